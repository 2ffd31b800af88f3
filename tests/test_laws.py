"""The laws of the design, at run time: whatever comes between, a step equals plain PyTorch's.

`verify`'s side of them (broken schedules are refused) is in test_verify.py.
"""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from graphs import NAMED, Named, gpt, mlp
from harness import adamw, call, difference, leaves, loss_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_plans import facts_of, on_disk
from torch import Tensor, nn

import elixir_fx
from elixir_fx.errors import TierError
from elixir_fx.facts import Facts
from elixir_fx.machine import Tier
from elixir_fx.runtime.cache import GatherCache

THREADS = 1
MLP = mlp(64, 256, 256, 64)
GPT = gpt(layers=2, width=64, seq=8, tied=True)


@cache
def captured(example: Named) -> Facts:
    return facts_of(example.build(), example.batches(1)[0])


class Pair:
    """The same model twice: plain, and compiled with all its state on disk."""

    def __init__(self, example: Named, folder: Path) -> None:
        self.example = example
        self.plain = example.build()
        model = example.build()
        self.plain_optimizer = adamw(list(self.plain.parameters()))
        self.optimizer = adamw(list(model.parameters()))
        options = on_disk(captured(example), folder)
        self.ours: Any = exact.compile(
            model,
            optimizer=self.optimizer,
            example_inputs=example.batches(1)[0],
            **options,
        )
        homes = [chunk.homes.parameters for chunk in self.ours.plan.layout.chunks]
        assert set(homes) == {Tier.DISK}

    def both(self, use: Callable[[Any], Any]) -> None:
        """`use` gives the same tensors for either model."""
        expected, got = list(leaves(use(self.plain))), list(leaves(use(self.ours)))
        assert [difference(a, b) for a, b in zip(expected, got, strict=True)] == [None] * len(got)

    def check(self) -> None:
        """Gradients, then a step, then weights are equal."""
        ours = dict(self.ours.named_parameters())
        for name, p in self.plain.named_parameters():
            mine = ours[name].grad
            assert difference(p.grad, None if mine is None else mine.detach().clone()) is None, name
        self.plain_optimizer.step()
        self.optimizer.step()
        self.plain_optimizer.zero_grad()
        self.optimizer.zero_grad()
        weights = self.ours.state_dict()
        for name, value in self.plain.state_dict().items():
            assert difference(value, weights[name]) is None, name


@pytest.fixture(params=["mlp", "gpt"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return Pair({"mlp": MLP, "gpt": GPT}[request.param], tmp_path)


# Law 1: the schedule is a promise about speed, never about correctness.


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_before_their_backwards(pair: Pair, order: tuple[int, int]) -> None:
    batches = pair.example.batches(2)

    def use(net: nn.Module) -> list[Tensor]:
        losses = [loss_of(call(net, batch)) for batch in batches]
        for index in order:
            losses[index].backward()
        return [loss.detach() for loss in losses]

    for _ in range(2):
        pair.both(use)
        pair.check()


def test_an_evaluation_between_forward_and_backward(pair: Pair) -> None:
    one, other = pair.example.batches(2)

    def use(net: nn.Module) -> list[Any]:
        loss = loss_of(call(net, one))
        net.eval()
        with torch.no_grad():
            seen = call(net, other)
        net.train()
        loss.backward()
        return [loss.detach(), seen]

    for _ in range(2):
        pair.both(use)
        pair.check()


def test_a_forward_that_fails_half_way(pair: Pair) -> None:
    engine = pair.ours._session.engine
    gather, left = engine.gather, 3

    def failing(chunk: int, offset: int) -> Tensor:
        nonlocal left
        left -= 1
        if left == 0:
            raise TierError("a cable came loose")
        return gather(chunk, offset)

    (batch,) = pair.example.batches(1)
    engine.gather = failing
    with pytest.raises(TierError, match="cable"):
        call(pair.ours, batch)
    assert engine.cache.gathered == []
    for _ in range(2):
        pair.both(lambda net: _step(net, batch))
        pair.check()


def test_a_backward_that_fails_half_way(pair: Pair) -> None:
    (batch,) = pair.example.batches(1)

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    def use(net: nn.Module) -> list[Tensor]:
        handle = next(iter(net.parameters())).register_hook(fail)
        loss = loss_of(call(net, batch))
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        for parameter in net.parameters():
            parameter.grad = None
        return [_step(net, batch)]

    pair.both(use)
    assert pair.ours._session.engine.cache.gathered == []
    pair.check()


def test_other_shapes_between(pair: Pair) -> None:
    one, other = pair.example.batches(2)
    smaller = tuple(value[:1] for value in other)
    for batch in (one, smaller, one, smaller):
        pair.both(lambda net, batch=batch: _step(net, batch))
        pair.check()


def test_a_new_graph_while_gradients_are_away(pair: Pair) -> None:
    one, other = pair.example.batches(2)
    smaller = tuple(value[:1] for value in other)
    pair.both(lambda net: _step(net, one))
    with torch.no_grad():
        pair.both(lambda net: call(net, one))
    pair.both(lambda net: _step(net, smaller))
    pair.check()


def _step(net: nn.Module, batch: Any) -> Tensor:
    loss = loss_of(call(net, batch))
    loss.backward()
    return loss.detach()


@given(st.lists(st.sampled_from(["forward", "backward", "evaluate", "small", "step"]), max_size=12))
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_calls_in_any_order(tmp_path: Path, calls: list[str]) -> None:
    pair = Pair(MLP, tmp_path)
    batches = iter(MLP.batches(len(calls) + 1))
    pending: list[tuple[Tensor, Tensor]] = []
    for name in [*calls, *["backward"] * len(calls), "step"]:
        if name == "backward" and pending:
            plain, ours = pending.pop(0)
            plain.backward()
            ours.backward()
        elif name == "evaluate":
            batch = next(batches)
            with torch.no_grad():
                pair.both(lambda net, batch=batch: call(net, batch))
        elif name in ("forward", "small"):
            batch = tuple(value[: 1 if name == "small" else None] for value in next(batches))
            plain, ours = (loss_of(call(net, batch)) for net in (pair.plain, pair.ours))
            assert difference(plain.detach(), ours.detach()) is None
            pending.append((plain, ours))
        elif name == "step" and not pending:  # in eager a step spoils graphs that are pending
            pair.check()
    torch._dynamo.reset()


# Laws 2 and 5: what is released may be written over at once.


class Poisoned(GatherCache):
    """Forgets every chunk at its release and fills its block with NaN."""

    def release(self, chunk: int) -> None:
        block = self._blocks[chunk]
        super().release(chunk)
        if not block.references:
            block.flat.fill_(torch.nan if block.flat.is_floating_point() else 77)
            self._blocks.pop(chunk, None)


@pytest.mark.parametrize("name", ["mlp", "gpt", "mixed", "thrice"])
def test_nothing_reads_what_was_released(name: str, tmp_path: Path) -> None:
    wide: dict[str, Named] = {"mlp": MLP, "gpt": GPT}
    pair = Pair(wide.get(name) or _wide(name), tmp_path)
    pair.ours._session.engine.cache.__class__ = Poisoned
    for batch in pair.example.batches(3):
        pair.both(lambda net, batch=batch: _step(net, batch))
        pair.check()


def _wide(name: str) -> Any:
    """A named model beside a layer that is too large to stay."""
    example = NAMED["thrice" if name == "thrice" else f"kind_{name}"]

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = example.build()
            self.wide = nn.Linear(64, 1024)

        def forward(self, x: Tensor, *inputs: Tensor) -> Tensor:
            return loss_of(self.inner(*inputs)) + self.wide(x).square().mean()

    def batch(generator: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(2, 64, generator=generator), *example.batches(1)[0]

    return Named(make=Wide, batch=batch)


# Law 3: no gathered weight is saved for backward.


def test_no_saved_tensor_lies_in_the_arena(pair: Pair) -> None:
    arena = pair.ours._session.engine.store.arena
    low, high = arena.data_ptr(), arena.data_ptr() + arena.nbytes
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(call(pair.ours, pair.example.batches(1)[0]))
    assert saved
    away = {id(p) for p in pair.ours.parameters() if isinstance(p, elixir_fx.AwayParameter)}
    for tensor in saved:
        if id(tensor) not in away:
            assert not low <= tensor.data_ptr() < high
    loss.backward()


# Law 6: nothing is global.


def test_two_models_never_meet(tmp_path: Path) -> None:
    one, other = Pair(MLP, tmp_path), Pair(GPT, tmp_path)
    twin = Pair(MLP, tmp_path)
    assert one.ours._session.engine.store is not twin.ours._session.engine.store
    for first, second in zip(MLP.batches(3), GPT.batches(3), strict=True):
        losses = [
            [loss_of(call(net, batch)) for net, batch in nets]
            for nets in (
                [(one.plain, first), (other.plain, second), (twin.plain, first)],
                [(one.ours, first), (other.ours, second), (twin.ours, first)],
            )
        ]
        for plain, ours in zip(*losses, strict=True):
            assert difference(plain.detach(), ours.detach()) is None
            plain.backward()
            ours.backward()
        for pair in (other, one, twin):
            pair.check()


# Law 9: with gradients off nothing is saved.


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_only_a_forward(pair: Pair, mode: Any) -> None:
    (batch,) = pair.example.batches(1)
    with mode():
        expected, got = call(pair.plain, batch), call(pair.ours, batch)
    assert difference(expected, got) is None
    assert got.grad_fn is None
    assert not got.requires_grad
    made = pair.ours.plan.schedules[-1]
    assert not made.trains
    assert made.gathers
    assert not any(stay.backward for stay in made.gathers)
    assert not made.reduces


# Law 11: a reduce runs only when autograd would accumulate.


def _grads(net: nn.Module) -> list[Tensor]:
    return [
        torch.zeros(()) if p.grad is None else p.grad.detach().clone() for p in net.parameters()
    ]


def _floats(pair: Pair) -> Tensor:
    return pair.example.batches(1)[0][0]


def test_the_gradient_of_an_input_leaves_parameters_alone(tmp_path: Path) -> None:
    pair = Pair(MLP, tmp_path)

    def by_grad(net: nn.Module) -> list[Tensor]:
        x = _floats(pair).requires_grad_()
        return [*torch.autograd.grad(net(x).square().mean(), x), *_grads(net)]

    def by_backward(net: nn.Module) -> list[Tensor]:
        x = _floats(pair).requires_grad_()
        net(x).square().mean().backward(inputs=[x])
        assert x.grad is not None
        return [x.grad, *_grads(net)]

    pair.both(by_grad)
    pair.both(by_backward)
    assert all(p.grad is None for p in pair.ours.parameters())


def test_gradients_that_are_asked_for_are_answered(tmp_path: Path) -> None:
    pair = Pair(MLP, tmp_path)

    def all_of_them(net: nn.Module) -> list[Tensor]:
        loss = net(_floats(pair)).square().mean()
        return [*torch.autograd.grad(loss, list(net.parameters())), *_grads(net)]

    def one_of_them(net: nn.Module) -> list[Tensor]:
        loss = net(_floats(pair)).square().mean()
        third = list(net.parameters())[2]
        return [*torch.autograd.grad(loss, [third]), *_grads(net)]

    def into_one(net: nn.Module) -> list[Tensor]:
        net(_floats(pair)).square().mean().backward(inputs=[list(net.parameters())[2]])
        return _grads(net)

    pair.both(all_of_them)
    pair.both(one_of_them)
    assert all(p.grad is None for p in pair.ours.parameters())
    pair.both(into_one)
    pair.both(lambda net: _step(net, pair.example.batches(1)[0]))
    pair.check()


def test_a_retained_graph_goes_backward_twice(pair: Pair) -> None:
    (batch,) = pair.example.batches(1)

    def use(net: nn.Module) -> list[Tensor]:
        loss = loss_of(call(net, batch))
        loss.backward(retain_graph=True)
        once = _grads(net)
        loss.backward()
        for first, both in zip(once, _grads(net), strict=True):
            assert difference(2 * first, both) is None
        return once

    pair.both(use)
    pair.check()


def test_a_deep_copy_taken_in_training_is_plain(pair: Pair) -> None:
    (batch,) = pair.example.batches(1)
    pair.both(lambda net: _step(net, batch))
    pair.check()
    twin = copy.deepcopy(pair.ours)
    assert type(twin) is type(pair.plain)
    pair.ours = twin
    pair.both(lambda net: call(net, batch))
