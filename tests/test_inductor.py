"""The seam to Inductor: runs as machine code, with memory from elsewhere, and what may be fused."""

import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError
from torch._subclasses import FakeTensorMode

import elixir_fx
from elixir_fx import inductor
from elixir_fx.errors import CaptureError
from elixir_fx.runtime.meter import DeviceMeter
from elixir_fx.step import FUSES

THREADS = 1
ATEN: Any = torch.ops.aten
ROWS, COLUMNS = 8, 16


def run_of() -> tuple[fx.GraphModule, list[Any]]:
    """relu(x @ w + b), its transpose and its sums, and the fakes of the inputs."""
    mode = FakeTensorMode()
    graph = fx.Graph()

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda source: source.meta["val"]))
        return node

    inputs = []
    for index, shape in enumerate([(ROWS, 4), (4, COLUMNS), (COLUMNS,)]):
        node = graph.placeholder(f"arg{index}_1")
        node.meta["val"] = mode.from_tensor(torch.empty(shape))
        inputs.append(node)
    x, w, b = inputs
    product = call(ATEN.mm.default, x, w)
    rectified = call(ATEN.relu.default, call(ATEN.add.Tensor, product, b))
    sums = call(ATEN.sum.dim_IntList, rectified, [1])
    graph.output((rectified, call(ATEN.permute.default, rectified, [1, 0]), sums))
    return fx.GraphModule({}, graph), [node.meta["val"] for node in inputs]


def values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, 4), (4, COLUMNS), (COLUMNS,)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


def test_a_run_computes_what_its_graph_does() -> None:
    module, fakes = run_of()
    given = values()
    expected = module(*given)
    compiled = inductor.compile_run(module, fakes, False, True)
    for function in (compiled.function, compiled.with_memory(empty)):
        boxed = list(given)
        found = function(boxed)
        assert boxed == []  # so that who calls keeps nothing alive
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
        address = [result.untyped_storage().data_ptr() for result in found]
        assert address[0] == address[1] != address[2]


def test_memory_from_an_operator_is_seen() -> None:
    module, fakes = run_of()
    compiled = inductor.compile_run(module, fakes, False, True)
    rectified_bytes, sum_bytes = ROWS * COLUMNS * 4, ROWS * 4
    with DeviceMeter() as meter:
        results = compiled.with_memory(empty)(values())
        held_bytes = meter.current_bytes
        assert held_bytes >= rectified_bytes + sum_bytes
        del results
        assert held_bytes - meter.current_bytes == rectified_bytes + sum_bytes
    with DeviceMeter(limit_bytes=rectified_bytes) as meter, pytest.raises(Exception, match="bytes"):
        compiled.with_memory(empty)(values())


def test_a_run_and_its_twin_are_equal_bit_for_bit() -> None:
    module, fakes = run_of()
    compiled = inductor.compile_run(module, fakes, False, True)
    for one, other in zip(
        compiled.function(values()), compiled.with_memory(empty)(values()), strict=True
    ):
        assert torch.equal(one, other)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sin().sum()


def test_what_cannot_be_compiled_is_named_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise InductorError(RuntimeError("no such instruction"), None)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fail)
    compiled = elixir_fx.compile(Small(), memory="1GiB", kernels="inductor")
    message = r"operations of .*test_inductor.py:\d+.* could not be compiled with Inductor: .*"
    with pytest.raises(CaptureError, match=message) as refused:
        compiled(torch.ones(2, 4))
    assert "no such instruction" in str(refused.value)
    assert "kernels='eager' runs them with PyTorch's own kernels" in str(refused.value)


def test_operations_without_a_line_are_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise InductorError(RuntimeError("no such instruction"), None)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", fail)
    with pytest.raises(CaptureError, match="the operations of unknown lines could not"):
        inductor.compile_run(*run_of(), False, True)


def test_loops_may_be_fused_and_library_calls_and_views_not() -> None:
    module, _ = run_of()
    inductor._mark_fusible(module)
    fuses = {node.name: node.meta[FUSES] for node in module.graph.nodes}
    assert fuses == {
        "arg0_1": False,
        "arg1_1": False,
        "arg2_1": False,
        "mm_default": False,
        "add_tensor": True,
        "relu_default": True,
        "sum_dim_int_list": True,
        "permute_default": False,
        "output": False,
    }


def test_several_results_may_be_fused_but_not_their_picks_and_sizes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(4, 4)
    both = graph.call_function(ATEN.var_mean.correction, (x, [0]))
    both.meta["val"] = (torch.ones(4), torch.ones(4))
    first = graph.call_function(operator.getitem, (both, 0))
    first.meta["val"] = torch.ones(4)
    size = graph.call_function(ATEN.sym_size.int, (x, 0))
    size.meta["val"] = 4
    graph.output((first, size))
    module = fx.GraphModule({}, graph)
    inductor._mark_fusible(module)
    assert [node.meta[FUSES] for node in (both, first, size)] == [True, False, False]


def test_a_compiler_of_the_users_gets_the_graph_and_its_inputs() -> None:
    seen: list[tuple[fx.GraphModule, list[Any]]] = []

    def compiler(module: fx.GraphModule, fakes: Any) -> Any:
        seen.append((module, fakes))
        return module

    module, fakes = run_of()
    compiled = inductor.compile_run_with(compiler)(module, fakes, False, True)
    assert seen == [(module, fakes)]
    boxed: list[Any] = values()
    for one, other in zip(compiled.function(boxed), module(*values()), strict=True):
        assert torch.equal(one, other)
    assert boxed == []
