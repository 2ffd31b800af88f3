"""Real arguments for an operator of a captured graph, so that it can be timed.

Used by lowering with `measure`. Tensors get the shapes, strides and dtypes of the graph and
random contents; integers are zeros, valid as indices.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sample_call(
    target: Callable[..., object], arguments: Any, number: Callable[[object], int]
) -> Callable[[], object] | None:
    """A call of an operator on made-up tensors; None where they do not suit it.

    `arguments` are its (args, kwargs) with fake tensors; `number` says the size that a dynamic
    dimension is tried with.
    """
    sample = _Sample(target, arguments, number)
    try:
        sample()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None  # an operator that wants particular values: the roofline costs it
    return sample


class _Sample:
    """Makes its arguments at the first call and keeps them for the following ones."""

    def __init__(
        self, target: Callable[..., object], fakes: Any, number: Callable[[object], int]
    ) -> None:
        self._target = target
        self._fakes = fakes
        self._number = number
        self._arguments: Any = None

    def __call__(self) -> object:
        if self._arguments is None:
            self._arguments = self._real(self._fakes)
        args, kwargs = self._arguments
        with torch.no_grad():
            return self._target(*args, **kwargs)

    def _real(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            return self._tensor(tree)
        if isinstance(tree, torch.SymInt):
            return self._number(tree)
        if isinstance(tree, (tuple, list)):
            return type(tree)(self._real(item) for item in tree)
        if isinstance(tree, dict):
            return {key: self._real(item) for key, item in tree.items()}
        return tree

    def _tensor(self, fake: Tensor) -> Tensor:
        shape, strides = (tuple(map(self._number, sizes)) for sizes in (fake.shape, fake.stride()))
        real = torch.empty_strided(shape, strides, dtype=fake.dtype, device=fake.device)
        if real.is_floating_point():
            return real.normal_()
        return real.zero_()
