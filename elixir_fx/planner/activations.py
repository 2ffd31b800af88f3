"""Activations: kept, computed again or sent away, chosen with everything else. The planner's door.

A decision is two sets of storages: those that the backward computes again, and those that leave
the device in between (`repeated.Walk`). Every decision makes other facts, for which `search` finds
the best layout; the best of them is the plan:

    minimise    step_s(search(rewritten(decision)))
    over        decisions: what becomes of each family of activations

Storages that equal layers leave are one family and get equal treatment, but that only the first
layers' may leave: those have the longest time to come back. A family's price is the seconds of
computing one of its storages again, alone, for each byte; families are dropped the cheapest
first, and then each is treated in every other way once more, as long as that helps (`_Choosing`).
First tries are searched with little effort, the best with all.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from elixir_fx.errors import LayoutError, PlanError
from elixir_fx.facts import Facts, Role, Storage
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Layout, Limits, Plan, Schedule
from elixir_fx.planner import search as settled
from elixir_fx.planner.footprint import live_peak_bytes
from elixir_fx.planner.pack import away_tiers
from elixir_fx.planner.repeated import BlockedError, Step, Walk, rewritten

SMALL = 1 / 500  # of all activations: a storage below is not worth a decision
TRIED = 600  # chunks of the drafts of a first try
FINALISTS = 2  # decisions that are searched with all effort

PARTS = (1.0, 0.5)  # of a family, its first layers, that may leave


@dataclass(frozen=True, slots=True)
class Decision:
    """Storages that are dropped and computed again, and those that leave and come back."""

    dropped: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()

    def drop(self, names: Iterable[str]) -> "Decision":
        return Decision(self.dropped | frozenset(names), self.away - frozenset(names))

    def send(self, names: Iterable[str]) -> "Decision":
        return Decision(self.dropped - frozenset(names), self.away | frozenset(names))

    def keep(self, names: Iterable[str]) -> "Decision":
        return Decision(self.dropped - frozenset(names), self.away - frozenset(names))

    @property
    def order(self) -> tuple[object, ...]:
        """Simple ones first."""
        return len(self.dropped), len(self.away), sorted(self.dropped), sorted(self.away)


KEEP_ALL = Decision()


def decided(facts: Facts, schedule: Schedule) -> Facts:
    """The facts of a step as a schedule rewrites it. PlanError if it cannot be carried out."""
    if not schedule.recomputes and not schedule.offloads:
        return facts
    repeated = {entry.node for entry in schedule.recomputes}
    activations = [s.name for s in facts.storages if s.role is Role.ACTIVATION]
    away = [entry.node for entry in schedule.offloads]
    strangers = sorted(set(away) - set(activations))
    if strangers:
        raise PlanError(
            f"the plan sends {strangers[0]!r} away, which the forward does not leave for the "
            "backward; it was made for another model"
        )
    dropped = [name for name in activations if name in repeated]
    try:
        walk = Walk(Step(facts=facts), dropped, away)
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
        if decision == KEEP_ALL:
            return None, self.facts
        if decision not in self._known:
            try:
                walk = Walk(self.step, sorted(decision.dropped), sorted(decision.away))
                self._known[decision] = (walk, rewritten(walk))
            except BlockedError:
                self._known[decision] = None
        return self._known[decision]

    def ladder(self) -> Iterator[Decision]:
        """More and more families dropped, the cheapest first, but none that helps no peak."""
        dropped, least = KEEP_ALL, live_peak_bytes(self.facts)
        for family in self.families:
            more = dropped.drop(family.names)
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
        if first is not None:
            self.tried[KEEP_ALL] = first
        for decision in self.activations.rungs[1:]:
            self._try(decision)
        self._improve()
        found = [first] if first is not None else []
        for decision in [d for d in self._ranked() if d != KEEP_ALL][:FINALISTS]:
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
        worked = {d: p.forecast.step_s for d, p in self.tried.items() if p is not None}
        return sorted(worked, key=lambda d: (worked[d], d.order))

    def _improve(self) -> None:
        """Treat the families of the best decision otherwise, one at a time, while that helps."""
        for family in reversed(self.activations.families):  # the dearest first
            for change in self._changes(family):
                ranked = self._ranked()
                if not ranked:
                    return
                self._try(change(ranked[0]))

    def _changes(self, family: Family) -> Iterator[Callable[[Decision], Decision]]:
        names = family.names
        if self._may_leave:
            for part in PARTS:
                first = names[: math.ceil(part * len(names))]
                yield partial(_sent, names, first)
        yield partial(_kept, names)
        yield partial(_dropped, names)

    @property
    def _may_leave(self) -> bool:
        """Whether there is somewhere to go. Ranks would have to agree on what came back when."""
        return self.group.ranks == 1 and bool(away_tiers(self.machine, self.limits))

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


def _sent(names: tuple[str, ...], some: tuple[str, ...], decision: Decision) -> Decision:
    return decision.keep(names).send(some)


def _kept(names: tuple[str, ...], decision: Decision) -> Decision:
    return decision.keep(names)


def _dropped(names: tuple[str, ...], decision: Decision) -> Decision:
    return decision.drop(names)
