"""Prove that a transformed graph keeps the laws; runs after every pass.

Independent of the passes and of the planner: it walks the nodes in their order of execution
and follows what every block of the gather cache holds, and it compares with the captured graph
(`Reference`), whose readers must read the same parameters still. A graph that breaks a law is
never run.

Checked, by the numbers of the design's laws:
1  every read of an away parameter reads that parameter, through a gather of its own phase
2  no read of a chunk, or of a view of it, outside gather .. release; every gather is released
3  no gathered weight crosses from forward to backward
4  at no position do the planned bytes exceed the budget (verify_memory), and what is updated on
   the host is at home there
5  a block is written (from its prefetch on) only while no other stay uses those bytes
10 slices of a chunk start at multiples of 64 elements, and do not meet
10 what is computed again is the same operator on the same values
11 every gradient of a reduced chunk passes its reduce exactly once
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from elixir_fx import ops
from elixir_fx.errors import VerifyError
from elixir_fx.machine import Tier
from elixir_fx.plan import SAVED, Chunk, Gather, Offload, Plan, Slice
from elixir_fx.step import (
    AGAIN,
    Reference,
    StepGraph,
    is_backward,
    is_item,
    memory_root,
    stay_of,
)
from elixir_fx.verify_memory import budget

CUT_ELEMENTS = 64  # every cut falls on a multiple of it (law 10)


def verify(step: StepGraph, plan: Plan, *, complete: bool = True) -> None:
    """Raise VerifyError at the first law that the graph breaks, naming node and chunk.

    `complete` is False between passes: parameters that are not gathered yet and gradients
    that are not reduced yet are then allowed, and what the gather cache holds is followed only
    once there are releases.
    """
    _order(step)
    _arguments(step)
    _crossing(step)
    walk = _Walk(step=step)
    targets = {node.target for node in step.nodes}
    if complete or ops.RELEASE in targets:
        for node in step.nodes:
            walk.visit(node)
        walk.end()
    _repetitions(step)
    if complete:
        _slices(plan)
        _updates(plan)
        _away_parameters(step, plan)
        _same_reads(step)
        _gradients(step, plan)
        budget(step, plan)


def reference(step: StepGraph) -> Reference:
    """What a captured graph reads and returns, to hold the transformed one to."""
    return Reference(
        reads=_parameter_reads(step),
        gradients={path: node.name for path, node in step.gradients.items()},
    )


def _order(step: StepGraph) -> None:
    """Every node after its inputs, and the backward after the forward."""
    seen: set[fx.Node] = set()
    backward = False
    for node in step.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                raise VerifyError(f"{node.name} reads {source.name} before it is computed")
        seen.add(node)
        if node.op in ("placeholder", "output"):
            continue
        if backward and not is_backward(node):
            raise VerifyError(f"forward node {node.name} stands after the backward began")
        backward = backward or is_backward(node)


def _crossing(step: StepGraph) -> None:
    """Law 3: the backward reads no chunk that the forward gathered."""
    for node in step.nodes:
        if not is_backward(node) or node.op == "output":
            continue
        for source in node.all_input_nodes:
            root = memory_root(source)
            if root.target is ops.GATHER and not is_backward(source):
                raise VerifyError(
                    f"{node.name} in the backward reads {source.name}, a gathered weight of the "
                    f"forward (chunk {stay_of(root).chunk}): it would be saved for backward"
                )


def _arguments(step: StepGraph) -> None:
    """Our nodes say what their stay says, and every view of a chunk is a whole parameter."""
    for node in step.nodes:
        if node.target in (ops.GATHER, ops.PREFETCH, ops.RELEASE):
            stay = stay_of(node)
            if node.args[0] != stay.chunk:
                raise VerifyError(
                    f"{node.name} names chunk {node.args[0]}, its stay chunk {stay.chunk}"
                )
        if node.target is not ops.GATHER:
            continue
        chunk = step.chunk(stay_of(node).chunk)
        if not chunk.gathered:
            raise VerifyError(f"{node.name}: chunk {chunk.id} is at home on the device")
        layout = step.layout
        if layout is not None and stay_of(node).resident == layout.takes_block(chunk):
            raise VerifyError(
                f"{node.name}: chunk {chunk.id} is said to be resident where it takes a block, or "
                "the other way round"
            )
        if node.args[1:3] != (chunk.numel, getattr(torch, chunk.dtype)):
            raise VerifyError(f"{node.name} does not have the size of chunk {chunk.id}")
        for view in node.users:
            _view(view, chunk)


def _view(view: fx.Node, chunk: Chunk) -> None:
    piece = _piece(view, chunk)
    if piece is None:
        raise VerifyError(f"{view.name} reads no single parameter of chunk {chunk.id}")
    for shaped in view.users:
        if (
            shaped.target is torch.ops.aten.as_strided.default
            and tuple(shaped.args[1]) == piece.shape  # type: ignore[arg-type]
            and tuple(shaped.args[2]) == piece.strides  # type: ignore[arg-type]
        ):
            continue
        raise VerifyError(
            f"{shaped.name} reads {piece.path!r} from chunk {chunk.id} in another shape"
        )


def _piece(view: fx.Node, chunk: Chunk) -> Slice | None:
    """The slice of the chunk that a view of its gather cuts out."""
    if view.target is not torch.ops.aten.slice.Tensor:
        return None
    bounds = tuple(view.args[1:])
    found = (p for p in chunk.slices if bounds == (0, p.offset, p.offset + p.span))
    return next(found, None)


@dataclass(kw_only=True)
class _Stay:
    """A chunk's time in the gather cache, from the first write of its block to its release."""

    gather: Gather
    nbytes: int
    backward: bool
    node: fx.Node | None = None  # the gather node, once passed

    @property
    def end(self) -> int:
        return self.gather.offset + self.nbytes


@dataclass(kw_only=True)
class _Walk:
    """What the gather cache holds while the nodes go by."""

    step: StepGraph
    live: dict[int, _Stay] = field(default_factory=dict)  # by chunk: prefetched or gathered
    left: list[_Stay] = field(default_factory=list)  # released, bytes not written over since
    was_backward: bool = False

    def visit(self, node: fx.Node) -> None:
        inner = node.op not in ("placeholder", "output")
        if inner and is_backward(node) and not self.was_backward:
            self.was_backward = True
            self.end_of_phase("forward")
        if node.target in (ops.PREFETCH, ops.RECALL):
            self.begin(node, gathers=False)
        elif node.target in (ops.GATHER, ops.RELOAD):
            self.begin(node, gathers=True)
        elif node.target in (ops.RELEASE, ops.DROP):
            self.release(node)
        else:
            self.read(node)

    def begin(self, node: fx.Node, *, gathers: bool) -> None:
        stay = stay_of(node)
        moved = self.step.moved(stay)
        known = self.live.get(stay.chunk)
        if known is None:
            if gathers and stay.kept and not self.still_there(stay):
                raise VerifyError(
                    f"{node.name}: {_what(stay)} is planned to be kept from the forward, "
                    "but its block is written over in between"
                )
            nbytes = 0 if stay.resident else moved.nbytes
            known = _Stay(gather=stay, nbytes=nbytes, backward=is_backward(node))
            self.take(node, known, moved)
        elif not gathers or known.node is not None:
            raise VerifyError(f"{node.name}: {_what(stay)} is already there")
        elif known.gather != stay:
            raise VerifyError(f"{node.name}: {_what(stay)} was prefetched for another stay")
        if gathers:
            known.node = node
            known.backward = is_backward(node)

    def take(self, node: fx.Node, new: _Stay, moved: Chunk | Offload) -> None:
        layout = self.step.layout
        assert layout is not None
        if new.gather.offset < 0 or new.end > layout.gather_bytes:
            raise VerifyError(
                f"{node.name}: the block of {_what(new.gather)}, {new.gather.offset} .. {new.end}, "
                f"lies outside the gather cache of {layout.gather_bytes} bytes"
            )
        for other in self.live.values():
            if _overlap(new, other):
                raise VerifyError(
                    f"{node.name}: the block of {_what(new.gather)} ({moved.title}) is written "
                    f"while {_what(other.gather)} is still in use there; it is reused too early"
                )
        self.left = [stay for stay in self.left if not _overlap(stay, new)]
        self.live[new.gather.chunk] = new

    def still_there(self, stay: Gather) -> bool:
        return any(
            old.gather.chunk == stay.chunk and old.gather.offset == stay.offset for old in self.left
        )

    def release(self, node: fx.Node) -> None:
        stay = self.live.pop(stay_of(node).chunk, None)
        if stay is None or stay.node is None:
            raise VerifyError(f"{node.name}: {_what(stay_of(node))} is not gathered here")
        self.left.append(stay)

    def read(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            root = memory_root(source)
            if root.target not in (ops.GATHER, ops.RELOAD):
                continue
            stay = stay_of(root)
            known = self.live.get(stay.chunk)
            if known is None or known.node is not root:
                raise VerifyError(
                    f"{node.name} reads {_what(stay)} ({self.step.moved(stay).title}) through "
                    f"{source.name} after its release"
                )

    def end_of_phase(self, phase: str) -> None:
        for stay in self.live.values():
            if stay.node is not None:
                what = _what(stay.gather)
                raise VerifyError(f"{what} is gathered and never released in the {phase}")

    def end(self) -> None:
        self.end_of_phase("backward" if self.was_backward else "forward")
        for stay in self.live.values():
            if stay.node is None:
                raise VerifyError(f"{_what(stay.gather)} is prefetched and never gathered")


def _what(stay: Gather) -> str:
    """What a stay is of, for messages."""
    return f"chunk {stay.chunk}" if stay.chunk < SAVED else f"activation {stay.chunk - SAVED}"


def _overlap(one: _Stay, other: _Stay) -> bool:
    return one.gather.offset < other.end and other.gather.offset < one.end


def _slices(plan: Plan) -> None:
    for chunk in plan.layout.chunks:
        if chunk.shards not in (1, plan.layout.group.ranks):
            raise VerifyError(
                f"chunk {chunk.id} is cut into {chunk.shards} parts for "
                f"{plan.layout.group.ranks} ranks"
            )
        if chunk.sharded and chunk.numel % (chunk.shards * CUT_ELEMENTS):
            raise VerifyError(
                f"{chunk.numel} elements of chunk {chunk.id} are not {chunk.shards} parts of a "
                f"multiple of {CUT_ELEMENTS}"
            )
        for piece in chunk.slices:
            if piece.offset % CUT_ELEMENTS:
                raise VerifyError(
                    f"{piece.path!r} starts at element {piece.offset} of chunk {chunk.id}, not at "
                    f"a multiple of {CUT_ELEMENTS}"
                )
            if piece.offset + piece.span > chunk.numel:
                raise VerifyError(f"{piece.path!r} reaches over the end of chunk {chunk.id}")
        for one, other in pairwise(sorted(chunk.slices, key=lambda piece: piece.offset)):
            if other.offset < one.offset + one.span:
                raise VerifyError(f"{one.path!r} and {other.path!r} meet in chunk {chunk.id}")


def _updates(plan: Plan) -> None:
    """What is updated on the host is at home there, all of it."""
    for chunk in plan.layout.chunks:
        if chunk.update is Tier.DEVICE:
            continue
        who = f"chunk {chunk.id} ({chunk.title})"
        if chunk.update is not Tier.HOST:
            raise VerifyError(f"{who} is updated on {chunk.update}, where no optimizer runs")
        if not chunk.trainable:
            raise VerifyError(f"{who} is updated on the host, and nothing of it is trained")
        homes = chunk.homes
        for part, home in (
            ("parameters", homes.parameters),
            ("gradients", homes.gradients),
            ("optimizer states", homes.states),
        ):
            if home is not Tier.HOST:
                raise VerifyError(
                    f"{who} is updated on the host, and its {part} are at home on {home}: they "
                    "must be at home on the host too"
                )


def _away_parameters(step: StepGraph, plan: Plan) -> None:
    parameters = step.parameter_nodes
    for chunk in plan.layout.chunks:
        if not chunk.gathered:
            continue
        for piece in chunk.slices:
            node = parameters.get(piece.path)
            for user in node.users if node else ():
                if user.op != "output":
                    raise VerifyError(
                        f"{user.name} reads parameter {piece.path!r}, whose home is "
                        f"{chunk.homes.parameters}, without a gather of chunk {chunk.id}"
                    )


def _same_reads(step: StepGraph) -> None:
    """Nodes of the captured graph read the parameters that they read there."""
    if step.reference is None:
        return
    now = _parameter_reads(step)
    names = {node.name for node in step.nodes}
    chunks = step.layout.chunks if step.layout is not None else ()
    empty = {piece.path for chunk in chunks for piece in chunk.slices if not piece.span}
    for (name, place), path in step.reference.reads.items():
        found = now.get((name, place))
        if name in names and found != path and not {found, path} <= empty:
            what = f"parameter {found!r}" if found else "something else"
            raise VerifyError(f"input {place} of {name} is {what}, not parameter {path!r}")


def _repetitions(step: StepGraph) -> None:
    """What is computed again is the same operator on the same values."""
    nodes = {node.name: node for node in step.nodes}
    again = [node for node in step.nodes if AGAIN in node.meta]
    reads = _parameter_reads(step) if again else {}
    for node in again:
        first = nodes.get(node.meta[AGAIN])
        if first is None or first.target is not node.target or first.op != node.op:
            raise VerifyError(f"{node.name} is no repetition of {node.meta[AGAIN]!r}")
        if _written(first) != _written(node):
            raise VerifyError(f"{node.name} has other arguments than {first.name}")
        for place, (there, here) in enumerate(
            zip(first.all_input_nodes, node.all_input_nodes, strict=True)
        ):
            path = reads.get((first.name, place))
            same = there is here or here.meta.get(AGAIN) == there.name or _left(here) is there
            if not same and (path is None or reads.get((node.name, place)) != path):
                raise VerifyError(
                    f"{node.name} reads {here.name} where {first.name} has {there.name}"
                )


def _left(node: fx.Node) -> fx.Node | None:
    """What came back is what left, if that is so."""
    handle = node.args[0] if node.target is ops.RELOAD else None
    value = handle.args[0] if isinstance(handle, fx.Node) and handle.target is ops.OFFLOAD else None
    return value if isinstance(value, fx.Node) else None


def _written(node: fx.Node) -> str:
    """A node's arguments without the values that it reads."""
    return repr(fx.node.map_arg((node.args, node.kwargs), lambda _: None))


def _parameter_reads(step: StepGraph) -> dict[tuple[str, int], str]:
    """By node and input: the parameter that it is made of alone, by views or copies."""
    origin: dict[fx.Node, str] = {}
    found = {}
    for node in step.nodes:
        if node.op == "output":
            continue
        sources = node.all_input_nodes
        for place, source in enumerate(sources):
            if source in origin:
                found[node.name, place] = origin[source]
        path = _origin(step, node)
        if path is None and len(sources) == 1:
            path = origin.get(sources[0])
        if path is not None:
            origin[node] = path
    return found


def _origin(step: StepGraph, node: fx.Node) -> str | None:
    """The parameter that a placeholder is, or that a view cuts out of a gathered chunk."""
    if node.op == "placeholder" and node.name in step.parameter_names:
        return step.paths[node.name].path
    gathered = node.all_input_nodes[0] if node.all_input_nodes else None
    if gathered is None or gathered.target is not ops.GATHER:
        return None
    piece = _piece(node, step.chunk(stay_of(gathered).chunk))
    return piece.path if piece is not None else None


def _gradients(step: StepGraph, plan: Plan) -> None:
    """Gradients go through the reduce of their chunk, once, each in its own place. Where all
    stays on the device, autograd gets them as they are."""
    if plan.layout.keeps_all:
        return
    answers: set[int] = set()
    for path, node in step.gradients.items():
        if path in step.sparse:
            continue  # autograd's own
        source = node.args[0] if is_item(node) else None
        if not isinstance(source, fx.Node) or source.target is not ops.REDUCE:
            raise VerifyError(
                f"the gradient of {path!r}, {node.name}, leaves the graph without a reduce"
            )
        chunk_id, slices, gradients = source.args
        assert isinstance(chunk_id, int)
        place = node.args[1]
        reduced = step.chunk(chunk_id).slices[slices[place]].path  # type: ignore[index]
        if reduced != path:
            raise VerifyError(
                f"{source.name} gives the gradient of {reduced!r} in chunk {chunk_id} to {path!r}"
            )
        wanted = step.reference.gradients.get(path) if step.reference is not None else None
        given = gradients[place].name  # type: ignore[index, union-attr]
        if wanted not in (None, given):
            raise VerifyError(
                f"{source.name} takes {given} for the gradient of {path!r}, which is {wanted}"
            )
        answers.add(chunk_id)
    count = Counter(node.args[0] for node in step.nodes if node.target is ops.REDUCE)
    for chunk_id, times in count.items():
        if times != 1 or chunk_id not in answers:
            raise VerifyError(
                f"chunk {chunk_id} is reduced {times} times, {len(answers & {chunk_id})} wanted"
            )
