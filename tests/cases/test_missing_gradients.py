"""Parameters without a gradient in a step: branches not taken, outputs that are not in the loss,
inputs that learn or do not."""

from pathlib import Path
from typing import Any

import torch
from case_models import EVERY_WAY, BothWays, Branches, Way, pair_of, randn
from harness import Batch
from pairs import Side
from torch import Tensor, nn

THREADS = 1


@EVERY_WAY
def test_a_branch_that_is_not_taken_does_not_decay(way: Way, tmp_path: Path) -> None:
    """Alternate branches, then clip with one of them unused."""
    batches: list[Batch] = [(randn(3, 32), use_b) for use_b in (True, False)]
    pair = pair_of(way, Branches, batches, tmp_path, room=0.3)
    pair.train(4)
    pair.check()
    pair.backward()
    assert pair.ours.model.a.weight.grad is None and pair.ours.model.b.weight.grad is not None
    pair.do(lambda side: nn.utils.clip_grad_norm_(side.net.parameters(), 0.1))
    pair.do(lambda side: side.optimizer.step())
    pair.check()


class Pictures(nn.Module):
    """A tower that only some batches need."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision = nn.Linear(32, 32), nn.Linear(48, 32)

    def forward(self, x: Tensor, img: Tensor | None = None) -> Tensor:
        h = self.text(x)
        return h if img is None else h + self.vision(img)


@EVERY_WAY
def test_batches_with_and_without_pictures(way: Way, tmp_path: Path) -> None:
    """Also joined in one step, as two ranks would."""
    x, img = randn(3, 32), randn(3, 48)
    pair = pair_of(way, Pictures, [(x, img), (x,), (x, None)], tmp_path, room=0.5)
    pair.train(3)
    pair.check()
    for _ in range(3):
        pair.backward()
    pair.do(lambda side: side.optimizer.step())
    pair.check()


class Loops(nn.Module):
    """A layer as often as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self.head(x).tanh()
        return self.last(x)


@EVERY_WAY
def test_a_layer_as_often_as_the_caller_says(way: Way, tmp_path: Path) -> None:
    batches: list[Batch] = [(randn(3, 32), times) for times in (3, 1, 0)]
    pair = pair_of(way, Loops, batches, tmp_path, room=0.5)
    pair.train(6)
    pair.check()


@EVERY_WAY
def test_an_output_that_is_not_in_the_loss(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, BothWays, [(randn(3, 32),)], tmp_path)
    pair.train(2, lambda side, batch: side.net(*batch)[0].square().mean())
    pair.check()
    assert not pair.ours.optimizer.state.get(pair.ours.model.b.weight)
    pair.train(1, lambda side, batch: side.net(*batch)[1].square().mean())
    pair.train(1, lambda side, batch: side.net(*batch)[0].square().mean())
    pair.train(1)
    pair.check()


class Half(nn.Module):
    """Uses a frozen input and lets one that learns go by."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.other = nn.Linear(32, 32)

    def forward(self, kept: Tensor, learns: Tensor) -> tuple[Tensor, Tensor]:
        return self.frozen(kept), self.other(learns)


@EVERY_WAY
def test_gradients_of_inputs(way: Way, tmp_path: Path) -> None:
    kept, learns = randn(2, 32), randn(2, 32, seed=1)
    pair = pair_of(way, Half, [(kept, learns)], tmp_path)

    def use(side: Side) -> list[Any]:
        x = learns.clone().requires_grad_()
        y = kept.clone().requires_grad_()
        first, second = side.net(y, x)
        first.sum().backward(retain_graph=True)
        alone = (None if x.grad is None else x.grad.clone(), y.grad.clone())
        second.sum().backward()
        return [alone, x.grad, y.grad]

    pair.do(use)
    pair.check()


class OneOfTwo(nn.Module):
    """Looks at the frozen input only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 32)

    def forward(self, kept: Tensor, learns: Tensor) -> Tensor:
        return self.body(kept)


@EVERY_WAY
def test_an_input_that_learns_and_is_not_used(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, OneOfTwo, [(randn(2, 32), randn(2, 32))], tmp_path)

    def use(side: Side) -> list[Any]:
        x = randn(2, 32).requires_grad_()
        side.net(randn(2, 32), x * 2).sum().backward()
        return [x.grad]

    assert pair.do(use) == [None]
    pair.check()


class Experts(nn.Module):
    """Every expert runs on all tokens; those that nobody chose get zeros, as in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y = torch.where((chosen == index)[:, None], expert(x), y)
        return y


@EVERY_WAY
def test_experts(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, Experts, [(randn(6, 16),), (randn(1, 16).expand(6, 16),)], tmp_path)
    pair.train(3)
    pair.check()
