"""Plans made by hand, and the budgets that they take: what the search would choose is no matter.

facts = facts_of(model, batch, machine=emulated(), host_memory=GIB)
plan = everything_away(facts, emulated(), Limits(device=GIB, host=GIB))
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import Batch, planning, step_facts
from pairs import MACHINE
from torch import nn

from elixir_fx.facts import Facts
from elixir_fx.machine import Machine
from elixir_fx.plan import ONE_RANK, Layout, Limits, Plan, align
from elixir_fx.planner.arranged import Arranger
from elixir_fx.planner.footprint import Footprint
from elixir_fx.planner.place import Stay, Use, core_bytes, place
from elixir_fx.units import GIB


def facts_of(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer | str = "adamw",
    **options: Any,
) -> Facts:
    """The facts of the model's training step."""
    options = {"machine": MACHINE, **options}
    return step_facts(planning(model, optimizer, **options), batch)


def everything_away(
    facts: Facts, machine: Machine, limits: Limits, *, chunk_bytes: int = 1, ring: int = 1
) -> Plan:
    """All chunks at home on the nearest tier that has room, in chunks of so many bytes or one
    parameter. There is room to gather one more than is read at a time, and to update the widest
    parameter, `ring` times: the plan's limit of the device is what it takes."""
    arranger = Arranger(facts=facts, machine=machine, limits=limits, pins={}, group=ONE_RANK)
    chunks = arranger.pack(chunk_bytes)
    chunks = arranger.settle(chunks, [None] * len(chunks))

    def stays(needed: Sequence[Use]) -> tuple[Stay, ...] | None:
        largest = max(align(use.nbytes) for use in needed)
        return place(needed, core_bytes(needed) + largest, arranger.first_call)

    arranged = arranger.arrange("everything away", chunks, stays, ring=ring)
    plan = arranger.plan("everything away", arranged)
    return replace(plan, limits=replace(limits, device=device_bytes(facts, plan.layout)))


def on_disk(
    facts: Facts, folder: Path | str, *, room: float = 0.0, chunk_bytes: int = 1
) -> dict[str, Any]:
    """compile()'s options on a CPU for everything away on a disk, under a budget that is larger
    than it takes by a share of `room`."""
    tiers = Limits(device=GIB, disk=GIB)
    plan = everything_away(facts, MACHINE, tiers, chunk_bytes=chunk_bytes)
    memory = int((1 + room) * plan.limits.device)
    plan = replace(plan, limits=replace(plan.limits, device=memory))
    return {"plan": plan, "memory": memory, "disk": str(folder), "machine": MACHINE}


def device_bytes(facts: Facts, layout: Layout) -> int:
    """What the device must hold for a step of this layout."""
    return Footprint(facts, layout.chunks, layout.group).layout_peak(layout)
