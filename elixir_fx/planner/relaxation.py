"""Relaxation: a linear programme whose optimum no plan under the same budgets can beat.

Second part of the bound. A plan here is what `Layout` and `Schedule` can say and the runtime
does: homes that hold for the whole step, one arena, an update that follows the backward. The
step is cut into K segments of its nodes and the update; the parameters into groups. Any plan
gives these quantities, bytes of one rank (of N ranks the mean one):

    P[g], G[g], S[g]   parameters, gradients, states of group g at home on the device
    A, B               the arena, and the blocks in it that gradients pass through
    x[g,k]  parameters of the group that are gathered at cut k, in the arena
    r[g,k]  read from the far tier in segment k,   u[g,k]  received from other ranks
    w[g,k]  gradients written to the far tier,     q[k]    sent to other ranks
    d[g,k]  gradients complete at cut k that wait for the rest of their chunk, whole on each
            rank, among the activations
    FP[g], FG[g], FS[g]   of N ranks: what each has whole, at home on its device
    h[g]    the part of the group that is updated on the host
    a[f], d[f]   the parts of a family of activations that leave, and that are computed again
    o[f,k]  bytes of the family that are not there at cut k
    s[k]    seconds of computing again in segment k
    t[k]    seconds of segment k; t[K] of the update

    minimise  sum t[k]   subject to

    memory   home = sum_g P + G + S + FP + FG + FS + A                            `_memory`
             home <= device - buffers - activations at their peak, less o there
             home + sum_g d[g,k] <= device - buffers - activations at cut k + sum_f o[f,k]
             sum_g x[g,k] <= A - B,  gradients on their way at cut k <= B, the blocks
             the largest parameter of g <= A - B + P[g], its gradient <= B + G[g], all of
             it <= A + P[g] + G[g] + S[g] unless the host updates it
    spare    o[f,k] <= what lies unread at cut k,  o[f,k] <= (a[f] + d[f]) of all `_spare`
             seconds again in all segments >= sum_f d[f] of the family's; what leaves
             is written and read in all segments, and copied on its way
    use      r >= (read in k - z[g,k] - FP) / N - P[g],  r >= gain of z / N       `_reads`
             u >= (read in k - x[g,k] - FP) (N - 1) / N, u >= gain of x (N - 1) / N
             where z[g,k] >= x[g,k] - N P[g] is what of x no device is home to    `_from_far`
    results  written before <= gradients complete by cut k                        `_gradients`
             <= G[g] + FG + d[g,k] + written before + on their way, each share
             those of an accumulation are read again where they are not at home
    tiers    what is not at home on the device is on the host or the disk           `_tiers`
    disk     what the host cannot hold is read for the update, and written once     `_disk`
    update   what runs on the device is read there, and written, but for P, G, S  `_update`
             what runs on the host has no home on the device
    time     t[k] >= compute + share of it lost while links stream                `_time`
             compute has the copies of gradients that go away                     `_copies`
             t[k] >= bytes / rate of each link alone, and of both directions at once

Cut k is the moment after the node before it; what happens between two nodes belongs to the later
segment. Cuts stand where activations are largest nearby. Each constraint holds for every plan,
so the optimum is a lower bound: the programme may split bytes that a plan cannot and forgets
what happens between two cuts. With micro-batches each is a programme of its own: the first has
nothing to add to and an empty arena, the last has the update behind it.

The solver is scipy's HiGHS. Where it proves that the constraints contradict each other no plan
fits, and the optimum is infinite: the device is too small for buffers and activations, for the
largest parameter beside them, for its gradient or its update, or all tiers together for the
state. Where it gives up, the optimum is 0, which claims nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array

from elixir_fx.facts import Facts
from elixir_fx.machine import Link, Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Limits
from elixir_fx.planner.segments import Spare, Task
from elixir_fx.planner.wires import SLOWEST, together

SAFETY = 1e-6  # of the optimum that is given up to the solver's tolerances
SOLVED, IMPOSSIBLE = 0, 2  # what `scipy.optimize.linprog` calls it


@dataclass
class _Rows:
    """A linear programme being written: rows of `sum coefficient * variable <= bound`."""

    bounds: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    most: list[float | None] = field(default_factory=list)
    _row: list[int] = field(default_factory=list)
    _column: list[int] = field(default_factory=list)
    _value: list[float] = field(default_factory=list)

    def variable(self, *, most: float | None = None, cost: float = 0.0) -> int:
        """A new variable, from 0 to `most`."""
        self.costs.append(cost)
        self.most.append(most)
        return len(self.costs) - 1

    def variables(self, count: int, *, most: float | None = None) -> list[int]:
        return [self.variable(most=most) for _ in range(count)]

    def at_most(self, terms: Sequence[tuple[float, int]], bound: float) -> None:
        """sum of the terms <= bound"""
        for value, column in terms:
            if value:
                self._row.append(len(self.bounds))
                self._column.append(column)
                self._value.append(value)
        self.bounds.append(bound)

    def at_least(self, terms: Sequence[tuple[float, int]], bound: float) -> None:
        """sum of the terms >= bound"""
        self.at_most([(-value, column) for value, column in terms], -bound)

    def solve(self) -> tuple[float, NDArray[np.float64]]:
        """The least cost, and values of the variables that have it: infinite and none if the rows
        allow no values, 0 and none if the solver gives up."""
        shape = (len(self.bounds), len(self.costs))
        solved = linprog(
            self.costs,
            A_ub=csr_array((self._value, (self._row, self._column)), shape=shape),
            b_ub=self.bounds,
            bounds=[(0.0, most) for most in self.most],
            method="highs",
        )
        if solved.status == SOLVED:
            return float(solved.fun), np.asarray(solved.x, dtype=np.float64)
        return (float("inf") if solved.status == IMPOSSIBLE else 0.0), np.zeros(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Relaxed:
    """An optimum of the relaxation: seconds of a step, bytes of each part at home on the device
    of a rank, bytes of the arena, and the share of what is updated that the host updates. Infinite
    seconds say that no plan fits, and then nothing of the rest."""

    step_s: float = 0.0
    parameters_bytes: int = 0
    gradients_bytes: int = 0
    states_bytes: int = 0
    arena_bytes: int = 0
    on_host: float = 0.0


NOTHING = Relaxed()  # where there is no programme, or no optimum: it claims nothing


def relax(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    group: Group = ONE_RANK,
    micro_batches: int = 1,
    spares: Sequence[Spare] = (),
) -> Relaxed:
    """The relaxation's optimum for one steady step, whatever becomes of the `spares`."""
    task = Task(facts=facts, machine=machine, limits=limits, group=group, spares=tuple(spares))
    if not task.groups or task.far is None:
        return NOTHING
    many = facts.trains and micro_batches > 1
    last = _Programme(task, accumulates=many, updates=facts.trains).optimum()
    if not many or not last.step_s < float("inf"):
        return last
    step_s = last.step_s + _Programme(task, accumulates=False, updates=False).optimum().step_s
    if micro_batches > 2:
        between = _Programme(task, accumulates=True, updates=False).optimum()
        step_s += (micro_batches - 2) * between.step_s
    return replace(last, step_s=step_s)


class _Programme:
    """The linear programme of a forward and backward, with the update behind it or not."""

    def __init__(self, task: Task, *, accumulates: bool, updates: bool) -> None:
        self.task = task
        self.rows = _Rows()
        rows, groups, cuts = self.rows, task.groups, len(task.cuts)
        self.segments = cuts - 1
        n = task.group.ranks
        self.arena, self.blocks = rows.variable(), rows.variable()
        self.parameters = [rows.variable(most=g.parameters / n) for g in groups]
        self.at_home = [rows.variable(most=g.gradients / n) for g in groups]  # gradients
        self.states = [rows.variable(most=g.states / n) for g in groups]
        replicas = 1.0 if n > 1 else 0.0
        self.whole_parameters = [rows.variable(most=replicas * g.parameters) for g in groups]
        self.whole_gradients = [rows.variable(most=replicas * g.gradients) for g in groups]
        self.whole_states = [rows.variable(most=replicas * g.states) for g in groups]
        self.x = [rows.variables(cuts, most=g.parameters) for g in groups]
        self.r = [rows.variables(self.segments) for _ in groups]
        self.u = [rows.variables(self.segments) for _ in groups]
        self.w = [rows.variables(self.segments) for _ in groups]
        self.old = [rows.variables(self.segments) for _ in groups]  # gradients read again
        self.flying = [rows.variables(cuts) for _ in groups]  # gradients on their way
        self.waiting = [
            [
                *rows.variables(cuts - 1, most=g.gradients),
                rows.variable(most=task.waits_last * g.gradients),
            ]
            for g in groups
        ]
        self.q = rows.variables(self.segments)
        self.copies = rows.variables(self.segments)  # seconds
        self.t = [rows.variable(cost=1.0) for _ in range(self.segments)]
        able = task.machine.updates_on_host and updates
        self.on_host = [rows.variable(most=1.0 if able else 0.0) for _ in groups]
        self.on_disk = rows.variable()
        self.total_sent = 0.0
        self.sent = [rows.variable(most=task.may_send) for _ in task.spares]
        self.again = [rows.variable(most=float(s.again_s < np.inf)) for s in task.spares]
        self.again_s = rows.variables(self.segments)
        self.leaving = rows.variables(self.segments)
        self.returning = rows.variables(self.segments)
        self._spare()
        self._memory(accumulates)
        self._tiers()
        self._reads()
        self._gradients(accumulates)
        self._sends()
        self._copies(accumulates)
        self._time()
        if updates:
            self._update()

    def optimum(self) -> Relaxed:
        step_s, values = self.rows.solve()
        if not len(values):
            return Relaxed(step_s=step_s)
        unit = self.task.unit_bytes

        def nbytes(variables: Sequence[int]) -> int:
            return int(sum(float(values[one]) for one in variables) * unit)

        updated = sum(group.updated for group in self.task.groups)
        hosted = sum(
            group.updated * float(values[part])
            for group, part in zip(self.task.groups, self.on_host, strict=True)
        )
        return Relaxed(
            step_s=step_s * (1 - SAFETY),
            parameters_bytes=nbytes(self.parameters),
            gradients_bytes=nbytes(self.at_home),
            states_bytes=nbytes(self.states),
            arena_bytes=nbytes([self.arena]),
            on_host=hosted / updated if updated else 0.0,
        )

    def _spare(self) -> None:
        """Activations that leave or are computed again cost that somewhere."""
        rows, task = self.rows, self.task
        unit, stream = task.unit_bytes, task.machine.stream_bytes_per_s
        bytes_sent = [
            (s.nbytes / unit, sent) for s, sent in zip(task.spares, self.sent, strict=True)
        ]
        seconds = _scaled(bytes_sent, 2 * unit / stream)
        for spare, again in zip(task.spares, self.again, strict=True):
            if spare.again_s < np.inf:
                seconds.append((spare.again_s, again))
        rows.at_least([*((1.0, one) for one in self.again_s), *_scaled(seconds, -1.0)], 0.0)
        for moved in (self.leaving, self.returning):
            rows.at_least([*((1.0, one) for one in moved), *_scaled(bytes_sent, -1.0)], 0.0)

    def _freed(self, unread: Sequence[int]) -> list[tuple[float, int]]:
        """Room that spare activations leave where so many bytes of each lie unread."""
        terms = []
        for spare, nbytes, sent, again in zip(
            self.task.spares, unread, self.sent, self.again, strict=True
        ):
            if nbytes:
                freed = self.rows.variable(most=nbytes / self.task.unit_bytes)
                share = spare.nbytes / self.task.unit_bytes
                self.rows.at_most([(1.0, freed), (-share, sent), (-share, again)], 0.0)
                terms.append((-1.0, freed))
        return terms

    def _memory(self, accumulates: bool) -> None:
        task = self.task
        device = task.limits.device - task.facts.buffer_bytes
        whole = (*self.whole_parameters, *self.whole_gradients, *self.whole_states)
        at_home = (*self.parameters, *self.at_home, *self.states, *whole, self.arena)
        fixed = [(1.0, part) for part in at_home]
        peak = int(task.live.argmax()) if len(task.live) else 0
        room = device - int(task.live.max(initial=0))
        freed = self._freed([int(spare.unread[peak]) for spare in task.spares])
        self.rows.at_most([*fixed, *freed], room / task.unit_bytes)
        for k, cut in enumerate(task.cuts):
            room = device - int(task.live_between[cut])
            freed = self._freed([int(spare.between[cut]) for spare in task.spares])
            waiting = [
                (group.waiting, waits[k])
                for group, waits in zip(task.groups, self.waiting, strict=True)
            ]
            self.rows.at_most([*fixed, *waiting, *freed], room / task.unit_bytes)
            gathered = [(1.0, x[k]) for x in self.x]
            self.rows.at_most([*gathered, (1.0, self.blocks), (-1.0, self.arena)], 0.0)
            flying = [(1.0, flying[k]) for flying in self.flying]
            self.rows.at_most([*flying, (-1.0, self.blocks)], 0.0)
        n, apart = task.group.ranks, task.apart > 1
        for g, group in enumerate(task.groups):  # each lies in the arena whole, or at home
            home = [(1.0, self.whole_parameters[g])]
            home += [] if apart else [(float(n), self.parameters[g])]
            area = [(1.0, self.arena), (-1.0, self.blocks)]
            self.rows.at_least([*area, *home], group.largest)
            block = [(1.0, self.blocks)] if n > 1 else [(1.0, self.blocks), (1.0, self.at_home[g])]
            self.rows.at_least(block, group.largest_block)
        if not accumulates:  # the update has had the arena
            for x in self.x:
                self.rows.at_most([(1.0, x[0])], 0.0)

    def _reads(self) -> None:
        n, shared = self.task.group.ranks, self.task.group.shared
        rows = self.rows
        for g, group in enumerate(self.task.groups):
            home = (float(n), self.parameters[g])
            whole = (1.0, self.whole_parameters[g])
            far = self._from_far(g)
            for k in range(self.segments):
                read, received = (float(n), self.r[g][k]), (n / (n - 1) if n > 1 else 0.0)
                rows.at_least([read, (1.0, far[k]), home, whole], group.reads[k])
                rows.at_least([read, (1.0, far[k]), (-1.0, far[k + 1])], 0.0)
                if n == 1:
                    continue
                others = [(received, self.u[g][k]), (1.0, self.x[g][k])]
                # What is at home in memory that ranks share is looked at where it is.
                seen = [whole, home] if shared else [whole]
                rows.at_least([*others, *seen], group.reads[k])
                rows.at_least([*others, (-1.0, self.x[g][k + 1])], 0.0)

    def _from_far(self, g: int) -> list[int]:
        """Of what is gathered, the bytes that are not at home on the device of any rank. What is
        at home on the device of one rank is gathered only if ranks share no memory."""
        if self.task.apart == 1:
            return self.x[g]
        cuts = len(self.task.cuts)
        far = self.rows.variables(cuts)
        home = (float(self.task.group.ranks), self.parameters[g])
        for k in range(cuts):
            self.rows.at_least([(1.0, far[k]), home, (-1.0, self.x[g][k])], 0.0)
            self.rows.at_most([(1.0, far[k]), (-1.0, self.x[g][k])], 0.0)
        return far

    def _gradients(self, accumulates: bool) -> None:
        n = self.task.group.ranks
        for g, group in enumerate(self.task.groups):
            for k in range(self.segments):
                done = group.complete[k + 1] / n
                there = [
                    (1.0, self.at_home[g]),
                    (1 / n, self.whole_gradients[g]),
                    (1 / n, self.waiting[g][k + 1]),
                ]
                written = [(1.0, w) for w in self.w[g][: k + 1]]
                self.rows.at_least([*there, *written, (1.0, self.flying[g][k + 1])], done)
                self.rows.at_most(written, done)
                if accumulates:
                    old = [(1.0, one) for one in self.old[g][: k + 1]]
                    self.rows.at_least([*there, *old], done)

    def _copies(self, accumulates: bool) -> None:
        """A gradient that goes away is written to a block and read there (`Player._reduce`)."""
        n, stream = self.task.group.ranks, self.task.machine.stream_bytes_per_s
        each = (3 if accumulates else 2) * self.task.unit_bytes / stream
        total, home = 0.0, []
        for g, group in enumerate(self.task.groups):
            if n == 1:
                home.append((each, self.at_home[g]))
                total += each * group.gradients
            else:
                share = (n + 1) / n * self.task.unit_bytes / stream
                total += (each + share) * group.gradients
        self.rows.at_least([*((1.0, one) for one in self.copies), *home], total)

    def _sends(self) -> None:
        """Gradients go to the ranks that keep them, after they are complete."""
        n = self.task.apart
        if n == 1:
            return
        share = (n - 1) / n
        for k in range(self.segments):
            complete = sum(group.complete[k + 1] for group in self.task.groups)
            self.rows.at_most([(1.0, q) for q in self.q[: k + 1]], share * complete)
        self.total_sent = share * sum(group.gradients for group in self.task.groups)

    def _time(self) -> None:
        task = self.task
        for k in range(self.segments):
            low, high = task.cuts[k], task.cuts[k + 1]
            compute_s = float(task.starts[high] - task.starts[low])
            reads = [(1.0, of[k]) for part in (self.r, self.old) for of in part]
            writes = [(1.0, w[k]) for w in self.w]
            reads.append((1.0, self.returning[k]))
            writes.append((1.0, self.leaving[k]))
            compute = [(compute_s, None), (1.0, self.copies[k]), (1.0, self.again_s[k])]
            self._links(self.t[k], reads, writes, compute)
            self._peers(self.t[k], [(1.0, u[k]) for u in self.u], [(1.0, self.q[k])])

    def _links(
        self,
        seconds: int,
        reads: list[tuple[float, int]],
        writes: list[tuple[float, int]],
        compute: list[tuple[float, int | None]],
    ) -> None:
        """`seconds` hold the bytes over the links to the far tier, and the computation that they
        slow down: `compute` are seconds, constant or for each unit of a variable."""
        far = self.task.far
        assert far is not None
        into, back = self.task.link(far, Tier.DEVICE), self.task.link(Tier.DEVICE, far)
        assert into is not None and back is not None
        most = 1.0 - SLOWEST  # of the device's speed, lost to both together
        counted = min(1.0, most / max(most, into.compute_share + back.compute_share))
        slowed = _scaled(reads, counted * into.compute_share / into.bytes_per_s)
        slowed += _scaled(writes, counted * back.compute_share / back.bytes_per_s)
        constant = sum(value for value, of in compute if of is None)
        slowed += [(value, of) for value, of in compute if of is not None]
        self.rows.at_least([(1.0, seconds), *_scaled(slowed, -1.0)], constant)
        self._pair(seconds, reads, writes, into, back)

    def _peers(
        self, seconds: int, received: list[tuple[float, int]], sent: list[tuple[float, int]]
    ) -> None:
        into = self.task.link(Tier.PEERS, Tier.DEVICE)
        back = self.task.link(Tier.DEVICE, Tier.PEERS)
        if self.task.group.ranks > 1 and into is not None and back is not None:
            self._pair(seconds, received, sent, into, back)

    def _pair(
        self,
        seconds: int,
        reads: list[tuple[float, int]],
        writes: list[tuple[float, int]],
        into: Link,
        back: Link,
    ) -> None:
        """Both directions alone, and together: what fits in a second is the hull of (r, 0),
        (r', w') and (0, w)."""
        r, w = into.bytes_per_s, back.bytes_per_s
        both_r, both_w = together(into, back), together(back, into)
        if both_r / r + both_w / w < 1:
            both_r = both_w = 0.0
        self.rows.at_least([(1.0, seconds), *_scaled(reads, -1 / r)], 0.0)
        self.rows.at_least([(1.0, seconds), *_scaled(writes, -1 / w)], 0.0)
        if not both_r:
            in_turn = [*_scaled(reads, -1 / r), *_scaled(writes, -1 / w)]
            self.rows.at_least([(1.0, seconds), *in_turn], 0.0)
            return
        # Through (r, 0) and (r', w'): R / r + W (r - r') / (r w'); and through (0, w) likewise.
        for many, few, (rate, both), other in (
            (reads, writes, (r, both_r), both_w),
            (writes, reads, (w, both_w), both_r),
        ):
            slope = (rate - both) / (rate * other)
            terms = [*_scaled(many, -1 / rate), *_scaled(few, -slope)]
            self.rows.at_least([(1.0, seconds), *terms], 0.0)

    def _update(self) -> None:
        """The update behind the backward."""
        rows, task, n = self.rows, self.task, self.task.group.ranks
        stream = task.machine.update_bytes_per_s(Tier.DEVICE) / task.unit_bytes
        host = task.machine.update_bytes_per_s(Tier.HOST) / task.unit_bytes
        optimizer = task.facts.optimizer
        each = n if optimizer is None or optimizer.elementwise else 1  # has so much less to do
        seconds = rows.variable(cost=1.0)
        reads: list[tuple[float, int]] = []
        writes: list[tuple[float, int]] = []
        compute: list[tuple[float, int | None]] = []
        on_host: list[tuple[float, int]] = []
        for g, group in enumerate(task.groups):
            part = self.on_host[g]
            read, write = rows.variable(), rows.variable()
            changed = (group.updated + group.states) / n
            everything = changed + group.gradients / n
            homes = [(1.0, self.parameters[g]), (1.0, self.states[g])]
            homes += [(1 / n, self.whole_parameters[g]), (1 / n, self.whole_states[g])]
            rows.at_least([(1.0, write), (changed, part), *homes], changed)
            homes += [(1.0, self.at_home[g]), (1 / n, self.whole_gradients[g])]
            rows.at_least([(1.0, read), (everything, part), *homes], everything)
            if n == 1:  # an updated parameter is in the ring whole
                whole = group.largest_whole
                elsewhere = (group.times_whole * group.updated, part)  # where the host updates it
                rows.at_least([(1.0, self.arena), elsewhere, *homes], whole)
            for most, home in (
                (group.parameters, self.parameters[g]),
                (group.gradients, self.at_home[g]),
                (group.states, self.states[g]),
            ):
                rows.at_most([(1.0, home), (most / n, part)], most / n)
            late = rows.variable()  # gradients for the host that were still on their way
            written = [(1.0, w) for w in self.w[g]]
            rows.at_least([*written, (1.0, late), (-group.gradients / n, part)], 0.0)
            reads.append((1.0, read))
            writes += [(1.0, write), (1.0, late)]
            device_s = group.traffic / each / stream
            compute += [(device_s, None), (-device_s, part)]
            if task.machine.updates_on_host:
                on_host.append((group.traffic / each / host, part))
        self._links(seconds, reads, writes, compute)
        rows.at_least([(1.0, seconds), *_scaled(on_host, -1.0)], 0.0)
        self._disk(seconds)
        if task.apart > 1:
            rest = rows.variable()
            rows.at_least([(1.0, rest), *((1.0, q) for q in self.q)], self.total_sent)
            self._peers(seconds, [], [(1.0, rest)])

    def _tiers(self) -> None:
        """What is not at home on the device is on the host, if there is one, or the disk; what is
        updated on the host is at home there."""
        rows, task, n = self.rows, self.task, self.task.group.ranks
        homes = [
            (1.0, part) for parts in (self.parameters, self.at_home, self.states) for part in parts
        ]
        wholes = (self.whole_parameters, self.whole_gradients, self.whole_states)
        homes += [(1 / n, part) for parts in wholes for part in parts]
        total = sum(g.parameters + g.gradients + g.states for g in task.groups) / n
        host = 0.0 if task.machine.unified else task.limits.host / task.unit_bytes
        rows.at_least([(1.0, self.on_disk), *homes], total - host)
        rows.at_most([(1.0, self.on_disk)], task.disk_bytes / task.unit_bytes)
        hosted = [(g.updated + g.gradients + g.states) / n for g in task.groups]
        rows.at_most(list(zip(hosted, self.on_host, strict=True)), host)

    def _disk(self, update: int) -> None:
        """What the host has no room for is on the disk behind it: every byte of it is read for
        the update, and written in the step once; nothing of it is updated on the host."""
        rows, task, n = self.rows, self.task, self.task.group.ranks
        into, back = task.link(Tier.DISK, Tier.HOST), task.link(Tier.HOST, Tier.DISK)
        if into is None or back is None:
            return
        frozen = sum(g.parameters - g.updated for g in task.groups) / n
        late = rows.variable()  # bytes on the disk that an update changes
        rows.at_least([(1.0, late), (-1.0, self.on_disk)], -frozen)
        moved = [(1.0, late)]
        self._pair(update, moved, [], into, back)
        everything = rows.variable()
        rows.at_most([(1.0, everything), *((-1.0, t) for t in (*self.t, update))], 0.0)
        self._pair(everything, moved, moved, into, back)


def _scaled(terms: Sequence[tuple[float, int]], factor: float) -> list[tuple[float, int]]:
    return [(value * factor, column) for value, column in terms]
