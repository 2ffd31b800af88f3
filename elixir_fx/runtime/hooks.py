"""What a backward pass does with a parameter's gradient, and the hooks it should meet.

For the backward function of a compiled step: it accumulates gradients by itself and returns
None to autograd, which calls the user's hooks even so. They are wrapped here, in place, so
that they notice only gradients. Stands above `parameters`, which knows torch's own names.
"""

import enum
from collections.abc import Callable

from torch import Tensor, nn

from elixir_fx.runtime.accumulation import accumulator, executes, post_hooks, tensor_hooks, version


class Accumulation(enum.Enum):
    """What the running backward pass does with a parameter's gradient (law 11)."""

    ACCUMULATE = "accumulate"  # into p.grad
    CAPTURE = "capture"  # returned by autograd.grad
    SKIP = "skip"


def accumulation(parameter: nn.Parameter) -> Accumulation:
    """What the backward pass under way on this thread will do with `parameter`'s gradient.

    RuntimeError outside a backward pass.
    """
    runs = executes(accumulator(parameter))
    if runs is None:
        return Accumulation.CAPTURE
    return Accumulation.ACCUMULATE if runs else Accumulation.SKIP


class _UnlessNone:
    """A tensor hook that a call with no gradient passes by."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.hook(gradient)


class _UnlessUnchanged:
    """A post-accumulate hook that is not told of a gradient that did not come.

    `before` is the state of p.grad when our backward function returned None, or None.
    """

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook
        self.before: tuple[int, int] | None = None

    def __call__(self, parameter: nn.Parameter) -> None:
        before, self.before = self.before, None
        if before is None or before != _state(parameter):
            self.hook(parameter)


def run_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """What the tensor hooks of `parameter` make of `gradient`, in autograd's order.

    The post-accumulate hooks autograd calls by itself, once per pass when every use of the
    parameter has accumulated, which is right: nobody else may.
    RuntimeError or TypeError, in autograd's words, for a hook that returns something else
    than a tensor of the same shape and device.
    """
    for hook in _quiet(parameter):
        changed = hook(gradient)
        if changed is None:
            continue
        if not isinstance(changed, Tensor):
            raise TypeError(f"expected Variable, but hook returned '{type(changed).__name__}'")
        if changed.shape != gradient.shape or changed.device != gradient.device:
            raise RuntimeError("hook has changed the size or device of value")
        gradient = changed
    return gradient


def pass_by(parameter: nn.Parameter) -> None:
    """Keep hooks quiet about a parameter that got no gradient in this pass.

    For a backward function that returns None for it and accumulates nothing: in eager its
    hooks would not run. They do if another use of the parameter brings a gradient.
    """
    _quiet(parameter)
    hooks = post_hooks(parameter)
    for key, hook in tuple(hooks.items()):
        if not isinstance(hook, _UnlessUnchanged):
            hooks[key] = hook = _UnlessUnchanged(hook)
        hook.before = _state(parameter)


def _quiet(parameter: nn.Parameter) -> list[_UnlessNone]:
    hooks = tensor_hooks(parameter)
    for key, hook in tuple(hooks.items()):
        if not isinstance(hook, _UnlessNone):
            hooks[key] = _UnlessNone(hook)  # under its key: the user's handle still removes it
    return list(hooks.values())


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    """Which tensor p.grad is, and how often it was written."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), version(gradient))
