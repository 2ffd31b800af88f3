"""Recompute: the backward computes again what the forward did not keep for it.

Stands first: what is repeated reads weights, which later passes gather for it.

Before    a = aten.gelu(h); y = aten.mm(a, w); ...; dw = aten.mm(dy, t)      t = a's transpose
After     a = aten.gelu(h); y = aten.mm(a, w); ...; a_again = aten.gelu(h);
          t_again = aten.t(a_again); dw = aten.mm(dy, t_again)
Law       a repetition is the same operator on the same values, ahead of all who read it, so that
          every bit stays; what draws random numbers runs once
"""

from torch import fx

from elixir_fx.errors import PlanError
from elixir_fx.facts import again
from elixir_fx.plan import Plan
from elixir_fx.step import AGAIN, StepGraph, is_backward, mark


def recompute(step: StepGraph, plan: Plan) -> None:
    """Insert the repetitions of the schedule and point their readers in the backward there."""
    assert step.schedule is not None
    if not step.schedule.recomputes:
        return
    nodes = {node.name: node for node in step.nodes}
    position = {node: index for index, node in enumerate(step.nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    graph = step.module.graph
    for entry in step.schedule.recomputes:
        node, before = nodes.get(entry.node), nodes.get(entry.before)
        if node is None or before is None or is_backward(node) or not is_backward(before):
            raise PlanError(
                f"the plan repeats {entry.node!r} before {entry.before!r}, which is no node of the "
                "forward before one of the backward here; it was made for another model"
            )
        with graph.inserting_before(before):
            copy = graph.node_copy(node, lambda source: copies.get(source, source))
        copy.name = again(node.name)
        copy.meta = dict(node.meta)
        copy.meta[AGAIN] = node.name
        copies[node] = mark(copy, backward=True, note=f"computed again: {node.name} was not kept")
    for node, copy in copies.items():
        for user in list(node.users):
            if is_backward(user) and user in position and user.op != "output":
                user.replace_input_with(node, copy)
