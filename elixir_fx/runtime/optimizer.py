"""The optimizer's step, streamed: parts that are away pass through memory unit by unit.

`bind` hangs two hooks on the user's own optimizer object. The pre-hook runs the user's own
update (the class's `step`, with `param_groups` showing one unit at a time) on ordinary
tensors in a ring over the engine's arena: while a unit is updated the next one is fetched
and the one before goes home. A unit that is at home on the host and is updated there does not
move: its update runs, in its turn, on the memory that it is at home in, which costs the ring
nothing. Then the pre-hook hides the gradients, so that the step which the hook precedes finds
nothing left to do, and the post-hook gives them back.

Numbers are those of the plain optimizer: every update runs on whole parameters, with the
options, the foreach or fused choice and the learning rate that the group has at that moment.
If that last, empty step is interrupted, the hidden gradients count as used: p.grad is None.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elixir_fx.errors import PlanError, TierError
from elixir_fx.plan import align
from elixir_fx.runtime.away import Home, Source
from elixir_fx.runtime.lending import PartialStep, collect, hide, show
from elixir_fx.runtime.parameters import AwayTensor
from elixir_fx.runtime.probe import probe
from elixir_fx.runtime.ring import (
    Entry,
    Load,
    Piece,
    Ring,
    Unit,
    host_memory,
    in_place,
    is_on_host,
    nbytes_of,
    own,
)
from elixir_fx.runtime.shards import ShardedHome


class Engine(Protocol):
    """What streaming needs of the runtime."""

    @property
    def entries(self) -> Mapping[nn.Parameter, Entry]:
        """Parameters with anything away."""

    def units(self) -> Sequence[Sequence[nn.Parameter]]:
        """Parameters that stream together, in order."""

    def state_home(self, parameter: nn.Parameter, name: str, like: Tensor) -> Home:
        """The home of a state; allocated at the first call."""

    def watched(self, source: Source) -> Source:
        """`source`, a new one, which the engine may have to move when its homes change."""

    def update_memory(self) -> AbstractContextManager[Tensor]:
        """The arena as bytes, for the time of an update."""

    def updated(self, parameters: Sequence[nn.Parameter]) -> None:
        """A unit has been updated."""

    def gradient_is_home(self, parameter: nn.Parameter) -> bool:
        """Whether p.grad is what the gradient's home holds."""


class Binding:
    """An optimizer whose step is streamed. Made by `bind`, undone by `unbind`."""

    def __init__(self, optimizer: Optimizer, engine: Engine) -> None:
        self.optimizer = optimizer
        self.engine = engine
        self._inside = False
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._check()
        self._take_off = attach_step_hooks(optimizer, self._before, self._after)
        self._removable = [
            optimizer.register_state_dict_post_hook(_ordinary_state_dict, prepend=True),
            optimizer.register_load_state_dict_post_hook(lambda _: self.adopt_all()),
        ]
        try:
            self.adopt_all()
        except TierError:
            self.unbind()
            raise

    def adopt(self, parameter: nn.Parameter) -> None:
        """Move the states of `parameter` that are ordinary tensors to their homes."""
        entry = self.engine.entries.get(parameter)
        if entry is None or not entry.states_away or parameter not in self.optimizer.state:
            return
        states = self.optimizer.state[parameter]
        for name, state in states.items():
            at_home = isinstance(state, AwayTensor) and not state.views
            if is_elementwise(state, parameter) and not at_home:
                home = self.engine.state_home(parameter, name, state)
                _keep(entry, home, state.load() if isinstance(state, AwayTensor) else state)
                states[name] = AwayTensor(self.engine.watched(Source(home)))

    def adopt_all(self) -> None:
        """`adopt` for every managed parameter of the optimizer."""
        for parameter in self._parameters():
            self.adopt(parameter)

    def unbind(self) -> None:
        """Take the hooks off and make every state an ordinary tensor again."""
        self._take_off()
        for handle in self._removable:
            handle.remove()
        for states in self.optimizer.state.values():
            for name, state in states.items():
                if isinstance(state, AwayTensor):
                    state.source.keep()  # its home may become another state's
                    states[name] = state.load()

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _check(self) -> None:
        """PlanError for an optimizer that cannot be run one unit at a time."""
        entries = self.engine.entries
        away = [entries[p].path for p in self._parameters() if p in entries]
        if not away:
            return
        name = type(self.optimizer).__name__
        if any(group.get("differentiable") for group in self.optimizer.param_groups):
            raise PlanError(
                f"{name}(differentiable=True) needs every parameter in memory, and {away[0]} and "
                f"{len(away) - 1} others are away. Use differentiable=False"
            )
        facts = probe(self.optimizer)
        shared = [p for p in self._parameters() if p in entries and is_sharded(entries[p])]
        if shared and not facts.elementwise:
            raise PlanError(
                f"{name} needs parameters whole, and {entries[shared[0]].path} and "
                f"{len(shared) - 1} others are cut between the ranks. Give it to "
                "elixir_fx.compile, which then keeps what it trains whole on every rank"
            )
        if facts.global_state:
            raise PlanError(
                f"{name} needs all parameters at once, and {away[0]} and {len(away) - 1} others "
                "are away. Give a larger memory budget or another optimizer"
            )

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Pre-hook of the step: the closure, then the whole update, then hide the gradients."""
        if self._inside:
            return None
        self._hidden.clear()
        entries = self.engine.entries
        if not any(parameter in entries for parameter in self._parameters()):
            return None
        if any(group.get("differentiable") for group in optimizer.param_groups):
            self._check()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if "closure" in kwargs:
                kwargs = {**kwargs, "closure": lambda: loss}
            else:
                args = (args[0], lambda: loss, *args[2:])
        self._inside = True
        try:
            self._update(args, kwargs)
        finally:
            self._inside = False
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None
        return args, kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Post-hook of the step: the gradients are seen again."""
        if self._inside:
            return
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def _update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entries = self.engine.entries
        live = {parameter for parameter in self._parameters() if parameter.grad is not None}
        rest = {parameter for parameter in live if parameter not in entries}
        for parameter in live - rest:
            self.adopt(parameter)  # a state that the user replaced
        step = PartialStep(self.optimizer, args, kwargs)
        chosen = [[p for p in unit if p in live and p in entries] for unit in self.engine.units()]
        units = [Unit(unit, on_host=entries[unit[0]].on_host) for unit in chosen if unit]
        if units:
            with self.engine.update_memory() as arena:
                fitting = [part for unit in units for part in self._fitting(unit, arena)]
                self._stream(fitting, Ring(arena), step)
        if rest:
            step({parameter: parameter for parameter in rest})

    def _fitting(self, unit: Unit, arena: Tensor) -> Iterator[Unit]:
        """`unit`, in parts where it is more than the arena holds. Runs before any change."""
        if unit.on_host:
            for parameter in unit.parameters:
                self._check_on_host(parameter)
            yield unit
            return
        part: list[nn.Parameter] = []
        size = 0
        for parameter in unit.parameters:
            nbytes = self._nbytes(parameter)
            if nbytes > arena.numel():
                path = self.engine.entries[parameter].path
                raise TierError(
                    f"updating {path} needs {nbytes / 2**20:.1f} MiB of device memory at once, "
                    f"{arena.numel() / 2**20:.1f} MiB are planned. The plan was made for another "
                    "optimizer: call compiled.bind(optimizer) before the first step"
                )
            if part and size + nbytes > arena.numel():
                yield Unit(part)
                part, size = [], 0
            part.append(parameter)
            size += nbytes
        yield Unit(part)

    def _check_on_host(self, parameter: nn.Parameter) -> None:
        for name, home, _ in self._homes(parameter):
            if not is_on_host(home):
                raise TierError(
                    f"{self.engine.entries[parameter].path} is updated on the host, and its {name} "
                    "is not at home there: give the optimizer an ordinary tensor"
                )

    def _homes(self, parameter: nn.Parameter) -> Iterator[tuple[str, Home, AwayTensor | None]]:
        """The away parts of `parameter` that an update reads: what, its home, its state. Of
        what several ranks share, this rank's elements."""
        entry = self.engine.entries[parameter]
        if entry.value is not None:
            yield "value", own(entry.value), None
        if entry.gradient is not None and self.engine.gradient_is_home(parameter):
            yield "gradient", own(entry.gradient), None
        if parameter in self.optimizer.state:
            for name, state in self.optimizer.state[parameter].items():
                if isinstance(state, AwayTensor):
                    yield name, own(state.source.home), state

    def _nbytes(self, parameter: nn.Parameter) -> int:
        """What the ring must hold of it; nothing of what is in device memory already."""
        homes = (home for _, home, _ in self._homes(parameter) if in_place(home) is None)
        return sum(align(nbytes_of(home)) for home in homes)

    def _stream(self, units: Sequence[Unit], ring: Ring, step: PartialStep) -> None:
        """Update every unit, in order. While one is updated the next one that passes through the
        ring is on its way, also past units that are updated on the host."""
        to_fetch = deque(unit for unit in units if not unit.on_host)
        coming: Unit | None = None
        try:
            for unit in units:
                if unit is coming:
                    coming = None
                elif not unit.on_host:
                    reserved = self._fetch(to_fetch.popleft(), ring)
                    assert reserved, "nothing is at work in the ring"
                if coming is None and to_fetch and self._fetch(to_fetch[0], ring):
                    coming = to_fetch.popleft()
                if unit.on_host:
                    self._look_at(unit)
                unit.wait()
                self._step_unit(unit, step)
                unit.leaving = True
        finally:
            ring.drain()

    def _fetch(self, unit: Unit, ring: Ring) -> bool:
        """Start to read a unit into the ring; False if it has no room yet."""
        if not ring.reserve(unit, sum(map(self._nbytes, unit.parameters))):
            return False
        offset = unit.start
        for load in self._loads(unit):
            for name, home, state in self._homes(load.parameter):
                there = in_place(home)
                if there is None:
                    flat = ring.arena[offset : offset + nbytes_of(home)].view(home.dtype)
                    offset += align(nbytes_of(home))
                    unit.tickets.append(home.fetch(flat))
                else:
                    flat = there
                load.hold(
                    name, Piece(home, flat, home.view(flat), in_place=there is not None), state
                )
        return True

    def _look_at(self, unit: Unit) -> None:
        """The pieces of a unit on the host: the memory that they are at home in."""
        for load in self._loads(unit):
            for name, home, state in self._homes(load.parameter):
                flat = host_memory(home)
                assert flat is not None, "checked before any change"
                load.hold(name, Piece(home, flat, home.view(flat), in_place=True), state)

    def _loads(self, unit: Unit) -> list[Load]:
        entries = self.engine.entries
        unit.loads = [
            Load(parameter, entries[parameter], parameter) for parameter in unit.parameters
        ]
        return unit.loads

    def _step_unit(self, unit: Unit, step: PartialStep) -> None:
        """Update one unit on ordinary tensors and start to send home what changed."""
        try:
            for load in unit.loads:
                show(load, self.optimizer)
            step.update(unit)
            for load in unit.loads:
                collect(load, self.optimizer)
                if is_sharded(load.entry):
                    self._adopt_shares(load)
        finally:
            for load in unit.loads:
                hide(load, self.optimizer)
        for load in unit.loads:
            unit.tickets += [
                piece.home.put(piece.flat)
                for piece in load.pieces()
                if piece.writes and not piece.in_place
            ]
            self.adopt(load.parameter)
        self.engine.updated(unit.parameters)

    def _adopt_shares(self, load: Load) -> None:
        """New states of a shown part of a parameter: they are parts of whole states."""
        parameter = load.parameter
        states = self.optimizer.state.get(parameter, {})
        for name, state in states.items():
            if name not in load.states and is_elementwise(state, load.shown):
                home = self.engine.state_home(parameter, name, state)
                _keep(load.entry, own(home), state)
                states[name] = AwayTensor(self.engine.watched(Source(home)))


def bind(optimizer: Optimizer, engine: Engine) -> Binding:
    """Stream the steps of `optimizer` through `engine`'s memory from now on.

    States that exist already move to their homes. PlanError for an optimizer that needs all
    parameters at once (LBFGS), that is differentiable, or that cannot be probed, if anything
    of its parameters is away.
    """
    return Binding(optimizer, engine)


def _keep(entry: Entry, home: Home, value: Tensor) -> None:
    """Write a state to its home; one of a chunk that is updated on the host, without a detour
    through the device."""
    memory = host_memory(home) if entry.on_host else None
    if memory is None:
        home.store(value)
    else:
        home.view(memory).copy_(value)


def is_sharded(entry: Entry) -> bool:
    """Whether this rank has a part of the parameter only."""
    return isinstance(entry.value, ShardedHome)


def is_elementwise(state: Any, parameter: nn.Parameter) -> bool:
    """Whether a state goes where the parameter's states go; counters and factors do not."""
    return isinstance(state, Tensor) and state.dim() > 0 and state.shape == parameter.shape


def _ordinary_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with tensors of its own on the CPU."""
    ordinary: dict[str, Any] = _ordinary(state_dict)
    ordinary["state"] = dict(sorted(ordinary["state"].items()))  # not in the order of chunks
    return ordinary


def _ordinary(value: Any) -> Any:
    if isinstance(value, AwayTensor):
        return value.snapshot().cpu()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _ordinary(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_ordinary(item) for item in value)
    return value


def attach_step_hooks(
    optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., Any]
) -> Callable[[], None]:
    """Run `before` as the last thing before each step of `optimizer`, `after` as the first
    one after it, whenever the user registers hooks of their own: those see the gradients.
    Returns what takes both off again."""
    pre = optimizer.register_step_pre_hook(before)
    post = optimizer.register_step_post_hook(after)
    cast(Any, optimizer._optimizer_step_post_hooks).move_to_end(post.id, last=False)

    def register(hook: Callable[..., Any]) -> Any:
        handle = type(optimizer).register_step_pre_hook(optimizer, hook)
        cast(Any, optimizer._optimizer_step_pre_hooks).move_to_end(pre.id)
        return handle

    optimizer.register_step_pre_hook = register  # type: ignore[method-assign]

    def remove() -> None:
        pre.remove()
        post.remove()
        optimizer.__dict__.pop("register_step_pre_hook", None)

    return remove
