"""Prove that a transformed graph keeps the laws; runs after every pass.

Independent of the passes and of the planner: it walks the nodes in their order of execution
and follows what every gather cache block holds. A graph that breaks a law is never run.

Checked, by the numbers of the design's laws:
1  every read of an away parameter reads a gather of its own phase
2  no read of a chunk, or of a view of it, outside gather .. release; every gather is released
3  no gathered weight crosses from forward to backward
4  at no position do the planned bytes exceed the budget
5  a block is written (from its prefetch on) only while no other stay uses those bytes
11 every gradient of a reduced chunk passes its reduce exactly once
"""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor, fx

from elixir_fx import ops
from elixir_fx.errors import VerifyError
from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Gather, Plan
from elixir_fx.step import (
    StepGraph,
    is_backward,
    is_item,
    memory_root,
    readers,
    stay_of,
    value,
    viewed_input,
)
from elixir_fx.units import sizes


def verify(step: StepGraph, plan: Plan, *, complete: bool = True) -> None:
    """Raise VerifyError at the first law that the graph breaks, naming node and chunk.

    `complete` is False between passes: parameters that are not gathered yet and gradients
    that are not reduced yet are then allowed, and what the gather cache holds is followed only
    once there are releases.
    """
    _order(step)
    walk = _Walk(step=step)
    targets = {node.target for node in step.nodes}
    if complete or ops.RELEASE in targets:
        for node in step.nodes:
            walk.visit(node)
        walk.end()
    if complete:
        _away_parameters(step, plan)
        _gradients(step, plan)
        _budget(step, plan)


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
        if node.op not in ("placeholder", "output"):
            if is_backward(node) and not self.was_backward:
                self.was_backward = True
                self.end_of_phase("forward")
            self.crossing(node)
        if node.target is ops.PREFETCH:
            self.begin(node, gathers=False)
        elif node.target is ops.GATHER:
            self.begin(node, gathers=True)
        elif node.target is ops.RELEASE:
            self.release(node)
        else:
            self.read(node)

    def begin(self, node: fx.Node, *, gathers: bool) -> None:
        stay = stay_of(node)
        chunk = self.step.chunk(stay.chunk)
        known = self.live.get(chunk.id)
        if known is None:
            if gathers and stay.kept and not self.still_there(stay):
                raise VerifyError(
                    f"{node.name}: chunk {chunk.id} is planned to be kept from the forward, "
                    "but its block is written over in between"
                )
            known = _Stay(gather=stay, nbytes=chunk.nbytes, backward=is_backward(node))
            self.take(node, known, chunk)
        elif not gathers or known.node is not None:
            raise VerifyError(f"{node.name}: chunk {chunk.id} is already there")
        elif known.gather != stay:
            raise VerifyError(f"{node.name}: chunk {chunk.id} was prefetched for another stay")
        if gathers:
            known.node = node
            known.backward = is_backward(node)

    def take(self, node: fx.Node, new: _Stay, chunk: Chunk) -> None:
        layout = self.step.layout
        assert layout is not None
        if new.gather.offset < 0 or new.end > layout.gather_bytes:
            raise VerifyError(
                f"{node.name}: the block of chunk {chunk.id}, {new.gather.offset} .. {new.end}, "
                f"lies outside the gather cache of {layout.gather_bytes} bytes"
            )
        for other_id, other in self.live.items():
            if _overlap(new, other):
                raise VerifyError(
                    f"{node.name}: the block of chunk {chunk.id} ({chunk.title}) is written "
                    f"while chunk {other_id} is still in use there; it is reused too early"
                )
        self.left = [stay for stay in self.left if not _overlap(stay, new)]
        self.live[chunk.id] = new

    def still_there(self, stay: Gather) -> bool:
        return any(
            old.gather.chunk == stay.chunk and old.gather.offset == stay.offset for old in self.left
        )

    def release(self, node: fx.Node) -> None:
        stay = self.live.pop(stay_of(node).chunk, None)
        if stay is None or stay.node is None:
            raise VerifyError(f"{node.name}: chunk {stay_of(node).chunk} is not gathered here")
        self.left.append(stay)

    def read(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            root = memory_root(source)
            if root.target is not ops.GATHER:
                continue
            chunk = stay_of(root).chunk
            known = self.live.get(chunk)
            if known is None or known.node is not root:
                raise VerifyError(
                    f"{node.name} reads chunk {chunk} ({self.step.chunk(chunk).title}) through "
                    f"{source.name} after its release"
                )

    def crossing(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if is_backward(node) == is_backward(source) or source.op == "placeholder":
                continue
            root = memory_root(source)
            if root.target is ops.GATHER:
                raise VerifyError(
                    f"{node.name} in the backward reads {source.name}, a gathered weight of the "
                    f"forward (chunk {stay_of(root).chunk}): it would be saved for backward"
                )

    def end_of_phase(self, phase: str) -> None:
        for chunk, stay in self.live.items():
            if stay.node is not None:
                raise VerifyError(f"chunk {chunk} is gathered and never released in the {phase}")

    def end(self) -> None:
        self.end_of_phase("backward" if self.was_backward else "forward")
        for chunk, stay in self.live.items():
            if stay.node is None:
                raise VerifyError(f"chunk {chunk} is prefetched and never gathered")


def _overlap(one: _Stay, other: _Stay) -> bool:
    return one.gather.offset < other.end and other.gather.offset < one.end


def _away_parameters(step: StepGraph, plan: Plan) -> None:
    parameters = step.parameter_nodes
    for chunk in plan.layout.chunks:
        if chunk.homes.parameters is Tier.DEVICE:
            continue
        for piece in chunk.slices:
            node = parameters.get(piece.path)
            for user in node.users if node else ():
                if user.op != "output":
                    raise VerifyError(
                        f"{user.name} reads parameter {piece.path!r}, whose home is "
                        f"{chunk.homes.parameters}, without a gather of chunk {chunk.id}"
                    )


def _gradients(step: StepGraph, plan: Plan) -> None:
    """Gradients of chunks that are reduced go through their reduce, once."""
    if plan.layout.keeps_all:
        return
    answers: dict[str, int] = {}
    for path, node in step.gradients.items():
        source = node.args[0] if is_item(node) else None
        if not isinstance(source, fx.Node) or source.target is not ops.REDUCE:
            raise VerifyError(f"the gradient of {path!r} leaves the graph without a reduce")
        chunk_id = source.args[0]
        assert isinstance(chunk_id, int)
        if all(piece.path != path for piece in step.chunk(chunk_id).slices):
            raise VerifyError(f"{source.name} reduces {path!r}, which is not in chunk {chunk_id}")
        answers[path] = chunk_id
    reduced = [node.args[0] for node in step.nodes if node.target is ops.REDUCE]
    if len(reduced) != len(set(reduced)) or set(reduced) != set(answers.values()):
        raise VerifyError(f"chunks {sorted(map(str, reduced))} are reduced, not each once")


def _budget(step: StepGraph, plan: Plan) -> None:
    """Law 4: constants and live values at every position, by this file's own count."""
    limit = plan.limits.device
    constant = _constant_bytes(step, plan)
    born, died = _allocations(step)
    live = 0
    for node in step.nodes:
        live += born.get(node, 0)
        if constant + live > limit:
            raise VerifyError(
                f"at {node.name} the step holds {sizes(constant + live)} on the device "
                f"({sizes(constant)} of it always); {sizes(limit)} are allowed"
            )
        live -= died.get(node, 0)


def _constant_bytes(step: StepGraph, plan: Plan) -> int:
    layout = plan.layout
    state_bytes = step.optimizer.state_bytes if step.optimizer else 0
    total = layout.arena_bytes
    for node in step.nodes:
        buffer = value(node)
        if _is_buffer(step, node) and isinstance(buffer, Tensor):
            total += buffer.untyped_storage().nbytes()
    for chunk in layout.chunks:
        elements = sum(piece.span for piece in chunk.slices)
        if chunk.homes.parameters is Tier.DEVICE:
            total += elements * chunk.itemsize
        if chunk.trainable and chunk.homes.gradients is Tier.DEVICE:
            total += elements * chunk.itemsize
        if chunk.trainable and chunk.homes.states is Tier.DEVICE:
            total += elements * state_bytes
    return total


def _is_buffer(step: StepGraph, node: fx.Node) -> bool:
    return (
        node.op == "placeholder"
        and node.name in step.paths
        and node.name not in step.parameter_names
        and step.paths[node.name].role.value == "buffer"
    )


def _outputs(step: StepGraph) -> set[fx.Node]:
    """Storages that the caller gets: outputs of the forward, gradients of its inputs."""
    forward, backward = step.results()
    inputs = [item.node in step.parameter_names for item in step.inputs]
    given = [node for node, ours in zip(backward, inputs, strict=False) if not ours]
    return {memory_root(node) for node in (*forward, *given) if isinstance(node, fx.Node)}


def _allocations(step: StepGraph) -> tuple[Counter[fx.Node], Counter[fx.Node]]:
    """Bytes that every node allocates, and bytes that are free after it.

    Inputs, gathered chunks and what the caller gets are not among them. A result is free
    after the last reader of it or of a view of it; one of several results, not before the
    last of them was picked.
    """
    given = _outputs(step)
    position = {node: index for index, node in enumerate(step.nodes)}
    born: Counter[fx.Node] = Counter()
    died: Counter[fx.Node] = Counter()
    for node in step.nodes:
        if node.op != "call_function" or node.target in ops.ALL or is_item(node):
            continue
        results = value(node)
        items = {user.args[1]: user for user in node.users if is_item(user)}
        picked = max([node, *items.values()], key=position.__getitem__)
        if isinstance(results, Tensor):
            owners = [(node, results)] if memory_root(node) is node else []
        elif isinstance(results, (list, tuple)) and viewed_input(node) is None:
            owners = [(items.get(index, node), result) for index, result in enumerate(results)]
        else:
            owners = []
        for owner, result in owners:
            if isinstance(result, Tensor) and owner not in given:
                uses = readers(owner) if isinstance(results, Tensor) or owner is not node else ()
                last = max([picked, *uses], key=position.__getitem__)
                born[node] += result.untyped_storage().nbytes()
                died[last] += result.untyped_storage().nbytes()
    return born, died
