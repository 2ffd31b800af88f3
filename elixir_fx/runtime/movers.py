"""Who carries a fetch or a put out: one class for each kind of machine.

Stands between `store`, which decides what must come before what, and the threads of
`transfers` and the file of `disk`. On a CPU, disk and device meet directly, one thread reading
and one writing. An accelerator has a lane for each direction of its link; the disk's two
threads reach it through the staging slots, in pieces, so that disk and link work at the same
time. An accelerator that is played has the same lanes over other RAM, and a `Pace`.
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from elixir_fx.errors import TierError
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ALIGNMENT_BYTES, align
from elixir_fx.runtime.disk import DiskFile, Files, address_of, anonymous_mapping, view_memory
from elixir_fx.runtime.regions import Counters, Journal, Region
from elixir_fx.runtime.transfers import CudaLane, Lane, Pace, Slots, Ticket, compute_fence

# Staging slots are at most this large: the disk's rate is reached from here on (see disk.py),
# and a transfer's first piece is on the link after this much.
SLOT_BYTES = 4 << 20


@dataclass(slots=True)
class Drive:
    """The file and its two threads."""

    file: DiskFile
    reader: Lane
    writer: Lane

    def lanes(self) -> tuple[Lane, Lane]:
        return self.reader, self.writer


def open_drive(folder: Path | None, nbytes: int, files: Files) -> Drive | None:
    if not nbytes:
        return None
    if folder is None:
        raise TierError(f"{nbytes} bytes of disk are planned and no folder is given; pass disk=")
    file = DiskFile(folder, nbytes, files)
    return Drive(file, Lane("elixir_fx disk reader"), Lane("elixir_fx disk writer"))


class Movers(Protocol):
    """Who carries a fetch or a put out, for one kind of machine. `host` is the host's memory."""

    host: Tensor

    def fetch(
        self, region: Region, into: Tensor, after: Sequence[Ticket], behind: Sequence[Ticket]
    ) -> Ticket: ...

    def put(
        self,
        region: Region,
        source: Tensor,
        after: Sequence[Ticket],
        behind: Sequence[Ticket],
    ) -> Ticket: ...

    def close(self) -> None: ...


class UnifiedMovers:
    """Host and device are one memory: the disk reads into it and writes from it."""

    def __init__(self, disk: Drive | None, counters: Counters, journal: Journal) -> None:
        self.disk = disk
        self.host = torch.empty(0, dtype=torch.uint8)  # the device's memory is the host's
        self.counters = counters
        self.journal = journal
        self.process = os.getpid()

    def fetch(
        self, region: Region, into: Tensor, after: Sequence[Ticket], behind: Sequence[Ticket]
    ) -> Ticket:
        assert self.disk is not None, "the disk tier has regions only if it exists"
        job = partial(self._read, region, into.data_ptr())
        return self.disk.reader.submit(job, after, behind, kept=into)

    def _read(self, region: Region, address: int) -> None:
        assert self.disk is not None
        memory = view_memory(address, region.nbytes)
        self.disk.file.read(memory, region.offset)
        self.journal.complete(region, memory)
        self.counters.disk_read_bytes += region.nbytes

    def put(
        self,
        region: Region,
        source: Tensor,
        after: Sequence[Ticket],
        behind: Sequence[Ticket],
    ) -> Ticket:
        assert self.disk is not None
        job = partial(self._write, region, source.data_ptr())
        return self.disk.writer.submit(job, after, behind, kept=source)

    def _write(self, region: Region, address: int) -> None:
        assert self.disk is not None
        self.disk.file.write(view_memory(address, region.nbytes), region.offset, region.spare)
        self.counters.disk_write_bytes += region.nbytes

    def close(self) -> None:
        close_all(self.process, self.disk, ())


class LinkedMovers:
    """A device with memory of its own, real or played, behind a link in both directions."""

    def __init__(
        self,
        *,
        device: torch.device,
        host_bytes: int,
        staging_bytes: int,
        disk: Drive | None,
        machine: Machine,
        counters: Counters,
        journal: Journal,
    ) -> None:
        self.device = device
        self.disk = disk
        self.counters = counters
        self.journal = journal
        self.process = os.getpid()
        self.pinned: list[int] = []
        self.host = self._host_memory(host_bytes)
        if disk is not None:
            self.slots = self._make_slots(staging_bytes)
        self.paces = _paces(machine)
        if device.type == "cuda":
            self.to_device: Lane = CudaLane("elixir_fx host to device", device)
            self.to_host: Lane = CudaLane("elixir_fx device to host", device)
        else:
            self.to_device = Lane("elixir_fx host to device")
            self.to_host = Lane("elixir_fx device to host")

    def _host_memory(self, nbytes: int) -> Tensor:
        """Mapped by ourselves and then pinned: torch's pinned allocator rounds sizes up to
        powers of two."""
        memory = mapped_tensor(nbytes)
        if self.device.type == "cuda" and nbytes:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            result = cudart.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            if int(result) != 0:
                raise TierError(f"cannot pin {nbytes} bytes of host memory: CUDA error {result}")
            self.pinned.append(memory.data_ptr())
        return memory

    def _make_slots(self, staging_bytes: int) -> Slots:
        """At least two slots where the memory is there, so that disk and link overlap."""
        slot_bytes = min(SLOT_BYTES, staging_bytes // 2)
        slot_bytes = max(slot_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES, ALIGNMENT_BYTES)
        if staging_bytes < slot_bytes:
            raise TierError(
                f"staging_bytes={staging_bytes}: bytes between disk and device pass through "
                f"host memory; give it {slot_bytes} bytes or more"
            )
        return Slots(self._host_memory(staging_bytes), slot_bytes)

    def _fence(self) -> tuple[Ticket, ...]:
        return (compute_fence(self.device),) if self.device.type == "cuda" else ()

    def fetch(
        self, region: Region, into: Tensor, after: Sequence[Ticket], behind: Sequence[Ticket]
    ) -> Ticket:
        fence = self._fence()
        if region.tier == Tier.HOST:
            job = partial(self._to_device, into, self.host[region.offset : region.end])
            return self.to_device.submit(job, after, (*behind, *fence), kept=into)
        assert self.disk is not None
        return self.disk.reader.submit(
            partial(self._disk_to_device, region, into, fence), after, behind, kept=into
        )

    def put(
        self,
        region: Region,
        source: Tensor,
        after: Sequence[Ticket],
        behind: Sequence[Ticket],
    ) -> Ticket:
        fence = self._fence()
        if region.tier == Tier.HOST:
            job = partial(self._to_host, self.host[region.offset : region.end], source)
            return self.to_host.submit(job, after, (*behind, *fence), kept=source)
        assert self.disk is not None
        return self.disk.writer.submit(
            partial(self._device_to_disk, region, source, fence), after, behind, kept=source
        )

    def _to_device(self, target: Tensor, source: Tensor) -> None:
        started_s = time.monotonic()
        _copy(target, source)
        if Tier.HOST in self.paces:
            self.paces[Tier.HOST].hold(source.numel(), started_s)
        self.counters.host_to_device_bytes += source.numel()

    def _to_host(self, target: Tensor, source: Tensor) -> None:
        started_s = time.monotonic()
        _copy(target, source)
        if Tier.DEVICE in self.paces:
            self.paces[Tier.DEVICE].hold(source.numel(), started_s)
        self.counters.device_to_host_bytes += source.numel()

    def _disk_to_device(self, region: Region, into: Tensor, fence: Sequence[Ticket]) -> Ticket:
        """On the reader's thread: disk to slot here, slot to device on the link's lane."""
        assert self.disk is not None
        copies: list[Ticket] = []
        try:
            for first, start, stop, end in _pieces(region, self.slots.slot_bytes):
                slot = self.slots.take()
                copied = Ticket.ready()
                try:
                    self.disk.file.read(_bytes_of(slot[: end - first]), first)
                    self.journal.complete(
                        Region(region.tier, start, stop - start),
                        _bytes_of(slot[start - first : stop - first]),
                    )
                    target = into[start - region.offset : stop - region.offset]
                    copied = self.to_device.submit(
                        partial(self._to_device, target, slot[start - first : stop - first]),
                        after=copies[-1:],
                        behind=fence,
                        kept=into,
                    )
                    copies.append(copied)
                finally:
                    self.slots.give(slot, copied)
                self.counters.disk_read_bytes += stop - start
        except BaseException:
            for ticket in copies:  # nobody writes into `into` after its ticket failed
                ticket.finish()
            raise
        return copies[-1]

    def _device_to_disk(self, region: Region, source: Tensor, fence: Sequence[Ticket]) -> None:
        """On the writer's thread: device to slot on the link's lane, slot to disk here."""
        assert self.disk is not None
        filling: deque[tuple[Tensor, Ticket, int, int]] = deque()
        try:
            for first, start, stop, _ in _pieces(region, self.slots.slot_bytes):
                slot = self.slots.take_now() if filling else self.slots.take()
                while slot is None:  # hold none while waiting for one: see Slots
                    self._slot_to_disk(filling, region)
                    slot = self.slots.take_now() if filling else self.slots.take()
                target = slot[start - first : stop - first]
                piece = source[start - region.offset : stop - region.offset]
                job = partial(self._to_host, target, piece)
                filled = self.to_host.submit(job, behind=fence, kept=source)
                filling.append((slot, filled, start, stop))
            while filling:
                self._slot_to_disk(filling, region)
        finally:
            for slot, filled, _, _ in filling:
                filled.finish()
                self.slots.give(slot, filled)

    def _slot_to_disk(
        self, filling: deque[tuple[Tensor, Ticket, int, int]], region: Region
    ) -> None:
        assert self.disk is not None
        slot, filled, start, stop = filling[0]
        filled.block()
        inner = start % ALIGNMENT_BYTES
        self.disk.file.write(
            _bytes_of(slot[inner : inner + stop - start]),
            start,
            region.spare if stop == region.end else 0,
        )
        self.counters.disk_write_bytes += stop - start
        filling.popleft()
        self.slots.give(slot, filled)

    def close(self) -> None:
        if close_all(self.process, self.disk, (self.to_device, self.to_host)):
            for address in self.pinned:
                cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                cudart.cudaHostUnregister(address)
            self.pinned.clear()


def close_all(process: int, disk: Drive | None, lanes: Sequence[Lane]) -> bool:
    """End the threads and the file; False where that is left to the threads themselves.

    The garbage collector may run this on one of those very threads, in the middle of a job:
    then they are only told to stop, and the file goes with its last user.
    """
    if os.getpid() != process:
        return False  # a forked child has none of the threads, and the file is the parent's
    lanes = [*lanes, *(disk.lanes() if disk is not None else ())]
    for lane in lanes:
        lane.stop()
    if threading.current_thread() in [lane.thread for lane in lanes]:
        return False
    for lane in lanes:
        lane.close()
    if disk is not None:
        disk.file.close()
    return True


def _paces(machine: Machine) -> dict[Tier, Pace]:
    """The played link's clocks, by the tier that bytes come from. None on a real machine."""
    if not machine.emulated:
        return {}
    clock = [0.0]
    return {
        Tier.HOST: Pace(machine.link(Tier.HOST, Tier.DEVICE), clock),
        Tier.DEVICE: Pace(machine.link(Tier.DEVICE, Tier.HOST), clock),
    }


def _pieces(region: Region, slot_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a region on disk into slots, whole blocks each: (first byte of the blocks, first
    byte wanted, end of those wanted, end of the blocks)."""
    last = align(region.end)
    for first in range(region.offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES, last, slot_bytes):
        end = min(first + slot_bytes, last)
        yield first, max(first, region.offset), min(end, region.end), end


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy bytes between host and device memory.

    In RAM with one plain memmove, which lets go of the interpreter; torch's copy would start a
    pool of threads for every lane.
    """
    if target.device.type == "cpu" and source.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
    else:
        target.copy_(source, non_blocking=True)


def _bytes_of(memory: Tensor) -> memoryview:
    return view_memory(memory.data_ptr(), memory.numel())


def mapped_tensor(nbytes: int) -> Tensor:
    """uint8 memory on pages of its own, rounded up to whole blocks, not inherited by forks."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    mapping = anonymous_mapping(align(nbytes))
    assert address_of(mapping) % ALIGNMENT_BYTES == 0
    return torch.frombuffer(mapping, dtype=torch.uint8)
