"""Segments: a step cut into stretches of nodes, and its parameters into groups that are read alike.

What the relaxation is written about: facts, budgets and links, in units in which a solver does
not lose small coefficients.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from elixir_fx.facts import Facts, Parameter, Role
from elixir_fx.machine import Link, Machine, Tier
from elixir_fx.plan import Group, Limits
from elixir_fx.planner.footprint import NO_OPTIMIZER
from elixir_fx.planner.pack import linked

SEGMENTS = 18  # of forward and backward together
UNITS = 1e3  # that all parameters together are, so that no coefficient is lost as too small


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBytes:
    """What one group of parameters holds, in units of `Task.unit_bytes`; `traffic` is what its
    optimizer reads and writes."""

    parameters: float
    updated: float
    gradients: float
    states: float
    traffic: float
    reads: tuple[float, ...]  # by segment
    complete: tuple[float, ...]  # gradients complete at each cut
    largest: float  # parameter,
    largest_block: float  # that gradients of one pass through,
    largest_whole: float  # and updated one with its gradient and states
    times_whole: float  # which is so many times the parameter itself
    waiting: float  # bytes of storage for each byte of gradients, or less


@dataclass(frozen=True, kw_only=True, eq=False)
class Spare:
    """Activations that a plan may drop, or send away, in any part.

    `again_s` are the seconds of computing them all again, at least: infinite where that cannot be.
    `unread` are their bytes at each position that lie there unread, from the last reader in the
    forward to the first in the backward; `between` the same before each position and at the end.
    """

    nbytes: int
    again_s: float
    unread: NDArray[np.int64]
    between: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the programme is about: cuts, groups and links."""

    facts: Facts
    machine: Machine
    limits: Limits
    group: Group
    spares: tuple[Spare, ...] = ()

    @cached_property
    def unit_bytes(self) -> float:
        """Bytes that the programme counts as one."""
        return max(1, sum(p.nbytes for p in self.facts.parameters)) / UNITS

    @property
    def far(self) -> Tier | None:
        """Where parts are that are not on the device; None where they cannot be."""
        tier = Tier.DISK if self.machine.unified else Tier.HOST
        there = linked(self.machine, Tier.DEVICE, tier)
        return tier if there and self.limits.of(tier) > 0 else None

    @property
    def may_send(self) -> float:
        """1 where activations may leave the device: one rank's."""
        return float(self.group.ranks == 1)

    @property
    def disk_bytes(self) -> int:
        """Room on the disk; none where it cannot be reached."""
        near = Tier.DEVICE if self.machine.unified else Tier.HOST
        return self.limits.disk if linked(self.machine, near, Tier.DISK) else 0

    @property
    def apart(self) -> int:
        """Ranks that must send each other what they do not have."""
        return 1 if self.group.shared else self.group.ranks

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """Bytes of activations, temporaries and gradients by position, in any plan: a gradient
        is there at least until it is complete."""
        return self._lives(0)

    @cached_property
    def live_between(self) -> NDArray[np.int64]:
        """The same before each position and at the end, without the gradients that are complete
        by then."""
        return np.concatenate((np.zeros(1, dtype=np.int64), self._lives(1)))

    def _lives(self, early: int) -> NDArray[np.int64]:
        """Live bytes by position; a gradient goes `early` positions before it is complete."""
        complete: dict[str, int] = {}
        for p in self.facts.parameters:
            if p.gradient is not None:
                soonest = min(p.gradient, complete.get(p.gradient_storage, p.gradient))
                complete[p.gradient_storage] = soonest
        end = len(self.facts.nodes) - 1
        change = np.zeros(len(self.facts.nodes) + 1, dtype=np.int64)
        for storage in self.facts.storages:
            if storage.role in (Role.ACTIVATION, Role.TEMPORARY, Role.GRADIENT):
                dies = min(storage.dies, end)
                if storage.role is Role.GRADIENT:
                    known = complete.get(storage.name, storage.born)
                    dies = max(storage.born, min(dies, known)) - early
                change[storage.born] += storage.nbytes
                change[dies + 1] -= storage.nbytes
        lives: NDArray[np.int64] = np.cumsum(change[:-1])
        return lives

    @property
    def waits_last(self) -> bool:
        """Whether a gradient is complete so late that no reduce follows within the graph."""
        last = len(self.facts.nodes) - 1
        return any(p.gradient == last for p in self.facts.parameters)

    @cached_property
    def starts(self) -> NDArray[np.float64]:
        """Compute seconds before each position, and at the end."""
        seconds = [cost.seconds for cost in self.facts.costs]
        starts: NDArray[np.float64] = np.concatenate(([0.0], np.cumsum(seconds)))
        return starts

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Positions before which the segments begin, from 0 to the end: equally far apart in
        time, and then where the most activations are."""
        count = len(self.facts.nodes)
        evenly = np.linspace(0.0, float(self.starts[-1]), SEGMENTS + 1)[1:-1]
        ideal = np.searchsorted(self.starts, evenly)
        middle = [0, *((ideal[1:] + ideal[:-1]) // 2).tolist(), count]
        found = {0, count}
        for low, high in pairwise(middle):
            if high > low:
                found.add(low + int(self.live[low:high].argmax()))
        return tuple(sorted(found))

    @cached_property
    def groups(self) -> tuple[GroupBytes, ...]:
        """Parameters that are read, and whose gradients are complete, in the same segments."""
        members: dict[tuple[object, ...], list[Parameter]] = {}
        for parameter in self.facts.parameters:
            if parameter.reads and parameter.nbytes:
                reads = {self._segment(read) for read in parameter.reads}
                gradient = parameter.gradient
                done = None if gradient is None else self._segment(gradient)
                key = (*sorted(reads), "gradient", done, parameter.trainable)
                members.setdefault(key, []).append(parameter)
        return tuple(self._bytes(group) for group in members.values())

    def _segment(self, position: int) -> int:
        return bisect_right(self.cuts, position) - 1

    def _bytes(self, parameters: Sequence[Parameter]) -> GroupBytes:
        optimizer = self.facts.optimizer
        updated = [p for p in parameters if self.facts.updates(p)]
        each = [optimizer.of(p.dtype) if optimizer is not None else NO_OPTIMIZER for p in updated]
        spans = list(pairwise(self.cuts))
        states = [p.span * one.state_bytes for p, one in zip(updated, each, strict=True)]
        traffic = [p.span * one.read_bytes for p, one in zip(updated, each, strict=True)]
        wholes = [2 * p.nbytes + held for p, held in zip(updated, states, strict=True)]
        times = [whole / p.nbytes for p, whole in zip(updated, wholes, strict=True)]
        unit = self.unit_bytes
        return GroupBytes(
            parameters=sum(p.nbytes for p in parameters) / unit,
            updated=sum(p.nbytes for p in updated) / unit,
            gradients=sum(p.nbytes for p in updated) / unit,
            states=sum(states) / unit,
            traffic=sum(traffic) / unit,
            reads=tuple(
                sum(p.nbytes for p in parameters if any(low <= read < high for read in p.reads))
                / unit
                for low, high in spans
            ),
            complete=tuple(
                sum(p.nbytes for p in updated if p.gradient is not None and p.gradient < cut) / unit
                for cut in self.cuts
            ),
            largest=max(p.nbytes for p in parameters) / unit,
            largest_block=max((self._block_bytes(p) for p in updated), default=0) / unit,
            largest_whole=max(wholes, default=0) / unit,
            times_whole=max(times, default=0.0),
            waiting=min((self._waiting[p.gradient_storage] for p in updated), default=0.0),
        )

    @cached_property
    def _waiting(self) -> dict[str, float]:
        """For each gradient's storage its bytes by those of the gradients in it, 1 at most."""
        there = {s.name: s.nbytes for s in self.facts.storages if s.role is Role.GRADIENT}
        holds: dict[str, int] = {}
        for p in self.facts.parameters:
            if p.gradient is not None:
                holds[p.gradient_storage] = holds.get(p.gradient_storage, 0) + p.nbytes
        return {name: min(1.0, there.get(name, 0) / max(1, n)) for name, n in holds.items()}

    def _block_bytes(self, parameter: Parameter) -> int:
        """Room that the gradient of a parameter takes at least while ranks sum it, whether it is
        cut between them or not (`Group.gradient_block_bytes`)."""
        n = self.group.ranks
        if n == 1:
            return parameter.nbytes
        return parameter.nbytes + (parameter.nbytes // n if self.group.shared else parameter.nbytes)

    def link(self, source: Tier, target: Tier) -> Link | None:
        """A link with its rates in units."""
        found = self.machine.find_link(source, target)
        if found is None:
            return None
        return replace(
            found,
            bytes_per_s=found.bytes_per_s / self.unit_bytes,
            shared_bytes_per_s=found.shared_bytes_per_s / self.unit_bytes,
        )
