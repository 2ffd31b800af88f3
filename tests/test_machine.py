"""Machines as data: links to other ranks, and the way through JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graphs_facts import accelerator, cpu

from elixir_fx.errors import PlanError
from elixir_fx.machine import HOMES, Machine, Tier
from elixir_fx.testing import emulated

MACHINES = {
    "cpu": cpu(),
    "accelerator": accelerator(),
    "emulated": emulated(disk_memory=1 << 30),
    "no link": replace(cpu(), links=()),
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
