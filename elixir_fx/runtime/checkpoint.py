"""Full values, for people and for plain PyTorch.

`full_state` is what `state_dict()` hands out: ordinary CPU tensors that alias nothing live,
in RAM up to a budget and in unlinked mapped files past it. `save` and `load` are
`elixir_fx.save` and `elixir_fx.load`: a folder that any safetensors tool reads.

    folder/ checkpoint.json                  version, tied names, optimizer options, random state
            model*.safetensors               parameters and persistent buffers, original names
            model.safetensors.index.json
            optimizer/optimizer*.safetensors "exp_avg/layers.0.weight", ... and their index

Both use only what every module and optimizer has (`named_parameters`, `detach().clone()` of
one tensor at a time, `copy_`), so they work on plain models as on compiled ones.
"""

import base64
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elixir_fx.errors import TierError
from elixir_fx.runtime.heap import HeapTrim
from elixir_fx.runtime.optimizer_state import Adopt, load_optimizer, optimizer_record
from elixir_fx.runtime.weights import (
    BLOCK_BYTES,
    Pending,
    WeightFiles,
    listed,
    nbytes_of,
    write_weights,
)

VERSION = 1
RECORD = "checkpoint.json"
OPTIMIZER = "optimizer"


def full_state(
    entries: Iterable[tuple[str, Callable[[], Tensor]]],
    *,
    in_memory_bytes: int,
    folder: Path | None,
) -> dict[str, Tensor]:
    """CPU tensors with the values of `entries`, in their order, loaded one by one.

    Each is a copy, so `load()` may return something live. Two names with the same `load`
    object are tied: they get the same tensor. While the sum is within `in_memory_bytes`
    tensors are in RAM; each one after that maps a file of its own in `folder`, unlinked at
    birth: the disk is free again when the tensor is. Without a folder all are in RAM.
    TierError if the folder cannot hold a tensor.
    """
    state: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    loads = []  # kept alive, so that an id is not given twice
    used = 0
    heap = HeapTrim()
    for name, load in entries:
        if id(load) not in made:
            loads.append(load)
            value = load().detach()
            nbytes = nbytes_of(value)
            if folder is None or used + nbytes <= in_memory_bytes or nbytes == 0:
                used += nbytes
                made[id(load)] = value.to("cpu", copy=True)
            else:
                made[id(load)] = _mapped_copy(name, value.cpu(), folder)
            del value
            heap.freed(nbytes)
        state[name] = made[id(load)]
    return state


def _mapped_copy(name: str, value: Tensor, folder: Path) -> Tensor:
    """`value` in a shared mapping of an unlinked file; none of its pages is resident."""
    dense = torch.empty_like(value, device="meta")  # the strides that a copy would have
    if value.stride() != dense.stride():
        value = value.clone()
    nbytes = nbytes_of(value)
    memory = value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy().data
    try:
        descriptor, path = tempfile.mkstemp(prefix="elixir-state-", dir=folder)
        try:
            # Allocated before it is mapped: a full disk is an error here, not a signal later.
            os.posix_fallocate(descriptor, 0, nbytes)
            offset = 0
            while offset < nbytes:
                offset += os.pwrite(descriptor, memory[offset : offset + BLOCK_BYTES], offset)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, nbytes, os.POSIX_FADV_DONTNEED)
            flat = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        finally:
            os.close(descriptor)
            os.unlink(path)
    except OSError as error:
        raise TierError(f"{folder} cannot hold {name} ({nbytes} bytes): {error}") from error
    return flat.view(value.dtype).as_strided(value.shape, value.stride())


def save(folder: str | Path, model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Write `model`, and the state of `optimizer`, to `folder`.

    Written beside it first and renamed at the end: until then an older checkpoint there
    stays whole. Files in `folder` that are not a checkpoint's are kept. At most one shard of
    values (256 MiB, or one larger tensor) is in memory at a time. TierError if the folder is
    something else than a checkpoint, the disk is full, or a state cannot be written.
    """
    folder = Path(folder)
    names, aliases = _names(model)
    record: dict[str, Any] = {"elixir_fx_checkpoint": VERSION, "aliases": aliases}
    record["random"] = _random_state()
    with _replaced(folder) as fresh:
        tensors = [pending(name, tensor) for name, tensor in names.items()]
        write_weights(fresh, "model", tensors, {"aliases": aliases})
        del tensors
        if optimizer is not None:
            record["optimizer"], states = optimizer_record(optimizer, _parameter_paths(model))
            (fresh / OPTIMIZER).mkdir()
            write_weights(
                fresh / OPTIMIZER,
                OPTIMIZER,
                [pending(name, tensor) for name, tensor in states.items()],
                {},
            )
        (fresh / RECORD).write_text(json.dumps(record, indent=1))


def read_along(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Read what `save` reads, in its order, and write nothing: for the other ranks of one that
    saves, where reading brings the shares of all ranks together."""
    names, _ = _names(model)
    for name, tensor in names.items():
        pending(name, tensor).load()
    if optimizer is not None:
        _, states = optimizer_record(optimizer, _parameter_paths(model))
        for name, tensor in states.items():
            pending(name, tensor).load()


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    adopt: Adopt | None = None,
    random: bool = True,
) -> None:
    """Read what `save` wrote into `model`, `optimizer` and, with `random`, torch's random state.

    Values are copied in place, one tensor at a time. TierError, before anything is changed:
    the folder is no checkpoint, names are missing or unexpected, a shape or dtype differs,
    the optimizer's groups are others. Without `optimizer` a saved one is left unread; `adopt`
    is `load_optimizer`'s.
    """
    folder = _present(Path(folder))
    record = _record(folder)
    names, _ = _names(model)
    files = WeightFiles(folder)
    faults = []
    if missing := names.keys() - files.entries.keys():
        faults.append(f"missing: {listed(missing)}")
    if unexpected := files.entries.keys() - names.keys():
        faults.append(f"unexpected: {listed(unexpected)}")
    if faults:
        raise TierError(f"{folder} does not belong to this model; {'; '.join(faults)}")
    for name, tensor in names.items():
        files.check(name, tensor)
    if optimizer is not None:
        if "optimizer" not in record:
            raise TierError(f"{folder} was saved without an optimizer")
        states = WeightFiles(folder / OPTIMIZER)
        load_optimizer(optimizer, _parameter_paths(model), record["optimizer"], states, adopt)
    heap = HeapTrim()
    with torch.no_grad():
        for name, tensor in names.items():
            tensor.copy_(files.read(name))
            heap.freed(nbytes_of(tensor))
    files.close()
    if random:
        _set_random_state(record["random"])


def pending(name: str, tensor: Tensor) -> Pending:
    """`tensor` to be written as `name`: cloned when it is due, which loads one that is away."""
    return Pending(
        name=name,
        nbytes=nbytes_of(tensor),
        dtype=tensor.dtype,
        load=lambda: tensor.detach().clone(),
    )


def _names(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What a checkpoint holds, each object once, and the other names of tied ones.

    Buffers count if they are persistent; `keep_vars` makes state_dict hand out the objects
    themselves, so that nothing is loaded.
    """
    state = nn.Module.state_dict(model, keep_vars=True)
    if extra := [name for name in state if name.endswith("_extra_state")]:
        raise TierError(f"a checkpoint cannot hold the extra state of modules: {listed(extra)}")
    persistent = {id(value) for value in state.values()}
    names: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if not isinstance(tensor, nn.Parameter) and id(tensor) not in persistent:
                continue
            if tensor.is_meta:
                raise TierError(f"{name} is on meta: it has no values to save or to load into")
            if id(tensor) in first:
                aliases[name] = first[id(tensor)]
            else:
                first[id(tensor)] = name
                names[name] = tensor
    return names, aliases


def _parameter_paths(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _random_state() -> dict[str, Any]:
    states = {"cpu": _text(torch.get_rng_state())}
    cuda: Any = torch.cuda  # parts of it are untyped
    if cuda.is_available() and cuda.is_initialized():
        states |= {
            f"cuda:{index}": _text(state) for index, state in enumerate(cuda.get_rng_state_all())
        }
    return states


def _set_random_state(states: dict[str, str]) -> None:
    """Set what was saved, as far as this machine has the devices."""
    for device, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif int(device.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _present(folder: Path) -> Path:
    """`folder`, or what it was before a `save` that was killed between its two renames."""
    if not folder.exists() and _previous(folder).exists():
        return _previous(folder)
    return folder


def _record(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise TierError(f"{folder} does not exist: there is no checkpoint to load")
    try:
        record = json.loads((folder / RECORD).read_text())
        version = record["elixir_fx_checkpoint"]
    except FileNotFoundError as error:
        raise TierError(f"{folder} is not a checkpoint: it has no {RECORD}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TierError(f"{folder / RECORD} is malformed: {error!r}") from error
    if version != VERSION:
        raise TierError(f"{folder} is a checkpoint of version {version}; this reads {VERSION}")
    return dict(record)


@contextmanager
def _replaced(folder: Path) -> Iterator[Path]:
    """A fresh folder beside `folder` that takes its place when the block ends well."""
    folder = folder.absolute()
    if folder.exists() and not folder.is_dir():
        raise TierError(f"{folder} is a file: a checkpoint is a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).exists():
        raise TierError(f"{folder} holds something else than a checkpoint: give another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{folder.name}.partial-"
        for entry in list(folder.parent.iterdir()):
            if entry.name.startswith(prefix):  # of a save that was killed
                rmtree(entry)
        fresh = folder.with_name(f"{prefix}{os.getpid()}")
        fresh.mkdir()
    except OSError as error:
        raise TierError(f"cannot save to {folder}: {error}") from error
    try:
        yield fresh
        _swap(folder, fresh)
    except OSError as error:
        raise TierError(f"cannot save to {folder}: {error}") from error
    finally:
        rmtree(fresh, ignore_errors=True)  # gone already if all went well


def _swap(folder: Path, fresh: Path) -> None:
    previous = _previous(folder)
    if folder.exists():
        if previous.exists():
            rmtree(previous)
        folder.rename(previous)
    fresh.rename(folder)
    if previous.exists():
        for entry in list(previous.iterdir()):
            if not _ours(entry):
                entry.rename(folder / entry.name)
        rmtree(previous)


def _ours(entry: Path) -> bool:
    weights = entry.name.startswith("model") and ".safetensors" in entry.name
    return weights or entry.name in (RECORD, OPTIMIZER)
