"""Gradients that add up: micro-batches, layers and weights that are used more than once, and
what clipping and scalers make of them."""

from pathlib import Path

import pytest
import torch
from case_models import EVERY_WAY, WHEN_TIGHT, Way, decayed, mlp, pair_of, randn, sgd, token_ids
from harness import Batch, loss_of
from pairs import SPARE, Side, same
from torch import Tensor, nn

THREADS = 1


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([20.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@EVERY_WAY
def test_four_gradients_on_one_weight(way: Way, tmp_path: Path) -> None:
    """Gradients 1, 2, 3, 4 with a learning rate of 1 move the weight by 10."""

    def whole_steps(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    home = "disk" if way.budget == "tight" else "device"
    options = {"memory": "1GiB", "disk": tmp_path, "keep": {"weight": home}}
    batches: list[Batch] = [(torch.tensor([number]),) for number in (1.0, 2.0, 3.0, 4.0)]
    pair = pair_of(way, Scalar, batches, tmp_path, whole_steps, options=options)
    for _ in batches:
        pair.backward()
    pair.do(lambda side: side.optimizer.step())
    pair.check()
    assert pair.ours.model.weight.item() == 10.0


class Repeated(nn.Module):
    """One layer more than once: in a row, and on two inputs."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.nested = nested

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x)) if self.nested else self.fc(x) + self.fc(2 * x)


@pytest.mark.parametrize("nested", [True, False])
@EVERY_WAY
def test_a_layer_used_twice(way: Way, nested: bool, tmp_path: Path) -> None:
    on_disk = {"memory": "1GiB", "disk": tmp_path, "keep": {"fc": "disk"}}
    options = on_disk if way.budget == "tight" else SPARE
    pair = pair_of(way, lambda: Repeated(nested), [(randn(2, 16),)], tmp_path, options=options)
    pair.train(2)
    pair.check()
    if way.entry == "compile" and way.budget == "tight":
        chunks = len(pair.ours.net.plan.layout.chunks)
        assert pair.ours.net.code.count("elixir.gather") == chunks
        assert pair.ours.net.backward_module.code.count("elixir.reduce") == chunks


@EVERY_WAY
def test_accumulation_equals_itself_in_any_context(way: Way, tmp_path: Path) -> None:
    batches: list[Batch] = [(randn(4, 32, seed=seed),) for seed in range(4)]
    pair = pair_of(way, mlp, batches, tmp_path)
    for pattern in ("out in out", "in out in", "in in out", "in in in out"):
        for word in pattern.split():

            def loss(side: Side, batch: Batch, word: str = word) -> Tensor:
                if word == "in" and hasattr(side.net, "no_sync"):
                    with side.net.no_sync():
                        return loss_of(side.net(*batch)) / 4
                return loss_of(side.net(*batch)) / 4

            pair.backward(loss)
        pair.do(lambda side: side.optimizer.step())
        pair.check()
        pair.do(lambda side: side.optimizer.zero_grad())


@WHEN_TIGHT
def test_one_reduce_for_each_chunk_and_micro_batch(way: Way, tmp_path: Path) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x).tanh()
            return x

    pair = pair_of(way, Blocks, [(randn(2, 64),)], tmp_path)
    pair.train(2)
    pair.check()
    if way.entry != "compile":
        return
    net = pair.ours.net
    chunks = len(net.plan.layout.chunks)
    assert net.code.count("elixir.gather") <= chunks
    assert net.backward_module.code.count("elixir.gather") <= chunks
    assert net.backward_module.code.count("elixir.reduce") == chunks


# -- tied weights ----------------------------------------------------------------------------------


class Tied(nn.Module):
    """The head is the table, and one layer stands at three places."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.table.weight
        self.a = nn.Linear(32, 32)
        self.b = self.c = self.a

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        for layer in (self.a, self.b, self.c):
            h = layer(h).tanh()
        return self.head(h)


@EVERY_WAY
def test_tied_weights(way: Way, tmp_path: Path) -> None:
    """One gradient, one state, one norm; still tied after a save and a load."""
    pair = pair_of(way, Tied, [(token_ids(2, 5, below=40),)], tmp_path)
    pair.train(2)
    pair.backward()
    pair.do(lambda side: nn.utils.clip_grad_norm_(side.net.parameters(), 0.1))
    pair.do(lambda side: side.optimizer.step())
    pair.check()
    ours = pair.ours.model
    assert ours.head.weight is ours.table.weight and ours.c is ours.a
    assert len(pair.ours.optimizer.state) == 3
    saved = {name: value.clone() for name, value in pair.ours.model.state_dict().items()}
    pair.train(1)
    for side in pair.sides:
        side.model.load_state_dict(saved)
    assert ours.head.weight is ours.table.weight
    pair.train(1)
    pair.check()


class SameTwice(nn.Module):
    """A parameter under two names, and one used before and after another."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 32) / 6)
        self.w2 = self.w
        self.b = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.T + self.b + x @ self.w2.T


@EVERY_WAY
def test_one_parameter_at_two_positions(way: Way, tmp_path: Path) -> None:
    on_disk = {"memory": "1GiB", "disk": tmp_path, "keep": {"w": "disk", "b": "disk"}}
    options = on_disk if way.budget == "tight" else SPARE
    pair = pair_of(way, SameTwice, [(randn(3, 32),)], tmp_path, options=options)
    pair.train(2)
    pair.check()
    if way.entry == "compile" and way.budget == "tight":
        net = pair.ours.net
        assert net.code.count("elixir.gather") == len(net.plan.layout.chunks)
        assert net.backward_module.code.count("elixir.reduce") == len(net.plan.layout.chunks)


# -- norms and scalers -----------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@EVERY_WAY
def test_clipping(way: Way, norm: float, tmp_path: Path) -> None:
    pair = pair_of(way, mlp, [(randn(4, 32),)], tmp_path, sgd)
    for _ in range(2):
        pair.backward()
        pair.do(
            lambda side: nn.utils.clip_grad_norm_(
                side.net.parameters(), 0.1, norm, error_if_nonfinite=True
            )
        )
        pair.do(lambda side: side.optimizer.step())
        pair.check()
        pair.do(lambda side: side.optimizer.zero_grad())


@EVERY_WAY
def test_a_norm_that_is_not_finite(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, mlp, [(randn(4, 32),)], tmp_path)
    pair.backward(lambda side, batch: side.net(*batch).sum() * float("inf"))
    for side in pair.sides:
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(side.net.parameters(), 0.1, error_if_nonfinite=True)
    pair.do(lambda side: side.optimizer.zero_grad())
    pair.train(1)
    pair.check()


@EVERY_WAY
def test_a_scaler_skips_what_is_not_finite(way: Way, tmp_path: Path) -> None:
    """Weights and states stay, the scale halves; then it goes on."""
    pair = pair_of(way, mlp, [(randn(4, 32),)], tmp_path, decayed)
    scalers = {id(side): torch.amp.GradScaler("cpu", init_scale=64.0) for side in pair.sides}

    def step(side: Side, factor: float) -> tuple[Tensor, float]:
        scaler = scalers[id(side)]
        loss = side.net(randn(4, 32)).square().mean() * factor
        scaler.scale(loss).backward()
        scaler.unscale_(side.optimizer)
        scaler.step(side.optimizer)
        scaler.update()
        side.optimizer.zero_grad()
        return loss.detach(), scaler.get_scale()

    pair.do(lambda side: step(side, 1.0))
    before = {name: p.detach().clone() for name, p in pair.ours.model.named_parameters()}
    _, scale = pair.do(lambda side: step(side, float("inf")))
    assert scale == 32.0
    same(before, {name: p.detach() for name, p in pair.ours.model.named_parameters()})
    pair.do(lambda side: step(side, 1.0))
    pair.check()
