"""Plans made by hand in which some chunks are updated on the host.

options = options_for(GPT, every)      # compile()'s, on the emulated accelerator
pair = Pair(GPT.build, GPT.batches(3), options)
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from graphs import Named, gpt
from harness import MakeOptimizer, adamw
from made_plans import device_bytes, everything_away, facts_of

from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Chunk, Homes, Limits, Plan
from elixir_fx.testing import emulated
from elixir_fx.units import GIB

GPT = gpt(layers=2, width=128, seq=16)
SLOW = emulated(bytes_per_s=2e8, latency_s=1e-3)
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
    facts: Facts, chosen: Choice, *, machine: Machine | None = None, chunk_bytes: int = 1
) -> dict[str, Any]:
    """compile()'s options for the step of `facts` on an emulated accelerator: everything is away
    on the host, the device has room for that alone."""
    machine = machine or emulated()
    limits = Limits(device=GIB, host=GIB)
    plan = everything_away(facts, machine, limits, chunk_bytes=chunk_bytes, ring=2)
    plan = on_host(plan, chosen)
    memory = device_bytes(facts, plan.layout)
    plan = replace(plan, limits=replace(limits, device=memory))
    return {"memory": memory, "plan": plan, "machine": machine, "host_memory": GIB}


@cache
def captured(example: Named, make_optimizer: MakeOptimizer) -> Facts:
    model = example.build()
    optimizer = make_optimizer(list(model.parameters()))
    return facts_of(model, example.batches(1)[0], optimizer, machine=emulated())


def options_for(
    example: Named, chosen: Choice, make_optimizer: MakeOptimizer = adamw, **options: Any
) -> dict[str, Any]:
    """`updated_on_host` for an example and its optimizer."""
    return updated_on_host(captured(example, make_optimizer), chosen, **options)
