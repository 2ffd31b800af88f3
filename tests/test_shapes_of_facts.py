"""The facts of a graph with dynamic dimensions at other sizes: what `at` changes, and what not."""

from dataclasses import replace
from typing import Any

import pytest
import sympy
import torch
from graphs_facts import Builder
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import _CapturedError, _Owner
from torch import Tensor, nn
from torch.utils._sympy.functions import FloorDiv

from elixir_fx.capture import Capture
from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts, Role, Storage
from elixir_fx.formula import evaluate
from elixir_fx.machine import Tier
from elixir_fx.pipeline import PIPELINE, annotate
from elixir_fx.plan import Limits
from elixir_fx.planner import Formulas, at, demand, schedule, search
from elixir_fx.planner.polynomials import live_formulas
from elixir_fx.runtime.probe import probe
from elixir_fx.step import StepGraph
from elixir_fx.testing import emulated
from elixir_fx.units import GIB

THREADS = 1
S, T = sympy.symbols("s t", integer=True, positive=True)
MACHINE = emulated(device_memory=GIB, host_memory=GIB)


def facts(batch: int, length: int) -> tuple[Facts, Formulas]:
    """A step by hand: x [s, t], h = x w, loss; with the formulas of its sizes."""
    b = Builder()
    b.parameter("w", 64, 64)
    b.node("h", "w", nbytes=4 * batch * length)
    b.node("loss", "h", nbytes=4)
    b.backward()
    b.node("g", "h", nbytes=8 * batch)
    b.node("dw", "g", gradient_of="w")
    found = b.facts()
    moved = {"h": 4 * batch * length, "g": 8 * batch + 4 * batch * length}
    costs = tuple(
        replace(cost, bytes=moved.get(cost.node, 16), flops=10 * moved.get(cost.node, 1))
        for cost in found.costs
    )
    formulas = Formulas(
        symbols=(S, T),
        storages={"h": 4 * S * T, "g": 8 * S},
        nodes={"h": 4 * S * T, "g": 8 * S + 4 * S * T},
    )
    return replace(found, costs=costs), formulas


def test_other_sizes() -> None:
    """Twice the batch: twice the bytes, the seconds and the flops of what depends on it."""
    known, formulas = facts(4, 16)
    found = at(known, formulas, (8, 16))
    before, after = ({s.name: s.nbytes for s in f.storages} for f in (known, found))
    assert before == {"h": 256, "loss": 4, "g": 32, "dw": 16384}
    assert after == {"h": 512, "loss": 4, "g": 64, "dw": 16384}
    costs = {cost.node: cost for cost in found.costs}
    assert (costs["h"].bytes, costs["h"].flops) == (512, 5120)
    assert costs["h"].seconds == pytest.approx(2e-3)
    assert costs["dw"] == {cost.node: cost for cost in known.costs}["dw"]


def test_what_stays() -> None:
    """Positions, nodes, parameters: a schedule made for the one can be read for the other."""
    known, formulas = facts(4, 16)
    found = at(known, formulas, (9, 5))
    assert found.key == f"{known.key}@9,5"
    assert (found.nodes, found.backward, found.parameters) == (
        known.nodes,
        known.backward,
        known.parameters,
    )
    places = [(s.name, s.born, s.dies, s.readers, s.role) for s in known.storages]
    assert [(s.name, s.born, s.dies, s.readers, s.role) for s in found.storages] == places


def test_nothing_to_move() -> None:
    """A node that moved no byte in the captured call keeps its cost; a dimension may be 0."""
    known, formulas = facts(4, 16)
    empty = replace(known, costs=tuple(replace(cost, bytes=0) for cost in known.costs))
    assert at(empty, formulas, (8, 16)).costs == empty.costs
    assert {s.nbytes for s in at(known, formulas, (0, 16)).storages} == {0, 4, 16384}


def test_one_value_too_few() -> None:
    known, formulas = facts(4, 16)
    with pytest.raises(ValueError, match="zip"):
        at(known, formulas, (4,))


sizes = st.integers(1, 512)


@given(sizes, sizes)
def test_at_the_captured_sizes(batch: int, length: int) -> None:
    """`at` gives back the facts themselves, but for the key."""
    known, formulas = facts(batch, length)
    found = at(known, formulas, (batch, length))
    assert replace(found, key=known.key) == known


@given(sizes, sizes, sizes, sizes, sizes, sizes)
@settings(max_examples=50)
def test_any_way_round(a: int, b: int, c: int, d: int, e: int, f: int) -> None:
    """By way of other sizes or straight; and what grows, grows everything."""
    known, formulas = facts(a, b)
    straight = at(known, formulas, (e, f))
    again = at(at(known, formulas, (c, d)), formulas, (e, f))
    assert straight.storages == again.storages
    assert [x.bytes for x in straight.costs] == [x.bytes for x in again.costs]
    assert [x.seconds for x in straight.costs] == pytest.approx([x.seconds for x in again.costs])
    larger = at(known, formulas, (max(a, e), max(b, f)))
    for one, other in zip(known.storages, larger.storages, strict=True):
        assert one.nbytes <= other.nbytes
    for cost, more in zip(known.costs, larger.costs, strict=True):
        assert cost.seconds <= more.seconds * (1 + 1e-9) and cost.bytes <= more.bytes


@given(sizes, sizes)
@settings(max_examples=20)
def test_the_peak_grows(batch: int, length: int) -> None:
    """A larger call never needs less under the same layout."""
    known, formulas = facts(batch, length)
    limits = Limits(device=GIB, host=GIB)
    layout = search(known, MACHINE, limits).layout
    small = schedule(known, MACHINE, limits, layout).forecast.peak_device_bytes
    large = at(known, formulas, (batch + 1, length + 7))
    assert schedule(large, MACHINE, limits, layout).forecast.peak_device_bytes >= small


# -- as formulas, for any size ----------------------------------------------------------------


@given(sizes, sizes, sizes, sizes, st.booleans())
@settings(max_examples=50)
def test_the_demand_is_the_peak_of_a_schedule(
    a: int, b: int, batch: int, length: int, keeps: bool
) -> None:
    """At any sizes: what `schedule` finds with the facts evaluated there."""
    known, formulas = facts(a, b)
    formulas = replace(formulas, names=("batch", "length"), captured=(a, b))
    limits = Limits(device=GIB, host=GIB)
    pins = {} if keeps else {"w": Tier.HOST}
    layout = search(known, MACHINE, limits, pins).layout
    assert layout.keeps_all == keeps
    found = demand(known, formulas, layout).peak({"batch": batch, "length": length})
    there = at(known, formulas, formulas.values({"batch": batch, "length": length}))
    assert found == schedule(there, MACHINE, limits, layout).forecast.peak_device_bytes


def test_values_of_symbols() -> None:
    """A name for several symbols settles all of them; a symbol without one is as captured."""
    formulas = Formulas(symbols=(S, T), names=("batch", ""), captured=(4, 16))
    assert formulas.sizes == {"batch": 4}
    assert formulas.values({}) == (4, 16) and formulas.values({"batch": 9}) == (9, 16)
    both = Formulas(symbols=(S, T), names=("n", "n"), captured=(4, 4))
    assert both.sizes == {"n": 4} and both.values({"n": 7}) == (7, 7)


def lives(*formulas: sympy.Expr) -> tuple[int, list[tuple[Storage, int]], dict[str, sympy.Expr]]:
    """Storages with these bytes, each alone at its position."""
    found = [
        Storage(
            name=f"s{place}", role=Role.TEMPORARY, path="", source="", nbytes=int(formula)
            if formula.is_Integer else 0, born=place, dies=place, readers=(),
        )
        for place, formula in enumerate(formulas)
    ]  # fmt: skip
    given = {f"s{place}": f for place, f in enumerate(formulas) if f.free_symbols}
    return len(formulas), [(storage, storage.dies) for storage in found], given


@pytest.mark.parametrize(
    ("formulas", "text"),
    [
        ((4 * S * T, 8 * S * T), ("8*s*t",)),
        ((4 * S * T, 4 * S * T, sympy.Integer(4)), ("4*s*t",)),
        ((4 * S * (T - 1), 4 * S * T), ("4*s*t",)),
        ((S * T, S + T - 1), ("1*s*t",)),  # (s - 1)(t - 1) is never negative
        ((S * S, 8 * S), ("1*s**2", "8*s")),
        ((8 * S, sympy.Integer(100)), ("100", "8*s")),
        ((4 * sympy.floor(S / 3), sympy.Integer(0)), ("4*((s)//(3))",)),
        ((sympy.Max(S, 8) - 4, sympy.Max(S, 8)), ("1*max(8, s)",)),
    ],
)
def test_what_another_covers_is_left_out(formulas: Any, text: tuple[str, ...]) -> None:
    assert sorted(live_formulas(*lives(*formulas))) == sorted(text)


EXPRESSIONS = st.recursive(
    st.sampled_from([S, T, S - 1, T + 7]) | st.integers(1, 9).map(sympy.Integer),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1]),
        st.tuples(inner, st.integers(2, 9)).map(lambda pair: sympy.floor(pair[0] / pair[1])),
        st.tuples(inner, st.integers(2, 9)).map(lambda pair: sympy.ceiling(pair[0] / pair[1])),
        st.tuples(inner, st.integers(2, 9)).map(lambda pair: sympy.Mod(*pair)),
        st.tuples(inner, inner).map(lambda pair: sympy.Max(*pair)),
        st.tuples(inner, inner).map(lambda pair: sympy.Min(*pair)),
        st.tuples(inner, st.integers(2, 9)).map(lambda pair: FloorDiv(*map(sympy.S, pair))),
    ),
    max_leaves=6,
)


@given(st.lists(EXPRESSIONS, min_size=1, max_size=5), sizes, sizes)
@settings(max_examples=100, deadline=None)
def test_formulas_are_exact(formulas: list[sympy.Expr], s: int, t: int) -> None:
    """The most of them is the most of the expressions, at any sizes, whatever was left out."""
    found = live_formulas(*lives(*formulas))
    expected = max(int(formula.xreplace({S: s, T: t})) for formula in formulas)
    assert max(evaluate(text, {"s": s, "t": t}) for text in found) == expected


def test_what_no_formula_can_say() -> None:
    with pytest.raises(PlanError, match=r"cos is more than .* leave that dimension out"):
        live_formulas(*lives(sympy.cos(S)))


# -- of captured graphs ----------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        return self.down(torch.cat([h, h[:, 1:]], 1)).square().mean()


class _Last(_Owner):
    """Lets a capture go on where it is: the graph is taken, and the call stopped."""


def captured(model: nn.Module, *shapes: tuple[int, ...]) -> list[StepGraph]:
    """The annotated steps of calls with these shapes; from the second on with symbols."""
    owner = _Last(model)
    capture = Capture(model, owner)
    for shape in shapes:
        x = torch.zeros(shape)
        for dimension in range(x.dim() - 1):
            torch._dynamo.mark_dynamic(x, dimension)
        try:
            capture(x)
        except _CapturedError:
            continue
    for step in owner.found:
        step.optimizer = probe("adamw")
        annotate(step, MACHINE, PIPELINE)
    return owner.found


def formulas_of(step: StepGraph) -> Formulas:
    return Formulas(
        symbols=tuple(symbol for _, symbol in step.symbols),
        storages=step.storage_formulas,
        nodes=step.node_formulas,
    )


def test_a_captured_graph() -> None:
    """One graph with symbols, evaluated, is the graph captured for those sizes alone."""
    (step,) = captured(Model(), (5, 7, 8))
    assert len(step.symbols) == 2
    assert step.storage_formulas and step.node_formulas
    values = [where.of(_inputs(step, (5, 7, 8))) for where, _ in step.symbols]
    assert sorted(values) == [5, 7]
    known = step.facts()
    assert replace(at(known, formulas_of(step), tuple(values)), key=known.key) == known


@pytest.mark.parametrize("shape", [(5, 9, 8), (11, 7, 8), (2, 3, 8)])
def test_sizes_of_another_capture(shape: tuple[int, ...]) -> None:
    """The bytes that a capture of other sizes counts are those that the formulas say."""
    torch.manual_seed(0)
    (one,) = captured(Model(), (5, 7, 8))
    (other,) = captured(Model(), shape)
    values = tuple(where.of(_inputs(one, shape)) for where, _ in one.symbols)
    found = at(one.facts(), formulas_of(one), values)
    expected = other.facts()
    assert [s.nbytes for s in found.storages] == [s.nbytes for s in expected.storages]
    assert [c.bytes for c in found.costs] == [c.bytes for c in expected.costs]


def _inputs(step: StepGraph, shape: tuple[int, ...]) -> list[Any]:
    """A call's inputs in the order of the graph's placeholders: the batch, symbols, weights."""
    x = torch.zeros(shape)
    values: list[Any] = []
    weights = dict(Model().named_parameters())
    placeholders = {node.name: node for node in step.nodes if node.op == "placeholder"}
    for item in step.inputs:
        fake = placeholders[item.node].meta["val"]
        if item.path:
            values.append(weights[item.path])
        elif isinstance(fake, Tensor):
            values.append(x)
        else:
            known = {int(fake.node.hint): 0}
            values.append(shape[0] if 5 in known else shape[1])
    return values
