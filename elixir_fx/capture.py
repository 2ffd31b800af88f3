"""Capture: a call of a model becomes a joint graph, and runs only under its guards.

First of the five verbs, and the one seam to PyTorch. `compile_graph` takes a graph that Dynamo
traced to AOTAutograd with one partition function, which makes a `StepGraph` of the joint
forward and backward, gives it to its owner's `lower` (annotate, plan, rewrite) and returns
the two halves that code generation split it into. Two entry points come through it:
`Capture`, the guarded call of compile(), traces a whole model as torch.compile(fullgraph=True)
does; `backend` is handed one region after the other by a torch.compile of the user's. Dynamo's
guards decide which captured graph serves a call. A dimension that changes becomes a symbol.

One of the few files that use underscored torch names (tests/test_layers.py lists them). Tried on
torch 2.11 and 2.13. What it relies on: Dynamo lifts parameters to graph inputs in
the order of its placeholders and traces tensors that have no storage; AOTAutograd keeps that
order, tags joint nodes with their phase and describes tangents by the output they belong to.
"""

import builtins
import types
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dispatch.python import no_python_dispatcher
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from elixir_fx.codegen import Halves
from elixir_fx.dynamo import (
    as_in_eager,
    capture_error,
    data_assigned_error,
    data_dependent_error,
    loggers,
    refused,
)
from elixir_fx.errors import CaptureError, ElixirError
from elixir_fx.facts import Parameter, Role
from elixir_fx.joint import Tracing, is_added, is_tangent, order_phases
from elixir_fx.kernels import Boxed
from elixir_fx.step import (
    STEP_NAME,
    Dimension,
    Input,
    StepGraph,
    is_backward,
    memory_root,
    span,
)

GRAPHS = 8  # captured graphs that a model keeps


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """What the rest of the compiler makes of a captured step.

    `forward` and `backward` take and return what AOTAutograd's halves do; `backward` is None
    where nothing trains.
    """

    halves: Halves
    forward: Boxed
    backward: Boxed | None


@dataclass(frozen=True, kw_only=True)
class Captured:
    """One captured graph, as its calls are checked.

    `paths` are those of its inputs, empty where the user gave them; `sizes` say where among the
    inputs each dynamic dimension is; `tangents` the output that each tangent belongs to, None
    where that is not known.
    """

    key: str
    paths: tuple[str, ...]
    sizes: tuple[Dimension, ...]
    tangents: tuple[int | None, ...]


class Owner(Protocol):
    """Who captured graphs belong to: a session."""

    @property
    def title(self) -> str:
        """What is compiled, for messages: the model's class."""

    @property
    def tracing(self) -> Tracing:
        """How its graphs are traced."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by path; a tied one under each of its paths."""

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers, likewise."""

    def lower(self, step: StepGraph) -> Lowered:
        """What runs in the place of a step."""

    def enter(self, captured: Captured, inputs: Sequence[Any]) -> None:
        """Called once the guards hold, outside of tracing, before anything of the step runs."""

    def leave(self, captured: Captured, inputs: Sequence[Any], results: Any) -> None:
        """Called with the forward's inputs and results."""


class _Stale(BaseException):
    """A parameter was frozen or thawed, which torch 2.11 does not guard. Never leaves this file."""


class Capture:
    """The guarded call of one model, all of it in one graph.

    `owner` is told of every captured graph and every call.
    """

    def __init__(self, model: nn.Module, owner: Owner) -> None:
        self.model = model
        self.graphs = 0
        # Code and globals of its own: there Dynamo puts what it made, which dies with the model.
        # A name of its own: by it Dynamo remembers which sizes have changed.
        own = {"__name__": __name__, "__builtins__": builtins}
        name = f"{STEP_NAME}_{uuid.uuid4().hex}"
        function = types.FunctionType(_step.__code__.replace(co_name=name), own)
        self._code = function.__code__
        # What Dynamo made refers back to the code, by ways that no garbage collector sees.
        end = weakref.finalize(self, reset_code, self._code)
        end.atexit = False
        backend = _counted(self, owner)  # Dynamo keeps every backend that it ever saw
        self.call = torch.compile(function, backend=backend, fullgraph=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured step for these inputs, capturing it first if no guard holds.

        CaptureError names what cannot be captured, with file and line; ForwardError is one
        that the model's own code caused, by raising.
        """
        if self.graphs > GRAPHS:
            self.forget()
        try:
            with torch._dynamo.config.patch(
                ignore_logging_functions=loggers(),
                skip_nnmodule_hook_guards=False,
                specialize_float=True,
                recompile_limit=GRAPHS + 2,
            ):
                try:
                    return self.call(self.model, *args, **kwargs)
                except _Stale:
                    self.forget()
                    return self.call(self.model, *args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            raise data_dependent_error(self.model, error) from None
        except BackendCompilerFailed as error:
            raise CaptureError(f"{type(self.model).__name__}: lowering failed: {error}") from error
        except TorchDynamoException as error:
            raise capture_error(self.model, error) from None

    def forget(self) -> None:
        """Drop every captured graph."""
        reset_code(self._code)
        self.graphs = 0


def _counted(capture: Capture, owner: Owner) -> Callable[..., Any]:
    """A Dynamo backend that keeps neither `capture` nor `owner` alive."""
    counted, belongs = weakref.ref(capture), weakref.ref(owner)

    def elixir_fx(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        alive = counted()
        if alive is not None:
            alive.graphs += 1
        return compile_graph(belongs, module, inputs, None)

    return elixir_fx


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
    )
    dynamic = any(isinstance(given, torch.SymInt) for given in inputs)
    # As in eager, a backward runs outside of the autocast that its forward was in.
    try:
        with (
            torch._functorch.config.patch(donated_buffer=False, backward_pass_autocast="off"),
            alive.tracing.context(),
        ):
            compiled = aot_autograd(
                fw_compiler=compilation.forward,
                bw_compiler=compilation.backward,
                inference_compiler=compilation.inference,
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


def _step(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


@contextmanager
def real_mode() -> Iterator[None]:
    """A context in which tensors are real although a capture is going on.

    Without the Python dispatcher, too: an operator that goes through it holds the interpreter,
    which deadlocks with a communication's own threads.
    """
    with no_python_dispatcher(), _disable_current_modes():
        yield


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
    step: StepGraph | None = None
    lowered: Lowered | None = None

    def partition(
        self, joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's partition function: the joint graph in, its two halves out."""
        joined = self.tracing.join(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        self.lower(joined, num_fwd_outputs, trains=True)
        assert self.lowered is not None and self.lowered.halves.backward is not None
        return self.lowered.halves.forward, self.lowered.halves.backward

    def forward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        assert self.lowered is not None
        metadata = self.metadata()
        if metadata is not None:
            metadata.bw_donated_idxs = []  # None forbids retain_graph
            self.check_changed_inputs(metadata.input_info)
        return _boxed(self.lowered.forward)

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

    def backward(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        assert self.lowered is not None and self.lowered.backward is not None
        return _boxed(self.lowered.backward)

    def inference(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        """Where gradients are off: the forward alone."""
        (outputs,) = module.graph.output_node().args
        self.lower(self.tracing.alone(module, inputs), len(outputs), trains=False)  # type: ignore[arg-type]
        assert self.lowered is not None
        return _boxed(self.lowered.forward)

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
        self.lowered = _alive(self.owner).lower(self.step)

    def placeholders(self, module: fx.GraphModule) -> tuple[Input, ...]:
        """Who the forward placeholders are: the graph's inputs, in their order."""
        nodes = [n for n in module.graph.nodes if n.op == "placeholder" and not is_added(n)]
        if len(nodes) != len(self.inputs):
            raise CaptureError(
                f"{self.title}: the captured graph has {len(nodes)} inputs "
                f"for {len(self.inputs)} tensors; inputs that share memory with each other and "
                "are changed in place are not supported: clone them before the call"
            )
        plain = Name(role=Role.INPUT, path="", aliases=())
        found = []
        for node, given in zip(nodes, self.inputs, strict=True):
            name = self.names.get(id(given), plain)
            found.append(
                Input(
                    node=node.name,
                    role=name.role,
                    path=name.path,
                    aliases=name.aliases,
                    trainable=name.trainable,
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
        owner, step = self.owner, self.step
        assert step is not None, "AOTAutograd has called one of the compilers"
        learns = [item.trainable if item.role is Role.PARAMETER else None for item in step.inputs]
        captured = Captured(
            key=step.key,
            paths=tuple(item.path for item in step.inputs),
            sizes=tuple(where for where, _ in step.symbols),
            tangents=tangent_outputs(step) if step.trains else (),
        )
        # Neither the joint graph nor the model's tensors are needed any more.
        self.step, self.inputs, self.parameters = None, (), ()

        @torch._dynamo.disable  # type: ignore[untyped-decorator]
        def run(*args: Any) -> Any:
            alive = _alive(owner)
            for flag, value in zip(learns, args, strict=False):
                if flag is not None and value.requires_grad is not flag:
                    if otherwise is not None:
                        return otherwise(*args)
                    raise _Stale
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


def _boxed(function: Boxed) -> Boxed:
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def _faking(module: fx.GraphModule) -> Callable[[], Any]:
    """The capture's fake mode, as a context factory."""
    fakes = (node.meta.get("val") for node in module.graph.nodes)
    modes = (fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    mode: Any = next(modes, None) or torch._subclasses.fake_tensor.FakeTensorMode()
    return lambda: mode


def _join_eager(joint: fx.GraphModule, inputs: Sequence[Any], **others: Any) -> fx.GraphModule:
    order_phases(joint, trains=True)
    _fill_in_place(joint)
    return joint


def _alone_eager(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    order_phases(module, trains=False)
    _fill_in_place(module)
    return module


def _fill_in_place(module: fx.GraphModule) -> None:
    """Dropout's mask again as eager draws it: into memory that lies as the input does. Tracing
    makes `empty_like(x).bernoulli_(p)` a bernoulli that returns contiguous memory, and numbers
    are drawn in the order of memory."""
    aten = torch.ops.aten
    for node in module.graph.nodes:
        if node.target is not aten.bernoulli.p or not isinstance(node.args[0], fx.Node):
            continue
        memory = node.args[0]
        if memory.target is aten.empty_like.default and len(memory.users) == 1:
            node.target = aten.bernoulli_.float
            node.meta["val"] = memory.meta["val"]


EAGER = Tracing(prepare=as_in_eager, join=_join_eager, alone=_alone_eager, context=nullcontext)


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


@contextmanager
def pretend_on(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a model on meta pass for one on `device` while it is captured: its tensors are
    replaced by others of the same geometry that have no memory behind them."""
    stand_ins: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for members in held:
            for name, tensor in members.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in stand_ins:
                        stand_ins[id(tensor)] = _stand_in(tensor, device)
                    replaced.append((members, name, tensor))
    for members, name, tensor in replaced:
        members[name] = stand_ins[id(tensor)]
    try:
        yield
    finally:
        for members, name, tensor in replaced:
            members[name] = tensor


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    shell = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.dim():  # a number is small, and capturing may look at it
        shell.untyped_storage().resize_(0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(shell, requires_grad=tensor.requires_grad)
    return shell


def ordinary_inputs(inputs: Any) -> Any:
    """Inputs that autograd can work with: inference tensors become others of the same geometry.
    For captures that run nothing."""

    def ordinary(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_inference():
            return torch.empty_like(value)
        return value

    return pytree.tree_map(ordinary, inputs)
