"""Between two steps a parameter can be used as any other, wherever its value lives.

Each use runs on a plain model and on its twin compiled under the smallest budget with a disk,
and gives the same bits; the training that follows does too.
"""

import copy
import io
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Batch, sgd_momentum
from pairs import Pair, Side, tight
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

THREADS = 1


class Net(nn.Module):
    """Tied, frozen and shared weights, buffers, and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 32}
        self.fc1, self.fc2 = nn.Linear(32, 48), nn.Linear(48, 32)
        self.norm = nn.LayerNorm(32)
        self.head, self.tail = nn.Linear(32, 40, bias=False), nn.Linear(32, 40, bias=False)
        self.tail.weight = self.head.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.register_buffer("scale", torch.full((32,), 0.5))

    def encode(self, x: Tensor) -> Tensor:
        return self.fc1(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.fc2(self.encode(x)) + self.frozen(x) * self.scale)
        return self.head(h) + self.tail(x)


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 32, generator=generator),) for _ in range(count)]


BATCHES = batches(8)
X = BATCHES[0][0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(Net, BATCHES, tight(Net, BATCHES[0], tmp_path_factory.mktemp("disk")))


@pytest.fixture
def shared(pair: Pair) -> Pair:
    """The one pair, after two steps of training."""
    pair.restart()
    pair.train(2)
    assert set(pair.away()) == {name for name, _ in pair.plain.model.named_parameters()}
    return pair


def reload(saved: Any) -> Any:
    stream = io.BytesIO()
    torch.save(saved, stream)
    return torch.load(io.BytesIO(stream.getvalue()))


def weights(side: Side) -> list[nn.Parameter]:
    return list(side.net.parameters())


class Scaled(torch.autograd.Function):
    """A user's own autograd function that keeps a parameter for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def gradients(side: Side, loss: Tensor) -> list[Tensor | None]:
    found = torch.autograd.grad(loss, [p for p in weights(side) if p.requires_grad],
                                allow_unused=True)  # fmt: skip
    return [None if one is None else one.clone() for one in found]


READS: dict[str, Callable[[Side], Any]] = {
    "norm": lambda s: [p.norm() for p in weights(s)],
    "foreach norm": lambda s: torch._foreach_norm([p.detach() for p in weights(s)]),
    "numel": lambda s: sum(p.numel() for p in weights(s)),
    "shapes": lambda s: [(p.shape, p.stride(), p.dtype, p.device, p.ndim) for p in weights(s)],
    "flags": lambda s: [(p.requires_grad, p.is_leaf, p.grad is None) for p in weights(s)],
    "printed": lambda s: repr(s.net.fc1.bias) + str(s.model) + f"{s.net.norm.weight[0]:.3f}",
    "clone": lambda s: [p.clone() for p in weights(s)],
    "detach": lambda s: [p.detach() for p in weights(s)],
    "data": lambda s: [p.data for p in weights(s)],
    "deepcopy": lambda s: copy.deepcopy(s.net.fc1.weight),
    "deepcopy of the model": lambda s: copy.deepcopy(s.net)(X),
    "deepcopy of a part": lambda s: copy.deepcopy(s.net.fc1)(X),
    "saved weights": lambda s: reload(s.net.state_dict()),
    "saved parameter": lambda s: reload(s.net.fc1.weight),
    "saved optimizer": lambda s: reload(s.optimizer.state_dict()),
    "vector": lambda s: nn.utils.parameters_to_vector(s.net.parameters()),
    "numpy": lambda s: torch.from_numpy(np.array(s.net.fc1.weight.detach().numpy())),
    "tolist": lambda s: (s.net.fc1.bias.tolist(), s.net.fc1.bias[3].item(), len(s.net.fc1.bias)),
    "cast": lambda s: [s.net.fc1.weight.double(), s.net.fc1.weight.to(torch.bfloat16)],
    "compared": lambda s: (s.net.fc1.weight > 0, torch.equal(s.net.fc1.bias, s.net.fc2.bias)),
    "views": lambda s: [s.net.fc1.weight.t()[1:3], s.net.fc1.weight.view(-1)[5],
                        *s.net.fc1.weight.chunk(2), s.net.fc1.weight.unbind(0)[1]],
    "iterated": lambda s: sum(float(row.detach().sum()) for row in s.net.fc1.weight),
    "as tensor": lambda s: [torch.as_tensor(s.net.fc1.bias), s.net.fc1.bias.detach().cpu()],
    "new parameter": lambda s: nn.Parameter(s.net.fc1.weight.data),
    "stacked": lambda s: torch.stack([p.detach().abs().mean() for p in weights(s)]),
    "in a dict": lambda s: len(dict.fromkeys([*weights(s), *s.model.parameters()], 1)),
    "outside": lambda s: functional.linear(X, s.net.fc1.weight, s.net.fc1.bias),
    "encode": lambda s: s.net.encode(X),
    "a part": lambda s: s.net.norm(s.net.fc2(s.net.fc1(X))),
    "own forward": lambda s: s.model(X),
    "own forward without gradients": lambda s: torch.no_grad()(s.model)(X),
    "inference": lambda s: torch.inference_mode()(s.model)(X).clone(),
    "gradient of a penalty": lambda s: gradients(s, sum(p.pow(2).sum() for p in weights(s))),
    "gradient of own forward": lambda s: gradients(s, s.model(X).square().mean()),
    "gradient through the call": lambda s: gradients(s, s.net(X).square().mean()),
    "checkpointed": lambda s: gradients(
        s, checkpoint(s.net.fc1, X.clone().requires_grad_(), use_reentrant=False).sum()
    ),
    "own function": lambda s: gradients(s, Scaled.apply(X, s.net.fc1.weight).sum()),
    "functional call": lambda s: torch.func.functional_call(
        s.model, {"fc1.weight": torch.ones(48, 32)}, (X,)
    ),
    "func grad": lambda s: torch.func.grad(lambda w: functional.linear(X, w).sum())(
        s.net.fc1.weight.detach()
    ),
    "averaged": lambda s: swa_utils.AveragedModel(s.net)(X),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_reads(name: str, shared: Pair) -> None:
    shared.do(READS[name])
    shared.train()
    shared.check()


@torch.no_grad()
def halve(side: Side) -> None:
    for p in weights(side):
        p.mul_(0.5)


@torch.no_grad()
def overwrite(side: Side) -> None:
    fc1, fc2 = side.net.fc1, side.net.fc2
    fc1.weight.copy_(fc2.weight.t())
    fc1.bias.zero_()
    fc1.bias[3:5] = 2.0
    fc2.weight[0].add_(1)
    fc2.weight.view(-1)[7] = -1.0
    fc2.bias += torch.ones(32)
    nn.init.normal_(side.net.norm.weight)
    side.net.norm.bias.fill_(0.25)
    torch._foreach_mul_([fc1.weight, fc2.weight], 0.9)


def edit_data(side: Side) -> None:
    fc1 = side.net.fc1
    fc1.weight.data.mul_(1.5)
    fc1.weight.data[0] = 1.0
    fc1.bias.data = fc1.bias.data * 2
    side.net.frozen.weight.data = torch.ones(32, 32)
    side.net.norm.weight.data.clamp_(-0.5, 0.5)
    side.net.head.weight.detach().sub_(0.1)
    assert side.net.tail.weight is side.net.head.weight


def average(side: Side) -> list[Tensor]:
    """Exponential average by hand, swapped in for an evaluation and out again."""
    averages = [p.detach().clone() for p in weights(side)]
    side.step(BATCHES[5])
    with torch.no_grad():
        for mean, p in zip(averages, weights(side), strict=True):
            mean.lerp_(p, 0.1)
        kept = [p.detach().clone() for p in weights(side)]
        for mean, p in zip(averages, weights(side), strict=True):
            p.copy_(mean)
        seen = [side.net(X)]
        for saved, p in zip(kept, weights(side), strict=True):
            p.copy_(saved)
    return [*averages, *seen, side.net(X)]


def averaged_model(side: Side) -> list[Tensor]:
    average = swa_utils.AveragedModel(
        side.net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for batch in BATCHES[:3]:
        side.step(batch)
        average.update_parameters(side.net)
    return [average(X), *average.parameters()]


def stochastic_averages(side: Side) -> list[Tensor]:
    average = swa_utils.AveragedModel(side.net)
    for batch in BATCHES[:2]:
        side.step(batch)
        average.update_parameters(side.net)
    swa_utils.update_bn([X], average)
    return list(average.parameters())


def load_in_place(side: Side) -> None:
    state = {name: value * 0.5 for name, value in side.net.state_dict().items()}
    missing = side.net.load_state_dict(state)
    assert not missing.missing_keys and not missing.unexpected_keys
    side.net.load_state_dict({"fc1.bias": torch.ones(48)}, strict=False)
    side.net.load_state_dict(state, assign=False)


def scatter(side: Side) -> None:
    vector = nn.utils.parameters_to_vector(side.net.parameters())
    nn.utils.vector_to_parameters(vector * 2, side.net.parameters())


def swap(side: Side) -> None:
    """Weights of another model of the kind, by zip."""
    torch.manual_seed(3)
    with torch.no_grad():
        for p, other in zip(side.net.parameters(), Net().parameters(), strict=True):
            p.copy_(other)


EDITS: dict[str, Callable[[Side], Any]] = {
    "halve": halve,
    "overwrite": overwrite,
    "data": edit_data,
    "average": average,
    "averaged model": averaged_model,
    "stochastic averages": stochastic_averages,
    "load": load_in_place,
    "vector": scatter,
    "copy from another": swap,
    "initialise": lambda s: s.model.apply(
        lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None
    ) and None,
    "freeze": lambda s: s.net.fc2.requires_grad_(False) and None,
    "thaw": lambda s: s.net.fc2.requires_grad_(True) and None,
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_edits(name: str, shared: Pair) -> None:
    shared.do(EDITS[name])
    shared.check()
    shared.train(2)
    shared.check()
    assert len(shared.away()) == len(weights(shared.ours))


def with_penalty(side: Side, batch: Batch) -> Tensor:
    return side.net(*batch).square().mean() + 1e-2 * side.net.fc1.weight.pow(2).sum()


def on_the_outside(side: Side, batch: Batch) -> Tensor:
    """A head used only outside of forward, and weights used on both sides."""
    h = side.net(*batch)[:, :32] @ side.net.frozen.weight
    return functional.linear(h, side.net.fc1.weight, side.net.fc1.bias).square().mean()


def twice(side: Side, batch: Batch) -> Tensor:
    (x,) = batch
    return (side.net(x) - side.net(x[:2]).mean()).square().mean()


def through_a_method(side: Side, batch: Batch) -> Tensor:
    return side.net(*batch).square().mean() + side.net.encode(*batch).mean()


def own_forward(side: Side, batch: Batch) -> Tensor:
    return side.model(*batch).square().mean()


def half_own_forward(side: Side, batch: Batch) -> Tensor:
    return (side.net(*batch) + side.model(*batch)).square().mean()


def reentrant(side: Side, batch: Batch) -> Tensor:
    x = batch[0].clone().requires_grad_()
    return checkpoint(side.model, x, use_reentrant=True).square().mean()


def distilled(side: Side, batch: Batch) -> Tensor:
    """A frozen copy of the model as it was, beside it in one loss."""
    if not hasattr(side, "teacher"):
        side.teacher = copy.deepcopy(side.net).requires_grad_(False)
    target = side.teacher(*batch).softmax(-1)
    return functional.kl_div(side.net(*batch).log_softmax(-1), target, reduction="batchmean")


LOSSES = [with_penalty, on_the_outside, through_a_method, own_forward, reentrant, distilled]
# A weight used twice in each of two calls gets four gradients: added up in pairs, not in a row.
PAIRWISE = [twice, half_own_forward]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_losses(loss: Callable[[Side, Batch], Tensor], shared: Pair) -> None:
    shared.train(2, loss)
    shared.backward(loss)
    shared.check()
    shared.backward(loss)  # on top: the gradients of two uses are then added up one by one
    close_gradients(shared)


@pytest.mark.parametrize("loss", PAIRWISE, ids=lambda loss: loss.__name__)
def test_losses_of_two_calls(loss: Callable[[Side, Batch], Tensor], shared: Pair) -> None:
    shared.backward(loss)
    close_gradients(shared)
    shared.do(lambda side: [p.grad for p in weights(side) if p is not side.net.head.weight])


def close_gradients(pair: Pair) -> None:
    for one, other in zip(weights(pair.plain), weights(pair.ours), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad.clone())


def scale_one(side: Side) -> None:
    side.net.fc1.weight.grad.mul_(0.5)
    side.net.fc1.bias.grad *= 3
    side.net.fc2.weight.grad[0] = 0.0
    side.net.fc2.bias.grad.data.add_(1)


def set_gradients(side: Side) -> None:
    side.net.fc1.weight.grad = torch.ones(48, 32)
    side.net.fc1.bias.grad = None
    side.net.fc2.weight.grad = side.net.fc2.weight.grad * 2
    side.net.norm.bias.grad = -side.net.norm.weight.grad


def keep_gradients(side: Side) -> list[Tensor]:
    """The gradient objects of this step are read after the next one."""
    kept = [p.grad for p in weights(side) if p.grad is not None]
    values = [one.clone() for one in kept]
    side.optimizer.zero_grad()
    side.net(BATCHES[3][0]).square().mean().backward()
    for one, value in zip(kept, values, strict=True):
        assert torch.equal(one, value)
    return values


def clip(norm_type: float, **options: Any) -> Callable[[Side], Tensor]:
    return lambda s: nn.utils.clip_grad_norm_(s.net.parameters(), 0.01, norm_type, **options)


def accumulate_by_hand(side: Side) -> None:
    total = [torch.zeros_like(p) for p in weights(side)]
    for one, p in zip(total, weights(side), strict=True):
        if p.grad is not None:
            one.add_(p.grad)
            p.grad.copy_(one / 2)


GRADIENTS: dict[str, Callable[[Side], Any]] = {
    "read": lambda s: [p.grad.norm() for p in weights(s) if p.grad is not None],
    "scale": scale_one,
    "set": set_gradients,
    "keep": keep_gradients,
    "sum": accumulate_by_hand,
    "flags": lambda s: [
        (p.grad.shape, p.grad.dtype, p.grad.requires_grad, p.grad.is_leaf)
        for p in weights(s) if p.grad is not None
    ],
    "clip": clip(2.0),
    "clip inf": clip(float("inf")),
    "clip 1": clip(1.0, error_if_nonfinite=True),
    "clip 0.5": clip(0.5, foreach=False),
    "clip one by one": clip(2.0, foreach=False),
    "clip value": lambda s: nn.utils.clip_grad_value_(s.net.parameters(), 1e-3),
    "total norm": lambda s: nn.utils.get_total_norm(
        [p.grad for p in weights(s) if p.grad is not None]
    ),
    "zero in place": lambda s: s.optimizer.zero_grad(set_to_none=False),
    "zero the model": lambda s: s.net.zero_grad(),
    "zero in place by the model": lambda s: s.net.zero_grad(set_to_none=False),
    "again": lambda s: s.net(BATCHES[4][0]).square().mean().backward(),
    "noise": lambda s: [p.grad.add_(torch.randn_like(p.grad))
                        for p in weights(s) if p.grad is not None],
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, shared: Pair) -> None:
    shared.backward()
    shared.do(GRADIENTS[name])
    shared.check()
    shared.do(lambda side: side.optimizer.step())
    shared.check()
    shared.do(lambda side: side.optimizer.zero_grad())
    shared.train()
    shared.check()


def test_clipping_by_the_compiled_model(shared: Pair) -> None:
    shared.backward()
    stock = nn.utils.clip_grad_norm_(shared.plain.net.parameters(), 0.1)
    assert torch.equal(stock, shared.ours.net.clip_grad_norm_(0.1))
    shared.check()
    shared.do(lambda side: side.optimizer.step())
    shared.do(lambda side: side.optimizer.zero_grad())


def halve_gradient(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def test_hooks(shared: Pair) -> None:
    """Each kind, added after steps were taken, and removed again."""

    def add(side: Side) -> list[Any]:
        net, log = side.net, side.log
        return [
            net.fc1.weight.register_hook(lambda grad: grad * 2),
            net.fc1.weight.register_hook(lambda grad: log.append(("tensor", grad.sum()))),
            net.fc2.weight.register_post_accumulate_grad_hook(
                lambda p: log.append(("accumulated", p.grad.norm(), p.detach().norm()))
            ),
            net.fc2.bias.register_post_accumulate_grad_hook(halve_gradient),
            side.optimizer.register_step_pre_hook(
                lambda *_: log.append(("before", net.fc1.weight.grad.sum()))
            ),
            side.optimizer.register_step_post_hook(
                lambda *_: log.append(
                    ("after", net.fc1.weight.grad.sum(), net.fc1.weight.sum().detach())
                )
            ),
        ]

    handles = [add(side) for side in shared.sides]
    shared.train(3)
    for side in shared.sides:  # a step accumulates at its end: kinds interleave differently
        side.log.sort(key=lambda entry: entry[0])
    shared.check()
    assert len(shared.plain.log) == 4 * 3
    for handle in [one for several in handles for one in several]:
        handle.remove()
    shared.train()
    shared.check()
    assert len(shared.plain.log) == 4 * 3


def test_an_update_for_each_parameter_in_its_hook(tmp_path: Path) -> None:
    """Plain SGD as each gradient arrives; none is left afterwards."""

    def no_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0)

    pair = Pair(Net, BATCHES, tight(Net, BATCHES[0], tmp_path), no_optimizer)

    @torch.no_grad()
    def update(p: nn.Parameter) -> None:
        p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for side in pair.sides:
        for p in weights(side):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        pair.backward()
        pair.check()
    assert all(p.grad is None for p in weights(pair.ours))


def test_scaled_losses(shared: Pair) -> None:
    """GradScaler: a step that is skipped for an infinite gradient, and ones that are not."""
    scalers = {id(side): torch.amp.GradScaler("cpu", init_scale=1024.0) for side in shared.sides}

    def step(side: Side, spoil: bool) -> Tensor:
        scaler = scalers[id(side)]
        loss = side.net(X).square().mean()
        scaler.scale(loss).backward()
        if spoil:
            side.net.fc1.weight.grad[0, 0] = float("inf")
        scaler.unscale_(side.optimizer)
        norm = nn.utils.clip_grad_norm_(side.net.parameters(), 1.0)
        scaler.step(side.optimizer)
        scaler.update()
        side.optimizer.zero_grad()
        return torch.stack([norm, torch.tensor(scaler.get_scale())])

    for spoil in (False, True, False):
        shared.do(lambda side, spoil=spoil: step(side, spoil))
        shared.check()


def test_a_closure(shared: Pair) -> None:
    def closure(side: Side) -> Callable[[], Tensor]:
        def again() -> Tensor:
            side.optimizer.zero_grad()
            loss = side.net(X).square().mean()
            loss.backward()
            return loss

        return again

    shared.do(lambda side: side.optimizer.step(closure(side)).detach())
    shared.check()
    shared.do(lambda side: side.optimizer.zero_grad())


def test_a_group_added_later(tmp_path: Path) -> None:
    def without_head(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters[:-1], lr=1e-2)

    pair = Pair(Net, BATCHES, tight(Net, BATCHES[0], tmp_path), without_head)
    pair.train(2)
    pair.check()
    pair.do(lambda side: side.optimizer.add_param_group({"params": weights(side)[6], "lr": 1e-3}))
    pair.train(2)
    pair.check()


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "swa": lambda o: swa_utils.SWALR(o, swa_lr=0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, shared: Pair) -> None:
    saved = [copy.deepcopy(side.optimizer.state_dict()["param_groups"]) for side in shared.sides]
    schedulers = [SCHEDULERS[name](side.optimizer) for side in shared.sides]
    for _ in range(3):
        shared.train()
        for scheduler in schedulers:
            scheduler.step()
    shared.check()
    for side, groups in zip(shared.sides, saved, strict=True):
        for group, values in zip(side.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})


def test_an_optimizer_made_after_compile_and_another_one(tmp_path: Path) -> None:
    options = tight(Net, BATCHES[0], tmp_path)
    pair = Pair(Net, BATCHES, options, bind=False)
    pair.ours.net.bind(pair.ours.optimizer)
    pair.train(2)
    pair.check()
    for side in pair.sides:
        side.optimizer = sgd_momentum([p for p in weights(side) if p.requires_grad])
    pair.ours.net.bind(pair.ours.optimizer)
    pair.train(2)
    pair.check()


def test_an_unbound_optimizer_works_with_one_warning(tmp_path: Path) -> None:
    options = tight(Net, BATCHES[0], tmp_path, "adamw")
    pair = Pair(Net, BATCHES, options, bind=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.train(3)
    assert sum("bind" in str(one.message) for one in caught) == 1
    pair.check()
    assert pair.away()


RISKY = """
import copy, gc, pickle, sys, warnings
import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
import elixir_fx
from elixir_fx import AwayParameter

warnings.simplefilter("ignore")
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
x = torch.ones(2, 16)
net = elixir_fx.compile(model, example_inputs=(x,), memory="1GiB", disk=sys.argv[1],
                        keep={"0": "disk", "2": "disk"}, kernels="eager")
p, q = model[0].weight, model[2].weight
assert type(p) is AwayParameter
raw = torch._C.DisableTorchFunctionSubclass
before = [one.detach().clone() for one in model.parameters()]
uses = {
    "address": lambda: p.data_ptr(),
    "storage": lambda: p.untyped_storage().nbytes(),
    "typed storage": lambda: p.storage(),
    "set": lambda: p.set_(torch.ones(64, 16)),
    "resize": lambda: p.resize_(3),
    "swap": lambda: torch.utils.swap_tensors(p, nn.Parameter(torch.ones(64, 16))),
    "array": lambda: np.asarray(p.detach()) + np.array(q.detach()),
    "array of a leaf": lambda: np.asarray(p),
    "memoryview": lambda: memoryview(p),
    "dlpack": lambda: torch.from_dlpack(p.detach()),
    "frombuffer": lambda: torch.frombuffer(p.detach().numpy(), dtype=torch.float32),
    "shared": lambda: p.share_memory_(),
    "pinned": lambda: p.is_pinned(),
    "subclass": lambda: p.as_subclass(torch.Tensor).sum(),
    "parameter": lambda: nn.Parameter(p),
    "jvp": lambda: torch.func.jvp(lambda w: (w * w).sum(), (p,), (torch.ones(64, 16),)),
    "dual": lambda: dual(),
    "compiled part": lambda: torch.compile(model[0], backend="eager")(x),
    "traced": lambda: torch.jit.trace(model, (x,))(x),
    "scripted": lambda: torch.jit.script(model)(x),
    "exported": lambda: torch.export.export(model, (x,)),
    "symbolic": lambda: torch.fx.symbolic_trace(model)(x),
    "quantised": lambda: torch.ao.quantization.quantize_dynamic(model, {nn.Linear})(x),
    "weight norm": lambda: parametrizations.weight_norm(model[0]),
    "pruned": lambda: prune.l1_unstructured(copy.deepcopy(model)[0], "weight", 0.5),
    "pickled": lambda: pickle.loads(pickle.dumps(p)).sum(),
    "out": lambda: torch.add(q.t(), 1, out=p.data),
    "out itself": lambda: torch.mul(p.data, 0.5, out=p.data),
    "sparse": lambda: p.to_sparse().sum(),
    "complex": lambda: torch.view_as_complex(p.detach().view(-1, 2)),
    "as strided": lambda: p.as_strided((3, 3), (1, 2)).sum(),
    "names": lambda: p.refine_names("a", "b"),
    "functional": lambda: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    "hessian": lambda: torch.autograd.functional.hessian(lambda w: (w**3).sum(), model[2].bias),
    "second order": lambda: torch.autograd.grad((p**3).sum(), p, create_graph=True)[0].sum(),
    "raw repr": lambda: object.__repr__(p),
    "stacked": lambda: torch.stack([p, q.t()]).sum(),
    "thread": lambda: in_thread(),
    "equal": lambda: (p == q.t()).sum() + (p in [p]),
    "sort": lambda: torch.sort(p).values,
    "index": lambda: p[torch.tensor([0, 3])][:, None],
    "put": lambda: torch.no_grad()(p.index_put_)((torch.tensor([1]),), torch.tensor(4.0)),
    "masked": lambda: torch.no_grad()(p.masked_fill_)(p > 1, 0.0),
    "mode": lambda: torch.inference_mode()(lambda: p * 2)().sum(),
    "deleted": lambda: delattr(copy.deepcopy(model)[0], "weight"),
    "closed": lambda: net._session.engine.close(),
    "after": lambda: p.sum(),
}

def dual():
    import torch.autograd.forward_ad as forward
    with forward.dual_level():
        return forward.make_dual(p, torch.ones(64, 16)).sum()

def in_thread():
    import threading
    found = []
    thread = threading.Thread(target=lambda: found.append(p.sum()))
    thread.start(); thread.join()
    assert torch.equal(found[0], p.sum())

for name, use in uses.items():
    try:
        result = use()
        kind = "worked"
    except Exception as error:
        kind = type(error).__name__
    print(name, ":", kind, flush=True)
    if name == "as strided":
        same = all(torch.equal(a, b.detach()) for a, b in zip(before[1:], list(model.parameters())[1:]))
        assert same, "a use changed a parameter that it did not write"
"""  # noqa: E501


def test_no_use_crashes_the_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RISKY, str(tmp_path)], capture_output=True, text=True, check=False
    )
    lines = dict(line.split(" : ") for line in done.stdout.splitlines() if " : " in line)
    assert done.returncode == 0, (
        f"{done.returncode} after {list(lines)[-1:]}: {done.stderr[-2000:]}"
    )
    worked = [name for name, kind in lines.items() if kind == "worked"]
    assert len(lines) == RISKY.count('": lambda: ') and len(worked) > 25
    for name in ("address", "storage", "shared", "after"):
        assert lines[name] in ("ElixirError", "TierError"), name
