"""Capture: a call becomes a joint graph with names and lines, used only under its guards."""

from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from graphs import NAMED, mlp
from harness import difference
from steps import captured, captured_model
from torch import Tensor, nn

from elixir_fx.capture import GRAPHS
from elixir_fx.errors import CaptureError
from elixir_fx.facts import Role
from elixir_fx.step import is_backward
from elixir_fx.units import GIB


class Tied(nn.Module):
    """A tied weight, a buffer, and a parameter that nobody reads."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("steps", torch.zeros(3))
        self.spare = nn.Linear(2, 2, bias=False)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) * self.frozen) + self.steps.sum()


def test_inputs_have_names() -> None:
    step = captured_model(Tied(), (torch.tensor([1, 2]),))
    known = {(item.role, item.path): item for item in step.inputs}
    weight = known[Role.PARAMETER, "table.weight"]
    assert weight.aliases == ("head.weight",)
    assert weight.trainable
    assert not known[Role.PARAMETER, "frozen"].trainable
    assert (Role.BUFFER, "steps") in known
    assert (Role.INPUT, "") in known
    assert len(step.inputs) == 4
    assert step.buffer_bytes == 12


def test_parameters_that_the_graph_does_not_have_are_known() -> None:
    step = captured_model(Tied(), (torch.tensor([1, 2]),))
    assert [idle.path for idle in step.idle] == ["spare.weight"]
    (spare,) = [p for p in step.facts().parameters if p.path == "spare.weight"]
    assert (spare.reads, spare.gradient, spare.trainable, spare.span) == ((), None, True, 4)


def test_gradients_stand_where_they_belong() -> None:
    step = captured_model(Tied(), (torch.tensor([1, 2]),))
    assert set(step.gradients) == {"table.weight"}
    positions = {node: index for index, node in enumerate(step.nodes)}
    turn = step.backward_position
    for node in step.nodes:
        if node.op == "call_function":
            assert is_backward(node) == (positions[node] >= turn)
    assert positions[step.gradients["table.weight"]] > turn


def test_without_gradients_there_is_no_backward() -> None:
    step = captured(mlp(4, 6, 2), grad=False)
    assert not step.trains
    assert not step.gradients
    assert step.backward_position == len(step.nodes)


def test_nodes_know_the_users_line() -> None:
    step = captured_model(Tied(), (torch.tensor([1, 2]),))
    number = Tied.forward.__code__.co_firstlineno + 1
    assert {s.source for s in step.storages if s.name.startswith("mul")} == {
        f"{Path(__file__).name}:{number}"
    }


def test_equal_models_have_equal_keys() -> None:
    one, other = (captured(NAMED["thrice"]) for _ in range(2))
    assert one.key == other.key
    assert captured(mlp(4, 6, 2)).key != captured(mlp(4, 7, 2)).key


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.sum() > 0:
            return y
        return -y


def test_a_graph_break_is_refused_with_its_line() -> None:
    number = Breaks.forward.__code__.co_firstlineno + 2
    with pytest.raises(CaptureError) as refused:
        exact.compile(Breaks(), example_inputs=(torch.ones(2, 2),), memory=GIB)
    text = str(refused.value)
    assert f"{Path(__file__).name}:{number}" in text
    assert "Breaks cannot be captured as one graph" in text
    assert "torch.compile(model, backend='elixir_fx')" in text


class Guarded(nn.Module):
    """Reads an attribute, its training flag, and a number that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gain = 2.0

    def forward(self, x: Tensor, power: int = 1) -> Tensor:
        y = self.layer(x) * self.gain
        return y**power if self.training else y.sin()


def test_a_captured_step_serves_only_under_its_guards() -> None:
    torch.manual_seed(0)
    plain = Guarded()
    net: Any = exact.compile(Guarded(), memory=GIB)
    net.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3)

    def check(*args: Any) -> None:
        expected, got = plain(*args), net(*args)
        assert difference(expected.detach(), got.detach()) is None
        assert expected.requires_grad == got.requires_grad

    check(x)
    check(x, 3)
    check(torch.randn(5, 3))
    check(torch.randn(3, 2).t())
    check(x.double().float())
    for each in (plain, net):
        each.eval()
    check(x)
    for each in (plain, net):
        each.train()
        each.gain = 3.0
    check(x)
    with torch.no_grad():
        check(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(x)
    for each in (plain, net):
        each.layer.weight.requires_grad_(False)
    check(x)
    for each in (plain, net):
        each.layer.requires_grad_(False)
    check(x)


def test_more_shapes_than_graphs_are_kept() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 3)
    net: Any = exact.compile(nn.Linear(3, 3), memory=GIB)
    net.load_state_dict(plain.state_dict())
    for rows in [*range(1, GRAPHS + 4), 1, 2]:
        x = torch.randn(rows, 3)
        assert difference(plain(x).detach(), net(x).detach()) is None
