"""What a compiler may fuse: bytes that a cut costs, and which layers are equal."""

import operator
import string
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from elixir_fx.passes.fusion import FEWEST, SHORTEST, Repeat, cut_bytes, repeats
from elixir_fx.step import FUSES

THREADS = 1
ATEN: Any = torch.ops.aten
LIBRARY = (ATEN.mm.default, ATEN.view.default, ATEN.t.default, operator.getitem)
NBYTES = 4 * 4 * 4  # of the values here: f32[4, 4]


class Written:
    """A graph under construction, its values computed at once. Matrix products and views do not
    fuse, all else does."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x, self.y = self.input(), self.input()

    def input(self) -> fx.Node:
        node = self.graph.placeholder("x")
        node.meta["val"] = torch.ones(4, 4)
        return node

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.node.map_arg(args, lambda source: source.meta["val"])
        node.meta["val"] = target(*values)
        node.meta[FUSES] = target not in LIBRARY
        return node

    def costs(self) -> list[int]:
        return cut_bytes([node for node in self.graph.nodes if node.op == "call_function"])


def test_a_chain_between_matrix_products_costs_inside_alone() -> None:
    new = Written()
    product = new(ATEN.mm.default, new.x, new.y)
    added = new(ATEN.add.Tensor, product, new.y)
    rectified = new(ATEN.relu.default, added)
    summed = new(ATEN.sum.dim_IntList, rectified, [0], True)
    new(ATEN.mm.default, summed, new.y)
    assert new.costs() == [0, 0, NBYTES, NBYTES, 0, 0]


def test_what_only_library_calls_read_is_written_anyway() -> None:
    new = Written()
    added = new(ATEN.add.Tensor, new.x, new.y)
    new(ATEN.mm.default, added, new.x)
    new(ATEN.mm.default, added, new.y)
    assert new.costs() == [0, 0, 0, 0]


def test_what_nobody_reads_costs_nothing() -> None:
    new = Written()
    new(ATEN.add.Tensor, new.x, new.y)
    assert new.costs() == [0, 0]


def test_a_residual_stream_is_cut_for_nothing() -> None:
    """It is written for the matrix product; who adds to it behind that reads it from memory."""
    new = Written()
    stream = new(ATEN.add.Tensor, new.x, new.y)
    branch = new(ATEN.mm.default, stream, new.y)
    stream = new(ATEN.add.Tensor, stream, branch)
    branch = new(ATEN.mm.default, stream, new.y)
    new(ATEN.add.Tensor, stream, branch)
    assert new.costs() == [0, 0, 0, 0, 0, 0]


def test_two_readers_in_front_of_the_same_product_share_a_chain() -> None:
    new = Written()
    added = new(ATEN.add.Tensor, new.x, new.y)
    sine = new(ATEN.sin.default, added)
    cosine = new(ATEN.cos.default, added)
    mixed = new(ATEN.mul.Tensor, sine, cosine)
    new(ATEN.mm.default, mixed, new.y)
    assert new.costs() == [0, NBYTES, 2 * NBYTES, 2 * NBYTES, 0, 0]


def test_what_waits_for_its_only_reader_costs_all_the_way() -> None:
    """The reader would compute it again, behind the product, without a cut."""
    new = Written()
    mask = new(ATEN.add.Tensor, new.x, new.y)
    product = new(ATEN.mm.default, new.x, new.y)
    new(ATEN.mul.Tensor, mask, product)
    assert new.costs() == [0, NBYTES, NBYTES, 0]


def test_chains_go_on_through_views() -> None:
    new = Written()
    added = new(ATEN.add.Tensor, new.x, new.y)
    viewed = new(ATEN.view.default, new(ATEN.t.default, added), [4, 4])
    new(ATEN.relu.default, viewed)
    assert new.costs() == [0, NBYTES, NBYTES, NBYTES, 0]


def test_a_view_in_front_of_a_product_costs_nothing() -> None:
    new = Written()
    added = new(ATEN.add.Tensor, new.x, new.y)
    new(ATEN.mm.default, new(ATEN.t.default, added), new.y)
    assert new.costs() == [0, 0, 0, 0]


def test_all_results_of_an_operator_count() -> None:
    new = Written()
    both = new(ATEN.var_mean.correction, new.x, [1])
    variance, mean = new(operator.getitem, both, 0), new(operator.getitem, both, 1)
    new(ATEN.add.Tensor, variance, mean)
    rows = 2 * 4 * 4
    assert new.costs() == [0, rows, rows, rows, 0]


def test_readers_elsewhere_do_not_count() -> None:
    """The nodes are a part of a graph: others read results of theirs from memory."""
    new = Written()
    added = new(ATEN.add.Tensor, new.x, new.y)
    new(ATEN.relu.default, added)
    assert cut_bytes([added]) == [0, 0]


def test_no_nodes() -> None:
    assert cut_bytes([]) == [0]


# Repeats

LETTERS = string.ascii_letters


@pytest.mark.parametrize(
    "tokens",
    [
        "",
        LETTERS,  # nothing twice
        LETTERS[:10] * (FEWEST - 1),  # too few layers
        LETTERS[: SHORTEST - 1] * 3,  # too short ones
    ],
)
def test_no_layers(tokens: str) -> None:
    assert repeats(tokens) == []


def test_equal_layers_between_others() -> None:
    tokens = "<" + LETTERS[:10] * 4 + ">"
    assert repeats(tokens) == [Repeat(1, 10, 4)]
    assert repeats(tokens)[0].end == 41


def test_half_a_layer_more_belongs_to_none() -> None:
    tokens = LETTERS[:10] * 3 + LETTERS[:5]
    assert repeats(tokens) == [Repeat(0, 10, 3)]


def test_layers_of_two_lengths() -> None:
    """As of an encoder and its decoder, the longer repetition second."""
    encoder, decoder = LETTERS[:9] * 3, LETTERS[20:32] * 5
    tokens = "<" + encoder + "|" + decoder + ">"
    assert repeats(tokens) == [Repeat(1, 9, 3), Repeat(29, 12, 5)]
    tokens = decoder + "|" + encoder
    assert repeats(tokens) == [Repeat(0, 12, 5), Repeat(61, 9, 3)]


def test_only_a_part_is_searched() -> None:
    tokens = LETTERS[:10] * 3 + "|" + LETTERS[20:30] * 3
    assert repeats(tokens, 31) == [Repeat(31, 10, 3)]
    assert repeats(tokens, 0, 30) == [Repeat(0, 10, 3)]


@given(
    before=st.integers(0, 7),
    period=st.integers(SHORTEST, 30),
    count=st.integers(FEWEST, 8),
    after=st.integers(0, 7),
)
def test_layers_are_found_wherever_they_are(
    before: int, period: int, count: int, after: int
) -> None:
    front = [f"before {index}" for index in range(before)]
    behind = [f"after {index}" for index in range(after)]
    tokens = [*front, *list(range(period)) * count, *behind]
    assert repeats(tokens) == [Repeat(before, period, count)]


@given(st.lists(st.sampled_from("ab"), max_size=80).map("".join))
def test_what_is_found_repeats(tokens: str) -> None:
    end = 0
    for repeat in repeats(tokens):
        assert repeat.start >= end and repeat.count >= FEWEST and repeat.period >= SHORTEST
        end = repeat.end
        assert end <= len(tokens)
        layer = tokens[repeat.start : repeat.start + repeat.period]
        assert tokens[repeat.start : repeat.end] == layer * repeat.count
