"""Chunks whose optimizer runs on the host: nothing of them passes through the device in the
optimizer's step, their memory is the host's, they move to other layouts, and plans in which that
cannot be are refused."""

import re
from dataclasses import replace
from typing import Any

import exact
import pytest
import torch
from harness import MakeOptimizer, adamw
from host_plans import (
    AT_HOME_ON_HOST,
    GPT,
    SLOW,
    Choice,
    even,
    every,
    odd,
    on_host,
    options_for,
)
from pairs import Pair, plain_loss
from ranks import run
from teams import Tall, our_twin, training_state
from torch import nn

from elixir_fx.errors import PlanError, TierError, VerifyError
from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Group, Plan, align
from elixir_fx.runtime.lending import PartialStep
from elixir_fx.runtime.meter import DeviceMeter
from elixir_fx.runtime.migrate import Migration
from elixir_fx.runtime.parameters import AwayParameter, AwayTensor
from elixir_fx.testing import emulated
from elixir_fx.units import GIB

THREADS = 1
O = torch.optim  # noqa: E741


# -- what moves, and what is held ------------------------------------------------------------


def ours(chosen: Choice, make_optimizer: MakeOptimizer = adamw, **options: Any) -> Pair:
    given = options_for(GPT, chosen, make_optimizer, **options)
    return Pair(GPT.build, GPT.batches(1), given, make_optimizer)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_of_an_update_on_the_host_is_moved(accumulate: int) -> None:
    """Parameters go down, gradients up; old gradients come down to be added to."""
    pair = ours(every)
    net, optimizer = pair.ours.net, pair.ours.optimizer
    for step in range(3):
        for batch in GPT.batches(accumulate):
            plain_loss(pair.ours, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        stats = net.stats()
        gradients = sum(align(chunk.nbytes) for chunk in net.plan.layout.chunks)
        if step:  # before the first one the weights move home
            assert stats["host_to_device_bytes"] == (
                stats["gathered_bytes"] + (accumulate - 1) * gradients
            )
            assert stats["device_to_host_bytes"] == stats["reduced_bytes"]
        assert stats["reduced_bytes"] == accumulate * gradients
    # The second forward finds what the first backward gathered last.
    assert accumulate > 1 or stats["gathered_bytes"] == net.plan.forecast.gathered_bytes


def test_what_streams_beside_it_is_all_that_moves() -> None:
    pair = ours(odd)
    net = pair.ours.net
    for _ in range(3):
        pair.ours.step(GPT.batches(1)[0])
    stats = net.stats()
    parts = 0  # of what streams: parameters, and as many bytes of each state
    for chunk in net.plan.layout.chunks:
        if chunk.update is Tier.DEVICE:
            parts += sum(piece.span * chunk.itemsize for piece in chunk.slices)
    assert parts
    assert stats["host_to_device_bytes"] == stats["gathered_bytes"] + 4 * parts
    assert stats["device_to_host_bytes"] == stats["reduced_bytes"] + 3 * parts


def test_its_memory_is_the_hosts() -> None:
    """Scratch and new states of the update are not the device's, whoever counts."""

    def foreach(parameters: list[nn.Parameter]) -> O.Optimizer:
        return O.AdamW(parameters, lr=1e-2, foreach=True)

    peaks = {}
    for chosen in (every, odd):
        pair = ours(chosen, foreach)
        plain_loss(pair.ours, GPT.batches(1)[0]).backward()
        with DeviceMeter() as meter:
            meter.ignore(pair.ours.net._session.engine.store.arena.untyped_storage())
            pair.ours.optimizer.step()
        assert meter.counts
        peaks[chosen] = meter.peak_bytes
    largest = max(p.nbytes for p in GPT.build().parameters())
    assert peaks[every] < largest <= peaks[odd]


def test_its_ordinary_states_are_the_hosts() -> None:
    def adafactor(parameters: list[nn.Parameter]) -> O.Optimizer:
        return O.Adafactor(parameters)

    held = []
    for chosen in (every, lambda _: False):
        pair = ours(chosen, adafactor)
        pair.ours.step(GPT.batches(1)[0])
        held.append(pair.ours.net._session.engine.state_bytes())
    assert held[0] == 0 < held[1]


def test_the_next_unit_that_streams_is_on_its_way_meanwhile(monkeypatch: Any) -> None:
    """Chunks 1 and 2 are updated on the host: before either is, chunk 3 is being fetched."""
    pair = ours(lambda chunk: chunk.id in (1, 2, 5), chunk_bytes=350_000)
    pair.ours.step(GPT.batches(1)[0])
    assert len(pair.ours.net.plan.layout.chunks) == 6
    plain_loss(pair.ours, GPT.batches(1)[0]).backward()
    engine = pair.ours.net._session.engine
    chunk_of = {p: entry.chunk.id for p, entry in engine.entries.items()}
    offsets = {
        entry.value.region.offset: entry.chunk.id
        for entry in engine.entries.values()
        if entry.piece is entry.chunk.slices[0]
    }
    log: list[str] = []
    fetch, update = engine.store.fetch, PartialStep.update

    def watched_fetch(region: Any, *args: Any, **kwargs: Any) -> Any:
        if region.offset in offsets:
            log.append(f"fetch {offsets[region.offset]}")
        return fetch(region, *args, **kwargs)

    def watched_update(self: PartialStep, unit: Any) -> None:
        log.append(f"update {chunk_of[unit.parameters[0]]}")
        update(self, unit)

    monkeypatch.setattr(engine.store, "fetch", watched_fetch)
    monkeypatch.setattr(PartialStep, "update", watched_update)
    pair.ours.optimizer.step()
    order = list(dict.fromkeys(log))
    assert [entry for entry in order if entry.startswith("fetch")] == [
        "fetch 0", "fetch 3", "fetch 4"
    ]  # fmt: skip
    updates = [entry for entry in order if entry.startswith("update")]
    assert updates == [f"update {chunk}" for chunk in (0, 1, 3, 2, 4, 5)]
    assert order.index("fetch 3") < order.index("update 2")
    assert order.index("fetch 4") < order.index("update 5")


def test_a_gradient_still_on_its_way_is_waited_for() -> None:
    """A slow link: the last gradients have not arrived when the step begins."""
    pair = Pair(GPT.build, GPT.batches(2), options_for(GPT, every, machine=SLOW))
    pair.train(3)
    pair.check()


# -- moving to another layout ----------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [(odd, even), (every, None), (None, every)])
def test_a_new_layout_may_update_elsewhere(first: Choice | None, then: Choice | None) -> None:
    def none(_: Chunk) -> bool:
        return False

    pair = ours(first or none)
    pair.train(2)
    pair.backward()
    session = pair.ours.net._session
    old, plan = session.engine, session.lowering.plan
    chunks = tuple(replace(chunk, update=Tier.DEVICE) for chunk in plan.layout.chunks)
    streamed = replace(plan, layout=replace(plan.layout, chunks=chunks))
    session.lowering.plan = on_host(streamed, then or none)
    old.lend_arena()
    new = session.make_engine()
    migration = Migration(old, new, pair.ours.optimizer)
    migration.run()
    migration.commit()
    old.close()
    session.binding.engine = new
    session.start(new)
    del migration, old  # who holds a gradient has it kept in memory
    pair.check()
    pair.finish()


# -- ranks -----------------------------------------------------------------------------------


def rank_plan(memory: int, tiers: dict[str, Any]) -> Plan:
    plan = exact.plan(Tall(), (Tall.batch(0, 0),), ranks=2, memory=memory, **tiers)
    assert plan.layout.group == Group(ranks=2)
    assert {chunk.homes for chunk in plan.layout.chunks} == {AT_HOME_ON_HOST}
    return plan


def updated_shares(rank: int) -> list[Any]:
    """Two steps, one of them clipped, of ranks whose updates run on the device, on the host, and
    on both."""
    tiers = {"machine": emulated(), "host_memory": GIB}
    memory = exact.smallest_memory(Tall(), (Tall.batch(0, 0),), ranks=2, **tiers)
    plan = rank_plan(memory, tiers)
    found = []
    for chosen in (lambda _: False, every, odd):
        side = our_twin(Tall, adamw, memory=memory, plan=on_host(plan, chosen), **tiers)
        for step in range(3):
            loss = side.net(Tall.batch(step, rank))
            loss.backward()
            if step:
                nn.utils.clip_grad_norm_(side.net.parameters(), 0.01)
            side.optimizer.step()
            side.optimizer.zero_grad()
        stats = side.net.stats()
        moved = [stats["host_to_device_bytes"], stats["device_to_host_bytes"]]
        found.append((moved, training_state(side)))
    return found


def test_shares_are_updated_on_the_host() -> None:
    for streamed, on_the_host, mixed in run(2, updated_shares):
        for moved, state in (on_the_host, mixed):
            for name, value in streamed[1]["weights"].items():
                assert torch.equal(value, state["weights"][name])
            for index, states in streamed[1]["optimizer"]["state"].items():
                for name, value in states.items():
                    assert torch.equal(value, state["optimizer"]["state"][index][name])
            assert moved[0] < streamed[0][0] and moved[1] < streamed[0][1]
        assert on_the_host[0][0] < mixed[0][0]


# -- plans that are refused ------------------------------------------------------------------


def compiled_with(plan: Plan, options: dict[str, Any]) -> Any:
    model = GPT.build()
    optimizer = adamw(list(model.parameters()))
    given = {**options, "plan": plan, "example_inputs": GPT.batches(1)[0]}
    return exact.compile(model, optimizer=optimizer, **given)


@pytest.mark.parametrize("part", ["gradients", "states"])
def test_a_part_that_is_not_at_home_on_the_host(part: str, monkeypatch: Any) -> None:
    """The check of the written graph by itself, without that of the plan before it."""
    monkeypatch.setattr("elixir_fx.lowering.check_plan", lambda *_: None)
    options = options_for(GPT, every)
    first, *rest = options["plan"].layout.chunks
    broken = replace(first, homes=replace(first.homes, **{part: Tier.DEVICE}))
    layout = replace(options["plan"].layout, chunks=(broken, *rest))
    message = re.escape(
        f"chunk 0 ({first.title}) is updated on the host, and its "
        f"{'optimizer states' if part == 'states' else part} are at home on device"
    )
    options["memory"] *= 2
    with pytest.raises(VerifyError, match=message):
        compiled_with(replace(options["plan"], layout=layout), options)


def test_an_update_on_the_disk(monkeypatch: Any) -> None:
    monkeypatch.setattr("elixir_fx.lowering.check_plan", lambda *_: None)
    options = options_for(GPT, every)
    first, *rest = options["plan"].layout.chunks
    layout = replace(options["plan"].layout, chunks=(replace(first, update=Tier.DISK), *rest))
    with pytest.raises(VerifyError, match=r"chunk 0 \(.*\) is updated on disk, where no optimizer"):
        compiled_with(replace(options["plan"], layout=layout), options)


def test_the_hosts_memory_counts_its_scratch() -> None:
    """Enough for the homes, not for an update beside them."""
    options = options_for(GPT, every)
    plan = options["plan"]
    limits = replace(plan.limits, host=plan.layout.host_bytes)
    with pytest.raises(VerifyError, match=r"the layout holds .* on host; .* are allowed"):
        compiled_with(replace(plan, limits=limits), options)


def test_the_device_needs_no_room_for_it() -> None:
    """An arena too small for any unit is enough, and no scratch is counted there."""
    options = options_for(GPT, every)
    plan = options["plan"]
    layout = replace(plan.layout, gradient_blocks=1, update_numel=1 << 30)
    arena_bytes = layout.gather_bytes + layout.block_bytes
    layout = replace(layout, arena_bytes=arena_bytes)
    widest = max(4 * chunk.nbytes for chunk in layout.chunks)
    assert widest > arena_bytes  # all parts of a chunk at once
    pair = Pair(GPT.build, GPT.batches(2), {**options, "plan": replace(plan, layout=layout)})
    pair.train(2)
    pair.check()


def test_a_state_that_is_elsewhere_is_refused_before_any_change() -> None:
    pair = ours(odd)
    pair.ours.step(GPT.batches(1)[0])
    plain_loss(pair.ours, GPT.batches(1)[0]).backward()
    entries = pair.ours.net._session.engine.entries
    here = next(p for p, entry in entries.items() if entry.on_host and p.dim() == 2)

    other = pair.ours.optimizer.state[here]["exp_avg"]
    source = type(other.source)(_Memory(other.source.home))
    pair.ours.optimizer.state[here]["exp_avg"] = AwayTensor(source)
    before = [p.detach().clone() for p in pair.ours.net.parameters()]
    with pytest.raises(TierError, match="updated on the host, and its exp_avg is not at home"):
        pair.ours.optimizer.step()
    after = [p.detach().clone() for p in pair.ours.net.parameters()]
    assert all(map(torch.equal, before, after))
    assert all(type(p) is AwayParameter for p in pair.ours.net.parameters())


class _Memory:
    """A home that is no tier's."""

    def __init__(self, home: Any) -> None:
        self.path, self.shape, self.strides = home.path, home.shape, home.strides
        self.dtype, self.device, self.span = home.dtype, home.device, home.span


def test_another_optimizer_that_needs_all_at_once() -> None:
    pair = ours(every)
    pair.train(1)
    with pytest.raises(PlanError):
        pair.ours.net.bind(O.LBFGS(list(pair.ours.model.parameters())))
