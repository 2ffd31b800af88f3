"""The optimizer's step, streamed: parts that are away pass through memory unit by unit.

`bind` hangs two hooks on the user's own optimizer object. The pre-hook runs the user's own
update (the class's `step`, with `param_groups` showing one unit at a time) on ordinary
tensors in a ring over the engine's arena: while a unit is updated the next one is fetched
and the one before goes home. Then it hides the gradients, so that the step which the hook
precedes finds nothing left to do, and the post-hook gives them back.

Numbers are those of the plain optimizer: every update runs on whole parameters, with the
options, the foreach or fused choice and the learning rate that the group has at that moment.
If that last, empty step is interrupted, the hidden gradients count as used: p.grad is None.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elixir_fx.errors import PlanError, TierError
from elixir_fx.plan import align
from elixir_fx.runtime.accumulation import version
from elixir_fx.runtime.away import Home, Source, Ticket
from elixir_fx.runtime.parameters import AwayTensor, lend, recall
from elixir_fx.runtime.probe import own_step, probe
from elixir_fx.runtime.shards import ShardedHome
from elixir_fx.runtime.store import TensorHome


class Entry(Protocol):
    """One managed parameter. A part whose home is None is an ordinary tensor."""

    @property
    def path(self) -> str: ...
    @property
    def value(self) -> Home | None: ...
    @property
    def gradient(self) -> Home | None: ...
    @property
    def states_away(self) -> bool: ...


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


@dataclass(eq=False)
class _Piece:
    """One tensor of a unit in the ring."""

    home: Home
    flat: Tensor
    view: Tensor
    writes: bool = False
    in_place: bool = False  # it is the home itself


@dataclass(eq=False)
class _Load:
    """The away parts of one parameter in the ring."""

    parameter: nn.Parameter
    entry: Entry
    value: _Piece | None = None
    gradient: _Piece | None = None
    states: dict[str, tuple[AwayTensor, _Piece]] = field(default_factory=dict)
    seen: Tensor | None = None  # p.grad as the user sees it
    lent: Tensor | None = None  # p.grad during the update
    lent_version: int = 0

    def pieces(self) -> Iterator[_Piece]:
        yield from (piece for piece in (self.value, self.gradient) if piece is not None)
        yield from (piece for _, piece in self.states.values())


@dataclass(eq=False)
class _Unit:
    """Parameters that are updated by one call, and the region of the ring they have."""

    parameters: list[nn.Parameter]
    start: int = 0
    end: int = 0
    loads: list[_Load] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    leaving: bool = False

    def wait(self) -> None:
        while self.tickets:
            self.tickets.pop(0).wait()


class _Ring:
    """Regions of the arena, given out in a circle; a region is taken again once it is home."""

    def __init__(self, arena: Tensor) -> None:
        self.arena = arena
        self.head = 0
        self.units: deque[_Unit] = deque()

    def reserve(self, unit: _Unit, nbytes: int) -> bool:
        """Give `unit` a region; False while a unit that is still at work is in the way."""
        start = self.head if self.head + nbytes <= self.arena.numel() else 0
        end = start + nbytes
        in_the_way = [old for old in self.units if old.start < end and start < old.end]
        if any(not old.leaving for old in in_the_way):
            return False
        for old in in_the_way:
            old.wait()
            self.units.remove(old)
        unit.start, unit.end, self.head = start, end, end
        self.units.append(unit)
        return True

    def drain(self) -> None:
        """Wait for everything under way, all of it even if some of it fails."""
        error: BaseException | None = None
        while self.units:
            unit = self.units[0]
            try:
                unit.wait()
            except TierError as failed:
                error = error or failed
            if not unit.tickets:
                self.units.popleft()
        if error is not None:
            raise error


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
                home.store(state.load() if isinstance(state, AwayTensor) else state)
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
        units = [
            _Unit([p for p in unit if p in live and p in entries]) for unit in self.engine.units()
        ]
        streamed = [unit for unit in units if unit.parameters]
        if streamed:
            with self.engine.update_memory() as arena:
                streamed = [part for unit in streamed for part in self._fitting(unit, arena)]
                self._stream(streamed, _Ring(arena), _Step(self.optimizer, args, kwargs))
        if rest:
            _Step(self.optimizer, args, kwargs)(rest)

    def _fitting(self, unit: _Unit, arena: Tensor) -> Iterator[_Unit]:
        """`unit`, in parts where it is more than the arena holds. Runs before any change."""
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
                yield _Unit(part)
                part, size = [], 0
            part.append(parameter)
            size += nbytes
        yield _Unit(part)

    def _homes(self, parameter: nn.Parameter) -> Iterator[tuple[str, Home, AwayTensor | None]]:
        """The away parts of `parameter` that an update reads: what, its home, its state. Of
        what several ranks share, this rank's elements."""
        entry = self.engine.entries[parameter]
        if entry.value is not None:
            yield "value", _own(entry.value), None
        if entry.gradient is not None and self.engine.gradient_is_home(parameter):
            yield "gradient", _own(entry.gradient), None
        if parameter in self.optimizer.state:
            for name, state in self.optimizer.state[parameter].items():
                if isinstance(state, AwayTensor):
                    yield name, _own(state.source.home), state

    def _nbytes(self, parameter: nn.Parameter) -> int:
        """What the ring must hold of it; nothing of what is in device memory already."""
        homes = (home for _, home, _ in self._homes(parameter) if in_place(home) is None)
        return sum(align(_bytes(home)) for home in homes)

    def _stream(self, units: Sequence[_Unit], ring: _Ring, step: "_Step") -> None:
        following = deque(units)
        current: _Unit | None = None
        try:
            while following or current is not None:
                if current is None:
                    current = following.popleft()
                    reserved = self._fetch(current, ring)
                    assert reserved, "nothing is at work in the ring"
                ahead = following[0] if following and self._fetch(following[0], ring) else None
                current.wait()
                self._step_unit(current, step)
                current.leaving = True
                current = following.popleft() if ahead is not None else None
        finally:
            ring.drain()

    def _fetch(self, unit: _Unit, ring: _Ring) -> bool:
        """Start to read a unit into the ring; False if it has no room yet."""
        if not ring.reserve(unit, sum(map(self._nbytes, unit.parameters))):
            return False
        offset = unit.start
        for parameter in unit.parameters:
            load = _Load(parameter, self.engine.entries[parameter])
            unit.loads.append(load)
            for name, home, state in self._homes(parameter):
                there = in_place(home)
                if there is None:
                    flat = ring.arena[offset : offset + _bytes(home)].view(home.dtype)
                    offset += align(_bytes(home))
                    unit.tickets.append(home.fetch(flat))
                else:
                    flat = there
                piece = _Piece(home, flat, home.view(flat), in_place=there is not None)
                if state is not None:
                    load.states[name] = (state, piece)
                elif name == "value":
                    load.value = piece
                else:
                    load.gradient = piece
        return True

    def _step_unit(self, unit: _Unit, step: "_Step") -> None:
        """Update one unit on ordinary tensors and start to send home what changed."""
        try:
            for load in unit.loads:
                self._lend(load)
            step(set(unit.parameters))
            for load in unit.loads:
                self._collect(load)
        finally:
            for load in unit.loads:
                self._recall(load)
        for load in unit.loads:
            unit.tickets += [
                piece.home.put(piece.flat)
                for piece in load.pieces()
                if piece.writes and not piece.in_place
            ]
            self.adopt(load.parameter)
        self.engine.updated(unit.parameters)

    def _lend(self, load: _Load) -> None:
        parameter = load.parameter
        load.seen = parameter.grad
        if load.value is not None:
            parameter.grad = None  # it has the shape of the whole
            lend(parameter, load.value.view)
        if load.gradient is not None:
            # With a version counter of its own: views of the arena share one.
            parameter.grad = load.gradient.view.data
        elif load.seen is not None:
            parameter.grad = self._ordinary_gradient(load.entry, load.seen)
        load.lent = parameter.grad
        load.lent_version = version(load.lent) if load.lent is not None else 0
        for name, (_, piece) in load.states.items():
            self.optimizer.state[parameter][name] = piece.view

    @staticmethod
    def _ordinary_gradient(entry: Entry, seen: Tensor) -> Tensor:
        """A p.grad that is not at home, as the update reads it."""
        value = seen.snapshot() if isinstance(seen, AwayTensor) else seen
        if isinstance(entry.value, ShardedHome):
            return entry.value.elements(value)
        return value

    def _collect(self, load: _Load) -> None:
        """Note what the update wrote, also where it put a new tensor in place of ours."""
        parameter = load.parameter
        if load.value is not None:
            if parameter.data_ptr() != load.value.view.data_ptr():
                load.value.view.copy_(parameter.detach())
            load.value.writes = True
        if load.gradient is not None and load.lent is not None:
            load.gradient.writes = version(load.lent) != load.lent_version and not any(
                group.get("fused") for group in self.optimizer.param_groups
            )
            # Fused kernels claim to write the gradient; only unscaling does.
            load.gradient.writes |= getattr(self.optimizer, "grad_scale", None) is not None
        states = self.optimizer.state[parameter] if load.states else {}
        if isinstance(load.entry.value, ShardedHome):
            self._adopt_shares(parameter, set(load.states))
        for name, (_, piece) in load.states.items():
            found = states.get(name)
            if found is not piece.view and isinstance(found, Tensor):
                if found.shape != piece.view.shape or found.dtype != piece.view.dtype:
                    continue
                piece.view.copy_(found)
                states[name] = piece.view
            piece.writes = found is not None

    def _adopt_shares(self, parameter: nn.Parameter, known: Collection[str]) -> None:
        """New states of a lent part of a parameter: they are parts of whole states."""
        states = self.optimizer.state.get(parameter, {})
        for name, state in states.items():
            if name not in known and is_elementwise(state, parameter):
                home = self.engine.state_home(parameter, name, state)
                _own(home).store(state)
                states[name] = AwayTensor(self.engine.watched(Source(home)))

    def _recall(self, load: _Load) -> None:
        parameter = load.parameter
        states = self.optimizer.state[parameter] if load.states else {}
        for name, (state, piece) in load.states.items():
            if states.get(name) is piece.view:
                states[name] = state
        returned = load.seen if parameter.grad is load.lent else parameter.grad
        if load.value is not None:
            parameter.grad = None
            recall(parameter, changed=load.value.writes)
        parameter.grad = returned


class _Step:
    """The optimizer's own update, on some of its parameters at a time."""

    def __init__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.optimizer, self.args, self.kwargs = optimizer, args, kwargs

    def __call__(self, chosen: Collection[nn.Parameter]) -> None:
        """Run it; the groups' dicts are the same objects, only "params" is shorter."""
        optimizer = self.optimizer
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = [p for p in parameters if p in chosen]
            optimizer.param_groups = [group for group in groups if group["params"]]
            own_step(optimizer)(*self.args, **self.kwargs)
        finally:
            optimizer.param_groups = groups
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters


def bind(optimizer: Optimizer, engine: Engine) -> Binding:
    """Stream the steps of `optimizer` through `engine`'s memory from now on.

    States that exist already move to their homes. PlanError for an optimizer that needs all
    parameters at once (LBFGS), that is differentiable, or that cannot be probed, if anything
    of its parameters is away.
    """
    return Binding(optimizer, engine)


def _own(home: Home) -> Home:
    """What this rank has of a home."""
    return home.own if isinstance(home, ShardedHome) else home


def is_sharded(entry: Entry) -> bool:
    """Whether this rank has a part of the parameter only."""
    return isinstance(entry.value, ShardedHome)


def in_place(home: Home) -> Tensor | None:
    """The value itself, flat, where a home is in device memory."""
    return home.memory if isinstance(home, TensorHome) else None


def _bytes(home: Home) -> int:
    return home.span * home.dtype.itemsize


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
