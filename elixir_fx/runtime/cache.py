"""The gather cache: blocks of the arena that hold gathered chunks.

Called by the generated code through the engine. The schedule says where each chunk's block
lies and when its transfer starts; that is a promise about speed only. Whatever order calls
come in, `acquire` finds its chunk or fetches it. What the cache holds is never newer than the
chunk's home, so any block that nobody references can be dropped at once.
"""

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from elixir_fx.errors import TierError
from elixir_fx.plan import align
from elixir_fx.runtime.store import Region, Store
from elixir_fx.runtime.transfers import Ticket


class Movable(Protocol):
    """What lies in a block: a chunk, or anything else that is away and comes back."""

    @property
    def nbytes(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def sharded(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Block:
    """One chunk in the arena (or beside it, where the plan's place was taken)."""

    chunk: int
    offset: int
    end: int
    flat: Tensor
    ticket: Ticket
    references: int = 0


class GatherCache:
    """Chunks on the device, by id. Not thread-safe: the engine's lock is held around it."""

    def __init__(
        self,
        store: Store,
        chunks: Mapping[int, Movable],
        homes: Mapping[int, Region],
        gather_bytes: int,
    ) -> None:
        self._store = store
        self._chunks: dict[int, Movable] = dict(chunks)
        self._homes = dict(homes)
        self._gather_bytes = gather_bytes
        self._entered: set[int] = set()
        self._blocks: dict[int, Block] = {}
        self._views: dict[tuple[int, int], Tensor] = {}
        self._warned = False
        self.hits = 0
        self.misses = 0
        self.waited_s = 0.0
        self.gathered_bytes = 0

    def acquire(self, chunk: int, offset: int) -> Tensor:
        """The chunk's elements, 1-D; stays valid until `release`. Fetches them if need be."""
        block = self._at_its_place(chunk, offset)
        if block is None:
            self.misses += 1
            block = self._load(chunk, offset)
        else:
            self.hits += 1
        ticket = block.ticket
        started = time.perf_counter()
        settled = ticket.settled
        try:
            ticket.wait()
        except TierError:
            if not block.references:
                del self._blocks[chunk]  # its next gather tries again
            raise
        if not settled:
            self.waited_s += time.perf_counter() - started
        block.references += 1
        return block.flat

    def start(self, chunk: int, offset: int) -> None:
        """Begin the chunk's transfer if it is not there. Does nothing where the block is still
        in use: its gather will fetch it then."""
        if self._at_its_place(chunk, offset) is not None:
            return
        end = offset + align(self._chunks[chunk].nbytes)
        if all(not self._overlaps(block, offset, end) for block in self._referenced()):
            self._load(chunk, offset)

    def release(self, chunk: int) -> None:
        """One reader of the chunk is done; its bytes stay until someone needs the place."""
        block = self._blocks[chunk]
        block.references -= 1
        if block.end > self._gather_bytes and not block.references:
            del self._blocks[chunk]  # it lay beside the arena

    def enter(self, number: int, moved: Movable, home: Region) -> None:
        """There is one more thing to gather, beside the chunks."""
        self._chunks[number] = moved
        self._homes[number] = home
        self._entered.add(number)

    def leave(self, number: int) -> None:
        """It is there no more."""
        del self._chunks[number], self._homes[number]
        self._entered.discard(number)
        block = self._blocks.get(number)
        if block is not None and not block.references:
            block.ticket.finish()
            del self._blocks[number]
        for key in [key for key in self._views if key[0] == number]:
            del self._views[key]

    def release_all(self) -> None:
        """Drop every reference, and what could not be fetched: a call was cut short by an
        exception."""
        for chunk, block in list(self._blocks.items()):
            block.references = 0
            if block.ticket.failed:
                del self._blocks[chunk]

    def invalidate(self, chunk: int) -> None:
        """The chunk's home has changed: refresh a block in use, forget any other."""
        block = self._blocks.get(chunk)
        if block is None:
            return
        block.ticket.finish()
        if block.references:
            block.ticket = self._bring(chunk, block.flat, [])
            block.ticket.wait()
        else:
            del self._blocks[chunk]

    def clear(self) -> None:
        """Forget everything that nobody references, after its transfer has ended."""
        for chunk, block in list(self._blocks.items()):
            block.ticket.finish()
            if not block.references:
                del self._blocks[chunk]

    @property
    def gathered(self) -> list[int]:
        """Chunks that somebody references."""
        return [block.chunk for block in self._referenced()]

    def _referenced(self) -> list[Block]:
        return [block for block in self._blocks.values() if block.references]

    @staticmethod
    def _overlaps(block: Block, offset: int, end: int) -> bool:
        return block.offset < end and offset < block.end

    def _at_its_place(self, chunk: int, offset: int) -> Block | None:
        """The chunk's block, if it is there; one that another graph left elsewhere is first
        copied to the planned place, where it is in no other chunk's way."""
        block = self._blocks.get(chunk)
        if block is None or block.references or block.offset == offset:
            return block
        end = offset + align(self._chunks[chunk].nbytes)
        if any(self._overlaps(other, offset, end) for other in self._referenced()):
            return block
        block.ticket.finish()
        if self._overlaps(block, offset, end):
            del self._blocks[chunk]
            return None
        try:
            block.ticket.wait()
        except TierError:
            del self._blocks[chunk]  # its gather tries again
            return None
        for other in list(self._blocks.values()):
            if self._overlaps(other, offset, end):
                other.ticket.finish()
                del self._blocks[other.chunk]
        flat = self._view(chunk, offset).copy_(block.flat)
        self._blocks[chunk] = Block(chunk, offset, end, flat, Ticket.ready())
        return self._blocks[chunk]

    def _load(self, chunk: int, offset: int) -> Block:
        nbytes = self._chunks[chunk].nbytes
        size = align(nbytes)
        place = self._free_place(offset, size)
        before: list[Ticket] = []
        if place is None:
            offset = self._gather_bytes + 1  # beside the arena: overlaps nothing
            flat = self._beside(chunk)
        else:
            offset = place
            for other in list(self._blocks.values()):
                if self._overlaps(other, offset, offset + size):
                    before.append(other.ticket)
                    del self._blocks[other.chunk]
            flat = self._view(chunk, offset)
        unsettled = [ticket for ticket in before if not ticket.settled]
        ticket = self._bring(chunk, flat, unsettled)
        block = Block(chunk, offset, offset + size, flat, ticket)
        self._blocks[chunk] = block
        if chunk not in self._entered:  # bytes of parameters
            self.gathered_bytes += nbytes
        return block

    def _bring(self, chunk: int, flat: Tensor, after: list[Ticket]) -> Ticket:
        """Start to fill a block with the chunk."""
        return self._store.fetch(self._homes[chunk], flat, after=after)

    def _free_place(self, wanted: int, size: int) -> int | None:
        """The planned offset if nobody uses it, else the first gap between blocks in use."""
        used = sorted((b.offset, b.end) for b in self._referenced() if b.end <= self._gather_bytes)
        if all(end <= wanted or wanted + size <= start for start, end in used):
            return wanted if wanted + size <= self._gather_bytes else None
        gap = 0
        for start, end in used:
            if start - gap >= size:
                return gap
            gap = max(gap, end)
        return gap if gap + size <= self._gather_bytes else None

    def _view(self, chunk: int, offset: int) -> Tensor:
        key = (chunk, offset)
        if key not in self._views:
            known = self._chunks[chunk]
            dtype = getattr(torch, known.dtype)
            self._views[key] = self._store.arena[offset : offset + known.nbytes].view(dtype)
        return self._views[key]

    def _beside(self, chunk: int) -> Tensor:
        known = self._chunks[chunk]
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"elixir_fx: the plan's places in the gather cache are all in use; chunk {chunk} "
                f"({known.title}) is gathered beside it, over the budget. Calls that overlap "
                "(a forward inside a backward hook, threads) need a larger memory budget",
                stacklevel=2,
            )
        return torch.empty(
            known.numel, dtype=getattr(torch, known.dtype), device=self._store.arena.device
        )
