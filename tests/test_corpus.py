"""The corpus' own sums: activation checkpointing of captured facts, times on another machine."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples" / "benchmarks"))

from corpus_models import DRAFT, LAUNCH_S, SHAPES, capture, checkpointed, costed
from graphs_facts import Builder

from elixir_fx.facts import Facts, Role
from elixir_fx.testing import emulated

THREADS = 1


def two_layers() -> Facts:
    """x -> layer 0 (a, b) -> layer 1 (c, d) -> loss; the backward reads a, c and the inputs."""
    b = Builder()
    paths = [b.parameter(f"layers.{n}.weight", 1024) for n in range(2)]
    b.node("x", nbytes=10, seconds=1.0)
    b.node("a", "x", paths[0], nbytes=100, seconds=2.0)
    b.node("b", "a", "x", nbytes=10, seconds=3.0)
    b.node("c", "b", paths[1], nbytes=200, seconds=4.0)
    b.node("d", "c", "b", nbytes=10, seconds=5.0)
    b.node("loss", "d", nbytes=4, seconds=1.0)
    b.backward()
    b.node("e", "loss", "d", nbytes=10, seconds=1.0)
    b.node("g1", "e", "c", gradient_of=paths[1], seconds=1.0)
    b.node("f", "e", "b", paths[1], nbytes=10, seconds=1.0)
    b.node("g0", "f", "a", gradient_of=paths[0], seconds=1.0)
    b.node("h", "f", "x", paths[0], nbytes=10, seconds=1.0)
    facts = b.facts()
    layer = {"a": "layers.0.up", "b": "layers.0.down", "c": "layers.1.up", "d": "layers.1.down"}
    storages = [replace(s, path=layer.get(s.name, s.path)) for s in facts.storages]
    return replace(facts, storages=tuple(storages))


def test_layers_run_again_before_their_backward() -> None:
    facts = checkpointed(two_layers())
    assert [n for n in facts.nodes if not n.startswith("p_")] == [
        "x", "a", "b", "c", "d", "loss", "e", "c_again", "g1", "f", "a_again", "g0", "h", "output",
    ]  # fmt: skip
    assert [cost.node for cost in facts.costs] == list(facts.nodes)
    assert facts.compute_s == two_layers().compute_s + 2.0 + 4.0
    assert facts.nodes[facts.backward] == "e"


def test_what_a_layer_computes_dies_and_is_born_again() -> None:
    facts = checkpointed(two_layers())
    at = facts.nodes.index
    lives = {s.name: (s.born, s.dies, s.role) for s in facts.storages}
    assert lives["a"] == (at("a"), at("b"), Role.TEMPORARY)
    assert lives["a_again"] == (at("a_again"), at("g0"), Role.TEMPORARY)
    assert lives["c"] == (at("c"), at("d"), Role.TEMPORARY)
    assert lives["c_again"] == (at("c_again"), at("g1"), Role.TEMPORARY)
    assert lives["x"] == (at("x"), at("h"), Role.ACTIVATION)
    assert lives["b"] == (at("b"), at("f"), Role.ACTIVATION)


def test_parameters_are_read_where_their_layer_runs_again() -> None:
    facts = checkpointed(two_layers())
    at = facts.nodes.index
    first, second = facts.parameters
    assert first.reads == (at("a"), at("a_again"), at("h"))
    assert second.reads == (at("c"), at("c_again"), at("f"))
    assert (first.gradient, second.gradient) == (at("g0"), at("g1"))


@pytest.mark.parametrize("name", ["gpt-27m", "llama", "experts"])
def test_a_captured_decoder_keeps_layers_inputs_only(name: str) -> None:
    small = {"width": 64, "heads": 4, "vocabulary": 256, "sequence": 32}
    shape = {
        "gpt-27m": replace(SHAPES["gpt-27m"], layers=3),
        "llama": replace(SHAPES["llama3-8b"], layers=3, keys=2, inner=128, **small),
        "experts": replace(SHAPES["mixtral-8x7b"], layers=2, keys=2, inner=128, **small),
    }[name]
    facts = capture(shape, batch=2)
    less = checkpointed(facts)
    hidden = 2 * shape.sequence * shape.width * 4
    for layer in range(shape.layers):
        kept = [
            s for s in less.storages
            if s.role is Role.ACTIVATION and s.path.startswith(f"layers.{layer}.")
        ]  # fmt: skip
        assert sum(s.nbytes for s in kept) <= hidden  # but for the statistics of norms
    flops = [sum(cost.flops for cost in one.costs) for one in (facts, less)]
    head = 6 * 2 * shape.sequence * shape.width * shape.vocabulary
    assert 1.15 < (flops[1] - head) / (flops[0] - head) < 1.34  # the forward's third, or less
    assert len({cost.node for cost in less.costs}) == len(less.nodes) == len(less.costs)


def test_costs_follow_the_machine() -> None:
    facts = capture(replace(SHAPES["gpt-27m"], layers=1), batch=1)
    assert costed(facts, DRAFT, "float32") == facts
    faster = emulated(flops_per_s=2e12, stream_bytes_per_s=2e12)
    for before, after in zip(facts.costs, costed(facts, faster, "float32").costs, strict=True):
        launch = LAUNCH_S if after.seconds * 2 != before.seconds else 0.0
        assert after.seconds - launch == pytest.approx((before.seconds - launch) / 2, abs=1e-15)
