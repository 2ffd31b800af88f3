"""Safetensors files, read and written one tensor at a time.

`materialize` and `checkpoint` stand on this. Reading goes in blocks of rows and lets go of
the file's mapping every `MAPPED_BYTES`, writing goes in files of at most `shard_bytes`, so
that memory grows by one block, or one shard, however large the model is. The format, its
index and its names are the usual ones: any safetensors tool reads what is written here.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from elixir_fx.errors import TierError
from elixir_fx.runtime.heap import HeapTrim
from elixir_fx.units import MIB

BLOCK_BYTES = 16 * MIB  # of rows that are copied at once
MAPPED_BYTES = 64 * MIB  # read through one mapping before it is dropped with its pages
SHARD_BYTES = 256 * MIB  # of one written file, unless a single tensor is larger
SHOWN = 8  # names that an error lists before it only counts

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


def listed(names: Iterable[str]) -> str:
    """Names for an error message: sorted, the first few and how many more."""
    names = sorted(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, from what is known without its values."""
    return tensor.shape.numel() * tensor.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What a file says of one tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles:
    """The tensors of a safetensors file, or of a folder of them, by name.

    A folder is read through its index (`*.safetensors.index.json`) where it has one, else
    all its `*.safetensors` count. `entries` maps each name to its `Entry`; `metadata` is the
    index's. TierError if the path holds no weights, a file cannot be read, or two files
    hold the same name.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self._open: tuple[Path, Any] | None = None
        self._read_bytes = 0
        for file in self._files():
            handle = _opened(file)
            for name in handle.keys():  # noqa: SIM118 (a handle is no mapping)
                if name in self.entries:
                    raise TierError(f"{name!r} is in both {self.entries[name].file} and {file}")
                piece = handle.get_slice(name)
                dtype = DTYPES.get(piece.get_dtype())
                if dtype is None:
                    raise TierError(f"{name!r} in {file} has the type {piece.get_dtype()}, unread")
                self.entries[name] = Entry(file=file, shape=tuple(piece.get_shape()), dtype=dtype)

    def _files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        if not self.path.is_dir():
            raise TierError(f"{self.path} does not exist: give a safetensors file or a folder")
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        if len(indices) > 1:
            raise TierError(f"{self.path} holds several models: {[x.name for x in indices]}")
        if not indices:
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise TierError(f"{self.path} holds no *.safetensors file")
            return files
        try:
            index = json.loads(indices[0].read_text())
            files = [self.path / name for name in sorted(set(index["weight_map"].values()))]
            self.metadata = dict(index.get("metadata", {}))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TierError(f"{indices[0]} is not an index of weights: {error!r}") from error
        for file in files:
            if not file.is_file():
                raise TierError(f"{indices[0]} names {file.name}, which is not there")
        return files

    def check(self, name: str, tensor: Tensor, what: str = "the model") -> None:
        """TierError unless the file's tensor has the shape and dtype of `tensor`."""
        entry = self.entries[name]
        if entry.shape != tuple(tensor.shape) or entry.dtype != tensor.dtype:
            raise TierError(
                f"{name!r} in {entry.file} is {list(entry.shape)} {entry.dtype}, "
                f"but {list(tensor.shape)} {tensor.dtype} in {what}"
            )

    def read_into(self, name: str, target: Tensor) -> None:
        """Copy the values of `name` into `target` (of its shape and dtype, on any device)."""
        entry = self.entries[name]
        target = target.detach()
        if not entry.shape or target.numel() == 0:
            target.copy_(self._handle(entry.file, 8).get_tensor(name))
            return
        row_bytes = target.numel() // entry.shape[0] * entry.dtype.itemsize
        rows = max(1, BLOCK_BYTES // row_bytes)
        for start in range(0, entry.shape[0], rows):
            end = min(start + rows, entry.shape[0])
            handle = self._handle(entry.file, (end - start) * row_bytes)
            try:
                target[start:end].copy_(handle.get_slice(name)[start:end])
            except (OSError, SafetensorError) as error:
                raise TierError(f"cannot read {name!r} from {entry.file}: {error}") from error

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """The values of `name` as a tensor of its own."""
        entry = self.entries[name]
        value = torch.empty(entry.shape, dtype=entry.dtype, device=device)
        self.read_into(name, value)
        return value

    def close(self) -> None:
        """Let go of the file that was read last, and of its mapped pages."""
        self._open = None

    def _handle(self, file: Path, nbytes: int) -> Any:
        self._read_bytes += nbytes
        if self._open is None or self._open[0] != file or self._read_bytes > MAPPED_BYTES:
            self._open = None  # before the next is mapped: the pages of the old one go here
            self._open = (file, _opened(file))
            self._read_bytes = nbytes
        return self._open[1]


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise TierError(f"{file} is not a readable safetensors file: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A tensor to be written: its size is known now, `load` makes its value when it is due.

    What `load` returns must alias nothing else that is written.
    """

    name: str
    nbytes: int
    dtype: torch.dtype
    load: Callable[[], Tensor]


def write_weights(
    folder: Path,
    stem: str,
    tensors: Sequence[Pending],
    metadata: Mapping[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `tensors` to `folder` as `stem`*.safetensors and their index.

    At most `shard_bytes`, or one larger tensor, stand in memory. TierError names a tensor of
    a dtype that the format lacks, or the file that could not be written.
    """
    for pending in tensors:
        if pending.dtype not in DTYPES.values():
            raise TierError(f"safetensors cannot hold {pending.name!r}: {pending.dtype}")
    shards = _shards(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    heap = HeapTrim()
    for number, shard in enumerate(shards, 1):
        suffix = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        file = folder / f"{stem}{suffix}.safetensors"
        values = {pending.name: pending.load().detach().to("cpu").contiguous() for pending in shard}
        try:
            save_file(values, file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise TierError(f"cannot write {file}: {error}") from error
        values.clear()
        heap.freed(sum(pending.nbytes for pending in shard))
        weight_map.update({pending.name: file.name for pending in shard})
    total = sum(pending.nbytes for pending in tensors)
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(tensors: Sequence[Pending], shard_bytes: int) -> list[list[Pending]]:
    """`tensors` in order, in groups of at most `shard_bytes` or of one."""
    shards: list[list[Pending]] = [[]]
    filled = 0
    for pending in tensors:
        if shards[-1] and filled + pending.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(pending)
        filled += pending.nbytes
    return shards
