"""Split views: what the forward derived from a weight is made again in the backward.

Stands before gather: only then does each phase read weights through its own gather.
Applies to parameters whose home is not the device.

Before    t = aten.t(w); y = aten.mm(x, t); ...; dx = aten.mm(dy, t)
After     t = aten.t(w); y = aten.mm(x, t); ...; t_again = aten.t(w); dx = aten.mm(dy, t_again)
Law       no value derived from a gathered weight crosses from forward to backward (laws 2, 3)
"""

from elixir_fx.machine import Tier
from elixir_fx.passes.derived import derived_from_parameters
from elixir_fx.plan import Plan
from elixir_fx.step import StepGraph, is_backward, mark
from torch import fx


def split_views(step: StepGraph, plan: Plan) -> None:
    """Give every backward reader of a derived weight a copy of the derivation of its own."""
    away = {
        piece.path
        for chunk in plan.layout.chunks
        if chunk.homes.parameters is not Tier.DEVICE
        for piece in chunk.slices
    }
    for path, parameter in step.parameter_nodes.items():
        if path in away:
            _split(step.module.graph, parameter)


def _split(graph: fx.Graph, parameter: fx.Node) -> None:
    made = list(derived_from_parameters(parameter))
    again: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for node in made:
        for user in [user for user in node.users if is_backward(user)]:
            user.replace_input_with(node, _remake(graph, node, parameter, user, again))


def _remake(
    graph: fx.Graph,
    node: fx.Node,
    parameter: fx.Node,
    reader: fx.Node,
    again: dict[tuple[fx.Node, fx.Node], fx.Node],
) -> fx.Node:
    """The chain parameter -> node, made again just before `reader`."""
    if node is parameter:
        return parameter
    if (node, reader) not in again:
        source = _remake(graph, node.all_input_nodes[0], parameter, reader, again)
        with graph.inserting_before(reader):
            copy = graph.node_copy(node, lambda _: source)
        again[node, reader] = mark(copy, backward=True)
    return again[node, reader]
