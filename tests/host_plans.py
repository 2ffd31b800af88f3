"""Plans in which some chunks are updated on the host, made by hand from a planner's.

options = updated_on_host(build, batch, every)      # compile()'s, on the emulated accelerator
pair = Pair(build, batches, options)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import exact
from graphs import seeded
from harness import Batch
from torch import nn

from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Chunk, Homes, Plan
from elixir_fx.testing import emulated
from elixir_fx.units import GIB

Choice = Callable[[Chunk], bool]
AT_HOME_ON_HOST = Homes(parameters=Tier.HOST, gradients=Tier.HOST, states=Tier.HOST)


def every(chunk: Chunk) -> bool:
    return True


def odd(chunk: Chunk) -> bool:
    """Half of them: what streams and what does not takes turns."""
    return chunk.id % 2 == 1


def even(chunk: Chunk) -> bool:
    return chunk.id % 2 == 0


def on_host(plan: Plan, chosen: Choice) -> Plan:
    """The plan with trained chunks updated on the host where `chosen`, and at home there."""
    chunks = tuple(
        replace(chunk, homes=AT_HOME_ON_HOST, update=Tier.HOST)
        if chunk.trainable and chosen(chunk)
        else chunk
        for chunk in plan.layout.chunks
    )
    room = 4 * sum(chunk.nbytes for chunk in chunks)  # parameters, gradients, at most two states
    layout = replace(plan.layout, chunks=chunks, host_bytes=max(plan.layout.host_bytes, room))
    return replace(plan, layout=layout)


def updated_on_host(
    build: Callable[[], nn.Module],
    batch: Batch,
    chosen: Choice,
    *,
    optimizer: Any = "adamw",
    machine: Machine | None = None,
    **options: Any,
) -> dict[str, Any]:
    """compile()'s options for the smallest budget of an emulated accelerator, with that plan."""
    tiers = {"machine": machine or emulated(), "host_memory": GIB, **options}
    model = seeded(0, build)
    memory = exact.smallest_memory(model, batch, optimizer=optimizer, **tiers)
    plan = exact.plan(model, batch, optimizer=optimizer, memory=memory, **tiers)
    return {"memory": memory, "plan": on_host(plan, chosen), **tiers}
