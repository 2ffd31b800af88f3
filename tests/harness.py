"""Train a model plainly and through elixir_fx, and compare the two runs bit for bit.

    plain = train(copy.deepcopy(model), adamw, batches)
    ours = train(model, adamw, batches, compile={"memory": "1MiB", "disk": tmp_path})
    assert_equal_runs(plain, ours)

or both in one with `compare`. A model may return a tensor or any nest of tensors; `loss_of`
makes one loss of it.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import exact
import torch
from torch import Tensor, nn

from elixir_fx import planner
from elixir_fx.config import read_options
from elixir_fx.facts import Facts
from elixir_fx.guarded import GuardedSession
from elixir_fx.plan import Limits, Plan
from elixir_fx.units import GIB

Batch = tuple[Any, ...] | dict[str, Any]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd_momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-3)


@dataclass(kw_only=True)
class Run:
    """What training left behind, all ordinary tensors that alias nothing live.

    `grads` are those of the last step, before the optimizer; None where there was none.
    `states` are the optimizer's, by the parameter's index and the state's name.
    `evaluated` are outputs of evaluations between the steps, by step and place.
    `stats` and `plan` are None in a plain run.
    """

    losses: list[Tensor] = field(default_factory=list)
    evaluated: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    stats: dict[str, float] | None = None
    plan: Plan | None = None


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors of a nest of tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from leaves(getattr(value, entry.name))
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from leaves(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from leaves(entry)


def loss_of(output: Any) -> Tensor:
    """The output's own `loss` if it has one, else a scalar of all its differentiable tensors."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if dataclasses.is_dataclass(output) and hasattr(output, "loss"):
        return output.loss
    parts = [leaf for leaf in leaves(output) if leaf.is_floating_point() and leaf.requires_grad]
    if len(parts) == 1 and parts[0].ndim == 0:
        return parts[0]
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def call(model: nn.Module, batch: Batch) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def train(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    batches: Sequence[Batch],
    *,
    accumulate: int = 1,
    evaluate: bool = False,
    seed: int = 0,
    compile: Mapping[str, Any] | None = None,
) -> Run:
    """One optimizer step for each `accumulate` batches; with `compile`, through elixir_fx.

    With `evaluate` the step's first batch is evaluated before the backward, while gradients
    are off, and after the step in eval mode. The model and its weights are changed in place.
    `seed` is set before every step, so that dropout draws the same numbers on both sides
    however the library spends random numbers while it plans.
    """
    optimizer = make_optimizer(list(model.parameters()))
    net: Any = model
    if compile is not None:
        net = exact.compile(model, optimizer=optimizer, **compile)
    run = Run()
    steps = [batches[at : at + accumulate] for at in range(0, len(batches), accumulate)]
    for number, micro_batches in enumerate(steps):
        torch.manual_seed(seed + number)
        for batch in micro_batches:
            loss = loss_of(call(net, batch)) / len(micro_batches)
            if evaluate:
                _evaluate(net, batch, f"{number}, between", run)
            loss.backward()
            run.losses.append(loss.detach().clone())
        if number == len(steps) - 1:
            run.grads = {
                name: None if p.grad is None else p.grad.detach().clone()
                for name, p in net.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        if evaluate:
            net.eval()
            _evaluate(net, micro_batches[0], f"{number}, after", run)
            net.train()
    run.weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
    for index, states in optimizer.state_dict()["state"].items():
        for name, value in states.items():
            run.states[f"{index}.{name}"] = torch.as_tensor(value).detach().clone()
    if compile is not None:
        run.stats, run.plan = dict(net.stats()), net.plan
    return run


def _evaluate(net: nn.Module, batch: Batch, when: str, run: Run) -> None:
    with torch.no_grad():
        for place, leaf in enumerate(leaves(call(net, batch))):
            run.evaluated[f"{when}, {place}"] = leaf.clone()


def compare(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    batches: Sequence[Batch],
    *,
    accumulate: int = 1,
    evaluate: bool = False,
    compile: Mapping[str, Any],
) -> Run:
    """Train a deep copy plainly and `model` through elixir_fx; assert equality; our run."""
    how: dict[str, Any] = {"accumulate": accumulate, "evaluate": evaluate}
    plain = train(copy.deepcopy(model), make_optimizer, batches, **how)
    ours = train(model, make_optimizer, batches, compile=compile, **how)
    assert_equal_runs(plain, ours)
    return ours


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and every bit; any NaN equals any other NaN, 0.0 is not -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    nan = a.isnan()
    same_signs = torch.equal(a.signbit() & ~nan, b.signbit() & ~nan)
    return (
        torch.equal(nan, b.isnan())
        and same_signs
        and torch.equal(a.masked_fill(nan, 0), b.masked_fill(nan, 0))
    )


def difference(a: Tensor | None, b: Tensor | None) -> str | None:
    """None if equal bit for bit, else what differs, in words."""
    if a is None and b is None:
        return None
    if a is None or b is None:
        return "plain has none, ours has one" if a is None else "plain has one, ours has none"
    if same_bits(a, b):
        return None
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"plain is {a.dtype}{list(a.shape)}, ours {b.dtype}{list(b.shape)}"
    wrong = ~torch.isclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)
    largest = (a.double() - b.double()).abs().nan_to_num(torch.inf).max().item()
    where = wrong.nonzero()[0].tolist() if wrong.any() else "a sign of zero"
    return (
        f"{int(wrong.sum())} of {a.numel()} elements differ, by at most {largest:.3g}; "
        f"first at {where}"
    )


def assert_equal_runs(plain: Run, ours: Run) -> None:
    """AssertionError that lists what differs: losses first, then gradients, weights, states."""
    problems = []
    if len(plain.losses) != len(ours.losses):
        problems.append(f"{len(plain.losses)} losses against {len(ours.losses)}")
    for index, (a, b) in enumerate(zip(plain.losses, ours.losses, strict=False)):
        if difference(a, b) is not None:
            problems.append(f"loss {index}: plain {a.item()!r}, ours {b.item()!r}")
    for what in ("evaluated", "grads", "weights", "states"):
        left, right = getattr(plain, what), getattr(ours, what)
        for name in sorted(left.keys() ^ right.keys()):
            problems.append(f"{what}: {name} only in {'plain' if name in left else 'ours'}")
        for name in left.keys() & right.keys():
            if (words := difference(left[name], right[name])) is not None:
                problems.append(f"{what}: {name}: {words}")
    assert not problems, f"{len(problems)} differences\n" + "\n".join(problems[:20])


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with `count` threads. Tests of small models take one: two that wait for each
    other on a busy machine take many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def planning(
    model: nn.Module, optimizer: torch.optim.Optimizer | str, **options: Any
) -> GuardedSession:
    """A session that will run nothing."""
    return GuardedSession(model, optimizer, read_options({"kernels": "eager", **options}))


def step_facts(session: GuardedSession, batch: Batch) -> Facts:
    """The facts of its model's training step."""
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    return session.facts_only(args, kwargs)


def needs(
    model: nn.Module,
    batch: Batch,
    *,
    optimizer: torch.optim.Optimizer | str = "adamw",
    **options: Any,
) -> tuple[int, int]:
    """The smallest device budget that works, and what the step takes where all stays."""
    session = planning(model, optimizer, **options)
    facts = step_facts(session, batch)
    tiers = session.lowering.limits
    smallest = planner.smallest(facts, session.machine, tiers)
    whole = planner.search(facts, session.machine, Limits(device=64 * GIB))
    return smallest, whole.forecast.peak_device_bytes


def budget(model: nn.Module, batch: Batch, share: float, **options: Any) -> int:
    """A device budget between the smallest that works (share 0) and all that is needed (1)."""
    smallest, everything = needs(model, batch, **options)
    return smallest + int(share * max(0, everything - smallest))
