"""Real arguments for an operator of a captured graph, so that it can be timed.

Used by lowering with `measure`. Tensors get the shapes, strides and dtypes of the graph and
random contents; integers are zeros, valid as indices.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx


def sample_call(node: fx.Node) -> Callable[[], object] | None:
    """A call of the node's operator on made-up tensors; None where they do not suit it."""
    target: Callable[..., object] = node.target  # type: ignore[assignment]
    fakes = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta.get("val"))
    sample = _Sample(target, fakes)
    try:
        sample()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # an operator that wants particular values: the roofline costs it
    return sample


class _Sample:
    """Makes its arguments at the first call and keeps them for the following ones."""

    def __init__(self, target: Callable[..., object], fakes: Any) -> None:
        self._target = target
        self._fakes = fakes
        self._arguments: Any = None

    def __call__(self) -> object:
        if self._arguments is None:
            self._arguments = _real(self._fakes)
        args, kwargs = self._arguments
        with torch.no_grad():
            return self._target(*args, **kwargs)


def _real(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return _tensor(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(_real(item) for item in tree)
    if isinstance(tree, dict):
        return {key: _real(item) for key, item in tree.items()}
    return tree


def _tensor(fake: Tensor) -> Tensor:
    shape, strides = tuple(fake.shape), tuple(fake.stride())
    real = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
    if real.is_floating_point():
        return real.normal_()
    return real.zero_()
