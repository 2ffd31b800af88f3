"""Shapes that change from call to call: how many graphs, plans and moves that takes."""

import warnings
from pathlib import Path

import torch
from case_models import WHEN_TIGHT, Tokens, Way, pair_of, randn, token_ids
from harness import Batch
from torch import Tensor, nn

THREADS = 1


def ids(batch: int, length: int) -> Batch:
    return (token_ids(batch, length, below=50, seed=batch + length),)


@WHEN_TIGHT
def test_batch_sizes(way: Way, tmp_path: Path) -> None:
    """8, 8, 8, 5, 8, 3, 8, then lengths 16 to 23: few graphs, one layout, packed once."""
    sizes = [*((size, 16) for size in (8, 8, 8, 5, 8, 3, 8)), *((2, n) for n in range(16, 24))]
    pair = pair_of(way, Tokens, [ids(*size) for size in sizes], tmp_path)
    pair.train()
    layout = pair.ours.net.plan.layout if way.entry == "compile" else None
    pair.train(len(sizes) - 1)
    pair.check()
    if way.entry == "compile":
        assert pair.ours.net.plan.layout is layout
        assert pair.ours.net._session._capture.graphs <= 3


@WHEN_TIGHT
def test_many_lengths(way: Way, tmp_path: Path) -> None:
    """Twenty lengths, twice: the graphs kept are bounded, and nothing warns."""
    lengths = range(36, 16, -1)
    pair = pair_of(way, Tokens, [ids(2, length) for length in lengths], tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.train(len(lengths) + 3)
    pair.check()
    if way.entry == "compile":
        assert len(pair.ours.net.plan.schedules) <= 8


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).relu().mean((2, 3)))


@WHEN_TIGHT
def test_image_sizes(way: Way, tmp_path: Path) -> None:
    """Height, width and batch change together, and the memory format does."""
    shapes = [(2, 3, 12, 12), (2, 3, 8, 12), (1, 3, 12, 8), (2, 3, 10, 10)]
    batches: list[Batch] = [(randn(*shape),) for shape in shapes]
    batches.append((randn(2, 3, 12, 12).to(memory_format=torch.channels_last),))
    pair = pair_of(way, Images, batches, tmp_path, room=0.2)
    pair.train(len(batches))
    pair.check()


class Growing(nn.Module):
    """The batch as a list of tensors, more of them each time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 32)

    def forward(self, parts: list[Tensor]) -> Tensor:
        return self.body(torch.cat(parts)).tanh()


@WHEN_TIGHT
def test_lists_that_grow(way: Way, tmp_path: Path) -> None:
    batches: list[Batch] = [([randn(2, 32)] * count,) for count in (4, 3, 2, 1)]
    pair = pair_of(way, Growing, batches, tmp_path, room=0.2)
    pair.train(6)
    pair.check()
