"""Recomputation: the planner's account of the rewritten step is what the analyses find there."""

import random
from dataclasses import replace
from itertools import accumulate

import pytest
from graphs import NAMED, Drawn, Example, models
from hypothesis import HealthCheck, given, settings
from steps import MACHINE, captured, copied, planned

from elixir_fx import ops
from elixir_fx.facts import Facts, Role, Storage
from elixir_fx.passes.offload import offload
from elixir_fx.passes.recompute import recompute
from elixir_fx.pipeline import PIPELINE, annotate
from elixir_fx.plan import Offload
from elixir_fx.planner.repeated import BlockedError, Step, Walk, rewritten
from elixir_fx.step import StepGraph


def decision(facts: Facts, seed: int) -> Walk:
    """Some activations dropped and some sent away, as many as can be."""
    draw = random.Random(seed)
    names = [s.name for s in facts.storages if s.role is Role.ACTIVATION and s.nbytes]
    known = Step(facts=facts)
    ways: dict[str, list[str]] = {"drop": [], "away": [], "keep": []}
    for name in names:
        way = "drop" if seed == 0 else draw.choice(sorted(ways))
        ways[way].append(name)
        try:
            Walk(known, ways["drop"], ways["away"])
        except BlockedError:
            ways[way].remove(name)
    return Walk(known, ways["drop"], ways["away"])


def carried_out(step: StepGraph, walk: Walk) -> StepGraph:
    """A copy of the step after the passes, annotated again."""
    plan = planned(step, 1.0)
    facts = rewritten(walk)
    offloads = tuple(
        Offload(
            node=away.storage,
            nbytes=away.nbytes,
            after=facts.nodes[away.leaves],
            before=facts.nodes[away.first],
            last=facts.nodes[away.last],
            offset=0,
            prefetch=None,
        )
        for away in facts.departures
    )
    made = replace(plan.schedules[0], recomputes=walk.recomputes(), offloads=offloads)
    after = copied(step)
    after.layout, after.schedule = plan.layout, made
    changed = replace(plan, schedules=(made,))
    recompute(after, changed)
    offload(after, changed)
    after.module.graph.lint()
    annotate(after, MACHINE, PIPELINE)
    return after


class Places:
    """Positions in a graph without our nodes: what happens at one of them happens behind the node
    before it."""

    def __init__(self, step: StepGraph) -> None:
        ours = [node.target in ops.ALL for node in step.nodes]
        self.of = list(accumulate((not one for one in ours), initial=-1))[1:]
        self.is_ours = ours

    def account(self, storage: Storage) -> tuple[object, ...]:
        readers = tuple(self.of[r] for r in storage.readers if not self.is_ours[r])
        born, dies = self.of[storage.born], self.of[storage.dies]
        return born, dies, storage.nbytes, storage.role, readers


def check(step: StepGraph, seed: int) -> int:
    walk = decision(step.facts(), seed)
    after = carried_out(step, walk)
    expected, found, places = rewritten(walk), after.facts(), Places(after)
    ours = {node.name for node in after.nodes if node.target in ops.ALL}
    assert expected.nodes == tuple(name for name in found.nodes if name not in ours)
    assert expected.backward - places.of[found.backward] in (0, 1)  # perhaps a reload begins it
    assert expected.costs == tuple(cost for cost in found.costs if cost.node not in ours)
    there = sorted((s.born, s.dies, s.nbytes, s.role, s.readers) for s in expected.storages)
    assert there == sorted(places.account(s) for s in found.storages)
    by_path = {
        p.path: (tuple(places.of[r] for r in p.reads), p.gradient and places.of[p.gradient])
        for p in found.parameters
    }
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
