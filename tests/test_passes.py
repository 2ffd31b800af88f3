"""The transform passes: what they print, that numbers stay, their laws, on random graphs too.

Step by step each pass gets the graph that those before it made. What verify refuses in
general is in test_verify.py; here every pass breaks its own law on purpose.
"""

import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from graphs import NAMED, Drawn, Example, gpt, mlp, models
from hypothesis import HealthCheck, given, settings
from steps import captured, captured_model, copied, on_chunks, planned, printed
from torch import nn

from elixir_fx import ops
from elixir_fx.errors import PlanError, VerifyError
from elixir_fx.passes.gather import gather
from elixir_fx.passes.prefetch import prefetch
from elixir_fx.passes.reduce import reduce
from elixir_fx.passes.release import release
from elixir_fx.passes.split_views import split_views
from elixir_fx.pipeline import PIPELINE, Pipeline, rewrite
from elixir_fx.plan import Plan
from elixir_fx.step import (
    StepGraph,
    is_backward,
    mark,
    memory_root,
    readers,
    stay_of,
    tensor,
)

PASSES = PIPELINE.transforms


class Scaled(nn.Module):
    """y = x W^T with a cast weight: one derivation by view, one by copy."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w.float().t()


@cache
def scaled() -> tuple[StepGraph, Plan]:
    step = captured_model(Scaled(), (torch.ones(2, 4, requires_grad=True),), optimizer="sgd")
    return step, planned(step, 0.0, away=True)


def after(*passes: Any) -> StepGraph:
    original, plan = scaled()
    step = copied(original)
    for transform in passes:
        transform(step, plan)
    step.module.graph.lint()
    return step


def test_split_views_prints() -> None:
    assert printed(after()) == (
        """\
_to_copy = aten._to_copy.default(primals_1, dtype=torch.float32)
t = aten.t.default(_to_copy)
mm = aten.mm.default(primals_2, t)
t_1 = aten.t.default(tangents_1)
mm_1 = aten.mm.default(t_1, primals_2)
t_2 = aten.t.default(mm_1)
t_3 = aten.t.default(t)
mm_2 = aten.mm.default(tangents_1, t_3)
t_4 = aten.t.default(t_2)
_to_copy_1 = aten._to_copy.default(t_4, dtype=torch.bfloat16, layout=torch.strided, device=cpu)
return [mm, _to_copy_1, mm_2]"""
    )
    assert printed(after(split_views)) == (
        """\
_to_copy = aten._to_copy.default(primals_1, dtype=torch.float32)
t = aten.t.default(_to_copy)
mm = aten.mm.default(primals_2, t)
t_1 = aten.t.default(tangents_1)
mm_1 = aten.mm.default(t_1, primals_2)
t_2 = aten.t.default(mm_1)
_to_copy_2 = aten._to_copy.default(primals_1, dtype=torch.float32)
t_5 = aten.t.default(_to_copy_2)
t_3 = aten.t.default(t_5)
mm_2 = aten.mm.default(tangents_1, t_3)
t_4 = aten.t.default(t_2)
_to_copy_1 = aten._to_copy.default(t_4, dtype=torch.bfloat16, layout=torch.strided, device=cpu)
return [mm, _to_copy_1, mm_2]"""
    )


def test_gather_prints() -> None:
    assert printed(after(split_views, gather)).splitlines()[:4] == [
        "chunk_0 = elixir.gather.default(0, 2048, torch.bfloat16, cpu)",
        "w_flat = aten.slice.Tensor(chunk_0, 0, 0, 12)",
        "w = aten.as_strided.default(w_flat, [3, 4], [4, 1])",
        "_to_copy = aten._to_copy.default(w, dtype=torch.float32)",
    ]
    text = printed(after(split_views, gather), notes=True)
    assert "# gather chunk 0 (w, 4.0 KiB) from host into the block at 0 B\nchunk_0 = " in text
    assert (
        "chunk_0_backward = elixir.gather.default(0, 2048, torch.bfloat16, cpu)\n"
        "w_backward_flat = aten.slice.Tensor(chunk_0_backward, 0, 0, 12)\n"
        "w_backward = aten.as_strided.default(w_backward_flat, [3, 4], [4, 1])\n"
        "_to_copy_2 = aten._to_copy.default(w_backward, dtype=torch.float32)\n"
    ) in text


def test_release_prints() -> None:
    text = printed(after(split_views, gather, release), notes=True)
    assert (
        "_to_copy = aten._to_copy.default(w, dtype=torch.float32)\n"
        "# release chunk 0 after _to_copy\n"
        "release_0 = elixir.release.default(0)\n"
        "t = aten.t.default(_to_copy)\n"
    ) in text
    assert "# release chunk 0 after _to_copy_2\nrelease_0_backward = " in text


def test_reduce_prints() -> None:
    text = printed(after(split_views, gather, release, reduce), notes=True)
    assert text.endswith(
        """\
_to_copy_1 = aten._to_copy.default(t_4, dtype=torch.bfloat16, layout=torch.strided, device=cpu)
# reduce chunk 0 (w, 4.0 KiB) to device after _to_copy_1
reduce_0 = elixir.reduce.default(0, [0], [_to_copy_1])
answer_0_0 = getitem(reduce_0, 0)
return [mm, answer_0_0, mm_2]"""
    )


def test_prefetch_prints() -> None:
    step = captured(mlp(8, 16, 4))
    plan = planned(step, 0.0, away=True)
    rewrite(step, plan, PIPELINE)
    lines = printed(step, notes=True).splitlines()
    at = lines.index("prefetch_2 = elixir.prefetch.default(2)")
    assert lines[at - 1] == "# prefetch chunk 2 (2.weight, 4.0 KiB) from host, needed at t_1"
    assert at < lines.index("chunk_2 = elixir.gather.default(2, 1024, torch.float32, cpu)")


# Numbers: the rewritten graph computes what the captured one does, bit for bit, on chunks
# that turn to NaN when they are released.

EXAMPLES: dict[str, Example] = {
    "gpt": gpt(layers=1, width=32, seq=8),
    "gpt_tied": gpt(layers=1, width=32, seq=8, tied=True),
    **{name: NAMED[name] for name in ("thrice", "adapted", "by_keyword", "elsewhere")},
    **{f"kind_{kind}": NAMED[f"kind_{kind}"] for kind in ("mixed", "packed", "strided", "bytes")},
}


def check_numbers(example: Example, share: float) -> None:
    step = captured(example)
    plan = planned(step, share, away=True)
    for one, other in on_chunks(step, plan, example.build()):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_numbers_stay(name: str, share: float) -> None:
    check_numbers(EXAMPLES[name], share)


@given(models())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_numbers_stay_on_random_models(drawn: Drawn) -> None:
    check_numbers(drawn, 0.2)
    torch._dynamo.reset()


@given(models())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_what_holds_of_every_rewritten_step(drawn: Drawn) -> None:
    step = captured(drawn)
    plan = planned(step, 0.0, away=True)
    before = {node.name for node in step.nodes}
    rewrite(step, plan, PIPELINE)
    nodes = step.nodes
    position = {node: index for index, node in enumerate(nodes)}
    assert before <= {node.name for node in nodes}  # nothing of the captured graph is lost
    gathers = [node for node in nodes if node.target is ops.GATHER]
    releases = {stay_of(node): node for node in nodes if node.target is ops.RELEASE}
    assert len(gathers) == len(releases) == len({stay_of(node) for node in gathers})
    for gathered in gathers:
        last = max(readers(gathered), key=position.__getitem__)
        assert releases[stay_of(gathered)].prev in (last, *releases.values())
        assert is_backward(gathered) == stay_of(gathered).backward
    for node in nodes:
        if is_backward(node):
            roots = {memory_root(source) for source in node.all_input_nodes}
            assert not [r for r in roots if r.target is ops.GATHER and not is_backward(r)]
    reduced = [path for n in nodes if n.target is ops.REDUCE for path in _reduced(step, n)]
    assert sorted(reduced) == sorted(step.gradients)
    torch._dynamo.reset()


def _reduced(step: StepGraph, node: Any) -> list[str]:
    return [step.chunk(node.args[0]).slices[index].path for index in node.args[1]]


# Laws, broken by a pass that does half its work: the runner names it.


def half_split(step: StepGraph, plan: Plan) -> None:
    split_views(step, plan)
    view = next(n for n in reversed(step.nodes) if n.name == "t_1")  # of 2.weight, in the forward
    with step.module.graph.inserting_before(step.output):
        node = step.call("late", torch.ops.aten.clone.default, (view,), lambda: tensor(view))
    mark(node, backward=True)


def half_gather(step: StepGraph, plan: Plan) -> None:
    gather(step, plan)
    shaped = next(s for n in step.nodes if n.target is ops.GATHER for p in n.users for s in p.users)
    shaped.replace_all_uses_with(next(iter(step.parameter_nodes.values())))


def half_release(step: StepGraph, plan: Plan) -> None:
    release(step, plan)
    gathered = next(n for n in step.nodes if n.target is ops.GATHER)
    stay = stay_of(gathered)
    released = next(n for n in step.nodes if n.target is ops.RELEASE and stay_of(n) == stay)
    gathered.append(released)


def half_reduce(step: StepGraph, plan: Plan) -> None:
    """Forgets to reduce."""


def half_prefetch(step: StepGraph, plan: Plan) -> None:
    prefetch(step, plan)
    node = next(n for n in step.nodes if n.target is ops.PREFETCH)
    next(n for n in step.nodes if n.target is ops.GATHER and stay_of(n) == stay_of(node)).append(
        node
    )


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            split_views,
            half_split,
            r"late in the backward reads t_1, a gathered weight of the forward",
        ),
        (gather, half_gather, r"reads parameter '0.weight'.* without a gather"),
        (release, half_release, r"pass 'half_release' .*reads chunk 0 .* after its release"),
        (reduce, half_reduce, r"the gradient of '.*', .* leaves the graph without a reduce"),
        (prefetch, half_prefetch, r"prefetch_\d.*: chunk \d is already there"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_pass_that_breaks_its_law_is_named(right: Any, wrong: Any, message: str) -> None:
    step = captured(mlp(8, 16, 4))
    plan = planned(step, 0.0, away=True)
    transforms = tuple(wrong if known is right else known for known in PASSES)
    with pytest.raises(VerifyError, match=message) as refused:
        rewrite(step, plan, Pipeline(analyses=PIPELINE.analyses, transforms=transforms))
    assert str(refused.value).startswith("pass '")


def test_a_plan_of_another_model_is_refused() -> None:
    step = captured(mlp(8, 16, 4))
    other = captured(gpt(layers=1, width=32, seq=8))
    plan = planned(other, 0.0, away=True)
    step.layout, step.schedule = plan.layout, plan.schedules[0]
    for transform in (gather, reduce):
        with pytest.raises(PlanError, match="made for another model"):
            transform(copied(step), plan)


def lines_run(layers: int) -> Counter[str]:
    """How many lines of Python each pass runs on a GPT of so many layers, all of it away."""
    step = captured(gpt(layers=layers))
    plan = planned(step, 0.0, away=True)
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: object) -> Any:
        found[transform.__name__] += event == "line"
        return count

    before = sys.gettrace()
    for transform in PASSES:
        sys.settrace(count)
        try:
            transform(step, plan)
        finally:
            sys.settrace(before)
    return found


def test_twice_the_layers_are_twice_the_work() -> None:
    few, many = lines_run(8), lines_run(16)
    growth = {name: many[name] / few[name] for name in few}
    assert max(growth.values()) < 2.1, growth
