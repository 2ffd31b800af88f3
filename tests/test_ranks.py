"""Ranks: what they agree on, send each other, add up and share, and how one tells of its failure.

Whole training runs of several ranks are in tests/cases/test_ranks.py.
"""

import gc
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor

from elixir_fx.errors import RankError
from elixir_fx.runtime.ranks import Ranks, add_up, check_equal

CPU = torch.device("cpu")
GATHERED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool,
            torch.int16, torch.complex64, torch.float8_e4m3fn)  # fmt: skip
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def here() -> Ranks:
    return Ranks(dist.group.WORLD, CPU)


def noise(rank: int, dtype: torch.dtype, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 3).to(dtype)


def shared_files() -> int:
    """Mappings and descriptors of memory that ranks share."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:elixir_fx")
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    open_ones = [os.readlink(link) for link in links if os.path.lexists(link)]
    return maps + sum("memfd:elixir_fx" in name for name in open_ones)


# -- what every group can do -------------------------------------------------------------------


def everything(rank: int) -> dict[str, Any]:
    """Checks what it can here, so that one start of the processes serves all."""
    ranks = here()
    size = dist.get_world_size()
    assert (ranks.rank, ranks.size, ranks.local, ranks.replicas) == (rank, size, True, 1)
    assert not ranks.fake and ranks.size == size

    assert ranks.agree("begin") and ranks.agree("begin", 7)
    assert ranks.agree("a digest of one", int(rank == size - 1)) is False
    first, second = ranks.propose("one", 1), ranks.propose("two", rank)  # both under way
    assert first.same() and not second.same()

    given = [None, "x" * 10 ** (3 * rank), {"rank": [rank] * rank}, rank / 3, "é€"]
    found = ranks.exchange(given)
    assert [entry[2] for entry in found] == [{"rank": [r] * r} for r in range(size)]
    assert [len(entry[1]) for entry in found] == [10 ** (3 * r) for r in range(size)]
    assert found[rank] == given

    broadcasts = (
        lambda r: torch.full((2, 3), float(r)),
        lambda r: torch.arange(6.0).view(2, 3).t() + r,  # strided
        lambda r: torch.tensor(r),
        lambda r: torch.tensor([r == 0]),
        lambda r: torch.full((3,), r, dtype=torch.bfloat16),
        lambda r: torch.empty(0),
        lambda r: torch.nn.Parameter(torch.full((2,), float(r))),
    )
    for make in broadcasts:
        mine = make(rank)
        got = ranks.broadcast(mine)
        assert torch.equal(got, make(0)) and got.dtype == mine.dtype
        assert torch.equal(mine, make(rank))  # what was given is left alone

    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        parts = [noise(r, dtype, 5) for r in range(size)]
        assert torch.equal(ranks.total(parts[rank]), torch.stack(parts).sum(0))
        assert torch.equal(ranks.total(parts[rank], largest=True), torch.stack(parts).amax(0))
    whole = ranks.total(torch.tensor(rank + 1.0))
    assert whole.shape == () and whole.item() == sum(range(1, size + 1))

    for dtype in GATHERED:
        for share in (1, 64, 5000):
            parts = [noise(r, torch.float32, share).mul(9).to(dtype) for r in range(size)]
            flat = torch.zeros(share * size, dtype=dtype)
            flat[rank * share : (rank + 1) * share] = parts[rank]
            ranks.gather(flat)
            expected = torch.cat([part.view(torch.uint8) for part in parts])
            assert torch.equal(flat.view(torch.uint8), expected), dtype

    sums = {}
    for dtype in SUMMED:
        flats = [noise(r, dtype, 640 * size) for r in range(size)]
        room = torch.empty_like(flats[rank])
        got = ranks.scatter_sum(flats[rank].clone(), room)
        own = [flat.view(size, -1)[rank] for flat in flats]
        total = own[0].clone()
        for part in own[1:]:
            total += part  # in the order of the ranks, rounded to this dtype each time
        assert torch.equal(got, total), dtype
        assert got.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()
        everybody = ranks.sum_whole(flats[rank].clone())
        assert torch.allclose(everybody.float(), torch.stack(flats).float().sum(0), atol=0.3)
        sums[str(dtype)] = everybody
    ranks.meet()
    check_equal(ranks, "the parameters", [("a", "float32[2]"), ("b", "")])
    ranks.close()
    ranks.close()
    return sums


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_send_and_add_up(size: int) -> None:
    first, *others = run(size, everything)
    for other in others:  # a sum over all is the same to the last bit
        assert all(torch.equal(first[dtype], other[dtype]) for dtype in first)


@pytest.mark.parametrize("dtype", SUMMED)
def test_rows_are_added_first_to_last(dtype: torch.dtype) -> None:
    rows = torch.stack([noise(row, dtype, 100) for row in range(4)])
    total = ((rows[0] + rows[1]) + rows[2]) + rows[3]
    into = torch.empty(100, dtype=dtype)
    assert add_up(rows.clone(), into) is into and torch.equal(into, total)
    assert torch.equal(add_up(rows, rows[0]), total)


# -- memory that all see -----------------------------------------------------------------------


def share(rank: int) -> list[int]:
    before = shared_files()
    ranks = here()
    with_page = shared_files()
    memory = ranks.share(10_000)
    assert memory.dtype == torch.uint8 and memory.shape == (10_000,) and not memory.any()
    ranks.agree("write")
    memory[rank * 100 : (rank + 1) * 100] = rank + 1
    ranks.agree("look")
    assert [int(memory[r * 100]) for r in range(ranks.size)] == [1, 2, 3][: ranks.size]
    assert memory.count_nonzero() == 100 * ranks.size
    view = memory[:8].view(torch.float64)
    assert not [name for name in os.listdir("/dev/shm") if "elixir" in name]
    with_memory = shared_files()
    ranks.agree("looked")
    del memory
    kept = shared_files()  # the view holds it
    del view
    gone = shared_files()
    ranks.close()
    del ranks
    return [before, with_page, with_memory, kept, gone, shared_files()]


def test_shared_memory_is_seen_by_all_and_goes_with_its_last_view() -> None:
    for before, with_page, with_memory, kept, gone, after in run(3, share):
        assert before == after == 0
        assert 0 < with_page == gone < with_memory == kept


# -- failures ----------------------------------------------------------------------------------


def other_words(rank: int) -> Any:
    here().agree("step" if rank else "call the model")


def one_more(rank: int) -> Any:
    ranks = here()
    if rank == 0:
        ranks._sequence += 1  # as if it had proposed something that the other did not
    ranks.agree("backward")


def fails(rank: int) -> Any:
    ranks = here()
    ranks.agree("begin")
    if rank == 1:
        with ranks.together("in its forward"):
            raise ValueError("no such token")
    try:
        ranks.agree("wait for the other")
    except RankError:
        with pytest.raises(RankError, match=r"rank 1 failed in its forward: ValueError: no such"):
            ranks.gather(torch.zeros(4))  # it stays failed
        raise


def slow_and_failed(rank: int) -> Any:
    """The message is there before the rank that reads it asks."""
    ranks = here()
    ranks.agree("begin")
    if rank == 1:
        ranks.fail(ValueError("at once"))
        ranks.fail(ValueError("and again"))
        time.sleep(0.5)
        return
    time.sleep(0.3)
    ranks.gather(torch.zeros(4))


def other_parameters(rank: int, told: list[list[tuple[str, str]]]) -> Any:
    check_equal(here(), "the parameters", told[rank])


STEP = "rank 0: call the model; rank 1: step"
FAILED = "rank 1 failed in its forward: ValueError: no such token"
AB = [("a", "f32[2]"), ("b", "f32[3]")]
CASES: dict[str, tuple[Any, list[tuple[str, str] | None]]] = {
    "other words": (other_words, [("RankError", STEP)] * 2),
    "out of step": (one_more, [("RankError", "rank 0: backward; rank 1: backward")] * 2),
    "one fails": (fails, [("RankError", FAILED), ("ValueError", "no such token")]),
    "failed before": (
        slow_and_failed,
        [("RankError", "rank 1 failed: ValueError: at once"), None],
    ),
    "another shape": (
        partial(other_parameters, told=[AB, [AB[0], ("b", "f32[4]")]]),
        [("RankError", "differs on rank 1: b f32[3] on rank 0, b f32[4] on rank 1")] * 2,
    ),
    "one less": (
        partial(other_parameters, told=[AB, AB[:1]]),
        [("RankError", "differs on rank 1: b f32[3] on rank 0, nothing on rank 1")] * 2,
    ),
    "one more": (
        partial(other_parameters, told=[AB[:1], AB]),
        [("RankError", "differs on rank 1: nothing on rank 0, b f32[3] on rank 1")] * 2,
    ),
}


def one_case(rank: int, name: str) -> tuple[str, str] | None:
    """How it ended, as a result: the processes are kept so."""
    try:
        CASES[name][0](rank)
    except (RankError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("name", CASES)
def test_a_failure_is_told_to_all_in_the_same_words(name: str) -> None:
    for got, wanted in zip(run(2, one_case, name), CASES[name][1], strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert got[0] == wanted[0] and wanted[1] in got[1]


# -- groups one after the other ----------------------------------------------------------------


def again(rank: int) -> int:
    """As when a model is compiled, deleted, and another one compiled."""
    for number in range(3):
        ranks = here()
        assert ranks.agree(f"time {number}")
        ranks.close()
        time.sleep(0.2 * rank)
    return number


def collected_sooner(rank: int) -> bool:
    """A collector may end what is left of a model sooner on one rank."""
    old = here()
    if rank:
        old.close()
    return here().agree("begin")


def beside_a_smaller_group(rank: int) -> bool:
    """The user made a group of some ranks before."""
    dist.new_group([0])
    return here().agree("begin")


@pytest.mark.parametrize("function", [again, collected_sooner, beside_a_smaller_group])
def test_ranks_can_be_made_whatever_groups_there_are(function: Any) -> None:
    assert len(run(2, function)) == 2


def close_late(rank: int, file: Path) -> None:
    ranks = here()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=1)
    ranks.close()


def test_ranks_are_closed_after_the_user_began_anew(tmp_path: Path) -> None:
    run(1, close_late, tmp_path / "meeting")


def narrow(rank: int) -> str:
    return json.dumps(here().broadcast(torch.full((3,), rank, dtype=torch.int16)).tolist())


def test_any_dtype_is_broadcast() -> None:
    assert run(2, narrow) == ["[0, 0, 0]"] * 2


def nothing(rank: int) -> int:
    return here().share(0).numel()


def test_no_memory_can_be_shared() -> None:
    assert run(2, nothing) == [0, 0]
