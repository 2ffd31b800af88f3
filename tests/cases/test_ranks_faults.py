"""Ranks that take different paths, fail, end or were given something that cannot be."""

import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import exact
import pytest
import torch
import torch.distributed as dist
from graphs import seeded
from harness import adamw
from ranks import Outcome, run, start
from teams import APART, PLENTY, Odd, Tall, drift, gradients, hosts, our_twin, trained
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from elixir_fx import CaptureError, ElixirError, RankError

THREADS = 1
CLOSE = 1e-6
SOON_S = 60.0


# -- different paths -------------------------------------------------------------------------------


class Sight(nn.Module):
    """Text, and an image if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.last = nn.Linear(32, 32), nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, img: Tensor | None = None) -> Tensor:
        h = self.text(x)
        if img is not None:
            h = h + self.image(img)
        return self.last(h.tanh()).square().mean()


class Experts(nn.Module):
    """Tokens go to the expert that the caller names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](self.first(x).tanh()).square().mean()


class Rounds(nn.Module):
    """One head, as often as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, rounds: int) -> Tensor:
        h = self.first(x)
        for _ in range(rounds):
            h = self.head(h).tanh()
        return h.square().mean()


def inputs(kind: str, step: int, rank: int) -> tuple[Any, ...]:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    if kind == "image":
        return (x, x[:, :16]) if rank == 0 else (x,)
    return (x, rank) if kind == "expert" else (x, 1 + 2 * rank)


MODELS = {"image": Sight, "expert": Experts, "rounds": Rounds}


def paths(rank: int, kind: str, apart: bool) -> tuple[str, float]:
    """How far gradients and weights are from the mean over the ranks, each computed plainly."""
    size = dist.get_world_size()
    with hosts(apart):
        plain = seeded(0, MODELS[kind])
        optimizer = adamw(trained(plain))
        ours = our_twin(MODELS[kind], adamw)
        worst = 0.0
        try:
            for step in range(3):
                for other in range(size):
                    (plain(*inputs(kind, step, other)) / size).backward()
                ours.net(*inputs(kind, step, rank)).backward()
                wanted = {name: p.grad for name, p in plain.named_parameters()}
                worst = max(worst, drift(wanted, gradients(ours)))
                optimizer.step(), ours.optimizer.step()
                optimizer.zero_grad(), ours.optimizer.zero_grad()
        except RankError as error:
            return str(error), 0.0
        return "", max(worst, drift(dict(plain.state_dict()), dict(ours.net.state_dict())))


@APART
@pytest.mark.parametrize(
    ("kind", "count"), [("image", 2), ("expert", 2), ("expert", 4), ("rounds", 2)]
)
def test_different_paths(kind: str, count: int, apart: bool) -> None:
    found = run(count, paths, kind, apart, timeout_s=20)
    assert len({message for message, _ in found}) == 1  # the same for all, or none
    if not apart:
        assert found[0][0] == ""
    assert max(far for _, far in found) <= 1e-5


def left_over(rank: int, apart: bool) -> tuple[str, float]:
    """Rank 0 sees an image within no_sync(), and nobody does in the backward that sums."""
    with hosts(apart):
        ours, plain = our_twin(Sight, adamw), seeded(0, Sight)
        for number, alone in enumerate([True, False]):
            for other in range(2):
                given = inputs("image", number, other)[: 2 if alone else 1]
                (plain(*given) / 2).backward()
            given = inputs("image", number, rank)[: 2 if alone else 1]
            try:
                with ours.net.no_sync() if alone else nullcontext():
                    ours.net(*given).backward()
            except RankError as error:
                return str(error), 0.0
        return "", drift({name: p.grad for name, p in plain.named_parameters()}, gradients(ours))


def test_what_one_rank_alone_has_under_no_sync() -> None:
    found = run(2, left_over, False, timeout_s=10)
    assert [message for message, _ in found] == ["", ""]
    assert max(far for _, far in found) <= CLOSE


def evaluations(rank: int, joint: bool) -> float:
    ours, plain = our_twin(Odd, adamw), seeded(0, Odd)
    if joint:
        ours.step((Odd.batch(8, rank),))
    with torch.no_grad():
        for step in range(3 + rank):
            ours.net(Odd.batch(step, rank))
    ours.net(Odd.batch(0, rank)).backward()
    for other in range(2):
        (plain(Odd.batch(0, other)) / 2).backward()
    return (
        0.0 if joint else drift({n: p.grad for n, p in plain.named_parameters()}, gradients(ours))
    )


@pytest.mark.parametrize("joint", [False, True])
def test_one_rank_evaluates_more(joint: bool) -> None:
    """Where ranks share memory a forward alone needs no other rank."""
    assert max(run(2, evaluations, joint, timeout_s=20)) <= CLOSE


# -- faults ----------------------------------------------------------------------------------------


def told(outcomes: Sequence[Outcome], rank: int) -> str:
    """The message of a rank that ended with a RankError in time."""
    one = outcomes[rank]
    assert (one.kind, one.error) == ("error", "RankError"), f"{one}\n{one.stacks}{one.traceback}"
    assert one.seconds < SOON_S
    return one.message


class Trap(torch.autograd.Function):
    """Does what it is told in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Any) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return gradient, None


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise ValueError("no gradient today")


def fault(rank: int, where: str, apart: bool) -> None:
    """Rank 1 fails in its third step."""
    act = refuse if where.startswith("raise") else die
    with hosts(apart):
        ours = our_twin(Tall, adamw)
        weight = ours.model.layers[4].weight
        armed = [False]
        if where == "hook" or where == "raise in a hook":
            weight.register_hook(lambda g: act() if armed[0] else None)
        if where == "update":
            ours.optimizer.register_step_pre_hook(lambda *_: act() if armed[0] else None)
        for step in range(6):
            armed[0] = rank == 1 and step == 2
            batch = Tall.batch(step, rank)
            if armed[0] and where == "forward":
                act()
            loss = ours.net(batch)
            if armed[0] and where in ("backward", "raise in a backward"):
                loss = Trap.apply(loss, act)
            loss.backward()
            ours.optimizer.step()
            ours.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("where", "apart"),
    [("forward", True), ("backward", False), ("hook", True), ("hook", False), ("update", True)],
)
def test_a_killed_rank(where: str, apart: bool) -> None:
    outcomes = start(2, fault, where, apart).wait(SOON_S)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert "connection" in told(outcomes, 0)


@pytest.mark.parametrize(
    ("where", "apart"), [("raise in a backward", True), ("raise in a hook", False)]
)
def test_a_rank_that_raises_in_its_backward(where: str, apart: bool) -> None:
    outcomes = start(2, fault, where, apart).wait(SOON_S)
    assert outcomes[1].error == "ValueError"
    message = told(outcomes, 0)
    if not apart:  # else no way leads to the others once rank 1 has gone
        assert "rank 1" in message and "no gradient today" in message


def other_model(rank: int, what: str, apart: bool) -> tuple[str, float]:
    """What this rank's first call raises, and after how long."""
    width = 48 if what == "width" and rank == 1 else 32
    layers = [nn.Linear(32, width), nn.Tanh(), nn.Linear(width, 8)]
    if what == "layer" and rank == 1:
        layers.append(nn.Linear(8, 8))
    if what == "frozen" and rank == 1:
        layers[0].requires_grad_(False)
    model = nn.Sequential(*layers)
    with hosts(apart):
        net = exact.compile(model, optimizer=adamw(trained(model)), memory=PLENTY)
        began = time.monotonic()
        try:
            net(torch.ones(2, 32)).sum().backward()
        except RankError as error:
            return str(error), time.monotonic() - began
    return "", 0.0


@APART
@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("width", r"0\.bias float32\[32\] on rank 0, 0\.bias float32\[48\] on rank 1"),
        ("layer", r"nothing on rank 0, 3\.bias float32\[8\] on rank 1"),
        ("frozen", r"0\.bias float32\[32\] on rank 0, 0\.bias float32\[32\], frozen on rank 1"),
    ],
    ids=["width", "layer", "frozen"],
)
def test_ranks_with_different_models(what: str, difference: str, apart: bool) -> None:
    (zero, zero_s), (one, one_s) = run(2, other_model, what, apart, timeout_s=20)
    assert re.search(difference, zero), zero
    assert zero == one
    assert max(zero_s, one_s) < SOON_S


def fewer_batches(rank: int, apart: bool) -> str:
    with hosts(apart):
        ours = our_twin(Tall, adamw)
        for step in range(3 - rank):
            ours.step((Tall.batch(step, rank),))
    return "done"


@APART
def test_data_that_runs_out_on_one_rank(apart: bool) -> None:
    outcomes = start(2, fewer_batches, apart).wait(SOON_S)
    assert outcomes[1].result == "done"
    assert "equally many batches" in told(outcomes, 0)


class Refusing(nn.Module):
    """Cannot be captured on rank 1: a graph that breaks."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.fc(h).square().mean()


def no_capture(rank: int, apart: bool) -> None:
    model = seeded(0, lambda: Refusing(rank == 1))
    with hosts(apart):
        net = exact.compile(model, optimizer=adamw(trained(model)), memory=PLENTY)
        try:
            net(torch.ones(2, 32)).backward()
        except CaptureError:
            time.sleep(3)  # its process lives on: the others must be told
            raise


@APART
def test_a_rank_that_cannot_capture(apart: bool) -> None:
    outcomes = start(2, no_capture, apart).wait(SOON_S)
    message = told(outcomes, 0)
    assert outcomes[1].error == "CaptureError"
    assert outcomes[0].seconds < outcomes[1].seconds  # before that process ended
    if not apart:
        assert "rank 1" in message and "CaptureError" in message


class Slow(nn.Module):
    """Takes its time while it is captured."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        pause(self.seconds)
        return self.fc(x).square().mean()


@torch._dynamo.assume_constant_result
def pause(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def slow_capture(rank: int) -> float:
    group = dist.new_group(timeout=timedelta(seconds=1))
    model = seeded(0, lambda: Slow(2.0 * rank))
    net = exact.compile(model, optimizer=adamw(trained(model)), memory=PLENTY, process_group=group)
    began = time.monotonic()
    net(torch.ones(2, 32)).backward()
    return time.monotonic() - began


def test_a_rank_that_captures_for_longer_than_the_groups_timeout() -> None:
    assert all(seconds >= 2.0 for seconds in run(2, slow_capture))


def saved_by_one(rank: int, apart: bool) -> str:
    with hosts(apart):
        ours = our_twin(Tall, adamw)
        ours.step((Tall.batch(0, rank),))
        ours.optimizer.zero_grad()
        try:
            if rank == 0:
                Tall().load_state_dict(ours.net.state_dict(), strict=True)
            ours.step((Tall.batch(1, rank),))
        except RankError as error:
            return str(error)
        return ""


@APART
def test_a_state_dict_of_one_rank(apart: bool) -> None:
    found = run(2, saved_by_one, apart, timeout_s=20)
    if not apart:
        assert found == ["", ""]
        return
    assert found[0] == found[1]
    assert "rank 0" in found[0] and "no longer in step" in found[0]


# -- refused ---------------------------------------------------------------------------------------


def refused(rank: int) -> dict[str, tuple[str, str]]:
    """What each asked for raises."""

    def compiled(make_optimizer: Any, **options: Any) -> Any:
        return our_twin(Tall, make_optimizer, **options)

    def late() -> None:
        ours = compiled(adamw)
        ours.step((Tall.batch(0, rank),))
        ours.net.bind(torch.optim.Adafactor(ours.model.parameters()))

    asked = {
        "max": lambda: compiled(adamw, reduction="max"),
        "mesh": lambda: compiled(adamw, process_group=init_device_mesh("cpu", (1, 2, 1))),
        "name": lambda: compiled(adamw, process_group="all"),
        "late": late,
    }
    return {name: raised(ask) for name, ask in asked.items()}


def refused_lbfgs(rank: int) -> tuple[str, str]:
    return raised(lambda: our_twin(Tall, torch.optim.LBFGS).net(Tall.batch(0, rank)))


def raised(ask: Any) -> tuple[str, str]:
    try:
        ask()
    except ElixirError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_what_is_refused() -> None:
    zero, one = run(2, refused, timeout_s=30)
    assert zero == one
    assert zero["max"][1].startswith("reduction='max'") and "'sum'" in zero["max"][1]
    assert "3 dimensions" in zero["mesh"][1]
    assert "process_group is a str" in zero["name"][1]
    assert zero["late"][0] == "PlanError" and "Adafactor" in zero["late"][1]


def test_an_optimizer_that_needs_all_at_once_is_named() -> None:
    for kind, message in run(2, refused_lbfgs):
        assert kind == "PlanError" and "LBFGS" in message
