"""Pack: which parameters move together.

First stage of the planner. Parameters are packed into chunks in order of first use
(Elixir, arXiv 2212.05339, section 3: the order is known before the run). A chunk holds one
kind only: one dtype, trainable or not, one pinned tier, read by the graph or not. Three sorts
of parameters do not join the running chunk of their kind: one larger than a chunk, one
that is pinned to another tier, and one whose first and last use in the forward are far
apart (a tied embedding, the weights of an unrolled cell), since its chunk stays gathered
all that time.

Where several ranks train, each has an equal part of every chunk. Parts begin at multiples of 64
elements of every parameter, so that a kernel that updates a part does to each element what it
does to it in the whole (DESIGN, law 10). An optimizer that needs parameters whole
(Adafactor, Muon) keeps those it trains whole on every rank; so are scalars, and what the user
keeps on the device or has left alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts, Parameter
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ALIGNMENT_BYTES, ONE_RANK, Chunk, Group, Homes, Limits, Slice, align

FAR_FRACTION = 1 / 8  # of the forward's nodes: uses farther apart make a parameter "far"
FAR_NODES = 8  # but never nearer than this many nodes
CHUNK_STEPS = (1.0, 1.5, 2.25, 3.4, 5.0, 8.0)  # chunk sizes tried, in typical large parameters
CUT = 64  # elements at whose multiples parameters are cut for the ranks
PADDING = 0.005  # of a chunk that may be added so that the parts are whole disk blocks
ALONE = 64  # a model of at most so many parameters is also tried with a chunk for each


@dataclass(frozen=True, slots=True)
class Kind:
    """What all parameters of one chunk have in common. `far` is the first and last use in
    the forward of a parameter with distant uses."""

    dtype: str
    itemsize: int
    trainable: bool
    pin: Tier | None
    read: bool
    far: tuple[int, int] | None = None
    whole: bool = False  # not to be cut between ranks


def pinned_tiers(
    facts: Facts, machine: Machine, limits: Limits, pins: Mapping[str, Tier]
) -> dict[str, Tier]:
    """The tier that each pinned parameter's home must be, by parameter path.

    A pin names a parameter, an alias of one, or a module: then it holds for all in it.
    `pins` win over `Parameter.pinned`. PlanError for names that match nothing and for tiers
    that do not exist here.
    """
    tiers = {p.path: Tier(p.pinned) for p in facts.parameters if p.pinned is not None}
    for name, tier in sorted(pins.items()):
        paths = [p.path for p in facts.parameters if _named(p, name)]
        if not paths:
            raise PlanError(f"keep names {name!r}, which is neither a parameter nor a module")
        tiers.update(dict.fromkeys(paths, Tier(tier)))
    for path, tier in sorted(tiers.items()):
        if tier != Tier.DEVICE and tier not in away_tiers(machine, limits):
            raise PlanError(f"{path} is pinned to {tier}, but this plan has no {tier} memory")
    return tiers


def away_tiers(machine: Machine, limits: Limits) -> tuple[Tier, ...]:
    """The tiers beside the device that have memory and links, the nearest first."""
    if machine.unified:
        reached = limits.disk > 0 and linked(machine, Tier.DEVICE, Tier.DISK)
        return (Tier.DISK,) if reached else ()
    if limits.host <= 0 or not linked(machine, Tier.DEVICE, Tier.HOST):
        return ()  # a disk is reached through host memory
    reached = limits.disk > 0 and linked(machine, Tier.HOST, Tier.DISK)
    return (Tier.HOST, Tier.DISK) if reached else (Tier.HOST,)


def linked(machine: Machine, near: Tier, far: Tier) -> bool:
    """Whether bytes can go from either tier to the other."""
    ends = (machine.find_link(near, far), machine.find_link(far, near))
    return None not in ends


def chunk_sizes(facts: Facts) -> tuple[int, ...]:
    """Chunk sizes worth trying, in bytes, ascending.

    From the typical large parameter to a quarter of all parameters. Typical is the size up to
    which lie half of the bytes of parameters whose size occurs twice: an outsized embedding has a
    chunk of its own anyway.
    """
    by_size: dict[int, int] = {}
    for parameter in facts.parameters:
        nbytes = align(parameter.nbytes)
        by_size[nbytes] = by_size.get(nbytes, 0) + 1
    if not any(by_size):
        return (align(1),)
    total = sum(size * count for size, count in by_size.items())
    repeated = {size: count for size, count in by_size.items() if count > 1} or by_size
    half = sum(size * count for size, count in repeated.items()) / 2
    typical, below = align(1), 0
    for size in sorted(repeated):
        typical, below = max(typical, size), below + size * repeated[size]
        if below >= half:
            break
    found = {align(int(typical * step)) for step in CHUNK_STEPS}
    found = {size for size in found if size <= total / 4} | {typical}
    if len(facts.parameters) <= ALONE:
        found.add(align(1))
    return tuple(sorted(found))


def pack(
    facts: Facts, chunk_bytes: int, pins: Mapping[str, Tier], group: Group = ONE_RANK
) -> tuple[Chunk, ...]:
    """Chunks of at most `chunk_bytes` (or one larger parameter), all at home on the device.

    Chunk ids count from 0 in order of first use; slices start at multiples of
    `ALIGNMENT_BYTES`. Every parameter is in exactly one chunk.
    """
    groups: list[tuple[Kind, list[Parameter]]] = []
    running: dict[Kind, int] = {}
    filled: list[int] = []
    for parameter, kind in _kinds(facts, pins, group):
        nbytes = align(parameter.nbytes)
        place = running.get(kind) if kind.far is None else _similar(groups, kind)
        if place is not None and filled[place] + nbytes <= chunk_bytes:
            groups[place][1].append(parameter)
            filled[place] += nbytes
            continue
        groups.append((kind, [parameter]))
        filled.append(nbytes)
        if nbytes <= chunk_bytes:
            running[kind] = len(groups) - 1
    return tuple(
        _chunk(number, kind, parameters, 1 if kind.whole else group.ranks)
        for number, (kind, parameters) in enumerate(groups)
    )


def _needed_whole(facts: Facts, parameter: Parameter) -> bool:
    """Whether every rank must have all of a parameter: its optimizer reads it whole, or it has
    no dimension, so that its states cannot be told from counters of steps."""
    optimizer = facts.optimizer
    reads_whole = optimizer is not None and not optimizer.elementwise
    return not parameter.shape or (parameter.trainable and reads_whole)


def _kinds(
    facts: Facts, pins: Mapping[str, Tier], group: Group
) -> Iterator[tuple[Parameter, Kind]]:
    never = len(facts.nodes)
    ordered = sorted(facts.parameters, key=lambda p: min(p.reads, default=never))
    far = max(FAR_NODES, int(facts.backward * FAR_FRACTION))
    for parameter in ordered:
        forward = [read for read in parameter.reads if read < facts.backward]
        distant = bool(forward) and max(forward) - min(forward) > far
        yield (
            parameter,
            Kind(
                dtype=parameter.dtype,
                itemsize=parameter.itemsize,
                trainable=parameter.trainable,
                pin=pins.get(parameter.path),
                read=bool(parameter.reads),
                far=(min(forward), max(forward)) if distant else None,
                whole=group.ranks > 1
                and (_needed_whole(facts, parameter) or pins.get(parameter.path) is Tier.DEVICE),
            ),
        )


def _named(parameter: Parameter, name: str) -> bool:
    known = (parameter.path, *parameter.aliases)
    return any(path == name or path.startswith(f"{name}.") for path in known)


def _similar(groups: list[tuple[Kind, list[Parameter]]], kind: Kind) -> int | None:
    """The latest chunk of parameters in use at nearly the same time as `kind.far`."""
    assert kind.far is not None
    first, last = kind.far
    for place in range(len(groups) - 1, -1, -1):
        other = groups[place][0]
        alike = (other.dtype, other.trainable, other.pin, other.whole) == (
            kind.dtype,
            kind.trainable,
            kind.pin,
            kind.whole,
        )
        if other.far is None or not alike:
            continue
        common = min(last, other.far[1]) - max(first, other.far[0])
        either = max(last, other.far[1]) - min(first, other.far[0])
        if common >= 0.8 * either:
            return place
    return None


def _chunk(number: int, kind: Kind, parameters: list[Parameter], shards: int) -> Chunk:
    slices = []
    offset = 0
    for parameter in parameters:
        slices.append(
            Slice(
                path=parameter.path,
                offset=offset,
                span=parameter.span,
                shape=parameter.shape,
                strides=parameter.strides,
            )
        )
        offset += align(parameter.nbytes) // kind.itemsize
    return Chunk(
        id=number,
        dtype=kind.dtype,
        itemsize=kind.itemsize,
        numel=_divisible(offset, kind.itemsize, shards),
        trainable=kind.trainable,
        slices=tuple(slices),
        homes=Homes(),
        shards=shards,
    )


def _divisible(numel: int, itemsize: int, shards: int) -> int:
    """`numel`, padded so that `shards` equal parts begin where parameters may be cut, and at
    disk blocks where that adds little."""
    if shards == 1:
        return numel
    for step in (ALIGNMENT_BYTES // itemsize, CUT):
        padded = -(-numel // (shards * step)) * shards * step
        if padded - numel <= PADDING * numel or step == CUT:
            break
    return padded
