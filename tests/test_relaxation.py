"""The bound against every plan there is: a bound that a plan beats is worse than none."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from graphs_facts import ADAMW, SGD, Builder, accelerator, cpu
from oracle import exact
from random_steps import Instance, crowded, instance

from elixir_fx.errors import PlanError
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import ONE_RANK, Group, Limits
from elixir_fx.planner import search, smallest
from elixir_fx.planner.baselines import POLICIES
from elixir_fx.planner.bound import lower_bound_s
from elixir_fx.planner.draft import Choice
from elixir_fx.planner.order import ORDERS
from elixir_fx.planner.relaxation import NOTHING, relax
from elixir_fx.planner.space import Space

ROUNDING = 1e-9  # relative
GROUPS = (
    ONE_RANK,
    Group(ranks=2),
    Group(ranks=4),
    Group(ranks=2, shared=True),
    Group(ranks=4, shared=True),
)
HUGE = 1 << 40


def of_ranks(problem: Instance, group: Group) -> tuple[Machine, Limits]:
    """The problem as one of so many ranks has it."""
    if group.ranks == 1:
        return problem.machine, problem.limits
    device = int(problem.limits.device / group.ranks**0.5)
    return problem.machine.with_peers(), replace(problem.limits, device=device)


def random_layouts_s(space: Space, random: Random, count: int) -> Iterator[float]:
    """Steps of layouts that nobody would choose."""
    for _ in range(count):
        size = random.choice(space.chunk_sizes)
        choice = Choice(
            chunk_bytes=size,
            arena_bytes=int(random.choice(space.arenas(size)) * random.uniform(0.7, 1.3)),
            gradient_blocks=random.choice((1, 2, 3)),
            ring=random.choice((1, 2, 3)),
            pieces=random.choice((2, 4, 8)),
            order=random.choice(ORDERS),
            on_host=random.choice((0.0, 0.3, 1.0)),
            fill=random.random() < 0.8,
        )
        draft = space.drafters[size].draft(choice, lambda layout: True)
        if draft is not None:
            yield space.players[size].play(draft.layout, draft.stays).step_s


def check(problem: Instance, group: Group, micro_batches: int) -> int:
    """No plan of a problem beats its bound; how many plans there were."""
    machine, limits = of_ranks(problem, group)
    facts = problem.facts
    bound_s = lower_bound_s(facts, machine, limits, group, micro_batches)
    space = Space(
        facts=facts,
        machine=machine,
        limits=limits,
        pins={},
        group=group,
        micro_batches=micro_batches,
    )
    steps = list(random_layouts_s(space, Random(problem.title), 8))
    with suppress(PlanError):
        steps.append(search(facts, machine, limits, {}, group, micro_batches).forecast.step_s)
    for policy in POLICIES.values() if micro_batches == 1 else ():
        with suppress(PlanError):
            steps.append(policy(facts, machine, limits, group=group).forecast.step_s)
    for step_s in steps:
        assert bound_s <= step_s * (1 + ROUNDING), (problem.title, group, micro_batches)
    return len(steps)


def check_all(seeds: range) -> None:
    plans = 0
    for problem in (make(seed) for make in (instance, crowded) for seed in seeds):
        for group in GROUPS if problem.machine.unified else GROUPS[:3]:
            for micro_batches in (1, 3):
                plans += check(problem, group, micro_batches)
    assert plans > 20 * len(seeds)


def test_no_plan_beats_the_bound() -> None:
    check_all(range(4))


@pytest.mark.slow
def test_no_plan_of_many_beats_the_bound() -> None:
    check_all(range(4, 100))


@pytest.mark.parametrize("seed", range(8))
def test_the_best_plan_does_not_beat_the_bound(seed: int) -> None:
    problem = instance(seed)
    best = exact(problem)
    bound_s = lower_bound_s(problem.facts, problem.machine, problem.limits)
    assert best is None or bound_s <= best.step_s * (1 + ROUNDING)


def layers(count: int, optimizer=SGD, pieces: int = 8):
    """Layers of many parameters whose gradients wait for each other, beside little computation;
    most activations are there at the turn."""
    b = Builder(optimizer=optimizer)
    paths = [[b.parameter(f"l.{i}.{j}", 1 << 17) for j in range(pieces)] for i in range(count)]
    x = b.node("x", nbytes=1 << 26, seconds=1e-6)
    for i, layer in enumerate(paths):
        for j, path in enumerate(layer):
            x = b.node(f"f{i}_{j}", x, path, nbytes=4096, seconds=1e-6)
    b.node("turn", x, nbytes=1 << 26, seconds=1e-6)
    b.backward()
    d = b.node("d", x, nbytes=4096, seconds=1e-6)
    for i, layer in reversed(list(enumerate(paths))):
        for j, path in reversed(list(enumerate(layer))):
            d = b.node(f"d{i}_{j}", d, nbytes=4096, seconds=1e-6)
            b.node(f"g{i}_{j}", d, gradient_of=path, seconds=1e-6)
    return b.facts("layers")


def slowed(machine: Machine, end: str) -> Machine:
    """A machine whose links with the device as this end are a thousand times as slow."""
    links = tuple(
        replace(
            link,
            bytes_per_s=link.bytes_per_s / 1000,
            shared_bytes_per_s=link.shared_bytes_per_s / 1000,
        )
        if (link.source if end == "source" else link.target) is Tier.DEVICE
        else link
        for link in machine.links
    )
    return replace(machine, links=links)


@pytest.mark.parametrize("end", ["source", "target"])
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_gradients_wait_for_their_chunk_and_the_first_have_none_before(
    end, optimizer, micro_batches
) -> None:
    """A bound that reads old gradients in the first micro-batch was 15 % too high here."""
    facts, machine = layers(8, optimizer), slowed(cpu(), end)
    least = smallest(facts, machine, Limits(device=1, disk=HUGE))
    for device in (least, int(1.05 * least), int(1.2 * least)):
        limits = Limits(device=device, disk=HUGE)
        made = search(facts, machine, limits, micro_batches=micro_batches).forecast
        bound_s = lower_bound_s(facts, machine, limits, micro_batches=micro_batches)
        assert 0.5 * made.step_s < bound_s <= made.step_s * (1 + ROUNDING)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_what_every_rank_has_whole_is_not_gathered(pinned: bool, shared: bool) -> None:
    """Because its optimizer reads it whole, or because the user pinned it to the device."""
    optimizer = ADAMW if pinned else replace(ADAMW, elementwise=False)
    facts = layers(2, optimizer)
    machine = cpu().with_peers()
    machine = replace(
        machine,
        links=tuple(
            replace(link, bytes_per_s=1e6, shared_bytes_per_s=1e6)
            if Tier.PEERS in (link.source, link.target)
            else link
            for link in machine.links
        ),
    )
    pins = {p.path: Tier.DEVICE for p in facts.parameters} if pinned else {}
    for ranks in (2, 4):
        group = Group(ranks=ranks, shared=shared)
        limits = Limits(device=HUGE, disk=HUGE)
        step_s = search(facts, machine, limits, pins, group).forecast.step_s
        bound_s = lower_bound_s(facts, machine, limits, group)
        assert 0 < bound_s <= step_s * (1 + ROUNDING)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_less_memory_or_slower_links_never_lower_the_bound(seed: int, micro_batches: int) -> None:
    for problem in (instance(seed), crowded(seed)):
        facts, machine, limits = problem.facts, problem.machine, problem.limits

        def bound_s(share: float, rate: float, facts=facts, machine=machine, limits=limits):
            links = tuple(
                replace(
                    link,
                    bytes_per_s=link.bytes_per_s * rate,
                    shared_bytes_per_s=link.shared_bytes_per_s * rate,
                )
                for link in machine.links
            )
            changed = replace(machine, links=links)
            budget = replace(limits, device=int(limits.device * share))
            return lower_bound_s(facts, changed, budget, micro_batches=micro_batches)

        for values in (
            [bound_s(share, 1.0) for share in (0.5, 0.8, 1.0, 1.3)],
            [bound_s(1.0, rate) for rate in (0.25, 0.5, 1.0, 2.0)],
        ):
            for more, less in pairwise(values):
                assert less <= more * (1 + 1e-5)  # of the solver


def test_nothing_is_claimed_where_nothing_can_be_away() -> None:
    facts = layers(2)
    assert relax(facts, cpu(), Limits(device=HUGE)) == NOTHING
    assert relax(Builder().facts(), cpu(), Limits(device=1, disk=HUGE)) == NOTHING
    assert relax(facts, accelerator(), Limits(device=1, disk=HUGE)) == NOTHING


def test_enough_memory_is_not_used_to_move_anything() -> None:
    facts = layers(2)
    found = relax(facts, cpu(), Limits(device=HUGE, disk=HUGE))
    assert found.step_s == pytest.approx(lower_bound_s(facts, cpu(), Limits(device=HUGE)), rel=1e-4)
    assert found.on_host == 0.0
