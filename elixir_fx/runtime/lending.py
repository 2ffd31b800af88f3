"""How an optimizer's own update sees what is away, and what it leaves behind.

Stands between `ring` and `optimizer`. `show` gives the optimizer a unit's values, gradients and
states as ordinary tensors, `collect` notes what it wrote, `hide` takes them back; `PartialStep`
runs the update in between.

A unit in the ring is shown as the user's own parameters, which are ordinary ones for a moment.
One that is updated on the host is shown as stand-ins, parameters over the host memory that is
its home: the user's own would have to change their device, and PyTorch then drops the node that
accumulates their gradients, which graphs that are kept still need.

What moves to the CPU for the host's update of an accelerator's training (counters, tensor
options, a scaler's factors) was never moved where this was written: there both are one device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elixir_fx.runtime.accumulation import version
from elixir_fx.runtime.meter import uncounted
from elixir_fx.runtime.parameters import AwayTensor, lend, recall, rewritten, stand_in
from elixir_fx.runtime.probe import own_step
from elixir_fx.runtime.ring import Entry, Load, Unit
from elixir_fx.runtime.shards import ShardedHome


class PartialStep:
    """The optimizer's own update, on some of its parameters at a time."""

    def __init__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.optimizer, self.args, self.kwargs = optimizer, args, kwargs

    def __call__(self, shown: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Run it on what is shown of these parameters; the groups' dicts are the same objects,
        only "params" is shorter."""
        optimizer = self.optimizer
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = [shown[p] for p in parameters if p in shown]
            optimizer.param_groups = [group for group in groups if group["params"]]
            own_step(optimizer)(*self.args, **self.kwargs)
        finally:
            optimizer.param_groups = groups
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters

    def update(self, unit: Unit) -> None:
        """Run it on a unit whose loads are shown."""
        shown = {load.parameter: load.shown for load in unit.loads}
        if unit.on_host:
            with uncounted(), _on_the_cpu(self.optimizer, unit.parameters[0].device):
                self(shown)
        else:
            self(shown)


def show(load: Load, optimizer: Optimizer) -> None:
    """Let the optimizer see one parameter of a unit."""
    if load.entry.on_host:
        _stand_in(load, optimizer)
    else:
        _lend(load)
    load.lent = load.shown.grad
    load.lent_version = version(load.lent) if load.lent is not None else 0
    for name, (_, piece) in load.states.items():
        optimizer.state[load.parameter][name] = piece.view


def _lend(load: Load) -> None:
    parameter = load.parameter
    load.seen = parameter.grad
    if load.value is not None:
        parameter.grad = None  # it has the shape of the whole
        lend(parameter, load.value.view)
    if load.gradient is not None:
        # With a version counter of its own: views of the arena share one.
        parameter.grad = load.gradient.view.data
    elif load.seen is not None:
        parameter.grad = _ordinary_gradient(load.entry, load.seen)


def _stand_in(load: Load, optimizer: Optimizer) -> None:
    parameter, value = load.parameter, load.value
    assert value is not None, "what is updated on the host is at home there"
    load.seen = parameter.grad
    load.shown = stand_in(parameter, value.view)
    if load.gradient is not None:
        load.shown.grad = load.gradient.view.data
    elif load.seen is not None:
        load.ordinary = _ordinary_gradient(load.entry, load.seen)
        load.shown.grad = load.ordinary.to(load.shown.device)
    if parameter in optimizer.state:
        states = optimizer.state[parameter]
        optimizer.state[load.shown] = states
        for name, state in states.items():
            ordinary = isinstance(state, Tensor) and not isinstance(state, AwayTensor)
            if ordinary and state.device != load.shown.device:
                load.moved[name] = state.device
                states[name] = state.to(load.shown.device)


def _ordinary_gradient(entry: Entry, seen: Tensor) -> Tensor:
    """A p.grad that is not at home, as the update reads it."""
    value = seen.snapshot() if isinstance(seen, AwayTensor) else seen
    if isinstance(entry.value, ShardedHome):
        return entry.value.elements(value)
    return value


def collect(load: Load, optimizer: Optimizer) -> None:
    """Note what the update wrote, also where it put a new tensor in place of ours."""
    _take_states(load, optimizer)
    if load.value is not None:
        if load.shown.data_ptr() != load.value.view.data_ptr():
            load.value.view.copy_(load.shown.detach())
        load.value.writes = True
    if load.lent is not None:
        wrote = _wrote_gradient(load.lent, load.lent_version, optimizer)
        if load.gradient is not None:
            load.gradient.writes = wrote
        elif wrote and load.ordinary is not None and load.ordinary is not load.lent:
            load.ordinary.copy_(load.lent)  # the user's, which is elsewhere
    states = optimizer.state[load.parameter] if load.states else {}
    for name, (_, piece) in load.states.items():
        found = states.get(name)
        if found is not piece.view and isinstance(found, Tensor):
            if found.shape != piece.view.shape or found.dtype != piece.view.dtype:
                continue
            piece.view.copy_(found)
            states[name] = piece.view
        piece.writes = found is not None


def _take_states(load: Load, optimizer: Optimizer) -> None:
    """The states of a stand-in, also those it got just now, are the parameter's."""
    if load.shown is not load.parameter and load.shown in optimizer.state:
        optimizer.state[load.parameter] = optimizer.state.pop(load.shown)


def _wrote_gradient(lent: Tensor, before: int, optimizer: Optimizer) -> bool:
    fused = any(group.get("fused") for group in optimizer.param_groups)
    # Fused kernels claim to write the gradient; only unscaling does.
    unscaled = getattr(optimizer, "grad_scale", None) is not None
    return unscaled or (not fused and version(lent) != before)


def hide(load: Load, optimizer: Optimizer) -> None:
    """Everything is away again, and p.grad what the user saw, unless the update replaced it."""
    parameter = load.parameter
    _take_states(load, optimizer)
    states = optimizer.state.get(parameter, {})
    for name, (state, piece) in load.states.items():
        if states.get(name) is piece.view:
            states[name] = state
    if load.entry.on_host:
        _put_back(load, states, optimizer)
        return
    returned = load.seen if parameter.grad is load.lent else parameter.grad
    if load.value is not None:
        parameter.grad = None
        recall(parameter, changed=load.value.writes)
    parameter.grad = returned


def _put_back(load: Load, states: dict[str, Any], optimizer: Optimizer) -> None:
    parameter = load.parameter
    if load.value is not None and load.value.writes:
        rewritten(parameter)
    if load.shown is not parameter and load.shown.grad is not load.lent:
        held = load.shown.grad
        parameter.grad = None if held is None else held.to(parameter.device)
    on_device = any(g.get("fused") or g.get("capturable") for g in optimizer.param_groups)
    for name, state in states.items():
        if not isinstance(state, Tensor) or isinstance(state, AwayTensor):
            continue
        # Where it was; a new one, where the device's own update would have made it.
        if name in load.moved or (on_device and not state.dim()):
            states[name] = state.to(load.moved.get(name, parameter.device))


def _on_the_cpu(optimizer: Optimizer, device: torch.device) -> Any:
    return nullcontext() if device.type == "cpu" else _options_on_the_cpu(optimizer)


@contextmanager
def _options_on_the_cpu(optimizer: Optimizer) -> Iterator[None]:
    """For a while, tensors among the options and the factors of a scaler are on the CPU, and
    `capturable`, which the CPU does not know, is off. Copied here and at once: fused kernels
    would copy them without waiting for the copy to arrive."""
    places = [*optimizer.param_groups, optimizer.__dict__]
    before: list[tuple[dict[str, Any], str, Any]] = []
    for place in places:
        names = list(place) if place is not optimizer.__dict__ else ["grad_scale", "found_inf"]
        for name in names:
            value = place.get(name)
            if isinstance(value, Tensor) and value.device.type != "cpu":
                before.append((place, name, value))
                place[name] = value.cpu()
            elif name == "capturable" and value:
                before.append((place, name, value))
                place[name] = False
    try:
        yield
    finally:
        for place, name, value in before:
            place[name] = value
