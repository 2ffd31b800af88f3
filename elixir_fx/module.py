"""The compiled model: a GraphModule that wraps the user's module and shows what was made of it.

Same parameters under the same names, same submodules, attributes and methods as the original.
Calling it goes through the guarded step; its `graph` is the transformed forward of the last
training capture, `backward_module` the backward.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from elixir_fx.errors import ElixirError
from elixir_fx.guarded import GuardedSession
from elixir_fx.plan import Plan
from elixir_fx.runtime.checkpoint import full_state
from elixir_fx.runtime.tracing import calls_through
from elixir_fx.step import NOTE, Record

# What wrappers ask of a module before they wrap it.
_WRAPPERS = {
    "_ddp_params_and_buffers_to_ignore": "DistributedDataParallel",
    "_initialize_hook": "torch.compile",
}


class ElixirModule(fx.GraphModule):
    """What `elixir_fx.compile()` returns; see the module's docstring.

    `.graph`, `.code` and `print_readable()` show the transformed forward, `.backward_module`
    the backward, `.plan` what was decided, `.history` what each pass did, `.stats()` the last
    step. Attributes that it does not have are the original's, and so are those set on it.
    """

    def __init__(self, session: GuardedSession) -> None:
        original = session.model
        super().__init__({"original": original}, _original_call())
        # One set of parameters, buffers, submodules and hooks, held by two modules.
        for name in nn.Module().__dict__:
            if name != "training":
                self.__dict__[name] = original.__dict__[name]
        self.__dict__["_session"] = session
        self.__dict__["_shown"] = None
        self.__dict__["_original"] = original

    # -- the call --------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._session.call(args, kwargs)

    def recompile(self) -> Any:
        """Regenerate the shown code. What runs is the guarded step, not this code."""
        code = super().recompile()
        kind: Any = type(self)
        kind.forward = ElixirModule._run
        kind.__call__ = ElixirModule._run
        return code

    # -- what can be looked at -------------------------------------------------------------

    @property
    def graph(self) -> fx.Graph:
        """The transformed forward of the last training capture; one call of the original
        before there was one."""
        self._show()
        return self._graph

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        fx.GraphModule.graph.fset(self, graph)  # type: ignore[attr-defined]

    def _show(self) -> None:
        session = self.__dict__.get("_session")
        if session is not None and session.shown is not self.__dict__["_shown"]:
            self.__dict__["_shown"] = session.shown
            self.graph = copy.copy(session.shown.forward).graph

    @property
    def code(self) -> str:
        """The transformed forward as Python."""
        self._show()
        return super().code

    def print_readable(self, *args: Any, **kwargs: Any) -> str:
        """As GraphModule.print_readable, with our notes above our nodes."""
        self._show()
        kwargs.setdefault("additional_meta", [NOTE])
        return super().print_readable(*args, **kwargs)

    @property
    def backward_module(self) -> fx.GraphModule | None:
        """The transformed backward of the last training capture."""
        shown = self._session.shown
        return shown.backward if shown is not None else None

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first capture."""
        session: GuardedSession = self._session
        return session.plan

    @property
    def history(self) -> list[Record]:
        """What each pass did to the last captured step."""
        return list(self._session.history)

    def stats(self) -> dict[str, float]:
        """Measurements of the last whole step, by the names that Forecast has too."""
        return dict(self._session.stats.last)

    # -- training --------------------------------------------------------------------------

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Stream `optimizer`'s step chunk by chunk. PlanError if it cannot be streamed."""
        self._session.bind(optimizer)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ over the model's parameters: on every rank the norm of
        the whole gradients, each element counted once."""
        return nn.utils.clip_grad_norm_(
            self.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add this rank's own gradients up without summing them over the ranks;
        the next backward outside sums them all. Takes the memory of whole gradients. In one
        process there is nothing to do."""
        session: GuardedSession = self._session
        return session.no_sync()

    def train(self, mode: bool = True) -> "ElixirModule":
        self._original.train(mode)
        return self

    @property
    def training(self) -> bool:
        """The original's flag."""
        original = self.__dict__.get("_original")
        return True if original is None else bool(original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:
            self._original.training = mode

    # -- state -----------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Full values under the original names: ordinary CPU tensors that alias nothing live.

        Past what the memory budget leaves free they map an unlinked file on the disk tier.
        """
        state = self._original.state_dict(*args, **kwargs)
        keep_vars = kwargs.get("keep_vars", args[2] if len(args) > 2 else False)
        if keep_vars:
            return state
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        first = _first_names(self._original, prefix)
        entries = [
            (name, value.detach)
            for name, value in state.items()
            if isinstance(value, Tensor) and first.get(name, name) == name
        ]
        full = full_state(
            entries,
            in_memory_bytes=self._session.free_bytes(),
            folder=self._session.options.disk,
        )
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = full[first.get(name, name)]
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Copy values into the parameters, wherever they live. `assign=True` copies too: the
        parameters stay the objects that the optimizer knows."""
        return self._original.load_state_dict(state_dict, strict=strict, assign=False)

    def __deepcopy__(self, memo: Any) -> Any:
        """A plain model with the current weights."""
        return copy.deepcopy(self._original, memo)

    def __copy__(self) -> NoReturn:
        raise ElixirError("a compiled model has no shallow copy; deepcopy gives a plain model")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ElixirError(
            "a compiled model cannot be pickled: use elixir_fx.save(folder, model, optimizer), "
            "or torch.save(model.state_dict(), path)"
        )

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the model is compiled."""
        raise ElixirError(_refusal("torch.compile"))

    def share_memory(self) -> NoReturn:
        """Refused: other processes cannot reach the homes of parameters."""
        raise ElixirError(
            "the parameters of a compiled model cannot be shared between processes: share "
            "copy.deepcopy(model), a plain model with the current weights"
        )

    def _get_name(self) -> str:
        return f"ElixirModule of {type(self._original).__name__}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ElixirModule":
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device != probe.device:
                raise ElixirError(
                    f"{name} would become {moved.dtype} on {moved.device}: move or cast the "
                    "model before elixir_fx.compile"
                )
        return self

    # -- everything else is the original's -------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name in _WRAPPERS:
            raise ElixirError(_refusal(_WRAPPERS[name]))
        original = self.__dict__.get("_original")
        if original is None:
            return super().__getattr__(name)
        found = getattr(original, name)
        if isinstance(found, MethodType) and found.__self__ is original:
            return _routed(found, self)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PROPERTIES:
            super().__setattr__(name, value)
        elif name in self.__dict__ or name == "original":  # the graph's name for the user's module
            self.__dict__[name] = value
        elif "_original" not in self.__dict__:  # GraphModule's constructor is at work
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._original)

    def __getitem__(self, key: Any) -> Any:
        return self._original[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._original)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._original)})


def _routed(method: MethodType, compiled: ElixirModule) -> Callable[..., Any]:
    """A method of the original in which calls of the model itself, `self(...)`, are captured
    steps: `generate()` runs under the plan like any other call."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = None if compiled._session.is_full else compiled._run
        with calls_through(compiled._original, call):
            return method(*args, **kwargs)

    return run


_PROPERTIES = frozenset({"graph", "training"})


def _refusal(wrapper: str) -> str:
    return (
        f"{wrapper} around a compiled model is refused: elixir_fx.compile already does its work; "
        "wrap nothing, or compile the plain model"
    )


def _original_call() -> fx.Graph:
    """What is shown before a capture: one call of the original."""
    graph = fx.Graph()
    args = graph.placeholder("*args")
    kwargs = graph.placeholder("**kwargs")
    graph.output(graph.call_module("original", (args,), {"kwargs": kwargs}))
    return graph


def _first_names(model: nn.Module, prefix: str) -> dict[str, str]:
    """For every name of a tied parameter or buffer, the first of its names."""
    first: dict[int, str] = {}
    names = {}
    for members in (
        model.named_parameters(prefix.rstrip("."), remove_duplicate=False),
        model.named_buffers(prefix.rstrip("."), remove_duplicate=False),
    ):
        for name, tensor in members:
            names[name] = first.setdefault(id(tensor), name)
    return names
