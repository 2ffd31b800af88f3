"""Parameters, gradients and states that are away behave as ordinary ones do."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from elixir_fx.errors import ElixirError
from elixir_fx.runtime.away import Source
from elixir_fx.runtime.hooks import Accumulation, accumulation, pass_by, run_hooks
from elixir_fx.runtime.parameters import (
    AwayParameter,
    AwayTensor,
    ChunkGradient,
    away,
    settle,
)
from elixir_fx.runtime.tracing import plain


class Done:
    def wait(self) -> None: ...


class MemoryHome:
    """A home in memory that counts what is read and written."""

    def __init__(self, like: Tensor, path: str = "weight") -> None:
        self.path, self.shape, self.strides = path, tuple(like.shape), like.stride()
        self.dtype, self.device = like.dtype, like.device
        self.span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        self.span = self.span if like.numel() else 0
        self.flat = torch.zeros(self.span, dtype=self.dtype)
        self.reads = self.writes = 0
        self.view(self.flat).copy_(like.detach())

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.strides, flat.storage_offset())

    def load(self) -> Tensor:
        self.reads += 1
        return self.view(self.flat.clone())

    def store(self, value: Tensor) -> None:
        self.writes += 1
        assert value.shape == self.shape
        self.view(self.flat).copy_(value)

    def fetch(self, into: Tensor) -> Done:
        self.reads += 1
        into.copy_(self.flat)
        return Done()

    def put(self, source: Tensor) -> Done:
        self.writes += 1
        self.flat.copy_(source)
        return Done()


def pair(*shape: int, grad: bool = True, strides: bool = False) -> tuple[nn.Parameter, Any]:
    """An ordinary parameter and an away one of the same value."""
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    if strides:
        value = value.t().contiguous().t()
    ordinary = nn.Parameter(value.clone(), grad)
    moved = nn.Parameter(value.clone(), grad)
    return ordinary, away(moved, MemoryHome(moved))


def same(left: Any, right: Any) -> None:
    assert isinstance(left, Tensor) == isinstance(right, Tensor)
    if isinstance(left, Tensor):
        right = right.clone() if isinstance(right, AwayTensor | AwayParameter) else right
        assert left.stride() == right.stride() and left.dtype == right.dtype
        assert left.requires_grad == right.requires_grad
        assert torch.equal(left, right)
    elif isinstance(left, (tuple, list)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    else:
        assert left == right


READS: dict[str, Callable[[Any], Any]] = {
    "norm": lambda p: p.norm(),
    "power": lambda p: (p**2).sum(),
    "linear": lambda p: functional.linear(torch.ones(2, 6), p),
    "linear_kwarg": lambda p: functional.linear(input=torch.ones(2, 6), weight=p),
    "twice": lambda p: (p * p + p).sum(),
    "stack": lambda p: torch.stack([p, p]),
    "foreach": lambda p: torch._foreach_mul([p, p], 2.0),
    "view": lambda p: p.view(-1).sum(),
    "transpose": lambda p: torch.ones(2, 6) @ p.t(),
    "property": lambda p: p.T * 2,
    "index": lambda p: p[1, 2:4] * 1,
    "mask": lambda p: p[p > 0],
    "split": lambda p: [part * 1 for part in p.split(2)],
    "iterate": lambda p: [row * 1 for row in p],
    "compare": lambda p: p > 0,
    "length": lambda p: len(p),
    "bool": lambda p: bool((p != 0).any()),
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: float(p[0, 0]),
    "tolist": lambda p: p.tolist(),
    "format": lambda p: f"{p[0, 0].detach():.3f}",
    "repr": lambda p: repr(p),
    "clone": lambda p: p.clone(),
    "double": lambda p: p.double(),
    "half": lambda p: p.to(torch.bfloat16),
    "like": lambda p: torch.zeros_like(p),
    "new": lambda p: p.new_ones(3),
    "numpy": lambda p: p.detach().numpy().tolist(),
    "strided": lambda p: p.as_strided((3, 2), (6, 1), 7) * 1,
    "bits": lambda p: p.detach().view(torch.int32)[0] + 0,
    "einsum": lambda p: torch.einsum("ij,ij->i", p, p),
    "amp": lambda p: functional.linear(torch.ones(2, 6), p).float(),
    "meta": lambda p: (p.shape, p.stride(), p.dtype, p.numel(), p.dim(), p.is_leaf, p.ndim),
    "names": lambda p: (p.requires_grad, p.device, p.is_contiguous(), p.element_size()),
}


@pytest.mark.parametrize("grad", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("name", READS)
def test_reads_equal_eager(name: str, mode: str, grad: bool) -> None:
    context = {
        "grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode
    }[mode]  # fmt: skip
    ordinary, moved = pair(4, 6, grad=grad)
    with context():
        want, got = READS[name](ordinary), READS[name](moved)
        same(want, got)


GRADIENTS = (
    *("power", "linear", "twice", "foreach", "stack", "view", "transpose", "index", "mask"),
    *("split", "iterate", "strided", "einsum", "half"),
)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_equal_eager(name: str) -> None:
    ordinary, moved = pair(4, 6)
    for p in (ordinary, moved):
        result = READS[name](p)
        parts = [result] if isinstance(result, Tensor) else result
        sum((part * part).sum() for part in parts).backward()
    same(ordinary.grad, moved.grad)
    assert type(moved.grad) is Tensor
    (want,) = torch.autograd.grad((ordinary**3).sum(), ordinary)
    (got,) = torch.autograd.grad((moved**3).sum(), moved)
    same(want, got)


def test_metadata_reads_nothing() -> None:
    _, p = pair(4, 6)
    _ = (p.shape, p.stride(), p.size(0), p.dim(), p.grad, p.is_leaf, p.grad_fn, hash(p), len(p))
    p.requires_grad_(False).requires_grad_(True)
    p.register_hook(lambda gradient: None).remove()
    p.grad = torch.zeros(4, 6)
    p.grad = None
    _ = p.t(), p.view(-1), p.detach(), p.data, p[0], torch.zeros_like(p), p.is_contiguous()
    assert p.base.source.home.reads == 0
    assert isinstance(p, nn.Parameter) and torch.is_tensor(p)
    assert p in {p} and p is next(nn.ParameterList([p]).parameters())


WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "copy_": lambda p: p.copy_(torch.arange(24.0).view(4, 6)),
    "zero_": lambda p: p.zero_(),
    "setitem": lambda p: p.__setitem__((slice(None), 2), 7.0),
    "mask": lambda p: p.__setitem__(p > 0, 0.0),
    "init": lambda p: nn.init.xavier_uniform_(p),
    "normal": lambda p: nn.init.normal_(p, std=0.02),
    "orthogonal": lambda p: nn.init.orthogonal_(p),
    "out": lambda p: torch.add(torch.ones(4, 6), 1, out=p),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "lists": lambda p: torch._foreach_addcdiv_(
        [p, p.detach()[:2]], *[[torch.ones(4, 6), torch.ones(2, 6)]] * 2, [1.0, 2.0]
    ),
    "data": lambda p: p.data.mul_(3),
    "element": lambda p: p.data[3].zero_(),
    "detach": lambda p: p.detach().copy_(torch.ones(4, 6)),
    "view_of_view": lambda p: p.t()[1:3][0].unsqueeze(0).add_(1),
    "flat": lambda p: p.data.view(-1)[5:9].fill_(2.0),
    "strided": lambda p: p.detach()[1].as_strided((2, 2), (6, 1)).fill_(9.0),
    "chunk": lambda p: [part.mul_(i) for i, part in enumerate(p.data.chunk(2))],
    "self": lambda p: p.add_(p),
    "aliases": lambda p: p.copy_(p.data.flip(0)),
    "set_data": lambda p: setattr(p, "data", torch.full((4, 6), 5.0)),
    "lerp": lambda p: p.lerp_(torch.ones(4, 6), 0.25),
    "bits": lambda p: p.data.view(torch.int32).bitwise_and_(-256),
    "apply": lambda p: p.detach()[1].apply_(lambda x: x + 1),
    "map": lambda p: p.detach().map_(torch.ones(4, 6), lambda x, y: x + y),
    "iadd": lambda p: p.__iadd__(1),
}  # fmt: skip


@pytest.mark.parametrize("strides", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", WRITES)
def test_writes_go_home(name: str, strides: bool) -> None:
    ordinary, moved = pair(4, 6, strides=strides)
    if strides and name in ("flat",):
        pytest.skip("eager refuses the view")
    results = []
    for p in (ordinary, moved):
        torch.manual_seed(3)
        with torch.no_grad():
            results.append(WRITES[name](p))
    home = moved.base.source.home
    assert home.writes > 0
    assert torch.equal(home.load(), ordinary.detach())
    assert (results[0] is ordinary) == (results[1] is moved)
    assert type(moved) is AwayParameter
    assert (ordinary._version > 0) == (moved._version > 0)


def test_frozen_parameters_are_written_with_gradients_on() -> None:
    ordinary, moved = pair(4, 6, grad=False)
    for p in (ordinary, moved):
        assert p.mul_(2) is p
        p[0] = 1.0
    same(ordinary, moved)


@pytest.mark.parametrize("name", ["mul_", "copy_", "zero_", "setitem", "foreach", "out"])
def test_editing_a_leaf_raises_as_eager(name: str) -> None:
    ordinary, moved = pair(4, 6)
    with pytest.raises(RuntimeError) as want:
        WRITES[name](ordinary)
    with pytest.raises(RuntimeError) as got:
        WRITES[name](moved)
    assert str(got.value) == str(want.value)
    with pytest.raises(RuntimeError, match="modified inplace"):
        moved.view(-1).mul_(2)
    assert moved.base.source.home.writes == 0


def test_views_follow_the_value() -> None:
    _, p = pair(4, 6)
    row, data = p.detach()[1], p.data
    with torch.no_grad():
        p.fill_(3.0)
    assert row.tolist() == [3.0] * 6 and data.sum() == 72
    source = settle(p, torch.full((4, 6), 4.0))
    assert type(p) is nn.Parameter and row.tolist() == [4.0] * 6
    with torch.no_grad():
        p.add_(1)
        row.add_(1)
    assert p[1, 0] == 6 and p[0, 0] == 5
    away(p, MemoryHome(p), source)
    with torch.no_grad():
        p.mul_(2)
    assert row.tolist() == [12.0] * 6


def test_a_change_between_forward_and_backward_raises_as_eager() -> None:
    for p in pair(4, 6):
        loss = (p**2).sum()
        with torch.no_grad():
            p.mul_(2)
        with pytest.raises(RuntimeError, match="modif"):
            loss.backward()


def test_settle_gives_the_parameter_back() -> None:
    ordinary, p = pair(4, 6)
    seen: list[Tensor] = []
    p.register_hook(seen.append)
    p.mark = 3
    identity = id(p)
    settle(p, p.clone().detach())
    assert id(p) == identity and type(p) is nn.Parameter and p.mark == 3
    p.sum().backward()
    assert len(seen) == 1 and torch.equal(p, ordinary)
    assert sorted(vars(p)) == ["mark"]


def test_plain_is_for_a_moment() -> None:
    moved = [pair(2, 3)[1] for _ in range(5)]
    with plain([*moved, nn.Parameter(torch.ones(2))]):
        assert all(type(p) is nn.Parameter for p in moved)
    assert all(type(p) is AwayParameter for p in moved)


def test_subclasses_are_refused_by_name() -> None:
    class Mine(nn.Parameter):
        pass

    p = Mine(torch.ones(2))
    with pytest.raises(ElixirError, match=r"fc.weight is a .*Mine"):
        away(p, MemoryHome(p, "fc.weight"))


def test_addresses_and_shapes_are_refused() -> None:
    _, p = pair(4, 6)
    for tensor in (p, p.data, p.detach()[0]):
        for name in ("data_ptr", "untyped_storage", "storage"):
            with pytest.raises(ElixirError, match="weight has no address"):
                getattr(tensor, name)()
    with pytest.raises(ElixirError, match="cannot become"):
        p.data = torch.ones(4, 6, dtype=torch.float64)
    with pytest.raises(ElixirError, match="shape or storage"):
        p.data.resize_(2, 2)
    with pytest.raises(ElixirError, match="shape or storage"), torch.no_grad():
        p.t_()
    with pytest.raises(ValueError, match="read-only"):
        p.detach().numpy()[0] = 1


def test_modules_cast_and_move() -> None:
    net = nn.Linear(6, 4)
    away(net.weight, MemoryHome(net.weight))
    assert net.to("cpu").weight is net.weight and type(net.weight) is AwayParameter
    with pytest.raises(ElixirError, match=r"cannot become torch\.bfloat16"):
        net.bfloat16()
    net.load_state_dict({"weight": torch.ones(4, 6), "bias": torch.zeros(4)})
    assert torch.equal(net(torch.ones(1, 6)), torch.full((1, 4), 6.0))
    clone = copy.deepcopy(net)
    assert type(clone.weight) is nn.Parameter and torch.equal(clone.weight, torch.ones(4, 6))
    same(nn.utils.parameters_to_vector(clone.parameters()),
         nn.utils.parameters_to_vector(net.parameters()))  # fmt: skip


def test_saved_parameters_load_without_elixir_fx(tmp_path: Any) -> None:
    ordinary, moved = pair(4, 6)
    gradient = ChunkGradient(Source(MemoryHome(ordinary)))
    file = tmp_path / "parameter.pt"
    torch.save({"p": moved, "same": moved, "view": moved.detach()[1], "grad": gradient}, file)
    program = f"""
import sys, torch
found = torch.load({str(file)!r})
assert "elixir_fx" not in sys.modules
assert type(found["p"]) is torch.nn.Parameter and found["p"] is found["same"]
assert type(found["view"]) is torch.Tensor and type(found["grad"]) is torch.Tensor
print(found["p"].sum().item())
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert float(output.stdout) == ordinary.sum().item()
    moved.mark = "head"
    for copied in (pickle.loads(pickle.dumps(moved)), copy.copy(moved)):
        assert type(copied) is nn.Parameter and copied.mark == "head"
        same(ordinary, copied)
    stream = io.BytesIO()
    torch.save(nn.ParameterList([moved]).state_dict(), stream)


@dataclass
class Model:
    """Two parameters, one with its gradient away, and the plain twin."""

    eager: list[nn.Parameter] = field(default_factory=list)
    ours: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        for shape in ((4, 6), (3,)):
            ordinary, moved = pair(*shape)
            gradient = torch.randn(*shape, generator=torch.Generator().manual_seed(9))
            ordinary.grad = gradient.clone()
            moved.grad = ChunkGradient(Source(MemoryHome(gradient, "gradient")))
            self.eager.append(ordinary)
            self.ours.append(moved)

    def check(self) -> None:
        for ordinary, moved in zip(self.eager, self.ours, strict=True):
            same(ordinary.grad, moved.grad)
            assert type(moved.grad) is ChunkGradient


def _scaler(parameters: list[nn.Parameter], value: float | None) -> None:
    if value is not None:
        parameters[0].grad[1, 1] = value
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def _add(gradient: Tensor) -> None:
    gradient *= 2
    gradient.add_(torch.ones(()))
    gradient.data[0] = 3.0


EDITS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
    "clip_loop": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=False),
    "clip_max": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, norm_type=float("inf")),
    "clip_sum": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, 1.0, error_if_nonfinite=True),
    "clip_value": lambda ps: nn.utils.clip_grad_value_(ps, 0.2),
    "zero": lambda ps: torch.optim.SGD(ps).zero_grad(set_to_none=False),
    "zero_foreach": lambda ps: torch.optim.SGD(ps, foreach=True).zero_grad(set_to_none=False),
    "unscale": lambda ps: _scaler(ps, None),
    "unscale_inf": lambda ps: _scaler(ps, float("inf")),
    "edit": lambda ps: [_add(p.grad) for p in ps],
    "norms": lambda ps: torch.stack(torch._foreach_norm([p.grad for p in ps])),
    "loss": lambda ps: sum((p**2).sum() for p in ps).backward(),
    "finite": lambda ps: [bool(torch.isfinite(p.grad).all()) for p in ps],
    "clone": lambda ps: [p.grad.clone() for p in ps],
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_gradients_that_are_away(name: str) -> None:
    model = Model()
    want, got = EDITS[name](model.eager), EDITS[name](model.ours)
    if not isinstance(got, AwayTensor):
        same(want, got)
    model.check()
    for ordinary, moved in zip(model.eager, model.ours, strict=True):
        same(ordinary, moved)


def test_gradients_are_seen_as_what_they_are() -> None:
    p = Model().ours[0]
    kept = p.grad
    assert p.grad is kept and repr(p.grad).startswith("ChunkGradient([[")
    assert type(p.grad.detach()) is ChunkGradient and type(p.grad.clone()) is Tensor
    assert type(copy.deepcopy(p.grad)) is Tensor
    torch.optim.SGD([p]).zero_grad()
    assert p.grad is None
    kept.source.keep()
    home: Any = kept.source.home
    home.flat.zero_()
    assert kept.norm() > 0


def test_clipping_holds_one_gradient_at_a_time() -> None:
    gradients = [ChunkGradient(Source(MemoryHome(torch.ones(100)))) for _ in range(8)]
    home: Any = gradients[0].source.home
    order: list[int] = []
    for index, gradient in enumerate(gradients):
        inner: Any = gradient.source.home
        load, store = inner.load, inner.store
        inner.load = lambda index=index, load=load: (order.append(index), load())[1]
        inner.store = lambda value, index=index, store=store: (order.append(~index), store(value))
    torch._foreach_mul_(gradients, 0.5)
    assert order == [step for index in range(8) for step in (index, ~index)]
    assert home.flat[0] == 0.5


class Compiled(torch.autograd.Function):
    """Stands in for a compiled step: accumulates by itself, hands autograd nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Any], *parameters: nn.Parameter) -> Tensor:
        ctx.parameters, ctx.seen, ctx.x = parameters, seen, x.detach()
        return sum(x * (p.detach() * 1) for p in parameters)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        given: list[Tensor | None] = []
        for p in ctx.parameters:
            decision = accumulation(p)
            ctx.seen.append(decision)
            mine = gradient * ctx.x
            if decision is Accumulation.ACCUMULATE:
                mine = run_hooks(p, mine)
                p.grad = mine if p.grad is None else p.grad + mine
            given.append(mine if decision is Accumulation.CAPTURE else None)
        return sum(gradient * p.detach() for p in ctx.parameters), None, *given


def test_law_11() -> None:
    eager = [pair(3, 2)[0], pair(3, 2)[0]]
    ours: list[Any] = [pair(3, 2)[1], pair(3, 2)[1]]
    logs: list[list[Any]] = [[], []]
    for log, parameters in zip(logs, (eager, ours), strict=True):
        parameters[0].register_hook(lambda gradient: gradient * 2)
        parameters[0].register_hook(lambda gradient, log=log: log.append(gradient.sum()))
        parameters[0].register_post_accumulate_grad_hook(
            lambda p, log=log: log.append((p.grad.sum(), p.detach().sum()))
        )
    x = torch.full((3, 2), 3.0, requires_grad=True)
    seen: list[Any] = []
    A, C, S = Accumulation.ACCUMULATE, Accumulation.CAPTURE, Accumulation.SKIP  # noqa: N806

    def run(use: Callable[[Tensor, list[nn.Parameter]], Any], decisions: list[Any]) -> None:
        want = use((x * eager[0] + x * eager[1]).sum(), eager)
        got = use(Compiled.apply(x, seen, *ours).sum(), ours)
        same(want, got)
        assert seen == decisions
        seen.clear()
        for one, other in zip(eager, ours, strict=True):
            same(one.grad, other.grad)

    run(lambda loss, ps: loss.backward(), [A, A])
    run(lambda loss, ps: loss.backward(inputs=[ps[1]]), [S, A])
    run(lambda loss, ps: loss.backward(inputs=[x, ps[0]]), [A, S])
    run(lambda loss, ps: torch.autograd.grad(loss, x), [S, S])
    run(lambda loss, ps: torch.autograd.grad(loss, ps[0]), [C, S])
    run(lambda loss, ps: torch.autograd.grad(loss, [ps[1], x]), [S, C])
    same(logs[0], logs[1])
    assert len(logs[0]) == 5
    with pytest.raises(RuntimeError):
        accumulation(ours[0])


class Unreached(torch.autograd.Function):
    """A compiled step in which the parameter turns out to get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: nn.Parameter) -> Tensor:
        ctx.p = p
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        pass_by(ctx.p)
        return gradient * 2, None


@pytest.mark.parametrize("before", [None, "tensor", "away"])
def test_hooks_are_quiet_about_parameters_without_gradient(before: str | None) -> None:
    _, p = pair(3, 2)
    calls: list[Any] = []
    p.register_hook(calls.append)
    handle = p.register_post_accumulate_grad_hook(calls.append)
    if before is not None:
        value = torch.ones(3, 2)
        p.grad = ChunkGradient(Source(MemoryHome(value))) if before == "away" else value
    x = torch.ones(3, 2, requires_grad=True)
    Unreached.apply(x, p).sum().backward()
    assert calls == []
    (Unreached.apply(x, p) + p).sum().backward()  # another use does bring one
    assert len(calls) == 2 and calls[1] is p
    handle.remove()
    p.sum().backward()
    assert len(calls) == 3


def test_hooks_must_return_tensors() -> None:
    _, p = pair(3, 2)
    handle = p.register_hook(lambda gradient: 3)
    with pytest.raises(TypeError, match="int"):
        run_hooks(p, torch.ones(3, 2))
    handle.remove()
    p.register_hook(lambda gradient: gradient[0])
    with pytest.raises(RuntimeError, match="size"):
        run_hooks(p, torch.ones(3, 2))


def test_hooks_read_parameters_in_a_backward() -> None:
    results = []
    for p in pair(4, 6):
        p.register_hook(lambda gradient, p=p: gradient * p.detach().norm())
        (found,) = torch.autograd.grad((p**2).sum(), p)
        (p**2).sum().backward()
        results.append((found, p.grad))
    same(*results)


def test_nothing_leaks() -> None:
    import gc
    import weakref

    _, p = pair(4, 6)
    (p**2).sum().backward()
    loss = Compiled.apply(torch.ones(4, 6, requires_grad=True), [], p)
    loss.sum().backward()
    watch = weakref.ref(p)
    del p, loss
    gc.collect()
    assert watch() is None
