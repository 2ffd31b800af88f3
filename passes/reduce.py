"""Reduce: a chunk's gradients go home together, as soon as the last of them is complete.

Stands after release, so that the gathered weights are gone before gradients are added up.

Before    g = aten.mm(dt, x); ...; return [..., g]
After     g = aten.mm(dt, x); reduce_6 = elixir.reduce(6, [0], [g]); ...; return [..., reduce_6[0]]
Law       every gradient of the chunk passes its reduce exactly once; what autograd gets is
          the reduce's answer: nothing, unless it asked for that gradient itself (law 11)
"""

import operator
from collections.abc import Mapping

import torch
from torch import fx

from elixir_fx import ops
from elixir_fx.errors import PlanError
from elixir_fx.plan import Chunk, Plan
from elixir_fx.step import StepGraph, mark, tensor
from elixir_fx.units import sizes


def reduce(step: StepGraph, plan: Plan) -> None:
    """Insert the reduces of the schedule and hand their answers to the joint outputs."""
    assert step.schedule is not None
    # Of the graph as it was: chunks share no parameter, so no reduce sees another's answers.
    position = {node: index for index, node in enumerate(step.nodes)}
    gradients = step.gradients
    answers: dict[str, fx.Node] = {}
    for entry in step.schedule.reduces:
        answers.update(_reduce(step, step.chunk(entry.chunk), gradients, position))
    _return_answers(step, answers)


def _reduce(
    step: StepGraph,
    chunk: Chunk,
    found: Mapping[str, fx.Node],
    position: Mapping[fx.Node, int],
) -> dict[str, fx.Node]:
    """Insert the reduce of a chunk; its answers, by the path of their parameter."""
    slices = [i for i, piece in enumerate(chunk.slices) if piece.path in found]
    paths = [chunk.slices[i].path for i in slices]
    if not paths:
        raise PlanError(
            f"the plan reduces chunk {chunk.id} ({chunk.title}), which has no gradient here; "
            "it was made for another model"
        )
    gradients = [found[path] for path in paths]
    last = max(gradients, key=position.__getitem__)
    graph = step.module.graph
    fakes = [tensor(node) for node in gradients]
    anchor = _after_operator(step, last)
    with graph.inserting_after(anchor):
        node = step.call(
            f"reduce_{chunk.id}",
            ops.REDUCE,
            (chunk.id, slices, gradients),
            lambda: [torch.empty_like(fake) for fake in fakes],
        )
    over = f", summed over {chunk.shards} ranks," if chunk.sharded else ""
    note = (
        f"reduce chunk {chunk.id} ({chunk.title}, {sizes(chunk.nbytes)}) to "
        f"{chunk.homes.gradients}{over} after {last.name}"
    )
    mark(node, backward=True, note=note)
    answers = {}
    with graph.inserting_after(node):
        for index, path in reversed(list(enumerate(paths))):
            fake = fakes[index]
            item = step.call(
                f"answer_{chunk.id}_{index}",
                operator.getitem,
                (node, index),
                lambda fake=fake: fake,  # type: ignore[misc]
            )
            answers[path] = mark(item, backward=True)
    return answers


def _after_operator(step: StepGraph, node: fx.Node) -> fx.Node:
    """Where to insert: behind what completes a gradient; behind the whole forward where that is
    a tangent."""
    if node.op != "placeholder":
        return node
    nodes = step.nodes
    return nodes[step.backward_position - 1]


def _return_answers(step: StepGraph, answers: Mapping[str, fx.Node]) -> None:
    output = step.output
    results = list(output.args[0])  # type: ignore[arg-type]
    for index, item in enumerate(step.inputs):
        if item.path in answers and item.node in step.parameter_names:
            results[step.forward_outputs + index] = answers[item.path]
    output.args = (tuple(results),)
