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
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import SAVED, Chunk, Homes, Layout, Limits, align
from elixir_fx.planner.footprint import ChunkBytes, Footprint, Part
from elixir_fx.planner.order import LETTERS, ORDERS, Item, Order, spread
from elixir_fx.planner.pack import away_tiers
from elixir_fx.planner.place import (
    Stay,
    Use,
    core_bytes,
    extent,
    first_call,
    idle_bytes,
    in_order,
    place,
    resident,
    returns,
    uses,
)
from elixir_fx.planner.tally import COLUMN, PARTS, Mask, Parts, Tally

ON_HOST = Homes(parameters=Tier.HOST, gradients=Tier.HOST, states=Tier.HOST)
WHOLE = 1 << 62  # elements of a unit: the whole chunk, before it is known how it is cut
# Which parts keep to the nearer tier: on the disk gradients are written in the backward and read
# in the update, states both in the update.
SPILLS = ("PSG", "PGS")
OUTSIZED = 2  # times the size of a chunk: a single parameter that is larger
SAVED_BLOCK_BYTES = 16 << 20  # of a block for activations alone
STAGING_BLOCKS = 4  # host blocks between disk and an accelerator


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One point of the search.

    `ring` units fit the arena at least, `pieces` is how many the units are cut for. Parts come
    home in this order: those in `first`; of each part as many bytes as `quotas` say, and then
    the rest, as `order` ranks them; never those in `never`. `on_host` is the share of the bytes
    of trained chunks that is updated on the host. The nearer tiers get the parts away in the
    order of `spill`. `fill` False leaves the device budget beyond the least memory unused.
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
    spill: str = SPILLS[0]
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
    def _tally(self) -> Tally:
        return Tally(footprint=self.footprint)

    @cached_property
    def _movable(self) -> Mask:
        """Every part that could be away."""
        movable = [[not self.stays(s.chunk, part) for part in PARTS] for s in self._sizes]
        return np.array(movable, dtype=np.bool_).reshape(-1, len(PARTS)) & (
            self._tally.ordinary > 0
        )

    @cached_property
    def _bound_away(self) -> Mask:
        """Parts pinned to a tier beyond the device."""
        pinned = np.array([self.pin(s.chunk) is not None for s in self._sizes], dtype=np.bool_)
        bound = np.zeros_like(self._movable)
        bound[:, COLUMN[Part.PARAMETERS]] = pinned & self._movable[:, COLUMN[Part.PARAMETERS]]
        return bound

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

    def _least(self, choice: Choice) -> Parts | None:
        """The parts away when as few as possible are at home."""
        parts = Parts.of(self._movable)
        self._to_host(choice, parts)
        self._serve_arena(choice, parts)
        if not self._serve_tiers(choice, parts) or not (parts.count or self._may_be_empty):
            return None
        return parts

    @property
    def _may_be_empty(self) -> bool:
        """Whether a layout may have all parts at home and still be no layout that keeps all."""
        return self._many or bool(self._returns)

    @property
    def _many(self) -> bool:
        return self.footprint.group.ranks > 1

    def _to_host(self, choice: Choice, parts: Parts) -> None:
        """Choose the chunks whose optimizer runs on the host: as large a share as the choice
        says of those that may be, as far as the host has room for them."""
        if not choice.on_host or not self._host_updates:
            return
        wholly = (parts.away | (self._tally.ordinary == 0)).all(axis=1)
        able = {int(chunk) for chunk in np.flatnonzero(wholly & self._tally.trainable)}
        wanted = choice.on_host * sum(self._sizes[chunk].chunk.share_bytes for chunk in able)
        room = self.limits.of(Tier.HOST) - self.footprint.host_update_bytes(able, WHOLE)
        outsized = self._tally.nbytes > OUTSIZED * choice.chunk_bytes  # need no ring there
        for chunk in sorted(able, key=lambda chunk: (not outsized[chunk], -self._spread[chunk])):
            sizes = self._sizes[chunk]
            needed = sum(sizes.packed.values())
            if wanted < sizes.chunk.share_bytes / 2:
                break
            if needed > room:
                continue
            wanted -= sizes.chunk.share_bytes
            room -= needed
            parts.hosted[chunk] = True

    @property
    def _host_updates(self) -> bool:
        """Whether an optimizer can run on the host."""
        return self.machine.updates_on_host and Tier.HOST in self._tiers

    def _serve_arena(self, choice: Choice, parts: Parts) -> None:
        arena, tally = choice.arena_bytes, self._tally
        for part in (Part.STATES, Part.PARAMETERS, Part.GRADIENTS):
            in_ring = choice.ring * (tally.widest * parts.streams).sum(axis=1)
            self._come_home(parts, part, in_ring > arena)
        if self._many and not self.footprint.group.shared:
            return  # what is at home is gathered as well
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
            before = parts.count
            self._come_home(parts, part, tally.nbytes >= size)
            if parts.count == before:  # only pinned ones are left: they set the arena
                return

    def _serve_tiers(self, choice: Choice, parts: Parts) -> bool:
        """Bring parts home until host and disk hold the rest, as few as that takes; whether they
        can."""
        if self._assign(parts, choice.spill) is not None:
            return True
        ordered = [
            (chunk, COLUMN[part])
            for chunk, part in self._ordered(choice, parts)
            if not self._bound_away[chunk, COLUMN[part]]
        ]
        chunks, columns = np.array(ordered, dtype=np.int64).reshape(-1, 2).T

        def without(count: int) -> Parts:
            fewer = Parts(away=parts.away.copy(), hosted=parts.hosted.copy())
            fewer.away[chunks[:count], columns[:count]] = False
            fewer.hosted[chunks[:count]] = False
            return fewer

        low, high = 0, len(ordered)  # too few, perhaps enough
        if self._assign(without(high), choice.spill) is None:
            return False
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._assign(without(middle), choice.spill) is not None
            low, high = (low, middle) if fits else (middle, high)
        enough = without(high)
        parts.away, parts.hosted = enough.away, enough.hosted
        return True

    def _come_home(self, parts: Parts, part: Part, chunks: Mask) -> None:
        """Bring a part of these chunks home, but for what is pinned elsewhere."""
        column = COLUMN[part]
        moved = chunks & parts.away[:, column] & ~self._bound_away[:, column]
        parts.away[moved, column] = False
        parts.hosted[moved] = False

    # Step 5: memory that is left.

    def _fill(self, choice: Choice, parts: Parts) -> None:
        """Bring parts home while the device has room, but never all of them."""
        ordinary = self._tally.ordinary
        for _ in range(3):  # parts at home can make the arena smaller, which makes room
            room = self.limits.device - self._need(choice, parts)
            left = parts.count
            taken: list[Item] = []
            for chunk, part in self._ordered(choice, parts):
                size = int(ordinary[chunk, COLUMN[part]])
                able = not self._bound_away[chunk, COLUMN[part]] and not parts.hosted[chunk]
                if size <= room and able and (left > 1 or self._may_be_empty):
                    room -= size
                    left -= 1
                    parts.put((chunk, part), False)
                    taken.append((chunk, part))
            while taken and self._need(choice, parts) > self.limits.device:
                parts.put(taken.pop(), True)
            if not taken:
                break
        self._fill_whole(choice, parts)

    def _fill_whole(self, choice: Choice, parts: Parts) -> None:
        """Bring chunks that are updated on the host home, with all their parts."""
        room = self.limits.device - self._need(choice, parts)
        whole = self._tally.ordinary.sum(axis=1)
        taken: list[tuple[int, Mask]] = []
        kept = np.array(self._bound_away.any(axis=1), dtype=np.bool_)
        for chunk, _ in choice.never:
            kept[chunk] = True
        for chunk in sorted(parts.hosted_ids(), key=lambda chunk: self._spread[chunk]):
            if kept[chunk] or whole[chunk] > room or parts.count == parts.away[chunk].sum():
                continue
            room -= int(whole[chunk])
            taken.append((chunk, parts.away[chunk].copy()))
            parts.hosted[chunk] = False
            parts.away[chunk] = False
        while taken and self._need(choice, parts) > self.limits.device:
            chunk, away = taken.pop()
            parts.hosted[chunk] = True
            parts.away[chunk] = away

    def _ordered(self, choice: Choice, parts: Parts) -> list[Item]:
        """Items in the order in which they come home."""
        order = Order(
            letters=choice.order, quotas=dict(choice.quotas), first=choice.first, never=choice.never
        )
        return order.of(parts.items(), self._sizes, self._spread)

    @cached_property
    def _spread(self) -> tuple[int, ...]:
        return spread(len(self._sizes))

    # Step 6: tiers.

    @cached_property
    def _homes(self) -> dict[tuple[int, ...], Homes]:
        """Homes by the numbers of the places of their parts: 0 is the device."""
        places = (Tier.DEVICE, *self._tiers)
        fields = [part.value for part in PARTS]
        return {
            numbers: Homes(**dict(zip(fields, (places[n] for n in numbers), strict=True)))
            for numbers in product(range(len(places)), repeat=len(PARTS))
        }

    @cached_property
    def _tiers(self) -> tuple[Tier, ...]:
        return away_tiers(self.machine, self.limits)

    def _assign(self, parts: Parts, spill: str) -> tuple[NDArray[np.int64], int] | None:
        """The place of every part, 0 the device or a number counted in `_tiers` from 1, and the
        staging bytes. None if the tiers do not hold what is away."""
        places = parts.away.astype(np.int64)  # the nearest tier
        if not self._tiers:
            return places, 0
        packed = self._tally.packed
        room = [self.limits.of(tier) for tier in self._tiers]
        if self._saved_bytes:
            room[self._tiers.index(self._saved_tier)] -= self._saved_bytes
            if min(room) < 0:
                return None
        if parts.hosted.any():
            room[0] -= self.footprint.host_update_bytes(parts.hosted_ids(), WHOLE)
        if int(packed[parts.away].sum()) <= room[0] and not (parts.away & self._bound_far).any():
            return places, 0
        if len(room) == 1:
            return None
        staging = self._staging(parts)
        room[0] -= staging
        for chunk, column in self._spilling(parts, spill):
            size = int(packed[chunk, column])
            fits = [size <= left for left in room]
            if self._bound_far[chunk, column]:
                fits[0] = False
            elif parts.hosted[chunk] or self._bound_away[chunk, column]:
                fits[1] = False
            if not any(fits):
                return None
            nearest = fits.index(True)
            room[nearest] -= size
            places[chunk, column] = nearest + 1
        return places, staging

    def _spilling(self, parts: Parts, spill: str) -> Iterator[tuple[int, int]]:
        """The parts away in the order in which they choose a tier: first those that have no
        choice."""
        chunks, columns = np.nonzero(parts.away)
        rank = np.array([spill.index(LETTERS[part]) for part in PARTS])[columns]
        bound = self._bound_away[chunks, columns]
        order = np.lexsort((chunks, rank, ~bound, ~parts.hosted[chunks]))
        return zip(chunks[order].tolist(), columns[order].tolist(), strict=True)

    @cached_property
    def _bound_far(self) -> Mask:
        """Parts pinned to a tier beyond the nearest."""
        far = np.array([self.pin(s.chunk) in self._tiers[1:] for s in self._sizes], dtype=np.bool_)
        bound: Mask = self._bound_away & far[:, None]
        return bound

    def _staging(self, parts: Parts) -> int:
        return staging_bytes(int(self._tally.packed[parts.away].max()), self.limits)

    # The layout that homes make.

    def _layout(self, choice: Choice, parts: Parts) -> Layout | None:
        """The layout of these homes, its gather area as large as the arena allows."""
        assigned = self._assign(parts, choice.spill)
        if assigned is None:
            return None
        places, staging = assigned
        block = self._gradient_block(parts)
        blocks = choice.gradient_blocks if block else 0
        packed = dict.fromkeys((Tier.HOST, Tier.DISK), 0)
        for number, tier in enumerate(self._tiers, start=1):
            packed[tier] = int(self._tally.packed[places == number].sum())
        if self._saved_bytes:
            packed[self._saved_tier] += self._saved_bytes
        return Layout(
            chunks=tuple(
                replace(sizes.chunk, homes=ON_HOST, update=Tier.HOST)
                if parts.hosted[sizes.chunk.id]
                else replace(sizes.chunk, homes=self._homes[tuple(places[sizes.chunk.id].tolist())])
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
            saved_bytes=self._saved_bytes,
            saved_tier=self._saved_tier,
            group=self.footprint.group,
        )

    @cached_property
    def _saved_bytes(self) -> int:
        return saved_bytes(self.footprint.facts)

    @cached_property
    def _saved_tier(self) -> Tier:
        return saved_tier(self._tiers, self.limits, self._saved_bytes)

    def _need(self, choice: Choice, parts: Parts) -> int:
        """Device bytes of these homes with the choice's arena, at the step's peak."""
        update_numel = self._update_numel(choice, parts)
        blocks = choice.gradient_blocks * self._gradient_block(parts)
        beside = blocks if self.footprint.group.shared else 0
        area = self._area(choice, parts) + blocks - beside
        arena = max(area, choice.ring * self._tally.unit_bytes(parts, update_numel))
        return self._need_of(parts, update_numel, arena + beside)

    def _area(self, choice: Choice, parts: Parts) -> int:
        """Bytes of the gather area: what the arena leaves, or without `fill` the least."""
        if not choice.fill:
            return self._core_bytes(parts)
        # Also where this graph reads none of them: another one may.
        if not self._takes_block(parts).any() and not self._returns:
            return 0
        blocks = choice.gradient_blocks * self._gradient_block(parts)
        bound = Parts.of(self._bound_away)
        return max(choice.arena_bytes - blocks, self._core_bytes(bound))

    def _core_bytes(self, parts: Parts) -> int:
        """Bytes of the gather area without which no schedule works, of this graph or of one
        that reads what this one leaves idle (another branch): two such chunks at once."""
        takes = self._takes_block(parts)
        key = takes.tobytes()
        if key not in self._known_cores:
            gathered = self._uses(parts)
            idle = takes.copy()
            idle[[use.chunk for use in gathered if use.chunk < SAVED]] = False
            unread = idle_bytes(self._tally.nbytes[idle].tolist())
            self._known_cores[key] = max(core_bytes(gathered), unread)
        return self._known_cores[key]

    @cached_property
    def _known_cores(self) -> dict[bytes, int]:
        return {}

    def _arena(self, choice: Choice, parts: Parts, layout: Layout) -> int:
        return max(
            layout.gather_bytes + layout.block_bytes - layout.shared_bytes,
            choice.ring * self._tally.unit_bytes(parts, layout.update_numel),
        )

    def _need_of(self, parts: Parts, update_numel: int, arena: int) -> int:
        constant = self._everything - int(self._tally.ordinary[parts.away].sum())
        update = self._tally.update_bytes(parts, update_numel)
        return constant + arena + max(self.footprint.live_peak, update)

    @cached_property
    def _everything(self) -> int:
        return self.footprint.constant([Homes()] * len(self._sizes))

    def _uses(self, parts: Parts) -> tuple[Use, ...]:
        """Uses of the chunks that are gathered into blocks, and of activations that come back."""
        takes = self._takes_block(parts)
        return (*(use for use in self._all_uses if takes[use.chunk]), *self._returns)

    @cached_property
    def _returns(self) -> tuple[Use, ...]:
        return returns(self.footprint.facts)

    def _residents(self, parts: Parts) -> tuple[Use, ...]:
        """Uses of the chunks that are gathered where they are at home."""
        there = self._tally.sharded & ~self._takes_block(parts)
        return tuple(use for use in self._all_uses if there[use.chunk])

    def _takes_block(self, parts: Parts) -> Mask:
        """The chunks that are gathered into blocks."""
        away = parts.away[:, COLUMN[Part.PARAMETERS]]
        takes: Mask = away if self.footprint.group.shared else away | self._tally.sharded
        return takes

    def _gradient_block(self, parts: Parts) -> int:
        """A block takes the gradients of any chunk, also one that another graph trains."""
        if self._many:
            return self._shared_block
        column = COLUMN[Part.GRADIENTS]
        gradients = int(self._tally.packed[parts.away[:, column], column].max(initial=0))
        return block_for(gradients, self.footprint.facts)

    @cached_property
    def _shared_block(self) -> int:
        group = self.footprint.group
        trained = (s.chunk for s in self._sizes if s.chunk.trainable)
        return max((group.gradient_block_bytes(chunk) for chunk in trained), default=0)

    def _update_numel(self, choice: Choice, parts: Parts) -> int:
        """Elements of a unit: so many that `pieces` of the widest fit the arena."""
        if not self._tally.numel.any():
            return 1
        per_element = self._tally.per_element(parts)
        if not per_element:  # updated where it is
            return int(self._tally.numel.max())
        target = choice.arena_bytes / max(choice.ring, choice.pieces)
        return rounded_down(max(1, int(target / per_element)))


def rounded_down(numel: int) -> int:
    """`numel` with four binary digits that count: units of about the same size are cut alike, so
    that what is known of them need not be found again."""
    shift = max(0, numel.bit_length() - 4)
    return numel >> shift << shift


def saved_bytes(facts: Facts) -> int:
    """Bytes of a tier for the activations that leave, each at an alignment of its own."""
    return sum(align(away.nbytes) for away in facts.departures)


def saved_tier(tiers: Sequence[Tier], limits: Limits, nbytes: int) -> Tier:
    """Where activations go: to the nearest tier that has room for all of them."""
    if not nbytes or not tiers:
        return Tier.DEVICE
    return next((tier for tier in tiers if limits.of(tier) >= nbytes), tiers[-1])


def block_for(gradients: int, facts: Facts) -> int:
    """Bytes of a block through which gradients of so many bytes leave, and activations by pieces:
    one is needed for them even where all gradients stay."""
    if gradients or not facts.departures:
        return gradients
    return align(min(max(away.nbytes for away in facts.departures), SAVED_BLOCK_BYTES))


def staging_bytes(block_bytes: int, limits: Limits) -> int:
    """Host memory between disk and device: a few blocks, but a quarter of the budget."""
    least = min(block_bytes, limits.host)
    return min(STAGING_BLOCKS * block_bytes, max(limits.host // 4, least))


def spread_arenas(base: int, blocks: Sequence[int], most: int) -> tuple[int, ...]:
    """Arena sizes worth trying: multiples of a chunk, and what large blocks would need."""
    multiples = (2, 2.5, 3, 4, 5, 6, 8, 11, 16, 24, 32)
    found = {int(base * step) for step in multiples} | set(blocks)
    return tuple(sorted(size for size in found if size <= max(most, 2 * base)))
