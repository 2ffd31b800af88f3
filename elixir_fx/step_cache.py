"""The step cache: a captured and planned step that a later start takes as it is.

Beside `capture`. Dynamo traces the model at every start, so its guards are always its own; what
comes after is looked up in AOTAutograd's cache, whose key covers the traced graph, the inputs'
geometry, every setting of the compiler and torch's version, and ours in `cache_key_tag`: whatever
else a plan follows from. An entry holds both halves as graphs, and what the session knows of
them. AOTAutograd's own rules say what may be stored; a step with dynamic dimensions or with
inputs that it changes is not.

Uses underscored torch names; tried on torch 2.11 and 2.13.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import TracingContext
from torch._inductor.output_code import OutputCode
from torch.fx._graph_pickler import GraphPickler, Options

from elixir_fx.codegen import Halves
from elixir_fx.kernels import Boxed, settings


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is stored of a step: `known` is what its session knows of it, without tensors."""

    halves: Halves
    known: object


class Restorer(Protocol):
    """The compilation under way, which takes what an earlier one has stored."""

    def restore(self, entry: Entry) -> None: ...

    @property
    def functions(self) -> tuple[Boxed, Boxed | None]:
        """What runs in the place of the halves."""


_settings: Any = torch.compiler.config
MARK = ":elixir_fx:"  # in cache_key_tag, before what is ours
_UNDER_WAY: ContextVar[Restorer] = ContextVar("elixir_fx_compilation")


class StepCode(OutputCode):
    """A half as AOTAutograd stores it. The forward's brings what both need."""

    def __init__(self, function: Boxed, entry: Callable[[], Entry | None] | None) -> None:
        self._boxed_call = True
        self._function: Boxed | None = function
        self._entry = entry
        self._stored = b""

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self._function is not None, "restored before it is called"
        return self._function(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Called on a copy that is stored."""
        self._function = None
        entry, self._entry = self._entry, None
        if entry is None:
            return
        found = entry()
        if found is None:
            raise BypassAOTAutogradCache("elixir_fx keeps no step of this kind")
        content = (found.halves.forward, found.halves.backward, found.known)
        options = Options(ops_filter=None, node_metadata_key_filter=_is_kept)
        try:
            self._stored = GraphPickler.dumps(content, options)
        except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError) as error:
            raise BypassAOTAutogradCache(f"no part of a file: {error}") from error

    def post_compile(self, *_: Any) -> None:
        """Called on what was stored, once it is read."""
        compilation = _UNDER_WAY.get()
        if self._stored:
            mode = TracingContext.get().fake_mode
            assert mode is not None
            stored: Any = GraphPickler.loads(self._stored, mode)
            self._stored = b""
            forward, backward, known = stored
            halves = Halves(forward=forward, backward=backward)
            compilation.restore(Entry(halves=halves, known=known))
            self._function = compilation.functions[0]
        else:
            self._function = compilation.functions[1]

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There is none: runs are stored by Inductor itself."""


def surroundings() -> str:
    """What of PyTorch's state a trace follows from, beside what AOTAutograd's key has."""
    devices = ("cpu", "cuda")
    attention: Any = torch.backends.cuda
    return repr(
        (
            [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices],
            settings(),
            str(torch.get_default_device()),
            attention.flash_sdp_enabled(),
            attention.mem_efficient_sdp_enabled(),
            attention.math_sdp_enabled(),
            attention.cudnn_sdp_enabled(),
        )
    )


def code_digest() -> str:
    """A digest of this package's source: another version stores steps of its own."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for file in sorted({*here.rglob("*.py"), *(here / "passes").glob("*.py")}):
        digest.update(file.read_bytes())
    return digest.hexdigest()


# Of a node's notes, beside ours, what the code of a half follows from and what people see.
_KEPT = frozenset({"val", "eager_input_vals", "unbacked_bindings", "stack_trace"})


def _is_kept(key: str) -> bool:
    return key in _KEPT or key.startswith("elixir")


def cached(function: Callable[..., StepCode]) -> Any:
    """A compiler of AOTAutograd's whose results it may store."""
    return SerializableAOTDispatchCompiler(StepCode, function)


@contextmanager
def caching(key: str, compilation: Restorer) -> Iterator[None]:
    """Around AOTAutograd's work: it looks for an entry under `key` first."""
    token = _UNDER_WAY.set(compilation)
    try:
        with (
            _settings.patch(cache_key_tag=f"{_settings.cache_key_tag}{MARK}{key}"),
            torch._functorch.config.patch(
                bundled_autograd_cache=True, force_non_lazy_backward_lowering=True
            ),
        ):
            yield
    finally:
        _UNDER_WAY.reset(token)


@contextmanager
def cached_by_inductor() -> Iterator[None]:
    """Around the compilation of one run, which Inductor stores by itself, for every plan."""
    tag = _settings.cache_key_tag.split(MARK)[0]
    with (
        _settings.patch(cache_key_tag=tag),
        torch._functorch.config.patch(bundled_autograd_cache=False),
    ):
        yield
