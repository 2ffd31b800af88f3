"""The builders themselves: every model trains in plain PyTorch, twice the same."""

import copy

import pytest
import torch
from graphs import KINDS, NAMED, OUTPUTS, Drawn, Layer, models
from harness import (
    Run,
    adamw,
    assert_equal_runs,
    call,
    difference,
    leaves,
    loss_of,
    same_bits,
    sgd_momentum,
    train,
)
from hypothesis import given, settings


def assert_trains(run: Run, before: dict[str, torch.Tensor]) -> None:
    assert all(loss.isfinite() and loss.requires_grad is False for loss in run.losses)
    moved = [name for name in before if not same_bits(before[name], run.weights[name])]
    assert moved, "no weight changed"
    assert any(grad is not None for grad in run.grads.values())


@pytest.mark.parametrize("name", NAMED)
def test_named_models_train_and_repeat(name: str) -> None:
    example = NAMED[name]
    model = example.build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run = train(copy.deepcopy(model), adamw, example.batches(3))
    assert_trains(run, before)
    assert_equal_runs(run, train(example.build(), adamw, example.batches(3)))


@given(models())
@settings(max_examples=40, deadline=None)
def test_drawn_models_train_and_repeat(drawn: Drawn) -> None:
    model = drawn.build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run = train(model, sgd_momentum, drawn.batches(2))
    assert_trains(run, before)
    again = eval(repr(drawn), {"Drawn": Drawn, "Layer": Layer})
    assert_equal_runs(run, train(again.build(), sgd_momentum, again.batches(2)))


@pytest.mark.parametrize("output", OUTPUTS)
def test_what_the_loss_does_not_see_has_no_gradient(output: str) -> None:
    model = Drawn(layers=(Layer("aside"),), output=output).build()
    batch = Drawn(layers=()).batches(1)[0]
    loss_of(call(model, batch)).backward()
    grad = dict(model.named_parameters())["layers.0.probe.weight"].grad
    assert (grad is None) == (output in ("loss", "dict"))


def test_kinds_make_what_they_are_named_for() -> None:
    def build(kind: str) -> dict[str, torch.nn.Parameter]:
        model = Drawn(layers=(Layer(kind),)).build()
        return dict(model.named_parameters(remove_duplicate=False))

    assert len(KINDS) >= 12
    assert build("gain")["layers.0.gain"].ndim == 0
    assert not build("strided")["layers.0.weight"].is_contiguous()
    assert build("strided")["layers.0.empty"].numel() == 0
    tied = build("tied")
    assert tied["layers.0.head.weight"] is tied["layers.0.table.weight"]
    assert not build("frozen")["layers.0.first.weight"].requires_grad
    assert build("bytes")["layers.0.codes"].dtype == torch.uint8
    assert {p.dtype for p in build("mixed").values()} == {
        torch.float32,
        torch.float64,
        torch.bfloat16,
    }


def test_accumulation_counts_steps_not_batches() -> None:
    example = NAMED["mlp"]
    run = train(example.build(), adamw, example.batches(4), accumulate=2)
    assert len(run.losses) == 4
    assert run.states["0.step"] == 2


def test_bits_are_compared_not_values() -> None:
    nan, zero = torch.tensor([torch.nan, 1.0]), torch.tensor([0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]))
    assert same_bits(torch.ones(2, dtype=torch.uint8), torch.ones(2, dtype=torch.uint8))


def test_differences_are_told_in_words() -> None:
    a, b = torch.zeros(3), torch.tensor([0.0, 0.5, 0.0])
    assert difference(a, a.clone()) is None
    assert difference(a, b) == "1 of 3 elements differ, by at most 0.5; first at [1]"
    assert difference(None, b) == "plain has none, ours has one"
    assert difference(a, -a) == "0 of 3 elements differ, by at most 0; first at a sign of zero"
    with pytest.raises(AssertionError, match=r"weights: w: 1 of 3 elements differ"):
        assert_equal_runs(Run(weights={"w": a}), Run(weights={"w": b}))
    with pytest.raises(AssertionError, match="grads: g only in plain"):
        assert_equal_runs(Run(grads={"g": None}), Run())


def test_leaves_are_found_in_any_nest() -> None:
    tensors = [torch.zeros(()) for _ in range(3)]
    nest = {"a": tensors[0], "b": [None, (tensors[1], 3)], "c": Run(losses=[tensors[2]])}
    assert [id(leaf) for leaf in leaves(nest)] == [id(tensor) for tensor in tensors]
