"""The vocabulary of a transformed step: gather, prefetch, release, reduce, and for activations
offload, recall (which is their prefetch), reload, drop.

These operators exist so that a plan can be read, printed, checked and moved about in an FX
graph. They have a schema, a fake and a printed form, and no kernel of their own: code
generation binds each to the runtime that the generated module holds, so two compiled models
never meet. Running one unbound is an error that says so.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from elixir_fx.errors import ElixirError

LIBRARY: Any = torch.library.Library("elixir", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("gather(int chunk, int numel, ScalarType dtype, Device device) -> Tensor")
LIBRARY.define("prefetch(int chunk) -> ()")
LIBRARY.define("release(int chunk) -> ()")
LIBRARY.define("reduce(int chunk, int[] slices, Tensor[] gradients) -> Tensor[]")
LIBRARY.define("offload(Tensor value) -> Tensor")
LIBRARY.define("recall(Tensor handle) -> ()")
LIBRARY.define("reload(Tensor handle) -> Tensor")
LIBRARY.define("drop(Tensor handle) -> ()")

GATHER = torch.ops.elixir.gather.default
PREFETCH = torch.ops.elixir.prefetch.default
RELEASE = torch.ops.elixir.release.default
REDUCE = torch.ops.elixir.reduce.default
OFFLOAD = torch.ops.elixir.offload.default
RECALL = torch.ops.elixir.recall.default
RELOAD = torch.ops.elixir.reload.default
DROP = torch.ops.elixir.drop.default
ALL = (GATHER, PREFETCH, RELEASE, REDUCE, OFFLOAD, RECALL, RELOAD, DROP)


def _unbound(*_: object) -> None:
    raise ElixirError(
        "an elixir operator ran outside its generated module; call the compiled model, "
        "not the graph that it prints"
    )


def _gather_fake(chunk: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


def _reduce_fake(chunk: int, slices: Sequence[int], gradients: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(gradient) for gradient in gradients]


def _nothing(_: object) -> None:
    return None


def _handle_fake(value: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.int64)


def _reload_fake(handle: Tensor) -> Tensor:
    raise ElixirError("what comes back is as it was when it left, which a handle does not say")


for _name, _fake in (
    ("gather", _gather_fake),
    ("prefetch", _nothing),
    ("release", _nothing),
    ("reduce", _reduce_fake),
    ("offload", _handle_fake),
    ("recall", _nothing),
    ("reload", _reload_fake),
    ("drop", _nothing),
):
    LIBRARY.impl(_name, _unbound, "CompositeExplicitAutograd")
    LIBRARY.impl(_name, _fake, "Meta")

for _target in ALL:
    # Dead-code removal would drop nodes whose result nobody reads.
    fx.node.has_side_effect(_target)
