"""Kernels: the pure operations of a half are compiled in runs, each kind of run once.

Between `codegen.split` and `codegen.executable`. A run is a maximal stretch of pure operations
between nodes of ours, cut once more where equal layers begin, so that a model of 48 layers has
as many kinds of runs as one of 6. Outside of runs stay our nodes, the views that cut parameters
out of gathered chunks, seeds, sizes, and what no compiler takes (sparse tensors).
"""

import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from elixir_fx import ops
from elixir_fx.passes.derived import SIZES
from elixir_fx.passes.fusion import cut_bytes, repeats
from elixir_fx.step import (
    FUSES,
    expression,
    is_item,
    memory_root,
    operator_name,
    value,
)

Boxed = Callable[[list[Any]], Sequence[Any]]

SHORTEST_S = 1e-3  # of layers that are a run: calling it takes some 20 microseconds
SHARED = "elixir_shared"  # node.meta key of a run's results: another one lies in the same memory
KINDS = 1024  # of runs that a model keeps
# Operators that make the seeds of a step's random numbers: they would tell equal layers apart,
# and cost nothing outside.
SEEDS = frozenset({"prims::inductor_seed", "prims::inductor_seeds", "prims::inductor_lookup_seed"})
CHUNK_VIEWS: Any = (torch.ops.aten.slice.Tensor, torch.ops.aten.as_strided.default)


Empty = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]  # shape, strides, dtype


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kind of run as machine code: a function of one list, which it empties.

    `with_memory` takes a function that makes tensors to one that does the same with all of its
    memory from there.
    """

    function: Boxed
    with_memory: Callable[[Empty], Boxed]


# (module, fake inputs, backward, trains) -> its machine code
CompileRun = Callable[[fx.GraphModule, Sequence[Any], bool, bool], Compiled]


class Kernels:
    """The compiled kinds of runs of one model."""

    def __init__(self, compile_run: CompileRun) -> None:
        self._compile_run = compile_run
        self._known: dict[Hashable, Compiled] = {}
        self.count = 0  # kinds of runs that were compiled

    def compiled(
        self, half: fx.GraphModule, seconds: Mapping[str, float], *, backward: bool, trains: bool
    ) -> fx.GraphModule:
        """The half with calls of `Compiled` runs in the place of their operations, which take so
        many `seconds` by their names."""
        own: dict[Hashable, Compiled] = {}  # kinds with dynamic dimensions, which are this graph's

        def kind_of(run: Run) -> Compiled:
            return self._kind(run, backward, trains, own if run.is_symbolic else self._known)

        return _Cutting(half, seconds, kind_of).module()

    def _kind(
        self, run: "Run", backward: bool, trains: bool, known: dict[Hashable, Compiled]
    ) -> Compiled:
        key = (backward, trains, settings(), run.key())
        if key not in known:
            module, fakes = run.module()
            if len(known) >= KINDS:
                known.clear()
            known[key] = self._compile_run(module, fakes, backward, trains)
            self.count += 1
        return known[key]


def settings() -> Hashable:
    """What of PyTorch's state generated code follows from."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
    )


def packed(*values: object) -> list[object]:
    """The arguments of a run in a list of their own, which it may empty."""
    return list(values)


class _Cutting:
    """One half on its way from operations to calls of runs."""

    def __init__(
        self,
        half: fx.GraphModule,
        seconds: Mapping[str, float],
        kind_of: Callable[["Run"], Compiled],
    ) -> None:
        self._half = half
        self._seconds = seconds
        self._kind_of = kind_of
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}  # what there is outside, by the half's node
        self._sizes: dict[sympy.Symbol, fx.Node] = {}  # and the nodes that are a dimension
        self._kinds: dict[str, Compiled] = {}

    def module(self) -> fx.GraphModule:
        outside: list[list[fx.Node]] = [[]]  # ahead of each stretch of pure operations
        stretches: list[list[fx.Node]] = [[]]
        known: set[fx.Node] = set()
        for node in _picks_first(self._half.graph.nodes):
            if not _stays_outside(node, known):
                stretches[-1].append(node)
                continue
            known.add(node)
            if _is_barrier(node):
                outside.append([])
                stretches.append([])
            outside[-1].append(node)
        for nodes, runs in zip(outside, cut(stretches, self._seconds), strict=True):
            for node in nodes:
                self._copy(node)
            for members in runs:
                self._call(members)
        attributes = {
            str(node.target): operator.attrgetter(str(node.target))(self._half)
            for node in self._graph.nodes
            if node.op == "get_attr"
        }
        return fx.GraphModule({**attributes, **self._kinds}, self._graph)

    def _copy(self, node: fx.Node) -> None:
        self._made[node] = self._graph.node_copy(node, self._made.__getitem__)
        formula = expression(value(node))
        if isinstance(formula, sympy.Symbol):
            self._sizes.setdefault(formula, node)

    def _call(self, members: list[fx.Node]) -> None:
        """Call the run of these operations; without one that a compiler fuses they stay."""
        if not any(node.meta.get(FUSES) for node in members):
            for node in members:
                self._copy(node)
            return
        run = Run(self._half, members, self._sizes)
        name = f"run_{len(self._kinds)}"
        self._kinds[name] = self._kind_of(run)
        inputs = tuple(self._made[node] for node in run.inputs)
        arguments = self._graph.call_function(packed, inputs)
        call = self._graph.call_module(name, (arguments,))
        call.meta["val"] = tuple(value(node) for node in run.results)
        memories = Counter(memory_root(node) for node in run.results)
        for place, node in enumerate(run.results):
            self._made[node] = item = self._graph.call_function(operator.getitem, (call, place))
            item.meta = {**node.meta, SHARED: memories[memory_root(node)] > 1}
        for node in run.views:
            self._copy(node)


class Run:
    """Operations that are compiled together.

    `inputs` are the nodes that it reads, `results` those that others read. `views` others read
    too, but they are views of inputs, and made again outside. Each in order.
    """

    def __init__(
        self,
        half: fx.GraphModule,
        members: Sequence[fx.Node],
        sizes: Mapping[sympy.Symbol, fx.Node],
    ) -> None:
        self._half = half
        self._members = members
        inside = set(members)
        read = dict.fromkeys(
            source
            for node in members
            for source in node.all_input_nodes
            if source not in inside and not _is_body(source, half)
        )
        symbols = {s for node in (*read, *members) for s in _symbols(value(node))}
        self.is_symbolic = bool(symbols)
        for symbol in sorted(symbols, key=str):
            if symbol in sizes:
                read[sizes[symbol]] = None
        self.inputs = list(read)
        needed = [n for n in members if any(user not in inside for user in n.users)]
        self.results = [node for node in needed if memory_root(node) in inside]
        views: dict[fx.Node, None] = {}
        for node in needed:
            if memory_root(node) not in inside:
                _chain(node, inside, views)
        self.views = list(views)

    def key(self) -> Hashable:
        """What equal runs have in common: operators, constants, geometry and what is read."""
        numbers = {node: index for index, node in enumerate((*self.inputs, *self._members))}
        lines: list[Hashable] = [_geometry(value(node)) for node in self.inputs]
        if any(node.target is torch.ops.aten.as_strided.default for node in self._members):
            # Its offset counts from where the storage begins.
            fakes = (value(node) for node in self.inputs)
            lines.append(tuple(str(f.storage_offset()) for f in fakes if isinstance(f, Tensor)))
        for node in self._members:
            if any(source not in numbers for source in node.all_input_nodes):
                return object()  # it has a body of its own
            lines.append((node.target, _written(node, numbers)))
        lines.append(tuple(numbers[node] for node in self.results))
        return tuple(lines)

    def module(self) -> tuple[fx.GraphModule, list[object]]:
        """The run as a graph, its names those of its structure, and its inputs' fakes."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for index, node in enumerate(self.inputs):
            made[node] = graph.placeholder(f"arg{index}_1")
            made[node].meta = {"val": value(node)}
        for node in self._members:
            for source in node.all_input_nodes:
                if source not in made:
                    made[source] = graph.node_copy(source)
            arguments = map_arg((node.args, node.kwargs), made.__getitem__)
            made[node] = graph.create_node(node.op, node.target, *arguments)
            made[node].meta = dict(node.meta)
        graph.output(tuple(made[node] for node in self.results))
        return fx.GraphModule(self._half, graph), [value(node) for node in self.inputs]


class _Numbered:
    """A node in the description of a run."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __repr__(self) -> str:
        return f"%{self._index}"


def _written(node: fx.Node, numbers: Mapping[fx.Node, int]) -> str:
    """A node's arguments, the nodes among them by their numbers."""

    def numbered(source: fx.Node) -> Any:
        return _Numbered(numbers[source])

    return repr(map_arg((node.args, node.kwargs), numbered))


def _chain(node: fx.Node, inside: set[fx.Node], views: dict[fx.Node, None]) -> None:
    """Note a view of something outside, behind the views that it is made of."""
    if node in inside and node not in views:
        for source in node.all_input_nodes:
            _chain(source, inside, views)
        views[node] = None


def cut(
    stretches: Sequence[Sequence[fx.Node]], seconds: Mapping[str, float]
) -> list[list[list[fx.Node]]]:
    """The runs of each stretch of pure operations: cut where equal layers begin, at every place
    where nodes of ours cut one of these layers, or else at one that costs nothing; there as
    many short layers stay together as make calling a run cheap."""
    nodes = [node for stretch in stretches for node in stretch]
    ends = [0]
    for stretch in stretches:
        ends.append(ends[-1] + len(stretch))
    # Never between an operator and what is picked of its results.
    costs = [
        sys.maxsize if is_item(n) else c for n, c in zip(nodes, cut_bytes(nodes), strict=False)
    ]
    cuts = set(ends)
    for repeat in repeats(_tokens(nodes)):
        layer = repeat.start + repeat.period  # the second: the first may be read otherwise
        inside = [end - repeat.start for end in ends if repeat.start < end < repeat.end]
        places = {end % repeat.period for end in inside}
        together = 1
        if not places:
            places = {min(range(repeat.period), key=lambda place: costs[layer + place])}
            layer_s = sum(seconds.get(n.name, 0.0) for n in nodes[layer : layer + repeat.period])
            together = max(1, math.ceil(SHORTEST_S / max(layer_s, SHORTEST_S / repeat.count)))
        for place in places:
            cuts.update(range(repeat.start + place, repeat.end, repeat.period * together))
    return [
        [nodes[start:end] for start, end in pairwise(sorted(c for c in cuts if first <= c <= last))]
        for first, last in pairwise(ends)
    ]


def _tokens(nodes: Iterable[fx.Node]) -> list[Hashable]:
    """What equal layers have in common, by node: operator, constants, geometry."""
    described: dict[fx.Node, Hashable] = {}

    def of(node: fx.Node) -> Hashable:
        if node not in described:
            described[node] = _geometry(value(node))
        return described[node]

    return [
        (
            node.target,
            repr(map_arg((node.args, node.kwargs), lambda _: None)),
            of(node),
            tuple(of(source) for source in node.all_input_nodes),
        )
        for node in nodes
    ]


def _geometry(fake: object) -> Hashable:
    """What a compiled run must know of a value."""
    if isinstance(fake, Tensor):
        sizes = (*fake.shape, *fake.stride()) if fake.layout is torch.strided else (*fake.shape,)
        numbers = tuple(str(size) for size in sizes)
        return (fake.dtype, str(fake.device), fake.is_conj(), numbers)
    if isinstance(fake, (list, tuple)):
        return tuple(_geometry(one) for one in fake)
    if isinstance(fake, SIZES):
        return str(fake)
    return repr(fake)


def _symbols(fake: object) -> Iterator[sympy.Symbol]:
    """The dynamic dimensions in a value's geometry."""
    if isinstance(fake, Tensor):
        sizes: Iterable[object] = fake.shape
        if fake.layout is torch.strided:
            sizes = (*fake.shape, *fake.stride(), fake.storage_offset())
        for size in sizes:
            yield from _symbols(size)
    elif isinstance(fake, (list, tuple)):
        for one in fake:
            yield from _symbols(one)
    else:
        known = isinstance(fake, SIZES)
        formula = fake.node.expr if known else None  # type: ignore[attr-defined]
        if formula is not None:
            yield from formula.free_symbols


def _picks_first(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The nodes with what is picked of several results right behind the operator."""
    for node in nodes:
        if not is_item(node):
            yield node
            yield from _picks(node)


def _picks(node: fx.Node) -> Iterator[fx.Node]:
    for user in node.users:
        if is_item(user):
            yield user
            yield from _picks(user)


def _stays_outside(node: fx.Node, outside: set[fx.Node]) -> bool:
    if node.op != "call_function" or _is_barrier(node):
        return True
    if any(source not in outside for source in node.all_input_nodes):
        return False
    if isinstance(value(node), SIZES):
        return True
    if is_item(node):  # of something that is outside
        return True
    of_chunk = node.target in CHUNK_VIEWS and memory_root(node).target is ops.GATHER
    return of_chunk or operator_name(node) in SEEDS


def _is_barrier(node: fx.Node) -> bool:
    """Whether what stands before a node must have run before it."""
    if node.op == "output" or node.target in ops.ALL:
        return True
    if node.op != "call_function":
        return False
    effects = getattr(node.target, "__name__", "") == "with_effects"
    return effects or any(_is_foreign(value(n)) for n in (node, *node.all_input_nodes))


def _is_foreign(fake: object) -> bool:
    """Whether a value is nothing that a compiler takes: sparse, or no tensor at all."""
    if isinstance(fake, Tensor):
        return fake.layout is not torch.strided or fake.is_quantized
    if isinstance(fake, (list, tuple)):
        return any(_is_foreign(one) for one in fake)
    return not isinstance(fake, (int, float, bool, *SIZES, type(None)))


def _is_body(node: fx.Node, half: fx.GraphModule) -> bool:
    """Whether a node is the graph that a higher-order operator runs."""
    if node.op != "get_attr":
        return False
    return isinstance(operator.attrgetter(str(node.target))(half), fx.GraphModule)
