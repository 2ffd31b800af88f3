"""From a model as it was built, real or on meta, to its first step."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import exact
import pytest
import torch
from graphs import seeded
from harness import Batch, adamw
from pairs import SPARE, Pair, Side, memory_needed, same, tight
from safetensors.torch import save_file
from torch import Tensor, nn

from elixir_fx import ElixirError, TierError
from elixir_fx.units import GIB

THREADS = 1

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(4, 32, generator=GENERATOR)
BATCHES: list[Batch] = [(torch.randn(4, 32, generator=GENERATOR),) for _ in range(4)]


class Net(nn.Module):
    """Tied weights, a saved and an unsaved buffer, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head, self.tail = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.tail.weight = self.head.weight
        self.norm = nn.BatchNorm1d(32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.register_buffer("steps", torch.empty(32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.steps.copy_(torch.arange(32.0) / 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.body(x) + self.frozen(x)) * self.steps
        return self.head(h) + self.tail(x)


def fill(module: nn.Module) -> None:
    """An init of one's own: like reset_parameters, of one module."""
    with torch.no_grad():
        for p in module.parameters(recurse=False):
            p.uniform_(-0.1, 0.1)


def on_meta(build: Callable[[], nn.Module] = Net) -> nn.Module:
    with torch.device("meta"):
        return build()


def trains_like(plain: nn.Module, model: nn.Module, options: dict[str, Any]) -> Any:
    """`model`, on meta, compiled with `options`, trains as `plain` does. The compiled model."""
    sides = []
    for one in (plain, model):
        trained = [p for p in one.parameters() if p.requires_grad]
        sides.append(Side(one, one, adamw(trained), []))
    objects = list(model.parameters())
    sides[1].net = exact.compile(
        model, optimizer=sides[1].optimizer, example_inputs=(X,), **options
    )
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert [id(p) for p in model.parameters()] == [id(p) for p in objects]
    for name, buffer in plain.named_buffers():
        same(buffer, dict(model.named_buffers())[name], name)
    same(plain.state_dict(), sides[1].net.state_dict())
    for batch in BATCHES[:2]:
        same(*(side.step(batch) for side in sides))
    same(plain.state_dict(), sides[1].net.state_dict())
    same(sides[0].optimizer.state_dict(), sides[1].optimizer.state_dict())
    return sides[1].net


@pytest.fixture(params=["tight", "spare"])
def budget(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    if request.param == "spare":
        return dict(SPARE)
    (tmp_path / "disk").mkdir()
    return {"memory": memory_needed(on_meta(), (X,)), "disk": tmp_path / "disk"}


def initialised(init: Callable[[nn.Module], object] | None) -> nn.Module:
    """An ordinary model whose modules are initialised in the order in which materialising
    does it; what is tied is filled by its first owner."""
    model = Net()
    torch.manual_seed(5)
    for module in model.modules():
        if module is not model.tail and any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()
            if init is not None:
                init(module)
    return model


@pytest.mark.parametrize("init", [None, fill], ids=["own", "init"])
def test_meta(init: Callable[[nn.Module], object] | None, budget: dict[str, Any]) -> None:
    reference, model = initialised(init), on_meta()
    torch.manual_seed(5)
    net = trains_like(reference, model, {**budget, "init": init})
    assert net.head.weight is net.tail.weight


@pytest.mark.parametrize("form", ["file", "folder"])
def test_meta_with_weights(form: str, budget: dict[str, Any], tmp_path: Path) -> None:
    reference = seeded(1, Net)
    weights = {name: value.clone() for name, value in reference.state_dict().items()}
    del weights["tail.weight"]  # tied: once is enough
    folder = tmp_path / "weights"
    folder.mkdir()
    if form == "file":
        save_file(weights, folder / "one.safetensors")
        given = folder / "one.safetensors"
    else:
        names = sorted(weights)
        save_file({name: weights[name] for name in names[:3]}, folder / "a.safetensors")
        save_file({name: weights[name] for name in names[3:]}, folder / "b.safetensors")
        given = folder
    net = trains_like(reference, on_meta(), {**budget, "weights": given})
    assert net.head.weight is net.tail.weight and not net.frozen.weight.requires_grad


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    weights = seeded(1, Net).state_dict()
    del weights["tail.weight"], weights["norm.weight"]
    save_file({**weights, "more": torch.ones(2)}, tmp_path / "w.safetensors")
    options: dict[str, Any] = {"example_inputs": (X,), **SPARE}
    for given, words in (
        (tmp_path / "w.safetensors", r"missing: norm\.weight; unexpected: more"),
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "empty", r"holds no \*\.safetensors"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(TierError, match=words):
            exact.compile(on_meta(), weights=given, **options)


class Unfilled(nn.Module):
    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        if buffer:
            self.register_buffer("mask", torch.ones(32))
        else:
            self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (self.mask if hasattr(self, "mask") else self.scale)


@pytest.mark.parametrize(("buffer", "name"), [(True, "mask"), (False, "scale")])
def test_what_nothing_fills_is_named(buffer: bool, name: str) -> None:
    model = on_meta(lambda: Unfilled(buffer))
    with pytest.raises(ElixirError, match=f"nothing fills {name}: Unfilled has no reset"):
        exact.compile(model, example_inputs=(X,), **SPARE)
    assert all(p.is_meta for p in model.parameters())
    net = exact.compile(
        model,
        example_inputs=(X,),
        init=lambda module: (
            getattr(module, name).detach().fill_(1.0) if isinstance(module, Unfilled) else None
        ),
        **SPARE,
    )
    same(net.inner(X).shape, net(X).shape)


def test_a_real_model_with_one_part_on_meta(budget: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(32, 32), on_meta(lambda: nn.Linear(32, 32)))
    real = model[0].weight.detach().clone()
    net = exact.compile(model, example_inputs=(X,), **budget)
    same(real, net[0].weight.detach())
    assert net(X).shape == (4, 32) and not net[1].weight.is_meta


def test_planning_leaves_the_model_alone() -> None:
    for model in (on_meta(), Net()):
        before = [(id(p), p.is_meta) for p in model.parameters()]
        plan = exact.plan(model, (X,), memory=GIB)
        assert plan.layout.keeps_all
        assert [(id(p), p.is_meta) for p in model.parameters()] == before


# -- kinds of models, inputs and outputs ----------------------------------------------------


class Prediction(NamedTuple):
    loss: Tensor
    hidden: Tensor


@dataclass
class Answer:
    loss: Tensor
    hidden: Tensor | None = None
    aside: tuple[Tensor, ...] | None = None


class Output(OrderedDict[str, Any]):
    """As the outputs of transformers: a dict with attributes that leaves out what is None."""

    def __init__(self, **fields: Any) -> None:
        super().__init__({key: value for key, value in fields.items() if value is not None})

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


def as_dict(h: Tensor) -> Any:
    return {"loss": h.square().mean(), "aside": [h, None, 3], "name": "x"}


def as_tuple(h: Tensor) -> Any:
    return Prediction(h.square().mean(), h * 2)


def as_dataclass(h: Tensor) -> Any:
    return Answer(loss=h.square().mean(), aside=(h, h + 1))


def as_nest(h: Tensor) -> Any:
    return (h, [{"a": (h.sum(), None)}, 4.5], None)


def as_output(h: Tensor) -> Any:
    return Output(loss=h.square().mean(), logits=h, states=None)


class Returns(nn.Module):
    """Inputs of every kind, and the output that `make` makes."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(
        self, x: Tensor, extra: Any = None, *, scale: int = 2, flag: bool = False, more: Any = ()
    ) -> Any:
        h = self.second(self.first(x).tanh()) * scale
        if extra is not None:
            h = h + extra["shift"]
        for tensor in more:
            h = h * tensor
        return self.make(h.sin() if flag else h)


MAKERS = [as_dict, as_tuple, as_dataclass, as_nest, as_output]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_outputs(make: Callable[[Tensor], Any], tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Returns(make)

    pair = Pair(build, BATCHES, tight(build, BATCHES[0], tmp_path))
    pair.train(2)
    pair.check()
    one, other = (side.net(X) for side in pair.sides)
    assert type(one) is type(other)
    if isinstance(one, Output):
        assert list(one) == list(other) and other.logits.requires_grad
    if isinstance(one, Answer):
        assert other.hidden is None
        same(list(one.aside), list(other.aside))
    pair.backward(lambda side, batch: last_tensor(side.net(*batch)).square().sum())
    pair.check()


def last_tensor(value: Any) -> Tensor:
    """Some output that is not the loss."""
    if isinstance(value, Answer):
        return value.aside[1]
    if isinstance(value, Prediction):
        return value.hidden
    if isinstance(value, dict):
        return value["aside"][0] if "aside" in value else value["logits"]
    return value[1][0]["a"][0]


@pytest.mark.parametrize("budgeted", [True, False], ids=["tight", "spare"])
def test_inputs(budgeted: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return Returns(as_dict)

    options = tight(build, (X,), tmp_path) if budgeted else dict(SPARE)
    if budgeted:
        options["memory"] += options["memory"] // 4
    shift = torch.linspace(0, 1, 32)
    batches: list[Batch] = [
        {"x": X},
        {"x": X, "scale": 3},
        {"x": X, "extra": {"shift": shift, "unused": None}, "flag": True},
        {"x": X, "more": [shift, shift + 1]},
        {"x": X, "extra": None, "scale": 2},
    ]
    pair = Pair(build, batches, {**options, "example_inputs": batches[0]})
    pair.train(len(batches))
    pair.check()
    pair.do(lambda side: side.net(X, {"shift": shift}, scale=1)["loss"])
    pair.do(lambda side: side.net(X, None, more=(shift,))["aside"][0])


def test_a_traced_graph_module(budget: dict[str, Any]) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x))) + x

    options = dict(budget)
    if "disk" in options:
        options["memory"] = memory_needed(torch.fx.symbolic_trace(Plain()), (X,))
    pair = Pair(lambda: torch.fx.symbolic_trace(Plain()), BATCHES, options)
    pair.train(2)
    pair.check()
    assert list(pair.ours.net.state_dict()) == list(pair.plain.net.state_dict())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_first(mode: Any, budget: dict[str, Any]) -> None:
    pair = Pair(Net, BATCHES, budget)

    def look(side: Side) -> Tensor:
        side.net.eval()
        with mode():
            y = side.net(X)
            assert not y.requires_grad and y.is_inference() == (mode is torch.inference_mode)
            result = y.clone()
        side.net.train()
        return result.detach() if mode is torch.no_grad else torch.tensor(result.tolist())

    pair.do(look)
    pair.train(2)
    pair.do(look)
    pair.train()
    pair.check()
    assert len(pair.ours.net.plan.schedules) <= 3


def test_frozen_altogether(budget: dict[str, Any]) -> None:
    """Nothing requires a gradient: a forward alone, and gradients of inputs."""
    model = Net().requires_grad_(False).eval()
    plain = seeded(0, Net).requires_grad_(False).eval()
    plain.load_state_dict(model.state_dict())
    net = exact.compile(model, **budget)
    same(plain(X), net(X))
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for one, module in zip(inputs, (plain, net), strict=True):
        module(one).square().mean().backward()
    same(inputs[0].grad, inputs[1].grad)
    assert all(p.grad is None for p in model.parameters())
