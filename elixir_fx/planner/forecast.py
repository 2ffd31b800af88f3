"""Forecast: one steady step of a schedule, played against a machine.

The step is one micro-batch: forward, backward, update. The compute device walks through the
nodes; stretches of nodes without an event are one piece of work. Beside it the links move
what prefetches, gathers and reduces ask for (see wires). Where compute must wait, the
seconds are exposed and booked under their cause:

    a gather waits for its chunk                     "disk->device", "peers->device"
    a reduce waits for a block, or copies into it    "device->disk", "reduce"
    the update waits for a unit or for its writes    "update"
    compute is slower while a link streams           "contention"

The update is a ring over the arena: while unit k computes, k + 1 loads and k - 1 writes. A
unit's place is free again when its writes are done; a load whose place is not yet free is
waited for, and one whose place is at work follows it. A step ends with the last write.

Of several ranks one is played, and the others do the same: a rank brings its own share of a chunk
from its home and gets the rest from its peers; gradients go to the peers and its own share of
the sum home. Ranks of one host that share memory read each other's instead.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Chunk, Forecast, Layout, Limits
from elixir_fx.planner.bound import lower_bound_s
from elixir_fx.planner.footprint import Footprint, Part, home
from elixir_fx.planner.place import Stay
from elixir_fx.planner.wires import Route, Wires

ROUNDING_S = 1e-12  # less is the rounding of sums of seconds

# The order of events between the same two nodes: a gather is asked for before a prefetch.
_REDUCE, _GATHER, _PREFETCH = range(3)


@dataclass(kw_only=True)
class Timing:
    """What playing a step told."""

    step_s: float = 0.0
    compute_s: float = 0.0
    optimizer_s: float = 0.0
    exposed: dict[str, float] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)  # by chunk, for its gathers
    hits: int = 0
    misses: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    moved: dict[tuple[Tier, Tier], int] = field(default_factory=dict)

    def expose(self, cause: str, seconds: float) -> None:
        if seconds > ROUNDING_S:
            self.exposed[cause] = self.exposed.get(cause, 0.0) + seconds


def route(machine: Machine, source: Tier, target: Tier) -> Route:
    """The links from one tier to another: disk and accelerator meet in host memory."""
    if Tier.DISK in (source, target) and not machine.unified:
        return ((source, Tier.HOST), (Tier.HOST, target))
    return ((source, target),)


@dataclass(frozen=True, kw_only=True)
class Player:
    """Plays steps of one packing of one graph: what does not change with the homes."""

    facts: Facts
    machine: Machine
    footprint: Footprint
    starts: tuple[float, ...]  # starts[i]: compute seconds before node i

    @staticmethod
    def of(facts: Facts, machine: Machine, footprint: Footprint) -> "Player":
        starts = tuple(accumulate((cost.seconds for cost in facts.costs), initial=0.0))
        return Player(facts=facts, machine=machine, footprint=footprint, starts=starts)

    def play(self, layout: Layout, stays: Sequence[Stay]) -> Timing:
        """One step of `layout` with these stays in the gather area."""
        timing = Timing()
        wires = Wires(self.machine)
        writes = self._graph(layout, stays, wires, timing)
        timing.compute_s = self.facts.compute_s
        if self.facts.trains:
            begin = wires.now
            timing.compute_s += _Update(self, layout, wires, timing).run(writes.values())
            timing.optimizer_s = wires.now - begin
        timing.step_s = wires.now
        timing.expose("contention", timing.step_s - timing.compute_s - sum(timing.exposed.values()))
        timing.moved = {
            (link.source, link.target): wires.moved(link.source, link.target)
            for link in self.machine.links
        }
        return timing

    def _graph(
        self, layout: Layout, stays: Sequence[Stay], wires: Wires, timing: Timing
    ) -> dict[int, int]:
        """Forward and backward. Returns the event of each chunk's gradients reaching home."""
        arrived: dict[int, int] = {}
        writes: dict[int, int] = {}
        blocks: deque[int] = deque()
        done_s = 0.0
        for position, kind, index in self._events(layout, stays):
            wires.compute(self.starts[position] - done_s)
            done_s = self.starts[position]
            if kind == _REDUCE:
                self._reduce(layout, layout.chunks[index], wires, timing, blocks, writes)
                continue
            if kind == _PREFETCH:
                arrived[index] = self._fetch(layout.chunks[stays[index].chunk], wires)
                continue
            stay = stays[index]
            self._gather(layout.chunks[stay.chunk], stay, arrived.get(index), wires, timing)
        wires.compute(self.starts[-1] - done_s)
        return writes

    def _events(self, layout: Layout, stays: Sequence[Stay]) -> list[tuple[int, int, int]]:
        events = []
        for index, stay in enumerate(stays):
            if stay.start < stay.first and not stay.kept:
                events.append((stay.start, _PREFETCH, index))
            events.append((stay.first, _GATHER, index))
        if not layout.keeps_all:
            for chunk, position in self.footprint.reduces.items():
                events.append((position + 1, _REDUCE, chunk))
        return sorted(events)

    def _fetch(self, chunk: Chunk, wires: Wires) -> int:
        event = wires.event()
        path: Route = ()
        if chunk.homes.parameters is not Tier.DEVICE:
            path = route(self.machine, chunk.homes.parameters, Tier.DEVICE)
        sizes = [chunk.share_bytes] * len(path)
        if chunk.sharded:
            path = (*path, (Tier.PEERS, Tier.DEVICE))
            sizes.append(chunk.nbytes - chunk.share_bytes)
        wires.send(path, sizes, event=event)
        return event

    def _gather(
        self, chunk: Chunk, stay: Stay, arrived: int | None, wires: Wires, timing: Timing
    ) -> None:
        if stay.kept or stay.resident:
            timing.hits += 1
            return
        timing.gathered_bytes += chunk.nbytes
        waited = wires.wait(self._fetch(chunk, wires) if arrived is None else arrived)
        if waited > 0 or arrived is None:
            timing.misses += 1
        else:
            timing.hits += 1
        timing.waits[chunk.id] = timing.waits.get(chunk.id, 0.0) + waited
        far = Tier.PEERS if chunk.sharded else chunk.homes.parameters
        timing.expose(f"{far}->device", waited)

    def _reduce(
        self,
        layout: Layout,
        chunk: Chunk,
        wires: Wires,
        timing: Timing,
        blocks: deque[int],
        writes: dict[int, int],
    ) -> None:
        tier, group = chunk.homes.gradients, layout.group
        if (tier == Tier.DEVICE and group.ranks == 1) or not chunk.nbytes:
            return
        timing.reduced_bytes += chunk.nbytes
        if len(blocks) >= layout.gradient_blocks:
            far = Tier.PEERS if tier == Tier.DEVICE else tier
            timing.expose(f"device->{far}", wires.wait(blocks.popleft()))
        # Written to the block; then this rank's share of every rank's is read, and one written.
        copied = 2 * chunk.nbytes
        if group.ranks > 1:
            copied += (group.ranks + 1) * chunk.share_bytes
        copy_s = copied / self.machine.stream_bytes_per_s
        wires.compute(copy_s)
        timing.expose("reduce", copy_s)
        writes[chunk.id] = wires.event()
        path: Route = ()
        sizes: list[int] = []
        if group.ranks > 1:  # those that share memory still wait for each other
            path = ((Tier.DEVICE, Tier.PEERS),)
            sizes.append(0 if group.shared else chunk.nbytes - chunk.nbytes // group.ranks)
        if tier != Tier.DEVICE:
            home_route = route(self.machine, Tier.DEVICE, tier)
            path = (*path, *home_route)
            sizes += [chunk.share_bytes] * len(home_route)
        wires.send(path, sizes, event=writes[chunk.id])
        blocks.append(writes[chunk.id])


@dataclass
class _Unit:
    """One unit of the update: seconds of compute, and bytes by tier to load and to write.
    `low` and `high` are its place in the ring."""

    seconds: float
    loads: dict[Tier, list[int]]
    stores: dict[Tier, list[int]]
    nbytes: int
    low: int = 0
    high: int = 0
    loading: list[int] = field(default_factory=list)
    leaving: list[int] | None = None  # None while it is at work


class _Update:
    """The optimizer's phase of a step, in the runtime's order of waiting."""

    def __init__(self, player: Player, layout: Layout, wires: Wires, timing: Timing) -> None:
        self.player = player
        self.layout = layout
        self.wires = wires
        self.timing = timing
        self.head = 0
        self.taken: deque[_Unit] = deque()

    def run(self, writes: Iterable[int]) -> float:
        """Play it; `writes` are the events of the gradients reaching home. Returns the
        seconds of computation; time beyond that is exposed."""
        begin = self.wires.now
        compute_s = 0.0
        for event in writes:
            self.wires.wait(event)
        following = deque(unit for chunk in self.layout.chunks for unit in self._units(chunk))
        current: _Unit | None = None
        while following or current is not None:
            if current is None:
                current = following.popleft()
                self._fetch(current)
            ahead = bool(following) and self._fetch(following[0])
            self._step(current)
            compute_s += current.seconds
            current = following.popleft() if ahead else None
        while self.taken:
            self._wait(self.taken.popleft().leaving)
        self.timing.expose("update", self.wires.now - begin - compute_s)
        return compute_s

    def _fetch(self, unit: _Unit) -> bool:
        """Start to load a unit; False if one that is still at work is in the way."""
        low = self.head if self.head + unit.nbytes <= self.layout.arena_bytes else 0
        high = low + unit.nbytes
        in_the_way = [old for old in self.taken if old.low < high and low < old.high]
        if any(old.leaving is None for old in in_the_way):
            return False
        for old in in_the_way:
            self._wait(old.leaving)
            self.taken.remove(old)
        unit.low, unit.high, self.head = low, high, high
        self.taken.append(unit)
        for tier, parts in unit.loads.items():
            unit.loading.append(self._send(tier, Tier.DEVICE, parts))
        return True

    def _step(self, unit: _Unit) -> None:
        self._wait(unit.loading)
        self.wires.compute(unit.seconds)
        unit.leaving = [self._send(Tier.DEVICE, tier, parts) for tier, parts in unit.stores.items()]

    def _send(self, source: Tier, target: Tier, parts: list[int]) -> int:
        event = self.wires.event()
        path = route(self.player.machine, source, target)
        self.wires.send(path, sum(parts), parts=len(parts), event=event)
        return event

    def _wait(self, events: list[int] | None) -> None:
        for event in events or ():
            self.wires.wait(event)

    def _units(self, chunk: Chunk) -> list[_Unit]:
        footprint = self.player.footprint
        if chunk.id not in footprint.reduces:
            return []
        sizes = footprint.sizes[chunk.id]
        rate = sizes.optimizer.read_bytes / self.player.machine.stream_bytes_per_s
        if chunk.homes.on_device:
            return [_Unit(sizes.elements * rate, {}, {}, 0)]
        units = []
        for width, elements in sizes.units(self.layout.update_numel):
            loads: dict[Tier, list[int]] = {}
            stores: dict[Tier, list[int]] = {}
            nbytes = 0
            for part, size in sizes.of(width).items():
                tier = home(chunk.homes, part)
                if tier == Tier.DEVICE or not size:
                    continue
                nbytes += size
                loads.setdefault(tier, []).append(size)
                if part is not Part.GRADIENTS:
                    stores.setdefault(tier, []).append(size)
            units.append(_Unit(elements * rate, loads, stores, nbytes))
        return units


def forecast(player: Player, layout: Layout, stays: Sequence[Stay], limits: Limits) -> Forecast:
    """All that is expected of a steady step of `layout`, times and bytes."""
    timing = player.play(layout, stays)
    footprint = player.footprint
    homes = [chunk.homes for chunk in layout.chunks]
    constant = footprint.constant(homes) + layout.arena_bytes + layout.shared_bytes
    live = footprint.live_kept if layout.keeps_all else footprint.live
    update = footprint.layout_update_bytes(layout)
    peak_live = int(live.max(initial=0))
    position = int(live.argmax()) if len(live) else 0
    peak_node = "optimizer"
    largest: tuple[tuple[str, int], ...] = (("update of a unit", update),)
    if update <= peak_live and len(live):
        peak_node = player.facts.nodes[position]
        largest = footprint.largest_at(position)
    moved = timing.moved
    into = sum(n for (source, _), n in moved.items() if source == Tier.DISK)
    out = sum(n for (_, target), n in moved.items() if target == Tier.DISK)
    return Forecast(
        step_s=timing.step_s,
        compute_s=timing.compute_s,
        optimizer_s=timing.optimizer_s,
        exposed_s=timing.step_s - timing.compute_s,
        lower_bound_s=lower_bound_s(player.facts, player.machine, limits, layout.group),
        peak_device_bytes=constant + max(peak_live, update),
        peak_host_bytes=layout.host_bytes + layout.staging_bytes,
        disk_read_bytes=into,
        disk_write_bytes=out,
        host_to_device_bytes=moved.get((Tier.HOST, Tier.DEVICE), 0),
        device_to_host_bytes=moved.get((Tier.DEVICE, Tier.HOST), 0),
        gathered_bytes=timing.gathered_bytes,
        reduced_bytes=timing.reduced_bytes,
        prefetch_hits=timing.hits,
        prefetch_misses=timing.misses,
        activation_bytes=peak_live,
        peak_node=peak_node,
        exposed=tuple(sorted(timing.exposed.items())),
        largest=largest,
    )
