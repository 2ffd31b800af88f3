"""The torch.compile backend: `torch.compile(model, backend="elixir_fx", options={...})`.

Registered through the entry point group torch_dynamo_backends. Dynamo calls `elixir_fx` with
one region after the other; those of one model meet in a session that hangs on its parameters.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from elixir_fx.config import Options, check_disk, read_options
from elixir_fx.dynamo import named_parameters_of, refused
from elixir_fx.errors import ElixirError
from elixir_fx.plan import Plan
from elixir_fx.regions import RegionSession, session_of
from elixir_fx.runtime.materialize import is_meta
from elixir_fx.runtime.parameters import AwayParameter, AwayTensor
from elixir_fx.step import Record

# Options that only elixir_fx.compile() has.
OF_COMPILE = ("init", "weights", "plan", "dynamic_shapes")
OF_BACKEND = ("model", "optimizer")
_DELETED = object()  # in the place of one of these that was deleted


def elixir_fx(
    region: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """The backend: what torch.compile calls with each region that it captured.

    `options` are those of `elixir_fx.compile()`, and `model` and `optimizer`. With the model (or
    else the optimizer's parameters) memory is reserved for the regions still to come;
    without either there is no budget to share, and `memory` and `disk` are refused. Dynamo keeps
    the options of every backend for good: model and optimizer become weak references in them.

    Raises ElixirError for an option that it does not know, PlanError if no plan fits.
    """
    if unknown:
        raise refused(
            ElixirError(f"backend='elixir_fx' takes options={{...}}, not {sorted(unknown)}")
        )
    try:
        session = _session(region, inputs, _taken({} if options is None else options))
    except ElixirError as error:
        raise refused(error) from None
    return session.compile(region, inputs)


def _taken(options: dict[str, Any]) -> dict[str, Any]:
    """The options' values; weak references are left in the place of model and optimizer."""
    values = dict(options)
    for name in OF_BACKEND:
        value = values.get(name)
        if isinstance(value, weakref.ref):
            alive = value()
            values[name] = _DELETED if alive is None else alive
        elif isinstance(value, (nn.Module, torch.optim.Optimizer)):
            options[name] = weakref.ref(value)
    return values


def _session(
    region: fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]
) -> RegionSession:
    given = [options.get(name) for name in OF_BACKEND]
    model, optimizer = (None if value is _DELETED else value for value in given)
    read = _read({name: value for name, value in options.items() if name not in OF_BACKEND})
    named = list(named_parameters_of(region, inputs))
    _check(model, optimizer, read)
    known = list(model.parameters()) if model is not None else []
    if optimizer is not None:
        known += [p for group in optimizer.param_groups for p in group["params"]]
    if any(isinstance(tensor, (AwayParameter, AwayTensor)) for tensor in (*known, *inputs)):
        raise ElixirError("this model is compiled already, by elixir_fx.compile()")
    found = session_of([*known, *(parameter for _, parameter in named)])
    if found is not None:
        if optimizer is not None:
            found.take(optimizer)
        return found
    for name in OF_BACKEND:
        if options.get(name) is _DELETED:
            raise ElixirError(f"options[{name!r}] was deleted: keep it alive")
    if model is None:
        model = _holding(named, known)
    return RegionSession(model, optimizer, read)


def _read(options: Mapping[str, Any]) -> Options:
    for name in OF_COMPILE:
        if options.get(name) is not None:
            raise ElixirError(f"option {name!r} belongs to elixir_fx.compile(), not to the backend")
    read = read_options(options, "the backend", OF_BACKEND)
    check_disk(read)
    return read


def _check(model: object, optimizer: object, options: Options) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise ElixirError(f"options['model'] is a {type(model).__name__}, not an nn.Module")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ElixirError(
            f"options['optimizer'] is a {type(optimizer).__name__}, not a torch.optim optimizer"
        )
    if isinstance(model, nn.Module) and is_meta(model):
        raise ElixirError("options['model'] is on meta: the backend trains models that have values")
    if model is None and optimizer is None and (options.memory or options.disk):
        raise ElixirError(
            "options has a budget but neither 'model' nor 'optimizer': give the model, so that "
            "room can be kept for the regions that are still to come"
        )


def _holding(named: Sequence[tuple[str, nn.Parameter]], known: Sequence[nn.Parameter]) -> nn.Module:
    """A module that holds parameters of a model that we were not given, by their paths."""
    paths = {id(parameter): path for path, parameter in named}
    members = {id(p): p for p in (*(parameter for _, parameter in named), *known)}
    root = nn.Module()
    for number, (key, parameter) in enumerate(members.items()):
        *parents, name = paths.get(key, f"parameter_{number}").split(".")
        module = root
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        if name in module._parameters:
            name = f"{name}_{number}"
        module.register_parameter(name, parameter)
    return root


class State:
    """What the backend knows of a model: the plan, statistics, what each pass did."""

    def __init__(self, session: RegionSession) -> None:
        self._session = session

    @property
    def plan(self) -> Plan | None:
        """The plan in force; final after the first optimizer step."""
        return self._session.plan

    @property
    def history(self) -> list[Record]:
        """What each pass did to the last captured region."""
        return list(self._session.history)

    @property
    def regions(self) -> list[fx.GraphModule]:
        """The transformed forwards of the captured regions, in the order of their arrival."""
        return list(self._session.forwards)

    def stats(self) -> dict[str, float]:
        """Measurements of the last whole step, as `ElixirModule.stats()`."""
        return dict(self._session.stats.last)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Stream `optimizer`'s step. PlanError if it cannot be streamed."""
        self._session.bind(optimizer)


def state(model: nn.Module) -> State:
    """What the backend knows of `model`. ElixirError if it has compiled no region of it."""
    session = session_of(list(model.parameters()))
    if session is None:
        raise ElixirError(
            f"no region of {type(model).__name__} was compiled with backend='elixir_fx' yet"
        )
    return State(session)
