"""The corpus' own sums: what is kept of its models' layers, times on another machine."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples" / "benchmarks"))

from corpus_models import DRAFT, LAUNCH_S, SHAPES, capture, costed

from elixir_fx.facts import Role
from elixir_fx.testing import emulated

THREADS = 1


@pytest.mark.parametrize("name", ["gpt2-4b", "llama3-8b", "mixtral-8x7b"])
def test_a_large_decoder_keeps_the_inputs_of_its_layers_only(name: str) -> None:
    small = {"width": 64, "heads": 4, "inner": 128, "vocabulary": 256, "sequence": 32, "layers": 3}
    keys = 2 if SHAPES[name].keys else 0
    shape = replace(SHAPES[name], keys=keys, **small)
    facts = capture(shape, batch=2)
    tokens = 2 * shape.sequence
    hidden = tokens * shape.width * 4
    scores = tokens * shape.experts * 4 if shape.experts > 1 else 0  # the router's stay as well
    again = capture(replace(shape, large=False), batch=2)
    for layer in range(shape.layers):
        kept, whole = (
            sum(
                s.nbytes
                for s in one.storages
                if s.role is Role.ACTIVATION and f"{s.path}.".startswith(f"layers.{layer}.")
            )
            for one in (facts, again)
        )
        assert kept <= hidden + scores
        assert whole > 4 * hidden
    flops = [sum(cost.flops for cost in one.costs) for one in (facts, again)]
    assert 1.15 < flops[0] / flops[1] < 1.34  # the layers' forward, or less, once more


def test_costs_follow_the_machine() -> None:
    facts = capture(replace(SHAPES["gpt-27m"], layers=1), batch=1)
    assert costed(facts, DRAFT, "float32") == facts
    faster = emulated(flops_per_s=2e12, stream_bytes_per_s=2e12)
    for before, after in zip(facts.costs, costed(facts, faster, "float32").costs, strict=True):
        launch = LAUNCH_S if after.seconds * 2 != before.seconds else 0.0
        assert after.seconds - launch == pytest.approx((before.seconds - launch) / 2, abs=1e-15)
