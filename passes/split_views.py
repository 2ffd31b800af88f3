"""Split views: what the forward derived from a weight is made again in the backward.

Stands before gather: only then does each phase read weights through its own gather.
Applies to parameters that are gathered: at home elsewhere, or in shares with several ranks.

Before    t = aten.t(w); y = aten.mm(x, t); ...; dx = aten.mm(dy, t)
After     t = aten.t(w); y = aten.mm(x, t); ...; t_again = aten.t(w); dx = aten.mm(dy, t_again)
Law       no value derived from a gathered weight crosses from forward to backward (laws 2, 3)
"""

from torch import fx

from elixir_fx.passes.derived import derived_from_parameters, tensor_inputs
from elixir_fx.plan import Plan
from elixir_fx.step import StepGraph, is_backward, mark


def split_views(step: StepGraph, plan: Plan) -> None:
    """Give the backward readers of a derived weight a derivation of their own."""
    away = {piece.path for chunk in plan.layout.chunks if chunk.gathered for piece in chunk.slices}
    position = {node: index for index, node in enumerate(step.nodes)}
    for path, parameter in step.parameter_nodes.items():
        if path in away:
            _split(step.module.graph, parameter, position)


def _split(graph: fx.Graph, parameter: fx.Node, position: dict[fx.Node, int]) -> None:
    made = set(derived_from_parameters(parameter))
    again: dict[fx.Node, fx.Node] = {parameter: parameter}
    # Captured nodes all of them: what is made again reads nothing that the forward derived.
    users = (user for node in made for user in node.users)
    readers = {user for user in users if is_backward(user) and user.op != "output"}
    for reader in sorted(readers, key=position.__getitem__):
        for node in reader.all_input_nodes:
            if node in made:
                reader.replace_input_with(node, _remade(graph, node, reader, again))


def _remade(
    graph: fx.Graph, node: fx.Node, reader: fx.Node, again: dict[fx.Node, fx.Node]
) -> fx.Node:
    """The backward's own copy of a derived value, made before its first `reader`."""
    if node not in again:
        (origin,) = tensor_inputs(node)
        source = _remade(graph, origin, reader, again)
        with graph.inserting_before(reader):
            copy = graph.node_copy(node, lambda given: source if given is origin else given)
        again[node] = mark(copy, backward=True)
    return again[node]
