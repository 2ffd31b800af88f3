"""What a tensor that is not in device memory is read from: its `Home`, behind a `Source`.

Stands below `parameters` (tensors that people hold) and beside `store` (the memory of the
tiers, whose `TensorHome` has the shape of `Home`).
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Ticket(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when the transfer is done; raise what went wrong with it."""


class Home(Protocol):
    """A place on some tier that holds one tensor's value between uses.

    `span` counts the elements from the first to the last one of a tensor of this shape and
    these strides; flat tensors of `span` elements are what moves.
    """

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def strides(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def span(self) -> int: ...

    def load(self) -> Tensor:
        """A fresh ordinary tensor with the current value."""

    def store(self, value: Tensor) -> None:
        """Write `value`, a tensor of `shape`; returns when it is written."""

    def fetch(self, into: Tensor) -> Ticket:
        """Start to read the value into a flat tensor of `span` elements."""

    def put(self, source: Tensor) -> Ticket:
        """Start to write the value from a flat tensor of `span` elements."""

    def view(self, flat: Tensor) -> Tensor:
        """A flat tensor of `span` elements seen in `shape` and `strides`."""


class Source:
    """Where all lazily read views of one tensor look: its home, or for a while a real tensor.

    Everything that a user holds of an away tensor (`p.data`, `p.grad`, views of views) shares
    one source, so that it stays an alias when the value moves into memory and out again.
    A weak reference to a source tells whether anybody still holds such a view.
    """

    __slots__ = ("__weakref__", "home", "tensor")

    def __init__(self, home: Home) -> None:
        self.home = home
        self.tensor: Tensor | None = None

    def load(self) -> Tensor:
        """The value with the home's strides: the real tensor if there is one, else fresh."""
        if self.tensor is not None:
            return self.tensor
        value = self.home.load()
        if value.stride() == tuple(self.home.strides):
            return value
        return self.blank().copy_(value)

    def blank(self) -> Tensor:
        """A tensor to be overwritten: the real one if there is one, else uninitialised."""
        if self.tensor is not None:
            return self.tensor
        return torch.empty_strided(
            tuple(self.home.shape),
            tuple(self.home.strides),
            dtype=self.home.dtype,
            device=self.home.device,
        )

    def store(self, value: Tensor) -> None:
        """Write `value`, which `load` or `blank` gave and somebody changed."""
        if self.tensor is None:
            self.home.store(value)

    def keep(self) -> None:
        """Hold the value in memory from now on: the home is about to be used for another."""
        if self.tensor is None:
            self.tensor = self.home.load()
