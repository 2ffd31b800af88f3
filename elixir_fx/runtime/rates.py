"""How fast this machine computes, copies, reads and writes: the experiments of `measure`.

Each takes well under a second and only the memory it is given. Compute is measured with as
many threads as the step will use. The disk is measured as the disk tier uses it: blocks of
8 MiB through direct I/O by a thread for each direction, on an unlinked file that is gone when the
measurement is.
"""

import os
import statistics
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from shutil import disk_usage
from time import perf_counter, sleep
from typing import Any

import torch

from elixir_fx.errors import TierError
from elixir_fx.machine import Link, Tier
from elixir_fx.runtime.disk import DiskFile, anonymous_mapping
from elixir_fx.units import MIB, sizes

FILE_BYTES = 256 * MIB
BLOCK_BYTES = 8 * MIB  # of one read or write
PAGE_BYTES = 4096
FILL_S = 0.5  # of writing that file, at most a block longer
DISK_S = 0.5  # that the disk streams in one experiment; a short burst may be faster than that
EXPERIMENT_S = 0.25  # that a product is repeated beside it
MATMUL_S = 0.01  # that the largest product takes at least,
LARGE_MATMUL = 1024  # with this many rows,
SLOW_MATMUL_S = 0.1  # unless a smaller one takes this long already
GLANCE_MATMUL = 512  # rows of the product that tells whether a CPU has become faster,
GLANCE_MATMUL_CUDA = 4096  # and an accelerator


def flops_per_s(device: torch.device, threads: int, memory_bytes: int) -> dict[str, float]:
    """Floating-point operations per second of a square matrix product, by dtype."""
    with compute_threads(threads):
        return {
            name: _matmul_flops_per_s(device, dtype, memory_bytes)
            for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
        }


def _matmul_flops_per_s(device: torch.device, dtype: torch.dtype, memory_bytes: int) -> float:
    """The best rate of growing products, up to one that is large and takes MATMUL_S.

    A small product alone says nothing: on a busy machine its threads wait for each other.
    """
    best = 0.0
    size = 256 if memory_bytes >= MIB else 64
    while True:
        left, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        seconds = _best_s(partial(torch.matmul, left, left, out=out), device)
        best = max(best, 2 * size**3 / seconds)
        grown = 2 * (2 * size) ** 2 * dtype.itemsize
        enough = size >= LARGE_MATMUL and seconds >= MATMUL_S
        if enough or seconds >= SLOW_MATMUL_S or grown > memory_bytes:
            return best
        size *= 2


def stream_bytes_per_s(device: torch.device, threads: int, memory_bytes: int) -> float:
    """Bytes per second that the device reads and writes in its own memory, both counted."""
    numel = min(memory_bytes // 2, 128 * MIB) // 4
    with compute_threads(threads):
        source, target = (torch.ones(numel, device=device) for _ in range(2))
        return 2 * 4 * numel / _best_s(lambda: target.copy_(source), device)


def update_bytes_per_s(device: torch.device, threads: int, memory_bytes: int) -> float:
    """Bytes per second that a fused AdamW reads and writes on tensors in the memory of `device`.

    Of an element it reads the parameter, its gradient and two states, and writes all but the
    gradient: seven numbers. On tensors that no cache holds, 128 MiB together if they may be.
    """
    numel = min(memory_bytes // 4, 32 * MIB) // 4
    with compute_threads(threads):
        parameter = torch.nn.Parameter(torch.ones(numel, device=device))
        parameter.grad = torch.ones(numel, device=device)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        return 7 * 4 * numel / _best_s(optimizer.step, device)


def glance(device: torch.device, threads: int, memory_bytes: int) -> tuple[float, float]:
    """FLOP/s of a float32 product and bytes/s of a copy, in less than 50 ms: lower bounds of what
    `flops_per_s` and `stream_bytes_per_s` take longer to find. The copy is of more bytes than a
    cache holds, where that may be, or it would be faster than theirs."""
    wanted = GLANCE_MATMUL if device.type == "cpu" else GLANCE_MATMUL_CUDA
    size = next(size for size in (wanted, 256, 64) if 2 * 4 * size**2 <= memory_bytes)
    numel = min(memory_bytes // 2, 32 * MIB) // 4
    with compute_threads(threads):
        left, out = (torch.ones(size, size, device=device) for _ in range(2))
        product_s = _best_s(partial(torch.matmul, left, left, out=out), device, seconds=0, runs=3)
        source, target = (torch.ones(numel, device=device) for _ in range(2))
        copy_s = _best_s(lambda: target.copy_(source), device, seconds=0, runs=2)
    return 2 * size**3 / product_s, 2 * 4 * numel / copy_s


def copy_links(device: torch.device, memory_bytes: int) -> list[Link]:
    """Both directions between host and a CUDA device, through pinned memory."""
    nbytes = min(memory_bytes // 4, 64 * MIB)
    hosts = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    cuda: Any = torch.cuda  # parts of it are untyped
    streams = [cuda.Stream(device) for _ in range(2)]

    def down(size: int = nbytes) -> None:
        with torch.cuda.stream(streams[0]):
            devices[0][:size].copy_(hosts[0][:size], non_blocking=True)

    def up(size: int = nbytes) -> None:
        with torch.cuda.stream(streams[1]):
            hosts[1][:size].copy_(devices[1][:size], non_blocking=True)

    def both() -> None:
        down()
        up()

    shared = 2 * nbytes / _best_s(both, device)
    return [
        Link(
            source=source,
            target=target,
            bytes_per_s=nbytes / _best_s(copy, device),
            shared_bytes_per_s=shared,
            latency_s=_best_s(partial(copy, PAGE_BYTES), device),
        )
        for source, target, copy in (
            (Tier.HOST, Tier.DEVICE, down),
            (Tier.DEVICE, Tier.HOST, up),
        )
    ]


def _best_s(
    work: Callable[[], object], device: torch.device, seconds: float = 0.05, runs: int = 5
) -> float:
    """The shortest of at least so many runs after a first one, for about `seconds`."""
    best = float("inf")
    work()
    spent = 0.0
    done = 0
    while done < runs or spent < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took = perf_counter() - start
        best, spent, done = min(best, took), spent + took, done + 1
    return max(best, 1e-9)


@contextmanager
def compute_threads(threads: int) -> Iterator[None]:
    """Compute on `threads` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRates:
    """A disk, reading and writing alone and together, and what that costs a matrix product."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float
    latency_s: float
    read_compute_share: float
    write_compute_share: float


def disk_rates(folder: Path, threads: int, memory_bytes: int) -> DiskRates:
    """Measure the disk that holds `folder`. TierError if it cannot be written there.

    The file is the disk tier's own kind, on blocks that were written before: the first writes to
    a fresh file, and the first reads after them, may be twice as fast or half.
    """
    room = min(FILE_BYTES, disk_usage(folder).free // 4) // BLOCK_BYTES * BLOCK_BYTES
    if room < 2 * BLOCK_BYTES:
        free = sizes(disk_usage(folder).free)
        raise TierError(f"{folder} has {free} free: too little for a disk tier")
    block_bytes = min(BLOCK_BYTES, memory_bytes // 4 // PAGE_BYTES * PAGE_BYTES)
    scratch = _ScratchFile(folder, room, block_bytes)
    try:
        extent = scratch.fill()
        half = max(block_bytes, extent // 2 // block_bytes * block_bytes)
        write = scratch.rate(_Range(0, extent), writes=True)
        read = scratch.rate(_Range(0, extent), writes=False)
        both = scratch.both(_Range(0, half), _Range(min(half, extent - block_bytes), extent))
        latency_s = scratch.latency_s(extent)
        shares = scratch.compute_shares(_Range(0, extent), threads, memory_bytes)
    finally:
        scratch.file.close()
    return DiskRates(
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        both_bytes_per_s=both,
        latency_s=latency_s,
        read_compute_share=shares[0],
        write_compute_share=shares[1],
    )


@dataclass(frozen=True, slots=True)
class _Range:
    start: int
    end: int


class _ScratchFile:
    """A file as the disk tier has it, and a buffer for each direction."""

    def __init__(self, folder: Path, nbytes: int, block_bytes: int) -> None:
        with warnings.catch_warnings():  # the disk tier itself warns of what it cannot do
            warnings.simplefilter("ignore", RuntimeWarning)
            self.file = DiskFile(folder, nbytes)
        self.block_bytes = block_bytes
        self.buffers = [memoryview(anonymous_mapping(block_bytes)) for _ in range(2)]
        for buffer in self.buffers:
            _scatter(buffer)
            buffer[:] = os.urandom(PAGE_BYTES) * (block_bytes // PAGE_BYTES)

    def fill(self) -> int:
        """Write the file as far as FILL_S lets it; the bytes that it has then, two blocks or
        more."""
        written = 0
        start = perf_counter()
        while written + self.block_bytes <= self.file.nbytes:
            self.file.write(self.buffers[1], written)
            written += self.block_bytes
            if perf_counter() - start >= FILL_S and written >= 2 * self.block_bytes:
                break
        return written

    def stream(self, extent: _Range, stop: threading.Event, *, writes: bool) -> float:
        """Bytes per second over `extent`, round and round until `stop`."""
        move = self.file.write if writes else self.file.read
        buffer = self.buffers[writes]
        moved, offset = 0, extent.start
        start = perf_counter()
        while not moved or not stop.is_set():
            move(buffer, offset)
            moved += self.block_bytes
            offset += self.block_bytes
            if offset + self.block_bytes > extent.end:
                offset = extent.start
        return moved / (perf_counter() - start)

    def rate(self, extent: _Range, *, writes: bool) -> float:
        """Bytes per second of one direction alone."""
        with self._streaming(extent, writes=writes) as moving:
            sleep(DISK_S)
        return moving.bytes_per_s

    def both(self, reads: _Range, writes: _Range) -> float:
        """Bytes per second of a reader and a writer together."""
        with (
            self._streaming(reads, writes=False) as reader,
            self._streaming(writes, writes=True) as writer,
        ):
            sleep(DISK_S)
        return reader.bytes_per_s + writer.bytes_per_s

    def latency_s(self, extent: int) -> float:
        """Seconds of the smallest read."""
        page = self.buffers[0][:PAGE_BYTES]
        runs = []
        for index in range(16):
            offset = index * 37 * PAGE_BYTES % (extent - PAGE_BYTES)
            start = perf_counter()
            self.file.read(page, offset // PAGE_BYTES * PAGE_BYTES)
            runs.append(perf_counter() - start)
        return statistics.median(runs)

    def compute_shares(
        self, extent: _Range, threads: int, memory_bytes: int
    ) -> tuple[float, float]:
        """The part of a matrix product's speed that is lost beside a reader, and a writer."""
        size = next(size for size in (512, 256, 64) if 16 * size**2 <= memory_bytes)
        left, out = torch.ones(size, size), torch.empty(size, size)

        def products(seconds: float) -> float:
            count = 0
            start = perf_counter()
            while not count or perf_counter() - start < seconds:
                torch.matmul(left, left, out=out)
                count += 1
            return count / (perf_counter() - start)

        def share(writes: bool, alone: float) -> float:
            with self._streaming(extent, writes=writes):
                beside = products(EXPERIMENT_S)
            return min(0.95, max(0.0, 1 - beside / alone))

        with compute_threads(threads):
            products(EXPERIMENT_S / 5)
            alone = products(EXPERIMENT_S)
            return share(False, alone), share(True, alone)

    @contextmanager
    def _streaming(self, extent: _Range, *, writes: bool) -> "Iterator[_Moving]":
        """A thread that streams meanwhile; its rate is known in the end."""
        stop = threading.Event()
        moving = _Moving()
        errors: list[TierError] = []

        def run() -> None:
            try:
                moving.bytes_per_s = self.stream(extent, stop, writes=writes)
            except TierError as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="elixir-measure")
        thread.start()
        try:
            yield moving
        finally:
            stop.set()
            thread.join()
        if errors:
            raise errors[0]


def _scatter(buffer: memoryview) -> None:
    """Touch fresh memory page by page in no order, so that its pages lie anywhere in RAM, as those
    of a run do. Where neighbours happen to be neighbours in RAM too a read was twice as fast
    (measured through virtio: 2.7 and 1.35 GB/s), and that is luck."""
    pages = list(range(0, buffer.nbytes, PAGE_BYTES))
    Random(0).shuffle(pages)
    for page in pages:
        buffer[page] = 0


@dataclass(slots=True)
class _Moving:
    """What a thread moves; its rate once it has ended."""

    bytes_per_s: float = 0.0
