"""Bound: a time that no plan under the same budgets can beat.

Let D be the device budget less the buffers. Of the parameters that the step updates let T
be the bytes of parameters, gradients and states, and U those of parameters and states; F
the bytes of all other parameters that the step reads. Consider a steady step, in which the
update follows the backward.

At the end of the backward all of T and F exist, and the device holds at most D of them.

    reads  >= T + F - D   a byte elsewhere is used in the update, or by the next forward
    writes >= T - D       a byte of T elsewhere was changed once since it was last there:
                          gradients by the backward, the others by the update

Bytes of F are the cheapest to have elsewhere (one read, no write) and are counted first;
all bytes of T cost one read and one write at least. The update alone, which begins when the
backward has ended, must load and store

    reads  >= T - D       what it changes, and was not on the device when it began
    writes >= U - D       what it changed, and is not on the device when it ends

(`least_bytes`). Links to the disk see the same with D + H, H the host budget, in place of D. A
pair of links with rates r, w alone and r', w' when both run needs for R and W bytes at least

    min  a + b + c   with  r a + r' c >= R,  w b + w' c >= W,  a, b, c >= 0

seconds (`pair_s`): c = min(R / r', W / w') where r'/r + w'/w >= 1, else c = 0. The bound is

    max( max over pairs of the step's bytes,
         compute of the graph + max(compute of the update, max over pairs of the update's bytes) )

Of N ranks with equal budgets the mean one must do at least an N-th of all that, where nothing is
held twice; the update computes an N-th where its parameters may be cut. Unless they share memory
it must also get from the others, once a step, what they updated, and send them the gradients for
that; with P the bytes of the parameters that the step trains,

    receives >= (N - 1) / N P,  sends >= (N - 1) / N P

An optimizer that can run on the host makes what passes the device less: then only the disk's links
are bounded so, and the update's compute by both rates together.

With micro-batches the compute of the graph counts as often; bytes are those of one. It takes the
graph as it is: recomputation and another numeric format are other graphs.

What must cross the links within the forward and the backward is the relaxation's business;
`Bound.step_s` is the larger of the two.
"""

from dataclasses import dataclass
from functools import cached_property

from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Limits
from elixir_fx.planner.relaxation import Relaxed, relax
from elixir_fx.planner.wires import together

PROVED = 1e-4  # a plan this close to a bound needs no better one


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """What must cross a pair of links, in either direction."""

    reads: int
    writes: int

    def beyond(self, budget: int) -> "MovedBytes":
        """What is left where memory holds `budget` of it."""
        return MovedBytes(max(0, self.reads - budget), max(0, self.writes - budget))

    def share(self, ranks: int) -> "MovedBytes":
        return MovedBytes(self.reads // ranks, self.writes // ranks)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What bounds a step under `limits` of each rank. The relaxation is solved once, when it is
    first asked for."""

    facts: Facts
    machine: Machine
    limits: Limits
    group: Group = ONE_RANK
    micro_batches: int = 1

    @cached_property
    def simple_s(self) -> float:
        """The bound by bytes and compute alone."""
        return simple_bound_s(self.facts, self.machine, self.limits, self.group, self.micro_batches)

    @cached_property
    def relaxed(self) -> Relaxed:
        """The relaxation's optimum."""
        return relax(self.facts, self.machine, self.limits, self.group, self.micro_batches)

    def step_s(self, reached_s: float = float("inf")) -> float:
        """Seconds that one steady step takes at least, on any plan; infinite where the relaxation
        shows that there is none.

        The relaxation is not asked where the simple bound shows that `reached_s`, the seconds of
        a plan at hand, cannot be beaten.
        """
        if self.simple_s >= reached_s * (1 - PROVED):
            return self.simple_s
        return max(self.simple_s, self.relaxed.step_s)


def lower_bound_s(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    group: Group = ONE_RANK,
    micro_batches: int = 1,
) -> float:
    """Seconds that one steady step takes at least: `Bound.step_s`."""
    return Bound(
        facts=facts, machine=machine, limits=limits, group=group, micro_batches=micro_batches
    ).step_s()


def simple_bound_s(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    group: Group = ONE_RANK,
    micro_batches: int = 1,
) -> float:
    """The bound by bytes and compute alone."""
    device = max(0, limits.device - facts.buffer_bytes)
    step_s = update_s = 0.0
    for near, far, budget in _pairs(machine, device, limits.host):
        step, update = least_bytes(facts, budget * group.ranks)
        step, update = step.share(group.ranks), update.share(group.ranks)
        step_s = max(step_s, pair_s(machine, near, far, step.reads, step.writes))
        update_s = max(update_s, pair_s(machine, near, far, update.reads, update.writes))
    if facts.trains:
        cut = facts.optimizer is None or facts.optimizer.elementwise
        whole_s = update_compute_s(facts, machine)
        update_s = max(update_s, whole_s / group.ranks if cut else whole_s)
        if group.ranks > 1 and not group.shared:
            trained = sum(p.nbytes for p in facts.parameters if facts.updates(p))
            others = trained * (group.ranks - 1) // group.ranks
            step_s = max(step_s, pair_s(machine, Tier.DEVICE, Tier.PEERS, others, others))
    passes = micro_batches if facts.trains else 1
    return max(step_s, passes * facts.compute_s + update_s)


def update_compute_s(facts: Facts, machine: Machine) -> float:
    """Seconds the optimizer computes: it streams what it reads and writes, on the device and,
    where it can, on the host at once."""
    if facts.optimizer is None:
        return 0.0
    nbytes = sum(
        p.span * facts.optimizer.of(p.dtype).read_bytes
        for p in facts.parameters
        if facts.updates(p)
    )
    rate = machine.update_bytes_per_s(Tier.DEVICE)
    if machine.updates_on_host:
        rate += machine.update_bytes_per_s(Tier.HOST)
    return nbytes / rate


def _pairs(machine: Machine, device: int, host: int) -> list[tuple[Tier, Tier, int]]:
    """(near tier, far tier, bytes that fit on the near side) of every pair of links."""
    if machine.unified:
        return [(Tier.DEVICE, Tier.DISK, device)]
    disk = (Tier.HOST, Tier.DISK, device + host)
    if machine.updates_on_host:  # the relaxation says what need not pass the device
        return [disk]
    return [(Tier.DEVICE, Tier.HOST, device), disk]


def least_bytes(facts: Facts, budget: int) -> tuple[MovedBytes, MovedBytes]:
    """What the step, and the update alone, must move past `budget` bytes of memory."""
    optimizer = facts.optimizer
    trained = changed = other = 0
    for parameter in facts.parameters:
        if facts.updates(parameter):
            each = optimizer.of(parameter.dtype).state_bytes if optimizer is not None else 0
            changed += parameter.nbytes + parameter.span * each
            trained += 2 * parameter.nbytes + parameter.span * each
        elif parameter.reads:
            other += parameter.nbytes
    step = MovedBytes(trained + other, trained)
    update = MovedBytes(trained, changed)
    return step.beyond(budget), update.beyond(budget)


def pair_s(machine: Machine, near: Tier, far: Tier, reads: int, writes: int) -> float:
    """Least seconds for bytes over the two links between a nearer and a farther tier."""
    into = machine.find_link(far, near)
    back = machine.find_link(near, far)
    if into is None or back is None:
        return 0.0
    rate_in, rate_out = into.bytes_per_s, back.bytes_per_s
    both_in, both_out = together(into, back), together(back, into)
    both_s = min(reads / both_in, writes / both_out)
    if both_in / rate_in + both_out / rate_out < 1:
        both_s = 0.0
    alone_in = max(0.0, reads - both_s * both_in) / rate_in
    alone_out = max(0.0, writes - both_s * both_out) / rate_out
    return both_s + alone_in + alone_out
