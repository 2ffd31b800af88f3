"""Captured steps for tests: of a model, annotated, planned, rewritten, copied, run.

step = captured(mlp(8, 16, 4))            # joint graph, annotated
plan = planned(step, share=0.3)           # on the emulated accelerator
rewrite(copied(step), plan, PIPELINE)     # a copy may be broken, the original stays
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from graphs import Example
from torch import Tensor, fx, nn

from elixir_fx.capture import Capture, pretend_on
from elixir_fx.errors import ElixirError
from elixir_fx.joint import EAGER, Tracing
from elixir_fx.machine import Tier
from elixir_fx.pipeline import PIPELINE, annotate, rewrite
from elixir_fx.plan import Limits, Plan
from elixir_fx.planner.search import search, smallest
from elixir_fx.runtime.probe import probe
from elixir_fx.step import NOTE, StepGraph
from elixir_fx.testing import emulated
from elixir_fx.units import GIB

MACHINE = emulated(device_memory=64 * GIB, host_memory=64 * GIB)
TIERS = Limits(device=64 * GIB, host=64 * GIB)


class _CapturedError(ElixirError):
    """Ends a capture once it has its graph."""


class _Owner:
    """Takes the first captured step of a model and stops there."""

    title = "model"
    checkpoint_hints = True

    def __init__(self, model: nn.Module, tracing: Tracing = EAGER) -> None:
        self.model = model
        self.tracing = tracing
        self.found: list[StepGraph] = []

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(remove_duplicate=False)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_buffers(remove_duplicate=False)

    def cache_key(self, names: str) -> None:
        return None

    def size_names(self) -> dict[int, dict[int, str]]:
        return {}

    def lower(self, step: StepGraph) -> NoReturn:
        self.found.append(step)
        raise _CapturedError

    def enter(self, captured: object, inputs: object) -> None:
        pass

    def leave(self, captured: object, inputs: object, results: object) -> None:
        pass


def captured(
    example: Example, *, grad: bool = True, optimizer: str = "adamw", tracing: Tracing = EAGER
) -> StepGraph:
    """The annotated step of a model's call on its first batch; nothing runs."""
    batch = example.batches(1)[0]
    return captured_model(example.build(), batch, grad=grad, optimizer=optimizer, tracing=tracing)


def captured_model(
    model: nn.Module,
    batch: Any,
    *,
    grad: bool = True,
    optimizer: str = "adamw",
    tracing: Tracing = EAGER,
) -> StepGraph:
    owner = _Owner(model, tracing)
    capture = Capture(model, owner)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    try:
        with torch.set_grad_enabled(grad), pretend_on(model, torch.device("cpu")):
            capture(*args, **kwargs)
    except _CapturedError:
        pass
    (step,) = owner.found
    step.optimizer = probe(optimizer)
    annotate(step, MACHINE, PIPELINE)
    return step


def planned(step: StepGraph, share: float, *, away: bool = False) -> Plan:
    """The plan for a budget between the least (0) and all (1), with host memory beside it;
    `step` learns what was decided. `away` pins every parameter to the host."""
    facts = step.facts()
    pins = dict.fromkeys(step.parameter_paths, Tier.HOST) if away else {}
    least = smallest(facts, MACHINE, TIERS, pins)
    everything = search(facts, MACHINE, TIERS).forecast.peak_device_bytes
    device = least + int(share * max(0, everything - least))
    plan = search(facts, MACHINE, replace(TIERS, device=device), pins)
    step.layout, step.schedule = plan.layout, plan.schedules[0]
    return plan


def copied(step: StepGraph) -> StepGraph:
    """The step with a graph of its own; fakes, notes and names are shared."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in step.module.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
        known[node].name = node.name
    return replace(step, module=fx.GraphModule(step.module, graph), history=list(step.history))


def printed(step: StepGraph, *, notes: bool = False) -> str:
    """The graph, one line a node; `x` stands for tensors' reprs that no test is about."""
    lines = []
    for node in step.nodes:
        if notes and NOTE in node.meta:
            lines.append(f"# {node.meta[NOTE]}")
        if node.op == "output":
            lines.append(f"return {_text(node.args[0])}")
        elif node.op == "call_function":
            arguments = [*map(_text, node.args)]
            arguments += [f"{name}={_text(value)}" for name, value in node.kwargs.items()]
            lines.append(f"{node.name} = {_operator(node)}({', '.join(arguments)})")
    return "\n".join(lines)


def _operator(node: fx.Node) -> str:
    return str(node.target) if hasattr(node.target, "overloadpacket") else "getitem"


def _text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (tuple, list)):
        return f"[{', '.join(map(_text, argument))}]"
    return str(argument)


class Home:
    """A runtime for tests that keeps chunks as plain tensors; what generated code would call.

    `gradients` are filled by reduces. Released chunks are filled with NaN or -1: who reads
    them after, reads that.
    """

    empty = None

    def __init__(self, step: StepGraph, parameters: dict[str, Tensor]) -> None:
        assert step.layout is not None
        self.step = step
        self.parameters = parameters
        self.gradients: dict[str, Tensor] = {}
        self.live: dict[int, Tensor] = {}

    def gather(self, chunk: int, offset: int) -> Tensor:
        known = self.step.chunk(chunk)
        flat = torch.zeros(known.numel, dtype=getattr(torch, known.dtype))
        for piece in known.slices:
            part = flat[piece.offset : piece.offset + piece.span]
            part.as_strided(piece.shape, piece.strides).copy_(self.parameters[piece.path])
        assert chunk not in self.live
        self.live[chunk] = flat
        return flat

    def prefetch(self, chunk: int, offset: int) -> None:
        assert chunk not in self.live

    def release(self, chunk: int) -> None:
        flat = self.live.pop(chunk)
        flat.fill_(torch.nan if flat.is_floating_point() else -1)

    def reduce(
        self, chunk: int, slices: list[int], gradients: list[Tensor], owned: Sequence[bool]
    ) -> list[Tensor | None]:
        pieces = self.step.chunk(chunk).slices
        for index, gradient in zip(slices, gradients, strict=True):
            assert pieces[index].path not in self.gradients
            self.gradients[pieces[index].path] = gradient.clone()
        return [None] * len(gradients)


def on_chunks(
    step: StepGraph, plan: Plan, model: nn.Module
) -> list[tuple[Tensor | None, Tensor | None]]:
    """What a step gives, and what it gives once it is rewritten, on chunks that turn to NaN when
    they are released; gradients from their homes."""
    values = step_inputs(step, model)
    expected = run(step, values)
    new = copied(step)
    rewrite(new, plan, PIPELINE)
    home = Home(new, {path: p.detach() for path, p in model.named_parameters()})
    got = run(new, values, home)
    assert not home.live
    paths = {item.path: index for index, item in enumerate(step.inputs)}
    for path, gradient in home.gradients.items():
        got[step.forward_outputs + paths[path]] = gradient
    return list(zip(expected, got, strict=True))


def step_inputs(step: StepGraph, model: nn.Module, seed: int = 0) -> list[Tensor]:
    """Values for the placeholders: the model's parameters and buffers, random inputs (of
    small whole numbers where they are integers) and tangents."""
    generator = torch.Generator().manual_seed(seed)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = []
    for node in step.nodes:
        if node.op == "placeholder":
            known = step.paths.get(node.name)
            if known is not None and known.path:
                values.append(named[known.path].detach().clone())
            else:
                values.append(_random(node.meta["val"], generator))
    return values


def _random(fake: Tensor, generator: torch.Generator) -> Tensor:
    if not fake.is_floating_point():
        return torch.randint(0, 3, tuple(fake.shape), generator=generator).to(fake.dtype)
    value = torch.randn(tuple(fake.shape), generator=generator).to(fake.dtype)
    return torch.empty_strided(tuple(fake.shape), fake.stride(), dtype=fake.dtype).copy_(value)


def run(step: StepGraph, values: Sequence[Tensor], home: Any = None) -> list[Any]:
    """Run the joint graph node by node; our nodes call `home`."""
    calls: dict[Any, Callable[..., Any]] = {}
    if home is not None:
        calls = {
            torch.ops.elixir.gather.default: lambda chunk, *_: home.gather(chunk, 0),
            torch.ops.elixir.prefetch.default: lambda chunk: home.prefetch(chunk, 0),
            torch.ops.elixir.release.default: home.release,
            torch.ops.elixir.reduce.default: lambda c, s, g: home.reduce(c, s, g, ()),
        }

    class Interpreter(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return calls.get(target, target)(*args, **kwargs)

    torch.manual_seed(0)
    # A copy: the captured module's own code generator would nest the results.
    return list(Interpreter(copied(step).module).run(*[value.clone() for value in values]))
