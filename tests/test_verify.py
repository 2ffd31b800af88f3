"""`verify` refuses every broken schedule, naming node and chunk, and accepts what passes make."""

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from breaking import WAYS, Way
from graphs import NAMED, gpt, mlp
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import MACHINE, TIERS, captured, copied, planned

from elixir_fx import ops
from elixir_fx.errors import VerifyError
from elixir_fx.machine import Machine, Tier
from elixir_fx.pipeline import PIPELINE, rewrite
from elixir_fx.plan import Chunk, Group, Limits, Plan
from elixir_fx.planner import search, smallest
from elixir_fx.step import STAY, StepGraph, stay_of
from elixir_fx.verify import verify

MODELS = {
    "mlp": mlp(64, 256, 256, 64),
    "gpt": gpt(layers=2, width=64, seq=8),
    "gpt_tied": gpt(layers=1, width=64, seq=8, tied=True),
    "thrice": NAMED["thrice"],
    "frozen": NAMED["kind_frozen"],
    "mixed": NAMED["kind_mixed"],
}
TRIES = 3  # of each way on each step


@cache
def rewritten(name: str, share: float) -> tuple[StepGraph, Plan]:
    """A rewritten step, all parameters away; the rest as the budget allows."""
    step = captured(MODELS[name])
    plan = planned(step, share, away=True)
    rewrite(step, plan, PIPELINE)
    return step, plan


STEPS = [*((name, 0.0) for name in MODELS), ("gpt", 0.3), ("mlp", 0.5)]


@pytest.mark.parametrize(("name", "share"), STEPS)
def test_what_the_passes_make_is_accepted(name: str, share: float) -> None:
    step, plan = rewritten(name, share)
    assert not plan.layout.keeps_all
    verify(step, plan)
    verify(copied(step), plan)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_broken_step_is_refused(way: Way) -> None:
    count = 0
    for name, share in STEPS:
        original, plan = rewritten(name, share)
        for seed in range(TRIES):
            step = copied(original)
            broken = way(step, plan, random.Random(f"{name} {seed}"))
            if broken is None:
                continue
            count += 1
            with pytest.raises(VerifyError) as refused:
                verify(step, broken.plan)
            assert re.search(broken.message, str(refused.value)), (name, seed, str(refused.value))
        verify(original, plan)  # what was broken was a copy
    assert count >= TRIES


def test_there_are_two_hundred_of_them() -> None:
    made: Counter[str] = Counter()
    for way in WAYS:
        for name, share in STEPS:
            original, plan = rewritten(name, share)
            for seed in range(TRIES):
                broken = way(copied(original), plan, random.Random(f"{name} {seed}"))
                made[way.__name__] += broken is not None
    assert made.total() >= 200, made


@given(st.sampled_from(STEPS), st.lists(st.sampled_from(WAYS), min_size=1), st.randoms())
@settings(max_examples=60, deadline=None)
def test_random_breaks_are_refused(
    which: tuple[str, float], ways: list[Way], rng: random.Random
) -> None:
    original, plan = rewritten(*which)
    step = copied(original)
    for way in ways:
        broken = way(step, plan, rng)
        if broken is not None:
            with pytest.raises(VerifyError):
                verify(step, broken.plan)
            return


# -- several ranks -----------------------------------------------------------------------------

GROUPS = (Group(ranks=2), Group(ranks=3, shared=True), Group(ranks=64))


def machine_of(group: Group) -> tuple[Machine, Limits]:
    """An accelerator with a host; where memory is shared, a CPU with a disk."""
    if not group.shared:
        return MACHINE.with_peers(), TIERS
    links = tuple(
        replace(x, source=Tier.DISK if x.source is Tier.HOST else x.source,
                target=Tier.DISK if x.target is Tier.HOST else x.target)
        for x in MACHINE.links
    )  # fmt: skip
    machine = replace(MACHINE, emulated=False, links=links).with_peers()
    return machine, replace(TIERS, host=0, disk=TIERS.host)


@cache
def of_ranks(name: str, group: Group, tight: bool) -> tuple[StepGraph, Plan]:
    """A rewritten step of one of several ranks, with the least memory or with plenty."""
    step = captured(MODELS[name])
    machine, limits = machine_of(group)
    facts = step.facts()
    if tight:
        limits = replace(limits, device=smallest(facts, machine, limits, group=group))
    plan = search(facts, machine, limits, group=group)
    step.layout, step.schedule = plan.layout, plan.schedules[0]
    rewrite(step, plan, PIPELINE)
    return step, plan


RANK_STEPS = [(name, group, tight) for name in ("gpt", "mixed", "frozen", "thrice")
              for group in GROUPS for tight in (False, True)]  # fmt: skip


@pytest.mark.parametrize(("name", "group", "tight"), RANK_STEPS)
def test_what_the_passes_make_for_a_rank_is_accepted(name: str, group: Group, tight: bool) -> None:
    step, plan = of_ranks(name, group, tight)
    resident = {stay_of(node).resident for node in step.nodes if node.target is ops.GATHER}
    assert tight or resident == {group.shared}
    verify(step, plan)
    verify(copied(step), plan)


# Ways that ask for what a plan with resident chunks may not have.
BLOCKS = {"block_reused_too_early", "kept_block_written_over", "block_outside_the_cache"}


@pytest.mark.parametrize("way", [way for way in WAYS if way.__name__ != "host_cut"],
                         ids=lambda way: way.__name__)  # fmt: skip
def test_a_broken_step_of_a_rank_is_refused(way: Way) -> None:
    for name, group, tight in RANK_STEPS:
        original, plan = of_ranks(name, group, tight)
        if not plan.layout.gather_bytes or (group.shared and way.__name__ in BLOCKS):
            continue
        step = copied(original)
        broken = way(step, plan, random.Random(f"{name} {group} {tight}"))
        if broken is None:
            continue
        with pytest.raises(VerifyError) as refused:
            verify(step, broken.plan)
        assert re.search(broken.message, str(refused.value)), (name, group, str(refused.value))


def with_chunks(plan: Plan, change: Callable[[Chunk], Chunk]) -> Plan:
    chunks = tuple(change(chunk) for chunk in plan.layout.chunks)
    return replace(plan, layout=replace(plan.layout, chunks=chunks))


def test_an_arena_without_a_block_for_what_the_others_send_is_refused() -> None:
    step, plan = of_ranks("gpt", Group(ranks=2), False)
    needed = max(plan.layout.group.gradient_block_bytes(chunk) for chunk in plan.layout.chunks)
    layout = replace(plan.layout, gradient_block_bytes=needed - 1)
    with pytest.raises(VerifyError, match="no gradient block holds the gradients of chunk"):
        verify(step, replace(plan, layout=layout))
    layout = replace(plan.layout, gradient_blocks=0)
    with pytest.raises(VerifyError, match="no gradient block holds the gradients of chunk"):
        verify(step, replace(plan, layout=layout))


def test_blocks_that_ranks_share_count_against_the_budget() -> None:
    step, plan = of_ranks("gpt", Group(ranks=3, shared=True), False)
    peak = plan.forecast.peak_device_bytes
    verify(step, replace(plan, limits=replace(plan.limits, device=peak)))
    below = peak - plan.layout.shared_bytes
    with pytest.raises(VerifyError, match=r"the step holds .* on the device .* are allowed"):
        verify(step, replace(plan, limits=replace(plan.limits, device=below)))


def uneven(chunk: Chunk) -> Chunk:
    return replace(chunk, numel=chunk.numel - 1)


def cut_between(chunk: Chunk) -> Chunk:
    """Equal parts that begin at no multiple of 64."""
    return replace(chunk, numel=chunk.numel - 32 * chunk.shards)


def of_other_ranks(chunk: Chunk) -> Chunk:
    return replace(chunk, shards=chunk.shards * 2)


@pytest.mark.parametrize("change", [uneven, cut_between, of_other_ranks])
def test_chunks_cut_in_another_way_are_refused(change: Callable[[Chunk], Chunk]) -> None:
    original, plan = of_ranks("gpt", Group(ranks=2), False)
    step = copied(original)
    broken = with_chunks(plan, change)
    step.layout = broken.layout
    for node in step.nodes:
        if node.target is ops.GATHER:  # it says the chunk's size
            chunk = step.chunk(stay_of(node).chunk)
            node.args = (node.args[0], chunk.numel, *node.args[2:])
    with pytest.raises(VerifyError, match=r"cut|equal|parts|ranks|shares|shards"):
        verify(step, broken)


def test_a_chunk_that_is_not_there_is_not_read_in_place() -> None:
    original, plan = of_ranks("gpt", Group(ranks=2), False)
    step = copied(original)
    gathered: Any = next(node for node in step.nodes if node.target is ops.GATHER)
    stay = stay_of(gathered)
    for node in step.nodes:
        if node.meta.get(STAY) == stay:
            node.meta[STAY] = replace(stay, resident=True, offset=0)
    with pytest.raises(VerifyError):
        verify(step, plan)
