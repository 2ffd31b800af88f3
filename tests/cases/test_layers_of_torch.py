"""Layers of torch.nn, one after the other: trained, then evaluated without gradients."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from case_models import (
    EVERY_WAY,
    Way,
    compile_spare,
    in_turn,
    pair_of,
    randn,
    token_ids,
)
from harness import Batch
from pairs import Side
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import elixir_fx

THREADS = 1
WIDTH = 32


class Around(nn.Module):
    """The layer after one of our own. What it returns beside a tensor is left out."""

    def __init__(self, make: Callable[[], nn.Module], *shape: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = make()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).reshape(self.shape)
        y = self.layer(h)
        return y if isinstance(y, Tensor) else y[0]


class Itself(nn.Module):
    """Attention of a stream to itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **options)

    def forward(self, h: Tensor) -> Tensor:
        y, _ = self.attention(h, h, h, need_weights=False)
        weighted, weights = self.attention(h, h, h)
        return y + weighted * weights.mean()


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = (
            nn.ConvTranspose2d(8, 4, 3, stride=2),
            nn.InstanceNorm2d(4, affine=True),
        )

    def forward(self, h: Tensor) -> Tensor:
        return torch.nn.functional.interpolate(self.norm(self.up(h)), scale_factor=1.5)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, 16)

    def forward(self, h: Tensor) -> Tensor:
        state = None
        for row in h.unbind(1):
            state = self.cell(row, state)
        return state[0]


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, 5)

    def forward(self, h: Tensor) -> Tensor:
        return self.bilinear(h, h.flip(0))


def normed(norm: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: norm(nn.Linear(WIDTH, WIDTH), **options)


STREAM = (2, 4, WIDTH)
IMAGE = (2, 8, 4, 4)
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cells": (Cells, STREAM),
    "attention": (Itself, STREAM),
    "attention, key and value bias": (lambda: Itself(add_bias_kv=True, dropout=0.1), STREAM),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.1, batch_first=True),
        STREAM,
    ),
    "encoder stack": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True), 2
        ),
        STREAM,
    ),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6)), IMAGE),
    "groups": (lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=4), nn.GroupNorm(2, 8)), IMAGE),
    "transposed": (Generator, IMAGE),
    "pools": (lambda: nn.Sequential(nn.Conv2d(8, 4, 1), nn.MaxPool2d(2), nn.PReLU(4)), IMAGE),
    "bilinear": (Pairs, (8, WIDTH)),
    "weight norm": (normed(parametrizations.weight_norm), STREAM),
    "spectral norm": (normed(parametrizations.spectral_norm), STREAM),
    "orthogonal": (normed(parametrizations.orthogonal), STREAM),
    "old weight norm": (normed(nn.utils.weight_norm), STREAM),
    "old spectral norm": (normed(nn.utils.spectral_norm), STREAM),
    "gated": (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GLU(), nn.RMSNorm(32)), STREAM),
    "dropouts": (lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.AlphaDropout(0.2)), STREAM),
    "feature dropout": (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.Dropout2d(0.3)), IMAGE),
    "random slope": (lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.RReLU()), STREAM),
}


@pytest.fixture
def slow_attention() -> Iterator[None]:
    """Attention in eval mode has a fast path of its own in eager, which no capture takes."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(("way", "name"), in_turn(LAYERS))
def test_a_layer(way: Way, name: str, slow_attention: None, tmp_path: Path) -> None:
    make, shape = LAYERS[name]
    rows = torch.Size(shape).numel() // WIDTH
    batches: list[Batch] = [(randn(rows, WIDTH, seed=seed),) for seed in range(2)]
    pair = pair_of(way, lambda: Around(make, *shape), batches, tmp_path, room=0.3)
    pair.train(2)
    pair.check()

    def evaluated(side: Side) -> Tensor:
        side.net.eval()
        with torch.no_grad():
            y = side.net(*batches[0])
        side.net.train()
        return y

    pair.do(evaluated)
    pair.train(1)
    pair.check()


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(WIDTH, 24, num_layers=2, batch_first=True),
    "lstm, both ways": lambda: nn.LSTM(WIDTH, 16, bidirectional=True),
    "gru": lambda: nn.GRU(WIDTH, 24),
    "rnn": lambda: nn.RNN(WIDTH, 24),
}


@pytest.mark.parametrize("name", RECURRENT)
@EVERY_WAY
def test_recurrent_layers(way: Way, name: str, tmp_path: Path) -> None:
    """Dynamo breaks the graph around them: the backend runs them, compile() says the line."""

    def build() -> nn.Module:
        return Around(RECURRENT[name], *STREAM)

    batches: list[Batch] = [(randn(8, WIDTH),)]
    if way.entry == "compile":
        with pytest.raises(elixir_fx.CaptureError, match=r"test_layers_of_torch\.py:\d+: .*LSTM"):
            compile_spare(build())(*batches[0])
        return
    options = {"memory": "1GiB", "disk": str(tmp_path)}
    if way.budget == "tight":
        options["keep"] = {"first": "disk", "layer": "disk"}
    pair = pair_of(way, build, batches, tmp_path, options=options)
    pair.train(3)
    pair.check()


TABLES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(50, WIDTH, padding_idx=0),
    "by frequency": lambda: nn.Embedding(50, WIDTH, scale_grad_by_freq=True),
    "largest norm": lambda: nn.Embedding(50, WIDTH, max_norm=1.0),
    "bag": lambda: nn.EmbeddingBag(50, WIDTH, mode="mean"),
}


@pytest.mark.parametrize("name", TABLES)
@EVERY_WAY
def test_a_table(way: Way, name: str, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(TABLES[name](), nn.Linear(WIDTH, WIDTH))

    pair = pair_of(way, build, [(token_ids(3, 4, below=50),)], tmp_path)
    pair.train(3)
    pair.check()


@pytest.mark.parametrize("bag", [False, True])
@EVERY_WAY
def test_sparse_gradients(way: Way, bag: bool, tmp_path: Path) -> None:
    def build() -> nn.Module:
        kind = nn.EmbeddingBag if bag else nn.Embedding
        return nn.Sequential(kind(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    pair = pair_of(way, build, [(token_ids(3, 4, below=50),)], tmp_path, make)
    pair.train(2)
    pair.backward()

    def seen(side: Side) -> list[Any]:
        gradient = side.model[0].weight.grad
        return [gradient.is_sparse, gradient.to_dense()]

    pair.do(seen)
    pair.do(lambda side: [p.detach() for p in side.model.parameters()])
