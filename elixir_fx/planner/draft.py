"""Draft: from one point of the search to a whole layout.

A `Choice` names what the search varies. `Drafter.draft` completes it:

    1. everything is away, except what is pinned to the device           `_least`
    2. a share of the chunks that are wholly away is updated on the      `_to_host`
       host, which then must have room for them
    3. parts that the arena cannot serve come home: parameters that do   `_serve_arena`
       not fit the gather area, gradients larger than a block, states
       of parameters too large for the ring
    4. parts that host and disk cannot hold come home                    `_serve_tiers`
    5. what is left of the device budget is filled with parts, in the    `_fill`, order.Order
       order of the choice: this is where memory buys time
    6. the parts away get tiers, the nearest first                       `_assign`
    7. gathered chunks get their blocks and prefetches                   place.place

`need_bytes` after step 4 is the least device memory of a choice; it does not depend on the
device budget, which makes `smallest` and `search` agree.

Of several ranks a part at home on the device is one rank's share, which is no ordinary tensor: its
chunk is gathered all the same, from the peers or in place where the ranks share memory; and
everything may be at home, without a tier to be away on. Gradients pass through blocks wherever
they are at home.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Chunk, Homes, Layout, Limits, align
from elixir_fx.planner.footprint import ChunkBytes, Footprint, Part
from elixir_fx.planner.order import ORDERS, Item, Order, spread
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

ON_HOST = Homes(parameters=Tier.HOST, gradients=Tier.HOST, states=Tier.HOST)
WHOLE = 1 << 62  # elements of a unit: the whole chunk, before it is known how it is cut
STAGING_BLOCKS = 4  # host blocks between disk and an accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One point of the search.

    `ring` units fit the arena at least, `pieces` is how many the units are cut for. Parts come
    home in this order: those in `first`; of each part as many bytes as `quotas` say, and then
    the rest, as `order` ranks them; never those in `never`. `on_host` is the share of the bytes
    of trained chunks that is updated on the host. `fill` False leaves the device budget beyond
    the least memory unused.
    """

    chunk_bytes: int
    arena_bytes: int
    gradient_blocks: int = 2
    ring: int = 2
    pieces: int = 4
    order: str = ORDERS[0]
    quotas: tuple[tuple[Part, int], ...] = ()
    first: tuple[Item, ...] = ()
    never: frozenset[Item] = frozenset()
    on_host: float = 0.0
    fill: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A layout with the stays of its gathered chunks, and the device memory it needs."""

    choice: Choice
    layout: Layout
    stays: tuple[Stay, ...]
    need_bytes: int


@dataclass(kw_only=True)
class _Parts:
    """The parts that are away, and the chunks of these whose optimizer runs on the host."""

    away: set[Item]
    hosted: set[int] = field(default_factory=set)

    def streams(self, chunk: int, part: Part) -> bool:
        """Whether the update brings a part to the device and back."""
        return (chunk, part) in self.away and chunk not in self.hosted


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
            if sizes.ordinary[part] and not self.stays(sizes.chunk, part)
        )

    @cached_property
    def _bound_away(self) -> frozenset[Item]:
        """Parts pinned to a tier beyond the device."""
        return frozenset(
            (chunk, part)
            for chunk, part in self._items
            if part is Part.PARAMETERS and self.pin(self._sizes[chunk].chunk) is not None
        )

    def pin(self, chunk: Chunk) -> Tier | None:
        """The tier that the user fixed for a chunk's parameters."""
        return self.pins.get(chunk.slices[0].path)

    def stays(self, chunk: Chunk, part: Part) -> bool:
        """Whether a part must be on the device: it is pinned there, or there is nothing else.
        A chunk that all ranks have whole is one that its optimizer must see whole."""
        if not self._tiers or (self._many and not chunk.sharded):
            return True
        return part is Part.PARAMETERS and self.pin(chunk) is Tier.DEVICE

    # Steps 1 to 4: the least that must be at home on the device.

    def _least(self, choice: Choice) -> _Parts | None:
        """The parts away when as few as possible are at home."""
        parts = _Parts(away=set(self._items))
        self._to_host(choice, parts)
        self._serve_arena(choice, parts)
        if not self._serve_tiers(choice, parts) or not (parts.away or self._many):
            return None
        return parts

    @property
    def _many(self) -> bool:
        return self.footprint.group.ranks > 1

    def _to_host(self, choice: Choice, parts: _Parts) -> None:
        """Choose the chunks whose optimizer runs on the host: as large a share as the choice
        says of those that may be, as far as the host has room for them."""
        if not choice.on_host or not self._host_updates:
            return
        able = [
            sizes
            for sizes in self._sizes
            if sizes.chunk.trainable
            and all((sizes.chunk.id, part) in parts.away for part in Part if sizes.ordinary[part])
        ]
        wanted = choice.on_host * sum(sizes.chunk.share_bytes for sizes in able)
        scratch = self.footprint.host_update_bytes({s.chunk.id for s in able}, WHOLE)
        room = self.limits.of(Tier.HOST) - scratch
        for sizes in sorted(able, key=lambda sizes: -self._spread[sizes.chunk.id]):
            needed = sum(sizes.packed.values())
            if wanted < sizes.chunk.share_bytes / 2:
                break
            if needed > room:
                continue
            wanted -= sizes.chunk.share_bytes
            room -= needed
            parts.hosted.add(sizes.chunk.id)

    @property
    def _host_updates(self) -> bool:
        """Whether an optimizer can run on the host."""
        return self.machine.updates_on_host and Tier.HOST in self._tiers

    def _serve_arena(self, choice: Choice, parts: _Parts) -> None:
        arena = choice.arena_bytes
        for sizes in self._sizes:
            for part in (Part.STATES, Part.PARAMETERS, Part.GRADIENTS):
                needed = choice.ring * self._streamed_bytes(parts, sizes.chunk.id, sizes.widest)
                if needed > arena:
                    self._come_home(parts, (sizes.chunk.id, part))
        while True:
            block = self._gradient_block(parts)
            gathered = self._uses(parts)
            largest = max((use.nbytes for use in gathered), default=0)
            area = arena - choice.gradient_blocks * block
            if largest <= area and self._core_bytes(parts) <= area:
                return
            part, size = Part.PARAMETERS, largest
            if choice.gradient_blocks * block > arena // 2 or not largest:
                part, size = Part.GRADIENTS, block
            if self._many:  # the gradients of every chunk need their block wherever they live
                part, size = Part.PARAMETERS, largest
            before = len(parts.away)
            for item in sorted(parts.away):
                if item[1] is part and self._sizes[item[0]].chunk.nbytes >= size:
                    self._come_home(parts, item)
            if len(parts.away) == before:  # only pinned ones are left: they set the arena
                return

    def _serve_tiers(self, choice: Choice, parts: _Parts) -> bool:
        """Bring parts home until host and disk hold the rest; whether they can."""
        room = sum(self.limits.of(tier) for tier in self._tiers)
        total = sum(self._sizes[chunk].packed[part] for chunk, part in parts.away)
        for item in self._ordered(choice, parts):
            if total <= room and self._assign(parts) is not None:
                return True
            before = len(parts.away)
            self._come_home(parts, item)
            if len(parts.away) < before:
                total -= self._sizes[item[0]].packed[item[1]]
        return self._assign(parts) is not None

    def _come_home(self, parts: _Parts, item: Item) -> None:
        if item not in self._bound_away and item in parts.away:
            parts.away.remove(item)
            parts.hosted.discard(item[0])

    # Step 5: memory that is left.

    def _fill(self, choice: Choice, parts: _Parts) -> None:
        """Bring parts home while the device has room, but never all of them."""
        for _ in range(3):  # parts at home can make the arena smaller, which makes room
            room = self.limits.device - self._need(choice, parts)
            taken = []
            for item in self._ordered(choice, parts):
                size = self._sizes[item[0]].ordinary[item[1]]
                last = len(parts.away) == 1 and not self._many
                able = item not in self._bound_away and item[0] not in parts.hosted
                if size <= room and able and not last:
                    room -= size
                    parts.away.discard(item)
                    taken.append(item)
            while taken and self._need(choice, parts) > self.limits.device:
                parts.away.add(taken.pop())
            if not taken:
                break
        self._fill_whole(choice, parts)

    def _fill_whole(self, choice: Choice, parts: _Parts) -> None:
        """Bring chunks that are updated on the host home, with all their parts."""
        for chunk in sorted(parts.hosted, key=lambda chunk: self._spread[chunk]):
            items = [(chunk, part) for part in Part if (chunk, part) in parts.away]
            kept = any(item in self._bound_away or item in choice.never for item in items)
            if kept or len(items) == len(parts.away):
                continue
            parts.hosted.discard(chunk)
            parts.away.difference_update(items)
            if self._need(choice, parts) > self.limits.device:
                parts.hosted.add(chunk)
                parts.away.update(items)

    def _ordered(self, choice: Choice, parts: _Parts) -> list[Item]:
        """Items in the order in which they come home."""
        order = Order(
            letters=choice.order, quotas=dict(choice.quotas), first=choice.first, never=choice.never
        )
        return order.of(parts.away, self._sizes, self._spread)

    @cached_property
    def _spread(self) -> tuple[int, ...]:
        return spread(len(self._sizes))

    # Step 6: tiers.

    @cached_property
    def _tiers(self) -> tuple[Tier, ...]:
        return away_tiers(self.machine, self.limits)

    def _assign(self, parts: _Parts) -> tuple[dict[Item, Tier], int] | None:
        """A tier for every part away, and the staging bytes. None if they do not fit."""
        room = {tier: self.limits.of(tier) for tier in self._tiers}
        total = sum(self._sizes[chunk].packed[part] for chunk, part in parts.away)
        if parts.hosted:
            room[Tier.HOST] -= self.footprint.host_update_bytes(parts.hosted, WHOLE)
        staging = 0
        bound_to_disk = any(
            self.pin(self._sizes[c].chunk) == Tier.DISK for c, _ in parts.away & self._bound_away
        )
        if Tier.HOST in room and (total > room[Tier.HOST] or bound_to_disk):
            staging = self._staging(parts) if Tier.DISK in room else 0
            room[Tier.HOST] -= staging
        tiers: dict[Item, Tier] = {}
        rank = {part: i for i, part in enumerate((Part.PARAMETERS, Part.STATES, Part.GRADIENTS))}
        for item in sorted(
            parts.away,
            key=lambda i: (i[0] not in parts.hosted, i not in self._bound_away, rank[i[1]], i[0]),
        ):
            chunk, part = item
            size = self._sizes[chunk].packed[part]
            pin = self.pin(self._sizes[chunk].chunk) if item in self._bound_away else None
            if chunk in parts.hosted:
                pin = Tier.HOST
            tier = next((t for t in room if size <= room[t] and pin in (None, t)), None)
            if tier is None:
                return None
            room[tier] -= size
            tiers[item] = tier
        return tiers, staging

    def _staging(self, parts: _Parts) -> int:
        block = max(self._sizes[chunk].packed[part] for chunk, part in parts.away)
        return staging_bytes(block, self.limits)

    # The layout that homes make.

    def _layout(self, choice: Choice, parts: _Parts) -> Layout | None:
        """The layout of these homes, its gather area as large as the arena allows."""
        assigned = self._assign(parts)
        if assigned is None:
            return None
        tiers, staging = assigned
        block = self._gradient_block(parts)
        blocks = choice.gradient_blocks if block else 0
        packed = {
            tier: sum(self._sizes[c].packed[p] for (c, p), t in tiers.items() if t == tier)
            for tier in (Tier.HOST, Tier.DISK)
        }
        return Layout(
            chunks=tuple(
                replace(sizes.chunk, homes=ON_HOST, update=Tier.HOST)
                if sizes.chunk.id in parts.hosted
                else replace(sizes.chunk, homes=_homes(sizes.chunk.id, tiers))
                for sizes in self._sizes
            ),
            gather_bytes=self._area(choice, parts),
            gradient_blocks=blocks,
            gradient_block_bytes=block,
            update_numel=self._update_numel(choice, parts),
            arena_bytes=0,
            host_bytes=packed[Tier.HOST],
            disk_bytes=packed[Tier.DISK],
            staging_bytes=staging,
            group=self.footprint.group,
        )

    def _need(self, choice: Choice, parts: _Parts) -> int:
        """Device bytes of these homes with the choice's arena, at the step's peak."""
        update_numel = self._update_numel(choice, parts)
        blocks = choice.gradient_blocks * self._gradient_block(parts)
        beside = blocks if self.footprint.group.shared else 0
        area = self._area(choice, parts) + blocks - beside
        arena = max(area, choice.ring * self._unit_bytes(parts, update_numel))
        return self._need_of(parts, update_numel, arena + beside)

    def _area(self, choice: Choice, parts: _Parts) -> int:
        """Bytes of the gather area: what the arena leaves, or without `fill` the least."""
        if not choice.fill:
            return self._core_bytes(parts)
        # Also where this graph reads none of them: another one may.
        if not any(self._takes_block(sizes.chunk.id, parts.away) for sizes in self._sizes):
            return 0
        blocks = choice.gradient_blocks * self._gradient_block(parts)
        bound = _Parts(away=set(self._bound_away))
        return max(choice.arena_bytes - blocks, self._core_bytes(bound))

    def _core_bytes(self, parts: _Parts) -> int:
        """Bytes of the gather area without which no schedule works, of this graph or of one
        that reads what this one leaves idle (another branch): two such chunks at once."""
        gathered = self._uses(parts)
        key = tuple(use.chunk for use in gathered)
        if key not in self._known_cores:
            self._known_cores[key] = core_bytes(gathered)
        read = set(key)
        idle = sorted(
            align(sizes.chunk.nbytes)
            for sizes in self._sizes
            if self._takes_block(sizes.chunk.id, parts.away) and sizes.chunk.id not in read
        )
        return max(self._known_cores[key], sum(idle[-2:]))

    @cached_property
    def _known_cores(self) -> dict[tuple[int, ...], int]:
        return {}

    def _arena(self, choice: Choice, parts: _Parts, layout: Layout) -> int:
        return max(
            layout.gather_bytes + layout.block_bytes - layout.shared_bytes,
            choice.ring * self._unit_bytes(parts, layout.update_numel),
        )

    def _need_of(self, parts: _Parts, update_numel: int, arena: int) -> int:
        constant = self._everything - sum(self._sizes[c].ordinary[p] for c, p in parts.away)
        states = {chunk for chunk, part in parts.away if part is Part.STATES}
        update = self.footprint.update_bytes(states, update_numel, parts.hosted)
        return constant + arena + max(self.footprint.live_peak, update)

    @cached_property
    def _everything(self) -> int:
        return self.footprint.constant([Homes()] * len(self._sizes))

    def _uses(self, parts: _Parts) -> tuple[Use, ...]:
        """Uses of the chunks that are gathered into blocks."""
        return tuple(use for use in self._all_uses if self._takes_block(use.chunk, parts.away))

    def _residents(self, parts: _Parts) -> tuple[Use, ...]:
        """Uses of the chunks that are gathered where they are at home."""
        return tuple(
            use
            for use in self._all_uses
            if self._sizes[use.chunk].chunk.sharded and not self._takes_block(use.chunk, parts.away)
        )

    def _takes_block(self, chunk: int, away: set[Item]) -> bool:
        if (chunk, Part.PARAMETERS) in away:
            return True
        return self._sizes[chunk].chunk.sharded and not self.footprint.group.shared

    def _gradient_block(self, parts: _Parts) -> int:
        """A block takes the gradients of any chunk, also one that another graph trains."""
        if self._many:
            group = self.footprint.group
            trained = (s.chunk for s in self._sizes if s.chunk.trainable)
            return max((group.gradient_block_bytes(chunk) for chunk in trained), default=0)
        return max(
            (self._sizes[c].packed[part] for c, part in parts.away if part is Part.GRADIENTS),
            default=0,
        )

    def _streamed_bytes(self, parts: _Parts, chunk: int, sizes: Mapping[Part, int]) -> int:
        """Bytes of these parts of a chunk that pass through the ring."""
        total = 0
        for part, size in sizes.items():
            if parts.streams(chunk, part):
                total += size
        return total

    def _update_numel(self, choice: Choice, parts: _Parts) -> int:
        """Elements of a unit: so many that `pieces` of the widest fit the arena."""
        if not any(sizes.chunk.share_numel for sizes in self._sizes):
            return 1
        per_element = max(
            self._streamed_bytes(parts, s.chunk.id, s.packed) / s.chunk.share_numel
            for s in self._sizes
            if s.chunk.share_numel
        )
        target = choice.arena_bytes / max(choice.ring, choice.pieces)
        if not per_element:  # updated where it is
            return max(s.chunk.share_numel for s in self._sizes)
        return rounded_down(max(1, int(target / per_element)))

    def _unit_bytes(self, parts: _Parts, update_numel: int) -> int:
        """The largest unit's bytes that pass through the ring."""
        largest = 0
        for sizes in self._moving(parts):
            unit = sizes.of(sizes.largest_unit(update_numel))
            largest = max(largest, self._streamed_bytes(parts, sizes.chunk.id, unit))
        return largest

    def _moving(self, parts: _Parts) -> Iterator[ChunkBytes]:
        """Chunks that the update streams."""
        chunks = {chunk for chunk, _ in parts.away} - parts.hosted
        return (s for s in self._sizes if s.chunk.id in chunks and s.chunk.trainable)


def rounded_down(numel: int) -> int:
    """`numel` with four binary digits that count: units of about the same size are cut alike, so
    that what is known of them need not be found again."""
    shift = max(0, numel.bit_length() - 4)
    return numel >> shift << shift


def staging_bytes(block_bytes: int, limits: Limits) -> int:
    """Host memory between disk and device: a few blocks, but a quarter of the budget."""
    least = min(block_bytes, limits.host)
    return min(STAGING_BLOCKS * block_bytes, max(limits.host // 4, least))


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
