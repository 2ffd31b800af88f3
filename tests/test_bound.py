import pytest
from graphs_facts import accelerator, cpu, gpt
from scipy.optimize import linprog

from elixir_fx.machine import Tier
from elixir_fx.plan import Limits
from elixir_fx.planner.bound import lower_bound_s, pair_s, update_compute_s

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
    bound = lower_bound_s(facts, machine, Limits(device=0, disk=1 << 40))
    assert bound >= facts.compute_s + 16 * elements / 1e9


def test_frozen_parameters_are_read_and_never_written():
    facts = gpt(2, 512, 100, 4, frozen=2, flops_per_s=1e18)
    slow_writes = cpu(1e9, 1.0, 1e9)
    frozen = sum(p.nbytes for p in facts.parameters if not p.trainable)
    trained = 4 * sum(p.nbytes for p in facts.parameters if p.trainable)
    limits = Limits(device=facts.buffer_bytes + trained + 100, disk=1 << 40)
    assert lower_bound_s(facts, slow_writes, limits) < 1
    none = Limits(device=facts.buffer_bytes + trained - MIB, disk=1 << 40)
    assert lower_bound_s(facts, slow_writes, none) > 1e5
    assert frozen > 0


def test_the_disk_sees_only_what_device_and_host_cannot_hold():
    facts = gpt(2, 256, 100, 4, flops_per_s=1e18)
    machine = accelerator()
    small = Limits(device=MIB, host=MIB, disk=1 << 40)
    large = Limits(device=MIB, host=1 << 40, disk=1 << 40)
    beyond = [lower_bound_s(facts, machine, x) - facts.compute_s for x in (small, large)]
    assert beyond[0] > 3 * beyond[1] > 0


def test_more_memory_never_raises_the_bound():
    facts = gpt(3, 128, 500, 16, flops_per_s=1e14)
    bounds = [
        lower_bound_s(facts, cpu(), Limits(device=n * MIB, disk=1 << 40)) for n in range(0, 40, 2)
    ]
    assert bounds == sorted(bounds, reverse=True)
