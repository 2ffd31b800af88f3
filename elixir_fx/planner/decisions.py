"""Decisions: what may become of the activations of one step, and the facts that it makes.

A decision is two sets of storages: those that the backward computes again, and those that leave
the device in between. Storages that equal layers leave are one family: its price is the seconds of
computing one of them again, alone, for each byte.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts, Role, Storage
from elixir_fx.plan import Plan, Schedule
from elixir_fx.planner.footprint import live_peak_bytes
from elixir_fx.planner.repeated import BlockedError, Step, Walk, rewritten
from elixir_fx.planner.segments import Spare

SMALL = 1 / 500  # of all activations: a storage below is not worth a decision


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
        prices = {s.name: step.again_s(step.position[s.name]) for s in members}
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
