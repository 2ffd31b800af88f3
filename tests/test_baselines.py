"""What others would decide: plans that keep every promise, and that train as plain PyTorch does."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from graphs import gpt
from graphs_facts import LBFGS, accelerator, cpu
from graphs_facts import gpt as gpt_facts
from harness import adamw, compare
from made_plans import facts_of
from random_steps import crowded, instance
from test_search import check

from elixir_fx import config
from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Limits, Plan
from elixir_fx.planner import search
from elixir_fx.planner.baselines import POLICIES, keep_all, layer_of, offload_all, zero3_per_layer
from elixir_fx.planner.bound import lower_bound_s
from elixir_fx.planner.elixir_rule import RuleConstants, elixir_rule, moves
from elixir_fx.testing import emulated
from elixir_fx.units import GIB, MIB

THREADS = 1
HUGE = 1 << 40
FACTS = gpt_facts(layers=6, width=256, vocabulary=2000, sequence=128)
HOST_UPDATES = replace(accelerator(), host_stream_bytes_per_s=5e10)
PLACES = {
    "cpu": (cpu(), {"disk": HUGE}),
    "host": (accelerator(), {"host": HUGE}),
    "host updates": (HOST_UPDATES, {"host": HUGE}),
    "host and disk": (accelerator(), {"host": 40 * MIB, "disk": HUGE}),
}


def kept_bytes(facts: Any = FACTS) -> int:
    return search(facts, cpu(), Limits(device=HUGE)).forecast.peak_device_bytes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_a_plan_keeps_its_promises(policy: str, place: str, share: float) -> None:
    machine, tiers = PLACES[place]
    limits = Limits(device=int(share * kept_bytes()), **tiers)
    try:
        plan = POLICIES[policy](FACTS, machine, limits)
    except PlanError:
        # Nothing but what it is asked for: to keep all, or to know no disk behind the host.
        assert (policy == "keep_all" and share < 1) or (policy, place, share) in (
            ("elixir_rule", "host and disk", 0.5),
            ("elixir_rule", "host and disk", 0.8),
        )
        return
    check(plan, FACTS, limits, machine)
    assert plan.forecast.step_s >= lower_bound_s(FACTS, machine, limits) * 0.999


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shared", [False, True])
def test_plans_of_ranks(policy: str, shared: bool) -> None:
    machine, tiers = PLACES["cpu" if shared else "host"]
    machine, group = machine.with_peers(), Group(ranks=2, shared=shared)
    limits = Limits(device=int(0.8 * kept_bytes()), **tiers)
    plan = POLICIES[policy](FACTS, machine, limits, None, group)
    check(plan, FACTS, limits, machine)
    assert all(chunk.shards == 2 for chunk in plan.layout.chunks)


GROUPS = {
    "alone": ONE_RANK,
    "2 ranks": Group(ranks=2),
    "4 ranks": Group(ranks=4),
    "4 that share": Group(ranks=4, shared=True),
}


def check_never_slower(seeds: Iterable[int], group: Group, micro_batches: int) -> None:
    """The search against every policy that has a plan."""
    for problem in (make(seed) for seed in seeds for make in (instance, crowded)):
        facts, limits = problem.facts, problem.limits
        machine = problem.machine if group.ranks == 1 else problem.machine.with_peers()
        try:
            ours = search(facts, machine, limits, None, group, micro_batches)
        except PlanError:
            ours = None
        for policy in POLICIES.values():
            try:
                other = policy(facts, machine, limits, None, group, micro_batches)
            except PlanError:
                continue
            assert ours is not None and ours.forecast.step_s <= other.forecast.step_s
            assert other.forecast.micro_batches == micro_batches


@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_search_is_never_slower(group: Group, micro_batches: int) -> None:
    check_never_slower((2, 14, 19), group, micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_search_is_never_slower_on_many(group: Group, micro_batches: int) -> None:
    check_never_slower(range(60), group, micro_batches)


def test_keep_all_is_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"keep_all: everything on the device takes .* allowed"):
        keep_all(FACTS, cpu(), Limits(device=kept_bytes() - 4096, disk=HUGE))


def test_offload_all_leaves_nothing() -> None:
    plan = offload_all(FACTS, accelerator(), Limits(device=HUGE, host=HUGE))
    homes = {tier for c in plan.layout.chunks for tier in (c.homes.parameters, c.homes.states)}
    assert homes == {Tier.HOST}
    assert plan.layout.gather_bytes < sum(c.nbytes for c in plan.layout.chunks) / 2


def test_offload_all_fills_the_nearest_tier_first() -> None:
    plan = offload_all(FACTS, accelerator(), Limits(device=HUGE, host=40 * MIB, disk=HUGE))
    assert 30 * MIB < plan.layout.host_bytes + plan.layout.staging_bytes <= 40 * MIB
    assert plan.layout.disk_bytes > 0


def test_a_pin_is_kept() -> None:
    limits = Limits(device=int(0.8 * kept_bytes()), host=HUGE)
    for policy in (offload_all, zero3_per_layer, elixir_rule):
        plan = policy(FACTS, accelerator(), limits, {"wte": Tier.DEVICE})
        homes = {s.path: c.homes.parameters for c in plan.layout.chunks for s in c.slices}
        assert homes["wte"] is Tier.DEVICE


def test_an_optimizer_that_needs_everything_is_refused() -> None:
    facts = replace(FACTS, optimizer=LBFGS)
    with pytest.raises(PlanError, match="needs all parameters at once"):
        offload_all(facts, accelerator(), Limits(device=HUGE, host=HUGE))


def test_layers_are_told_by_their_numbers() -> None:
    paths = ("h.3.mlp.fc.weight", "model.layers.11.experts.2.w1", "0.weight", "wte.weight", "bias")
    assert [layer_of(path) for path in paths] == ["h.3", "model.layers.11", "0", "wte", ""]


def test_zero3_gathers_layers_one_ahead_and_keeps_none() -> None:
    limits = Limits(device=int(0.6 * kept_bytes()), host=HUGE)
    plan = zero3_per_layer(FACTS, HOST_UPDATES, limits)
    layers = [{layer_of(s.path) for s in chunk.slices} for chunk in plan.layout.chunks]
    assert {"h.0"} in layers and {"h.5"} in layers
    assert all(chunk.update is Tier.HOST for chunk in plan.layout.chunks)
    gathers = plan.schedules[0].gathers
    assert not any(gather.kept for gather in gathers)
    position = {name: n for n, name in enumerate(FACTS.nodes)}
    for before, gather in pairwise(gathers):
        assert gather.prefetch is not None
        assert position[gather.prefetch] >= position[before.before]


def test_belady_counts_moves() -> None:
    there_and_back = [0, 1, 2, 3, 3, 2, 1, 0]
    assert [moves(there_and_back, blocks) for blocks in (1, 2, 3, 4)] == [7, 6, 5, 4]


@pytest.mark.parametrize(("ranks", "first"), [(1, True), (2, False), (4, False)])
def test_the_rule_of_the_paper_is_cache_first_on_one_rank_only(ranks: int, first: bool) -> None:
    assert RuleConstants.paper(ranks).cache_first(2, 14, ranks) is first


def test_the_rule_is_two_valued() -> None:
    """Either as many blocks as there is room for, or as many chunks at home."""
    limits = Limits(device=int(0.7 * kept_bytes()), host=HUGE)
    slow_host = RuleConstants(
        c2g_bytes_per_s=1e9, g2c_bytes_per_s=1e9, gpu_parameters_per_s=1e10,
        cpu_parameters_per_s=1e5,
    )  # fmt: skip
    fast_host = replace(slow_host, cpu_parameters_per_s=1e10)
    plans = [
        elixir_rule(FACTS, HOST_UPDATES, limits, constants=known)
        for known in (slow_host, fast_host)
    ]
    kept = [sum(c.homes.on_device for c in plan.layout.chunks) for plan in plans]
    assert kept[0] > kept[1]
    assert plans[0].layout.gather_bytes < plans[1].layout.gather_bytes
    for plan in plans:
        for chunk in plan.layout.chunks:
            assert chunk.homes.on_device or chunk.update is Tier.HOST


# Running.

MODEL = gpt(layers=3, width=64, seq=32, batch=2)


MACHINES: dict[str, Machine] = {
    "cpu": cpu(),
    "host": emulated(),
    "host updates": replace(emulated(), host_stream_bytes_per_s=1e10),
    "host and disk": emulated(disk_memory=GIB),
}


@cache
def captured(place: str) -> Facts:
    return facts_of(MODEL.build(), MODEL.batches(1)[0], machine=MACHINES[place])


def planned(policy: str, share: float, place: str, **options: Any) -> tuple[Plan, int]:
    """A policy's plan for the model, with the budget it was made for."""
    facts, machine = captured(place), MACHINES[place]
    budget = int(share * kept_bytes(facts))
    limits = config.limits(config.read_options({"memory": budget, **options}), machine)
    return POLICIES[policy](facts, machine, limits), budget


def trains(plan: Plan, budget: int, **options: Any) -> Plan:
    model, batches = MODEL.build(), MODEL.batches(3)
    run = compare(model, adamw, batches, compile={"plan": plan, "memory": budget, **options})
    assert run.plan is not None and run.stats is not None
    assert run.plan.layout == plan.layout
    assert run.plan.schedules[0] == plan.schedules[0]
    assert run.stats["peak_device_bytes"] <= budget + 4096
    return run.plan


@pytest.mark.parametrize("policy", POLICIES)
def test_trains_on_a_cpu_with_a_disk(policy: str, tmp_path: Path) -> None:
    share = 1.0 if policy == "keep_all" else 0.9
    options = {"machine": MACHINES["cpu"], "disk_memory": GIB}
    plan, budget = planned(policy, share, "cpu", **options)
    assert plan.layout.keeps_all == (policy == "keep_all")
    trains(plan, budget, disk=tmp_path, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", [place for place in MACHINES if place != "cpu"])
def test_trains_on_an_accelerator(policy: str, place: str, tmp_path: Path) -> None:
    share = 1.0 if policy == "keep_all" else 0.9
    options: dict[str, Any] = {"machine": MACHINES[place]}
    if place == "host and disk":
        host = 16 * MIB if policy == "elixir_rule" else MIB // 2
        options |= {"host_memory": host, "disk_memory": GIB, "disk": tmp_path}
    plan, budget = planned(policy, share, place, **options)
    if place == "host and disk" and policy not in ("keep_all", "elixir_rule"):
        assert plan.layout.disk_bytes > 0
    trains(plan, budget, **options)
