"""checkpoint: full values as ordinary tensors, and folders that bring training back."""

import copy
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from elixir_fx.errors import TierError
from elixir_fx.runtime import checkpoint
from elixir_fx.runtime.checkpoint import full_state, load, save
from elixir_fx.runtime.materialize import materialize
from elixir_fx.runtime.weights import Pending, WeightFiles, write_weights


class Net(nn.Module):
    """Tied weights, buffers of both kinds, two dtypes, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(13, 8)
        self.fc = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.low = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.norm(self.fc(self.emb(x))), 0.2)
        return self.head(self.low(hidden.bfloat16()).float())


Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Build] = {
    "adamw": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "lr": 1e-2}, {"params": p[2:]}], betas=(0.8, 0.99), amsgrad=True
    ),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), capturable=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 13, (16,))
        loss = nn.functional.cross_entropy(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path, name: str):
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer, 3)
    optimizer.param_groups[0]["lr"] *= 0.5
    save(tmp_path / "ck", model, optimizer)
    expected = train(model, optimizer, 3)

    torch.manual_seed(99)
    again = Net()
    fresh = OPTIMIZERS[name](list(again.parameters()))
    load(tmp_path / "ck", again, fresh)
    assert again.head.weight is again.emb.weight
    assert train(again, fresh, 3) == expected  # lr, states and random numbers are back too
    assert equal(again.state_dict(), model.state_dict())


def test_plain_tools_read_the_folder(tmp_path: Path):
    model = Net()
    save(tmp_path, model)  # an empty folder that exists is fine
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    state: dict[str, Tensor] = {}
    for file in set(index["weight_map"].values()):
        state |= load_file(tmp_path / file)
    assert index["metadata"]["aliases"] == {"head.weight": "emb.weight"}
    assert "scratch" not in state and "norm.num_batches_tracked" in state
    plain = Net()
    result = plain.load_state_dict(state, strict=False)
    assert result.missing_keys == ["head.weight"] and not result.unexpected_keys
    assert equal(plain.state_dict(), model.state_dict())
    # and so does a model that is built on meta
    with torch.device("meta"):
        meta = Net()
    del meta.scratch

    def deliver(path: str, parameter: nn.Parameter, value: Tensor) -> None:
        torch.utils.swap_tensors(parameter, nn.Parameter(value))

    materialize(meta, deliver, weights=tmp_path, device="cpu")
    assert equal(meta.state_dict(), model.state_dict())


def test_values_arrive_in_place(tmp_path: Path):
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    train(model, optimizer, 1)
    save(tmp_path / "ck", model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 1)
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    states = {id(value) for state in optimizer.state.values() for value in state.values()}
    load(tmp_path / "ck", model, optimizer)
    assert {name: v.data_ptr() for name, v in model.state_dict().items()} == pointers
    assert {id(v) for state in optimizer.state.values() for v in state.values()} == states
    for one, other in zip(
        saved["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert equal(one, other)


def test_adopt_sees_one_parameter_after_the_other(tmp_path: Path):
    model = Net()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    train(model, optimizer, 1)
    save(tmp_path / "ck", model, optimizer)
    fresh = OPTIMIZERS["adamw"](list(model.parameters()))
    held: list[int] = []
    away: dict[nn.Parameter, dict[str, Tensor]] = {}

    def adopt(parameter: nn.Parameter) -> None:
        held.append(sum(bool(state) for state in fresh.state.values()))
        away[parameter] = dict(fresh.state[parameter])
        fresh.state[parameter].clear()

    load(tmp_path / "ck", model, fresh, adopt=adopt)
    assert held == [1] * len(list(model.parameters()))
    for parameter, state in optimizer.state.items():
        assert equal(away[parameter], state)


def test_a_state_without_its_parameter_in_the_file_is_dropped(tmp_path: Path):
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    save(tmp_path / "ck", model, optimizer)
    train(model, optimizer, 1)
    load(tmp_path / "ck", model, optimizer)
    assert not optimizer.state


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[Path]:
    model = Net()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    train(model, optimizer, 1)
    save(tmp_path / "ck", model, optimizer)
    yield tmp_path / "ck"
    assert [entry.name for entry in tmp_path.iterdir()] == ["ck"]  # nothing else is left behind


def with_fc(layer: nn.Module) -> nn.Module:
    model = Net()
    model.fc = layer
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: with_fc(nn.Linear(8, 8, bias=False)), r"unexpected: fc\.bias"),
        (lambda: with_fc(nn.Bilinear(8, 8, 8, bias=True)), r"'fc\.weight' .*\[8, 8\].*\[8, 8, 8\]"),
        (lambda: with_fc(nn.Linear(8, 8, dtype=torch.float64)), r"torch\.float32, but .*float64"),
        (lambda: nn.Sequential(Net()), r"missing: 0\.emb\.weight, .*unexpected: emb\.weight"),
    ],
)
def test_another_model_is_refused_unchanged(
    saved: Path, build: Callable[[], nn.Module], message: str
):
    model = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TierError, match=message):
        load(saved, model)
    assert equal(model.state_dict(), before)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda p: torch.optim.Adam(p), "is of SGD, the optimizer is Adam"),
        (lambda p: torch.optim.SGD(p[1:], lr=1.0), r"unexpected there: emb\.weight"),
        (
            lambda p: torch.optim.SGD([{"params": p[:1]}, {"params": p[1:]}], lr=1.0),
            "has 1 parameter groups, the optimizer 2",
        ),
        (
            lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(7))], lr=1.0),
            r"parameter of shape \[7\] that the model does not have",
        ),
    ],
)
def test_another_optimizer_is_refused_unchanged(saved: Path, build: Build, message: str):
    model = Net()
    before = copy.deepcopy(model.state_dict())
    optimizer = build(list(model.parameters()))
    with pytest.raises(TierError, match=message):
        load(saved, model, optimizer)
    assert equal(model.state_dict(), before) and not optimizer.state


def test_folders_that_are_no_checkpoint_are_refused(saved: Path, tmp_path: Path):
    for folder, message in (
        (saved / "absent", "does not exist"),
        (saved / "optimizer", r"has no checkpoint\.json"),
    ):
        with pytest.raises(TierError, match=message):
            load(folder, Net())
    record = saved / "checkpoint.json"
    text = record.read_text()
    record.write_text(text[: len(text) // 2])
    with pytest.raises(TierError, match="malformed"):
        load(saved, Net())
    record.write_text(text.replace('"elixir_fx_checkpoint": 1', '"elixir_fx_checkpoint": 7'))
    with pytest.raises(TierError, match="version 7"):
        load(saved, Net())
    with pytest.raises(TierError, match="holds something else than a checkpoint"):
        save(saved / "optimizer", Net())
    with pytest.raises(TierError, match="is a file"):
        save(record, Net())


def test_a_truncated_file_is_refused(saved: Path):
    file = saved / "model.safetensors"
    os.truncate(file, file.stat().st_size - 8)
    with pytest.raises(TierError, match=r"model\.safetensors is not a readable"):
        load(saved, Net())


def test_saving_again_replaces_a_checkpoint_and_keeps_other_files(saved: Path):
    (saved / "config.json").write_text("{}")
    model = Net()
    save(saved, model)
    assert (saved / "config.json").read_text() == "{}"
    again = Net()
    load(saved, again)
    assert equal(again.state_dict(), model.state_dict())
    with pytest.raises(TierError, match="saved without an optimizer"):
        load(saved, again, torch.optim.SGD(again.parameters(), lr=1.0))


def test_a_save_that_fails_leaves_the_old_one(saved: Path):
    good = Net()
    load(saved, good)
    bad = Net()
    bad.fc.weight = nn.Parameter(torch.ones(8, 8, dtype=torch.complex128))
    with pytest.raises(TierError, match=r"safetensors cannot hold 'fc\.weight'"):
        save(saved, bad)
    bad = Net()
    optimizer = torch.optim.SGD(bad.parameters(), lr=1.0)
    optimizer.param_groups[0]["schedule"] = print
    with pytest.raises(TierError, match=r"schedule/group\.0 of the optimizer is a builtin"):
        save(saved, bad, optimizer)
    again = Net()
    load(saved, again)
    assert equal(again.state_dict(), good.state_dict())


def test_a_save_killed_between_its_renames_is_found(saved: Path):
    saved.rename(saved.with_name(".ck.previous"))
    (saved.with_name(".ck.partial-1")).mkdir()
    load(saved, Net())
    save(saved, Net())  # the leftovers go


def test_a_full_disk_is_an_error_with_the_file(tmp_path: Path):
    source = f"""
        import resource, signal, torch
        from pathlib import Path
        from torch import nn
        from elixir_fx.errors import TierError
        from elixir_fx.runtime.checkpoint import full_state, load, save
        folder = Path({str(tmp_path)!r}) / "ck"
        small, large = nn.Linear(10, 10), nn.Linear(600, 600)
        save(folder, small)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for attempt in (
            lambda: save(folder, large),
            lambda: full_state([("w", lambda: large.weight)], in_memory_bytes=0, folder=folder),
        ):
            try:
                attempt()
            except TierError as error:
                print(error)
        load(folder, small)
        print(sorted(path.name for path in folder.parent.rglob("*")))
    """
    out = run(source)
    assert "cannot write" in out and "model.safetensors" in out and "cannot hold w (1440000" in out
    assert "['checkpoint.json', 'ck', 'model.safetensors', 'model.safetensors.index.json']" in out


def run(source: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_full_state_aliases_nothing_and_spills_to_the_disk(tmp_path: Path):
    model = Net()
    model.t = nn.Parameter(torch.randn(4, 6).t())
    entries = {name: value.detach for name, value in model.named_parameters()}
    entries["head.weight"] = entries["emb.weight"]
    entries["empty"] = lambda: torch.empty(0, 3)
    entries["scalar"] = lambda: torch.tensor(3)
    entries["flags"] = lambda: torch.tensor([True, False])
    expected = {name: entry().clone() for name, entry in entries.items()}
    for bytes_in_memory in (1 << 30, 300, 0):
        state = full_state(entries.items(), in_memory_bytes=bytes_in_memory, folder=tmp_path)
        assert equal(state, expected)
        assert all(state[name].stride() == expected[name].stride() for name in state)
        assert all(type(value) is Tensor and not value.requires_grad for value in state.values())
        assert state["head.weight"] is state["emb.weight"]
        assert not list(tmp_path.iterdir())  # unlinked at birth
        mapped = Path("/proc/self/maps").read_text().count("elixir-state-")
        assert (mapped > 0) == (bytes_in_memory < 1 << 30)
        for value in state.values():
            value.zero_()
        assert all(torch.equal(entry(), expected[name]) for name, entry in entries.items())
        del state, value
        assert "elixir-state-" not in Path("/proc/self/maps").read_text()


def test_full_state_without_a_folder_stays_in_memory():
    state = full_state([("a", lambda: torch.ones(3))], in_memory_bytes=0, folder=None)
    assert torch.equal(state["a"], torch.ones(3))


def test_full_state_names_a_folder_that_is_gone(tmp_path: Path):
    entries = [("layer.weight", lambda: torch.ones(4))]
    with pytest.raises(TierError, match=r"gone cannot hold layer\.weight \(16 bytes\)"):
        full_state(entries, in_memory_bytes=0, folder=tmp_path / "gone")


def test_memory_stays_bounded(tmp_path: Path):
    # 24 tensors of 16 MiB: 384 MiB pass through.
    source = f"""
        import torch
        from pathlib import Path
        from elixir_fx.runtime.checkpoint import full_state
        from elixir_fx.runtime.weights import Pending, WeightFiles, write_weights
        folder = Path({str(tmp_path)!r})

        def resident(key):
            line = [x for x in open("/proc/self/status") if x.startswith(key)][0]
            return int(line.split()[1]) // 1024

        def growth(work):
            open("/proc/self/clear_refs", "w").write("5")
            before = resident("VmHWM")
            result = work()
            print(resident("VmHWM") - before, resident("VmRSS") - before)
            return result

        size = 4 << 20
        names = [f"w{{i}}" for i in range(24)]
        loads = [lambda i=i: torch.full((1024, 4096), float(i)) for i in range(24)]
        torch.full((size,), 1.0)
        state = growth(
            lambda: full_state(zip(names, loads), in_memory_bytes=32 << 20, folder=folder)
        )
        assert all(state[f"w{{i}}"][3, 5] == i for i in range(24))
        del state
        pendings = [
            Pending(name=name, nbytes=4 * size, dtype=torch.float32, load=load)
            for name, load in zip(names, loads)
        ]
        growth(lambda: write_weights(folder, "model", pendings, {{}}, shard_bytes=128 << 20))
        files = WeightFiles(folder)
        for i, name in enumerate(names):
            assert files.read(name).eq(i).all()
        target = torch.empty(1024, 4096)
        growth(lambda: [files.read_into(name, target) for name in names])
    """
    lines = [tuple(map(int, line.split())) for line in run(source).splitlines()]
    spilled, written, read = lines
    assert spilled[0] < 32 + 4 * 16 + 16 and spilled[1] < 32 + 2 * 16
    assert written[0] < 128 + 3 * 16
    assert read[0] < 64 + 3 * 16
    assert len(list(tmp_path.glob("model-*-of-00003.safetensors"))) == 3


def test_shards_are_cut_at_whole_tensors(tmp_path: Path):
    values = {f"w{i}": torch.arange(i * 100.0) for i in range(6)}
    pendings = [checkpoint.pending(name, value) for name, value in values.items()]
    write_weights(tmp_path, "model", pendings, {}, shard_bytes=1000)
    files = WeightFiles(tmp_path)
    assert {name: entry.file.name[6:11] for name, entry in files.entries.items()} == {
        "w0": "00001",
        "w1": "00001",
        "w2": "00002",
        "w3": "00003",
        "w4": "00004",
        "w5": "00005",
    }
    assert all(torch.equal(files.read(name), value) for name, value in values.items())


def test_one_name_in_two_files_is_refused(tmp_path: Path):
    for stem in ("a", "b"):
        pending = Pending(name="w", nbytes=4, dtype=torch.float32, load=lambda: torch.ones(1))
        write_weights(tmp_path, stem, [pending], {})
    with pytest.raises(TierError, match="holds several models"):
        WeightFiles(tmp_path)
    for index in tmp_path.glob("*.json"):
        index.unlink()
    with pytest.raises(TierError, match="'w' is in both"):
        WeightFiles(tmp_path)
