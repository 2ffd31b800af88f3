"""named_sizes: which dimensions are named, and what a plan with names promises of a real run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import elixir_fx
from elixir_fx import CaptureError, ElixirError
from elixir_fx.errors import LayoutError
from elixir_fx.named_sizes import by_tensor, check_open, named_sizes
from elixir_fx.units import MIB

THREADS = 1
WORDS = 100


class Attention(nn.Module):
    """Its scores are quadratic in the sequence."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.words(ids)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(h).chunk(3, -1)
            h = h + out((q @ k.transpose(1, 2)).softmax(-1) @ v)
        return functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class Rounded(nn.Module):
    """Sizes that are no polynomials: halves of the sequence, rounded up, and a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(WORDS, 48), nn.Linear(48, 96)
        self.down = nn.Conv1d(96, 64, 3, stride=2, padding=1)
        self.head = nn.Linear(64, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.down(self.mix(self.words(ids)).tanh().transpose(1, 2)).transpose(1, 2)
        scores = self.head(h.relu())
        return functional.cross_entropy(scores.flatten(0, 1), labels[:, ::2].flatten())


SHAPES = {"ids": {0: "batch", 1: "sequence"}, "labels": {0: "batch", 1: "sequence"}}


def batch(batch: int = 4, sequence: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(batch * sequence)
    ids = torch.randint(0, WORDS, (batch, sequence), generator=generator)
    return {"ids": ids, "labels": ids.clone()}


def options(memory: int | str, folder: Path) -> dict[str, Any]:
    return {
        "memory": memory,
        "disk": str(folder),
        "kernels": "eager",
        "dynamic_shapes": SHAPES,
    }


# -- what a plan promises --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["batch", "sequence"])
@pytest.mark.parametrize("room", ["tight", "between", "loose"])
@pytest.mark.parametrize("build", [Attention, Rounded])
def test_the_largest_runs_and_the_next_is_refused(
    build: type[nn.Module], room: str, name: str, tmp_path: Path
) -> None:
    """The same plan in force: the call at `largest` trains, one more is a LayoutError."""
    free = {**options(0, tmp_path), "memory": None}
    needed = elixir_fx.smallest_memory(build(), batch(), **free)
    memory = {"tight": needed, "between": needed + needed // 3, "loose": 8 * MIB}[room]
    plan = elixir_fx.plan(build(), batch(), **options(memory, tmp_path))
    assert plan.layout.keeps_all == (room == "loose")
    largest = plan.largest(name)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    net = elixir_fx.compile(model, optimizer, batch(), plan=plan, **options(memory, tmp_path))
    assert net.plan.schedules == plan.schedules
    for sizes in ({}, {name: largest}):
        net(**batch(**sizes)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert net.plan.schedules[-1].forecast.peak_device_bytes <= memory
    # Of an odd sequence it has another graph, which may keep less.
    more = 2 if build is Rounded and name == "sequence" else 1
    with pytest.raises(LayoutError, match="are allowed"):
        net(**batch(**{name: largest + more}))
    assert net._session._capture.graphs <= 2  # another for an odd sequence


def test_the_names_are_of_sizes_that_the_forecast_is_for(tmp_path: Path) -> None:
    """Equal sizes with different names stay apart; the peak is the forecast's."""
    plan = elixir_fx.plan(Attention(), batch(8, 8), **options("8MiB", tmp_path))
    assert plan.sizes == {"batch": 8, "sequence": 8}
    (schedule,) = plan.schedules
    assert schedule.demand is not None
    assert schedule.demand.peak(plan.sizes) == schedule.forecast.peak_device_bytes
    assert plan.largest("batch") > plan.largest("sequence")
    assert plan.largest("batch", sequence=16) < plan.largest("batch")


def test_the_inputs_stay_as_they_were(tmp_path: Path) -> None:
    given = batch()
    given["ids"].note = "mine"  # type: ignore[attr-defined]
    elixir_fx.plan(Attention(), given, **options("8MiB", tmp_path))
    assert [vars(tensor) for tensor in given.values()] == [{"note": "mine"}, {}]


# -- what cannot be open ---------------------------------------------------------------------


class Fixed(nn.Module):
    """Its batch is written down, its length is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).view(4, -1).square().mean()


class Branching(Fixed):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean() if x.shape[1] == 6 else x.sum()


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.body(x) + y).mean()


def plan_of(model: nn.Module, *inputs: Tensor, shapes: Any) -> elixir_fx.Plan:
    return elixir_fx.plan(model, inputs, memory="8MiB", kernels="eager", dynamic_shapes=shapes)


@pytest.mark.parametrize(("model", "dimension", "constant"), [(Fixed, 0, 4), (Branching, 1, 6)])
def test_a_dimension_that_the_model_takes_for_a_constant(
    model: type[nn.Module], dimension: int, constant: int
) -> None:
    with pytest.raises(CaptureError, match=rf"'it' cannot change: .* constant {constant}, .*leave"):
        plan_of(model(), torch.zeros(4, 6, 8), shapes=({dimension: "it"},))


@pytest.mark.parametrize("size", [0, 1])
def test_sizes_of_zero_and_one(size: int) -> None:
    with pytest.raises(CaptureError, match=rf"'batch', is {size} in .* 0 or 1 for a constant"):
        plan_of(Branching(), torch.zeros(size, 6, 8), shapes={"x": {0: "batch"}})


def test_two_names_for_one_size() -> None:
    x = torch.zeros(3, 5, 8)
    shapes = {"x": {0: "batch"}, "y": {0: "other"}}
    with pytest.raises(CaptureError, match=r"'(batch|other)' is no size of its own"):
        plan_of(Added(), x, x.clone(), shapes=shapes)
    plan = plan_of(Added(), x, x.clone(), shapes={"x": {0: "batch"}, "y": {0: "batch"}})
    assert plan.sizes == {"batch": 3}


# -- names and inputs ------------------------------------------------------------------------


class Nested(nn.Module):
    def forward(self, x: Tensor, parts: Any = None, *more: Tensor, **others: Any) -> None: ...


X, Y, Z = torch.zeros(4, 6), torch.zeros(4, 2), torch.zeros(6)


@pytest.mark.parametrize(
    ("shapes", "args", "kwargs", "names"),
    [
        (None, (X,), {}, []),
        ({}, (X,), {}, []),
        ({"x": None}, (X,), {}, []),
        ({"x": {0: "b", -1: "s"}}, (X,), {}, [("x", 0, "b"), ("x", 1, "s")]),
        (({0: "b"},), (X, Y), {}, [("input 0", 0, "b")]),
        ((None, {0: "b"}), (X, Y), {}, [("input 1", 0, "b")]),
        ({"parts": [{0: "b"}, None]}, (X, [Y, Z]), {}, [("parts[0]", 0, "b")]),
        ({"parts": {"k": {0: "s"}}}, (X,), {"parts": {"k": Z}}, [("parts['k']", 0, "s")]),
        ({"more": ({0: "s"},)}, (X, Y, Z), {}, [("more[0]", 0, "s")]),
        ({"mask": {0: "b"}}, (X,), {"mask": Y}, [("mask", 0, "b")]),
    ],
)
def test_where_names_may_stand(shapes: Any, args: Any, kwargs: Any, names: Any) -> None:
    found = named_sizes(Nested(), shapes, args, kwargs)
    assert [(one.where, one.dimension, one.name) for one in found] == names
    check_open(found)
    assert sum(map(len, by_tensor(found).values())) == len(names)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": {0: "b"}}, r"names 'z': forward is given \['parts', 'x'\]"),
        ({"x": {2: "b"}}, "x has 2 dimensions, and no 2"),
        ({"x": {"batch": 0}}, "x has 2 dimensions, and no 'batch'"),
        ({"x": {0: "my batch"}}, "'my batch': give a name"),
        ({"x": {0: 3}}, "is called 3: give a name"),
        ({"x": ["b"]}, r"give \{dimension: name\}"),
        ({"parts": {0: "b"}}, "a list: give"),
        ({"parts": [None, {0: "b"}]}, "has 2 entries for parts, of which there are 1"),
        ("batch", "for the inputs, a dict: give"),
        ({"x": {0: "n", 1: "n"}}, "'n', is 6, and dimension 0 of x, 'n', is 4: one name"),
        ({"x": {0: "n"}, "parts": [{1: "n"}]}, r"dimension 1 of parts\[0\], 'n', is 2, and"),
    ],
)
def test_names_of_nothing(shapes: Any, message: str) -> None:
    with pytest.raises(ElixirError, match=message):
        named_sizes(Nested(), shapes, (X, [Y]), {})


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ElixirError, match="do not fit Nested: missing"):
        named_sizes(Nested(), {"x": {0: "b"}}, (), {})
