"""Compute cost: seconds of every node on the compute device.

Analysis; after lifetime. Times come from the machine's table of measured operators, keyed by
operator, shapes, strides and dtypes. An operator that nobody measured yet is listed in
`step.missing` and costed by the roofline: the larger of FLOPs / peak and bytes / bandwidth
(Williams et al., 2009). One that a compiler fuses with its neighbours costs the bytes that it
reads from memory and writes there; what stays in registers costs nothing.
"""

import math

import sympy
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from elixir_fx.facts import Cost
from elixir_fx.machine import Machine
from elixir_fx.passes.fusion import in_registers
from elixir_fx.step import (
    FUSES,
    StepGraph,
    describe,
    expression,
    is_backward,
    is_item,
    memory_root,
    number,
    operator_name,
    value,
    viewed_input,
)

LAUNCH_S = 2e-6  # of one operator call from generated Python code


def compute_cost(step: StepGraph, machine: Machine) -> None:
    """Fill `step.costs`, `step.node_formulas` and `step.missing`."""
    costs, missing = [], {}
    formulas: dict[str, sympy.Expr] = {}
    fused = _fused_bytes(step) if step.compiled else {}
    for node in step.nodes:
        if is_free(node):
            costs.append(Cost(node=node.name, seconds=0.0, flops=0, bytes=0, source="free"))
            continue
        key = operator_key(node)
        moved_bytes = _bytes(node)
        flops, moved = _flops(node), number(moved_bytes)
        formula = expression(moved_bytes)
        if formula is not None:
            formulas[node.name] = formula
        seconds = machine.operators.get(key)
        if node in fused:
            seconds, source = fused[node] / machine.stream_bytes_per_s, "roofline"
        elif seconds is None:
            missing[key] = node
            peak = machine.flops(_dtype(node))
            roofline = max(flops / peak, moved / machine.stream_bytes_per_s)
            seconds, source = LAUNCH_S + roofline, "roofline"
        else:
            source = "measured"
        costs.append(Cost(node=node.name, seconds=seconds, flops=flops, bytes=moved, source=source))
    step.costs = tuple(costs)
    step.missing = tuple(missing)
    step.node_formulas = formulas


def _fused_bytes(step: StepGraph) -> dict[fx.Node, int]:
    """What operations that a compiler fuses read from memory and write there, by node."""
    found = {}
    for backward in (False, True):
        nodes = [
            node
            for node in step.nodes
            if node.op == "call_function" and is_backward(node) == backward
        ]
        registers = in_registers(nodes)
        for node in nodes:
            if node.meta.get(FUSES):
                moved = [n for n in node.all_input_nodes if memory_root(n) not in registers]
                if node not in registers:
                    moved.append(node)
                found[node] = number(_nbytes([one for n in moved for one in _results(n)]))
    return found


def is_free(node: fx.Node) -> bool:
    """Whether the node does no work on the device: inputs, outputs, views, picks."""
    return node.op != "call_function" or is_item(node) or viewed_input(node) is not None


def operator_key(node: fx.Node) -> str:
    """What a measured time depends on: operator, arguments' shapes, strides, dtypes, values.

    Dynamic dimensions count with the value that they had in the captured call."""
    arguments = [_argument(argument) for argument in node.args]
    named = [f"{name}={_argument(argument)}" for name, argument in node.kwargs.items()]
    return f"{node.target}({', '.join(arguments + named)})"


def _argument(argument: object) -> str:
    if isinstance(argument, fx.Node):
        given = value(argument)
        return str(number(given)) if isinstance(given, torch.SymInt) else describe(argument)
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_argument(item) for item in argument)}]"
    return repr(argument)


def _results(node: fx.Node) -> list[Tensor]:
    fake = value(node)
    items = fake if isinstance(fake, (list, tuple)) else [fake]
    return [item for item in items if isinstance(item, Tensor)]


def _tensors(node: fx.Node) -> list[Tensor]:
    return [one for each in (node, *node.all_input_nodes) for one in _results(each)]


def _nbytes(tensors: list[Tensor]) -> int | torch.SymInt:
    """Bytes of their elements, however large the memory is that they lie in."""
    return sum(item.numel() * item.element_size() for item in tensors)


def _dtype(node: fx.Node) -> str:
    tensors = _tensors(node)
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32"


def _bytes(node: fx.Node) -> int | torch.SymInt:
    return _nbytes(_tensors(node))


def _flops(node: fx.Node) -> int:
    """FLOPs by torch's own formulas; CPU attention, which torch counts as 0, by hand."""
    name = operator_name(node)
    if "scaled_dot_product" in name:
        first = 1 if "_backward" in name else 0  # the gradient of the result comes before
        query, key = (value(node.args[first + n]) for n in range(2))  # type: ignore[arg-type]
        assert isinstance(query, Tensor) and isinstance(key, Tensor)
        products = number(math.prod(query.shape) * key.shape[-2])
        return products * (10 if "_backward" in name else 4)
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry:
        return 0
    arguments = [value(a) if isinstance(a, fx.Node) else a for a in node.args]
    keywords = {k: value(a) if isinstance(a, fx.Node) else a for k, a in node.kwargs.items()}
    return number(flop_registry[packet](*arguments, **keywords, out_val=value(node)))
