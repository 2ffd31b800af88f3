"""Footprint: the bytes that a layout holds on every tier, at every position.

    device(i) = constant + arena + live(i) <= limits.device      for every position i
    constant  = buffers + parameters, gradients and states at home on the device
    live(i)   = activations, temporaries and gradients on their way, born <= i <= dies
    update    = constant + arena + scratch and new states of one unit <= limits.device
    host, disk: the homes away, and the staging memory between disk and device
    host       also: scratch and new states of one unit that is updated there

A gradient on its way dies at its chunk's reduce. Where everything stays on the device there
are no reduces: autograd gets the gradients when the backward graph ends, so all of them live
until then. The old gradients that they are added to are part of the constant.

Where several ranks train, all of this is what one rank holds: its shares of the chunks. Memory
that the ranks of a host share counts for the rank that it is the share of.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from elixir_fx.demand import Demand
from elixir_fx.facts import Facts, OptimizerFacts, Role, Storage
from elixir_fx.machine import Tier
from elixir_fx.plan import ALIGNMENT_BYTES, ONE_RANK, Chunk, Group, Homes, Layout, align

NO_OPTIMIZER = OptimizerFacts(name="none", states=(), scratch_bytes=0, read_bytes=0)


class Part(StrEnum):
    """What a chunk has a home for. Values are the fields of `Homes`."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    STATES = "states"


@dataclass(frozen=True, kw_only=True)
class ChunkBytes:
    """The bytes of a chunk's parts: as ordinary tensors, and packed and padded elsewhere."""

    chunk: Chunk
    optimizer: OptimizerFacts
    twin: "ChunkBytes | None" = None  # a chunk of the same shape, whose sums are this one's

    @property
    def shape(self) -> tuple[object, ...]:
        """What the bytes of its units follow from."""
        chunk = self.chunk
        pieces = tuple((piece.offset, piece.span) for piece in chunk.slices)
        return (chunk.dtype, chunk.numel, chunk.shards, chunk.trainable, pieces)

    @cached_property
    def elements(self) -> int:
        if self.chunk.sharded:
            return self.chunk.share_numel
        return sum(piece.span for piece in self.chunk.slices)

    @cached_property
    def largest_span(self) -> int:
        return min(max(piece.span for piece in self.chunk.slices), self.elements)

    @cached_property
    def ordinary(self) -> dict[Part, int]:
        trainable = self.elements if self.chunk.trainable else 0
        return {
            Part.PARAMETERS: self.elements * self.chunk.itemsize,
            Part.GRADIENTS: trainable * self.chunk.itemsize,
            Part.STATES: trainable * self.optimizer.state_bytes,
        }

    @cached_property
    def packed(self) -> dict[Part, int]:
        return self.of(self.chunk.share_numel)

    @cached_property
    def widest(self) -> dict[Part, int]:
        """The parts of the largest parameter: what a ring must hold at least."""
        widest = max(self.chunk.width(piece) for piece in self.chunk.slices)
        return self.of(min(widest, self.chunk.share_numel))

    def units(self, update_numel: int) -> tuple[tuple[int, int], ...]:
        """(elements with padding, elements without) of each unit of the update."""
        if update_numel not in self._units:
            self._units[update_numel] = self._units_of(update_numel, rank=0)
        return self._units[update_numel]

    def _units_of(self, update_numel: int, rank: int) -> tuple[tuple[int, int], ...]:
        chunk = self.chunk
        found = []
        for unit in chunk.units(update_numel, rank):
            bounds = [chunk.own(piece, rank) for piece in unit]
            elements = sum(end - first for first, end in bounds)
            found.append((sum(chunk.own_width(piece, rank) for piece in unit), elements))
        return tuple(found)

    def largest_unit(self, update_numel: int) -> int:
        """Elements, padding included, of the largest unit of any rank."""
        if update_numel not in self._largest:
            self._largest[update_numel] = int(self._widest_units(update_numel).max())
        return self._largest[update_numel]

    def _widest_units(self, update_numel: int) -> NDArray[np.int64]:
        """The width of each rank's largest unit: `Chunk.units` for all ranks at once."""
        chunk = self.chunk
        first = np.arange(chunk.shards, dtype=np.int64) * chunk.share_numel
        widest = np.zeros(chunk.shards, dtype=np.int64)
        width, room = np.zeros_like(widest), np.full_like(widest, -1)
        block = ALIGNMENT_BYTES // chunk.itemsize
        for piece in chunk.slices:
            low = np.clip(first - piece.offset, 0, piece.span)
            own = np.clip(first + chunk.share_numel - piece.offset, 0, piece.span) - low
            joins = own <= room
            padded = -(-own // block) * block
            width = np.where(joins, width + padded, padded)
            room = np.where(joins, room - own, update_numel - own)
            widest = np.maximum(widest, width)
        return widest

    @cached_property
    def _largest(self) -> dict[int, int]:
        return {} if self.twin is None else self.twin._largest

    @cached_property
    def _units(self) -> dict[int, tuple[tuple[int, int], ...]]:
        return {} if self.twin is None else self.twin._units

    def of(self, numel: int) -> dict[Part, int]:
        """The parts of `numel` consecutive elements, packed. Do not change the answer."""
        if numel not in self._known:
            nbytes = align(numel * self.chunk.itemsize)
            gradients, states = nbytes, 0
            for _, size in self.optimizer.states:
                states += align(numel * size)
            if not self.chunk.trainable:
                gradients = states = 0
            self._known[numel] = {
                Part.PARAMETERS: nbytes,
                Part.GRADIENTS: gradients,
                Part.STATES: states,
            }
        return self._known[numel]

    @cached_property
    def _known(self) -> dict[int, dict[Part, int]]:
        return {} if self.twin is None else self.twin._known


def home(homes: Homes, part: Part) -> Tier:
    """The home of one part."""
    if part is Part.PARAMETERS:
        return homes.parameters
    return homes.gradients if part is Part.GRADIENTS else homes.states


def away(homes: Homes, sizes: Mapping[Part, int]) -> int:
    """Bytes of the parts that are not at home on the device."""
    return sum(size for part, size in sizes.items() if home(homes, part) != Tier.DEVICE)


@dataclass(frozen=True)
class Footprint:
    """The bytes of one packing of one graph; the homes come with each question."""

    facts: Facts
    chunks: tuple[Chunk, ...]
    group: Group = ONE_RANK
    twin: "Footprint | None" = field(default=None, repr=False, compare=False)

    def repacked(self, chunks: tuple[Chunk, ...]) -> "Footprint":
        """The same graph in another packing; what is live in both is counted once."""
        return replace(self, chunks=chunks, twin=self)

    @cached_property
    def optimizer(self) -> OptimizerFacts:
        return self.facts.optimizer or NO_OPTIMIZER

    @cached_property
    def sizes(self) -> tuple[ChunkBytes, ...]:
        first: dict[tuple[object, ...], ChunkBytes] = {}
        found = []
        for chunk in self.chunks:
            size = ChunkBytes(chunk=chunk, optimizer=self.optimizer.of(chunk.dtype))
            twin = first.setdefault(size.shape, size)
            found.append(size if twin is size else replace(size, twin=twin))
        return tuple(found)

    @cached_property
    def reduces(self) -> dict[int, int]:
        """The position after which each chunk's gradients are complete, by chunk."""
        gradients = {p.path: p.gradient for p in self.facts.parameters if p.gradient is not None}
        found = {}
        for chunk in self.chunks:
            complete = [gradients[s.path] for s in chunk.slices if s.path in gradients]
            if complete and chunk.trainable:
                found[chunk.id] = max(complete)
        return found

    @property
    def last_deaths(self) -> tuple[tuple[Storage, int], ...]:
        """Every storage that counts as live, with the position it lives to, while gradients
        go home by reduces."""
        return self._passing + self._gradient_deaths

    @property
    def kept_deaths(self) -> tuple[tuple[Storage, int], ...]:
        """The same where everything stays on the device: gradients live to the end."""
        end = len(self.facts.nodes) - 1
        return self._passing + tuple((storage, end) for storage, _ in self._gradient_deaths)

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """Live bytes by position, while gradients go home by reduces."""
        return self._live_passing + _profile(len(self.facts.nodes), self._gradient_deaths)

    @cached_property
    def live_kept(self) -> NDArray[np.int64]:
        """Live bytes by position where everything stays on the device."""
        return _profile(len(self.facts.nodes), self.kept_deaths)

    @cached_property
    def _passing(self) -> tuple[tuple[Storage, int], ...]:
        """Activations and temporaries, in any packing."""
        if self.twin is not None:
            return self.twin._passing
        passing = (Role.ACTIVATION, Role.TEMPORARY)
        return tuple((s, s.dies) for s in self.facts.storages if s.role in passing)

    @cached_property
    def _live_passing(self) -> NDArray[np.int64]:
        """Their bytes by position."""
        if self.twin is not None:
            return self.twin._live_passing
        return _profile(len(self.facts.nodes), self._passing)

    @cached_property
    def _gradient_deaths(self) -> tuple[tuple[Storage, int], ...]:
        chunk_of = {piece.path: chunk.id for chunk in self.chunks for piece in chunk.slices}
        reduced: dict[str, int] = {}
        for parameter in self.facts.parameters:
            position = self.reduces.get(chunk_of.get(parameter.path, -1))
            if position is not None and parameter.gradient is not None:
                name = parameter.gradient_storage
                reduced[name] = max(position, reduced.get(name, 0))
        return tuple(
            (storage, _death(self.facts, storage, reduced.get(storage.name)))
            for storage in self.facts.storages
            if storage.role == Role.GRADIENT
        )

    @cached_property
    def live_peak(self) -> int:
        return int(self.live.max(initial=0))

    @cached_property
    def kept_peak(self) -> int:
        """The device bytes of a step that keeps everything."""
        live = int(self.live_kept.max(initial=0))
        return self.constant([Homes()] * len(self.chunks)) + max(live, self.kept_update_bytes)

    def constant(self, homes: Iterable[Homes]) -> int:
        """Device bytes between steps: buffers and the parts at home there."""
        total = self.facts.buffer_bytes
        for sizes, homes_of_one in zip(self.sizes, homes, strict=True):
            ordinary = sizes.ordinary
            total += sum(ordinary.values()) - away(homes_of_one, ordinary)
        return total

    def tier_bytes(self, chunks: Iterable[Chunk]) -> dict[Tier, int]:
        """Bytes that the parts away of these chunks, this packing's, take on host and disk."""
        held = {Tier.HOST: 0, Tier.DISK: 0}
        for chunk, sizes in zip(chunks, self.sizes, strict=True):
            for part, size in sizes.packed.items():
                tier = home(chunk.homes, part)
                if tier is not Tier.DEVICE:
                    held[tier] += size
        return held

    def layout_peak(self, layout: Layout, held_bytes: int = 0) -> int:
        """Device bytes of a layout at the step's peak. `held_bytes` are activations of other
        graphs that are there in forward and backward."""
        live = self.live_kept if layout.keeps_all else self.live
        return self.demand(layout, [str(live.max(initial=0))]).peak({}, held_bytes)

    def demand(self, layout: Layout, live: Iterable[str]) -> Demand:
        """What a layout takes on the device, with formulas for what is live in it."""
        constant = self.constant([chunk.homes for chunk in layout.chunks])
        return Demand(
            constant_bytes=constant + layout.arena_bytes + layout.shared_bytes,
            update_bytes=self.layout_update_bytes(layout),
            live=tuple(live),
        )

    def update_bytes(
        self, states_away: Container[int], update_numel: int, on_host: Container[int] = ()
    ) -> int:
        """Device bytes that a streamed update needs beside constant and arena: scratch of one
        unit and, on the first step, its new states before they leave. Chunks that are updated
        `on_host` need none."""
        peak = 0
        for sizes in self._updated():
            if sizes.chunk.id not in on_host:
                per_element = sizes.optimizer.scratch_bytes
                if sizes.chunk.id in states_away or sizes.chunk.sharded:
                    per_element += sizes.optimizer.state_bytes
                peak = max(peak, sizes.largest_unit(update_numel) * per_element)
        return peak

    def host_update_bytes(self, on_host: Container[int], update_numel: int) -> int:
        """Host bytes that the update of the chunks `on_host` needs beside their homes: scratch
        of one unit and, on the first step, its new states before they are there."""
        return max(
            (
                sizes.largest_unit(update_numel)
                * (sizes.optimizer.scratch_bytes + sizes.optimizer.state_bytes)
                for sizes in self._updated()
                if sizes.chunk.id in on_host
            ),
            default=0,
        )

    def _updated(self) -> list[ChunkBytes]:
        """The chunks that an update changes."""
        if not self.facts.trains:
            return []
        return [sizes for sizes in self.sizes if sizes.chunk.trainable]

    @cached_property
    def kept_update_bytes(self) -> int:
        """Scratch of an update where everything stays: the optimizer's own, all at once."""
        trained = self._updated()
        if self.optimizer.foreach or self.optimizer.global_state:
            elements = sum(sizes.elements for sizes in trained)
        else:
            elements = max((sizes.largest_span for sizes in trained), default=0)
        return elements * self.optimizer.scratch_bytes

    def layout_update_bytes(self, layout: Layout) -> int:
        """The bytes of a layout's update beside constant and arena."""
        if layout.keeps_all:
            return self.kept_update_bytes
        states_away = {c.id for c in layout.chunks if c.homes.states != Tier.DEVICE}
        return self.update_bytes(states_away, layout.update_numel, _on_host(layout))

    def layout_host_update_bytes(self, layout: Layout) -> int:
        """The host bytes of a layout's update beside the homes there."""
        return self.host_update_bytes(_on_host(layout), layout.update_numel)

    def largest_at(self, position: int, count: int = 5) -> tuple[tuple[str, int], ...]:
        """The largest live storages at a position, for people."""
        there = [s for s, dies in self.last_deaths if s.born <= position <= dies]
        there.sort(key=lambda storage: (-storage.nbytes, storage.name))
        return tuple((title(storage), storage.nbytes) for storage in there[:count])


def _on_host(layout: Layout) -> set[int]:
    """The chunks that are updated on the host."""
    return {chunk.id for chunk in layout.chunks if chunk.update is Tier.HOST}


def live_bytes(facts: Facts) -> NDArray[np.int64]:
    """Bytes of activations, temporaries and gradients on their way, by position."""
    return Footprint(facts, ()).live


def live_peak_bytes(facts: Facts) -> int:
    """The most bytes of activations, temporaries and gradients on their way, in any layout."""
    return Footprint(facts, ()).live_peak


def title(storage: Storage) -> str:
    """A storage as a person would point at it."""
    known = storage.path in ("", storage.name)
    name = storage.name if known else f"{storage.name} of {storage.path}"
    if storage.role == Role.GRADIENT:
        name = f"gradient of {storage.path or storage.name}"
    return f"{name} ({storage.source})" if storage.source else name


def _death(facts: Facts, storage: Storage, reduced: int | None) -> int:
    """The last position at which a gradient is in memory."""
    if reduced is None:
        return storage.dies
    end = len(facts.nodes) - 1
    returns = bool(facts.nodes) and facts.nodes[end].startswith("output")
    reads = [read for read in storage.readers if not (returns and read == end)]
    return max([reduced, storage.born, *reads])


def _profile(length: int, lives: Iterable[tuple[Storage, int]]) -> NDArray[np.int64]:
    change = [0] * (length + 1)
    for storage, dies in lives:
        change[min(storage.born, length)] += storage.nbytes
        change[min(dies, length - 1) + 1] -= storage.nbytes
    profile: NDArray[np.int64] = np.cumsum(np.array(change[:-1], dtype=np.int64))
    return profile
