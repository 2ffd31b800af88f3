"""The joint graph as AOTAutograd hands it over, and in what way it was traced.

Beside `compilation`. What stands behind can count on it that every node has its phase,
placeholders stand in front, and the forward stands before the backward.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from elixir_fx.dynamo import as_in_eager
from elixir_fx.errors import CaptureError
from elixir_fx.step import CHECKPOINTED, mark

RANDOM_STATE = "rng_state_output"  # begins placeholders of the backward that bring one


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """How operators are traced: as PyTorch's own kernels run them, or as a compiler wants them.

    `prepare` takes Dynamo's graph, and whether it has dynamic dimensions, to the one that is
    traced, inside `context`, with `decompositions`. `join` takes AOTAutograd's joint graph, its
    inputs and its partition function's keywords to one whose phases are in order, `alone` a
    forward without a backward. `compiled`: the operators will be compiled in runs.
    """

    prepare: Callable[[fx.GraphModule, bool], fx.GraphModule]
    join: Callable[..., fx.GraphModule]
    alone: Callable[[fx.GraphModule, Sequence[Any]], fx.GraphModule]
    decompositions: Callable[[], Mapping[Any, Callable[..., Any]] | None] = lambda: None
    context: Callable[[], AbstractContextManager[object]]
    compiled: bool = False


def is_tangent(node: fx.Node) -> bool:
    return node.name.startswith("tangents_")


def is_added(node: fx.Node) -> bool:
    """Whether AOTAutograd added a placeholder: a tangent, or a token that keeps operators with
    effects (the error checks of torch.linalg) in their order."""
    return is_tangent(node) or type(node.meta.get("desc")).__name__ == "ForwardTokenAOTInput"


def order_phases(module: fx.GraphModule, *, trains: bool) -> None:
    """Mark every node with its phase and make sure the forward stands in front."""
    backward: set[fx.Node] = set()
    for node in module.graph.nodes:
        tagged = node.meta.get("partitioner_tag") == "is_backward" and node.op != "output"
        if trains and (
            tagged or is_tangent(node) or any(s in backward for s in node.all_input_nodes)
        ):
            backward.add(node)
        mark(node, backward=node in backward)
    first = next((n for n in module.graph.nodes if n in backward and n.op != "placeholder"), None)
    late = False
    for node in list(module.graph.nodes):
        late = late or node is first
        if late and node not in backward and node.op not in ("placeholder", "output"):
            assert first is not None
            first.prepend(node)
    mark(module.graph.output_node(), backward=trains)


def take_checkpoints(joint: fx.GraphModule, *, hints: bool) -> None:
    """Nodes within a torch.utils.checkpoint of the model's are ordinary ones from now on, which may
    be kept; with `hints` they are marked as ones that the model wants computed again, but for what
    one checkpoint takes from another."""
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    inside = {
        n: n.meta.get("ac_graph_id") for n in joint.graph.nodes if n.meta.get("recompute") in again
    }
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
        if hints and node in inside:
            regions = {inside[user] for user in node.users if user in inside}
            node.meta[CHECKPOINTED] = regions <= {inside[node]}


def rejoin(
    joint: fx.GraphModule, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int
) -> fx.GraphModule:
    """One graph again of two that a partitioner made of `joint`: what its backward computes
    again stands there once more, what it takes from the forward is read there. `outputs` of the
    forward's are the user's."""
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}  # nodes of the forward, by their name there
    taken: dict[str, fx.Node] = {}  # and of the backward
    for node in forward.graph.nodes:
        if node.op == "placeholder":
            known[node.name] = mark(graph.node_copy(node), backward=False)
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if is_tangent(node):
            taken[node.name] = mark(graph.node_copy(node), backward=True)
    _append(graph, forward, known, backward=False)
    results = _results(forward, known)
    taken.update(_handed_over(forward, placeholders, results[outputs:], known))
    _append(graph, backward, taken, backward=True)
    output = graph.output((*results[:outputs], *_results(backward, taken)))
    output.meta = dict(joint.graph.output_node().meta)
    mark(output, backward=True)
    return fx.GraphModule(joint, graph)


def _handed_over(
    forward: fx.GraphModule,
    placeholders: Sequence[fx.Node],
    saved: Sequence[fx.Node | None],
    known: Mapping[str, fx.Node],
) -> dict[str, fx.Node]:
    """What the backward takes from the forward, by its placeholder's name: the node of that name,
    or (states of random numbers) what is saved in that place."""
    names = {known[node.name]: node.name for node in forward.graph.nodes if node.name in known}
    wanted = [node.name for node in placeholders if not is_tangent(node)]
    others = iter([node for node in saved if node is not None and names[node] not in wanted])
    found = {}
    for name in wanted:
        node = known.get(name)
        if node is None and name.startswith(RANDOM_STATE):
            node = next(others, None)
        if node is None:
            raise CaptureError(f"the backward takes {name!r}, which the forward does not make")
        found[name] = node
    return found


def _append(
    graph: fx.Graph, half: fx.GraphModule, known: dict[str, fx.Node], *, backward: bool
) -> None:
    for node in half.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copy = graph.node_copy(node, lambda source: known[source.name])
            known[node.name] = mark(copy, backward=backward)


def _results(half: fx.GraphModule, known: Mapping[str, fx.Node]) -> list[fx.Node | None]:
    (results,) = half.graph.output_node().args
    assert isinstance(results, (list, tuple))
    return [known[node.name] if isinstance(node, fx.Node) else node for node in results]  # type: ignore[misc]


def _join_eager(joint: fx.GraphModule, inputs: Sequence[Any], **others: Any) -> fx.GraphModule:
    order_phases(joint, trains=True)
    _fill_in_place(joint)
    return joint


def _alone_eager(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    order_phases(module, trains=False)
    _fill_in_place(module)
    return module


def _fill_in_place(module: fx.GraphModule) -> None:
    """Dropout's mask again as eager draws it: into memory that lies as the input does. Tracing
    makes `empty_like(x).bernoulli_(p)` a bernoulli that returns contiguous memory, and numbers
    are drawn in the order of memory."""
    aten = torch.ops.aten
    for node in module.graph.nodes:
        if node.target is not aten.bernoulli.p or not isinstance(node.args[0], fx.Node):
            continue
        memory = node.args[0]
        if memory.target is aten.empty_like.default and len(memory.users) == 1:
            node.target = aten.bernoulli_.float
            node.meta["val"] = memory.meta["val"]


EAGER = Tracing(prepare=as_in_eager, join=_join_eager, alone=_alone_eager, context=nullcontext)
