"""The seam to Inductor, torch.compile's code generator: what it traces, saves and compiles.

Beside `capture`, which traces, and `kernels`, which cuts a half into the runs that are compiled
here. Uses underscored torch names; tried on torch 2.11 and 2.13. What it relies on: Inductor
wants a graph traced with its decompositions and rewritten by its joint passes; `partition_fn`
runs those and chooses by a minimum cut what is saved for the backward; `compile_fx_inner` takes
a graph of pure operations to a function of one list, which it empties, and needs a tracing
context of its own for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import compile_fx, lowering
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.utils import BoxedBool
from torch._inductor.virtualized import V

from elixir_fx.errors import CaptureError
from elixir_fx.joint import EAGER, Tracing, order_phases, rejoin
from elixir_fx.kernels import Boxed, Compiled, CompileRun, Empty
from elixir_fx.step import FUSES, is_item, source_line, viewed_input
from elixir_fx.step_cache import cached_by_inductor

_aten: Any = torch.ops.aten
# Operators that are calls of a library even where Inductor could generate a loop.
LIBRARY_CALLS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten.convolution.default,
    }
)


def _join(
    joint: fx.GraphModule, inputs: Sequence[Any], *, num_fwd_outputs: int, **others: Any
) -> fx.GraphModule:
    """The joint graph with Inductor's joint passes done, and what the backward takes from the
    forward chosen as torch.compile chooses it."""
    others["num_fwd_outputs"] = num_fwd_outputs
    settings = torch._functorch.config.patch(graphsafe_rng_functionalization=False)
    with V.set_fake_mode(detect_fake_mode(inputs)), settings:
        forward, backward = compile_fx.partition_fn(joint, inputs, **others)
    joined = rejoin(joint, forward, backward, num_fwd_outputs)
    _mark_fusible(joined)
    return joined


def _alone(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    device = next((given.device for given in inputs if isinstance(given, Tensor)), None)
    with V.set_fake_mode(detect_fake_mode(inputs)):
        module = compile_fx._recursive_joint_graph_passes(module, input_device=device)
    order_phases(module, trains=False)
    _mark_fusible(module)
    return module


def _mark_fusible(module: fx.GraphModule) -> None:
    """Mark the nodes whose loops Inductor may fuse with their neighbours'."""
    known = {*lowering.lowerings, *select_decomp_table()} - {*lowering.fallbacks, *LIBRARY_CALLS}
    for node in module.graph.nodes:
        node.meta[FUSES] = (
            node.op == "call_function"
            and node.target in known
            and not is_item(node)
            and viewed_input(node) is None
            and isinstance(node.meta.get("val"), (Tensor, list, tuple))
        )


TRACING = Tracing(
    prepare=lambda module, dynamic: module,
    join=_join,
    alone=_alone,
    decompositions=select_decomp_table,
    context=enable_python_dispatcher,
    compiled=True,
)


def compile_run(
    module: fx.GraphModule, fakes: Sequence[Any], backward: bool, trains: bool
) -> Compiled:
    """A graph of pure operations as machine code.

    CaptureError with the lines of its operations if Inductor cannot compile it.
    """
    output = module.graph.output_node()
    (results,) = output.args
    assert isinstance(results, (list, tuple))
    # Who reads a result was traced for these strides.
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    lines = dict.fromkeys(source_line(node) for node in module.graph.nodes)
    try:
        with (
            tracing(TracingContext(detect_fake_mode(fakes))),
            torch.no_grad(),
            torch._C._DisableAutocast(),
            cached_by_inductor(),
        ):
            function = compile_fx.compile_fx_inner(
                module,
                list(fakes),
                is_backward=backward,
                is_inference=not trains,
                cudagraphs=BoxedBool(False),
            )
    except InductorError as error:
        where = ", ".join(line for line in lines if line) or "unknown lines"
        first = str(error).strip().splitlines()[0]
        raise CaptureError(
            f"the operations of {where} could not be compiled with Inductor: {first}. "
            "kernels='eager' runs them with PyTorch's own kernels"
        ) from error
    return Compiled(function, partial(_with_memory, function))


def _with_memory(function: Any, empty: Empty) -> Boxed:
    """A twin of a compiled function whose results and buffers are made by `empty`; the function
    itself where it is of another kind.

    Generated code gets its memory by a name of its module, which equal code of other models has
    too: so the twin has the same code and other globals.
    """
    found = getattr(function, "current_callable", function)
    code = found.__func__ if isinstance(found, MethodType) else found
    if not isinstance(code, FunctionType) or "empty_strided_cpu" not in code.__globals__:
        return function  # type: ignore[no-any-return]
    names = {**code.__globals__, "empty_strided_cpu": empty}
    twin = FunctionType(code.__code__, names, code.__name__)
    return MethodType(twin, found.__self__) if isinstance(found, MethodType) else twin


def _aten_join(joint: fx.GraphModule, inputs: Sequence[Any], **others: Any) -> fx.GraphModule:
    joined = EAGER.join(joint, inputs, **others)
    _mark_fusible(joined)
    return joined


def _aten_alone(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    alone = EAGER.alone(module, inputs)
    _mark_fusible(alone)
    return alone


# For a compiler of the user's: operators as PyTorch's own kernels run them.
ATEN = replace(EAGER, join=_aten_join, alone=_aten_alone, compiled=True)


def compile_run_with(
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> CompileRun:
    """How runs are compiled with a compiler of the user's."""

    def compile_run(
        module: fx.GraphModule, fakes: Sequence[Any], backward: bool, trains: bool
    ) -> Compiled:
        function = compiler(module, fakes)

        def run(boxed: list[Any]) -> Sequence[Any]:
            arguments = tuple(boxed)
            boxed.clear()
            return function(*arguments)  # type: ignore[no-any-return]

        return Compiled(run, lambda empty: run)

    return compile_run
