"""Baselines: what others would decide for a step, as plans that can be compared and run.

    keep_all         everything on the device; of several ranks, each its share
    offload_all      everything away, the fewest bytes gathered at once, two of everything
    zero3_per_layer  ZeRO-3 as DeepSpeed and FSDP2 do it: a chunk for each layer, gathered
                     before use and released after, the next one meanwhile, nothing kept
    elixir_rule      the published rule (elixir_rule.py)

A policy takes what `search` takes and raises PlanError if its plan does not meet the limits. The
search chooses from `rivals` as well, so that it is never slower than one of them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Limits, Plan, align
from elixir_fx.planner.arranged import Arranger, one_ahead
from elixir_fx.planner.elixir_rule import by_rule, on_host
from elixir_fx.planner.pack import chunk_sizes
from elixir_fx.planner.place import Stay, Use, core_bytes, place
from elixir_fx.planner.space import Arranged

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.)")


@dataclass(frozen=True)
class Policy:
    """Decides a whole step: `decide` arranges it, or raises PlanError if it does not fit."""

    name: str
    decide: Callable[[Arranger], Arranged]

    def __call__(
        self,
        facts: Facts,
        machine: Machine,
        limits: Limits,
        pins: Mapping[str, Tier] | None = None,
        group: Group = ONE_RANK,
        micro_batches: int = 1,
    ) -> Plan:
        """The policy's plan. PlanError if it does not fit."""
        arranger = Arranger(
            facts=facts,
            machine=machine,
            limits=limits,
            pins=pins or {},
            group=group,
            micro_batches=micro_batches,
        )
        return arranger.plan(self.name, self.decide(arranger))


def rivals(arranger: Arranger) -> Iterator[Arranged]:
    """What the policies decide, of those that keep the limits."""
    for policy in POLICIES.values():
        try:
            yield policy.decide(arranger)
        except PlanError:
            continue


def _keep_all(arranger: Arranger) -> Arranged:
    """Everything at home on the device. Of several ranks each has its share, and as many chunks
    stay gathered as the device has room for."""
    refused = PlanError("keep_all: no chunk size fits")
    for size in reversed(chunk_sizes(arranger.facts)):
        chunks = arranger.pack(size)
        home = arranger.settle(chunks, [Tier.DEVICE] * len(chunks))
        area = min(arranger.room(home), sum(align(chunk.nbytes) for chunk in home))
        try:
            return arranger.arrange("keep_all", home, partial(_placed, arranger, area))
        except PlanError as error:
            refused = error
    raise refused


def _placed(arranger: Arranger, area: int, needed: Sequence[Use]) -> tuple[Stay, ...] | None:
    return place(needed, area, arranger.first_call)


def _offload_all(arranger: Arranger) -> Arranged:
    """Everything away on the nearest tier with room, in the smallest chunks. Two chunks fit the
    gather area, so that one comes while another is read, or only what must, if that is too
    much."""
    chunks = arranger.pack(chunk_sizes(arranger.facts)[0])
    chunks = arranger.settle(chunks, [None] * len(chunks))

    def double(needed: Sequence[Use]) -> tuple[Stay, ...] | None:
        largest = max((align(use.nbytes) for use in needed), default=0)
        return _placed(arranger, core_bytes(needed) + largest, needed)

    def single(needed: Sequence[Use]) -> tuple[Stay, ...] | None:
        return _placed(arranger, core_bytes(needed), needed)

    try:
        return arranger.arrange("offload_all", chunks, double)
    except PlanError:
        return arranger.arrange("offload_all", chunks, single, gradient_blocks=1, ring=1)


def _zero3_per_layer(arranger: Arranger) -> Arranged:
    """A chunk for each layer, nothing kept from forward to backward. The shares are at home on
    the device if they fit; else on the host, where their optimizer runs if the machine has one
    there (ZeRO-Offload); else as far out as need be (ZeRO-Infinity)."""
    chunks = arranger.pack_by(layer_of)
    refusal: PlanError | None = None
    for tier in dict.fromkeys((Tier.DEVICE, *arranger.tiers[:1], None)):
        if tier is None and not arranger.tiers:
            continue
        try:
            settled = arranger.settle(chunks, [tier] * len(chunks))
            settled = tuple(on_host(arranger.machine, chunk) for chunk in settled)
            return arranger.arrange("zero3_per_layer", settled, partial(_sliding, arranger))
        except PlanError as error:
            refusal = error
    assert refusal is not None
    raise refusal


def layer_of(path: str) -> str:
    """The layer that a parameter belongs to: its path up to the first number ("h.3" of
    "h.3.mlp.fc.weight"), else its module."""
    found = _LAYER.match(path)
    return found[0] if found else path.rpartition(".")[0]


def _sliding(arranger: Arranger, needed: Sequence[Use]) -> tuple[Stay, ...]:
    """A stay for each use in either phase, prefetched while the one before it is read."""
    cores = [
        Stay(use.chunk, backward, align(use.nbytes), 0, arranger.first_call, span[0], span[1])
        for use in needed
        for backward, span in ((False, use.forward), (True, use.backward))
        if span is not None
    ]
    placed: list[Stay] = []
    for stay in one_ahead(cores):
        left = max((old.last + 1 for old in placed if old.chunk == stay.chunk), default=0)
        stay = replace(stay, start=min(max(stay.start, left), stay.first))
        placed.append(replace(stay, offset=_lowest(placed, stay)))
    return tuple(placed)


def _lowest(placed: Sequence[Stay], stay: Stay) -> int:
    """The lowest offset that is free all the time of a stay."""
    offset = 0
    meeting = [old for old in placed if old.start <= stay.last and stay.start <= old.last]
    for other in sorted(meeting, key=lambda old: old.offset):
        if other.offset >= offset + stay.nbytes:
            break
        offset = max(offset, other.offset + other.nbytes)
    return offset


keep_all = Policy("keep_all", _keep_all)
offload_all = Policy("offload_all", _offload_all)
zero3_per_layer = Policy("zero3_per_layer", _zero3_per_layer)
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (keep_all, offload_all, zero3_per_layer, Policy("elixir_rule", by_rule))
    }
)
