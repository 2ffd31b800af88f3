"""The order of passes, written once, and the runner that carries it out.

The runner lints and verifies after every pass, records what it added and removed, and dumps
each stage as readable Python on request. An error names the pass and those before it.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from elixir_fx.errors import ElixirError, VerifyError
from elixir_fx.machine import Machine
from elixir_fx.passes.align import align
from elixir_fx.passes.communication_cost import communication_cost
from elixir_fx.passes.compute_cost import compute_cost
from elixir_fx.passes.dataflow import dataflow
from elixir_fx.passes.gather import gather
from elixir_fx.passes.lifetime import lifetime
from elixir_fx.passes.offload import offload
from elixir_fx.passes.prefetch import prefetch
from elixir_fx.passes.recompute import recompute
from elixir_fx.passes.recycle import recycle
from elixir_fx.passes.reduce import reduce
from elixir_fx.passes.release import release
from elixir_fx.passes.split_views import split_views
from elixir_fx.plan import Plan
from elixir_fx.step import NOTE, Record, StepGraph
from elixir_fx.verify import reference, verify

Analysis = Callable[[StepGraph, Machine], None]
Transform = Callable[[StepGraph, Plan], None]


@dataclass(frozen=True)
class Pipeline:
    """Analyses, then (once planned) transforms, in order. Immutable: edits give a new one."""

    analyses: tuple[Analysis, ...]
    transforms: tuple[Transform, ...]

    def after(self, name: str, transform: Transform) -> "Pipeline":
        """This pipeline with `transform` right after the transform called `name`."""
        index = self._index(name) + 1
        return replace(
            self, transforms=(*self.transforms[:index], transform, *self.transforms[index:])
        )

    def without(self, name: str) -> "Pipeline":
        """This pipeline without the transform called `name`."""
        index = self._index(name)
        return replace(self, transforms=self.transforms[:index] + self.transforms[index + 1 :])

    def _index(self, name: str) -> int:
        names = [transform.__name__ for transform in self.transforms]
        if name not in names:
            raise ElixirError(f"no transform pass is called {name!r}; there are {names}")
        return names.index(name)


PIPELINE = Pipeline(
    analyses=(
        lifetime,  # first: the others cost what it found
        compute_cost,
        communication_cost,
        dataflow,
    ),
    transforms=(
        recompute,  # what the backward reads is settled first
        offload,
        recycle,  # lives are those of operators, which nothing moves any more
        split_views,  # each phase gets readers of its own, so that it can gather on its own
        gather,  # readers then look at gathered chunks
        release,  # after the last of those readers
        reduce,  # gradients leave once weights are released
        prefetch,  # only moves the start of transfers ahead
        align,  # last: where our nodes cut nothing that a compiler fuses
    ),
)


def annotate(step: StepGraph, machine: Machine, pipeline: Pipeline) -> None:
    """Run the analyses: afterwards `step.facts()` is complete."""
    for analysis in pipeline.analyses:
        started = time.perf_counter()
        analysis(step, machine)
        _record(step, analysis.__name__, started, Counter(), Counter())


def rewrite(step: StepGraph, plan: Plan, pipeline: Pipeline, dump: Path | None = None) -> None:
    """Run the transforms, each one checked. VerifyError names the pass that broke a law."""
    done: list[str] = []
    step.reference = reference(step)
    _dump(step, dump, "captured", 0)
    for transform in pipeline.transforms:
        started = time.perf_counter()
        before = _operators(step)
        last = transform is pipeline.transforms[-1]
        try:
            transform(step, plan)
            step.module.graph.lint()
            verify(step, plan, complete=last)
        except (VerifyError, RuntimeError) as error:
            where = _dump(step, dump, f"broken_{transform.__name__}", len(done) + 1)
            raise VerifyError(
                f"pass {transform.__name__!r} (after {done or 'none'}) broke the graph: {error}"
                + (f"; its graph: {where}" if where else "; pass dump=folder to see its graph")
            ) from error
        after = _operators(step)
        _record(step, transform.__name__, started, after - before, before - after)
        done.append(transform.__name__)
        _dump(step, dump, transform.__name__, len(done))
    _adopt_lines(step)
    step.module.recompile()


def _adopt_lines(step: StepGraph) -> None:
    """Our nodes stand under the user's line that they serve: that of the next operator."""
    trace: str | None = None
    for node in reversed(step.nodes):
        if node.op == "call_function" and node.stack_trace is None:
            node.stack_trace = trace
        trace = node.stack_trace or trace


def _operators(step: StepGraph) -> Counter[str]:
    return Counter(str(node.target) for node in step.nodes if node.op == "call_function")


def _record(
    step: StepGraph,
    name: str,
    started: float,
    added: Mapping[str, int],
    removed: Mapping[str, int],
) -> None:
    seconds = time.perf_counter() - started
    step.history.append(
        Record(name=name, seconds=seconds, added=dict(added), removed=dict(removed))
    )


def _dump(step: StepGraph, folder: Path | None, name: str, number: int) -> Path | None:
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step.key}_{number:02d}_{name}.py"
    step.module.recompile()
    seconds = step.history[-1].seconds if step.history else 0.0
    text = step.module.print_readable(print_output=False, additional_meta=[NOTE])
    path.write_text(f"# stage {number}: {name}, made in {seconds * 1e3:.1f} ms\n{text}")
    return path
