"""Forecast: one steady step of a schedule, played against a machine.

A step is `micro_batches` times forward and backward, then the update. The compute device walks
through the nodes; stretches of nodes without an event are one piece of work. Beside it the
links move what prefetches, gathers and reduces ask for (see wires). Where compute must wait,
the seconds are exposed and booked under their cause:

    a gather waits for its chunk                     "disk->device", "peers->device"
    a reduce waits for a block, or copies into it    "device->disk", "reduce"
    an activation that leaves likewise               "device->disk", "offload"
    the update waits for a unit or for its writes    "update" (see there)
    compute is slower while a link streams           "contention"

From the second micro-batch on a chunk that the last backward left at its place is still there,
and gradients are added to those so far: what is away of them comes back into its block, asked
for one reduce ahead where there is a second block.

Of several ranks one is played, and the others do the same: a rank brings its own share of a chunk
from its home and gets the rest from its peers; gradients go to the peers and its own share of
the sum home. Ranks of one host that share memory read each other's instead.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import SAVED, Chunk, Forecast, Layout
from elixir_fx.planner.bound import Bound
from elixir_fx.planner.footprint import Footprint
from elixir_fx.planner.place import Stay, returning
from elixir_fx.planner.update import Update
from elixir_fx.planner.wires import Route, Wires, route

ROUNDING_S = 1e-12  # less is the rounding of sums of seconds

# The order of events between the same two nodes: what leaves makes room, and a gather is asked for
# before a prefetch.
_REDUCE, _LEAVE, _GATHER, _PREFETCH = range(4)


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


@dataclass(kw_only=True)
class _Pass:
    """One forward and backward on its way: transfers under way, by stay and by chunk."""

    index: int  # of the micro-batch
    arrived: dict[int, int] = field(default_factory=dict)  # events of stays' transfers
    fetched: dict[int, int] = field(default_factory=dict)  # events of old gradients, by chunk
    blocks: deque[int] = field(default_factory=deque)  # events of the last gradients sent home


@dataclass(frozen=True, kw_only=True)
class Player:
    """Plays steps of one packing of one graph: what does not change with the homes."""

    facts: Facts
    machine: Machine
    footprint: Footprint
    starts: tuple[float, ...]  # starts[i]: compute seconds before node i
    micro_batches: int = 1

    @staticmethod
    def of(
        facts: Facts, machine: Machine, footprint: Footprint, micro_batches: int = 1
    ) -> "Player":
        starts = tuple(accumulate((cost.seconds for cost in facts.costs), initial=0.0))
        return Player(
            facts=facts,
            machine=machine,
            footprint=footprint,
            starts=starts,
            micro_batches=micro_batches if facts.trains else 1,
        )

    def play(self, layout: Layout, stays: Sequence[Stay]) -> Timing:
        """One step of `layout` with these stays in the gather area."""
        return _Play(self, layout, stays).run()

    def graph_s(self, layout: Layout, stays: Sequence[Stay]) -> float:
        """Seconds of all micro-batches, until their gradients are home."""
        return _Play(self, layout, stays).graphs_s()

    def update_s(self, layout: Layout) -> float:
        """Seconds of the update alone."""
        wires = Wires(self.machine)
        Update(self.machine, self.footprint, layout, wires).play(())
        return wires.now

    def least_update_s(self, layout: Layout) -> float:
        """Seconds of the update alone in an arena of any size, at least."""
        return Update(self.machine, self.footprint, layout, Wires(self.machine)).least_s()


class _Play:
    """One step under way."""

    def __init__(self, player: Player, layout: Layout, stays: Sequence[Stay]) -> None:
        self.player = player
        self.machine = player.machine
        self.layout = layout
        self.stays = stays
        self.wires = Wires(player.machine)
        self.timing = Timing()
        self.writes: dict[int, int] = {}  # the event of each chunk's gradients reaching home

    def graphs_s(self) -> float:
        """Play forwards and backwards, until their gradients are home."""
        self._graphs()
        for event in self.writes.values():
            self.wires.wait(event)
        return self.wires.now

    def _graphs(self) -> None:
        events = self._events()
        there = returning(self.stays) if self.player.micro_batches > 1 else frozenset()
        for index in range(self.player.micro_batches):
            self._graph(events, _Pass(index=index), there if index else frozenset())

    def run(self) -> Timing:
        facts, timing, wires = self.player.facts, self.timing, self.wires
        self._graphs()
        timing.compute_s = self.player.starts[-1] * self.player.micro_batches
        if facts.trains:
            begin = wires.now
            update = Update(self.machine, self.player.footprint, self.layout, wires)
            update.play(self.writes.values())
            timing.compute_s += update.compute_s
            timing.optimizer_s = wires.now - begin
            timing.expose("update", timing.optimizer_s - update.compute_s)
        timing.step_s = wires.now
        timing.expose("contention", timing.step_s - timing.compute_s - sum(timing.exposed.values()))
        timing.moved = {
            (link.source, link.target): wires.moved(link.source, link.target)
            for link in self.machine.links
        }
        return timing

    def _events(self) -> list[tuple[int, int, int]]:
        events = []
        for index, stay in enumerate(self.stays):
            if stay.start < stay.first and not stay.kept:
                events.append((stay.start, _PREFETCH, index))
            events.append((stay.first, _GATHER, index))
        for chunk, position in self.player.footprint.reduces.items():
            events.append((position + 1, _REDUCE, chunk))
        for index, away in enumerate(self.player.facts.departures):
            events.append((away.leaves + 1, _LEAVE, index))
        return sorted(events)

    def _graph(
        self, events: Sequence[tuple[int, int, int]], under: _Pass, there: frozenset[int]
    ) -> None:
        """A forward and its backward; stays in `there` find their chunk at its place."""
        starts, wires = self.player.starts, self.wires
        reduces = [index for _, kind, index in events if kind == _REDUCE]
        following = dict(pairwise(reduces))
        done_s = 0.0
        for position, kind, index in events:
            wires.compute(starts[position] - done_s)
            done_s = starts[position]
            if kind == _REDUCE:
                self._reduce(self.layout.chunks[index], following.get(index), under)
                continue
            if kind == _LEAVE:
                self._leave(self.player.facts.departures[index].nbytes, under)
                continue
            stay = self.stays[index]
            if index in there:
                self.timing.hits += kind == _GATHER
            elif kind == _PREFETCH:
                under.arrived[index] = self._fetch(stay)
            else:
                self._gather(stay, under.arrived.get(index))
        wires.compute(starts[-1] - done_s)

    def _leave(self, nbytes: int, under: _Pass) -> None:
        """An activation leaves by the blocks of the gradients, in pieces of one."""
        tier, block = self.layout.saved_tier, self.layout.gradient_block_bytes
        path = route(self.machine, Tier.DEVICE, tier)
        for start in range(0, nbytes, block):
            piece = min(block, nbytes - start)
            self._free_block(tier, under)
            self._copy(2 * piece, "offload")
            event = self.wires.event()
            self.wires.send(path, [piece] * len(path), event=event)
            under.blocks.append(event)

    def _fetch(self, stay: Stay) -> int:
        event = self.wires.event()
        path: Route = ()
        if stay.chunk >= SAVED:
            path = route(self.machine, self.layout.saved_tier, Tier.DEVICE)
            self.wires.send(path, [stay.nbytes] * len(path), event=event)
            return event
        chunk = self.layout.chunks[stay.chunk]
        if chunk.homes.parameters is not Tier.DEVICE:
            path = route(self.machine, chunk.homes.parameters, Tier.DEVICE)
        sizes = [chunk.share_bytes] * len(path)
        if chunk.sharded:
            path = (*path, (Tier.PEERS, Tier.DEVICE))
            sizes.append(chunk.nbytes - chunk.share_bytes)
        self.wires.send(path, sizes, event=event)
        return event

    def _gather(self, stay: Stay, arrived: int | None) -> None:
        timing = self.timing
        if stay.kept or stay.resident:
            timing.hits += 1
            return
        waited = self.wires.wait(self._fetch(stay) if arrived is None else arrived)
        if waited > 0 or arrived is None:
            timing.misses += 1
        else:
            timing.hits += 1
        if stay.chunk >= SAVED:
            timing.expose(f"{self.layout.saved_tier}->device", waited)
            return
        chunk = self.layout.chunks[stay.chunk]
        timing.gathered_bytes += chunk.nbytes
        timing.waits[chunk.id] = timing.waits.get(chunk.id, 0.0) + waited
        far = Tier.PEERS if chunk.sharded else chunk.homes.parameters
        timing.expose(f"{far}->device", waited)

    def _reduce(self, chunk: Chunk, following: int | None, under: _Pass) -> None:
        if not chunk.nbytes:
            return
        if chunk.homes.gradients is Tier.DEVICE and self.layout.group.ranks == 1:
            if under.index:  # added to what is there: read both, write one
                self._copy(3 * chunk.nbytes)
            return
        self._through_block(chunk, following, under)

    def _copy(self, nbytes: int, cause: str = "reduce") -> None:
        """Pass the time in which the device reads and writes so much to send it away."""
        copy_s = nbytes / self.machine.stream_bytes_per_s
        self.wires.compute(copy_s)
        self.timing.expose(cause, copy_s)

    def _through_block(self, chunk: Chunk, following: int | None, under: _Pass) -> None:
        """Gradients of a chunk, or of all ranks' chunk, on their way home."""
        tier, group = chunk.homes.gradients, self.layout.group
        self.timing.reduced_bytes += chunk.nbytes
        far = Tier.PEERS if tier is Tier.DEVICE else tier
        if under.index and tier is not Tier.DEVICE:
            arrived = under.fetched.pop(chunk.id, None)
            if arrived is None:
                self._free_block(far, under)
                arrived = self._fetch_old(chunk)
            if following is not None and self.layout.gradient_blocks > 1:
                self._free_block(far, under)
                under.fetched[following] = self._fetch_old(self.layout.chunks[following])
            self.timing.expose(f"{far}->device", self.wires.wait(arrived))
        else:
            self._free_block(far, under)
        # Written to the block, or read there, added to and written; then this rank's share of
        # every rank's is read, and one written.
        copied = (3 if under.index else 2) * chunk.nbytes
        if group.ranks > 1:
            copied += (group.ranks + 1) * chunk.share_bytes
        self._copy(copied)
        event = self.wires.event()
        path: Route = ()
        sizes: list[int] = []
        if group.ranks > 1:  # those that share memory still wait for each other
            others = 0 if group.shared else chunk.nbytes - chunk.nbytes // group.ranks
            path = ((Tier.DEVICE, Tier.PEERS),)
            sizes.append(others)
            if not chunk.sharded and not group.shared:  # every rank gets the whole sum
                path = (*path, (Tier.PEERS, Tier.DEVICE))
                sizes.append(others)
        if tier != Tier.DEVICE:
            home_route = route(self.machine, Tier.DEVICE, tier)
            path = (*path, *home_route)
            sizes += [chunk.share_bytes] * len(home_route)
        self.wires.send(path, sizes, event=event)
        self.writes[chunk.id] = event
        under.blocks.append(event)

    def _free_block(self, far: Tier, under: _Pass) -> None:
        """Wait for a block whose gradients have gone home."""
        if len(under.blocks) + len(under.fetched) >= self.layout.gradient_blocks and under.blocks:
            self.timing.expose(f"device->{far}", self.wires.wait(under.blocks.popleft()))

    def _fetch_old(self, chunk: Chunk) -> int:
        """Bring the gradient so far into a block, after it has reached home."""
        tier = chunk.homes.gradients
        event = self.wires.event()
        if tier is Tier.DEVICE:
            self.wires.send((), 0, event=event)
            return event
        path = route(self.machine, tier, Tier.DEVICE)
        self.wires.send(path, chunk.share_bytes, event=event)
        return event


def forecast(player: Player, layout: Layout, stays: Sequence[Stay], bound: Bound) -> Forecast:
    """All that is expected of a steady step of `layout`, times and bytes; `bound` is that of the
    step under the limits that the layout keeps to."""
    timing = player.play(layout, stays)
    footprint = player.footprint
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
        lower_bound_s=bound.step_s(timing.step_s),
        peak_device_bytes=footprint.layout_peak(layout),
        peak_host_bytes=layout.host_bytes
        + layout.staging_bytes
        + footprint.layout_host_update_bytes(layout),
        disk_read_bytes=into,
        disk_write_bytes=out,
        host_to_device_bytes=moved.get((Tier.HOST, Tier.DEVICE), 0),
        device_to_host_bytes=moved.get((Tier.DEVICE, Tier.HOST), 0),
        gathered_bytes=timing.gathered_bytes,
        reduced_bytes=timing.reduced_bytes,
        prefetch_hits=timing.hits,
        prefetch_misses=timing.misses,
        micro_batches=player.micro_batches,
        activation_bytes=peak_live,
        peak_node=peak_node,
        exposed=tuple(sorted(timing.exposed.items())),
        largest=largest,
    )
