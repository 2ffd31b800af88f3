"""What is asked of Dynamo: operators as eager calls them, loggers, names, guards, refusals."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from case_models import mlp, randn
from graphs import seeded
from pairs import same
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from elixir_fx.dynamo import (
    ForwardError,
    as_in_eager,
    capture_error,
    guard_identity,
    loggers,
    named_parameters_of,
    refused,
    sees_module_hooks,
)
from elixir_fx.errors import CaptureError, ElixirError, PlanError

THREADS = 1
X = randn(6, 32)


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Taken:
    """A backend that keeps what it is given."""

    def __init__(self) -> None:
        self.graphs: list[tuple[fx.GraphModule, list[Any]]] = []
        self.names: list[tuple[str, nn.Parameter]] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        self.graphs.append((module, list(inputs)))
        self.names += named_parameters_of(module, inputs)  # Dynamo forgets them soon
        return module


def graph_of(function: Any, *args: Any, **options: Any) -> tuple[fx.GraphModule, list[Any]]:
    taken = Taken()
    torch.compile(function, backend=taken, **options)(*args)
    (found,) = taken.graphs
    return found


def names_of(function: Any) -> list[tuple[str, nn.Parameter]]:
    taken = Taken()
    torch.compile(function, backend=taken)(X)
    return taken.names


# -- operators as in eager -------------------------------------------------------------------


class Operators(nn.Module):
    """Functions, methods, a layer, a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.body(x).relu(), 0.5, training=True)
        return h.view(-1, 4).softmax(-1).reshape_as(x) * torch.sin(x)


def test_the_same_numbers() -> None:
    """The copy computes what eager does, dropout's mask included; the graph given stays."""
    model = seeded(0, Operators)
    graph, inputs = graph_of(model, X)
    targets = [node.target for node in graph.graph.nodes]
    copy = as_in_eager(graph, dynamic=False)
    assert [node.target for node in graph.graph.nodes] == targets
    for module in (graph, copy):
        torch.manual_seed(3)
        expected = model(X)
        torch.manual_seed(3)
        (result,) = module(*inputs)
        same(expected, result)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_wrapped(dynamic: bool) -> None:
    """Every operator; with symbolic sizes dropout alone."""
    graph, _ = graph_of(seeded(0, Operators), X)
    copy = as_in_eager(graph, dynamic)
    names, methods = [], []
    for before, after in zip(graph.graph.nodes, copy.graph.nodes, strict=True):
        assert (before.name, before.meta) == (after.name, after.meta)
        if after.target is not before.target:
            names.append(after.target.__name__)
        methods += [after.target] if after.op == "call_method" else []
    if dynamic:
        assert names == ["dropout"]
        assert methods == ["relu", "view", "softmax", "reshape_as"]
    else:
        assert {"linear", "dropout", "view", "softmax", "sin", "mul"} <= set(names)
        assert methods == []


def test_bodies_of_checkpoints() -> None:
    """Graphs inside the graph are copied as well."""
    model = seeded(0, mlp)

    def step(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False).sum()

    graph, inputs = graph_of(step, X)
    bodies = [child for child in graph.children() if isinstance(child, fx.GraphModule)]
    assert bodies
    copy = as_in_eager(graph, dynamic=False)
    for before, after in zip(bodies, copy.children(), strict=True):
        assert before is not after
    (result,) = copy(*inputs)
    same(step(X), result)


def test_decompositions_are_left_out() -> None:
    """Within the Python dispatcher a wrapped operator still runs its C++ kernel."""
    from torch._dispatch.python import enable_python_dispatcher

    def resize(x: Tensor) -> Tensor:
        return functional.interpolate(x, scale_factor=1.7, mode="bilinear", align_corners=False)

    image = randn(2, 3, 9, 11)
    graph, inputs = graph_of(resize, image, dynamic=False)
    copy = as_in_eager(graph, dynamic=False)
    with enable_python_dispatcher():
        (result,) = copy(*inputs)
    same(resize(image), result)


# -- loggers ---------------------------------------------------------------------------------


def test_loggers() -> None:
    found = loggers()
    for name in ("debug", "info", "warning", "error", "critical", "exception", "log"):
        assert getattr(logging.Logger, name) in found
    assert print not in found and logging.Logger.setLevel not in found
    assert len(list(found)) == len({id(function) for function in found})
    assert not found  # torch 2.11 writes settings to a log as JSON: an empty object there


def test_libraries_loggers() -> None:
    """What a library adds to the class counts too."""

    def warning_once(self: logging.Logger, *args: Any) -> None: ...

    assert warning_once not in loggers()
    logging.Logger.warning_once = warning_once  # type: ignore[attr-defined]
    try:
        assert warning_once in loggers()
    finally:
        del logging.Logger.warning_once  # type: ignore[attr-defined]


def test_settings_stay_the_users() -> None:
    """Functions that the user told Dynamo to ignore stay ignored."""
    before = torch._dynamo.config.ignore_logging_functions
    with torch._dynamo.config.patch(ignore_logging_functions={test_loggers}):
        assert test_loggers in loggers()
        with torch._dynamo.config.patch(ignore_logging_functions=loggers()):
            assert test_loggers in loggers()
    assert torch._dynamo.config.ignore_logging_functions == before


# -- names -----------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.layers = nn.ModuleList(mlp() for _ in range(2))
        self.named = nn.ModuleDict({"a-b": nn.Linear(32, 32, bias=False)})
        self.many = nn.ParameterList([nn.Parameter(torch.ones(32)) for _ in range(2)])
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return self.named["a-b"](x) * self.many[1] + self.mean


def test_names() -> None:
    """Paths in the module; buffers and the user's tensors have none."""
    model = Nested()
    found = dict(names_of(model))
    known = dict(model.named_parameters())
    assert set(found) == {name for name in known if name != "many.0"}
    assert all(found[name] is known[name] for name in found)


def test_names_in_a_function() -> None:
    """A parameter that a function closes over is named within its module, a lone one somehow."""
    model, alone = mlp(), nn.Parameter(torch.ones(32))

    def step(x: Tensor) -> Tensor:
        return model(x * alone).sum()

    found = dict(names_of(step))
    assert len(found) == 5 and set(dict(model.named_parameters())) <= set(found)
    (name,) = set(found) - set(dict(model.named_parameters()))
    assert name.isidentifier() and found[name] is alone


def test_names_of_two_modules() -> None:
    """Two modules of a function have the same paths: every parameter is told all the same."""
    one, other = mlp(), mlp()
    found = names_of(lambda x: other(one(x)).sum())
    assert len({id(parameter) for _, parameter in found}) == 8


# -- guards ----------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [True, False])
def test_identity(guarded: bool) -> None:
    """Of its own accord Dynamo uses one graph for every module of a class; guarded it does not."""
    captured: list[list[nn.Parameter]] = []

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        captured.append([p for _, p in named_parameters_of(module, inputs)])
        if guarded:
            guard_identity(module)
        return module

    @torch.compile(backend=backend)
    def call(net: nn.Module, x: Tensor) -> Tensor:
        return net(x)

    models = [seeded(0, Nested), seeded(1, Nested)]
    for model in (*models, *models):
        same(model(X), call(model, X))
    assert len(captured) == (2 if guarded else 1)


def test_sees_module_hooks() -> None:
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        assert not sees_module_hooks()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        assert sees_module_hooks()


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ElixirError, PlanError])
def test_refused(kind: type[ElixirError]) -> None:
    """What a backend raises reaches the caller as it is, each time, also from a nested call."""

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        raise refused(kind("no"))

    model = mlp()
    for call in (torch.compile(model, backend=backend), torch.compile(model, backend=backend)):
        with pytest.raises(ElixirError, match=r"^no$") as caught:
            call(X)
        assert type(caught.value) is kind


def test_capture_error_kinds() -> None:
    """What the model raised is told from what cannot be captured."""

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("never")

    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x.sin()

    for model, kind in ((Raises(), ForwardError), (Breaks(), CaptureError)):
        with pytest.raises(torch._dynamo.exc.TorchDynamoException) as caught:
            torch.compile(model, backend="eager", fullgraph=True)(X)
        error = capture_error(model, caught.value)
        assert type(error) is kind
        assert "test_dynamo.py:" in str(error) and type(model).__name__ in str(error)
