"""Plain and compiled twins on every rank, for the workers of tests that use ranks.py.

    def worker(rank: int, apart: bool) -> float:
        with hosts(apart):
            plain, ours = twins(Tall, adamw)
            for side in (plain, ours):
                side.step((Tall.batch(0, rank),))
            return drift(training_state(plain), training_state(ours))

The plain twin is in DistributedDataParallel. `hosts(True)` plays ranks on a host each: chunks then
travel by messages instead of lying in memory that all ranks see.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any
from unittest import mock

import exact
import pytest
import torch
from case_models import randn, token_ids
from graphs import seeded
from harness import MakeOptimizer
from pairs import Side, sorted_states
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from elixir_fx.runtime.ranks import Ranks

PLENTY = "64MiB"
APART = pytest.mark.parametrize("apart", [False, True], ids=["shared", "apart"])


@contextlib.contextmanager
def hosts(apart: bool) -> Iterator[None]:
    """Every rank on a host of its own, if `apart`."""
    if not apart:
        yield
        return
    with mock.patch.object(Ranks, "_same_host", lambda self: False):
        yield


class Odd(nn.Module):
    """Ids below 11 -> the loss of guessing them: tied weights, a frozen part, and sizes that no
    number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 7)
        self.widen = nn.Linear(7, 48)
        self.frozen = nn.Linear(48, 48).requires_grad_(False)
        self.norm = nn.LayerNorm(48)
        self.narrow = nn.Linear(48, 7)
        self.last = nn.Linear(7, 5)
        self.three = nn.Linear(5, 3)
        self.back = nn.Linear(3, 7, bias=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.widen(self.table(ids))
        h = self.narrow(self.norm(h + self.frozen(h).tanh()))
        h = h + self.back(self.three(self.last(h).tanh()))
        return functional.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())

    @staticmethod
    def batch(step: int, rank: int) -> Tensor:
        return token_ids(4, 6, below=11, seed=10 * step + rank)


class Tall(nn.Module):
    """Eight equal layers without a bias: something to move, and nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()

    @staticmethod
    def batch(step: int, rank: int) -> Tensor:
        return randn(2, 64, seed=10 * step + rank)


class Twice(nn.Module):
    """One layer on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x)).square().mean()

    @staticmethod
    def batch(step: int, rank: int) -> Tensor:
        return randn(4, 32, seed=10 * step + rank)


@cache
def tight(build: type, ranks: int, dtype: torch.dtype = torch.float32) -> int:
    """The smallest budget with a disk, and what ranks that are apart need more."""
    model = seeded(0, build).to(dtype)
    batch = build.batch(0, 0)  # type: ignore[attr-defined]
    if batch.is_floating_point():
        batch = batch.to(dtype)
    return int(1.3 * exact.smallest_memory(model, (batch,), ranks=ranks, disk_memory="1GiB"))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def plain_twin(
    build: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype,
    **options: Any,
) -> Side:
    model = seeded(0, build).to(dtype)
    net = DistributedDataParallel(model, **options)
    return Side(model, net, make_optimizer(trained(model)), [])


def our_twin(
    build: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Side:
    model = seeded(0, build).to(dtype)
    optimizer = make_optimizer(trained(model))
    net = exact.compile(model, optimizer=optimizer, **{"memory": PLENTY, **options})
    return Side(model, net, optimizer, [])


def twins(
    build: Callable[[], nn.Module],
    make_optimizer: MakeOptimizer,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[Side, Side]:
    """A plain one and a compiled one. `options` are compile()'s."""
    return plain_twin(build, make_optimizer, dtype), our_twin(
        build, make_optimizer, dtype, **options
    )


def drift(plain: Any, ours: Any) -> float:
    """The largest difference of two nests of tensors and numbers; infinite where they have
    different keys, shapes or dtypes."""
    if isinstance(plain, Mapping):
        if list(plain) != list(ours):
            return float("inf")
        return max((drift(plain[key], ours[key]) for key in plain), default=0.0)
    if isinstance(plain, list | tuple):
        if len(plain) != len(ours):
            return float("inf")
        return max(map(drift, plain, ours), default=0.0)
    if isinstance(plain, Tensor):
        if not isinstance(ours, Tensor) or plain.shape != ours.shape or plain.dtype != ours.dtype:
            return float("inf")
        if not plain.numel():
            return 0.0
        return float((plain.detach().double() - ours.detach().double()).abs().max())
    if isinstance(plain, int | float) and not isinstance(plain, bool):
        return abs(plain - ours)
    return 0.0 if plain == ours else float("inf")


def gradients(side: Side) -> dict[str, Tensor | None]:
    """p.grad by name, ordinary tensors."""
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in side.model.named_parameters()
    }


def training_state(side: Side) -> dict[str, Any]:
    """Weights, buffers and the optimizer's states."""
    model = side.net.module if isinstance(side.net, DistributedDataParallel) else side.net
    return {"weights": dict(model.state_dict()), "optimizer": sorted_states(side.optimizer)}
