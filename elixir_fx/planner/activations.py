"""Activations: kept, computed again or sent away, chosen with everything else. The planner's door.

A decision is a set of storages that the backward computes again (`repeated.Walk`). Every decision
makes other facts, for which `search` finds the best layout; the best of them is the plan:

    minimise    step_s(search(rewritten(decision)))
    over        decisions: which families of activations are dropped

Storages that equal layers leave are one family and get equal treatment. A family's price is the
seconds of computing one of its storages again, alone, for each byte; families are dropped the
cheapest first, and each on its own once more, as long as that helps (`_Choosing`). First tries
are searched with little effort, the best with all.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from elixir_fx.errors import LayoutError, PlanError
from elixir_fx.facts import Facts, Role, Storage
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Layout, Limits, Plan, Schedule
from elixir_fx.planner import search as settled
from elixir_fx.planner.footprint import live_peak_bytes
from elixir_fx.planner.repeated import BlockedError, Step, Walk, rewritten

SMALL = 1 / 500  # of all activations: a storage below is not worth a decision
TRIED = 600  # chunks of the drafts of a first try
FINALISTS = 2  # decisions that are searched with all effort

Decision = frozenset[str]  # storages that are dropped
KEEP_ALL: Decision = frozenset()


def decided(facts: Facts, schedule: Schedule) -> Facts:
    """The facts of a step as a schedule rewrites it. PlanError if it cannot be carried out."""
    if not schedule.recomputes:
        return facts
    step = Step(facts=facts)
    repeated = {entry.node for entry in schedule.recomputes}
    dropped = [s.name for s in facts.storages if s.name in repeated and s.role is Role.ACTIVATION]
    try:
        walk = Walk(step, dropped)
    except BlockedError as error:
        raise PlanError(f"the plan drops what cannot be computed again: {error}") from None
    if walk.recomputes() != schedule.recomputes:
        raise PlanError(
            f"what the plan computes again is not what dropping {len(dropped)} activations takes: "
            "it was edited, or made for another model"
        )
    return rewritten(walk)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Activations of equal layers. `again_s`: seconds of computing one of them again, alone."""

    names: tuple[str, ...]
    nbytes: int
    again_s: float

    @property
    def price(self) -> float:
        return self.again_s / self.nbytes


def families(step: Step) -> tuple[Family, ...]:
    """What may be dropped, the cheapest first."""
    facts = step.facts
    activations = [s for s in facts.storages if s.role is Role.ACTIVATION and s.nbytes]
    least = SMALL * sum(s.nbytes for s in activations)
    alike: dict[tuple[object, ...], list[Storage]] = {}
    for storage in activations:
        key = (_numberless(storage.name), _numberless(storage.path), storage.nbytes)
        alike.setdefault(key, []).append(storage)
    found = []
    for members in alike.values():
        if sum(s.nbytes for s in members) < least:
            continue
        prices = {s.name: price for s in members if (price := _again_s(step, s)) is not None}
        if prices:
            found.append(
                Family(
                    names=tuple(prices),
                    nbytes=members[0].nbytes,
                    again_s=sum(prices.values()) / len(prices),
                )
            )
    return tuple(sorted(found, key=lambda family: (family.price, family.names)))


def _numberless(name: str) -> str:
    return re.sub(r"_?\d+", "", name)


def _again_s(step: Step, storage: Storage) -> float | None:
    try:
        return Walk(step, [storage.name]).repeated_s
    except BlockedError:
        return None


@dataclass
class Activations:
    """The decisions about one step, and what each makes of it."""

    facts: Facts
    _known: dict[Decision, tuple[Walk, Facts] | None] = field(default_factory=dict)

    @cached_property
    def step(self) -> Step:
        return Step(facts=self.facts)

    @cached_property
    def families(self) -> tuple[Family, ...]:
        if not self.facts.flow or not self.facts.trains:
            return ()
        return families(self.step)

    def of(self, decision: Decision) -> tuple[Walk | None, Facts] | None:
        """The walk and the facts of a decision; None if it cannot be."""
        if not decision:
            return None, self.facts
        if decision not in self._known:
            try:
                walk = Walk(self.step, sorted(decision))
                self._known[decision] = (walk, rewritten(walk))
            except BlockedError:
                self._known[decision] = None
        return self._known[decision]

    def ladder(self) -> Iterator[Decision]:
        """More and more families, the cheapest first; none that leaves the peak as it is."""
        dropped, least = KEEP_ALL, live_peak_bytes(self.facts)
        for family in self.families:
            more = dropped | frozenset(family.names)
            made = self.of(more)
            if made is None:
                continue
            peak = live_peak_bytes(made[1])
            if peak < least:
                dropped, least = more, peak
                yield dropped

    @cached_property
    def rungs(self) -> tuple[Decision, ...]:
        """All decisions of the ladder, the first keeps everything."""
        return (KEEP_ALL, *self.ladder())

    def thriftiest(self) -> Decision:
        return self.rungs[-1]

    def plan(self, decision: Decision, plan: Plan) -> Plan:
        """The plan of a decision's facts, with what its passes carry out."""
        made = self.of(decision)
        assert made is not None
        walk, _ = made
        if walk is None:
            return plan
        first, *rest = plan.schedules
        return replace(plan, schedules=(replace(first, recomputes=walk.recomputes()), *rest))


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
        made = settled.schedule(settled_facts, machine, limits, layout, held_bytes, micro_batches)
        return made if walk is None else replace(made, recomputes=walk.recomputes())

    if like is not None:
        made = of(None, decided(facts, like))
        return replace(made, recomputes=like.recomputes)
    try:
        return of(None, facts)
    except LayoutError:
        known = Activations(facts)
        for decision in known.rungs[1:]:
            found = known.of(decision)
            assert found is not None
            try:
                return of(*found)
            except LayoutError as still:
                error = still
        raise error from None


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
    made = known.of(known.thriftiest())
    assert made is not None
    return settled.smallest(made[1], machine, limits, pins, group)


@dataclass
class _Choosing:
    """One search over decisions."""

    activations: Activations
    machine: Machine
    limits: Limits
    pins: Mapping[str, Tier]
    group: Group
    micro_batches: int
    tried: dict[Decision, Plan | None] = field(default_factory=dict)

    def best(self) -> Plan:
        first = self._plan(KEEP_ALL, settled.EFFORT, fails=len(self.activations.rungs) == 1)
        if first is not None and not self._may_gain(first):
            return first
        for decision in self.activations.rungs[1:]:
            self._try(decision)
        self._improve()
        found = [first] if first is not None else []
        for decision in self._ranked()[:FINALISTS]:
            plan = self._plan(decision, settled.EFFORT)
            found += [] if plan is None else [plan]
        if not found:
            return self._refused()
        return min(found, key=lambda plan: plan.forecast.step_s)

    def _may_gain(self, plan: Plan) -> bool:
        """Whether the step waits for anything at all."""
        return len(self.activations.rungs) > 1 and plan.forecast.gap > 1e-4

    def _refused(self) -> Plan:
        """The refusal, with the least memory of all."""
        plan = self._plan(self.activations.thriftiest(), settled.EFFORT, fails=True)
        assert plan is not None
        return plan

    def _ranked(self) -> list[Decision]:
        worked = {d: p.forecast.step_s for d, p in self.tried.items() if p is not None and d}
        return sorted(worked, key=lambda d: (worked[d], len(d), sorted(d)))

    def _improve(self) -> None:
        """Take families in and out of the best decision, one at a time, while that helps."""
        ranked = self._ranked()
        if not ranked:
            return
        best = ranked[0]
        for family in self.activations.families:
            names = frozenset(family.names)
            other = best - names if names <= best else best | names
            if other:
                self._try(other)
            if self._ranked()[0] == other:
                best = other

    def _try(self, decision: Decision) -> None:
        if decision not in self.tried:
            self.tried[decision] = self._plan(decision, TRIED)

    def _plan(self, decision: Decision, effort: int, *, fails: bool = False) -> Plan | None:
        made = self.activations.of(decision)
        if made is None:
            return None
        try:
            plan = settled.search(
                made[1],
                self.machine,
                self.limits,
                self.pins,
                self.group,
                self.micro_batches,
                effort=effort,
            )
        except PlanError:
            if fails:
                raise
            return None
        return self.activations.plan(decision, plan)
