"""What a user sees of the parameters: names, totals, values, uses away from their module; saved
weights; and what is left when all is deleted."""

import gc
import io
import os
import weakref
from pathlib import Path

import pytest
import torch
from case_models import EVERY_WAY, WHEN_TIGHT, Way, mlp, pair_of, randn
from harness import Batch
from pairs import Side, same
from torch import Tensor, nn
from torch.nn import functional

import elixir_fx

THREADS = 1
X = randn(4, 32)


class Net(nn.Module):
    """A bias read away from its module, a head used by the loss, and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(32, 32), nn.Linear(32, 32)
        self.never, self.head = nn.Linear(32, 32), nn.Linear(32, 10)
        self.norm = nn.BatchNorm1d(32)

    def encode(self, x: Tensor) -> Tensor:
        return self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(self.encode(x).tanh())) + self.never.bias


@EVERY_WAY
def test_reads(way: Way, tmp_path: Path) -> None:
    """Totals, shapes and norms; a gradient that is read and scaled before the step."""
    pair = pair_of(way, Net, [(X,)], tmp_path, room=0.5)
    for _ in range(2):
        pair.do(lambda side: sum(p.numel() for p in side.net.parameters()))
        pair.do(lambda side: [p.shape for p in side.net.parameters()])
        pair.do(lambda side: [p.detach().norm() for p in side.net.parameters()])
        pair.do(lambda side: side.net.encode(X).detach())
        pair.backward()

        def scale(side: Side) -> Tensor:
            side.model.fc.weight.grad.mul_(0.5)
            return side.model.fc.weight.grad.norm()

        pair.do(scale)
        pair.check()
        pair.do(lambda side: side.optimizer.step())
        pair.do(lambda side: side.optimizer.zero_grad())
    pair.check()


@EVERY_WAY
def test_uses_outside(way: Way, tmp_path: Path) -> None:
    """A head applied by the loss, and a penalty on a weight: the gradients of both uses."""
    pair = pair_of(way, Net, [(X,)], tmp_path, room=0.5)

    def loss(side: Side, batch: Batch) -> Tensor:
        scores = side.net(*batch) @ side.net.head.weight.t()
        penalty = 1e-2 * side.net.fc.weight.pow(2).sum()
        return functional.cross_entropy(scores, torch.arange(4)) + penalty

    pair.train(3, loss)
    pair.check()
    pair.train(1)
    pair.check()


@EVERY_WAY
def test_names(way: Way, tmp_path: Path) -> None:
    """Keys, order and metadata of the plain model, through a file, both ways, strictly."""
    pair = pair_of(way, Net, [(X,)], tmp_path, room=0.5)
    pair.train(2)
    plain, ours = pair.plain.model, pair.ours
    kept = ours.net if way.entry == "compile" else ours.model
    assert [name for name, _ in kept.named_parameters()] == [n for n, _ in plain.named_parameters()]
    state = kept.state_dict()
    assert list(state) == list(plain.state_dict())
    assert state._metadata == plain.state_dict()._metadata
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    fresh = Net()
    fresh.load_state_dict(torch.load(file), strict=True)
    for side in pair.sides:
        side.net.eval()
    same(fresh.eval()(X).detach(), ours.net(X).detach())
    for value in state.values():
        value.zero_()  # a state dict of compile() is the caller's
    if way.entry == "compile":
        pair.check()
        same(fresh(X).detach(), ours.net(X).detach())


@EVERY_WAY
def test_a_checkpoint_of_the_plain_model(way: Way, tmp_path: Path) -> None:
    """Loaded strictly into the compiled model, which trains on from there."""
    saved = Net().state_dict()
    pair = pair_of(way, Net, [(X,)], tmp_path, room=0.5)
    pair.train(1)
    for side in pair.sides:
        side.model.load_state_dict(saved, strict=True)
    pair.train(2)
    pair.check()


@pytest.mark.parametrize("cast", ["half", "double", "bfloat16"])
@WHEN_TIGHT
def test_casts_are_refused_or_done(way: Way, cast: str, tmp_path: Path) -> None:
    """A move to where it is changes nothing; a cast is refused, and nothing is half cast."""
    pair = pair_of(way, mlp, [(X,)], tmp_path)
    pair.train(1)
    pair.ours.model.to("cpu")
    pair.ours.model.float()
    pair.train(1)
    pair.check()
    if way.entry == "backend":  # the cast is PyTorch's own; the next call says what is wrong
        getattr(pair.ours.net, cast)()
        with pytest.raises(elixir_fx.PlanError, match=r"'0.weight' is .*; the plan has float32"):
            pair.ours.net(X.to(pair.ours.model[0].weight.dtype))
        return
    with pytest.raises(elixir_fx.ElixirError, match="move or cast the model before"):
        getattr(pair.ours.net, cast)()
    assert {p.dtype for p in pair.ours.model.parameters()} == {torch.float32}
    pair.train(1)
    pair.check()


# -- what is left ----------------------------------------------------------------------------------


def open_files(folder: Path) -> list[str]:
    here = f"/proc/{os.getpid()}/fd"
    links = []
    for entry in os.listdir(here):
        try:
            links.append(os.readlink(f"{here}/{entry}"))
        except FileNotFoundError:
            continue
    return [link for link in links if link.startswith(str(folder))]


@WHEN_TIGHT
def test_nothing_is_left(way: Way, tmp_path: Path) -> None:
    """Built, trained and deleted: the model dies, files close, the folder is empty."""
    for _ in range(3):
        pair = pair_of(way, mlp, [(X,)], tmp_path)
        pair.train(2)
        assert open_files(tmp_path)
        model = weakref.ref(pair.ours.model)
        del pair
        torch._dynamo.reset() if way.entry == "backend" else None
        gc.collect()
        assert model() is None
        assert not open_files(tmp_path) and not list(tmp_path.iterdir())


def live_tensors() -> int:
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


@EVERY_WAY
def test_steps_leave_no_tensor(way: Way, tmp_path: Path) -> None:
    """Without the garbage collector: as many tensors after twenty steps as after five."""
    pair = pair_of(way, mlp, [(X,)], tmp_path)
    pair.train(5)
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        pair.train(15)
        assert live_tensors() <= before
    finally:
        gc.enable()
