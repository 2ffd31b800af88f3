"""Memory of every tier, and the moves between a tensor's home and the compute device.

A `Store` owns, for one compiled model, the arena (device memory that chunks are gathered into),
the host memory and the disk file, all allocated at birth. A `Region` is a piece of one tier;
`fetch` brings its bytes to the device and `put` takes them home, in the background, each
returning a `Ticket`; `movers` carry them out. A `TensorHome` is one tensor that lives in a
region between steps.

Order: transfers whose regions overlap (on disk: whose blocks do) run as they were submitted,
except that reads may pass reads; others run at once. What a failed put was to write is kept in
memory and fetched from there, until a put has covered it.
"""

import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from elixir_fx.errors import TierError
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ALIGNMENT_BYTES, align
from elixir_fx.runtime.disk import Files
from elixir_fx.runtime.movers import (
    Drive,
    LinkedMovers,
    Movers,
    UnifiedMovers,
    close_all,
    mapped_tensor,
    open_drive,
)
from elixir_fx.runtime.regions import Counters, Journal, Region
from elixir_fx.runtime.transfers import Ticket

__all__ = ["Counters", "Region", "Store", "TensorHome", "span_of"]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """One that may still be under way."""

    first: int
    end: int
    writes: bool
    ticket: Ticket


@dataclass(slots=True)
class _Space:
    """A tier's memory as it is given away, and the transfers in it."""

    capacity: int
    used: int = 0
    transfers: list[_Transfer] = field(default_factory=list)


class Store:
    """Memory of one compiled model on every tier. Used by one process; forks are refused.

    `arena` is uint8 memory on the compute device, aligned to 4096 bytes. `counters` are totals
    since birth. All sizes are in bytes; a tier of 0 bytes does not exist. Raises TierError where
    a tier cannot be had.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        arena_bytes: int,
        machine: Machine,
        host_bytes: int = 0,
        disk_bytes: int = 0,
        disk: Path | None = None,
        staging_bytes: int = 0,
        files: Files | None = None,
    ) -> None:
        if machine.unified and host_bytes:
            raise TierError(
                f"host_memory={host_bytes}: on {machine.name} host and device are one memory; "
                f"the tiers are RAM and disk"
            )
        self.device = device
        self.counters = Counters()
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._journal = Journal()
        self._spaces = {
            Tier.DEVICE: _Space(arena_bytes),
            Tier.HOST: _Space(host_bytes),
            Tier.DISK: _Space(disk_bytes),
        }
        self.arena = self._make_arena(arena_bytes)
        self._resident: list[Tensor] = []  # more device memory, behind the arena in that tier
        self._starts: list[int] = []  # its offsets there
        drive = open_drive(disk, disk_bytes, Files() if files is None else files)
        try:
            self._movers = self._make_movers(machine, host_bytes, staging_bytes, drive)
        except BaseException:
            close_all(self._process, drive, ())
            raise
        self._finalizer = weakref.finalize(self, self._movers.close)

    def _make_arena(self, nbytes: int) -> Tensor:
        if self.device.type == "cpu":
            return mapped_tensor(nbytes)[:nbytes]
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _make_movers(
        self, machine: Machine, host_bytes: int, staging_bytes: int, disk: Drive | None
    ) -> Movers:
        if machine.unified:
            return UnifiedMovers(disk, self.counters, self._journal)
        return LinkedMovers(
            device=self.device,
            host_bytes=host_bytes,
            staging_bytes=staging_bytes,
            disk=disk,
            machine=machine,
            counters=self.counters,
            journal=self._journal,
        )

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def capacity(self, tier: Tier) -> int:
        return self._spaces[tier].capacity

    def used(self, tier: Tier) -> int:
        """Bytes given away, padding included."""
        return self._spaces[tier].used

    def allocate(self, tier: Tier, nbytes: int) -> Region:
        """The next `nbytes` of a tier, for the life of the store. TierError if it is full."""
        self._check_usable()
        with self._lock:
            space = self._spaces[tier]
            if space.used + nbytes > space.capacity:
                raise TierError(
                    f"the {tier} tier is full: {nbytes} bytes asked, "
                    f"{max(space.capacity - space.used, 0)} of {space.capacity} bytes left"
                )
            region = Region(tier, space.used, nbytes, spare=align(nbytes) - nbytes)
            space.used += align(nbytes)
        return region

    def reside(self, nbytes: int, memory: Tensor | None = None) -> Region:
        """A region of the device tier outside the arena, which stays for good: `memory`, or
        `nbytes` of fresh zeros."""
        if memory is None:
            memory = self._make_arena(nbytes)
        with self._lock:
            last = len(self._starts) - 1
            end = align(self.arena.numel())
            if self._starts:
                end = self._starts[last] + align(self._resident[last].numel())
            self._resident.append(memory)
            self._starts.append(end)
        return Region(Tier.DEVICE, end, nbytes)

    def view(self, region: Region) -> Tensor:
        """The device memory of a region, as bytes."""
        assert region.tier == Tier.DEVICE, "only device memory can be looked at"
        index = bisect_right(self._starts, region.offset) - 1
        if index < 0:
            return self.arena[region.offset : region.end]
        start = self._starts[index]
        return self._resident[index][region.offset - start : region.end - start]

    def host_memory(self, region: Region) -> Tensor:
        """The host memory of a region, as bytes, once no transfer reads or writes it. Whoever asks
        may read and write it from the CPU until somebody moves it again."""
        assert region.tier == Tier.HOST, "only host memory"
        self._check_usable()
        with self._lock:
            moving = [
                other.ticket
                for other in self._spaces[Tier.HOST].transfers
                if other.first < region.end and region.offset < other.end
            ]
        for ticket in moving:
            ticket.finish()  # on CUDA the copies themselves, not only their issue
        return self._movers.host[region.offset : region.end]

    def fetch(self, region: Region, into: Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Bring a region's bytes into `into`, contiguous device memory of just that many bytes.

        Nothing may read or write `into` until the ticket is done.
        """
        return self._submit(region, into, after, writes=False)

    def put(self, region: Region, source: Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Take `source`, contiguous device memory of a region's size, home into the region.

        The caller leaves it unchanged until the ticket is done; it is kept alive so long.
        """
        return self._submit(region, source, after, writes=True)

    def _submit(
        self, region: Region, tensor: Tensor, after: Sequence[Ticket], writes: bool
    ) -> Ticket:
        self._check_usable()
        self._check_fits(region, tensor)
        if not region.nbytes:
            return Ticket.ready()
        flat = tensor.detach().view(-1).view(torch.uint8)
        if region.tier == Tier.DEVICE:
            return self._copy_on_device(region, flat, after, writes)
        space = self._spaces[region.tier]
        first = region.offset // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        end = align(region.end)
        with self._lock:
            space.transfers = [other for other in space.transfers if not other.ticket.done]
            behind = [
                other.ticket
                for other in space.transfers
                if (writes or other.writes) and other.first < end and first < other.end
            ]
            if writes:
                ticket = self._movers.put(region, flat, after, behind)
            else:
                ticket = self._movers.fetch(region, flat, after, behind)
            source = flat if writes else None
            ticket.on_settled(partial(self._journal.settled, region, ticket, source))
            space.transfers.append(_Transfer(first, end, writes, ticket))
        return ticket

    def _copy_on_device(
        self, region: Region, flat: Tensor, after: Sequence[Ticket], writes: bool
    ) -> Ticket:
        for ticket in after:
            ticket.wait()
        home = self.view(region)
        target, source = (home, flat) if writes else (flat, home)
        target.copy_(source)
        return Ticket.ready()

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise TierError(
                "this memory belongs to another process; worker processes must not use a "
                "compiled model"
            )
        if self.closed:
            raise TierError("this model's memory was released; compile the model again")

    def _check_fits(self, region: Region, tensor: Tensor) -> None:
        if tensor.nbytes != region.nbytes:
            raise TierError(f"a tensor of {tensor.nbytes} bytes for {region}")
        if not tensor.is_contiguous():
            raise TierError(f"a tensor that is not contiguous for {region}")
        if tensor.device.type != self.device.type:
            raise TierError(
                f"a tensor on {tensor.device} for {region}, the device is {self.device}"
            )

    def drain(self) -> None:
        """Wait for every transfer. Raises the first error that nobody was told of, if any."""
        self._finish()
        error = self._journal.take_first_error()
        if isinstance(error, TierError):
            raise TierError(*error.args) from error
        if error is not None:
            raise error

    def pass_over_errors(self) -> None:
        """Wait for every transfer; that some failed is known."""
        if os.getpid() == self._process:  # a forked one has no thread that would end them
            self._finish()
            self._journal.take_first_error()

    def _finish(self) -> None:
        with self._lock:
            tickets = [other.ticket for space in self._spaces.values() for other in space.transfers]
        for ticket in tickets:
            ticket.finish()

    def close(self) -> None:
        """Give everything back: transfers not begun fail, threads end, the file goes.

        Idempotent. The arena lives on as long as a view of it does.
        """
        self._finalizer()


class TensorHome:
    """Where one tensor lives between steps: a region, and how to look at its bytes.

    `span` counts elements from the tensor's first to its last, gaps of its strides included;
    the region holds just those. A tensor without elements has no bytes and moves nothing.
    """

    def __init__(
        self,
        store: Store,
        region: Region,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        path: str,
    ) -> None:
        self._store = store
        self.region = region
        self.shape = tuple(shape)
        self.strides = tuple(strides)
        self.dtype = dtype
        self.device = device
        self.path = path
        self.span = span_of(self.shape, self.strides)
        self.nbytes = self.span * dtype.itemsize
        if self.nbytes != region.nbytes:
            raise TierError(f"{path}: {self.nbytes} bytes do not fill {region}")

    def fetch(self, into: Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Bring the value into `into`, 1-D of `span` elements of this dtype, on the device."""
        self._check_flat(into)
        return self._store.fetch(self.region, into, after)

    def put(self, source: Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Take the value home from `source`, as `fetch` brings it."""
        self._check_flat(source)
        return self._store.put(self.region, source, after)

    @property
    def memory(self) -> Tensor | None:
        """The value itself, 1-D, where it is at home in device memory."""
        if self.region.tier is not Tier.DEVICE:
            return None
        return self._store.view(self.region).view(self.dtype)

    def host_memory(self) -> Tensor | None:
        """The value itself, 1-D, where it is at home in host memory, once nothing moves there."""
        if self.region.tier is not Tier.HOST:
            return None
        return self._store.host_memory(self.region).view(self.dtype)

    def view(self, flat: Tensor) -> Tensor:
        """`flat`, 1-D of `span` elements, seen with the tensor's shape and strides."""
        self._check_flat(flat)
        return flat.as_strided(self.shape, self.strides)

    def load(self) -> Tensor:
        """A fresh ordinary tensor with the value at this moment, shape and strides the same."""
        value = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        self.fetch(value.as_strided((self.span,), (1,))).wait()
        return value

    def store(self, value: Tensor) -> None:
        """Make `value`, of this shape and dtype with any strides and device, the new value."""
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise TierError(
                f"{self.path} is {self.dtype} {list(self.shape)}; "
                f"the new value is {value.dtype} {list(value.shape)}"
            )
        flat = torch.zeros(self.span, dtype=self.dtype, device=self.device)
        self.view(flat).copy_(value.detach())
        self.put(flat).block()

    def _check_flat(self, flat: Tensor) -> None:
        if flat.dim() != 1 or flat.numel() != self.span or flat.dtype != self.dtype:
            raise TierError(
                f"{self.path} moves as {self.dtype} [{self.span}], "
                f"not as {flat.dtype} {list(flat.shape)}"
            )


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from a tensor's first to its last; 0 if it has none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
