"""The public functions and options that no other test is about."""

import json
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from graphs import gpt
from harness import adamw, difference
from pairs import SPARE, Pair, Side, memory_needed, same
from torch import Tensor, nn

import elixir_fx
from elixir_fx import ElixirError, PlanError, planner
from elixir_fx.config import read_options
from elixir_fx.guarded import GuardedSession
from elixir_fx.machine import Machine
from elixir_fx.pipeline import PIPELINE
from elixir_fx.plan import Group, Limits, Plan
from elixir_fx.step import StepGraph
from elixir_fx.testing import emulated
from elixir_fx.units import GIB, MIB

THREADS = 1

X = torch.linspace(-1, 1, 4 * 64).view(4, 64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.body = nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.body(self.wte(x).tanh()) + shift


@pytest.fixture(scope="module")
def smallest() -> int:
    return memory_needed(Net(), (X,))


def homes(net: Any) -> dict[str, str]:
    layout = net.plan.layout
    return {s.path: str(c.homes.parameters) for c in layout.chunks for s in c.slices}


def test_every_name_is_exported() -> None:
    for name in ("compile", "plan", "smallest_memory", "full_parameters", "save", "load",
                 "ElixirModule", "AwayParameter", "ChunkGradient", "Plan", "ElixirError",
                 "CaptureError", "PlanError", "VerifyError", "TierError"):  # fmt: skip
        assert hasattr(elixir_fx, name), name


def test_a_plan_is_made_saved_and_given_back(smallest: int, tmp_path: Path) -> None:
    """By name of an optimizer, for a disk without a folder, for a model on meta."""
    with torch.device("meta"):
        model: nn.Module = Net()
    plan = exact.plan(model, {"x": X}, memory=smallest, disk_memory=GIB, optimizer="adamw")
    assert plan.limits.device == smallest and plan.limits.disk == GIB
    assert plan.forecast.peak_device_bytes <= smallest and plan.forecast.lower_bound_s > 0
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["elixir_fx_plan"] == 6
    for given in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        net = exact.compile(Net(), plan=given, memory=smallest, disk=tmp_path, example_inputs=(X,))
        assert net.plan is not None and net.plan.layout == plan.layout


def test_equal_questions_have_equal_plans(smallest: int) -> None:
    first, second = (exact.plan(Net(), (X,), memory=smallest, disk_memory=GIB) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("inputs", [(X,), {"x": X, "shift": 1.0}, (X, 2.0)])
def test_example_inputs(inputs: Any) -> None:
    net = exact.compile(Net(), example_inputs=inputs, **SPARE)
    assert net.plan is not None
    want = net._original(*inputs) if isinstance(inputs, tuple) else net._original(**inputs)
    got = net(*inputs) if isinstance(inputs, tuple) else net(**inputs)
    assert difference(want, got) is None


def test_homes_that_are_fixed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"memory": GIB, "disk": tmp_path}
    pair = Pair(Net, [(X,)], {**options, "keep": {"wte": "disk"}})
    pair.train(2)
    pair.check()
    assert pair.away() == ["wte.weight", "wte.bias"]
    assert homes(pair.ours.net)["body.weight"] == "device"
    with pytest.raises(PlanError, match="attic"):
        exact.compile(Net(), keep={"wte": "attic"}, **options)


def test_parameters_that_are_left_alone(smallest: int, tmp_path: Path) -> None:
    class Own(nn.Parameter):
        """A Parameter of the user's own, which cannot be stored away."""

    def build() -> nn.Module:
        model = Net()
        model.body.bias = Own(torch.zeros(64))
        return model

    options = {"memory": smallest + (64 << 10), "disk": tmp_path, "ignore": ["body.bias"]}
    pair = Pair(build, [(X,)], options)
    pair.train(2)
    pair.check()
    assert type(pair.ours.net.body.bias) is Own and "body.bias" not in pair.away()


def test_a_pass_of_ones_own_and_a_dump(smallest: int, tmp_path: Path) -> None:
    seen: list[int] = []

    def mine(step: StepGraph, plan: Plan) -> None:
        """Before: anything. After: the same. Law: none."""
        seen.append(len(step.nodes))

    (tmp_path / "disk").mkdir()
    options = {
        "memory": smallest,
        "disk": tmp_path / "disk",
        "passes": PIPELINE.after("gather", mine),
        "dump": tmp_path / "dump",
    }
    net = exact.compile(Net(), example_inputs=(X,), **options)
    assert seen and [record.name for record in net.history if record.name == "mine"]
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert any(name.endswith("captured.py") for name in files)
    assert any("prefetch" in name for name in files)
    with pytest.raises(ElixirError, match="no transform pass is called"):
        PIPELINE.after("gathers", mine)


def test_memory_as_text_and_as_a_number(smallest: int, tmp_path: Path) -> None:
    for memory in (smallest, f"{smallest / 1024}KiB", "0.01GiB"):
        net = exact.compile(Net(), memory=memory, disk=tmp_path, example_inputs=(X,))
        assert net.plan is not None and net.plan.forecast.peak_device_bytes <= 0.01 * GIB


def test_default_budget_keeps_a_small_model(tmp_path: Path) -> None:
    model = Net()
    net = exact.compile(model, adamw(list(model.parameters())), disk=tmp_path)
    net(X).mean().backward()
    assert net.plan is not None and net.plan.layout.keeps_all and net.plan.limits.device > 0
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_several_models_at_once(smallest: int, tmp_path: Path) -> None:
    """Nothing is shared between two compiled models."""
    options = {"memory": smallest, "disk": tmp_path}
    pairs = [Pair(Net, [(X,)], options) for _ in range(2)]
    for _ in range(2):
        for pair in pairs:
            pair.train()
    for pair in pairs:
        pair.check()
    one, two = (pair.ours for pair in pairs)

    def chained(side: Side) -> Tensor:
        other = two if side is one else pairs[1].plain
        return other.net(side.net(X).sin()).square().mean()

    results = []
    for side in pairs[0].sides:
        chained(side).backward()
        other = two if side is one else pairs[1].plain
        results.append([p.grad for p in (*side.net.parameters(), *other.net.parameters())])
    same(*results)


def on_meta(**sizes: int) -> tuple[nn.Module, Any]:
    example = gpt(**sizes)
    return example.build().to("meta"), example.batches(1)[0]


def test_plans_for_many_ranks_need_no_process_group() -> None:
    """Of a mid-size transformer on meta, on an accelerator that nobody has."""
    model, batch = on_meta(layers=4, width=256, seq=64, vocab=4096)
    machine = emulated(device_memory=GIB, host_memory=GIB)
    options: dict[str, Any] = {"memory": "200MiB", "host_memory": "100MiB", "machine": machine}
    whole = sum(p.nbytes for p in model.parameters())
    peaks, needed = [], []
    for ranks in (2, 64):
        plan = exact.plan(model, batch, ranks=ranks, **options)
        layout = plan.layout
        assert (layout.group.ranks, layout.group.shared) == (ranks, False)
        assert plan.forecast.peak_device_bytes <= plan.limits.device == 200 * MIB
        assert plan.forecast.lower_bound_s <= plan.forecast.step_s
        share = sum(chunk.share_bytes for chunk in layout.chunks)
        largest = max(chunk.nbytes for chunk in layout.chunks)
        assert whole / ranks <= share <= 1.02 * whole / ranks + largest / ranks
        assert len(plan.schedules[0].gathers) >= len(layout.chunks)
        peaks.append(plan.forecast.peak_device_bytes)
        needed.append(exact.smallest_memory(model, batch, ranks=ranks, **options))
    assert peaks[0] > peaks[1]
    assert 200 * MIB > needed[0] >= needed[1]
    assert all(p.is_meta for p in model.parameters())


def test_the_smallest_memory_of_a_rank_is_accepted() -> None:
    model, batch = on_meta(layers=2, width=64, seq=8)
    options: dict[str, Any] = {"machine": emulated(), "host_memory": "64MiB"}
    least = exact.smallest_memory(model, batch, ranks=8, **options)
    plan = exact.plan(model, batch, ranks=8, memory=least, **options)
    assert plan.forecast.peak_device_bytes <= least
    with pytest.raises(PlanError, match="Smallest that fits"):
        exact.plan(model, batch, ranks=8, memory=least - 1, **options)


def test_where_nothing_can_be_timed_one_search_is_enough() -> None:
    options: dict[str, Any] = {"machine": emulated(), "host_memory": "64MiB", "kernels": "eager"}
    options["memory"] = exact.smallest_memory(Net(), (X,), machine=emulated(), host_memory="64MiB")
    session = GuardedSession(Net(), "adamw", read_options(options))
    searched: list[Plan] = []

    def counted(*given: Any) -> Plan:
        searched.append(planner.search(*given))
        return searched[-1]

    session.lowering.make_plan = counted
    plan = session.plan_only((X,), {})
    assert plan is not None and not plan.layout.keeps_all
    assert len(searched) == 1 and searched[0].layout == plan.layout


def test_one_rank_is_the_same_as_none_named(smallest: int) -> None:
    options: dict[str, Any] = {"memory": smallest, "disk_memory": GIB}
    assert exact.plan(Net(), (X,), ranks=1, **options) == exact.plan(Net(), (X,), **options)


@pytest.mark.parametrize("ranks", [0, -1, "2", 2.0, None])
def test_a_number_of_ranks_that_cannot_be(ranks: Any) -> None:
    for function in (exact.plan, exact.smallest_memory):
        with pytest.raises(ElixirError, match="give the number of ranks, 1 or more"):
            function(Net(), (X,), ranks=ranks)


def test_a_plan_for_other_ranks_is_refused() -> None:
    plan = exact.plan(Net(), (X,), ranks=2, **SPARE)
    with pytest.raises(PlanError, match="the plan is for 2 ranks and 1 train this model"):
        exact.compile(Net(), plan=plan, example_inputs=(X,), **SPARE)


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_a_machine_of_the_catalogue_is_planned_for(ranks: int) -> None:
    """Its memory, of which a rank has its part, is the budget where none is given."""
    plan = exact.plan(Net(), (X,), ranks=ranks, machine="h100-sxm")
    wanted = Machine.named("h100-sxm").with_ranks(ranks)
    assert plan.machine == wanted.name and plan.layout.group == Group(ranks=ranks)
    assert plan.limits == Limits(device=80 * GIB, host=2048 * GIB // min(ranks, 8))
    tight = exact.plan(Net(), (X,), ranks=ranks, machine="h100-sxm", memory=200 * 1024)
    assert not tight.layout.keeps_all and tight.machine == wanted.name


def test_a_machine_that_is_elsewhere_runs_nothing_here() -> None:
    with pytest.raises(ElixirError, match="'h200' computes on cuda and this model on cpu"):
        exact.compile(Net(), machine="h200")
