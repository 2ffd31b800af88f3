"""What the tests in tests/cases share: the ways a case is run, and small models.

    @EVERY_WAY
    def test_a_case(way: Way, tmp_path: Path) -> None:
        pair = pair_of(way, mlp, [(randn(4, 32),)], tmp_path)
        pair.train(2)
        pair.check()

runs through both entry points, each under a tight budget with a disk and, with `-m spare`, with
memory to spare (nothing moves).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
from graphs import seeded
from harness import Batch, MakeOptimizer
from made_plans import facts_of, on_disk
from pairs import SPARE, Entry, Pair, tight
from torch import Tensor, nn
from torch.nn import functional

from elixir_fx.planner.pack import chunk_sizes


@dataclass(frozen=True)
class Way:
    """An entry point, "compile" or "backend", and a budget, "spare" or "tight"."""

    entry: Entry
    budget: str

    def __str__(self) -> str:
        return f"{self.entry}-{self.budget}"


ENTRIES: tuple[Entry, ...] = ("compile", "backend")


def ways(*budgets: str, marks: Mapping[str, Any] | None = None) -> list[Any]:
    """Parameters of a test: both entry points, with each of these budgets."""
    return [
        pytest.param(
            Way(entry, budget), id=f"{entry}-{budget}", marks=(marks or {}).get(budget, ())
        )
        for entry in ENTRIES
        for budget in budgets
    ]


# Where memory is tight all that moves is at work; with memory to spare much less is.
EVERY_WAY = pytest.mark.parametrize(
    "way", ways("spare", "tight", marks={"spare": pytest.mark.spare})
)
WHEN_TIGHT = pytest.mark.parametrize("way", ways("tight"))
WHEN_SPARE = pytest.mark.parametrize("way", ways("spare"))


def in_turn(names: Iterable[str], budget: str = "tight") -> list[Any]:
    """(way, name) for each name, through one entry point and the other in turn: for what goes
    beyond the list of cases."""
    return [
        pytest.param(Way(ENTRIES[index % 2], budget), name, id=f"{ENTRIES[index % 2]}-{name}")
        for index, name in enumerate(names)
    ]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Equal numbers for equal arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def token_ids(*shape: int, below: int, seed: int = 0) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def decayed(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW that shows at once whether a parameter was stepped that should not be."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def pair_of(
    way: Way,
    build: Callable[[], nn.Module],
    batches: Sequence[Batch],
    folder: Path,
    make_optimizer: MakeOptimizer = decayed,
    room: float = 0.0,
    options: Mapping[str, Any] | None = None,
) -> Pair:
    """`room`: how much more than a tight budget, as a share, for later graphs that need more than
    the first. `options` replace those that the budget would give."""
    if options is None:
        options = dict(SPARE)
        if way.budget == "tight":
            options = _tight(way.entry, build, batches[0], folder, room)
    if way.entry == "backend":
        torch._dynamo.reset()  # else code that many tests share runs in eager after 8 captures
    return Pair(build, batches, options, make_optimizer, entry=way.entry)


def _tight(
    entry: Entry, build: Callable[[], nn.Module], batch: Batch, folder: Path, room: float
) -> dict[str, Any]:
    """For compile() everything is away by a plan made by hand, in chunks of several parameters; the
    backend plans by itself, under the smallest budget."""
    if entry == "compile":
        facts = facts_of(seeded(0, build), batch)
        return on_disk(facts, folder, room=room, chunk_bytes=chunk_sizes(facts)[-1])
    options = tight(build, batch, folder)
    return {**options, "memory": int((1 + room) * options["memory"])}


def gathered_blocks(pair: Pair) -> int:
    """How many chunks lie in the gather cache of a model of compile(); 0 between steps."""
    return len(pair.ours.net._session.engine.cache.gathered)


# -- models that several files use -----------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


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


class Tokens(nn.Module):
    """Ids of below 50 -> the loss of guessing them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.body = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.body(self.table(ids)).flatten(0, 1), ids.flatten())


class Branches(nn.Module):
    """One of two ways, as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        return self.c(self.b(x) if use_b else self.a(x))


class BothWays(nn.Module):
    """Two outputs, each with its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def compile_spare(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Any:
    return exact.compile(model, optimizer, **SPARE)
