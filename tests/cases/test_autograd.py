"""Autograd inside forward: functions of the user's, checkpointing, regions without gradients,
autocast; and in the loop: gradients of inputs, retained graphs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from case_models import WHEN_TIGHT, Way, gathered_blocks, in_turn, mlp, pair_of, randn
from harness import Batch
from pairs import Side
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elixir_fx

THREADS = 1
X = randn(4, 32)


class Scaled(torch.autograd.Function):
    """x @ w, with a gradient of its own making, a number, and an output without gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        y = x @ weight.t() * scale
        chosen = y.argmax(-1)
        ctx.mark_non_differentiable(chosen)
        return y, chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight, gradient.t() @ x * ctx.scale, None


class Apart(torch.autograd.Function):
    """With setup_context, and a gradient for one input only."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient * weight * 3, None


class Straight(torch.autograd.Function):
    """Rounded on the way there, unchanged on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


class Layers(nn.Module):
    """Three layers, and `use` between the first and the last."""

    def __init__(self, use: Callable[["Layers", Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.first, self.middle, self.last = nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 32)
        self.dropout = nn.Dropout(0.3)

    def block(self, h: Tensor) -> Tensor:
        return self.dropout(self.middle(h).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self, self.first(x)).to(x.dtype))


def own_functions(model: Layers, h: Tensor) -> Tensor:
    y, chosen = Scaled.apply(h, model.middle.weight, 0.5)
    return Straight.apply(Apart.apply(y, model.middle.bias) * 4) + chosen[:, None]


def without_gradient(model: Layers, h: Tensor) -> Tensor:
    with torch.no_grad():
        aside = model.middle(h).relu()
    with torch.set_grad_enabled(False):
        other = h.mean(0)
    return h * aside + other + model.middle(h.detach())


def inference_inside(model: Layers, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = model.middle(h).abs().amax()
        with torch.enable_grad():
            again = model.middle(h)
    return again / scale + h


def nested_checkpoints(model: Layers, h: Tensor) -> Tensor:
    def outer(v: Tensor) -> Tensor:
        return checkpoint(model.block, v, use_reentrant=False) + v

    return checkpoint(outer, h, use_reentrant=False)


def in_bfloat16(model: Layers, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model.middle(h)
        with torch.autocast("cpu", enabled=False):
            z = model.middle(y.float())
        return y + z


@torch.autocast("cpu", dtype=torch.bfloat16)
def decorated(model: Layers, h: Tensor) -> Tensor:
    return checkpoint(model.block, h, use_reentrant=False)


def kept_activation(model: Layers, h: Tensor) -> Tensor:
    h = model.middle(h)
    h.register_hook(lambda gradient: gradient * 2)
    return h


INSIDE: dict[str, Callable[[Layers, Tensor], Tensor]] = {
    "own functions": own_functions,
    "without gradient": without_gradient,
    "with gradient again": inference_inside,
    "checkpoint": lambda m, h: checkpoint(m.block, h, use_reentrant=False),
    "checkpoint, reentrant": lambda m, h: checkpoint(m.block, h, use_reentrant=True),
    "checkpoint, keywords": lambda m, h: checkpoint(
        lambda v, *, s: m.block(v) * s, h, s=2, use_reentrant=False
    ),
    "checkpoint, random state dropped": lambda m, h: checkpoint(
        m.middle, h, use_reentrant=False, preserve_rng_state=False
    ),
    "checkpoint twice": lambda m, h: (
        checkpoint(m.block, h, use_reentrant=False)
        + checkpoint(m.block, h * 2, use_reentrant=False)
    ),
    "checkpoint in a checkpoint": nested_checkpoints,
    "autocast": in_bfloat16,
    "autocast and checkpoint": decorated,
    "vmap": lambda m, h: torch.vmap(m.middle)(h),
    "hook on an activation": kept_activation,
}


@pytest.mark.parametrize(("way", "name"), in_turn(INSIDE))
def test_inside(way: Way, name: str, tmp_path: Path) -> None:
    batches: list[Batch] = [(X,), (randn(4, 32, seed=1),)]
    pair = pair_of(way, lambda: Layers(INSIDE[name]), batches, tmp_path, room=0.3)
    pair.train(3)
    pair.backward()
    pair.backward()
    pair.check()
    if way.entry == "compile":
        assert not gathered_blocks(pair)


def forces(model: Layers, h: Tensor) -> Tensor:
    """A gradient as a part of the result, with a graph of its own."""
    (gradient,) = torch.autograd.grad(model.middle(h).sin().sum(), h, create_graph=True)
    return h + gradient


def test_gradients_in_forward_are_refused_with_the_line() -> None:
    net = exact.compile(Layers(forces), memory="1GiB")
    with pytest.raises(elixir_fx.CaptureError, match=r"test_autograd\.py:\d+"):
        net(X)


# -- in the loop -------------------------------------------------------------------------------


def halves(side: Side) -> list[Any]:
    """The graph is kept and used for each part of the loss."""
    y = side.net(X)
    parts = [part.square().mean() for part in y.chunk(2)]
    parts[0].backward(retain_graph=True)
    first = side.model[0].weight.grad.clone()
    parts[1].backward()
    return [first, side.model[0].weight.grad]


def for_some(side: Side) -> list[Any]:
    """backward(inputs=...): the others stay without."""
    some = [side.model[0].weight, side.model[2].bias]
    side.net(X).square().mean().backward(inputs=some)
    return [p.grad for p in side.model.parameters()]


def penalised(side: Side) -> list[Any]:
    """A gradient of the inputs first, without a second derivative; then the backward."""
    x = X.clone().requires_grad_()
    loss = side.net(x).square().mean()
    (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
    (loss * slope.norm()).backward()
    return [slope, x.grad, side.model[0].weight.grad]


def several_at_once(side: Side) -> list[Any]:
    losses = [side.net(X).mean(), side.net(2 * X).square().mean()]
    torch.autograd.backward(losses)
    return [p.grad for p in side.model.parameters()]


def saved_elsewhere(side: Side) -> list[Any]:
    with torch.autograd.graph.save_on_cpu():
        loss = side.net(X).square().mean()
    loss.backward()
    return [side.model[0].weight.grad]


def packed(side: Side) -> list[Any]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = side.net(X).square().mean()
    loss.backward()
    return [side.model[0].weight.grad]


def anomalies(side: Side) -> list[Any]:
    with torch.autograd.set_detect_anomaly(True):
        loss = side.net(X).square().mean()
        loss.backward()
    return [side.model[0].weight.grad]


def zeros_kept(side: Side) -> list[Any]:
    side.net(X).square().mean().backward()
    kept = side.model[0].weight.grad
    side.optimizer.zero_grad(set_to_none=False)
    side.net(X).square().mean().backward()
    return [side.model[0].weight.grad, kept.shape]


def from_a_checkpoint(side: Side) -> list[Any]:
    """The whole call is checkpointed by the caller."""
    x = X.clone().requires_grad_()
    checkpoint(side.net, x, use_reentrant=False).square().mean().backward()
    return [x.grad, side.model[0].weight.grad]


LOOPS = [halves, for_some, penalised, several_at_once, saved_elsewhere, packed, anomalies,
         zeros_kept, from_a_checkpoint]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("use", LOOPS, ids=lambda use: use.__name__)
@WHEN_TIGHT
def test_in_the_loop(way: Way, use: Callable[[Side], Any], tmp_path: Path) -> None:
    pair = pair_of(way, mlp, [(X,)], tmp_path, room=0.5)
    pair.train(1)
    pair.do(use)
    pair.finish()


@WHEN_TIGHT
def test_second_derivatives_are_refused(way: Way, tmp_path: Path) -> None:
    """At once and in words; a step goes on after it."""
    pair = pair_of(way, mlp, [(X,)], tmp_path, room=0.5)
    pair.train(1)
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"double backward|create_graph|twice"):
        (slope,) = torch.autograd.grad(pair.ours.net(x).sin().sum(), x, create_graph=True)
        slope.square().sum().backward()
    pair.ours.optimizer.zero_grad()
    pair.train(2)
    pair.check()


def test_a_graph_that_was_freed_is_an_error() -> None:
    net = exact.compile(mlp(), memory="1GiB")
    loss = net(X).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    functional.mse_loss(net(X), X).backward()
