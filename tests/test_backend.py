"""The torch.compile backend: its options, what its regions share, what it leaves behind."""

import copy
import gc
import io
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from case_models import Way, mlp, pair_of, randn
from graphs import Elsewhere, Thrice, gpt, seeded
from harness import adamw
from pairs import SPARE, Pair, memory_needed, same, tight
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional

import elixir_fx
from elixir_fx import ElixirError, PlanError
from elixir_fx.backend import state
from elixir_fx.machine import Tier
from elixir_fx.regions import session_of
from elixir_fx.testing import emulated

THREADS = 1
X = randn(6, 32)
TIGHT = Way("backend", "tight")


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Code that many tests share would run in eager after eight captures."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Broken(nn.Module):
    """Two layers with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin()
        torch._dynamo.graph_break()
        return self.second(h)


class Tied(nn.Module):
    """One weight that both regions read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)
        self.body = nn.Linear(32, 64)
        self.back = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.back(self.body(functional.linear(x, self.weight)).tanh())
        torch._dynamo.graph_break()
        return functional.linear(h, self.weight.t())


class Fails(nn.Module):
    """Raises between its regions when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin()
        self.check(h)
        return self.second(h)

    @torch._dynamo.disable
    def check(self, h: Tensor) -> None:
        if self.fails:
            raise ValueError(f"{len(h)} rows")


class Bare(nn.Module):
    """A region without parameters comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.back = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin() * x.cos()
        torch._dynamo.graph_break()
        return self.back(self.body(h).tanh())


class Sine(nn.Module):
    """No parameter at all."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class BrokenBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).tanh()
        torch._dynamo.graph_break()
        return x + self.down(h)


def blocks(count: int, kind: type[Block] = Block) -> nn.Module:
    return nn.Sequential(*(kind() for _ in range(count)))


def learn(net: Any, optimizer: torch.optim.Optimizer, x: Tensor = X) -> Tensor:
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def compiled(model: nn.Module, /, **options: Any) -> Any:
    return torch.compile(model, backend="elixir_fx", options={"kernels": "eager", **options})


def refusal(model: nn.Module, /, **options: Any) -> str:
    """What the first call says; it says it again, and the plain model still runs."""
    net = compiled(model, **options)
    words = []
    for _ in range(2):
        with pytest.raises(ElixirError) as caught:
            net(X)
        assert type(caught.value).__module__ == "elixir_fx.errors"
        words.append(str(caught.value))
    assert words[0] == words[1]
    return words[0]


# -- options ---------------------------------------------------------------------------------


def test_it_is_registered() -> None:
    assert "elixir_fx" in torch._dynamo.list_backends(exclude_tags=None)


def test_unknown_option() -> None:
    words = refusal(mlp(), memry="1MiB")
    assert "the backend has no option 'memry'; did you mean 'memory'?" in words
    assert "'optimizer'" in words


def test_unknown_keyword() -> None:
    with pytest.raises(ElixirError, match=r"takes options=\{\.\.\.\}, not \['memory'\]"):
        torch.compile(mlp(), backend=with_keyword)(X)


def with_keyword(region: Any, inputs: Any) -> Any:
    from elixir_fx.backend import elixir_fx as backend

    return backend(region, inputs, memory="1MiB")


@pytest.mark.parametrize(
    ("name", "value"), [("init", nn.Module.type), ("weights", "w"), ("plan", "p.json")]
)
def test_options_of_compile_only(name: str, value: Any) -> None:
    assert f"option {name!r} belongs to elixir_fx.compile()" in refusal(mlp(), **{name: value})


@pytest.mark.parametrize("budget", ["memory", "disk"])
def test_a_budget_needs_a_model(budget: str, tmp_path: Path) -> None:
    value = "1MiB" if budget == "memory" else str(tmp_path)
    assert "neither 'model' nor 'optimizer'" in refusal(mlp(), **{budget: value})


def test_wrong_types() -> None:
    assert "options['model'] is a str, not an nn.Module" in refusal(mlp(), model="mlp")
    words = refusal(mlp(), optimizer="adamw")
    assert "options['optimizer'] is a str, not a torch.optim optimizer" in words


def test_values_that_cannot_be(tmp_path: Path) -> None:
    model = mlp()
    assert "disk=" in refusal(model, model=model, disk=str(tmp_path / "nowhere"))
    assert "host_memory is refused" in refusal(model, model=model, host_memory="1MiB")
    assert "keep/ignore names 'head'" in refusal(model, model=model, ignore=["head"])


def test_meta_model() -> None:
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(ElixirError, match="is on meta: the backend trains models that have values"):
        compiled(model, model=model)(torch.empty(6, 32, device="meta"))


def test_compiled_already(tmp_path: Path) -> None:
    """Weights that are away cannot be a region's inputs."""
    model = seeded(0, mlp)
    optimizer = adamw(list(model.parameters()))
    kept = exact.compile(model, optimizer, (X,), **tight(mlp, (X,), tmp_path))
    with pytest.raises((ElixirError, TorchDynamoException)):  # Dynamo may be the first to see it
        compiled(model)(X)
    with pytest.raises(ElixirError, match="compiled already"):
        compiled(Bare(), model=model)(X)
    assert kept is not None


@pytest.mark.parametrize("given", [True, False], ids=["model", "nothing"])
@pytest.mark.parametrize("build", ["Bare", "Sine"])
def test_regions_without_parameters(build: str, given: bool) -> None:
    """The session of a region that reads no parameter lives as long as its code."""
    model = seeded(0, {"Bare": Bare, "Sine": Sine}[build])
    net = compiled(model, **({"model": model} if given else {}))
    x = X.clone().requires_grad_()
    for _ in range(2):
        gc.collect()
        same(model(X), net(X))
        net(x).sum().backward()


def test_a_function_of_tensors_alone() -> None:
    """No module at all."""
    weight = randn(32, 32).requires_grad_()

    @torch.compile(backend="elixir_fx", options={"kernels": "eager"})
    def product(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).sum()

    for _ in range(2):
        product(X, weight).backward()
        gc.collect()
    same(X.sum(0)[:, None].expand(32, 32) * 2, weight.grad)


def test_too_small(tmp_path: Path) -> None:
    """The smallest budget is named, and nothing has changed."""
    model = seeded(0, mlp)
    optimizer = adamw(list(model.parameters()))
    with pytest.raises(PlanError, match="allowed"):
        compiled(model, model=model, optimizer=optimizer, memory="1KiB", disk=str(tmp_path))(X)
    plain = seeded(0, mlp)
    same(learn(plain, adamw(list(plain.parameters()))), learn(model, optimizer))
    same(dict(plain.named_parameters()), dict(model.named_parameters()))


def test_options_stay_the_users() -> None:
    """A second compile may be given the same options."""
    model = seeded(0, mlp)
    options = {
        "model": model,
        "optimizer": adamw(list(model.parameters())),
        "kernels": "eager",
        **SPARE,
    }
    for _ in range(2):
        torch.compile(model, backend="elixir_fx", options=options)(X)
    assert sorted(options) == ["kernels", "machine", "memory", "model", "optimizer"]


def test_deleted_model() -> None:
    model, other = mlp(), mlp()
    net = compiled(other, model=model)
    net(X)
    del model
    gc.collect()
    torch._dynamo.reset()
    with pytest.raises(ElixirError, match=r"options\['model'\] was deleted"):
        net(X)


# -- entry points ----------------------------------------------------------------------------


def test_module_compile(tmp_path: Path) -> None:
    """model.compile(backend=...), in place: the model is called as before. (Dynamo skips the
    forwards of torch.nn's own classes there.)"""
    options = tight(Block, (X,), tmp_path)
    plain, model = seeded(0, Block), seeded(0, Block)
    optimizer = adamw(list(model.parameters()))
    given = {"model": model, "optimizer": optimizer, "kernels": "eager", **options}
    model.compile(backend="elixir_fx", options=given)
    plain_optimizer = adamw(list(plain.parameters()))
    for _ in range(3):
        same(learn(plain, plain_optimizer), learn(model, optimizer))
    same(dict(plain.named_parameters()), dict(model.named_parameters()))
    assert not state(model).plan.layout.keeps_all


def test_compiled_function() -> None:
    """A function that calls the model, without the model: no budget, but it runs."""
    model = seeded(0, mlp)

    @torch.compile(backend="elixir_fx", options={"kernels": "eager"})
    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean()

    loss(X).backward()
    plain = seeded(0, mlp)
    plain(X).square().mean().backward()
    same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])
    assert state(model).plan.layout.keeps_all


@pytest.mark.parametrize("known", ["model", "optimizer"])
def test_compiled_loss(known: str, tmp_path: Path) -> None:
    """The loss is a function; the model or the optimizer says what there is to plan for."""
    options = tight(mlp, (X,), tmp_path)
    results = []
    for ours in (False, True):
        model = seeded(0, mlp)
        optimizer = adamw(list(model.parameters()))

        def loss(x: Tensor, net: nn.Module = model) -> Tensor:
            return net(x).square().mean()

        call = loss
        if ours:
            given = {"model": model} if known == "model" else {"optimizer": optimizer}
            given |= {"kernels": "eager", **options}
            call = torch.compile(loss, backend="elixir_fx", options=given)
        for _ in range(3):
            value = call(X)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        if ours and known == "model":
            state(model).bind(optimizer)
        results.append((value.detach(), [p.detach() for p in model.parameters()]))
    same(*results)
    assert not state(model).plan.layout.keeps_all


def test_equal_blocks_share_a_session(tmp_path: Path) -> None:
    """block.compile() of each block: as many regions, one session, one plan."""

    def build() -> nn.Module:
        return blocks(4)

    options = tight(build, (X,), tmp_path)
    plain, model = seeded(0, build), seeded(0, build)
    optimizer = adamw(list(model.parameters()))
    given = {"model": model, "optimizer": optimizer, "kernels": "eager", **options}
    for block in model:
        block.compile(backend="elixir_fx", options=given)
    plain_optimizer = adamw(list(plain.parameters()))
    for _ in range(3):
        same(learn(plain, plain_optimizer), learn(model, optimizer))
    same(dict(plain.named_parameters()), dict(model.named_parameters()))
    assert len(state(model).regions) == 4
    assert len({id(session_of([p])) for p in model.parameters()}) == 1
    assert len(state(model).plan.schedules) == 4


@pytest.mark.parametrize("each", [True, False], ids=["each", "whole"])
def test_many_equal_blocks(each: bool, tmp_path: Path) -> None:
    """More blocks than Dynamo keeps graphs of one function: every one is still a region."""

    def build() -> nn.Module:
        return blocks(12, BrokenBlock)

    options = tight(lambda: blocks(12), (X,), tmp_path)
    plain, model = seeded(0, build), seeded(0, build)
    optimizer = adamw(list(model.parameters()))
    given = {"model": model, "optimizer": optimizer, "kernels": "eager", **options}
    for part in model if each else [model]:
        part.compile(backend="elixir_fx", options=given)
    plain_optimizer = adamw(list(plain.parameters()))
    for _ in range(2):
        same(learn(plain, plain_optimizer), learn(model, optimizer))
    same(dict(plain.named_parameters()), dict(model.named_parameters()))
    read = [len(paths) for paths in _parameters_of_regions(model)]
    assert sum(read) == len(list(model.parameters()))


def _parameters_of_regions(model: nn.Module) -> list[set[str]]:
    session = session_of(list(model.parameters()))
    graphs = session.lowering.captured.values()
    return [{p.path for p in graph.facts.parameters if p.reads} for graph in graphs]


def test_two_models_of_one_class(tmp_path: Path) -> None:
    """Same code, same shapes: graphs, plans and weights of their own."""
    options = tight(mlp, (X,), tmp_path)
    models, results = [], []
    for ours in (False, True):
        pair = [seeded(seed, mlp) for seed in (0, 1)]
        optimizers = [adamw(list(model.parameters())) for model in pair]
        nets: list[Any] = pair
        if ours:
            nets = [
                compiled(model, model=model, optimizer=optimizer, **options)
                for model, optimizer in zip(pair, optimizers, strict=True)
            ]
        losses = [learn(nets[i], optimizers[i]) for i in (0, 1, 1, 0, 0, 1)]
        results.append((losses, [p.detach() for model in pair for p in model.parameters()]))
        models = pair
    same(*results)
    sessions = [session_of(list(model.parameters())) for model in models]
    assert sessions[0] is not sessions[1]
    assert sessions[0].engine is not sessions[1].engine


def test_one_function_for_two_models() -> None:
    """A compiled function that is handed one model, then another."""

    @torch.compile(backend="elixir_fx", options={"kernels": "eager"})
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    for seed in (0, 1, 0, 1):
        model, plain = seeded(seed, mlp), seeded(seed, mlp)
        loss(model, X).backward()
        plain(X).square().mean().backward()
        same([p.grad for p in plain.parameters()], [p.grad for p in model.parameters()])


# -- what a model may be ---------------------------------------------------------------------


@pytest.mark.parametrize("build", [Broken, Tied, Bare, Elsewhere, Thrice])
@pytest.mark.parametrize("budget", ["spare", "tight"])
def test_regions(build: type[nn.Module], budget: str, tmp_path: Path) -> None:
    x = X if build in (Broken, Tied, Bare) else randn(6, 6)
    options: dict[str, Any] = dict(SPARE)
    if budget == "tight":
        options = tight(_whole(build), (x,), tmp_path)
        options["memory"] += options["memory"] // 4
    pair = Pair(build, [(x,)], options, entry="backend")
    pair.train(2)
    pair.backward()
    pair.backward()
    pair.check()
    pair.train(2)
    pair.check()
    if budget == "spare" or build not in (Elsewhere, Thrice):  # those are too small to leave
        assert state(pair.ours.model).plan.layout.keeps_all is (budget == "spare")


def _whole(build: type[nn.Module]) -> Any:
    """The same model without its graph breaks, for compile() to say what it needs."""
    return mlp if build in (Broken, Tied, Bare) else build


def test_a_shared_parameter_accumulates(tmp_path: Path) -> None:
    """Eager adds the sum of both uses to an old gradient: so do two regions."""
    pair = Pair(Tied, [(X,), (2 * X,)], tight(mlp, (X,), tmp_path), entry="backend")
    for _ in range(3):
        pair.backward()
        pair.check()
    pair.train(2)
    pair.check()


def test_no_trainable_parameters(tmp_path: Path) -> None:
    """Frozen weights that do not fit are tensors over a mapped file."""
    plain, model = seeded(0, lambda: blocks(4)), seeded(0, lambda: blocks(4))
    for both in (plain, model):
        both.requires_grad_(False)
    weights = sum(p.nbytes for p in model.parameters())
    net = compiled(model, model=model, memory=weights // 2, disk=str(tmp_path))
    for _ in range(3):
        same(plain(X), net(X))
    given = X[:2].clone().requires_grad_()
    same(plain(given).sum(), net(given).sum())
    plan = state(model).plan
    assert plan.layout.mapped_bytes > weights // 2
    same(plain.state_dict(), model.state_dict())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_emulated_accelerator() -> None:
    """Parameters stay on the device as ordinary tensors; gradients and states go to the host."""
    model = gpt(width=32)
    (batch,) = model.batches(1)
    nbytes = sum(p.nbytes for p in model.build().parameters())
    least = memory_needed(model.build(), batch, machine=emulated(), disk_memory=None)
    for memory in (3 * nbytes, 16 * nbytes):
        torch._dynamo.reset()
        options = {"machine": emulated(), "memory": memory + least}
        pair = Pair(model.build, [batch], options, entry="backend")
        pair.train(3)
        pair.check()
        plan = state(pair.ours.model).plan
        assert {chunk.homes.parameters for chunk in plan.layout.chunks} == {Tier.DEVICE}
        assert plan.layout.host_bytes > 0 or plan.layout.keeps_all
        assert all(type(p) is nn.Parameter for p in pair.ours.model.parameters())


# -- the optimizer and the plan --------------------------------------------------------------


@pytest.mark.parametrize("build", [mlp, Broken])
def test_the_plan_becomes_final(build: Any, tmp_path: Path) -> None:
    pair = Pair(build, [(X,)], tight(mlp, (X,), tmp_path), entry="backend")
    with pytest.raises(ElixirError, match=r"no region of .* was compiled"):
        state(pair.ours.model)
    pair.backward()
    found = state(pair.ours.model)
    assert not any("final" in note for note in found.plan.notes)
    assert any("until the first whole step is known" in note for note in found.plan.notes)
    pair.do(lambda side: side.optimizer.step())
    assert any("final" in note for note in found.plan.notes)
    pair.train(2)
    pair.check()
    assert len(found.regions) == (2 if build is Broken else 1)
    assert len(found.plan.schedules) == len(found.regions)
    assert all(isinstance(region, torch.fx.GraphModule) for region in found.regions)
    assert [record.name for record in found.history][-1:]
    stats = found.stats()
    assert stats["step_s"] > 0
    assert 0 < stats["peak_device_bytes"] <= found.plan.limits.device


def test_the_plan_becomes_final_with_memory_to_spare() -> None:
    pair = Pair(mlp, [(X,)], SPARE, entry="backend")
    pair.train()
    assert any("final" in note for note in state(pair.ours.model).plan.notes)


def test_bind_later(tmp_path: Path) -> None:
    """A warning says that states stay in memory; then the optimizer is bound after all."""
    options = tight(mlp, (X,), tmp_path)
    pair = Pair(mlp, [(X,)], options, bind=False, entry="backend")
    with pytest.warns(UserWarning, match="no optimizer was given"):
        pair.train()
    state(pair.ours.model).bind(pair.ours.optimizer)
    pair.train(2)
    pair.check()
    away = [
        value
        for states in pair.ours.optimizer.state.values()
        for value in states.values()
        if isinstance(value, elixir_fx.runtime.parameters.AwayTensor)
    ]
    assert away


def test_bound_optimizer_keeps_states_away(tmp_path: Path) -> None:
    pair = Pair(
        lambda: blocks(4), [(X,)], tight(lambda: blocks(4), (X,), tmp_path), entry="backend"
    )
    pair.train(2)
    session = session_of(list(pair.ours.model.parameters()))
    assert session.binding is not None and session.binding.optimizer is pair.ours.optimizer
    assert any(c.homes.states is not Tier.DEVICE for c in session.plan.layout.chunks)
    pair.check()


# -- copies and files ------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["first", "trained"])
def test_deepcopy(when: str, tmp_path: Path) -> None:
    """A copy is a plain model with a life of its own, which may be compiled as well."""
    options = tight(mlp, (X,), tmp_path)
    pair = Pair(mlp, [(X,)], options, entry="backend")
    pair.train(2 if when == "trained" else 1)
    copies = [copy.deepcopy(side.model) for side in pair.sides]
    assert session_of(list(copies[1].parameters())) is None
    before = {name: p.detach().clone() for name, p in copies[1].named_parameters()}
    pair.train(2)
    same(before, {name: p.detach() for name, p in copies[1].named_parameters()})
    optimizers = [adamw(list(model.parameters())) for model in copies]
    nets = [copies[0], compiled(copies[1], model=copies[1], optimizer=optimizers[1], **options)]
    for _ in range(2):
        same(*(learn(net, o) for net, o in zip(nets, optimizers, strict=True)))
    same(*(model.state_dict() for model in copies))
    pair.train()
    pair.check()


class TwoTypes(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh().to(torch.bfloat16)).float()


def squeezed(build: Any, batch: Any, folder: Path) -> Pair:
    """A pair under a budget in which weights are mapped, trained for two steps."""
    options = tight(build, batch, folder)
    pair = Pair(build, [batch], options, entry="backend")
    pair.train(2)
    assert state(pair.ours.model).plan.layout.mapped_bytes
    return pair


MAPPED = {
    "blocks": (lambda: blocks(6), (X,)),
    "two types": (TwoTypes, (randn(2, 64),)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_save_state_dict(name: str, tmp_path: Path) -> None:
    """torch.save of a state dict holds values, loads without us, and is no larger than plain."""
    pair = squeezed(*MAPPED[name], tmp_path)
    saved = []
    for side in pair.sides:
        buffer = io.BytesIO()
        torch.save(side.model.state_dict(), buffer)
        saved.append((buffer.tell(), torch.load(io.BytesIO(buffer.getvalue()))))
    same(saved[0][1], saved[1][1])
    assert saved[1][0] < 1.5 * saved[0][0] + 4096
    pair.do(lambda side: str(side.model.load_state_dict(saved[0][1])))
    pair.train()
    pair.check()


@pytest.mark.parametrize("name", MAPPED)
def test_save_one_tensor(name: str, tmp_path: Path) -> None:
    """One weight saved is one weight's bytes."""
    pair = squeezed(*MAPPED[name], tmp_path)
    sizes = []
    for side in pair.sides:
        buffer = io.BytesIO()
        torch.save(next(side.model.parameters()).detach(), buffer)
        sizes.append(buffer.tell())
    assert sizes[1] < 1.5 * sizes[0] + 4096, sizes


@pytest.mark.parametrize("name", MAPPED)
def test_save_model(name: str, tmp_path: Path) -> None:
    """torch.save of the model itself gives a plain model back."""
    pair = squeezed(*MAPPED[name], tmp_path)
    buffer = io.BytesIO()
    torch.save(pair.ours.model, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert session_of(list(loaded.parameters())) is None
    same(pair.plain.model.state_dict(), loaded.state_dict())
    batch = next(pair.batches)
    same(pair.plain.model(*batch), loaded(*batch))


def test_save_optimizer(tmp_path: Path) -> None:
    pair = squeezed(*MAPPED["blocks"], tmp_path)
    buffer = io.BytesIO()
    torch.save(pair.ours.optimizer.state_dict(), buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()))
    pair.do(lambda side: side.optimizer.load_state_dict(copy.deepcopy(loaded)))
    pair.train(2)
    pair.check()


# -- what is left ----------------------------------------------------------------------------


def _left(folder: Path) -> tuple[int, int, int]:
    """Threads, descriptors, and mappings of files in the folder."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return (
        len([t for t in threading.enumerate() if "elixir" in t.name]),
        len(os.listdir("/proc/self/fd")),
        len([line for line in maps if str(folder) in line]),
    )


@pytest.mark.parametrize("last", ["step", "forward", "backward", "exception"])
def test_nothing_is_left(last: str, tmp_path: Path) -> None:
    """Everything dies with the model, though Dynamo keeps code and options for good."""
    options = tight(mlp, (X,), tmp_path)
    before = _left(tmp_path)
    model = seeded(0, Broken)
    optimizer = adamw(list(model.parameters()))
    net = compiled(model, model=model, optimizer=optimizer, **options)
    learn(net, optimizer)
    learn(net, optimizer)
    during = _left(tmp_path)
    assert during[1] > before[1] or during[2] > before[2]
    if last == "forward":
        net(X)
    elif last == "backward":
        net(X).sum().backward()
    elif last == "exception":
        with pytest.raises(RuntimeError):
            net(randn(6, 31))
    session = session_of(list(model.parameters()))
    watched = [
        weakref.ref(value)
        for value in (model, optimizer, session, session.engine, session.engine.store)
    ]
    watched += [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer, net, session
    gc.collect()
    assert [ref() for ref in watched if ref() is not None] == []
    assert _left(tmp_path) == before
    assert os.listdir(tmp_path) == []


def test_a_mapped_tensor_outlives_its_model(tmp_path: Path) -> None:
    pair = squeezed(*MAPPED["blocks"], tmp_path)
    expected = {n: p.detach().clone() for n, p in pair.plain.model.named_parameters()}
    held = dict(pair.ours.model.state_dict())
    del pair
    torch._dynamo.reset()
    gc.collect()
    same(expected, held)
    del held
    assert _left(tmp_path)[2] == 0


# -- calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("budget", ["spare", "tight"])
def test_a_first_call_without_gradients(mode: Any, budget: str, tmp_path: Path) -> None:
    options = dict(SPARE) if budget == "spare" else tight(mlp, (X,), tmp_path)
    pair = Pair(mlp, [(X,)], options, entry="backend")

    def evaluate(side: Any) -> Tensor:
        context: AbstractContextManager[None] = mode()
        with context:
            return torch.tensor(side.net(X).tolist())

    pair.do(evaluate)
    pair.train(2)
    pair.do(evaluate)
    pair.train()
    pair.check()


def test_a_smaller_last_batch(tmp_path: Path) -> None:
    batches = [(randn(8, 32),), (randn(8, 32, seed=1),), (randn(3, 32),)]
    for build in (mlp, Broken):
        pair = pair_of(TIGHT, build, batches, tmp_path, options=tight(mlp, batches[0], tmp_path))
        pair.train(7)
        pair.check()
        assert state(pair.ours.model).plan.forecast.peak_device_bytes > 0


def test_a_larger_batch_is_refused_whole(tmp_path: Path) -> None:
    """A batch that does not fit is refused before anything runs; then training goes on."""
    options = tight(mlp, (randn(64, 32),), tmp_path)
    pair = Pair(mlp, [(randn(64, 32),)], options, entry="backend")
    pair.train(2)
    with pytest.raises(PlanError):
        pair.ours.net(randn(8192, 32))
    pair.train(2)
    pair.check()


def test_retain_graph(tmp_path: Path) -> None:
    for build in (mlp, Broken, Tied):
        options = tight(mlp, (X,), tmp_path)
        pair = pair_of(TIGHT, build, [(X,)], tmp_path, options=options)

        def twice(side: Any, batch: Any) -> Tensor:
            loss = side.net(*batch).square().mean()
            loss.backward(retain_graph=True)
            return loss

        pair.train(2, twice)
        pair.check()


def test_autograd_grad(tmp_path: Path) -> None:
    """Gradients that are asked for do not land in p.grad."""
    pair = Pair(Broken, [(X,)], tight(mlp, (X,), tmp_path), entry="backend")

    def ask(side: Any) -> Any:
        loss = side.net(X).square().mean()
        return torch.autograd.grad(loss, list(side.model.parameters()))

    pair.do(ask)
    pair.check()
    pair.train(2)
    pair.check()


@pytest.mark.parametrize("budget", ["spare", "tight"])
def test_an_exception_between_regions(budget: str, tmp_path: Path) -> None:
    options = dict(SPARE) if budget == "spare" else tight(mlp, (X,), tmp_path)
    pair = Pair(Fails, [(X,)], options, entry="backend")

    def fail(side: Any) -> str:
        side.model.fails = True
        with pytest.raises(ValueError, match="6 rows") as caught:
            side.net(X)
        side.model.fails = False
        return str(caught.value)

    pair.do(fail)  # at the very first call
    pair.train(2)
    pair.do(fail)
    pair.train(2)
    pair.check()


def test_an_exception_inside_a_region(tmp_path: Path) -> None:
    """Half way through a forward and through a backward: the next step is a normal one."""
    options = tight(lambda: blocks(4), (X,), tmp_path)
    pair = Pair(lambda: blocks(4), [(X,)], options, entry="backend")
    pair.train(2)
    engine = session_of(list(pair.ours.model.parameters())).engine
    for name in ("gather", "reduce"):
        real = getattr(engine, name)

        def fails(*args: Any, real: Any = real) -> Any:
            raise KeyboardInterrupt

        setattr(engine, name, fails)
        with pytest.raises(KeyboardInterrupt):
            pair.ours.net(X).sum().backward()
        delattr(engine, name)
        assert engine.cache.gathered == []
        pair.do(lambda side: side.optimizer.zero_grad())
        pair.train(2)
        pair.check()


def test_gradient_hooks(tmp_path: Path) -> None:
    """Hooks of parameters and tensors run as in eager, in regions too."""
    pair = Pair(Broken, [(X,)], tight(mlp, (X,), tmp_path), entry="backend")
    for side in pair.sides:
        for name, parameter in side.model.named_parameters():
            parameter.register_hook(lambda g, s=side, n=name: s.log.append((n, g.sum().item())))
            parameter.register_post_accumulate_grad_hook(
                lambda p, s=side, n=name: s.log.append((n, "done"))
            )
    pair.train(3)
    for side in pair.sides:
        side.log.sort(key=str)
    pair.check()


def test_module_hooks_that_change_warn() -> None:
    model = seeded(0, mlp)
    net = compiled(model, model=model, **SPARE)
    net(X)
    handle = model[0].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="hooks of Sequential's modules have changed"):
        net(X)
    handle.remove()


def test_frozen_and_thawed(tmp_path: Path) -> None:
    """requires_grad may change between calls."""
    pair = Pair(Broken, [(X,)], tight(mlp, (X,), tmp_path), entry="backend")
    pair.train()
    for flag in (False, True):
        pair.do(lambda side, flag=flag: side.model.first.requires_grad_(flag) and None)
        pair.train(2)
        pair.check()


def test_budget_is_kept(tmp_path: Path) -> None:
    """The peak that was counted stays within the budget, from the second step on."""
    model = gpt(width=32)
    (batch,) = model.batches(1)
    options = tight(model.build, batch, tmp_path)
    pair = Pair(model.build, [batch], options, entry="backend")
    pair.train(3)
    pair.check()
    assert state(pair.ours.model).stats()["peak_device_bytes"] <= options["memory"]


def test_a_replaced_parameter(tmp_path: Path) -> None:
    """Another object under a managed name is refused by its path; the first one works again."""
    pair = Pair(
        lambda: blocks(4), [(X,)], tight(lambda: blocks(4), (X,), tmp_path), entry="backend"
    )
    pair.train(2)
    layer = pair.ours.model[1].up
    own = layer.weight
    layer.weight = nn.Parameter(own.detach().clone())
    with pytest.raises(ElixirError, match=r"1\.up\.weight is another parameter object"):
        pair.ours.net(X)
    layer.weight = own
    pair.train()
    pair.check()
