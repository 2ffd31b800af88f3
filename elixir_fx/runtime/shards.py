"""This rank's shares of the chunks, and whole tensors made of the shares of all ranks.

A chunk that several ranks train is cut into equal parts, one at home with each rank. `Shards`
holds this rank's parts in device memory and says when ranks must wait for each other; a
`ShardedHome` is the home of one whole parameter, gradient or optimizer state of such a chunk:
writing it writes this rank's elements, reading it brings all of them together.

Where the ranks of a host share memory, parameters and gradients at home there lie chunk by
chunk in memory that all of them see, so reading is looking. What one rank may read another
must not write meanwhile: `before_write` waits until all ranks are there, and the first
`before_read` after it until all have written. Every rank makes the same calls.

Elsewhere reading is a collective: each rank brings its part, and the chunk that was read last is
kept until something is written, so that reading parameter by parameter costs one exchange a
chunk.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from elixir_fx.errors import ElixirError
from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Layout, Slice, align
from elixir_fx.runtime.ranks import Ranks
from elixir_fx.runtime.store import Region, Store, TensorHome
from elixir_fx.runtime.transfers import Ticket, fences, lane_of

PARTS = ("parameters", "gradients")
Key = tuple[int, str]  # a chunk, and what of it: "parameters", "gradients", or a state's name


class Shards:
    """What one rank has of the chunks, and how it reads the rest."""

    def __init__(self, ranks: Ranks, layout: Layout, store: Store) -> None:
        self.ranks = ranks
        self._lane = lane_of("elixir gathers", store.device)
        self.resident_bytes = 0
        self._store = store
        self._shared = layout.group.shared
        self._regions: dict[Key, Region] = {}
        self._spare: dict[int, list[Region]] = {}  # of states nobody uses any more, by chunk
        self._wholes: dict[Key, Tensor] = {}  # memory of whole chunks that every rank sees
        self._read: tuple[Key, Tensor] | None = None  # the chunk that was brought together last
        self._last = Ticket.ready()
        self._written = False
        if self._shared:
            self._share(layout)

    def _share(self, layout: Layout) -> None:
        """One piece of memory for all that is at home here, seen by every rank."""
        keys = []
        for chunk in layout.chunks:
            if chunk.sharded and chunk.homes.parameters is Tier.DEVICE:
                keys.append((chunk, "parameters"))
            if chunk.sharded and chunk.trainable and chunk.homes.gradients is Tier.DEVICE:
                keys.append((chunk, "gradients"))
        memory = self.ranks.share(sum(align(chunk.nbytes) for chunk, _ in keys))
        offset = 0
        for chunk, what in keys:
            self._wholes[chunk.id, what] = memory[offset : offset + chunk.nbytes]
            offset += align(chunk.nbytes)

    def whole(self, chunk: int, what: str = "parameters") -> Tensor | None:
        """A whole chunk in memory that all ranks see, as bytes; None where there is none."""
        return self._wholes.get((chunk, what))

    def region(self, chunk: Chunk, what: str, tier: Tier, nbytes: int) -> Region:
        """This rank's part of something of a chunk, `nbytes` long; made at the first call."""
        key = (chunk.id, what)
        if key not in self._regions:
            spare = self._spare.get(chunk.id, [])
            again = next((region for region in spare if region.nbytes == nbytes), None)
            if again is not None:
                spare.remove(again)
                self._regions[key] = again
            elif tier is not Tier.DEVICE:
                self._regions[key] = self._store.allocate(tier, align(nbytes)).part(0, nbytes)
            else:
                whole = self._wholes.get(key)
                first = self.ranks.rank * nbytes if whole is not None else 0
                memory = None if whole is None else whole[first : first + nbytes]
                self._regions[key] = self._store.reside(nbytes, memory)
                self.resident_bytes += nbytes
        return self._regions[key]

    def home(
        self,
        chunk: Chunk,
        piece: Slice,
        what: str,
        tier: Tier,
        dtype: torch.dtype,
        written: Callable[[], None] = lambda: None,
    ) -> "ShardedHome":
        """The home of a whole tensor. `what` is "parameters", "gradients" or a state's name."""
        if what not in PARTS:  # a state: another optimizer may have one of this name
            what = f"{what} ({dtype})"
        region = self.region(chunk, what, tier, chunk.share_numel * dtype.itemsize)
        return ShardedHome(self, chunk, piece, what, region, dtype, written)

    def forget_states(self) -> None:
        """Let another optimizer's states have the memory of those so far."""
        for chunk, what in [key for key in self._regions if key[1] not in PARTS]:
            self._spare.setdefault(chunk, []).append(self._regions.pop((chunk, what)))
        self._read = None

    # -- who waits for whom ----------------------------------------------------------------

    def before_write(self) -> None:
        """Return when no rank reads any more what is about to be written."""
        self._read = None
        if self._shared:
            self.ranks.agree("write parameters or gradients")
            self._written = True

    def before_read(self) -> None:
        """Return when what the ranks have written can be read."""
        if self._written:
            self.ranks.agree("read what was written")
            self._written = False

    def forget(self) -> None:
        """Something is about to be written, by this rank's own clock: nothing read is kept."""
        self._read = None

    # -- bringing shares together ----------------------------------------------------------

    def bring(self, region: Region, flat: Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Start to fill `flat`, a chunk's worth, with the parts of all ranks; in the order of
        calls, which is the same on all of them."""
        share = flat.numel() // self.ranks.size
        own = flat[self.ranks.rank * share : (self.ranks.rank + 1) * share]
        ranks = self.ranks
        before = list(after)
        here = self._store.view(region) if region.tier is Tier.DEVICE else None
        if here is None:
            before = [self._store.fetch(region, own, after)]

        def gather() -> None:
            if here is not None:
                own.view(torch.uint8).copy_(here)
            ranks.gather(flat)

        # Behind the one before, whatever became of it: every rank gathers in the same order.
        behind = [self._last, *fences(flat.device)]
        self._last = self._lane.submit(gather, after=before, behind=behind, kept=flat)
        return self._last

    def together(self, chunk: Chunk, what: str, dtype: torch.dtype) -> Tensor:
        """All elements of a chunk, flat, not to be written to."""
        whole = self._wholes.get((chunk.id, what))
        if whole is not None:
            self.before_read()
            return whole.view(dtype)
        key = (chunk.id, what)
        if self._read is None or self._read[0] != key:
            self._read = None
            self.ranks.agree(f"read the {what} of chunk {chunk.id} ({chunk.title})")
            flat = torch.empty(chunk.numel, dtype=dtype, device=self._store.device)
            with self.ranks.together(f"while reading {chunk.title}"):
                self.bring(self._regions[key], flat).block()
            self._read = key, flat
        return self._read[1]

    def close(self) -> None:
        self._read = None
        self._lane.stop()


class ShardedHome:
    """The home of a whole tensor of which this rank has some elements, `own`, maybe none.

    `own` is flat. A `Home` for those who read and write whole tensors; what streams is `own`.
    """

    def __init__(
        self,
        shards: Shards,
        chunk: Chunk,
        piece: Slice,
        what: str,
        region: Region,
        dtype: torch.dtype,
        written: Callable[[], None],
    ) -> None:
        self.shards = shards
        self.shape, self.strides, self.span = piece.shape, piece.strides, piece.span
        self.dtype = dtype
        self.device = shards._store.device
        self.path = piece.path if what == "parameters" else f"{what} of {piece.path}"
        self.first, self.end = chunk.own(piece, shards.ranks.rank)
        self.cut = (piece.offset, chunk.share_numel)  # which elements each rank has
        self._chunk, self._piece, self._what = chunk, piece, what
        self._after_write = written
        start = piece.offset + self.first - shards.ranks.rank * chunk.share_numel
        count = self.end - self.first
        size = dtype.itemsize
        part = region.part(start * size if count else 0, count * size)
        self.own = TensorHome(shards._store, part, (count,), (1,), dtype, self.device, self.path)

    def load(self) -> Tensor:
        """A fresh ordinary tensor with the value at this moment. A collective, unless the ranks
        share the memory that it lies in."""
        flat = self.shards.together(self._chunk, self._what, self.dtype)
        first = self._piece.offset
        return self.view(flat[first : first + self.span]).clone(memory_format=torch.preserve_format)

    def store(self, value: Tensor) -> None:
        """Make `value` the new value: every rank does, and each writes its own elements."""
        self.shards.before_write()
        with self.shards.ranks.together(f"while writing {self.path}"):
            self.own.store(self.elements(value))
            self._after_write()

    def write_own(self, value: Tensor) -> None:
        """Make `value`, flat, this rank's elements; after `Shards.before_write`."""
        self.own.store(value)
        self._after_write()

    def elements(self, value: Tensor) -> Tensor:
        """This rank's elements of a whole ordinary tensor, flat."""
        value = value.detach()
        if tuple(value.stride()) != tuple(self.strides) or value.device != self.device:
            laid_out = torch.empty_strided(
                self.shape, self.strides, dtype=value.dtype, device=self.device
            )
            value = laid_out.copy_(value)
        flat = value.as_strided((self.span,), (1,), value.storage_offset())
        return flat[self.first : self.end]

    def fetch(self, into: Tensor) -> Ticket:
        """Bring the whole value into `into`, flat; done when it returns."""
        into.copy_(self.load().as_strided((self.span,), (1,)))
        return Ticket.ready()

    def put(self, source: Tensor) -> Ticket:
        """Write from a flat whole value; done when it returns."""
        self.store(self.view(source))
        return Ticket.ready()

    def view(self, flat: Tensor) -> Tensor:
        """A flat tensor of `span` elements seen in `shape` and `strides`."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())


class OverwrittenHome(ShardedHome):
    """What is left of a gradient's home, to who still holds that gradient, once the next one has
    taken its place."""

    def __init__(self, home: ShardedHome) -> None:
        self.__dict__.update(home.__dict__)

    def load(self) -> Tensor:
        raise ElixirError(
            f"this {self.path} was overwritten by a later backward: clone a gradient, on every "
            "rank, that you want to keep beyond the step"
        )
