"""Gradients on ranks where it is not one backward of one graph: several calls in a loss, outputs
that only one rank uses, sums of old and new, gradients that somebody kept."""

from typing import Any

import exact
import pytest
import torch
import torch.distributed as dist
from case_models import randn
from graphs import seeded
from harness import adamw, sgd_momentum
from ranks import run
from teams import APART, PLENTY, Tall, drift, gradients, hosts, our_twin, trained, training_state
from torch import Tensor, nn

from elixir_fx import ElixirError, PlanError

THREADS = 1
CLOSE = 1e-6


def mean_over(rank_losses: Any, model: nn.Module, ranks: int = 2) -> dict[str, Tensor | None]:
    """The gradients of the mean of every rank's loss, from one plain process."""
    model.zero_grad()
    for rank in range(ranks):
        (rank_losses(model, rank) / ranks).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def several_calls(rank: int, apart: bool) -> float:
    """Two calls in one loss, in each of two micro-batches."""

    def loss(net: Any, micro: int, of: int) -> Tensor:
        return net(Tall.batch(2 * micro, of)) + net(Tall.batch(2 * micro + 1, of))

    with hosts(apart):
        ours = our_twin(Tall, adamw)
        for micro in range(2):
            loss(ours.net, micro, rank).backward()
        found = gradients(ours)
    expected = mean_over(lambda m, of: loss(m, 0, of) + loss(m, 1, of), seeded(0, Tall))
    return drift(expected, found)


@APART
def test_two_calls_in_one_loss_while_accumulating(apart: bool) -> None:
    assert max(run(2, several_calls, apart)) < CLOSE


class Heads(nn.Module):
    """Two outputs, each with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.first(h).square().mean(), self.second(h).square().mean()


def one_output_unused(rank: int, apart: bool) -> float:
    def loss(net: Any, of: int) -> Tensor:
        main, extra = net(randn(4, 32, seed=of))
        return main + extra if of else main

    with hosts(apart):
        ours = our_twin(Heads, adamw)
        loss(ours.net, rank).backward()
        found = gradients(ours)
    return drift(mean_over(loss, seeded(0, Heads)), found)


@APART
def test_an_output_that_one_rank_has_no_loss_of(apart: bool) -> None:
    assert max(run(2, one_output_unused, apart)) < CLOSE


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def whole_sums(rank: int) -> tuple[float, float]:
    """Gradients of whole parameters, summed, after two backwards and one under no_sync()."""
    ours = our_twin(Tall, adafactor, reduction="sum")
    batches = [Tall.batch(step, rank) for step in range(3)]
    ours.net(batches[0]).backward()
    ours.net(batches[1]).backward()
    two = gradients(ours)
    with ours.net.no_sync():
        ours.net(batches[2]).backward()
    ours.net(batches[0]).backward()
    four = gradients(ours)
    plain = seeded(0, Tall)
    wanted = []
    for steps in ((0, 1), (0, 1, 2, 0)):
        plain.zero_grad()
        for of in range(2):
            for step in steps:
                plain(Tall.batch(step, of)).backward()
        wanted.append({name: p.grad.clone() for name, p in plain.named_parameters()})
    return drift(wanted[0], two), drift(wanted[1], four)


def test_sums_of_whole_parameters_count_what_is_there_once() -> None:
    assert max(max(run(2, whole_sums))) < CLOSE


class Uneven(nn.Module):
    """Weights of one shape that are cut between the ranks at different elements."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(64, 64, bias=False)
        self.odd = nn.Linear(64, 33)
        self.two = nn.Linear(33, 64)
        self.three = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.odd(self.one(x).tanh()).tanh())).square().mean()


def one_into_another(rank: int, apart: bool) -> float:
    with hosts(apart):
        ours = our_twin(Uneven, adamw)
        ours.net(randn(4, 64, seed=rank)).backward()
        weights = [ours.model.one.weight, ours.model.three.weight]
        expected = weights[0].detach().clone() + weights[1].detach().clone()
        summed = weights[0].grad.clone() + 2 * weights[1].grad.clone()
        with torch.no_grad():
            weights[0].add_(weights[1])
            weights[0].grad.add_(weights[1].grad, alpha=2)
        found = [weights[0].detach().clone(), weights[0].grad.clone()]
    return drift([expected, summed], found)


@APART
def test_one_shared_tensor_is_added_to_another(apart: bool) -> None:
    assert run(2, one_into_another, apart) == [0.0, 0.0]


def kept_gradient(rank: int, apart: bool) -> tuple[float, str]:
    """How far the second gradient is from the truth, and what became of the first."""
    with hosts(apart):
        ours = our_twin(Tall, adamw)
        ours.net(Tall.batch(0, rank)).backward()
        weight = ours.model.layers[3].weight
        kept, copy = weight.grad, weight.grad.clone()
        ours.optimizer.zero_grad()
        ours.net(Tall.batch(1, rank)).backward()
        found = gradients(ours)
        try:
            became = "right" if torch.equal(kept.clone(), copy) else "wrong"
        except ElixirError as error:
            became = str(error)
    expected = mean_over(lambda m, of: m(Tall.batch(1, of)), seeded(0, Tall))
    return drift(expected, found), became


@APART
def test_a_gradient_that_somebody_kept(apart: bool) -> None:
    for far, became in run(2, kept_gradient, apart):
        assert far < CLOSE
        assert became == "right" if not apart else "overwritten by a later backward" in became


class Scaled(nn.Module):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.fc = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * self.fc(x)).square().mean()


def adagrad(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2)


def scalars(rank: int, apart: bool) -> float:
    """Steps, with a reload of the optimizer's states between them."""
    far = 0.0
    with hosts(apart):
        for make in (adagrad, adamw, sgd_momentum):
            ours = our_twin(Scaled, make)
            model = seeded(0, Scaled)
            plain = make(trained(model))
            for step in range(3):
                ours.step((randn(4, 32, seed=10 * step + rank),))
                for of in range(2):
                    (model(randn(4, 32, seed=10 * step + of)) / 2).backward()
                plain.step()
                plain.zero_grad()
                ours.optimizer.load_state_dict(ours.optimizer.state_dict())
            far = max(far, drift(dict(model.state_dict()), training_state(ours)["weights"]))
    return far


@APART
def test_a_parameter_without_a_dimension(apart: bool) -> None:
    assert max(run(2, scalars, apart)) < CLOSE


def wrong_batch(rank: int) -> tuple[str, float]:
    """Rank 1's own mistake, caught; then a good step."""
    ours = our_twin(Tall, adamw)
    ours.step((Tall.batch(0, rank),))
    told = ""
    if rank == 1:
        try:
            ours.net(randn(2, 63))
        except RuntimeError as error:
            told = str(error)
    ours.step((Tall.batch(1, rank),))
    mine = ours.model.layers[0].weight.detach().clone()
    dist.broadcast(mine, 0)
    return told, drift(mine, ours.model.layers[0].weight.detach().clone())


def test_a_mistake_in_a_forward_stays_the_ranks_own() -> None:
    (none, _), (told, far) = run(2, wrong_batch)
    assert none == "" and "2x63" in told and far == 0.0


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()


def sparse(rank: int) -> str:
    model = Table()
    net = exact.compile(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), memory=PLENTY)
    with pytest.raises(PlanError) as refused:
        net(torch.arange(4))
    return str(refused.value)


def test_sparse_gradients_are_refused() -> None:
    assert all("sparse=False" in message for message in run(2, sparse))


def kept_on_the_device(rank: int) -> tuple[str, float]:
    ours = our_twin(Tall, adamw, keep={"layers.2": "device"})
    model = seeded(0, Tall)
    plain = adamw(trained(model))
    for step in range(3):
        ours.step((Tall.batch(step, rank),))
        for of in range(2):
            (model(Tall.batch(step, of)) / 2).backward()
        plain.step()
        plain.zero_grad()
    kind = type(ours.model.layers[2].weight).__name__
    return kind, drift(dict(model.state_dict()), training_state(ours)["weights"])


def test_what_is_kept_on_the_device_is_whole_on_every_rank() -> None:
    for kind, far in run(2, kept_on_the_device):
        assert kind == "Parameter" and far < CLOSE
