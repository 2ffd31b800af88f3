"""What tests and benchmarks need: a made-up accelerator, a faulty disk, a memory limit.

`emulated` makes a `Machine` whose accelerator is played in RAM: `p.device` stays cpu, device
bytes are counted by `elixir_fx.runtime.meter.DeviceMeter` and bounded hard, the host is other
RAM, and links are threads with a set rate. `FaultyFiles` breaks the disk at a chosen call;
`compile_over` compiles a model that uses it.
`memory_group` limits what a process may hold.
"""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elixir_fx import api
from elixir_fx.errors import ElixirError
from elixir_fx.machine import Link, Machine, Tier
from elixir_fx.module import ElixirModule
from elixir_fx.runtime.disk import SECTOR_BYTES, Files

__all__ = [
    "FaultyFiles",
    "MemoryGroup",
    "MemoryGroupError",
    "compile_over",
    "emulated",
    "memory_group",
]


def compile_over(
    files: Files,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    example_inputs: Any = None,
    **options: Any,
) -> ElixirModule:
    """elixir_fx.compile with a disk tier whose system calls are those of `files`."""
    return api.compile_over(files, model, optimizer, example_inputs, options)


def emulated(
    *,
    device_memory: int = 1 << 30,
    host_memory: int = 4 << 30,
    disk_memory: int = 0,
    bytes_per_s: float = 4e9,
    latency_s: float = 20e-6,
    duplex: bool = True,
    disk_bytes_per_s: float = 2e9,
    disk_latency_s: float = 100e-6,
    flops_per_s: float = 1e11,
    stream_bytes_per_s: float = 2e10,
    host_stream_bytes_per_s: float = 0.0,
    like: Machine | None = None,
) -> Machine:
    """An accelerator with `device_memory` bytes of its own, played on this machine's CPU.

    The link between host and device has `bytes_per_s` each way, both at once if `duplex`. The
    disk is this machine's real one and half duplex; its rates are only what a planner believes.
    disk <-> device stands for the way through the host. Rates are those of float32; bfloat16
    and float16 have twice as many flops. With `host_stream_bytes_per_s`, the rate of an optimizer
    there, a plan may have chunks updated on the host. Nothing is measured: the same arguments
    make an equal machine.

    With `like`, this machine as it was measured, the accelerator computes as fast as that does:
    its rates of compute are taken from there, and operators are timed when something has to move.
    """
    host, device, disk = Tier.HOST, Tier.DEVICE, Tier.DISK
    both_bytes_per_s = bytes_per_s * (2 if duplex else 1)
    slower_bytes_per_s = min(bytes_per_s, disk_bytes_per_s)
    links = [
        Link(
            source=source,
            target=target,
            bytes_per_s=rate,
            shared_bytes_per_s=shared,
            latency_s=latency,
        )
        for ends, rate, shared, latency in (
            ((host, device), bytes_per_s, both_bytes_per_s, latency_s),
            ((disk, host), disk_bytes_per_s, disk_bytes_per_s, disk_latency_s),
            ((disk, device), slower_bytes_per_s, slower_bytes_per_s, disk_latency_s + latency_s),
        )
        for source, target in (ends, ends[::-1])
        if disk_memory or disk not in ends
    ]
    played = Machine(
        name="emulated",
        fingerprint="",
        device="cpu",
        emulated=True,
        memory={device: device_memory, host: host_memory, disk: disk_memory},
        links=tuple(links),
        flops_per_s={
            "float32": flops_per_s,
            "bfloat16": 2 * flops_per_s,
            "float16": 2 * flops_per_s,
        },
        stream_bytes_per_s=stream_bytes_per_s,
        host_stream_bytes_per_s=host_stream_bytes_per_s,
    )
    if like is None:
        return played
    return replace(
        played,
        fingerprint=like.fingerprint,
        flops_per_s=like.flops_per_s,
        stream_bytes_per_s=like.stream_bytes_per_s,
        update_stream_bytes_per_s=like.update_stream_bytes_per_s,
        operators=like.operators,
    )


class FaultyFiles(Files):
    """Real files that fail where they are told to.

    `fail_read_at` and `fail_write_at` count calls from 0: that call and, unless `once`, all
    after it raise OSError(`error`). `short_reads` and `short_writes` move about half of what is
    asked. After `truncate_at` reads the file ends at once (0 bytes). `space` bytes can be
    allocated before ENOSPC. `refuse_direct`: "flag" when direct I/O is asked for, "call" only
    when it is used. `reads` and `writes` count calls. Thread-safe.
    """

    def __init__(
        self,
        *,
        fail_read_at: int | None = None,
        fail_write_at: int | None = None,
        error: int = errno.EIO,
        once: bool = False,
        short_reads: bool = False,
        short_writes: bool = False,
        truncate_at: int | None = None,
        space: int | None = None,
        refuse_direct: str = "",
    ) -> None:
        self.fail_read_at = fail_read_at
        self.fail_write_at = fail_write_at
        self.error = error
        self.once = once
        self.short_reads = short_reads
        self.short_writes = short_writes
        self.truncate_at = truncate_at
        self.space = space
        self.refuse_direct = refuse_direct
        self.reads = 0
        self.writes = 0
        self._direct = False
        self._lock = threading.Lock()

    def set_direct(self, fd: int, direct: bool) -> None:
        if direct and self.refuse_direct == "flag":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().set_direct(fd, direct)
        self._direct = direct

    def allocate(self, fd: int, nbytes: int) -> None:
        if self.space is not None and nbytes > self.space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, nbytes)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            call = self.reads
            self.reads += 1
        self._fail(call, self.fail_read_at)
        if self.truncate_at is not None and call >= self.truncate_at:
            return 0
        return super().pread(fd, _half(buffer) if self.short_reads else buffer, offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            call = self.writes
            self.writes += 1
        self._fail(call, self.fail_write_at)
        return super().pwrite(fd, _half(buffer) if self.short_writes else buffer, offset)

    def _fail(self, call: int, at: int | None) -> None:
        if at is not None and (call == at if self.once else call >= at):
            raise OSError(self.error, os.strerror(self.error))
        if self._direct and self.refuse_direct == "call":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _half(buffer: memoryview) -> memoryview:
    """About half of a buffer, in whole sectors as a disk would stop."""
    half = buffer.nbytes // 2 // SECTOR_BYTES * SECTOR_BYTES
    return buffer[:half] if half else buffer


class MemoryGroupError(ElixirError):
    """This process may not make a memory control group, so nothing was limited."""


class MemoryGroup:
    """A version-1 memory control group: who is in it shares one limit on resident memory.

    Page cache and shared mappings count too. Memory that a process touched before it joined
    stays charged where it was.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, pid: int) -> None:
        """Put a process with all its threads into the group; its later children join it."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def used_bytes(self) -> int:
        return int((self.folder / "memory.usage_in_bytes").read_text())

    @property
    def peak_bytes(self) -> int:
        """The most that was held since the group was made, or since `reset_peak`."""
        return int((self.folder / "memory.max_usage_in_bytes").read_text())

    @property
    def refused(self) -> int:
        """How often an allocation met the limit (and memory was reclaimed, or not)."""
        return int((self.folder / "memory.failcnt").read_text())

    def reset_peak(self) -> None:
        (self.folder / "memory.max_usage_in_bytes").write_text("0")


_numbers = count()


@contextmanager
def memory_group(limit_bytes: int, pid: int | None = None) -> Iterator[MemoryGroup]:
    """Limit the memory of a process (None: this one) for the duration of a block.

    At the end the process goes back where it was, if it still lives, and the group goes.
    Raises MemoryGroupError, with the reason, where that is not allowed or version 2 is in charge.
    """
    process = os.getpid() if pid is None else pid
    root = _memory_root()
    before = root / _own_group(process)
    parent = before if before.is_dir() else root
    group = MemoryGroup(parent / f"elixir_fx-{os.getpid()}-{next(_numbers)}")
    try:
        group.folder.mkdir()
    except OSError as error:
        raise MemoryGroupError(f"cannot make {group.folder}: {error}") from error
    try:
        try:
            (group.folder / "memory.limit_in_bytes").write_text(str(limit_bytes))
            group.add(process)
        except OSError as error:
            raise MemoryGroupError(f"cannot limit process {process}: {error}") from error
        yield group
    finally:
        for member in (group.folder / "cgroup.procs").read_text().split():
            try:
                (parent / "cgroup.procs").write_text(member)
            except ProcessLookupError:
                continue  # it ended meanwhile
        group.folder.rmdir()


def _memory_root() -> Path:
    """Where version 1's memory controller is mounted."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError as error:
        raise MemoryGroupError(f"no control groups here: {error}") from error
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup" and "memory" in options.split(","):
            return Path(before.split()[4])
    raise MemoryGroupError("version 1's memory controller is not mounted")


def _own_group(pid: int) -> str:
    """A process' path below the controller's mount."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return path.lstrip("/")
    return ""
