"""The runner: order, history, dumps, and how it names what went wrong."""

from pathlib import Path

import pytest
from graphs import mlp
from steps import captured, copied, planned

from elixir_fx import ops
from elixir_fx.errors import ElixirError, VerifyError
from elixir_fx.passes.gather import gather
from elixir_fx.pipeline import PIPELINE, rewrite
from elixir_fx.plan import Plan
from elixir_fx.step import StepGraph

STEP = captured(mlp(8, 16, 4))
PLAN = planned(STEP, 0.0, away=True)


def mine(step: StepGraph, plan: Plan) -> None:
    """A pass that reads only."""


def names(pipeline: object) -> list[str]:
    return [transform.__name__ for transform in pipeline.transforms]  # type: ignore[attr-defined]


def test_the_order_is_written_once() -> None:
    assert names(PIPELINE) == [
        "recompute", "offload", "recycle", "split_views", "gather", "release", "reduce", "prefetch",
        "align",
    ]  # fmt: skip
    assert [a.__name__ for a in PIPELINE.analyses] == [
        "lifetime",
        "compute_cost",
        "communication_cost",
        "dataflow",
    ]


def test_a_pipeline_is_edited_by_name_and_stays_as_it_was() -> None:
    assert names(PIPELINE.after("prefetch", mine))[-3:] == ["prefetch", "mine", "align"]
    assert names(PIPELINE.after("gather", mine))[4:7] == ["gather", "mine", "release"]
    assert names(PIPELINE.without("align")) == names(PIPELINE)[:-1]
    with pytest.raises(
        ElixirError, match=r"no transform pass is called 'ghater'; there are \['rec"
    ):
        PIPELINE.after("ghater", mine)


def test_history_tells_what_each_pass_did() -> None:
    step = copied(STEP)
    rewrite(step, PLAN, PIPELINE.after("prefetch", mine))
    done = [record.name for record in step.history]
    assert done == [
        *(a.__name__ for a in PIPELINE.analyses),
        *names(PIPELINE.after("prefetch", mine)),
    ]
    by_name = {record.name: record for record in step.history}
    stays = len(step.schedule.gathers) if step.schedule is not None else 0
    assert by_name["gather"].added[str(ops.GATHER)] == stays == 5
    assert by_name["release"].added == {str(ops.RELEASE): stays}
    assert by_name["mine"].added == by_name["mine"].removed == {}
    assert all(record.seconds >= 0 for record in step.history)


def test_without_prefetch_every_gather_still_finds_its_chunk() -> None:
    step = copied(STEP)
    rewrite(step, PLAN, PIPELINE.without("prefetch"))
    assert not [node for node in step.nodes if node.target is ops.PREFETCH]


def test_stages_are_dumped_as_python(tmp_path: Path) -> None:
    step = copied(STEP)
    rewrite(step, PLAN, PIPELINE, tmp_path / "stages")
    files = sorted(path.name for path in (tmp_path / "stages").iterdir())
    wanted = ["captured", *names(PIPELINE)]
    assert files == [f"{step.key}_{number:02d}_{name}.py" for number, name in enumerate(wanted)]
    for file in (tmp_path / "stages").iterdir():
        compile(file.read_text(), str(file), "exec")
    last = (tmp_path / "stages" / files[-1]).read_text()
    assert last.startswith("# stage 9: align, made in ")
    assert "# elixir: gather chunk 0 (0.weight, 4.0 KiB) from host" in last.replace('"', "")


def broken(step: StepGraph, plan: Plan) -> None:
    step.module.graph.erase_node(next(n for n in step.nodes if n.target is ops.RELEASE))


def test_a_broken_graph_is_named_and_dumped(tmp_path: Path) -> None:
    pipeline = PIPELINE.after("release", broken)
    with pytest.raises(VerifyError) as refused:
        rewrite(copied(STEP), PLAN, pipeline, tmp_path)
    text = str(refused.value)
    before = names(PIPELINE)[:6]
    assert before[-1] == "release"
    assert text.startswith(f"pass 'broken' (after {before}) broke")
    (file,) = [path for path in tmp_path.iterdir() if "broken" in path.name]
    assert str(file) in text
    assert "gather" in file.read_text()
    with pytest.raises(VerifyError, match="pass dump=folder to see its graph"):
        rewrite(copied(STEP), PLAN, pipeline)


def test_an_error_of_the_pass_itself_is_not_hidden() -> None:
    with pytest.raises(ElixirError, match="where no node reads it"):
        rewrite(copied(STEP), PLAN, PIPELINE.after("split_views", gather))
