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

from elixir_fx.capture import Capture
from elixir_fx.facts import Facts
from elixir_fx.pipeline import PIPELINE, annotate
from elixir_fx.plan import Limits
from elixir_fx.planner import Formulas, at, schedule, search
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
