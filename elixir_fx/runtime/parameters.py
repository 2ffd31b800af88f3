"""Parameters, gradients and optimizer states that people can use though they are away.

Between steps a tensor whose home is not device memory is one of three classes:

    AwayParameter   the user's own nn.Parameter object, its class changed by `away`
    AwayTensor      a view of it, or an optimizer state: read at each use, written through
    ChunkGradient   an AwayTensor in p.grad

An AwayParameter has a storage of no bytes, so nothing may run on it as it is.
`__torch_function__` answers questions of metadata from the object itself and hands
everything else an AwayTensor in its place: below autograd, where `__torch_dispatch__` knows
from the operator's schema what is a view, what is written and what is only read. With
gradients on, the AwayTensor comes from an autograd Function, so that gradients reach the
parameter; autograd then refuses in-place edits, as it does for any leaf.

Where this differs from an ordinary parameter: `p.data = x` copies x home (same shape and
dtype only) and does not alias it; `numpy()` gives a read-only copy; `data_ptr()` and
`untyped_storage()` raise; a view taken with gradients on cannot be used in another forward
after the value has changed (RuntimeError: take it again); `nn.Parameter(p)` raises, as it does
for any subclass (use `p.data`).

What it cannot catch: `torch.tensor(p)` and `torch.Tensor(p)`, which PyTorch itself warns against,
and `torch.vmap` over p itself ask nobody before they read memory, and there is none: the process
ends. Use `p.detach().clone()`.

Underscored torch names in this file were tried on torch 2.11 and 2.13.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, increment_version

from elixir_fx.errors import ElixirError
from elixir_fx.runtime import on_shares
from elixir_fx.runtime.accumulation import accumulator
from elixir_fx.runtime.away import Home, Source, found, one_at_a_time, replaced
from elixir_fx.runtime.shards import ShardedHome

_raw = torch._C.DisableTorchFunctionSubclass
_aten = torch.ops.aten

_FILLS = ("copy_", "zero_", "normal_", "uniform_", "_foreach_zero_", "_foreach_copy_")
_NEW = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones")
# Written whole, whatever was there: the old value need not be read.
_OVERWRITES = frozenset(
    {*(getattr(_aten, name).default for name in _FILLS), _aten.fill_.Scalar, _aten.fill_.Tensor}
)
# Need shape, strides and dtype of their first argument only.
_FACTORIES = frozenset(getattr(_aten, name).default for name in (*_NEW, "new_full"))
_SAME = frozenset({_aten.detach.default, _aten.alias.default})


# One step from a tensor to a view of it.
View = Callable[[Tensor], Tensor]


class AwayTensor(Tensor):
    """A tensor whose value is read from its source at each use.

    `views` lead from the source's tensor to this one. `shadow` is the same on the meta device
    and says shape, strides and offset. `owner` is the parameter whose version counter follows
    writes, None for `p.data`, gradients and optimizer states.
    """

    source: Source
    views: tuple[View, ...]
    shadow: Tensor
    owner: "weakref.ref[Tensor] | None"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[Self],
        source: Source,
        views: tuple[View, ...] = (),
        shadow: Tensor | None = None,
        owner: "weakref.ref[Tensor] | None" = None,
    ) -> Self:
        home = source.home
        if shadow is None:
            shadow = torch.empty_strided(
                tuple(home.shape), tuple(home.strides), dtype=home.dtype, device="meta"
            )
        # Born as an ordinary tensor in inference mode too: it is a view of one.
        with torch.inference_mode(False):
            self = Tensor._make_wrapper_subclass(
                cls,
                shadow.shape,
                strides=shadow.stride(),
                storage_offset=shadow.storage_offset(),
                dtype=shadow.dtype,
                device=home.device,
            )
        self.source, self.views, self.shadow, self.owner = source, views, shadow, owner
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # composite operators arrive whole
            whole = func.decompose(*args, **kwargs)
            if whole is not NotImplemented:
                return whole
        first = args[0] if args else None
        if isinstance(first, AwayTensor):
            if func.is_view:
                return first._view(func, args[1:], kwargs)
            if func in _FACTORIES:
                device = kwargs.get("device") or first.device
                return func(first.shadow, *args[1:], **{**kwargs, "device": device})
        if torch.Tag.inplace_view in func.tags or func in (
            _aten.resize_.default,
            _aten.set_.source_Tensor,
            _aten.set_.source_Storage_storage_offset,
        ):
            raise ElixirError(
                f"{func} would change the shape or storage of {_path(args)}, whose value is away: "
                "do it within elixir_fx.full_parameters(model)"
            )
        if any(_share(tensor) is not None for tensor in found(args, AwayTensor)):
            done, result = on_shares.run(func, args, kwargs, _share)
            if done:
                _count_write(func, args)
                return result
        one_by_one = one_at_a_time(func._schema, args, kwargs)
        if one_by_one is None:
            return _run(func, args, kwargs)
        # One element after the other, or a clipped model would be in memory at once.
        results = [_run(func, part, options) for part, options in one_by_one]
        return None if results[0] is None else [item for result in results for item in result]

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _SAME:
            return type(self)(self.source, self.views, self.shadow, self.owner)
        if func is _aten.as_strided.default:
            return self._strided(*args, **kwargs)
        shadow = func(self.shadow, *args, **kwargs)
        if isinstance(shadow, Tensor):
            return AwayTensor(
                self.source,
                (*self.views, lambda value: cast(Tensor, func(value, *args, **kwargs))),
                shadow,
                self.owner,
            )

        def pick(index: int) -> View:
            return lambda value: cast(Tensor, func(value, *args, **kwargs)[index])

        return [
            AwayTensor(self.source, (*self.views, pick(index)), part, self.owner)
            for index, part in enumerate(shadow)
        ]

    def _strided(
        self, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
    ) -> "AwayTensor":
        offset = self.shadow.storage_offset() if storage_offset is None else storage_offset

        def strided(value: Tensor) -> Tensor:
            # Offsets count from the start of the source's tensor, wherever that lies.
            shift = value.storage_offset() - self.shadow.storage_offset()
            return value.as_strided(size, stride, offset + shift)

        shadow = self.shadow.as_strided(size, stride, offset)
        return AwayTensor(self.source, (*self.views, strided), shadow, self.owner)

    def within(self, value: Tensor) -> Tensor:
        """This view of `value`, a tensor that the source loaded."""
        for view in self.views:
            value = view(value)
        return value

    def load(self) -> Tensor:
        """The current value as an ordinary tensor, without autograd; not to be written to."""
        with torch.no_grad():
            return self.within(self.source.load())

    def snapshot(self) -> Tensor:
        """The current value as an ordinary tensor of its own."""
        value = self.load()
        return value if self.source.tensor is None and not self.views else value.clone()

    @property
    def data(self) -> Tensor:
        return AwayTensor(self.source, self.views, self.shadow)

    @data.setter
    def data(self, value: Tensor) -> None:
        _assign(self, value)

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only copy: writes to it could not reach the home."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. "
                "Use tensor.detach().numpy() instead."
            )
        array = self.snapshot().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.snapshot().__dlpack__(*args, **kwargs)

    def tolist(self) -> Any:
        return self.load().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return type(self).__name__ + repr(self.load()).removeprefix("tensor")

    def __format__(self, spec: str) -> str:
        return format(self.load(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return cast(Tensor, memo.setdefault(id(self), self.snapshot()))

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.snapshot().__reduce_ex__(proto)  # type: ignore[no-untyped-call]

    def apply_(self, function: Any) -> Tensor:
        self.data.copy_(self.snapshot().apply_(function))
        return self

    def map_(self, other: Tensor, function: Any) -> Tensor:
        self.data.copy_(self.snapshot().map_(other, function))
        return self

    def as_subclass(self, cls: type[Any]) -> Any:
        """A copy: an alias of another class would have no memory behind it."""
        return self.clone().as_subclass(cls)

    def is_shared(self) -> bool:
        return False

    def data_ptr(self) -> NoReturn:
        raise ElixirError(
            f"{self.source.home.path} has no address: its value is away between steps. Read it "
            "with .clone(), or use elixir_fx.full_parameters(model)"
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        if torch._guards.TracingContext.try_get() is None:
            self.data_ptr()
        return super().untyped_storage()  # a capture describes p.grad, and reads nothing

    def storage(self) -> NoReturn:
        self.data_ptr()

    def share_memory_(self) -> NoReturn:
        self.data_ptr()


class ChunkGradient(AwayTensor):
    """p.grad where the gradient's home is not device memory: in-place operations reach it."""


def _count_write(func: Any, args: tuple[Any, ...]) -> None:
    """Raise the version of the parameter that an in-place operator wrote."""
    first = args[0]
    if isinstance(first, AwayTensor) and first.owner is not None and func._schema.is_mutable:
        owner = first.owner()
        if owner is not None:
            increment_version(owner)


def _share(value: Any) -> ShardedHome | None:
    """The home of a whole tensor that several ranks share."""
    if isinstance(value, AwayTensor) and not value.views and value.source.tensor is None:
        home = value.source.home
        return home if isinstance(home, ShardedHome) else None
    return None


def _path(values: Any) -> str:
    return ", ".join(sorted({tensor.source.home.path for tensor in found(values, AwayTensor)}))


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on loaded values, then send home what its schema says it wrote."""
    tensors = found((args, kwargs), AwayTensor)
    written: list[AwayTensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += found(value, AwayTensor)
    loaded: dict[Source, Tensor] = {}
    if func in _OVERWRITES and len({tensor.source for tensor in tensors}) == len(tensors):
        loaded = {tensor.source: tensor.source.blank() for tensor in written if not tensor.views}
    back: dict[int, AwayTensor] = {}
    alive: list[Tensor] = []  # so that an id stays one tensor's

    def plain(tensor: AwayTensor) -> Tensor:
        if tensor.source not in loaded:
            loaded[tensor.source] = tensor.source.load()
        value = tensor.within(loaded[tensor.source])
        back[id(value)] = tensor
        alive.append(value)
        return value

    result = func(*replaced(args, AwayTensor, plain), **replaced(kwargs, AwayTensor, plain))
    for source in dict.fromkeys(tensor.source for tensor in written):
        source.store(loaded[source])
    owners = {tensor.owner for tensor in written if tensor.owner is not None}
    increment_version([owner for owner in (ref() for ref in owners) if owner is not None])
    return replaced(result, Tensor, lambda value: back.get(id(value), value))


def _assign(tensor: AwayTensor, value: Tensor) -> None:
    """What `tensor.data = value` means here: copy the value home."""
    if isinstance(value, AwayParameter):
        value = value.base
    if value.shape != tensor.shape or value.dtype != tensor.dtype or value.device != tensor.device:
        raise ElixirError(
            f"{tensor.source.home.path} is {tensor.dtype} {list(tensor.shape)} on {tensor.device} "
            f"and its value is away; it cannot become {value.dtype} {list(value.shape)} on "
            f"{value.device}. Move or cast the model before elixir_fx.compile"
        )
    if isinstance(value, AwayTensor):
        if value.source is tensor.source and value.views == tensor.views:
            return
        value = value.load()
    with torch.no_grad():
        AwayTensor(tensor.source, tensor.views, tensor.shadow).copy_(value)


class _Fetch(torch.autograd.Function):
    """From a parameter to a lazily read alias of it; the gradient goes back as it is."""

    @staticmethod
    def forward(ctx: Any, parameter: "AwayParameter") -> Tensor:
        # A view made in here: autograd refuses to change it in place, as it must.
        return cast(Tensor, _aten.alias.default(parameter.base))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone() if isinstance(gradient, AwayTensor) else gradient


_FIELDS = (
    "_backward_hooks _base _grad _grad_fn _is_view _post_accumulate_grad_hooks _version device "
    "dtype grad grad_dtype grad_fn is_cpu is_cuda is_leaf is_meta is_mkldnn is_mps is_nested "
    "is_quantized is_sparse is_sparse_csr is_xpu itemsize layout name names nbytes ndim output_nr "
    "requires_grad retains_grad shape volatile _has_symbolic_sizes_strides"
)
_METHODS = (
    "__hash__ __len__ _is_view _make_subclass detach_ dim element_size get_device "
    "has_names is_coalesced is_complex is_contiguous is_floating_point is_inference "
    "is_signed ndimension nelement numel register_hook register_post_accumulate_grad_hook "
    "requires_grad_ retain_grad size storage_offset stride"
)


def _metadata() -> frozenset[Any]:
    """Functions of a parameter that read neither its value nor its storage."""
    functions = {getattr(Tensor, name) for name in _METHODS.split() if hasattr(Tensor, name)}
    for name in _FIELDS.split():
        field = getattr(Tensor, name, None)
        for access in ("__get__", "__set__", "__delete__"):
            if hasattr(field, access):
                functions.add(getattr(field, access))
    for name in ("is_floating_point", "is_complex", "is_signed", "numel", "is_inference"):
        functions.add(getattr(torch, name))
    functions.add(torch._has_compatible_shallow_copy_type)
    return frozenset(functions)


_METADATA = _metadata()
_OWN_METHODS = {
    getattr(Tensor, name): getattr(AwayTensor, name)
    for name in (
        *("numpy", "tolist", "__array__", "__dlpack__", "__format__", "apply_", "map_"),
        *("is_shared", "data_ptr", "untyped_storage", "storage", "share_memory_"),
    )
}
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_IN_PLACE = "leaf Variable that requires grad is being used in an in-place operation."


class AwayParameter(nn.Parameter):
    """A user's parameter while its value is not in device memory. Made by `away` only.

    `base` is the lazily read alias that stands in for it; all its views are views of that.
    `shell` is its data: right in everything but that its storage has no bytes.
    """

    base: AwayTensor
    shell: Tensor

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with _raw():
                return func(*args, **kwargs)
        if func == _GET_DATA:
            return args[0].base.data
        if func == _SET_DATA:
            return _assign(args[0].base, args[1])
        if func is torch.autograd.grad:
            return _grad(*args, **kwargs)
        if func is torch.autograd.backward and kwargs.get("inputs") is not None:
            kwargs["inputs"] = _edges(kwargs["inputs"])
        # One alias for each mention, the last mention's first: then gradients of several uses
        # arrive in the order in which eager adds them up.
        mentioned = found((args, kwargs), AwayParameter)
        aliases = [parameter.stand_in() for parameter in reversed(mentioned)][::-1]
        following = iter(aliases)
        inner_args = replaced(args, AwayParameter, lambda _: next(following))
        inner_kwargs = replaced(kwargs, AwayParameter, lambda _: next(following))
        try:
            result = _OWN_METHODS.get(func, func)(*inner_args, **inner_kwargs)
        except RuntimeError as error:
            if "created inside a custom Function" not in str(error):
                raise
            whole = str(error).startswith(("Output 0 of _Fetch ", "Output 0 of _FetchBackward "))
            raise RuntimeError(("a " if whole else "a view of a ") + _IN_PLACE) from None
        originals = dict(zip(map(id, aliases), mentioned, strict=True))
        return replaced(result, Tensor, lambda value: originals.get(id(value), value))

    def stand_in(self) -> Tensor:
        """A new alias of this parameter for one call, part of autograd if it is on."""
        if self.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _Fetch.apply(self))  # type: ignore[no-untyped-call]
        return self.base.detach()

    def as_subclass(self, cls: type[Any]) -> Any:
        """A copy, as for AwayTensor; torch itself would not ask `__torch_function__`."""
        return self.clone().as_subclass(cls)

    def _ordinary(self) -> nn.Parameter:
        parameter = nn.Parameter(self.base.snapshot(), self.requires_grad)
        parameter.__dict__.update(_attributes(self))
        return parameter

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.base.load(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        value = nn.Parameter(self.base.snapshot(), self.requires_grad)
        return cast(nn.Parameter, memo.setdefault(id(self), value))

    def __reduce_ex__(self, proto: Any) -> Any:
        return self._ordinary().__reduce_ex__(proto)  # type: ignore[no-untyped-call]


def _edges(inputs: Any) -> Any:
    return replaced(inputs, AwayParameter, lambda leaf: GradientEdge(accumulator(leaf), 0))


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """torch.autograd.grad, which must find the parameters' own places in the graph."""
    outputs = replaced(outputs, AwayParameter, AwayParameter.stand_in)
    if not kwargs.pop("materialize_grads", False):
        return torch.autograd.grad(outputs, _edges(inputs), *args, **kwargs)
    kwargs["allow_unused"] = True
    gradients = torch.autograd.grad(outputs, _edges(inputs), *args, **kwargs)
    leaves = (inputs,) if isinstance(inputs, Tensor) else inputs
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(gradients, leaves, strict=True)
    )


def away(parameter: nn.Parameter, home: Home, source: Source | None = None) -> AwayParameter:
    """Make `parameter` one whose value is in `home`, which holds it already.

    Object, shape, strides, dtype, device, requires_grad, hooks and grad stay; its memory goes
    unless somebody else holds it. `source` is what `settle` returned, so that views taken
    before follow the value again. ElixirError if its class is a Parameter subclass of the
    user's own, which would lose its behaviour.
    """
    if type(parameter) is not nn.Parameter:
        raise ElixirError(
            f"{home.path} is a {type(parameter).__qualname__}; only plain nn.Parameter objects "
            "can be stored away. Give compile(..., ignore=[...]) its path"
        )
    if source is None:
        source = Source(home)
    source.home, source.tensor = home, None
    shell = _shell(parameter)
    parameter.data = shell
    parameter.__class__ = AwayParameter
    moved = cast(AwayParameter, parameter)
    moved.base, moved.shell = AwayTensor(source, owner=weakref.ref(moved)), shell
    return moved


def settle(parameter: nn.Parameter, value: Tensor) -> Source:
    """Make an AwayParameter an ordinary one again whose data is `value`.

    Views of it that somebody holds look at `value` from now on.
    """
    source = lend(parameter, value)
    del parameter.__dict__["base"], parameter.__dict__["shell"]
    return source


def lend(parameter: nn.Parameter, value: Tensor) -> Source:
    """Make an AwayParameter ordinary for a moment, with `value` as its data; see `recall`.

    `value` may be a flat part of it: views of it that somebody holds look at its home then.
    """
    moved = cast(AwayParameter, parameter)
    source = moved.base.source
    if value.shape == moved.shell.shape:
        source.tensor = value.detach()
    parameter.__class__ = nn.Parameter
    parameter.data = value
    return source


def recall(parameter: nn.Parameter, changed: bool = True) -> None:
    """Send a lent parameter away again. `changed` says that its home has a new value."""
    moved = cast(AwayParameter, parameter)
    moved.base.source.tensor = None
    parameter.data = moved.shell
    parameter.__class__ = AwayParameter
    if changed:
        increment_version(moved.base)


def stand_in(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """An ordinary parameter over `value`'s memory, to be updated in the place of an away one: with
    its attributes, and no part of autograd's graphs."""
    other = nn.Parameter(value.detach(), parameter.requires_grad)
    other.__dict__.update(_attributes(parameter))
    return other


def rewritten(parameter: nn.Parameter) -> None:
    """The home of an away parameter has a new value."""
    increment_version(cast(AwayParameter, parameter).base)


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """What the user hung on a parameter."""
    return {k: value for k, value in parameter.__dict__.items() if k not in ("base", "shell")}


def _shell(parameter: nn.Parameter) -> Tensor:
    """A tensor like `parameter` whose storage, its own, has no bytes."""
    tensor = torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
    )
    tensor.untyped_storage().resize_(0)
    return tensor
