"""Offload: what the forward leaves for the backward is away in between.

Stands behind recompute, which makes views of what comes back again; ahead of split_views, whose
views of weights it does not know.

Before    h = aten.mm(x, w); y = aten.gelu(h); ...; dh = aten.gelu_backward(dy, h)
After     h = aten.mm(x, w); y = aten.gelu(h); h_away = elixir.offload(h); ...;
          elixir.recall(h_away); ...; h_back = elixir.reload(h_away);
          dh = aten.gelu_backward(dy, h_back); elixir.drop(h_away)
Law       the backward reads what came back and nothing of what left, between its reload and its
          drop (2); its block is free from the recall on (5)
"""

import torch
from torch import fx

from elixir_fx import ops
from elixir_fx.errors import PlanError
from elixir_fx.plan import SAVED, Gather, Offload, Plan
from elixir_fx.step import StepGraph, is_backward, mark, readers, tensor
from elixir_fx.units import sizes


def offload(step: StepGraph, plan: Plan) -> None:
    """Insert the nodes of every offload of the schedule, and point the backward's readers at what
    comes back."""
    assert step.schedule is not None
    nodes = {node.name: node for node in step.nodes}
    position = {node: index for index, node in enumerate(step.nodes)}
    for index, entry in enumerate(step.schedule.offloads):
        names = (entry.node, entry.after, entry.before, entry.last, entry.prefetch or entry.before)
        missing = [name for name in names if name not in nodes]
        if missing:
            raise PlanError(
                f"the plan sends {entry.node!r} away between nodes of which this graph does not "
                f"have {missing[0]!r}; it was made for another model"
            )
        _offload(step, SAVED + index, entry, nodes, position)


def _offload(
    step: StepGraph,
    number: int,
    entry: Offload,
    nodes: dict[str, fx.Node],
    position: dict[fx.Node, int],
) -> None:
    node, graph = nodes[entry.node], step.module.graph
    users = [user for user in node.users if is_backward(user) and user.op != "output"]
    stay = Gather(
        chunk=number,
        backward=True,
        offset=entry.offset,
        before=entry.before,
        after=entry.last,
        prefetch=entry.prefetch,
    )
    assert step.layout is not None
    tier = step.layout.saved_tier
    with graph.inserting_after(nodes[entry.after]):
        handle = step.call(
            f"{node.name}_away", ops.OFFLOAD, (node,), lambda: torch.empty((), dtype=torch.int64)
        )
    mark(handle, backward=False, note=f"offload {node.name} ({sizes(entry.nbytes)}) to {tier}")
    with graph.inserting_before(nodes[entry.before]):
        back = step.call(f"{node.name}_back", ops.RELOAD, (handle,), lambda: tensor(node))
    mark(
        back,
        backward=True,
        note=f"reload {node.name} ({sizes(entry.nbytes)}) into the block at {sizes(entry.offset)}",
        stay=stay,
    )
    for user in users:
        user.replace_input_with(node, back)
    last = max(readers(back), key=lambda reader: position.get(reader, -1))
    with graph.inserting_after(last):
        dropped = step.call(f"{node.name}_drop", ops.DROP, (handle,), lambda: None)
    mark(dropped, backward=True, note=f"drop {node.name} after {last.name}", stay=stay)
    if entry.prefetch is not None:
        anchor = nodes[entry.prefetch]
        with graph.inserting_before(anchor):
            recalled = step.call(f"{node.name}_recall", ops.RECALL, (handle,), lambda: None)
        mark(
            recalled,
            backward=is_backward(anchor),
            note=f"recall {node.name} ({sizes(entry.nbytes)}), needed at {entry.before}",
            stay=stay,
        )
