"""Why a plan is as it is: the account of its memory against the plan itself."""

from dataclasses import replace

import pytest
from graphs_facts import accelerator, cpu, gpt
from random_steps import Instance, crowded, instance

from elixir_fx.errors import PlanError
from elixir_fx.machine import Tier
from elixir_fx.plan import ONE_RANK, Group, Limits, Plan
from elixir_fx.planner import explained, explanation, search, smallest

HUGE = 1 << 40
GIB = 1 << 30


def check(facts, machine, limits, group=ONE_RANK, micro_batches=1) -> Plan:
    """The explained plan: bytes add up to the peak, losses are none below zero, other budgets are
    as far from this one on either side; it is saved whole."""
    plan = search(facts, machine, limits, None, group, micro_batches)
    found = explained(facts, machine, limits, {}, group, micro_batches, plan)
    assert found == plan and not plan.worth  # a reason is no decision
    assert sum(worth.nbytes for worth in found.worth) == plan.forecast.peak_device_bytes
    assert all(worth.nbytes > 0 for worth in found.worth)
    assert all(worth.lost_s is None or worth.lost_s >= 0 for worth in found.worth)
    less, more = found.what_if
    assert less.limit_bytes < limits.device < more.limit_bytes
    assert limits.device - less.limit_bytes == more.limit_bytes - limits.device
    read = Plan.from_json(found.to_json())
    assert (read, read.worth, read.what_if) == (found, found.worth, found.what_if)
    assert read.explain() == found.explain()
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_any_plan_is_accounted_for(seed: int, micro_batches: int) -> None:
    problem = (instance, crowded)[seed % 2](seed)
    check(problem.facts, problem.machine, problem.limits, micro_batches=micro_batches)


def searched_s(problem: Instance, device: int, micro_batches: int) -> float | None:
    """Seconds of a step under another budget; None if there is no plan."""
    limits = replace(problem.limits, device=device)
    try:
        plan = search(problem.facts, problem.machine, limits, micro_batches=micro_batches)
    except PlanError:
        return None
    return plan.forecast.step_s


@pytest.mark.parametrize(("seed", "micro_batches"), [(0, 1), (1, 2)])
def test_other_budgets_are_what_the_search_says_of_them(seed: int, micro_batches: int) -> None:
    problem = (instance, crowded)[seed % 2](seed)
    found = check(problem.facts, problem.machine, problem.limits, micro_batches=micro_batches)
    for other in found.what_if:
        assert other.step_s == searched_s(problem, other.limit_bytes, micro_batches)


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_accounts_for_its_share(shared: bool) -> None:
    facts, group = gpt(3, 96, 700, 32), Group(ranks=2, shared=shared)
    machine = cpu().with_peers()
    least = smallest(facts, machine, Limits(device=1, disk=HUGE), group=group)
    for device in (least, int(1.5 * least), HUGE):
        check(facts, machine, Limits(device=device, disk=HUGE), group)


def test_parts_at_home_buy_what_moving_them_would_cost() -> None:
    facts = gpt(3, 96, 700, 32, flops_per_s=1e13)
    machine = accelerator()
    least = smallest(facts, machine, Limits(device=1, host=HUGE))
    found = check(facts, machine, Limits(device=2 * least, host=HUGE))
    at_home = [worth for worth in found.worth if worth.purpose.endswith("at home")]
    assert at_home and any(worth.lost_s for worth in at_home)
    # A byte at home saves at least one crossing of a link in the update, if that is exposed.
    assert found.forecast.exposed_s > 0


def test_large_budgets_are_varied_by_a_gib_and_small_ones_by_a_tenth() -> None:
    facts = gpt(1, 48, 16, 4)
    for device, step in ((8 * GIB, GIB), (GIB, GIB // 10)):
        limits = Limits(device=device, disk=HUGE)
        less, more = check(facts, cpu(), limits).what_if
        assert (less.limit_bytes, more.limit_bytes) == (device - step, device + step)


def test_a_plan_that_nobody_explained_says_what_it_knows() -> None:
    facts = gpt(3, 96, 700, 32)
    least = smallest(facts, cpu(), Limits(device=1, disk=HUGE))
    plan = search(facts, cpu(), Limits(device=2 * least, disk=HUGE))
    text = plan.explain()
    assert "elixir_fx.plan(...).explain() also says" in text and "without it" not in text
    assert f"gap {plan.forecast.gap:.1%}" in text
    told = dict(plan._held())
    assert sum(told.values()) == plan.forecast.peak_device_bytes
    kept = [chunk for chunk in plan.layout.chunks if chunk.homes.parameters is Tier.DEVICE]
    by_path = {p.path: p.nbytes for p in facts.parameters}
    assert told["parameters at home"] == sum(by_path[s.path] for c in kept for s in c.slices)


def test_reasons_are_worked_out_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = gpt(1, 48, 16, 4)
    least = smallest(facts, cpu(), Limits(device=1, disk=HUGE))
    limits = Limits(device=least, disk=HUGE)
    searches = []

    def counted(*given):
        searches.append(given)
        return search(*given)

    monkeypatch.setattr(explanation, "search", counted)
    plan = explained(facts, cpu(), limits, {}, ONE_RANK, 1, search(facts, cpu(), limits))
    before = Plan.from_json(plan.to_json())
    assert not searches and not before.worth and not before.what_if
    text = plan.explain()
    assert len(searches) == 2 and plan.explain() == text
    assert Plan.from_json(plan.to_json()).explain() == text != before.explain()
    assert len(searches) == 2


def test_pins_and_no_other_tier_leave_nothing_to_lose() -> None:
    facts = gpt(1, 48, 16, 4)
    found = check(facts, cpu(), Limits(device=GIB))
    assert {worth.lost_s for worth in found.worth} == {None}
    assert "needed" in found.explain() and "+" not in found.explain().split("with another")[0]
