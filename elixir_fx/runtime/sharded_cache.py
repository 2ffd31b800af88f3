"""The gather cache of one of several ranks: chunks brought together from the shares of all.

Where the ranks share the memory that a chunk is at home in, it is read there and takes no block.
Any other chunk is brought into its block by all ranks: each its own share from its home, then
all of them each other's. What a block holds follows from the sequence of calls alone, which is
the same on every rank (law 1).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from elixir_fx.plan import Chunk
from elixir_fx.runtime.cache import GatherCache
from elixir_fx.runtime.shards import Shards
from elixir_fx.runtime.store import Region, Store
from elixir_fx.runtime.transfers import Ticket


class ShardedCache(GatherCache):
    """A gather cache over `shards`. Not thread-safe: the engine's lock is held around it."""

    def __init__(
        self,
        store: Store,
        chunks: Mapping[int, Chunk],
        homes: Mapping[int, Region],
        gather_bytes: int,
        shards: Shards,
    ) -> None:
        super().__init__(store, chunks, homes, gather_bytes)
        self._shards = shards
        self._seen = {
            identity: whole.view(getattr(torch, chunk.dtype))
            for identity, chunk in chunks.items()
            if (whole := shards.whole(identity)) is not None
        }

    def acquire(self, chunk: int, offset: int) -> Tensor:
        """The chunk's elements, 1-D; stays valid until `release`. Fetches them if need be."""
        seen = self._seen.get(chunk)
        if seen is None:
            return super().acquire(chunk, offset)
        self.hits += 1
        return seen

    def start(self, chunk: int, offset: int) -> None:
        """Begin to bring the chunk together, as every rank does here."""
        if chunk not in self._seen:
            super().start(chunk, offset)

    def release(self, chunk: int) -> None:
        """One reader of the chunk is done."""
        if chunk not in self._seen:
            super().release(chunk)

    def _bring(self, chunk: int, flat: Tensor, after: list[Ticket]) -> Ticket:
        if not self._chunks[chunk].sharded:
            return super()._bring(chunk, flat, after)
        return self._shards.bring(self._homes[chunk], flat, after)
