"""Gather: parameters that live elsewhere are read from their gathered chunk.

Stands after split_views, so that forward and backward each have readers of their own.

Before    t = aten.t(w); y = aten.mm(x, t)
After     chunk_6 = elixir.gather(6); w = aten.as_strided(chunk_6[a:b], shape, strides)
          t = aten.t(w); y = aten.mm(x, t)
Law       every read of an away parameter reads a gather of its own phase (laws 1, 2)
"""

from collections.abc import Mapping

import torch
from torch import fx

from elixir_fx import ops
from elixir_fx.errors import PlanError
from elixir_fx.plan import Chunk, Gather, Plan, Slice
from elixir_fx.step import StepGraph, identifier, is_backward, mark, named, tensor
from elixir_fx.units import sizes


def gather(step: StepGraph, plan: Plan) -> None:
    """Insert the gathers of the schedule and point the readers of their parameters there."""
    assert step.schedule is not None
    # Of the graph as it was: what reads a parameter itself stands in it, and no gather does.
    position = {node: index for index, node in enumerate(step.nodes)}
    parameters = step.parameter_nodes
    for stay in step.schedule.gathers:
        _gather(step, step.chunk(stay.chunk), stay, parameters, position)


def _gather(
    step: StepGraph,
    chunk: Chunk,
    stay: Gather,
    parameters: Mapping[str, fx.Node],
    position: Mapping[fx.Node, int],
) -> None:
    reads: list[tuple[Slice, fx.Node, list[fx.Node]]] = []
    for piece in chunk.slices:
        if piece.path in parameters:
            node = parameters[piece.path]
            users = [u for u in node.users if u.op != "output" and is_backward(u) == stay.backward]
            if users:
                reads.append((piece, node, users))
    if not reads:
        raise PlanError(
            f"the plan gathers chunk {chunk.id} ({chunk.title}) where no node reads it; "
            "it was made for another model"
        )
    first = min((user for _, _, users in reads for user in users), key=position.__getitem__)
    graph = step.module.graph
    with graph.inserting_before(first):
        gathered = _call(step, chunk, stay, tensor(reads[0][1]).device)
        for piece, node, users in reads:
            view = _slice_view(step, gathered, piece)
            mark(view, backward=stay.backward)
            for user in users:
                user.replace_input_with(node, view)


def _call(step: StepGraph, chunk: Chunk, stay: Gather, device: torch.device) -> fx.Node:
    dtype = getattr(torch, chunk.dtype)
    node = step.call(
        named(f"chunk_{chunk.id}", backward=stay.backward),
        ops.GATHER,
        (chunk.id, chunk.numel, dtype, device),
        lambda: torch.empty(chunk.numel, dtype=dtype, device=device),
    )
    kept = ", kept from the forward" if stay.kept else ""
    source = f"{chunk.shards} ranks' {chunk.homes.parameters}" if chunk.sharded else None
    where = "where it is shared" if stay.resident else f"into the block at {sizes(stay.offset)}"
    note = (
        f"gather chunk {chunk.id} ({chunk.title}, {sizes(chunk.nbytes)}) from "
        f"{source or chunk.homes.parameters} {where}{kept}"
    )
    return mark(node, backward=stay.backward, note=note, stay=stay)


def _slice_view(step: StepGraph, gathered: fx.Node, piece: Slice) -> fx.Node:
    """The parameter's elements of the gathered chunk, in its shape and strides."""
    name = named(identifier(piece.path), backward=is_backward(gathered))
    bounds = (0, piece.offset, piece.offset + piece.span)
    flat = tensor(gathered)
    part = step.call(
        f"{name}_flat",
        torch.ops.aten.slice.Tensor,
        (gathered, *bounds),
        lambda: torch.ops.aten.slice.Tensor(flat, *bounds),
    )
    mark(part, backward=is_backward(gathered))
    geometry = (list(piece.shape), list(piece.strides))
    return step.call(
        name,
        torch.ops.aten.as_strided.default,
        (part, *geometry),
        lambda: torch.as_strided(tensor(part), *geometry),
    )
