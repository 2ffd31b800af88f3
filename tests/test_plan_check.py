"""A plan that a person edited is refused before it runs, by the chunk and the number."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from graphs_facts import accelerator, cpu, gpt
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import memory_needed
from torch import Tensor, nn

from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Group, Limits, Plan
from elixir_fx.planner import check_plan, search, smallest
from elixir_fx.units import GIB

THREADS = 1
HUGE = 1 << 40
FACTS = gpt(3, 96, 700, 16)
Edit = Callable[[dict[str, Any]], None]  # of a plan's JSON, in place


def limits_for(share: float, facts: Facts = FACTS) -> Limits:
    far = Limits(device=1, disk=HUGE)
    least = smallest(facts, cpu(), far)
    whole = search(facts, cpu(), replace(far, device=HUGE)).forecast.peak_device_bytes
    return replace(far, device=least + int(share * (whole - least)))


LIMITS = limits_for(0.1)
PLAN = search(FACTS, cpu(), LIMITS)


def edited(plan: Plan, edit: Edit) -> Plan:
    data = json.loads(plan.to_json())
    edit(data)
    return Plan.from_json(json.dumps(data))


def gathers(data: dict[str, Any]) -> list[dict[str, Any]]:
    return data["schedules"][0]["gathers"]


def chunk_of(data: dict[str, Any], gather: dict[str, Any]) -> dict[str, Any]:
    return data["layout"]["chunks"][gather["chunk"]]


def moved(data: dict[str, Any]) -> dict[str, Any]:
    """A stay that is not kept."""
    return next(gather for gather in gathers(data) if not gather["kept"])


def overlapping_stays(data: dict[str, Any]) -> None:
    one, other = (g for g in gathers(data)[:2])
    assert one["chunk"] != other["chunk"]
    other["offset"], other["prefetch"] = one["offset"], one["before"]


def a_chunk_missing(data: dict[str, Any]) -> None:
    del data["layout"]["chunks"][1]


def the_last_chunk_missing(data: dict[str, Any]) -> None:
    del data["layout"]["chunks"][-1]


def beyond_the_arena(data: dict[str, Any]) -> None:
    moved(data)["offset"] = data["layout"]["gather_bytes"]


def before_the_arena(data: dict[str, Any]) -> None:
    moved(data)["offset"] = -4096


def a_home_without_memory(data: dict[str, Any]) -> None:
    data["layout"]["chunks"][0]["homes"]["parameters"] = "host"


def a_home_with_the_peers(data: dict[str, Any]) -> None:
    data["layout"]["chunks"][0]["homes"]["states"] = "peers"


def an_update_away_from_its_parts(data: dict[str, Any]) -> None:
    chunk = next(chunk for chunk in data["layout"]["chunks"] if chunk["trainable"])
    chunk["update"] = "host"


def an_update_on_the_disk(data: dict[str, Any]) -> None:
    data["layout"]["chunks"][0]["update"] = "disk"


def a_prefetch_after_its_gather(data: dict[str, Any]) -> None:
    stay = next(g for g in gathers(data) if not g["kept"] and g["before"] != g["after"])
    stay["prefetch"] = stay["after"]


def more_bytes_than_the_budget(data: dict[str, Any]) -> None:
    for chunk in data["layout"]["chunks"]:
        chunk["homes"] = dict.fromkeys(chunk["homes"], "device")
        chunk["homes"]["states"] = "disk"


def a_larger_arena(data: dict[str, Any]) -> None:
    data["layout"]["arena_bytes"] += 1 << 40


def a_budget_of_less(data: dict[str, Any]) -> None:
    data["limits"]["device"] = 4096


def more_disk_than_there_is(data: dict[str, Any]) -> None:
    data["layout"]["disk_bytes"] = 1 << 60


def less_disk_than_the_homes_take(data: dict[str, Any]) -> None:
    data["layout"]["disk_bytes"] = 4096


def a_cache_beside_the_arena(data: dict[str, Any]) -> None:
    layout = data["layout"]
    layout["gather_bytes"] = layout["arena_bytes"] + 4096


def a_parameter_twice(data: dict[str, Any]) -> None:
    one, other = data["layout"]["chunks"][:2]
    other["slices"].append(dict(one["slices"][0]))


def a_parameter_of_another_shape(data: dict[str, Any]) -> None:
    data["layout"]["chunks"][0]["slices"][0]["span"] += 64


def an_unknown_reader(data: dict[str, Any]) -> None:
    moved(data)["before"] = "nobody"


def an_unknown_last_reader(data: dict[str, Any]) -> None:
    moved(data)["after"] = "nobody"


def an_unknown_prefetch(data: dict[str, Any]) -> None:
    moved(data)["prefetch"] = "nobody"


def another_reader(data: dict[str, Any]) -> None:
    stay = next(g for g in gathers(data) if g["before"] != g["after"])
    stay["after"] = stay["before"]


def an_unknown_chunk(data: dict[str, Any]) -> None:
    moved(data)["chunk"] = 99


def a_gather_twice(data: dict[str, Any]) -> None:
    gathers(data).append(dict(moved(data)))


def a_gather_missing(data: dict[str, Any]) -> None:
    gathers(data).remove(moved(data))


def a_gather_that_nobody_reads(data: dict[str, Any]) -> None:
    """Its chunk is at home on the device."""
    stay = moved(data)
    chunk_of(data, stay)["homes"] = dict.fromkeys(("parameters", "gradients", "states"), "device")
    data["limits"]["device"] = data["layout"]["disk_bytes"] = 1 << 40


def a_kept_stay_elsewhere(data: dict[str, Any]) -> None:
    stay = next(g for g in gathers(data) if g["kept"])
    stay["offset"] += 4096 if stay["offset"] == 0 else -4096


def a_kept_stay_of_the_forward(data: dict[str, Any]) -> None:
    next(g for g in gathers(data) if not g["backward"])["kept"] = True


def a_block_that_is_said_to_be_shared(data: dict[str, Any]) -> None:
    moved(data)["resident"] = True


def a_reduce_missing(data: dict[str, Any]) -> None:
    data["schedules"][0]["reduces"].pop()


def a_reduce_twice(data: dict[str, Any]) -> None:
    reduces = data["schedules"][0]["reduces"]
    reduces.append(dict(reduces[0]))


def a_reduce_too_early(data: dict[str, Any]) -> None:
    data["schedules"][0]["reduces"][0]["after"] = data["schedules"][0]["gathers"][0]["before"]


def an_unknown_end_of_gradients(data: dict[str, Any]) -> None:
    data["schedules"][0]["reduces"][0]["after"] = "nobody"


EDITS: dict[Edit, str] = {
    overlapping_stays: r"the blocks of chunk \d+ \(bytes \d+ .. \d+\) and chunk \d+ .* overlap",
    a_chunk_missing: "chunk 1 is missing: chunk 2 stands in its place",
    the_last_chunk_missing: "no chunk holds parameter",
    beyond_the_arena: r"block of chunk \d+, bytes \d+ .. \d+, lies outside the gather cache of \d",
    before_the_arena: r"block of chunk \d+, bytes -4096 .. \d+, lies outside the gather cache",
    a_home_without_memory: "parameters of chunk 0 are at home on host, which has no memory",
    a_home_with_the_peers: "states of chunk 0 are at home on peers, which has no memory",
    an_update_away_from_its_parts: r"chunk \d+ is updated on the host, and its parameters .* home",
    an_update_on_the_disk: "chunk 0 is updated on disk",
    a_prefetch_after_its_gather: r"chunk \d+ is prefetched at \S+ \(node \d+\), after its gather",
    more_bytes_than_the_budget: r"the plan needs .* \(\d+ bytes\) on device; .* are allowed",
    a_larger_arena: r"the plan needs 102\d\.\d GiB \(\d+ bytes\) on device|needs 1024",
    a_budget_of_less: r"on device; 4\.0 KiB \(4096\) are allowed",
    more_disk_than_there_is: r"\(1152921504606846976 bytes\) on disk",
    less_disk_than_the_homes_take: r"at home on disk take .* layout has 4\.0 KiB \(4096\) there",
    a_cache_beside_the_arena: r"do not fit the arena of \d+ bytes",
    a_parameter_twice: "parameter '.*' is in chunk 0 and again in chunk 1",
    a_parameter_of_another_shape: r"parameter '.*' in chunk 0: the plan has .*; the model has",
    an_unknown_reader: r"gather of chunk \d+ names node 'nobody'",
    an_unknown_last_reader: r"gather of chunk \d+ names node 'nobody'",
    an_unknown_prefetch: r"gather of chunk \d+ names node 'nobody'",
    another_reader: r"chunk \d+ is gathered for .*; its readers are",
    an_unknown_chunk: "gathers chunk 99, which it does not have",
    a_gather_twice: r"chunk \d+ is gathered twice in the forward",
    a_gather_missing: r"chunk \d+ is read in the forward and never gathered there",
    a_gather_that_nobody_reads: r"chunk \d+ is gathered in the forward, which reads it not",
    a_kept_stay_elsewhere: r"chunk \d+ is kept from the forward in the block at \d+, where it lay",
    a_kept_stay_of_the_forward: r"chunk \d+ is kept from a forward that does not gather it",
    a_block_that_is_said_to_be_shared: r"chunk \d+ is said to be resident where it takes a block",
    a_reduce_missing: r"the gradients of chunk \d+ are never reduced",
    a_reduce_twice: r"gradients of chunk \d+ are reduced after .* none to reduce any more",
    a_reduce_too_early: r"gradients of chunk \d+ are reduced after .*, and complete after",
    an_unknown_end_of_gradients: r"gradients of chunk \d+ are reduced after nobody, and complete",
}


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edited_plan_is_refused(edit: Edit) -> None:
    limits = replace(LIMITS, device=HUGE) if edit is a_gather_that_nobody_reads else LIMITS
    with pytest.raises(PlanError, match=EDITS[edit]):
        check_plan(edited(PLAN, edit), FACTS, limits)


def test_budgets_in_force_hold_as_well() -> None:
    check_plan(PLAN, FACTS, LIMITS)
    for less in (replace(LIMITS, device=4096), replace(LIMITS, disk=4096)):
        with pytest.raises(PlanError, match=r"are allowed"):
            check_plan(PLAN, FACTS, less)
    with pytest.raises(PlanError, match="at home on disk, which has no memory"):
        check_plan(PLAN, FACTS, replace(LIMITS, disk=0))


def test_an_update_on_the_host_needs_all_parts_there() -> None:
    def on_the_host(data: dict[str, Any]) -> None:
        for chunk in data["layout"]["chunks"]:
            chunk["homes"] = dict.fromkeys(chunk["homes"], "host")
            chunk["update"] = "host"

    limits = Limits(device=64 << 20, host=HUGE)
    tight = replace(limits, device=smallest(FACTS, accelerator(), limits))
    moving = edited(search(FACTS, accelerator(), tight), on_the_host)
    moving = replace(moving, layout=replace(moving.layout, host_bytes=1 << 30))
    check_plan(moving, FACTS, limits)
    chunk = moving.layout.chunks[0]
    homes = replace(chunk.homes, states=Tier.DEVICE)
    others = moving.layout.chunks[1:]
    layout = replace(moving.layout, chunks=(replace(chunk, homes=homes), *others))
    with pytest.raises(
        PlanError, match=r"chunk 0 is updated on the host, and its states \(.*evice"
    ):
        check_plan(replace(moving, layout=layout), FACTS, limits)


KINDS: list[tuple[Machine, Limits, Group]] = [
    (cpu(), Limits(device=1, disk=HUGE), Group()),
    (accelerator(), Limits(device=1, host=HUGE), Group()),
    (accelerator(), Limits(device=1, host=1 << 20, disk=HUGE), Group()),
    (accelerator().with_peers(), Limits(device=1, host=HUGE), Group(ranks=3)),
    (cpu().with_peers(), Limits(device=1, disk=HUGE), Group(ranks=2, shared=True)),
]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    layers=st.integers(1, 4),
    width=st.sampled_from([16, 64, 96]),
    tied=st.booleans(),
    frozen=st.integers(0, 2),
    trains=st.booleans(),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0, 4.0]),
)
def test_the_planners_own_plans_are_accepted(
    kind: tuple[Machine, Limits, Group],
    layers: int,
    width: int,
    tied: bool,
    frozen: int,
    trains: bool,
    share: float,
) -> None:
    machine, limits, group = kind
    facts = gpt(layers, width, 300, 8, tied=tied, frozen=frozen, trains=trains)
    least = smallest(facts, machine, limits, group=group)
    limits = replace(limits, device=int(least * (1 + share)))
    check_plan(search(facts, machine, limits, group=group), facts, limits)


# -- through compile() -------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


X = torch.linspace(-1, 1, 4 * 64).view(4, 64)
# Whose plan has nothing of the kind to edit: no stay is kept.
ELSEWHERE = {a_kept_stay_elsewhere, a_gather_that_nobody_reads}


@pytest.fixture(scope="module")
def made() -> Plan:
    least = memory_needed(Net(), (X,))
    plan = exact.plan(Net(), (X,), memory=int(1.2 * least), disk_memory=GIB)
    assert len(plan.layout.chunks) > 2 and len(plan.schedules[0].gathers) > 2
    return plan


@pytest.mark.parametrize(
    "edit", [edit for edit in EDITS if edit not in ELSEWHERE], ids=lambda edit: edit.__name__
)
def test_compile_refuses_it_before_anything_moves(edit: Edit, made: Plan, tmp_path: Path) -> None:
    edited(made, edit).save(tmp_path / "plan.json")
    model = Net()
    with pytest.raises(PlanError, match=EDITS[edit]):
        exact.compile(
            model,
            example_inputs=(X,),
            plan=tmp_path / "plan.json",
            memory=made.limits.device,
            disk=tmp_path,
            disk_memory=GIB,
        )
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_compile_runs_a_plan_that_may_be_edited_so(made: Plan, tmp_path: Path) -> None:
    """Without its prefetches, and with a wider budget: slower, and as right."""

    def later(data: dict[str, Any]) -> None:
        data["limits"]["device"] *= 2
        for gather in gathers(data):
            gather["prefetch"] = None

    torch.manual_seed(0)
    model, options = Net(), {"memory": 2 * made.limits.device, "disk": tmp_path}
    wanted = model(X).item()
    net = exact.compile(model, plan=edited(made, later), disk_memory=GIB, **options)
    assert net(X).item() == wanted
