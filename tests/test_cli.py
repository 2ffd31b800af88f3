"""The commands print what they were asked for, and say in one line what they refuse."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from elixir_fx import catalogue, cli
from elixir_fx.cli import main
from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Plan
from elixir_fx.report.machines import machine_text, sources_text
from elixir_fx.report.text import plan_text
from elixir_fx.testing import emulated
from elixir_fx.units import GIB, MIB

BUILD = """
import dataclasses
import torch
from beside import WIDTH

@dataclasses.dataclass
class Width:
    value: int = WIDTH

def build():
    width = Width().value
    layers = [torch.nn.Linear(width, width) for _ in range(6)]
    return torch.nn.Sequential(*layers), (torch.ones(4, width),)

def keywords():
    assert torch.ones(1).is_meta
    class Net(torch.nn.Linear):
        def forward(self, pair):
            return super().forward(pair["a"]) + pair["b"][0]
    return Net(8, 8), {"pair": {"a": torch.ones(2, 8), "b": [torch.ones(2, 8)]}}

def nothing():
    return None

size = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("WIDTH = 64\n")
    path = tmp_path / "cli_model.py"
    path.write_text(BUILD)
    return path


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    code = main([str(word) for word in argv])
    return (code, *capsys.readouterr())


def test_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = said(capsys, "machine", "--list")
    assert (code, error) == (0, "")
    lines = out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(catalogue.names())
    assert "NVIDIA H100 SXM 80 GB, 8 in a DGX H100" in out and "989.5 TFLOP/s" in out


def test_a_machine_of_the_catalogue_comes_with_its_sources(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = said(capsys, "machine", "h200", "--save", tmp_path / "h200.json")
    machine = Machine.named("h200")
    assert code == 0 and Machine.load(tmp_path / "h200.json") == machine
    assert out == machine_text(machine) + "\n" + sources_text(catalogue.sheet("h200"))
    assert "stream_bytes_per_s 4.8e+12 x 0.85: NVIDIA H200" in out
    # A file is a machine as well, and nobody knows its sources.
    code, out, _ = said(capsys, "machine", tmp_path / "h200.json")
    assert code == 0 and out == machine_text(machine)
    code, out, _ = said(capsys, "machine", "h200", "--json")
    assert code == 0 and Machine.from_json(out) == machine


def test_this_machine_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measured(device: torch.device, disk: Path | None, *, threads: int) -> Machine:
        asked.append((disk, threads))
        return emulated(disk_memory=GIB)

    monkeypatch.setattr(cli, "this_machine", measured)
    code, out, _ = said(capsys, "machine", "--disk", tmp_path, "--threads", 3, "--json")
    assert code == 0 and Machine.from_json(out) == emulated(disk_memory=GIB)
    assert said(capsys, "machine")[:2] == (0, machine_text(emulated(disk_memory=GIB)))
    assert asked == [(tmp_path, 3), (None, torch.get_num_threads())]


def test_what_a_machine_has_is_printed() -> None:
    text = machine_text(emulated(device_memory=3 * GIB, host_memory=512 * MIB))
    assert text.startswith(f"machine {emulated().name} (cpu)\n")
    lines = [line.split() for line in text.splitlines()]
    assert ["device", "3.0", "GiB"] in lines and ["host", "512.0", "MiB"] in lines
    assert "host -> device" in text and "optimizer on the host" not in text and "node" not in text
    assert "disk" not in text
    node = Machine.named("a100-80-sxm").with_ranks(16)
    assert node.node is not None
    text = machine_text(node)
    assert "machine a100-80-sxm, 16 ranks on 2 nodes (cuda)" in text
    assert f"peers -> {Tier.DEVICE}" in text and "8 to a node: 195.6 GiB/s each" in text


def test_a_plan_is_printed_and_saved(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    where = (f"{file}:build", "--machine", "a100-40-pcie", "--memory", "160KiB")
    saved = tmp_path / "plan.json"
    code, out, error = said(capsys, "plan", *where, "--ranks", 16, "--save", saved)
    assert (code, error) == (0, "")
    plan = Plan.load(saved)
    assert out == plan_text(plan)
    assert out.startswith("plan for a100-40-pcie, 16 ranks on 2 nodes\n")
    assert plan.layout.group.ranks == 16 and plan.limits.device == 160 << 10
    assert not plan.worth  # nobody has asked
    code, out, error = said(capsys, "plan", *where, "--ranks", 16, "--save", saved, "--explain")
    plan = Plan.load(saved)
    assert (code, error) == (0, "") and out == f"{plan_text(plan)}\n{plan.explain()}"
    assert plan.worth and "without it" in out and "with another budget" in out
    budgets = ("--host-memory", "1MiB", "--disk-memory", "2GiB", "--optimizer", "sgd")
    code, out, _ = said(capsys, "plan", *where, *budgets, "--json")
    assert code == 0 and json.loads(out)["limits"] == {
        "device": 160 << 10, "host": 1 << 20, "disk": 2 << 30
    }  # fmt: skip


def test_inputs_may_be_nests_without_values(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    code, out, error = said(capsys, "plan", f"{file}:keywords", "--machine", "rtx-3090")
    assert (code, error) == (0, "") and out.startswith("plan for rtx-3090\n")


def test_a_refusal_is_one_line(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.json").write_text("{")
    where = f"{file}:build"
    for argv, message in (
        (("machine", "v100"), "machine='v100' is no file and not in the catalogue"),
        (("machine", tmp_path / "broken.json"), "is not a machine file"),
        (("machine", "--disk", tmp_path / "absent"), "is not a folder"),
        (("plan", where, "--machine", "h200", "--memory", "1KiB"), "Smallest that fits: memory="),
        (("plan", where, "--machine", "h200", "--memory", "much"), "'much' is not a size"),
        (("plan", where, "--machine", "h200", "--optimizer", "adamm"), "no optimizer is called"),
        (("plan", where, "--machine", "h200", "--ranks", 0), "ranks=0: give the number of ranks"),
    ):
        code, out, error = said(capsys, *argv)
        assert (code, out) == (cli.REFUSED, "")
        assert error.startswith("elixir-fx: ") and error.count("\n") == 1 and message in error


def test_a_senseless_command_says_how_it_is_used(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    for argv, message in (
        ((), "COMMAND"),
        (("dance",), "invalid choice: 'dance'"),
        (("machine", "--threads", "0"), "--threads 0: give 1 or more"),
        (("plan", "build"), "'build' names no file: give FILE.py:FUNCTION"),
        (("plan", f"{file}:absent"), "has no function 'absent'"),
        (("plan", f"{file}:size"), "has no function 'size'"),
        (("plan", f"{file}:nothing"), "returns no (model, example_inputs)"),
        (("plan", f"{file}:build", "--ranks", "two"), "invalid int value: 'two'"),
    ):
        code, out, error = said(capsys, *argv)
        assert (code, out) == (cli.SENSELESS, "")
        assert error.startswith("usage: elixir-fx") and message in error
    code, out, _ = said(capsys, "--help")
    assert code == 0 and "plan the training of a model" in out


def test_it_is_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"elixir-fx": "elixir_fx.cli:main"}
    data = project["tool"]["setuptools"]["package-data"]["elixir_fx"]
    assert "machines/*.json" in data  # without them no name is known
