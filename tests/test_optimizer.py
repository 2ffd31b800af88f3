"""Streamed steps give the plain optimizer's numbers, whatever is away."""

import copy
import functools
import io
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_parameters import MemoryHome
from torch import Tensor, nn
from torch.optim import Optimizer

from elixir_fx.errors import PlanError, TierError
from elixir_fx.facts import OptimizerFacts
from elixir_fx.runtime.away import Home, Source
from elixir_fx.runtime.optimizer import Binding, bind
from elixir_fx.runtime.parameters import AwayParameter, AwayTensor, ChunkGradient, away
from elixir_fx.runtime.probe import probe

SHAPES = ((16, 24), (70,), (8, 3), (64, 9), (5,), (33, 2))
MATRICES = tuple(shape for shape in SHAPES if len(shape) == 2)


class Later:
    """A transfer that happens when it is waited for, so that waiting too late shows."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run: Callable[[], object] | None = run

    def wait(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            run()


class LateHome(MemoryHome):
    """A home whose transfers happen as late as they may; `log` says in which order."""

    log: list[str]
    broken = False

    def fetch(self, into: Tensor) -> Later:  # type: ignore[override]
        assert into.shape == (self.span,) and into.data_ptr() % 4096 == 0
        self.log.append(f"fetch {self.path}")
        into.view(torch.uint8).fill_(255)  # whoever reads before the wait reads NaN
        return Later(lambda: self._arrive(into))

    def _arrive(self, into: Tensor) -> None:
        if self.broken:
            raise TierError(f"cannot read {self.path}")
        into.copy_(self.flat)

    def put(self, source: Tensor) -> Later:  # type: ignore[override]
        self.log.append(f"put {self.path}")
        return Later(lambda: self.flat.copy_(source))


@dataclass
class MemoryEntry:
    path: str
    value: LateHome | None
    gradient: LateHome | None
    states_away: bool
    on_host: bool = False


class MemoryEngine:
    """An engine whose every home is in memory."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        parts: str = "value gradient states",
        arena_bytes: int = 1 << 18,
        unit: int = 2,
        skip: int | None = None,
    ) -> None:
        self.log: list[str] = []
        self.entries: dict[nn.Parameter, MemoryEntry] = {}
        self.states: dict[tuple[int, str], LateHome] = {}
        self.unit, self.updates = unit, 0
        raw = torch.zeros(arena_bytes + 4096, dtype=torch.uint8)
        shift = -raw.data_ptr() % 4096
        self.arena = raw[shift : shift + arena_bytes]
        for index, parameter in enumerate(parameters):
            if index == skip or not parameter.requires_grad:
                continue
            path = f"p{index}"
            value = self._home(parameter, path) if "value" in parts else None
            gradient = self._home(parameter, f"{path}.grad") if "gradient" in parts else None
            self.entries[parameter] = MemoryEntry(path, value, gradient, "states" in parts)
            if value is not None:
                away(parameter, value)

    def _home(self, like: Tensor, path: str) -> LateHome:
        home = LateHome(like, path)
        home.log = self.log
        return home

    def units(self) -> Sequence[Sequence[nn.Parameter]]:
        parameters = list(self.entries)
        return [
            parameters[start : start + self.unit] for start in range(0, len(parameters), self.unit)
        ]

    def state_home(self, parameter: nn.Parameter, name: str, like: Tensor) -> Home:
        key = (id(parameter), name)
        if key not in self.states:
            self.states[key] = self._home(like, f"{self.entries[parameter].path}.{name}")
        return self.states[key]

    def watched(self, source: Source) -> Source:
        return source

    def updated(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    @contextmanager
    def update_memory(self) -> Iterator[Tensor]:
        self.updates += 1
        yield self.arena

    def gradient_is_home(self, parameter: nn.Parameter) -> bool:
        entry = self.entries[parameter]
        gradient = parameter.grad
        return (
            entry.gradient is not None
            and isinstance(gradient, ChunkGradient)
            and gradient.source.home is entry.gradient
        )

    def give(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """What a backward pass would leave in p.grad."""
        entry = self.entries.get(parameter)
        if gradient is None or entry is None or entry.gradient is None:
            parameter.grad = gradient
        else:
            entry.gradient.store(gradient)
            parameter.grad = ChunkGradient(Source(entry.gradient))


def make(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(parameters: Sequence[nn.Parameter], step: int) -> list[Tensor | None]:
    """Random gradients; in most steps one parameter has none."""
    generator = torch.Generator().manual_seed(step)
    missing = random.Random(step).randrange(len(parameters) + 1)
    found = [torch.randn(p.shape, generator=generator) for p in parameters]
    return [None if index == missing else gradient for index, gradient in enumerate(found)]


def value_of(tensor: Any) -> Any:
    return tensor.detach().clone() if isinstance(tensor, Tensor) else tensor


def check_equal(
    want: Sequence[nn.Parameter], got: Sequence[nn.Parameter], *optimizers: Optimizer
) -> None:
    for one, other in zip(want, got, strict=True):
        assert torch.equal(one, value_of(other))
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert torch.equal(one.grad, value_of(other.grad))
        states, others = (o.state.get(p, {}) for o, p in zip(optimizers, (one, other), strict=True))
        assert list(states) == list(others)
        for name, state in states.items():
            if isinstance(state, Tensor):
                assert torch.equal(state, value_of(others[name])), name
            else:
                assert state == others[name]


O = torch.optim  # noqa: E741
P = functools.partial
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": P(O.AdamW, weight_decay=0.5),
    "adamw_foreach": P(O.AdamW, foreach=True),
    "adamw_fused": P(O.AdamW, fused=True),
    "adamw_amsgrad_fused": P(O.AdamW, fused=True, amsgrad=True, maximize=True),
    "adamw_tensor_lr": P(O.AdamW, lr=torch.tensor(0.01)),
    "adam_amsgrad": P(O.Adam, amsgrad=True, weight_decay=0.1),
    "sgd": P(O.SGD, lr=0.1, weight_decay=0.1),
    "sgd_momentum": P(O.SGD, lr=0.1, momentum=0.9),
    "sgd_nesterov": P(O.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": P(O.SGD, lr=0.1, momentum=0.9, fused=True),
    "rmsprop": P(O.RMSprop, momentum=0.5, centered=True),
    "adagrad": P(O.Adagrad, initial_accumulator_value=0.1),
    "nadam": O.NAdam,
    "radam": O.RAdam,
    "adadelta": O.Adadelta,
    "rprop": O.Rprop,
    "adamax": O.Adamax,
    "adafactor": O.Adafactor,
    "muon": O.Muon,
}


@pytest.mark.parametrize("parts", ["value gradient states", "states", "value", "gradient"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_eager(name: str, parts: str) -> None:
    shapes = MATRICES if name == "muon" else SHAPES
    want, got = make(shapes), make(shapes)
    plain = OPTIMIZERS[name](want)
    engine = MemoryEngine(got, parts, skip=1)
    ours = OPTIMIZERS[name](got)
    binding = bind(ours, engine)
    for step in range(4):
        for one, other, gradient in zip(want, got, gradients(want, step), strict=True):
            one.grad = None if gradient is None else gradient.clone()
            engine.give(other, None if gradient is None else gradient.clone())
        plain.step()
        ours.step()
        check_equal(want, got, plain, ours)
    assert engine.updates == 4
    for parameter, entry in engine.entries.items():
        assert (type(parameter) is AwayParameter) == (entry.value is not None)
        for state in ours.state[parameter].values():
            whole = isinstance(state, Tensor) and state.shape == parameter.shape
            assert isinstance(state, AwayTensor) == (whole and entry.states_away)
    binding.unbind()
    check_equal(want, got, plain, ours)
    assert not any(isinstance(s, AwayTensor) for d in ours.state.values() for s in d.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unbound_optimizers_work_unstreamed(name: str) -> None:
    shapes = MATRICES if name == "muon" else SHAPES
    want, got = make(shapes), make(shapes)
    engine = MemoryEngine(got, "value gradient", skip=0)
    plain, ours = OPTIMIZERS[name](want), OPTIMIZERS[name](got)
    for step in range(2):
        for one, other, gradient in zip(want, got, gradients(want, step), strict=True):
            one.grad = None if gradient is None else gradient.clone()
            engine.give(other, None if gradient is None else gradient.clone())
        plain.step()
        ours.step()
        check_equal(want, got, plain, ours)


class Pair:
    """The same parameters twice, plain and away, with one optimizer each."""

    def __init__(self, maker: Callable[..., Optimizer], **options: Any) -> None:
        self.want, self.got = make(), make()
        self.engine = MemoryEngine(self.got, **options)
        self.plain, self.ours = maker(self.want), maker(self.got)
        self.binding: Binding = bind(self.ours, self.engine)
        self.steps = 0

    def backward(self) -> None:
        self.steps += 1
        for one, other, gradient in zip(
            self.want, self.got, gradients(self.want, self.steps), strict=True
        ):
            one.grad = None if gradient is None else gradient.clone()
            self.engine.give(other, None if gradient is None else gradient.clone())

    def step(self) -> None:
        self.backward()
        self.plain.step()
        self.ours.step()
        self.check()

    def check(self) -> None:
        check_equal(self.want, self.got, self.plain, self.ours)


def test_the_next_unit_is_fetched_before_this_one_goes_home() -> None:
    pair = Pair(O.SGD, unit=1)
    for parameter in pair.got:
        pair.engine.give(parameter, torch.ones_like(parameter))
    pair.ours.step()
    moves = [move for move in pair.engine.log if "grad" not in move]
    assert moves[:6] == ["fetch p0", "fetch p1", "put p0", "fetch p2", "put p1", "fetch p3"]


@pytest.mark.parametrize("arena_bytes", [20480, 24576, 32768, 65536])
def test_a_small_arena_is_a_ring(arena_bytes: int) -> None:
    pair = Pair(O.AdamW, arena_bytes=arena_bytes, unit=3)
    for _ in range(4):
        pair.step()


def test_an_arena_that_holds_no_parameter_is_an_error_before_any_change() -> None:
    pair = Pair(P(O.AdamW, lr=0.1), arena_bytes=12288)
    pair.backward()
    before = [value_of(p) for p in pair.got]
    pair.ours.step()  # no states yet: it fits
    with pytest.raises(TierError, match=r"updating p\d needs 0.0 MiB"):
        pair.ours.step()
    assert not all(map(torch.equal, before, map(value_of, pair.got)))
    assert all(type(p) is AwayParameter for p in pair.got)


def test_a_failed_transfer_leaves_parameters_usable() -> None:
    pair = Pair(O.AdamW)
    pair.step()
    pair.backward()
    home = pair.engine.entries[pair.got[3]].value
    assert home is not None
    home.broken = True
    with pytest.raises(TierError, match="cannot read p3"):
        pair.ours.step()
    home.broken = False
    assert all(type(p) is AwayParameter and torch.isfinite(p).all() for p in pair.got)
    assert type(pair.got[3].grad) is ChunkGradient
    assert all(isinstance(pair.ours.state[p]["exp_avg"], AwayTensor) for p in pair.got[:3])


def test_closures_schedulers_and_groups() -> None:
    def maker(parameters: list[nn.Parameter]) -> Optimizer:
        groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:4]}]
        return O.AdamW(groups, lr=0.01, weight_decay=0.2)

    pair = Pair(maker)
    early = [O.lr_scheduler.StepLR(o, 2) for o in (pair.plain, pair.ours)]
    late = [O.lr_scheduler.ExponentialLR(o, 0.9) for o in (pair.plain, pair.ours)]
    groups = [id(group) for group in pair.ours.param_groups]
    for step in range(4):
        pair.backward()
        losses = []
        for optimizer, parameters in ((pair.plain, pair.want), (pair.ours, pair.got)):

            def closure(parameters: list[nn.Parameter] = parameters) -> Tensor:
                assert torch.is_grad_enabled()
                loss = sum((p**2).sum() for p in parameters)
                loss.backward()
                return loss.detach()

            losses.append(optimizer.step(closure))
        assert torch.equal(*losses)
        pair.check()
        for scheduler in (*early, *late):
            scheduler.step()
        if step == 1:
            for optimizer, parameters in ((pair.plain, pair.want), (pair.ours, pair.got)):
                optimizer.add_param_group({"params": parameters[4:], "lr": 0.3})
    assert [id(group) for group in pair.ours.param_groups][:2] == groups
    assert [len(group["params"]) for group in pair.ours.param_groups] == [2, 2, 2]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_grad_scaler(fused: bool, bad: bool) -> None:
    pair = Pair(P(O.AdamW, fused=fused, lr=0.1))
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(3):
        pair.backward()
        if bad and step == 1:
            for parameters in (pair.want, pair.got):
                parameter = next(p for p in parameters[2:] if p.grad is not None)
                parameter.grad.view(-1)[0] = float("inf")
        sides = ((pair.plain, pair.want), (pair.ours, pair.got))
        for scaler, (optimizer, parameters) in zip(scalers, sides, strict=True):
            scaler.scale(torch.ones(()))
            if step == 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 0.5)
            scaler.step(optimizer)
            scaler.update()
        for one, other in zip(pair.want, pair.got, strict=True):
            assert torch.equal(one, value_of(other))
        if not fused:
            pair.check()
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_gradients_that_the_user_sets() -> None:
    pair = Pair(O.SGD)
    for parameter in (pair.want[0], pair.got[0]):
        parameter.grad = torch.full((16, 24), 2.0)
    for parameter in (pair.want[2], pair.got[2]):
        parameter.grad = torch.ones(8, 3)
        parameter.grad *= 3
    pair.plain.step()
    pair.ours.step()
    pair.check()
    for optimizer in (pair.plain, pair.ours):
        optimizer.zero_grad(set_to_none=False)
    pair.check()


def test_users_hooks_see_gradients() -> None:
    pair = Pair(O.SGD)
    logs: list[list[Any]] = [[], []]
    for log, optimizer, parameters in (
        (logs[0], pair.plain, pair.want),
        (logs[1], pair.ours, pair.got),
    ):

        def clip(*_: Any, parameters: Any = parameters, log: Any = log) -> None:
            log.append(float(nn.utils.clip_grad_norm_(parameters, 0.1)))

        def after(*_: Any, parameters: Any = parameters, log: Any = log) -> None:
            log.append([None if p.grad is None else float(p.grad.norm()) for p in parameters])

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(after)
    pair.step()
    pair.step()
    assert logs[0] == logs[1] and len(logs[0]) == 4


@pytest.mark.parametrize("before", [True, False])
def test_state_dicts(before: bool) -> None:
    pair = Pair(P(O.AdamW, lr=torch.tensor(0.1)))
    for _ in range(2):
        pair.step()
    want, got = pair.plain.state_dict(), pair.ours.state_dict()
    assert want["param_groups"] == got["param_groups"]
    for index, states in want["state"].items():
        for name, state in states.items():
            copied = got["state"][index][name]
            assert type(copied) is Tensor and torch.equal(state, copied)
            copied += 1  # the caller's to edit
    pair.check()
    stream = io.BytesIO()
    torch.save(pair.ours.state_dict(), stream)
    stream.seek(0)
    saved = torch.load(stream)
    homes = dict(pair.engine.states)
    pair.step()
    if before:
        again, engine = make(), None
        for one, other in zip(again, pair.got, strict=True):
            one.data.copy_(value_of(other))
        optimizer = O.AdamW(again, lr=torch.tensor(0.1))
        optimizer.load_state_dict(saved)
        engine = MemoryEngine(again)
        bind(optimizer, engine)
        assert len(engine.states) == len(homes)
        assert all(isinstance(optimizer.state[p]["exp_avg"], AwayTensor) for p in again)
    else:
        pair.plain.load_state_dict(copy.deepcopy(saved))
        pair.ours.load_state_dict(saved)
        assert pair.engine.states == homes
        assert all(isinstance(pair.ours.state[p]["exp_avg"], AwayTensor) for p in pair.got)
        pair.check()
        pair.step()


def test_copies_are_ordinary() -> None:
    pair = Pair(O.AdamW)
    pair.step()
    for copied in (copy.deepcopy(pair.ours), pickle.loads(pickle.dumps(pair.ours))):
        parameters = copied.param_groups[0]["params"]
        assert all(type(p) is nn.Parameter for p in parameters)
        for one, other in zip(pair.want, parameters, strict=True):
            assert torch.equal(one, other)
            for name, state in pair.plain.state[one].items():
                assert type(copied.state[other][name]) is Tensor
                assert torch.equal(copied.state[other][name], state)
        copied.step()
    pair.check()


def test_states_can_be_read_and_written() -> None:
    pair = Pair(O.AdamW)
    pair.step()
    parameter = next(i for i, p in enumerate(pair.want) if p.grad is not None)
    for optimizer, parameters in ((pair.plain, pair.want), (pair.ours, pair.got)):
        states = optimizer.state[parameters[parameter]]
        states["exp_avg"].mul_(2)
        states["exp_avg_sq"] = states["exp_avg_sq"] + 1
    pair.check()
    pair.step()
    assert isinstance(pair.ours.state[pair.got[parameter]]["exp_avg_sq"], AwayTensor)
    pair.step()


def test_a_change_by_the_step_is_seen_by_a_later_backward() -> None:
    pair = Pair(O.SGD)
    loss = (pair.got[0] ** 2).sum()
    for parameter in pair.got:
        pair.engine.give(parameter, torch.ones_like(parameter))
    pair.ours.step()
    with pytest.raises(RuntimeError, match="modif"):
        loss.backward()


def test_the_users_own_optimizer() -> None:
    class Lion(Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.add_((average * 0.9 + p.grad * 0.1).sign(), alpha=-group["lr"])
                    self.state[p]["average"] = average * 0.99 + p.grad * 0.01
                    p.data = p.data * 0.99

    pair = Pair(Lion)
    for _ in range(3):
        pair.step()
    facts = probe(pair.plain)
    assert facts.states == (("average", 4),) and facts.elementwise and not facts.global_state


def test_optimizers_that_need_everything_are_refused() -> None:
    class Counting(O.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
            return super().step(closure)

    for maker, words in (
        (O.LBFGS, "LBFGS needs all parameters at once, and p0 and 5 others"),
        (Counting, "Counting needs all parameters at once"),
        (P(O.AdamW, differentiable=True), "differentiable"),
        (O.SparseAdam, "SparseAdam cannot be planned for"),
    ):
        with pytest.raises(PlanError, match=words):
            Pair(maker)
    parameters = make()
    bind(O.LBFGS(parameters), MemoryEngine([]))  # nothing is away


@pytest.mark.parametrize(
    ("name", "states", "elementwise"),
    [
        ("sgd", (), True),
        ("sgd_momentum", (("momentum_buffer", 4),), True),
        ("adamw", (("exp_avg", 4), ("exp_avg_sq", 4)), True),
        ("adamw_fused", (("exp_avg", 4), ("exp_avg_sq", 4)), True),
        ("adagrad", (("sum", 4),), True),
        ("muon", (("momentum_buffer", 4),), False),
        ("adafactor", (), False),
        ("rmsprop", (("square_avg", 4),), True),
        ("nadam", (("exp_avg", 4), ("exp_avg_sq", 4)), True),
    ],
)
def test_probe(name: str, states: Any, elementwise: bool) -> None:
    facts = probe(name)
    assert facts.states == states
    assert facts.elementwise == elementwise and not facts.global_state
    if name.endswith("fused"):
        assert facts.scratch_bytes == 0
    assert 0 <= facts.scratch_bytes <= 64
    assert facts.read_bytes >= 12
    assert probe(name, [torch.bfloat16]).state_bytes * 2 == facts.state_bytes


def test_probe_leaves_the_optimizer_alone() -> None:
    parameters = make()
    optimizer = O.AdamW(parameters)
    seed = torch.random.get_rng_state()
    before = copy.deepcopy(optimizer.state_dict())
    facts = probe(optimizer)
    assert optimizer.state_dict() == before and not optimizer.state
    assert torch.equal(seed, torch.random.get_rng_state())
    assert probe("lbfgs").global_state
    assert facts == OptimizerFacts(
        name="AdamW", states=(("exp_avg", 4), ("exp_avg_sq", 4)),
        scratch_bytes=facts.scratch_bytes, read_bytes=facts.read_bytes,
    )  # fmt: skip
    assert 4 <= facts.scratch_bytes <= 12
    assert probe(O.AdamW(parameters, foreach=True)).foreach
    assert not probe(O.AdamW(parameters, fused=True)).foreach
    with pytest.raises(PlanError, match="no optimizer is called 'adamm'; known names are adadelta"):
        probe("adamm")
