"""What can go wrong goes wrong at once, in words, and leaves the weights as they were."""

import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from graphs import mlp
from harness import Batch, adamw, call, loss_of
from made_plans import facts_of, on_disk
from pairs import SPARE, Pair, Side, memory_needed, same, tight
from torch import Tensor, nn

import elixir_fx
from elixir_fx import CaptureError, ElixirError, PlanError, TierError
from elixir_fx.facts import Facts
from elixir_fx.testing import FaultyFiles
from elixir_fx.units import MIB

THREADS = 1

MLP = mlp(32, 96, 96, 32)
BATCHES = MLP.batches(8)
X = BATCHES[0]


@pytest.fixture(scope="module")
def facts() -> Facts:
    return facts_of(MLP.build(), X)


@pytest.fixture
def away(facts: Facts, tmp_path: Path) -> dict[str, Any]:
    """compile()'s options for six chunks, all of them on the disk: parameters, gradients and two
    states of each."""
    return on_disk(facts, tmp_path)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trains_like_plain(model: nn.Module, **options: Any) -> None:
    """A model that a failed compile left behind is compiled again and trains."""
    plain = MLP.build()
    sides = [
        Side(plain, plain, adamw(list(plain.parameters())), []),
        Side(model, model, adamw(list(model.parameters())), []),
    ]
    sides[1].net = exact.compile(model, optimizer=sides[1].optimizer, **options)
    for batch in BATCHES[:2]:
        same(sides[0].step(batch), sides[1].step(batch))
    same(plain.state_dict(), sides[1].net.state_dict())


# -- refused before anything happens ------------------------------------------------------


def test_options_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    model = MLP.build()
    refused: list[tuple[type[ElixirError], str, dict[str, Any]]] = [
        (ElixirError, "no option 'memmory'; did you mean 'memory'", {"memmory": 3}),
        (ElixirError, "no option 'colour'. It has", {"colour": 3}),
        (TierError, "nowhere' is not a folder", {"disk": tmp_path / "nowhere"}),
        (TierError, "file' is not a folder", {"disk": tmp_path / "file"}),
        (PlanError, "host_memory is refused on a CPU", {"host_memory": "1GiB"}),
        (ElixirError, "disk_memory is given without disk", {"disk_memory": "1GiB"}),
        (ElixirError, "size", {"memory": "much"}),
        (ElixirError, "kernels='fast'", {"kernels": "fast"}),
        (PlanError, "a home is one of", {"keep": {"0": "attic"}}),
        (ElixirError, "machine=3", {"machine": 3}),
        (ElixirError, "weights fill a model that was built on meta", {"weights": tmp_path}),
        (ElixirError, "init fill a model that was built on meta", {"init": lambda module: None}),
        (ElixirError, "optimizer is a str", {"optimizer": "adamw"}),
        (PlanError, "file is not a plan", {"plan": tmp_path / "file"}),
        (PlanError, "nowhere is not a plan", {"plan": tmp_path / "nowhere"}),
        (ElixirError, "example_inputs is a Tensor", {"example_inputs": X[0]}),
    ]
    if os.geteuid():
        refused.append((TierError, "cannot be written to", {"disk": tmp_path / "closed"}))
    for kind, words, options in refused:
        with pytest.raises(kind, match=words):
            exact.compile(model, **options)
    with pytest.raises(PlanError, match="keep/ignore names 'wte'"):
        exact.compile(model, example_inputs=X, keep={"wte": "device"})
    with pytest.raises(PlanError, match="keep/ignore names 'wte'"):
        exact.compile(model, example_inputs=X, ignore=["wte"])
    with pytest.raises(ElixirError, match=r"model is a function, not an nn\.Module"):
        exact.compile(lambda x: x)  # type: ignore[arg-type]
    same(weights_of(MLP.build()), weights_of(model))
    trains_like_plain(model, **SPARE)


def test_a_budget_too_small_names_one_that_works(tmp_path: Path) -> None:
    model = MLP.build()
    optimizer = adamw(list(model.parameters()))
    options: dict[str, Any] = {"disk": tmp_path, "example_inputs": X}
    with pytest.raises(PlanError) as refusal:
        exact.compile(model, optimizer=optimizer, memory="4KiB", **options)
    same(weights_of(MLP.build()), weights_of(model))
    said = str(refusal.value).split("memory=")[1].split()[0].strip("'\".,;:)")
    trains_like_plain(model, memory=said, disk=tmp_path)


def test_lbfgs_needs_everything(tmp_path: Path) -> None:
    model = MLP.build()
    smallest = memory_needed(model, X)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(PlanError, match="LBFGS needs all parameters at once"):
        exact.compile(model, optimizer=optimizer, example_inputs=X, memory=smallest, disk=tmp_path)
    net = exact.compile(model, memory=smallest, disk=tmp_path)
    loss_of(call(net, X)).backward()
    with pytest.raises(PlanError, match="LBFGS"):
        net.bind(torch.optim.LBFGS(model.parameters()))
    net.zero_grad()
    same(weights_of(MLP.build()), weights_of(net))


def test_an_optimizer_that_cannot_be_planned_for() -> None:
    model = MLP.build()
    with pytest.raises(PlanError, match="Adam cannot be planned for"):
        exact.compile(model, torch.optim.Adam(model.parameters(), differentiable=True))


def test_a_heavier_optimizer_than_planned(tmp_path: Path) -> None:
    model = MLP.build()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = memory_needed(model, X, "sgd")
    net = exact.compile(model, sgd, example_inputs=X, memory=memory, disk=tmp_path)
    with pytest.raises(PlanError, match="made for SGD"):
        net.bind(adamw(list(model.parameters())))
    loss_of(call(net, X)).backward()
    sgd.step()  # is bound as before


def test_plans_that_belong_elsewhere(away: dict[str, Any], tmp_path: Path) -> None:
    model = MLP.build()
    plan = away["plan"]
    plan.save(tmp_path / "plan.json")
    other = mlp(32, 97, 32).build()
    with pytest.raises(PlanError, match="the plan has float32"):
        exact.compile(other, example_inputs=X, plan=tmp_path / "plan.json", disk=tmp_path)
    third = nn.Bilinear(32, 32, 4)
    with pytest.raises(PlanError, match="made for another model"):
        exact.compile(third, example_inputs=(*X, *X), plan=plan, disk=tmp_path)
    trains_like_plain(model, **{**away, "plan": tmp_path / "plan.json"})


class Printing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        print(h.sum())  # the line that is named
        return h


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:  # the line that is named
            return super().forward(x)
        return x


@pytest.mark.parametrize("kind", [Printing, Branching])
def test_a_graph_break_is_named(kind: type[nn.Linear], tmp_path: Path) -> None:
    lines = Path(__file__).read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if f"class {kind.__name__}" in line)
    number = next(n for n in range(first, len(lines)) if "the line that is named" in lines[n]) + 1
    net = exact.compile(kind(4, 4), **SPARE)
    with pytest.raises(CaptureError) as refusal:
        net(torch.ones(2, 4))
    assert f"{__file__}:{number}" in str(refusal.value)
    assert "torch.compile(model, backend='elixir_fx')" in str(refusal.value)


class Choosy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three is too many")
        return super().forward(x)


@pytest.mark.parametrize("budget", ["tight", "spare"])
def test_an_exception_of_the_model(budget: str, tmp_path: Path) -> None:
    batches: list[Batch] = [(torch.ones(2, 64),), (torch.ones(4, 64),)]

    def build() -> nn.Module:
        return Choosy(64, 64)

    pair = Pair(build, batches, tight(build, batches[0], tmp_path) if budget == "tight" else SPARE)
    pair.train()
    for side in pair.sides:
        with pytest.raises(ValueError, match="three is too many"):
            side.net(torch.ones(3, 64))
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
            side.net()
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            side.net(torch.ones(2, 63))
    pair.train(2)
    pair.check()


# -- the disk -----------------------------------------------------------------------------


def test_no_space(away: dict[str, Any]) -> None:
    model = MLP.build()
    optimizer = adamw(list(model.parameters()))
    with pytest.raises(TierError, match=r"bytes asked.*ENOSPC.*free some space"):
        exact.compile_over(FaultyFiles(space=8192), model, optimizer, X, **away)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    same(weights_of(MLP.build()), weights_of(model))
    trains_like_plain(model, **away)


@pytest.mark.parametrize("call_number", [0, 2, 5])
def test_a_write_error_while_weights_move(call_number: int, away: dict[str, Any]) -> None:
    model = MLP.build()
    optimizer = adamw(list(model.parameters()))
    files = FaultyFiles(fail_write_at=call_number)
    with pytest.raises(TierError, match="EIO"):
        exact.compile_over(files, model, optimizer, X, **away)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    same(weights_of(MLP.build()), weights_of(model))
    trains_like_plain(model, **SPARE)


def test_a_write_error_while_states_move(away: dict[str, Any]) -> None:
    """An optimizer that has states already; its last one cannot be written."""
    writes = 0
    for fault in (None, "last"):
        plain, model = MLP.build(), MLP.build()
        sides = [Side(m, m, adamw(list(m.parameters())), []) for m in (plain, model)]
        for side in sides:
            side.step(BATCHES[0])
        files = FaultyFiles(fail_write_at=writes - 1 if fault else None)
        if fault is None:
            sides[1].net = exact.compile_over(files, model, sides[1].optimizer, X, **away)
            writes = files.writes
        else:
            with pytest.raises(TierError, match="EIO"):
                exact.compile_over(files, model, sides[1].optimizer, X, **away)
            assert all(type(p) is nn.Parameter for p in model.parameters())
        same(plain.state_dict(), sides[1].net.state_dict())
        same(sides[0].optimizer.state_dict(), sides[1].optimizer.state_dict())
        same(*(side.step(BATCHES[1]) for side in sides))
        same(plain.state_dict(), sides[1].net.state_dict())


def test_no_direct_io(away: dict[str, Any]) -> None:
    for refusal in ("flag", "call"):
        model, plain = MLP.build(), MLP.build()
        sides = [Side(m, m, adamw(list(m.parameters())), []) for m in (plain, model)]
        with pytest.warns(RuntimeWarning, match="refuses direct I/O") as caught:
            files = FaultyFiles(refuse_direct=refusal)
            sides[1].net = exact.compile_over(files, model, sides[1].optimizer, X, **away)
            for batch in BATCHES[:2]:
                same(sides[0].step(batch), sides[1].step(batch))
        assert len([one for one in caught if "direct I/O" in str(one.message)]) == 1
        same(weights_of(plain), weights_of(sides[1].net))


def test_short_transfers(away: dict[str, Any]) -> None:
    """Reads and writes that move half of what they were asked go on."""
    model, plain = MLP.build(), MLP.build()
    sides = [Side(m, m, adamw(list(m.parameters())), []) for m in (plain, model)]
    files = FaultyFiles(short_reads=True, short_writes=True)
    sides[1].net = exact.compile_over(files, model, sides[1].optimizer, X, **away)
    for batch in BATCHES[:3]:
        same(sides[0].step(batch), sides[1].step(batch))
    same(weights_of(plain), weights_of(sides[1].net))


class Faulty:
    """A model in training that is all on the disk, two steps done, and its plain twin."""

    def __init__(self, away: dict[str, Any]) -> None:
        self.files = FaultyFiles()
        self.sides = []
        for compiled in (False, True):
            model = MLP.build()
            side = Side(model, model, adamw(list(model.parameters())), [])
            if compiled:
                side.net = exact.compile_over(self.files, model, side.optimizer, X, **away)
            self.sides.append(side)
        self.plain, self.ours = self.sides
        for batch in BATCHES[:2]:
            same(self.plain.step(batch), self.ours.step(batch))

    def gradients_are_home(self) -> None:
        """The writes that come next are the optimizer's: a read of a gradient waits for its own."""
        for p in self.ours.model.parameters():
            assert p.grad is not None
            p.grad.detach().clone()

    def goes_on(self) -> None:
        for batch in BATCHES[2:4]:
            same(self.plain.step(batch), self.ours.step(batch))
        same(weights_of(self.plain.net), weights_of(self.ours.net))
        same(self.plain.optimizer.state_dict(), self.ours.optimizer.state_dict())


@pytest.mark.parametrize("fault", ["error", "truncated"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_read_fails_in_a_step(fault: str, after: int, away: dict[str, Any]) -> None:
    """In the forward or backward: the call fails, nothing changes, the next one works."""
    run = Faulty(away)
    files = run.files
    if fault == "error":
        files.fail_read_at = files.reads + after
    else:
        files.truncate_at = files.reads + after
    words = "EIO" if fault == "error" else "short read"
    with pytest.raises(TierError, match=words):
        run.ours.step(BATCHES[2])
    files.fail_read_at = files.truncate_at = None
    run.ours.optimizer.zero_grad()
    same(weights_of(run.plain.net), weights_of(run.ours.net))
    run.goes_on()


@pytest.mark.parametrize("once", [True, False])
def test_a_gradient_cannot_be_written(once: bool, away: dict[str, Any]) -> None:
    run = Faulty(away)
    loss = loss_of(call(run.ours.net, BATCHES[2]))
    run.files.fail_write_at, run.files.once = run.files.writes, once
    with pytest.raises(TierError, match="EIO"):
        loss.backward()
        run.ours.optimizer.step()
    run.files.fail_write_at = None
    run.ours.optimizer.zero_grad()
    same(weights_of(run.plain.net), weights_of(run.ours.net))
    run.goes_on()


@pytest.mark.parametrize("after", [0, 1, 4, 7])
def test_an_update_cannot_be_written(after: int, away: dict[str, Any]) -> None:
    """The step fails; every parameter and its states are those before or after the update."""
    run = Faulty(away)
    before = weights_of(run.plain.net)
    run.plain.step(BATCHES[2])
    updated = weights_of(run.plain.net)
    loss_of(call(run.ours.net, BATCHES[2])).backward()
    run.gradients_are_home()
    with pytest.raises(TierError, match=r"write of \d+ bytes at offset \d+ .*EIO"):
        run.files.fail_write_at = run.files.writes + after
        run.ours.optimizer.step()
    run.files.fail_write_at = None
    found = weights_of(run.ours.net)
    states = run.ours.optimizer.state_dict()["state"]
    assert any(not torch.equal(found[name], updated[name]) for name in found)
    for index, name in enumerate(found):
        done = torch.equal(found[name], updated[name])
        assert done or torch.equal(found[name], before[name]), name
        whole = run.plain.optimizer.state_dict()["state"][index]
        if done:
            same(whole, states[index])
    run.ours.net.load_state_dict(updated)
    run.ours.optimizer.load_state_dict(copy.deepcopy(run.plain.optimizer.state_dict()))
    run.ours.optimizer.zero_grad()
    run.goes_on()


def test_a_full_disk_for_a_state_dict(away: dict[str, Any], tmp_path: Path) -> None:
    run = Faulty(away)
    elixir_fx.save(tmp_path / "saved", run.ours.net, run.ours.optimizer)
    run.files.fail_read_at = run.files.reads + 2
    with pytest.raises(TierError, match="EIO"):
        elixir_fx.save(tmp_path / "saved", run.ours.net, run.ours.optimizer)
    run.files.fail_read_at = None
    elixir_fx.load(tmp_path / "saved", run.ours.net, run.ours.optimizer)
    run.goes_on()


# -- processes ----------------------------------------------------------------------------

TRAIN = """
import sys, time
import torch
from torch import nn
import elixir_fx

model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(4, 256)
memory = elixir_fx.smallest_memory(model, (x,), disk_memory="1GiB", kernels="eager")
net = elixir_fx.compile(model, optimizer, memory=memory, disk=sys.argv[1], kernels="eager")
for step in range(10000):
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        print("trains", net.stats()["disk_write_bytes"], flush=True)
"""


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    words = process.stdout.readline().split()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=20)
    process.stdout.close()
    assert words[0] == "trains" and float(words[1]) > 0
    assert not list(tmp_path.iterdir())


class Items(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((32,), index / 12)


def test_workers_of_a_data_loader(away: dict[str, Any]) -> None:
    """Forked in the middle of training, while transfers are under way."""
    run = Faulty(away)
    for _ in range(2):
        for x in torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=2):
            same(run.plain.step((x,)), run.ours.step((x,)))
    run.goes_on()


class Uses(torch.utils.data.Dataset[str]):
    """A worker that uses the compiled model: refused, in words, by every part of it."""

    def __init__(self, net: Any) -> None:
        self.net = net

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        try:
            self.net[0].weight.norm()
        except TierError as error:
            return str(error)
        return "worked"


def test_a_worker_that_uses_the_model(away: dict[str, Any]) -> None:
    run = Faulty(away)
    loader = torch.utils.data.DataLoader(Uses(run.ours.net), batch_size=None, num_workers=1)
    assert "worker processes must not use a compiled model" in next(iter(loader))
    run.goes_on()


# -- the end ------------------------------------------------------------------------------


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    return sum(issubclass(type(entry), Tensor) for entry in gc.get_objects())


def test_compiled_and_deleted_ten_times(tmp_path: Path) -> None:
    example = mlp(64, 1024)
    (x,) = example.batches(1)[0]
    memory = memory_needed(example.build(), (x,))

    def once() -> list[weakref.ref[Any]]:
        model = example.build()
        optimizer = adamw(list(model.parameters()))
        net = exact.compile(model, optimizer, memory=memory, disk=tmp_path)
        net(x).mean().backward()
        optimizer.step()
        session = net._session
        return [weakref.ref(one) for one in (net, model, session, session.engine,
                                             session.engine.store, optimizer)]  # fmt: skip

    marks: list[tuple[int, int, int]] = []
    tensors: list[int] = []
    for _ in range(10):
        watched = once()
        gc.collect()
        assert [one() for one in watched] == [None] * len(watched)
        marks.append((threading.active_count(), descriptors(), resident_bytes()))
        tensors.append(live_tensors() if len(marks) in (2, 10) else 0)
    threads, files, resident = zip(*marks, strict=True)
    assert threads[-1] == threads[1] and files[-1] == files[1] and tensors[-1] <= tensors[1]
    assert resident[-1] <= resident[2] + 8 * MIB
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget", ["tight", "spare"])
def test_steps_leave_no_tensor_behind(budget: str, away: dict[str, Any]) -> None:
    model = MLP.build()
    options = away if budget == "tight" else SPARE
    side = Side(model, model, adamw(list(model.parameters())), [])
    side.net = exact.compile(model, side.optimizer, **options)
    for batch in BATCHES[:3]:
        side.step(batch)
    gc.collect()
    gc.disable()
    try:
        side.step(BATCHES[3])
        before = live_tensors()
        for number in range(20):
            side.step(BATCHES[number % 8])
        assert live_tensors() == before
    finally:
        gc.enable()
