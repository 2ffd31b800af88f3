"""Polish: homes taken as given, everything else made the best of them; and few homes, all tried.

Last stage of the search. Given the homes of all chunks, the rest is nearly independent: the
graph's way of gathering and of sending gradients home, and the update's way of passing
through the ring, share nothing but the arena, which is what the device has left. `complete`
plays each apart and takes the best pair:

    step_s(homes) = min over blocks, gather area   graph_s       Player.graph_s
                  + min over cuts, ring            update_s      Player.update_s
    subject to      arena >= gather area + blocks,  arena >= any unit
                    constant(homes) + arena + max(live, update(cuts)) <= limits.device

`Table` lists every home of every part of a few chunks with a time that none of them can beat,
so that they are tried in the order of promise until none is left that could be better (branch
and bound). With more chunks than that, `neighbours` are those homes that differ from given ones
in one chunk or two. All is bounded by counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ALIGNMENT_BYTES, Chunk, Homes, Layout, Limits
from elixir_fx.planner.bound import pair_s
from elixir_fx.planner.draft import (
    ON_HOST,
    Drafter,
    block_for,
    saved_bytes,
    saved_tier,
    staging_bytes,
)
from elixir_fx.planner.footprint import Part, away, home
from elixir_fx.planner.forecast import Player
from elixir_fx.planner.pack import away_tiers
from elixir_fx.planner.place import Stay, extent, first_call, idle_bytes, place, returns, uses

FEW = 40_000  # homes that are all listed
BLOCKS = 3  # gradient blocks tried
AREAS = 8  # chunks whose sums of sizes are tried as gather areas
RINGS = (1, 2, 3, 4, 6, 8)  # units in the ring for which the update is cut
CUTS, FEW_CUTS = 24, 6  # ways to cut the update that are tried, with few chunks and with many
SLACK = 1e-9  # relative: less is rounding
PLAYED = 1e-6  # and of a step that is played, transfer by transfer


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A layout, the stays of its gathered chunks, and the seconds of its step."""

    layout: Layout
    stays: tuple[Stay, ...]
    step_s: float


@dataclass(frozen=True, slots=True)
class Option:
    """Homes of one chunk, and where its optimizer runs."""

    homes: Homes
    update: Tier = Tier.DEVICE


@dataclass(frozen=True)
class _Way:
    """How chunks are gathered and gradients leave, and how long the graph takes then."""

    graph_s: float
    stays: tuple[Stay, ...]
    gather_bytes: int
    blocks: int
    block_bytes: int

    @property
    def arena_bytes(self) -> int:
        return self.gather_bytes + self.blocks * self.block_bytes


@dataclass(frozen=True, kw_only=True)
class Completer:
    """Makes the best of the homes of one packing, for one rank."""

    machine: Machine
    limits: Limits
    player: Player
    _placed: dict[tuple[frozenset[int], int], tuple[Stay, ...] | None] = field(
        default_factory=dict, repr=False
    )

    def complete(self, options: Sequence[Option], below: float = inf) -> Completed | None:
        """The best layout with these homes that was found; None if there is none of fewer than
        `below` seconds."""
        footprint = self.player.footprint
        chunks = tuple(
            replace(chunk, homes=option.homes, update=option.update)
            for chunk, option in zip(footprint.chunks, options, strict=True)
        )
        bare = self._bare(chunks)
        if bare is None:
            return None
        rooms = {numel: self._room(bare, numel) for numel in self._cuts(bare)}
        most = max(rooms.values())
        if most < 0:
            return None
        ways = sorted(self._ways(bare, most), key=lambda way: (way.graph_s, way.arena_bytes))
        best: tuple[float, _Way, int, int] | None = None
        known: dict[tuple[int, int], float] = {}
        least = {
            numel: self.player.least_update_s(replace(bare, update_numel=numel)) for numel in rooms
        }
        for way in ways:
            for numel, room in rooms.items():
                if (way.graph_s + least[numel]) * (1 - PLAYED) >= below:
                    continue
                for arena in self._arenas(bare, way.arena_bytes, numel, room):
                    if (numel, arena) not in known:
                        cut = replace(bare, update_numel=numel, arena_bytes=arena)
                        known[numel, arena] = self.player.update_s(cut)
                    step_s = way.graph_s + known[numel, arena]
                    if step_s < below:
                        below = step_s
                        best = (step_s, way, numel, arena)
        if best is None:
            return None
        step_s, way, numel, arena = best
        layout = replace(
            bare,
            gather_bytes=way.gather_bytes,
            gradient_blocks=way.blocks,
            gradient_block_bytes=way.block_bytes,
            update_numel=numel,
            arena_bytes=arena,
        )
        if footprint.layout_peak(layout) > self.limits.device:
            return None
        return Completed(layout=layout, stays=way.stays, step_s=step_s)

    def _bare(self, chunks: tuple[Chunk, ...]) -> Layout | None:
        """The layout without its arena; None if the tiers cannot hold what is away."""
        footprint = self.player.footprint
        held = footprint.tier_bytes(chunks)
        saved = saved_bytes(self.player.facts)
        nearest = saved_tier(away_tiers(self.machine, self.limits), self.limits, saved)
        if saved:
            held[nearest] += saved
        staging = 0
        if not self.machine.unified and held[Tier.DISK]:
            largest = max(
                size
                for chunk, sizes in zip(chunks, footprint.sizes, strict=True)
                for part, size in sizes.packed.items()
                if home(chunk.homes, part) is not Tier.DEVICE
            )
            staging = staging_bytes(largest, self.limits)
        layout = Layout(
            chunks=chunks,
            gather_bytes=0,
            gradient_blocks=0,
            gradient_block_bytes=0,
            update_numel=1,
            arena_bytes=0,
            host_bytes=held[Tier.HOST],
            disk_bytes=held[Tier.DISK],
            staging_bytes=staging,
            saved_bytes=saved,
            saved_tier=nearest,
        )
        host = held[Tier.HOST] + staging
        host += footprint.layout_host_update_bytes(layout)
        fits = host <= self.limits.host and held[Tier.DISK] <= self.limits.disk
        return layout if fits and not layout.keeps_all else None

    def _room(self, layout: Layout, numel: int) -> int:
        """What the device leaves for the arena where the update is cut so."""
        peak = self.player.footprint.layout_peak(replace(layout, update_numel=numel))
        room = self.limits.device - peak
        return room // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def _ways(self, layout: Layout, room: int) -> Iterator[_Way]:
        footprint = self.player.footprint
        sending = [
            sizes.packed[Part.GRADIENTS]
            for chunk, sizes in zip(layout.chunks, footprint.sizes, strict=True)
            if chunk.homes.gradients is not Tier.DEVICE
        ]
        block = block_for(max(sending, default=0), self.player.facts)
        leaving = len(sending) + len(self.player.facts.departures)
        counts = range(1, min(BLOCKS, leaving) + 1) if block else (0,)
        gathered = [chunk for chunk in layout.chunks if chunk.homes.parameters is not Tier.DEVICE]
        known: set[tuple[tuple[Stay, ...], int]] = set()
        for count in counts:
            for area in self._areas(gathered, room - count * block):
                stays = self._stays(gathered, area)
                if stays is None or (stays, count) in known:
                    continue
                known.add((stays, count))
                way = _Way(0.0, stays, max(extent(stays), self._core(gathered)), count, block)
                if way.arena_bytes > room:
                    continue
                made = replace(
                    layout,
                    gather_bytes=way.gather_bytes,
                    gradient_blocks=count,
                    gradient_block_bytes=block,
                )
                yield replace(way, graph_s=self.player.graph_s(made, stays))

    def _areas(self, gathered: Sequence[Chunk], room: int) -> list[int]:
        """Sizes of the gather area: all that there is, and those at which something new fits."""
        if room < 0:
            return []
        sums = {0}
        for chunk in gathered if len(gathered) <= AREAS else ():
            sums |= {old + chunk.nbytes for old in sums}
        return sorted({size for size in sums if size <= room} | {room}, reverse=True)

    def _core(self, gathered: Sequence[Chunk]) -> int:
        """The least gather area for other graphs, which may read two idle chunks at once."""
        read = {use.chunk for use in uses(self.player.facts, gathered)}
        return idle_bytes(chunk.nbytes for chunk in gathered if chunk.id not in read)

    def _stays(self, gathered: Sequence[Chunk], area: int) -> tuple[Stay, ...] | None:
        key = (frozenset(chunk.id for chunk in gathered), area)
        if key not in self._placed:
            needed = (*uses(self.player.facts, gathered), *returns(self.player.facts))
            self._placed[key] = place(needed, area, first_call(self.player.facts))
        return self._placed[key]

    def _streamed(self, layout: Layout) -> list[Chunk]:
        return [
            chunk
            for chunk in layout.chunks
            if chunk.trainable and chunk.update is Tier.DEVICE and not chunk.homes.on_device
        ]

    def _cuts(self, layout: Layout) -> list[int]:
        """Elements of a unit that cut some chunk into other units, evenly chosen among all."""
        found = {1}
        for chunk in (c for c in layout.chunks if c.trainable):
            total = 0
            for piece in chunk.slices:
                total += piece.span
                found |= {piece.span, total}
        ordered = sorted(found)
        most = CUTS if len(layout.chunks) <= AREAS else FEW_CUTS
        if len(ordered) <= most:
            return ordered
        return [ordered[index] for index in np.linspace(0, len(ordered) - 1, most).astype(int)]

    def _arenas(self, layout: Layout, needed: int, numel: int, room: int) -> list[int]:
        """Arena sizes: all that there is, the least, and those of a few whole units."""
        units = [
            away(chunk.homes, self.player.footprint.sizes[chunk.id].of(width))
            for chunk in self._streamed(layout)
            for width, _ in self.player.footprint.sizes[chunk.id].units(numel)
        ]
        largest = max(units, default=0)
        least = max(needed, largest)
        if least > room:
            return []
        found = {least, room} | {ring * largest for ring in RINGS}
        if len(units) <= AREAS:
            ends = np.cumsum([0, *units])
            found |= {int(b - a) for n, a in enumerate(ends) for b in ends[n + 1 :]}
        return sorted(size for size in found if least <= size <= room)


# What homes do to the sums that a bound is made of, by column.
_DEVICE, _HOST, _DISK, _READS, _WRITES, _LOADS, _STORES = range(7)
_DISK_READS, _DISK_WRITES, _DISK_LOADS, _DISK_STORES, _UPDATE_S, _COPY_S, _AWAY = range(7, 14)
_COLUMNS = 14


@dataclass(frozen=True, kw_only=True)
class Table:
    """What every option of every chunk of a packing weighs."""

    machine: Machine
    limits: Limits
    player: Player
    drafter: Drafter

    @cached_property
    def options(self) -> list[list[Option]]:
        """Every home of a chunk's parts, and every place of its update."""
        return [self._options(chunk) for chunk in self.player.footprint.chunks]

    @property
    def count(self) -> int:
        return prod(len(options) for options in self.options)

    def _options(self, chunk: Chunk) -> list[Option]:
        tiers = (Tier.DEVICE, *away_tiers(self.machine, self.limits))
        choices = []
        sizes = self.player.footprint.sizes[chunk.id]
        for part in Part:
            # States of no bytes count: with anything away, updates run unit by unit.
            movable = sizes.ordinary[part] or (part is Part.STATES and chunk.trainable)
            movable = movable and not self.drafter.stays(chunk, part)
            pin = self.drafter.pin(chunk) if part is Part.PARAMETERS else None
            choices.append((pin,) if pin is not None else tiers if movable else (Tier.DEVICE,))
        found = [
            Option(Homes(parameters=p, gradients=g, states=s)) for p, g, s in product(*choices)
        ]
        able = self.machine.updates_on_host and chunk.trainable and Tier.HOST in tiers
        parts = [part for part in Part if sizes.ordinary[part]]
        places = dict(zip(Part, choices, strict=True))
        if able and all(Tier.HOST in places[part] for part in parts):
            found.append(Option(ON_HOST, Tier.HOST))
        return found

    @cached_property
    def _rows(self) -> list[NDArray[np.float64]]:
        chunks = self.player.footprint.chunks
        return [
            np.array([self._row(chunk, option) for option in options])
            for chunk, options in zip(chunks, self.options, strict=True)
        ]

    def _row(self, chunk: Chunk, option: Option) -> list[float]:
        row = [0.0] * _COLUMNS
        footprint = self.player.footprint
        sizes = footprint.sizes[chunk.id]
        trains = chunk.id in footprint.reduces
        streams = trains and option.update is Tier.DEVICE
        batches = self.player.micro_batches
        for part in Part:
            tier = home(option.homes, part)
            if tier is Tier.DEVICE:
                row[_DEVICE] += sizes.ordinary[part]
                continue
            size = sizes.packed[part]
            row[_AWAY] = 1
            row[_HOST if tier is Tier.HOST else _DISK] += size
            reads = size if part is Part.PARAMETERS and chunk.id in self._read else 0
            writes = batches * size if part is Part.GRADIENTS and trains else 0
            loads = size if streams else 0
            stores = loads if part is not Part.GRADIENTS else 0
            for column, nbytes in zip(
                (_READS, _WRITES, _LOADS, _STORES), (reads, writes, loads, stores), strict=True
            ):
                row[column] += nbytes
                if tier is Tier.DISK and not self.machine.unified:
                    row[column + _DISK_READS - _READS] += nbytes
        if trains:
            rate = self.machine.update_bytes_per_s(option.update)
            row[_UPDATE_S] = sizes.elements * sizes.optimizer.read_bytes / rate
            if option.homes.gradients is not Tier.DEVICE:
                copied = (2 + 3 * (batches - 1)) * chunk.nbytes
                row[_COPY_S] = copied / self.machine.stream_bytes_per_s
        return row

    @cached_property
    def _read(self) -> set[int]:
        return {use.chunk for use in uses(self.player.facts, self.player.footprint.chunks)}

    def all(self) -> NDArray[np.int64]:
        """Every combination of options, a row each."""
        grids = np.indices([len(options) for options in self.options])
        rows: NDArray[np.int64] = grids.reshape(len(self.options), -1).T
        return rows

    def neighbours(self, options: Sequence[Option], changed: int) -> NDArray[np.int64]:
        """Combinations that differ from this one in `changed` chunks, or fewer."""
        at = [
            known.index(one) if one in known else 0
            for known, one in zip(self.options, options, strict=True)
        ]
        found = [at]
        for chunks in combinations(range(len(at)), min(changed, len(at))):
            for choice in product(*(range(len(self.options[chunk])) for chunk in chunks)):
                row = list(at)
                for chunk, option in zip(chunks, choice, strict=True):
                    row[chunk] = option
                found.append(row)
        return np.unique(np.array(found, dtype=np.int64), axis=0)

    def neighbour_count(self, changed: int) -> int:
        """How many combinations `neighbours` gives at most."""
        sizes = [len(options) for options in self.options]
        return sum(prod(chosen) for chosen in combinations(sizes, changed))

    def chosen(self, row: Sequence[int]) -> list[Option]:
        return [options[index] for options, index in zip(self.options, row, strict=True)]

    def bounds_s(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """A time that no plan with the homes of a row can beat; infinite where they do not fit,
        or where everything stays."""
        sums = np.zeros((len(rows), _COLUMNS))
        for column, known in enumerate(self._rows):
            sums += known[rows[:, column]]
        machine, limits, footprint = self.machine, self.limits, self.player.footprint
        graph_s = self.player.micro_batches * self.player.starts[-1] + sums[:, _COPY_S]
        update_s = sums[:, _UPDATE_S].copy()
        far = Tier.DISK if machine.unified else Tier.HOST
        pairs = [(Tier.DEVICE, far, 0)]
        if not machine.unified and limits.disk:
            pairs.append((Tier.HOST, Tier.DISK, _DISK_READS - _READS))
        for near, away_from, shift in pairs:
            for seconds, into, out in ((graph_s, _READS, _WRITES), (update_s, _LOADS, _STORES)):
                moved = sums[:, [into + shift, out + shift]]
                needed = _pairs_s(machine, near, away_from, moved)
                np.maximum(seconds, needed, out=seconds)
        device = footprint.facts.buffer_bytes + sums[:, _DEVICE] + footprint.live_peak
        fits = (device <= limits.device) & (sums[:, _HOST] <= limits.host)
        fits &= (sums[:, _DISK] <= limits.disk) & (sums[:, _AWAY] > 0)
        bounds: NDArray[np.float64] = np.where(fits, (graph_s + update_s) * (1 - SLACK), np.inf)
        return bounds


def _pairs_s(
    machine: Machine, near: Tier, far: Tier, moved: NDArray[np.float64]
) -> NDArray[np.float64]:
    """`pair_s` of each row of (reads, writes): it is linear along any ratio of the two."""
    distinct, inverse = np.unique(moved, axis=0, return_inverse=True)
    seconds = [pair_s(machine, near, far, int(reads), int(writes)) for reads, writes in distinct]
    return np.array(seconds)[inverse.reshape(-1)]
