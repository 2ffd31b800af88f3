"""Operators on tensors that several ranks share, done on the shares instead of the whole.

What changes every element by itself (`mul_`, `zero_`, GradScaler's unscaling) each rank does to its
own elements; norms and sums are made of those of the shares. Nothing is brought together, and
every rank gets the same answer, to the last bit. Everything else reads the whole.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elixir_fx.runtime.away import found, one_at_a_time, replaced
from elixir_fx.runtime.ranks import Ranks
from elixir_fx.runtime.shards import ShardedHome

_aten = torch.ops.aten
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_NORMS = (_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar)
_FILLS = frozenset(
    {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten._foreach_zero_.default}
)

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments by position and by name
Share = Callable[[Any], "ShardedHome | None"]  # the home of a tensor that is whole, else None


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], share: Share) -> tuple[bool, Any]:
    """Whether the operator could be done on the shares, and its result.

    `share` gives the home of an argument that ranks share, None for any other.
    """
    if func in _NORMS:
        return _norms(func, args, kwargs, share)
    if func is _aten.sum.default and not kwargs and (home := share(args[0])) is not None:
        return True, home.shards.ranks.total(home.own.load().sum())
    if func is _UNSCALE:
        return _unscale(args, share)
    written = args[0] if args else None
    lists = isinstance(written, (list, tuple))
    targets = list(written) if lists else [written]  # type: ignore[arg-type]
    homes = [share(target) for target in targets]
    if not homes or any(home is None for home in homes) or not _is_elementwise(func):
        return False, None
    calls = one_at_a_time(func._schema, args, kwargs) or [(args, kwargs)]
    if len(calls) != len(homes):
        return False, None
    pairs = [(call, home) for call, home in zip(calls, homes, strict=True) if home is not None]
    if not all(_fits(call, home, share) for call, home in pairs):
        return False, None
    pairs[0][1].shards.before_write()
    for call, home in pairs:  # one after the other: one may read what an earlier one wrote
        own, given, options = _part(call, home, share)
        func(*given, **options)
        home.write_own(own)
    return True, written if func._schema.returns else None


def _is_elementwise(func: Any) -> bool:
    """Whether an operator changes its first argument in place, every element by itself."""
    written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    name = func._schema.name.removeprefix("aten::")
    in_place = len(written) == 1 and written[0] is not None and name.endswith("_")
    pointwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
    return in_place and (pointwise or func in _FILLS)


def _fits(call: Call, home: ShardedHome, share: Share) -> bool:
    """Whether all other arguments are shared in the same way, whole tensors alike, or single
    numbers."""
    args, kwargs = call

    def alike(value: Tensor) -> bool:
        other = share(value)
        if other is not None:
            return (other.shape, other.strides, other.cut) == (home.shape, home.strides, home.cut)
        return not value.dim() or (tuple(value.shape) == home.shape and value.dtype == home.dtype)

    return all(alike(value) for value in found((args[1:], kwargs), Tensor))


def _part(call: Call, home: ShardedHome, share: Share) -> tuple[Tensor, Any, Any]:
    """A call that fits, on this rank's elements: what it writes, and its arguments."""
    args, kwargs = call
    own = home.own.load()

    def mine(value: Tensor) -> Tensor:
        other = share(value)
        if other is not None:
            return other.own.load()
        return home.elements(value) if value.dim() else value

    given = (
        [own] if isinstance(args[0], (list, tuple)) else own,
        *replaced(args[1:], Tensor, mine),
    )
    return own, given, replaced(kwargs, Tensor, mine)


def _norms(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], share: Share
) -> tuple[bool, Any]:
    """Vector norms over all elements, of one tensor or of each in a list."""
    single = func is _NORMS[0]
    values: Sequence[Any] = [args[0]] if single else args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = kwargs.get("dtype")
    if single and ((len(args) > 2 and args[2] is not None) or kwargs.get("dim") is not None):
        return False, None
    if single and ((len(args) > 3 and args[3]) or kwargs.get("keepdim")):
        return False, None
    homes = [share(value) for value in values]
    ranks = next((home.shards.ranks for home in homes if home is not None), None)
    if ranks is None:
        return False, None
    order = float(order)
    parts = [
        torch.zeros((), dtype=torch.float64) if home is None else _sum_of(home, order, dtype)
        for home in homes
    ]
    wholes = _combined(ranks, torch.stack(parts), order)
    results = []
    for index, (value, home) in enumerate(zip(values, homes, strict=True)):
        if home is None:
            results.append(torch.linalg.vector_norm(value, order, dtype=dtype))
        else:
            kind = dtype or value.dtype
            results.append(wholes[index].to(dtype=kind, device=home.device))
    return True, results[0] if single else results


def _sum_of(home: ShardedHome, order: float, dtype: torch.dtype | None) -> Tensor:
    """What this rank's elements, maybe none, add to a norm: the sum of their powers, or the
    largest or smallest of them."""
    if not home.own.span:
        return torch.tensor(math.inf if order == -math.inf else 0.0, dtype=torch.float64)
    norm = torch.linalg.vector_norm(home.own.load(), order, dtype=dtype).double().cpu()
    return norm if math.isinf(order) or order == 0 else torch.pow(norm, order)


def _combined(ranks: Ranks, sums: Tensor, order: float) -> Tensor:
    """The norms of wholes, from what every rank adds to them."""
    if math.isinf(order):
        sign = 1.0 if order > 0 else -1.0
        return ranks.total(sums * sign, largest=True) * sign
    total = ranks.total(sums)
    return total if order == 0 else torch.pow(total, 1 / order)


def _unscale(args: tuple[Any, ...], share: Share) -> tuple[bool, Any]:
    """GradScaler's check and unscaling: every rank learns of an infinity on any."""
    gradients, infinite, inverse = args
    homes = [share(gradient) for gradient in gradients]
    shards = next((home.shards for home in homes if home is not None), None)
    if shards is None:
        return False, None
    shards.before_write()
    own = [
        gradient if home is None else home.own.load()
        for gradient, home in zip(gradients, homes, strict=True)
    ]
    _UNSCALE(own, infinite, inverse)
    for home, value in zip(homes, own, strict=True):
        if home is not None:
            home.write_own(value)
    infinite.copy_(shards.ranks.total(infinite, largest=True))
    return True, None
