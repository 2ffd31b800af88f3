"""What goes in: kinds of inputs, inputs that learn, that alias each other, or that forward
changes in place."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from case_models import EVERY_WAY, WHEN_SPARE, WHEN_TIGHT, Way, in_turn, mlp, pair_of, randn
from harness import Batch
from pairs import Side
from torch import Tensor, nn

import elixir_fx

THREADS = 1
X = randn(4, 32)


class Kind(enum.Enum):
    SINE = 1
    COSINE = 2


class Point(NamedTuple):
    x: Tensor
    weight: float = 1.0


@dataclass
class Record:
    x: Tensor
    mask: Tensor | None = None
    name: str = ""


class Custom:
    """A class of the user's that holds a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Takes(nn.Module):
    """Anything, in any form: `read` finds the tensor in it."""

    def __init__(self, read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.read = read
        self.body = mlp()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.body(self.read(*args, **kwargs))


def by_kind(x: Tensor, kind: Kind) -> Tensor:
    return x.sin() if kind is Kind.SINE else x.cos()


def from_record(record: Record) -> Tensor:
    return record.x if record.mask is None else record.x * record.mask


FORMS: dict[str, tuple[Callable[..., Tensor], list[Batch]]] = {
    "nested dict": (lambda batch: batch["a"]["b"][0], [({"a": {"b": [X, None, 3]}},)]),
    "keywords only": (lambda *, x, scale=2: x * scale, [{"x": X}, {"x": X, "scale": 3}]),
    "any keywords": (lambda **named: named["x"] + named["y"], [{"x": X, "y": X.cos()}]),
    "many": (lambda *many: sum(many), [(X, X.sin(), 2.0)]),
    "named tuple": (lambda point: point.x * point.weight, [(Point(X),), (Point(X, 3.0),)]),
    "dataclass": (from_record, [(Record(X),), (Record(X, X > 0, "masked"),)]),
    "own class": (lambda held: held.x, [(Custom(X),), (Custom(X.sin()),)]),
    "enum": (by_kind, [(X, Kind.SINE), (X, Kind.COSINE)]),
    "string": (lambda x, how: getattr(x, how)(), [(X, "sin"), (X, "cos")]),
    "dtype and device": (lambda x, t, d: x.to(d, t).float(), [(X, torch.bfloat16, X.device)]),
    "size": (lambda x, size: x.reshape(size), [(X.flatten(), X.shape)]),
    "slice": (lambda x, part: x[part], [(X, slice(0, 3)), (X, slice(1, 4))]),
    "number that changes": (lambda x, t: x * t, [(X, 0.5), (X, 0.25), (X, 0.125)]),
    "step that changes": (lambda x, t: x / (t + 1), [(X, 1), (X, 2), (X, 3)]),
    "a number as tensor": (lambda x, t: x * t, [(X, torch.tensor(0.5)), (X, torch.tensor(0.3))]),
    "double": (lambda x: x.float(), [(X.double(),)]),
    "complex": (lambda x: torch.view_as_real(x).flatten(1), [(torch.complex(X, X)[:, :16],)]),
    "other strides": (lambda x: x * 2, [(X,), (randn(32, 4).t(),), (randn(4, 64)[:, ::2],)]),
    "expanded": (lambda x: x * 2, [(X[:1].expand(4, 32),), (X,)]),
    "no rows": (lambda x: torch.cat([x, x.new_ones(1, 32)]), [(X[:0],), (X,)]),
    "none": (lambda x, other: x if other is None else x + other, [(X, None), (X, X)]),
    "a parameter from elsewhere": (lambda x, p: x * p, [(X, nn.Parameter(torch.ones(32)))]),
}


@pytest.mark.parametrize(("way", "form"), in_turn(FORMS))
def test_forms(way: Way, form: str, tmp_path: Path) -> None:
    read, batches = FORMS[form]
    pair = pair_of(way, lambda: Takes(read), batches, tmp_path, room=0.5)
    pair.train(3)
    pair.check()


# -- inputs that learn -----------------------------------------------------------------------


def gradients_of(*inputs: Tensor) -> Callable[[Side], list[Any]]:
    """The gradients of these inputs in a step of their own."""

    def use(side: Side) -> list[Any]:
        given = [one.clone().requires_grad_(one.is_floating_point()) for one in inputs]
        side.net(*given).square().mean().backward()
        return [one.grad for one in given]

    return use


@EVERY_WAY
def test_inputs_that_learn(way: Way, tmp_path: Path) -> None:
    """As leaves, as results of earlier operations, and only in some steps."""
    pair = pair_of(way, lambda: Takes(lambda x: x.sin()), [(X,)], tmp_path, room=0.3)
    pair.do(gradients_of(X))
    pair.train(1)

    def through(side: Side) -> list[Tensor]:
        scale = torch.ones(32, requires_grad=True)
        side.net(X * scale).square().mean().backward()
        return [scale.grad]

    pair.do(through)
    pair.do(
        lambda side: torch.autograd.grad(side.net(one := X.clone().requires_grad_()).sum(), one)
    )
    pair.check()


# -- aliases and changes in place ----------------------------------------------------------------


def adds(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def adds_to_a_part(x: Tensor) -> Tensor:
    x[:, :3].mul_(2)
    return x.sin()


def changes_both(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    y.mul_(2)
    return x + y


def changes_one(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x * 2 + y


CHANGES: dict[str, tuple[Callable[..., Tensor], Callable[[], tuple[Tensor, ...]]]] = {
    "add": (adds, lambda: (X.clone(),)),
    "a part": (adds_to_a_part, lambda: (X.clone(),)),
    "both": (changes_both, lambda: (X.clone(), X.cos())),
    "one of two": (changes_one, lambda: (X.clone(), X.cos())),
    "into a view": (adds, lambda: (torch.cat([X, X])[2:6],)),
    "twice the same": (changes_one, lambda: (a := X.clone(), a)),
    "views of one": (changes_one, lambda: ((a := torch.cat([X, X]))[:4], a[4:])),
}


@pytest.mark.parametrize("change", CHANGES)
@EVERY_WAY
def test_inputs_changed_in_forward(way: Way, change: str, tmp_path: Path) -> None:
    read, make = CHANGES[change]
    pair = pair_of(way, lambda: Takes(read), [make()], tmp_path, room=0.3)

    def use(side: Side) -> list[Any]:
        given = make()
        loss = side.net(*given).square().mean()
        changed = [one.clone() for one in given]
        loss.backward()
        return [loss.detach(), *changed]

    for _ in range(2):
        pair.do(use)
    pair.check()


OVERLAPS: list[Callable[[], tuple[Tensor, Tensor]]] = [
    lambda: ((a := torch.cat([X, X]))[:4], a[2:6]),
    lambda: ((a := torch.cat([X, X]))[2:6], a),
]


@pytest.mark.parametrize("make", OVERLAPS)
@WHEN_SPARE
def test_inputs_that_overlap_and_change(
    way: Way, make: Callable[[], tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    """Refused at once, with what to do; and the inputs are as they were."""
    pair = pair_of(way, lambda: Takes(lambda x, y: x.add_(1) + y[:4]), [make()], tmp_path)
    given = make()
    before = [one.clone() for one in given]
    with pytest.raises(elixir_fx.CaptureError, match=r"share memory .* clone them before the call"):
        pair.ours.net(*given)
    assert all(torch.equal(one, other) for one, other in zip(before, given, strict=True))


@EVERY_WAY
def test_a_result_of_ours_changed_in_forward(way: Way, tmp_path: Path) -> None:
    """The input that forward writes into requires a gradient, and is no leaf."""
    pair = pair_of(way, lambda: Takes(adds), [(X.clone(),)], tmp_path, room=0.5)

    def use(side: Side) -> list[Tensor]:
        leaf = X.clone().requires_grad_()
        given = leaf * 3
        (side.net(given).square().mean() + given.sum()).backward()
        return [leaf.grad, given.detach()]

    pair.do(use)
    pair.check()


@EVERY_WAY
def test_inputs_that_alias_each_other(way: Way, tmp_path: Path) -> None:
    """Nothing is written: the same tensor twice, and views that overlap."""
    whole = torch.cat([X, X])
    batches: list[Batch] = [(X, X), (whole[:4], whole[2:6]), (X, X.clone())]
    pair = pair_of(way, lambda: Takes(lambda x, y: x.sin() * y), batches, tmp_path, room=0.5)
    pair.train(3)
    pair.check()

    def twice(side: Side) -> list[Tensor]:
        x = X.clone().requires_grad_()
        side.net(x, x).square().mean().backward()
        return [x.grad]

    pair.do(twice)


@EVERY_WAY
def test_a_leaf_changed_in_forward_is_an_error(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, lambda: Takes(adds), [(X.clone(),)], tmp_path, room=0.5)
    for side in pair.sides:
        with pytest.raises(RuntimeError, match="leaf Variable"):
            side.net(X.clone().requires_grad_())
    pair.do(lambda side: side.step((X.clone(),)))
    pair.check()


@WHEN_TIGHT
def test_an_input_changed_before_the_backward(way: Way, tmp_path: Path) -> None:
    """As in eager, an error where the backward needs the old value; a step goes on after it."""
    pair = pair_of(way, mlp, [(X,)], tmp_path)
    for side in pair.sides:
        x = X.clone()
        loss = side.net(x).square().mean()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        side.optimizer.zero_grad()
    pair.train(2)
    pair.check()
