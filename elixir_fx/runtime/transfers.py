"""Copy engines: who moves bytes while the graph computes, and how others wait for it.

Stands below `store`. A `Lane` is one daemon thread that runs jobs in the order in which they
become ready, a `Ticket` the promise of one job. A lane never waits for a dependency: a job
enters its queue when the last of its dependencies has settled. So a job that cannot run yet
holds up nobody, and jobs that wait only for jobs submitted before them cannot deadlock.

On CUDA a job only issues its copies, on the lane's own stream. Its ticket settles when they are
issued and carries an event that passes when they are done: `wait` makes the current stream wait
for that event and returns, `block` holds the CPU until then. On a CPU the two are the same.
The CUDA parts use torch.cuda's public interface only; they were never run where this was
written, so read them with that in mind.
"""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from elixir_fx.errors import TierError
from elixir_fx.machine import Link

Job = Callable[[], "Ticket | None"]


class Ticket:
    """The promise of one transfer. Made by a lane, or by `Ticket.ready()` for nothing to do."""

    __slots__ = (
        *("__weakref__", "_callbacks", "_error", "_event", "_guard", "_kept", "_settled"),
        *("blocked", "told"),
    )

    def __init__(self, kept: object = None) -> None:
        self._guard = threading.Lock()
        self._settled = threading.Lock()  # held until the job has run
        self._settled.acquire()
        self._callbacks: list[Callable[[], None]] | None = []  # None once settled
        self._error: BaseException | None = None
        self._event: torch.cuda.Event | None = None
        self._kept = kept  # memory that must outlive the copy
        self.told = False  # somebody who waited was told of the error
        self.blocked = False  # the job did not run: one it needed had failed

    @staticmethod
    def ready(event: torch.cuda.Event | None = None) -> "Ticket":
        """A ticket whose job has run. With an event: done when that passes."""
        ticket = Ticket()
        ticket.settle(None, event)
        return ticket

    @property
    def settled(self) -> bool:
        """The job has run or failed; on CUDA its copies are issued, perhaps still under way."""
        return self._callbacks is None

    @property
    def done(self) -> bool:
        """Nothing is under way any more, whether it went well or not."""
        if self._callbacks is not None:
            return False
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return False
        self._kept = None
        return True

    @property
    def error(self) -> BaseException | None:
        """Why the job failed; None if it did not, or has not run yet."""
        return self._error

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def event(self) -> torch.cuda.Event | None:
        """On CUDA, what passes when the copies are done; None until they are issued."""
        return self._event

    def wait(self) -> None:
        """Return when the caller's next operations may use what was moved.

        Raises the job's TierError. On CUDA "next operations" are those of the current stream.
        """
        self._await_settled()
        self._raise()
        if self._event is not None:
            self._event.wait()

    def block(self) -> None:
        """Return when the bytes have arrived, on CUDA too. Raises the job's TierError."""
        self.finish()
        self._raise()

    def finish(self) -> None:
        """As `block`, but a failed job is finished as well: raises nothing of the job's."""
        self._await_settled()
        if self._event is not None:
            self._event.synchronize()
        self._kept = None

    def _await_settled(self) -> None:
        if self._callbacks is not None or self._settled.locked():
            with self._settled:
                pass

    def _raise(self) -> None:
        error = self._error
        self.told = True
        if isinstance(error, TierError):
            raise TierError(*error.args) from error  # one traceback for each who waits
        if error is not None:
            raise error

    def on_settled(self, callback: Callable[[], None]) -> None:
        """Call back when the job has run, before anyone who waits goes on; or at once."""
        with self._guard:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback()

    def settle(self, error: BaseException | None, event: torch.cuda.Event | None = None) -> None:
        """For whoever runs the job: it has run, or failed with `error`. Once only."""
        assert self._callbacks is not None, "a job settles once"
        self._error, self._event = error, event
        if event is None:
            self._kept = None
        while True:
            with self._guard:
                callbacks = self._callbacks
                if not callbacks:
                    self._callbacks = None
                    break
                self._callbacks = []
            for callback in callbacks:
                callback()
        self._settled.release()


class Runner(Protocol):
    """How a lane runs a job after other tickets have settled."""

    def __call__(
        self, job: Job, before: Sequence[Ticket]
    ) -> tuple[Ticket | None, torch.cuda.Event | None]: ...


def run_on_cpu(job: Job, before: Sequence[Ticket]) -> tuple[Ticket | None, None]:
    """Run a job that touches memory from the CPU: copies before it must have arrived."""
    for ticket in before:
        if ticket.event is not None:
            ticket.finish()
    return job(), None


class CudaRunner:
    """Issue a job's copies on a stream of its own, after the events of those before it."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(
        self, job: Job, before: Sequence[Ticket]
    ) -> tuple[Ticket | None, torch.cuda.Event | None]:
        with torch.cuda.stream(self.stream):
            for ticket in before:
                if ticket.event is not None:
                    self.stream.wait_event(ticket.event)
            result = job()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
        return result, event


_Entry = tuple[Ticket, Job, Sequence[Ticket], Sequence[Ticket]]


class _Inbox:
    """What a lane and its thread share. The lock is re-entrant: the garbage collector may
    close a lane in the middle of a submission to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self.lock = threading.RLock()
        self.closed = False  # entries are failed instead of run
        self.ended = False  # nobody takes entries any more

    def put(self, entry: _Entry) -> None:
        with self.lock:
            if not self.ended:
                self.entries.put(entry)
                return
        entry[0].settle(self.cancelled())

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.entries.put(None)

    def cancelled(self) -> TierError:
        return TierError(f"{self.name} was closed before this transfer ran")

    def cancel_rest(self) -> None:
        """Fail what is left, also what these failures bring in, and accept no more."""
        while True:
            with self.lock:
                try:
                    entry = self.entries.get_nowait()
                except Empty:
                    self.ended = True
                    return
            if entry is not None:
                entry[0].settle(self.cancelled())


class Lane:
    """One daemon thread and its jobs. `close` it, or drop it: the thread ends either way."""

    def __init__(self, name: str, runner: Runner = run_on_cpu) -> None:
        self._inbox = _Inbox(name)
        self.thread = threading.Thread(
            target=_serve, args=(self._inbox, runner), name=name, daemon=True
        )
        self.thread.start()
        self._stop = weakref.finalize(self, self._inbox.close)

    def submit(
        self,
        job: Job,
        after: Sequence[Ticket] = (),
        behind: Sequence[Ticket] = (),
        kept: object = None,
    ) -> Ticket:
        """Run `job` once all those tickets have settled; return its own.

        Where one of `after` failed the job fails with that error and does not run; those of
        `behind` only come first. A job that returns a ticket is settled when that one is.
        `kept` is held until the copy is done.
        """
        ticket = Ticket(kept)
        entry = (ticket, job, after, behind)
        pending = [other for other in (*after, *behind) if not other.settled]
        if pending:
            countdown = _Countdown(len(pending), partial(self._inbox.put, entry))
            for other in pending:
                other.on_settled(countdown)
        else:
            self._inbox.put(entry)
        return ticket

    def close(self) -> None:
        """Let the job that runs end, fail those that wait, end the thread. Idempotent.

        From a job of its own (the garbage collector may run there) it does not wait.
        """
        self.stop()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def stop(self) -> None:
        """As `close`, without waiting for the thread."""
        self._stop()


class _Countdown:
    """Calls `action` at the last of `count` calls."""

    def __init__(self, count: int, action: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._action = action

    def __call__(self) -> None:
        with self._lock:
            self._count -= 1
            last = self._count == 0
        if last:
            self._action()


def _serve(inbox: _Inbox, runner: Runner) -> None:
    """A lane's thread. It knows the inbox, not the lane, so that a lane can be collected."""
    while (entry := inbox.entries.get()) is not None:
        if inbox.closed:
            entry[0].settle(inbox.cancelled())
        else:
            _run(entry, runner)
        del entry  # an idle thread keeps no tensor alive
    inbox.cancel_rest()


def _run(entry: _Entry, runner: Runner) -> None:
    ticket, job, after, behind = entry
    for other in after:
        if other.error is not None:
            ticket.blocked = True
            ticket.settle(other.error)
            return
    try:
        result, event = runner(job, (*after, *behind))
    except TierError as error:
        ticket.settle(error.with_traceback(None))  # its frames would keep the job's tensors
        return
    except BaseException as error:  # whoever waits gets it; a dead thread would let them hang
        ticket.settle(error)
        return
    if result is None:
        ticket.settle(None, event)
    else:
        result.on_settled(lambda: ticket.settle(result.error, result.event))


class CudaLane(Lane):
    """A lane whose jobs issue copies and collectives on one device's memory.

    A copy that overwrites device memory, or reads a fresh result, needs an event of the compute
    stream before it: pass `compute_fence(device)` among its `behind`.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name, CudaRunner(device))


def lane_of(name: str, device: torch.device) -> Lane:
    """A lane for work on a device's own memory: on CUDA it issues it on a stream of its own."""
    return CudaLane(name, device) if device.type == "cuda" else Lane(name)


def fences(device: torch.device) -> list[Ticket]:
    """What a job of such a lane comes behind so that it sees what was issued so far, and writes
    over nothing that this still reads; on a CPU that has been done already."""
    return [compute_fence(device)] if device.type == "cuda" else []


def compute_fence(device: torch.device) -> Ticket:
    """A ticket that is done when all work issued so far on the current stream is."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return Ticket.ready(event)


class Pace:
    """One direction of a link that is played: holds a copy back until the link would be done.

    `shared` is the clock of both directions together; give one list to the two of them.
    """

    def __init__(self, link: Link, shared: list[float] | None = None) -> None:
        self.link = link
        self._own = 0.0
        self._shared = [0.0] if shared is None else shared
        self._lock = threading.Lock()

    def hold(self, nbytes: int, started_s: float) -> None:
        """Sleep until `nbytes`, begun at `started_s` (time.monotonic), would have passed."""
        link = self.link
        with self._lock:
            own = max(self._own, started_s) + link.latency_s + nbytes / link.bytes_per_s
            both = max(self._shared[0], started_s) + nbytes / link.shared_bytes_per_s
            self._own, self._shared[0] = own, both
        remaining_s = max(own, both) - time.monotonic()
        if remaining_s > 0:
            time.sleep(remaining_s)


class Slots:
    """A bounded pool of equal pieces of staging memory between two copies.

    A slot is given back with the ticket of the copy that still reads or fills it; whoever takes
    it next waits for that copy. Hold no slot while you `take` one: that cannot deadlock then.
    """

    def __init__(self, memory: torch.Tensor, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.count = memory.numel() // slot_bytes
        self._free: SimpleQueue[tuple[torch.Tensor, Ticket]] = SimpleQueue()
        for index in range(self.count):
            self.give(memory[index * slot_bytes : (index + 1) * slot_bytes], Ticket.ready())

    def take(self) -> torch.Tensor:
        """A slot (uint8), when one is free."""
        slot, user = self._free.get()
        user.finish()
        return slot

    def take_now(self) -> torch.Tensor | None:
        """A slot if one is free or only its last copy is under way, None if all are held."""
        try:
            slot, user = self._free.get_nowait()
        except Empty:
            return None
        user.finish()
        return slot

    def give(self, slot: torch.Tensor, user: Ticket) -> None:
        """Back to the pool; the next one who takes it waits for `user`."""
        self._free.put((slot, user))
