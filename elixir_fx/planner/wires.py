"""Wires: the links of a machine, played in time beside the computation.

Part of the forecast. Every direction of a link is a first-in-first-out stream. While both
directions of a pair are busy each gets

    min(rate, shared * rate / (rate + rate of the other))

with shared = `Link.shared_bytes_per_s`; a busy stream takes `Link.compute_share` of the
compute device's speed. A transfer over several links (disk, host, device) is on one after
the other. Latency counts as bytes that the link would have moved meanwhile.
"""

from collections import deque
from collections.abc import Sequence

from elixir_fx.machine import Link, Machine, Tier

Route = tuple[tuple[Tier, Tier], ...]
NEVER = float("inf")
SLOWEST = 0.05  # of its speed, that the compute device keeps whatever streams


def route(machine: Machine, source: Tier, target: Tier) -> Route:
    """The links from one tier to another: disk and accelerator meet in host memory."""
    if Tier.DISK in (source, target) and not machine.unified:
        return ((source, Tier.HOST), (Tier.HOST, target))
    return ((source, target),)


def together(link: Link, back: Link) -> float:
    """Bytes per second of a link while the other direction, `back`, is busy as well."""
    rate = link.bytes_per_s
    return min(rate, link.shared_bytes_per_s * (rate / (rate + back.bytes_per_s)))


class _Transfer:
    __slots__ = ("event", "left", "parts", "route", "sizes", "stage")

    def __init__(
        self, route: tuple["_Stream", ...], sizes: Sequence[int], parts: int, event: int
    ) -> None:
        self.route = route
        self.sizes = sizes
        self.parts = parts
        self.event = event
        self.stage = 0
        self.left = 0.0


class _Stream:
    __slots__ = ("alone", "both", "latency_s", "moved", "partner", "queue", "share")

    def __init__(self, alone: float, both: float, latency_s: float, share: float) -> None:
        self.alone = alone
        self.both = both
        self.latency_s = latency_s
        self.share = share
        self.moved = 0
        self.queue: deque[_Transfer] = deque()
        self.partner: _Stream = self


class Wires:
    """A clock, the streams of a machine, and the events that transfers set."""

    def __init__(self, machine: Machine) -> None:
        self.now = 0.0
        self._done: list[bool] = []
        self._streams: dict[tuple[Tier, Tier], _Stream] = {}
        links = {(link.source, link.target): link for link in machine.links}
        for (source, target), link in links.items():
            back = links.get((target, source))
            rate = link.bytes_per_s
            both = min(rate, link.shared_bytes_per_s) if back is None else together(link, back)
            self._streams[source, target] = _Stream(rate, both, link.latency_s, link.compute_share)
        for (source, target), stream in self._streams.items():
            stream.partner = self._streams.get((target, source), stream)
        self._all = tuple(self._streams.values())
        self._busy: list[tuple[_Stream, float]] = []  # at work, with their rates
        self._speed = 1.0  # of the compute device, beside them

    def event(self) -> int:
        """A new event, not yet set."""
        self._done.append(False)
        return len(self._done) - 1

    def send(
        self, route: Route, nbytes: int | Sequence[int], *, parts: int = 1, event: int
    ) -> None:
        """Queue a transfer of `parts` pieces that sets `event` when it is through; of as many
        bytes over every link, or of `nbytes` for each."""
        streams = tuple(self._streams[hop] for hop in route)
        sizes = [nbytes] * len(route) if isinstance(nbytes, int) else nbytes
        if not streams:
            self._done[event] = True
            return
        self._enqueue(_Transfer(streams, sizes, parts, event))

    def moved(self, source: Tier, target: Tier) -> int:
        """Bytes sent so far in one direction."""
        stream = self._streams.get((source, target))
        return stream.moved if stream is not None else 0

    def compute(self, work_s: float) -> None:
        """Pass the time in which `work_s` seconds of computation get done."""
        while work_s > 0:
            if not self._busy:
                self.now += work_s
                return
            next_s = self._next_s()
            need_s = work_s / self._speed
            if need_s < next_s:
                self._pass(need_s)
                return
            work_s -= next_s * self._speed
            self._pass(next_s)

    def wait(self, event: int) -> float:
        """Pass time until `event` is set; the seconds that took."""
        begin = self.now
        while not self._done[event]:
            assert self._busy, "waiting for an event that no transfer sets"
            self._pass(self._next_s())
        return self.now - begin

    def _enqueue(self, transfer: _Transfer) -> None:
        stream = transfer.route[transfer.stage]
        nbytes = transfer.sizes[transfer.stage]
        transfer.left = nbytes + transfer.parts * stream.latency_s * stream.alone
        stream.moved += nbytes
        stream.queue.append(transfer)
        if len(stream.queue) == 1:
            self._change()

    def _change(self) -> None:
        """Note that a stream has begun to work, or ended."""
        self._busy = []
        taken = 0.0
        for stream in self._all:
            if stream.queue:
                shared = stream.partner is not stream and stream.partner.queue
                self._busy.append((stream, stream.both if shared else stream.alone))
                taken += stream.share
        self._speed = max(SLOWEST, 1.0 - taken)

    def _next_s(self) -> float:
        """The seconds until one of the streams is through with a transfer."""
        next_s = NEVER
        for stream, rate in self._busy:
            left_s = stream.queue[0].left / rate
            if left_s < next_s:
                next_s = left_s
        return next_s

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        changed = False
        for stream, rate in self._busy:
            head = stream.queue[0]
            head.left -= rate * seconds
            if head.left <= 1e-3:  # bytes: rounding, not data
                stream.queue.popleft()
                changed = changed or not stream.queue
                head.stage += 1
                if head.stage < len(head.route):
                    self._enqueue(head)
                else:
                    self._done[head.event] = True
        if changed:
            self._change()
