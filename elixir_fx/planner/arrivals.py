"""Arrivals: a plan for regions that come one at a time.

For the torch.compile backend, where a model with graph breaks is handed over piece by piece
and the first piece has to run before the second is known.

    first    the first region has come: parameters of the whole model are known, activations
             of this region only. Room is left for those to come, in proportion to the bytes
             of parameters that are not read here. If everything fits, everything stays.
             Otherwise gradients and optimizer states leave, all that can. A first region that
             does not train, or reads no parameter, says nothing of the step: the thriftiest
             layout then leaves the most room, unless the state takes less than half of it.
    settle   after the first whole step every region is known: gradients and states come
             home as far as the room goes that the step left. States first: a byte of them
             saves a load and a store in every update, a byte of gradients a store and a load
             only where the backward and the update are not waiting for compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts, Role
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Chunk, Homes, Layout, Limits, Plan, align
from elixir_fx.planner.footprint import ChunkBytes, Footprint, Part, away, home
from elixir_fx.planner.pack import away_tiers
from elixir_fx.planner.search import schedule, search
from elixir_fx.planner.space import Space
from elixir_fx.units import sizes

STAGING_PARTS = 4  # of the host's memory, one is for staging
GRADIENT_BLOCKS = 2  # where gradients leave that the search had kept


@dataclass(frozen=True, kw_only=True)
class Region:
    """A region that has come, and the most bytes that others held while it ran."""

    facts: Facts
    held_bytes: int


def first(facts: Facts, machine: Machine, limits: Limits, pins: Mapping[str, Tier]) -> Plan:
    """The plan when the first region has come. PlanError if that region alone cannot fit."""
    learns = any(parameter.trainable for parameter in facts.parameters)
    if learns and not (facts.trains and any(p.reads for p in facts.parameters)):
        plan = _unknown(facts, machine, limits, pins)
    else:
        room = max(0, limits.device - to_come_bytes(facts))
        try:
            plan = search(facts, machine, replace(limits, device=room), pins)
        except PlanError:
            plan = search(facts, machine, limits, pins)
        plan = replace(plan, limits=limits)
    if plan.layout.keeps_all:
        return plan
    mapped = replace(plan.layout, mapped=machine.unified)
    layout = _leaving(mapped, facts, machine, limits)
    made = schedule(facts, machine, limits, layout)
    notes = ("gradients and optimizer states leave until the first whole step is known",)
    return replace(plan, layout=layout, schedules=(made,), notes=notes)


def _unknown(facts: Facts, machine: Machine, limits: Limits, pins: Mapping[str, Tier]) -> Plan:
    """The plan for a model that learns when its first region tells nothing of the step."""
    space = Space(facts=facts, machine=machine, limits=limits, pins=pins)
    everything = space.keep_all()
    if everything is not None:
        constant = Footprint(facts, everything.layout.chunks).constant(
            [Homes()] * len(everything.layout.chunks)
        )
        if constant <= limits.device // 2 or space.least is None:
            return space.plan(everything)
    draft = None
    if space.least is not None and space.least[0] <= limits.device:
        choice = space.least[1]
        draft = space.drafters[choice.chunk_bytes].draft(choice, lambda layout: True)
    if draft is None:
        raise PlanError(space.refusal())
    return space.plan(space.arranged(draft))


def settle(plan: Plan, regions: Sequence[Region], machine: Machine) -> Plan:
    """The final plan, once `regions` are all of the step's."""
    limits, layout = plan.limits, plan.layout
    peaks = [
        Footprint(region.facts, layout.chunks).layout_peak(layout, region.held_bytes)
        for region in regions
    ]
    room = limits.device - max(peaks, default=limits.device)
    training = [region.facts for region in regions if region.facts.trains]
    if layout.keeps_all or not training:
        return replace(plan, notes=("final: nothing is left to decide",))
    all_sizes = Footprint(training[0], layout.chunks).sizes
    homes = {chunk.id: chunk.homes for chunk in layout.chunks}
    brought = 0
    left = sum(home(homes[s.chunk.id], part) is not Tier.DEVICE for s in all_sizes for part in Part)
    for part in (Part.STATES, Part.GRADIENTS):
        for chunk_sizes in all_sizes:
            nbytes = chunk_sizes.ordinary[part]
            identity = chunk_sizes.chunk.id
            if home(homes[identity], part) is Tier.DEVICE or not 0 < nbytes <= room:
                continue
            if left == 1:  # a layout that keeps all is another one: without reduces
                break
            homes[identity] = replace(homes[identity], **{part.value: Tier.DEVICE})
            room -= nbytes
            brought += nbytes
            left -= 1
    final = replace(
        layout, chunks=tuple(replace(chunk, homes=homes[chunk.id]) for chunk in layout.chunks)
    )
    return replace(
        plan,
        layout=final,
        schedules=tuple(schedule(region.facts, machine, limits, final) for region in regions),
        notes=(f"final after {len(regions)} regions: {sizes(brought)} came home",),
    )


def to_come_bytes(facts: Facts) -> int:
    """Activations of regions that have not come yet: as many for each byte of their
    parameters as this region has for its own."""
    read = sum(p.nbytes for p in facts.parameters if p.reads)
    idle = sum(p.nbytes for p in facts.parameters if not p.reads)
    saved = sum(s.nbytes for s in facts.storages if s.role is Role.ACTIVATION)
    return saved * idle // read if read else 0


def _leaving(layout: Layout, facts: Facts, machine: Machine, limits: Limits) -> Layout:
    """`layout` with the gradients and states of every chunk away, or as it is if the tiers or
    the device have no room for that."""
    tiers = away_tiers(machine, limits)
    room = {tier: limits.of(tier) for tier in tiers}
    staging = 0
    if Tier.HOST in room and Tier.DISK in room:  # what goes to the disk passes through the host
        staging = max(layout.staging_bytes, limits.host // STAGING_PARTS)
    if Tier.HOST in room:
        room[Tier.HOST] -= staging
    footprint = Footprint(facts, layout.chunks)
    chunks: list[Chunk] = []
    used = dict.fromkeys(tiers, 0)

    def take(tier: Tier, nbytes: int) -> None:
        room[tier] -= nbytes
        used[tier] += nbytes

    for chunk, size in zip(layout.chunks, footprint.sizes, strict=True):
        if chunk.homes.parameters is not Tier.DEVICE:
            take(chunk.homes.parameters, align(size.packed[Part.PARAMETERS]))
    for chunk, size in zip(layout.chunks, footprint.sizes, strict=True):
        homes = chunk.homes
        for part in (Part.STATES, Part.GRADIENTS) if chunk.trainable else ():
            nbytes = align(size.packed[part])
            tier = next((tier for tier in tiers if nbytes <= room[tier]), None)
            if tier is None:
                return layout
            take(tier, nbytes)
            homes = replace(homes, **{part.value: tier})
        chunks.append(replace(chunk, homes=homes))
    block = max((align(c.nbytes) for c in layout.chunks if c.trainable), default=0)
    blocks = max(layout.gradient_blocks, GRADIENT_BLOCKS)
    unit = max(_unit_bytes(c, s, layout) for c, s in zip(chunks, footprint.sizes, strict=True))
    left = replace(
        layout,
        chunks=tuple(chunks),
        gradient_blocks=blocks,
        gradient_block_bytes=block,
        arena_bytes=max(layout.arena_bytes, layout.gather_bytes + blocks * block, unit),
        host_bytes=used.get(Tier.HOST, 0),
        disk_bytes=used.get(Tier.DISK, 0),
        staging_bytes=staging if used.get(Tier.DISK) else 0,
    )
    return left if footprint.layout_peak(left) <= limits.device else layout


def _unit_bytes(chunk: Chunk, size: ChunkBytes, layout: Layout) -> int:
    """Ring memory that the update of the chunk's largest unit takes."""
    if not chunk.trainable:
        return 0
    return away(chunk.homes, size.of(size.largest_unit(layout.update_numel)))
