"""Plans for regions that come one at a time: what leaves at first, what comes home in the end."""

from dataclasses import replace
from functools import cache

import pytest
from graphs_facts import SGD, Builder, accelerator, cpu, gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts, Parameter, Role
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Limits, Plan
from elixir_fx.planner import schedule, search, smallest
from elixir_fx.planner.arrivals import GRADIENT_BLOCKS, Region, first, settle, to_come_bytes
from elixir_fx.units import GIB, MIB

THREADS = 1
STEP = gpt(4, 128, 512, sequence=64)
TRAINING_BYTES = 4 * sum(p.nbytes for p in STEP.parameters)


def tiers(machine: Machine, device: int) -> Limits:
    host = 0 if machine.unified else 8 * GIB
    return Limits(device=device, host=host, disk=GIB)


def pins_of(machine: Machine, facts: Facts) -> dict[str, Tier]:
    """As the backend pins: an accelerator's parameters stay where they are."""
    return {} if machine.unified else {p.path: Tier.DEVICE for p in facts.parameters}


MACHINES = {"cpu": cpu(), "gpu": accelerator()}


def arrived(machine: Machine, share: float, facts: Facts = STEP) -> Plan:
    """The first plan under a budget between the least (0) and all (1)."""
    pins = pins_of(machine, facts)
    least = smallest(facts, machine, tiers(machine, GIB), pins)
    everything = search(facts, machine, tiers(machine, GIB)).forecast.peak_device_bytes
    device = least + int(share * (everything - least))
    return first(facts, machine, tiers(machine, device), pins)


@cache
def step_arrived(name: str, share: float) -> Plan:
    return arrived(MACHINES[name], share)


def part(facts: Facts, keep: int) -> Facts:
    """The facts of a region that reads only the first `keep` parameters of the model."""

    def idle(parameter: Parameter) -> Parameter:
        return replace(parameter, reads=(), gradient=None, gradient_storage="")

    known = facts.parameters
    return replace(facts, parameters=(*known[:keep], *map(idle, known[keep:])))


# -- the first region ------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_everything_fits(name: str) -> None:
    machine = MACHINES[name]
    plan = first(STEP, machine, tiers(machine, 8 * GIB), {})
    assert plan.layout.keeps_all and not plan.layout.mapped
    assert plan.limits == tiers(machine, 8 * GIB)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_gradients_and_states_leave(name: str, share: float) -> None:
    """All of them, whatever the search had kept: activations are still to come."""
    machine = MACHINES[name]
    plan = step_arrived(name, share)
    layout = plan.layout
    assert not layout.keeps_all
    assert layout.mapped is machine.unified
    trainable = [chunk for chunk in layout.chunks if chunk.trainable]
    left = {chunk.homes.gradients for chunk in trainable} | {c.homes.states for c in trainable}
    if Tier.DEVICE not in left:
        assert layout.gradient_blocks >= (GRADIENT_BLOCKS if share else 1)
        assert layout.gradient_block_bytes >= max(chunk.nbytes for chunk in trainable)
        gathered = layout.gather_bytes + layout.gradient_blocks * layout.gradient_block_bytes
        assert layout.arena_bytes >= gathered
    else:
        assert share == 0.0  # the device has no room for blocks that the search did without
    assert plan.forecast.peak_device_bytes <= plan.limits.device
    assert [made.key for made in plan.schedules] == [STEP.key]
    assert any("until the first whole step is known" in note for note in plan.notes)


@pytest.mark.parametrize("name", MACHINES)
def test_tiers_hold_what_leaves(name: str) -> None:
    """Bytes on host and disk are within the limits and enough for the chunks at home there."""
    plan = step_arrived(name, 0.3)
    layout = plan.layout
    for tier, nbytes in ((Tier.HOST, layout.host_bytes), (Tier.DISK, layout.disk_bytes)):
        least = sum(
            chunk.nbytes * (1 if home == "parameters" else 2 if home == "states" else 1)
            for chunk in layout.chunks
            for home in ("parameters", "gradients", "states")
            if getattr(chunk.homes, home) is tier
        )
        assert least <= nbytes <= max(plan.limits.of(tier), 0)


def test_no_room_away() -> None:
    """A disk that holds nothing more than the search needed: its layout stays."""
    machine = cpu()
    whole = step_arrived("cpu", 0.3)
    needed = search(STEP, machine, whole.limits).layout.disk_bytes
    plan = first(STEP, machine, replace(whole.limits, disk=needed), {})
    assert plan.layout.disk_bytes <= needed


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match="allowed"):
        first(STEP, cpu(), Limits(device=MIB // 8, disk=GIB), {})


# -- room for what is to come ----------------------------------------------------------------


def test_to_come() -> None:
    """In proportion to the bytes of parameters that are not read here."""
    saved = sum(s.nbytes for s in STEP.storages if s.role is Role.ACTIVATION)
    assert saved and to_come_bytes(STEP) == 0
    partial = part(STEP, 10)
    read = sum(p.nbytes for p in STEP.parameters[:10])
    idle = sum(p.nbytes for p in STEP.parameters[10:])
    assert to_come_bytes(partial) == saved * idle // read


def test_to_come_of_a_region_without_parameters() -> None:
    """Nothing to measure by; later regions with parameters must still find room."""
    b = Builder()
    b.node("sin", nbytes=4096)
    b.node("cos", "sin", nbytes=4096)
    bare = b.facts()
    idle = tuple(replace(p, reads=(), gradient=None, gradient_storage="") for p in STEP.parameters)
    bare = replace(bare, parameters=idle)
    assert to_come_bytes(bare) == 0
    limits = tiers(cpu(), smallest(STEP, cpu(), tiers(cpu(), GIB)) * 3 // 2)
    plan = first(bare, cpu(), limits, {})
    region = replace(STEP, key="second")
    made = schedule(region, cpu(), limits, plan.layout)
    assert made.forecast.peak_device_bytes <= limits.device


def test_room_is_left() -> None:
    """A region that reads half of the model plans with less than it is given."""
    machine = cpu()
    whole = step_arrived("cpu", 0.8)
    half = first(part(STEP, 20), machine, whole.limits, {})
    assert half.limits == whole.limits
    assert half.forecast.peak_device_bytes <= whole.limits.device


# -- the last region -------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_nothing_left_to_decide(name: str) -> None:
    machine = MACHINES[name]
    plan = first(STEP, machine, tiers(machine, 8 * GIB), {})
    final = settle(plan, [Region(facts=STEP, held_bytes=0)], machine)
    assert final.layout == plan.layout
    assert final.notes == ("final: nothing is left to decide",)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_states_first(name: str, share: float) -> None:
    """States come home before gradients, as far as the room goes, and no further."""
    machine = MACHINES[name]
    plan = step_arrived(name, share)
    final = settle(plan, [Region(facts=STEP, held_bytes=0)], machine)
    assert any(note.startswith("final after 1 regions") for note in final.notes)
    for before, after in zip(plan.layout.chunks, final.layout.chunks, strict=True):
        assert before.slices == after.slices
        assert before.homes.parameters == after.homes.parameters
        for name_of in ("gradients", "states"):
            was, now = getattr(before.homes, name_of), getattr(after.homes, name_of)
            assert now in (was, Tier.DEVICE)
    assert final.layout.arena_bytes == plan.layout.arena_bytes
    assert all(s.forecast.peak_device_bytes <= plan.limits.device for s in final.schedules)


def test_more_room_brings_more_home() -> None:
    machine = cpu()
    home = []
    for held in (0, MIB // 2, 64 * MIB):
        plan = step_arrived("cpu", 0.6)
        final = settle(plan, [Region(facts=STEP, held_bytes=held)], machine)
        homes = [chunk.homes.states for chunk in final.layout.chunks]
        home.append(homes.count(Tier.DEVICE))
    assert home == sorted(home, reverse=True)
    assert home[0] > home[-1]


def test_evaluations_alone_decide_nothing() -> None:
    """Without a region that trains there are no states to bring home."""
    facts = gpt(4, 128, 512, sequence=64, trains=False)
    machine = cpu()
    least = smallest(facts, machine, tiers(machine, GIB))
    plan = first(facts, machine, tiers(machine, least + MIB // 4), {})
    final = settle(plan, [Region(facts=facts, held_bytes=0)], machine)
    assert final.layout == plan.layout


def test_an_optimizer_without_states() -> None:
    facts = gpt(4, 128, 512, sequence=64, optimizer=SGD)
    plan = arrived(cpu(), 0.3, facts)
    final = settle(plan, [Region(facts=facts, held_bytes=0)], cpu())
    assert all(s.forecast.peak_device_bytes <= plan.limits.device for s in final.schedules)


@given(
    layers=st.integers(1, 5),
    width=st.sampled_from([32, 64, 96]),
    sequence=st.sampled_from([16, 64]),
    share=st.floats(0, 1),
    held=st.integers(0, MIB),
    name=st.sampled_from(sorted(MACHINES)),
    frozen=st.integers(0, 2),
)
@settings(max_examples=20, deadline=None)
def test_budgets_are_kept(
    layers: int, width: int, sequence: int, share: float, held: int, name: str, frozen: int
) -> None:
    """Whatever the model and the budget: both plans keep to it, with what others hold."""
    machine = MACHINES[name]
    facts = gpt(layers, width, 128, sequence=sequence, frozen=min(frozen, layers))
    plan = arrived(machine, share, facts)
    assert plan.forecast.peak_device_bytes <= plan.limits.device
    assert plan.layout.host_bytes <= plan.limits.host
    assert plan.layout.disk_bytes <= plan.limits.disk
    final = settle(plan, [Region(facts=facts, held_bytes=held)], machine)
    peak = max(made.forecast.peak_device_bytes for made in final.schedules)
    assert peak <= plan.limits.device
    if final.layout != plan.layout:
        running = max(made.forecast.activation_bytes for made in final.schedules)
        assert running + held <= plan.limits.device
    assert Plan.from_json(final.to_json()) == final
