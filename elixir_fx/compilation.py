"""A compilation: one graph of Dynamo's on its way through AOTAutograd to what runs.

Between `capture`, which has Dynamo trace, and the owner of the captured graphs, whose `lower`
annotates, plans and rewrites. One partition function serves both entry points: it makes a
`StepGraph` of the joint graph, gives it to its owner and returns the two halves that it was
split into. A step that was stored skips all of that.

Uses underscored torch names; tried on torch 2.11 and 2.13. What it relies on: Dynamo lifts
parameters to graph inputs in the order of its placeholders and traces tensors that have no
storage; AOTAutograd keeps that order, tags joint nodes with their phase and describes tangents
by the output they belong to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor

from elixir_fx.codegen import Halves
from elixir_fx.dynamo import data_assigned_error, refused
from elixir_fx.errors import CaptureError, ElixirError
from elixir_fx.facts import Parameter, Role
from elixir_fx.joint import Tracing, is_added, is_tangent, take_checkpoints
from elixir_fx.kernels import Boxed
from elixir_fx.step import Dimension, Input, StepGraph, is_backward, memory_root, span


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """What the rest of the compiler makes of a captured step.

    `forward` and `backward` take and return what AOTAutograd's halves do; `backward` is None
    where nothing trains. `known` is what may be stored beside the halves, for `restore`; None
    where the step must not be stored.
    """

    halves: Halves
    forward: Boxed
    backward: Boxed | None
    known: object = None


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One captured graph, as its calls are checked.

    `paths` are those of its inputs, empty where the user gave them; `sizes` say where among the
    inputs each dynamic dimension is; `tangents` the output that each tangent belongs to, None
    where that is not known; `learns` which inputs are parameters that require a gradient, None
    for what is no parameter.
    """

    key: str
    paths: tuple[str, ...]
    sizes: tuple[Dimension, ...]
    tangents: tuple[int | None, ...]
    learns: tuple[bool | None, ...]


class Owner(Protocol):
    """Who captured graphs belong to: a session."""

    @property
    def title(self) -> str:
        """What is compiled, for messages: the model's class."""

    @property
    def tracing(self) -> Tracing:
        """How its graphs are traced."""

    @property
    def checkpoint_hints(self) -> bool | None:
        """Whether what the model checkpoints is where its planner begins; None where it is left
        to the tracing."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by path; a tied one under each of its paths."""

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers, likewise."""

    def size_names(self) -> Mapping[int, Mapping[int, str]]:
        """Names that the user gave to dimensions of the inputs under way, by id of the input."""

    def lower(self, step: StepGraph) -> Lowered:
        """What runs in the place of a step."""

    def cache_key(self, names: str) -> str | None:
        """What a stored step follows from beside its graph, `names` of its tensors among it;
        None where none is stored."""

    def restore(self, known: Any, halves: Halves) -> Lowered:
        """What runs in the place of a step that was stored."""

    def enter(self, captured: Captured, inputs: Sequence[Any]) -> None:
        """Called once the guards hold, outside of tracing, before anything of the step runs."""

    def leave(self, captured: Captured, inputs: Sequence[Any], results: Any) -> None:
        """Called with the forward's inputs and results."""


class Stale(BaseException):
    """A parameter was frozen or thawed, which torch 2.11 does not guard. Never leaves `capture`."""


def compile_graph(
    owner: Callable[[], Owner | None],
    module: fx.GraphModule,
    inputs: Sequence[Any],
    otherwise: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """Dynamo's graph in, the function that its code calls out.

    `otherwise` runs where a parameter was frozen or thawed and no guard noticed; None captures
    the model again. `owner` is a weak reference where something else keeps the owner alive:
    Dynamo keeps the function where no garbage collector looks.
    """
    alive = _alive(owner)
    parameters, buffers = list(alive.parameters()), list(alive.buffers())
    compilation = _Compilation(
        owner=owner,
        tracing=alive.tracing,
        title=alive.title,
        names=_names(parameters, buffers),
        parameters=tuple({id(p): p for _, p in parameters}.values()),
        buffer_bytes=sum({id(b): b.nbytes for _, b in buffers}.values()),
        inputs=tuple(inputs),
        sizes=alive.size_names(),
    )
    dynamic = any(isinstance(given, torch.SymInt) for given in inputs)
    # As in eager, a backward runs outside of the autocast that its forward was in.
    try:
        with (
            torch._functorch.config.patch(donated_buffer=False, backward_pass_autocast="off"),
            alive.tracing.context(),
            compilation.caching(None if dynamic else alive.cache_key(compilation.named())),
        ):
            compiled = aot_autograd(
                fw_compiler=compilation.compiler(compilation.forward),
                bw_compiler=compilation.compiler(compilation.backward),
                inference_compiler=compilation.compiler(compilation.inference),
                partition_fn=compilation.partition,
                decompositions=alive.tracing.decompositions(),
            )(alive.tracing.prepare(module, dynamic), list(inputs))
    except ElixirError as error:
        raise refused(error) from None
    except AssertionError as error:
        if "set_" not in str(error):
            raise
        raise refused(data_assigned_error(alive.title)) from None
    return compilation.guarded(compiled, otherwise)


def _alive(owner: Callable[[], Owner | None]) -> Owner:
    found = owner()
    if found is None:
        raise ElixirError("this step's model was deleted: keep the compiled model alive")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Name:
    """What a tensor of the model is called."""

    role: Role
    path: str
    aliases: tuple[str, ...]
    trainable: bool = False


def _names(
    parameters: Sequence[tuple[str, nn.Parameter]], buffers: Sequence[tuple[str, Tensor]]
) -> Mapping[int, Name]:
    """Parameters and buffers by the id of the tensor; tied ones under their first path."""
    paths: dict[int, list[str]] = {}
    roles: dict[int, Role] = {}
    trained: set[int] = set()
    members: tuple[tuple[Role, Sequence[tuple[str, Tensor]]], ...] = (
        (Role.PARAMETER, parameters),
        (Role.BUFFER, buffers),
    )
    for role, named in members:
        for path, member in named:
            paths.setdefault(id(member), []).append(path)
            roles.setdefault(id(member), role)
            if role is Role.PARAMETER and member.requires_grad:
                trained.add(id(member))
    return {
        key: Name(role=roles[key], path=first, aliases=tuple(rest), trainable=key in trained)
        for key, (first, *rest) in paths.items()
    }


@dataclass(kw_only=True, eq=False)
class _Compilation:
    """One graph on its way through AOTAutograd."""

    owner: Callable[[], Owner | None]
    tracing: Tracing
    title: str
    names: Mapping[int, Name]
    parameters: tuple[nn.Parameter, ...]
    buffer_bytes: int
    inputs: tuple[Any, ...]
    sizes: Mapping[int, Mapping[int, str]]  # names of dimensions, by id of the input
    step: StepGraph | None = None
    captured: Captured | None = None
    lowered: Lowered | None = None
    store: Any = None  # `step_cache`, where steps may be stored, and taken from there

    def partition(
        self, joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's partition function: the joint graph in, its two halves out."""
        hints = _alive(self.owner).checkpoint_hints
        if hints is not None:
            take_checkpoints(joint, hints=hints)
        joined = self.tracing.join(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        self.lower(joined, num_fwd_outputs, trains=True)
        assert self.lowered is not None
        forward, backward = self.lowered.halves.forward, self.lowered.halves.backward
        assert backward is not None
        # A copy: storing a step takes the notes off the backward that AOTAutograd has.
        return forward, _copied(backward) if self.store else backward

    def forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        metadata = self.metadata()
        if metadata is not None:
            metadata.bw_donated_idxs = []  # None forbids retain_graph
            self.check_changed_inputs(metadata.input_info)
        return self.functions[0]

    def backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        function = self.functions[1]
        assert function is not None
        return function

    def inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        """Where gradients are off: the forward alone."""
        (outputs,) = module.graph.output_node().args
        alone = self.tracing.alone(module, inputs)
        self.lower(alone, len(outputs), trains=False)  # type: ignore[arg-type]
        return self.functions[0]

    @property
    def functions(self) -> tuple[Boxed, Boxed | None]:
        """What runs in the place of the halves."""
        assert self.lowered is not None
        return self.lowered.forward, self.lowered.backward

    # -- steps that are stored ---------------------------------------------------------------

    def named(self) -> str:
        """What the inputs, and the parameters beside them, are called."""
        inputs = [self.name_of(given) for given in self.inputs]
        return repr([*inputs, *self.idle(), self.buffer_bytes])

    def name_of(self, given: object) -> Name:
        """What an input is called."""
        return self.names.get(id(given), Name(role=Role.INPUT, path="", aliases=()))

    @contextmanager
    def caching(self, key: str | None) -> Iterator[None]:
        """Around AOTAutograd's work: with a key it may take a stored step, or store one."""
        if key is None:
            yield
            return
        from elixir_fx import step_cache  # of Inductor, which other kernels do without

        self.store = step_cache
        with step_cache.caching(key, self):
            yield

    def compiler(self, function: Callable[..., Boxed]) -> Any:
        """One of AOTAutograd's compilers, whose results are stored if they may be."""

        def boxed(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            return _boxed(function(module, inputs))

        store = self.store
        if store is None:
            return boxed
        entry = None if function == self.backward else self.entry
        return store.cached(lambda *given: store.StepCode(boxed(*given), entry))

    def entry(self) -> Any:
        """What is stored of this step; None for one that changes inputs."""
        metadata = self.metadata()
        if metadata is not None and any(info.mutates_data for info in metadata.input_info):
            return None
        lowered = self.lowered
        if lowered is None or lowered.known is None:
            return None
        return self.store.Entry(halves=lowered.halves, known=(self.captured, lowered.known))

    def restore(self, entry: Any) -> None:
        """Take a stored step in the place of one that is traced."""
        self.captured, known = entry.known
        self.lowered = _alive(self.owner).restore(known, entry.halves)

    def metadata(self) -> Any:
        """What AOTAutograd knows of the graph under way."""
        context = torch._guards.TracingContext.try_get()
        return context.fw_metadata if context is not None else None

    def check_changed_inputs(self, infos: Sequence[Any]) -> None:
        """CaptureError where the backward needs an input that shares memory with another which the
        forward changes: autograd could not tell that it still has its value."""
        assert self.step is not None
        changed = {index for index, info in enumerate(infos) if info.mutates_data}
        if not changed:
            return
        saved = {
            memory_root(source).name
            for node in self.step.nodes
            if is_backward(node)
            for source in node.all_input_nodes
            if not is_backward(source)
        }
        addresses = [
            given.untyped_storage().data_ptr()
            if isinstance(given, Tensor) and given.layout is torch.strided
            else 0
            for given in self.inputs
        ]
        lost = {addresses[index] for index in changed} - {0}
        for index, item in enumerate(self.step.inputs):
            if index not in changed and addresses[index] in lost and item.node in saved:
                raise CaptureError(
                    f"{self.title}: the backward needs an input that shares memory with another, "
                    "which the forward changes in place: clone one of them before the call"
                )

    def lower(self, module: fx.GraphModule, forward_outputs: int, *, trains: bool) -> None:
        self.step = StepGraph(
            module=module,
            faking=_faking(module),
            compiled=self.tracing.compiled,
            forward_outputs=forward_outputs,
            inputs=self.placeholders(module),
            trains=trains,
            idle=self.idle(),
            buffer_bytes=self.buffer_bytes,
        )
        step = self.step
        self.captured = Captured(
            key=step.key,
            paths=tuple(item.path for item in step.inputs),
            sizes=tuple(where for where, _ in step.symbols),
            tangents=tangent_outputs(step) if trains else (),
            learns=tuple(i.trainable if i.role is Role.PARAMETER else None for i in step.inputs),
        )
        self.lowered = _alive(self.owner).lower(step)

    def placeholders(self, module: fx.GraphModule) -> tuple[Input, ...]:
        """Who the forward placeholders are: the graph's inputs, in their order."""
        nodes = [n for n in module.graph.nodes if n.op == "placeholder" and not is_added(n)]
        if len(nodes) != len(self.inputs):
            raise CaptureError(
                f"{self.title}: the captured graph has {len(nodes)} inputs "
                f"for {len(self.inputs)} tensors; inputs that share memory with each other and "
                "are changed in place are not supported: clone them before the call"
            )
        found = []
        for node, given in zip(nodes, self.inputs, strict=True):
            name = self.name_of(given)
            found.append(
                Input(
                    node=node.name,
                    role=name.role,
                    path=name.path,
                    aliases=name.aliases,
                    trainable=name.trainable,
                    sizes=self.sizes.get(id(given), {}),
                )
            )
        return tuple(found)

    def idle(self) -> tuple[Parameter, ...]:
        """The model's parameters that are no inputs of this graph: another graph may read
        them, and they need a home as well."""
        present = {id(given) for given in self.inputs}
        return tuple(
            _idle(parameter, self.names[id(parameter)])
            for parameter in self.parameters
            if id(parameter) not in present
        )

    def guarded(
        self, compiled: Callable[..., Any], otherwise: Callable[..., Any] | None
    ) -> Callable[..., Any]:
        """The function that Dynamo's code calls once the guards hold."""
        owner, captured = self.owner, self.captured
        assert captured is not None, "AOTAutograd has called one of the compilers"
        # Neither the graphs nor the model's tensors are needed any more. With a store the backward
        # is compiled by now; else AOTAutograd asks for it later.
        self.step, self.inputs, self.parameters = None, (), ()
        if self.store is not None:
            self.lowered = None

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def run(*args: Any) -> Any:
            alive = _alive(owner)
            for flag, value in zip(captured.learns, args, strict=False):
                if flag is not None and value.requires_grad is not flag:
                    if otherwise is not None:
                        return otherwise(*args)
                    raise Stale
            alive.enter(captured, args)
            results = compiled(*args)
            if captured.tangents:
                alive.leave(captured, args, results)
            return results

        return run  # type: ignore[no-any-return]


def _idle(parameter: Tensor, name: Name) -> Parameter:
    return Parameter(
        path=name.path,
        aliases=name.aliases,
        shape=tuple(parameter.shape),
        strides=tuple(parameter.stride()),
        dtype=str(parameter.dtype).removeprefix("torch."),
        itemsize=parameter.element_size(),
        span=span(parameter),
        trainable=name.trainable,
        reads=(),
        gradient=None,
    )


def _copied(half: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(half.graph, {}))
    graph.output_node().meta = dict(half.graph.output_node().meta)
    return fx.GraphModule(half, graph)


def _boxed(function: Boxed) -> Boxed:
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def _faking(module: fx.GraphModule) -> Callable[[], Any]:
    """The capture's fake mode, as a context factory."""
    fakes = (node.meta.get("val") for node in module.graph.nodes)
    modes = (fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    mode: Any = next(modes, None) or torch._subclasses.fake_tensor.FakeTensorMode()
    return lambda: mode


def tangent_outputs(step: StepGraph) -> tuple[int | None, ...]:
    """For every tangent, the forward output it belongs to; None where unknown."""
    described = (step.output.meta.get("desc") or [])[: step.forward_outputs]
    outputs = [desc for desc in described if type(desc).__name__ != "ForwardTokenAOTOutput"]
    positions = {desc: index for index, desc in enumerate(outputs)}
    return tuple(
        positions.get(getattr(node.meta.get("desc"), "output", None))
        for node in step.nodes
        if node.op == "placeholder" and is_tangent(node)
    )
