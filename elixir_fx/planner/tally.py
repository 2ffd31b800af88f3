"""Tally: the bytes of all chunks of a packing at once, for a draft under way.

Part of the search, which asks for the same sums thousands of times. `Parts` says which parts of
which chunks are away and which chunks the host updates; `Tally` has the bytes of every part in
arrays of [chunks, parts] and sums what `Parts` selects. Columns follow `PARTS`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from elixir_fx.planner.footprint import ChunkBytes, Footprint, Part
from elixir_fx.planner.order import Item

PARTS = tuple(Part)
COLUMN = {part: column for column, part in enumerate(PARTS)}

Bytes = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass
class Parts:
    """The parts that are away [chunks, parts], and the chunks that are updated on the host."""

    away: Mask
    hosted: Mask

    @staticmethod
    def of(away: Mask) -> "Parts":
        return Parts(away=away.copy(), hosted=np.zeros(len(away), dtype=np.bool_))

    @property
    def streams(self) -> Mask:
        """What the update brings to the device and back."""
        moving: Mask = self.away & ~self.hosted[:, None]
        return moving

    @property
    def count(self) -> int:
        """How many parts are away."""
        return int(self.away.sum())

    def put(self, item: Item, away: bool) -> None:
        self.away[item[0], COLUMN[item[1]]] = away

    def items(self) -> list[Item]:
        """The parts away, in order."""
        chunks, columns = np.nonzero(self.away)
        return [(c, PARTS[p]) for c, p in zip(chunks.tolist(), columns.tolist(), strict=True)]

    def hosted_ids(self) -> set[int]:
        return {int(chunk) for chunk in np.flatnonzero(self.hosted)}


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Bytes of the parts of every chunk."""

    footprint: Footprint

    @property
    def sizes(self) -> tuple[ChunkBytes, ...]:
        return self.footprint.sizes

    def _table(self, rows: Iterable[dict[Part, int]]) -> Bytes:
        return np.array([[row[part] for part in PARTS] for row in rows], dtype=np.int64).reshape(
            -1, len(PARTS)
        )

    @cached_property
    def ordinary(self) -> Bytes:
        """As ordinary tensors at home on the device."""
        return self._table(size.ordinary for size in self.sizes)

    @cached_property
    def packed(self) -> Bytes:
        """Packed and padded, away."""
        return self._table(size.packed for size in self.sizes)

    @cached_property
    def widest(self) -> Bytes:
        """Of the largest parameter of each chunk."""
        return self._table(size.widest for size in self.sizes)

    @cached_property
    def numel(self) -> Bytes:
        """Elements of a chunk that one rank has."""
        return np.array([size.chunk.share_numel for size in self.sizes], dtype=np.int64)

    @cached_property
    def nbytes(self) -> Bytes:
        return np.array([size.chunk.nbytes for size in self.sizes], dtype=np.int64)

    @cached_property
    def trainable(self) -> Mask:
        return np.array([size.chunk.trainable for size in self.sizes], dtype=np.bool_)

    @cached_property
    def sharded(self) -> Mask:
        return np.array([size.chunk.sharded for size in self.sizes], dtype=np.bool_)

    @cached_property
    def _scratch(self) -> Bytes:
        """Scratch of an update, by element."""
        return np.array([size.optimizer.scratch_bytes for size in self.sizes], dtype=np.int64)

    @cached_property
    def _states(self) -> Bytes:
        return np.array([size.optimizer.state_bytes for size in self.sizes], dtype=np.int64)

    @cached_property
    def _units(self) -> dict[int, tuple[Bytes, Bytes]]:
        return {}

    def units(self, update_numel: int) -> tuple[Bytes, Bytes]:
        """Elements of each chunk's largest unit, and the bytes of its parts."""
        if update_numel not in self._units:
            largest = [size.largest_unit(update_numel) for size in self.sizes]
            parts = (size.of(numel) for size, numel in zip(self.sizes, largest, strict=True))
            self._units[update_numel] = (np.array(largest, dtype=np.int64), self._table(parts))
        return self._units[update_numel]

    def unit_bytes(self, parts: Parts, update_numel: int) -> int:
        """The largest unit's bytes that pass through the ring."""
        _, unit = self.units(update_numel)
        streamed = (unit * parts.streams).sum(axis=1)[self.trainable]
        return int(streamed.max(initial=0))

    def update_bytes(self, parts: Parts, update_numel: int) -> int:
        """`Footprint.update_bytes` of these parts."""
        if not self.footprint.facts.trains:
            return 0
        largest, _ = self.units(update_numel)
        fresh = parts.away[:, COLUMN[Part.STATES]] | self.sharded
        each = self._scratch + np.where(fresh, self._states, 0)
        return int((largest * each)[self.trainable & ~parts.hosted].max(initial=0))

    def per_element(self, parts: Parts) -> float:
        """The most bytes by element that pass through the ring, 0 if none do."""
        there = self.numel > 0
        streamed = (self.packed * parts.streams).sum(axis=1)
        return float((streamed[there] / self.numel[there]).max(initial=0.0))
