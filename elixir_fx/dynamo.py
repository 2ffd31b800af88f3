"""What we ask of Dynamo, and what it says: guards, names of inputs, refusals in words.

Beside `capture`, which traces. Uses underscored torch names; tried on torch 2.11 and 2.13.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException, TorchRuntimeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import ChainedSource, GlobalSource  # type: ignore[attr-defined]
from torch._ops import HigherOrderOperator
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
)

from elixir_fx.errors import CaptureError, ElixirError


class _Refusal(ShortenTraceback):
    """Brings an ElixirError out of Dynamo as it is, from a backend that it called."""

    def __init__(self, error: ElixirError) -> None:
        super().__init__(str(error), first_useful_frame=None)
        self.error = error

    def remove_dynamo_frames(self) -> BaseException:  # type: ignore[override]
        return self.error.with_traceback(None)


class ForwardError(CaptureError):
    """The model's own forward raised while it was captured; run it to see what."""


class _Functions(dict[str, None]):
    """A collection of functions for Dynamo's settings, which torch 2.11 writes to its log as
    JSON: there it is an empty object, where a set would be an error."""

    def __init__(self, functions: Sequence[Any]) -> None:
        super().__init__()
        self.functions = functions

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)

    def __contains__(self, function: object) -> bool:
        return function in self.functions


def loggers() -> _Functions:
    """Methods of loggers that a capture may skip: what they print is no part of a step.
    Libraries add their own, `warning_once`, to the class when they are imported."""
    names = ("debug", "info", "warning", "warn", "error", "critical", "exception", "log")
    methods = vars(logging.Logger).items()
    found = [method for name, method in methods if name.removesuffix("_once") in names]
    return _Functions([*found, *torch._dynamo.config.ignore_logging_functions])


def refused(error: ElixirError) -> BaseException:
    """What a backend raises so that `error` reaches the user as it is."""
    return _Refusal(error)


def guard_identity(module: fx.GraphModule) -> None:
    """Let Dynamo use this graph, which it is compiling, for these very parameters only. Of its
    own accord it would use it for every module of the same class and shapes."""
    for node in module.graph.nodes:
        source = _source(node)
        if source is None or not _is_parameter(node):
            continue
        while isinstance(source, ChainedSource) and not isinstance(source.base, GlobalSource):
            source = source.base
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def named_parameters_of(
    module: fx.GraphModule, inputs: Sequence[Any]
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters among the inputs of Dynamo's graph, by their path in the module whose
    forward it traced."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, given in zip(nodes, inputs, strict=True):
        if isinstance(given, nn.Parameter):
            steps = re.findall(r"_(?:modules|parameters)\['(.*?)'\]", _source_name(node))
            yield ".".join(steps) or node.name, given


WITHOUT_SIZES = ("dropout", "interpolate")  # in names of operators that take symbolic sizes


class _AsInEager:
    """An operator called without the Python dispatcher, whose decompositions of dropout,
    interpolate and others round differently from the C++ ones that eager PyTorch runs."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self.target = target
        self.__name__ = getattr(target, "__name__", type(target).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with no_python_dispatcher():
            return self.target(*args, **kwargs)


def as_in_eager(module: fx.GraphModule, dynamic: bool) -> fx.GraphModule:
    """Dynamo's graph with its operators called as eager calls them.

    Symbolic sizes need the Python dispatcher: where there are any, only operators go without
    that can do so.
    """
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        known[node] = copy = graph.node_copy(node, known.__getitem__)
        if node.op == "call_method" and not dynamic:
            copy.op = "call_function"
            copy.target = _AsInEager(_method(str(node.target)))
        elif node.op == "call_function" and not isinstance(node.target, HigherOrderOperator):
            name = getattr(node.target, "__name__", "")
            if not dynamic or any(word in name for word in WITHOUT_SIZES):
                copy.target = _AsInEager(node.target)
    made = fx.GraphModule(module, graph)
    made.meta = module.meta
    for name, child in module.named_children():
        if isinstance(child, fx.GraphModule):  # the body of a checkpoint and the like
            setattr(made, name, as_in_eager(child, dynamic))
    return made


def _method(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    call.__name__ = name
    return call


@contextmanager
def open_sizes(sizes: Mapping[Tensor, Iterable[int]]) -> Iterator[None]:
    """Let a capture keep these dimensions of its inputs open, as symbols of their own, two that
    have equal sizes too. The tensors stay as they were but for marks that are taken off again."""
    before = [(tensor, dict(vars(tensor))) for tensor in sizes]
    try:
        for tensor, dimensions in sizes.items():
            for dimension in dimensions:
                torch._dynamo.mark_dynamic(tensor, dimension)
        yield
    finally:
        for tensor, attributes in before:
            vars(tensor).clear()
            vars(tensor).update(attributes)


def constant_size_error(model: nn.Module, error: ConstraintViolationError) -> CaptureError:
    """A dimension that was to be open and that what compiles the graph takes for a constant."""
    reasons = [
        line.strip(" -") for line in str(error).splitlines() if line.lstrip().startswith("-")
    ]
    reason = reasons[0].split(". If you")[0] if reasons else str(error).splitlines()[0]
    return CaptureError(
        f"{type(model).__name__}: a dimension of dynamic_shapes cannot change: {reason}. Let the "
        "model compute with its size, or leave it out of dynamic_shapes"
    )


def sees_module_hooks() -> bool:
    """Whether Dynamo's guards look at the hooks of modules."""
    return not torch._dynamo.config.skip_nnmodule_hook_guards


def _source(node: fx.Node) -> Any:
    """Where Dynamo got a graph's input from."""
    return getattr(node.meta.get("grapharg"), "source", None) if node.op == "placeholder" else None


def _source_name(node: fx.Node) -> str:
    name = getattr(_source(node), "name", "")
    return str(name() if callable(name) else name)  # a method before torch 2.12


def _is_parameter(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), nn.Parameter)


def _where(error: Exception) -> str:
    """The user's line that Dynamo was at."""
    stack = list(getattr(error, "real_stack", None) or ())
    own = [frame for frame in stack if not _is_internal(frame.filename)]
    frame = (own or stack or [None])[-1]
    return f"{frame.filename}:{frame.lineno}" if frame else "unknown line"


def data_assigned_error(title: str) -> CaptureError:
    """A forward that puts another tensor in the place of one."""
    return CaptureError(
        f"{title}: its forward assigns to the .data of a tensor, which cannot be captured: write "
        "`with torch.no_grad(): p.copy_(...)`"
    )


def data_dependent_error(model: nn.Module, error: GuardOnDataDependentSymNode) -> CaptureError:
    """A branch or size that depends on the value of a tensor, in the user's words."""
    where = _where(error)
    return CaptureError(
        f"{type(model).__name__} cannot be captured as one graph, at {where}: what it does depends "
        "on the value of a tensor. Change that line, or use torch.compile(model, "
        "backend='elixir_fx'), which allows graph breaks"
    )


# How Dynamo begins when the code that it follows raises, or is called as it cannot be.
_RAISED = ("Observed exception", "failed to bind arguments")
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(__file__) + os.sep


def _is_internal(file: str) -> bool:
    """Whether a source file is torch's or ours, rather than the user's."""
    return file.startswith((_TORCH, _OURS))


def capture_error(model: nn.Module, error: TorchDynamoException) -> CaptureError:
    """Dynamo's refusal in the user's words: what, where, and what to do instead."""
    where = _where(error)
    reason = str(error).strip().splitlines()
    first = next((line.strip() for line in reason if line.strip()), type(error).__name__)
    explanation = next(
        (line.strip() for line in reason if line.strip().startswith("Explanation:")), ""
    )
    hooked = [
        path or type(model).__name__
        for path, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    if hooked and "hook" in first:
        return CaptureError(
            f"{', '.join(hooked)} has a backward hook of the module, which a captured step cannot "
            "run: use a hook on the parameter, or on a tensor in forward, or remove it"
        )
    raised = isinstance(error, TorchRuntimeError) or any(words in first for words in _RAISED)
    kind = ForwardError if raised else CaptureError
    return kind(
        f"{type(model).__name__} cannot be captured as one graph, at {where}: {first}. "
        f"{explanation} Change that line, or use torch.compile(model, backend='elixir_fx'), "
        "which allows graph breaks"
    )
