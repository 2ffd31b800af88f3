"""Pieces of a tier, what has moved in and out of them, and which of them cannot be trusted.

Plain data below `movers` and `store`.
"""

import threading
from dataclasses import dataclass, replace

from torch import Tensor

from elixir_fx.errors import TierError
from elixir_fx.machine import Tier
from elixir_fx.runtime.transfers import Ticket


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` of a tier, from `offset` on.

    `spare` bytes behind it are padding that holds nothing: a put may overwrite them, which
    saves reading the last block of a file before a part of it is written.
    """

    tier: Tier
    offset: int
    nbytes: int
    spare: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def part(self, offset: int, nbytes: int, spare: int = 0) -> "Region":
        """A piece of this region; `offset` counts from its start. One that reaches to the end
        has the region's spare bytes too."""
        if min(offset, nbytes, spare) < 0 or offset + nbytes + spare > self.nbytes:
            raise TierError(f"{nbytes} bytes at {offset} are not all inside {self}")
        if offset + nbytes == self.nbytes:
            spare = self.spare
        return Region(self.tier, self.offset + offset, nbytes, spare)

    def __str__(self) -> str:
        return f"the region of {self.nbytes} bytes at offset {self.offset} of the {self.tier} tier"


@dataclass(slots=True)
class Counters:
    """Bytes moved since the store's birth. Each field is written by one thread."""

    disk_read_bytes: int = 0
    disk_write_bytes: int = 0
    host_to_device_bytes: int = 0
    device_to_host_bytes: int = 0

    def snapshot(self) -> "Counters":
        return replace(self)


@dataclass(frozen=True, slots=True)
class _Loss:
    """A put that failed: its region may be half written. `kept` are the bytes it was to write,
    in host memory; None if nobody knows them."""

    region: Region
    why: str
    kept: Tensor | None

    def without(self, covered: Region) -> list["_Loss"]:
        """What is left of it outside another region."""
        region = self.region
        if region.tier != covered.tier:
            return [self]
        ends = (
            (region.offset, min(region.end, covered.offset)),
            (max(region.offset, covered.end), region.end),
        )
        return [self.part(start, end) for start, end in ends if start < end]

    def part(self, start: int, end: int) -> "_Loss":
        first = self.region.offset
        kept = self.kept[start - first : end - first] if self.kept is not None else None
        return _Loss(Region(self.region.tier, start, end - start), self.why, kept)


class Journal:
    """What failed: errors that nobody was told of yet, and bytes that are not in their region.

    The bytes of a put that failed are kept in memory until a put has covered them: a disk
    that fails once, or is full, costs no value.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed: list[Ticket] = []
        self._losses: list[_Loss] = []

    def settled(self, region: Region, ticket: Ticket, source: Tensor | None) -> None:
        """A transfer has ended. `source` is what a put was to write, None for a fetch."""
        error = ticket.error
        if error is None and (source is None or not self._losses):
            return
        with self._lock:
            if error is not None:
                self._failed = [other for other in self._failed if not other.told]
                self._failed.append(ticket)
            if source is None:
                return
            self._losses = [left for loss in self._losses for left in loss.without(region)]
            if error is not None:
                kept = None if ticket.blocked else source.to("cpu", copy=True)
                self._losses.append(_Loss(region, str(error), kept))

    def complete(self, region: Region, memory: memoryview) -> None:
        """Put what a failed write kept over `memory`, the region's bytes as they were read.

        TierError if some of them are lost.
        """
        if not self._losses:
            return
        with self._lock:
            losses = list(self._losses)
        for loss in losses:
            hurt = loss.region
            start, end = max(hurt.offset, region.offset), min(hurt.end, region.end)
            if hurt.tier != region.tier or start >= end:
                continue
            kept = loss.part(start, end).kept
            if kept is None:
                raise TierError(f"{region} is damaged: writing {hurt} failed: {loss.why}")
            memory[start - region.offset : end - region.offset] = kept.numpy().data

    def take_first_error(self) -> BaseException | None:
        """The first error that nobody was told of."""
        with self._lock:
            failed, self._failed = self._failed, []
        errors = [ticket.error for ticket in failed if not ticket.told]
        return errors[0] if errors else None
