"""What autograd is about to do with a parameter, and who holds a tensor: torch's own answers.

Underscored torch names in this file were tried on torch 2.11 and 2.13.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

_raw = torch._C.DisableTorchFunctionSubclass


def accumulator(parameter: nn.Parameter) -> Node:
    """The node of the autograd graph that accumulates into `parameter`.

    Never keep it: it holds the parameter from C++, where no garbage collector looks.
    """
    with _raw(), torch.enable_grad():
        if not parameter.requires_grad:
            raise RuntimeError("One of the differentiated Tensors does not require grad")
        function = parameter.view_as(parameter).grad_fn  # reads nothing
        assert function is not None
        return cast(Node, function.next_functions[0][0])


def executes(node: Node) -> bool | None:
    """Whether the backward pass under way runs a leaf's `node`; None if it is asked for it.

    RuntimeError outside a backward pass.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return None


def pass_number() -> int:
    """Which backward pass is under way on this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def tensor_hooks(parameter: nn.Parameter) -> dict[int, Any]:
    """The hooks of `parameter.register_hook`, live, by the key of their handle."""
    return parameter._backward_hooks or {}


def post_hooks(parameter: nn.Parameter) -> dict[int, Any]:
    """The hooks of `parameter.register_post_accumulate_grad_hook`, live."""
    return parameter._post_accumulate_grad_hooks or {}


def held_alone(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether only `tensor`, and the one it is a view of, look at `storage`."""
    users: Any = Tensor._use_count  # type: ignore[attr-defined]
    base = tensor._base
    holders = int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the Python object aside
    alone: bool = users(tensor) == 1  # else p.grad has it too, or a graph that is kept
    return alone and (holders == 1 if base is None else bool(holders == 2 and users(base) == 2))


def is_idle(storage: torch.UntypedStorage) -> bool:
    """Whether no tensor looks at a storage that somebody keeps."""
    return int(torch._C._storage_Use_Count(storage._cdata)) == 1


def version(tensor: Tensor) -> int:
    """How often `tensor` was written in place."""
    return tensor._version
