"""materialize: a meta model is filled module by module, from code or from files."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from elixir_fx.errors import ElixirError, TierError
from elixir_fx.runtime.materialize import is_meta, materialize


class Tied(nn.Module):
    """An embedding, a normalised hidden layer, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.fc(self.emb(x))))


class Rotary(nn.Module):
    """Owns a non-persistent buffer; `fill` says how it gets its values."""

    def __init__(self, fill: Callable[["Rotary"], None] | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(3, 4), persistent=False)
        if fill is not None:
            self.reset_parameters = lambda: fill(self)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


class Home:
    """The simplest home: the parameter object becomes an ordinary one."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def __call__(self, path: str, parameter: nn.Parameter, value: Tensor) -> None:
        assert type(value) is Tensor and not value.requires_grad
        assert (value.shape, value.stride(), value.dtype) == (
            parameter.shape,
            parameter.stride(),
            parameter.dtype,
        )
        self.paths.append(path)
        real = nn.Parameter(value, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, real)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_reset_parameters_gives_the_values_of_an_ordinary_build():
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Conv1d(2, 3, 2), nn.Embedding(4, 3))
    meta = on_meta(
        lambda: nn.Sequential(
            nn.Linear(5, 7), nn.LayerNorm(7), nn.Conv1d(2, 3, 2), nn.Embedding(4, 3)
        )
    )
    assert is_meta(meta) and not is_meta(plain)
    torch.manual_seed(5)
    materialize(meta, Home(), device="cpu")
    assert not is_meta(meta)
    assert equal(state_of(meta), state_of(plain))


def test_tied_parameters_and_buffers_stay_one_object_and_seeds_repeat():
    states = []
    for _ in range(2):
        model = on_meta(Tied)
        before = dict(model.named_parameters())
        home = Home()
        torch.manual_seed(1)
        materialize(model, home, device="cpu")
        assert home.paths == [
            "emb.weight",
            "fc.weight",
            "fc.bias",
            "norm.weight",
            "norm.bias",
            "head.bias",
        ]
        assert model.head.weight is model.emb.weight
        assert all(dict(model.named_parameters())[name] is value for name, value in before.items())
        states.append(state_of(model))
    assert equal(*states)
    # The first owner filled it: an embedding's N(0, 1), not the head's uniform.
    torch.manual_seed(1)
    assert torch.equal(states[0]["emb.weight"], nn.Embedding(11, 6).weight)
    assert states[0]["norm.running_var"].eq(1).all()
    assert states[0]["norm.num_batches_tracked"].item() == 0


def test_one_module_at_a_time_is_real():
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))))
    real: list[int] = []

    def drop(path: str, parameter: nn.Parameter, value: Tensor) -> None:
        # A home elsewhere: the parameter stays on meta, its value goes away.
        real.append(sum(not p.is_meta for p in model.parameters()))

    def init(module: nn.Module) -> None:
        real.append(sum(not p.is_meta for p in model.parameters()))
        assert all(not p.is_meta for p in module.parameters(recurse=False))

    materialize(model, drop, init=init, device="cpu")
    # One is real while init runs (a stand-in), none when its value is delivered.
    assert real == [1, 0] * 8


def gpt_init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(std=0.02)
    if isinstance(module, nn.Linear):
        module.bias = nn.Parameter(torch.zeros_like(module.bias))


def test_init_runs_after_reset_parameters_and_may_write_through_data():
    model = on_meta(Tied)
    torch.manual_seed(0)
    materialize(model, Home(), init=gpt_init, device="cpu")
    assert 0.01 < model.fc.weight.std().item() < 0.03
    assert 0.01 < model.emb.weight.std().item() < 0.03
    assert model.fc.bias.eq(0).all() and model.norm.weight.eq(1).all()
    assert model(torch.tensor([1, 2])).shape == (2, 11)


def test_flags_and_attributes_of_parameters_survive():
    model = on_meta(Tied)
    model.fc.weight.requires_grad_(False)
    model.fc.weight.group = "frozen"

    def init(module: nn.Module) -> None:
        if module is model.norm:
            module.bias.requires_grad_(False)
            module.bias.seen = True

    seen: dict[str, dict[str, object]] = {}

    def deliver(path: str, parameter: nn.Parameter, value: Tensor) -> None:
        seen[path] = dict(vars(parameter))
        Home()(path, parameter, value)

    materialize(model, deliver, init=init, device="cpu")
    assert not model.fc.weight.requires_grad and not model.norm.bias.requires_grad
    assert model.fc.bias.requires_grad
    assert seen["fc.weight"] == {"group": "frozen"} and seen["norm.bias"] == {"seen": True}


def test_only_meta_tensors_are_touched():
    model = Tied()
    before = state_of(model)
    model.fc.weight = nn.Parameter(torch.empty(6, 6, device="meta"))
    model.norm.bias = nn.Parameter(torch.empty(6, device="meta"))
    home = Home()
    materialize(model, home, device="cpu")
    assert home.paths == ["fc.weight", "norm.bias"]
    after = state_of(model)
    for name in before.keys() - {"fc.weight", "norm.bias"}:
        assert torch.equal(before[name], after[name]), name


def test_buffers_keep_their_persistence():
    def fill(module: Rotary) -> None:
        nn.init.ones_(module.scale)
        module.table.copy_(torch.arange(12.0).view(3, 4))

    model = on_meta(lambda: nn.Sequential(Rotary(fill)))
    materialize(model, Home(), device="cpu")
    assert torch.equal(model[0].table, torch.arange(12.0).view(3, 4))
    assert list(model.state_dict()) == ["0.scale"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_the_marker_is_seen_in_every_dtype(dtype: torch.dtype):
    model = on_meta(lambda: nn.Linear(3, 3, dtype=dtype))
    model.reset_parameters = lambda: nn.init.zeros_(model.bias)
    with pytest.raises(ElixirError, match="weight was not filled"):
        materialize(model, Home(), device="cpu")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.bool])
def test_the_marker_is_seen_in_whole_numbers(dtype: torch.dtype):
    def build(fill: bool) -> nn.Module:
        module = nn.Module()
        module.register_buffer("ids", torch.empty(40000, dtype=dtype, device="meta"))

        def reset() -> None:
            if fill:
                module.ids.copy_(torch.arange(-20000, 20000))

        module.reset_parameters = reset
        return module

    filled = build(fill=True)
    materialize(filled, Home(), device="cpu")
    assert torch.equal(
        filled.ids, torch.empty(40000, dtype=dtype).copy_(torch.arange(-20000, 20000))
    )
    with pytest.raises(ElixirError, match="ids was not filled"):
        materialize(build(fill=False), Home(), device="cpu")


def test_what_nobody_fills_is_refused_by_name():
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Rotary()))
    home = Home()
    with pytest.raises(ElixirError, match=r"nothing fills 1\.scale, 1\.table: Rotary has no"):
        materialize(model, home, device="cpu")
    assert home.paths == []  # refused before the first value was made

    def partly(module: nn.Module) -> None:
        if isinstance(module, Rotary):
            module.scale.fill_(1.0)
            module.table[:2] = 0.0

    with pytest.raises(ElixirError, match=r"1\.table was not filled.*init="):
        materialize(model, Home(), init=partly, device="cpu")


def test_a_meta_tensor_that_is_no_buffer_is_refused():
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2)))
    model[0].mask = torch.ones(2, device="meta")
    with pytest.raises(ElixirError, match=r"0\.mask is a tensor on meta.*register_buffer"):
        materialize(model, Home(), device="cpu")


@pytest.mark.parametrize(
    "write",
    [
        lambda p: nn.init.normal_(p, std=0.02),
        lambda p: p.data.normal_(),
        lambda p: p.mul_(0.5),
        lambda p: p.__setitem__(0, 1.0),
        lambda p: torch.zeros(p.shape, out=p.data),
        lambda p: setattr(p, "data", torch.zeros(p.shape, device="meta")),
    ],
)
def test_an_init_for_the_whole_model_is_refused(write: Callable[[Tensor], object]):
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(2))
            self.fc = nn.Linear(2, 2)

    def init(module: nn.Module) -> None:
        if isinstance(module, Owner):
            module.scale.fill_(sum(p.numel() for p in module.parameters()))  # reading is fine
            for name, p in module.named_parameters():
                if name == "fc.weight":
                    p.requires_grad_(True)
                    write(p)

    model = on_meta(Owner)
    with pytest.raises(ElixirError, match=r"init, called with Owner, writes to .*every module in"):
        materialize(model, Home(), init=init, device="cpu")
    assert model.scale.is_meta and model.fc.weight.is_meta  # nothing is left half done


def test_a_real_parameter_of_another_module_is_not_written_either():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias = nn.Parameter(torch.empty(2, device="meta"))
    with pytest.raises(ElixirError, match=r"writes to 1\.weight, which belongs to another module"):
        materialize(model, Home(), init=lambda _: model[1].weight.zero_(), device="cpu")


def test_lazy_modules_are_refused():
    with pytest.raises(ElixirError, match="run the lazy module once"):
        materialize(nn.Sequential(nn.LazyLinear(3)), Home(), device="cpu")


def filled(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    model = Tied()
    model.norm.running_mean.normal_()
    return model


@pytest.mark.parametrize(
    "aliases", [("emb.weight",), ("head.weight",), ("emb.weight", "head.weight")]
)
@pytest.mark.parametrize("files", ["file", "folder", "indexed"])
def test_weights_equal_a_plain_load(tmp_path: Path, files: str, aliases: tuple[str, ...]):
    source = filled()
    state = state_of(source)
    for name in {"emb.weight", "head.weight"} - set(aliases):
        del state[name]
    names = list(state)
    if files == "file":
        path = tmp_path / "w.safetensors"
        save_file(state, path)
    else:
        path = tmp_path
        for number, part in enumerate((names[:3], names[3:])):
            save_file({name: state[name] for name in part}, tmp_path / f"{number}.safetensors")
    if files == "indexed":
        save_file({"stray": torch.zeros(1)}, tmp_path / "other.safetensors")
        weight_map = {name: f"{int(names.index(name) >= 3)}.safetensors" for name in names}
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    model = on_meta(Tied)
    materialize(model, Home(), weights=path, device="cpu")
    assert equal(state_of(model), state_of(source))
    assert model.head.weight is model.emb.weight


def test_non_persistent_buffers_beside_weights_come_from_code(tmp_path: Path):
    def fill(module: Rotary) -> None:
        nn.init.zeros_(module.scale)
        module.table.fill_(7.0)

    save_file({"0.scale": torch.arange(4.0)}, tmp_path / "w.safetensors")
    model = on_meta(lambda: nn.Sequential(Rotary(fill)))
    materialize(model, Home(), weights=tmp_path, device="cpu")
    assert torch.equal(model[0].scale, torch.arange(4.0))  # the file's, not reset_parameters'
    assert model[0].table.eq(7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("fc.bias"), r"missing: fc\.bias"),
        (lambda s: s.update(extra=torch.zeros(1)), "unexpected: extra"),
        (
            lambda s: s.update({"fc.weight": torch.zeros(6, 5)}),
            r"'fc\.weight' in .*w\.safetensors is \[6, 5\] .* but \[6, 6\]",
        ),
        (
            lambda s: s.update({"fc.weight": torch.zeros(6, 6, dtype=torch.float16)}),
            r"float16, but \[6, 6\] torch\.float32",
        ),
        (
            lambda s: s.update({"head.weight": torch.zeros(11, 6)}),
            r"emb\.weight and head\.weight are one tied parameter",
        ),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
):
    state = state_of(filled())
    change(state)
    save_file(state, tmp_path / "w.safetensors")
    home = Home()
    with pytest.raises(TierError, match=message):
        materialize(on_meta(Tied), home, weights=tmp_path, device="cpu")
    assert home.paths == []


def test_files_that_are_no_weights_are_refused(tmp_path: Path):
    for weights, message in (
        (tmp_path / "absent", "does not exist"),
        (tmp_path, "holds no"),
    ):
        with pytest.raises(TierError, match=message):
            materialize(on_meta(Tied), Home(), weights=weights, device="cpu")
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(TierError, match="not a readable safetensors file"):
        materialize(on_meta(Tied), Home(), weights=tmp_path, device="cpu")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone"}}')
    with pytest.raises(TierError, match="names gone, which is not there"):
        materialize(on_meta(Tied), Home(), weights=tmp_path, device="cpu")


def test_the_whole_model_never_stands_in_memory(tmp_path: Path):
    # 24 layers of 16 MiB, 384 MiB in all, whose home is elsewhere.
    source = f"""
        import torch
        from pathlib import Path
        from torch import nn
        from elixir_fx.runtime.materialize import materialize
        from elixir_fx.runtime.weights import Pending, write_weights

        def resident(key):
            line = [x for x in open("/proc/self/status") if x.startswith(key)][0]
            return int(line.split()[1]) // 1024

        def growth(**options):
            with torch.device("meta"):
                model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))
            open("/proc/self/clear_refs", "w").write("5")
            before = resident("VmHWM")
            seen = []
            materialize(model, lambda path, p, value: seen.append(path), device="cpu", **options)
            print(len(seen), resident("VmHWM") - before)

        nn.Linear(2048, 2048)
        growth()
        growth(init=lambda m: isinstance(m, nn.Linear) and m.weight.data.normal_(std=0.02))
        folder = Path({str(tmp_path)!r})
        sizes = [(f"{{i}}.{{name}}", shape) for i in range(24)
                 for name, shape in (("weight", (2048, 2048)), ("bias", (2048,)))]
        write_weights(folder, "model", [
            Pending(name=name, nbytes=4 * torch.Size(shape).numel(), dtype=torch.float32,
                    load=lambda shape=shape: torch.ones(shape))
            for name, shape in sizes
        ], {{}}, shard_bytes=64 << 20)
        growth(weights=folder)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        delivered, grown_mib = map(int, line.split())
        assert delivered == 48
        assert grown_mib < 128, done.stdout
