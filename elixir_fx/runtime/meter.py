"""The played accelerator's memory gauge: every byte of storage born in a step, with a limit.

A file of its own because of the one underscored torch name in it, `torch.utils._python_dispatch`:
there is no public way to see the result of every operator, nor which modes are active. Tried on
torch 2.11 and 2.13.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
)

from elixir_fx.errors import TierError
from elixir_fx.runtime.parameters import AwayTensor


class DeviceMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts CPU storages that operators create while it is active, each once, until they die.

    Not counted: storages that an operator reads before any made them (inputs, what existed
    before), those given to `ignore` (the arena), memory inside an operator, meta and fake
    tensors. Raises TierError, with the numbers, at the operator that brings the total above
    `limit_bytes` (None: no limit). Storages stay counted after the mode ends, so that it can be
    entered again.
    """

    supports_higher_order_operators = True  # they pass by; what is in them is counted

    def __init__(self, limit_bytes: int | None = None, base_bytes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.base_bytes = base_bytes  # counted always: what was allocated before, once
        self.current_bytes = base_bytes
        self.peak_bytes = base_bytes
        self.peak_operator = ""
        self.counts = True  # False: what is born is not the device's
        self._lock = threading.RLock()  # a storage may die while another is noted
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int | None]] = {}

    def ignore(self, storage: torch.UntypedStorage) -> None:
        """Never count this storage, nor views into it."""
        with self._lock:
            self._forget(id(storage))
            self._note(storage, None)

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these from now on: they were made before, by a step that goes
        on under this meter."""
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None:
                self._count(storage, "saved for backward")

    def reset_peak(self) -> None:
        self.peak_bytes = self.current_bytes
        self.peak_operator = ""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            storage = _storage(tensor)
            if storage is not None and id(storage) not in self._known:
                self.ignore(storage)
        result = func(*args, **kwargs)
        for tensor in _tensors((result, args, kwargs)):
            storage = _storage(tensor)
            if storage is None:
                continue
            if self.counts:
                self._count(storage, str(func))
            elif id(storage) not in self._known:
                self.ignore(storage)
        return result

    def _count(self, storage: torch.UntypedStorage, operator: str) -> None:
        """Note a new storage, or a counted one that was resized."""
        nbytes = storage.nbytes()
        with self._lock:
            known = self._known.get(id(storage))
            if known is not None and known[1] in (None, nbytes):
                return
            if known is not None:
                self._forget(id(storage))
            self._note(storage, nbytes)
            if self.current_bytes > self.peak_bytes:
                self.peak_bytes = self.current_bytes
                self.peak_operator = operator
            current = self.current_bytes
        if self.limit_bytes is not None and current > self.limit_bytes:
            raise TierError(
                f"{operator} needs {nbytes} bytes more of device memory: {current} bytes are "
                f"then in use, {self.limit_bytes} bytes are allowed"
            )

    def _note(self, storage: torch.UntypedStorage, nbytes: int | None) -> None:
        """Watch a storage; None bytes: one that is ignored."""
        key, this = id(storage), weakref.ref(self)

        def died(reference: weakref.ref[torch.UntypedStorage]) -> None:
            meter = this()
            if meter is not None:
                meter._died(key, reference)

        self._known[key] = (weakref.ref(storage, died), nbytes)
        self.current_bytes += nbytes or 0

    def _died(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            known = self._known.get(key)
            if known is not None and known[0] is reference:
                self._forget(key)

    def _forget(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self.current_bytes -= known[1] or 0


@contextmanager
def uncounted() -> Iterator[None]:
    """What operators create meanwhile lies on the host: no meter that is active counts it."""
    active = [m for m in _get_current_dispatch_mode_stack() if isinstance(m, DeviceMeter)]
    counted = [meter for meter in active if meter.counts]
    for meter in counted:
        meter.counts = False
    try:
        yield
    finally:
        for meter in counted:
            meter.counts = True


def _tensors(tree: Any) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors(item)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The CPU memory of a tensor, None where it has none."""
    if tensor.layout is not torch.strided or isinstance(tensor, AwayTensor):
        return None
    storage = tensor.untyped_storage()
    return storage if storage.device.type == "cpu" else None
