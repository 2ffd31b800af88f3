"""Activations that are away between forward and backward.

Called by generated code through the engine. `offload` copies a value through the blocks of the
gradients, which the forward does not need, to a piece of the tier, and answers with a handle: a
number in a tensor of its own, which autograd keeps in the value's place. `reload` brings the value
into its block of the gather area, `recall` begins to; `drop` lets the block go. The piece is free
when nobody holds the handle any more, however many backwards read it until then.

Where the tier has no room left (more forwards than the plan knew of wait for their backward), the
value itself is the handle: that takes memory and no time.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import torch
from torch import Tensor

from elixir_fx.plan import Layout, align
from elixir_fx.runtime.accumulation import is_idle
from elixir_fx.runtime.cache import GatherCache
from elixir_fx.runtime.gradients import Reducer
from elixir_fx.runtime.meter import uncounted
from elixir_fx.runtime.store import Region, Store

FIRST = 1 << 32  # numbers of activations in the gather cache, beyond those of chunks


@dataclass(frozen=True, slots=True)
class Saved:
    """A value that is away, as the gather cache knows a chunk."""

    nbytes: int
    numel: int
    dtype: str
    title: str
    region: Region
    held: torch.UntypedStorage  # of the handle
    shape: torch.Size
    strides: tuple[int, ...]
    sharded: bool = False


class Offloads:
    """What is away of one model. Not thread-safe: the engine's lock is held around it."""

    def __init__(self, layout: Layout, store: Store, cache: GatherCache, reducer: Reducer) -> None:
        self._cache = cache
        self._reducer = reducer
        self._away: dict[int, Saved] = {}
        self._next = FIRST
        self._space: Region | None = None
        self._free: list[tuple[int, int]] = []  # (first, end) in the space, ascending
        if layout.saved_bytes:
            self._space = store.allocate(layout.saved_tier, layout.saved_bytes)
            self._free = [(0, layout.saved_bytes)]

    def offload(self, value: Tensor) -> Tensor:
        """Send a value away; what to ask for to get it back."""
        flat = _flat(value)
        region = None if flat is None else self._take(flat.nbytes)
        if flat is None or region is None:
            # Another tensor over its memory: so the recycler sees that somebody holds it.
            kept: Tensor = torch.ops.aten.alias.default(value)
            return kept
        number, self._next = self._next, self._next + 1
        with uncounted():
            handle = torch.tensor(number)
        self._away[number] = saved = Saved(
            nbytes=flat.nbytes,
            numel=flat.numel(),
            dtype=str(value.dtype).removeprefix("torch."),
            title="an activation",
            region=region,
            held=handle.untyped_storage(),
            shape=value.shape,
            strides=value.stride(),
        )
        self._cache.enter(number, saved, region)
        self._reducer.send(region, flat)
        return handle

    def recall(self, handle: Tensor, offset: int) -> None:
        """Begin to bring a value back."""
        number = self._number(handle)
        if number is not None:
            self._cache.start(number, offset)

    def reload(self, handle: Tensor, offset: int) -> Tensor:
        """The value, until its `drop`."""
        number = self._number(handle)
        if number is None:
            return handle
        saved = self._away[number]
        return self._cache.acquire(number, offset).as_strided(saved.shape, saved.strides)

    def drop(self, handle: Tensor) -> None:
        """Nobody reads what came back any more."""
        number = self._number(handle)
        if number is not None:
            self._cache.release(number)

    @property
    def nbytes(self) -> int:
        """Bytes that are away."""
        return sum(saved.nbytes for saved in self._away.values())

    def _number(self, handle: Tensor) -> int | None:
        """What a handle stands for; None if it is the value itself."""
        if handle.dim() or handle.dtype is not torch.int64:
            return None
        number = int(handle)
        saved = self._away.get(number)
        same = saved is not None and saved.held.data_ptr() == handle.untyped_storage().data_ptr()
        return number if same else None

    def _take(self, nbytes: int) -> Region | None:
        """A free piece of the tier."""
        self._reap()
        size = align(nbytes)
        for index, (first, end) in enumerate(self._free):
            if end - first >= size:
                self._free[index : index + 1] = [(first + size, end)] if end - first > size else []
                assert self._space is not None
                return self._space.part(first, nbytes, size - nbytes)
        return None

    def _reap(self) -> None:
        """Free the pieces whose handle nobody holds."""
        for number, saved in list(self._away.items()):
            if is_idle(saved.held):
                del self._away[number]
                self._cache.leave(number)
                self._give(saved.region)

    def _give(self, region: Region) -> None:
        assert self._space is not None
        first = region.offset - self._space.offset
        end = first + align(region.nbytes)
        place = bisect_left(self._free, (first, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == first:
            first = self._free.pop(place - 1)[0]
        insort(self._free, (first, end))


def _flat(value: Tensor) -> Tensor | None:
    """The memory of a value that fills it without gaps, 1-D; None for any other."""
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    if not value.numel() or span != value.numel():
        return None
    return value.as_strided((span,), (1,))
