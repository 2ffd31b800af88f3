"""Named sizes: which dimensions of the example inputs stay open, and what they are called.

`dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}}` says it as torch.export does, with
plain names: by parameter of the model's forward, or in the order of a tuple of inputs; for a
list, tuple or dict of tensors, one entry each. A dimension with a name becomes a symbol of the
captured graph, and the plan speaks of it by this name.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from elixir_fx.errors import CaptureError, ElixirError


@dataclass(frozen=True, kw_only=True, eq=False)
class Named:
    """A dimension of an input that has a name. `where` is the input's, for messages."""

    tensor: Tensor
    where: str
    dimension: int
    name: str

    @property
    def size(self) -> int:
        return int(self.tensor.shape[self.dimension])

    @property
    def title(self) -> str:
        return f"dimension {self.dimension} of {self.where}, {self.name!r},"


def named_sizes(
    model: nn.Module, shapes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Named, ...]:
    """The dimensions of these inputs that `shapes` names. ElixirError where it names an input or
    dimension that there is not, or one name stands for two sizes."""
    if shapes is None:
        return ()
    found = tuple(_walk("", shapes, _by_parameter(model, shapes, args, kwargs)))
    first: dict[str, Named] = {}
    for named in found:
        other = first.setdefault(named.name, named)
        if other.size != named.size:
            raise ElixirError(
                f"dynamic_shapes: {named.title} is {named.size}, and {other.title} is "
                f"{other.size}: one name is one size; give them two"
            )
    return found


def check_open(found: Sequence[Named]) -> None:
    """CaptureError for a dimension that torch would take for a constant, whatever its name."""
    for named in found:
        if named.size < 2:
            raise CaptureError(
                f"dynamic_shapes: {named.title} is {named.size} in the example inputs, and torch "
                "takes a size of 0 or 1 for a constant: give example inputs in which it is 2 or "
                "more; the plan still answers for 1"
            )


def by_tensor(found: Sequence[Named]) -> dict[int, dict[int, str]]:
    """The names of dimensions, by the id of the tensor."""
    names: dict[int, dict[int, str]] = {}
    for named in found:
        names.setdefault(id(named.tensor), {})[named.dimension] = named.name
    return names


def _by_parameter(
    model: nn.Module, shapes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The inputs in the form that `shapes` has: by name, or in their order."""
    if isinstance(shapes, (tuple, list)):
        return args
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ElixirError(f"example_inputs do not fit {type(model).__name__}: {error}") from error
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            given.update(value)
        else:
            given[name] = value
    return given


def _walk(where: str, shapes: Any, value: Any) -> Iterator[Named]:
    if shapes is None:
        return
    if isinstance(value, Tensor):
        yield from _of_tensor(where, shapes, value)
    elif isinstance(value, Mapping) and isinstance(shapes, Mapping):
        for key, inner in shapes.items():
            if key not in value:
                raise ElixirError(
                    f"dynamic_shapes names {key!r}: {where or 'forward'} is given {sorted(value)}"
                )
            yield from _walk(f"{where}[{key!r}]" if where else str(key), inner, value[key])
    elif isinstance(value, (tuple, list)) and isinstance(shapes, (tuple, list)):
        if len(shapes) > len(value):
            raise ElixirError(
                f"dynamic_shapes has {len(shapes)} entries for {where or 'the positional inputs'}, "
                f"of which there are {len(value)}"
            )
        for index, (inner, one) in enumerate(zip(shapes, value, strict=False)):
            yield from _walk(f"{where}[{index}]" if where else f"input {index}", inner, one)
    else:
        raise ElixirError(
            f"dynamic_shapes={shapes!r} for {where or 'the inputs'}, a {type(value).__name__}: "
            "give {dimension: name} for a tensor, and one entry each for what holds tensors"
        )


def _of_tensor(where: str, shapes: Any, tensor: Tensor) -> Iterator[Named]:
    if not isinstance(shapes, Mapping):
        raise ElixirError(f"dynamic_shapes={shapes!r} for {where}: give {{dimension: name}}")
    for dimension, name in shapes.items():
        if not isinstance(dimension, int) or not -tensor.dim() <= dimension < tensor.dim():
            raise ElixirError(
                f"dynamic_shapes: {where} has {tensor.dim()} dimensions, and no {dimension!r}"
            )
        if not isinstance(name, str) or not name.isidentifier():
            raise ElixirError(
                f"dynamic_shapes: dimension {dimension} of {where} is called {name!r}: give a name "
                "such as 'batch'"
            )
        place = dimension % tensor.dim()
        yield Named(tensor=tensor, where=where, dimension=place, name=name)
