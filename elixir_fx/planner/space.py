"""Space: all layouts of one step that the search knows, and what the least of them needs.

Part of the search. For every chunk size there is one packing of the parameters; for every
packing a `Drafter` that completes choices, and a `Player` that plays them. The sizes tried
depend on the step and not on the device budget, so the least memory of any choice is what
`smallest` answers and what `search` accepts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import (
    ONE_RANK,
    SAVED,
    Gather,
    Group,
    Layout,
    Limits,
    Offload,
    Plan,
    Reduce,
    Schedule,
    align,
)
from elixir_fx.planner.bound import Bound
from elixir_fx.planner.draft import Choice, Draft, Drafter, spread_arenas
from elixir_fx.planner.footprint import Footprint, Part, home
from elixir_fx.planner.forecast import Player, forecast
from elixir_fx.planner.pack import away_tiers, chunk_sizes, pack, pinned_tiers
from elixir_fx.planner.place import Stay
from elixir_fx.planner.polish import Completer, Table
from elixir_fx.units import round_up, sizes


@dataclass(frozen=True, kw_only=True)
class Arranged:
    """A layout that keeps the limits, the stays of its gathered chunks, and what plays it."""

    player: Player
    layout: Layout
    stays: tuple[Stay, ...]

    @cached_property
    def step_s(self) -> float:
        return self.player.play(self.layout, self.stays).step_s


@dataclass(frozen=True, kw_only=True)
class Space:
    """All layouts of one step that the search knows."""

    facts: Facts
    machine: Machine
    limits: Limits
    pins: Mapping[str, Tier]
    group: Group = ONE_RANK
    micro_batches: int = 1

    @cached_property
    def tiers_by_path(self) -> dict[str, Tier]:
        return pinned_tiers(self.facts, self.machine, self.limits, self.pins)

    @cached_property
    def bound(self) -> Bound:
        """What no layout can beat."""
        return Bound(
            facts=self.facts,
            machine=self.machine,
            limits=self.limits,
            group=self.group,
            micro_batches=self.micro_batches,
        )

    @cached_property
    def chunk_sizes(self) -> tuple[int, ...]:
        return chunk_sizes(self.facts)

    @cached_property
    def players(self) -> dict[int, Player]:
        """One packing of the parameters for each chunk size."""
        found = {}
        empty = Footprint(self.facts, (), self.group)
        for size in self.chunk_sizes:
            chunks = pack(self.facts, size, self.tiers_by_path, self.group)
            footprint = empty.repacked(chunks)
            found[size] = Player.of(self.facts, self.machine, footprint, self.micro_batches)
        return found

    @cached_property
    def drafters(self) -> dict[int, Drafter]:
        return {
            size: Drafter(
                machine=self.machine,
                limits=self.limits,
                pins=self.tiers_by_path,
                footprint=player.footprint,
            )
            for size, player in self.players.items()
        }

    @cached_property
    def completers(self) -> dict[int, Completer]:
        return {
            size: Completer(machine=self.machine, limits=self.limits, player=player)
            for size, player in self.players.items()
        }

    @cached_property
    def tables(self) -> dict[int, Table]:
        return {
            size: Table(
                machine=self.machine,
                limits=self.limits,
                player=player,
                drafter=self.drafters[size],
            )
            for size, player in self.players.items()
        }

    @cached_property
    def kept_peak(self) -> int | None:
        """Device bytes of keeping everything; None if a pin or other ranks forbid it."""
        pinned = any(tier != Tier.DEVICE for tier in self.tiers_by_path.values())
        if self.group.ranks > 1 or pinned or self.facts.departures:
            return None
        return self._whole.footprint.kept_peak

    @property
    def _whole(self) -> Player:
        return self.players[self.chunk_sizes[-1]]

    def keep_all(self) -> Arranged | None:
        """The layout that moves nothing, if it fits."""
        if self.kept_peak is None or self.kept_peak > self.limits.device:
            return None
        layout = Layout(
            chunks=self._whole.footprint.chunks,
            gather_bytes=0,
            gradient_blocks=0,
            gradient_block_bytes=0,
            update_numel=0,
            arena_bytes=0,
            host_bytes=0,
            disk_bytes=0,
        )
        return Arranged(player=self._whole, layout=layout, stays=())

    def arranged(self, draft: Draft) -> Arranged:
        """What a draft of this space says."""
        player = self.players[draft.choice.chunk_bytes]
        return Arranged(player=player, layout=draft.layout, stays=draft.stays)

    def arenas(self, chunk_bytes: int) -> tuple[int, ...]:
        """Arena sizes to try with a chunk size."""
        footprint = self.drafters[chunk_bytes].footprint
        largest = sorted(max(size.widest.values()) for size in footprint.sizes) or [0]
        whole = max((sum(size.widest.values()) for size in footprint.sizes), default=0)
        total = sum(sum(size.packed.values()) for size in footprint.sizes)
        base = max(chunk_bytes, self.chunk_sizes[0], largest[len(largest) // 2])
        big = [2 * largest[-1], 3 * largest[-1], whole, 2 * whole]
        read = sum(align(chunk.nbytes) for chunk in footprint.chunks)
        big += [int(read * share) for share in (0.25, 0.5, 0.75, 0.9, 1.0)]
        if self.group.ranks > 1:
            needed = (self.group.gradient_block_bytes(chunk) for chunk in footprint.chunks)
            blocks = 2 * max(needed, default=0)
            gathered = sum(align(chunk.nbytes) for chunk in footprint.chunks)
            big += [blocks + gathered, blocks + 2 * chunk_bytes, blocks // 2 + 2 * chunk_bytes]
            total = max(total, blocks + gathered)
        return spread_arenas(base, big, total)

    @cached_property
    def least(self) -> tuple[int, Choice] | None:
        """The choice that needs the least device memory, and how much."""
        found: tuple[int, Choice] | None = None
        if not away_tiers(self.machine, self.limits) and self.group.ranks == 1:
            return None
        shares = (0.0, 1.0) if self.machine.updates_on_host else (0.0,)
        for size, drafter in self.drafters.items():
            for arena, share in product(self.arenas(size), shares):
                choice = Choice(
                    chunk_bytes=size,
                    arena_bytes=arena,
                    gradient_blocks=1,
                    ring=1,
                    on_host=share,
                    fill=False,
                )
                need = drafter.need_bytes(choice)
                if need is not None and (found is None or need < found[0]):
                    found = (need, choice)
        return found

    def smallest(self) -> int:
        needs = [] if self.kept_peak is None else [self.kept_peak]
        moves = self.facts.optimizer is None or not self.facts.optimizer.global_state
        if moves and self.least is not None:
            needs.append(self.least[0])
        if not needs and not moves:
            optimizer = self.facts.optimizer
            assert optimizer is not None
            raise PlanError(
                f"{optimizer.name} needs all parameters at once, and they are cut between "
                f"{self.group.ranks} ranks. Use another optimizer, or one rank"
            )
        if not needs:
            raise PlanError("the pinned homes do not fit their tiers: give host or disk more room")
        return min(needs)

    def plan(self, arranged: Arranged) -> Plan:
        """The plan of a layout of this step, with what it keeps at home."""
        layout, stays = arranged.layout, arranged.stays
        made = make_schedule(arranged.player, self.bound, layout, stays)
        return Plan(
            machine=self.machine.name,
            limits=self.limits,
            layout=layout,
            schedules=(made,),
            notes=self._notes(arranged),
        )

    def _notes(self, arranged: Arranged) -> tuple[str, ...]:
        if arranged.layout.keeps_all:
            return ("everything stays on the device",)
        notes = []
        for part in Part:
            whole = kept = 0
            sizes_of = arranged.player.footprint.sizes
            for chunk, size in zip(arranged.layout.chunks, sizes_of, strict=True):
                total = size.ordinary[part]
                kept += total if home(chunk.homes, part) == Tier.DEVICE else 0
                whole += total
            notes.append(f"{part}: {sizes(kept)} of {sizes(whole)} at home on the device")
        if self.group.ranks > 1:
            notes.append(f"of {self.group.ranks} ranks, each with its share of every chunk")
        return tuple(notes)

    def refusal(self) -> str:
        """Why no plan fits, with the numbers and what would do."""
        least = self.smallest()
        footprint = self._whole.footprint
        position = int(footprint.live.argmax()) if len(footprint.live) else 0
        largest = ", ".join(
            f"{what} {sizes(size)}" for what, size in footprint.largest_at(position, 3)
        )
        optimizer = self.facts.optimizer
        if optimizer is not None and optimizer.global_state:
            reason = f" {optimizer.name} needs all parameters at once, so nothing can be away."
        elif not away_tiers(self.machine, self.limits):
            reason = " Nothing can be away: there is no disk or host memory to use."
        else:
            reason = ""
        return (
            f"The step needs {sizes(least)} on {self.machine.device}; "
            f"{sizes(self.limits.device)} are allowed.{reason} "
            f"Largest: {largest or 'parameters ' + sizes(footprint.constant([]))}. "
            f"Smallest that fits: memory={round_up(least)!r}."
        )


def make_schedule(
    player: Player, bound: Bound, layout: Layout, stays: tuple[Stay, ...]
) -> Schedule:
    """The schedule of these stays, in the names of the graph's nodes, with its forecast."""
    facts = player.facts
    saved = [stay for stay in stays if stay.chunk >= SAVED]
    gathers = tuple(
        Gather(
            chunk=stay.chunk,
            backward=stay.backward,
            offset=stay.offset,
            before=facts.nodes[stay.first],
            after=facts.nodes[stay.last],
            prefetch=facts.nodes[stay.start] if stay.start < stay.first else None,
            kept=stay.kept,
            resident=stay.resident,
        )
        for stay in stays
        if stay.chunk < SAVED
    )
    reduces = sorted(player.footprint.reduces.items(), key=lambda item: (item[1], item[0]))
    return Schedule(
        key=facts.key,
        trains=facts.trains,
        gathers=gathers,
        reduces=()
        if layout.keeps_all
        else tuple(Reduce(chunk=chunk, after=facts.nodes[after]) for chunk, after in reduces),
        forecast=forecast(player, layout, stays, bound),
        offloads=tuple(_offload(facts, stay) for stay in saved),
    )


def _offload(facts: Facts, stay: Stay) -> Offload:
    away = facts.departures[stay.chunk - SAVED]
    return Offload(
        node=away.storage,
        nbytes=away.nbytes,
        after=facts.nodes[away.leaves],
        before=facts.nodes[stay.first],
        last=facts.nodes[stay.last],
        offset=stay.offset,
        prefetch=facts.nodes[stay.start] if stay.start < stay.first else None,
    )


def nearest(sizes: Sequence[int], wanted: int, count: int) -> list[int]:
    """The `count` sizes nearest to `wanted`, as factors."""
    far = sorted(sizes, key=lambda size: abs(math.log(max(size, 1) / max(wanted, 1))))
    return far[:count]
