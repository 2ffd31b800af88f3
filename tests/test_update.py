"""The update and the graph played apart, and micro-batches, against steps played whole."""

from dataclasses import replace

import pytest
from graphs_facts import gpt
from random_steps import crowded, instance

from elixir_fx.errors import PlanError
from elixir_fx.machine import Tier
from elixir_fx.plan import Homes, Layout
from elixir_fx.planner import search
from elixir_fx.planner.explanation import stays_of
from elixir_fx.planner.footprint import Footprint
from elixir_fx.planner.forecast import Player
from elixir_fx.planner.pack import pack

SEEDS = range(12)


def planned(seed: int, micro_batches: int = 1):
    """Players of a random step's plan with so many micro-batches, its layout and stays; None
    where there is no plan."""
    problem = (instance, crowded)[seed % 2](seed)
    try:
        plan = search(problem.facts, problem.machine, problem.limits, micro_batches=micro_batches)
    except PlanError:
        return None
    footprint = Footprint(problem.facts, plan.layout.chunks)
    players = [Player.of(problem.facts, problem.machine, footprint, n) for n in (1, 2, 3)]
    return plan, players, plan.layout, stays_of(plan, problem.facts)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_step_is_its_graphs_and_its_update(seed: int, micro_batches: int) -> None:
    found = planned(seed, micro_batches)
    if found is None:
        pytest.skip("no plan")
    plan, players, layout, stays = found
    whole = players[micro_batches - 1].play(layout, stays)
    assert whole.step_s == pytest.approx(plan.forecast.step_s, rel=1e-9)
    apart_s = players[micro_batches - 1].graph_s(layout, stays)
    apart_s += players[micro_batches - 1].update_s(layout)
    assert whole.step_s == pytest.approx(apart_s, rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_more_micro_batches_take_their_compute_and_gather_no_more(seed: int) -> None:
    found = planned(seed)
    if found is None:
        pytest.skip("no plan")
    _, players, layout, stays = found
    one, two, three = (player.play(layout, stays) for player in players)
    compute_s = players[0].facts.compute_s
    assert one.compute_s >= compute_s
    for many, count in ((two, 2), (three, 3)):
        assert many.compute_s == pytest.approx(one.compute_s + (count - 1) * compute_s)
        assert many.step_s >= count * compute_s
        assert many.gathered_bytes <= count * one.gathered_bytes
        assert many.reduced_bytes == count * one.reduced_bytes
        assert many.hits + many.misses == count * (one.hits + one.misses)
    # From the second on all are the same: nothing depends on how many there were.
    assert three.gathered_bytes - two.gathered_bytes == two.gathered_bytes - one.gathered_bytes


def test_units_of_the_host_compute_at_its_rate_and_move_nothing() -> None:
    facts = gpt(2, 96, 700, 16)
    machine = replace(instance(0).machine, device="cuda", host_stream_bytes_per_s=1e9)
    there = Homes(parameters=Tier.HOST, gradients=Tier.HOST, states=Tier.HOST)
    bare = pack(facts, 1 << 20, {})
    seconds = {}
    for place in (Tier.DEVICE, Tier.HOST):
        homes = Homes() if place is Tier.DEVICE else there
        chunks = tuple(replace(chunk, homes=homes, update=place) for chunk in bare)
        layout = Layout(
            chunks=chunks,
            gather_bytes=0,
            gradient_blocks=0,
            gradient_block_bytes=0,
            update_numel=1 << 30,
            arena_bytes=0,
            host_bytes=0,
            disk_bytes=0,
        )
        player = Player.of(facts, machine, Footprint(facts, chunks))
        seconds[place] = player.update_s(layout) * machine.update_bytes_per_s(place)
    traffic = sum(p.span for p in facts.parameters) * facts.optimizer.read_bytes
    assert seconds[Tier.HOST] == pytest.approx(traffic)
    assert seconds[Tier.DEVICE] == pytest.approx(traffic)
