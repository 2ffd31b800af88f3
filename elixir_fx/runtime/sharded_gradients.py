"""Gradients of one of several ranks: summed over all of them on their way to p.grad.

A chunk's gradients are written side by side into a block; when every rank has done so, each sums
up its own share of all ranks' blocks and adds that to p.grad at home. The sums are made by a lane
while the backward goes on. They are in the order of the ranks that sent them, so a rank's share
has one value, whoever reads it.

Every rank must sum up the same chunks in the same order. At the start of a backward the ranks
compare what theirs will bring; where that differs (an expert that one rank did not use), each
first adds up its own gradients in ordinary tensors, and in the end all of them sum up every
chunk that any rank has gradients for, a missing one counting as zero. The same way is used
under `no_sync()`: p.grad is then this rank's own part of a sum that is still to be made.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Layout, align
from elixir_fx.runtime.gradients import Arrival, Entry, Reducer, accumulate, keep_earlier
from elixir_fx.runtime.hooks import Accumulation, accumulation
from elixir_fx.runtime.parameters import ChunkGradient
from elixir_fx.runtime.ranks import Proposal, add_up
from elixir_fx.runtime.shards import OverwrittenHome, ShardedHome, Shards
from elixir_fx.runtime.store import Region, Store
from elixir_fx.runtime.transfers import Ticket, fences, lane_of


@dataclass(eq=False)
class _Block:
    """Room for one chunk's gradients, for what other ranks send of theirs, and for old values.

    `theirs` are the blocks of all ranks where these share them, else empty.
    """

    mine: Tensor
    theirs: list[Tensor]
    ticket: Ticket = field(default_factory=Ticket.ready)


class ShardedReducer(Reducer):
    """Adds gradients, summed over the ranks, to p.grad, chunk by chunk.

    `syncs`: False within no_sync(). `mean`: divide the sum by the number of ranks.
    """

    def __init__(
        self,
        layout: Layout,
        store: Store,
        chunks: Mapping[int, Sequence[Entry]],
        regions: dict[int, Region],
        shards: Shards,
        mean: bool,
    ) -> None:
        super().__init__(layout, store, chunks, regions)
        self._blocks.clear()  # those of one rank alone
        self.syncs = True
        self._ranks = shards.ranks
        self._shards = shards
        self._divisor = self._ranks.size * self._ranks.replicas if mean else 1
        # A sum that exists already, as every rank's part of a sum that is still to be made.
        self._share_of_old = self._divisor / (self._ranks.size * self._ranks.replicas)
        self._lane = lane_of("elixir reduces", store.device)
        self._layout = layout
        self._own_blocks = self._make_blocks()
        self._turn = 0
        self._last = Ticket.ready()
        self._proposal: Proposal | None = None
        self._apart = False  # the ranks' backwards differ: sum up at the end
        self._left_over = False  # some rank has gradients that were never summed
        self._unsummed: dict[str, Entry] = {}  # with ordinary p.grad of this rank alone

    def _make_blocks(self) -> list[_Block]:
        layout, size = self._layout, self._layout.gradient_block_bytes
        if not layout.group.shared:
            first = layout.gather_bytes
            arena = self._store.arena
            return [
                _Block(arena[first + i * size : first + (i + 1) * size], [])
                for i in range(layout.gradient_blocks)
            ]
        memory = self._ranks.share(self._ranks.size * layout.block_bytes)
        rows = memory.view(self._ranks.size, layout.gradient_blocks, size)
        return [
            _Block(rows[self._ranks.rank, i], list(rows[:, i]))
            for i in range(layout.gradient_blocks)
        ]

    # -- one backward ------------------------------------------------------------------------

    def propose(self, digest: int) -> None:
        """A backward begins that will bring gradients in an order of this digest."""
        self._apart = False
        self._left_over = False
        left_over = bool(self._unsummed)
        self._proposal = self._ranks.propose("backward", digest, left_over) if self.syncs else None

    def _waits(self, entry: Entry) -> bool:
        """Never: what autograd added by itself would be this rank's gradient alone."""
        return False

    def coming(self, reduces: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[object, ...]:
        """What of a backward's reduces this pass will bring: autograd may want some gradients
        for itself, or none, and outputs that no loss came from give none."""
        found = []
        for chunk, slices in reduces:
            entries = [self._chunks[chunk][index] for index in slices]
            paths = tuple(
                entry.path
                for entry in entries
                if entry.path not in self.undefined
                and accumulation(entry.parameter) is Accumulation.ACCUMULATE
            )
            if paths:
                found.append((chunk, paths))
        return tuple(found)

    def _add(self, chunk: int, arrived: list[Arrival]) -> None:
        self._settle_proposal()
        if self.syncs and not self._apart:
            self._sum_up(chunk, arrived)
            return
        for entry, gradient, own in arrived:
            self._take_back(entry)
            accumulate(entry.parameter, gradient, own)
            self._unsummed[entry.path] = entry

    def _settle_proposal(self) -> None:
        if self._proposal is not None:
            started = time.perf_counter()
            proposal, self._proposal = self._proposal, None
            self._apart = not proposal.same()
            self._left_over = proposal.marked()
            self.waited_s += time.perf_counter() - started

    def end(self) -> None:
        """A backward has ended: every sum of it is made, on this rank and, as far as this one
        has a part in them, on the others."""
        self._settle_proposal()
        if self.syncs:
            if self._apart or self._left_over:  # as all ranks see it
                self._sum_up_rest()
            started = time.perf_counter()
            self.drain()
            self.waited_s += time.perf_counter() - started
            self._shards.forget()

    def _sum_up_rest(self) -> None:
        """Sum up, in the order of the chunks, what any rank has in ordinary gradients."""
        everyone = self._ranks.exchange(sorted(self._unsummed))
        wanted = {path for paths in everyone for path in paths}
        for chunk, entries in self._chunks.items():
            arrived: list[Arrival] = []
            for entry in entries:
                if entry.path not in wanted:
                    continue
                self._take_back(entry)
                held = entry.parameter.grad
                if held is None:
                    held = torch.zeros_like(entry.parameter, memory_format=torch.preserve_format)
                entry.parameter.grad = None
                arrived.append((entry, held, False))
            if arrived:
                self._sum_up(chunk, arrived)
        self._unsummed.clear()
        self._apart = False

    def _take_back(self, entry: Entry) -> None:
        """p.grad, summed up earlier, as this rank's part of a sum that is still to be made: its
        share, as often as the sum will be divided by, so that the sum has it once."""
        held = entry.parameter.grad
        if not entry.chunk.sharded and held is not None and entry.path not in self._unsummed:
            if self._share_of_old != 1:  # every rank has the old sum
                entry.parameter.grad = held * self._share_of_old
            return
        if not self.is_home(entry):
            return
        home = entry.gradient
        assert isinstance(home, ShardedHome)
        self.drain()
        whole = torch.zeros(home.span, dtype=home.dtype, device=home.device)
        factor = self._share_of_old * self._ranks.size  # one rank of each replica has it
        whole[home.first : home.end] = home.own.load() * factor
        entry.parameter.grad = home.view(whole)
        self._unsummed[entry.path] = entry

    # -- a sum ---------------------------------------------------------------------------------

    def _sum_up(self, chunk: int, arrived: list[Arrival]) -> None:
        known = self._layout.chunks[chunk]
        block = self._own_blocks[self._turn]
        self._turn = (self._turn + 1) % len(self._own_blocks)
        started = time.perf_counter()
        block.ticket.wait()
        self.waited_s += time.perf_counter() - started
        flat = block.mine[: known.nbytes].view(arrived[0][0].dtype)
        present = {entry.path for entry, _, _ in arrived}
        for piece in known.slices:
            if piece.path not in present:
                flat[piece.offset : piece.offset + piece.span].zero_()
        adds: list[tuple[Entry, bool]] = []
        for entry, gradient, _ in arrived:
            piece = entry.piece
            total = flat[piece.offset : piece.offset + piece.span].as_strided(
                piece.shape, piece.strides
            )
            at_home = self.is_home(entry)
            if not known.sharded:
                self._take_back(entry)
            held = entry.parameter.grad
            if held is None or at_home:
                total.copy_(gradient)
            else:
                total.copy_(held).add_(gradient)  # the user's, or of a backward without a sum
            self._unsummed.pop(entry.path, None)
            adds.append((entry, at_home))
            if not at_home and known.sharded:
                self._part_from_earlier(entry)
        self._shards.forget()  # what was read of these gradients is about to change
        for entry, _ in adds:  # what the lane writes to is there before it begins
            if known.sharded:
                self._at_home(entry)
            elif entry.parameter.grad is None:
                entry.parameter.grad = torch.empty_like(
                    entry.parameter, memory_format=torch.preserve_format
                )
        how = self._sum_shares if known.sharded else self._sum_whole
        job = partial(how, known, block, flat, adds)
        behind = [self._last, *fences(flat.device)]
        self._last = self._lane.submit(job, behind=behind)
        block.ticket = self._last
        self.reduced_bytes += known.nbytes

    def _part_from_earlier(self, entry: Entry) -> None:
        """Somebody may still hold an earlier p.grad whose home is about to be written over. Where
        reading takes all ranks, it cannot be read any more: others may not hold theirs."""
        if self._layout.group.shared:
            keep_earlier(entry)
            return
        source = entry.held() if entry.held is not None else None
        home = entry.gradient
        if source is not None and source.tensor is None and isinstance(home, ShardedHome):
            source.home = OverwrittenHome(home)

    def _sum_shares(
        self, chunk: Chunk, block: _Block, flat: Tensor, adds: list[tuple[Entry, bool]]
    ) -> Ticket | None:
        """On the lane: add up this rank's share of the chunk and take it home."""
        ranks = self._ranks
        first = ranks.rank * chunk.share_numel
        if block.theirs:
            ranks.meet()
            end = first + chunk.share_numel
            rows = [memory[: chunk.nbytes].view(flat.dtype)[first:end] for memory in block.theirs]
            share = add_up(rows, rows[0])  # nobody else reads this part of any block
        else:
            received = block.mine[align(chunk.nbytes) :][: chunk.nbytes].view(flat.dtype)
            share = ranks.scatter_sum(flat, received)
        ranks.sum_replicas(share)
        if self._divisor != 1:
            share.div_(self._divisor)
        ticket = self._take_home(chunk, block, share, adds)
        if block.theirs:
            ranks.meet()  # everybody has read this block
        return ticket

    def _take_home(
        self, chunk: Chunk, block: _Block, share: Tensor, adds: list[tuple[Entry, bool]]
    ) -> Ticket | None:
        region = self._regions[chunk.id]
        if region.tier is Tier.DEVICE:
            home = self._store.view(region).view(share.dtype)
        else:
            tail = block.mine[block.mine.numel() - align(chunk.share_bytes) :]
            home = tail[: chunk.share_bytes].view(share.dtype)
            if any(at_home for _, at_home in adds):
                self._store.fetch(region, home).wait()
        start = self._ranks.rank * chunk.share_numel
        for entry, at_home in adds:
            begin, end = chunk.own(entry.piece, self._ranks.rank)
            if begin == end:
                continue
            low, high = entry.piece.offset + begin - start, entry.piece.offset + end - start
            if at_home:
                home[low:high].add_(share[low:high])
            else:
                home[low:high].copy_(share[low:high])
        if region.tier is Tier.DEVICE:
            return None
        return self._store.put(region, home)

    def _sum_whole(
        self, chunk: Chunk, block: _Block, flat: Tensor, adds: list[tuple[Entry, bool]]
    ) -> Ticket | None:
        """On the lane: add up a chunk that every rank has whole."""
        total = self._ranks.sum_whole(flat)
        if self._divisor != 1:
            total.div_(self._divisor)
        for entry, _ in adds:
            piece = entry.piece
            part = total[piece.offset : piece.offset + piece.span]
            assert entry.parameter.grad is not None
            entry.parameter.grad.copy_(part.as_strided(piece.shape, piece.strides))
        return None

    # -- the rest ------------------------------------------------------------------------------

    def check_summed(self) -> list[str]:
        """Paths of the gradients that are this rank's own still."""
        return [
            path
            for path, entry in self._unsummed.items()
            if entry.parameter.grad is not None
            and not isinstance(entry.parameter.grad, ChunkGradient)
        ]

    def rest(self) -> None:
        """A forward begins: gradients that the user has dropped need no sum. The blocks stay as
        they are, since other ranks may look at them."""
        for path, entry in list(self._unsummed.items()):
            if entry.parameter.grad is None:
                del self._unsummed[path]

    def drain(self) -> None:
        """Wait for every sum that is being made."""
        super().drain()
        last, self._last = self._last, Ticket.ready()
        last.wait()
        for block in self._own_blocks:
            block.ticket.wait()

    def close(self) -> None:
        self._lane.stop()
