"""Recycle: results of PyTorch's own kernels are written into memory that earlier values left.

Stands behind recompute and offload, by which values live longer and shorter, and ahead of the
passes that move parameters. Only marks nodes; code generation reads the marks (see recycling).

Before    h = aten.mm(x, w)
After     h = aten.mm(x, w)    marked: from a block of so many bytes, while so much may be held
Law       the same kernels run, and what is held stays below the planned peak (4)
"""

from elixir_fx.passes.lifetime import find_lives
from elixir_fx.plan import Plan
from elixir_fx.recycling import mark_recycled
from elixir_fx.step import StepGraph


def recycle(step: StepGraph, plan: Plan) -> None:
    """Mark the results that come from the recycler, where the step uses one."""
    assert step.schedule is not None
    if step.recycles:
        if step.schedule.recomputes or step.schedule.offloads:
            find_lives(step)
        mark_recycled(step)
