"""The engine of one of several ranks: homes hold shares, gathers and reduces meet the others.

Everything else is `Engine`: generated code and the bound optimizer call the same methods.
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from elixir_fx.errors import ElixirError
from elixir_fx.plan import Chunk, Layout
from elixir_fx.runtime.cache import GatherCache
from elixir_fx.runtime.engine import Engine, Half
from elixir_fx.runtime.gradients import Entry, Reducer
from elixir_fx.runtime.ranks import Ranks
from elixir_fx.runtime.sharded_cache import ShardedCache
from elixir_fx.runtime.sharded_gradients import ShardedReducer
from elixir_fx.runtime.shards import ShardedHome, Shards
from elixir_fx.runtime.store import Store


class ShardedEngine(Engine):
    """Runtime of one compiled model on one of several ranks. `mean`: how gradients are summed."""

    reducer: ShardedReducer

    def __init__(
        self,
        layout: Layout,
        store: Store,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        ranks: Ranks,
        mean: bool,
    ) -> None:
        self.ranks = ranks
        self.shards = Shards(ranks, layout, store)
        self._mean = mean
        super().__init__(layout, store, parameters, device)
        self.rank = ranks.rank

    def _enter(self, chunk: Chunk, parameters: Mapping[str, nn.Parameter]) -> None:
        homes = chunk.homes
        dtype = getattr(torch, chunk.dtype)
        if not chunk.sharded:
            super()._enter(chunk, parameters)
            return
        for piece in chunk.slices:
            parameter = parameters[piece.path]
            entry = Entry(path=piece.path, parameter=parameter, chunk=chunk, piece=piece)
            entry.value = self.shards.home(
                chunk, piece, "parameters", homes.parameters, dtype, lambda: self._changed(chunk.id)
            )
            if chunk.trainable:
                entry.gradient = self.shards.home(chunk, piece, "gradients", homes.gradients, dtype)
            self.entries[parameter] = entry
            self._by_chunk.setdefault(chunk.id, []).append(entry)
        share_bytes = chunk.share_bytes
        region = self.shards.region(chunk, "parameters", homes.parameters, share_bytes)
        self._regions[chunk.id] = region
        if chunk.trainable:
            region = self.shards.region(chunk, "gradients", homes.gradients, share_bytes)
            self._gradient_regions[chunk.id] = region

    def _changed(self, chunk: int) -> None:
        """Somebody wrote a parameter of the chunk: gathered copies of it are stale."""
        with self.lock:
            if self.shards.whole(chunk) is None:
                self.cache.invalidate(chunk)
        self.written()

    def _make_cache(self, chunks: Mapping[int, Chunk]) -> GatherCache:
        gather_bytes = self.layout.gather_bytes
        return ShardedCache(self.store, chunks, self._regions, gather_bytes, self.shards)

    def _make_reducer(self) -> Reducer:
        return ShardedReducer(
            self.layout,
            self.store,
            self._by_chunk,
            self._gradient_regions,
            self.shards,
            self._mean,
        )

    def move_home(self, parameter: nn.Parameter, value: Tensor) -> None:
        """As the first rank has it, to every rank's share."""
        super().move_home(parameter, self.ranks.broadcast(value))

    def set_syncs(self, syncs: bool) -> None:
        """Whether backwards from now on sum gradients over the ranks."""
        self.reducer.syncs = syncs

    def gradient_mode(self) -> tuple[bool, ...]:
        """As of one rank; and whether gradients are summed over the ranks."""
        return (*super().gradient_mode(), self.reducer.syncs)

    def constant_bytes(self) -> int:
        """Device bytes that are always there: this rank's shares among them."""
        ordinary = super().constant_bytes()
        return ordinary + self.shards.resident_bytes + self.layout.shared_bytes

    def state_home(self, parameter: nn.Parameter, name: str, like: Tensor) -> ShardedHome:
        """The home of one element-wise state of a parameter; allocated with its chunk's."""
        entry = self.entries[parameter]
        chunk = entry.chunk
        return self.shards.home(chunk, entry.piece, name, chunk.homes.states, like.dtype)

    def forget_states(self) -> None:
        """Another optimizer comes: the memory of the states so far is its states'."""
        self.shards.forget_states()

    @contextmanager
    def update_memory(self) -> Iterator[Tensor]:
        """The whole arena, once no rank reads parameters or gradients any more."""
        self.check_step()
        with self.ranks.together("in the optimizer's step"):
            self.reducer.drain()
            self.shards.before_write()
            with super().update_memory() as arena:
                yield arena
            self.shards.before_read()  # from here on every rank may read, whatever the others do

    def check_step(self) -> None:
        """ElixirError for gradients that were never summed over the ranks."""
        paths = self.reducer.check_summed()
        if paths:
            raise ElixirError(
                f"{paths[0]} and {len(paths) - 1} others have gradients of this rank alone: they "
                "were accumulated under no_sync(). Leave it before the last backward of a step"
            )

    @contextmanager
    def running(self, half: Half) -> Iterator[None]:
        """Around one half of a step. Where the ranks meet in it, an error ends it on all.

        RankError on every rank if their gathers differ; reduces may.
        """
        self.shards.forget()
        self.shards.before_read()
        if not half.gathers and not half.backward:
            with super().running(half):
                yield
            return
        what = "backward" if half.backward else "forward"
        with self.ranks.together(f"in its {what}"):
            if half.gathers:
                digest = zlib.crc32(repr(half.gathers).encode())
                if not self.ranks.agree(f"gather for a {what}", digest):
                    self.ranks.disagree(f"a {what} that gathers chunks {half.gathers}")
            if half.backward:
                coming = repr(self.reducer.coming(half.reduces))
                self.reducer.propose(zlib.crc32(coming.encode()))
            with super().running(half):
                yield
            if half.backward:
                self.reducer.end()

    def close(self) -> None:
        """Give back memory, file, threads and connections."""
        self.reducer.close()
        self.shards.close()
        super().close()
