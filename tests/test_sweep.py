"""sweep: rows are what plan() would say, one capture serves all, and the table shows them."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_fx
from elixir_fx import ElixirError, PlanError
from elixir_fx.capture import Capture
from elixir_fx.report.sweep import Row, Sweep
from elixir_fx.testing import emulated
from elixir_fx.units import GIB, KIB, MIB

THREADS = 1
MACHINE = emulated(device_memory=GIB, host_memory=GIB)
SHAPES = {"x": {0: "batch", 1: "sequence"}}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def inputs(batch: int = 4) -> dict[str, Tensor]:
    return {"x": torch.zeros(batch, 8, 64)}


def swept(**options: Any) -> Sweep:
    return elixir_fx.sweep(Model(), inputs(), machine=MACHINE, kernels="eager", **options)


def test_rows_are_what_plans_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every budget, number of ranks and size; the model is captured once."""
    calls: list[object] = []
    ordinary = Capture.__call__

    def counted(self: Capture, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return ordinary(self, *args, **kwargs)

    monkeypatch.setattr(Capture, "__call__", counted)
    budgets = ["64KiB", 200 * KIB, "4MiB"]
    found = swept(memory=budgets, ranks=[1, 2], dynamic_shapes=SHAPES, sizes={"batch": [2, 4, 9]})
    assert len(calls) == 1
    assert [dict(row.sizes)["batch"] for row in found.rows] == [2] * 6 + [4] * 6 + [9] * 6
    assert [row.ranks for row in found.rows[:6]] == [1, 1, 1, 2, 2, 2]
    assert {dict(row.sizes)["sequence"] for row in found.rows} == {8}
    for row in found.rows:
        options: Any = {"memory": row.memory_bytes, "ranks": row.ranks, "kernels": "eager"}
        options["dynamic_shapes"] = SHAPES
        batch = inputs(dict(row.sizes)["batch"])
        if row.forecast is None:
            with pytest.raises(PlanError) as refused:
                elixir_fx.plan(Model(), batch, machine=MACHINE, **options)
            assert str(refused.value) == row.refusal
            assert row.smallest_bytes is not None and row.smallest_bytes > row.memory_bytes
            continue
        plan = elixir_fx.plan(Model(), batch, machine=MACHINE, **options)
        assert row.peak_device_bytes == plan.forecast.peak_device_bytes <= row.memory_bytes
        if dict(row.sizes)["batch"] == 4:  # at other sizes times are estimates
            assert row.step_s == pytest.approx(plan.forecast.step_s)
            assert row.gap == pytest.approx(plan.forecast.gap)
    refused_rows = [row for row in found.rows if row.forecast is None]
    budgets_refused = {row.memory_bytes for row in refused_rows}
    assert 64 * KIB in budgets_refused and 4 * MIB not in budgets_refused


def test_rates_only_where_their_sizes_are_known() -> None:
    (row,) = swept(memory="4MiB").rows
    assert row.step_s and row.samples_per_s is None and row.tokens_per_s is None
    (row,) = swept(memory="4MiB", ranks=2, dynamic_shapes={"x": {0: "batch"}}).rows
    assert row.samples_per_s == pytest.approx(2 * 4 / row.step_s)
    assert row.tokens_per_s is None
    (row,) = swept(memory="4MiB", dynamic_shapes=SHAPES, sizes={"sequence": [16]}).rows
    assert row.tokens_per_s == pytest.approx(4 * 16 / row.step_s)


def test_as_text_and_as_json() -> None:
    found = swept(memory=["64KiB", "4MiB"], dynamic_shapes=SHAPES)
    head, columns, _, refused, planned = str(found).splitlines()
    assert head == f"Model on {MACHINE.name}"
    assert columns.split()[:4] == ["memory", "batch", "sequence", "step"]  # one rank: no column
    assert "no plan: memory='" in refused and "no plan" not in planned
    assert planned.split()[:4] == ["4.0", "MiB", "4", "8"]
    data = json.loads(found.to_json())
    assert [row["memory_bytes"] for row in data["rows"]] == [64 * KIB, 4 * MIB]
    assert data["rows"][0]["forecast"] is None and data["rows"][0]["smallest_bytes"] > 64 * KIB
    assert data["rows"][1]["forecast"]["step_s"] == found.rows[1].step_s
    assert data["rows"][1]["sizes"] == {"batch": 4, "sequence": 8}


def test_a_refusal_that_no_memory_helps() -> None:
    row = Row(memory_bytes=MIB, refusal="the pinned homes do not fit")
    text = str(Sweep(model="Model", machine="cpu", rows=(row,)))
    assert "no plan: the pinned homes do not fit" in text and "step" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": []}, r"memory=\[\]: give one value"),
        ({"memory": 1.5}, r"memory=1\.5: give one value"),
        ({"ranks": [0]}, "ranks=0: give the number"),
        ({"sizes": {"batch": [2]}}, r"sizes has 'batch', .* known are \[\]"),
        ({"sizes": {"heads": [2]}, "dynamic_shapes": SHAPES}, r"known are \['batch', 'sequence'\]"),
        ({"sizes": {"batch": [0]}, "dynamic_shapes": SHAPES}, r"sizes\['batch'\] has 0"),
        ({"budget": 3}, "has no option 'budget'"),
    ],
)
def test_questions_that_cannot_be_answered(options: Any, message: str) -> None:
    with pytest.raises(ElixirError, match=message):
        swept(**options)
