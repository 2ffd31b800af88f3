"""Draft: from one point of the search to a whole layout.

A `Choice` names what the search varies. `Drafter.draft` completes it:

    1. everything is away, except what is pinned to the device           `_all_away`
    2. parts that the arena cannot serve come home: parameters that do   `_serve_arena`
       not fit the gather area, gradients larger than a block, states
       of parameters too large for the ring
    3. parts that host and disk cannot hold come home                    `_serve_tiers`
    4. what is left of the device budget is filled with parts, in the    `_fill`
       order of the choice: this is where memory buys time
    5. the parts away get tiers, the nearest first                       `_assign`
    6. gathered chunks get their blocks and prefetches                   place.place

`need_bytes` after step 3 is the least device memory of a choice; it does not depend on the
device budget, which makes `smallest` and `search` agree.

A byte of parameters at home saves two gathers, and a load and a store in the update; a byte
of states a load and a store; a byte of gradients a store in the backward and a load. Hence
the orders tried: parameters first, states and gradients after. Within a part chunks
come in bit-reversed order, so that any number of them is spread evenly between the others.

Of several ranks a part at home on the device is one rank's share, which is no ordinary tensor: its
chunk is gathered all the same, from the peers or in place where the ranks share memory; and
everything may be at home, without a tier to be away on. Gradients pass through blocks wherever
they are at home.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Chunk, Homes, Layout, Limits, align
from elixir_fx.planner.footprint import ChunkBytes, Footprint, Part
from elixir_fx.planner.pack import away_tiers
from elixir_fx.planner.place import (
    Stay,
    Use,
    core_bytes,
    extent,
    first_call,
    in_order,
    place,
    resident,
    uses,
)

Item = tuple[int, Part]  # a part of the chunk with this id

# Orders in which parts come home: P parameters, F frozen parameters, S states, G gradients.
ORDERS = ("PSFG", "PFSG", "PGSF", "SPGF", "PSGF")
LETTERS = {Part.PARAMETERS: "P", Part.GRADIENTS: "G", Part.STATES: "S"}
STAGING_BLOCKS = 4  # host blocks between disk and an accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One point of the search.

    `ring` units fit the arena at least, `pieces` is how many the units are cut for. `first`
    are chunks whose parameters come home before all others. `fill` False leaves the
    device budget beyond the least memory unused.
    """

    chunk_bytes: int
    arena_bytes: int
    gradient_blocks: int = 2
    ring: int = 2
    pieces: int = 4
    order: str = ORDERS[0]
    first: tuple[int, ...] = ()
    fill: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A layout with the stays of its gathered chunks, and the device memory it needs."""

    choice: Choice
    layout: Layout
    stays: tuple[Stay, ...]
    need_bytes: int


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """Completes choices of one chunk size."""

    machine: Machine
    limits: Limits
    pins: Mapping[str, Tier]
    footprint: Footprint

    def draft(self, choice: Choice, promising: Callable[[Layout], bool]) -> Draft | None:
        """The layout of a choice; None if there is none within the limits, or if its homes
        are not `promising`."""
        home = self._least(choice)
        if home is None or self._need(choice, home) > self.limits.device:
            return None
        if choice.fill:
            self._fill(choice, home)
        layout = self._layout(choice, home)
        if layout is None or layout.keeps_all or not promising(layout):
            return None
        stays = place(self._uses(home), layout.gather_bytes, self._first_call)
        if stays is None:
            return None
        stays = in_order([*stays, *resident(self._residents(home))])
        # At least the cores' own colouring, which also other graphs of the model go by.
        gather_bytes = max(extent(stays), min(self._core_bytes(home), layout.gather_bytes))
        layout = replace(layout, gather_bytes=gather_bytes)
        layout = replace(layout, arena_bytes=self._arena(choice, home, layout))
        need = self._need_of(home, layout.update_numel, layout.arena_bytes + layout.shared_bytes)
        if need > self.limits.device:
            return None
        return Draft(choice=choice, layout=layout, stays=stays, need_bytes=need)

    def need_bytes(self, choice: Choice) -> int | None:
        """The least device memory of a choice, None if it cannot be at all."""
        home = self._least(choice)
        return None if home is None else self._need(choice, home)

    # What is known before a choice is made.

    @cached_property
    def _sizes(self) -> tuple[ChunkBytes, ...]:
        return self.footprint.sizes

    @cached_property
    def _all_uses(self) -> tuple[Use, ...]:
        return uses(self.footprint.facts, self.footprint.chunks)

    @cached_property
    def _first_call(self) -> int:
        return first_call(self.footprint.facts)

    @cached_property
    def _items(self) -> tuple[Item, ...]:
        """Every part that could be away."""
        return tuple(
            (sizes.chunk.id, part)
            for sizes in self._sizes
            for part in Part
            if sizes.ordinary[part] and not self._stays(sizes.chunk, part)
        )

    @cached_property
    def _bound_away(self) -> frozenset[Item]:
        """Parts pinned to a tier beyond the device."""
        return frozenset(
            (chunk, part)
            for chunk, part in self._items
            if part is Part.PARAMETERS and self._pin(self._sizes[chunk].chunk) is not None
        )

    def _pin(self, chunk: Chunk) -> Tier | None:
        return self.pins.get(chunk.slices[0].path)

    def _stays(self, chunk: Chunk, part: Part) -> bool:
        """Whether a part must be on the device: it is pinned there, or there is nothing else.
        A chunk that all ranks have whole is one that its optimizer must see whole."""
        if not self._tiers or (self._many and not chunk.sharded):
            return True
        return part is Part.PARAMETERS and self._pin(chunk) is Tier.DEVICE

    # Steps 1 to 3: the least that must be at home on the device.

    def _least(self, choice: Choice) -> set[Item] | None:
        """The parts away when as few as possible are at home."""
        away = set(self._items)
        self._serve_arena(choice, away)
        if not self._serve_tiers(choice, away) or not (away or self._many):
            return None
        return away

    @property
    def _many(self) -> bool:
        return self.footprint.group.ranks > 1

    def _serve_arena(self, choice: Choice, away: set[Item]) -> None:
        arena = choice.arena_bytes
        for sizes in self._sizes:
            for part in (Part.STATES, Part.PARAMETERS, Part.GRADIENTS):
                needed = choice.ring * self._away_bytes(away, sizes.chunk.id, sizes.widest)
                if needed > arena:
                    self._come_home(away, (sizes.chunk.id, part))
        while True:
            block = self._gradient_block(away)
            gathered = self._uses(away)
            largest = max((use.nbytes for use in gathered), default=0)
            area = arena - choice.gradient_blocks * block
            if largest <= area and self._core_bytes(away) <= area:
                return
            part, size = Part.PARAMETERS, largest
            if choice.gradient_blocks * block > arena // 2 or not largest:
                part, size = Part.GRADIENTS, block
            if self._many:  # the gradients of every chunk need their block wherever they live
                part, size = Part.PARAMETERS, largest
            before = len(away)
            for item in sorted(away):
                if item[1] is part and self._sizes[item[0]].chunk.nbytes >= size:
                    self._come_home(away, item)
            if len(away) == before:  # only pinned ones are left: they set the arena
                return

    def _serve_tiers(self, choice: Choice, away: set[Item]) -> bool:
        """Bring parts home until host and disk hold the rest; whether they can."""
        room = sum(self.limits.of(tier) for tier in self._tiers)
        total = sum(self._sizes[chunk].packed[part] for chunk, part in away)
        for item in self._ordered(choice, away):
            if total <= room and self._assign(away, choice) is not None:
                return True
            before = len(away)
            self._come_home(away, item)
            if len(away) < before:
                total -= self._sizes[item[0]].packed[item[1]]
        return self._assign(away, choice) is not None

    def _come_home(self, away: set[Item], item: Item) -> None:
        if item not in self._bound_away:
            away.discard(item)

    # Step 4: memory that is left.

    def _fill(self, choice: Choice, away: set[Item]) -> None:
        """Bring parts home while the device has room, but never all of them."""
        for _ in range(3):  # parts at home can make the arena smaller, which makes room
            room = self.limits.device - self._need(choice, away)
            taken = []
            for item in self._ordered(choice, away):
                size = self._sizes[item[0]].ordinary[item[1]]
                last = len(away) == 1 and not self._many
                if size <= room and item not in self._bound_away and not last:
                    room -= size
                    away.discard(item)
                    taken.append(item)
            while taken and self._need(choice, away) > self.limits.device:
                away.add(taken.pop())
            if not taken:
                return

    def _ordered(self, choice: Choice, away: set[Item]) -> list[Item]:
        """Items in the order in which they come home."""
        first = set(choice.first)
        ranks = {part: choice.order.index(LETTERS[part]) for part in Part}
        frozen = choice.order.index("F")
        ranked = []
        for chunk, part in away:
            rank = ranks[part]
            if part is Part.PARAMETERS and not self._sizes[chunk].chunk.trainable:
                rank = frozen
            urgent = chunk not in first or part is not Part.PARAMETERS
            ranked.append((urgent, rank, self._spread[chunk], (chunk, part)))
        return [item for *_, item in sorted(ranked)]

    @cached_property
    def _spread(self) -> tuple[int, ...]:
        """Each chunk's rank, such that the first of any number lie evenly spread."""
        count = len(self._sizes)
        bits = max(1, (count - 1).bit_length())
        order = [n for n in (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)) if n < count]
        ranks = [0] * count
        for rank, chunk in enumerate(order):
            ranks[chunk] = rank
        return tuple(ranks)

    # Step 5: tiers.

    @cached_property
    def _tiers(self) -> tuple[Tier, ...]:
        return away_tiers(self.machine, self.limits)

    def _assign(self, away: set[Item], choice: Choice) -> tuple[dict[Item, Tier], int] | None:
        """A tier for every part away, and the staging bytes. None if they do not fit."""
        room = {tier: self.limits.of(tier) for tier in self._tiers}
        total = sum(self._sizes[chunk].packed[part] for chunk, part in away)
        staging = 0
        bound_to_disk = any(
            self._pin(self._sizes[c].chunk) == Tier.DISK for c, _ in away & self._bound_away
        )
        if Tier.HOST in room and (total > room[Tier.HOST] or bound_to_disk):
            staging = self._staging(away) if Tier.DISK in room else 0
            room[Tier.HOST] -= staging
        tiers: dict[Item, Tier] = {}
        parts = list(Part)
        rank = {part: i for i, part in enumerate((Part.PARAMETERS, Part.STATES, Part.GRADIENTS))}
        assert len(rank) == len(parts)
        for item in sorted(away, key=lambda i: (i not in self._bound_away, rank[i[1]], i[0])):
            chunk, part = item
            size = self._sizes[chunk].packed[part]
            pin = self._pin(self._sizes[chunk].chunk) if item in self._bound_away else None
            tier = next((t for t in room if size <= room[t] and pin in (None, t)), None)
            if tier is None:
                return None
            room[tier] -= size
            tiers[item] = tier
        return tiers, staging

    def _staging(self, away: set[Item]) -> int:
        """Host memory between disk and device: a few blocks, but a quarter of the budget."""
        block = max(self._sizes[chunk].packed[part] for chunk, part in away)
        return min(STAGING_BLOCKS * block, max(self.limits.host // 4, min(block, self.limits.host)))

    # The layout that homes make.

    def _layout(self, choice: Choice, away: set[Item]) -> Layout | None:
        """The layout of these homes, its gather area as large as the arena allows."""
        group = self.footprint.group
        assigned = self._assign(away, choice)
        if assigned is None:
            return None
        tiers, staging = assigned
        block = self._gradient_block(away)
        blocks = choice.gradient_blocks if block else 0
        packed = {
            tier: sum(self._sizes[c].packed[p] for (c, p), t in tiers.items() if t == tier)
            for tier in (Tier.HOST, Tier.DISK)
        }
        return Layout(
            chunks=tuple(
                replace(sizes.chunk, homes=_homes(sizes.chunk.id, tiers)) for sizes in self._sizes
            ),
            gather_bytes=self._area(choice, away),
            gradient_blocks=blocks,
            gradient_block_bytes=block,
            update_numel=self._update_numel(choice, away),
            arena_bytes=0,
            host_bytes=packed[Tier.HOST],
            disk_bytes=packed[Tier.DISK],
            staging_bytes=staging,
            group=group,
        )

    def _need(self, choice: Choice, away: set[Item]) -> int:
        """Device bytes of these homes with the choice's arena, at the step's peak."""
        update_numel = self._update_numel(choice, away)
        blocks = choice.gradient_blocks * self._gradient_block(away)
        beside = blocks if self.footprint.group.shared else 0
        area = self._area(choice, away) + blocks - beside
        arena = max(area, choice.ring * self._unit_bytes(away, update_numel))
        return self._need_of(away, update_numel, arena + beside)

    def _area(self, choice: Choice, away: set[Item]) -> int:
        """Bytes of the gather area: what the arena leaves, or without `fill` the least."""
        if not choice.fill:
            return self._core_bytes(away)
        # Also where this graph reads none of them: another one may.
        if not any(self._takes_block(sizes.chunk.id, away) for sizes in self._sizes):
            return 0
        blocks = choice.gradient_blocks * self._gradient_block(away)
        return max(choice.arena_bytes - blocks, self._core_bytes(set(self._bound_away)))

    def _core_bytes(self, away: set[Item]) -> int:
        """Bytes of the gather area without which no schedule works, of this graph or of one
        that reads what this one leaves idle (another branch): two such chunks at once."""
        gathered = self._uses(away)
        key = tuple(use.chunk for use in gathered)
        if key not in self._known_cores:
            self._known_cores[key] = core_bytes(gathered)
        idle = sorted(
            align(sizes.chunk.nbytes)
            for sizes in self._sizes
            if self._takes_block(sizes.chunk.id, away) and sizes.chunk.id not in key
        )
        return max(self._known_cores[key], sum(idle[-2:]))

    @cached_property
    def _known_cores(self) -> dict[tuple[int, ...], int]:
        return {}

    def _arena(self, choice: Choice, away: set[Item], layout: Layout) -> int:
        return max(
            layout.gather_bytes + layout.block_bytes - layout.shared_bytes,
            choice.ring * self._unit_bytes(away, layout.update_numel),
        )

    def _need_of(self, away: set[Item], update_numel: int, arena: int) -> int:
        constant = self._everything - sum(self._sizes[c].ordinary[p] for c, p in away)
        states = {chunk for chunk, part in away if part is Part.STATES}
        update = self.footprint.update_bytes(states, update_numel)
        return constant + arena + max(self.footprint.live_peak, update)

    @cached_property
    def _everything(self) -> int:
        return self.footprint.constant([Homes()] * len(self._sizes))

    def _uses(self, away: set[Item]) -> tuple[Use, ...]:
        """Uses of the chunks that are gathered into blocks."""
        return tuple(use for use in self._all_uses if self._takes_block(use.chunk, away))

    def _residents(self, away: set[Item]) -> tuple[Use, ...]:
        """Uses of the chunks that are gathered where they are at home."""
        return tuple(
            use
            for use in self._all_uses
            if self._sizes[use.chunk].chunk.sharded and not self._takes_block(use.chunk, away)
        )

    def _takes_block(self, chunk: int, away: set[Item]) -> bool:
        if (chunk, Part.PARAMETERS) in away:
            return True
        return self._sizes[chunk].chunk.sharded and not self.footprint.group.shared

    def _gradient_block(self, away: set[Item]) -> int:
        """A block takes the gradients of any chunk, also one that another graph trains."""
        if self._many:
            group = self.footprint.group
            trained = (s.chunk for s in self._sizes if s.chunk.trainable)
            return max((group.gradient_block_bytes(chunk) for chunk in trained), default=0)
        return max(
            (self._sizes[chunk].packed[part] for chunk, part in away if part is Part.GRADIENTS),
            default=0,
        )

    def _away_bytes(self, away: set[Item], chunk: int, sizes: Mapping[Part, int]) -> int:
        total = 0
        for part, size in sizes.items():
            if (chunk, part) in away:
                total += size
        return total

    def _update_numel(self, choice: Choice, away: set[Item]) -> int:
        """Elements of a unit: so many that `pieces` of the widest fit the arena."""
        if not any(sizes.chunk.share_numel for sizes in self._sizes):
            return 1
        per_element = max(
            self._away_bytes(away, s.chunk.id, s.packed) / s.chunk.share_numel
            for s in self._sizes
            if s.chunk.share_numel
        )
        target = choice.arena_bytes / max(choice.ring, choice.pieces)
        if not per_element:  # updated where it is
            return max(s.chunk.share_numel for s in self._sizes)
        return max(1, int(target / per_element))

    def _unit_bytes(self, away: set[Item], update_numel: int) -> int:
        """The largest unit's bytes away."""
        largest = 0
        for sizes in self._moving(away):
            unit = sizes.of(sizes.largest_unit(update_numel))
            largest = max(largest, self._away_bytes(away, sizes.chunk.id, unit))
        return largest

    def _moving(self, away: set[Item]) -> Iterator[ChunkBytes]:
        """Chunks that the update streams."""
        chunks = {chunk for chunk, _ in away}
        return (s for s in self._sizes if s.chunk.id in chunks and s.chunk.trainable)


def _homes(chunk: int, tiers: Mapping[Item, Tier]) -> Homes:
    device = Tier.DEVICE
    return Homes(
        parameters=tiers.get((chunk, Part.PARAMETERS), device),
        gradients=tiers.get((chunk, Part.GRADIENTS), device),
        states=tiers.get((chunk, Part.STATES), device),
    )


def spread_arenas(base: int, blocks: Sequence[int], most: int) -> tuple[int, ...]:
    """Arena sizes worth trying: multiples of a chunk, and what large blocks would need."""
    multiples = (2, 2.5, 3, 4, 5, 6, 8, 11, 16, 24, 32)
    found = {int(base * step) for step in multiples} | set(blocks)
    return tuple(sorted(size for size in found if size <= max(most, 2 * base)))
