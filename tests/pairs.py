"""A plain model and its compiled twin, driven by the same code and compared bit for bit.

pair = Pair(build, batches, tight(build, batches[0], tmp_path))
pair.do(lambda side: [p.norm() for p in side.net.parameters()])
pair.train(3)
pair.check()
"""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import exact
import torch
from graphs import seeded
from graphs_facts import cpu
from harness import (
    Batch,
    MakeOptimizer,
    adamw,
    call,
    difference,
    loss_of,
    planning,
    step_facts,
)
from torch import Tensor, nn

from elixir_fx import AwayParameter
from elixir_fx.planner.search import smallest
from elixir_fx.units import GIB

Build = Callable[[], nn.Module]
Entry = Literal["compile", "backend"]
MACHINE = cpu()  # as it might be measured: nothing of it is in question here
SPARE: Mapping[str, Any] = {"memory": "1GiB", "machine": MACHINE}


def memory_needed(model: nn.Module, batch: Batch, optimizer: Any = "adamw", **options: Any) -> int:
    """The smallest budget that works with a disk and all activations kept, as the backend keeps
    them."""
    options = {"machine": MACHINE, "disk_memory": GIB, **options}
    session = planning(model, optimizer, **options)
    facts = step_facts(session, batch)
    return smallest(facts, session.machine, session.lowering.limits)


def tight(
    build: Build, batch: Batch, folder: Path, optimizer: Any = "adamw", **options: Any
) -> dict[str, Any]:
    """compile()'s options for the smallest budget, with a disk."""
    memory = memory_needed(seeded(0, build), batch, optimizer, **options)
    return {"memory": memory, "disk": str(folder), "machine": MACHINE, **options}


def is_away(parameter: Any) -> bool:
    return isinstance(parameter, AwayParameter)


def plain_loss(side: "Side", batch: Batch) -> Tensor:
    return loss_of(call(side.net, batch))


@dataclass(eq=False)
class Side:
    """One of the two: `net` is called, `model` is the user's module, `log` for hooks."""

    model: nn.Module
    net: Any
    optimizer: torch.optim.Optimizer
    log: list[Any]

    def step(self, batch: Batch, loss: Callable[["Side", Batch], Tensor] = plain_loss) -> Tensor:
        value = loss(self, batch)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.detach()


def through(
    entry: Entry,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: Mapping[str, Any],
) -> Any:
    """`model` compiled by one of the two entry points."""
    if entry == "compile":
        return exact.compile(model, optimizer=optimizer, **options)
    given = {"model": model, "optimizer": optimizer, "kernels": "eager", **options}
    return torch.compile(model, backend="elixir_fx", options=given)


class Pair:
    """`options` are compile()'s; with `bind=False` the optimizer stays unknown to it.

    `entry` is how ours is made: by elixir_fx.compile, or by torch.compile with our backend.
    """

    def __init__(
        self,
        build: Build,
        batches: Sequence[Batch],
        options: Mapping[str, Any],
        make_optimizer: MakeOptimizer = adamw,
        bind: bool = True,
        entry: Entry = "compile",
    ) -> None:
        self.batches = itertools.cycle(batches)
        self.sides = []
        for compiled in (False, True):
            model = seeded(0, build)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = make_optimizer(trained)
            net: Any = model
            if compiled:
                net = through(entry, model, optimizer if bind else None, options)
            self.sides.append(Side(model, net, optimizer, []))
        self.plain, self.ours = self.sides
        self._first = [
            (side.net.state_dict(), copy.deepcopy(side.optimizer.state_dict()))
            for side in self.sides
        ]
        aliasing = 1 if entry == "compile" else 2  # state dicts of these sides are live values
        self._first[:aliasing] = copy.deepcopy(self._first[:aliasing])

    def restart(self) -> None:
        """Both as they were at first, as far as training goes."""
        for side, (weights, states) in zip(self.sides, self._first, strict=True):
            side.net.load_state_dict(weights)
            side.optimizer.zero_grad()
            side.optimizer.load_state_dict(copy.deepcopy(states))
            side.log.clear()

    def do(self, use: Callable[[Side], Any]) -> Any:
        """Run `use` on both sides; what it returns must be equal. Our result."""
        results = []
        for side in self.sides:
            torch.manual_seed(0)
            results.append(use(side))
        same(*results)
        return results[1]

    def train(self, steps: int = 1, loss: Callable[[Side, Batch], Tensor] = plain_loss) -> None:
        for _ in range(steps):
            batch = next(self.batches)
            self.do(lambda side, batch=batch: side.step(batch, loss))

    def backward(self, loss: Callable[[Side, Batch], Tensor] = plain_loss) -> None:
        batch = next(self.batches)
        self.do(lambda side: loss(side, batch).backward())

    def check(self) -> None:
        """Weights, gradients, buffers and optimizer states are equal, and what was logged."""
        self.do(lambda side: {name: p.detach() for name, p in side.model.named_parameters()})
        self.do(lambda side: {name: p.grad for name, p in side.model.named_parameters()})
        self.do(lambda side: dict(side.model.named_buffers()))
        self.do(lambda side: sorted_states(side.optimizer))
        self.do(lambda side: side.log)

    def finish(self) -> None:
        """End the step under way and do another: all is equal before, and at the end."""
        self.check()
        self.do(lambda side: side.optimizer.step())
        self.do(lambda side: side.optimizer.zero_grad())
        self.train(1)
        self.check()

    def away(self) -> list[str]:
        return [name for name, p in self.ours.model.named_parameters() if is_away(p)]


def sorted_states(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state dict, states in the order of parameters and not of their first steps."""
    state = optimizer.state_dict()
    return {**state, "state": dict(sorted(state["state"].items()))}


def same(plain: Any, ours: Any, where: str = "result") -> None:
    """Equal types, structure and bits."""
    if isinstance(plain, Tensor) and isinstance(ours, Tensor):
        words = difference(plain.detach(), ours.detach().clone())
        assert words is None, f"{where}: {words}"
        assert plain.requires_grad == ours.requires_grad, f"{where}: requires_grad"
    elif isinstance(plain, Mapping):
        assert list(plain) == list(ours), f"{where}: keys {list(plain)} against {list(ours)}"
        for key in plain:
            same(plain[key], ours[key], f"{where}[{key!r}]")
    elif isinstance(plain, list | tuple):
        assert len(plain) == len(ours), f"{where}: {len(plain)} against {len(ours)} entries"
        for index, (one, other) in enumerate(zip(plain, ours, strict=True)):
            same(one, other, f"{where}[{index}]")
    else:
        assert plain == ours, f"{where}: {plain!r} against {ours!r}"
