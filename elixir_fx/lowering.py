"""Lowering: a captured step is annotated, planned, rewritten and split.

The middle three verbs of `compile()`. It reads fakes and writes graphs; nothing here touches a
weight. The first graph settles the layout, every later one gets a schedule for that layout.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_fx.capture import real_mode
from elixir_fx.codegen import Halves, split
from elixir_fx.config import Options
from elixir_fx.errors import LayoutError, PlanError
from elixir_fx.facts import Facts, OptimizerFacts, Parameter, Role
from elixir_fx.machine import Machine, Tier
from elixir_fx.passes.compute_cost import operator_key
from elixir_fx.pipeline import annotate, rewrite
from elixir_fx.plan import ONE_RANK, Group, Layout, Limits, Plan, Schedule
from elixir_fx.planner import (
    Formulas,
    Values,
    at,
    check_plan,
    decided,
    demand,
    explained,
    schedule,
    search,
)
from elixir_fx.runtime.heap import bound_heap, relax_heap
from elixir_fx.runtime.measure import OperatorCache, measure_operators
from elixir_fx.runtime.samples import sample_call
from elixir_fx.runtime.updates import Updates
from elixir_fx.step import StepGraph, number, value

KEPT = 4096  # graphs that are remembered: more than any model has in use
SIZES = 64  # sizes of inputs that are known to fit, of all graphs with dynamic dimensions
MEASURE_S = 8.0  # at most, for the operators of one graph that nobody timed yet

MakePlan = Callable[[Facts, Machine, Limits, Mapping[str, Tier]], Plan]

# How ranks come to one plan: given the step, a planner that leaves some bytes alone, and what the
# ranks that do not plan do meanwhile.
SharePlan = Callable[[StepGraph, Callable[[int], Plan], Callable[[], object]], Plan]


def own_plan(step: StepGraph, plan: Callable[[int], Plan], beside: Callable[[], object]) -> Plan:
    """The plan of one rank."""
    return plan(0)


@dataclass(frozen=True, kw_only=True)
class Admitted:
    """A captured graph at sizes of its inputs that are known to fit: its facts, and what they are
    once its schedule, which decides about its activations, has been carried out. `formulas` are
    those of its dynamic dimensions, with the sizes that it was captured with."""

    facts: Facts
    settled: Facts
    schedule: Schedule
    formulas: Formulas | None = None

    @cached_property
    def output_bytes(self) -> int:
        return sum(s.nbytes for s in self.facts.storages if s.role is Role.OUTPUT)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of what the forward leaves for the backward."""
        return sum(s.nbytes for s in self.settled.storages if s.role is Role.ACTIVATION)

    @cached_property
    def trained(self) -> frozenset[str]:
        """Paths of the parameters that the backward trains."""
        return frozenset(p.path for p in self.facts.parameters if p.gradient is not None)


@dataclass(kw_only=True, eq=False)
class Lowering:
    """What lowering one model's steps needs to know, and the plan that grows with them."""

    options: Options
    machine: Machine
    limits: Limits
    optimizer: OptimizerFacts | None
    progress: Callable[[str], None]
    plan: Plan | None = None
    updates: Updates | None = None  # the optimizer, to be timed
    times_all: bool = False  # operators, even where nothing has to move
    make_plan: MakePlan | None = None
    share_plan: SharePlan = own_plan
    group: Group = ONE_RANK
    company: int = 1  # ranks that compute here while this one does
    pinned: Mapping[str, Tier] = field(default_factory=dict)  # beside what the user fixed
    held_bytes: Callable[[], int] = lambda: 0  # activations of other graphs, at this moment
    sparse: set[str] = field(default_factory=set)  # parameters whose gradients are sparse
    captured: dict[str, Admitted] = field(default_factory=dict)  # by key, the latest last
    admitted: dict[tuple[str, Values], Admitted] = field(default_factory=dict)

    def __call__(self, step: StepGraph) -> Halves:
        """Annotate, plan, rewrite and split one step. PlanError if no plan fits."""
        step.optimizer = self.optimizer
        fixed = self.options.keep_by_path(step.parameter_paths)
        for path, tier in self.pinned.items():
            if fixed.get(path, tier.value) != tier.value:
                raise PlanError(
                    f"keep={{{path!r}: {fixed[path]!r}}}: with the backend this parameter stays on "
                    f"the {tier}; elixir_fx.compile can put it elsewhere"
                )
            fixed[path] = tier.value
        for path in step.returned_parameters():
            if fixed.setdefault(path, Tier.DEVICE.value) != Tier.DEVICE.value:
                raise PlanError(
                    f"keep={{{path!r}: {fixed[path]!r}}}: the forward returns a view of this "
                    "parameter, which therefore stays on the device; return a clone of it"
                )
        step.pinned = fixed
        self.sparse |= step.sparse_gradients()
        step.sparse = frozenset(self.sparse)
        self.decide(step)
        assert self.plan is not None and step.schedule is not None
        moves = not self.plan.layout.keeps_all
        step.recycles = moves and self.machine.unified and not step.compiled
        if moves or step.schedule.recomputes:
            rewrite(step, self.plan, self.options.passes, self.options.dump)
        return split(step)

    def decide(self, step: StepGraph) -> None:
        """Make or extend the plan, and tell the step what was decided."""
        annotate(step, self.machine, self.options.passes)
        if self.plan is None:
            plan = self.share_plan(
                step,
                lambda room: self.options.plan or self.first_plan(step, room),
                lambda: self.options.plan or self.timed(step, kept=True),
            )
            _check_group(plan.layout.group, self.group)
            self.plan = plan
        facts = step.facts()
        known = {entry.key: entry for entry in self.plan.schedules}
        plan = self.plan
        if plan.layout.keeps_all:
            plan = replace(plan, layout=_thawed(plan.layout, step.parameters))
        if self.options.plan is not None:
            check_plan(plan, facts, self.limits)
        if step.key not in known or self.options.plan is not None:
            _check_belongs(plan, step.parameters)
        if step.key not in known:
            made = self.schedule(facts, plan)
            self.plan = plan.with_schedule(made)
            known[step.key] = made
        settled = decided(facts, known[step.key])
        formulas = _formulas(step) if step.symbols or step.size_names else None
        if formulas is not None and formulas.sizes:
            known[step.key] = replace(
                known[step.key],
                sizes=tuple(formulas.sizes.items()),
                demand=demand(settled, formulas, self.plan.layout),
            )
            self.plan = self.plan.with_known(known[step.key])
        step.layout, step.schedule = self.plan.layout, known[step.key]
        admitted = Admitted(
            facts=facts, settled=settled, schedule=known[step.key], formulas=formulas
        )
        remember(self.captured, step.key, admitted, KEPT)

    def adopt(self, key: str, facts: Facts, plan: Plan, sparse: frozenset[str]) -> None:
        """Take a step that was planned before, under these options and on this machine, with its
        own schedule in `plan`. LayoutError if it does not fit now."""
        layout = plan.layout
        if layout.host_bytes > self.limits.host or layout.disk_bytes > self.limits.disk:
            raise LayoutError("the tiers have less room than when this step was planned")
        self.schedule(facts, plan, like=plan.schedules[0])
        if self.plan is None:
            self.plan = replace(plan, limits=self.limits)
        else:
            self.plan = replace(self.plan, layout=layout).with_schedule(plan.schedules[0])
        self.sparse |= sparse
        like = plan.schedules[0]
        admitted = Admitted(facts=facts, settled=decided(facts, like), schedule=like)
        remember(self.captured, key, admitted, KEPT)

    def admit(self, key: str, values: Values) -> Admitted:
        """Check that a captured graph fits with its dynamic dimensions at `values`, before
        anything of it runs. LayoutError if it does not."""
        known = self.admitted.pop((key, values), None)
        if known is None:
            captured = self.captured[key]
            assert self.plan is not None and captured.formulas is not None
            facts = at(captured.facts, captured.formulas, values)
            made = self.schedule(facts, self.plan, captured.schedule)
            self.plan = self.plan.with_schedule(made)
            settled = decided(facts, captured.schedule)
            known = Admitted(facts=facts, settled=settled, schedule=captured.schedule)
        remember(self.admitted, (key, values), known, SIZES)  # the latest used last
        return known

    def forget(self) -> None:
        """Plan from the start with the next step."""
        self.plan = None
        self.admitted.clear()
        self.captured.clear()

    def schedule(self, facts: Facts, plan: Plan, like: Schedule | None = None) -> Schedule:
        """When the chunks move in a graph, with the activations of `like` where it has been
        rewritten already. LayoutError if it does not fit."""
        return schedule(
            facts,
            self.machine,
            self.limits,
            plan.layout,
            self.held_bytes(),
            self.options.micro_batches,
            like,
        )

    def first_plan(self, step: StepGraph, spare_bytes: int = 0) -> Plan:
        """Search for a plan that leaves `spare_bytes` of the device's budget alone; operators
        are timed only where something has to move."""
        plan = self._search(step, spare_bytes)
        return replace(plan, limits=self.limits)

    def _search(self, step: StepGraph, spare_bytes: int) -> Plan:
        pins = {path: Tier(tier) for path, tier in step.pinned.items()}
        limits = replace(self.limits, device=max(0, self.limits.device - spare_bytes))
        self.progress("planning")
        if self.company > 1:  # all of them time operators now, at once
            with real_mode():
                self.machine = self.timed(step, kept=True)
            annotate(step, self.machine, self.options.passes)
            return self._plan(step, limits, pins)
        plan = self._plan(step, limits, pins)
        if plan.layout.keeps_all and not self.times_all:
            return plan
        if self.machine.emulated:
            relax_heap()
        elif self.machine.unified:  # before the first large tensor: what a heap holds it keeps
            relax_heap() if plan.layout.all_home else bound_heap()
        with real_mode():
            timed = self.timed(step, kept=plan.layout.all_home or not self.machine.unified)
        if timed == self.machine:  # one that is not here: the facts are what they were
            return plan
        self.machine = timed
        annotate(step, self.machine, self.options.passes)
        self.progress("planning")
        return self._plan(step, limits, pins)

    def _plan(self, step: StepGraph, limits: Limits, pins: Mapping[str, Tier]) -> Plan:
        if self.make_plan is not None:
            return self.make_plan(step.facts(), self.machine, limits, pins)
        batches = self.options.micro_batches
        return search(step.facts(), self.machine, limits, pins, self.group, batches)

    def explained(self, plan: Plan) -> Plan:
        """The plan, which can say what its memory buys if its first graph was captured here."""
        captured = self.captured.get(plan.schedules[0].key)
        if captured is None:
            return plan
        batches = self.options.micro_batches
        return explained(captured.facts, self.machine, self.limits, {}, self.group, batches, plan)

    def timed(self, step: StepGraph, kept: bool) -> Machine:
        """The machine with seconds of the step's operators and of the optimizer's updates, from
        the user's cache or measured now; as it is where it is not here. `kept`: the C heap keeps
        what is freed, as it will in the run, so that fresh results take no page faults. Several
        ranks time at once, as they will compute: on one host they share its memory."""
        if not self.machine.fingerprint:
            return self.machine
        company = f"-{self.company}-ranks" if self.company > 1 else ""
        bounded = "" if kept else "-bounded"
        cache = OperatorCache(self.machine.fingerprint + company + bounded)
        missing = set(step.missing)
        once = self.optimizer is not None and self.optimizer.global_state  # nothing streams then
        updates = {} if self.updates is None or once else self.updates.specs(step.parameters)
        found = cache.known([*missing, *updates])
        specs: dict[str, fx.Node] = {}
        for node in step.nodes:
            key = operator_key(node) if node.op == "call_function" else ""
            if key in missing and key not in found:
                specs.setdefault(key, node)
        unknown = {key: update for key, update in updates.items() if key not in found}
        if specs or unknown:
            self.progress(f"timing {len(specs)} operators")
        calls = chain(unknown.items(), _calls(specs))
        with torch.random.fork_rng():  # timing a dropout must not move the user's stream
            fresh = measure_operators(calls, MEASURE_S)
        if fresh:
            cache.add(fresh)
        seconds = {**found, **fresh}
        machine = self.machine
        operators = {key: value for key, value in seconds.items() if key in missing}
        if operators:
            machine = machine.with_operators(operators)
        if updates and self.updates is not None and self.optimizer is not None:
            rate = self.updates.bytes_per_s(step.parameters, self.optimizer, seconds)
            if rate:
                machine = replace(machine, update_stream_bytes_per_s=rate)
        return machine


def _formulas(step: StepGraph) -> Formulas:
    """The sizes of a step with dynamic dimensions, as formulas of them."""
    hints = step.symbol_hints
    return Formulas.over(
        tuple(hints),
        names=tuple(step.size_names.get(symbol, "") for symbol in hints),
        captured=tuple(hints.values()),
        storages=step.storage_formulas,
        nodes=step.node_formulas,
    )


def remember(memory: dict[Any, Any], key: object, value: object, most: int) -> None:
    """Put an entry last and let the oldest go beyond `most`."""
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > most:
        del memory[next(iter(memory))]


def _calls(specs: Mapping[str, fx.Node]) -> Iterator[tuple[str, Callable[[], object]]]:
    for key, node in specs.items():
        call = sample_call(node.target, map_arg((node.args, node.kwargs), value), number)  # type: ignore[arg-type]
        if call is not None:
            yield key, call


def _thawed(layout: Layout, parameters: tuple[Parameter, ...]) -> Layout:
    """A layout in which everything stays, with the chunks marked trainable that hold a parameter
    that learns now: nothing moves, but gradients and states take memory."""
    learning = {parameter.path for parameter in parameters if parameter.trainable}
    chunks = tuple(
        replace(c, trainable=c.trainable or any(piece.path in learning for piece in c.slices))
        for c in layout.chunks
    )
    return replace(layout, chunks=chunks)


def _check_group(planned: Group, group: Group) -> None:
    """PlanError if a plan that was given is for other ranks."""
    if planned.ranks != group.ranks:
        raise PlanError(
            f"the plan is for {planned.ranks} ranks and {group.ranks} train this model: plan again"
        )
    if planned.shared and not group.shared:
        raise PlanError(
            "the plan is for ranks that share memory on one CPU host, and these do not: plan again"
        )


def _check_belongs(plan: Plan, parameters: tuple[Parameter, ...]) -> None:
    """PlanError if the plan was made for another model."""
    known = {
        piece.path: (piece.shape, chunk.dtype, chunk.trainable)
        for chunk in plan.layout.chunks
        for piece in chunk.slices
    }
    for parameter in parameters:
        if parameter.path not in known:
            raise PlanError(
                f"the plan knows no parameter {parameter.path!r}: it was made for another model, "
                "or the model has changed; compile a changed copy.deepcopy(model), which is plain"
            )
        shape, dtype, trainable = known[parameter.path]
        if (shape, dtype) != (parameter.shape, parameter.dtype):
            raise PlanError(
                f"parameter {parameter.path!r} is {parameter.dtype} {list(parameter.shape)}; the "
                f"plan has {dtype} {list(shape)}"
            )
        if parameter.trainable and not trainable:
            raise LayoutError(
                f"parameter {parameter.path!r} requires a gradient now and did not when the "
                "layout was made, and a new one cannot be made in the middle of a step: let it "
                "require one at the first call"
            )


def compute_device(model: torch.nn.Module) -> torch.device:
    """The device that the model's parameters are on; a meta model computes on the CPU
    unless a CUDA device is current."""
    devices = {p.device for p in model.parameters() if not p.is_meta}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise PlanError(f"the model's parameters are on {names}; elixir_fx computes on one device")
    if devices:
        return devices.pop()
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
