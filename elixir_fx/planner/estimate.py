"""Estimate: which decisions about activations promise most, before any of them is planned.

A family is kept, dropped or sent away; or its first half is sent, which has the longest time to
come back. From several starts one family after the other is treated otherwise while that gains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Group, Limits
from elixir_fx.planner.bound import (
    MovedBytes,
    least_bytes,
    pair_s,
    update_compute_s,
)
from elixir_fx.planner.decisions import KEEP_ALL, Activations, Decision, Family
from elixir_fx.planner.footprint import live_bytes, live_peak_bytes
from elixir_fx.planner.pack import away_tiers

STARTS = 4  # that drop a part of the families
SWEEPS = 3  # over all families, from one start
GAIN = 2e-3  # over keeping all that must be promised
SLACK = 1e-6  # a gain that is none


def may_send(machine: Machine, limits: Limits, group: Group) -> bool:
    """Whether activations have somewhere to go. Ranks would have to agree on what came back
    when."""
    return group.ranks == 1 and bool(away_tiers(machine, limits))


class Ways(StrEnum):
    """What may become of a family."""

    KEEP = "keep"
    DROP = "drop"
    AWAY = "away"
    HALF_AWAY = "half"  # the first layers' leave, the others are kept
    HALF_AGAIN = "half again"  # or computed again


@dataclass(frozen=True, kw_only=True)
class Estimate:
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
        rungs = {count * part // STARTS for part in range(1, STARTS)} - {0, count}
        starts += [(Ways.DROP,) * n + (Ways.KEEP,) * (count - n) for n in sorted(rungs)]
        if self._may_leave:
            starts.append((Ways.AWAY,) * count)
        found = {ways: self._guess_s(ways) for ways in map(self._descend, starts)}
        kept_s = self._guess_s((Ways.KEEP,) * count)
        gains = [ways for ways in found if found[ways] < kept_s * (1 - GAIN)]
        ranked = sorted(gains, key=lambda ways: (found[ways], self.decision(ways).order))
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
