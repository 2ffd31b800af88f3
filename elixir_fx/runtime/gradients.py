"""Gradients on their way from the backward to p.grad, wherever that lives.

Called by the generated backward through the engine, once a chunk. A gradient at home on the
device becomes an ordinary p.grad, or is added to it. One at home elsewhere passes through a
block of the arena: what p.grad held is fetched there, the new gradient added, the sum written
home while the backward goes on. Additions are those of autograd's AccumulateGrad, old + new,
so every bit is eager's.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Layout, Slice
from elixir_fx.runtime.away import Source
from elixir_fx.runtime.heap import give_back_pages
from elixir_fx.runtime.hooks import Accumulation, accumulation, pass_by, run_hooks
from elixir_fx.runtime.parameters import ChunkGradient
from elixir_fx.runtime.shards import ShardedHome
from elixir_fx.runtime.store import Region, Store, TensorHome
from elixir_fx.runtime.transfers import Ticket


@dataclass(kw_only=True, eq=False)
class Entry:
    """One parameter that has anything away; `value` and `gradient` are None for what is an
    ordinary tensor."""

    path: str
    parameter: nn.Parameter
    chunk: Chunk
    piece: Slice
    value: TensorHome | ShardedHome | None = None
    gradient: TensorHome | ShardedHome | None = None
    # What p.grad looks at; alive as long as somebody holds the gradient or a view of it.
    held: "weakref.ref[Source] | None" = None

    @property
    def home(self) -> TensorHome | ShardedHome:
        """The home of the value of a parameter that is away."""
        assert self.value is not None, self.path
        return self.value

    @property
    def states_away(self) -> bool:
        away = self.chunk.homes.states is not Tier.DEVICE or self.chunk.sharded
        return self.chunk.trainable and away

    @property
    def on_host(self) -> bool:
        """Whether its update runs on the host, where then all its parts are at home."""
        return self.chunk.update is Tier.HOST

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype


@dataclass(kw_only=True, eq=False)
class _Block:
    """A block of the arena that a chunk's gradients pass through."""

    memory: Tensor
    ticket: Ticket = field(default_factory=Ticket.ready)
    fetching: int | None = None  # the chunk whose old gradient is on its way into it
    used: bool = False  # its pages hold something, or did

    def settle(self) -> None:
        """Wait for what is under way; an error is told once."""
        ticket, self.ticket = self.ticket, Ticket.ready()
        ticket.wait()


# A parameter, its gradient, and whether that may become p.grad without a copy.
Arrival = tuple[Entry, Tensor, bool]


class Reducer:
    """Adds gradients to p.grad, chunk by chunk."""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        chunks: Mapping[int, Sequence[Entry]],
        regions: dict[int, Region],
    ) -> None:
        self._store = store
        self._chunks = chunks
        self._regions = regions
        first, size = layout.gather_bytes, layout.gradient_block_bytes
        self._blocks = [
            _Block(memory=store.arena[first + i * size : first + (i + 1) * size])
            for i in range(layout.gradient_blocks)
        ]
        self._next = 0
        self._previous: int | None = None
        self._follows: dict[int, int] = {}  # which chunk was reduced after which, last time
        self.sources: weakref.WeakSet[Source] = weakref.WeakSet()  # of gradients that are away
        self.undefined: frozenset[str] = frozenset()
        self.shared: frozenset[str] = frozenset()  # other graphs add to these in the same pass
        self._fresh: set[str] = set()  # shared ones that had no gradient when the pass began
        self.reduced_bytes = 0
        self.waited_s = 0.0

    def reduce(
        self, chunk: int, slices: list[int], gradients: list[Tensor], owned: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Add gradients of the chunk's `slices` to their p.grad.

        Answers, per gradient, what autograd must get itself: the gradient where
        autograd.grad() asked for it, else None. Nothing happens where autograd would not
        accumulate. `owned` tells which gradients may become p.grad without a copy.
        """
        entries = self._chunks[chunk]
        answers: list[Tensor | None] = [None] * len(gradients)
        arrived: list[Arrival] = []
        for position, (index, gradient) in enumerate(zip(slices, gradients, strict=True)):
            entry = entries[index]
            if entry.path in self.undefined:
                pass_by(entry.parameter)
                continue
            wanted = accumulation(entry.parameter)
            if wanted is Accumulation.CAPTURE or (
                wanted is Accumulation.ACCUMULATE and self._waits(entry)
            ):
                # Another tensor over its memory: so the recycler sees that somebody holds it.
                answers[position] = torch.ops.aten.alias.default(gradient)
            elif wanted is Accumulation.ACCUMULATE:
                hooked = run_hooks(entry.parameter, gradient)
                arrived.append((entry, hooked, owned[position] and hooked is gradient))
        gradients.clear()
        if arrived:
            self._add(chunk, arrived)
        return answers  # autograd itself runs the post-accumulate hooks, at the pass's end

    def _add(self, chunk: int, arrived: "list[Arrival]") -> None:
        """Add what has arrived to p.grad."""
        if chunk in self._regions:
            self._send_home(chunk, arrived)
        else:
            for entry, gradient, own in arrived:
                accumulate(entry.parameter, gradient, own)

    def _waits(self, entry: Entry) -> bool:
        """Whether autograd must sum up a shared gradient first: eager adds the sum of all uses
        to an old gradient, which is not the same as one use after the other."""
        if entry.path not in self.shared:
            return False
        if entry.parameter.grad is None:
            self._fresh.add(entry.path)
        return entry.path not in self._fresh

    def begin_pass(self, shared: frozenset[str]) -> None:
        """A backward pass begins in which several graphs add to the `shared` parameters."""
        self.shared = shared
        self._fresh.clear()

    def forget(self, chunk: int) -> None:
        """The chunk's gradients are ordinary tensors from now on."""
        self._regions.pop(chunk, None)
        self._follows.clear()
        self.start()

    def is_home(self, entry: Entry) -> bool:
        """Whether p.grad is the ChunkGradient of the parameter's own gradient home."""
        held = entry.parameter.grad
        if not isinstance(held, ChunkGradient) or held.views:
            return False
        # An earlier gradient that somebody kept has its value in memory: the home has another.
        return held.source.home is entry.gradient and held.source.tensor is None

    def _send_home(self, chunk: int, arrived: "list[Arrival]") -> None:
        region = self._regions[chunk]
        block = self._take_block(chunk)
        memory = block.memory[: region.nbytes]
        self._fetch_next(chunk)
        block.settle()
        for entry, gradient, _ in arrived:
            assert isinstance(entry.gradient, TensorHome)
            first = entry.piece.offset * entry.chunk.itemsize
            flat = memory[first : first + entry.gradient.nbytes].view(entry.dtype)
            total = entry.gradient.view(flat)
            held = entry.parameter.grad
            if self.is_home(entry):
                total.add_(gradient)
                continue
            keep_earlier(entry)
            if held is None:
                total.copy_(gradient)
            else:
                total.copy_(held).add_(gradient)  # the user's own tensor is taken over
        block.ticket = self._store.put(region, memory)
        block.fetching = None
        self.reduced_bytes += region.nbytes
        for entry, _, _ in arrived:
            self._at_home(entry)

    def _at_home(self, entry: Entry) -> None:
        """p.grad is what the gradient's home holds."""
        if not self.is_home(entry):
            assert entry.gradient is not None
            source = Source(entry.gradient)
            self.sources.add(source)
            entry.held = weakref.ref(source)
            entry.parameter.grad = ChunkGradient(source)

    def _take_block(self, chunk: int) -> _Block:
        """The block for a chunk's gradients, with their old values in it or on their way."""
        for block in self._blocks:
            if block.fetching == chunk:
                return block
        block = self._free_block()
        self._fetch_old(chunk, block)
        return block

    def _free_block(self) -> _Block:
        """The block whose last use began the longest ago."""
        block = self._blocks[self._next]
        self._next = (self._next + 1) % len(self._blocks)
        block.used = True
        return block

    def _fetch_old(self, chunk: int, block: _Block) -> None:
        block.fetching = chunk
        region = self._regions[chunk]
        after = [] if block.ticket.settled else [block.ticket]
        if any(self.is_home(entry) for entry in self._chunks[chunk]):
            block.ticket = self._store.fetch(region, block.memory[: region.nbytes], after=after)

    def _fetch_next(self, chunk: int) -> None:
        """While this chunk is added up, fetch what the next one is added to: the chunk that
        was reduced after this one the last time."""
        if self._previous is not None:
            self._follows[self._previous] = chunk
        self._previous = chunk
        following = self._follows.get(chunk)
        if following is None or len(self._blocks) < 2 or following == chunk:
            return
        if all(block.fetching != following for block in self._blocks):
            self._fetch_old(following, self._free_block())

    def send(self, region: Region, flat: Tensor) -> None:
        """Copy a contiguous value away, by way of the blocks: in a forward they are free."""
        value = flat.view(torch.uint8)
        size = self._blocks[0].memory.numel()
        for first in range(0, region.nbytes, size):
            piece = value[first : first + size]
            block = self._free_block()
            block.fetching = None
            block.settle()
            memory = block.memory[: piece.numel()]
            memory.copy_(piece)
            block.ticket = self._store.put(region.part(first, piece.numel()), memory)

    def start(self) -> None:
        """A backward begins: what an earlier one left half way is forgotten."""
        self._previous = None
        for block in self._blocks:
            block.fetching = None

    def rest(self) -> None:
        """A forward begins: no gradient passes through the blocks for a while. On a CPU their
        pages go back to the system, for the activations that are about to come."""
        for block in self._blocks:
            if block.used and block.ticket.settled and not block.memory.is_cuda:
                give_back_pages(block.memory)
                block.used = False

    def end(self) -> None:
        """A backward has ended: nothing more of it comes."""

    def pass_over_errors(self) -> None:
        """A call has failed: what failed with it is not told again."""
        for block in self._blocks:
            if block.ticket.failed:
                block.ticket = Ticket.ready()

    def drain(self) -> None:
        """Wait for every gradient that is on its way home."""
        self.start()
        for block in self._blocks:
            block.settle()


def keep_earlier(entry: Entry) -> None:
    """Somebody may still hold an earlier p.grad whose home is about to be written over."""
    source = entry.held() if entry.held is not None else None
    if source is not None:
        source.keep()


def accumulate(parameter: nn.Parameter, gradient: Tensor, own: bool) -> None:
    """As autograd's AccumulateGrad: keep the tensor if nobody else has it and it lies in
    memory as the parameter does, else a copy; afterwards add in place."""
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    elif own and gradient.stride() == parameter.stride():
        parameter.grad = gradient
    else:
        held = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        parameter.grad = held.copy_(gradient)
