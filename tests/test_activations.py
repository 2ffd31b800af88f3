"""Activations that are computed again or sent away: every bit stays, whatever order calls come in.

Plans are made by hand: some activations are dropped, some leave, all else is the search's.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from graphs import NAMED, Drawn, Example, gpt, models
from harness import adamw, assert_equal_runs, call, compare, loss_of, needs, same_bits, train
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

import elixir_fx
from elixir_fx.config import read_options
from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts, Role
from elixir_fx.guarded import GuardedSession
from elixir_fx.machine import Tier
from elixir_fx.plan import Limits, Plan
from elixir_fx.planner import search, smallest
from elixir_fx.planner import search as whole_search
from elixir_fx.planner.decisions import Activations, Decision
from elixir_fx.planner.repeated import BlockedError, Walk
from elixir_fx.planner.search import search as settled
from elixir_fx.planner.search import smallest as least_settled
from elixir_fx.testing import emulated
from elixir_fx.units import GIB, MIB

GPT = gpt(layers=3, width=64, seq=32)
MACHINE = emulated()

Choose = Callable[[int], str]  # what becomes of the n-th activation


def dropped(index: int) -> str:
    return "drop"


def away(index: int) -> str:
    return "away"


def mixed(index: int) -> str:
    return ("drop", "away", "keep")[index % 3]


def decide(facts: Facts, choose: Choose) -> Decision:
    """As many activations as can be treated as they are to be."""
    known = Activations(facts)
    found = Decision()
    for index, storage in enumerate(s for s in facts.storages if s.role is Role.ACTIVATION):
        way = choose(index)
        more = found.drop([storage.name]) if way == "drop" else found.send([storage.name])
        if way == "keep" or not storage.nbytes:
            continue
        try:
            Walk(known.step, sorted(more.dropped), sorted(more.away))
        except BlockedError:
            continue
        found = more
    return found


def by_hand(example: Example, choose: Choose, share: float, **tiers: Any) -> dict[str, Any]:
    """compile()'s options for a budget between the least (0) and all (1) with these activations."""
    model, batch = example.build(), example.batches(1)[0]
    session = GuardedSession(model, "adamw", read_options({"kernels": "eager", **tiers}))
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    facts = session.facts_only(args, kwargs)
    limits, machine = session.lowering.limits, session.machine
    known = Activations(facts)
    decision = decide(facts, choose)
    made = known.of(decision)
    assert made is not None
    least = least_settled(made[1], machine, limits)
    room = settled(made[1], machine, replace(limits, device=GIB)).forecast.peak_device_bytes
    device = least + int(share * max(0, room - least))
    limits = replace(limits, device=device)
    plan = known.plan(decision, settled(made[1], machine, limits))
    return {"plan": plan, "memory": device, **tiers}


@pytest.mark.parametrize("choose", [dropped, away, mixed])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", ["gpt", "gpt_dropout", "gpt_tied", "kind_in_place", "thrice"])
def test_bits_on_a_cpu_with_a_disk(name: str, share: float, choose: Choose, tmp_path: Path) -> None:
    example = NAMED[name]
    options = by_hand(example, choose, share, disk=str(tmp_path), disk_memory=64 * MIB)
    run = compare(example.build(), adamw, example.batches(3), compile=options)
    assert run.stats is not None and run.plan is not None
    schedule = run.plan.schedules[0]
    assert schedule.offloads or schedule.recomputes
    assert run.stats["peak_device_bytes"] <= options["memory"] + 4096


@pytest.mark.parametrize("choose", [dropped, away, mixed])
@pytest.mark.parametrize("name", ["gpt", "gpt_dropout", "kind_attention", "kind_batch_norm"])
def test_bits_on_an_accelerator_with_a_host(name: str, choose: Choose) -> None:
    example = NAMED[name]
    options = by_hand(example, choose, 0.3, machine=MACHINE, host_memory=64 * MIB)
    compare(example.build(), adamw, example.batches(3), evaluate=True, compile=options)


@settings(
    max_examples=8, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(models())
def test_bits_of_random_models(drawn: Drawn) -> None:
    options = by_hand(drawn, mixed, 0.0, machine=MACHINE, host_memory=64 * MIB)
    compare(drawn.build(), adamw, drawn.batches(2), compile=options)


@pytest.mark.parametrize("choose", [dropped, away])
def test_micro_batches(choose: Choose, tmp_path: Path) -> None:
    options = by_hand(GPT, choose, 0.2, disk=str(tmp_path), disk_memory=64 * MIB)
    compare(GPT.build(), adamw, GPT.batches(6), accumulate=3, compile=options)


def sides(options: dict[str, Any]) -> tuple[nn.Module, Any]:
    model = GPT.build()
    plain = copy.deepcopy(model)
    return plain, exact.compile(model, optimizer=adamw(list(model.parameters())), **options)


def same_gradients(plain: nn.Module, ours: nn.Module) -> None:
    for (name, a), (_, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            assert same_bits(a.grad, b.grad.detach().clone()), name


@pytest.mark.parametrize("choose", [dropped, away, mixed])
def test_two_forwards_before_their_backwards(choose: Choose, tmp_path: Path) -> None:
    """The tier has room for one step's activations: the second's stay where they are."""
    nets = sides(by_hand(GPT, choose, 1.0, disk=str(tmp_path), disk_memory=64 * MIB))
    first, second = GPT.batches(2)
    for net in nets:
        losses = [loss_of(call(net, batch)) for batch in (first, second)]
        with torch.no_grad():
            call(net, second)
        losses[1].backward()
        losses[0].backward()
    same_gradients(*nets)


@pytest.mark.parametrize("choose", [dropped, away, mixed])
def test_a_graph_that_is_kept_and_one_that_is_forgotten(choose: Choose, tmp_path: Path) -> None:
    nets = sides(by_hand(GPT, choose, 1.0, disk=str(tmp_path), disk_memory=64 * MIB))
    first, second = GPT.batches(2)
    for net in nets:
        loss_of(call(net, first))  # nobody wants its gradients
        loss = loss_of(call(net, second))
        loss.backward(retain_graph=True)
        loss.backward()
        loss_of(call(net, first)).backward()
    same_gradients(*nets)


def test_nothing_is_left_on_the_tier(tmp_path: Path) -> None:
    _, ours = sides(by_hand(GPT, away, 0.5, disk=str(tmp_path), disk_memory=64 * MIB))
    for batch in GPT.batches(4):
        loss_of(call(ours, batch)).backward()
    offloads = ours._session.engine.offloads
    there = offloads.nbytes
    for batch in GPT.batches(4):
        loss_of(call(ours, batch)).backward()
    assert offloads.nbytes == there
    assert len(offloads._free) <= 1 + len(offloads._away)


def test_without_a_tier_there_is_still_recomputation() -> None:
    example = gpt(layers=6, width=128, seq=64, batch=4)
    options = {"memory": exact.smallest_memory(example.build(), example.batches(1)[0])}
    run = compare(example.build(), adamw, example.batches(3), compile=options)
    assert run.plan is not None and run.plan.schedules[0].recomputes
    assert run.plan.layout.keeps_all


def test_a_larger_batch_is_computed_again_more(tmp_path: Path) -> None:
    """The layout is for the first batch; the second has twice the activations."""
    small = gpt(layers=6, width=64, seq=64, batch=2)
    model = small.build()
    plain = copy.deepcopy(model)
    _, everything = needs(model, small.batches(1)[0])
    memory = int(everything * 1.02)
    ours = exact.compile(model, optimizer=adamw(list(model.parameters())), memory=memory)
    large = gpt(layers=6, width=64, seq=64, batch=3).batches(1)[0]
    for net in (plain, ours):
        for batch in (small.batches(1)[0], large):
            loss_of(call(net, batch)).backward()
    same_gradients(plain, ours)
    assert any(schedule.recomputes for schedule in ours.plan.schedules[1:])


def test_more_memory_is_never_slower() -> None:
    session = GuardedSession(GPT.build(), "adamw", read_options({"machine": MACHINE}))
    facts = session.facts_only(GPT.batches(1)[0], {})
    limits = Limits(device=GIB, host=GIB)
    least = smallest(facts, MACHINE, limits)
    most = whole_search(facts, MACHINE, limits).forecast.peak_device_bytes
    steps = [
        search(facts, MACHINE, replace(limits, device=least + (most - least) * n // 6))
        for n in range(7)
    ]
    assert least < least_settled(facts, MACHINE, limits)
    for less, more in pairwise(steps):
        assert more.forecast.step_s <= less.forecast.step_s * 1.02


def test_a_plan_keeps_its_activations_on_file(tmp_path: Path) -> None:
    options = by_hand(GPT, mixed, 0.5, disk=str(tmp_path), disk_memory=64 * MIB)
    plan: Plan = options["plan"]
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.layout.saved_tier is Tier.DISK


def test_edited_plans_are_refused(tmp_path: Path) -> None:
    options = by_hand(GPT, mixed, 0.5, disk=str(tmp_path), disk_memory=64 * MIB)
    plan: Plan = options["plan"]
    first = plan.schedules[0]
    for schedule, match in (
        (replace(first, recomputes=first.recomputes[1:]), "edited, or made for another model"),
        (
            replace(first, offloads=(replace(first.offloads[0], node="strange"),)),
            "sends 'strange' away",
        ),
    ):
        edited = replace(plan, schedules=(schedule,))
        model = GPT.build()
        with pytest.raises(PlanError, match=match):
            exact.compile(
                model,
                optimizer=adamw(list(model.parameters())),
                example_inputs=GPT.batches(1)[0],
                **{**options, "plan": edited},
            )


def test_a_write_that_fails_is_told(tmp_path: Path) -> None:
    """The disk fails while activations leave: the step ends with the reason."""
    from elixir_fx.errors import TierError

    _, ours = sides(by_hand(GPT, away, 0.5, disk=str(tmp_path), disk_memory=64 * MIB))
    batch = GPT.batches(1)[0]
    loss_of(call(ours, batch)).backward()
    store = ours._session.engine.store
    store.close()
    with pytest.raises(TierError):
        loss_of(call(ours, batch)).backward()


def test_runs_are_the_same_run_by_run(tmp_path: Path) -> None:
    options = by_hand(GPT, mixed, 0.0, disk=str(tmp_path), disk_memory=64 * MIB)
    runs = [train(GPT.build(), adamw, GPT.batches(2), compile=options) for _ in range(2)]
    assert_equal_runs(*runs)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def checkpointed(example: Example) -> nn.Module:
    """The GPT with every block in a torch.utils.checkpoint."""
    model: Any = example.build()
    model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    return model


@pytest.mark.parametrize("kernels", ["eager", "inductor"])
def test_a_models_own_checkpoints_are_hints(kernels: str) -> None:
    """With room for all nothing is computed again; without, what the model says, or better. With
    compiled kernels that is so where they are told to ignore what the model says."""
    example = gpt(layers=4, width=64, seq=64, batch=8)
    batch = example.batches(1)[0]

    def compiled(**options: Any) -> Any:
        model = checkpointed(example)
        return elixir_fx.compile(
            model,
            optimizer=adamw(list(model.parameters())),
            example_inputs=batch,
            kernels=kernels,
            **options,
        )

    def hinted(model: Any) -> Decision:
        captured = model._session.lowering.captured[model.plan.schedules[0].key]
        return Activations(captured.facts).hinted

    roomy = compiled(memory="1GiB", respect_checkpointing=kernels == "eager")
    assert not roomy.plan.schedules[0].recomputes
    everything = roomy.plan.forecast.peak_device_bytes
    tight = compiled(memory=int(0.75 * everything))
    assert bool(hinted(tight).dropped) == (kernels == "eager")
    other = compiled(memory=int(0.75 * everything), respect_checkpointing=False)
    assert other.plan.schedules[0].recomputes and not hinted(other).dropped
    plain = example.build()
    loss_of(call(plain, batch)).backward()
    for net in (tight, other):
        loss_of(call(net, batch)).backward()
        for a, b in zip(plain.parameters(), net.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            if kernels == "eager":
                assert same_bits(a.grad, b.grad.detach().clone())
            else:
                torch.testing.assert_close(a.grad, b.grad.detach().clone())
