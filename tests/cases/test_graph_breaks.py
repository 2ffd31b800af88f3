"""What one graph cannot hold: printing, values of tensors, branches by data. The backend runs it
around breaks; compile() refuses it at once and names the line."""

import random
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import exact
import pytest
import torch
from case_models import EVERY_WAY, Way, mlp, pair_of, randn, token_ids
from harness import Batch
from pairs import SPARE, Side
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential

import elixir_fx

THREADS = 1


class Two(nn.Module):
    """Two layers and something between them that breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))


class Prints(Two):
    def between(self, h: Tensor) -> Tensor:
        print("hidden", tuple(h.shape))
        return h.sin()


class Reads(Two):
    def between(self, h: Tensor) -> Tensor:
        return h * h.detach().abs().mean().item()


class BranchesByValue(Two):
    def between(self, h: Tensor) -> Tensor:
        return h.sin() if h.sum() > 0 else h.cos()


class BranchInTheEnd(Two):
    """The second layer is used in the eager part only."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if torch.isnan(h).any():
            raise ValueError("not a number")
        return self.second(h) * 2


class Skips(Two):
    """A layer left out by a random number of Python's."""

    def between(self, h: Tensor) -> Tensor:
        return h.sin() if random.random() < 0.5 else h.cos()


class Logs(Two):
    def between(self, h: Tensor) -> Tensor:
        warnings.warn(f"mean {float(h.mean()):.1f}", stacklevel=2)
        return h.tanh()


class SizesByValue(Two):
    """Rows that pass a test, as many as there are."""

    def between(self, h: Tensor) -> Tensor:
        kept = h[h[:, 0] > 0]
        return torch.cat([kept.sin(), h])


class Sequenced(Two):
    def between(self, h: Tensor) -> Tensor:
        layers = [functional.gelu, torch.tanh]
        return checkpoint_sequential(layers, 2, h, use_reentrant=False)


class Averaged(Two):
    """Batch statistics whose factor is a count of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(48, momentum=None)

    def between(self, h: Tensor) -> Tensor:
        return self.norm(h)


class Recurrent(Two):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.LSTM(48, 48)

    def between(self, h: Tensor) -> Tensor:
        return self.middle(h)[0]


class Experts(nn.Module):
    """A loop over counts; an expert without tokens is not run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        counts = torch.bincount(chosen, minlength=4).tolist()
        y = torch.zeros_like(x)
        for index, count in enumerate(counts):
            if count:
                rows = (chosen == index).nonzero().squeeze(1)
                y = y.index_add(0, rows, self.experts[index](x[rows]) * weights[rows, index, None])
        return y


BREAKS = [
    Prints, BranchesByValue, BranchInTheEnd, Logs, Skips, Sequenced, Averaged, Recurrent, Experts,
]  # fmt: skip
VALUES = [Reads, SizesByValue]
BATCHES: list[Batch] = [(randn(6, 32, seed=seed),) for seed in range(3)]


@pytest.mark.filterwarnings("ignore:mean")
@pytest.mark.parametrize("kind", BREAKS)
@EVERY_WAY
def test_breaks(way: Way, kind: type[nn.Module], tmp_path: Path) -> None:
    """The same numbers through the backend, with weights that are away in both parts."""
    if way.entry == "compile":
        refused(kind, way, tmp_path)
        return
    names = ["experts", "gate"] if kind is Experts else ["first", "second"]
    pair = pair_of(way, kind, BATCHES, tmp_path, options=budget(way, tmp_path, names))
    for _ in range(3):
        batch = next(pair.batches)
        pair.do(lambda side, batch=batch: (random.seed(5), side.step(batch))[1])
    pair.check()
    for _ in range(2):
        pair.backward(lambda side, batch: (random.seed(5), side.net(*batch).square().mean())[1])
    pair.do(lambda side: (random.seed(5), torch.no_grad()(side.net)(BATCHES[0][0]))[1])
    pair.check()


@pytest.mark.parametrize("kind", VALUES)
@EVERY_WAY
def test_values(way: Way, kind: type[nn.Module], tmp_path: Path) -> None:
    """A number or a size that a tensor says is captured, and is another one in each call."""
    pair = pair_of(way, kind, BATCHES, tmp_path, room=0.3)
    pair.train(4)
    pair.check()
    pair.do(lambda side: torch.no_grad()(side.net)(BATCHES[1][0]))


def budget(way: Way, folder: Path, names: Sequence[str]) -> dict[str, object]:
    """compile() cannot say the smallest budget of a model that it cannot capture."""
    if way.budget == "spare":
        return SPARE
    keep = dict.fromkeys(names, "disk")
    return {"memory": "1MiB", "disk": str(folder), "keep": keep}


def refused(kind: type[nn.Module], way: Way, folder: Path) -> None:
    """At the first call, with file and line of the user's; the model is as it was."""
    model = kind()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {**SPARE, "disk": str(folder)} if way.budget == "tight" else SPARE
    net = exact.compile(model, **options)
    with pytest.raises(elixir_fx.CaptureError) as caught:
        net(BATCHES[0][0])
    assert re.search(r"test_graph_breaks\.py:\d+: ", str(caught.value)), str(caught.value)
    assert "backend='elixir_fx'" in str(caught.value)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


class Outside(nn.Module):
    """A part that the user keeps out of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    @torch.compiler.disable
    def aside(self, h: Tensor) -> Tensor:
        return self.second(h).sin()

    def forward(self, x: Tensor) -> Tensor:
        return self.aside(self.first(x).tanh()) + x


@EVERY_WAY
def test_a_part_kept_out_of_the_graph(way: Way, tmp_path: Path) -> None:
    if way.entry == "compile":
        refused(Outside, way, tmp_path)
        return
    pair = pair_of(
        way, Outside, BATCHES, tmp_path, options=budget(way, tmp_path, ["first", "second"])
    )
    pair.train(3)
    pair.check()


# -- what is captured although it looks like a break -----------------------------------------------


class NormFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = nn.LayerNorm(32), mlp()

    def forward(self, x: Tensor) -> Tensor:
        assert self.norm.weight.shape == (32,) and self.norm.weight.numel() == x.shape[-1]
        return self.body(self.norm(x))


@EVERY_WAY
def test_capture_sees_full_shapes(way: Way, tmp_path: Path) -> None:
    """A norm comes first, and weights that are away have their shapes in a second capture."""
    pair = pair_of(way, NormFirst, [(randn(6, 32),), (randn(5, 32),)], tmp_path, room=0.3)
    pair.train(4)
    pair.check()


class Loops(nn.Module):
    """Loops and branches over shapes and plain values are no breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(9, 32), nn.Linear(32, 32)

    def forward(self, ids: Tensor, words: list[str]) -> Tensor:
        h = self.table(ids)
        for word in words:
            h = getattr(torch, word)(self.body(h)) if len(word) > 2 else h
        return h if h.shape[0] > 1 else h * 2


@EVERY_WAY
def test_loops_over_plain_values(way: Way, tmp_path: Path) -> None:
    ids = token_ids(4, below=9)
    batches: list[Batch] = [(ids, ["sin", "tanh"]), (ids, ["cos"]), (ids[:1], ["cos", "at"])]
    pair = pair_of(way, Loops, batches, tmp_path, room=0.5)
    pair.train(3)
    pair.check()

    def mean(side: Side) -> Tensor:
        return side.net(ids, ["sin"]).mean().detach()

    pair.do(mean)
