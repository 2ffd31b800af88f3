"""Activations: kept, computed again or sent away, chosen with everything else. The planner's door.

Every decision makes other facts, for which `search` finds the best layout; the best of them is the
plan:

    minimise    step_s(search(rewritten(decision)))
    over        decisions: what becomes of each family of activations   decisions.Activations

Searching all is out of the question: `estimate` guesses the most promising ones. These are
rewritten and estimated once more, and the best of them searched. What the model's own checkpoints
compute again is one of the guesses. All is bounded by counts.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from elixir_fx.errors import LayoutError, PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Layout, Limits, Plan, Schedule
from elixir_fx.planner.bound import (
    PROVED,
    simple_bound_s,
)
from elixir_fx.planner.decisions import KEEP_ALL, Activations, Decision, decided
from elixir_fx.planner.estimate import GAIN, Estimate, may_send
from elixir_fx.planner.relaxation import relax
from elixir_fx.planner.repeated import Walk
from elixir_fx.planner.search import schedule as settled_schedule
from elixir_fx.planner.search import search as settled_search
from elixir_fx.planner.search import smallest as settled_smallest

GUESSES = 4  # decisions that are looked at closely,
FINALISTS = 2  # and of these searched


def search(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    pins: Mapping[str, Tier] | None = None,
    group: Group = ONE_RANK,
    micro_batches: int = 1,
) -> Plan:
    """The best plan found for a step under `limits` of each rank, by the forecast's step time.

    `pins` fix the home of parameters, by parameter or module path; a step has `micro_batches`
    forwards and backwards. PlanError if no plan meets the limits, with the least device memory
    that would do.
    """
    choosing = _Choosing(Activations(facts), machine, limits, pins or {}, group, micro_batches)
    return choosing.best()


def schedule(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    layout: Layout,
    held_bytes: int = 0,
    micro_batches: int = 1,
    like: Schedule | None = None,
) -> Schedule:
    """When chunks of an existing layout move in another captured graph, and what that computes
    again: no more than it takes to fit, or what `like` says, a schedule of the same graph.

    `held_bytes` are activations of other graphs that are there while it runs. PlanError if the
    graph reads parameters that the layout does not have, LayoutError if it does not fit.
    """

    def of(walk: Walk | None, settled_facts: Facts) -> Schedule:
        made = settled_schedule(settled_facts, machine, limits, layout, held_bytes, micro_batches)
        return made if walk is None else replace(made, recomputes=walk.recomputes())

    if like is not None:
        made = of(None, decided(facts, like))
        return replace(made, recomputes=like.recomputes)
    known = Activations(facts)
    refusal: LayoutError | None = None
    for decision in chain([KEEP_ALL], known.ladder()):
        found = known.of(decision)
        assert found is not None
        try:
            return of(*found)
        except LayoutError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def smallest(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    pins: Mapping[str, Tier] | None = None,
    group: Group = ONE_RANK,
) -> int:
    """The least `limits.device` that `search` accepts, in bytes, the other limits as given.

    The least over the layouts that the search knows. PlanError where no device memory
    would help: pinned homes that their tier cannot hold.
    """
    known = Activations(facts)
    needs, refusal = [], None
    for decision in known.thrifty(may_send(machine, limits, group)):
        made = known.of(decision)
        assert made is not None
        try:
            needs.append(settled_smallest(made[1], machine, limits, pins, group))
        except PlanError as error:
            refusal = refusal or error
    if not needs and refusal is not None:
        raise refusal
    return min(needs)


@dataclass
class _Choosing:
    """One search over decisions."""

    activations: Activations
    machine: Machine
    limits: Limits
    pins: Mapping[str, Tier]
    group: Group
    micro_batches: int

    def best(self) -> Plan:
        if not self.activations.families:
            return self._plan(KEEP_ALL)
        first = self._try(KEEP_ALL)
        if first is None:
            self._check_smallest()
        elif first.forecast.step_s <= self._bound_s * (1 + PROVED):
            return self._bounded(first)
        tried = [first, *map(self._try, self._promising()[:FINALISTS])]
        found = [plan for plan in tried if plan is not None]
        if not found:
            may = may_send(self.machine, self.limits, self.group)
            found = [plan for plan in map(self._try, self.activations.thrifty(may)) if plan]
        return self._bounded(min(found, key=lambda plan: plan.forecast.step_s))

    def _check_smallest(self) -> None:
        """PlanError if the device has less than `smallest`."""
        may, needs = may_send(self.machine, self.limits, self.group), {}
        for decision in self.activations.thrifty(may):
            made = self.activations.of(decision)
            assert made is not None
            with suppress(PlanError):
                needs[decision] = settled_smallest(
                    made[1], self.machine, self.limits, self.pins, self.group
                )
        if not needs or min(needs.values()) > self.limits.device:
            least = min(needs, key=lambda d: (needs[d], d.order)) if needs else KEEP_ALL
            self._plan(least)  # says why not
            raise AssertionError("a plan under less than the smallest budget")

    def _try(self, decision: Decision) -> Plan | None:
        try:
            return self._plan(decision)
        except PlanError:
            return None

    @cached_property
    def _bound_s(self) -> float:
        """Seconds that no plan can beat, whatever it decides about activations."""
        facts, given = self.activations.facts, (self.machine, self.limits, self.group)
        simple_s = simple_bound_s(facts, *given, self.micro_batches)
        relaxed = relax(facts, *given, self.micro_batches, self.activations.spares)
        return max(simple_s, relaxed.step_s)

    def _bounded(self, plan: Plan) -> Plan:
        first, *rest = plan.schedules
        known = replace(first.forecast, lower_bound_s=self._bound_s)
        return replace(plan, schedules=(replace(first, forecast=known), *rest))

    def _plan(self, decision: Decision) -> Plan:
        made = self.activations.of(decision)
        if made is None:
            raise PlanError("these activations cannot be computed again")
        plan = settled_search(
            made[1], self.machine, self.limits, self.pins, self.group, self.micro_batches
        )
        return self.activations.plan(decision, plan)

    def _promising(self) -> list[Decision]:
        """Decisions in the order of their promise, by what they really take."""
        estimate = Estimate(
            activations=self.activations,
            machine=self.machine,
            limits=self.limits,
            group=self.group,
            micro_batches=self.micro_batches,
        )
        guesses = [self.activations.hinted, *estimate.guesses()[:GUESSES]]
        exact = {d: estimate.exact_s(d) for d in guesses if d != KEEP_ALL}
        worth = estimate.exact_s(KEEP_ALL) * (1 - GAIN)
        found = (d for d in exact if exact[d] < min(worth, math.inf))
        return sorted(found, key=lambda d: (exact[d], d.order))
