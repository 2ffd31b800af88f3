"""Learning-rate rules, closures and long runs."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from case_models import EVERY_WAY, WHEN_SPARE, WHEN_TIGHT, Way, decayed, mlp, pair_of, randn
from harness import Batch, sgd_momentum
from pairs import Side
from torch import Tensor, nn

THREADS = 1


class Cycle:
    """A learning-rate rule of one's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / self.count


@pytest.mark.parametrize("rule", ["one cycle", "lambda", "own"])
@WHEN_TIGHT
def test_learning_rates(way: Way, rule: str, tmp_path: Path) -> None:
    pair = pair_of(way, mlp, [(randn(4, 32),)], tmp_path, sgd_momentum)
    makers: dict[str, Any] = {
        "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
        "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
        "own": Cycle,
    }
    rules = [makers[rule](side.optimizer) for side in pair.sides]
    for _ in range(4):
        pair.train()
        for one in rules:
            one.step()
    pair.check()


@WHEN_SPARE
def test_lbfgs_where_everything_fits(way: Way, tmp_path: Path) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    pair = pair_of(way, mlp, [(randn(4, 32),)], tmp_path, make)
    x = randn(4, 32)

    def step(side: Side) -> Tensor:
        def closure() -> Tensor:
            side.optimizer.zero_grad()
            loss = side.net(x).square().mean()
            loss.backward()
            return loss

        return side.optimizer.step(closure).detach()

    for _ in range(3):
        pair.do(step)
    pair.check()


@pytest.mark.parametrize("how", ["foreach", "fused", "one by one"])
@EVERY_WAY
def test_forms_of_adamw(way: Way, how: str, tmp_path: Path) -> None:
    """Whatever the form, and with parameters at home in two tiers."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, foreach=how == "foreach", fused=how == "fused")

    options = None
    if way.budget == "tight":
        options = {"memory": "1GiB", "disk": tmp_path, "keep": {"0": "disk", "2": "device"}}
    pair = pair_of(way, mlp, [(randn(4, 32),)], tmp_path, make, options=options)
    pair.train(3)
    pair.check()


class Tower(nn.Module):
    """8 layers of widths 4 and 36, the first and the last one tied."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [4, 36, 4, 36, 4, 36, 4, 36, 4]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.layers[6].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("room", [0.0, 0.5])
@EVERY_WAY
def test_fifty_steps(way: Way, room: float, tmp_path: Path) -> None:
    if way.budget == "spare" and room:
        pytest.skip("there is room already")
    batches: list[Batch] = [(randn(3, 4, seed=seed),) for seed in range(5)]
    pair = pair_of(way, Tower, batches, tmp_path, decayed, room)
    pair.train(50)
    pair.check()
    assert pair.ours.model.layers[6].weight is pair.ours.model.layers[0].weight


@WHEN_TIGHT
def test_no_process_group_and_no_launcher(way: Way, tmp_path: Path) -> None:
    assert not torch.distributed.is_initialized()
    pair = pair_of(way, mlp, [(randn(2, 32),)], tmp_path)
    pair.train(1)
    pair.check()
    assert not torch.distributed.is_initialized()
