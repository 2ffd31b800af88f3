"""Recomputation: the planner's account of the rewritten step is what the analyses find there."""

import random
from dataclasses import replace

import pytest
from graphs import NAMED, Drawn, Example, models
from hypothesis import HealthCheck, given, settings
from steps import MACHINE, captured, copied, planned

from elixir_fx.facts import Facts, Role, Storage
from elixir_fx.passes.recompute import recompute
from elixir_fx.pipeline import PIPELINE, annotate
from elixir_fx.planner.repeated import BlockedError, Step, Walk, rewritten
from elixir_fx.step import StepGraph


def decision(facts: Facts, seed: int) -> Walk:
    """Some activations dropped, as many as can be."""
    draw = random.Random(seed)
    names = [s.name for s in facts.storages if s.role is Role.ACTIVATION]
    chosen = [name for name in names if draw.random() < (1.0 if seed == 0 else 0.5)]
    known = Step(facts=facts)
    dropped: list[str] = []
    for name in chosen:
        try:
            Walk(known, [*dropped, name])
        except BlockedError:
            continue
        dropped.append(name)
    return Walk(known, dropped)


def carried_out(step: StepGraph, walk: Walk) -> StepGraph:
    """A copy of the step after the pass, annotated again."""
    plan = planned(step, 1.0)
    made = replace(plan.schedules[0], recomputes=walk.recomputes())
    after = copied(step)
    after.layout, after.schedule = plan.layout, made
    recompute(after, replace(plan, schedules=(made,)))
    after.module.graph.lint()
    annotate(after, MACHINE, PIPELINE)
    return after


def account(storage: Storage) -> tuple[object, ...]:
    return storage.born, storage.dies, storage.nbytes, storage.role, storage.readers


def check(step: StepGraph, seed: int) -> int:
    walk = decision(step.facts(), seed)
    expected, found = rewritten(walk), carried_out(step, walk).facts()
    assert expected.nodes == found.nodes
    assert expected.backward == found.backward
    assert expected.costs == found.costs
    assert sorted(map(account, expected.storages)) == sorted(map(account, found.storages))
    by_path = {p.path: (p.reads, p.gradient) for p in found.parameters}
    assert {p.path: (p.reads, p.gradient) for p in expected.parameters} == by_path
    return len(walk.before)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(NAMED))
def test_facts_of_the_rewritten_step(name: str, seed: int) -> None:
    check(captured(NAMED[name]), seed)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_facts_of_random_models(drawn: Drawn) -> None:
    example: Example = drawn
    step = captured(example)
    if step.trains:
        check(step, 0)
        check(step, 1)
