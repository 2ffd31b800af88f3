from dataclasses import replace

import pytest
from graphs_facts import ADAMW, accelerator, cpu, gpt
from scipy.optimize import linprog

from elixir_fx.errors import PlanError
from elixir_fx.machine import Tier
from elixir_fx.plan import Group, Limits
from elixir_fx.planner import search, smallest
from elixir_fx.planner.bound import lower_bound_s, pair_s, simple_bound_s, update_compute_s
from elixir_fx.planner.footprint import live_peak_bytes

MIB = 1 << 20


@pytest.mark.parametrize("shared", [1.0e9, 1.9e9, 2.0e9, 2.6e9, 4.0e9])
@pytest.mark.parametrize(("reads", "writes"), [(0, 0), (10**9, 0), (10**9, 3 * 10**9), (5, 10**8)])
def test_the_pair_formula_solves_its_linear_program(shared, reads, writes):
    machine = cpu(1.8e9, 2.2e9, shared)
    both_in, both_out = min(1.8e9, shared * 0.45), min(2.2e9, shared * 0.55)
    rates = [[-1.8e9, 0, -both_in], [0, -2.2e9, -both_out]]
    solved = linprog([1, 1, 1], A_ub=rates, b_ub=[-reads, -writes])
    assert pair_s(machine, Tier.DEVICE, Tier.DISK, reads, writes) == pytest.approx(
        solved.fun, rel=1e-6, abs=1e-9
    )


def test_enough_memory_leaves_compute_alone():
    facts = gpt(2, 64, 100, 16)
    compute = facts.compute_s + update_compute_s(facts, cpu())
    assert lower_bound_s(facts, cpu(), Limits(device=1 << 40, disk=1 << 40)) == compute


def test_no_memory_moves_every_byte_of_training_state():
    facts = gpt(2, 64, 100, 16, flops_per_s=1e15)
    machine = cpu(1e9, 1e9, 2e9)
    elements = sum(p.span for p in facts.parameters)
    bound = simple_bound_s(facts, machine, Limits(device=0, disk=1 << 40))
    assert bound >= facts.compute_s + 16 * elements / 1e9


def test_frozen_parameters_are_read_and_never_written():
    facts = gpt(2, 512, 100, 4, frozen=2, flops_per_s=1e18)
    slow_writes = cpu(1e9, 1.0, 1e9)
    frozen = sum(p.nbytes for p in facts.parameters if not p.trainable)
    trained = 4 * sum(p.nbytes for p in facts.parameters if p.trainable)
    limits = Limits(device=facts.buffer_bytes + trained + 100, disk=1 << 40)
    assert simple_bound_s(facts, slow_writes, limits) < 1
    none = Limits(device=facts.buffer_bytes + trained - MIB, disk=1 << 40)
    assert simple_bound_s(facts, slow_writes, none) > 1e5
    assert frozen > 0


def test_the_disk_sees_only_what_device_and_host_cannot_hold():
    facts = gpt(2, 256, 100, 4, flops_per_s=1e18)
    machine = accelerator()
    small = Limits(device=MIB, host=MIB, disk=1 << 40)
    large = Limits(device=MIB, host=1 << 40, disk=1 << 40)
    beyond = [simple_bound_s(facts, machine, x) - facts.compute_s for x in (small, large)]
    assert beyond[0] > 3 * beyond[1] > 0


def test_where_no_plan_fits_the_bound_is_infinite():
    facts = gpt(2, 256, 100, 4)
    whole = 4 * sum(p.nbytes for p in facts.parameters)
    for machine, limits in (
        (cpu(), Limits(device=0, disk=1 << 40)),
        (accelerator(), Limits(device=live_peak_bytes(facts) // 2, host=1 << 40)),
        (accelerator(), Limits(device=whole // 2, host=whole // 4)),
    ):
        for micro_batches in (1, 3):
            found = lower_bound_s(facts, machine, limits, micro_batches=micro_batches)
            assert found == float("inf")
        with pytest.raises(PlanError):
            search(facts, machine, limits)


def test_more_memory_never_raises_the_bound():
    facts = gpt(3, 128, 500, 16, flops_per_s=1e14)
    least = smallest(facts, cpu(), Limits(device=0, disk=1 << 40))
    bounds = [
        lower_bound_s(facts, cpu(), Limits(device=least + n * MIB, disk=1 << 40))
        for n in range(0, 40, 2)
    ]
    assert bounds == sorted(bounds, reverse=True)


def test_one_rank_of_many_moves_and_updates_its_part():
    """With no memory at all, and peers that cost nothing."""
    facts = gpt(2, 256, 100, 4, flops_per_s=1e18)
    limits = Limits(device=0, disk=1 << 40)
    one = simple_bound_s(facts, cpu(), limits)
    for ranks in (2, 8, 64):
        group = Group(ranks=ranks, shared=True)
        bound = simple_bound_s(facts, cpu().with_peers(), limits, group)
        assert bound - facts.compute_s == pytest.approx(
            (one - facts.compute_s) / ranks, rel=0.02, abs=1e-6
        )


def test_memory_of_all_ranks_together_counts():
    facts = gpt(2, 256, 100, 4, flops_per_s=1e18)
    whole = 16 * sum(p.span for p in facts.parameters)
    for ranks in (2, 8):
        group = Group(ranks=ranks, shared=True)
        update_s = update_compute_s(facts, cpu()) / ranks
        enough = Limits(device=facts.buffer_bytes + whole // ranks + 1, disk=1 << 40)
        assert simple_bound_s(facts, cpu(), enough, group) == facts.compute_s + update_s
        less = replace(enough, device=enough.device - MIB)
        assert simple_bound_s(facts, cpu(), less, group) >= facts.compute_s + MIB / 2.2e9


def slow_peers():
    """Other ranks at 1 MB/s, in both directions together."""
    links = cpu().with_peers().links
    slow = (replace(x, bytes_per_s=1e6, shared_bytes_per_s=1e6) for x in links[2:])
    return replace(cpu(), links=(*links[:2], *slow))


def test_what_ranks_send_each_other_bounds_the_step():
    facts = gpt(2, 256, 100, 4, flops_per_s=1e18)
    enough = Limits(device=1 << 40)
    trained = sum(p.nbytes for p in facts.parameters)
    machine = slow_peers()
    for ranks in (2, 4, 64):
        bound = lower_bound_s(facts, machine, enough, Group(ranks=ranks))
        wanted = 2 * trained * (ranks - 1) / ranks / 1e6
        assert bound == pytest.approx(wanted, rel=1e-3)
        assert lower_bound_s(facts, machine, enough, Group(ranks=ranks, shared=True)) < wanted / 10


def test_frozen_parameters_need_not_be_sent():
    some = gpt(2, 256, 100, 4, frozen=2, flops_per_s=1e18)
    trained = sum(p.nbytes for p in some.parameters if p.trainable)
    bound = lower_bound_s(some, slow_peers(), Limits(device=1 << 40), Group(ranks=2))
    assert bound == pytest.approx(trained / 1e6, rel=1e-3)


def test_an_optimizer_that_needs_parameters_whole_is_no_quicker_on_many_ranks():
    facts = gpt(2, 64, 100, 16, optimizer=replace(ADAMW, elementwise=False))
    enough = Limits(device=1 << 40)
    many = lower_bound_s(facts, cpu().with_peers(), enough, Group(ranks=8, shared=True))
    assert many == lower_bound_s(facts, cpu(), enough)


@pytest.mark.parametrize("shared", [False, True])
def test_of_any_ranks_more_memory_never_raises_the_bound(shared):
    facts = gpt(3, 128, 500, 16, flops_per_s=1e14)
    group = Group(ranks=3, shared=shared)
    machine = cpu().with_peers()
    least = smallest(facts, machine, Limits(device=0, disk=1 << 40), group=group)
    bounds = [
        lower_bound_s(facts, machine, Limits(device=least + (n << 19), disk=1 << 40), group)
        for n in range(0, 40, 2)
    ]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[-1]
