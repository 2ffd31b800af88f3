"""Code generation: a transformed step becomes two functions that run it.

Last of the five verbs. The joint graph is split at the phase boundary: what the backward
reads of the forward is saved, nothing is moved across. Each half becomes straight-line Python
in which our nodes are calls of the runtime that the module holds, arguments arrive in one
list that is emptied at once (boxed), and every value is dropped after its last reader, so
that activations die when they are used.

Uses underscored torch names; tried on torch 2.11 and 2.13.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen

from elixir_fx import ops
from elixir_fx.kernels import SHARED, Compiled, Empty
from elixir_fx.recycling import COPIES, OUT_VARIANTS, ROOM, ROOM_BEHIND, recycled_root
from elixir_fx.step import (
    StepGraph,
    identifier,
    is_backward,
    is_item,
    memory_root,
    number,
    stay_of,
    storage_bytes,
    tensor,
    value,
    viewed_input,
)

ROOT = "elixir_root"  # of a backward's placeholders: the recycled result they lie in, by name
SAVED = "elixir_saved"  # node.meta key of a backward's placeholders


class Runtime(Protocol):
    """What generated code calls. `empty`: what makes the memory of compiled runs, if that is not
    left to them: so that it can be watched, or used again."""

    empty: Empty | None

    def gather(self, chunk: int, offset: int) -> Tensor: ...
    def prefetch(self, chunk: int, offset: int) -> None: ...
    def release(self, chunk: int) -> None: ...
    def reduce(
        self, chunk: int, slices: list[int], gradients: list[Tensor], owned: tuple[bool, ...]
    ) -> list[Tensor | None]: ...
    def offload(self, value: Tensor) -> Tensor: ...
    def recall(self, handle: Tensor, offset: int) -> None: ...
    def reload(self, handle: Tensor, offset: int) -> Tensor: ...
    def drop(self, handle: Tensor) -> None: ...
    def take(
        self,
        nbytes: int,
        room_bytes: int,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor: ...
    def give(self, value: Tensor, room_bytes: int) -> None: ...


Executable = Callable[[Runtime, list[Any]], Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Halves:
    """The two halves of a step as graph modules; `backward` is None where nothing trains."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None


class BoxedCode(CodeGen):
    """Functions that take one list and empty it, so that their caller keeps nothing alive."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: object) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        lines = ["def forward(self, boxed):"]
        if names:
            lines.append(f"    {', '.join(names)}, = boxed")
        lines.append("    boxed.clear()")
        return "\n".join(lines)

    def process_inputs(self, *args: Any) -> Any:
        return args[0]


def split(step: StepGraph) -> Halves:
    """Split the joint graph at the phase boundary, in the order that AOTAutograd expects:
    forward returns its outputs, then the tensors that are saved, then the sizes; backward takes
    the sizes, the tensors, then tangents.
    """
    if not step.trains:
        return Halves(forward=step.module, backward=None)
    forward_outputs, backward_outputs = step.results()
    forward = [node for node in step.nodes if not is_backward(node) and node.op != "output"]
    backward = [n for n in step.nodes if is_backward(n) and n.op not in ("output", "placeholder")]
    tangents = [node for node in step.nodes if node.op == "placeholder" and is_backward(node)]
    saved = _saved(forward, backward, backward_outputs, compiled=step.compiled)
    descriptions = step.output.meta.get("desc")
    first = descriptions[: step.forward_outputs] if descriptions else None
    tensors = [node for node in saved if isinstance(value(node), Tensor)]
    sizes = [node for node in saved if not isinstance(value(node), Tensor)]
    return Halves(
        forward=_half(step, forward, [], [*forward_outputs, *tensors, *sizes], first),
        backward=_half(step, backward, [*sizes, *tensors, *tangents], list(backward_outputs), None),
    )


def _saved(
    forward: list[fx.Node],
    backward: list[fx.Node],
    outputs: Sequence[fx.Node | None],
    *,
    compiled: bool,
) -> list[fx.Node]:
    """Forward values that the backward reads. Those that autograd need not guard with version
    counters go last, as AOTAutograd expects."""
    made = set(forward)
    wanted = {s: None for node in backward for s in node.all_input_nodes if s in made}
    if compiled:  # which asks for the dynamic dimensions by name
        wanted.update({node: None for node in forward if _is_dimension(node)})
    wanted.update({node: None for node in outputs if node in made and node is not None})
    ordered = [node for node in forward if node in wanted]
    return sorted(ordered, key=lambda n: bool(n.meta.get("saved_tensor_with_no_vc_check", False)))


def _is_dimension(node: fx.Node) -> bool:
    """Whether a node is an input that is a dynamic dimension, as a number."""
    return node.op == "placeholder" and isinstance(value(node), torch.SymInt)


def _half(
    step: StepGraph,
    body: list[fx.Node],
    inputs: list[fx.Node],
    outputs: Sequence[fx.Node | None],
    descriptions: Sequence[Any] | None,
) -> fx.GraphModule:
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        known[node] = _placeholder(step, graph, node)
    for node in body:
        if node.op == "placeholder":
            known[node] = _placeholder(step, graph, node)
        else:
            known[node] = graph.node_copy(node, known.__getitem__)
    result = graph.output(tuple(known[node] if node is not None else None for node in outputs))
    result.meta = dict(step.output.meta)
    if descriptions is not None:
        extra = [None] * (len(outputs) - len(descriptions))
        result.meta["desc"] = [*descriptions, *extra]
    else:
        result.meta.pop("desc", None)
    return fx.GraphModule(step.module, graph)


def _placeholder(step: StepGraph, graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A placeholder named as a reader knows it: by the path of its parameter or buffer."""
    known = step.paths.get(node.name)
    name = identifier(known.path) if known is not None else ""
    placeholder = graph.placeholder(name or node.name)
    placeholder.meta = dict(node.meta)
    root = memory_root(node)
    made = root.op != "placeholder" and root.target is not ops.OFFLOAD  # a handle is a number
    placeholder.meta[SAVED] = made and isinstance(value(node), Tensor)
    placeholder.meta[ROOT] = recycled_root(node)
    placeholder.meta.pop(ROOM, None)
    return placeholder


def is_activation(placeholder: fx.Node) -> bool:
    """Whether a backward's placeholder is a value that the forward made and saved."""
    return bool(placeholder.meta.get(SAVED))


def executable(half: fx.GraphModule) -> Executable:
    """The half as a function of a runtime, which its elixir nodes call, and one list."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    owner: fx.Node | None = None
    dying = _last_readers(half)
    for node in half.graph.nodes:
        if node.op != "placeholder" and owner is None:
            owner = graph.get_attr("runtime")
        if node.target in ops.ALL:
            assert owner is not None
            known[node] = _bind(graph, owner, node, known)
        elif ROOM in node.meta and node.op == "call_function":
            assert owner is not None
            known[node] = _write_into_block(graph, owner, node, known)
        else:
            known[node] = copied = graph.node_copy(node, known.__getitem__)
            if node.target is torch.ops.aten.view.default:
                # Some operators lay their results out otherwise than their fakes say.
                copied.target = torch.ops.aten.reshape.default
        for last in dying.get(node, ()):
            graph.call_method("give", (owner, known[last], _room_behind(node)))
    if owner is not None and not owner.users:
        graph.erase_node(owner)
    graph.set_codegen(BoxedCode())
    constants = {
        node.target: operator.attrgetter(str(node.target))(half)
        for node in graph.nodes
        if node.op in ("get_attr", "call_module") and node is not owner
    }
    # Only the function is kept: the graph that it was made from can go. It reads the runtime
    # off an object that lives for one call, since Dynamo keeps the function where no garbage
    # collector looks.
    module = fx.GraphModule({**constants, "runtime": None}, graph)
    forward = type(module).forward
    held = {name: getattr(module, name) for name in {str(t).split(".")[0] for t in constants}}
    runs = {name: found for name, found in held.items() if isinstance(found, Compiled)}
    held.update({name: kind.function for name, kind in runs.items()})
    memory = _Memory()
    elsewhere = held | {name: kind.with_memory(memory.empty) for name, kind in runs.items()}

    def run(runtime: Runtime, boxed: list[Any]) -> Sequence[Any]:
        memory.source = runtime.empty
        names = held if runtime.empty is None else elsewhere
        results: Sequence[Any] = forward(SimpleNamespace(runtime=runtime, **names), boxed)
        return results

    return run


class _Memory:
    """Where the runs of one half get their memory: from the runtime that calls it."""

    source: Empty | None = None

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        assert self.source is not None
        return self.source(shape, strides, dtype)


def _bind(graph: fx.Graph, owner: fx.Node, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
    chunk = node.args[0]
    if node.target is ops.GATHER:
        arguments: tuple[Any, ...] = (owner, chunk, stay_of(node).offset)
        return graph.call_method("gather", arguments)
    if node.target is ops.PREFETCH:
        return graph.call_method("prefetch", (owner, chunk, stay_of(node).offset))
    if node.target is ops.RELEASE:
        return graph.call_method("release", (owner, chunk))
    if node.target in (ops.OFFLOAD, ops.DROP):
        method = "offload" if node.target is ops.OFFLOAD else "drop"
        return graph.call_method(method, (owner, known[chunk]))  # type: ignore[index]
    if node.target in (ops.RECALL, ops.RELOAD):
        method = "recall" if node.target is ops.RECALL else "reload"
        return graph.call_method(method, (owner, known[chunk], stay_of(node).offset))  # type: ignore[index]
    slices, gradients = node.args[1:]
    assert isinstance(gradients, (list, tuple))
    sources = [known[gradient] for gradient in gradients]  # type: ignore[index]
    owned = tuple(_owned(gradient) for gradient in gradients)  # type: ignore[arg-type]
    return graph.call_method("reduce", (owner, chunk, slices, sources, owned))


def _owned(gradient: fx.Node) -> bool:
    """Whether nothing but the reduce looks at a gradient's memory, so that it may become
    p.grad as it is, as autograd would let it; otherwise it is copied."""
    fake = gradient.meta["val"]
    current = gradient
    while True:
        alone = len(current.users) == 1 and not current.meta.get(SHARED)
        if not alone or current.op == "placeholder":
            return False
        source = viewed_input(current)
        if source is None:
            break
        current = source
    own_bytes = number(fake.numel()) * int(fake.element_size())
    return number(storage_bytes(fake)) == own_bytes


def _sources(node: fx.Node) -> list[fx.Node]:
    """What a value follows from; the answer of a reduce, from its own gradient alone."""
    source = node.args[0] if is_item(node) else None
    if isinstance(source, fx.Node) and source.target is ops.REDUCE:
        gradients, place = source.args[2], node.args[1]
        return [gradients[place]]  # type: ignore[index, list-item]
    return node.all_input_nodes


def _write_into_block(
    graph: fx.Graph, owner: fx.Node, node: fx.Node, known: dict[fx.Node, fx.Node]
) -> fx.Node:
    """The operator's out-variant, on memory from the recycler."""
    fake = tensor(node)
    nbytes = fake.numel() * fake.element_size()
    geometry = (tuple(fake.shape), tuple(fake.stride()), fake.dtype)
    block = graph.call_method("take", (owner, nbytes, node.meta[ROOM], *geometry))
    args = fx.node.map_arg(node.args, known.__getitem__)
    if node.target in COPIES:
        return graph.call_function(torch.ops.aten.copy_.default, (block, args[0]))
    target, out = OUT_VARIANTS[node.target]
    kwargs = fx.node.map_arg(node.kwargs, known.__getitem__)
    return graph.call_function(target, args, {**kwargs, out: block})


def _room_behind(node: fx.Node) -> int:
    """What the recycler may hold behind a node: nodes of ours go by the operator before them."""
    while ROOM_BEHIND not in node.meta and node.op not in ("placeholder", "root"):
        node = node.prev
    return int(node.meta.get(ROOM_BEHIND, 0))


def _last_readers(half: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """By node: values through which it is the last to read a block of the recycler."""
    last: dict[str, tuple[fx.Node, fx.Node]] = {}
    for node in half.graph.nodes:
        for source in node.all_input_nodes:
            root = memory_root(source)
            name = root.meta.get(ROOT) if root.op == "placeholder" else recycled_root(source)
            if name is not None:
                last[name] = (node, source)
    dying: dict[fx.Node, list[fx.Node]] = {}
    for reader, source in last.values():
        if reader.op != "output":
            dying.setdefault(reader, []).append(source)
    return dying


def keeps_graph() -> bool:
    """Whether the backward pass under way on this thread was asked to keep its graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def tangents_of_outputs(step: StepGraph) -> tuple[frozenset[int], ...]:
    """For every backward output: the tangents that it follows from, by their position."""
    tangents = [n for n in step.nodes if n.op == "placeholder" and is_backward(n)]
    index = {node: i for i, node in enumerate(tangents)}
    reach: dict[fx.Node, frozenset[int]] = {}
    for node in step.nodes:
        own = frozenset([index[node]]) if node in index else frozenset()
        reach[node] = own.union(*(reach[source] for source in _sources(node)))
    _, outputs = step.results()
    return tuple(reach[node] if node is not None else frozenset() for node in outputs)
