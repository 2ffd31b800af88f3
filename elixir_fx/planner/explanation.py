"""Explanation: what the device memory of a plan buys, and what more or less of it would change.

Made on demand, beside the search.

    worth     of every purpose its bytes at the step's peak, which together are that peak, and
              the seconds that a step would take longer without them, on a device smaller by so
              much
    what_if   the steps of the plans that `search` finds under other device budgets

Seconds are those of the best of a few other layouts with all else as it is:

    parts at home     these away, what else is home home first                `_without_part`
    gathered blocks   no more than are read at once, nothing early or kept    `_fewer_blocks`
    gradient blocks   one of them
    ring              as small as the largest unit of the update

So they are no more than an estimate, from above, of what the purpose is worth.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from elixir_fx.errors import PlanError
from elixir_fx.explained import Account, WhatIf, Why, Worth
from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import SAVED, Group, Homes, Layout, Limits, Plan, align
from elixir_fx.planner.activations import search
from elixir_fx.planner.decisions import decided
from elixir_fx.planner.draft import Choice, Drafter
from elixir_fx.planner.footprint import Footprint, Part, away, home
from elixir_fx.planner.forecast import Player
from elixir_fx.planner.order import Item
from elixir_fx.planner.pack import pinned_tiers
from elixir_fx.planner.place import (
    Stay,
    core_bytes,
    extent,
    first_call,
    gathered_uses,
    in_order,
    place,
    resident,
)
from elixir_fx.units import GIB

SMALL = 4 * GIB  # a budget below this is varied by a share of it,
SHARE = 0.1
STEP_BYTES = GIB  # others by so much
ARENAS = (0.5, 1.0, 2.0)  # of the plan's, tried where parts are sent away,
LARGEST = (2, 4)  # and as many of the largest part of a parameter
THRIFT = ((2, 2), (1, 1))  # gradient blocks and units in the ring


def explained(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    pins: Mapping[str, Tier],
    group: Group,
    micro_batches: int,
    plan: Plan,
) -> Plan:
    """`plan`, which can say what its device memory buys: that is worked out when somebody asks. It
    is the plan of the step of `facts`, under these limits of each rank."""
    ledger = _Ledger(
        captured=facts,
        facts=decided(facts, plan.schedules[0]),
        machine=machine,
        limits=limits,
        pins=pins,
        group=group,
        micro_batches=micro_batches,
        plan=plan,
    )
    return replace(plan, why=Why(ledger.account))


@dataclass(frozen=True, kw_only=True)
class _Ledger:
    """The device memory of one plan, of the step as it was captured and as the plan makes it."""

    captured: Facts
    facts: Facts
    machine: Machine
    limits: Limits
    pins: Mapping[str, Tier]
    group: Group
    micro_batches: int
    plan: Plan

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @cached_property
    def footprint(self) -> Footprint:
        return Footprint(self.facts, self.layout.chunks, self.group)

    @cached_property
    def player(self) -> Player:
        return Player.of(self.facts, self.machine, self.footprint, self.micro_batches)

    @cached_property
    def peak_bytes(self) -> int:
        return self.footprint.layout_peak(self.layout)

    @cached_property
    def step_s(self) -> float:
        return self.player.play(self.layout, self.stays).step_s

    @cached_property
    def stays(self) -> tuple[Stay, ...]:
        return stays_of(self.plan, self.facts)

    def account(self) -> Account:
        return Account(worth=tuple(self.worth()), what_if=tuple(self.what_if()))

    # -- what it is for ------------------------------------------------------------------------

    def worth(self) -> Iterator[Worth]:
        """Every purpose that takes bytes."""
        layout = self.layout
        beside = layout.block_bytes - layout.shared_bytes  # blocks within the arena
        ring = layout.arena_bytes - layout.gather_bytes - beside
        yield from _worth("activations and gradients on their way", self._live_bytes, None)
        yield from _worth("the update", self.peak_bytes - self._others_bytes, None)
        yield from _worth("buffers", self.facts.buffer_bytes, None)
        for part in Part:
            nbytes = self._home_bytes(part)
            lost = self._lost(self._without_part(part, nbytes)) if nbytes else None
            yield from _worth(f"{part} at home", nbytes, lost)
        yield from self._gathered()
        yield from self._blocks()
        yield from _worth("ring of the update beyond these", ring, self._lost(self._least_ring()))

    @property
    def _live_bytes(self) -> int:
        live = self.footprint.live_kept if self.layout.keeps_all else self.footprint.live
        return int(live.max(initial=0))

    @property
    def _others_bytes(self) -> int:
        """All but what the update needs beyond the bytes of activations."""
        homes = [chunk.homes for chunk in self.layout.chunks]
        constant = self.footprint.constant(homes)
        return constant + self.layout.arena_bytes + self.layout.shared_bytes + self._live_bytes

    def _home_bytes(self, part: Part) -> int:
        return sum(self.footprint.sizes[chunk].ordinary[part] for chunk, part in self._at(part))

    def _at(self, part: Part) -> list[Item]:
        """The chunks of which a part, of any bytes, is at home on the device."""
        return [
            (size.chunk.id, part)
            for size in self.footprint.sizes
            if size.ordinary[part] and home(size.chunk.homes, part) is Tier.DEVICE
        ]

    def _lost(self, step_s: float | None) -> float | None:
        return None if step_s is None else max(0.0, step_s - self.step_s)

    # -- without it ----------------------------------------------------------------------------

    def _without_part(self, part: Part, nbytes: int) -> float | None:
        """The step with no byte of a part at home, on a device that has these bytes less; None
        if there is none."""
        limits = replace(self.limits, device=self.peak_bytes - nbytes)
        bare = tuple(
            replace(chunk, homes=Homes(), update=Tier.DEVICE) for chunk in self.layout.chunks
        )
        drafter = Drafter(
            machine=self.machine,
            limits=limits,
            pins=pinned_tiers(self.facts, self.machine, self.limits, self.pins),
            footprint=Footprint(self.facts, bare, self.group),
        )
        never = frozenset(item for item in self._at(part) if not drafter.stays(bare[item[0]], part))
        first = tuple(item for other in Part if other is not part for item in self._at(other))
        steps = []
        if not never:
            return None
        for arena, (blocks, ring) in product(self._arenas, THRIFT):
            choice = Choice(
                chunk_bytes=0,  # the chunks are what they are
                arena_bytes=arena,
                gradient_blocks=blocks,
                ring=ring,
                first=first,
                never=never,
                on_host=self._hosted,
            )
            draft = drafter.draft(choice, lambda layout: not never & _home_items(layout))
            if draft is not None:
                steps.append(self.player.play(draft.layout, draft.stays).step_s)
        return min(steps, default=None)

    @cached_property
    def _arenas(self) -> list[int]:
        widest = max((max(size.widest.values()) for size in self.footprint.sizes), default=0)
        mine = {int(self.layout.arena_bytes * factor) for factor in ARENAS}
        return sorted(mine | {count * widest for count in LARGEST})

    @property
    def _hosted(self) -> float:
        """The share of what is trained that the host updates."""
        trained = [chunk for chunk in self.layout.chunks if chunk.trainable]
        hosted = sum(chunk.share_bytes for chunk in trained if chunk.update is Tier.HOST)
        return hosted / max(1, sum(chunk.share_bytes for chunk in trained))

    def _gathered(self) -> Iterator[Worth]:
        layout = self.layout
        needed, there = gathered_uses(self.facts, layout)
        found = place(needed, core_bytes(needed), first_call(self.facts))
        least = layout.gather_bytes
        lost = None
        if found is not None:
            least = min(align(extent(found)), layout.gather_bytes)
            stays = in_order([*found, *resident(there)])
            lost = self._lost(self._fewer_blocks(layout.gather_bytes - least, stays))
        yield from _worth("chunks that are read at once", least, None)
        yield from _worth("chunks that come early or stay", layout.gather_bytes - least, lost)

    def _fewer_blocks(self, saved: int, stays: Sequence[Stay]) -> float | None:
        """The step with so many bytes less for gathered chunks."""
        arena = self.layout.arena_bytes - saved
        if arena < self._largest_unit:
            return None
        layout = replace(
            self.layout, gather_bytes=self.layout.gather_bytes - saved, arena_bytes=arena
        )
        return self.player.play(layout, stays).step_s

    def _blocks(self) -> Iterator[Worth]:
        layout = self.layout
        more = max(0, layout.gradient_blocks - 1)
        block = layout.gradient_block_bytes if layout.gradient_blocks else 0
        arena = layout.arena_bytes - (0 if layout.group.shared else more * block)
        lost = None
        if more and arena >= self._largest_unit:
            fewer = replace(layout, gradient_blocks=1, arena_bytes=arena)
            lost = self._lost(self.player.play(fewer, self.stays).step_s)
        yield from _worth("gradients on their way home, one block", block, None)
        yield from _worth("gradients on their way home, more blocks", more * block, lost)

    def _least_ring(self) -> float:
        """The step with an arena no larger than a forward and backward need, or the largest
        unit."""
        layout = self.layout
        area = layout.gather_bytes + layout.block_bytes - layout.shared_bytes
        arena = max(area, self._largest_unit)
        return self.player.play(replace(layout, arena_bytes=arena), self.stays).step_s

    @cached_property
    def _largest_unit(self) -> int:
        """Bytes in the ring of the largest unit of the update."""
        return max(
            (
                away(size.chunk.homes, size.of(size.largest_unit(self.layout.update_numel)))
                for size in self.footprint.sizes
                if size.chunk.trainable and size.chunk.update is Tier.DEVICE
            ),
            default=0,
        )

    # -- with more and less --------------------------------------------------------------------

    def what_if(self) -> Iterator[WhatIf]:
        device = self.limits.device
        step = STEP_BYTES if device >= SMALL else int(device * SHARE)
        for other in (device - step, device + step):
            limits = replace(self.limits, device=other)
            try:
                found = search(
                    self.captured, self.machine, limits, self.pins, self.group, self.micro_batches
                )
            except PlanError:
                yield WhatIf(limit_bytes=other, step_s=None)
            else:
                yield WhatIf(limit_bytes=other, step_s=found.forecast.step_s)


def stays_of(plan: Plan, facts: Facts) -> tuple[Stay, ...]:
    """The stays that a plan's first schedule says, which is for these facts."""
    position = {node: index for index, node in enumerate(facts.nodes)}
    chunks = [
        Stay(
            gather.chunk,
            gather.backward,
            0 if gather.resident else plan.layout.chunks[gather.chunk].nbytes,
            gather.offset,
            position[gather.prefetch or gather.before],
            position[gather.before],
            position[gather.after],
            gather.kept,
            gather.resident,
        )
        for gather in plan.schedules[0].gathers
    ]
    activations = [
        Stay(
            SAVED + index,
            True,
            align(away.nbytes),
            away.offset,
            position[away.prefetch or away.before],
            position[away.before],
            position[away.last],
        )
        for index, away in enumerate(plan.schedules[0].offloads)
    ]
    return in_order([*chunks, *activations])


def _worth(purpose: str, nbytes: int, lost_s: float | None) -> Iterator[Worth]:
    """A purpose, if it takes any bytes."""
    if nbytes > 0:
        yield Worth(purpose=purpose, nbytes=nbytes, lost_s=lost_s)


def _home_items(layout: Layout) -> set[Item]:
    return {
        (chunk.id, part)
        for chunk in layout.chunks
        for part in Part
        if home(chunk.homes, part) is Tier.DEVICE
    }
