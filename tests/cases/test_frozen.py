"""Frozen parameters, adapters, partly trainable groups."""

from collections.abc import Callable
from pathlib import Path

import exact
import pytest
import torch
from case_models import EVERY_WAY, WHEN_TIGHT, Adapters, Way, pair_of, randn
from graphs import Adapted
from harness import loss_of
from made_plans import facts_of, on_disk
from pairs import memory_needed, same
from torch import nn

THREADS = 1


@EVERY_WAY
def test_a_frozen_weight_does_not_decay(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, Adapted, [(randn(4, 8),)], tmp_path)
    frozen = pair.ours.model.base.weight.detach().clone()
    flags = [p.requires_grad for p in pair.ours.net.parameters()]
    assert flags == [False, True, True, True]
    pair.train(3)
    pair.check()
    assert pair.ours.model.base.weight.grad is None
    same(frozen, pair.ours.model.base.weight.detach())


@EVERY_WAY
def test_every_adapter_of_a_stack_learns(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, lambda: Adapters(6, 16), [(randn(3, 16),)], tmp_path)
    pair.backward()
    trained = [p for p in pair.ours.model.parameters() if p.requires_grad]
    assert len(trained) == 12 and all(p.grad is not None for p in trained)
    pair.check()


def test_a_frozen_model_pays_for_its_adapters_only(tmp_path: Path) -> None:
    """Gradient and optimizer memory follow what learns: 4 x Linear(1024, 1024) are frozen."""
    model = Adapters(4, 1024)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    memory = memory_needed(model, (randn(2, 1024),))
    net = exact.compile(
        model, optimizer, example_inputs=(randn(2, 1024),), memory=memory, disk=tmp_path
    )
    learning = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert net.plan is not None
    spent = net.plan.layout.disk_bytes - frozen
    assert spent <= 2 * (4 * learning)  # weights, gradients and two states, with padding
    for chunk in net.plan.layout.chunks:
        assert len({model.get_parameter(s.path).requires_grad for s in chunk.slices}) == 1
    assert "elixir.gather" in net.code
    loss_of(net(randn(2, 1024))).backward()
    optimizer.step()


@pytest.mark.parametrize("first", [True, False])
@EVERY_WAY
def test_a_frozen_layer_before_or_after(way: Way, first: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        layers = [nn.Linear(128, 128), nn.Linear(128, 128)]
        layers[0 if first else 1].requires_grad_(False)
        return nn.Sequential(*layers)

    batch = (randn(2, 128),)
    planned = way == Way("compile", "tight")
    options = on_disk(facts_of(build(), batch), tmp_path) if planned else None
    pair = pair_of(way, build, [batch], tmp_path, options=options)
    pair.train(2)
    pair.check()
    if planned:
        learns = pair.ours.model[1 if first else 0]
        held = {id(p) for group in pair.ours.optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in learns.parameters()}
        assert set(pair.away()) == {name for name, _ in pair.plain.model.named_parameters()}


def groups_of(order: list[bool]) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": parameters[:2] if first else parameters[2:]} for first in order], lr=1e-2
        )

    return make


@pytest.mark.parametrize("order", [[True, False], [False, True]])
@WHEN_TIGHT
def test_the_order_of_groups(way: Way, order: list[bool], tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    pair = pair_of(way, build, [(randn(2, 32),)], tmp_path, groups_of(order))
    pair.train(2)
    pair.check()


@WHEN_TIGHT
def test_two_equal_adapters_in_a_row_take_two_graphs(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, lambda: Adapters(2, 16), [(randn(3, 16),)], tmp_path)
    pair.train(2)
    pair.do(lambda side: torch.no_grad()(side.net)(torch.ones(3, 16)))
    pair.check()
    if way.entry == "compile":
        assert len(pair.ours.net.plan.schedules) == 2
