"""Elixir rule: the plan that the paper's published method would make (arXiv 2212.05339).

    budget     0.95 (device - reserve - buffers - 1.25 activations)           `_budget_bytes`
    chunks     of equal size S, in order of first use; S from base to 3 base,
               base = max(32 MiB, the largest parameter, up to a power of 2);
               the least S x (moves under Belady's replacement)               `_chunk_sizes`
    blocks     N of size S hold gathered chunks: the rCache
    which first, more blocks or more chunks at home on the device, of n ranks `cache_first`
               I = e_p / c2g + e_p / g2c
               J = n / r (e_o / c2g + I + e_p / g2c + 1 / v_cpu - 1 / v_gpu)
               blocks if I > J, up to one for each chunk, then chunks; else the other way round
    moves      the next chunk is prefetched while one is read, no deeper

e_p are the bytes of a parameter's element, e_o = 4, r the bytes of parameter, gradient and states
in e_p. A chunk is at home whole on one side; those on the host are updated there, if the machine
has an optimizer there. Where RAM and disk are the tiers, the disk is the host.

Kept apart from the method: gradients pass through one block of their own, since our runtime
does not put them where the parameters were; chunks at home on the device of a single rank need
no block; and the reserve of 2 GiB and the least chunk of 32 MiB shrink with devices under 8 GiB,
which the paper does not have.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import log

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts, OptimizerFacts, Role
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Chunk, Group, Limits, Plan, align
from elixir_fx.planner.arranged import Arranger, one_ahead
from elixir_fx.planner.footprint import NO_OPTIMIZER
from elixir_fx.planner.place import Stay, Use, core_bytes, place, uses
from elixir_fx.planner.space import Arranged
from elixir_fx.units import GIB, MIB

BUDGET_SHARE = 0.95  # of what is left may be chunks
RESERVE_BYTES = 2 * GIB
ACTIVATION_FACTOR = 1.25
LEAST_CHUNK_BYTES = 32 * MIB
SMALL_DEVICE_BYTES = 8 * GIB  # a smaller one has a reserve and a least chunk in proportion
OPTIMIZER_ELEMENT_BYTES = 4  # e_o
SCAN_STEPS = 32  # chunk sizes tried between base and 3 base


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleConstants:
    """What the rule knows of a machine, of all ranks together: bytes/s from host to device
    (`c2g`) and back, parameters/s that an optimizer updates on the device and on the host."""

    c2g_bytes_per_s: float
    g2c_bytes_per_s: float
    gpu_parameters_per_s: float
    cpu_parameters_per_s: float

    @staticmethod
    def paper(ranks: int) -> "RuleConstants":
        """As fitted to the authors' node of A100s."""
        return RuleConstants(
            c2g_bytes_per_s=(16.3 * ranks + 8.7) * 1e9,
            g2c_bytes_per_s=(15.8 * ranks + 2.3) * 1e9,
            gpu_parameters_per_s=50e9 * ranks,
            cpu_parameters_per_s=(1.66 * log(ranks) + 5.15) * 1e9,
        )

    @staticmethod
    def of(machine: Machine, optimizer: OptimizerFacts, ranks: int) -> "RuleConstants":
        """Of any machine. Without an optimizer on the host, what is away is updated on the
        device, and its states must come and go."""
        far = Tier.DISK if machine.unified else Tier.HOST
        c2g = machine.link(far, Tier.DEVICE).bytes_per_s
        g2c = machine.link(Tier.DEVICE, far).bytes_per_s
        gpu_s = optimizer.read_bytes / machine.stream_bytes_per_s
        cpu_s = gpu_s + optimizer.state_bytes / c2g + optimizer.state_bytes / g2c
        if machine.host_stream_bytes_per_s:
            cpu_s = optimizer.read_bytes / machine.host_stream_bytes_per_s
        return RuleConstants(
            c2g_bytes_per_s=c2g * ranks,
            g2c_bytes_per_s=g2c * ranks,
            gpu_parameters_per_s=ranks / gpu_s if gpu_s else float("inf"),
            cpu_parameters_per_s=ranks / cpu_s if cpu_s else float("inf"),
        )

    def cache_first(self, element_bytes: int, model_bytes: int, ranks: int) -> bool:
        """Whether device memory goes to cache blocks before chunks. `element_bytes` of a
        parameter, `model_bytes` of parameter, gradient and states together."""
        moved_s = element_bytes / self.c2g_bytes_per_s + element_bytes / self.g2c_bytes_per_s
        factor = model_bytes / element_bytes
        kept_s = (ranks / factor) * (
            OPTIMIZER_ELEMENT_BYTES / self.c2g_bytes_per_s
            + moved_s
            + element_bytes / self.g2c_bytes_per_s
            + 1 / self.cpu_parameters_per_s
            - 1 / self.gpu_parameters_per_s
        )
        return moved_s > kept_s


def elixir_rule(
    facts: Facts,
    machine: Machine,
    limits: Limits,
    pins: Mapping[str, Tier] | None = None,
    group: Group = ONE_RANK,
    constants: RuleConstants | None = None,
) -> Plan:
    """The rule's plan; without `constants`, with those of the machine. PlanError if it does not
    meet the limits: it knows no tier beyond the host, and no way to make itself smaller than the
    chunks that are needed at once."""
    arranger = Arranger(facts=facts, machine=machine, limits=limits, pins=pins or {}, group=group)
    return arranger.plan("elixir_rule", by_rule(arranger, constants))


def by_rule(arranger: Arranger, constants: RuleConstants | None = None) -> Arranged:
    """What the rule decides. PlanError as above."""
    facts = arranger.facts
    known = constants
    if known is None and arranger.tiers:
        optimizer = facts.optimizer or NO_OPTIMIZER
        known = RuleConstants.of(arranger.machine, optimizer, arranger.group.ranks)
    budget = _budget_bytes(facts, arranger.limits)
    refusal: PlanError | None = None
    for size in _chunk_sizes(arranger, budget):
        try:
            return _with_chunks(arranger, size, budget, known)
        except PlanError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _with_chunks(
    arranger: Arranger, size: int, budget: int, constants: RuleConstants | None
) -> Arranged:
    """What the rule decides with chunks of a size; without `constants` nothing can be away."""
    chunks = arranger.pack(size)
    away = arranger.tiers[0] if arranger.tiers else Tier.DEVICE
    blocks_first = False
    if constants is not None:
        optimizer = arranger.facts.optimizer or NO_OPTIMIZER
        element = max((chunk.itemsize for chunk in chunks), default=4)
        model = 2 * element + optimizer.state_bytes
        blocks_first = constants.cache_first(element, model, arranger.group.ranks)
    refusal: PlanError | None = None
    for blocks, kept in _shares(arranger, chunks, size, budget, blocks_first):
        homes = [Tier.DEVICE] * kept + [away] * (len(chunks) - kept)
        stays_of = partial(_cached, arranger, blocks * size)
        try:
            settled = arranger.settle(chunks, homes)
            settled = tuple(on_host(arranger.machine, chunk) for chunk in settled)
            return arranger.arrange("elixir_rule", settled, stays_of, gradient_blocks=1)
        except PlanError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def on_host(machine: Machine, chunk: Chunk) -> Chunk:
    """`chunk`, updated on the host if all of it is at home there and an optimizer runs there."""
    homes = (chunk.homes.parameters, chunk.homes.gradients, chunk.homes.states)
    at_home = chunk.trainable and all(tier is Tier.HOST for tier in homes)
    if at_home and machine.host_stream_bytes_per_s:
        return replace(chunk, update=Tier.HOST)
    return chunk


def _cached(arranger: Arranger, area: int, needed: Sequence[Use]) -> tuple[Stay, ...] | None:
    stays = place(needed, max(area, core_bytes(needed)), arranger.first_call)
    return None if stays is None else one_ahead(stays)


def _small(limits: Limits) -> float:
    """What a device is of the smallest that the paper's constants are meant for."""
    return min(1.0, limits.device / SMALL_DEVICE_BYTES)


def _budget_bytes(facts: Facts, limits: Limits) -> int:
    reserve = RESERVE_BYTES * _small(limits)
    left = limits.device - reserve - facts.buffer_bytes
    return max(0, int(BUDGET_SHARE * (left - ACTIVATION_FACTOR * activation_peak_bytes(facts))))


def activation_peak_bytes(facts: Facts) -> int:
    """The most bytes of activations and temporaries at one time; gradients are not among them,
    they have their chunk's own memory in the paper."""
    change = [0] * (len(facts.nodes) + 1)
    for storage in facts.storages:
        if storage.role in (Role.ACTIVATION, Role.TEMPORARY):
            change[storage.born] += storage.nbytes
            change[storage.dies + 1] -= storage.nbytes
    live = peak = 0
    for each in change:
        live += each
        peak = max(peak, live)
    return peak


def _base(facts: Facts, limits: Limits) -> int:
    largest = max((p.nbytes for p in facts.parameters), default=1)
    least = align(int(LEAST_CHUNK_BYTES * _small(limits)))
    return max(least, align(1 << max(0, largest - 1).bit_length()))


def _chunk_sizes(arranger: Arranger, budget: int) -> list[int]:
    """Chunk sizes, first those that move the fewest bytes through the blocks of the whole budget.
    The paper takes the first one; the others are for where its blocks do not fit our arena."""
    base = _base(arranger.facts, arranger.limits)
    costs = {}
    for step in range(SCAN_STEPS + 1):
        size = align(base + 2 * base * step // SCAN_STEPS)
        order = list(_order(arranger, arranger.pack(size)))
        costs[size] = size * moves(order, max(1, budget // size))
    return sorted(costs, key=lambda size: (costs[size], size))


def _order(arranger: Arranger, chunks: Sequence[Chunk]) -> Iterator[int]:
    """Chunks as the step reads them, in either phase."""
    spans = [
        (span[0], use.chunk)
        for use in uses(arranger.facts, chunks)
        for span in (use.forward, use.backward)
        if span is not None
    ]
    return (chunk for _, chunk in sorted(spans))


def moves(order: Sequence[int], blocks: int) -> int:
    """How often a chunk is brought in when `blocks` hold some, and the one whose next read is
    farthest away goes first (Belady)."""
    following: list[int] = [len(order)] * len(order)
    seen: dict[int, int] = {}
    for place_in_order in range(len(order) - 1, -1, -1):
        following[place_in_order] = seen.get(order[place_in_order], len(order))
        seen[order[place_in_order]] = place_in_order
    held: dict[int, int] = {}
    count = 0
    for chunk, next_read in zip(order, following, strict=True):
        if chunk not in held:
            count += 1
            if len(held) >= blocks:
                del held[max(held, key=lambda one: (held[one], one))]
        held[chunk] = next_read
    return count


def _shares(
    arranger: Arranger, chunks: tuple[Chunk, ...], size: int, budget: int, blocks_first: bool
) -> Iterator[tuple[int, int]]:
    """(blocks, chunks at home on the device) of the rule; then less and less of what it would
    give last, as our arena takes more than the paper's blocks."""
    footprint = arranger.footprint(chunks)
    whole = [sum(one.ordinary.values()) for one in footprint.sizes]
    least = max(1, -(-core_bytes(uses(arranger.facts, chunks)) // size))

    def kept_in(nbytes: int) -> int:
        """How many chunks fit, the first ones first."""
        count = 0
        for each in whole:
            nbytes -= each
            if nbytes < 0:
                break
            count += 1
        return count

    most = max(least, min(len(chunks), budget // size))
    if blocks_first:
        kept = kept_in(budget - most * size)
        yield from ((most, fewer) for fewer in range(kept, -1, -1))
        yield from ((fewer, 0) for fewer in range(most - 1, least - 1, -1))
        return
    kept = kept_in(budget - least * size)
    blocks = max(least, min(len(chunks), (budget - sum(whole[:kept])) // size))
    yield from ((fewer, kept) for fewer in range(blocks, least - 1, -1))
    yield from ((least, fewer) for fewer in range(kept - 1, -1, -1))
