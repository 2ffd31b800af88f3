"""Update: the optimizer's phase of a step, played in the runtime's order of waiting.

Part of the forecast. Chunks are updated one after the other, in units:

    streamed    parts that are away pass through a ring over the arena: while unit k computes,
                k + 1 loads and k - 1 writes. A unit's place is free again when its writes are
                done; a load whose place is not yet free is waited for, and one whose place is
                at work follows it.
    on the host what is at home there is updated in place, at the host's own rate; the ring
                loads and writes meanwhile (ZeRO-Offload, arXiv 2101.06840, section 4)

The phase ends with the last write.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from elixir_fx.machine import Link, Machine, Tier
from elixir_fx.plan import Chunk, Layout, merged
from elixir_fx.planner.bound import pair_s
from elixir_fx.planner.footprint import Footprint, Part, home
from elixir_fx.planner.wires import Wires, route


@dataclass
class _Unit:
    """One unit of the update: seconds of compute, and bytes by tier to load and to write.
    `low` and `high` are its place in the ring; one of no bytes needs none."""

    seconds: float
    loads: dict[Tier, list[int]] = field(default_factory=dict)
    stores: dict[Tier, list[int]] = field(default_factory=dict)
    nbytes: int = 0
    low: int = 0
    high: int = 0
    loading: list[int] = field(default_factory=list)
    leaving: list[int] | None = None  # None while it is at work


def _alone_s(link: Link, parts: Mapping[Tier, Sequence[int]]) -> float:
    """Seconds that pieces take over a link, one after the other, with nothing beside them."""
    pieces = [nbytes for some in parts.values() for nbytes in some]
    return sum(pieces) / link.bytes_per_s + len(pieces) * link.latency_s


class Update:
    """The optimizer's phase of one step of a layout. Played once."""

    def __init__(self, machine: Machine, footprint: Footprint, layout: Layout, wires: Wires):
        self._machine = machine
        self._footprint = footprint
        self._layout = layout
        self._wires = wires
        self._head = 0
        self._taken: deque[_Unit] = deque()
        self.compute_s = 0.0

    def least_s(self) -> float:
        """Seconds that no ring can beat: of all compute; of all that passes the links of the
        device; of the streamed units in their order, where one of the three is busy all the time.
        """
        units = self._in_order()
        compute_s = sum(unit.seconds for unit in units)
        streamed = [unit for unit in units if unit.nbytes]
        if not streamed:
            return compute_s
        far = Tier.DISK if self._machine.unified else Tier.HOST
        into, back = self._machine.link(far, Tier.DEVICE), self._machine.link(Tier.DEVICE, far)
        loads_s = [_alone_s(into, unit.loads) for unit in streamed]
        stores_s = [_alone_s(back, unit.stores) for unit in streamed]
        works_s = [unit.seconds for unit in streamed]
        reads, writes = sum(loads_s) * into.bytes_per_s, sum(stores_s) * back.bytes_per_s
        return max(
            compute_s,
            pair_s(self._machine, Tier.DEVICE, far, int(reads), int(writes)),
            sum(loads_s) + works_s[-1] + stores_s[-1],
            loads_s[0] + sum(works_s) + stores_s[-1],
            loads_s[0] + works_s[0] + sum(stores_s),
        )

    def play(self, writes: Iterable[int]) -> None:
        """Pass the time that it takes; `writes` are the events of gradients reaching home."""
        for event in writes:
            self._wires.wait(event)
        following = self._in_order()
        streamed = deque(unit for unit in following if unit.nbytes)
        ahead: _Unit | None = None
        for current in following:
            if current is ahead:
                ahead = None
            elif current.nbytes:
                self._fetch(streamed.popleft())
            if ahead is None and streamed and self._fetch(streamed[0]):
                ahead = streamed.popleft()
            self._wait(current.loading)
            self._wires.compute(current.seconds)
            self.compute_s += current.seconds
            current.leaving = [
                self._send(Tier.DEVICE, tier, parts) for tier, parts in current.stores.items()
            ]
        while self._taken:
            self._wait(self._taken.popleft().leaving)

    def _fetch(self, unit: _Unit) -> bool:
        """Start to load a unit; False if one that is still at work is in the way."""
        low = self._head if self._head + unit.nbytes <= self._layout.arena_bytes else 0
        high = low + unit.nbytes
        in_the_way = [old for old in self._taken if old.low < high and low < old.high]
        if any(old.leaving is None for old in in_the_way):
            return False
        for old in in_the_way:
            self._wait(old.leaving)
            self._taken.remove(old)
        unit.low, unit.high, self._head = low, high, high
        self._taken.append(unit)
        for tier, parts in unit.loads.items():
            unit.loading.append(self._send(tier, Tier.DEVICE, parts))
        return True

    def _send(self, source: Tier, target: Tier, parts: list[int]) -> int:
        event = self._wires.event()
        path = route(self._machine, source, target)
        self._wires.send(path, sum(parts), parts=len(parts), event=event)
        return event

    def _wait(self, events: list[int] | None) -> None:
        for event in events or ():
            self._wires.wait(event)

    def _in_order(self) -> list[_Unit]:
        """All units: those of the device and those of the host in the order of their chunks, so
        mixed that both get on equally far."""
        by_place: dict[bool, list[_Unit]] = {True: [], False: []}
        for chunk in self._layout.chunks:
            by_place[chunk.update is Tier.HOST] += self._units(chunk)
        return merged(by_place[False], by_place[True])

    def _units(self, chunk: Chunk) -> list[_Unit]:
        if chunk.id not in self._footprint.reduces:
            return []
        sizes = self._footprint.sizes[chunk.id]
        rate = sizes.optimizer.read_bytes / self._machine.update_bytes_per_s(chunk.update)
        if chunk.update is Tier.HOST:
            units = sizes.units(self._layout.update_numel)
            return [_Unit(elements * rate) for _, elements in units]
        if chunk.homes.on_device:
            return [_Unit(sizes.elements * rate)]
        units = sizes.units(self._layout.update_numel)
        return [self._streamed(chunk, width, elements * rate) for width, elements in units]

    def _streamed(self, chunk: Chunk, width: int, seconds: float) -> _Unit:
        unit = _Unit(seconds)
        for part, size in self._footprint.sizes[chunk.id].of(width).items():
            tier = home(chunk.homes, part)
            if tier == Tier.DEVICE or not size:
                continue
            unit.nbytes += size
            unit.loads.setdefault(tier, []).append(size)
            if part is not Part.GRADIENTS:
                unit.stores.setdefault(tier, []).append(size)
        return unit
