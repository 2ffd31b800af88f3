"""Values that follow from one parameter alone and are cheap to make again.

A backward reads views of weights (a transpose) and casts of them (`w.to(bfloat16)`) that the
forward made. Kept, they would hold the gathered weight from forward to backward; so they are
made again next to their backward reader. Both the lifetime analysis, which must count such
reads as reads of the parameter, and split_views, which makes them again, ask here.
"""

from collections.abc import Iterator

import torch
from torch import fx

from elixir_fx.step import is_backward, operator_name, value, viewed_input

SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
CHEAP = frozenset({"aten::_to_copy", "aten::clone", "prims::convert_element_type"})


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that are no sizes."""
    return [source for source in node.all_input_nodes if not isinstance(value(source), SIZES)]


def is_derived(node: fx.Node) -> bool:
    """Whether the node is a view or a cheap copy of its single tensor argument."""
    if len(tensor_inputs(node)) != 1:
        return False
    return viewed_input(node) is not None or operator_name(node) in CHEAP


def derived_from_parameters(parameter: fx.Node) -> Iterator[fx.Node]:
    """Forward nodes that follow from `parameter` alone by views and cheap copies."""
    for user in parameter.users:
        if not is_backward(user) and is_derived(user):
            yield user
            yield from derived_from_parameters(user)
