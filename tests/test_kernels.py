"""Kernels: which runs a half is cut into, and that they compute what the half does.

Nothing is compiled here: a run is done by PyTorch's own kernels, operation by operation.
"""

import operator
import weakref
from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graphs import NAMED, Example, Named, gpt, mlp
from steps import Home, captured, captured_model, copied, planned
from torch import Tensor, fx, nn
from torch.nn import functional

from elixir_fx import inductor, ops
from elixir_fx.codegen import Halves, executable, is_activation, split
from elixir_fx.kernels import SHARED, SHORTEST_S, Compiled, Kernels, cut
from elixir_fx.pipeline import PIPELINE, rewrite
from elixir_fx.step import FUSES, StepGraph, is_item, number

THREADS = 1
ATEN: Any = torch.ops.aten


class Interpreted:
    """In the place of a compiler: keeps every kind's graph, and runs it as it stands, its
    values dropped after their last reader. `after` is called at the end of a run."""

    def __init__(self) -> None:
        self.modules: list[fx.GraphModule] = []
        self.fakes: list[Sequence[Any]] = []

    def __call__(
        self, module: fx.GraphModule, fakes: Sequence[Any], backward: bool, trains: bool
    ) -> Compiled:
        self.modules.append(module)
        self.fakes.append(fakes)
        function = executable(module)

        def run(boxed: list[Any]) -> Sequence[Any]:
            results = function(SimpleNamespace(empty=None), boxed)
            self.after()
            return results

        return Compiled(run, lambda empty: run)

    def after(self) -> None: ...


def compiled_halves(
    step: StepGraph, interpreted: Interpreted, seconds: float = 0.0
) -> tuple[Halves, Halves, Kernels]:
    """The halves of a step, the same with runs, and the kinds of runs; each operation takes so
    many seconds."""
    halves, kernels = split(step), Kernels(interpreted)
    each = {node.name: seconds for node in step.nodes}
    forward = kernels.compiled(halves.forward, each, backward=False, trains=step.trains)
    backward = halves.backward
    if backward is not None:
        backward = kernels.compiled(backward, each, backward=True, trains=True)
    return halves, Halves(forward=forward, backward=backward), kernels


def runs(half: fx.GraphModule | None) -> list[fx.Node]:
    assert half is not None
    return [node for node in half.graph.nodes if node.op == "call_module"]


def step_of(example: Example, share: float | None = None, tracing: Any = None) -> StepGraph:
    """A captured step; with a share, planned for so much memory and rewritten."""
    step = captured(example, tracing=tracing or inductor.TRACING)
    if share is not None:
        rewrite(step, planned(step, share, away=True), PIPELINE)
    return step


# How many kinds there are.


def layered(kind: str, layers: int) -> Example:
    if kind == "gpt":
        return gpt(layers=layers, width=32, seq=8, tied=True)
    return Named(make=lambda: Blocks(layers), batch=lambda generator: (torch.ones(4, 16),))


class Blocks(nn.Module):
    """Equal blocks that normalise, and add to a stream."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(16, 32) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(32, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(functional.gelu(up(norm(x))))
        return x.square().mean()


@cache
def layered_step(kind: str, layers: int, share: float | None = None) -> StepGraph:
    return step_of(layered(kind, layers), share)


def kinds(kind: str, layers: int, layer_s: float = 1.0, share: float | None = None) -> int:
    step = copied(layered_step(kind, layers, share))
    _, _, kernels = compiled_halves(step, Interpreted(), layer_s)
    return kernels.count


@pytest.mark.parametrize("layer_s", [0.0, 1.0])
def test_equal_layers_are_compiled_once(layer_s: float) -> None:
    """Be they few or many; the three of which a backward has fewer equal ones are not more."""
    few, some, many = (kinds("gpt", layers, layer_s) for layers in (3, 6, 9))
    assert few == some == many
    few, some, many = (kinds("blocks", layers, layer_s) for layers in (3, 6, 9))
    assert few <= some == many


@pytest.mark.parametrize(("kind", "share"), [("gpt", 0.0), ("gpt", 0.3), ("blocks", 0.0)])
def test_equal_layers_between_nodes_of_ours_are_compiled_once(kind: str, share: float) -> None:
    """Twice the layers are no more kinds; fewer may have more, where a plan treats both ends
    otherwise."""
    assert kinds(kind, 8, share=share) <= kinds(kind, 4, share=share)


def test_long_layers_are_runs_of_their_own() -> None:
    for layers in (6, 9):
        _, halves, _ = compiled_halves(copied(layered_step("gpt", layers)), Interpreted(), 1.0)
        assert len(runs(halves.forward)) == layers + 1
        assert len(runs(halves.backward)) == layers + 1


def test_short_layers_stay_together() -> None:
    _, halves, _ = compiled_halves(copied(layered_step("gpt", 9)), Interpreted(), 0.0)
    assert len(runs(halves.forward)) <= 2
    assert len(runs(halves.backward)) <= 2


def test_a_half_is_compiled_once_more_for_nothing() -> None:
    step, interpreted = step_of(mlp(8, 16, 4)), Interpreted()
    halves, kernels = split(step), Kernels(interpreted)
    kernels.compiled(halves.forward, {}, backward=False, trains=True)
    known = kernels.count
    kernels.compiled(halves.forward, {}, backward=False, trains=True)
    assert kernels.count == known == len(interpreted.modules)
    kernels.compiled(halves.forward, {}, backward=False, trains=False)
    assert kernels.count == known + 1  # an inference is another kind


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.factor).sin().sum()


def test_other_constants_are_another_kind() -> None:
    interpreted = Interpreted()
    kernels = Kernels(interpreted)
    counts = []
    for factor, rows in ((2.0, 3), (2.0, 3), (3.0, 3), (2.0, 5)):
        step = captured_model(Scaled(factor), (torch.ones(rows, 4),), tracing=inductor.TRACING)
        kernels.compiled(split(step).forward, {}, backward=False, trains=True)
        counts.append(kernels.count)
    assert counts == [1, 1, 2, 3]


# Where is cut.


def chain(length: int, layers: int) -> tuple[list[fx.Node], list[fx.Node]]:
    """So many equal layers of so many operations, the first of which has two results; and what
    is picked of those. Layers begin with a pick: ahead of the first stands another operator."""
    graph = fx.Graph()
    current = graph.placeholder("x")
    current.meta["val"] = torch.ones(4, 4)
    nodes, picks = [], []

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.node.map_arg(args, lambda source: source.meta["val"]))
        nodes.append(node)
        return node

    for layer in range(layers):
        both = call(ATEN.var_mean.correction, current, [0 if layer == 0 else 1])
        both.meta["val"] = tuple(torch.ones(4, 4) for _ in range(2))
        first, second = call(operator.getitem, both, 0), call(operator.getitem, both, 1)
        picks += [first, second]
        current = call(ATEN.add.Tensor, first, second)
        for _ in range(length - 4):
            current = call(ATEN.sin.default, current)
    return nodes, picks


@pytest.mark.parametrize("length", [8, 11])
def test_no_cut_between_an_operator_and_what_is_picked_of_its_results(length: int) -> None:
    nodes, picks = chain(length, 5)
    (members,) = cut([nodes], {node.name: 1.0 for node in nodes})
    assert len(members) >= 4
    assert [node for run in members for node in run] == nodes
    assert not [run for run in members if run[0] in picks]


@pytest.mark.parametrize(
    ("share_of_shortest", "lengths"), [(2.0, [1, 1, 1]), (0.5, [2, 2, 2]), (0.3, [4, 4, 4])]
)
def test_so_many_layers_stay_together_as_are_long_enough(
    share_of_shortest: float, lengths: list[int]
) -> None:
    nodes, _ = chain(10, 12)
    each_s = share_of_shortest * SHORTEST_S / 10
    (members,) = cut([nodes], {node.name: each_s for node in nodes})
    assert [round(len(run) / 10) for run in members[1:4]] == lengths


def test_nodes_of_ours_cut_all_layers_where_they_cut_one() -> None:
    nodes, _ = chain(10, 6)
    each_s = {node.name: 0.0 for node in nodes}
    first, second = cut([nodes[:25], nodes[25:]], each_s)
    assert [len(run) for run in first] == [5, 10, 10]
    assert [len(run) for run in second] == [10, 10, 15]


def test_short_layers_stay_together_where_a_graph_begins_with_them() -> None:
    nodes, _ = chain(10, 6)
    assert len(cut([nodes[10:]], {})[0]) == 1


def test_stretches_may_be_empty() -> None:
    nodes, _ = chain(8, 1)
    assert cut([[], nodes, []], {}) == [[], [nodes], []]
    assert cut([[]], {}) == [[]]


@pytest.mark.parametrize("name", ["gpt", "kind_norm", "kind_attention", "kind_batch_norm"])
def test_results_are_picked_where_they_are_made(name: str) -> None:
    step, interpreted = step_of(NAMED[name], 0.0), Interpreted()
    _, halves, _ = compiled_halves(step, interpreted, 1.0)
    for module in interpreted.modules:
        for node in module.graph.nodes:
            assert not is_item(node) or node.args[0].op == "call_function"
            if node.op == "placeholder":
                assert isinstance(node.meta["val"], (Tensor, torch.SymInt, torch.SymFloat))
    assert runs(halves.forward) and runs(halves.backward)


# That they compute the same.


class Runtime(Home):
    """Also of a step without nodes of ours, which calls nothing."""

    def __init__(self, step: StepGraph, parameters: dict[str, Tensor]) -> None:
        if step.layout is not None:
            super().__init__(step, parameters)
        else:
            self.gradients, self.live = {}, {}

    def take(self, *_: Any) -> Tensor:
        raise AssertionError("nothing is recycled here")

    def give(self, value: Tensor) -> None: ...


def inputs_of(step: StepGraph, model: nn.Module) -> list[Any]:
    """Values of the placeholders, sizes among them."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    generator = torch.Generator().manual_seed(0)
    values: list[Any] = []
    for node in step.nodes:
        if node.op != "placeholder":
            continue
        fake, known = node.meta["val"], step.paths.get(node.name)
        if known is not None and known.path:
            values.append(named[known.path].detach())
        elif not isinstance(fake, Tensor):
            values.append(number(fake))
        else:
            shape, strides = tuple(map(number, fake.shape)), tuple(map(number, fake.stride()))
            value = torch.empty_strided(shape, strides, dtype=fake.dtype)
            if fake.is_floating_point():
                value.copy_(torch.randn(shape, generator=generator))
            else:
                value.copy_(torch.randint(0, 3, shape, generator=generator))
            values.append(value)
    return values


def results_of(
    step: StepGraph, halves: Halves, model: nn.Module, values: list[Any]
) -> tuple[list[Any], dict[str, Tensor]]:
    """Outputs and gradients of inputs, and the gradients that were reduced, by path."""
    home = Runtime(step, {path: p.detach() for path, p in model.named_parameters()})
    given = [value.clone() if isinstance(value, Tensor) else value for value in values]
    torch.manual_seed(0)
    forward = given[: len(step.inputs)]
    results = list(executable(halves.forward)(home, forward))
    assert forward == []
    if halves.backward is None:
        return results, {}
    outputs, saved = results[: step.forward_outputs], results[step.forward_outputs :]
    sizes = [value for value in saved if not isinstance(value, Tensor)]
    tensors = [value for value in saved if isinstance(value, Tensor)]
    backward = [*sizes, *tensors, *given[len(step.inputs) :]]
    gradients = list(executable(halves.backward)(home, backward))
    assert backward == [] and not home.live
    return [*outputs, *gradients], home.gradients


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    if one.layout is not torch.strided:
        return same(one.coalesce().indices(), other.coalesce().indices()) and same(
            one.coalesce().values(), other.coalesce().values()
        )
    equal = torch.equal(one.nan_to_num(), other.nan_to_num()) and one.dtype == other.dtype
    return equal and one.stride() == other.stride()


def check(
    step: StepGraph, model: nn.Module, seconds: float = 0.0, interpreted: Interpreted | None = None
) -> Halves:
    """The halves with runs, which do what those without do, bit for bit."""
    plain, ours, _ = compiled_halves(step, interpreted or Interpreted(), seconds)
    values = inputs_of(step, model)
    expected, reduced = results_of(step, plain, model, values)
    found, found_reduced = results_of(step, ours, model, values)
    assert len(expected) == len(found)
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert same(one, other), index
    assert reduced.keys() == found_reduced.keys()
    for path, gradient in reduced.items():
        assert same(gradient, found_reduced[path]), path
    assert runs(ours.forward)
    return ours


NAMES = sorted(set(NAMED) - {"gpt_dropout", "kind_dropout"})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [None, 0.0], ids=["spare", "tight"])
def test_runs_compute_what_the_half_computes(name: str, share: float | None) -> None:
    """As Inductor traces: dropout and its seeds are below."""
    check(step_of(NAMED[name], share), NAMED[name].build(), 1.0)


@pytest.mark.parametrize("name", ["gpt_tied", "gpt_dropout", "kind_in_place", "thrice"])
@pytest.mark.parametrize("share", [None, 0.3], ids=["spare", "some"])
def test_so_do_runs_of_pytorchs_own_operators(name: str, share: float | None) -> None:
    check(step_of(NAMED[name], share, inductor.ATEN), NAMED[name].build(), 1.0)


@pytest.mark.parametrize("share", [None, 0.0, 0.5])
def test_so_do_short_layers_that_stay_together(share: float | None) -> None:
    example = gpt(layers=4, width=32, seq=8, tied=True)
    check(step_of(example, share), example.build(), 0.0)


def test_dropout_draws_from_seeds_outside_of_runs() -> None:
    """Equal layers with dropout are equal runs."""
    counts = []
    for layers in (3, 6):
        example = gpt(layers=layers, width=32, seq=8, dropout=0.1)
        interpreted = Interpreted()
        ours = check(step_of(example), example.build(), 1.0, interpreted)
        names = [str(node.target) for node in ours.forward.graph.nodes]
        assert sum("inductor_lookup_seed" in name for name in names) > layers
        inside = [str(n.target) for m in interpreted.modules for n in m.graph.nodes]
        assert not [name for name in inside if "seed" in name]
        assert [name for name in inside if "inductor_random" in name]
        counts.append(len(interpreted.modules))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("tracing", [inductor.TRACING, inductor.ATEN], ids=["inductor", "aten"])
@pytest.mark.parametrize("share", [None, 0.3], ids=["spare", "some"])
def test_dynamic_shapes(tracing: Any, share: float | None) -> None:
    """A run is told the sizes that its tensors have."""
    example = gpt(layers=3, width=32, seq=8, tied=True)
    batch = example.batches(1)[0]
    for tensor in batch:
        torch._dynamo.mark_dynamic(tensor, 0)
    step = captured_model(example.build(), batch, tracing=tracing)
    assert len(step.symbols) >= 1
    if share is not None:
        rewrite(step, planned(step, share, away=True), PIPELINE)
    interpreted = Interpreted()
    check(step, example.build(), 1.0, interpreted)
    sized = [fakes for fakes in interpreted.fakes if any(map(is_size, fakes))]
    assert len(sized) == len(interpreted.fakes)


def is_size(fake: Any) -> bool:
    return isinstance(fake, torch.SymInt)


class SparseRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.body = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.table(ids).sin()).cos().sum()


@pytest.mark.parametrize("tracing", [inductor.TRACING, inductor.ATEN], ids=["inductor", "aten"])
def test_sparse_gradients_stay_outside(tracing: Any) -> None:
    step = captured_model(SparseRows(), (torch.tensor([[1, 3, 3]]),), tracing=tracing)
    interpreted = Interpreted()
    ours = check(step, SparseRows(), 0.0, interpreted)
    for module in interpreted.modules:
        fakes = [node.meta.get("val") for node in module.graph.nodes]
        assert not [f for f in fakes if isinstance(f, Tensor) and f.layout is not torch.strided]
    assert ours.backward is not None
    outside = [node.meta.get("val") for node in ours.backward.graph.nodes]
    assert [f for f in outside if isinstance(f, Tensor) and f.layout is torch.sparse_coo]


class Views(nn.Module):
    """Returns a result, views of it, and views of an input and of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x).sin()
        return y, y.t()[1:], x.view(-1)[2:], self.layer.weight.t()


def test_views_of_results_and_of_inputs() -> None:
    """Those of a result are results in the same memory, which are told so; those of inputs are
    made outside."""
    step = captured_model(Views(), (torch.ones(4, 6),), tracing=inductor.ATEN)
    ours = check(step, Views())
    (call,) = runs(ours.forward)
    items = [user for user in call.users if is_item(user)]
    shared = [item for item in items if item.meta[SHARED]]
    assert {tuple(item.meta["val"].shape) for item in shared} == {(4, 6), (5, 4)}
    outside = [n for n in ours.forward.graph.nodes if n.target is ATEN.view.default]
    assert len(outside) == 1


def test_views_share_memory_as_they_did() -> None:
    step = captured_model(Views(), (torch.ones(4, 6),), tracing=inductor.ATEN)
    _, ours, _ = compiled_halves(step, Interpreted())
    values = inputs_of(step, Views())[: len(step.inputs)]
    given = list(values)
    home = Runtime(step, {})
    y, rows, flat, weight = executable(ours.forward)(home, given)[:4]
    address = [t.untyped_storage().data_ptr() for t in (y, rows, flat, weight)]
    assert address[0] == address[1] and len(set(address)) == 3
    inputs = {value.untyped_storage().data_ptr() for value in values}
    assert set(address[2:]) <= inputs


class Folded(nn.Module):
    """Several results of one operator: some read, some not, one an output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.body = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        values, places = self.body(self.norm(x)).max(dim=-1)
        first, _, last = self.body(x).split([2, 4, 2], dim=-1)
        variance, mean = torch.var_mean(first * last, dim=0)
        return values, places, variance + mean, mean


@pytest.mark.parametrize("tracing", [inductor.TRACING, inductor.ATEN], ids=["inductor", "aten"])
@pytest.mark.parametrize("share", [None, 0.0], ids=["spare", "tight"])
def test_operators_with_several_results(tracing: Any, share: float | None) -> None:
    example = Named(make=Folded, batch=lambda generator: (torch.randn(5, 8, generator=generator),))
    check(step_of(example, share, tracing), example.build())


def test_a_forward_alone() -> None:
    example = gpt(layers=3, width=32, seq=8)
    step = captured(example, grad=False, tracing=inductor.TRACING)
    interpreted = Interpreted()
    ours = check(step, example.build(), 1.0, interpreted)
    assert ours.backward is None and interpreted.modules


# What a run keeps alive, and what is in it.


class Watching(Interpreted):
    """Notes at the end of each run how many of the watched storages live."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive: list[int] = []

    def after(self) -> None:
        self.alive.append(sum(ref() is not None for ref in self.watched))


def activations(half: fx.GraphModule, values: Sequence[Any]) -> Iterator[Tensor]:
    placeholders = [node for node in half.graph.nodes if node.op == "placeholder"]
    for node, value in zip(placeholders, values, strict=True):
        if is_activation(node):
            yield value


@pytest.mark.parametrize("share", [None, 0.0], ids=["spare", "tight"])
def test_activations_die_in_the_run_that_reads_them_last(share: float | None) -> None:
    example = Named(make=lambda: Blocks(6), batch=lambda generator: (torch.ones(4, 16),))
    step, watching = step_of(example, share), Watching()
    _, ours, _ = compiled_halves(step, watching, 1.0)
    assert ours.backward is not None
    model = example.build()
    values = inputs_of(step, model)
    home = Runtime(step, {path: p.detach() for path, p in model.named_parameters()})
    results = list(executable(ours.forward)(home, values[: len(step.inputs)]))
    given = [*results[step.forward_outputs :], *values[len(step.inputs) :]]
    own = {value.untyped_storage().data_ptr() for value in values}
    watching.watched = [
        weakref.ref(value.untyped_storage())
        for value in activations(ours.backward, given)
        if value.untyped_storage().data_ptr() not in own
    ]
    assert len(watching.watched) >= 8
    watching.alive.clear()
    results.clear()
    executable(ours.backward)(home, given)
    assert watching.alive == sorted(watching.alive, reverse=True)
    assert watching.alive[0] > watching.alive[-1] == 0
    assert len(set(watching.alive)) >= 3


@pytest.mark.parametrize("tracing", [inductor.TRACING, inductor.ATEN], ids=["inductor", "aten"])
def test_runs_are_pure(tracing: Any) -> None:
    """No node of ours is in a run, and outside is nothing left that a compiler fuses."""
    example = gpt(layers=3, width=32, seq=8)
    step, interpreted = step_of(example, 0.3, tracing), Interpreted()
    _, ours, _ = compiled_halves(step, interpreted, 1.0)
    inside = [node for module in interpreted.modules for node in module.graph.nodes]
    assert not [node for node in inside if node.target in ops.ALL]
    for half in (ours.forward, ours.backward):
        assert half is not None
        outside = [node for node in half.graph.nodes if node.op == "call_function"]
        assert not [node for node in outside if node.meta.get(FUSES) and not is_item(node)]


def test_equal_runs_have_equal_graphs() -> None:
    """Whatever their nodes were called: a compiler's cache finds them again."""
    texts = []
    for layers in (3, 6):
        interpreted = Interpreted()
        compiled_halves(step_of(layered("blocks", layers)), interpreted, 1.0)
        texts.append({module.code for module in interpreted.modules})
        for module in interpreted.modules:
            names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
            assert names == [f"arg{index}_1" for index in range(len(names))]
    assert len(texts[0] & texts[1]) >= 2
