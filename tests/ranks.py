"""Run a test's function on N processes that share a gloo process group.

    def total(rank: int, first: int) -> int:  # at the top level of the test module
        mine = torch.tensor(first + rank)
        dist.all_reduce(mine)
        return int(mine)

    assert run(2, total, 10) == [21, 21]  # the processes are kept for the next run(2, ...)

    with start(2, train, folder) as running:  # for faults: processes of its own
        running.kill(1)
        survivor, killed = running.wait(20)

The test speaks with each process, rank_worker.py, through a socket.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, cast

from rank_worker import packed, unpacked

TESTS = Path(__file__).resolve().parent
START_S = 120.0  # to import torch and the test module, on busy cores
LATE_START_S = 10.0  # for the other ranks, once one could not start
GRACE_S = 1.0  # from a rank's error until it is ended, so that its peers' own errors come first
REST_S = 10.0  # to destroy a process group that no rank uses any more
LOOK_S = 0.25  # between two looks for a process that ended without closing its socket
TAIL = 2000  # characters of a process's output that a failure shows

Kind = Literal["result", "error", "exited", "running"]
Job = tuple[list[str], str, str | None, str, bytes, bool]


@dataclass(frozen=True)
class Outcome:
    """How a rank ended. "exited": without an answer, and `exit_code` is -9 if it was killed.
    "running": it hung until the time was up, and was then killed; `stacks` says where."""

    rank: int
    kind: Kind
    seconds: float  # to its end, since every rank was about to enter the function
    result: Any = None
    error: str = ""  # the name of the exception's type
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    stacks: str = ""
    output: str = ""  # the end of its stdout and stderr in this run

    def __str__(self) -> str:
        said = {
            "result": "returned",
            "error": f"raised {self.error}: {self.message}",
            "exited": f"ended without an answer, exit code {self.exit_code},",
            "running": "hung: it was still running",
        }[self.kind]
        return f"rank {self.rank} {said} after {self.seconds:.1f} s"


class RanksFailed(Exception):  # noqa: N818 (it reads better so where it is expected)
    """Not every rank returned. `outcomes` has one entry a rank, in order."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        lines = [f"{name} on {len(outcomes)} ranks:", *(f"  {outcome}" for outcome in outcomes)]
        for one in outcomes:
            parts = {"traceback": one.traceback, "stacks": one.stacks, "output": one.output}
            for part, text in parts.items():
                if text.strip():
                    lines += ["", f"--- rank {one.rank}: {part}", text.rstrip()]
        super().__init__("\n".join(lines))

    @property
    def errors(self) -> list[tuple[str, str] | None]:
        """By rank (type name, message); None for a rank that did not raise."""
        return [(o.error, o.message) if o.kind == "error" else None for o in self.outcomes]


def run(count: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """What `function(rank, *args)` returns on each of `count` ranks, by rank. Tensors come back on
    the CPU, by value. Raises RanksFailed if a rank raises, dies, or is not back in `timeout_s`,
    which begins when every rank is about to enter the function."""
    job = _job(function, args, once=False)
    crew = _crew_at_rest(count) or Crew(count)
    try:
        crew.begin(job)
        crew.await_end(timeout_s if crew.await_entry() else 0.0)
        outcomes = crew.outcomes()
        if any(outcome.kind != "result" for outcome in outcomes):
            raise RanksFailed(function.__qualname__, outcomes)
        if crew.rest():
            AT_REST[count] = crew
        return [outcome.result for outcome in outcomes]
    finally:
        if AT_REST.get(count) is not crew:
            crew.end()


def start(count: int, function: Callable[..., Any], *args: Any) -> "Running":
    """Begin `function(rank, *args)` in `count` fresh processes; back when every rank is about to
    enter it. A rank that returns or raises ends its process, and with it its connections."""
    job = _job(function, args, once=True)
    crew = Crew(count)
    try:
        crew.begin(job)
        crew.await_entry()
    except BaseException:
        crew.end()
        raise
    return Running(crew)


@dataclass(eq=False)
class Running:
    """Ranks that a test may kill. `wait`, or leaving a `with`, ends every process."""

    crew: "Crew"
    outcomes: list[Outcome] = field(default_factory=list)

    def kill(self, rank: int) -> None:
        self.crew.workers[rank].kill()

    def wait(self, timeout_s: float) -> list[Outcome]:
        """Outcomes by rank; a rank that is not back `timeout_s` from now is "running"."""
        if not self.outcomes:
            with self:
                self.crew.await_end(timeout_s)
                self.outcomes = self.crew.outcomes()
        return self.outcomes

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.crew.end()


def _job(function: Callable[..., Any], args: tuple[Any, ...], once: bool) -> Job:
    module, name = function.__module__, function.__qualname__
    if "<" in name:
        raise ValueError(f"{name} must be at the top level of its module: each rank imports it")
    return sys.path, module, sys.modules[module].__file__, name, packed(args), once


class Worker:
    """The test's side of one process."""

    def __init__(self, rank: int, count: int, folder: Path) -> None:
        self.rank = rank
        self.output = folder / f"output-{rank}.txt"
        self.stacks = folder / f"stacks-{rank}.txt"
        ours, theirs = socket.socketpair()
        with theirs, self.output.open("wb") as output:
            args = [theirs.fileno(), os.getpid(), rank, count, self.stacks]
            self.process = subprocess.Popen(
                # Unbuffered, or what a killed rank had printed would be lost.
                [sys.executable, "-u", str(TESTS / "rank_worker.py"), *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=TESTS.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # its own children end with it
            )
        self.connection: Connection = Connection(ours.detach())
        self.forget()

    def forget(self) -> None:
        """Ready for the next job."""
        self.kind: Kind | Literal["rested"] = "running"
        self.payload: Any = None
        self.entered_s: float | None = None
        self.ended_s: float | None = None
        self.printed_bytes = self.output.stat().st_size

    def exit_code(self, *, block: bool = False) -> int | None:
        # WNOWAIT: until the process is reaped, no other gets its number, and killing it is safe.
        flags = os.WEXITED | os.WNOWAIT | (0 if block else os.WNOHANG)
        state = os.waitid(os.P_PID, self.process.pid, flags)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # receive() will say so
            self.connection.send(message)

    def receive(self) -> None:
        """Take one message, or the end of the process."""
        try:
            kind, at_s, payload = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.exited()
            return
        if kind == "entered":
            self.entered_s = at_s
        else:
            self.kind, self.ended_s, self.payload = kind, at_s, payload

    def exited(self) -> None:
        self.kind, self.payload = "exited", self.exit_code(block=True)
        self.ended_s = self.ended_s or time.monotonic()  # kill() knows better

    def kill(self) -> None:
        if self.process.returncode is None:
            os.kill(self.process.pid, signal.SIGKILL)  # send_signal() would reap
            self.ended_s = self.ended_s or time.monotonic()

    def printed(self) -> str:
        with self.output.open("rb") as file:
            file.seek(max(self.printed_bytes, file.seek(0, os.SEEK_END) - 4 * TAIL))
            return file.read().decode(errors="replace")[-TAIL:]

    def where(self) -> str:
        """The Python stacks of its threads, which faulthandler writes at this signal."""
        os.kill(self.process.pid, signal.SIGUSR1)
        text, until_s = "", time.monotonic() + 2.0
        while time.monotonic() < until_s:
            time.sleep(0.1)
            before, text = text, self.stacks.read_text() if self.stacks.exists() else ""
            if text and text == before:
                break
        return text


class Crew:
    """`count` workers, their folder, and the loop that listens to them."""

    def __init__(self, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.workers: list[Worker] = []
        # Called by hand, or when the crew is collected, or at the end of the test process.
        self.end = weakref.finalize(self, _end, self.workers, self.folder)
        self.jobs = 0
        for rank in range(count):
            self.workers.append(Worker(rank, count, self.folder))

    def begin(self, job: Job) -> None:
        self.jobs += 1
        self.began_s = time.monotonic()
        for worker in self.workers:
            worker.forget()
            worker.send((str(self.folder / f"meeting-{self.jobs}"), *job))

    def listen(self, until_s: float) -> None:
        """Take what the workers send next, or wait a moment for it."""
        busy = [worker for worker in self.workers if worker.kind == "running"]
        left_s = max(0.0, min(until_s - time.monotonic(), LOOK_S))
        ready = wait([worker.connection for worker in busy], left_s)
        for worker in busy:
            if worker.connection in ready:
                worker.receive()
            elif worker.exit_code() is not None and not worker.connection.poll():
                worker.exited()

    def await_entry(self) -> bool:
        """Whether every rank is about to enter the function, or has been there."""
        until_s = time.monotonic() + START_S
        while out := [worker for worker in self.workers if worker.entered_s is None]:
            for worker in out:
                if worker.ended_s is not None:  # its peers wait for it in init_process_group
                    until_s = min(until_s, worker.ended_s + LATE_START_S)
            if all(worker.kind != "running" for worker in out) or time.monotonic() > until_s:
                return False
            self.listen(until_s)
        return True

    def await_end(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while any(worker.kind == "running" for worker in self.workers):
            now_s = time.monotonic()
            if now_s > until_s:
                return
            for worker in self.workers:
                if worker.kind == "error" and now_s > (worker.ended_s or now_s) + GRACE_S:
                    worker.kill()  # so that peers that wait for it in a collective raise too
            self.listen(until_s)

    def outcomes(self) -> list[Outcome]:
        zero_s = max(worker.entered_s or self.began_s for worker in self.workers)
        now_s = time.monotonic()
        found = []
        for worker in self.workers:
            facts: dict[str, Any] = {"output": worker.printed()}
            if worker.kind == "result":
                facts["result"] = unpacked(worker.payload)
            elif worker.kind == "error":
                facts |= zip(("error", "message", "traceback"), worker.payload, strict=True)
            elif worker.kind == "exited":
                facts["exit_code"] = worker.payload
            else:
                facts["stacks"] = worker.where()
            seconds = max(0.0, (worker.ended_s or now_s) - zero_s)
            found.append(Outcome(worker.rank, cast(Kind, worker.kind), seconds, **facts))
        return found

    def rest(self) -> bool:
        """Let the workers destroy their group, now that no rank waits for another. Whether all
        could, and so may work again."""
        for worker in self.workers:
            worker.forget()
            worker.send(None)
        self.await_end(REST_S)
        return all(worker.kind == "rested" for worker in self.workers)


def _end(workers: list[Worker], folder: Path) -> None:
    until_s = time.monotonic() + 2.0
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        # At rest, it leaves when its socket closes, and takes its temporary files with it.
        while worker.kind == "rested" and worker.exit_code() is None and time.monotonic() < until_s:
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
    shutil.rmtree(folder, ignore_errors=True)


AT_REST: dict[int, Crew] = {}  # by the number of workers


def _crew_at_rest(count: int) -> Crew | None:
    crew = AT_REST.pop(count, None)
    if crew and any(worker.exit_code() is not None for worker in crew.workers):
        crew.end()
        return None
    return crew
