"""Two, three and four ranks train one model: they do what plain PyTorch does on the same ranks."""

import copy
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
import torch.distributed as dist
from graphs import seeded
from harness import adamw, sgd_momentum
from pairs import Side
from ranks import run
from teams import (
    APART,
    PLENTY,
    Odd,
    Tall,
    Twice,
    drift,
    gradients,
    hosts,
    our_twin,
    plain_twin,
    tight,
    trained,
    training_state,
    twins,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_fx
from elixir_fx import AwayParameter

THREADS = 1
STEPS = 8
# (apart, short of memory): each of the two with each of the two, or in half of the ways
EVERY = pytest.mark.parametrize(
    ("apart", "short"),
    [(False, False), (False, True), (True, False), (True, True)],
    ids=["shared-plenty", "shared-tight", "apart-plenty", "apart-tight"],
)
MIXED = pytest.mark.parametrize(
    ("apart", "short"), [(False, True), (True, False)], ids=["shared-tight", "apart-plenty"]
)
CROSSED = pytest.mark.parametrize(
    ("apart", "short"), [(False, False), (True, True)], ids=["shared-plenty", "apart-tight"]
)
CLOSE = 1e-6
F32, BF16 = torch.float32, torch.bfloat16


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-1)


# -- training ------------------------------------------------------------------------------------


def train(
    rank: int,
    build: Any,
    make_optimizer: Any,
    dtype: torch.dtype,
    apart: bool,
    memory: str | int,
    folder: Path,
) -> tuple[float, float, int]:
    """How far losses and the final state are from DDP's, and how many chunks are away."""
    with hosts(apart):
        plain, ours = twins(build, make_optimizer, dtype, memory=memory, disk=folder)
        losses = 0.0
        for step in range(STEPS):
            batch = build.batch(step, rank)
            if batch.is_floating_point():
                batch = batch.to(dtype)
            losses = max(losses, drift(plain.step((batch,)), ours.step((batch,))))
        chunks = ours.net.plan.layout.chunks
        assert {chunk.shards for chunk in chunks} <= {1, dist.get_world_size()}
        away = [chunk for chunk in chunks if not chunk.homes.on_device]
        return losses, drift(training_state(plain), training_state(ours)), len(away)


TWO = [
    pytest.param(Odd, adamw, F32, False, id="shared"),
    pytest.param(Odd, adamw, F32, True, id="apart"),
    pytest.param(Odd, sgd_momentum, F32, True, id="momentum-apart"),
    pytest.param(Odd, adamw, BF16, True, id="bf16-apart"),
    pytest.param(Tall, adamw, BF16, False, id="bf16-shared"),
]


@pytest.mark.parametrize("short", [False, True], ids=["plenty", "tight"])
@pytest.mark.parametrize(("build", "make_optimizer", "dtype", "apart"), TWO)
def test_two_ranks_have_the_bits_of_ddp(
    build: Any, make_optimizer: Any, dtype: torch.dtype, apart: bool, short: bool, tmp_path: Path
) -> None:
    memory = tight(build, 2, dtype) if short else PLENTY
    found = run(2, train, build, make_optimizer, dtype, apart, memory, tmp_path)
    assert [(losses, state) for losses, state, _ in found] == [(0.0, 0.0)] * 2
    assert all((away > 0) == short for _, _, away in found)


def check_close(count: int, apart: bool, short: bool, folder: Path) -> None:
    memory = tight(Odd, count) if short else PLENTY
    for losses, state, away in run(count, train, Odd, adamw, F32, apart, memory, folder):
        assert losses <= CLOSE and state <= CLOSE
        assert (away > 0) == short


@CROSSED
def test_three_ranks_are_close_to_ddp(apart: bool, short: bool, tmp_path: Path) -> None:
    check_close(3, apart, short, tmp_path)


@MIXED
def test_four_ranks_are_close_to_ddp(apart: bool, short: bool, tmp_path: Path) -> None:
    check_close(4, apart, short, tmp_path)


@APART
def test_an_optimizer_that_needs_parameters_whole(apart: bool, tmp_path: Path) -> None:
    found = run(2, train, Odd, adafactor, F32, apart, PLENTY, tmp_path)
    assert [(losses, state) for losses, state, _ in found] == [(0.0, 0.0)] * 2


def budgets(rank: int, count: int, apart: bool, memory: int, folder: Path) -> bool:
    """Whether a tight budget changes a bit."""
    with hosts(apart):
        sides = [our_twin(Tall, adamw), our_twin(Tall, adamw, memory=memory, disk=folder)]
        for step in range(5):
            for side in sides:
                side.step((Tall.batch(step, rank),))
        assert any(not c.homes.on_device for c in sides[1].net.plan.layout.chunks)
        return drift(*map(training_state, sides)) == 0.0


@APART
def test_a_tight_budget_changes_no_bit(apart: bool, tmp_path: Path) -> None:
    assert run(3, budgets, 3, apart, tight(Tall, 3), tmp_path) == [True] * 3


def stored(rank: int, apart: bool) -> tuple[int, int, int]:
    """Bytes of this rank's shares, of all that there is, and of the largest chunk."""
    with hosts(apart):
        ours = our_twin(Tall, adamw)
        ours.step((Tall.batch(0, rank),))
        engine = ours.net._session.engine
        assert engine.constant_bytes() >= engine.shards.resident_bytes
        whole = 4 * sum(p.numel() * p.itemsize for p in ours.model.parameters())
        largest = max(chunk.nbytes for chunk in ours.net.plan.layout.chunks)
        return engine.shards.resident_bytes, whole, largest


@pytest.mark.parametrize(("count", "apart"), [(2, False), (3, True)])
def test_a_rank_stores_its_share(count: int, apart: bool) -> None:
    for mine, whole, chunk in run(count, stored, apart):
        assert whole / count <= mine + chunk
        assert mine <= 1.02 * whole / count + chunk


# -- several replicas, a part of the ranks ---------------------------------------------------------


def hybrid(rank: int, apart: bool) -> tuple[float, float]:
    with hosts(apart):
        mesh = init_device_mesh("cpu", (2, 2))
        plain, ours = twins(Odd, adamw, process_group=mesh)
        losses = 0.0
        for step in range(5):
            losses = max(losses, drift(*both(plain, ours, Odd.batch(step, rank))))
        assert ours.net.plan.layout.group.ranks == 2
        return losses, drift(training_state(plain), training_state(ours))


def both(plain: Side, ours: Side, batch: Tensor) -> tuple[Tensor, Tensor]:
    return plain.step((batch,)), ours.step((batch,))


@APART
def test_replicas_of_shards(apart: bool) -> None:
    for losses, state in run(4, hybrid, apart):
        assert losses <= CLOSE and state <= CLOSE


def in_pairs(rank: int) -> tuple[float, int]:
    """Ranks 0 and 2 train one model, 1 and 3 another."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pairs[rank % 2]
    plain = plain_twin(Odd, adamw, F32, process_group=mine)
    ours = our_twin(Odd, adamw, process_group=mine)
    for step in range(3):
        both(plain, ours, Odd.batch(step, rank))
    return drift(training_state(plain), training_state(ours)), ours.net.plan.layout.group.ranks


def test_a_part_of_the_ranks() -> None:
    assert run(4, in_pairs) == [(0.0, 2)] * 4


# -- gradients that add up -------------------------------------------------------------------------

# Each backward of a step: whether gradients are summed over the ranks at once, "zero" for
# zero_grad(); rank 1 leaves out what is marked with "-".
SEQUENCES = {
    "all": ["sync", "sync", "sync"],
    "last": ["alone", "alone", "sync"],
    "middle": ["sync", "alone", "sync"],
    "first": ["alone", "sync", "sync"],
    "dropped": ["alone", "zero", "sync"],
    "dropped sum": ["sync", "zero", "alone", "sync"],
}
UNEVEN = {"one less": ["alone", "-alone", "sync"], "none": ["-alone", "sync"]}


def accumulate(
    rank: int, build: Any, apart: bool, sequences: dict[str, list[str]]
) -> dict[str, float]:
    """How far p.grad is from DDP's after each sequence, and the state after all of them."""
    found = {}
    with hosts(apart):
        sides = twins(build, adamw)
        for name, sequence in sequences.items():
            for side in sides:
                for number, what in enumerate(sequence):
                    if what.startswith("-") and rank == 1:
                        continue
                    if what == "zero":
                        side.optimizer.zero_grad()
                        continue
                    alone = nullcontext() if what == "sync" else side.net.no_sync()
                    with alone:
                        (side.net(build.batch(number, rank)) / 3).backward()
            found[name] = drift(*map(gradients, sides))
            for side in sides:
                side.optimizer.step()
                side.optimizer.zero_grad()
        found["state"] = drift(*map(training_state, sides))
    return found


@APART
@pytest.mark.parametrize("build", [Odd, Twice])
def test_micro_batches(build: Any, apart: bool) -> None:
    for found in run(2, accumulate, build, apart, SEQUENCES, timeout_s=30):
        assert max(found.values()) <= CLOSE, found


@pytest.mark.parametrize("name", UNEVEN)
def test_one_rank_has_fewer_micro_batches(name: str) -> None:
    """Within no_sync() the ranks of one host need not meet."""
    for found in run(2, accumulate, Odd, False, {name: UNEVEN[name]}, timeout_s=15):
        assert max(found.values()) <= CLOSE, found


def never_summed(rank: int, apart: bool) -> tuple[str, float]:
    """The first call of all within no_sync(), then a step too early."""
    with hosts(apart):
        ours, plain = our_twin(Odd, adamw), seeded(0, Odd)
        with ours.net.no_sync():
            ours.net(Odd.batch(0, rank)).backward()
        plain(Odd.batch(0, rank)).backward()
        own = drift(
            {name: p.grad for name, p in plain.named_parameters()},
            {name: p.grad for name, p in ours.model.named_parameters()},
        )
        try:
            ours.optimizer.step()
        except elixir_fx.ElixirError as error:
            return str(error), own
        return "", own


@APART
def test_a_step_on_gradients_that_were_never_summed(apart: bool) -> None:
    for message, own in run(2, never_summed, apart):
        assert own == 0.0
        assert "no_sync()" in message and "last backward" in message


def tokens(rank: int, apart: bool, reduction: str) -> float:
    """3 tokens on rank 0 and 5 on rank 1: how far gradients are from those of one process."""
    ids = Odd.batch(0, 0).flatten()[:8]
    parts = [ids[:3].view(1, 3), ids[3:].view(1, 5)]
    share = len(parts[rank].flatten()) / 8
    if reduction == "mean":
        share *= 2
    plain = seeded(0, Odd)
    plain(ids.view(1, 8)).backward()
    with hosts(apart):
        ours = our_twin(Odd, adamw, reduction=reduction)
        (ours.net(parts[rank]) * share).backward()
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        return drift(wanted, gradients(ours))


@APART
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_uneven_batches(reduction: str, apart: bool) -> None:
    assert max(run(2, tokens, apart, reduction)) <= CLOSE


# -- norms, clipping, scaling ----------------------------------------------------------------------


def clip(rank: int, apart: bool, make_optimizer: Any, orders: tuple[float, ...]) -> dict[str, Any]:
    """How far norms and clipped gradients are from DDP's, and this rank's norms."""
    found: dict[str, Any] = {}
    with hosts(apart):
        plain, ours = twins(Odd, make_optimizer)
        for order in orders:
            for own in (True, False):
                for side in (plain, ours):
                    side.net(Odd.batch(0, rank)).backward()
                wanted = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1, order)
                if own:
                    norm = ours.net.clip_grad_norm_(0.1, order)
                else:
                    norm = nn.utils.clip_grad_norm_(ours.net.parameters(), 0.1, order)
                found[f"{order} {own}"] = (
                    drift(wanted, norm) / float(wanted),
                    drift(gradients(plain), gradients(ours)),
                    float(norm),
                )
                for side in (plain, ours):
                    side.optimizer.step()
                    side.optimizer.zero_grad()
        found["state"] = (drift(training_state(plain), training_state(ours)), 0.0, 0.0)
        net, broken = ours.net, ours.model.widen.weight
        (net(Odd.batch(0, rank)) * (math.nan if rank == 0 else 1.0)).backward()
        before = gradients(ours)
        with pytest.raises(RuntimeError, match="non-finite"):
            net.clip_grad_norm_(0.1, error_if_nonfinite=True)
        assert broken.grad is not None and before["widen.weight"].isnan().all()
    return found


ORDERS = [
    pytest.param(sgd, (2.0, 1.0), id="shared out"),
    pytest.param(
        sgd,
        (math.inf,),
        id="largest",
    ),
    pytest.param(adafactor, (2.0, 1.0, math.inf), id="whole"),
]


@APART
@pytest.mark.parametrize(("make_optimizer", "orders"), ORDERS)
def test_clipping(make_optimizer: Any, orders: tuple[float, ...], apart: bool) -> None:
    zero, one = run(2, clip, apart, make_optimizer, orders)
    for key in zero:
        assert zero[key][0] <= CLOSE and zero[key][1] <= CLOSE, (key, zero[key])
        assert zero[key][2] == one[key][2]


def scale(rank: int, apart: bool, memory: str | int, folder: Path) -> list[float]:
    """Scales after each step, of which rank 0's second has an infinite gradient, and how far the
    final state is from DDP's."""
    scales = []
    with hosts(apart):
        sides = twins(Tall, sgd, memory=memory, disk=folder)
        for side in sides:
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
            broken = [0]
            first = side.model.layers[0].weight
            first.register_hook(lambda g, broken=broken: g * math.inf if broken[0] else g)
            for step in range(3):
                broken[0] = int(rank == 0 and step == 1)
                before = first.detach().clone()
                scaler.scale(side.net(Tall.batch(step, rank))).backward()
                scaler.unscale_(side.optimizer)
                nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
                scaler.step(side.optimizer)
                scaler.update()
                side.optimizer.zero_grad()
                scales.append(scaler.get_scale())
                assert torch.equal(before, first.detach()) == (step == 1)
        return [*scales, drift(*map(training_state, sides))]


@MIXED
def test_an_infinity_on_one_rank_skips_the_step_on_all(
    apart: bool, short: bool, tmp_path: Path
) -> None:
    memory = tight(Tall, 2) if short else PLENTY
    for *scales, state in run(2, scale, apart, memory, tmp_path):
        assert scales == [1024.0, 512.0, 512.0] * 2
        assert state <= CLOSE


# -- values ----------------------------------------------------------------------------------------


def read_and_write(rank: int, apart: bool, memory: str | int, folder: Path) -> None:
    with hosts(apart):
        plain, ours = twins(Odd, adamw, memory=memory, disk=folder)
        for step in range(3):
            both(plain, ours, Odd.batch(step, rank))
        net = ours.net
        state = net.state_dict()
        fresh = Odd()
        fresh.load_state_dict(state, strict=True)
        assert drift(dict(plain.model.state_dict()), dict(state)) == 0.0
        net.eval()
        with torch.no_grad():
            assert torch.equal(net(Odd.batch(9, 0)), fresh.eval()(Odd.batch(9, 0)))
        net.train()
        states = ours.optimizer.state_dict()["state"]
        for index, parameter in enumerate(trained(fresh)):
            assert states[index]["exp_avg"].shape == parameter.shape
        assert drift(training_state(plain), training_state(ours)) == 0.0
        three, theirs = net.three.bias, plain.model.three.bias
        assert isinstance(three, AwayParameter)
        assert three.shape == (3,) and torch.equal(three.detach().clone(), theirs.detach())
        for mine, other in zip(net.parameters(), plain.model.parameters(), strict=True):
            assert drift(other.norm().detach(), mine.norm().detach()) <= CLOSE
            assert drift(other.detach().sum(), mine.detach().sum()) <= 1e-4
        with torch.no_grad():
            for model in (net, plain.model):
                for parameter in model.parameters():
                    parameter.mul_(0.5).add_(1.0)
                model.widen.weight[3] = 7.0
                model.widen.bias.copy_(torch.arange(48.0))
        copied = copy.deepcopy(net)
        assert type(copied) is Odd
        assert drift(dict(plain.model.state_dict()), dict(copied.state_dict())) == 0.0
        net.load_state_dict(state)
        plain.model.load_state_dict(state)
        with elixir_fx.full_parameters(net):
            assert drift(dict(plain.model.state_dict()), dict(ours.model.state_dict())) == 0.0
            net.widen.weight.data[0] = 3.0
        plain.model.widen.weight.data[0] = 3.0
        for side in (plain, ours):
            side.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
        both(plain, ours, Odd.batch(5, rank))
        assert drift(training_state(plain), training_state(ours)) == 0.0


@EVERY
def test_values_are_whole_on_every_rank(apart: bool, short: bool, tmp_path: Path) -> None:
    run(2, read_and_write, apart, tight(Odd, 2) if short else PLENTY, tmp_path)


def read(rank: int, apart: bool, memory: str | int, folder: Path) -> None:
    """On more ranks than the smallest bias has elements."""
    with hosts(apart):
        ours = our_twin(Odd, adamw, memory=memory, disk=folder)
        ours.step((Odd.batch(0, rank),))
        values, states = ours.net.state_dict(), ours.optimizer.state_dict()["state"]
        Odd().load_state_dict(values, strict=True)
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, (values, states))
        assert max(drift(everyone[0], other) for other in everyone) == 0.0
        assert values["three.bias"].shape == (3,)


@MIXED
def test_a_rank_without_an_element(apart: bool, short: bool, tmp_path: Path) -> None:
    run(4, read, apart, tight(Odd, 4) if short else PLENTY, tmp_path)


class Normed(nn.Module):
    """With buffers that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x))).square().mean()


def own_seed(rank: int, apart: bool) -> list[dict[str, Tensor]]:
    """Values at the start on this rank: before, and after the compiled model was prepared."""
    model = seeded(rank, Normed)
    model.norm.running_mean.normal_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with hosts(apart):
        net = exact.compile(
            model, optimizer=adamw(trained(model)), example_inputs=(torch.ones(4, 16),)
        )
        return [before, net.state_dict()]


@APART
def test_all_start_as_the_first_rank_does(apart: bool) -> None:
    (zero, start_zero), (one, start_one) = run(2, own_seed, apart)
    assert drift(zero, one) > 0.1
    assert drift(zero, start_zero) == drift(zero, start_one) == 0.0


def several_models(rank: int, keeps: bool) -> list[float]:
    """One model after another, which rank 1 may hold on to; then two at once."""
    found, kept = [], []
    for _ in range(3):
        plain, ours = twins(Twice, adamw)
        both(plain, ours, Twice.batch(0, rank))
        found.append(drift(training_state(plain), training_state(ours)))
        if keeps and rank == 1:
            kept.append(ours)
    pairs = [twins(Twice, adamw), twins(Odd, sgd)]
    for step in range(2):
        for (plain, ours), build in zip(pairs, (Twice, Odd), strict=True):
            both(plain, ours, build.batch(step, rank))
            found.append(drift(training_state(plain), training_state(ours)))
    return found


@pytest.mark.parametrize("keeps", [False, True])
def test_several_models(keeps: bool) -> None:
    for found in run(2, several_models, keeps, timeout_s=10):
        assert found == [0.0] * 7


def other_shapes(rank: int, apart: bool, memory: str | int, folder: Path) -> float:
    """Sizes that change on one rank and not on the other, and an evaluation in between."""
    with hosts(apart):
        plain, ours = twins(Odd, adamw, memory=memory, disk=folder)
        for step, width in enumerate([6, 6, 5, 3, 6, 4]):
            ids = Odd.batch(step, rank)[:, : width if rank else 6]
            both(plain, ours, ids)
            with torch.no_grad():
                assert drift(plain.model(ids), ours.net(ids)) == 0.0
        return drift(training_state(plain), training_state(ours))


@EVERY
def test_shapes_that_change_on_one_rank(apart: bool, short: bool, tmp_path: Path) -> None:
    memory = tight(Odd, 2) if short else PLENTY
    assert run(2, other_shapes, apart, memory, tmp_path, timeout_s=30) == [0.0] * 2
