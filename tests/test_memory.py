"""The plan says how much memory a step takes; the step takes that, and never more than allowed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import exact
import pytest
from graphs import gpt, mlp
from harness import adamw, budget, train

from elixir_fx.errors import PlanError
from elixir_fx.testing import emulated
from elixir_fx.units import GIB, MIB

GPT = gpt(layers=4, width=128, seq=64, batch=4)


PAGE = 4096  # small results may live one operator longer where their neighbours are recycled


def close(measured: float, forecast: float) -> bool:
    """Within 1 % or 1 MiB, whichever is more."""
    return abs(measured - forecast) <= max(0.01 * forecast, MIB)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_planned_peak_is_the_measured_one(share: float, tmp_path: Path) -> None:
    model, batches = GPT.build(), GPT.batches(3)
    memory = budget(model, batches[0], share, disk_memory=GIB, optimizer="adamw")
    run = train(model, adamw, batches, compile={"memory": memory, "disk": str(tmp_path)})
    assert run.stats is not None
    assert run.plan is not None
    assert run.stats["peak_device_bytes"] <= memory + PAGE
    assert run.plan.forecast.peak_device_bytes <= memory
    assert close(run.stats["peak_device_bytes"], run.plan.forecast.peak_device_bytes)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_planned_peaks_of_an_accelerator_and_its_host(share: float) -> None:
    machine = emulated()
    model, batches = GPT.build(), GPT.batches(3)
    tiers: dict[str, Any] = {"machine": machine, "host_memory": GIB}
    memory = budget(model, batches[0], share, optimizer="adamw", **tiers)
    run = train(model, adamw, batches, compile={"memory": memory, **tiers})
    assert run.stats is not None
    assert run.plan is not None
    assert run.stats["peak_device_bytes"] <= memory + PAGE
    assert close(run.stats["peak_device_bytes"], run.plan.forecast.peak_device_bytes)
    assert close(run.stats["peak_host_bytes"], run.plan.forecast.peak_host_bytes)


def test_moved_bytes_are_as_forecast(tmp_path: Path) -> None:
    model, batches = GPT.build(), GPT.batches(4)
    memory = budget(model, batches[0], 0.2, disk_memory=GIB, optimizer="adamw")
    optimizer = adamw(list(model.parameters()))
    compiled = exact.compile(model, optimizer=optimizer, memory=memory, disk=tmp_path)
    for batch in batches:
        compiled(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compiled.plan is not None
    stats, forecast = compiled.stats(), compiled.plan.forecast
    for name in ("gathered_bytes", "reduced_bytes"):
        assert stats[name] == getattr(forecast, name), name
    for name in ("disk_read_bytes", "disk_write_bytes"):  # padding of small parameters counts
        assert abs(stats[name] / getattr(forecast, name) - 1) < 0.03, name


def test_the_smallest_budget_works_and_less_is_refused(tmp_path: Path) -> None:
    model, batches = GPT.build(), GPT.batches(2)
    smallest = exact.smallest_memory(model, batches[0], disk_memory=GIB, optimizer="adamw")
    options: dict[str, Any] = {"disk": str(tmp_path), "example_inputs": batches[0]}
    with pytest.raises(PlanError, match="memory="):
        exact.compile(
            model,
            optimizer=adamw(list(model.parameters())),
            memory=int(0.98 * smallest) - 4096,
            **options,
        )
    run = train(model, adamw, batches, compile={"memory": smallest, **options})
    assert run.stats is not None
    assert run.stats["peak_device_bytes"] <= smallest + PAGE


def test_without_a_disk_a_budget_below_the_state_is_refused() -> None:
    example = mlp(256, 256, 256)
    model, batch = example.build(), example.batches(1)[0]
    state_bytes = 4 * sum(p.nbytes for p in model.parameters())
    with pytest.raises(PlanError, match="memory="):
        exact.plan(model, batch, memory=state_bytes // 2, optimizer="adamw")


RESIDENT = """
import gc, json, sys
from pathlib import Path

import torch
from torch import nn

import elixir_fx

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

torch.compile(nn.Linear(4, 4), backend="aot_eager")(torch.randn(2, 4)).sum().backward()
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
start = status("VmRSS:")
memory = int(sys.argv[1])
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(12)])
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(16, 1024)
model = elixir_fx.compile(model, optimizer=optimizer, example_inputs=(x,), memory=memory,
                          disk=sys.argv[2], kernels="eager")
resident = []
for _ in range(8):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    resident.append(status("VmRSS:"))
print(json.dumps({"growth": status("VmHWM:") - start, "resident": resident}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_keeps_to_the_budget(tmp_path: Path) -> None:
    memory = 64 * MIB  # the training state of the model in RESIDENT is 192 MiB
    command = [sys.executable, "-c", RESIDENT, str(memory), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["growth"] <= 1.05 * memory + 64 * MIB
    assert result["resident"][-1] <= 1.02 * result["resident"][2] + 2 * MIB
    assert not list(tmp_path.iterdir())
