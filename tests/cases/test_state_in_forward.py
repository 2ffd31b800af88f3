"""State that forward changes or leaves behind: buffers, parameters, attributes; and where its
random numbers come from."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_models import EVERY_WAY, WHEN_SPARE, WHEN_TIGHT, Way, in_turn, mlp, pair_of, randn
from harness import Batch
from pairs import Side
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elixir_fx import CaptureError

THREADS = 1
X = randn(4, 32)
BATCHES: list[Batch] = [(randn(4, 32, seed=seed),) for seed in range(3)]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)
        self.prepare()

    def prepare(self) -> None: ...

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Statistics(Base):
    """Batch norm, with and without weights; statistics change in training only."""

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(48)
        self.average = nn.BatchNorm1d(48, affine=False)

    def between(self, h: Tensor) -> Tensor:
        return self.average(self.norm(h).tanh())


class Counts(Base):
    """Buffers that are not saved: changed in place, and replaced."""

    seen: Tensor
    mean: Tensor

    def prepare(self) -> None:
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("mean", torch.zeros(48), persistent=False)

    def between(self, h: Tensor) -> Tensor:
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean / self.seen


class Cache(Base):
    """A buffer that grows."""

    past: Tensor

    def prepare(self) -> None:
        self.register_buffer("past", torch.zeros(1, 48))

    def between(self, h: Tensor) -> Tensor:
        self.past = torch.cat([self.past, h.detach()[:1]])
        return h + self.past.mean(0)


class Codebook(Base):
    """Entries follow the values that chose them, without gradients, in training."""

    codes: Tensor

    def prepare(self) -> None:
        self.register_buffer("codes", torch.randn(6, 48))

    def between(self, h: Tensor) -> Tensor:
        chosen = torch.cdist(h.detach(), self.codes).argmin(-1)
        if self.training:
            with torch.no_grad():
                share = functional.one_hot(chosen, 6).to(h.dtype)
                self.codes.mul_(0.9).add_(share.t() @ h.detach(), alpha=0.1)
        quantised = self.codes[chosen]
        return h + (quantised - h).detach()


class Attributes(Base):
    """A plain count and a list of results, kept on the module."""

    def prepare(self) -> None:
        self.calls = 0
        self.kept: list[Tensor] = []

    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.kept = [h.detach().mean()]
        return h * self.calls


class Following(Base):
    """A second encoder that follows the first, updated in forward (momentum contrast)."""

    def prepare(self) -> None:
        self.target = nn.Linear(32, 48).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in zip(self.target.parameters(), self.first.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        return self.second(self.first(x) * self.target(x))


class FollowingData(Base):
    """The same by assignment to .data."""

    def prepare(self) -> None:
        self.target = nn.Linear(32, 48).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for own, other in zip(self.target.parameters(), self.first.parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1
        return self.second(self.first(x) * self.target(x))


class Clamped(Base):
    """Weights of the critic are clipped before they are used."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return self.second(self.first(x))


class Metadata(Base):
    """Looks at its own parameters: shapes, flags, norms, values without gradient."""

    def between(self, h: Tensor) -> Tensor:
        scale = sum(p.numel() for p in self.parameters() if p.requires_grad)
        norm = torch.stack([p.detach().norm() for p in self.parameters()]).sum()
        return h.to(self.first.weight.dtype) * norm / scale + self.first.bias.data


STATES = [
    Statistics, Counts, Cache, Codebook, Attributes, Following, Clamped, Metadata,
]  # fmt: skip


@pytest.mark.parametrize("kind", STATES)
@WHEN_TIGHT
def test_state(way: Way, kind: type[Base], tmp_path: Path) -> None:
    pair = pair_of(way, kind, BATCHES, tmp_path, room=0.3)
    pair.train(3)
    pair.check()

    def evaluated(side: Side) -> Tensor:
        side.net.eval()
        with torch.no_grad():
            y = side.net(X)
        side.net.train()
        return y

    pair.do(evaluated)
    pair.do(lambda side: side.net(X))  # no backward
    pair.train(1)
    pair.check()
    pair.do(lambda side: side.model.state_dict())
    if kind is Attributes:
        pair.do(lambda side: (side.model.calls, side.model.kept[0]))


class Auxiliary(Base):
    """A loss beside the output, left on a layer as mixtures of experts do."""

    def between(self, h: Tensor) -> Tensor:
        self.second.aside = h.softmax(-1).square().mean()
        return h


@EVERY_WAY
def test_a_loss_left_on_a_layer(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, Auxiliary, BATCHES, tmp_path)

    def loss(side: Side, batch: Batch) -> Tensor:
        y = side.net(*batch)
        return y.square().mean() + 0.1 * side.model.second.aside

    pair.train(3, loss)
    pair.check()


# -- random numbers ------------------------------------------------------------------------------


class Draws(Base):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def between(self, h: Tensor) -> Tensor:
        return self.draw(h)


def masked(h: Tensor) -> Tensor:
    keep = torch.rand(h.shape[0], 1) < 0.7
    return h * keep / 0.7


def permuted(h: Tensor) -> Tensor:
    return h[torch.randperm(h.shape[0])]


def checkpointed(reentrant: bool) -> Callable[[Tensor], Tensor]:
    def dropped(v: Tensor) -> Tensor:
        return functional.dropout(v, 0.5).sin()

    def draw(h: Tensor) -> Tensor:
        once = functional.dropout(h, 0.2)
        again = checkpoint(dropped, once, use_reentrant=reentrant)
        return functional.dropout(again, 0.1)

    return draw


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: functional.dropout(h, 0.5) + functional.dropout(h, 0.1),
    "noise": lambda h: h + 0.1 * torch.randn_like(h) + torch.rand(48),
    "mask": masked,
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "in place": lambda h: h + torch.empty(48).uniform_(-1, 1),
    "whole numbers": lambda h: h[torch.randint(0, 4, (4,))],
    "choice": lambda h: h[torch.multinomial(h.detach().exp().sum(-1), 4, replacement=True)],
    "permutation": permuted,
    "gumbel": lambda h: functional.gumbel_softmax(h, tau=0.5),
    "normal": lambda h: torch.distributions.Normal(h, 1.0).rsample(),
    "checkpointed": checkpointed(False),
    "checkpointed, reentrant": checkpointed(True),
}


@pytest.mark.parametrize(("way", "name"), in_turn(DRAWS))
def test_random_numbers(way: Way, name: str, tmp_path: Path) -> None:
    """The same numbers, and as many: what the caller draws after a step is equal, too."""
    pair = pair_of(way, lambda: Draws(DRAWS[name]), BATCHES, tmp_path)

    def step(side: Side) -> list[Tensor]:
        torch.manual_seed(3)
        losses = []
        for batch in BATCHES[:2]:
            losses += [side.step(batch), torch.rand(2)]
        return losses

    for _ in range(2):
        pair.do(step)
    pair.check()


class Scales(Base):
    def between(self, h: Tensor) -> Tensor:
        return h * random.uniform(0.5, 2.0)


@EVERY_WAY
def test_pythons_random_numbers(way: Way, tmp_path: Path) -> None:
    """Drawn anew at each call, none of them by a capture."""
    pair = pair_of(way, Scales, BATCHES, tmp_path, room=0.3)

    def steps(side: Side) -> list[Any]:
        random.seed(5)
        return [side.step(batch) for batch in BATCHES * 2]

    pair.do(steps)
    pair.check()


@EVERY_WAY
def test_a_generator_of_the_callers(way: Way, tmp_path: Path) -> None:
    """Drawing for the batch between the steps does not disturb what forward draws."""
    pair = pair_of(way, lambda: nn.Sequential(mlp(), nn.Dropout(0.4)), BATCHES, tmp_path)

    def steps(side: Side) -> list[Tensor]:
        torch.manual_seed(1)
        return [side.step((torch.randn(4, 32),)) for _ in range(3)]

    pair.do(steps)
    pair.check()


@WHEN_SPARE
def test_assigning_to_data_is_refused(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, FollowingData, BATCHES, tmp_path)
    with pytest.raises(CaptureError, match="FollowingData: its forward assigns to"):
        pair.ours.net(*BATCHES[0])
