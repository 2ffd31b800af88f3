"""Machines as data: links to other ranks, the catalogue, and the way through JSON."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from graphs_facts import accelerator, cpu, gpt

from elixir_fx import catalogue
from elixir_fx.config import read_options
from elixir_fx.errors import ElixirError, PlanError
from elixir_fx.machine import HOMES, MOST_RANKS, Machine, Node, Tier
from elixir_fx.plan import Group, Limits
from elixir_fx.planner import search
from elixir_fx.testing import emulated

MACHINES = {
    "cpu": cpu(),
    "accelerator": accelerator(),
    "emulated": emulated(disk_memory=1 << 30),
    "no link": replace(cpu(), links=()),
    "h100-sxm": Machine.named("h100-sxm"),
}
BOTH_WAYS = ((Tier.PEERS, Tier.DEVICE), (Tier.DEVICE, Tier.PEERS))


@pytest.mark.parametrize("name", MACHINES)
def test_links_to_peers_are_added_once(name: str) -> None:
    machine = MACHINES[name]
    with_peers = machine.with_peers()
    assert with_peers.links[: len(machine.links)] == machine.links
    assert [(x.source, x.target) for x in with_peers.links[len(machine.links) :]] == [*BOTH_WAYS]
    assert with_peers.with_peers() == with_peers
    assert replace(with_peers, links=machine.links) == machine
    assert with_peers.unified == machine.unified
    for source, target in BOTH_WAYS:
        assert with_peers.link(source, target).bytes_per_s > 0
        with pytest.raises(PlanError, match=f"has no link from {source} to {target}"):
            machine.link(source, target)


def test_links_that_were_measured_stay() -> None:
    machine = cpu().with_peers()
    measured = tuple(replace(link, bytes_per_s=7.0) for link in machine.links)
    assert replace(machine, links=measured).with_peers().links == measured


@pytest.mark.parametrize("machine", [cpu(), accelerator()])
def test_a_machine_that_says_nothing_of_its_node_is_each_ranks_own(machine: Machine) -> None:
    assert machine.with_ranks(1) == machine
    assert machine.with_ranks(5000) == machine.with_peers()


NODE = Node(
    ranks=4,
    peer_bytes_per_s=100.0,
    network_bytes_per_s=40.0,
    start_latency_s=1.0,
    peer_latency_s=10.0,
    network_latency_s=1000.0,
)
# Ranks: rate of the ring, latency, divisor of what is the node's.
RINGS = {
    2: (100.0, 1.0 + 10, 2),
    3: (100.0, 1.0 + 20, 3),
    4: (100.0, 1.0 + 30, 4),
    5: (40.0, 1.0 + 30 + 1000, 4),
    8: (40.0, 1.0 + 60 + 1000, 4),
    1024: (40.0, 1.0 + 7680 + 255_000, 4),
}


@pytest.mark.parametrize("ranks", RINGS)
def test_a_rank_has_its_part_of_a_node_and_a_ring_to_the_others(ranks: int) -> None:
    whole = replace(accelerator(), node=NODE, host_stream_bytes_per_s=12e9)
    part = whole.with_ranks(ranks)
    rate, latency_s, share = RINGS[ranks]
    for source, target in BOTH_WAYS:
        link = part.link(source, target)
        assert (link.bytes_per_s, link.latency_s) == (rate, latency_s)
        assert link.shared_bytes_per_s == rate  # a ring sends as much as it receives
    for link in whole.links:
        divisor = 1 if Tier.DEVICE in (link.source, link.target) else share
        assert part.link(link.source, link.target).bytes_per_s == link.bytes_per_s / divisor
    assert part.memory == {
        Tier.DEVICE: 80 << 30, Tier.HOST: (200 << 30) // share, Tier.DISK: (1 << 40) // share
    }  # fmt: skip
    assert part.host_stream_bytes_per_s == 12e9 / share
    assert part.stream_bytes_per_s == whole.stream_bytes_per_s
    assert part.with_ranks(ranks) == part and part.ranks == ranks
    nodes = -(-ranks // NODE.ranks)
    assert part.name == f"gpu, {ranks} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")
    with pytest.raises(PlanError, match=f"one of {ranks} ranks already, and 7 are wanted"):
        part.with_ranks(7)
    assert Machine.from_json(part.to_json()) == part


def test_impossible_numbers_of_ranks_are_refused() -> None:
    for ranks in (0, -1, MOST_RANKS + 1):
        with pytest.raises(PlanError, match=f"{ranks} ranks: machine 'h200' has 1 to 1024"):
            Machine.named("h200").with_ranks(ranks)


# -- the catalogue -----------------------------------------------------------------------------

NAMES = (
    "a100-40-pcie", "a100-40-sxm", "a100-80-pcie", "a100-80-sxm", "b200", "h100-pcie",
    "h100-sxm", "h200", "rtx-3090", "rtx-4090", "rtx-5090",
)  # fmt: skip


def test_the_catalogue_has_these() -> None:
    assert catalogue.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_sheet_makes_a_machine_that_can_be(name: str) -> None:
    machine = Machine.named(name)
    assert machine.name == name and machine.device == "cuda" and not machine.fingerprint
    assert 24 << 30 <= machine.memory[Tier.DEVICE] <= 192 << 30
    assert machine.memory[Tier.DEVICE] < machine.memory[Tier.HOST] < machine.memory[Tier.DISK]
    assert set(machine.flops_per_s) == {"float32", "tfloat32", "bfloat16", "float16"}
    float32, tfloat32 = machine.flops("float32"), machine.flops("tfloat32")
    assert float32 <= tfloat32 <= machine.flops("float16") <= 33 * float32
    # From the device outwards every memory is slower.
    rates = [
        machine.stream_bytes_per_s,
        machine.host_stream_bytes_per_s,
        machine.link(Tier.HOST, Tier.DEVICE).bytes_per_s,
    ]
    assert rates == sorted(rates, reverse=True)
    assert 24e9 < rates[-1] < 51e9
    for link in machine.links:
        assert link.bytes_per_s <= link.shared_bytes_per_s <= 2 * link.bytes_per_s or (
            link.target is Tier.DISK  # as fast as its reads
        )
        assert 1e-6 <= link.latency_s <= 1e-3
    assert machine.node is not None and machine.node.ranks in (4, 8)
    for figure in catalogue.sheet(name).figures.values():
        assert figure.source and 0.5 < figure.share <= 1


@pytest.mark.parametrize("name", NAMES)
def test_more_ranks_never_have_more_each(name: str) -> None:
    parts = [Machine.named(name).with_ranks(1 << power) for power in range(11)]
    assert {part.memory[Tier.DEVICE] for part in parts} == {parts[0].memory[Tier.DEVICE]}
    for fewer, more in pairwise(parts[1:]):
        one, other = (part.link(Tier.PEERS, Tier.DEVICE) for part in (fewer, more))
        assert other.bytes_per_s <= one.bytes_per_s and other.latency_s > one.latency_s
        assert more.memory[Tier.HOST] <= fewer.memory[Tier.HOST]
    assert len({part.name for part in parts}) == 11


def test_one_name_is_one_machine_to_plan_for() -> None:
    assert read_options({"machine": "rtx-4090"}).machine == Machine.named("rtx-4090")
    with pytest.raises(PlanError, match="no machine is called 'v100'; the catalogue has a100-40-"):
        Machine.named("v100")
    with pytest.raises(PlanError, match="machine='v100' is no file and not in the catalogue, whi"):
        read_options({"machine": "v100"})
    with pytest.raises(ElixirError, match="machine=3: give a Machine"):
        read_options({"machine": 3})


def test_a_file_is_a_machine_to_plan_for(tmp_path: Path) -> None:
    cpu().save(tmp_path / "mine.json")
    assert read_options({"machine": tmp_path / "mine.json"}).machine == cpu()
    assert read_options({"machine": str(tmp_path / "mine.json")}).machine == cpu()


def sheet_text(**figures: Any) -> str:
    known = {
        name: {"value": 1.0, "source": "made up"}
        for name in (*catalogue.FIGURES, "float32_flops_per_s")
    }
    return json.dumps({"title": "one", "device": "cuda", "figures": {**known, **figures}})


def test_a_sheet_must_be_whole_and_sourced() -> None:
    read = catalogue.read(
        "one", sheet_text(gpus_per_node={"value": 8, "share": 0.5, "source": "s"})
    )
    assert read["gpus_per_node"] == 4.0 and read.flops_per_s == {"float32": 1.0}
    for broken in (
        {"value": 1.0},
        {"value": 1.0, "source": ""},
        {"value": 0, "source": "s"},
        {"value": 1.0, "share": 1.5, "source": "s"},
        {"value": 1.0, "source": "s", "colour": "red"},
        1.0,
    ):
        with pytest.raises(PlanError, match="malformed sheet of machine 'one'"):
            catalogue.read("one", sheet_text(host_memory_bytes=broken))
    with pytest.raises(PlanError, match=r"and has \['speed'\], which nobody reads"):
        catalogue.read("one", sheet_text(speed={"value": 1.0, "source": "s"}))
    lacking = json.loads(sheet_text())
    del lacking["figures"]["host_memory_bytes"]
    with pytest.raises(PlanError, match=r"lacks \['host_memory_bytes'\]"):
        catalogue.read("one", json.dumps(lacking))


def test_a_plan_says_the_machine_and_the_ranks_it_is_for() -> None:
    machine = Machine.named("a100-40-pcie").with_ranks(16)
    facts = gpt(2, 96, 700, 16)
    limits = Limits(device=12 << 20, host=1 << 34)
    plan = search(facts, machine, limits, group=Group(ranks=16))
    assert plan.machine == "a100-40-pcie, 16 ranks on 2 nodes"
    assert plan.layout.group.ranks == 16


def test_nothing_is_at_home_with_the_peers() -> None:
    assert set(HOMES) == set(Tier) - {Tier.PEERS}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_comes_back_from_json_equal(name: str, tmp_path: Path) -> None:
    for machine in (MACHINES[name], MACHINES[name].with_peers()):
        machine = machine.with_operators({"mm f32[2, 2]": 1e-6})
        assert Machine.from_json(machine.to_json()) == machine
        machine.save(tmp_path / "machine.json")
        assert Machine.load(tmp_path / "machine.json") == machine


def changed(**entries: Any) -> str:
    return json.dumps({**json.loads(cpu().to_json()), **entries})


MALFORMED = {
    "no JSON": "machine",
    "nothing": "{}",
    "a list": "[]",
    "a number": "3",
    "another tier": changed(memory={"attic": 1}),
    "a link to nowhere": changed(links=[{"source": "device", "target": "attic"}]),
    "half a link": changed(links=[{"source": "device", "target": "disk"}]),
    "links that are numbers": changed(links=[1, 2]),
    "memory that is a list": changed(memory=[1, 2]),
    "something else": changed(colour="red"),
    "half a node": changed(node={"ranks": 8}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_anything_else_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="malformed machine: "):
        Machine.from_json(MALFORMED[name])
    (tmp_path / "it").write_text(MALFORMED[name])
    with pytest.raises(PlanError, match="it is not a machine file: malformed machine: "):
        Machine.load(tmp_path / "it")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    for name in ("missing", "binary"):
        with pytest.raises(PlanError, match=f"{name} is not a machine file: "):
            Machine.load(tmp_path / name)
