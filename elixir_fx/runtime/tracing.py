"""What a capture must not see: parameters and gradients that are away.

Around the guards of a captured step, and the capture itself where none holds. Left before
anything of the step runs.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from elixir_fx.runtime.parameters import AwayParameter, ChunkGradient


@contextmanager
def plain(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let away parameters pass for plain nn.Parameter objects, as Dynamo's guards want them,
    without gradients that are away, which it would look at.

    Nothing may read a value inside: the objects have no memory.
    """
    known = list(parameters)
    moved: list[nn.Parameter] = [p for p in known if type(p) is AwayParameter]
    for parameter in moved:
        parameter.__class__ = nn.Parameter
    hidden = [(p, p.grad) for p in known if type(p.grad) is ChunkGradient]
    for parameter, _ in hidden:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient
        for parameter in moved:
            parameter.__class__ = AwayParameter


@contextmanager
def calls_through(module: nn.Module, call: Callable[..., Any] | None) -> Iterator[None]:
    """Let `module(...)` mean `call(...)`, or with None what it means by itself.

    Where nn.Module.compile() puts its function too, so that subclasses keep their `__call__`.
    """
    before = module.__dict__.get("_compiled_call_impl")
    module.__dict__["_compiled_call_impl"] = call
    try:
        yield
    finally:
        module.__dict__["_compiled_call_impl"] = before
