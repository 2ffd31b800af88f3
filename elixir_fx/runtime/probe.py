"""What an optimizer keeps and needs, learned by stepping a copy of it on small tensors.

The planner reads the result (`OptimizerFacts`) before the first step, `optimizer.bind` to
know whether updates may run on one unit of parameters at a time.
"""

import inspect
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from elixir_fx.errors import PlanError
from elixir_fx.facts import OptimizerFacts
from elixir_fx.runtime.away import found

_ROWS = (64, 128)  # of the two sizes that tell scratch per element from scratch per step
_COLUMNS = 64
_STEPS = 2  # the first one makes the states, the second is measured
# Options that change neither states nor memory, so that groups differing in them are alike.
_RATES = frozenset({"params", "param_names", "lr", "initial_lr", "max_lr", "min_lr"})
# What the user's own optimizers may raise when they meet a parameter they were not made for.
_FAILURES = (
    RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError,
    ArithmeticError,
)  # fmt: skip


def own_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The class's `step` without the wrapper that runs the optimizer's hooks."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def probe(optimizer: Optimizer | str, dtypes: Iterable[torch.dtype] = ()) -> OptimizerFacts:
    """Learn an optimizer's states, scratch and traffic, in bytes per element of a parameter.

    `optimizer` is an object, which is left as it is, or a name such as "adamw" for planning
    without one. `dtypes` are those of the parameters that it will update; by default of the
    floating ones that it has, or float32. Each is learned apart. Where groups differ, the
    facts are those of the most demanding one.
    PlanError names an optimizer that cannot be stepped on an ordinary dense parameter.
    """
    if isinstance(optimizer, str):
        optimizer = named(optimizer)
    groups = optimizer.param_groups
    own = {p.dtype for group in groups for p in group["params"] if p.is_floating_point()}
    wanted = {dtype for dtype in dtypes if dtype.is_floating_point} or own or {torch.float32}
    facts = {
        dtype: _probe_dtype(optimizer, dtype)
        for dtype in sorted(wanted, key=lambda dtype: (-dtype.itemsize, str(dtype)))
    }
    widest = next(iter(facts.values()))
    if len(facts) == 1:
        return widest
    by_dtype = ((str(dtype).removeprefix("torch."), one) for dtype, one in facts.items())
    return replace(
        widest,
        elementwise=all(one.elementwise for one in facts.values()),
        global_state=any(one.global_state for one in facts.values()),
        foreach=any(one.foreach for one in facts.values()),
        by_dtype=tuple(by_dtype),
    )


def _probe_dtype(optimizer: Optimizer, dtype: torch.dtype) -> OptimizerFacts:
    kinds = {
        tuple(
            sorted((key, repr(value)) for key, value in group.items() if key not in _RATES)
        ): group
        for group in optimizer.param_groups
    }
    facts = [_probe_group(optimizer, group, dtype) for group in kinds.values()]
    return OptimizerFacts(
        name=type(optimizer).__name__,
        states=max(facts, key=lambda one: one.state_bytes).states,
        scratch_bytes=max(one.scratch_bytes for one in facts),
        read_bytes=max(one.read_bytes for one in facts),
        elementwise=all(one.elementwise for one in facts),
        global_state=any(one.global_state for one in facts),
        foreach=any(one.foreach for one in facts),
    )


def named(name: str) -> Optimizer:
    """An optimizer of torch's by its name in small letters. PlanError for an unknown one."""
    makers: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adamw_amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
        "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
        "adafactor": torch.optim.Adafactor,
        "adagrad": torch.optim.Adagrad,
        "adadelta": torch.optim.Adadelta,
        "adamax": torch.optim.Adamax,
        "lbfgs": torch.optim.LBFGS,
        "muon": torch.optim.Muon,
        "nadam": torch.optim.NAdam,
        "radam": torch.optim.RAdam,
        "rmsprop": torch.optim.RMSprop,
        "rprop": torch.optim.Rprop,
        "sgd": torch.optim.SGD,
        "sgd_momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    }
    if name not in makers:
        raise PlanError(
            f"no optimizer is called {name!r}; known names are {', '.join(sorted(makers))}. "
            "Or give the optimizer object"
        )
    return makers[name]([nn.Parameter(torch.zeros(2, 2))])


def _probe_group(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> OptimizerFacts:
    name = type(optimizer).__name__
    floats = [p for p in group["params"] if p.is_floating_point()]
    device = floats[0].device if floats else torch.device("cpu")
    device = torch.device("cpu") if device.type == "meta" else device
    if _needs_closure(optimizer):
        history = int(group.get("history_size", 1))
        states = (("history", (2 * history + 3) * dtype.itemsize),)
        return OptimizerFacts(
            name=name,
            states=states,
            scratch_bytes=3 * dtype.itemsize,
            read_bytes=2 * states[0][1],
            elementwise=False,
            global_state=True,
        )
    try:
        with torch.random.fork_rng(devices=[]):
            small, large = (
                _Trial(optimizer, group, [_values(rows, dtype, device)]) for rows in _ROWS
            )
            several = _Trial(optimizer, group, [_values(_ROWS[0], dtype, device)] * 4)
            halves = [
                _Trial(optimizer, group, [part])
                for part in _values(_ROWS[0], dtype, device).chunk(2)
            ]
    except _FAILURES as error:
        raise PlanError(
            f"{name} cannot be planned for: a step on a dense {dtype} parameter of "
            f"{_ROWS[0]} x {_COLUMNS} elements failed: {error}. Use an optimizer that can do this"
        ) from error
    elements = large.parameter.numel() - small.parameter.numel()
    tolerance = 1e-5 if dtype.itemsize >= 4 else 2e-2
    joined = torch.cat([half.parameter.detach() for half in halves])
    return OptimizerFacts(
        name=name,
        states=small.states(),
        scratch_bytes=max(0, math.ceil((large.meter.peak - small.meter.peak) / elements)),
        read_bytes=max(0, math.ceil((large.meter.traffic - small.meter.traffic) / elements)),
        elementwise=small.whole_states()
        and torch.allclose(joined, small.parameter.detach(), rtol=tolerance, atol=1e-8),
        global_state=small.global_state,
        foreach=several.meter.peak > 2 * small.meter.peak > 0,
    )


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(own_step(optimizer)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _values(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values whose two halves differ in size, so that an update over all of them shows."""
    ramp = torch.linspace(-1, 1, rows * _COLUMNS, device=device).view(rows, _COLUMNS).sin()
    ramp[rows // 2 :] *= 8
    return ramp.to(dtype)


def trial_copy(
    optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]
) -> Optimizer:
    """The optimizer with one group of its options, over other parameters and without states."""
    device = parameters[0].device
    copied: Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    options = {
        key: value.detach().to(device, copy=True) if isinstance(value, Tensor) else value
        for key, value in group.items()
    }
    if "capturable" in options and device.type == "cpu":
        options["capturable"] = False
    options["params"] = parameters
    copied.param_groups = [options]
    copied.state = defaultdict(dict)
    if isinstance(optimizer, torch.optim.Adagrad):  # its constructor makes the states
        for parameter in parameters:
            copied.state[parameter] = {
                "step": torch.tensor(0.0),
                "sum": torch.zeros_like(parameter, requires_grad=False),
            }
    return copied


class _Trial:
    """A copy of an optimizer after a few steps on parameters of these values."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], values: list[Tensor]) -> None:
        parameters = [nn.Parameter(value.clone()) for value in values]
        self.parameter = parameters[0]
        copied = trial_copy(optimizer, group, parameters)
        options = copied.param_groups[0]
        before = self._settings(copied)
        self.meter = _Meter()
        for step in range(_STEPS):
            for parameter, value in zip(parameters, values, strict=True):
                parameter.grad = value.cos() * value * (step + 1)
            self.meter = _Meter(
                [
                    *found((options, dict(copied.state)), Tensor),
                    *(parameter.grad for parameter in parameters if parameter.grad is not None),
                ]
            )
            with self.meter:
                own_step(copied)(copied)
        self.found = dict(copied.state.get(self.parameter, {}))
        strange = [key for key in copied.state if key not in set(parameters)]
        self.global_state = bool(strange) or before != self._settings(copied)

    @staticmethod
    def _settings(optimizer: Optimizer) -> dict[str, str]:
        """Options and public attributes, which an update of single parameters leaves alone."""
        plain = (bool, int, float, str, Tensor)
        return {
            name: repr(value)
            for source in (optimizer.param_groups[0], vars(optimizer))
            for name, value in source.items()
            if isinstance(value, plain) and not name.startswith("_")
        }

    def whole_states(self) -> bool:
        """Whether every state is of the parameter's shape or a counter."""
        return all(
            state.shape == self.parameter.shape or state.numel() == 1
            for state in found(self.found, Tensor)
        )

    def states(self) -> tuple[tuple[str, int], ...]:
        return tuple(
            (name, state.element_size())
            for name, state in self.found.items()
            if isinstance(state, Tensor) and state.shape == self.parameter.shape
        )


class _Meter(TorchFunctionMode):
    """Counts the memory born under it (`peak`) and what operations read and wrote (`traffic`)."""

    def __init__(self, known: list[Tensor] | None = None) -> None:
        super().__init__()
        self.peak = self.traffic = self._live = 0
        self._known = known or []  # held, so that their addresses stay theirs
        self._holders: dict[int, int] = {}
        self._seen: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            return result
        given, made = found((args, kwargs), Tensor), found(result, Tensor)
        addresses = {tensor.untyped_storage().data_ptr() for tensor in [*given, *self._known]}
        fresh = [t for t in made if t.untyped_storage().data_ptr() not in addresses]
        writes = name.endswith("_") and not name.endswith("__")
        if fresh or writes:
            written = found(args[0], Tensor) if writes and args else fresh
            if name.startswith("_fused_"):  # it writes all that it reads but the gradients
                written = [*written, *found(args[2:], Tensor)]
            self.traffic += sum(tensor.nbytes for tensor in [*given, *written])
        for tensor in made:
            self._hold(tensor)
        return result

    def _hold(self, tensor: Tensor) -> None:
        address, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        known = any(address == one.untyped_storage().data_ptr() for one in self._known)
        if known or not address or id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        if not self._holders.get(address):
            self._live += nbytes
            self.peak = max(self.peak, self._live)
        self._holders[address] = self._holders.get(address, 0) + 1
        weakref.finalize(tensor, self._drop, id(tensor), address, nbytes)

    def _drop(self, identity: int, address: int, nbytes: int) -> None:
        self._seen.discard(identity)
        self._holders[address] -= 1
        if not self._holders[address]:
            self._live -= nbytes
