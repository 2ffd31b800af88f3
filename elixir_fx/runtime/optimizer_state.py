"""An optimizer as named tensors and plain numbers, for checkpoints.

`optimizer_record` splits an optimizer into a JSON value and tensors named
"<state>/<parameter path>"; `load_optimizer` puts both back, one parameter at a time, so that
an optimizer whose states live elsewhere never has all of them in memory. States are kept by
path, not by position: the order of parameters may change between saving and loading.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elixir_fx.errors import TierError
from elixir_fx.runtime.heap import HeapTrim
from elixir_fx.runtime.weights import WeightFiles, listed, nbytes_of

Adopt = Callable[[nn.Parameter], object]


def optimizer_record(
    optimizer: Optimizer, paths: Mapping[int, str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What JSON can hold of `optimizer`, and its tensors by name, live and unread.

    `paths` maps a parameter's id to its path. TierError names a parameter that the model
    lacks, or an option or state that is neither number, text, tensor nor a list of these.
    """
    tensors: dict[str, Tensor] = {}
    groups = []
    state: dict[str, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        names = [_path(parameter, paths) for parameter in group["params"]]
        options = {
            key: _encoded(value, f"{key}/group.{index}", tensors)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        groups.append({"params": names, "options": options})
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter in optimizer.state:  # reading a missing one would make it
                state[name] = {
                    key: _encoded(value, f"{key}/{name}", tensors)
                    for key, value in optimizer.state[parameter].items()
                }
    kind = type(optimizer).__name__
    return {"kind": kind, "groups": groups, "state": state}, tensors


def load_optimizer(
    optimizer: Optimizer,
    paths: Mapping[int, str],
    record: Mapping[str, Any],
    files: WeightFiles,
    adopt: Adopt | None = None,
) -> None:
    """Put a record's options and states into `optimizer`.

    A state tensor that exists with the same shape and dtype is overwritten in place, any
    other becomes an ordinary tensor in `optimizer.state`; then `adopt(parameter)` is called,
    which may take the parameter's states away before the next ones are read. TierError, before
    anything is changed, if the groups hold other parameters or a tensor is missing.
    """
    _check(optimizer, paths, record, files)
    state = record["state"]
    heap = HeapTrim()
    for group, saved in zip(optimizer.param_groups, record["groups"], strict=True):
        for key, value in saved["options"].items():
            group[key] = _restored(group.get(key), value, files, torch.device("cpu"))
        for parameter in group["params"]:
            values = state.get(paths[id(parameter)])
            if values is None:
                if parameter in optimizer.state:
                    del optimizer.state[parameter]
                continue
            own = optimizer.state[parameter]
            for key in [key for key in own if key not in values]:
                del own[key]
            for key, value in values.items():
                device = _state_device(key, group, parameter)
                own[key] = _restored(own.get(key), value, files, device)
            if adopt is not None:
                adopt(parameter)
            heap.freed(nbytes_of(parameter) * len(values))
    files.close()


def _check(
    optimizer: Optimizer,
    paths: Mapping[int, str],
    record: Mapping[str, Any],
    files: WeightFiles,
) -> None:
    kind = type(optimizer).__name__
    if record["kind"] != kind:
        raise TierError(f"the checkpoint is of {record['kind']}, the optimizer is {kind}")
    groups = record["groups"]
    if len(groups) != len(optimizer.param_groups):
        raise TierError(
            f"the checkpoint has {len(groups)} parameter groups, "
            f"the optimizer {len(optimizer.param_groups)}"
        )
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        mine = {_path(parameter, paths) for parameter in group["params"]}
        theirs = set(saved["params"])
        if mine != theirs:
            raise TierError(
                f"parameter group {index} differs from the checkpoint's; "
                f"missing there: {listed(mine - theirs) or 'none'}; "
                f"unexpected there: {listed(theirs - mine) or 'none'}"
            )
    wanted = _tensor_names(record["state"]) | _tensor_names([x["options"] for x in groups])
    if missing := wanted - files.entries.keys():
        raise TierError(f"{files.path} lacks {listed(missing)}")


def _path(parameter: Tensor, paths: Mapping[int, str]) -> str:
    path = paths.get(id(parameter))
    if path is None:
        raise TierError(
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model "
            f"does not have"
        )
    return path


def _state_device(key: str, group: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """Where torch's optimizers keep a state: step counts on the CPU unless fused."""
    on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if on_cpu else parameter.device


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` for JSON. Tensors go to `tensors` and leave their name, tuples say so."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else {"list": items}
    raise TierError(
        f"{name} of the optimizer is a {type(value).__name__}, which a checkpoint cannot hold"
    )


def _restored(current: Any, value: Any, files: WeightFiles, device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        name = value["tensor"]
        entry = files.entries[name]
        if (
            isinstance(current, Tensor)
            and tuple(current.shape) == entry.shape
            and current.dtype == entry.dtype
        ):
            with torch.no_grad():
                current.copy_(files.read(name))
            return current
        return files.read(name, device)
    kind = "tuple" if "tuple" in value else "list"
    items = [_restored(None, item, files, device) for item in value[kind]]
    return tuple(items) if kind == "tuple" else items


def _tensor_names(value: Any) -> set[str]:
    if isinstance(value, dict):
        if "tensor" in value and isinstance(value["tensor"], str):
            return {value["tensor"]}
        value = list(value.values())
    if isinstance(value, list):
        return set().union(*(_tensor_names(item) for item in value))
    return set()
