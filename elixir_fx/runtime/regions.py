"""Pieces of a tier, what has moved in and out of them, and which of them cannot be trusted.

Plain data below `movers` and `store`.
"""

import threading
from dataclasses import dataclass, replace

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


class Journal:
    """What failed: the errors that nobody collected yet, and the bytes that cannot be trusted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._damage: list[tuple[Region, str]] = []

    def settled(self, region: Region, ticket: Ticket, writes: bool) -> None:
        error = ticket.error
        if error is None and (not writes or not self._damage):
            return
        with self._lock:
            if error is not None:
                self._errors.append(error)
            if writes:
                self._damage = [
                    (rest, why) for hurt, why in self._damage for rest in _without(hurt, region)
                ]
                if error is not None:
                    self._damage.append((region, str(error)))

    def check(self, region: Region) -> None:
        """TierError if a failed put may have left some of these bytes half written."""
        for hurt, why in self._damage:
            if hurt.tier == region.tier and hurt.offset < region.end and region.offset < hurt.end:
                raise TierError(f"{region} is damaged: writing {hurt} failed: {why}")

    def take_first_error(self) -> BaseException | None:
        with self._lock:
            errors, self._errors = self._errors, []
        return errors[0] if errors else None


def _without(region: Region, covered: Region) -> list[Region]:
    """What is left of a region outside another."""
    if region.tier != covered.tier:
        return [region]
    below = Region(region.tier, region.offset, min(region.end, covered.offset) - region.offset)
    start = max(region.offset, covered.end)
    above = Region(region.tier, start, region.end - start)
    return [part for part in (below, above) if part.nbytes > 0]
