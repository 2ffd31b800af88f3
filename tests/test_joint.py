"""The joint graph: phases in order, and one graph again of two halves."""

from typing import Any

import pytest
import torch
from graphs import mlp
from steps import captured
from torch import fx

from elixir_fx import inductor
from elixir_fx.errors import CaptureError
from elixir_fx.joint import is_tangent, order_phases, rejoin
from elixir_fx.step import is_backward

THREADS = 1
ATEN: Any = torch.ops.aten
TAG = {"partitioner_tag": "is_backward"}


def graph_of(text: str, **tagged: dict[str, str]) -> fx.GraphModule:
    """A graph of lines "name = operator(arguments)"; a bare name is a placeholder, "return a, b"
    the output. `tagged` is meta by the name of its node."""
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    for line in text.split("; "):
        if line.startswith("return "):
            names = line.removeprefix("return ").split(", ")
            graph.output(tuple(known.get(name) for name in names))
        elif "=" not in line:
            known[line] = graph.placeholder(line)
        else:
            name, call = line.split(" = ")
            operator, arguments = call.rstrip(")").split("(")
            target = getattr(ATEN, operator).default
            sources = tuple(known[argument] for argument in arguments.split(", "))
            known[name] = graph.create_node("call_function", target, sources, name=name)
    for name, meta in tagged.items():
        known[name].meta.update(meta)
    return fx.GraphModule({}, graph)


def text_of(module: fx.GraphModule) -> str:
    lines = []
    for node in module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {', '.join(map(str, node.args[0]))}")
        elif node.op == "placeholder":
            lines.append(node.name)
        else:
            operator = node.target.overloadpacket.__name__
            lines.append(f"{node.name} = {operator}({', '.join(map(str, node.args))})")
    return "; ".join(lines)


def backward_of(module: fx.GraphModule) -> list[str]:
    return [node.name for node in module.graph.nodes if is_backward(node)]


JOINT = (
    "primals_1; tangents_1; sin = sin(primals_1); cos = cos(primals_1); tanh = tanh(sin); "
    "neg = neg(tangents_1); mm = mm(neg, cos); return tanh, mm"
)


def test_what_follows_from_tangents_is_backward() -> None:
    module = graph_of(JOINT)
    order_phases(module, trains=True)
    assert backward_of(module) == ["tangents_1", "neg", "mm", "output"]
    assert text_of(module) == JOINT


def test_forward_operations_that_come_late_stand_in_front() -> None:
    """AOTAutograd tags what only the backward needs, which no tangent leads to."""
    module = graph_of(
        "primals_1; tangents_1; cos = cos(primals_1); neg = neg(tangents_1); "
        "sin = sin(primals_1); mm = mm(neg, cos); tanh = tanh(sin); return tanh, mm",
        cos=TAG,
    )
    order_phases(module, trains=True)
    assert backward_of(module) == ["tangents_1", "cos", "neg", "mm", "output"]
    assert text_of(module) == (
        "primals_1; tangents_1; sin = sin(primals_1); tanh = tanh(sin); cos = cos(primals_1); "
        "neg = neg(tangents_1); mm = mm(neg, cos); return tanh, mm"
    )


def test_what_reads_the_backward_is_backward() -> None:
    module = graph_of(
        "primals_1; cos = cos(primals_1); neg = neg(cos); sin = sin(primals_1); return sin, neg",
        cos=TAG,
    )
    order_phases(module, trains=True)
    assert backward_of(module) == ["cos", "neg", "output"]


def test_a_forward_alone_has_no_backward() -> None:
    module = graph_of(JOINT, cos=TAG)
    order_phases(module, trains=False)
    assert backward_of(module) == []
    assert text_of(module) == JOINT


FORWARD = (
    "primals_1; primals_2; mm = mm(primals_1, primals_2); sin = sin(mm); tanh = tanh(sin); "
    "return tanh, mm"
)
BACKWARD = (
    "primals_2; mm; tangents_1; sin = sin(mm); mul = mul(tangents_1, sin); "
    "mm_1 = mm(mul, primals_2); return mm_1, None"
)


def rejoined(forward: str = FORWARD, backward: str = BACKWARD) -> fx.GraphModule:
    joint = graph_of("primals_1; return primals_1")
    joint.graph.output_node().meta["desc"] = "of the joint graph"
    return rejoin(joint, graph_of(forward), graph_of(backward), 1)


def test_what_the_backward_computes_again_stands_in_it() -> None:
    """`sin` was made in the forward, and is made again of what was saved."""
    assert text_of(rejoined()) == (
        "primals_1; primals_2; tangents_1; "
        "mm = mm(primals_1, primals_2); sin = sin(mm); tanh = tanh(sin); "
        "sin_1 = sin(mm); mul = mul(tangents_1, sin_1); mm_1 = mm(mul, primals_2); "
        "return tanh, mm_1, None"
    )


def test_phases_are_marked_and_in_order() -> None:
    module = rejoined()
    assert backward_of(module) == ["tangents_1", "sin_1", "mul", "mm_1", "output"]
    module.graph.lint()


def test_outputs_are_the_users_and_the_gradients() -> None:
    """What the forward saves is no output; what is known of the joint graph's stays known."""
    module = rejoined()
    output = module.graph.output_node()
    names = [getattr(node, "name", None) for node in output.args[0]]
    assert names == ["tanh", "mm_1", None]
    assert output.meta["desc"] == "of the joint graph"


def test_an_input_may_be_an_output() -> None:
    module = rejoined(
        "primals_1; sin = sin(primals_1); return primals_1, sin",
        "sin; tangents_1; mul = mul(tangents_1, sin); return tangents_1",
    )
    assert text_of(module) == (
        "primals_1; tangents_1; sin = sin(primals_1); mul = mul(tangents_1, sin); "
        "return primals_1, tangents_1"
    )


def test_a_backward_that_takes_what_nobody_makes_is_refused() -> None:
    with pytest.raises(CaptureError, match="takes 'ghost', which the forward does not make"):
        rejoined(backward="ghost; tangents_1; mul = mul(tangents_1, ghost); return mul")


def test_inductors_partition_comes_back_as_one_graph() -> None:
    """It saves one value of a GELU and computes the others again."""
    step = captured(mlp(8, 16, 4), tracing=inductor.TRACING)
    nodes = step.nodes
    phases = [is_backward(node) for node in nodes if node.op != "placeholder"]
    assert phases == sorted(phases)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    assert placeholders == nodes[: len(placeholders)]
    assert [is_backward(node) for node in placeholders] == [is_tangent(n) for n in placeholders]
    saved = {
        source.name
        for node in nodes
        if is_backward(node) and node.op != "output"
        for source in node.all_input_nodes
        if not is_backward(source) and source.op != "placeholder"
    }
    assert {name for name in saved if not name.startswith("permute")} == {"addmm", "mul_2"}
    assert [n.target for n in nodes if is_backward(n)].count(ATEN.erf.default) == 1
