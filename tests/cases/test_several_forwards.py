"""Several forwards before a backward, several backwards of one forward, and models that train
each other."""

import copy
from pathlib import Path
from typing import Any

import torch
from case_models import EVERY_WAY, Way, mlp, pair_of, randn
from harness import Batch
from pairs import Side, same
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

THREADS = 1


@EVERY_WAY
def test_two_forwards_in_one_loss(way: Way, tmp_path: Path) -> None:
    """Different batch sizes; a forward without a backward; an evaluation in between."""
    batches: list[Batch] = [(randn(6, 32),), (randn(6, 32, seed=1),)]
    pair = pair_of(way, mlp, batches, tmp_path, room=0.5)
    small = randn(2, 32)

    def together(side: Side, batch: Batch) -> Tensor:
        return side.net(*batch).square().mean() + side.net(small).cos().mean()

    def interrupted(side: Side, batch: Batch) -> Tensor:
        loss = side.net(*batch).square().mean()
        with torch.no_grad():
            side.net(small)
        side.net(small)  # never used
        return loss

    pair.train(2, together)
    pair.train(2, interrupted)
    pair.check()


@EVERY_WAY
def test_backwards_in_another_order(way: Way, tmp_path: Path) -> None:
    """Four forwards; their backwards come last to first, and one never."""
    pair = pair_of(way, mlp, [(randn(6, 32),)], tmp_path, room=1.0)

    def use(side: Side) -> None:
        losses = [side.net(randn(6, 32, seed=seed)).square().mean() for seed in range(4)]
        for index in (3, 0, 2):
            losses[index].backward()

    pair.do(use)
    pair.check()
    pair.do(lambda side: side.optimizer.step())
    pair.check()


@EVERY_WAY
def test_one_call_into_the_next(way: Way, tmp_path: Path) -> None:
    """The output of one call is the input of another: gradients go through both."""
    pair = pair_of(way, mlp, [(randn(6, 32),)], tmp_path, room=1.0)

    def loss(side: Side, batch: Batch) -> Tensor:
        return side.net(side.net(side.net(*batch)).tanh()).square().mean()

    pair.train(2, loss)
    pair.check()


@EVERY_WAY
def test_backward_twice(way: Way, tmp_path: Path) -> None:
    pair = pair_of(way, mlp, [(randn(4, 32),)], tmp_path)
    pair.train(3)

    def use(side: Side) -> list[Tensor]:
        loss = side.net(torch.ones(4, 32)).square().mean()
        loss.backward(retain_graph=True)
        once = side.model[0].weight.grad.clone()
        loss.backward()
        return [once, side.model[0].weight.grad]

    once, twice = pair.do(use)
    assert torch.equal(twice, 2 * once)
    pair.check()
    pair.do(lambda side: side.optimizer.zero_grad())

    def asked(side: Side) -> list[Any]:
        loss = side.net(torch.ones(4, 32)).square().mean()
        weights = list(side.net.parameters())
        first = [g.clone() for g in torch.autograd.grad(loss, weights, retain_graph=True)]
        second = torch.autograd.grad(loss, weights[1], retain_graph=True)[0].clone()
        before = [p.grad is None for p in weights]
        loss.backward()
        return [first, second, before]

    pair.do(asked)
    pair.check()


@EVERY_WAY
def test_a_plain_copy_beside_the_compiled_model(way: Way, tmp_path: Path) -> None:
    """A reference that is not compiled, in one loss with the one that is."""
    reference = mlp()
    pair = pair_of(way, mlp, [(randn(4, 32),)], tmp_path)
    before = copy.deepcopy(reference.state_dict())

    def loss(side: Side, batch: Batch) -> Tensor:
        target = reference(*batch).softmax(-1)
        return functional.kl_div(side.net(*batch).log_softmax(-1), target)

    pair.train(2, loss)
    pair.check()
    same(before, reference.state_dict())


class Scores(nn.Sequential):
    def __init__(self, *sizes: int) -> None:
        super().__init__(nn.Linear(*sizes[:2]), nn.LeakyReLU(0.2), nn.Linear(*sizes[1:]))


@EVERY_WAY
def test_two_models_that_train_each_other(way: Way, tmp_path: Path) -> None:
    """The order of DCGAN: D on real, D on fake.detach(), then G through D."""
    noise, real = randn(4, 16), randn(4, 32)
    generator = pair_of(way, lambda: Scores(16, 48, 32), [(noise,)], tmp_path)
    critic = pair_of(way, lambda: Scores(32, 48, 1), [(real,)], tmp_path, room=0.5)
    for _ in range(2):
        for g, d in zip(generator.sides, critic.sides, strict=True):
            torch.manual_seed(0)
            d.net.zero_grad()
            functional.softplus(-d.net(real)).mean().backward()
            fake = g.net(noise)
            functional.softplus(d.net(fake.detach())).mean().backward()
            d.optimizer.step()
            g.net.zero_grad()
            functional.softplus(-d.net(fake)).mean().backward()
            g.optimizer.step()
        generator.check()
        critic.check()


# -- checkpointing ---------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block that runs again in the backward, on one input or two."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.block = nn.Sequential(nn.Linear(32, 48), nn.Dropout(0.2), nn.Linear(48, 32))
        if frozen:
            self.first.requires_grad_(False)
            self.block[0].requires_grad_(False)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        y = checkpoint(self.block, self.first(x), use_reentrant=False)
        if other is not None:
            y = y + checkpoint(self.block, other, use_reentrant=False)
        return y


@EVERY_WAY
def test_checkpointing(way: Way, tmp_path: Path) -> None:
    """Frozen or not, one view or two; two micro-batches before the step."""
    x = randn(4, 32)
    for number, (frozen, inputs) in enumerate([(True, (x,)), (True, (x, x * 2)), (False, (x,)),
                                               (False, (x, x * 2))]):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        pair = pair_of(way, lambda frozen=frozen: Checkpointed(frozen), [inputs], folder)
        pair.backward()
        pair.backward()
        pair.check()
        if way.entry == "compile":
            assert not pair.ours.net._session.engine.cache.gathered
        pair.do(lambda side: side.optimizer.step())
        pair.check()
