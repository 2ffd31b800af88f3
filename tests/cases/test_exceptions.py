"""An exception in the middle of a forward or a backward: it reaches the caller as in eager, and
a normal step goes on after it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_models import EVERY_WAY, WHEN_SPARE, WHEN_TIGHT, Way, gathered_blocks, mlp, pair_of, randn
from pairs import Pair, Side
from torch import Tensor, nn

import elixir_fx

THREADS = 1
X = randn(4, 32)


class StopError(Exception):
    """What the tests raise."""


def raises(*_: Any) -> Any:
    raise StopError


class Table(nn.Module):
    """An id that is too large raises in the middle of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(32, 32), nn.Embedding(10, 32)
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.last(self.first(x) + self.table(ids))


def equal_after(pair: Pair) -> None:
    """Gradients of half a backward may differ: they are dropped, as a loop that goes on does."""
    pair.do(lambda side: side.optimizer.zero_grad())
    pair.train(2)
    pair.check()
    if not hasattr(pair.ours.net, "_session"):
        return
    assert not gathered_blocks(pair)


@EVERY_WAY
def test_in_the_middle_of_a_forward(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, Table, [(X, torch.arange(4))], tmp_path)
    pair.train(1)
    for _ in range(2):
        for side in pair.sides:
            with pytest.raises(IndexError, match="index out of range"):
                side.net(X, torch.tensor([1, 2, 3, 10]))
    equal_after(pair)


@EVERY_WAY
def test_in_the_first_forward(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, Table, [(X, torch.arange(4))], tmp_path)
    for side in pair.sides:
        with pytest.raises(IndexError, match="index out of range"):
            side.net(X, torch.tensor([1, 2, 3, 10]))
    equal_after(pair)


@EVERY_WAY
def test_in_a_forward_without_gradients(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, Table, [(X, torch.arange(4))], tmp_path, room=0.3)
    pair.train(1)
    for side in pair.sides:
        with torch.no_grad(), pytest.raises(IndexError, match="index out of range"):
            side.net(X, torch.tensor([1, 2, 3, 10]))
    equal_after(pair)


def on_the_output(side: Side) -> Any:
    y = side.net(X)
    y.register_hook(raises)
    return y.square().mean()


def on_an_input(side: Side) -> Any:
    x = X.clone().requires_grad_()
    x.register_hook(raises)
    return side.net(x).square().mean()


@pytest.mark.parametrize("loss", [on_the_output, on_an_input], ids=lambda loss: loss.__name__)
@EVERY_WAY
def test_in_a_backward(way: Way, loss: Callable[[Side], Tensor], tmp_path: Path) -> None:
    pair = pair_of(way, mlp, [(X,)], tmp_path, room=0.5)
    pair.train(1)
    for side in pair.sides:
        with pytest.raises(StopError):
            loss(side).backward()
    equal_after(pair)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
@EVERY_WAY
def test_in_a_hook_of_a_parameter(
    way: Way, error: type[BaseException], register: str, tmp_path: Path
) -> None:
    def stop(_: Any) -> None:
        raise error

    pair = pair_of(way, mlp, [(X,)], tmp_path)
    pair.train(1)
    for side in pair.sides:
        handle = getattr(side.model[2].weight, register)(stop)
        with pytest.raises(error):
            side.net(X).square().mean().backward()
        handle.remove()
    equal_after(pair)


class Guarded(torch.autograd.Function):
    """Its backward raises where the values say so, which a graph cannot."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.isnan(gradient).any():
            raise StopError
        return gradient


class Guards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Guarded.apply(self.first(x)))


@WHEN_SPARE
def test_a_backward_that_branches_by_value(way: Way, tmp_path: Path) -> None:
    """A graph break that only the backward has: refused by compile(), with a line."""
    pair = pair_of(way, Guards, [(X,)], tmp_path)
    if way.entry == "compile":
        with pytest.raises(elixir_fx.CaptureError, match=r"test_exceptions\.py:\d+"):
            pair.ours.net(X)
        return
    pair.train(2)
    pair.check()


@WHEN_TIGHT
def test_a_loss_that_raises_between_the_two(way: Way, tmp_path: Path) -> None:
    """The forward is thrown away; twice, with more forwards than the memory could keep."""
    pair = pair_of(way, mlp, [(X,)], tmp_path)
    pair.train(1)
    for _ in range(8):
        for side in pair.sides:
            with pytest.raises(StopError):
                raises(side.net(X))
    equal_after(pair)


@WHEN_TIGHT
def test_a_step_of_the_optimizer_that_raises(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, mlp, [(X,)], tmp_path)
    pair.train(1)
    for side in pair.sides:
        handle = side.optimizer.register_step_pre_hook(raises)
        side.net(X).square().mean().backward()
        with pytest.raises(StopError):
            side.optimizer.step()
        handle.remove()
    pair.finish()


@WHEN_TIGHT
def test_wrong_inputs(way: Way, tmp_path: Path) -> None:
    """Shapes and arguments that do not fit raise what eager raises."""
    pair = pair_of(way, Table, [(X, torch.arange(4))], tmp_path)
    pair.train(1)
    for side in pair.sides:
        with pytest.raises(RuntimeError, match=r"shape|size"):
            side.net(randn(4, 31), torch.arange(4))
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'ids'"):
            side.net(X)
        with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
            side.net(X, torch.arange(4), more=1)
    equal_after(pair)
