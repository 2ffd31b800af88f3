"""Place: where in the gather area a chunk stays, from when to when.

Second stage of the planner. A stay is a rectangle: the bytes [offset, offset + nbytes) of
the gather area during the positions [start, last]. Its core [first, last] is given, by the
chunk's first and last reader in a phase; chosen are the offset and the start, the position
before which the transfer into the block begins.

    law         two stays that share a byte, or their chunk, share no position
    order       starts ascend with the first readers: a link is first in, first out, so a
                transfer must not overtake one that is needed sooner
    objective   the earliest starts, and as few transfers as possible: a block that nobody
                overwrote since the forward is kept for the backward

`_rotate` takes stays in order of need and gives each the block that has been free longest:
for equal chunks a ring, whose depth is capacity / chunk. In the turn from forward to
backward it keeps what the ring still holds, which is what Belady's rule would keep, as the
backward reads chunks in the reverse order. Where uneven sizes defeat it, `_color` colours
the cores alone (first fit by size) and starts each as early as its colour is free.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elixir_fx.facts import Facts
from elixir_fx.plan import SAVED, Chunk, Layout, align


@dataclass(frozen=True, slots=True)
class Use:
    """When a chunk's parameters are read: first and last position in either phase. Before
    position `there` it is not at home yet."""

    chunk: int
    nbytes: int
    forward: tuple[int, int] | None
    backward: tuple[int, int] | None
    there: int = 0


@dataclass(frozen=True, slots=True)
class Stay:
    """One stay of a chunk in the gather area. The block is taken from `start` to `last`."""

    chunk: int
    backward: bool
    nbytes: int
    offset: int
    start: int
    first: int
    last: int
    kept: bool = False
    resident: bool = False


# Bytes [low, high) of the area: (low, high, taken until, the stay that took them last).
_Segment = tuple[int, int, int, int]


def uses(facts: Facts, chunks: Iterable[Chunk]) -> tuple[Use, ...]:
    """When each chunk is read. Empty chunks and chunks that nobody reads have no use."""
    reads = {parameter.path: parameter.reads for parameter in facts.parameters}
    found = []
    for chunk in chunks:
        positions = [read for piece in chunk.slices for read in reads.get(piece.path, ())]
        forward = [read for read in positions if read < facts.backward]
        backward = [read for read in positions if read >= facts.backward]
        if positions and chunk.nbytes:
            found.append(
                Use(
                    chunk.id,
                    chunk.nbytes,
                    (min(forward), max(forward)) if forward else None,
                    (min(backward), max(backward)) if backward else None,
                )
            )
    return tuple(found)


def gathered_uses(facts: Facts, layout: Layout) -> tuple[tuple[Use, ...], tuple[Use, ...]]:
    """Uses of all that comes into blocks of a layout, and of the chunks that are read where they
    are at home."""
    gathered = [chunk for chunk in layout.chunks if chunk.gathered]
    blocks = uses(facts, [chunk for chunk in gathered if layout.takes_block(chunk)])
    there = uses(facts, [chunk for chunk in gathered if not layout.takes_block(chunk)])
    return (*blocks, *returns(facts)), there


def returns(facts: Facts) -> tuple[Use, ...]:
    """When each activation that has left is read in the backward."""
    return tuple(
        Use(
            chunk=SAVED + index,
            nbytes=align(away.nbytes),
            forward=None,
            backward=(away.first, away.last),
            there=away.leaves + 1,
        )
        for index, away in enumerate(facts.departures)
    )


def first_call(facts: Facts) -> int:
    """The first position that is surely no placeholder: somebody there reads something."""
    readers = [s.readers[0] for s in facts.storages if s.readers]
    reads = [p.reads[0] for p in facts.parameters if p.reads]
    return min([*readers, *reads, facts.backward])


def place(stays: Sequence[Use], capacity: int, earliest: int) -> tuple[Stay, ...] | None:
    """Stays for all uses within `capacity` bytes, in order of their first readers.

    No prefetch starts before position `earliest`. None if no way was found.
    """
    if max((use.nbytes for use in stays), default=0) > capacity:
        return None
    found = _rotate(_cores(stays), capacity, earliest)
    found = _color(stays, capacity, earliest) if found is None else found
    return None if found is None else _once_there(found, stays)


def _once_there(found: Sequence[Stay], uses: Sequence[Use]) -> tuple[Stay, ...]:
    """None of them begins before what it brings is at home."""
    there = {use.chunk: use.there for use in uses if use.there}
    return tuple(replace(s, start=max(s.start, there.get(s.chunk, 0))) for s in found)


def returning(stays: Sequence[Stay]) -> frozenset[int]:
    """Which stays of a forward, by their index, find their chunk still at its place when the
    step runs again without an update in between: what the backward left there."""
    order = sorted(range(len(stays)), key=lambda index: (stays[index].start, stays[index].first))
    there: list[int] = []
    for index in order:
        there = [old for old in there if not _replaces(stays[index], stays[old])] + [index]
    found = set()
    for index in order:
        stay = stays[index]
        if stay.backward or stay.resident:
            continue
        places = {(stays[old].chunk, stays[old].offset) for old in there}
        if (stay.chunk, stay.offset) in places:
            found.add(index)
        there = [old for old in there if not _replaces(stay, stays[old])]
    return frozenset(found)


def _replaces(stay: Stay, old: Stay) -> bool:
    """Whether a stay takes bytes, or the chunk, of an older one."""
    meets = stay.offset < old.offset + old.nbytes and old.offset < stay.offset + stay.nbytes
    return meets or stay.chunk == old.chunk


def resident(stays: Sequence[Use]) -> tuple[Stay, ...]:
    """Stays of chunks that are read where they are at home: they take no bytes, nothing moves."""
    return tuple(replace(core, nbytes=0, resident=True) for core in _cores(stays))


def in_order(stays: Iterable[Stay]) -> tuple[Stay, ...]:
    """Stays by their first readers."""
    return tuple(sorted(stays, key=lambda stay: (stay.first, stay.chunk)))


def extent(stays: Iterable[Stay]) -> int:
    """Bytes of the gather area that stays take."""
    return max((stay.offset + stay.nbytes for stay in stays), default=0)


def idle_bytes(chunks: Iterable[int]) -> int:
    """Room to gather two chunks at once, of those of so many bytes that this graph does not read:
    another one may."""
    return sum(sorted(map(align, chunks))[-2:])


def core_bytes(stays: Sequence[Use]) -> int:
    """A capacity that `place` is sure to succeed with: the cores, coloured."""
    return extent(_first_fit(_cores(stays)))


def _cores(stays: Sequence[Use]) -> list[Stay]:
    """Stays without prefetch, by first reader."""
    found = [
        Stay(use.chunk, backward, use.nbytes, 0, span[0], span[0], span[1])
        for use in stays
        for backward, span in ((False, use.forward), (True, use.backward))
        if span is not None
    ]
    return list(in_order(found))


def _first_fit(cores: Sequence[Stay]) -> list[Stay]:
    """Lowest offsets at which no two cores meet, the largest placed first."""
    placed: list[Stay] = []
    for stay in sorted(cores, key=lambda stay: (-stay.nbytes, stay.first, stay.chunk)):
        offset = 0
        meeting = [p for p in placed if p.first <= stay.last and stay.first <= p.last]
        for other in sorted(meeting, key=lambda other: other.offset):
            if other.offset >= offset + stay.nbytes:
                break
            offset = max(offset, other.offset + other.nbytes)
        placed.append(replace(stay, offset=offset))
    return list(in_order(placed))


def _color(stays: Sequence[Use], capacity: int, earliest: int) -> tuple[Stay, ...] | None:
    """Offsets by first fit over the cores, then starts as early as the blocks allow."""
    colored = _first_fit(_cores(stays))
    if extent(colored) > capacity:
        return None
    started: list[Stay] = []
    start = earliest
    for stay in colored:
        start = max(start, _left(started, stay.chunk))
        for other in started:
            if other.offset < stay.offset + stay.nbytes and stay.offset < (
                other.offset + other.nbytes
            ):
                start = max(start, other.last + 1)
        start = min(start, stay.first)
        started.append(replace(stay, start=start))
    return tuple(started)


def _rotate(cores: Sequence[Stay], capacity: int, earliest: int) -> tuple[Stay, ...] | None:
    """Each stay in the block that is free earliest; as many blocks as can are kept."""
    turn = next((i for i, core in enumerate(cores) if core.backward), len(cores))
    ahead = _Rotation(area=[(0, capacity, earliest - 1, -1)], placed=[], start=earliest)
    if not ahead.add(cores[:turn]):
        return None
    held = ahead.survivors(cores[turn:])
    again = {core.chunk for core in cores[turn:]}
    keeps = sum(core.chunk in again for core in cores[:turn])
    tried: list[int] | None = None
    while True:
        kept = held[:keeps]
        if kept != tried:  # else there are not so many
            back = _Rotation(area=list(ahead.area), placed=list(ahead.placed), start=ahead.start)
            if back.add(cores[turn:], kept):
                return in_order(back.placed)
        if keeps == 0:
            return None
        keeps, tried = keeps // 2, kept


@dataclass(slots=True)
class _Rotation:
    """Stays that were placed one after the other, and what of the area they left to whom."""

    area: list[_Segment]  # from the lowest bytes on, without a gap
    placed: list[Stay]
    start: int  # of the last one: the next starts no sooner

    def add(self, cores: Sequence[Stay], kept: Sequence[int] = ()) -> bool:
        """Place these too, whether there is a way; the stays `kept` stay where they are."""
        until = {core.chunk: core for core in cores}
        keeping = []
        for owner in kept:
            held = self.placed[owner]
            core = until.pop(held.chunk)
            keeping.append(replace(core, offset=held.offset, kept=True))
            self.area = [
                (low, high, core.last if of == owner else free_at, of)
                for low, high, free_at, of in self.area
            ]
        left = {stay.chunk: stay.last + 1 for stay in self.placed}  # a chunk is there once
        for core in cores:
            if core.chunk in until and not self._take(core, left.get(core.chunk, 0)):
                return False
        self.placed += keeping
        return True

    def survivors(self, backward: Sequence[Stay]) -> list[int]:
        """Stays whose whole block nobody took since, the soonest needed first."""
        needed = {core.chunk: core.first for core in backward}
        intact: dict[int, int] = {}
        for low, high, _, owner in self.area:
            if owner >= 0:
                intact[owner] = intact.get(owner, 0) + high - low
        whole = [
            owner
            for owner, nbytes in intact.items()
            if nbytes == self.placed[owner].nbytes and self.placed[owner].chunk in needed
        ]
        return sorted(whole, key=lambda owner: (needed[self.placed[owner].chunk], owner))

    def _take(self, core: Stay, start: int) -> bool:
        """Give `core` the bytes where it can start earliest, but not before `start`."""
        start = max(start, self.start)
        nbytes, most = core.nbytes, self.area[-1][1]
        offsets = {low for low, _, _, _ in self.area}
        offsets |= {high - nbytes for _, high, _, _ in self.area}
        begin, offset = core.first + 1, -1
        for other in sorted(offsets):
            if 0 <= other <= most - nbytes:
                free = self._free(other, other + nbytes, start)
                if free < begin:
                    begin, offset = free, other
                if free == start:
                    break
        if offset < 0:
            return False
        self._occupy((offset, offset + nbytes, core.last, len(self.placed)))
        stay = Stay(core.chunk, core.backward, nbytes, offset, begin, core.first, core.last)
        self.placed.append(stay)
        self.start = begin
        return True

    def _free(self, offset: int, end: int, start: int) -> int:
        """The first position from `start` on at which [offset, end) is free."""
        for low, high, free_at, _ in self.area:
            if low >= end:
                break
            if offset < high and free_at >= start:
                start = free_at + 1
        return start

    def _occupy(self, taken: _Segment) -> None:
        """Cut `taken` out of the segments it overlaps, and put it in their place."""
        first, end = taken[:2]
        rest: list[_Segment] = []
        for segment in self.area:
            low, high, free_at, owner = segment
            if high <= first or low >= end:
                rest.append(segment)
                continue
            if low < first:
                rest.append((low, first, free_at, owner))
            if low <= first:
                rest.append(taken)
            if high > end:
                rest.append((end, high, free_at, owner))
        self.area = rest


def _left(placed: Iterable[Stay], chunk: int) -> int:
    """The first position after an earlier stay of the same chunk: one is there at a time."""
    return max((stay.last + 1 for stay in placed if stay.chunk == chunk), default=0)
