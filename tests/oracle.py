"""The best plan of a small step, by exhaustion: what the search is held to.

    minimise    step_s                                        forecast.Player.play
    over        every packing that the search tries           pack.chunk_sizes, pack.pack
                every home of every part of every chunk       _options
                where every chunk's optimizer runs            _options
                gather areas and their stays                  _Homes.graph_ways, place.place
                1 to 3 gradient blocks                        _Homes.graph_ways
                the cuts of the update into units             _Homes.update_ways
                ring sizes                                    _Homes.arenas
    subject to  the device's, the host's and the disk's limits

Homes are visited in the order of a bound of their own (`_Table.bounds_s`): no plan with these
homes can be faster than its computation, or than the bytes that must cross each pair of links.
When the bound reaches the best step found, nothing better is left.

Gathers happen in the graph and the ring in the update, and the forecast plays the update after
the graph, so each part is played alone and the best pair is taken. Both this and the bound are
checked on every pair that is: the oracle fails if the forecast stops being so.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray
from random_steps import Instance, instance

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ALIGNMENT_BYTES, Chunk, Homes, Layout, Limits
from elixir_fx.planner import search
from elixir_fx.planner.draft import STAGING_BLOCKS
from elixir_fx.planner.footprint import Footprint, Part, away
from elixir_fx.planner.forecast import Player
from elixir_fx.planner.pack import away_tiers, chunk_sizes, pack
from elixir_fx.planner.place import Stay, Use, extent, first_call, place, uses

MOST_BLOCKS = 3
HUGE = 1 << 60  # bytes or elements that nothing reaches
TOLERANCE = 1e-9  # relative: less is rounding


class OracleError(AssertionError):
    """The forecast is not what the oracle's short cuts take it for."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The least step time, the layout that has it, and how many steps were played for it."""

    step_s: float
    layout: Layout
    stays: tuple[Stay, ...]
    played: int


@dataclass(frozen=True, slots=True)
class _Option:
    """Homes of one chunk, and where its optimizer runs."""

    homes: Homes
    update: Tier


def exact(problem: Instance) -> Best | None:
    """The best plan of a problem; None if nothing fits."""
    return _Oracle(facts=problem.facts, machine=problem.machine, limits=problem.limits).best()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The search's step beside the best one, in seconds; infinite where it found no plan."""

    title: str
    best_s: float
    search_s: float
    played: int

    @property
    def ratio(self) -> float:
        return self.search_s / self.best_s


def compare(seeds: Iterable[int]) -> Iterator[Comparison]:
    """The search against the best plan of the problems with these numbers that have one."""
    for problem in map(instance, seeds):
        best = exact(problem)
        try:
            search_s = search(problem.facts, problem.machine, problem.limits).forecast.step_s
        except PlanError:
            search_s = float("inf")
        if best is None:
            if search_s < float("inf"):
                raise OracleError(f"the search has a plan for {problem.title}, and the oracle none")
            continue
        yield Comparison(
            title=problem.title, best_s=best.step_s, search_s=search_s, played=best.played
        )


def every_step_s(problem: Instance) -> Iterator[float]:
    """The time of every plan of a problem, each played whole and none skipped: very slow."""
    oracle = _Oracle(facts=problem.facts, machine=problem.machine, limits=problem.limits)
    for table in oracle.tables():
        oracle.keep_all(table)
        if oracle.found is not None:
            yield oracle.found.step_s
        for options in table.homes[1:]:
            yield from _Homes(oracle, table, options).every_step_s()


@dataclass(kw_only=True)
class _Oracle:
    facts: Facts
    machine: Machine
    limits: Limits
    found: Best | None = None
    played: int = 0

    def best(self) -> Best | None:
        tables = self.tables()
        for table in tables:
            self.keep_all(table)
        candidates = [
            (bound, number, row)
            for number, table in enumerate(tables)
            for row, bound in enumerate(table.bounds_s.tolist())
            if bound < float("inf")
        ]
        for bound, number, row in sorted(candidates):
            if self.found is not None and bound >= self.found.step_s:
                break
            _Homes(self, tables[number], tables[number].homes[row]).visit(bound)
        return None if self.found is None else replace(self.found, played=self.played)

    def tables(self) -> list["_Table"]:
        """One for every packing."""
        sizes = chunk_sizes(self.facts)
        packings = dict.fromkeys(pack(self.facts, size, {}) for size in sizes)
        return [_Table(self, chunks) for chunks in packings]

    def keep_all(self, table: "_Table") -> None:
        """Consider the layout that moves nothing, if it fits."""
        if table.footprint.kept_peak <= self.limits.device:
            self.consider(table, _layout(table.chunks), (), None)

    def consider(
        self, table: "_Table", layout: Layout, stays: tuple[Stay, ...], expected_s: float | None
    ) -> None:
        """Play a whole step, and keep it if it is the best so far."""
        step_s = table.player.play(layout, stays).step_s
        self.played += 1
        if expected_s is not None and abs(step_s - expected_s) > TOLERANCE * step_s:
            raise OracleError(f"graph and update took {expected_s} s apart, {step_s} s together")
        if self.found is None or step_s < self.found.step_s:
            self.found = Best(step_s=step_s, layout=layout, stays=stays, played=self.played)


def _layout(chunks: tuple[Chunk, ...], **bytes_of: int) -> Layout:
    nothing = dict.fromkeys(
        (
            "gather_bytes",
            "gradient_blocks",
            "gradient_block_bytes",
            "update_numel",
            "arena_bytes",
            "host_bytes",
            "disk_bytes",
            "staging_bytes",
        ),
        0,
    )
    return Layout(chunks=chunks, **{**nothing, **bytes_of})


def _options(oracle: _Oracle, chunk: Chunk) -> list[_Option]:
    """Every home of a chunk's parts, and every place of its update."""
    places = (Tier.DEVICE, *away_tiers(oracle.machine, oracle.limits))
    if not chunk.trainable:
        return [_Option(Homes(parameters=tier), Tier.DEVICE) for tier in places]
    found = [
        _Option(Homes(parameters=p, gradients=g, states=s), Tier.DEVICE)
        for p, g, s in product(places, repeat=3)
    ]
    host = Homes(parameters=Tier.HOST, gradients=Tier.HOST, states=Tier.HOST)
    if Tier.HOST in places and oracle.machine.host_stream_bytes_per_s > 0:
        found.append(_Option(host, Tier.HOST))
    return found


# What homes do to the sums that a bound is made of, by column.
_DEVICE, _HOST, _DISK, _READ, _WRITE, _DISK_READ, _DISK_WRITE = range(7)
_LOAD, _STORE, _DISK_LOAD, _DISK_STORE, _UPDATE_S, _COPY_S = range(7, 13)
_COLUMNS = 13


@dataclass(eq=False)
class _Table:
    """All homes of one packing with their bounds."""

    oracle: _Oracle
    chunks: tuple[Chunk, ...]
    placed: dict[tuple[frozenset[int], int], tuple[Stay, ...] | None] = field(default_factory=dict)

    @cached_property
    def footprint(self) -> Footprint:
        return Footprint(self.oracle.facts, self.chunks)

    @cached_property
    def player(self) -> Player:
        return Player.of(self.oracle.facts, self.oracle.machine, self.footprint)

    @cached_property
    def options(self) -> list[list[_Option]]:
        return [_options(self.oracle, chunk) for chunk in self.chunks]

    @cached_property
    def homes(self) -> list[tuple[_Option, ...]]:
        return list(product(*self.options))

    @cached_property
    def bounds_s(self) -> NDArray[np.float64]:
        """A time that no plan with these homes can beat, by row of `homes`; infinite where
        their bytes alone do not fit, or where they keep everything."""
        sums = np.zeros((1, _COLUMNS))
        for chunk, options in zip(self.chunks, self.options, strict=True):
            rows = np.array([self._row(chunk, option) for option in options])
            sums = (sums[:, None, :] + rows[None, :, :]).reshape(-1, _COLUMNS)
        machine, limits = self.oracle.machine, self.oracle.limits
        pairs = [(Tier.DEVICE, Tier.DISK if machine.unified else Tier.HOST, False)]
        if not machine.unified and limits.disk:
            pairs.append((Tier.HOST, Tier.DISK, True))
        graph_s = self.oracle.facts.compute_s + sums[:, _COPY_S]
        update_s = sums[:, _UPDATE_S]
        for near, far, disk in pairs:
            reads, writes = (_DISK_READ, _DISK_WRITE) if disk else (_READ, _WRITE)
            loads, stores = (_DISK_LOAD, _DISK_STORE) if disk else (_LOAD, _STORE)
            graph_s = np.maximum(
                graph_s, _pairs_s(machine, near, far, sums[:, reads], sums[:, writes])
            )
            update_s = np.maximum(
                update_s, _pairs_s(machine, near, far, sums[:, loads], sums[:, stores])
            )
        device = self.oracle.facts.buffer_bytes + sums[:, _DEVICE] + self.footprint.live_peak
        fits = (
            (device <= limits.device)
            & (sums[:, _HOST] <= limits.host)
            & (sums[:, _DISK] <= limits.disk)
        )
        fits[0] = False  # everything on the device is another layout, without reduces
        bounds: NDArray[np.float64] = np.where(fits, (graph_s + update_s) * (1 - TOLERANCE), np.inf)
        return bounds

    def _row(self, chunk: Chunk, option: _Option) -> list[float]:
        """The sums' share of one chunk with these homes."""
        row = [0.0] * _COLUMNS
        sizes = self.footprint.sizes[chunk.id]
        homes = (option.homes.parameters, option.homes.gradients, option.homes.states)
        trains = chunk.id in self.footprint.reduces
        read = any(use.chunk == chunk.id for use in self.all_uses)
        on_device = trains and option.update is Tier.DEVICE
        for part, home in zip(Part, homes, strict=True):
            packed = sizes.packed[part]
            if home is Tier.DEVICE:
                row[_DEVICE] += sizes.ordinary[part]
                continue
            row[_HOST if home is Tier.HOST else _DISK] += packed
            moving = sum(sizes.of(width)[part] for width, _ in sizes.units(chunk.numel))
            for into, pair in self._hops(home):
                reads, writes, loads, stores = pair
                back = self._latency_bytes(into[::-1])
                if part is Part.PARAMETERS and read:
                    row[reads] += chunk.share_bytes + self._latency_bytes(into)
                if part is Part.GRADIENTS and trains:
                    row[writes] += chunk.share_bytes + back
                if on_device and moving:
                    row[loads] += moving + self._latency_bytes(into)
                if on_device and moving and part is not Part.GRADIENTS:
                    row[stores] += moving + back
        machine = self.oracle.machine
        if trains:
            rate = machine.update_bytes_per_s(option.update)
            row[_UPDATE_S] = sizes.elements * sizes.optimizer.read_bytes / rate
        if trains and option.homes.gradients is not Tier.DEVICE:
            row[_COPY_S] = 2 * chunk.nbytes / machine.stream_bytes_per_s
        return row

    def _hops(self, home: Tier) -> list[tuple[tuple[Tier, Tier], tuple[int, int, int, int]]]:
        """The links from a home to the device, with the columns of what crosses them."""
        near = (_READ, _WRITE, _LOAD, _STORE)
        if self.oracle.machine.unified or home is Tier.HOST:
            return [((home, Tier.DEVICE), near)]
        far = (_DISK_READ, _DISK_WRITE, _DISK_LOAD, _DISK_STORE)
        return [((Tier.HOST, Tier.DEVICE), near), ((Tier.DISK, Tier.HOST), far)]

    def _latency_bytes(self, ends: tuple[Tier, Tier]) -> float:
        """What a link would have moved while it only waits, once for every transfer."""
        link = self.oracle.machine.link(*ends)
        return link.latency_s * link.bytes_per_s

    @cached_property
    def all_uses(self) -> tuple[Use, ...]:
        return uses(self.oracle.facts, self.chunks)

    def stays(self, gathered: frozenset[int], capacity: int) -> tuple[Stay, ...] | None:
        if (gathered, capacity) not in self.placed:
            needed = [use for use in self.all_uses if use.chunk in gathered]
            self.placed[gathered, capacity] = place(needed, capacity, first_call(self.oracle.facts))
        return self.placed[gathered, capacity]


def _pairs_s(
    machine: Machine,
    near: Tier,
    far: Tier,
    reads: NDArray[np.float64],
    writes: NDArray[np.float64],
) -> NDArray[np.float64]:
    """bound.pair_s of many numbers of bytes at once."""
    into, back = machine.link(far, near), machine.link(near, far)
    rate_in, rate_out = into.bytes_per_s, back.bytes_per_s
    both_in = min(rate_in, into.shared_bytes_per_s * rate_in / (rate_in + rate_out))
    both_out = min(rate_out, back.shared_bytes_per_s * rate_out / (rate_in + rate_out))
    together = np.minimum(reads / both_in, writes / both_out)
    if both_in / rate_in + both_out / rate_out < 1:
        together = np.zeros_like(together)
    alone_in = np.maximum(0.0, reads - together * both_in) / rate_in
    alone_out = np.maximum(0.0, writes - together * both_out) / rate_out
    answer: NDArray[np.float64] = together + alone_in + alone_out
    return answer


@dataclass(frozen=True)
class _GraphWay:
    """How chunks are gathered and gradients leave."""

    stays: tuple[Stay, ...]
    gather_bytes: int
    blocks: int
    block_bytes: int

    @property
    def arena_bytes(self) -> int:
        return self.gather_bytes + self.blocks * self.block_bytes


@dataclass(eq=False)
class _Homes:
    """One choice of homes, completed in every way that matters."""

    oracle: _Oracle
    table: _Table
    options: tuple[_Option, ...]

    def visit(self, bound_s: float) -> None:
        if not self._tiers_fit():
            return
        cuts = [(numel, self._room(numel)) for numel in self._cuts()]
        room = max(room for _, room in cuts)
        ways = sorted(
            ((self._graph_s(way), n, way) for n, way in enumerate(self._graph_ways(room))),
            key=lambda timed: timed[:2],
        )
        known: dict[tuple[int, int], float] = {}
        best: tuple[float, _GraphWay, int, int] | None = None
        for graph_s, _, way in ways:
            for numel, allowed in cuts:
                for arena in self._arenas(way.arena_bytes, numel, allowed):
                    if (numel, arena) not in known:
                        known[numel, arena] = self._update_s(numel, arena)
                    step_s = graph_s + known[numel, arena]
                    if best is None or step_s < best[0]:
                        best = (step_s, way, numel, arena)
        if best is None:
            return
        step_s, way, numel, arena = best
        if step_s < bound_s:
            raise OracleError(f"homes that take {bound_s} s at least took {step_s} s")
        found = self.oracle.found
        if found is None or step_s < found.step_s:
            layout = self._made(way, numel, arena)
            assert self.table.footprint.layout_peak(layout) <= self.oracle.limits.device
            self.oracle.consider(self.table, layout, way.stays, step_s)

    def every_step_s(self) -> Iterator[float]:
        """The time of every plan with these homes, each played whole."""
        if not self._tiers_fit():
            return
        cuts = [(numel, self._room(numel)) for numel in self._cuts()]
        for way in self._graph_ways(max(room for _, room in cuts)):
            for numel, room in cuts:
                for arena in self._arenas(way.arena_bytes, numel, room):
                    yield self._play(way, numel, arena)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(
            replace(chunk, homes=option.homes, update=option.update)
            for chunk, option in zip(self.table.chunks, self.options, strict=True)
        )

    # Bytes.

    @cached_property
    def _elsewhere(self) -> dict[Tier, int]:
        held = {Tier.HOST: 0, Tier.DISK: 0}
        for chunk, sizes in zip(self.chunks, self.table.footprint.sizes, strict=True):
            homes = (chunk.homes.parameters, chunk.homes.gradients, chunk.homes.states)
            for part, tier in zip(Part, homes, strict=True):
                if tier is not Tier.DEVICE:
                    held[tier] += sizes.packed[part]
        return held

    @cached_property
    def _staging_bytes(self) -> int:
        if self.oracle.machine.unified or not self._elsewhere[Tier.DISK]:
            return 0
        block = max(
            sizes.packed[part]
            for chunk, sizes in zip(self.chunks, self.table.footprint.sizes, strict=True)
            for part, tier in zip(
                Part,
                (chunk.homes.parameters, chunk.homes.gradients, chunk.homes.states),
                strict=True,
            )
            if tier is not Tier.DEVICE
        )
        host = self.oracle.limits.host
        return min(STAGING_BLOCKS * block, max(host // 4, min(block, host)))

    def _tiers_fit(self) -> bool:
        return self._elsewhere[Tier.HOST] + self._staging_bytes <= self.oracle.limits.host

    def _room(self, numel: int) -> int:
        """What the device leaves for the arena with updates cut so."""
        layout = _layout(self.chunks, update_numel=numel)
        room = self.oracle.limits.device - self.table.footprint.layout_peak(layout)
        return room // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    # The graph.

    def _graph_ways(self, room: int) -> list[_GraphWay]:
        gathered = frozenset(
            use.chunk
            for use in self.table.all_uses
            if self.chunks[use.chunk].homes.parameters is not Tier.DEVICE
        )
        sending = [
            sizes.packed[Part.GRADIENTS]
            for chunk, sizes in zip(self.chunks, self.table.footprint.sizes, strict=True)
            if chunk.homes.gradients is not Tier.DEVICE
        ]
        block = max(sending, default=0)
        counts = range(1, min(MOST_BLOCKS, len(sending)) + 1) if block else (0,)
        ways: dict[_GraphWay, None] = {}
        for count in counts:
            left = room - count * block
            for capacity in self._capacities(gathered, left):
                stays = self.table.stays(gathered, capacity)
                if stays is not None:
                    ways[_GraphWay(stays, extent(stays), count, block)] = None
        return list(ways)

    def _capacities(self, gathered: frozenset[int], room: int) -> list[int]:
        """Sizes of the gather area at which something new may fit."""
        sums = {0}
        for chunk in gathered:
            sums |= {old + self.chunks[chunk].nbytes for old in sums}
        return sorted({size for size in sums if size <= room} | {room}) if room >= 0 else []

    def _graph_s(self, way: _GraphWay) -> float:
        """A step whose update has all the room it could use."""
        return self._play(way, HUGE, HUGE)

    # The update.

    @cached_property
    def _streamed(self) -> list[Chunk]:
        return [
            chunk
            for chunk in self.chunks
            if chunk.trainable and chunk.update is Tier.DEVICE and not chunk.homes.on_device
        ]

    def _cuts(self) -> list[int]:
        """Numbers of elements that cut some chunk into other units."""
        found = {1}
        for chunk in self.chunks:
            spans = [piece.span for piece in chunk.slices] if chunk.trainable else []
            for first in range(len(spans)):
                found |= {sum(spans[first:end]) for end in range(first + 1, len(spans) + 1)}
        cuts: dict[tuple, int] = {}
        for numel in sorted(found):
            cuts.setdefault(tuple(chunk.units(numel) for chunk in self.chunks), numel)
        return list(cuts.values())

    def _units(self, numel: int) -> Iterator[int]:
        """Bytes of each unit of the update in the ring."""
        for chunk in self._streamed:
            sizes = self.table.footprint.sizes[chunk.id]
            for width, _ in sizes.units(numel):
                yield away(chunk.homes, sizes.of(width))

    def _arenas(self, needed: int, numel: int, room: int) -> list[int]:
        """Arena sizes at which the ring turns elsewhere."""
        units = list(self._units(numel))
        least = max([needed, *units])
        if least > room:
            return []
        ends = [0]
        for unit in units:
            ends.append(ends[-1] + unit)
        sums = {last - first for n, first in enumerate(ends) for last in ends[n + 1 :]}
        return sorted({size for size in sums if least < size < room} | {least, room})

    def _update_s(self, numel: int, arena: int) -> float:
        """What an update of such units takes more than one with all the room it could use."""
        nothing_gathered = _GraphWay((), 0, MOST_BLOCKS, 0)
        return self._play(nothing_gathered, numel, arena) - self._roomy_s

    @cached_property
    def _roomy_s(self) -> float:
        return self._play(_GraphWay((), 0, MOST_BLOCKS, 0), HUGE, HUGE)

    def _play(self, way: _GraphWay, numel: int, arena: int) -> float:
        self.oracle.played += 1
        layout = self._made(way, numel, arena)
        return self.table.player.play(layout, way.stays).step_s

    def _made(self, way: _GraphWay, numel: int, arena: int) -> Layout:
        return _layout(
            self.chunks,
            gather_bytes=way.gather_bytes,
            gradient_blocks=way.blocks,
            gradient_block_bytes=way.block_bytes,
            update_numel=numel,
            arena_bytes=arena,
            host_bytes=self._elsewhere[Tier.HOST],
            disk_bytes=self._elsewhere[Tier.DISK],
            staging_bytes=self._staging_bytes,
        )
