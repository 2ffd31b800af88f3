"""Activations: kept, computed again or sent away, chosen with everything else. The planner's door.

A decision is two sets of storages: those that the backward computes again, and those that leave
the device in between (`repeated.Walk`). Every decision makes other facts, for which `search` finds
the best layout; the best of them is the plan:

    minimise    step_s(search(rewritten(decision)))
    over        decisions: what becomes of each family of activations

Storages that equal layers leave are one family and get equal treatment, but that only the first
half of the layers' may leave: those have the longest time to come back. `Account` estimates the
seconds of a decision; from several starts one family after the other is treated otherwise while
that gains. The most promising guesses are rewritten and estimated once more, and of these the best
are searched. What the model's own checkpoints compute again is one of the guesses. All is bounded
by counts.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from elixir_fx.errors import LayoutError, PlanError
from elixir_fx.facts import Facts, Role, Storage
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Layout, Limits, Plan, Schedule
from elixir_fx.planner.bound import (
    PROVED,
    MovedBytes,
    least_bytes,
    pair_s,
    simple_bound_s,
    update_compute_s,
)
from elixir_fx.planner.footprint import live_bytes, live_peak_bytes
from elixir_fx.planner.pack import away_tiers
from elixir_fx.planner.relaxation import relax
from elixir_fx.planner.repeated import BlockedError, Step, Walk, rewritten
from elixir_fx.planner.search import schedule as settled_schedule
from elixir_fx.planner.search import search as settled_search
from elixir_fx.planner.search import smallest as settled_smallest
from elixir_fx.planner.segments import Spare

SMALL = 1 / 500  # of all activations: a storage below is not worth a decision
GUESSES = 4  # decisions that are looked at closely,
FINALISTS = 2  # and of these searched
SWEEPS = 3  # over all families, from one start
SLACK = 1e-6  # a gain that is none


@dataclass(frozen=True, slots=True)
class Decision:
    """Storages that are dropped and computed again, and those that leave and come back."""

    dropped: frozenset[str] = frozenset()
    away: frozenset[str] = frozenset()

    def drop(self, names: Iterable[str]) -> "Decision":
        these = frozenset(names)
        return Decision(self.dropped | these, self.away - these)

    def send(self, names: Iterable[str]) -> "Decision":
        these = frozenset(names)
        return Decision(self.dropped - these, self.away | these)

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
    """Activations of equal layers. `again_s`: seconds of computing one of them again, alone;
    infinite where that cannot be."""

    names: tuple[str, ...]
    nbytes: int
    again_s: float

    @property
    def price(self) -> float:
        return self.again_s / self.nbytes

    @property
    def halves(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of the first layers and of the others."""
        middle = math.ceil(len(self.names) / 2)
        return self.names[:middle], self.names[middle:]


def families(step: Step) -> tuple[Family, ...]:
    """What may be dropped or sent away, the cheapest first."""
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
        prices = {storage.name: _again_s(step, storage) for storage in members}
        can = {name: price for name, price in prices.items() if price < math.inf}
        found.append(
            Family(
                names=tuple(can or prices),
                nbytes=members[0].nbytes,
                again_s=sum(can.values()) / len(can) if can else math.inf,
            )
        )
    return tuple(sorted(found, key=lambda family: (family.price, family.names)))


def _numberless(name: str) -> str:
    return re.sub(r"_?\d+", "", name)


def _again_s(step: Step, storage: Storage) -> float:
    try:
        return Walk(step, [storage.name]).repeated_s
    except BlockedError:
        return math.inf


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
            if family.again_s == math.inf:
                continue
            more = dropped.drop(family.names)
            made = self.of(more)
            if made is None:
                continue
            peak = live_peak_bytes(made[1])
            if peak < least:
                dropped, least = more, peak
                yield dropped

    @cached_property
    def spares(self) -> tuple[Spare, ...]:
        """What the bound may drop or send away: every family, and all small activations at once,
        for nothing."""
        if not self.families:
            return ()
        known = {name for family in self.families for name in family.names}
        small = [name for name, s in self._storages.items() if s.role is Role.ACTIVATION]
        small = [name for name in small if name not in known]
        return (*map(self._spare, self.families), self._spare_of(small, 0.0))

    def _spare(self, family: Family) -> Spare:
        own_s = sum(self._own_s(self._storages[name]) for name in family.names)
        return self._spare_of(family.names, own_s if family.again_s < math.inf else math.inf)

    def _spare_of(self, names: Sequence[str], again_s: float) -> Spare:
        unread, between = self.unread(names)
        nbytes = sum(self._storages[name].nbytes for name in names)
        return Spare(nbytes=nbytes, again_s=again_s, unread=unread, between=between)

    @cached_property
    def _storages(self) -> dict[str, Storage]:
        return {storage.name: storage for storage in self.facts.storages}

    def _own_s(self, storage: Storage) -> float:
        """Seconds of the operator that makes a storage, shared with what else it makes."""
        picked = len(self.step.picks.get(storage.born, ())) or 1
        return self.facts.costs[storage.born].seconds / picked

    def unread(self, names: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Bytes of these that nobody reads at each position, from the last reader in the forward
        to the first in the backward; and those before each position and at the end."""
        start, count = self.facts.backward, len(self.facts.nodes)
        change, between = (np.zeros(count + 2, dtype=np.int64) for _ in range(2))
        for storage in (self._storages[name] for name in names):
            early = max([storage.born, *(r for r in storage.readers if r < start)])
            late = min((r for r in storage.readers if r >= start), default=early)
            change[early + 1] += storage.nbytes
            change[max(late, early + 1)] -= storage.nbytes
            between[early + 1] += storage.nbytes
            between[late + 1] -= storage.nbytes
        return np.cumsum(change)[:count], np.cumsum(between)[: count + 1]

    @cached_property
    def hinted(self) -> Decision:
        """What the model's own checkpoints compute again."""
        facts, step = self.facts, self.step
        if not facts.flow or not facts.trains:
            return KEEP_ALL
        return KEEP_ALL.drop(
            storage.name
            for storage in facts.storages
            if storage.role is Role.ACTIVATION
            and facts.flow[step.position[storage.name]].checkpointed
            and storage.name in step.may_repeat
        )

    def thrifty(self, may_send: bool) -> tuple[Decision, ...]:
        """Decisions that take little memory, whatever anything costs: to keep all, the model's own,
        to drop each family that then lowers the peak, the largest first, and to send all away."""
        dropped = KEEP_ALL
        for family in sorted(self.families, key=lambda f: (-f.nbytes * len(f.names), f.names)):
            more = dropped.drop(family.names)
            if self._peak(more) < self._peak(dropped):
                dropped = more
        away = KEEP_ALL
        for family in self.families if may_send else ():
            more = away.send(family.names)
            away = more if self.of(more) is not None else away
        found = (KEEP_ALL, self.hinted, dropped, away)
        return tuple(dict.fromkeys(d for d in found if self.of(d) is not None))

    def _peak(self, decision: Decision) -> float:
        made = self.of(decision)
        return math.inf if made is None else live_peak_bytes(made[1])

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


def may_send(machine: Machine, limits: Limits, group: Group) -> bool:
    """Whether activations have somewhere to go. Ranks would have to agree on what came back
    when."""
    return group.ranks == 1 and bool(away_tiers(machine, limits))


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
        account = Account(
            activations=self.activations,
            machine=self.machine,
            limits=self.limits,
            group=self.group,
            micro_batches=self.micro_batches,
        )
        guesses = [self.activations.hinted, *account.guesses()[:GUESSES]]
        exact = {d: account.exact_s(d) for d in guesses if d != KEEP_ALL}
        return sorted((d for d in exact if exact[d] < math.inf), key=lambda d: (exact[d], d.order))


class Ways(StrEnum):
    """What may become of a family."""

    KEEP = "keep"
    DROP = "drop"
    AWAY = "away"
    HALF_AWAY = "half"  # the first layers' leave, the others are kept
    HALF_AGAIN = "half again"  # or computed again


@dataclass(frozen=True, kw_only=True)
class Account:
    """What decisions take, estimated: seconds of a step of which all that moves is hidden behind
    the graph's compute but for the update.

        step_s = max(links_s(states and activations that do not fit),
                     compute_s + copies_s + lost_s + update_s(states that do not fit))

    Of a guess the peak is that of the captured step less what every family saves, which forgets
    what repetitions need; `exact_s` takes the rewritten step's.
    """

    activations: Activations
    machine: Machine
    limits: Limits
    group: Group
    micro_batches: int

    def guesses(self) -> list[Decision]:
        """Decisions from which no change of one family gains, the most promising first: from
        several starts."""
        count = len(self._families)
        starts = [(Ways.KEEP,) * count, (Ways.DROP,) * count]
        starts += [(Ways.DROP,) * n + (Ways.KEEP,) * (count - n) for n in range(1, count)]
        if self._may_leave:
            starts.append((Ways.AWAY,) * count)
        found = {ways: self._guess_s(ways) for ways in map(self._descend, starts)}
        ranked = sorted(found, key=lambda ways: (found[ways], self.decision(ways).order))
        return list(dict.fromkeys(map(self.decision, ranked)))

    def exact_s(self, decision: Decision) -> float:
        """The estimate by the facts of the rewritten step; infinite if there is none."""
        made = self.activations.of(decision)
        if made is None:
            return math.inf
        facts = made[1]
        away = sum(one.nbytes for one in facts.departures)
        return self._step_s(facts.compute_s, live_peak_bytes(facts), away)

    def decision(self, ways: Sequence[Ways]) -> Decision:
        found = KEEP_ALL
        for family, way in zip(self._families, ways, strict=True):
            first, rest = family.halves
            if way is Ways.DROP:
                found = found.drop(family.names)
            elif way is Ways.AWAY:
                found = found.send(family.names)
            elif way is not Ways.KEEP:
                found = found.send(first)
                found = found.drop(rest) if way is Ways.HALF_AGAIN else found
        return found

    @property
    def _families(self) -> tuple[Family, ...]:
        return self.activations.families

    @cached_property
    def _may_leave(self) -> bool:
        return may_send(self.machine, self.limits, self.group)

    @cached_property
    def _ways(self) -> tuple[Ways, ...]:
        return tuple(Ways) if self._may_leave else (Ways.KEEP, Ways.DROP)

    def _descend(self, ways: tuple[Ways, ...]) -> tuple[Ways, ...]:
        best, best_s = ways, self._guess_s(ways)
        for _ in range(SWEEPS):
            before = best_s
            for place in range(len(ways)):
                for way in self._ways:
                    other = (*best[:place], way, *best[place + 1 :])
                    other_s = self._guess_s(other)
                    if other_s < best_s * (1 - SLACK):
                        best, best_s = other, other_s
            if best_s == before:
                break
        return best

    def _guess_s(self, ways: tuple[Ways, ...]) -> float:
        compute_s, away, live = self.activations.facts.compute_s, 0, self._live.copy()
        for family, way, (all_of, first) in zip(self._families, ways, self._saved, strict=True):
            count, half = len(family.names), len(family.halves[0])
            if way in (Ways.DROP, Ways.HALF_AGAIN):
                compute_s += family.again_s * (count if way is Ways.DROP else count - half)
            if way not in (Ways.KEEP, Ways.DROP):
                away += family.nbytes * (count if way is Ways.AWAY else half)
            if way is not Ways.KEEP:
                live -= first if way is Ways.HALF_AWAY else all_of
        return self._step_s(compute_s, int(live.max(initial=0)), away)

    @cached_property
    def _live(self) -> NDArray[np.int64]:
        return live_bytes(self.activations.facts)

    @cached_property
    def _saved(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """By position the bytes of a family, and of its first half, that nobody reads there."""
        unread = self.activations.unread
        return [(unread(f.names)[0], unread(f.halves[0])[0]) for f in self._families]

    @cached_property
    def _all_moves(self) -> tuple[MovedBytes, MovedBytes]:
        """What step and update would move on a device without memory."""
        return least_bytes(self.activations.facts, 0)

    @cached_property
    def _update_s(self) -> float:
        return update_compute_s(self.activations.facts, self.machine)

    def _step_s(self, compute_s: float, peak: int, away: int) -> float:
        """Seconds of a step with so much compute in a graph, live bytes at its peak and bytes of
        activations that leave."""
        facts, machine, batches = self.activations.facts, self.machine, self.micro_batches
        room = self.limits.device - facts.buffer_bytes - peak
        if room < 0:
            return math.inf
        ranks = self.group.ranks
        step, update = (moved.beyond(room * ranks).share(ranks) for moved in self._all_moves)
        far = Tier.DISK if machine.unified else Tier.HOST
        into, out = machine.find_link(far, Tier.DEVICE), machine.find_link(Tier.DEVICE, far)
        if into is None or out is None:
            return batches * compute_s if not update.writes else math.inf
        reads, writes = step.reads + batches * away, step.writes + batches * away
        lost_s = (
            batches
            * away
            * (into.compute_share / into.bytes_per_s + out.compute_share / out.bytes_per_s)
        )
        graph_s = batches * (compute_s + 2 * away / machine.stream_bytes_per_s) + lost_s
        update_s = max(
            self._update_s / ranks,
            pair_s(machine, Tier.DEVICE, far, update.reads, update.writes),
        )
        return max(pair_s(machine, Tier.DEVICE, far, reads, writes), graph_s + update_s)
