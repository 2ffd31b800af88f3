"""Release: a gathered chunk is let go right after its last reader.

Stands after gather, whose readers it looks for.

Before    chunk_6 = elixir.gather(6); ...; y = aten.mm(x, t)
After     chunk_6 = elixir.gather(6); ...; y = aten.mm(x, t); elixir.release(6)
Law       nothing reads a chunk, or a view of it, between its release and its next gather (2)
"""

from elixir_fx import ops
from elixir_fx.plan import Plan
from elixir_fx.step import StepGraph, mark, named, readers, stay_of


def release(step: StepGraph, plan: Plan) -> None:
    """Insert a release for every gather."""
    position = {node: index for index, node in enumerate(step.nodes)}
    graph = step.module.graph
    for gathered in [node for node in step.nodes if node.target is ops.GATHER]:
        stay = stay_of(gathered)
        last = max(readers(gathered), key=position.__getitem__)
        with graph.inserting_after(last):
            name = named(f"release_{stay.chunk}", backward=stay.backward)
            node = step.call(name, ops.RELEASE, (stay.chunk,), lambda: None)
        note = f"release chunk {stay.chunk} after {last.name}"
        mark(node, backward=stay.backward, note=note, stay=stay)
