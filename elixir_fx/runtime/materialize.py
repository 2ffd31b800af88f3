"""Fill a model that was built on meta, module by module.

Stands at the start of `compile()`: the model has shapes and no values, the plan is made, and
every parameter gets its values and goes to its home before the next module is looked at, so
that the whole model never stands in memory.

Where values come from
- `weights`: a safetensors file or folder with the original names. A tied parameter may be
  there under one of its names or under several, with equal values.
- otherwise the module's own `reset_parameters()`, if it has one, and then `init(module)`.
  Both see one module at a time: its own parameters and buffers are ordinary tensors while
  they run, everything below it is still on meta. A write to anything that is not the
  module's own is refused; it would be lost.
- non-persistent buffers are never in a file: `reset_parameters()` or `init` fills them.

Each tensor starts out as a marker pattern; one that still shows the marker afterwards was
never written (or only in part) and is refused by name. So writes through `.data` count, and
so does `module.weight = nn.Parameter(...)`.

Random numbers are drawn in the order of `model.modules()`: the same seed gives the same
values each time. They equal those of building the model ordinarily only where its
constructors draw in that order and draw nothing else; a constructor that re-initialises its
children (as GPT-2's does) needs an `init` that does the same. A tied parameter is filled by
the first module that owns it; what later owners write to it is dropped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from elixir_fx.errors import ElixirError, TierError
from elixir_fx.runtime.heap import HeapTrim
from elixir_fx.runtime.weights import WeightFiles, listed, nbytes_of

Init = Callable[[nn.Module], object]
Deliver = Callable[[str, nn.Parameter, Tensor], None]


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer of `model` is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(
    model: nn.Module,
    deliver: Deliver,
    *,
    init: Init | None = None,
    weights: Path | str | None = None,
    device: torch.device | str,
) -> None:
    """Make the values of every meta parameter and buffer of `model`, one module at a time.

    `deliver(path, parameter, value)` is called once for each meta parameter, under its first
    name, with an ordinary tensor on `device` of its shape, strides and dtype; it makes the
    parameter object real. Tied parameters stay the same object everywhere. Buffers become
    ordinary tensors on `device`. Parameters and buffers that are real already are left as
    they are, also where `weights` holds them.

    ElixirError: a tensor that nothing fills, or an init that writes to other modules, by
    name. TierError: missing and unexpected names in `weights`, another shape or dtype.
    Names and shapes are checked before the first value is made.
    """
    device = torch.device(device)
    slots = _slots(model)
    files = None if weights is None else _checked_files(model, slots, Path(weights))
    for slot in slots:
        if files is not None:
            slot.keys = [name for name in slot.names if name in files.entries]
    _refuse_unfillable(slots, init)

    known = {id(tensor): name for name, tensor in _named_tensors(model)}
    heap = HeapTrim()
    for path, module in model.named_modules():
        own = [slot for slot in slots if slot.module is module]
        if own:
            filler = _Filler(path=path, module=module, init=init, device=device, known=known)
            values = filler.fill(own, files)
            for slot in own:
                slot.hand_over(values.pop(slot.path), deliver)
                heap.freed(nbytes_of(slot.tensor))
    if files is not None:
        files.close()
    _refuse_meta_attributes(model)


@dataclass(kw_only=True, slots=True)
class _Slot:
    """One meta parameter or buffer: its names, its owners, and where its values are."""

    path: str  # its first name
    name: str  # within `module`
    module: nn.Module  # its first owner, the one that fills it
    tensor: Tensor
    names: list[str]
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # its names in the files of weights

    def hand_over(self, value: Tensor, deliver: Deliver) -> None:
        if isinstance(self.tensor, nn.Parameter):
            deliver(self.path, self.tensor, value)
        else:
            for module, name in self.owners:
                setattr(module, name, value)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each under every name that it has."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of `module` itself."""
    return {
        **dict(module.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    }


def _slots(model: nn.Module) -> list[_Slot]:
    names: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(model):
        if is_lazy(tensor):
            raise ElixirError(f"{name} has no shape yet: run the lazy module once before")
        names.setdefault(id(tensor), []).append(name)
    slots: dict[int, _Slot] = {}
    for path, module in model.named_modules():
        for name, tensor in _own_tensors(module).items():
            if not tensor.is_meta:
                continue
            full = f"{path}.{name}" if path else name
            slot = slots.setdefault(
                id(tensor),
                _Slot(path=full, name=name, module=module, tensor=tensor, names=names[id(tensor)]),
            )
            slot.owners.append((module, name))
    return list(slots.values())


def _checked_files(model: nn.Module, slots: list[_Slot], path: Path) -> WeightFiles:
    files = WeightFiles(path)
    persistent = set(model.state_dict(keep_vars=True))
    missing = []
    for slot in slots:
        found = [name for name in slot.names if name in files.entries]
        for name in found:
            files.check(name, slot.tensor)
        if not found and (
            isinstance(slot.tensor, nn.Parameter) or persistent.intersection(slot.names)
        ):
            missing.append(slot.path)
    unexpected = files.entries.keys() - {name for name, _ in _named_tensors(model)}
    faults = [f"missing: {listed(missing)}"] if missing else []
    faults += [f"unexpected: {listed(unexpected)}"] if unexpected else []
    if faults:
        raise TierError(f"{path} does not belong to this model; {'; '.join(faults)}")
    return files


def _refuse_unfillable(slots: list[_Slot], init: Init | None) -> None:
    """What certainly nobody fills is refused before the first value is made."""
    if init is not None:
        return
    lost = [slot for slot in slots if not slot.keys and not _has_reset(slot.module)]
    if lost:
        kinds = sorted({type(slot.module).__name__ for slot in lost})
        raise ElixirError(
            f"nothing fills {listed(slot.path for slot in lost)}: {', '.join(kinds)} has no "
            f"reset_parameters(). Give init=, a function that fills one module's own "
            f"parameters and buffers, or weights="
        )


def _has_reset(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _reset(module: Any) -> None:
    module.reset_parameters()


def _refuse_meta_attributes(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ElixirError(
                    f"{path + '.' if path else ''}{name} is a tensor on meta and neither a "
                    f"parameter nor a buffer: use register_buffer(..., persistent=False) and "
                    f"fill it in reset_parameters() or init="
                )


@dataclass(kw_only=True, slots=True)
class _Filler:
    """Makes the values of one module."""

    path: str
    module: nn.Module
    init: Init | None
    device: torch.device
    known: dict[int, str]  # every parameter and buffer of the model, by id

    def fill(self, own: list[_Slot], files: WeightFiles | None) -> dict[str, Tensor]:
        """The values of the module's own meta tensors, by path."""
        values: dict[str, Tensor] = {}
        unfilled: dict[str, Tensor] = {}
        for slot in own:
            value = torch.empty_like(slot.tensor.detach(), device=self.device)
            values[slot.path] = value
            if slot.keys and files is not None:
                self._read(slot, files, value)
            else:
                _mark(value)
                unfilled[slot.name] = value
        if unfilled:
            read = {slot.name: values[slot.path] for slot in own if slot.keys}
            self._initialise(unfilled, read)
            for slot in own:
                if not slot.keys:
                    values[slot.path] = self._accepted(slot, unfilled[slot.name])
        return values

    def _read(self, slot: _Slot, files: WeightFiles, value: Tensor) -> None:
        first, *others = slot.keys
        files.read_into(first, value)
        for other in others:
            again = torch.empty_like(value)
            files.read_into(other, again)
            if not _same_bits(value, again):
                raise TierError(
                    f"{first} and {other} are one tied parameter of the model, but differ in "
                    f"{files.path}"
                )

    def _initialise(self, unfilled: dict[str, Tensor], read: dict[str, Tensor]) -> None:
        """Run reset_parameters() and init on stand-ins; `unfilled` then holds their results."""
        originals = _own_tensors(self.module)
        with self._stand_ins(originals, unfilled, read), torch.no_grad():
            if _has_reset(self.module):
                with _OwnWritesOnly(self.known, f"reset_parameters() of {self._title}"):
                    _reset(self.module)
            if self.init is not None:
                with _OwnWritesOnly(self.known, f"init, called with {self._title},"):
                    self.init(self.module)
            now = _own_tensors(self.module)
            for name in unfilled:
                if name not in now:
                    raise ElixirError(f"initialising {self._title} removed its {name}")
                unfilled[name] = now[name]
                if isinstance(originals[name], nn.Parameter):
                    vars(originals[name]).update(vars(now[name]))
                    originals[name].requires_grad_(now[name].requires_grad)

    @contextmanager
    def _stand_ins(
        self, originals: dict[str, Tensor], unfilled: dict[str, Tensor], read: dict[str, Tensor]
    ) -> Iterator[None]:
        """The module with ordinary tensors: those to be filled, and copies of all others."""
        made: dict[int, Tensor] = {}  # by original: one that the module has twice stays one
        for name, original in originals.items():
            if id(original) not in made:
                value = unfilled.get(name)
                if value is None:
                    value = read.get(name, original).detach().clone()
                if isinstance(original, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=original.requires_grad)
                    vars(value).update(vars(original))
                made[id(original)] = value
            setattr(self.module, name, made[id(original)])
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(self.module, name, original)

    def _accepted(self, slot: _Slot, value: Tensor) -> Tensor:
        if value.is_meta or _marked(value):
            raise ElixirError(
                f"{slot.path} was not filled: neither reset_parameters() nor init wrote all of "
                f"it. Fill it in reset_parameters() of {type(self.module).__name__} or in init=, "
                f"or give weights="
            )
        if value.shape != slot.tensor.shape or value.dtype != slot.tensor.dtype:
            raise ElixirError(
                f"initialising {self._title} made {slot.path} {list(value.shape)} {value.dtype}; "
                f"it is {list(slot.tensor.shape)} {slot.tensor.dtype}"
            )
        return value.detach().to(self.device)

    @property
    def _title(self) -> str:
        kind = type(self.module).__name__
        return f"{self.path} ({kind})" if self.path else kind


class _OwnWritesOnly(TorchFunctionMode):
    """Refuses in-place writes to tensors that are not the module's own.

    While it is on, the module's own tensors are stand-ins, so whatever is on meta, or is a
    parameter or buffer of the model itself, belongs to another module.
    """

    def __init__(self, known: dict[int, str], who: str) -> None:
        super().__init__()
        self.known = known
        self.who = who

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        target = _written(func, args, kwargs)
        if isinstance(target, Tensor) and (target.is_meta or id(target) in self.known):
            what = self.known.get(id(target), "a tensor on meta")
            raise ElixirError(
                f"{self.who} writes to {what}, which belongs to another module and would be "
                f"lost. Each module is initialised on its own: write only to "
                f"module.parameters(recurse=False) and module.buffers(recurse=False); init is "
                f"called with every module in turn"
            )
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that a torch function writes to, None if it only reads."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    name = str(getattr(func, "__name__", ""))
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    assigns_data = name == "__set__" and getattr(func.__self__, "__name__", "") == "data"
    if not (in_place or assigns_data or name == "__setitem__"):
        return None
    if args:
        return args[0]
    return next((kwargs[key] for key in ("tensor", "input", "self") if key in kwargs), None)


def _bits(value: Tensor) -> Tensor:
    """The memory of a dense tensor as whole numbers of its item size."""
    flat = value.detach().as_strided((value.numel(),), (1,))
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return flat.view(wide.get(value.dtype.itemsize, torch.int64))


def _marker(dtype: torch.dtype) -> int:
    """A pattern that no initialisation writes: for floats a NaN with a payload of its own."""
    part = dtype.to_real() if dtype.is_complex else dtype
    floats = {
        torch.float16: 0x7EA5,
        torch.bfloat16: 0x7FD5,
        torch.float32: 0x7FD5A5A5,
        torch.float64: 0x7FF8A5A55A5AA5A5,
    }
    whole = {1: 0xA5, 2: -0x5A5B, 4: -0x5A5A5A5B, 8: -0x5A5A5A5A5A5A5A5B}
    return floats.get(part, whole[part.itemsize])


def _mark(value: Tensor) -> None:
    real = torch.view_as_real(value) if value.is_complex() else value
    _bits(real).fill_(_marker(value.dtype))


def _marked(value: Tensor) -> bool:
    """Whether the marker is still there: anywhere, or for small whole numbers everywhere."""
    real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
    bits = _bits(real.contiguous())
    if bits.numel() == 0:
        return False
    narrow = real.dtype.itemsize <= 1 or real.dtype in (torch.int16, torch.uint16)
    marker = _marker(value.dtype)
    hits = (block == marker for block in _blocks(bits))
    return all(bool(hit.all()) for hit in hits) if narrow else any(bool(hit.any()) for hit in hits)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    pairs = zip(_blocks(_bits(one)), _blocks(_bits(other)), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def _blocks(flat: Tensor, numel: int = 1 << 22) -> Iterator[Tensor]:
    """Pieces of a flat tensor, so that comparing it takes little memory."""
    for start in range(0, flat.numel(), numel):
        yield flat[start : start + numel]
