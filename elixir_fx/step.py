"""One captured training step: the joint graph, who its inputs are, what was done to it.

`StepGraph` is what every pass takes. Its nodes stand in order of execution: placeholders,
forward, then backward. Analyses write `facts`, transforms follow `schedule`, the runner
writes `history`.
"""

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from elixir_fx.errors import CaptureError
from elixir_fx.facts import Cost, Facts, Flow, Moves, OptimizerFacts, Parameter, Role, Storage
from elixir_fx.plan import SAVED, Chunk, Gather, Layout, Offload, Schedule

STEP_NAME = "elixir_step"  # begins the name of the function that calls a captured model
NOTE = "elixir"  # node.meta key of our notes; print_readable(additional_meta=["elixir"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """What one forward placeholder is: a parameter, a buffer or an input of the user's."""

    node: str
    role: Role
    path: str
    aliases: tuple[str, ...] = ()
    trainable: bool = False  # a parameter that requires a gradient
    sizes: Mapping[int, str] = field(default_factory=dict)  # names of its dimensions


@dataclass(frozen=True, slots=True)
class Dimension:
    """Where the inputs of a call say how large a dynamic dimension is: the input at `place`
    itself, or a dimension of its shape or strides."""

    place: int
    kind: str
    index: int

    def of(self, inputs: Sequence[Any]) -> int:
        """Its size in a call."""
        given = inputs[self.place]
        if self.kind == "itself":
            return int(given)
        sizes = given.shape if self.kind == "shape" else given.stride()
        return int(sizes[self.index])


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What one pass did: seconds, and nodes added and removed by operator."""

    name: str
    seconds: float
    added: Mapping[str, int]
    removed: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What a captured graph reads and returns.

    `reads`: by node and place among its inputs, the path of the parameter that this input is
    made of alone. `gradients`: names of the nodes that hold gradients, by path.
    """

    reads: Mapping[tuple[str, int], str]
    gradients: Mapping[str, str]


@dataclass(kw_only=True, eq=False)
class StepGraph:
    """The joint graph of one training step, or the forward alone where nothing trains.

    `forward_outputs` counts how many of the joint outputs belong to the forward; the rest
    are gradients, one for each forward placeholder (None where there is none). `faking` is
    the context in which tensors are made without memory.
    """

    module: fx.GraphModule
    faking: Callable[[], AbstractContextManager[object]]
    forward_outputs: int
    inputs: tuple[Input, ...]
    trains: bool
    compiled: bool = False  # its operators, in runs between nodes of ours
    recycles: bool = False  # memory of results, in generated code
    idle: tuple[Parameter, ...] = ()  # parameters of the model that this graph does not have
    buffer_bytes: int = 0  # of all buffers of the model
    optimizer: OptimizerFacts | None = None
    pinned: Mapping[str, str] = field(default_factory=dict)
    sparse: frozenset[str] = frozenset()  # parameters with sparse gradients, here or elsewhere
    # filled by the analysis passes
    storages: tuple[Storage, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    costs: tuple[Cost, ...] = ()
    moves: tuple[Moves, ...] = ()
    missing: tuple[str, ...] = ()
    flow: tuple[Flow, ...] = ()
    storage_formulas: Mapping[str, sympy.Expr] = field(default_factory=dict)  # bytes, by name
    node_formulas: Mapping[str, sympy.Expr] = field(default_factory=dict)  # bytes moved, by name
    # what the transform passes must keep
    reference: "Reference | None" = None
    # decided by the planner
    layout: Layout | None = None
    schedule: Schedule | None = None
    history: list[Record] = field(default_factory=list)

    def call(
        self,
        name: str,
        target: Callable[..., object],
        args: tuple[object, ...],
        fake: Callable[[], object],
    ) -> fx.Node:
        """A new call node at the graph's insertion point; `fake` makes its fake value."""
        graph = self.module.graph
        node: fx.Node = graph.create_node("call_function", target, args, name=name)  # type: ignore[arg-type]
        with self.faking():
            made = fake()
            # As in the traced graph: no view of autograd's, which would hold its base.
            node.meta["val"] = made.detach() if isinstance(made, Tensor) else made
        return node

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)

    @property
    def output(self) -> fx.Node:
        return self.module.graph.output_node()

    @cached_property
    def paths(self) -> Mapping[str, Input]:
        """Inputs by the name of their placeholder."""
        return {item.node: item for item in self.inputs}

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Names of the placeholders that are parameters."""
        return frozenset(item.node for item in self.inputs if item.role is Role.PARAMETER)

    @cached_property
    def symbols(self) -> tuple[tuple["Dimension", sympy.Symbol], ...]:
        """The dynamic dimensions: where to read them from a call's inputs, and their symbols."""
        return tuple((where, symbol) for symbol, (where, _) in self._symbols.items())

    @cached_property
    def symbol_hints(self) -> Mapping[sympy.Symbol, int]:
        """The dynamic dimensions in the same order, with their sizes in the captured call."""
        return {symbol: size for symbol, (_, size) in self._symbols.items()}

    @cached_property
    def _symbols(self) -> Mapping[sympy.Symbol, tuple["Dimension", int]]:
        placeholders = {node.name: node for node in self.nodes if node.op == "placeholder"}
        found: dict[sympy.Symbol, tuple[Dimension, int]] = {}
        for place, item in enumerate(self.inputs):
            for kind, index, size in _sizes(value(placeholders[item.node])):
                formula = expression(size)
                if isinstance(formula, sympy.Symbol):
                    found.setdefault(formula, (Dimension(place, kind, index), number(size)))
        return found

    @cached_property
    def size_names(self) -> Mapping[sympy.Symbol, str]:
        """What the user calls the dynamic dimensions. CaptureError for a name of what is a
        constant in this graph, or follows from another."""
        placeholders = {node.name: node for node in self.nodes if node.op == "placeholder"}
        found: dict[sympy.Symbol, str] = {}
        for item in self.inputs:
            for dimension, name in item.sizes.items():
                size = tensor(placeholders[item.node]).shape[dimension]
                formula = expression(size)
                if formula is None:
                    raise CaptureError(
                        f"dynamic_shapes: {name!r} cannot change: the model takes it for the "
                        f"constant {number(size)}, as a view or reshape with a written number, a "
                        "branch on the size or a mask of fixed length does. Let the model compute "
                        f"with x.shape[{dimension}], or leave {name!r} out of dynamic_shapes"
                    )
                other = found.setdefault(formula, name)
                if not isinstance(formula, sympy.Symbol) or other != name:
                    same = f"{other!r}" if other != name else str(formula)
                    raise CaptureError(
                        f"dynamic_shapes: {name!r} is no size of its own: in this model it is "
                        f"always {same}. Give both one name, or leave {name!r} out"
                    )
        return found

    @property
    def parameter_nodes(self) -> dict[str, fx.Node]:
        """Placeholders of parameters, by path."""
        return {
            self.paths[node.name].path: node
            for node in self.module.graph.nodes
            if node.op == "placeholder" and node.name in self.parameter_names
        }

    @property
    def parameter_paths(self) -> list[str]:
        """Paths of all parameters of the model, those that the graph does not have last."""
        return [*self.parameter_nodes, *(parameter.path for parameter in self.idle)]

    @property
    def gradients(self) -> dict[str, fx.Node]:
        """Nodes that hold the gradients of parameters, by path."""
        _, backward_outputs = self.results()
        found = {}
        for item, node in zip(self.inputs, backward_outputs, strict=False):
            if item.role is Role.PARAMETER and isinstance(node, fx.Node):
                found[item.path] = node
        return found

    def sparse_gradients(self) -> set[str]:
        """Parameters whose gradients are sparse tensors here. Those stay with autograd: neither
        the gradient nor the optimizer's states of such a parameter are ever away."""
        fakes = {path: tensor(node) for path, node in self.gradients.items()}
        return {path for path, fake in fakes.items() if fake.layout is not torch.strided}

    def returned_parameters(self) -> set[str]:
        """Parameters of which the forward returns a view: their memory must stay."""
        roots = {memory_root(node) for node in self.results()[0] if node and viewed_input(node)}
        return {path for path, node in self.parameter_nodes.items() if node in roots}

    def results(self) -> tuple[Sequence[fx.Node | None], Sequence[fx.Node | None]]:
        """The outputs of the forward, and those of the backward."""
        outputs = self.output.args[0]
        assert isinstance(outputs, (list, tuple))
        return outputs[: self.forward_outputs], outputs[self.forward_outputs :]  # type: ignore[return-value]

    def chunk(self, index: int) -> Chunk:
        assert self.layout is not None
        return self.layout.chunks[index]

    def moved(self, stay: Gather) -> Chunk | Offload:
        """What a stay is of: a chunk, or an activation that comes back."""
        if stay.chunk < SAVED:
            return self.chunk(stay.chunk)
        assert self.schedule is not None
        return self.schedule.offloads[stay.chunk - SAVED]

    def facts(self) -> Facts:
        """What is known, as plain data for the planner."""
        nodes = self.nodes
        return Facts(
            key=self.key,
            nodes=tuple(node.name for node in nodes),
            backward=self.backward_position,
            costs=self.costs,
            storages=self.storages,
            parameters=self.parameters,
            moves=self.moves,
            buffer_bytes=self.buffer_bytes,
            optimizer=self.optimizer,
            missing=self.missing,
            flow=self.flow,
        )

    @property
    def backward_position(self) -> int:
        """Position of the first backward node; the number of nodes if nothing trains."""
        nodes = self.nodes
        if not self.trains:
            return len(nodes)
        return next(i for i, n in enumerate(nodes) if is_backward(n) and n.op != "placeholder")

    @cached_property
    def key(self) -> str:
        """A digest of operators, shapes, dtypes and parameter paths: equal steps, equal keys."""
        digest = hashlib.sha256()
        for node in self.module.graph.nodes:
            path = self.paths[node.name].path if node.name in self.paths else ""
            text = f"{node.name}|{node.target}|{node.args}|{node.kwargs}|{path}|{describe(node)}\n"
            digest.update(text.encode())
        return digest.hexdigest()[:16]


FUSES = "elixir_fuses"  # node.meta key: a compiler may fuse the node's loops with its neighbours'
PHASE = "elixir_phase"  # node.meta key: "forward" or "backward"
CHECKPOINTED = "elixir_checkpointed"  # node.meta key: within a checkpoint of the model's own
AGAIN = "elixir_again"  # node.meta key of a repetition: the name of the node that it repeats
STAY = "elixir_stay"  # node.meta key: the planned Gather that a node of ours carries out


def is_backward(node: fx.Node) -> bool:
    """Whether the node runs in the backward. New nodes inherit it through `mark`."""
    return node.meta.get(PHASE) == "backward"


def mark(
    node: fx.Node,
    *,
    backward: bool,
    note: str | None = None,
    stay: Gather | None = None,
) -> fx.Node:
    """Give a node its phase and, if it is one of ours, the note printed above it and the
    stay in the gather cache that it belongs to."""
    node.meta[PHASE] = "backward" if backward else "forward"
    if note is not None:
        node.meta[NOTE] = note
    if stay is not None:
        node.meta[STAY] = stay
    return node


def named(name: str, *, backward: bool) -> str:
    """The name of a node of ours; a number at its end keeps its meaning in either phase."""
    return f"{name}_backward" if backward else name


def stay_of(node: fx.Node) -> Gather:
    """The planned stay that a gather, prefetch or release node belongs to."""
    stay = node.meta[STAY]
    assert isinstance(stay, Gather)
    return stay


def value(node: fx.Node) -> object:
    """The fake value of a node: what it would return, without memory behind it."""
    return node.meta.get("val")


def tensor(node: fx.Node) -> Tensor:
    """The fake tensor of a node that has exactly one."""
    fake = value(node)
    assert isinstance(fake, Tensor), node
    return fake


def number(value: object) -> int:
    """A size as a number. One that depends on a dynamic dimension has the value that it had
    in the call that was captured; one that depends on the values of tensors counts as 1."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return int(hint) if hint is not None else 1
    return int(value)  # type: ignore[call-overload, no-any-return]


def expression(value: object) -> sympy.Expr | None:
    """A size as a formula of the dynamic dimensions; None for a constant."""
    if not isinstance(value, torch.SymInt):
        return None
    formula: sympy.Expr = value.node.expr
    return formula if formula.free_symbols else None


def _sizes(given: object) -> Iterator[tuple[str, int, object]]:
    """Every size that an input has: kind, index, and the size."""
    if not isinstance(given, Tensor):
        yield "itself", 0, given
    elif given.layout is torch.strided:
        yield from (("shape", index, size) for index, size in enumerate(given.shape))
        yield from (("stride", index, size) for index, size in enumerate(given.stride()))


def is_symbolic(tensor: Tensor) -> bool:
    """Whether a fake tensor's geometry depends on a dynamic dimension."""
    return any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride()))


def storage_bytes(tensor: Tensor) -> int | torch.SymInt:
    """Bytes of the memory that a fake tensor lies in; a sparse one's are not known before."""
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().nbytes()


def span(tensor: Tensor) -> int:
    """Elements of memory from a tensor's first to its last."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def source_line(node: fx.Node) -> str:
    """The user's "file:line" that a node came from, or an empty string."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    lines = [line for line in frames if f"in {STEP_NAME}" not in line]
    if not lines:
        return ""
    parts = lines[-1].split('"')
    number = lines[-1].split("line ")[-1].split(",")[0]
    return f"{parts[1].rsplit('/', 1)[-1]}:{number}"


def describe(node: fx.Node) -> str:
    """A node's fake value in short: f32[16, 8], or a tuple of such."""
    return _describe(value(node))


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def _describe(fake: object) -> str:
    if isinstance(fake, Tensor):
        dtype = _SHORT.get(fake.dtype, str(fake.dtype).removeprefix("torch."))
        shape, strides = (list(map(number, sizes)) for sizes in (fake.shape, fake.stride()))
        return f"{dtype}{shape}@{strides}"
    if isinstance(fake, (list, tuple)):
        return f"({', '.join(_describe(item) for item in fake)})"
    return repr(fake)


# Operators whose result lies in their input's memory though their schema does not say so.
_SILENT_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})


def is_item(node: fx.Node) -> bool:
    """Whether the node picks one result of an operator that returns several."""
    return node.op == "call_function" and node.target is operator.getitem


def identifier(path: str) -> str:
    """A parameter's or buffer's path as a Python name; empty for an empty path."""
    name = "".join(letter if letter.isalnum() else "_" for letter in path)
    return f"_{name}" if name[:1].isdigit() else name


def operator_name(node: fx.Node) -> str:
    """The operator's qualified name ("aten::mm"), or an empty string for anything else."""
    target: Any = node.target
    return str(target.name()).split(".")[0] if hasattr(target, "is_view") else ""


def viewed_input(node: fx.Node) -> fx.Node | None:
    """The argument that a node's result is a view of, or None if it allocates.

    Reading an element of a list of views (split, unbind) is a view of the list's input; an
    in-place operator returns what it wrote into.
    """
    if is_item(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return viewed_input(source)
    name = operator_name(node)
    if getattr(node.target, "is_view", False) or name in _SILENT_VIEWS or name.endswith("_"):
        return next(iter(node.all_input_nodes), None)  # none: a view of a constant
    return None


def memory_root(node: fx.Node) -> fx.Node:
    """The node that allocated what `node` looks at: a placeholder, a result, or one element
    of a multiple result (then the getitem node)."""
    current = node
    while (source := viewed_input(current)) is not None:
        current = source
    return current


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Every node that reads `node`'s memory, directly or through views."""
    for user in node.users:
        yield user
        if viewed_input(user) is not None and memory_root(user) is memory_root(node):
            yield from readers(user)
