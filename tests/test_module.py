"""The compiled model is the user's model: names, state, flags, attributes, and what it refuses."""

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from harness import Batch, adamw
from pairs import SPARE, Pair, Side, is_away, same, tight
from torch import Tensor, nn

import elixir_fx
from elixir_fx import ElixirError, PlanError

THREADS = 1


class Net(nn.Module):
    """Tied weights, saved and unsaved buffers, state of its own, a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 24}
        self.layers = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
        self.norm = nn.BatchNorm1d(24)
        self.head, self.tail = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)
        self.tail.weight = self.head.weight
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("shift", torch.arange(24.0), persistent=False)

    def encode(self, x: Tensor) -> Tensor:
        return self.layers[0](x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layers(x) + self.shift / 24)
        return self.tail(self.dropout(h)) + self.head(x)


GENERATOR = torch.Generator().manual_seed(2)
BATCHES: list[Batch] = [(torch.randn(6, 24, generator=GENERATOR),) for _ in range(6)]
X = BATCHES[0][0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(Net, BATCHES, tight(Net, BATCHES[0], tmp_path_factory.mktemp("disk")))


@pytest.fixture
def trained(pair: Pair) -> Pair:
    pair.restart()
    pair.train(2)
    assert pair.away()
    return pair


# -- what it is ---------------------------------------------------------------------------


def test_names_and_objects_are_the_original_ones(trained: Pair) -> None:
    model, net = trained.ours.model, trained.ours.net
    plain = trained.plain.net
    for kind in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [name for name, _ in getattr(net, kind)()] == [n for n, _ in getattr(plain, kind)()]
    assert [id(p) for p in net.parameters()] == [id(p) for p in model.parameters()]
    assert net.head.weight is net.tail.weight is model.head.weight
    assert net.layers is model.layers and net.get_submodule("layers.0") is model.layers[0]
    assert isinstance(net, torch.fx.GraphModule)
    assert repr(net).startswith("ElixirModule of Net(") and "Linear(in_features=24" in repr(net)


def test_attributes_and_methods_are_the_original_ones(trained: Pair) -> None:
    model, net = trained.ours.model, trained.ours.net
    assert net.config is model.config
    net.config = {"width": 3}
    assert model.config == {"width": 3}
    net.note = "mine"
    assert model.note == "mine" and "note" in dir(net)
    del net.note
    assert not hasattr(model, "note")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = net.nothing
    trained.do(lambda side: side.net.encode(X))
    sequence = exact.compile(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), **SPARE)
    assert len(sequence) == 2 and [type(part) for part in sequence] == [nn.Linear, nn.Tanh]
    assert type(sequence[0]) is nn.Linear


def test_what_it_shows(trained: Pair) -> None:
    net = trained.ours.net
    assert "torch.ops.elixir.gather" in net.code
    assert "# elixir: gather chunk" in net.print_readable(print_output=False)
    assert isinstance(net.backward_module, torch.fx.GraphModule)
    assert "elixir.reduce" in net.backward_module.code
    assert [record.name for record in net.history][-1] == "align"
    assert net.plan.forecast.disk_read_bytes > 0 and net.stats()["disk_read_bytes"] > 0
    fresh = exact.compile(Net(), **SPARE)
    assert fresh.plan is None and fresh.backward_module is None and not fresh.history
    assert [node.op for node in fresh.graph.nodes].count("call_module") == 1


def test_flags_follow(trained: Pair) -> None:
    model, net = trained.ours.model, trained.ours.net
    assert net.eval() is net and not model.training and not net.training
    assert not model.dropout.training
    trained.plain.net.eval()
    trained.do(lambda side: side.net(X))
    assert net.train() is net and model.training and net.norm.training
    trained.plain.net.train()
    net.training = False
    assert not model.training
    net.train()
    trained.train()
    trained.check()
    trained.do(lambda side: [p.requires_grad for p in side.net.parameters()])


# -- state --------------------------------------------------------------------------------


def test_state_dict_is_the_plain_one(trained: Pair) -> None:
    plain, ours = (side.net.state_dict() for side in trained.sides)
    same(plain, ours)
    assert plain._metadata == ours._metadata and type(plain) is type(ours)
    assert all(type(value) is Tensor for value in ours.values())
    assert ours["head.weight"] is ours["tail.weight"]
    other = Net()
    other.load_state_dict(ours, strict=True)
    for side in trained.sides:
        side.net.eval()
    trained.plain.net.load_state_dict(ours)
    same(other.eval()(X), trained.ours.net(X))
    for side in trained.sides:
        side.net.train()
    for value in ours.values():  # the caller's own: edits reach nothing
        value.zero_()
    trained.train()
    trained.check()
    same(trained.plain.net.state_dict(prefix="a.b."), trained.ours.net.state_dict(prefix="a.b."))
    kept = trained.ours.net.state_dict(keep_vars=True)
    assert kept["head.weight"] is trained.ours.net.head.weight


def test_loading_goes_on_equally(trained: Pair) -> None:
    saved = copy.deepcopy(trained.plain.net.state_dict())
    states = copy.deepcopy(trained.plain.optimizer.state_dict())
    trained.train(2)
    for side in trained.sides:
        result = side.net.load_state_dict(saved, assign=side is trained.ours)
        assert not result.missing_keys and not result.unexpected_keys
        side.optimizer.load_state_dict(copy.deepcopy(states))
    trained.train(2)
    trained.check()
    assert trained.away()
    for side in trained.sides:
        with pytest.raises(RuntimeError, match="Missing key"):
            side.net.load_state_dict({})
        with pytest.raises(RuntimeError, match="size mismatch"):
            side.net.load_state_dict({**saved, "head.weight": torch.ones(2)})


def test_a_state_dict_of_its_own() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner.state_dict(*args, **kwargs)

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            return self.inner.load_state_dict(state, *args, **kwargs)

        def get_extra_state(self) -> int:
            return 3

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Wrapped()
    net = exact.compile(model, **SPARE)
    assert list(net.state_dict()) == ["weight", "bias"]
    net.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.zeros(3)})
    assert torch.equal(net(torch.ones(1, 3)), torch.full((1, 3), 3.0))


class Scripted(Net):
    """State that is no tensor, and a hook on it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 7
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.__setitem__(prefix + "extra", torch.ones(2))
        )

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def test_extra_state_and_hooks(tmp_path: Path) -> None:
    pair = Pair(Scripted, BATCHES, tight(Scripted, BATCHES[0], tmp_path))
    pair.train()
    pair.do(lambda side: side.net.state_dict())
    state = pair.ours.net.state_dict()
    state["_extra_state"] = {"seen": 9}
    del state["extra"]
    pair.ours.net.load_state_dict(state)
    assert pair.ours.model.seen == 9


@pytest.mark.parametrize("name", ["tight", "spare"])
def test_optimizer_states_move_to_another_budget(name: str, trained: Pair, tmp_path: Path) -> None:
    """Saved from one budget, loaded under another: the same steps follow."""
    options = {"tight": tight(Net, BATCHES[0], tmp_path), "spare": SPARE}[name]
    if name == "tight":
        options["memory"] += options["memory"] // 4
    weights, states = trained.ours.net.state_dict(), trained.ours.optimizer.state_dict()
    assert not any(is_away(value) for state in states["state"].values() for value in state)
    model = Net()
    optimizer = adamw(list(model.parameters()))
    net = exact.compile(model, optimizer=optimizer, example_inputs=(X,), **options)
    net.load_state_dict(weights)
    optimizer.load_state_dict(states)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        plain = trained.plain.step(BATCHES[step])
        torch.manual_seed(step)
        losses.append(plain)
        same(plain, Side(model, net, optimizer, []).step(BATCHES[step]))
    same(trained.plain.net.state_dict(), net.state_dict())
    same(trained.plain.optimizer.state_dict(), optimizer.state_dict())


def test_save_and_load(trained: Pair, tmp_path: Path) -> None:
    """From the tight model into one with memory to spare, and back."""
    elixir_fx.save(tmp_path / "saved", trained.ours.net, trained.ours.optimizer)
    model = Net()
    optimizer = adamw(list(model.parameters()))
    net = exact.compile(model, optimizer=optimizer, example_inputs=(X,), **SPARE)
    elixir_fx.load(tmp_path / "saved", net, optimizer)
    same(trained.plain.net.state_dict(), net.state_dict())
    same(trained.plain.optimizer.state_dict(), optimizer.state_dict())
    other = Side(model, net, optimizer, [])
    for side in (trained.plain, other):
        torch.manual_seed(0)
        side.step(BATCHES[1])
    elixir_fx.save(tmp_path / "saved", net, optimizer)
    trained.ours.step(BATCHES[2])
    elixir_fx.load(tmp_path / "saved", trained.ours.net, trained.ours.optimizer)
    trained.check()
    trained.train()
    trained.check()


def test_full_parameters(trained: Pair) -> None:
    net, before = trained.ours.net, trained.ours.net.state_dict()
    kept = net.head.weight.detach()
    with elixir_fx.full_parameters(net) as inside:
        assert inside is net and type(net.head.weight) is nn.Parameter
        assert net.head.weight.data_ptr() and not trained.away()
        with torch.no_grad():
            net.head.weight.mul_(2)
        with pytest.raises(ElixirError, match="full_parameters"):
            net(X)
        same(copy.deepcopy(trained.ours.model)(X).shape, torch.Size([6, 40]))
    assert torch.equal(kept, before["head.weight"] * 2)
    with torch.no_grad():
        trained.plain.net.head.weight.mul_(2)
    trained.check()
    with elixir_fx.full_parameters(net, writeback=False), torch.no_grad():
        net.head.weight.zero_()
    trained.check()
    with pytest.raises(KeyError), elixir_fx.full_parameters(net):
        raise KeyError
    trained.train()
    trained.check()
    assert trained.away()


def test_deepcopy_is_a_plain_model(trained: Pair) -> None:
    copied = copy.deepcopy(trained.ours.net)
    assert type(copied) is Net and copied.head.weight is copied.tail.weight
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    same(dict(trained.plain.net.state_dict()), dict(copied.state_dict()))
    with torch.no_grad():
        copied.head.weight.zero_()
    trained.check()
    stream = io.BytesIO()
    torch.save(copied, stream)
    again = exact.compile(copied, **SPARE)
    assert again(X).shape == (6, 40)


# -- what it refuses ----------------------------------------------------------------------


def test_pickle_is_refused(trained: Pair) -> None:
    net = trained.ours.net
    for attempt in (pickle.dumps, lambda net: torch.save(net, io.BytesIO())):
        with pytest.raises(ElixirError, match=r"elixir_fx\.save"):
            attempt(net)
    with pytest.raises(ElixirError, match="deepcopy"):
        copy.copy(net)
    with pytest.raises(ElixirError, match="deepcopy"):
        net.share_memory()


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


def test_wrappers_are_refused(trained: Pair, group: None) -> None:
    net = trained.ours.net
    with pytest.raises(ElixirError, match=r"torch\.compile around a compiled model"):
        torch.compile(net)(X)
    with pytest.raises(ElixirError, match=r"torch\.compile around a compiled model"):
        net.compile()
    with pytest.raises(ElixirError, match="DistributedDataParallel around a compiled model"):
        nn.parallel.DistributedDataParallel(net)
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ElixirError, match="wrapped by DistributedDataParallel"):
        exact.compile(wrapped)
    with pytest.raises(ElixirError, match="wrapped by OptimizedModule"):
        exact.compile(torch.compile(nn.Linear(2, 2)))
    trained.train()
    trained.check()


def test_a_second_compile_is_refused(trained: Pair) -> None:
    spare = exact.compile(nn.Linear(2, 2), **SPARE)
    spare(torch.ones(1, 2))
    for model in (trained.ours.net, trained.ours.model, spare, nn.Sequential(spare)):
        with pytest.raises(ElixirError, match="compiled already"):
            exact.compile(model)
    trained.train()
    trained.check()


def test_moves_and_casts(trained: Pair) -> None:
    net = trained.ours.net
    assert net.to("cpu") is net and net.float() is net and net.to(torch.float32) is net
    for cast in (
        lambda: net.half(),
        lambda: net.bfloat16(),
        lambda: net.double(),
        lambda: net.to("meta"),
        lambda: trained.ours.model.half(),
        lambda: net.layers.double(),
    ):
        with pytest.raises(ElixirError, match=r"before elixir_fx\.compile"):
            cast()
    trained.train()
    trained.check()


def test_another_parameter_object_is_refused(trained: Pair) -> None:
    net = trained.ours.net
    kept = net.layers[0].weight
    net.layers[0].weight = nn.Parameter(torch.ones(40, 24))
    with pytest.raises(ElixirError, match=r"layers\.0\.weight is another parameter object"):
        net(X)
    net.layers[0].weight = kept
    net.late = nn.Linear(24, 24)
    first, net.layers[0] = net.layers[0], nn.Sequential(net.layers[0], nn.Linear(40, 40))
    with pytest.raises(PlanError, match=r"knows no parameter 'layers\.0\.0\.weight'"):
        net(X)
    net.layers[0] = first
    del net.late
    trained.train()
    trained.check()


def hook_of_the_output(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: grad * 3)


def test_hooks_of_the_model(trained: Pair) -> None:
    """Forward hooks, added after the first step, on the model and on a layer."""

    def add(side: Side) -> list[Any]:
        net = side.net
        return [
            net.register_forward_hook(lambda module, args, output: output * 2),
            net.layers[0].register_forward_hook(lambda module, args, output: output + 1),
            net.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)),
            net.layers[1].register_forward_hook(hook_of_the_output),
        ]

    handles = [add(side) for side in trained.sides]
    trained.train(2)
    trained.check()
    for handle in [one for several in handles for one in several]:
        handle.remove()
    trained.train()
    trained.check()


def test_backward_hooks_of_modules_are_refused(trained: Pair) -> None:
    net = trained.ours.net
    handle = net.layers[0].register_full_backward_hook(lambda module, into, out: None)
    with pytest.raises(ElixirError, match=r"layers\.0 has a backward hook"):
        net(X)
    handle.remove()
    trained.train()
    trained.check()
