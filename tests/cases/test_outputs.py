"""What comes out: kinds of outputs, views and inputs among them, parameters, and what the
caller does with them before the backward."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from case_models import EVERY_WAY, Way, compile_spare, in_turn, mlp, pair_of, randn
from harness import Batch, leaves
from pairs import Side
from torch import Tensor, nn

THREADS = 1
X = randn(4, 32)


class Pairing(NamedTuple):
    loss: Tensor
    other: Tensor


@dataclass
class Answer:
    loss: Tensor | None = None
    logits: Tensor | None = None
    states: tuple[Tensor, ...] | None = None


class Custom:
    """A class of the user's that holds a tensor."""

    def __init__(self, y: Tensor, count: int) -> None:
        self.y, self.count = y, count


class Gives(nn.Module):
    """`make` makes the output of an input, a hidden value and the model."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)
        self.register_buffer("mean", torch.ones(32))
        self.mask = torch.ones(32)

    def forward(self, x: Tensor) -> Any:
        h = self.second(self.first(x).tanh())
        return self.make(x, h, self)


def tensors(value: Any) -> list[Tensor]:
    return [value.y] if isinstance(value, Custom) else list(leaves(value))


def in_place(x: Tensor, h: Tensor, _: Any) -> Tensor:
    y = h * 2
    y.add_(1)
    y[:, 0] = 3.0
    return y


OUTPUTS: dict[str, Callable[..., Any]] = {
    "dict": lambda x, h, m: {"loss": h.square().mean(), "aux": [h, None, 3]},
    "dataclass, one of three": lambda x, h, m: Answer(logits=h),
    "named tuple": lambda x, h, m: Pairing(h.square().mean(), h.sin()),
    "own class": lambda x, h, m: Custom(h, 3),
    "number, string, nothing": lambda x, h, m: (h, 3, 2.5, "name", None, True, torch.float32),
    "generator of a list": lambda x, h, m: [part * 2 for part in h.unbind(0)],
    "the same twice": lambda x, h, m: (h, h),
    "views of each other": lambda x, h, m: (h, h[:, :3], h.t()),
    "views of what does not come out": lambda x, h, m: ((h * 2).t(), (h * 3)[0]),
    "the input": lambda x, h, m: (x, h),
    "a view of the input": lambda x, h, m: (x[0], x.t(), h),
    "a parameter": lambda x, h, m: (h, m.first.weight),
    "a view of a parameter": lambda x, h, m: (h, m.first.weight.t(), m.first.weight[0]),
    "a product with a parameter": lambda x, h, m: (h, m.first.weight * 2),
    "a parameter detached": lambda x, h, m: (h, m.first.weight.detach() * 2),
    "a buffer": lambda x, h, m: (h, m.mean),
    "a tensor that is no buffer": lambda x, h, m: (h, m.mask),
    "a constant": lambda x, h, m: (h, torch.arange(3), torch.tensor(2.0)),
    "whole numbers": lambda x, h, m: (h, h.argmax(-1), h > 0),
    "detached": lambda x, h, m: (h, h.detach(), h.detach().sum()),
    "written": in_place,
    "shapes": lambda x, h, m: (h, h.shape, h.size(0), x.stride()),
    "nothing to learn from": lambda x, h, m: (h.mean(), x.mean()),
}


@pytest.mark.parametrize(("way", "output"), in_turn(OUTPUTS))
def test_kinds(way: Way, output: str, tmp_path: Path) -> None:
    """Equal types and values, and a loss of every tensor that has a gradient."""
    batches: list[Batch] = [(X,)]
    pair = pair_of(way, lambda: Gives(OUTPUTS[output]), batches, tmp_path)

    def loss(side: Side, batch: Batch) -> Tensor:
        found = tensors(side.net(*batch))
        return sum(one.square().mean() for one in found if one.requires_grad)

    pair.train(2, loss)
    pair.check()
    one, other = (side.net(X) for side in pair.sides)
    assert type(one) is type(other)
    if isinstance(one, tuple | list):
        assert [type(part) for part in one] == [type(part) for part in other]
    pair.do(lambda side: [(t.requires_grad, t.shape, t.stride()) for t in tensors(side.net(X))])
    pair.do(lambda side: [t.detach().clone() for t in tensors(side.net(X))])


@EVERY_WAY
def test_what_the_caller_does_with_an_output(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, mlp, [(X,)], tmp_path)

    def changed(side: Side, batch: Batch) -> Tensor:
        y = side.net(*batch)
        y.mul_(2)
        y[:, 0] = 0.0
        return y.square().mean()

    def hooked(side: Side, batch: Batch) -> Tensor:
        y = side.net(*batch)
        y.register_hook(lambda gradient: gradient * 3)
        y.retain_grad()
        return y.square().mean()

    def kept(side: Side, batch: Batch) -> Tensor:
        y = side.net(*batch)
        return (y[0].detach() * y).mean() + y.view(-1)[3]

    for loss in (changed, hooked, kept):
        pair.train(1, loss)
    pair.check()
    pair.do(lambda side: side.net(X).backward(torch.ones(4, 32)))
    pair.check()


@EVERY_WAY
def test_no_gradient_where_no_output_has_one(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, lambda: Gives(lambda x, h, m: h.detach()), [(X,)], tmp_path, room=0.5)
    pair.do(lambda side: side.net(X))
    for side in pair.sides:
        with pytest.raises(RuntimeError, match="does not require grad"):
            side.net(X).sum().backward()
    pair.check()


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_model_that_returns_its_input() -> None:
    net = compile_spare(Identity())
    x = randn(2, 4).requires_grad_()
    y = net(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))
    assert all(p.grad is None for p in net.parameters())


def test_an_output_that_is_a_view_follows_the_input() -> None:
    """x[0] of the output is x[0] of the input, as in eager."""
    net = compile_spare(Gives(lambda x, h, m: (x[0], h)))
    x = X.clone()
    part, _ = net(x)
    part.zero_()
    assert torch.equal(x[0], torch.zeros(32))


class Returns(nn.Module):
    """Returns what `make` makes of its parameters, beside an output."""

    def __init__(self, make: Callable[["Returns"], Tensor]) -> None:
        super().__init__()
        self.make = make
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
        self.square = nn.Parameter(torch.randn(32, 32))
        self.row = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.make(self)


OF_PARAMETERS: dict[str, Callable[[Returns], Tensor]] = {
    "transposed": lambda model: model.square.t(),
    "part": lambda model: model.square[1:3],
    "sum": lambda model: model.row + 0,
    "clone": lambda model: model.row.clone(),
}


@pytest.mark.parametrize("made", OF_PARAMETERS)
def test_an_output_made_of_a_parameter_alone(made: str, tmp_path: Path) -> None:
    """Views keep their parameter on the device; a copy's gradient is a tangent."""
    way = Way("compile", "tight")
    pair = pair_of(way, lambda: Returns(OF_PARAMETERS[made]), [(X,)], tmp_path, room=0.3)
    for _ in range(2):
        pair.train()
    pair.check()
