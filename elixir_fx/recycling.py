"""Recycling: which results of a step are written into memory that an earlier value left.

Between rewriting and code generation, on a CPU under a budget. Marks nodes of the joint graph;
`codegen` turns a marked operator into its out-variant on a block from the runtime's recycler,
and gives a block back after the last reader of its memory. The kernels are the same, so every
bit is; only operators whose out-variant runs the same kernel are listed. How much the recycler
may hold behind a node is the step's peak of live bytes less what is live until the next mark, where
it can let go of some.
"""

import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from elixir_fx.facts import Role
from elixir_fx.step import StepGraph, is_symbolic, memory_root, value

OUTPUT_BYTES = 64 * 1024  # left for small results that the caller keeps, a loss
SMALLEST_BYTES = 256 * 1024  # results below this come from the heap, which reuses them itself
ROOM = "elixir_room"  # node.meta key: bytes that may stay held while this result is live
ROOM_BEHIND = "elixir_room_behind"  # node.meta key: and behind a node, until the next such result

_aten: Any = torch.ops.aten
# Functional operator -> (out-variant that runs the same kernel, name of its out argument).
OUT_VARIANTS: dict[Any, tuple[Any, str]] = {
    _aten.addmm.default: (_aten.addmm.out, "out"),
    _aten.mm.default: (_aten.mm.out, "out"),
    _aten.bmm.default: (_aten.bmm.out, "out"),
    _aten.baddbmm.default: (_aten.baddbmm.out, "out"),
    _aten.add.Tensor: (_aten.add.out, "out"),
    _aten.sub.Tensor: (_aten.sub.out, "out"),
    _aten.mul.Tensor: (_aten.mul.out, "out"),
    _aten.div.Tensor: (_aten.div.out, "out"),
    _aten.gelu.default: (_aten.gelu.out, "out"),
    _aten.gelu_backward.default: (_aten.gelu_backward.grad_input, "grad_input"),
    _aten.silu.default: (_aten.silu.out, "out"),
    _aten.silu_backward.default: (_aten.silu_backward.grad_input, "grad_input"),
    _aten.tanh.default: (_aten.tanh.out, "out"),
    _aten.tanh_backward.default: (_aten.tanh_backward.grad_input, "grad_input"),
    _aten.sigmoid.default: (_aten.sigmoid.out, "out"),
    _aten.threshold_backward.default: (_aten.threshold_backward.grad_input, "grad_input"),
    _aten._softmax.default: (_aten._softmax.out, "out"),
    _aten._log_softmax.default: (_aten._log_softmax.out, "out"),
    _aten._softmax_backward_data.default: (_aten._softmax_backward_data.out, "grad_input"),
    _aten._log_softmax_backward_data.default: (_aten._log_softmax_backward_data.out, "out"),
    _aten.nll_loss_backward.default: (_aten.nll_loss_backward.grad_input, "grad_input"),
}
COPIES = frozenset({_aten.clone.default, _aten._to_copy.default})  # an empty block and copy_


def mark_recycled(step: StepGraph) -> None:
    """Mark the results that come from the recycler, and how much it may hold behind any node.
    Where `step.storages` and the graph are of one state."""
    roles = {storage.name: storage.role for storage in step.storages}
    marked = {node for node in step.nodes if _suits(node, roles.get(node.name))}
    if not marked:
        return
    assert step.layout is not None
    live = _live_bytes(step)
    most = max(live)
    # Gradient blocks give their pages back between backward passes, which pays for what no
    # plan counts (the compiler's objects, kernels' scratch): what stays held leaves that alone.
    spared = step.layout.block_bytes + OUTPUT_BYTES
    behind = most  # what may be held behind the node that is looked at, in reverse
    for node, there in zip(reversed(step.nodes), reversed(live), strict=True):
        node.meta[ROOM_BEHIND] = behind
        behind = min(behind, most - there)
        if node in marked:
            node.meta[ROOM] = max(0, behind - spared)
            behind = most  # it lets go of what is held


def recycled_root(node: fx.Node) -> str | None:
    """The marked result whose memory a value of the joint graph lies in, by name."""
    root = memory_root(node)
    return root.name if ROOM in root.meta else None


def _suits(node: fx.Node, role: Role | None) -> bool:
    if node.target not in OUT_VARIANTS and node.target not in COPIES:
        return False
    if role not in (Role.ACTIVATION, Role.TEMPORARY, Role.GRADIENT):
        return False
    fake = value(node)
    if not isinstance(fake, Tensor) or fake.device.type != "cpu" or is_symbolic(fake):
        return False
    nbytes = fake.numel() * fake.element_size()
    dense = math.prod(fake.shape) == 1 + sum(
        (size - 1) * stride for size, stride in zip(fake.shape, fake.stride(), strict=True)
    )
    return nbytes >= SMALLEST_BYTES and dense and fake.untyped_storage().nbytes() == nbytes


def _live_bytes(step: StepGraph) -> list[int]:
    """Live bytes by node."""
    position = {node.name: index for index, node in enumerate(step.nodes)}
    leaves = _departures(step, position)
    change = [0] * (len(position) + 1)
    for storage in step.storages:
        if storage.role in (Role.ACTIVATION, Role.TEMPORARY, Role.GRADIENT):
            change[storage.born] += storage.nbytes
            change[leaves.get(storage.name, storage.dies) + 1] -= storage.nbytes
    return list(accumulate(change[:-1]))


def _departures(step: StepGraph, position: dict[str, int]) -> dict[str, int]:
    """By storage of a gradient: where its chunk is reduced, which ends its life."""
    assert step.schedule is not None
    reduced = {
        piece.path: position[entry.after]
        for entry in step.schedule.reduces
        for piece in step.chunk(entry.chunk).slices
    }
    leaves: dict[str, int] = {}
    for path, node in step.gradients.items():
        name = memory_root(node).name
        if path in reduced:
            leaves[name] = max(leaves.get(name, 0), reduced[path])
    return leaves
