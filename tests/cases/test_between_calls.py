"""What changes between two calls: modes, frozen and thawed parameters, hooks, attributes; and
forwards and backwards in any order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_models import (
    EVERY_WAY,
    WHEN_TIGHT,
    BothWays,
    Way,
    gathered_blocks,
    mlp,
    pair_of,
    randn,
)
from harness import Batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import Pair, Side
from torch import Tensor, nn

from elixir_fx import PlanError

THREADS = 1
X = randn(6, 32)


class Modes(nn.Module):
    """Dropout and batch norm: it matters which mode a call was in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)
        self.norm, self.dropout = nn.BatchNorm1d(48), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.dropout(self.norm(self.first(x)).tanh()))


def value(y: Tensor) -> Tensor:
    return torch.tensor(y.tolist())  # also of an inference tensor


def learn(side: Side, x: Tensor) -> Tensor:
    loss = side.net(x).square().mean()
    loss.backward()
    side.optimizer.step()
    side.optimizer.zero_grad()
    return loss.detach()


def forward_only(side: Side, x: Tensor) -> Tensor:
    return side.net(x).detach()


def no_grad(side: Side, x: Tensor) -> Tensor:
    with torch.no_grad():
        return side.net(x).clone()


def inference(side: Side, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return value(side.net(x))


def evaluation(side: Side, x: Tensor) -> Tensor:
    side.net.eval()
    return side.net(x).detach()


def training(side: Side, x: Tensor) -> bool:
    return side.net.train().training


def accumulate(side: Side, x: Tensor) -> None:
    side.net(x).square().mean().backward()


def over_an_evaluation(side: Side, x: Tensor) -> Tensor:
    """A forward without gradients stands between a forward and its backward."""
    loss = side.net(x).square().mean()
    with torch.no_grad():
        result = side.net(2 * x).clone()
    loss.backward()
    return result


def half_trained(side: Side, x: Tensor) -> None:
    """One layer is set to eval, as with frozen statistics."""
    side.net.train()
    side.net.norm.eval()


def two_forwards(side: Side, x: Tensor) -> None:
    one, other = side.net(x), side.net(x * 2)
    (other.mean() + one.square().mean()).backward()


def freeze(side: Side, x: Tensor) -> None:
    side.net.first.requires_grad_(False)


def thaw(side: Side, x: Tensor) -> None:
    side.net.first.requires_grad_(True)


ACTS: dict[str, Callable[[Side, Tensor], Any]] = {
    act.__name__: act
    for act in (
        learn,
        forward_only,
        no_grad,
        inference,
        evaluation,
        training,
        accumulate,
        over_an_evaluation,
        half_trained,
        two_forwards,
        freeze,
        thaw,
    )
}
ORDERS = [
    "no_grad learn inference learn",
    "inference learn no_grad evaluation learn training learn",
    "learn forward_only evaluation training learn",
    "forward_only forward_only learn accumulate evaluation no_grad accumulate learn",
    "over_an_evaluation learn half_trained learn training learn",
    "accumulate freeze accumulate learn thaw learn freeze evaluation learn",
    "freeze learn learn thaw learn over_an_evaluation learn",
    "two_forwards two_forwards learn evaluation two_forwards training learn",
]


def follow(pair: Pair, order: list[str]) -> None:
    for act in order:
        pair.do(lambda side, act=act: ACTS[act](side, X))
    pair.check()


@pytest.mark.parametrize("order", ORDERS)
@EVERY_WAY
def test_orders(way: Way, order: str, tmp_path: Path) -> None:
    if str(way) == "backend-tight" and "thaw" in order:
        pytest.skip("refused: see test_thawing_is_refused")
    pair = pair_of(way, Modes, [(X,)], tmp_path, room=1.0)
    follow(pair, order.split())
    if way.entry == "compile":
        assert not gathered_blocks(pair)


@EVERY_WAY
def test_ten_switches_take_two_graphs(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, Modes, [(X,)], tmp_path)
    for _ in range(5):
        for side in pair.sides:
            assert side.net.train().training
        pair.train()
        for side in pair.sides:
            side.net.eval()
            assert not side.net.training and not side.model.dropout.training
        pair.do(lambda side: no_grad(side, X))
    pair.check()
    if way.entry == "compile":
        assert len(pair.ours.net.plan.schedules) == 2
        assert not gathered_blocks(pair)


@settings(deadline=None, max_examples=4, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(order=st.lists(st.sampled_from(sorted(ACTS)), min_size=5, max_size=9))
@WHEN_TIGHT
def test_random_orders(way: Way, order: list[str], tmp_path: Path) -> None:
    follow(pair_of(way, Modes, [(X,)], tmp_path, room=1.0), order)


@EVERY_WAY
def test_thawed_layer_by_layer(way: Way, tmp_path: Path) -> None:
    """All layers are known to the optimizer and frozen but the last; each step thaws one."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    if str(way) == "backend-tight":
        pytest.skip("refused: see test_thawing_is_refused")
    pair = pair_of(way, build, [(X,)], tmp_path, room=1.0)
    for side in pair.sides:
        for layer in side.model[:3]:
            layer.requires_grad_(False)
    for index in (2, 1, 0):
        pair.train(1)
        pair.check()
        for side in pair.sides:
            side.model[index].requires_grad_(True)
    pair.train(2)
    pair.check()


@EVERY_WAY
def test_an_attribute_that_changes(way: Way, tmp_path: Path) -> None:
    """A number, a flag and a function that forward reads."""

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale, self.use = mlp(), 1.0, torch.sin

        def forward(self, x: Tensor) -> Tensor:
            return self.use(self.body(x)) * self.scale

    pair = pair_of(way, Tuned, [(X,)], tmp_path, room=0.5)
    pair.train(1)
    for scale, use in ((2.0, torch.sin), (2.0, torch.cos), (0.5, torch.tanh)):
        for side in pair.sides:
            side.net.scale, side.net.use = scale, use
        pair.train(1)
    pair.check()


# -- hooks ---------------------------------------------------------------------------------------


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def shifted(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 1,)


HOOKS: dict[str, Callable[[Side], list[Any]]] = {
    "forward": lambda s: [s.model[0].register_forward_hook(doubled)],
    "forward, of the whole": lambda s: [s.net.register_forward_hook(doubled)],
    "before forward": lambda s: [s.model[2].register_forward_pre_hook(shifted)],
    "several": lambda s: [
        s.model[0].register_forward_hook(doubled),
        s.model[0].register_forward_hook(lambda m, a, y: y + 1, prepend=True),
    ],
    "of a parameter": lambda s: [s.model[0].weight.register_hook(lambda g: g * 0.5)],
    "after accumulation": lambda s: [
        s.model[0].weight.register_post_accumulate_grad_hook(lambda p: s.log.append(p.grad.norm()))
    ],
    "around the step": lambda s: [
        s.optimizer.register_step_pre_hook(lambda *_: s.log.append("before")),
        s.optimizer.register_step_post_hook(lambda *_: s.log.append("after")),
    ],
}


@pytest.mark.parametrize("name", HOOKS)
@EVERY_WAY
def test_hooks_come_and_go(way: Way, name: str, tmp_path: Path) -> None:
    """Registered after a step, removed, and registered again."""
    # Of compile() it is the rule; of torch.compile a setting.
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        pair = pair_of(way, mlp, [(X,)], tmp_path, room=0.5)
        pair.train(1)
        for _ in range(2):
            handles = [HOOKS[name](side) for side in pair.sides]
            pair.train(2)
            for handle in (*handles[0], *handles[1]):
                handle.remove()
            pair.train(1)
            pair.check()


def test_the_backend_warns_of_hooks_that_it_does_not_see(tmp_path: Path) -> None:
    pair = pair_of(Way("backend", "spare"), mlp, [(X,)], tmp_path)
    pair.train(1)
    pair.ours.model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.warns(UserWarning, match="skip_nnmodule_hook_guards"):
        pair.ours.net(X)


@EVERY_WAY
def test_hooks_before_the_first_step(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, mlp, [(X,)], tmp_path, room=0.5)
    for side in pair.sides:
        for use in HOOKS.values():
            use(side)
    pair.train(3)
    pair.check()


@EVERY_WAY
def test_a_hook_on_what_is_not_in_the_loss(way: Way, tmp_path: Path) -> None:
    """It is not called."""
    pair = pair_of(way, BothWays, [(X,)], tmp_path)
    for side in pair.sides:
        log = side.log
        side.model.b.weight.register_hook(lambda g, log=log: log.append("b"))
        side.model.a.weight.register_hook(lambda g, log=log: log.append("a"))
    batches: list[Batch] = [(X,)]
    pair.do(lambda side: side.net(*batches[0])[0].square().mean().backward())
    pair.check()
    assert pair.ours.log == ["a"]


def test_thawing_is_refused(tmp_path: Path) -> None:
    """By the backend, where something is away: a layout cannot change in the middle of a step."""
    pair = pair_of(Way("backend", "tight"), mlp, [(X,)], tmp_path)
    first = pair.ours.model[0]
    first.requires_grad_(False)
    pair.ours.net(X).sum().backward()
    first.requires_grad_(True)
    with pytest.raises(PlanError, match=r"requires a gradient now and did not|are allowed"):
        pair.ours.net(X)
