"""A call too large for the layout in force: the training state moves to another, between steps."""

import errno
import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from case_models import randn
from harness import adamw, difference, sgd_momentum
from made_plans import everything_away, facts_of
from pairs import MACHINE, Pair, Side, is_away, memory_needed, tight
from torch import Tensor, nn

import elixir_fx
from elixir_fx import PlanError, TierError
from elixir_fx.errors import LayoutError
from elixir_fx.machine import Tier
from elixir_fx.plan import Limits, Plan
from elixir_fx.planner import search
from elixir_fx.runtime.migrate import Migration
from elixir_fx.runtime.parameters import AwayTensor, ChunkGradient
from elixir_fx.testing import FaultyFiles, emulated
from elixir_fx.units import GIB

THREADS = 1
SMALL, LARGE = (randn(2, 32),), (randn(16, 32, seed=1),)
HUGE = (randn(4096, 32),)
pairs = partial(zip, strict=True)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers)


@cache
def needed(build: Callable[[], nn.Module], optimizer: Any) -> int:
    return memory_needed(build(), LARGE, optimizer)


def roomy(folder: Path, optimizer: Any = "adamw", build: Callable[[], nn.Module] = net) -> dict:
    """Enough for the large batch under a layout of its own, not under the small one's."""
    memory = needed(build, optimizer)
    return {"memory": memory + memory // 32, "disk": str(folder), "machine": MACHINE}


def learn(batch: Any, zero: bool = True) -> Callable[[Side], Tensor]:
    def step(side: Side) -> Tensor:
        loss = side.net(*batch).square().mean()
        loss.backward()
        side.optimizer.step()
        if zero:
            side.optimizer.zero_grad()
        return loss.detach()

    return step


def accumulate(batch: Any) -> Callable[[Side], Tensor]:
    def back(side: Side) -> Tensor:
        loss = side.net(*batch).square().mean()
        loss.backward()
        return loss.detach()

    return back


def engine_of(pair: Pair) -> Any:
    return pair.ours.net._session.engine


def grown(pair: Pair, use: Callable[[Side], Any]) -> None:
    """`use` on both sides; ours has another engine afterwards."""
    before = engine_of(pair)
    pair.do(use)
    assert engine_of(pair) is not before, "the call fitted the layout in force"


# -- larger batches --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [adamw, sgd_momentum])
def test_a_larger_batch(make: Any, tmp_path: Path) -> None:
    """Weights, states and losses are those of plain PyTorch, before and after."""
    name = "adamw" if make is adamw else make([nn.Parameter(torch.zeros(2))])
    pair = Pair(net, [SMALL], roomy(tmp_path, name), make)
    pair.do(learn(SMALL))
    pair.do(learn(SMALL))
    grown(pair, learn(LARGE))
    pair.check()
    for batch in (SMALL, LARGE, SMALL):
        pair.do(learn(batch))
    pair.check()
    assert pair.ours.net.stats()["peak_device_bytes"] <= pair.ours.net.plan.limits.device


def test_growing_step_by_step(tmp_path: Path) -> None:
    """Twice and more, and no thread, file or mapping of an old layout stays."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    before = _held(tmp_path)
    engines = {id(engine_of(pair))}
    for rows in (4, 8, 12, 16):
        pair.do(learn((randn(rows, 32),)))
        engines.add(id(engine_of(pair)))
        pair.check()
    assert len(engines) > 1
    after = _held(tmp_path)
    assert after[0] <= before[0] and after[1] <= before[1]


def _held(folder: Path) -> tuple[int, int]:
    gc.collect()
    threads = [t for t in threading.enumerate() if "elixir" in t.name]
    return len(threads), len(os.listdir("/proc/self/fd"))


def test_an_optimizer_that_nobody_bound(tmp_path: Path) -> None:
    """Its states stay ordinary tensors."""
    pair = Pair(net, [SMALL], roomy(tmp_path), bind=False)
    with pytest.warns(UserWarning, match="bind"):
        pair.do(learn(SMALL))
    grown(pair, learn(LARGE))
    pair.do(learn(SMALL))
    pair.check()


def test_bound_after(tmp_path: Path) -> None:
    """Another optimizer, bound before and after the move."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    for batch in (LARGE, SMALL):
        for side in pair.sides:
            side.optimizer = adamw(list(side.model.parameters()))
        pair.ours.net.bind(pair.ours.optimizer)
        pair.do(learn(batch))
        pair.check()


def test_checkpoints_cross_a_move(tmp_path: Path) -> None:
    """What was saved under one layout loads under the next."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    elixir_fx.save(tmp_path / "saved", pair.ours.net, pair.ours.optimizer)
    weights = {name: p.detach().clone() for name, p in pair.plain.model.named_parameters()}
    grown(pair, learn(LARGE))
    elixir_fx.load(tmp_path / "saved", pair.ours.net, pair.ours.optimizer)
    for name, parameter in pair.ours.model.named_parameters():
        assert difference(weights[name], parameter.detach().clone()) is None


def test_emulated_accelerator(tmp_path: Path) -> None:
    """Host memory in the place of a disk."""
    memory = exact.smallest_memory(net(), LARGE, machine=emulated())
    pair = Pair(net, [SMALL], {"memory": memory + memory // 16, "machine": emulated()})
    pair.do(learn(SMALL))
    grown(pair, learn(LARGE))
    pair.do(learn(SMALL))
    pair.check()


# -- what people hold ------------------------------------------------------------------------


def test_gradients_while_accumulating(tmp_path: Path) -> None:
    """A large micro-batch after a small one: gradients that are away go along."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    pair.do(accumulate(SMALL))
    assert any(isinstance(p.grad, ChunkGradient) for p in pair.ours.model.parameters())
    grown(pair, accumulate(LARGE))
    pair.check()
    pair.do(accumulate(SMALL))
    pair.check()
    pair.do(lambda side: side.optimizer.step())
    pair.check()


def test_held_gradients_are_live(tmp_path: Path) -> None:
    """A p.grad that is away is still p.grad after the move, and after the next pass, for somebody
    who holds it. One that was an ordinary tensor does not follow when it leaves."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    pair.do(accumulate(SMALL))
    ours = [isinstance(p.grad, ChunkGradient) for p in _of(pair.ours)]
    chosen = [i for i, flag in enumerate(ours) if flag]
    assert chosen
    held = {side: [_of(side)[i].grad for i in chosen] for side in pair.sides}
    grown(pair, accumulate(LARGE))
    for later in (None, accumulate(SMALL)):
        if later is not None:
            pair.do(later)
        pair.do(lambda side: [g.clone() for g in held[side]])
        pair.do(
            lambda side: [_of(side)[i].grad is g for i, g in zip(chosen, held[side], strict=True)]
        )
    pair.do(lambda side: [g.mul_(2).sum() for g in held[side]])
    pair.check()


def _of(side: Side) -> list[nn.Parameter]:
    return list(side.model.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_an_earlier_step(set_to_none: bool, tmp_path: Path) -> None:
    """Gradients that were taken off p.grad keep their values when the layout goes."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    pair.do(accumulate(SMALL))
    away = [i for i, p in enumerate(_of(pair.ours)) if isinstance(p.grad, ChunkGradient)]
    assert away
    held = {side: [_of(side)[i].grad for i in away] for side in pair.sides}
    pair.do(lambda side: side.optimizer.zero_grad(set_to_none=set_to_none))
    grown(pair, learn(LARGE, zero=False))
    pair.do(lambda side: [g.clone() for g in held[side]])
    pair.check()


def test_views_of_parameters(tmp_path: Path) -> None:
    """p.data, detached rows and transposed views read and write the parameter after the move."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    held = {
        side: [
            view
            for p in side.model.parameters()
            if p.dim() == 2
            for view in (p.data, p.detach()[1], p.detach().t()[:, 2:5])
        ]
        for side in pair.sides
    }
    away = pair.away()
    grown(pair, learn(LARGE))
    assert set(away) & set(pair.away())
    pair.do(lambda side: [view.clone() for view in held[side]])
    pair.do(lambda side: [view.mul_(0.5).sum() for view in held[side]])
    pair.check()
    pair.do(learn(SMALL))
    pair.do(lambda side: [view.clone() for view in held[side]])
    pair.check()


NAMES = ("exp_avg", "exp_avg_sq", "step")


def is_away_state(side: Side, parameter: nn.Parameter) -> bool:
    return isinstance(side.optimizer.state[parameter]["exp_avg"], AwayTensor)


def test_objects_stay(tmp_path: Path) -> None:
    """Parameters and optimizer states are the same objects; held states stay live."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    parameters = _of(pair.ours)
    away = [i for i, p in enumerate(parameters) if is_away_state(pair.ours, p)]
    assert away
    held = {
        side: [side.optimizer.state[_of(side)[i]][name] for i in away for name in NAMES]
        for side in pair.sides
    }
    grown(pair, learn(LARGE))
    pair.do(learn(SMALL))
    assert all(a is b for a, b in zip(parameters, _of(pair.ours), strict=True))
    pair.do(lambda side: [value.clone() for value in held[side]])
    pair.check()


def test_states_that_were_replaced(tmp_path: Path) -> None:
    """States that a loaded state dict replaced can be read after the move."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    held = {side: [side.optimizer.state[p]["exp_avg"] for p in _of(side)] for side in pair.sides}
    expected = [value.clone() for value in held[pair.plain]]
    pair.do(lambda side: side.optimizer.load_state_dict(side.optimizer.state_dict()))
    grown(pair, learn(LARGE))
    pair.check()
    for value, ours in zip(expected, held[pair.ours], strict=True):
        assert difference(value, ours.clone()) is None


def test_hooks_stay(tmp_path: Path) -> None:
    pair = Pair(net, [SMALL], roomy(tmp_path))
    for side in pair.sides:
        for name, p in side.model.named_parameters():
            p.register_hook(lambda g, s=side, n=name: s.log.append((n, g.sum().item())))
    pair.do(learn(SMALL))
    grown(pair, learn(LARGE))
    for side in pair.sides:
        side.log.sort()
    pair.check()


# -- directly: any layout to any other -------------------------------------------------------


@cache
def plans_of_one_model() -> tuple[Plan, ...]:
    """All away, some away, nothing away."""
    facts = facts_of(net(), SMALL)
    tiers = Limits(device=GIB, disk=GIB)
    away = everything_away(facts, MACHINE, tiers)
    total = sum(4 * p.nbytes for p in net().parameters())
    some = replace(tiers, device=away.limits.device + total // 3)
    return away, search(facts, MACHINE, some), search(facts, MACHINE, tiers)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)])
def test_from_any_layout_to_any(source: int, target: int, tmp_path: Path) -> None:
    """`Migration` alone: values, gradients and states, and every object that looked at them."""
    plans = plans_of_one_model()
    pair = Pair(net, [SMALL], {"plan": plans[source], "disk": str(tmp_path), "machine": MACHINE})
    pair.do(learn(SMALL))
    pair.do(accumulate(SMALL))
    # What is an ordinary tensor and leaves does not follow: only what is away is looked at.
    away = [isinstance(p.grad, ChunkGradient) for p in _of(pair.ours)]
    held = {
        side: [p.grad for p, flag in zip(_of(side), away, strict=True) if flag]
        for side in pair.sides
    }
    states = {
        side: [
            side.optimizer.state[p][name]
            for p, ours in zip(_of(side), _of(pair.ours), strict=True)
            for name in NAMES
            if isinstance(pair.ours.optimizer.state[ours][name], AwayTensor)
        ]
        for side in pair.sides
    }
    moved = [is_away(p) for p in _of(pair.ours)]
    views = {
        side: [p.data for p, flag in zip(_of(side), moved, strict=True) if flag]
        for side in pair.sides
    }
    session = pair.ours.net._session
    old = session.engine
    session.lowering.plan = plans[target]
    old.lend_arena()
    new = session.make_engine()
    migration = Migration(old, new, pair.ours.optimizer)
    migration.run()
    migration.commit()
    old.close()
    session.binding.engine = new
    session.start(new)
    pair.do(lambda side: [p.detach().clone() for p in _of(side)])
    pair.do(lambda side: [p.grad.clone() for p in _of(side)])
    pair.do(lambda side: [g.clone() for g in held[side]])
    pair.do(lambda side: [s.clone() for s in states[side]])
    pair.do(lambda side: [v.clone() for v in views[side]])
    homes = {p: e.chunk.homes for p, e in new.entries.items()}
    for p in _of(pair.ours):
        assert is_away(p) is (p in homes and homes[p].parameters is not Tier.DEVICE)
        leaves = p in homes and homes[p].states is not Tier.DEVICE
        assert isinstance(pair.ours.optimizer.state[p]["exp_avg"], AwayTensor) is leaves
    pair.do(lambda side: [p.grad.mul_(2).sum() for p in _of(side)])
    pair.do(lambda side: [g.clone() for g in held[side]])
    pair.do(lambda side: side.optimizer.step())
    pair.do(lambda side: [p.detach().clone() for p in _of(side)])
    pair.do(lambda side: [s.clone() for p in _of(side) for s in side.optimizer.state[p].values()])
    new.close()


# -- refusals --------------------------------------------------------------------------------


def test_too_large_for_any_layout(tmp_path: Path) -> None:
    """PlanError, and training goes on under the layout that was in force."""
    pair = Pair(net, [SMALL], tight(net, SMALL, tmp_path))
    pair.do(learn(SMALL))
    engine, plan = engine_of(pair), pair.ours.net.plan
    for _ in range(2):
        with pytest.raises(PlanError, match="allowed"):
            pair.ours.net(*HUGE)
        assert engine_of(pair) is engine
        assert pair.ours.net.plan.layout is plan.layout
        pair.do(learn(SMALL))
    pair.check()


def test_not_while_a_forward_waits(tmp_path: Path) -> None:
    """Its backward reads the layout in force; after it the same call works."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    waiting = {side: side.net(*SMALL).square().mean() for side in pair.sides}
    with pytest.raises(LayoutError):
        pair.ours.net(*LARGE)
    pair.do(lambda side: waiting[side].backward())
    pair.do(lambda side: [p.grad.clone() for p in _of(side)])
    waiting.clear()
    pair.do(lambda side: side.optimizer.zero_grad())
    grown(pair, learn(LARGE))
    pair.check()


def test_not_without_gradients(tmp_path: Path) -> None:
    """A larger evaluation does not move the training state about."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    engine = engine_of(pair)
    with torch.no_grad():
        try:
            ours = pair.ours.net(*LARGE)
        except PlanError:
            ours = None
        if ours is not None:
            assert difference(pair.plain.net(*LARGE), ours) is None
    assert engine_of(pair) is engine
    pair.do(learn(SMALL))
    pair.check()


def test_not_with_a_plan_of_the_users(tmp_path: Path) -> None:
    options = roomy(tmp_path)
    plan = exact.plan(net(), SMALL, **options)
    pair = Pair(net, [SMALL], {**options, "plan": plan})
    pair.do(learn(SMALL))
    with pytest.raises(LayoutError):
        pair.ours.net(*LARGE)
    pair.do(learn(SMALL))
    pair.check()
    assert pair.ours.net.plan.layout == plan.layout


# -- thawed parameters -----------------------------------------------------------------------


def test_thawed(tmp_path: Path) -> None:
    """A frozen layer that learns from the third step on: another layout, the same numbers."""

    def frozen() -> nn.Module:
        model = net()
        model[0].requires_grad_(False)
        model[4].requires_grad_(False)
        return model

    memory = memory_needed(net(), SMALL)
    options = {"memory": memory + memory // 8, "disk": str(tmp_path)}
    pair = Pair(frozen, [SMALL], options)
    for side in pair.sides:
        side.optimizer = adamw(_of(side))
    pair.ours.net.bind(pair.ours.optimizer)
    pair.do(learn(SMALL))
    pair.do(learn(SMALL))
    for layer in (0, 4):
        for side in pair.sides:
            side.model[layer].requires_grad_(True)
        pair.do(learn(SMALL))
        pair.do(learn(SMALL))
        pair.check()


# -- faults ----------------------------------------------------------------------------------


class Breaking(FaultyFiles):
    """Writes fail while `writes_left` is used up; None is a healthy disk. `room` bytes in all."""

    def __init__(self) -> None:
        super().__init__()
        self.writes_left: int | None = None
        self.reads_left: int | None = None
        self.full = False
        self.failed = 0

    def allocate(self, fd: int, nbytes: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, nbytes)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        if self.writes_left is not None:
            if self.writes_left <= 0:
                self.failed += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.writes_left -= 1
        return super().pwrite(fd, buffer, offset)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        if self.reads_left is not None:
            if self.reads_left <= 0:
                self.failed += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.reads_left -= 1
        return super().pread(fd, buffer, offset)


def faulty_pair(files: Breaking, folder: Path) -> Pair:
    pair = Pair(net, [SMALL], {"memory": "1GiB"})
    model = net()
    optimizer = adamw(list(model.parameters()))
    compiled = exact.compile_over(files, model, optimizer, None, **roomy(folder))
    pair.sides[1] = Side(model, compiled, optimizer, [])
    pair.plain, pair.ours = pair.sides
    return pair


def test_a_full_disk(tmp_path: Path) -> None:
    """No room for a second file: the call is refused, and nothing has changed."""
    files = Breaking()
    pair = faulty_pair(files, tmp_path)
    pair.do(learn(SMALL))
    files.full = True
    with pytest.raises((PlanError, TierError)):
        pair.ours.net(*LARGE)
    pair.do(learn(SMALL))
    pair.check()
    files.full = False
    grown(pair, learn(LARGE))
    pair.check()


@pytest.mark.parametrize(
    ("kind", "count", "when"),
    [
        ("writes_left", 0, "window"),
        ("writes_left", 5, "window"),
        ("writes_left", 20, "window"),
        ("reads_left", 5, "window"),
        ("writes_left", 5, "once"),
        ("reads_left", 5, "once"),
    ],
)
def test_a_disk_that_fails_in_the_middle(kind: str, count: int, when: str, tmp_path: Path) -> None:
    """The call is refused; once the disk works again every value, view and state is right."""
    files = Breaking()
    pair = faulty_pair(files, tmp_path)
    pair.do(learn(SMALL))
    pair.do(accumulate(SMALL))
    held = {side: [p.grad for p in _of(side)] for side in pair.sides}
    views = {side: [p.data for p in _of(side)] for side in pair.sides}
    setattr(files, kind, count)
    if when == "once":
        _heal_after_one(files, kind)
    try:
        pair.ours.net(*LARGE)
        failed = False
    except (PlanError, TierError):
        failed = True
    assert failed is bool(files.failed)
    setattr(files, kind, None)
    if not failed:
        return
    pair.do(lambda side: [p.detach().clone() for p in _of(side)])
    pair.do(lambda side: [g.clone() for g in held[side]])
    pair.do(lambda side: [v.clone() for v in views[side]])
    with suppress(TierError):  # of a transfer that had begun while the disk failed
        pair.ours.net(*SMALL)
    pair.do(accumulate(SMALL))
    pair.do(lambda side: side.optimizer.step())
    pair.check()
    pair.do(lambda side: [v.clone() for v in views[side]])
    pair.do(lambda side: side.optimizer.zero_grad())
    pair.do(learn(SMALL))
    pair.check()
    grown(pair, learn(LARGE))
    pair.do(learn(SMALL))
    pair.check()


def _heal_after_one(files: Breaking, kind: str) -> None:
    """The disk works again after its first error."""
    name = "pwrite" if kind == "writes_left" else "pread"
    real = getattr(files, name)

    def call(*args: Any) -> int:
        if files.failed:
            setattr(files, kind, None)
        count: int = real(*args)
        return count

    setattr(files, name, call)


def test_an_interrupted_move(tmp_path: Path) -> None:
    """Control-C while the layout is made: training goes on under the one in force."""
    pair = Pair(net, [SMALL], roomy(tmp_path))
    pair.do(learn(SMALL))
    session = pair.ours.net._session
    real = session.make_engine

    def interrupted() -> Any:
        raise KeyboardInterrupt

    session.make_engine = interrupted
    with pytest.raises(KeyboardInterrupt):
        pair.ours.net(*LARGE)
    session.make_engine = real
    assert session.plan.layout is session.engine.layout
    pair.do(learn(SMALL))
    pair.check()
    grown(pair, learn(LARGE))
    pair.check()


WRITES_OF_WEIGHTS = 3


def test_a_disk_that_fails_for_the_states(tmp_path: Path) -> None:
    """From everything in memory: weights have moved when an optimizer state cannot."""

    def four() -> nn.Module:
        return net()[:8]

    small, large = (randn(8, 32),), (randn(96, 32),)
    files = Breaking()
    pair = Pair(four, [small], {"memory": "1GiB"})
    model = four()
    optimizer = adamw(list(model.parameters()))
    least = memory_needed(four(), large)
    options = {"memory": least + least // 16, "disk": str(tmp_path)}
    pair.sides[1] = Side(
        model, exact.compile_over(files, model, optimizer, None, **options), optimizer, []
    )
    pair.plain, pair.ours = pair.sides
    pair.do(learn(small))
    files.writes_left = WRITES_OF_WEIGHTS
    with pytest.raises(TierError):
        pair.ours.net(*large)
    files.writes_left = None
    pair.do(lambda side: [p.detach().clone() for p in _of(side)])
    pair.do(learn(small))
    pair.check()
    pair.do(learn(large))
    pair.check()
