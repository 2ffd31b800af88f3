"""The engine: one compiled model's memory and what its generated code calls.

Holds the store, the gather cache and the home of every parameter, gradient and state that is
not an ordinary tensor. Generated code calls gather, prefetch, release and reduce; the bound
optimizer asks for homes, update units and ring memory. One engine a model, nothing global.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elixir_fx.errors import ElixirError, TierError
from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Layout, Slice, align, merged
from elixir_fx.runtime.away import Source
from elixir_fx.runtime.cache import GatherCache
from elixir_fx.runtime.gradients import Entry, Reducer
from elixir_fx.runtime.heap import give_back_pages
from elixir_fx.runtime.hooks import pass_by
from elixir_fx.runtime.mapped import MappedCache, MappedFile
from elixir_fx.runtime.offloads import Offloads
from elixir_fx.runtime.parameters import AwayParameter, ChunkGradient, away, settle
from elixir_fx.runtime.recycler import Recycler
from elixir_fx.runtime.shards import ShardedHome
from elixir_fx.runtime.store import Region, Store, TensorHome


@dataclass(frozen=True, kw_only=True, slots=True)
class Half:
    """One half of a captured step as the engine knows it: the chunks that it gathers into blocks
    and, as (chunk, slices), the gradients that it reduces, in order."""

    backward: bool
    gathers: tuple[int, ...] = ()
    reduces: tuple[tuple[int, tuple[int, ...]], ...] = ()


class ParameterHome(TensorHome):
    """A parameter's home; writing it makes gathered copies of its chunk stale."""

    def __init__(self, engine: "Engine", chunk: Chunk, piece: Slice, region: Region) -> None:
        super().__init__(
            engine.store,
            region,
            piece.shape,
            piece.strides,
            getattr(torch, chunk.dtype),
            engine.device,
            piece.path,
        )
        self._engine = engine
        self._chunk = chunk.id

    def store(self, value: Tensor) -> None:
        super().store(value)
        with self._engine.lock:
            self._engine.cache.invalidate(self._chunk)
        self._engine.written()


class Engine:
    """Runtime of one compiled model.

    `parameters` are the model's, by path. The store must have been made for `layout`. With a
    `mapped` file parameters away from the device are tensors over it, not AwayParameters.
    """

    def __init__(
        self,
        layout: Layout,
        store: Store,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device,
        mapped: MappedFile | None = None,
    ) -> None:
        self.layout = layout
        self.store = store
        self.rank = 0  # among those that train this model
        self.device = device
        self.lock = threading.RLock()
        # What makes the memory of compiled runs: nothing, an operator, or the recycler.
        self.empty: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor] | None = None
        self.optimizer_s = 0.0
        self.buffer_bytes = 0
        self.peak_bytes = 0  # as planned; what the recycler holds stays below it
        self.update_bytes = 0  # scratch memory of one update, and the states it may create
        self.state_bytes: Callable[[], int] = lambda: 0  # of ordinary optimizer states
        self.written: Callable[[], None] = lambda: None  # somebody wrote an away parameter
        self.updating: Callable[[], None] = lambda: None  # a streamed update begins
        self._owned = dict(parameters)
        self.parameters = list(dict.fromkeys(parameters.values()))
        self._away: dict[nn.Parameter, None] = {}  # in the order in which they left
        self._witness = self._find_witness(parameters)
        self._depth = 0
        self._sources: weakref.WeakSet[Source] = weakref.WeakSet()
        self._mapped = mapped
        self._mapped_offsets: dict[int, int] = {}
        self._mapped_views: dict[str, Tensor] = {}  # of the parameters there, by path
        self._mapped_bytes = 0
        self._regions: dict[int, Region] = {}
        self._gradient_regions: dict[int, Region] = {}
        self._state_regions: dict[tuple[int, str, torch.dtype], Region] = {}
        self._spare_regions: dict[int, list[Region]] = {}  # of states nobody uses any more
        self.entries: dict[nn.Parameter, Entry] = {}
        self._by_chunk: dict[int, list[Entry]] = {}
        for chunk in layout.chunks:
            self._enter(chunk, parameters)
        self.cache = self._make_cache({chunk.id: chunk for chunk in layout.chunks})
        self.recycler = Recycler()
        self.lends = False  # the recycler's memory to compiled runs
        self.take = self.recycler.take
        self.give = self.recycler.give
        self.reducer = self._make_reducer()
        self.offloads = self._make_offloads()

    def _make_cache(self, chunks: Mapping[int, Chunk]) -> GatherCache | MappedCache:
        gather_bytes = self.layout.gather_bytes
        if self._mapped is None:
            return GatherCache(self.store, chunks, self._regions, gather_bytes)
        return MappedCache(self._mapped, chunks, self._mapped_offsets, gather_bytes)

    def _make_reducer(self) -> Reducer:
        return Reducer(self.layout, self.store, self._by_chunk, self._gradient_regions)

    def _make_offloads(self) -> Offloads | None:
        """None where nothing but parameters comes back into blocks."""
        if isinstance(self.cache, MappedCache) or self.layout.group.ranks > 1:
            return None
        return Offloads(self.layout, self.store, self.cache, self.reducer)

    def _enter(self, chunk: Chunk, parameters: Mapping[str, nn.Parameter]) -> None:
        homes = chunk.homes
        if homes.parameters is not Tier.DEVICE and self._mapped is not None:
            self._mapped_offsets[chunk.id] = self._mapped_bytes
            self._mapped_bytes += align(chunk.nbytes)
        elif homes.parameters is not Tier.DEVICE:
            self._regions[chunk.id] = self.store.allocate(homes.parameters, align(chunk.nbytes))
        if chunk.trainable and homes.gradients is not Tier.DEVICE:
            region = self.store.allocate(homes.gradients, align(chunk.nbytes))
            self._gradient_regions[chunk.id] = region
        for piece in chunk.slices:
            parameter = parameters[piece.path]
            entry = Entry(path=piece.path, parameter=parameter, chunk=chunk, piece=piece)
            if chunk.id in self._regions:
                part = self._part(self._regions[chunk.id], chunk, piece)
                entry.value = ParameterHome(self, chunk, piece, part)
            if chunk.id in self._gradient_regions:
                part = self._part(self._gradient_regions[chunk.id], chunk, piece)
                entry.gradient = self._home(part, piece, getattr(torch, chunk.dtype), "gradient of")
            if not homes.on_device:
                self.entries[parameter] = entry
            self._by_chunk.setdefault(chunk.id, []).append(entry)

    def _find_witness(self, parameters: Mapping[str, nn.Parameter]) -> nn.Parameter | None:
        """A parameter whose gradient is at home on the device."""
        for chunk in self.layout.chunks:
            if chunk.trainable and chunk.homes.gradients is Tier.DEVICE:
                return parameters[chunk.slices[0].path]
        return None

    @staticmethod
    def _part(region: Region, chunk: Chunk, piece: Slice) -> Region:
        return region.part(piece.offset * chunk.itemsize, piece.span * chunk.itemsize)

    def _home(self, region: Region, piece: Slice, dtype: torch.dtype, what: str) -> TensorHome:
        return TensorHome(
            self.store,
            region,
            piece.shape,
            piece.strides,
            dtype,
            self.device,
            f"{what} {piece.path}",
        )

    # -- start-up -------------------------------------------------------------------------

    def move_home(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Move a value to its parameter's home and make that an AwayParameter; a parameter at
        home on the device keeps `value` as its data. One on meta becomes real."""
        entry = self.entries.get(parameter)
        if parameter.is_meta:
            real = nn.Parameter(value, requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
        elif parameter.data is not value:
            parameter.data = value
        if entry is not None and entry.value is not None:
            entry.value.store(value)
            away(parameter, entry.value)
            self._away[parameter] = None

    def watched(self, source: Source) -> Source:
        """`source`, noted: what it reads must move or be kept when this engine goes."""
        self._sources.add(source)
        return source

    def sources(self) -> list[Source]:
        """Sources of gradients and states that somebody holds."""
        return [*self._sources, *self.reducer.sources]

    def adopt(self, parameter: nn.Parameter) -> None:
        """A parameter is away already, and its home is the one that this engine gave it."""
        self._away[parameter] = None

    def move_all_home(self) -> None:
        """Move every parameter that is still ordinary to its home, chunk by chunk. If that fails
        half way, all are ordinary again."""
        try:
            for parameter in self.entries:
                if not isinstance(parameter, AwayParameter):
                    self.move_home(parameter, parameter.data)
        except BaseException:
            self.give_back()
            raise

    def map_parameters(self) -> None:
        """Make every parameter whose home is the mapped file a tensor over it."""
        assert self._mapped is not None and isinstance(self.cache, MappedCache)
        for chunk, start in self._mapped_offsets.items():
            for entry in self._by_chunk[chunk]:
                piece = entry.piece
                if piece.span:
                    offset = start + piece.offset * entry.chunk.itemsize
                    memory = self._mapped.tensor(offset, entry.dtype, piece.span)
                    value = memory.as_strided(piece.shape, piece.strides)
                    entry.parameter.data = value.copy_(entry.parameter.data)
                    self._mapped_views[entry.path] = value
            self.cache.drop(chunk)

    def map_again(self, paths: Iterable[str]) -> None:
        """Somebody gave a mapped parameter other memory, by `p.data = x` or `model.to(...)`: its
        value goes to the file, and it is a tensor over that again."""
        if self._mapped is None:
            return
        for path in paths:
            parameter = self._owned.get(path)
            mapped = self._mapped_views.get(path)
            if parameter is None or mapped is None or parameter.data_ptr() == mapped.data_ptr():
                continue
            if parameter.shape == mapped.shape and parameter.dtype == mapped.dtype:
                with torch.no_grad():
                    parameter.data = mapped.copy_(parameter.data)

    def give_back(self) -> None:
        """Make every parameter an ordinary tensor again, for good."""
        for parameter in self._away:
            settle(parameter, self.entries[parameter].home.load())
        self._away.clear()

    @contextmanager
    def full(self, writeback: bool) -> Iterator[None]:
        """Away parameters as ordinary tensors; with `writeback` their values go home after."""
        sources: dict[nn.Parameter, Source] = {}
        try:
            for parameter in self._away:
                sources[parameter] = settle(parameter, self.entries[parameter].home.load())
            yield
        finally:
            failed: BaseException | None = None
            for parameter, source in sources.items():
                home = self.entries[parameter].home
                try:
                    if writeback:
                        home.store(parameter.data)
                except TierError as error:
                    failed = failed or error
                away(parameter, home, source)
            if failed is not None:
                raise failed

    def constant_bytes(self) -> int:
        """Device bytes that are always there: ordinary parameters and optimizer states,
        buffers, the arena."""
        ordinary = sum(p.nbytes for p in self.parameters if type(p) is not AwayParameter)
        ordinary -= sum(view.nbytes for view in self._mapped_views.values())
        return self.layout.arena_bytes + self.buffer_bytes + ordinary + self.state_bytes()

    def gradient_bytes(self) -> int:
        """Device bytes of the gradients that are ordinary dense tensors now."""
        gradients = [parameter.grad for parameter in self.parameters]
        return sum(
            g.nbytes
            for g in gradients
            if g is not None and g.layout is torch.strided and not isinstance(g, ChunkGradient)
        )

    def check_owned(self, paths: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """ElixirError if a managed parameter was replaced by another object."""
        if self.layout.keeps_all:
            return
        for path, tensor in zip(paths, tensors, strict=True):
            mine = self._owned.get(path)
            if mine is not None and mine is not tensor:
                raise ElixirError(
                    f"{path} is another parameter object than the one that was compiled: write "
                    "into that one (copy_, load_state_dict), or compile a changed "
                    "copy.deepcopy(model), which is a plain model"
                )

    def set_syncs(self, syncs: bool) -> None:
        """Whether backwards from now on sum gradients over the ranks; here is only one."""

    def gradient_mode(self) -> tuple[bool, ...]:
        """What of gradients a half meets: halves that meet the same take the same memory. Whether
        those at home on the device are there already."""
        return (self._witness is not None and self._witness.grad is not None,)

    # -- what generated code calls --------------------------------------------------------

    def gather(self, chunk: int, offset: int) -> Tensor:
        """The chunk's elements on the device, 1-D, until its release."""
        return self.cache.acquire(chunk, offset)

    def prefetch(self, chunk: int, offset: int) -> None:
        self.cache.start(chunk, offset)

    def release(self, chunk: int) -> None:
        self.cache.release(chunk)

    def reduce(
        self, chunk: int, slices: list[int], gradients: list[Tensor], owned: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Add the chunk's gradients to p.grad; answer what autograd must get itself."""
        return self.reducer.reduce(chunk, slices, gradients, owned)

    def offload(self, value: Tensor) -> Tensor:
        """Send an activation away; its handle."""
        assert self.offloads is not None
        return self.offloads.offload(value)

    def recall(self, handle: Tensor, offset: int) -> None:
        assert self.offloads is not None
        self.offloads.recall(handle, offset)

    def reload(self, handle: Tensor, offset: int) -> Tensor:
        """What left under this handle, until it is dropped."""
        assert self.offloads is not None
        return self.offloads.reload(handle, offset)

    def drop(self, handle: Tensor) -> None:
        assert self.offloads is not None
        self.offloads.drop(handle)

    def pass_by(self, paths: Iterable[str]) -> None:
        """Keep the hooks of ordinary parameters quiet that get no gradient in this pass."""
        for path in paths:
            parameter = self._owned.get(path)
            if parameter is not None:
                pass_by(parameter)

    @contextmanager
    def running(self, half: Half) -> Iterator[None]:
        """Around one half of a step. An exception lets go of every gathered chunk; where a transfer
        failed, the one error stands for all that failed with it, and the next call starts afresh.
        """
        with self.lock:
            outermost = self._depth == 0
            self._depth += 1
            try:
                yield
            except BaseException as error:
                if outermost:
                    if isinstance(error, TierError):
                        self.store.pass_over_errors()
                        self.reducer.pass_over_errors()
                    self.cache.release_all()
                raise
            finally:
                self._depth -= 1

    @contextmanager
    def watched_memory(self) -> Iterator[None]:
        """Compiled runs make their memory with an operator, which modes see."""
        with self._memory_from(_empty):
            yield

    @contextmanager
    def lending(self, taken_bytes: int) -> Iterator[None]:
        """Compiled runs get their memory from the recycler where all memory is short; half of what
        the plan has beside `taken_bytes`, which a half was seen to take, may be idle."""
        if self.lends:
            room_bytes = self.peak_bytes - self.constant_bytes() - taken_bytes
            self.recycler.idle_bytes = max(0, room_bytes - self.layout.block_bytes) // 2
            with self._memory_from(self.recycler.empty):
                yield
        else:
            yield

    @contextmanager
    def _memory_from(self, empty: Callable[..., Tensor]) -> Iterator[None]:
        before, self.empty = self.empty, empty
        try:
            yield
        finally:
            self.empty = before

    # -- what the bound optimizer asks for -------------------------------------------------

    def units(self) -> Sequence[Sequence[nn.Parameter]]:
        """Whole parameters that are updated together, as the plan cuts its chunks; those of the
        device and those of the host mixed, so that both get on."""
        device, host = (
            [
                [self._owned[piece.path] for piece in unit]
                for chunk in self.layout.chunks
                if chunk.trainable and self._by_chunk[chunk.id][0].parameter in self.entries
                if (chunk.update is Tier.HOST) == on_host
                for unit in chunk.units(self.layout.update_numel, self.rank)
            ]
            for on_host in (False, True)
        )
        return merged(device, host)

    def state_home(
        self, parameter: nn.Parameter, name: str, like: Tensor
    ) -> TensorHome | ShardedHome:
        """The home of one element-wise state of a parameter; allocated with its chunk's."""
        entry = self.entries[parameter]
        chunk = entry.chunk
        key = (chunk.id, name, like.dtype)
        size = like.element_size()
        if key not in self._state_regions:
            nbytes = align(chunk.numel * size)
            spare = self._spare_regions.get(chunk.id, [])
            again = next((region for region in spare if region.nbytes == nbytes), None)
            if again is not None:
                spare.remove(again)
            self._state_regions[key] = again or self.store.allocate(chunk.homes.states, nbytes)
        region = self._state_regions[key]
        part = region.part(entry.piece.offset * size, entry.piece.span * size)
        return self._home(part, entry.piece, like.dtype, f"{name} of")

    def forget_states(self) -> None:
        """Another optimizer comes: the memory of the states so far is its states'."""
        for (chunk, _, _), region in self._state_regions.items():
            self._spare_regions.setdefault(chunk, []).append(region)
        self._state_regions.clear()

    def gradient_is_home(self, parameter: nn.Parameter) -> bool:
        """Whether p.grad is the ChunkGradient of the parameter's own gradient home."""
        return self.reducer.is_home(self.entries[parameter])

    def updated(self, parameters: Iterable[nn.Parameter]) -> None:
        """An update has changed these, and nothing reads them for a while."""
        if isinstance(self.cache, MappedCache):
            for chunk in {self.entries[p].chunk.id for p in parameters}:
                if chunk in self._mapped_offsets:
                    self.cache.drop(chunk)

    def rehome(self, layout: Layout) -> None:
        """The plan is final: gradients and states that may stay on the device from now on. What
        a home away holds of them stays in use until it is replaced."""
        self.layout = layout
        for chunk in layout.chunks:
            for entry in self._by_chunk[chunk.id]:
                entry.chunk = chunk
            if chunk.homes.gradients is Tier.DEVICE and chunk.id in self._gradient_regions:
                self.reducer.forget(chunk.id)
        self._witness = self._find_witness(self._owned)

    @contextmanager
    def update_memory(self) -> Iterator[Tensor]:
        """The whole arena, for the optimizer to stream through."""
        with self.lock:
            started = time.perf_counter()
            self.updating()
            self.reducer.drain()
            self.cache.clear()
            room = self.peak_bytes - self.constant_bytes() - self.gradient_bytes()
            # As much is left alone as the gradient blocks give back in a forward.
            room -= self.layout.block_bytes
            self.recycler.shrink(max(0, room - self.update_bytes))
            self.recycler.shrink_idle(0)
            try:
                yield self.store.arena
            finally:
                self.store.drain()
                self.cache.clear()
                if self._mapped is not None:  # its pages are planned for the mapped ones
                    give_back_pages(self.store.arena)
                self.optimizer_s += time.perf_counter() - started

    def lend_arena(self) -> None:
        """Another engine takes over: the arena's memory is its, until `take_arena`."""
        self.reducer.drain()
        self.store.drain()
        self.cache.clear()
        self.recycler.shrink(0)
        self.recycler.shrink_idle(0)
        if self.store.arena.is_cuda:
            self.store.arena.untyped_storage().resize_(0)
        else:
            give_back_pages(self.store.arena)

    def take_arena(self) -> None:
        """The other engine could not be made after all."""
        if self.store.arena.is_cuda:
            self.store.arena.untyped_storage().resize_(self.layout.arena_bytes)

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> None:
        """Give back memory, file and threads. Parameters that are away are lost with it."""
        self.store.close()


def _empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)
