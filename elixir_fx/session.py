"""A session: what one compiled model holds, whichever entry point its calls come through.

Ties the middle of the five verbs to a running step: a captured step is lowered onto the plan
(`lowering`), its halves are bound to the engine, the optimizer's step is streamed, and each
step is measured. `guarded` is the session of compile(), `regions` that of the torch.compile
backend; they differ in when the engine is made and in where parameters live.
"""

import gc
import hashlib
import sys
import tempfile
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from elixir_fx import ops
from elixir_fx.codegen import (
    Executable,
    Halves,
    executable,
    is_activation,
    keeps_graph,
    tangents_of_outputs,
)
from elixir_fx.compilation import Captured, Lowered
from elixir_fx.config import Options, limits
from elixir_fx.errors import ElixirError, PlanError
from elixir_fx.facts import Facts, OptimizerFacts
from elixir_fx.joint import EAGER, Tracing
from elixir_fx.kernels import Boxed, Kernels
from elixir_fx.lowering import Admitted, Lowering, compute_device
from elixir_fx.machine import Machine, Tier
from elixir_fx.pipeline import PIPELINE
from elixir_fx.plan import Plan
from elixir_fx.report.progress import Progress
from elixir_fx.runtime.accumulation import pass_number
from elixir_fx.runtime.disk import Files
from elixir_fx.runtime.engine import Engine, Half
from elixir_fx.runtime.heap import bound_heap, relax_heap
from elixir_fx.runtime.mapped import MappedFile
from elixir_fx.runtime.measure import this_machine
from elixir_fx.runtime.optimizer import Binding, bind
from elixir_fx.runtime.parameters import AwayTensor
from elixir_fx.runtime.probe import named, probe
from elixir_fx.runtime.sharded_engine import ShardedEngine
from elixir_fx.runtime.stats import Stats
from elixir_fx.runtime.store import Store
from elixir_fx.runtime.updates import Updates
from elixir_fx.step import Record, StepGraph, stay_of
from elixir_fx.team import Team

VIEWS_ABOVE = 3  # nodes that may stand between a result and the captured graph's node


@dataclass(frozen=True, kw_only=True)
class KnownStep:
    """What a session knows of a captured step beside its halves: plain data, which can be stored.

    `paths` are those of its inputs, `reach` the tangents that each result of the backward
    follows from, `plan` the layout with the schedule of this step, `sparse` the parameters whose
    gradients are known to be sparse.
    """

    key: str
    facts: Facts
    plan: Plan
    paths: tuple[str, ...]
    reach: tuple[frozenset[int], ...]
    sparse: frozenset[str]
    history: tuple[Record, ...]


class Pending:
    """A forward whose backward has not run: what it saved is in memory."""

    def __init__(self, graph: Admitted) -> None:
        self.nbytes = graph.saved_bytes
        self.trained = graph.trained


class Session:
    """What a compiled model holds: plan, engine, optimizer and statistics.

    The owner of the graphs that `capture` makes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | str | None,
        options: Options,
        files: Files | None = None,
        team: Team | None = None,
    ) -> None:
        self.model = model
        self.team = team
        self._files = Files() if files is None else files
        self.options = options
        self.device = compute_device(model)
        self.tracing, self.kernels = _kernels(options)
        self.checkpoint_hints: bool | None = None  # regions keep to what the model checkpoints
        self.will_run = True  # False where a session only plans
        self.progress = Progress()
        self.machine = self._machine() if team is None else team.machine(self._machine)
        self.lowering = Lowering(
            options=options,
            machine=self.machine,
            limits=limits(options, self.machine, team.on_this_host if team else 1),
            optimizer=probe(optimizer, trained(model)) if optimizer is not None else None,
            progress=self.progress,
            updates=self._updates(optimizer),
        )
        self.engine: Engine | None = None
        self.binding: Binding | None = None
        self.stats = Stats()
        self.shown: Halves | None = None  # of the last training capture
        self.history: list[Record] = []  # of the last captured step
        self._lock = threading.RLock()  # around what changes plan or engine
        self.pending: weakref.WeakSet[Pending] = weakref.WeakSet()
        self._pass: int | None = None  # the backward pass under way
        self.admitted: dict[str, Admitted] = {}  # of the last call, by graph with dynamic sizes
        self._optimizer = None if isinstance(optimizer, str) else optimizer
        self._warned = False
        self._step_hook: Any = None
        self._local = threading.local()

    def _machine(self) -> Machine:
        """The machine that was given, or this one as it is measured. On CUDA with eager kernels
        the optimizer runs where the parameters are, as the user's does (DESIGN, law 10)."""
        machine = self.options.machine or this_machine(
            self.device, _disk_to_measure(self.options), threads=torch.get_num_threads()
        )
        if self.options.kernels == "eager" and self.device.type == "cuda":
            return replace(machine, host_stream_bytes_per_s=0.0)
        return machine

    def _updates(self, optimizer: torch.optim.Optimizer | str | None) -> Updates | None:
        """The optimizer, to be timed where it will run."""
        if optimizer is None:
            return None
        known = named(optimizer) if isinstance(optimizer, str) else optimizer
        return Updates(optimizer=known, device=self.device)

    @property
    def plan(self) -> Plan | None:
        return self.lowering.plan

    # -- the owner of captured graphs --------------------------------------------------------

    @property
    def title(self) -> str:
        return type(self.model).__name__

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(remove_duplicate=False)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_buffers(remove_duplicate=False)

    def size_names(self) -> Mapping[int, Mapping[int, str]]:
        """None, where graphs come from calls of the user's."""
        return {}

    def lower(self, step: StepGraph) -> Lowered:
        """Annotate, plan, rewrite and split a step; what runs it through the engine."""
        halves = self.lowering(step)
        self.machine = self.lowering.machine
        plan = self.plan
        assert plan is not None
        schedules = tuple(entry for entry in plan.schedules if entry.key == step.key)
        known = KnownStep(
            key=step.key,
            facts=self.lowering.captured[step.key].facts,
            plan=replace(plan, schedules=schedules),
            paths=tuple(item.path for item in step.inputs),
            reach=tangents_of_outputs(step) if step.trains else (),
            sparse=step.sparse,
            history=tuple(step.history),
        )
        # Not one whose plan follows from the memory that was free.
        stored = self.options.memory is not None or plan.layout.keeps_all
        return self.lowered(known, halves, known if stored else None)

    def restore(self, known: KnownStep, halves: Halves) -> Lowered:
        """A stored step in the place of one that is captured. LayoutError if it does not fit."""
        self.lowering.adopt(known.key, known.facts, known.plan, known.sparse)
        return self.lowered(known, halves, None)

    def lowered(self, known: KnownStep, halves: Halves, stored: KnownStep | None) -> Lowered:
        """The halves as they are run, compiled if need be: while tracing, since what a compiler
        asks of dynamic dimensions becomes a guard."""
        forward, backward = halves.forward, halves.backward
        trains = backward is not None
        if trains:
            self.shown = halves
        self.history = list(known.history)
        if self.kernels is not None and self.will_run:
            self.progress("compiling kernels")
            seconds = {cost.node: cost.seconds for cost in known.facts.costs}
            forward = self.kernels.compiled(forward, seconds, backward=False, trains=trains)
            if backward is not None:
                backward = self.kernels.compiled(backward, seconds, backward=True, trains=True)
        run = _Run(self, known)
        return Lowered(
            halves=halves,
            forward=run.half(forward, backward=False),
            backward=run.half(backward, backward=True) if backward is not None else None,
            known=stored,
        )

    def cache_key(self, names: str) -> str | None:
        """What a step follows from beside its graph: this package, the options, the machine but
        for what is free on it, and the layout that is there. None where no step is stored: for
        several ranks, and for passes or compilers of the user's."""
        options = self.options
        ordinary = options.kernels == "inductor" and options.passes is PIPELINE
        if not (ordinary and self.will_run and self.team is None and options.dump is None):
            return None
        from elixir_fx.step_cache import code_digest, surroundings

        parts = (
            code_digest(),
            surroundings(),
            type(self).__name__,
            repr(sorted(self.lowering.pinned.items())),
            names,
            repr([options.memory, options.host_memory, options.disk_memory, bool(options.disk)]),
            repr([sorted(options.keep.items()), list(options.ignore), options.micro_batches]),
            repr(options.respect_checkpointing),
            options.plan.to_json() if options.plan is not None else "",
            # Without what was timed for this step's plan.
            replace(self.machine, memory={}, operators={}, update_stream_bytes_per_s=0.0).to_json(),
            repr(self.lowering.optimizer),
            repr(self.plan.layout) if self.plan is not None else "",
            repr(sorted(self.lowering.sparse)),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def enter(self, captured: Captured, inputs: Sequence[Any]) -> None:
        """ElixirError if a parameter is another object than the one whose home the step reads,
        PlanError for inputs larger than there is memory for."""
        if self.engine is not None:
            self.engine.check_owned(captured.paths, inputs)
        if captured.sizes:
            values = tuple(where.of(inputs) for where in captured.sizes)
            self.admitted[captured.key] = self.lowering.admit(captured.key, values)

    def leave(self, captured: Captured, inputs: Sequence[Any], results: Any) -> None:
        """Learn, when the backward comes, that it does, and which outputs took part in the loss."""
        node = _node_of(inputs, results)
        if node is None:
            return
        pending = Pending(self.graph(captured.key))
        self.pending.add(pending)
        session, tangents = weakref.ref(self), captured.tangents

        def before_backward(gradients: Sequence[Tensor | None]) -> None:
            alive = session()
            if alive is None:
                return
            alive._local.pending = pending
            if len(tangents) > 1:
                alive._local.undefined = frozenset(
                    index
                    for index, output in enumerate(tangents)
                    if output is not None and gradients[output] is None
                )

        node.register_prehook(before_backward)

    def graph(self, key: str) -> Admitted:
        """A captured graph, at the sizes of its last call."""
        return self.admitted.get(key) or self.lowering.captured[key]

    def begin_backward(self) -> int:
        """The backward of a captured graph is about to run, on this thread. Bytes that its own
        forward still holds afterwards, where the graph is kept.

        Gradients of a parameter that several graphs of this pass add to go through autograd,
        which sums them in eager's order before they are accumulated.
        """
        if self.engine is not None and pass_number() != self._pass:
            self._pass = pass_number()
            uses = Counter(path for pending in self.pending for path in pending.trained)
            shared = frozenset(path for path, count in uses.items() if count > 1)
            self.engine.reducer.begin_pass(shared)
        pending: Pending | None = self._local.__dict__.pop("pending", None)
        if pending is None:
            return 0
        if keeps_graph():
            return pending.nbytes
        self.pending.discard(pending)
        return 0

    def held_bytes(self) -> int:
        """What forwards saved whose backward has not run."""
        return sum(pending.nbytes for pending in self.pending)

    # -- the engine and the optimizer ------------------------------------------------------

    def make_engine(self) -> Engine:
        """Memory on every tier as the plan has it; nothing has moved yet."""
        plan = self.plan
        assert plan is not None
        layout = plan.layout
        store = Store(
            device=self.device,
            arena_bytes=layout.arena_bytes,
            machine=self.machine,
            host_bytes=layout.host_bytes,
            disk_bytes=layout.disk_bytes - layout.mapped_bytes,
            disk=self.options.disk if layout.disk_bytes > layout.mapped_bytes else None,
            staging_bytes=layout.staging_bytes,
            files=self._files,
        )
        mapped = None
        if layout.mapped_bytes:
            assert self.options.disk is not None
            mapped = MappedFile(self.options.disk, layout.mapped_bytes, self._files)
        parameters = dict(self.model.named_parameters())
        engine = (
            Engine(layout, store, parameters, self.device, mapped)
            if self.team is None
            else ShardedEngine(
                layout, store, parameters, self.device, self.team.ranks, self.team.mean
            )
        )
        engine.written = weakly(self._written)
        engine.lends = self.kernels is not None and self.machine.unified and not layout.keeps_all
        return engine

    def expect_optimizer(self) -> None:
        """Plan for AdamW where something learns and no optimizer is known: one may be bound."""
        if self.lowering.optimizer is None and trained(self.model):
            self.lowering.optimizer = probe("adamw", trained(self.model))
            self.lowering.updates = self._updates("adamw")

    def fit_heap(self, engine: Engine) -> None:
        """Have the C library keep freed memory, or give it back, as the engine's layout needs."""
        if self.machine.emulated:
            relax_heap()  # an accelerator's memory has no page faults
        if self.machine.unified:
            gc.collect()  # capturing leaves cycles behind
            free = engine.layout.keeps_all or self.options.memory is None
            relax_heap() if engine.layout.all_home and free else bound_heap()

    def start(self, engine: Engine) -> None:
        """From now on steps run with this engine."""
        plan = self.plan
        assert plan is not None
        self.engine = engine
        self.refresh(engine)
        self.stats.start(engine, plan.limits, self.machine)

    def refresh(self, engine: Engine) -> None:
        """Tell the engine what the plan in force expects."""
        plan = self.plan
        assert plan is not None
        engine.buffer_bytes = sum(buffer.nbytes for buffer in self.model.buffers())
        engine.peak_bytes = plan.forecast.peak_device_bytes
        engine.update_bytes = self._update_bytes(plan)

    def _update_bytes(self, plan: Plan) -> int:
        """Memory beside the arena that the update of the largest unit needs."""
        optimizer = self.lowering.optimizer
        if optimizer is None:
            return 0
        here = [chunk for chunk in plan.layout.chunks if chunk.update is Tier.DEVICE]
        if not here:
            return 0
        spans = [piece.span for chunk in here for piece in chunk.slices]
        elements = max([plan.layout.update_numel, *spans])
        return elements * (optimizer.scratch_bytes + optimizer.state_bytes)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Stream the optimizer's step; before the first capture it is remembered until then."""
        facts = probe(optimizer, trained(self.model))
        if self.engine is None:
            self._optimizer, self.lowering.optimizer = optimizer, facts
            self.lowering.updates = self._updates(optimizer)
            return
        self._check_planned_for(facts)
        if self.binding is not None:
            self.binding.unbind()
            self._step_hook.remove()
            self.engine.forget_states()
            self.binding = None
        self.binding = bind(optimizer, self.engine)
        self._optimizer = optimizer
        self.engine.state_bytes = partial(ordinary_state_bytes, optimizer, self.engine)
        self._step_hook = optimizer.register_step_post_hook(lambda *_: self.end_step())

    def end_step(self) -> None:
        """The bound optimizer has finished a step."""
        self.stats.end_step()

    def _check_planned_for(self, facts: OptimizerFacts) -> None:
        """PlanError for an optimizer that keeps more than the plan has room for."""
        planned, layout = self.lowering.optimizer, self.lowering.plan
        if planned is None or layout is None or layout.layout.keeps_all:
            return
        if facts.state_bytes > planned.state_bytes:
            raise PlanError(
                f"{facts.name} keeps {facts.state_bytes} bytes of state per parameter element; "
                f"the plan was made for {planned.name}, which keeps {planned.state_bytes}. Give "
                "the optimizer to elixir_fx.compile, or compiled.bind(optimizer) before the "
                "first call"
            )

    def _written(self) -> None:
        """Somebody wrote a parameter that is away: an optimizer that nobody bound?"""
        if self._warned:
            return
        stepping = _optimizer_at_work()
        if stepping is None or stepping is self._optimizer:
            return
        self._warned = True
        warnings.warn(
            f"elixir_fx: {type(stepping).__name__} updates parameters that are away one by one, "
            "and keeps its states in memory: call compiled.bind(optimizer) so that its step is "
            "streamed",
            stacklevel=2,
        )

    def free_bytes(self) -> int:
        """What the memory budget leaves beside what always stays."""
        if self.engine is None:
            return sys.maxsize
        return max(0, self.lowering.limits.device - self.engine.constant_bytes())


def _node_of(inputs: Sequence[Any], results: Sequence[Any]) -> Node | None:
    """The node of the captured graph in autograd's graph. Outputs that are views of inputs or of
    each other have nodes of their own above it; those of the inputs are other graphs'."""
    theirs = {tensor.grad_fn for tensor in inputs if isinstance(tensor, Tensor)}
    above = [r.grad_fn for r in results if isinstance(r, Tensor)]
    for _ in range(VIEWS_ABOVE):
        ours = [node for node in above if node is not None and node not in theirs]
        for node in ours:
            if node.name().startswith("CompiledFunction"):
                return node
        above = [below for node in ours for below, _ in node.next_functions]
    return None


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """`method`, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def _optimizer_at_work() -> torch.optim.Optimizer | None:
    """The optimizer whose step is running on this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step":
            found = frame.f_locals.get("self")
            if isinstance(found, torch.optim.Optimizer):
                return found
        frame = frame.f_back
    return None


def trained(model: nn.Module) -> set[torch.dtype]:
    """The dtypes of the parameters that learn."""
    return {p.dtype for p in model.parameters() if p.requires_grad}


def ordinary_state_bytes(optimizer: torch.optim.Optimizer, engine: Engine) -> int:
    """Device bytes of the optimizer's states that are ordinary tensors; scalars, such as the
    number of steps, are not counted, by the planner neither."""
    on_host = {parameter for parameter, entry in engine.entries.items() if entry.on_host}
    return sum(
        value.nbytes
        for parameter, state in optimizer.state.items()
        if parameter not in on_host
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim and not isinstance(value, AwayTensor)
    )


def _kernels(options: Options) -> tuple[Tracing, Kernels | None]:
    """How steps are traced, and what compiles their operations; None: PyTorch's own kernels."""
    if options.kernels == "eager":
        return EAGER, None
    from elixir_fx import inductor  # a second of imports that other kernels do without

    if callable(options.kernels):
        return inductor.ATEN, Kernels(inductor.compile_run_with(options.kernels))
    return inductor.TRACING, Kernels(inductor.compile_run)


def _disk_to_measure(options: Options) -> Path | None:
    """The disk tier's folder; for a plan that names none, where temporary files go."""
    if options.disk is None and options.disk_memory:
        return Path(tempfile.gettempdir())
    return options.disk


def _half_of(module: fx.GraphModule, backward: bool) -> Half:
    """What of a generated half the engine must know before it runs."""
    gathers, reduces = [], []
    for node in module.graph.nodes:
        if node.target is ops.GATHER and not stay_of(node).resident:
            gathers.append(stay_of(node).chunk)
        elif node.target is ops.REDUCE:
            reduces.append((node.args[0], tuple(node.args[1])))
    return Half(backward=backward, gathers=tuple(gathers), reduces=tuple(reduces))


class _Run:
    """The two halves of one captured step as they are run."""

    def __init__(self, session: Session, known: KnownStep) -> None:
        self._session = weakref.ref(session)
        self._reach, self._paths, self._key = known.reach, known.paths, known.key
        self._several = len({tangent for reach in self._reach for tangent in reach}) > 1

    def half(self, module: fx.GraphModule, *, backward: bool) -> Boxed:
        """The half as AOTAutograd calls it; its code is generated at its first run."""
        made: list[Executable] = []
        saved = [is_activation(n) for n in module.graph.nodes if n.op == "placeholder"]
        meets = _half_of(module, backward)

        def run(boxed: list[Any]) -> Sequence[Any]:
            session = self._session()
            if session is None or session.engine is None:
                raise ElixirError("this step's model was deleted: keep the compiled model alive")
            if not made:
                made.append(executable(module))
            engine = session.engine
            activations = [value for value, flag in zip(boxed, saved, strict=True) if flag]
            key = (self._key, backward, *(value for value in boxed if type(value) is int))
            output_bytes = session.graph(self._key).output_bytes
            own_bytes = session.begin_backward() if backward else 0
            held_bytes = session.held_bytes() - own_bytes
            none = self._without_gradient(session) if backward else []
            engine.reducer.undefined = frozenset(self._paths[index] for index in none)
            with (
                engine.running(meets),
                session.stats.half(key, activations, output_bytes, held_bytes),
            ):
                if not backward:
                    engine.reducer.rest()
                    engine.recycler.keeps = True
                    return made[0](engine, boxed)
                return self._backward(engine, made[0], boxed, none)

        return run

    def _without_gradient(self, session: Session) -> list[int]:
        """Places of the inputs that, as in eager, get no gradient, not zeros: no output in the
        loss depends on them."""
        undefined = session._local.__dict__.pop("undefined", frozenset()) if self._several else ()
        if not undefined:
            return []
        return [index for index, reach in enumerate(self._reach) if reach and reach <= undefined]

    def _backward(
        self, engine: Engine, function: Executable, boxed: list[Any], none: list[int]
    ) -> Sequence[Any]:
        engine.reducer.start()
        engine.recycler.keeps = not keeps_graph()
        if not none:
            return function(engine, boxed)
        results = list(function(engine, boxed))
        for index in none:
            results[index] = None
        engine.pass_by(self._paths[index] for index in none)
        return results
