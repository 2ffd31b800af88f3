"""`verify` refuses every broken schedule, naming node and chunk, and accepts what passes make."""

import random
import re
from collections import Counter
from functools import cache

import pytest
from breaking import WAYS, Way
from graphs import NAMED, gpt, mlp
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import captured, copied, planned

from elixir_fx.errors import VerifyError
from elixir_fx.pipeline import PIPELINE, rewrite
from elixir_fx.plan import Plan
from elixir_fx.step import StepGraph
from elixir_fx.verify import verify

MODELS = {
    "mlp": mlp(64, 256, 256, 64),
    "gpt": gpt(layers=2, width=64, seq=8),
    "gpt_tied": gpt(layers=1, width=64, seq=8, tied=True),
    "thrice": NAMED["thrice"],
    "frozen": NAMED["kind_frozen"],
    "mixed": NAMED["kind_mixed"],
}
TRIES = 3  # of each way on each step


@cache
def rewritten(name: str, share: float) -> tuple[StepGraph, Plan]:
    """A rewritten step, all parameters away; the rest as the budget allows."""
    step = captured(MODELS[name])
    plan = planned(step, share, away=True)
    rewrite(step, plan, PIPELINE)
    return step, plan


STEPS = [*((name, 0.0) for name in MODELS), ("gpt", 0.3), ("mlp", 0.5)]


@pytest.mark.parametrize(("name", "share"), STEPS)
def test_what_the_passes_make_is_accepted(name: str, share: float) -> None:
    step, plan = rewritten(name, share)
    assert not plan.layout.keeps_all
    verify(step, plan)
    verify(copied(step), plan)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_broken_step_is_refused(way: Way) -> None:
    count = 0
    for name, share in STEPS:
        original, plan = rewritten(name, share)
        for seed in range(TRIES):
            step = copied(original)
            broken = way(step, plan, random.Random(f"{name} {seed}"))
            if broken is None:
                continue
            count += 1
            with pytest.raises(VerifyError) as refused:
                verify(step, broken.plan)
            assert re.search(broken.message, str(refused.value)), (name, seed, str(refused.value))
        verify(original, plan)  # what was broken was a copy
    assert count >= TRIES


def test_there_are_two_hundred_of_them() -> None:
    made: Counter[str] = Counter()
    for way in WAYS:
        for name, share in STEPS:
            original, plan = rewritten(name, share)
            for seed in range(TRIES):
                broken = way(copied(original), plan, random.Random(f"{name} {seed}"))
                made[way.__name__] += broken is not None
    assert made.total() >= 200, made


@given(st.sampled_from(STEPS), st.lists(st.sampled_from(WAYS), min_size=1), st.randoms())
@settings(max_examples=60, deadline=None)
def test_random_breaks_are_refused(
    which: tuple[str, float], ways: list[Way], rng: random.Random
) -> None:
    original, plan = rewritten(*which)
    step = copied(original)
    for way in ways:
        broken = way(step, plan, rng)
        if broken is not None:
            with pytest.raises(VerifyError):
                verify(step, broken.plan)
            return
