"""Blocks of activation memory that are used again instead of going back to the system.

Called by the generated code on a CPU whose heap is bounded (see `heap`): there every large
tensor is mapped when it is made, and its pages cost a fault each; measured here, a fifth of a
step. The generated code knows when a value dies, gives its block to the recycler, and has the
next operator that wants as many bytes write its result there. Nothing is shared by guess: a
block is taken back only if nobody else holds its storage. Compiled runs do not say when a value
dies: blocks that they were lent are idle once nobody holds them.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elixir_fx.runtime.accumulation import held_alone, is_idle
from elixir_fx.runtime.heap import MAPPED_BYTES


class Recycler:
    """Free blocks by size. Holds no more than the step's forecast has room for at each moment,
    so that memory stays below the planned peak."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.UntypedStorage]] = {}
        self.held_bytes = 0
        self.reused = 0  # results that were written into a block that was there
        self.keeps = True  # False while a backward must leave the graph as it is
        self.idle_bytes = 0  # of lent blocks, that may stay while nobody holds them
        self._lent: dict[int, list[torch.UntypedStorage]] = {}

    def take(
        self,
        nbytes: int,
        room_bytes: int,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        """Memory for a result, uninitialised. `room_bytes` may stay held beside it."""
        free = self._free.get(nbytes)
        storage = free.pop() if free else None
        if storage is not None:
            self.held_bytes -= nbytes
            self.reused += 1
        self.shrink(room_bytes)
        if storage is None:
            return torch.empty_strided(shape, strides, dtype=dtype)
        # A tensor of its own, not a view: a view would keep the one before it alive.
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(strides))

    def give(self, value: Tensor, room_bytes: int) -> None:
        """The generated code does not read `value`, or any view of its memory, any more; so many
        bytes may be held from here to the next `take`."""
        storage = value.untyped_storage()
        nbytes = storage.nbytes()
        fits = self.held_bytes + nbytes <= room_bytes
        if fits and self.keeps and held_alone(value, storage):
            self._free.setdefault(nbytes, []).append(storage)
            self.held_bytes += nbytes

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result of a compiled run, uninitialised."""
        elements = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        nbytes = elements * dtype.itemsize if 0 not in shape else 0
        if nbytes < MAPPED_BYTES:  # the heap uses it again itself
            return torch.empty_strided(shape, strides, dtype=dtype)
        blocks = self._lent.setdefault(nbytes, [])
        storage = next((block for block in blocks if is_idle(block)), None)
        if storage is not None:
            made = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), tuple(strides))
            self.reused += 1
            self.shrink_idle(self.idle_bytes)
        else:
            self.shrink_idle(max(0, self.idle_bytes - nbytes))
            made = torch.empty_strided(shape, strides, dtype=dtype)
            blocks.append(made.untyped_storage())
        return made

    def shrink_idle(self, room_bytes: int) -> None:
        """Return lent blocks that nobody holds to the system, the largest first, until no more
        than that is idle."""
        idle = {size: sum(map(is_idle, blocks)) for size, blocks in self._lent.items()}
        total = sum(size * count for size, count in idle.items())
        for size in sorted(idle, reverse=True):
            while total > room_bytes and idle[size]:
                block = next(block for block in self._lent[size] if is_idle(block))
                self._lent[size].remove(block)
                idle[size] -= 1
                total -= size

    def blocks(self) -> Iterator[Tensor]:
        """Everything that is held."""
        for free in self._free.values():
            for storage in free:
                yield torch.empty(0, dtype=torch.uint8).set_(storage)

    def shrink(self, room_bytes: int) -> None:
        """Return blocks to the system, the largest first, until no more than that is held."""
        while self.held_bytes > room_bytes:
            nbytes = max(size for size, free in self._free.items() if free)
            self._free[nbytes].pop()
            self.held_bytes -= nbytes
