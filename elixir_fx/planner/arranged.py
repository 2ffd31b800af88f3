"""Arranged: a whole layout from decisions that somebody else made.

What the baselines need: chunks with their homes and a way to gather them go in, the layout is
completed (arena, tiers, staging) and held to the limits. It becomes a plan of its own, or one of
those that the search chooses from.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts, Parameter
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Chunk, Group, Homes, Layout, Limits, Plan, align
from elixir_fx.planner.bound import Bound
from elixir_fx.planner.draft import staging_bytes
from elixir_fx.planner.footprint import Footprint, Part, away
from elixir_fx.planner.forecast import Player
from elixir_fx.planner.pack import away_tiers, pack, pinned_tiers
from elixir_fx.planner.place import (
    Stay,
    Use,
    core_bytes,
    extent,
    first_call,
    idle_bytes,
    in_order,
    resident,
    uses,
)
from elixir_fx.planner.space import Arranged, make_schedule
from elixir_fx.units import sizes

WHOLE = 1 << 60  # bytes of a chunk that takes all parameters of its kind
PIECES = 4  # units of the update that the area of gathers and gradients is cut for

# Stays for the chunks that are gathered into blocks; None if there are none.
Stays = Callable[[Sequence[Use]], tuple[Stay, ...] | None]


@dataclass(frozen=True, kw_only=True)
class Arranger:
    """Makes layouts of one step under limits of each rank."""

    facts: Facts
    machine: Machine
    limits: Limits
    pins: Mapping[str, Tier]
    group: Group
    micro_batches: int = 1

    @cached_property
    def tiers_by_path(self) -> dict[str, Tier]:
        return pinned_tiers(self.facts, self.machine, self.limits, self.pins)

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers beside the device, the nearest first."""
        return away_tiers(self.machine, self.limits)

    @cached_property
    def bound(self) -> Bound:
        return Bound(
            facts=self.facts,
            machine=self.machine,
            limits=self.limits,
            group=self.group,
            micro_batches=self.micro_batches,
        )

    @cached_property
    def first_call(self) -> int:
        return first_call(self.facts)

    def pack(self, chunk_bytes: int) -> tuple[Chunk, ...]:
        """Chunks in order of first use, all at home on the device."""
        return pack(self.facts, chunk_bytes, self.tiers_by_path, self.group)

    def pack_by(self, title: Callable[[str], str]) -> tuple[Chunk, ...]:
        """A chunk for all parameters whose path has the same title, or several where they are
        not of one kind; in order of first use."""
        never = len(self.facts.nodes)
        ordered = sorted(self.facts.parameters, key=lambda p: min(p.reads, default=never))
        groups: dict[str, list[Parameter]] = {}
        for parameter in ordered:
            groups.setdefault(title(parameter.path), []).append(parameter)
        chunks: list[Chunk] = []
        for parameters in groups.values():
            only = replace(self.facts, parameters=tuple(parameters))
            for chunk in pack(only, WHOLE, self.tiers_by_path, self.group):
                chunks.append(replace(chunk, id=len(chunks)))
        return tuple(chunks)

    def settle(self, chunks: Sequence[Chunk], tiers: Sequence[Tier | None]) -> tuple[Chunk, ...]:
        """`chunks` with their parts at home on these tiers; None: on the nearest that has room
        left, after all others. What is pinned stays so. PlanError if they do not fit."""
        footprint = self.footprint(chunks)
        room = {tier: self.limits.of(tier) for tier in self.tiers}
        if None in tiers and Tier.HOST in room and Tier.DISK in room:
            room[Tier.HOST] -= self._staging(footprint.sizes[n].packed for n in range(len(chunks)))
        settled = list(chunks)
        last = sorted(range(len(chunks)), key=lambda n: tiers[n] is None)
        for number in last:
            chunk, wanted = chunks[number], tiers[number]
            homes = Homes()
            for part in Part:
                size = footprint.sizes[number].packed[part]
                place = self._place(chunk, part, wanted, size, room)
                homes = replace(homes, **{part.value: place})
                if place in room:
                    room[place] -= size
            settled[number] = replace(chunk, homes=homes)
        if any(left < 0 for left in room.values()):
            raise PlanError("the parts that are away do not fit their tiers")
        return tuple(settled)

    def _place(
        self, chunk: Chunk, part: Part, wanted: Tier | None, size: int, room: Mapping[Tier, int]
    ) -> Tier:
        pin = self.tiers_by_path.get(chunk.slices[0].path) if part is Part.PARAMETERS else None
        whole = self.group.ranks > 1 and not chunk.sharded  # its optimizer must see it whole
        if pin is not None or whole or not size:
            return pin or Tier.DEVICE
        if wanted is not None:
            return wanted
        for tier in self.tiers:
            if size <= room[tier]:
                return tier
        raise PlanError(f"no tier has room for {sizes(size)} of {chunk.title}")

    def footprint(self, chunks: Sequence[Chunk]) -> Footprint:
        """The bytes of a packing."""
        return self._empty.repacked(tuple(chunks))

    @cached_property
    def _empty(self) -> Footprint:
        return Footprint(self.facts, (), self.group)

    def arrange(
        self,
        name: str,
        chunks: tuple[Chunk, ...],
        stays_of: Stays,
        *,
        gradient_blocks: int = 2,
        ring: int = 2,
    ) -> Arranged:
        """The layout of these homes. PlanError, in the words of the policy `name`, if the device
        does not hold it."""
        footprint = self.footprint(chunks)
        draft = self._layout(footprint)
        if draft.keeps_all:
            return self._kept(name, footprint, draft)
        optimizer = self.facts.optimizer
        if optimizer is not None and optimizer.global_state:
            raise PlanError(f"{name}: {optimizer.name} needs all parameters at once")
        self._check(name, footprint, draft)  # before the work of placing what is gathered
        needed = uses(self.facts, [c for c in chunks if draft.takes_block(c)])
        there = uses(self.facts, [c for c in chunks if c.gathered and not draft.takes_block(c)])
        stays = stays_of(needed)
        if stays is None:
            raise PlanError(f"{name}: the chunks do not fit the area that they are gathered in")
        stays = in_order([*stays, *resident(there)])
        layout = self._complete(draft, footprint, extent(stays), gradient_blocks, ring)
        self._check(name, footprint, layout)
        return Arranged(player=self._player(footprint), layout=layout, stays=stays)

    def plan(self, name: str, arranged: Arranged) -> Plan:
        """The plan of an arranged layout, as the policy `name` would have it."""
        made = make_schedule(arranged.player, self.bound, arranged.layout, arranged.stays)
        return Plan(
            machine=self.machine.name,
            limits=self.limits,
            layout=arranged.layout,
            schedules=(made,),
            notes=(f"a baseline: {name}",),
        )

    def room(self, chunks: Sequence[Chunk]) -> int:
        """What the device leaves for gathered chunks, of homes whose update streams nothing."""
        footprint = self.footprint(chunks)
        layout = self._complete(self._layout(footprint), footprint, 0, 2, 0)
        return self.limits.device - footprint.layout_peak(layout) + layout.gather_bytes

    def _kept(self, name: str, footprint: Footprint, layout: Layout) -> Arranged:
        if footprint.kept_peak > self.limits.device:
            raise PlanError(
                f"{name}: everything on the device takes {sizes(footprint.kept_peak)}; "
                f"{sizes(self.limits.device)} are allowed"
            )
        return Arranged(player=self._player(footprint), layout=layout, stays=())

    def _player(self, footprint: Footprint) -> Player:
        return Player.of(self.facts, self.machine, footprint, self.micro_batches)

    def _check(self, name: str, footprint: Footprint, layout: Layout) -> None:
        """PlanError if a tier does not hold what it should."""
        for tier, held in (
            (Tier.DEVICE, footprint.layout_peak(layout)),
            (Tier.HOST, layout.host_bytes + layout.staging_bytes),
            (Tier.DISK, layout.disk_bytes),
        ):
            if held > self.limits.of(tier):
                raise PlanError(
                    f"{name} takes {sizes(held)} on {tier}; {sizes(self.limits.of(tier))} "
                    "are allowed"
                )

    def _layout(self, footprint: Footprint) -> Layout:
        """The homes alone, without an arena."""
        held = footprint.tier_bytes(footprint.chunks)
        staged = held[Tier.DISK] and not self.machine.unified
        return Layout(
            chunks=footprint.chunks,
            gather_bytes=0,
            gradient_blocks=0,
            gradient_block_bytes=0,
            update_numel=0,
            arena_bytes=0,
            host_bytes=held[Tier.HOST],
            disk_bytes=held[Tier.DISK],
            staging_bytes=self._staging(s.packed for s in footprint.sizes) if staged else 0,
            group=self.group,
        )

    def _staging(self, packed: Iterable[Mapping[Part, int]]) -> int:
        """Host memory between disk and device."""
        block = max((max(parts.values()) for parts in packed), default=0)
        return staging_bytes(block, self.limits)

    def _complete(
        self, draft: Layout, footprint: Footprint, gather_bytes: int, blocks: int, ring: int
    ) -> Layout:
        block = self._gradient_block(draft)
        needed = uses(self.facts, [c for c in draft.chunks if draft.takes_block(c)])
        read = {use.chunk for use in needed}
        idle = (c.nbytes for c in draft.chunks if draft.takes_block(c) and c.id not in read)
        gather_bytes = max(gather_bytes, core_bytes(needed), idle_bytes(idle))
        layout = replace(
            draft,
            gather_bytes=gather_bytes,
            gradient_blocks=blocks if block else 0,
            gradient_block_bytes=block,
        )
        area = layout.gather_bytes + layout.block_bytes - layout.shared_bytes
        numel = self._update_numel(footprint, max(area, self._widest(footprint)))
        units = (
            away(size.chunk.homes, size.of(size.largest_unit(numel)))
            for size in footprint.sizes
            if size.chunk.trainable
        )
        arena = max(area, ring * max(units, default=0))
        return replace(layout, update_numel=numel, arena_bytes=arena)

    def _gradient_block(self, layout: Layout) -> int:
        """A block takes the gradients of any chunk that passes through one."""
        if self.group.ranks > 1:
            trained = (c for c in layout.chunks if c.trainable)
            return max((self.group.gradient_block_bytes(c) for c in trained), default=0)
        leaving = (c for c in layout.chunks if c.homes.gradients is not Tier.DEVICE)
        return max((align(c.nbytes) for c in leaving), default=0)

    @staticmethod
    def _widest(footprint: Footprint) -> int:
        """Bytes away of the largest parameter's parts: no unit is smaller."""
        return max((away(s.chunk.homes, s.widest) for s in footprint.sizes), default=0)

    @staticmethod
    def _update_numel(footprint: Footprint, area: int) -> int:
        """Elements of a unit: so many that `PIECES` of the widest fit the area."""
        shares = [size for size in footprint.sizes if size.chunk.share_numel]
        per_element = max(
            (away(s.chunk.homes, s.packed) / s.chunk.share_numel for s in shares), default=0.0
        )
        if not per_element:  # updated where it is
            return max((size.chunk.share_numel for size in shares), default=1)
        return max(1, int(area / PIECES / per_element))


def one_ahead(stays: Sequence[Stay]) -> tuple[Stay, ...]:
    """These stays, each prefetched no sooner than the one before it is read: prefetch depth 1."""
    ordered = in_order(stays)
    clipped: list[Stay] = []
    before: Stay | None = None
    for stay in ordered:
        if stay.kept or stay.resident:
            clipped.append(stay)
            continue
        start = stay.first if before is None else max(stay.start, before.first)
        clipped.append(replace(stay, start=min(start, stay.first)))
        before = stay
    return tuple(clipped)
