"""Capture: a call of a model becomes a joint graph, and runs only under its guards.

First of the five verbs. `Capture`, the guarded call of compile(), traces a whole model as
torch.compile(fullgraph=True) does, and Dynamo's guards decide which captured graph serves a
call; a dimension that changes becomes a symbol. Its graphs go through `compile_graph` of
`compilation`, as do the regions that `backend` is handed by a torch.compile of the user's.

One of the few files that use underscored torch names (tests/test_layers.py lists them). Tried on
torch 2.11 and 2.13.
"""

import builtins
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from elixir_fx.compilation import Owner, Stale, compile_graph
from elixir_fx.dynamo import (
    capture_error,
    constant_size_error,
    data_dependent_error,
    loggers,
)
from elixir_fx.errors import CaptureError
from elixir_fx.step import (
    STEP_NAME,
)

GRAPHS = 8  # captured graphs that a model keeps


class Capture:
    """The guarded call of one model, all of it in one graph.

    `owner` is told of every captured graph and every call.
    """

    def __init__(self, model: nn.Module, owner: Owner) -> None:
        self.model = model
        self.graphs = 0
        # Code and globals of its own: there Dynamo puts what it made, which dies with the model.
        # A name of its own: by it Dynamo remembers which sizes have changed.
        own = {"__name__": __name__, "__builtins__": builtins}
        name = f"{STEP_NAME}_{uuid.uuid4().hex}"
        function = types.FunctionType(_step.__code__.replace(co_name=name), own)
        self._code = function.__code__
        # What Dynamo made refers back to the code, by ways that no garbage collector sees.
        end = weakref.finalize(self, reset_code, self._code)
        end.atexit = False
        backend = _counted(self, owner)  # Dynamo keeps every backend that it ever saw
        self.call = torch.compile(function, backend=backend, fullgraph=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured step for these inputs, capturing it first if no guard holds.

        CaptureError names what cannot be captured, with file and line; ForwardError is one
        that the model's own code caused, by raising.
        """
        if self.graphs > GRAPHS:
            self.forget()
        try:
            with torch._dynamo.config.patch(
                ignore_logging_functions=loggers(),
                skip_nnmodule_hook_guards=False,
                specialize_float=True,
                recompile_limit=GRAPHS + 2,
            ):
                try:
                    return self.call(self.model, *args, **kwargs)
                except Stale:
                    self.forget()
                    return self.call(self.model, *args, **kwargs)
        except ConstraintViolationError as error:
            raise constant_size_error(self.model, error) from None
        except GuardOnDataDependentSymNode as error:
            raise data_dependent_error(self.model, error) from None
        except BackendCompilerFailed as error:
            raise CaptureError(f"{type(self.model).__name__}: lowering failed: {error}") from error
        except TorchDynamoException as error:
            raise capture_error(self.model, error) from None

    def forget(self) -> None:
        """Drop every captured graph."""
        reset_code(self._code)
        self.graphs = 0


def _counted(capture: Capture, owner: Owner) -> Callable[..., Any]:
    """A Dynamo backend that keeps neither `capture` nor `owner` alive."""
    counted, belongs = weakref.ref(capture), weakref.ref(owner)

    def elixir_fx(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        alive = counted()
        if alive is not None:
            alive.graphs += 1
        return compile_graph(belongs, module, inputs, None)

    return elixir_fx


def _step(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


@contextmanager
def real_mode() -> Iterator[None]:
    """A context in which tensors are real although a capture is going on.

    Without the Python dispatcher, too: an operator that goes through it holds the interpreter,
    which deadlocks with a communication's own threads.
    """
    with no_python_dispatcher(), _disable_current_modes():
        yield


@contextmanager
def pretend_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a model on meta pass for one on `device` while it is captured: its tensors are
    replaced by others of the same geometry that have no memory behind them."""
    stand_ins: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for members in held:
            for name, tensor in members.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in stand_ins:
                        stand_ins[id(tensor)] = _stand_in(tensor, device)
                    replaced.append((members, name, tensor))
    for members, name, tensor in replaced:
        members[name] = stand_ins[id(tensor)]
    try:
        yield
    finally:
        for members, name, tensor in replaced:
            members[name] = tensor


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    shell = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.dim():  # a number is small, and capturing may look at it
        shell.untyped_storage().resize_(0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(shell, requires_grad=tensor.requires_grad)
    return shell


def ordinary_inputs(inputs: Any) -> Any:
    """Inputs that autograd can work with: inference tensors become others of the same geometry.
    For captures that run nothing."""

    def ordinary(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_inference():
            return torch.empty_like(value)
        return value

    return pytree.tree_map(ordinary, inputs)
