"""Moving a model's training state from one layout to another, between two steps.

For a call that does not fit the layout in force: a larger batch than the one it was planned
for. What people hold (parameters, gradients, states and views of them) stays the same
objects: only the home that their source reads changes. One tensor at a time is in memory.
"""

import weakref

from torch import nn
from torch.optim import Optimizer

from elixir_fx.runtime.engine import Engine
from elixir_fx.runtime.gradients import Entry
from elixir_fx.runtime.parameters import AwayParameter, AwayTensor, ChunkGradient, settle


def migrate(old: Engine, new: Engine, optimizer: Optimizer | None) -> None:
    """Move every value, gradient and state that `old` keeps away to the homes of `new`.

    What is an ordinary tensor and has a home in `new` moves there too; optimizer states do when
    the optimizer is bound to `new`. TierError if a tier fails: then both must be kept.
    """
    for parameter in old.parameters:
        entry = new.entries.get(parameter)
        _move_value(parameter, entry, new)
        _move_gradient(parameter, entry)
        if optimizer is not None and parameter in optimizer.state:
            _move_states(parameter, entry, new, optimizer)


def _move_value(parameter: nn.Parameter, entry: Entry | None, new: Engine) -> None:
    home = entry.value if entry is not None else None
    if not isinstance(parameter, AwayParameter):
        if home is not None:
            new.move_home(parameter, parameter.data)
        return
    value = parameter.base.load()
    if home is None:
        settle(parameter, value)
        return
    home.store(value)
    parameter.base.source.home = home
    new.adopt(parameter)


def _move_gradient(parameter: nn.Parameter, entry: Entry | None) -> None:
    gradient = parameter.grad
    if not isinstance(gradient, ChunkGradient):
        return
    value = gradient.load()
    if entry is None or entry.gradient is None or gradient.views:
        gradient.source.keep()
        parameter.grad = value
        return
    entry.gradient.store(value)
    gradient.source.home = entry.gradient
    entry.held = weakref.ref(gradient.source)


def _move_states(
    parameter: nn.Parameter, entry: Entry | None, new: Engine, optimizer: Optimizer
) -> None:
    states = optimizer.state[parameter]
    for name, state in states.items():
        if not isinstance(state, AwayTensor):
            continue
        value = state.load()
        if entry is None or not entry.states_away or state.views:
            state.source.keep()
            states[name] = value
            continue
        home = new.state_home(parameter, name, value)
        home.store(value)
        state.source.home = home
