"""Check: whether a plan that somebody gave can be carried out at all. Pure data.

A plan of the planner's own keeps these by construction; one that a person edited may not.
`verify` proves the laws of the graph that the passes make of a plan, but sees only what the
passes look at, and only the laws: this looks at the plan itself, against the facts of the step
that it is for, and names the chunk and the number. Checked, in this order:

    chunks      stand at the places of their ids; every parameter is in one, once, as it is
    homes       are on tiers that there are, and the tiers' totals hold them
    updates     run on the device, or on the host where all parts are at home
    budgets     every tier's planned bytes, under the budgets in force
    gathers     one for each phase that reads a chunk, over all of its readers, in the gather
                cache; none starts after it is needed; no two share a byte at a time
    reduces     one for each chunk with gradients, where they are complete
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import HOMES, Tier
from elixir_fx.plan import Chunk, Gather, Layout, Limits, Plan, Schedule
from elixir_fx.planner.decisions import decided
from elixir_fx.planner.footprint import ChunkBytes, Footprint, Part, home
from elixir_fx.planner.place import uses
from elixir_fx.units import sizes


def check_plan(plan: Plan, facts: Facts, limits: Limits) -> None:
    """PlanError at the first thing in a plan that cannot be, for the step of `facts`.

    `limits` are the budgets in force; the plan's own hold as well. A schedule of this step, and
    the device memory that it takes, are checked if the plan has one: without, the planner makes
    one, and counts.
    """
    layout = plan.layout
    schedules = [schedule for schedule in plan.schedules if schedule.key == facts.key]
    _chunks(layout, facts)
    if schedules:
        facts = decided(facts, schedules[0])
    footprint = Footprint(facts, layout.chunks, layout.group)
    for budgets in (plan.limits, limits):
        _homes(layout, footprint, budgets)
        _budgets(layout, budgets)
        if schedules:
            _budget(Tier.DEVICE, footprint.layout_peak(layout), budgets)
    for schedule in schedules if not layout.keeps_all else ():
        _gathers(layout, schedule, facts)
        _reduces(schedule, footprint)


def _chunks(layout: Layout, facts: Facts) -> None:
    for place, chunk in enumerate(layout.chunks):
        if chunk.id != place:
            raise PlanError(f"chunk {place} is missing: chunk {chunk.id} stands in its place")
    known = {p.path: p for p in facts.parameters}
    holders: dict[str, int] = {}
    for chunk in layout.chunks:
        for piece in chunk.slices:
            if piece.path in holders:
                raise PlanError(
                    f"parameter {piece.path!r} is in chunk {holders[piece.path]} and again in "
                    f"chunk {chunk.id}"
                )
            holders[piece.path] = chunk.id
            parameter = known.get(piece.path)
            if parameter is None:
                continue  # of another graph
            planned = (piece.shape, piece.strides, piece.span, chunk.dtype, chunk.itemsize)
            there = (
                parameter.shape, parameter.strides, parameter.span, parameter.dtype,
                parameter.itemsize,
            )  # fmt: skip
            if planned != there:
                raise PlanError(
                    f"parameter {piece.path!r} in chunk {chunk.id}: the plan has "
                    f"{_geometry(*planned)}; the model has {_geometry(*there)}"
                )
    lost = sorted(set(known) - set(holders))
    if lost:
        raise PlanError(
            f"no chunk holds parameter {lost[0]!r}: it was taken out of the plan, or the plan was "
            "made for another model"
        )


def _geometry(
    shape: tuple[int, ...], strides: tuple[int, ...], span: int, dtype: str, itemsize: int
) -> str:
    laid = f"strides {list(strides)}, {span} elements of {itemsize} bytes from first to last"
    return f"{dtype} {list(shape)}, {laid}"


def _homes(layout: Layout, footprint: Footprint, limits: Limits) -> None:
    held = dict.fromkeys(HOMES, 0)
    for chunk, nbytes in zip(layout.chunks, footprint.sizes, strict=True):
        for part, tier in _parts(chunk):
            if tier not in HOMES or not (tier is Tier.DEVICE or limits.of(tier)):
                raise PlanError(
                    f"the {part} of chunk {chunk.id} are at home on {tier}, which has no memory"
                )
            held[tier] += nbytes.packed[part]
        _update(chunk, nbytes)
    if layout.mapped:  # laid out as files, not packed
        return
    for tier, planned in ((Tier.HOST, layout.host_bytes), (Tier.DISK, layout.disk_bytes)):
        if planned < held[tier]:
            raise PlanError(
                f"the parts of the chunks at home on {tier} take {sizes(held[tier])} "
                f"({held[tier]} bytes); the layout has {sizes(planned)} ({planned}) there"
            )


def _parts(chunk: Chunk) -> Iterator[tuple[Part, Tier]]:
    """The parts that a chunk has, with their homes."""
    for part in Part:
        if chunk.trainable or part is Part.PARAMETERS:
            yield part, home(chunk.homes, part)


def _update(chunk: Chunk, nbytes: ChunkBytes) -> None:
    if chunk.update is Tier.DEVICE or not chunk.trainable:
        return
    if chunk.update is not Tier.HOST:
        raise PlanError(
            f"chunk {chunk.id} is updated on {chunk.update}: an optimizer runs on device or host"
        )
    for part, tier in _parts(chunk):
        if nbytes.packed[part] and tier is not Tier.HOST:
            raise PlanError(
                f"chunk {chunk.id} is updated on the host, and its {part} "
                f"({sizes(nbytes.packed[part])}) are at home on {tier}"
            )


def _budget(tier: Tier, needed: int, limits: Limits) -> None:
    if needed > limits.of(tier):
        raise PlanError(
            f"the plan needs {sizes(needed)} ({needed} bytes) on {tier}; "
            f"{sizes(limits.of(tier))} ({limits.of(tier)}) are allowed"
        )


def _budgets(layout: Layout, limits: Limits) -> None:
    _budget(Tier.HOST, layout.host_bytes + layout.staging_bytes, limits)
    _budget(Tier.DISK, layout.disk_bytes, limits)
    blocks = layout.block_bytes - layout.shared_bytes
    if layout.gather_bytes + blocks > layout.arena_bytes:
        raise PlanError(
            f"the gather cache ({layout.gather_bytes} bytes) and the gradient blocks ({blocks}) "
            f"do not fit the arena of {layout.arena_bytes} bytes"
        )


@dataclass(frozen=True, slots=True)
class _Held:
    """A stay in positions of the graph: its block is taken from `start` to `last`."""

    gather: Gather
    nbytes: int
    start: int
    last: int

    def meets(self, other: "_Held") -> bool:
        return (
            self.gather.offset < other.gather.offset + other.nbytes
            and other.gather.offset < self.gather.offset + self.nbytes
            and self.start <= other.last
            and other.start <= self.last
        )


def _gathers(layout: Layout, schedule: Schedule, facts: Facts) -> None:
    positions = {node: index for index, node in enumerate(facts.nodes)}
    reads = {
        (use.chunk, backward): span
        for use in uses(facts, [chunk for chunk in layout.chunks if chunk.gathered])
        for backward, span in ((False, use.forward), (True, use.backward))
        if span is not None
    }
    held: dict[tuple[int, bool], _Held] = {}
    for gather in schedule.gathers:
        key = (gather.chunk, gather.backward)
        phase = "backward" if gather.backward else "forward"
        if gather.chunk not in range(len(layout.chunks)):
            raise PlanError(f"the plan gathers chunk {gather.chunk}, which it does not have")
        if key in held:
            raise PlanError(f"chunk {gather.chunk} is gathered twice in the {phase}")
        if key not in reads:
            raise PlanError(f"chunk {gather.chunk} is gathered in the {phase}, which reads it not")
        held[key] = _held(gather, layout, facts, positions, reads[key])
    for chunk, backward in reads:
        if (chunk, backward) not in held:
            phase = "backward" if backward else "forward"
            raise PlanError(f"chunk {chunk} is read in the {phase} and never gathered there")
    _kept(held)
    for one, other in combinations(held.values(), 2):
        if one.meets(other):
            a, b = one.gather, other.gather
            raise PlanError(
                f"the blocks of chunk {a.chunk} (bytes {a.offset} .. {a.offset + one.nbytes}) and "
                f"chunk {b.chunk} (bytes {b.offset} .. {b.offset + other.nbytes}) overlap while "
                f"both are there, at {facts.nodes[max(one.start, other.start)]}"
            )


def _held(
    gather: Gather,
    layout: Layout,
    facts: Facts,
    positions: dict[str, int],
    span: tuple[int, int],
) -> _Held:
    """One stay by itself: its nodes, its readers and its block."""
    chunk = layout.chunks[gather.chunk]
    for node in (gather.before, gather.after, gather.prefetch):
        if node is not None and node not in positions:
            raise PlanError(
                f"the gather of chunk {chunk.id} names node {node!r}, which the graph has not"
            )
    first, last = positions[gather.before], positions[gather.after]
    if (first, last) != span:
        raise PlanError(
            f"chunk {chunk.id} is gathered for {gather.before} .. {gather.after}; its readers are "
            f"{facts.nodes[span[0]]} .. {facts.nodes[span[1]]}"
        )
    start = first if gather.prefetch is None else positions[gather.prefetch]
    if start > first:
        raise PlanError(
            f"chunk {chunk.id} is prefetched at {gather.prefetch} (node {start}), after its "
            f"gather at {gather.before} (node {first})"
        )
    if gather.resident == layout.takes_block(chunk):
        raise PlanError(
            f"chunk {chunk.id} is said to be resident where it takes a block, or the other way "
            "round"
        )
    nbytes = chunk.nbytes if layout.takes_block(chunk) else 0
    if gather.offset < 0 or gather.offset + nbytes > layout.gather_bytes:
        raise PlanError(
            f"the block of chunk {chunk.id}, bytes {gather.offset} .. {gather.offset + nbytes}, "
            f"lies outside the gather cache of {layout.gather_bytes} bytes"
        )
    return _Held(gather, nbytes, start, last)


def _kept(held: dict[tuple[int, bool], _Held]) -> None:
    """A kept block is the forward's, which is then taken in between as well."""
    for (chunk, _), stay in list(held.items()):
        if not stay.gather.kept:
            continue
        before = held.get((chunk, False))
        if not stay.gather.backward or before is None:
            raise PlanError(f"chunk {chunk} is kept from a forward that does not gather it")
        if before.gather.offset != stay.gather.offset:
            raise PlanError(
                f"chunk {chunk} is kept from the forward in the block at {stay.gather.offset}, "
                f"where it lay at {before.gather.offset}"
            )
        held[chunk, True] = _Held(stay.gather, stay.nbytes, before.last + 1, stay.last)


def _reduces(schedule: Schedule, footprint: Footprint) -> None:
    nodes = footprint.facts.nodes
    wanted = {chunk: nodes[position] for chunk, position in footprint.reduces.items()}
    given: dict[int, str] = {}
    for entry in schedule.reduces:
        if entry.chunk not in wanted or entry.chunk in given:
            raise PlanError(
                f"the gradients of chunk {entry.chunk} are reduced after {entry.after}, and there "
                f"are none to reduce{' any more' if entry.chunk in given else ''}"
            )
        given[entry.chunk] = entry.after
        if entry.after != wanted[entry.chunk]:
            raise PlanError(
                f"the gradients of chunk {entry.chunk} are reduced after {entry.after}, and "
                f"complete after {wanted[entry.chunk]}"
            )
    for chunk in wanted:
        if chunk not in given:
            raise PlanError(f"the gradients of chunk {chunk} are never reduced")
