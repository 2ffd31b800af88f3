"""formula: what is evaluated, exactly, and that nothing else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_fx.errors import PlanError
from elixir_fx.formula import evaluate

VALUES = {"batch": 7, "sequence": 12}


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("0", 0),
        ("4096*batch*sequence + 128", 4096 * 84 + 128),
        ("-batch + 10", 3),
        ("2*batch - 3*sequence", -22),
        ("8*((sequence + 7)//8)", 16),
        ("(-((-sequence)//5))", 3),
        ("(sequence % 5) + sequence**2", 146),
        ("max(batch, 3, sequence) - min(batch, 2)", 10),
        ("max(batch)", 7),
        ("18014398509481985*batch", 18014398509481985 * 7),
    ],
)
def test_values(formula: str, value: int) -> None:
    assert evaluate(formula, VALUES) == value


@given(st.integers(0, 1 << 70), st.integers(0, 1 << 70))
def test_whole_numbers_stay_exact(a: int, b: int) -> None:
    assert evaluate("a*b + a//3", {"a": a, "b": b}) == a * b + a // 3


@pytest.mark.parametrize(
    "formula",
    [
        "",
        "batch +",
        "1.5*batch",
        "True",
        "'batch'",
        "batch/2",
        "batch.real",
        "batch if batch else 1",
        "sum(batch)",
        "max()",
        "max(*batch)",
        "max(batch, key=min)",
        "__import__('os')",
        "batch//0",
        "batch**-1",
        "2**(batch*1000)",
        "[batch]",
        "batch; batch",
        "(lambda: 1)()",
        "~batch",
    ],
)
def test_anything_else_is_refused(formula: str) -> None:
    with pytest.raises(PlanError, match=r"formula|power"):
        evaluate(formula, VALUES)


def test_a_name_that_nobody_gave() -> None:
    with pytest.raises(PlanError, match=r"'heads'; known are \['batch', 'sequence'\]"):
        evaluate("heads*batch", VALUES)
