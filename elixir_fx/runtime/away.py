"""What a tensor that is not in device memory is read from: its `Home`, behind a `Source`.

Stands below `parameters` (tensors that people hold) and beside `store` (the memory of the
tiers, whose `TensorHome` has the shape of `Home`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


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


def found(values: Any, kind: type[T]) -> list[T]:
    """Every `kind` in `values`, however deep in lists, tuples and dicts, in order."""
    if isinstance(values, kind):
        return [values]
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (list, tuple)):
        return [item for value in values for item in found(value, kind)]
    return []


def replaced(values: Any, kind: type, new: Callable[[Any], Any]) -> Any:
    """`values` with each `kind` in it, however deep in lists, tuples and dicts, replaced."""
    if isinstance(values, kind):
        return new(values)
    if isinstance(values, dict):
        return {key: replaced(value, kind, new) for key, value in values.items()}
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(replaced(value, kind, new) for value in values))
    if isinstance(values, (list, tuple)):
        return type(values)(replaced(value, kind, new) for value in values)
    return values


def one_at_a_time(
    schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """The calls on one element each that an operator's call on lists stands for.

    None if the operator of this schema does not treat its lists element by element.
    """
    name = schema.name.removeprefix("aten::").lstrip("_")
    if not name.startswith(("foreach", "fused", "amp_foreach")):
        return None
    given = [*args, *kwargs.values()]
    lists = [value for value in given if isinstance(value, (list, tuple)) and found(value, Tensor)]
    count = len(lists[0]) if lists else 0
    if count < 2 or any(len(value) not in (0, count) for value in lists):
        return None
    names = [argument.name for argument in schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    if isinstance(named.get("scalars"), Tensor):
        return None

    def part(value: Any, index: int) -> Any:
        several = isinstance(value, (list, tuple)) and len(value) == count
        return [value[index]] if several else value

    return [
        (
            tuple(part(value, index) for value in args),
            {key: part(value, index) for key, value in kwargs.items()},
        )
        for index in range(count)
    ]
