"""Homes completed, and the table's bounds, against steps played."""

import pytest
from oracle import exact
from random_steps import instance

from elixir_fx.plan import Plan
from elixir_fx.planner.check import check_plan
from elixir_fx.planner.polish import PLAYED, Option
from elixir_fx.planner.space import Space, make_schedule

SEEDS = range(8)


def space_of(seed: int) -> Space:
    problem = instance(seed)
    return Space(facts=problem.facts, machine=problem.machine, limits=problem.limits, pins={})


@pytest.mark.parametrize("seed", SEEDS)
def test_completed_homes_are_plans_that_no_bound_forbids(seed: int) -> None:
    space, best = space_of(seed), exact(instance(seed))
    for size in space.chunk_sizes[:2]:
        table, completer, player = space.tables[size], space.completers[size], space.players[size]
        rows = table.all()
        rows = rows[:: max(1, len(rows) // 30)]
        for row, bound_s in zip(rows, table.bounds_s(rows), strict=True):
            completed = completer.complete(table.chosen(row))
            if completed is None:
                continue
            assert completer.complete(table.chosen(row), completed.step_s) is None
            assert completer.complete(table.chosen(row), completed.step_s * 1.00001) == completed
            layout, stays = completed.layout, completed.stays
            assert player.least_update_s(layout) <= player.update_s(layout) * (1 + PLAYED)
            assert [Option(c.homes, c.update) for c in layout.chunks] == table.chosen(row)
            played_s = player.play(layout, stays).step_s
            assert completed.step_s == pytest.approx(played_s, rel=1e-9)
            assert bound_s <= played_s * (1 + 1e-9)
            assert best is not None and best.step_s <= played_s * (1 + 1e-9)
            made = make_schedule(player, space.bound, layout, stays)
            plan = Plan(machine="", limits=space.limits, layout=layout, schedules=(made,))
            check_plan(plan, space.facts, space.limits)


def test_neighbours_differ_in_as_many_chunks_and_all_are_there() -> None:
    space = space_of(3)
    table = space.tables[space.chunk_sizes[0]]
    start = [options[0] for options in table.options]
    for changed in (1, 2):
        rows = table.neighbours(start, changed)
        differences = [(row != 0).sum() for row in rows]
        assert max(differences) == changed and min(differences) == 0
        assert len({tuple(row) for row in rows}) == len(rows) <= table.neighbour_count(changed)
    ones = sum(len(options) - 1 for options in table.options)
    assert len(table.neighbours(start, 1)) == ones + 1
    assert len(table.all()) == table.count
