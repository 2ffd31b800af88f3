"""Code generation: two halves, straight-line code that frees what it has used."""

import weakref
from typing import Any

import pytest
import torch
from graphs import NAMED, Example, gpt, mlp
from steps import Home, captured, copied, planned, run, step_inputs
from torch import Tensor

from elixir_fx import ops
from elixir_fx.codegen import executable, is_activation, split, tangents_of_outputs
from elixir_fx.errors import ElixirError
from elixir_fx.pipeline import PIPELINE, rewrite
from elixir_fx.step import StepGraph


def rewritten(example: Example) -> tuple[StepGraph, StepGraph]:
    """The captured step, and its rewritten copy."""
    step = captured(example)
    plan = planned(step, 0.0, away=True)
    new = copied(step)
    rewrite(new, plan, PIPELINE)
    return step, new


class Runtime(Home):
    """What generated code calls, with memory from the heap for what it would recycle."""

    def take(
        self, nbytes: int, room_bytes: int, shape: Any, strides: Any, dtype: torch.dtype
    ) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype)

    def give(self, value: Tensor) -> None: ...


@pytest.mark.parametrize(
    "example",
    [mlp(8, 16, 4), gpt(layers=1, width=32, seq=8, tied=True), NAMED["kind_counter"]],
    ids=["mlp", "gpt_tied", "counter"],
)
def test_the_halves_compute_the_joint_graph(example: Example) -> None:
    step, new = rewritten(example)
    model = example.build()
    values = step_inputs(step, model)
    expected = run(step, values)
    home = Runtime(new, {name: p.detach() for name, p in model.named_parameters()})
    halves = split(new)
    assert halves.backward is not None
    tangents = len(values) - len(step.inputs)
    torch.manual_seed(0)
    arguments = [value.clone() for value in values[: len(values) - tangents]]
    results = list(executable(halves.forward)(home, arguments))
    assert arguments == []  # boxed: the caller keeps nothing alive
    outputs, saved = results[: step.forward_outputs], results[step.forward_outputs :]
    given = [*saved, *(value.clone() for value in values[len(values) - tangents :])]
    gradients = list(executable(halves.backward)(home, given))
    assert given == []
    paths = {item.path: index for index, item in enumerate(step.inputs)}
    for path, gradient in home.gradients.items():
        assert gradients[paths[path]] is None
        gradients[paths[path]] = gradient
    for one, other in zip(expected, [*outputs, *gradients], strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_activations_die_when_they_are_used() -> None:
    _, new = rewritten(mlp(8, 16, 16, 4))
    halves = split(new)
    assert halves.backward is not None
    backward = halves.backward
    alive: list[int] = []
    watched: list[weakref.ref[torch.UntypedStorage]] = []

    class Watching(Runtime):
        def reduce(self, *args: Any) -> list[Tensor | None]:
            alive.append(sum(ref() is not None for ref in watched))
            return super().reduce(*args)

    model = mlp(8, 16, 16, 4).build()
    home = Watching(new, {name: p.detach() for name, p in model.named_parameters()})
    values = step_inputs(new, model)
    results = list(executable(halves.forward)(home, values[:-1]))
    saved = results[new.forward_outputs :]
    placeholders = [n for n in backward.graph.nodes if n.op == "placeholder"]
    for node, value in zip(placeholders, [*saved, values[-1]], strict=True):
        if is_activation(node):
            watched.append(weakref.ref(value.untyped_storage()))
    assert len(watched) >= 3
    given = [*saved, values[-1]]
    results.clear()
    saved.clear()
    value = None
    executable(backward)(home, given)
    assert alive == sorted(alive, reverse=True)
    assert alive[0] > alive[-1] == 0


def test_halves_are_named_by_paths() -> None:
    _, new = rewritten(mlp(8, 16, 4))
    halves = split(new)
    assert halves.backward is not None
    assert "def forward(self, _0_weight, _0_bias," in halves.forward.code
    assert "elixir.gather" in halves.forward.code
    assert "elixir.reduce" in halves.backward.code
    assert not [n for n in halves.forward.graph.nodes if n.target is ops.REDUCE]


def test_tangents_are_followed_to_single_gradients() -> None:
    """Also through a reduce that several gradients share."""
    step, new = rewritten(NAMED["by_keyword"])
    assert tangents_of_outputs(step) == tangents_of_outputs(new)
    assert len(set(tangents_of_outputs(step))) > 2


def test_our_operators_run_only_in_generated_code() -> None:
    with pytest.raises(ElixirError, match="ran outside its generated module"):
        torch.ops.elixir.gather(0, 4, torch.float32, torch.device("cpu"))
    with pytest.raises(ElixirError, match="ran outside its generated module"):
        torch.ops.elixir.release(0)
