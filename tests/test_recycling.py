"""Results in recycled memory: the same bits, and never memory that somebody still looks at."""

from pathlib import Path

import exact
import pytest
import torch
from graphs import NAMED, gpt
from harness import adamw, budget, compare
from torch import nn

from elixir_fx import recycling
from elixir_fx.machine import Tier
from elixir_fx.runtime.recycler import Recycler
from elixir_fx.units import GIB

GPT = gpt(layers=2, width=64, seq=32)


@pytest.fixture(autouse=True)
def recycle_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recycling, "SMALLEST_BYTES", 1)


def tight(model: nn.Module, batch: object, folder: Path) -> dict[str, object]:
    memory = budget(model, batch, 0.0, disk_memory=GIB, optimizer="adamw")
    return {"memory": memory, "disk": str(folder)}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_named_model_keeps_its_bits(name: str, tmp_path: Path) -> None:
    example = NAMED[name]
    options = tight(example.build(), example.batches(1)[0], tmp_path)
    compare(example.build(), adamw, example.batches(3), compile=options)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_gradients_that_stay_are_not_taken(share: float, tmp_path: Path) -> None:
    memory = budget(GPT.build(), GPT.batches(1)[0], share, disk_memory=GIB, optimizer="adamw")
    options = {"memory": memory, "disk": str(tmp_path)}
    run = compare(GPT.build(), adamw, GPT.batches(3), compile=options)
    homes = {chunk.homes.gradients for chunk in run.plan.layout.chunks}
    assert Tier.DEVICE in homes or share < 0.9


def test_blocks_are_used_again(tmp_path: Path) -> None:
    taken: list[int] = []
    model = GPT.build()
    options = tight(model, GPT.batches(1)[0], tmp_path)
    compiled = exact.compile(model, **options)
    for batch in GPT.batches(3):
        compiled(*batch).backward()
        recycler = compiled._session.engine.recycler
        taken.append(recycler.reused)
    assert 0 < taken[1] < taken[2]


def test_a_kept_graph_keeps_its_values(tmp_path: Path) -> None:
    plain, model = GPT.build(), GPT.build()
    batch, other = GPT.batches(2)
    compiled = exact.compile(model, **tight(model, batch, tmp_path))
    for net in (plain, compiled):
        loss = net(*batch)
        loss.backward(retain_graph=True)
        net(*other).backward()  # would write over blocks that the first graph gave away
        loss.backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.clone()), name


def test_two_forwards_before_a_backward(tmp_path: Path) -> None:
    plain, model = GPT.build(), GPT.build()
    batches = GPT.batches(3)
    compiled = exact.compile(model, **tight(model, batches[0], tmp_path))
    for net in (plain, compiled):
        first, second = net(*batches[0]), net(*batches[1])
        net(*batches[2])  # its graph is dropped
        (first * second).backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad.clone()), name


def test_memory_that_somebody_else_holds_is_not_taken() -> None:
    recycler = Recycler()
    value = recycler.take(4096, 0, (1024,), (1,), torch.float32)
    view = value[3:]
    recycler.give(value, 4096)
    assert recycler.held_bytes == 0
    del view
    leaf = torch.nn.Parameter(torch.zeros(1024))
    leaf.grad = value
    recycler.give(value, 4096)
    assert recycler.held_bytes == 0
    leaf.grad = value.view(1024)
    recycler.give(value, 4096)
    assert recycler.held_bytes == 0
    leaf.grad = None
    recycler.give(value, 4096)
    assert recycler.held_bytes == 4096
    again = recycler.take(4096, 0, (4, 256), (256, 1), torch.float32)
    assert recycler.held_bytes == 0 and again.data_ptr() == value.data_ptr()


def test_no_more_is_held_than_there_is_room_for() -> None:
    recycler = Recycler()
    for nbytes in (4096, 8192, 12288):
        recycler.give(recycler.take(nbytes, 1 << 20, (nbytes,), (1,), torch.uint8), 1 << 20)
    assert recycler.held_bytes == 24576
    recycler.take(16384, 13000, (16384,), (1,), torch.uint8)
    assert recycler.held_bytes == 12288


SHAPE, STRIDES = (256, 512), (512, 1)
BLOCK_BYTES = 256 * 512 * 4


def lend(recycler: Recycler) -> torch.Tensor:
    return recycler.empty(SHAPE, STRIDES, torch.float32)


def test_a_lent_block_is_lent_again_once_nobody_holds_it() -> None:
    recycler = Recycler()
    recycler.idle_bytes = BLOCK_BYTES
    one = lend(recycler)
    view, address = one[3:], one.data_ptr()
    del one
    other = lend(recycler)
    assert other.data_ptr() != address  # a view holds it
    del view
    again = lend(recycler)
    assert again.data_ptr() == address and recycler.reused == 1
    assert again.shape == SHAPE and again.stride() == STRIDES


def test_idle_lent_blocks_go_back_beyond_their_room() -> None:
    recycler = Recycler()
    recycler.idle_bytes = BLOCK_BYTES
    blocks = [lend(recycler) for _ in range(5)]
    assert len(recycler._lent[BLOCK_BYTES]) == 5
    blocks.clear()
    recycler.shrink_idle(recycler.idle_bytes)
    assert len(recycler._lent[BLOCK_BYTES]) == 1
    recycler.shrink_idle(0)
    assert recycler._lent[BLOCK_BYTES] == []


def test_small_results_are_not_lent() -> None:
    recycler = Recycler()
    assert recycler.empty((4, 4), (4, 1), torch.float32).shape == (4, 4)
    assert recycler.empty((0, 4), (4, 1), torch.float32).numel() == 0
    assert not recycler._lent
