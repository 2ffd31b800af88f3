"""Training under a budget is the same training: every loss, gradient, weight and state, bit
for bit equal to plain PyTorch's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from graphs import NAMED, Drawn, Named, gpt, models
from harness import (
    MakeOptimizer,
    Run,
    adamw,
    assert_equal_runs,
    budget,
    call,
    compare,
    difference,
    leaves,
    loss_of,
    needs,
    sgd_momentum,
    threads,
    train,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elixir_fx.testing import emulated
from elixir_fx.units import GIB

GPT = gpt(layers=2, width=128, seq=16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


@cache
def needs_of(example: Any, make_optimizer: MakeOptimizer) -> tuple[int, int]:
    """The smallest budget with a disk, and what the step takes in all: one capture for both."""
    model, batch = example.build(), example.batches(1)[0]
    optimizer = make_optimizer(list(model.parameters()))
    return needs(model, batch, disk_memory=GIB, optimizer=optimizer)


def under_budget(
    example: Any, share: float, folder: Path, make_optimizer: MakeOptimizer = adamw
) -> dict[str, Any]:
    """compile()'s options: a share of what the model needs, and a disk."""
    smallest, everything = needs_of(example, make_optimizer)
    memory = smallest + int(share * max(0, everything - smallest))
    return {"memory": memory, "disk": str(folder)}


def used_the_disk(run: Run) -> bool:
    assert run.stats is not None
    return run.stats["disk_read_bytes"] > 0 and run.stats["disk_write_bytes"] > 0


def freeze_first_block(model: Any) -> None:
    model.tokens.requires_grad_(False)
    model.blocks[0].requires_grad_(False)


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize(
    ("example", "make_optimizer", "accumulate"),
    [
        pytest.param(GPT, adamw, 1, id="adamw"),
        pytest.param(GPT, sgd_momentum, 1, id="momentum"),
        pytest.param(GPT, adamw, 4, id="accumulated"),
        pytest.param(gpt(width=128, tied=True), adamw, 1, id="tied"),
        pytest.param(gpt(width=128, tied=True), adamw, 2, id="tied and accumulated"),
        pytest.param(gpt(width=128, prepare=freeze_first_block), adamw, 1, id="frozen"),
        pytest.param(gpt(width=128, dropout=0.2), adamw, 1, id="dropout"),
    ],
)
def test_gpt_under_a_budget_with_a_disk(
    example: Named, make_optimizer: MakeOptimizer, accumulate: int, share: float, tmp_path: Path
) -> None:
    options = under_budget(example, share, tmp_path, make_optimizer)
    batches = example.batches(3 * accumulate)
    run = compare(example.build(), make_optimizer, batches, accumulate=accumulate, compile=options)
    assert used_the_disk(run)


def test_gpt_with_two_threads(tmp_path: Path) -> None:
    options = under_budget(GPT, 0.2, tmp_path)
    with threads(2):
        assert used_the_disk(compare(GPT.build(), adamw, GPT.batches(2), compile=options))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gpt_on_an_emulated_accelerator_with_host_memory(accumulate: int) -> None:
    machine = emulated()
    model, batches = GPT.build(), GPT.batches(3 * accumulate)
    memory = budget(model, batches[0], 0.2, machine=machine, host_memory=GIB, optimizer="adamw")
    options = {"memory": memory, "host_memory": GIB, "machine": machine}
    run = compare(model, adamw, batches, accumulate=accumulate, compile=options)
    assert run.stats is not None
    assert run.stats["host_to_device_bytes"] > 0
    assert run.stats["device_to_host_bytes"] > 0


def test_gpt_on_an_emulated_accelerator_with_host_memory_and_disk(tmp_path: Path) -> None:
    machine = emulated(disk_memory=GIB)
    model, batches = GPT.build(), GPT.batches(4)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    tiers = {"machine": machine, "host_memory": 2 * parameter_bytes}
    memory = budget(model, batches[0], 0.0, disk_memory=GIB, optimizer="adamw", **tiers)
    run = compare(model, adamw, batches, compile={"memory": memory, "disk": str(tmp_path), **tiers})
    assert used_the_disk(run)


def test_gpt_without_limits_needs_no_node_of_ours() -> None:
    run = compare(GPT.build(), adamw, GPT.batches(3), compile={"memory": 4 * GIB})
    assert run.plan is not None
    assert run.plan.layout.keeps_all


@pytest.mark.parametrize("name", NAMED)
def test_named_models(name: str, tmp_path: Path) -> None:
    example = NAMED[name]
    options = under_budget(example, 0.2, tmp_path)
    compare(example.build(), adamw, example.batches(3), compile=options)


def _options(kind: str) -> MakeOptimizer:
    makers: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
        "foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
        "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
        "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
        "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
        "plain sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2),
        "groups": lambda ps: torch.optim.AdamW(
            [{"params": ps[::2], "weight_decay": 0.0}, {"params": ps[1::2], "lr": 1e-3}], lr=1e-2
        ),
    }
    return makers[kind]


@pytest.mark.parametrize("kind", ["foreach", "fused", "amsgrad", "rmsprop", "plain sgd", "groups"])
def test_optimizers(kind: str, tmp_path: Path) -> None:
    options = under_budget(NAMED["mlp"], 0.4, tmp_path, _options(kind))
    compare(NAMED["mlp"].build(), _options(kind), NAMED["mlp"].batches(4), compile=options)


def test_example_inputs_and_first_call_give_the_same(tmp_path: Path) -> None:
    options = under_budget(GPT, 0.2, tmp_path)
    batches = GPT.batches(2)
    late = train(GPT.build(), adamw, batches, compile=options)
    early = train(GPT.build(), adamw, batches, compile={**options, "example_inputs": batches[0]})
    assert_equal_runs(early, late)


def test_a_smaller_last_batch(tmp_path: Path) -> None:
    options = under_budget(GPT, 0.3, tmp_path)
    tokens, targets = GPT.batches(1)[0]
    batches = [(tokens, targets), (tokens[:1], targets[:1]), (tokens[:, :17], targets[:, :17])]
    compare(GPT.build(), adamw, [*batches, batches[0]], compile=options)


def test_evaluation_between_steps(tmp_path: Path) -> None:
    example = gpt(width=128, dropout=0.2)
    options = under_budget(example, 0.2, tmp_path)
    batches = example.batches(3)

    def run(net: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        seen = []
        for number, batch in enumerate(batches):
            torch.manual_seed(number)
            net.train()
            loss = loss_of(call(net, batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            net.eval()
            with torch.no_grad():
                seen += [loss.detach(), *leaves(call(net, batch))]
        return seen

    plain, model = example.build(), example.build()
    optimizer = adamw(list(model.parameters()))
    net = exact.compile(model, optimizer=optimizer, **options)
    expected, got = run(plain, adamw(list(plain.parameters()))), run(net, optimizer)
    assert [difference(a, b) for a, b in zip(expected, got, strict=True)] == [None] * 6


def test_a_schedule_of_learning_rates(tmp_path: Path) -> None:
    options = under_budget(NAMED["mlp"], 0.2, tmp_path)
    batches = NAMED["mlp"].batches(4)

    def run(compile_it: bool) -> dict[str, torch.Tensor]:
        net: Any = NAMED["mlp"].build()
        optimizer = adamw(list(net.parameters()))
        if compile_it:
            net = exact.compile(net, optimizer=optimizer, **options)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        for batch in batches:
            loss_of(call(net, batch)).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=False)
        return {name: value.clone() for name, value in net.state_dict().items()}

    assert_equal_runs(Run(weights=run(False)), Run(weights=run(True)))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A random model and how it is trained."""

    model: Drawn
    share: float
    make_optimizer: MakeOptimizer
    accumulate: int
    evaluate: bool
    host: bool


cases = st.builds(
    Case,
    model=models(),
    share=st.just(0.0) | st.floats(0, 1.1),
    make_optimizer=st.sampled_from([adamw, sgd_momentum]),
    accumulate=st.integers(1, 3),
    evaluate=st.booleans(),
    host=st.booleans(),
)


def check_case(case: Case, folder: Path) -> None:
    """Equal bits; on the accelerator, whose memory has a hard limit, within the budget too."""
    model, batches = case.model.build(), case.model.batches(2 * case.accumulate)
    tiers: dict[str, Any] = {"disk_memory": GIB}
    if case.host:
        tiers = {"machine": emulated(), "host_memory": GIB}
    optimizer = case.make_optimizer(list(model.parameters()))
    memory = budget(model, batches[0], case.share, optimizer=optimizer, **tiers)
    compare(
        model,
        case.make_optimizer,
        batches,
        accumulate=case.accumulate,
        evaluate=case.evaluate,
        compile={"memory": memory, **(tiers if case.host else {"disk": str(folder)})},
    )
    torch._dynamo.reset()


quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@given(case=cases)
@settings(max_examples=25, deadline=None, suppress_health_check=quiet)
def test_random_models(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)


@pytest.mark.slow
@given(case=cases)
@settings(max_examples=100, deadline=None, suppress_health_check=quiet)
def test_a_hundred_random_models(case: Case, tmp_path: Path) -> None:
    check_case(case, tmp_path)
