"""compile()'s session: a whole model whose calls go through one guarded step.

The first call captures and plans without running, then moves the weights to their homes,
outside of any tracing; only then does the step run. Later calls go straight through the
guards; a new graph is lowered onto the same layout.
"""

import gc
import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from elixir_fx.capture import Capture, ordinary_inputs, pretend_on
from elixir_fx.compilation import Captured
from elixir_fx.config import Options, limits
from elixir_fx.dynamo import ForwardError, open_sizes
from elixir_fx.errors import CaptureError, ElixirError, LayoutError, PlanError
from elixir_fx.facts import Facts
from elixir_fx.lowering import Admitted
from elixir_fx.machine import Machine
from elixir_fx.named_sizes import Named, by_tensor, check_open, named_sizes
from elixir_fx.plan import ONE_RANK, Group, Plan
from elixir_fx.runtime.disk import Files
from elixir_fx.runtime.heap import bound_heap
from elixir_fx.runtime.materialize import is_meta, materialize
from elixir_fx.runtime.migrate import Migration
from elixir_fx.runtime.stats import Stats
from elixir_fx.runtime.tracing import calls_through, plain
from elixir_fx.session import Session, ordinary_state_bytes
from elixir_fx.team import Team


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Leave the streams of random numbers as they are: a capture runs the user's Python up to the
    first tensor operation."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@contextmanager
def without_collections() -> Iterator[None]:
    """Leave the garbage collector alone: a capture makes a million objects that stay, and looking
    through them over and over takes a fifth of its time (measured, 48 layers)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def planned_group(machine: Machine, ranks: int) -> tuple[Machine, Group]:
    """A machine and the ranks to plan for that are not there: each has such a machine, and links
    to the others, or all are on one host if it computes on its CPU."""
    if ranks == 1:
        return machine, ONE_RANK
    return machine.with_ranks(ranks), Group(ranks=ranks, shared=machine.unified)


class _Captured(BaseException):
    """Stops a call between its capture and its first operation. Never leaves this file."""


class GuardedSession(Session):
    """What an ElixirModule holds."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | str | None,
        options: Options,
        files: Files | None = None,
        team: Team | None = None,
        planned_ranks: int = 1,
    ) -> None:
        """`team`: the ranks that this one trains with; `planned_ranks`: how many to plan for,
        without them."""
        super().__init__(model, optimizer, options, files, team)
        # A compiler's tracing computes again by itself what the model checkpoints.
        respected = None if self.tracing.compiled else True
        self.checkpoint_hints = respected if options.respect_checkpointing else False
        group: Group | None = None
        if team is not None:
            group = team.group
            self.lowering.share_plan = team.share_plan
            self.lowering.company = team.group.ranks
        elif planned_ranks > 1:
            self.machine, group = planned_group(self.machine, planned_ranks)
            self.lowering.machine = self.machine
            self.lowering.limits = limits(options, self.machine)
        if group is not None:
            self.lowering.group = group
        self.is_full = False  # within full_parameters()
        self._syncs = True  # gradients are summed over the ranks
        self._calls = threading.local()  # of each thread: whether it only captures, and its stacks
        self._size_names: Mapping[int, Mapping[int, str]] = {}  # of a capture under way
        self._capture = Capture(model, self)

    # -- a call ----------------------------------------------------------------------------

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the model on these inputs through its captured step."""
        if self.is_full:
            raise ElixirError("the compiled model cannot be called inside full_parameters()")
        with calls_through(self.model, None):
            try:
                return self._call(args, kwargs)
            except ElixirError as error:
                if self.team is not None:
                    self.team.ranks.fail(error)
                raise

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        try:
            with self._lock:
                empty = self.engine is None and not self.prepare(args, kwargs)
            if empty:
                return self._capture(*args, **kwargs)  # nothing to plan: no tensor operation
            try:
                return self._guarded(args, kwargs)
            except LayoutError:
                with self._lock:
                    if not self._plan_again(args, kwargs):
                        raise
            return self._guarded(args, kwargs)
        except ForwardError:
            apart = self.team is not None and not self.team.group.shared
            if is_meta(self.model) or apart:  # where reading parameters takes all ranks
                raise
        self.model(*args, **kwargs)  # raises what the model raises, in its own words
        raise CaptureError(
            f"{type(self.model).__name__} raised while it was captured and does not when it runs: "
            "its forward depends on more than its inputs"
        )

    def _guarded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        assert self.engine is not None
        with ExitStack() as stack:
            stack.enter_context(plain(self.engine.entries))
            stacks = self._calls.__dict__.setdefault("stacks", [])
            stacks.append(stack)
            try:
                return self._capture(*args, **kwargs)
            finally:
                stacks.pop()

    def enter(self, captured: Captured, inputs: Sequence[Any]) -> None:
        """ElixirError if a parameter is another object than the one whose home the step reads,
        PlanError for inputs larger than there is memory for."""
        if self._calls.__dict__.get("dry", False):
            raise _Captured
        super().enter(captured, inputs)
        self._calls.stacks[-1].close()

    # -- capture and start-up --------------------------------------------------------------

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Capture, plan and move the weights for these inputs, running nothing.

        The layout is made from the training graph wherever something requires grad. False
        where the call has no tensor operation to plan. Errors leave the model as it was.
        """
        # What is made here outlives an inference mode that the caller may be in.
        with self.progress, torch.inference_mode(False), self._together():
            check_open(self._named(args, kwargs))
            if not self._capture_only(args, kwargs):
                return False
            self._settle()
        if self._optimizer is not None:
            try:
                with self._together():
                    self.bind(self._optimizer)
            except ElixirError:
                assert self.engine is not None
                self.engine.give_back()
                self.engine.close()
                self.engine, self.stats = None, Stats()
                raise
        return True

    def _together(self) -> AbstractContextManager[None]:
        """Around what the other ranks wait for: its errors are theirs too."""
        if self.team is None:
            return nullcontext()
        return self.team.ranks.together("while the model was compiled")

    def plan_only(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan | None:
        """The plan for these inputs; the model is left as it is."""
        self.will_run = False
        check_open(self._named(args, kwargs))
        with self.progress:
            self._capture_only(args, kwargs)
        return self.plan

    def facts_only(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Facts:
        """The facts of the step for these inputs, whatever the budgets."""
        return self.captured_only(args, kwargs).facts

    def captured_only(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Admitted:
        """The step for these inputs as it is known to the planner, whatever the budgets."""
        self.lowering.limits = replace(self.lowering.limits, device=sys.maxsize)
        try:
            self.plan_only(args, kwargs)
        finally:
            self.lowering.limits = limits(self.options, self.machine)
        if not self.lowering.captured:
            raise ElixirError(f"{type(self.model).__name__} does no tensor operation here")
        return next(reversed(self.lowering.captured.values()))

    def _capture_only(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Capture and plan with gradients on wherever something requires them."""
        trains = any(parameter.requires_grad for parameter in self.model.parameters())
        self.expect_optimizer()
        self.progress(f"capturing {type(self.model).__name__}")
        if self.machine.unified and (self.options.memory is not None or is_meta(self.model)):
            bound_heap()  # before the first large tensor: what a heap has grown to it keeps
        self._calls.dry = True
        try:
            with (
                same_random_numbers(),
                without_collections(),
                torch.inference_mode(False),
                torch.set_grad_enabled(trains),
                pretend_on(self.model, self.device),
            ):
                args, kwargs = ordinary_inputs((args, dict(kwargs)))
                named = [one for one in self._named(args, kwargs) if one.size > 1]
                self._size_names = by_tensor(named)
                with open_sizes({one.tensor: self._size_names[id(one.tensor)] for one in named}):
                    self._capture(*args, **kwargs)
        except _Captured:
            return True
        finally:
            self._calls.dry = False
            self._size_names = {}
        return False

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Named, ...]:
        """The dimensions of these inputs that the user named."""
        return named_sizes(self.model, self.options.dynamic_shapes, args, kwargs)

    def size_names(self) -> Mapping[int, Mapping[int, str]]:
        """Names of dimensions, while the inputs that they are of are captured."""
        return self._size_names

    def _settle(self) -> None:
        """Make the engine and move every parameter to its home."""
        engine = self.make_engine()
        self.fit_heap(engine)
        self.progress("moving weights to their homes")
        if is_meta(self.model):
            materialize(
                self.model,
                lambda path, parameter, value: engine.move_home(parameter, value),
                init=self.options.init,
                weights=self.options.weights,
                device=self.device,
            )
        engine.move_all_home()
        if self.team is not None:
            self.team.start_equal(self.model, set(engine.entries))
        self.start(engine)
        self._set_syncs(self._syncs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside keep their gradients to this rank."""
        before = self._syncs
        self._set_syncs(False)
        try:
            yield
        finally:
            self._set_syncs(before)

    def _set_syncs(self, syncs: bool) -> None:
        self._syncs = syncs
        if self.engine is not None:
            self.engine.set_syncs(syncs)

    @contextmanager
    def full(self, writeback: bool) -> Iterator[None]:
        """Every parameter an ordinary tensor for a while."""
        self.is_full = True
        try:
            with self.engine.full(writeback) if self.engine is not None else nullcontext():
                yield
        finally:
            self.is_full = False

    def _plan_again(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """A new layout for a training call that the one in force is too small for, between steps:
        a batch larger than the first. Whether there is one; nothing has changed otherwise.
        Never of several ranks, which would all have to come to it."""
        old, plan, binding = self.engine, self.plan, self.binding
        assert old is not None
        given = self.team is not None or self.options.plan is not None
        if self.pending or given or not torch.is_grad_enabled():
            return False
        self._capture.forget()  # its graphs have nodes of the old layout
        self.lowering.forget()
        new, migration = None, None
        try:
            with self.progress, torch.inference_mode(False), torch.no_grad():
                with plain(old.entries), torch.enable_grad():
                    self._capture_only(args, kwargs)
                self.progress("moving the training state: this call needs another layout")
                old.lend_arena()
                new = self.make_engine()
                if self.machine.unified and not new.layout.keeps_all:
                    bound_heap()
                migration = Migration(old, new, binding.optimizer if binding else None)
                migration.run()
        except BaseException as error:
            if migration is not None:
                migration.undo()
            if new is not None:
                new.close()
            self._capture.forget()
            self.lowering.forget()
            self.lowering.plan = plan
            old.take_arena()
            if isinstance(error, PlanError):
                return False
            raise
        migration.commit()
        old.close()
        if binding is not None:
            binding.engine = new
            new.state_bytes = partial(ordinary_state_bytes, binding.optimizer, new)
        self.start(new)
        return True
