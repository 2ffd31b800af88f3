"""Moving a model's training state from one layout to another, between two steps.

For a call that does not fit the layout in force: a larger batch than the one it was planned
for. What people hold of a parameter, gradient or state that is away stays the same object:
only the home that its source reads changes. What was an ordinary tensor and leaves does not
follow, as it does not when a model is compiled. One tensor at a time is read into memory.

The old homes keep every value until `commit`, so `undo` only points back at them.
"""

import weakref
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from elixir_fx.runtime.away import Home, Source
from elixir_fx.runtime.engine import Engine
from elixir_fx.runtime.gradients import Entry
from elixir_fx.runtime.optimizer import is_elementwise
from elixir_fx.runtime.parameters import AwayParameter, AwayTensor, ChunkGradient, away, settle


class Migration:
    """One move from an engine to another. Exactly one of `commit` and `undo` ends it."""

    def __init__(self, old: Engine, new: Engine, optimizer: Optimizer | None) -> None:
        self._old = old
        self._new = new
        self._optimizer = optimizer
        self._undo: list[Callable[[], object]] = []
        self._moved: set[Source] = set()

    def run(self) -> None:
        """Move every value, gradient and state to its home in the new layout. TierError if a
        tier fails."""
        for parameter in self._old.parameters:
            entry = self._new.entries.get(parameter)
            self._move_value(parameter, entry)
            self._move_gradient(parameter, entry)
            if self._optimizer is not None and parameter in self._optimizer.state:
                self._move_states(parameter, entry, self._optimizer)
        self._keep_what_was_taken_off()

    def commit(self) -> None:
        """The new layout is in force: the old homes are not needed any more."""
        self._undo.clear()

    def undo(self) -> None:
        """Everything is as it was before `run`. Moves nothing."""
        while self._undo:
            self._undo.pop()()

    def _point(self, source: Source, home: Home) -> None:
        before = source.home
        source.home = home
        self._new.watched(source)
        self._moved.add(source)
        self._undo.append(lambda: setattr(source, "home", before))

    def _keep(self, source: Source) -> None:
        """Hold a source's value in memory."""
        if source.tensor is None:
            source.keep()
            self._undo.append(lambda: setattr(source, "tensor", None))

    def _move_value(self, parameter: nn.Parameter, entry: Entry | None) -> None:
        home = entry.value if entry is not None else None
        if not isinstance(parameter, AwayParameter):
            if home is not None:
                value = parameter.data
                self._new.move_home(parameter, value)
                self._undo.append(lambda: settle(parameter, value))
            return
        source = parameter.base.source
        before = source.home
        if home is None:
            settle(parameter, parameter.base.load())
            self._undo.append(lambda: away(parameter, before, source))
            return
        home.store(source.load())
        self._point(source, home)
        self._new.adopt(parameter)

    def _move_gradient(self, parameter: nn.Parameter, entry: Entry | None) -> None:
        gradient = parameter.grad
        home = entry.gradient if entry is not None else None
        if gradient is None:
            return
        if not isinstance(gradient, ChunkGradient):
            if home is not None and not gradient.is_sparse:
                home.store(gradient)
                source = self._new.watched(Source(home))
                self._put_gradient(parameter, ChunkGradient(source), entry)
            return
        if home is None or gradient.views or gradient.source.tensor is not None:
            self._keep(gradient.source)
            self._put_gradient(parameter, gradient.load(), None)
            return
        home.store(gradient.load())
        self._point(gradient.source, home)
        assert entry is not None
        entry.held = weakref.ref(gradient.source)

    def _put_gradient(self, parameter: nn.Parameter, new: Tensor, entry: Entry | None) -> None:
        before = parameter.grad
        parameter.grad = new
        if entry is not None and isinstance(new, ChunkGradient):
            entry.held = weakref.ref(new.source)
        self._undo.append(lambda: setattr(parameter, "grad", before))

    def _move_states(
        self, parameter: nn.Parameter, entry: Entry | None, optimizer: Optimizer
    ) -> None:
        states = optimizer.state[parameter]
        for name, state in list(states.items()):
            leaves = entry is not None and entry.states_away and is_elementwise(state, parameter)
            undo = partial(states.update, {name: state})
            if isinstance(state, AwayTensor) and (not leaves or state.views):
                self._keep(state.source)
                states[name] = state.load()
                self._undo.append(undo)
            elif leaves:
                value = state.load() if isinstance(state, AwayTensor) else state
                home = self._new.state_home(parameter, name, value)
                home.store(value)
                if isinstance(state, AwayTensor):
                    self._point(state.source, home)
                else:
                    states[name] = AwayTensor(self._new.watched(Source(home)))
                    self._undo.append(undo)

    def _keep_what_was_taken_off(self) -> None:
        """Gradients and states that somebody holds though they are no parameter's any more."""
        for source in self._old.sources():
            if source not in self._moved:
                self._keep(source)
