"""demand: the peak of a step at any sizes, and the largest size that keeps to a limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_fx.demand import Demand
from elixir_fx.errors import PlanError

ATTENTION = Demand(
    constant_bytes=1000,
    update_bytes=500,
    live=("8*batch*sequence**2 + 100*batch", "300*batch*sequence + 50"),
)


def test_peak() -> None:
    """The constant, and the larger of the update and the most that is live."""
    peak = ATTENTION.peak
    assert peak({"batch": 1, "sequence": 1}) == 1000 + 500
    assert peak({"batch": 2, "sequence": 3}) == 1000 + 1850
    assert peak({"batch": 1, "sequence": 100}) == 1000 + 80_100
    assert peak({"batch": 1, "sequence": 1}, held_bytes=1000) == 1000 + 1350
    assert Demand(constant_bytes=3, update_bytes=2, live=()).peak({}) == 5


@given(st.integers(1500, 10**9), st.integers(1, 1000))
def test_the_largest_fits_and_the_next_does_not(limit: int, sequence: int) -> None:
    others = {"sequence": sequence}
    if ATTENTION.peak({**others, "batch": 1}) > limit:
        with pytest.raises(PlanError, match=f"batch = 1 needs .*, with sequence = {sequence}"):
            ATTENTION.largest("batch", others, limit)
        return
    found = ATTENTION.largest("batch", others, limit)
    assert ATTENTION.peak({**others, "batch": found}) <= limit
    assert ATTENTION.peak({**others, "batch": found + 1}) > limit


def test_limits_met_exactly() -> None:
    step = Demand(constant_bytes=0, update_bytes=0, live=("10*n",))
    assert [step.largest("n", {}, limit) for limit in (10, 19, 20, 170, 179)] == [1, 1, 2, 17, 17]


def test_what_no_memory_depends_on() -> None:
    with pytest.raises(PlanError, match="heads may be any size"):
        ATTENTION.largest("heads", {"batch": 1, "sequence": 1}, 2000)
    capped = Demand(constant_bytes=0, update_bytes=0, live=("min(n, 8)*4",))
    with pytest.raises(PlanError, match="n may be any size"):
        capped.largest("n", {}, 32)
    assert capped.largest("n", {}, 31) == 7
