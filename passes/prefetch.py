"""Prefetch: transfers start before the chunk is needed.

Stands after reduce: it only adds the early start; without it every gather still finds its chunk.

Before    ...; chunk_6 = elixir.gather(6)
After     elixir.prefetch(6); ...; chunk_6 = elixir.gather(6)
Law       a prefetch stands before its gather, and its block is free from there on (law 5)
"""

from torch import fx

from elixir_fx import ops
from elixir_fx.errors import PlanError
from elixir_fx.plan import Gather, Plan
from elixir_fx.step import StepGraph, is_backward, mark, named, stay_of
from elixir_fx.units import sizes


def prefetch(step: StepGraph, plan: Plan) -> None:
    """Insert the prefetches of the schedule."""
    nodes = {node.name: node for node in step.nodes}
    for stay in [stay_of(node) for node in step.nodes if node.target is ops.GATHER]:
        if stay.prefetch is None or stay.kept:
            continue
        if stay.prefetch not in nodes:
            raise PlanError(
                f"the plan prefetches chunk {stay.chunk} before {stay.prefetch!r}, which the "
                "captured graph does not have; it was made for another model"
            )
        _insert(step, stay, nodes[stay.prefetch])


def _insert(step: StepGraph, stay: Gather, anchor: fx.Node) -> None:
    chunk = step.chunk(stay.chunk)
    with step.module.graph.inserting_before(anchor):
        name = named(f"prefetch_{chunk.id}", backward=stay.backward)
        node = step.call(name, ops.PREFETCH, (stay.chunk,), lambda: None)
    note = (
        f"prefetch chunk {chunk.id} ({chunk.title}, {sizes(chunk.nbytes)}) from "
        f"{chunk.homes.parameters}, needed at {stay.before}"
    )
    mark(node, backward=is_backward(anchor), note=note, stay=stay)
