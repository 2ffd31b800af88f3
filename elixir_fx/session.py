"""A session: one compiled model, from a call to a running step.

Ties the five verbs together. The first call captures and plans without running, then moves
the weights to their homes, outside of any tracing; only then does the step run. Later calls
go straight through the guards; a new graph is lowered onto the same layout.
"""

import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from elixir_fx.capture import (
    Capture,
    Lowered,
    ordinary_inputs,
    pretend_on,
    tangent_outputs,
)
from elixir_fx.codegen import Boxed, Halves, executable, is_activation, tangents_of_outputs
from elixir_fx.config import Options, limits
from elixir_fx.errors import ElixirError
from elixir_fx.facts import Facts, Role
from elixir_fx.lowering import Lowering, compute_device
from elixir_fx.plan import Plan
from elixir_fx.report.progress import Progress
from elixir_fx.runtime.engine import Engine
from elixir_fx.runtime.materialize import is_meta, materialize
from elixir_fx.runtime.measure import this_machine
from elixir_fx.runtime.optimizer import Binding, bind
from elixir_fx.runtime.probe import probe
from elixir_fx.runtime.parameters import plain
from elixir_fx.runtime.stats import Stats
from elixir_fx.runtime.store import Store
from elixir_fx.step import StepGraph


class _Captured(BaseException):
    """Stops a call between its capture and its first operation. Never leaves this file."""


class Session:
    """What a compiled model holds: its capture, plan, engine, optimizer and statistics."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | str | None,
        options: Options,
    ) -> None:
        self.model = model
        self.options = options
        self.device = compute_device(model)
        self.progress = Progress()
        self.machine = options.machine or this_machine(
            self.device, _disk_to_measure(options), threads=torch.get_num_threads()
        )
        self.lowering = Lowering(
            options=options,
            machine=self.machine,
            limits=limits(options, self.machine),
            optimizer=probe(optimizer) if optimizer is not None else None,
            progress=self.progress,
        )
        self.engine: Engine | None = None
        self.binding: Binding | None = None
        self.stats = Stats()
        self.shown: Halves | None = None  # of the last training capture
        self.steps: list[StepGraph] = []
        self._optimizer = None if isinstance(optimizer, str) else optimizer
        self._full = False
        self._local = threading.local()
        self._dry = False
        self._capture = Capture(
            model=model, lower=self._lower, enter=self._enter, leave=self._leave
        )

    @property
    def plan(self) -> Plan | None:
        return self.lowering.plan

    # -- a call ----------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model on these inputs through its captured step."""
        if self._full:
            raise ElixirError("the compiled model cannot be called inside full_parameters()")
        if self.engine is None and not self.prepare(args, kwargs):
            return self._capture(*args, **kwargs)  # nothing to plan: no tensor operation
        return self._guarded(args, kwargs)

    def _guarded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self.engine is not None
        with ExitStack() as stack:
            stack.enter_context(plain(self.engine.away))
            stacks = self._local.__dict__.setdefault("stacks", [])
            stacks.append(stack)
            try:
                return self._capture(*args, **kwargs)
            finally:
                stacks.pop()

    def _enter(self) -> None:
        """The guards hold and the step is about to run."""
        if self._dry:
            raise _Captured
        self._local.stacks[-1].close()

    def _leave(self, results: Any, step: StepGraph) -> None:
        """Learn, when the backward comes, which outputs took part in the loss."""
        tangents = tangent_outputs(step)
        if len(tangents) < 2:
            return
        node = next((r.grad_fn for r in results if isinstance(r, Tensor) and r.grad_fn), None)
        if node is None:
            return
        session = weakref.ref(self)

        def before_backward(gradients: Sequence[Tensor | None]) -> None:
            alive = session()
            if alive is not None:
                alive._local.undefined = frozenset(
                    index
                    for index, output in enumerate(tangents)
                    if output is not None and gradients[output] is None
                )

        node.register_prehook(before_backward)

    # -- capture and start-up --------------------------------------------------------------

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Capture, plan and move the weights for these inputs, running nothing.

        The layout is made from the training graph wherever something requires grad. False
        where the call has no tensor operation to plan. Errors leave the model as it was.
        """
        with self.progress:
            if not self._capture_only(args, kwargs):
                return False
            self._settle()
        if self._optimizer is not None:
            self.bind(self._optimizer)
        return True

    def plan_only(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan | None:
        """The plan for these inputs; the model is left as it is."""
        with self.progress:
            self._capture_only(args, kwargs)
        return self.plan

    def facts_only(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
        """The facts of the step for these inputs, whatever the budgets."""
        self.lowering.limits = replace(self.lowering.limits, device=sys.maxsize)
        self.plan_only(args, kwargs)
        self.lowering.limits = limits(self.options, self.machine)
        if not self.steps:
            raise ElixirError(f"{type(self.model).__name__} does no tensor operation here")
        return self.steps[0].facts()

    def _capture_only(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Capture and plan with gradients on wherever something requires them."""
        trains = any(parameter.requires_grad for parameter in self.model.parameters())
        self.progress(f"capturing {type(self.model).__name__}")
        self._dry = True
        try:
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(trains),
                pretend_on(self.model, self.device),
            ):
                args, kwargs = ordinary_inputs((args, dict(kwargs)))
                self._capture(*args, **kwargs)
        except _Captured:
            return True
        finally:
            self._dry = False
        return False

    def _settle(self) -> None:
        """Make the engine and move every parameter to its home."""
        plan = self.plan
        assert plan is not None
        layout = plan.layout
        parameters = dict(self.model.named_parameters())
        store = Store(
            device=self.device,
            arena_bytes=layout.arena_bytes,
            machine=self.machine,
            host_bytes=layout.host_bytes,
            disk_bytes=layout.disk_bytes,
            disk=self.options.disk if layout.disk_bytes else None,
            staging_bytes=layout.staging_bytes,
        )
        engine = Engine(layout, store, parameters, self.device)
        self.progress("moving weights to their homes")
        if is_meta(self.model):
            materialize(
                self.model,
                lambda path, parameter, value: engine.take(parameter, value),
                init=self.options.init,
                weights=self.options.weights,
                device=self.device,
            )
        engine.take_all()
        self.engine = engine
        engine.buffer_bytes = sum(buffer.nbytes for buffer in self.model.buffers())
        self.stats.start(engine, plan.limits, self.machine)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Stream the optimizer's step; before the first capture it is remembered until then."""
        self._optimizer = optimizer
        if self.engine is None:
            self.lowering.optimizer = probe(optimizer)
            return
        if self.binding is not None:
            self.binding.unbind()
        self.binding = bind(optimizer, self.engine)
        optimizer.register_step_post_hook(lambda *_: self.stats.end_step())

    @contextmanager
    def full(self, writeback: bool) -> Iterator[None]:
        """Every parameter an ordinary tensor for a while."""
        self._full = True
        try:
            with self.engine.full(writeback) if self.engine is not None else nullcontext():
                yield
        finally:
            self._full = False

    def free_bytes(self) -> int:
        """What the memory budget leaves beside what always stays."""
        if self.engine is None:
            return sys.maxsize
        return max(0, self.lowering.limits.device - self.engine.constant_bytes())

    # -- lowering --------------------------------------------------------------------------

    def _lower(self, step: StepGraph) -> Lowered:
        halves = self.lowering(step)
        self.machine = self.lowering.machine
        if step.trains:
            self.shown = halves
        self.steps.append(step)
        run = _Run(session=self, step=step)
        forward = run.half(halves.forward, backward=False)
        backward = run.half(halves.backward, backward=True) if halves.backward else None
        return Lowered(halves=halves, forward=forward, backward=backward)


def _disk_to_measure(options: Options) -> Path | None:
    """The disk tier's folder; for a plan that names none, where temporary files go."""
    if options.disk is None and options.disk_memory:
        return Path(tempfile.gettempdir())
    return options.disk


class _Run:
    """The two halves of one captured step as they are run."""

    def __init__(self, session: Session, step: StepGraph) -> None:
        self._session = weakref.ref(session)
        self._reach = tangents_of_outputs(step) if step.trains else ()
        self._paths = [item.path for item in step.inputs]
        self._several = len({tangent for reach in self._reach for tangent in reach}) > 1
        self._output_bytes = sum(s.nbytes for s in step.storages if s.role is Role.OUTPUT)

    def half(self, module: fx.GraphModule, *, backward: bool) -> Boxed:
        """The half as AOTAutograd calls it: bound to the engine at its first run."""
        bound: list[Boxed] = []
        saved = [is_activation(n) for n in module.graph.nodes if n.op == "placeholder"]

        def run(boxed: list[Any]) -> Sequence[Any]:
            session = self._session()
            if session is None or session.engine is None:
                raise ElixirError("this step's model was deleted: keep the compiled model alive")
            if not bound:
                bound.append(executable(module, session.engine))
            engine = session.engine
            activations = (value for value, flag in zip(boxed, saved, strict=True) if flag)
            with engine.running(), session.stats.half(bound[0], activations, self._output_bytes):
                if not backward:
                    return bound[0](boxed)
                return self._backward(session, engine, bound[0], boxed)

        return run

    def _backward(
        self, session: Session, engine: Engine, function: Boxed, boxed: list[Any]
    ) -> Sequence[Any]:
        engine.reducer.start()
        undefined = session._local.__dict__.pop("undefined", frozenset()) if self._several else ()
        if not undefined:
            return function(boxed)
        # As in eager: no gradient, not zeros, where no output in the loss depends on it.
        none = [index for index, reach in enumerate(self._reach) if reach and reach <= undefined]
        engine.reducer.undefined = frozenset(self._paths[index] for index in none)
        try:
            results = list(function(boxed))
        finally:
            engine.reducer.undefined = frozenset()
        for index in none:
            results[index] = None
        return results
