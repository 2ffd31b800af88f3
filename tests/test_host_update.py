"""Chunks whose optimizer runs on the host: the same training, bit for bit. What that moves and
holds is in test_host_update_homes.py."""

import io
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_between_steps as between
import torch
from graphs import gpt
from harness import MakeOptimizer, adamw, compare, sgd_momentum
from host_plans import GPT, SLOW, Choice, even, every, odd, options_for, updated_on_host
from hypothesis import given, settings
from hypothesis import strategies as st
from made_plans import facts_of
from pairs import Pair, Side, plain_loss
from torch import Tensor, nn

import elixir_fx
from elixir_fx.runtime.parameters import AwayTensor
from elixir_fx.testing import emulated

THREADS = 1
O = torch.optim  # noqa: E741
TIED = gpt(layers=2, width=128, seq=16, tied=True, dropout=0.1)


def grouped(parameters: list[nn.Parameter]) -> O.Optimizer:
    groups = [{"params": parameters[::2], "weight_decay": 0.0}, {"params": parameters[1::2]}]
    return O.AdamW(groups, lr=1e-2, fused=True)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": adamw,
    "foreach": lambda ps: O.AdamW(ps, lr=1e-2, foreach=True),
    "fused": lambda ps: O.AdamW(ps, lr=1e-2, fused=True),
    "groups": grouped,
    "momentum": sgd_momentum,
    "fused momentum": lambda ps: O.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "sgd": lambda ps: O.SGD(ps, lr=1e-2),
    "rmsprop": lambda ps: O.RMSprop(ps, lr=1e-3, momentum=0.9),
}


# -- the numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [every, odd])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_the_same(name: str, chosen: Choice) -> None:
    options = options_for(GPT, chosen, OPTIMIZERS[name])
    compare(GPT.build(), OPTIMIZERS[name], GPT.batches(3), compile=options)


def test_states_that_are_not_elementwise() -> None:
    """They are ordinary tensors, in host memory: the smallest budget of the device has no room."""

    def adafactor(parameters: list[nn.Parameter]) -> O.Optimizer:
        return O.Adafactor(parameters, lr=1e-2)

    options = options_for(GPT, every, adafactor)
    compare(GPT.build(), adafactor, GPT.batches(4), compile=options)


@pytest.mark.parametrize(
    ("chosen", "machine"),
    [(every, None), (odd, None), (even, None), (odd, SLOW)],
    ids=["every", "odd", "even", "odd-slow"],
)
def test_accumulation_and_evaluation(chosen: Choice, machine: Any) -> None:
    options = options_for(TIED, chosen, machine=machine)
    batches = TIED.batches(4)
    compare(TIED.build(), adamw, batches, accumulate=2, evaluate=True, compile=options)


def clipped(side: Side, batch: Any) -> list[Tensor]:
    loss = plain_loss(side, batch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(side.net.parameters(), 0.05)
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=False)
    return [loss.detach(), norm]


@pytest.mark.parametrize("make_optimizer", [adamw, OPTIMIZERS["fused"], sgd_momentum])
def test_clipping(make_optimizer: MakeOptimizer) -> None:
    options = options_for(GPT, odd, make_optimizer)
    pair = Pair(GPT.build, GPT.batches(1), options, make_optimizer)
    for batch in GPT.batches(4):
        pair.do(partial(clipped, batch=batch))
    pair.check()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("chosen", [every, odd])
def test_a_scaler_and_its_infinities(chosen: Choice, fused: bool) -> None:
    def make(parameters: list[nn.Parameter]) -> O.Optimizer:
        return O.AdamW(parameters, lr=1e-2, fused=fused)

    pair = Pair(GPT.build, GPT.batches(1), options_for(GPT, chosen, make), make)
    scalers = {side: torch.amp.GradScaler("cpu", init_scale=8.0) for side in pair.sides}
    for number, batch in enumerate(GPT.batches(5)):

        def step(side: Side, number: int = number, batch: Any = batch) -> list[Any]:
            scaler = scalers[side]
            loss = plain_loss(side, batch)
            scaler.scale(loss).backward()
            if number == 2:
                next(side.net.parameters()).grad.view(-1)[3] = float("inf")
            if number == 3:
                scaler.unscale_(side.optimizer)
                nn.utils.clip_grad_norm_(side.net.parameters(), 0.1)
            scaler.step(side.optimizer)
            scaler.update()
            # What fused kernels leave in p.grad, unscaled or not, must be the same too.
            seen = [p.grad.detach().clone() for p in side.net.parameters()]
            side.optimizer.zero_grad()
            return [loss.detach(), scaler.get_scale(), *seen]

        pair.do(step)
    pair.check()


def test_closures_missing_gradients_and_those_the_user_sets() -> None:
    options = options_for(GPT, odd)
    pair = Pair(GPT.build, GPT.batches(2), options)
    pair.train(1)

    def with_closure(side: Side) -> Tensor:
        def closure() -> Tensor:
            side.optimizer.zero_grad()
            loss = plain_loss(side, GPT.batches(1)[0])
            loss.backward()
            return loss.detach()

        return side.optimizer.step(closure)

    def set_some(side: Side) -> list[Tensor | None]:
        plain_loss(side, GPT.batches(1)[0]).backward()
        for index, p in enumerate(side.net.parameters()):
            if index % 3 == 0:
                p.grad = torch.full_like(p, 0.25)
            elif index % 3 == 1:
                p.grad = None if index % 2 else p.grad * 2
        side.optimizer.step()
        return [None if p.grad is None else p.grad.detach().clone() for p in side.net.parameters()]

    pair.do(with_closure)
    pair.check()
    pair.do(set_some)
    pair.finish()


def test_an_optimizer_of_the_users_own() -> None:
    """It replaces values, states and gradients by new tensors, and reads an attribute of the
    parameters."""

    class Lion(O.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    rate = group["lr"] * p.__dict__.get("rate", 1.0)
                    p.add_((average * 0.9 + p.grad * 0.1).sign(), alpha=-rate)
                    self.state[p]["average"] = average * 0.99 + p.grad * 0.01
                    p.data = p.data * 0.99
                    p.grad = p.grad * 0.5

    def build() -> nn.Module:
        model = GPT.build()
        for index, p in enumerate(model.parameters()):
            p.rate = 1.0 + index / 8  # type: ignore[attr-defined]
        return model

    pair = Pair(build, GPT.batches(2), options_for(GPT, odd, Lion), Lion)
    pair.train(2)
    pair.backward()
    pair.do(lambda side: side.optimizer.step())
    pair.check()
    pair.finish()


# -- between steps ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> Pair:
    """Every other chunk is updated on the host; with room for tensors that are set by hand."""
    facts = facts_of(between.Net(), between.BATCHES[0], machine=emulated())
    options = updated_on_host(facts, odd)
    memory = 8 * options["memory"]
    plan = replace(options["plan"], limits=replace(options["plan"].limits, device=memory))
    return Pair(between.Net, between.BATCHES, {**options, "memory": memory, "plan": plan})


@pytest.fixture
def shared(pair: Pair) -> Pair:
    pair.restart()
    pair.train(2)
    entries = pair.ours.net._session.engine.entries.values()
    assert len({entry.on_host for entry in entries if entry.chunk.trainable}) == 2
    return pair


@pytest.mark.parametrize("name", between.EDITS)
def test_edits(name: str, shared: Pair) -> None:
    shared.do(between.EDITS[name])
    shared.check()
    shared.train(2)
    shared.check()


@pytest.mark.parametrize("name", between.GRADIENTS)
def test_gradients(name: str, shared: Pair) -> None:
    shared.backward()
    shared.do(between.GRADIENTS[name])
    shared.check()
    shared.do(lambda side: side.optimizer.step())
    shared.check()
    shared.do(lambda side: side.optimizer.zero_grad())
    shared.train()
    shared.check()


def states_of(side: Side) -> list[dict[str, Any]]:
    """Of every parameter that has been updated, unless they were forgotten since."""
    return [side.optimizer.state[p] for p in side.net.parameters() if p in side.optimizer.state]


def read_states(side: Side) -> list[Tensor]:
    found = [states["exp_avg"] for states in states_of(side)]
    for first in found[:1]:
        first.mul_(2)
    return [one.clone() for one in found]


def replace_states(side: Side) -> None:
    for states in states_of(side):
        states["exp_avg"] = states["exp_avg"] * 0.5
        states["exp_avg_sq"] = states["exp_avg_sq"].clone()


def reload_optimizer(side: Side) -> None:
    saved = between.reload(side.optimizer.state_dict())
    side.optimizer.load_state_dict(saved)


STATES: dict[str, Callable[[Side], Any]] = {
    "read": read_states,
    "replace": replace_states,
    "reload": reload_optimizer,
    "forget": lambda side: side.optimizer.state.clear(),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name: str, shared: Pair) -> None:
    shared.do(STATES[name])
    shared.check()
    shared.train(2)
    shared.check()
    for p, entry in shared.ours.net._session.engine.entries.items():
        if entry.chunk.trainable:
            assert isinstance(shared.ours.optimizer.state[p]["exp_avg"], AwayTensor)


ACTIONS: dict[str, Callable[[Side], Any]] = {
    **{f"edit: {name}": edit for name, edit in between.EDITS.items() if name != "freeze"},
    **{f"gradient: {n}": use for n, use in between.GRADIENTS.items() if n not in ("keep", "noise")},
    **{f"states: {name}": use for name, use in STATES.items()},
    "evaluate": lambda side: torch.no_grad()(side.net)(between.X).clone(),
    "step": lambda side: side.optimizer.step(),
    "backward": lambda side: side.net(between.X).square().mean().backward(),
    "drop gradients": lambda side: side.optimizer.zero_grad(),
}


@settings(max_examples=25, deadline=None)
@given(names=st.lists(st.sampled_from(sorted(ACTIONS)), max_size=6))
def test_random_interleavings(names: list[str], pair: Pair) -> None:
    pair.restart()
    pair.train(1)
    for name in names:
        pair.backward()
        pair.do(ACTIONS[name])
    pair.check()
    pair.train(1)
    pair.check()


def test_checkpoints(tmp_path: Path) -> None:
    """What was saved under one place of update goes on under another."""
    pair = Pair(GPT.build, GPT.batches(3), options_for(GPT, odd))
    pair.train(2)
    elixir_fx.save(tmp_path / "saved", pair.ours.net, pair.ours.optimizer)
    saved = _pickled(pair.plain)
    pair.train(1)
    elixir_fx.load(tmp_path / "saved", pair.ours.net, pair.ours.optimizer)
    _restore(pair.plain, saved)
    pair.train(2)
    pair.check()
    other = Pair(GPT.build, GPT.batches(3), options_for(GPT, even))
    elixir_fx.load(tmp_path / "saved", other.ours.net, other.ours.optimizer)
    _restore(other.plain, saved)
    other.train(2)
    other.check()


def _pickled(side: Side) -> bytes:
    stream = io.BytesIO()
    torch.save([side.model.state_dict(), side.optimizer.state_dict()], stream)
    return stream.getvalue()


def _restore(side: Side, saved: bytes) -> None:
    weights, states = torch.load(io.BytesIO(saved))
    side.model.load_state_dict(weights)
    side.optimizer.load_state_dict(states)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 16), data=st.data())
def test_random_choices_of_chunks(seed: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    draw = random.Random(seed)
    machine = emulated(bytes_per_s=data.draw(st.sampled_from([4e9, 3e8])))
    options = options_for(GPT, lambda _: draw.random() < 0.5, OPTIMIZERS[name], machine=machine)
    accumulate = data.draw(st.integers(1, 2))
    batches = GPT.batches(2 * accumulate)
    compare(
        GPT.build(),
        OPTIMIZERS[name],
        batches,
        accumulate=accumulate,
        evaluate=data.draw(st.booleans()),
        compile=options,
    )
    torch._dynamo.reset()
