"""Cases of /shared/CASES: what a training loop does, with memory to spare and under the
smallest budget with a disk. Each equals plain PyTorch bit for bit."""

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Batch, loss_of, sgd_momentum
from pairs import SPARE, Pair, Side, memory_needed, same, tight
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elixir_fx

THREADS = 1

BOTH = pytest.mark.parametrize("budget", ["tight", "spare"])
GENERATOR = torch.Generator().manual_seed(4)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def decayed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


def pair_of(
    budget: str,
    build: Callable[[], nn.Module],
    batches: list[Batch],
    folder: Path,
    make_optimizer: Any = decayed,
    room: float = 0.0,
) -> Pair:
    """`room`: how much more than the smallest budget, as a share, for bigger later graphs."""
    options = dict(SPARE)
    if budget == "tight":
        options = tight(build, batches[0], folder)
        options["memory"] += int(room * options["memory"])
    return Pair(build, batches, options, make_optimizer)


# -- frozen parameters, adapters, partly trainable groups ------------------------------------


class Adapted(nn.Module):
    """A frozen weight whose bias learns, beside a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.weight.requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


@BOTH
def test_a_frozen_weight_does_not_decay(budget: str, tmp_path: Path) -> None:
    def everything(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return decayed(parameters)

    pair = pair_of(budget, Adapted, [(randn(4, 8),)], tmp_path, everything)
    frozen = pair.ours.model.base.weight.detach().clone()
    flags = [p.requires_grad for p in pair.ours.net.parameters()]
    assert flags == [False, True, True, True]
    pair.train(3)
    pair.check()
    assert pair.ours.net.base.weight.grad is None
    same(frozen, pair.ours.net.base.weight.detach())


class Adapters(nn.Module):
    """Frozen blocks, an adapter of rank 2 after each."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(width, width).requires_grad_(False) for _ in range(blocks)
        )
        self.down = nn.ModuleList(nn.Linear(width, 2, bias=False) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(2, width, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = (block(x) + up(down(x))).tanh()
        return x


@BOTH
def test_every_adapter_of_a_stack_learns(budget: str, tmp_path: Path) -> None:
    pair = pair_of(budget, lambda: Adapters(6, 16), [(randn(3, 16),)], tmp_path)
    pair.backward()
    trained = [p for p in pair.ours.net.parameters() if p.requires_grad]
    assert len(trained) == 12 and all(p.grad is not None for p in trained)
    pair.check()


def test_a_frozen_model_pays_for_its_adapters_only(tmp_path: Path) -> None:
    """Gradient and optimizer memory follow what learns: 4 x Linear(1024, 1024) are frozen."""
    model = Adapters(4, 1024)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    memory = memory_needed(model, (randn(2, 1024),))
    net = elixir_fx.compile(
        model, optimizer, example_inputs=(randn(2, 1024),), memory=memory, disk=tmp_path
    )
    learning = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert net.plan is not None
    spent = net.plan.layout.disk_bytes - frozen
    assert spent <= 2 * (4 * learning)  # weights, gradients and two states, with padding
    for chunk in net.plan.layout.chunks:
        assert len({model.get_parameter(s.path).requires_grad for s in chunk.slices}) == 1
    assert "elixir.gather" in net.code
    loss_of(net(randn(2, 1024))).backward()
    optimizer.step()


@pytest.mark.parametrize("first", [True, False])
@BOTH
def test_a_frozen_layer_before_or_after(budget: str, first: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        layers = [nn.Linear(64, 64), nn.Linear(64, 64)]
        layers[0 if first else 1].requires_grad_(False)
        return nn.Sequential(*layers)

    pair = pair_of(budget, build, [(randn(2, 64),)], tmp_path)
    pair.train(2)
    pair.check()


def groups_of(order: list[bool]) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [{"params": parameters[:2] if first else parameters[2:]} for first in order], lr=1e-2
        )

    return make


@pytest.mark.parametrize("order", [[True, False], [False, True]])
def test_the_order_of_groups(order: list[bool], tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    pair = pair_of("tight", build, [(randn(2, 32),)], tmp_path, groups_of(order))
    pair.train(2)
    pair.check()


def test_two_equal_adapters_in_a_row_take_two_graphs(tmp_path: Path) -> None:
    pair = pair_of("tight", lambda: Adapters(2, 16), [(randn(3, 16),)], tmp_path)
    pair.train(2)
    pair.do(lambda side: torch.no_grad()(side.net)(torch.ones(3, 16)))
    pair.check()
    assert len(pair.ours.net.plan.schedules) == 2


# -- mixed dtypes, whole numbers --------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.gain = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(self.norm(x).bfloat16()).double() * self.gain).float()


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 255, (64, 64), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.a, self.b = nn.Linear(64, 2, bias=False), nn.Linear(2, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.codes.float() - 128) / 128) + self.b(self.a(x))


@pytest.mark.parametrize("build", [Mixed, Quantised])
@BOTH
def test_dtypes_stay(budget: str, build: type[nn.Module], tmp_path: Path) -> None:
    pair = pair_of(budget, build, [(randn(3, 64),)], tmp_path)
    dtypes = [p.dtype for p in pair.ours.net.parameters()]
    pair.train(2)
    pair.backward()
    pair.check()
    for p, dtype in zip(pair.ours.net.parameters(), dtypes, strict=True):
        assert p.dtype == dtype and (p.grad is None or p.grad.dtype == dtype)
    for chunk in pair.ours.net.plan.layout.chunks:
        for piece in chunk.slices:
            assert str(pair.ours.net.get_parameter(piece.path).dtype) == f"torch.{chunk.dtype}"


# -- accumulation ---------------------------------------------------------------------------


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([20.0]))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("home", ["device", "disk"])
def test_four_gradients_on_one_weight(home: str, tmp_path: Path) -> None:
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    net = elixir_fx.compile(model, optimizer, memory="1GiB", disk=tmp_path, keep={"weight": home})
    for number in range(4):
        context = net.no_sync()
        with context:
            net(torch.tensor([number + 1.0])).backward()
    optimizer.step()
    assert model.weight.item() == 10.0


class Repeated(nn.Module):
    """One layer more than once: in a row, and on two inputs."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.nested = nested

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(x)) if self.nested else self.fc(x) + self.fc(2 * x)


@pytest.mark.parametrize("nested", [True, False])
@BOTH
def test_a_layer_used_twice(budget: str, nested: bool, tmp_path: Path) -> None:
    options = {"memory": "1GiB", "disk": tmp_path, "keep": {"fc": "disk"}}
    options = options if budget == "tight" else SPARE
    pair = Pair(lambda: Repeated(nested), [(randn(2, 16),)], options, decayed)
    pair.train(2)
    pair.check()
    if budget == "tight":
        chunks = len(pair.ours.net.plan.layout.chunks)
        assert pair.ours.net.code.count("elixir.gather") == chunks
        assert pair.ours.net.backward_module.code.count("elixir.reduce") == chunks


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


@BOTH
def test_accumulation_equals_itself_in_any_context(budget: str, tmp_path: Path) -> None:
    batches: list[Batch] = [(randn(4, 32),) for _ in range(4)]
    pair = pair_of(budget, mlp, batches, tmp_path)
    for pattern in ("out in out", "in out in", "in in out"):
        for word in pattern.split():

            def loss(side: Side, batch: Batch, word: str = word) -> Tensor:
                if word == "in" and side is pair.ours:
                    with side.net.no_sync():
                        return loss_of(side.net(*batch)) / 4
                return loss_of(side.net(*batch)) / 4

            pair.backward(loss)
        pair.do(lambda side: side.optimizer.step())
        pair.check()
        pair.do(lambda side: side.optimizer.zero_grad())


# -- parameters without a gradient in a step ----------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        return self.c(self.b(x) if use_b else self.a(x))


@BOTH
def test_a_branch_that_is_not_taken_does_not_decay(budget: str, tmp_path: Path) -> None:
    """Alternate branches, then clip with one of them unused."""
    batches: list[Batch] = [(randn(3, 32), use_b) for use_b in (True, False)]
    pair = pair_of(budget, Branches, batches, tmp_path, room=0.3)
    pair.train(4)
    pair.check()
    pair.backward()
    assert pair.ours.net.a.weight.grad is None and pair.ours.net.b.weight.grad is not None
    pair.do(lambda side: nn.utils.clip_grad_norm_(side.net.parameters(), 0.1))
    pair.do(lambda side: side.optimizer.step())
    pair.check()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


@BOTH
def test_an_output_that_is_not_in_the_loss(budget: str, tmp_path: Path) -> None:
    pair = pair_of(budget, Both, [(randn(3, 32),)], tmp_path)
    pair.train(2, lambda side, batch: side.net(*batch)[0].square().mean())
    pair.check()
    assert not pair.ours.optimizer.state.get(pair.ours.net.b.weight)
    pair.train(1, lambda side, batch: side.net(*batch)[1].square().mean())
    pair.train(1, lambda side, batch: side.net(*batch)[0].square().mean())
    pair.train(1)
    pair.check()


class Identity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return x


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_returns_its_input() -> None:
    net = elixir_fx.compile(Identity(), **SPARE)
    x = randn(2, 4).requires_grad_()
    net(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(2, 4))
    assert all(p.grad is None for p in net.parameters())


class Half(nn.Module):
    """Uses a frozen input and lets one that learns go by."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.other = nn.Linear(32, 32)

    def forward(self, kept: Tensor, learns: Tensor) -> tuple[Tensor, Tensor]:
        return self.frozen(kept), self.other(learns)


@BOTH
def test_gradients_of_inputs(budget: str, tmp_path: Path) -> None:
    kept, learns = randn(2, 32), randn(2, 32)
    pair = pair_of(budget, Half, [(kept, learns)], tmp_path)

    def use(side: Side) -> list[Any]:
        x = learns.clone().requires_grad_()
        y = kept.clone().requires_grad_()
        first, second = side.net(y, x)
        first.sum().backward(retain_graph=True)
        alone = (None if x.grad is None else x.grad.clone(), y.grad.clone())
        second.sum().backward()
        return [alone, x.grad, y.grad]

    pair.do(use)
    pair.check()


# -- several forwards, several backwards ---------------------------------------------------------


@BOTH
def test_two_forwards_in_one_loss(budget: str, tmp_path: Path) -> None:
    """Different batch sizes; a forward without a backward; an evaluation in between."""
    batches: list[Batch] = [(randn(6, 32),), (randn(6, 32),)]
    pair = pair_of(budget, mlp, batches, tmp_path, room=0.5)
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


@BOTH
def test_backward_twice(budget: str, tmp_path: Path) -> None:
    pair = pair_of(budget, mlp, [(randn(4, 32),)], tmp_path)
    pair.train(3)

    def use(side: Side) -> list[Tensor]:
        loss = side.net(torch.ones(4, 32)).square().mean()
        loss.backward(retain_graph=True)
        once = side.net[0].weight.grad.clone()
        loss.backward()
        return [once, side.net[0].weight.grad]

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


class Scores(nn.Sequential):
    def __init__(self, *sizes: int) -> None:
        super().__init__(nn.Linear(*sizes[:2]), nn.LeakyReLU(0.2), nn.Linear(*sizes[1:]))


@BOTH
def test_two_models_that_train_each_other(budget: str, tmp_path: Path) -> None:
    """The order of DCGAN: D on real, D on fake.detach(), then G through D."""
    noise, real = randn(4, 16), randn(4, 32)
    generator = pair_of(budget, lambda: Scores(16, 48, 32), [(noise,)], tmp_path)
    critic = pair_of(budget, lambda: Scores(32, 48, 1), [(real,)], tmp_path, room=0.5)
    for _ in range(3):
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


# -- train, eval, no_grad ------------------------------------------------------------------


@BOTH
def test_ten_switches_take_two_graphs(budget: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.BatchNorm1d(32))

    pair = pair_of(budget, build, [(randn(6, 16),)], tmp_path)
    x = randn(6, 16)
    for _ in range(5):
        for side in pair.sides:
            side.net.train()
            assert side.net.training
        pair.train()
        for side in pair.sides:
            side.net.eval()
            assert not side.net.training and not side.model[1].training
        pair.do(lambda side: torch.no_grad()(side.net)(x))
    pair.check()
    assert len(pair.ours.net.plan.schedules) == 2
    assert not pair.ours.net._session.engine.cache.gathered


# -- checkpointing inside the model ----------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
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


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("views", [1, 2])
@BOTH
def test_checkpointing(budget: str, views: int, frozen: bool, tmp_path: Path) -> None:
    x = randn(4, 32)
    batches: list[Batch] = [(x, x * 2) if views == 2 else (x,)]
    pair = pair_of(budget, lambda: Checkpointed(frozen), batches, tmp_path)
    pair.backward()
    pair.backward()
    pair.check()
    assert not pair.ours.net._session.engine.cache.gathered
    pair.do(lambda side: side.optimizer.step())
    pair.check()


# -- hooks, schedulers, shapes -------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@BOTH
def test_hooks(budget: str, when: str, tmp_path: Path) -> None:
    """Forward, tensor and post-accumulate hooks, before and after the first step."""
    pair = pair_of(budget, mlp, [(randn(4, 32),)], tmp_path)
    if when == "after":
        pair.train(1)
    for side in pair.sides:
        net, log = side.net, side.log
        net[0].register_forward_hook(lambda module, args, output: output * 2)
        net[2].weight.register_hook(lambda grad: grad * 0.5)
        net[0].weight.register_post_accumulate_grad_hook(
            lambda p, log=log: log.append(p.grad.norm())
        )
    pair.train(2)
    pair.check()
    assert len(pair.ours.log) == 2


class Cycle:
    """A learning-rate rule of one's own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / self.count


@pytest.mark.parametrize("rule", ["one cycle", "lambda", "own"])
def test_learning_rates(rule: str, tmp_path: Path) -> None:
    pair = pair_of("tight", mlp, [(randn(4, 32),)], tmp_path, sgd_momentum)
    makers: dict[str, Any] = {
        "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
        "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 0.5**n),
        "own": Cycle,
    }
    rules = [makers[rule](side.optimizer) for side in pair.sides]
    for _ in range(4):
        pair.train()
        for one in rules:
            one.step()
    pair.check()


def test_lbfgs_where_everything_fits() -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    pair = Pair(mlp, [(randn(4, 32),)], {"memory": "1GiB"}, make)
    x = randn(4, 32)

    def step(side: Side) -> Tensor:
        def closure() -> Tensor:
            side.optimizer.zero_grad()
            loss = side.net(x).square().mean()
            loss.backward()
            return loss

        return side.optimizer.step(closure).detach()

    for _ in range(3):
        pair.do(step)
    pair.check()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.body = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.body(self.table(ids)).flatten(0, 1), ids.flatten())


def ids(batch: int, length: int) -> Batch:
    return (torch.randint(0, 50, (batch, length), generator=GENERATOR),)


def test_changing_shapes(tmp_path: Path) -> None:
    """Batch sizes 8, 8, 8, 5, 8, 3, 8: one plan, chunks packed once."""
    batches = [ids(size, 16) for size in (8, 8, 8, 5, 8, 3, 8)]
    pair = pair_of("tight", Tokens, batches, tmp_path)
    pair.train()
    layout = pair.ours.net.plan.layout
    pair.train(6)
    pair.check()
    assert pair.ours.net.plan.layout is layout and len(pair.ours.net.plan.schedules) == 3


def test_many_lengths_keep_few_graphs(tmp_path: Path) -> None:
    lengths = range(32, 20, -1)
    pair = pair_of("tight", Tokens, [ids(2, length) for length in lengths], tmp_path)
    pair.train(len(lengths))
    pair.check()
    assert len(pair.ours.net.plan.schedules) <= 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.train(3)


# -- memory, odd sizes -----------------------------------------------------------------------


def test_a_parameter_larger_than_a_chunk(tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
            self.table = nn.Embedding(5000, 64)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.table(ids)
            for layer in self.small:
                h = h + layer(h).tanh()
            return h

    batches: list[Batch] = [(torch.randint(0, 5000, (2, 8), generator=GENERATOR),)]
    pair = pair_of("tight", Large, batches, tmp_path)
    pair.train(2)
    pair.check()
    of_table = next(
        chunk
        for chunk in pair.ours.net.plan.layout.chunks
        if any(piece.path == "table.weight" for piece in chunk.slices)
    )
    assert len(of_table.slices) == 1


def test_many_tiny_parameters_and_a_large_one(tmp_path: Path) -> None:
    """Padding and the room of chunks stay small beside the state itself."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large = nn.Linear(512, 512, bias=False)
            self.tiny = nn.ParameterList(nn.Parameter(torch.ones(7)) for _ in range(100))

        def forward(self, x: Tensor) -> Tensor:
            return self.large(x) + sum(p.sum() for p in self.tiny)

    pair = pair_of("tight", Tiny, [(randn(2, 512),)], tmp_path)
    pair.train(2)
    pair.check()
    layout = pair.ours.net.plan.layout
    state = 4 * sum(p.nbytes for p in pair.ours.net.parameters())
    largest = max(chunk.nbytes for chunk in layout.chunks)
    assert layout.disk_bytes <= 1.1 * state + largest


@pytest.mark.parametrize("shape", [(7, 5), (11, 3), (1, 1)])
def test_odd_sizes(shape: tuple[int, int], tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(11, shape[0]), nn.Linear(*shape), nn.Linear(shape[1], 1))

    batches: list[Batch] = [(torch.tensor([[0, 3, 10]]),)]
    pair = pair_of("tight", build, batches, tmp_path)
    pair.train(2)
    pair.backward()
    pair.do(lambda side: nn.utils.clip_grad_norm_(side.net.parameters(), 0.01))
    pair.check()


# -- low precision, autocast -----------------------------------------------------------------


def test_bfloat16_without_master_weights_stands_still(tmp_path: Path) -> None:
    """The choice is explicit: parameters in bfloat16 are updated in bfloat16."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

        def forward(self) -> Tensor:
            return self.weight.sum()

    def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-4)

    options = {"memory": "1GiB", "disk": tmp_path, "keep": {"weight": "disk"}}
    pair = Pair(One, [()], options, sgd)
    pair.train(20)
    pair.check()
    assert torch.equal(pair.ours.net.weight.detach(), torch.ones(4, dtype=torch.bfloat16))


class Cast(nn.Module):
    """An inner region without autocast, and weights cast by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        with torch.autocast("cpu", enabled=False):
            h = self.layers[1](h.float())
        weight = self.layers[2].weight.to(torch.bfloat16)
        return functional.linear(h.bfloat16(), weight).float()


@BOTH
def test_autocast(budget: str, tmp_path: Path) -> None:
    def loss(side: Side, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return 16384 * side.net(*batch).square().mean()

    pair = pair_of(budget, Cast, [(randn(4, 32),)], tmp_path, room=0.2)
    pair.train(3, loss)
    pair.train(1)
    pair.train(1, loss)
    pair.check()


def test_no_weight_is_saved_for_the_backward(tmp_path: Path) -> None:
    """Weights that are cast in forward are cast again in the backward."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = functional.linear(x, weight.to(torch.bfloat16)).tanh()
            return x.float()

    pair = pair_of("tight", Casts, [(randn(2, 64).bfloat16(),)], tmp_path)
    pair.train(2)
    pair.check()
    forward = pair.ours.net.graph
    saved = list(forward.output_node().args[0])[1:]
    sizes = [node.meta["val"].numel() for node in saved if node.op != "placeholder"]
    assert sizes and max(sizes) < 64 * 64


# -- branches by data --------------------------------------------------------------------------


class Experts(nn.Module):
    """Every expert runs on the tokens that chose it, none on no token: without a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y = torch.where((chosen == index)[:, None], expert(x), y)
        return y


class Counted(Experts):
    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        counts = torch.bincount(chosen, minlength=4).tolist()
        return sum(self.experts[i](x).sum() * n for i, n in enumerate(counts) if n)


@BOTH
def test_experts(budget: str, tmp_path: Path) -> None:
    pair = pair_of(budget, Experts, [(randn(6, 16),)], tmp_path)
    pair.train(2)
    pair.check()
    with pytest.raises(elixir_fx.CaptureError, match=r"py:\d+: .*backend='elixir_fx'"):
        elixir_fx.compile(Counted(), **SPARE)(randn(6, 16))


# -- sequences of steps ------------------------------------------------------------------------


class Tower(nn.Module):
    """8 layers of widths 4 and 36, the first and the last one tied."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [4, 36, 4, 36, 4, 36, 4, 36, 4]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.layers[6].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.mark.parametrize("share", [0.0, 0.5, None])
def test_fifty_steps(share: float | None, tmp_path: Path) -> None:
    batches: list[Batch] = [(randn(3, 4),) for _ in range(5)]
    pair = pair_of("spare" if share is None else "tight", Tower, batches, tmp_path, room=share or 0)
    pair.train(50)
    pair.check()
    assert pair.ours.net.layers[6].weight is pair.ours.net.layers[0].weight


def test_one_gather_and_one_reduce_for_each_chunk_and_pass(tmp_path: Path) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x).tanh()
            return x

    pair = pair_of("tight", Blocks, [(randn(2, 64),)], tmp_path)
    pair.train(2)
    pair.check()
    net = pair.ours.net
    chunks = len(net.plan.layout.chunks)
    assert net.code.count("elixir.gather") <= chunks
    assert net.backward_module.code.count("elixir.gather") <= chunks
    assert net.backward_module.code.count("elixir.reduce") == chunks


def test_no_process_group_and_no_launcher(tmp_path: Path) -> None:
    assert not torch.distributed.is_initialized()
    pair = pair_of("tight", mlp, [(randn(2, 32),)], tmp_path)
    pair.train(1)
    pair.check()
    assert not torch.distributed.is_initialized()
