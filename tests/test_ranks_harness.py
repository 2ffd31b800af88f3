"""ranks.py: values come back, and no failure, hang or death of a rank goes unseen."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run, start
from torch import Tensor


@dataclass
class Pair:
    """Pickled by the name that pytest gave this module."""

    mine: Tensor
    total: Tensor


def add(rank: int, given: Tensor) -> Pair:
    total = given + rank
    dist.all_reduce(total)
    return Pair(given + rank, total)


def process(rank: int) -> int:
    return os.getpid()


def settings(rank: int) -> tuple[Any, ...]:
    fresh = torch.get_num_threads(), torch.get_rng_state(), dist.get_world_size()
    torch.set_num_threads(2)
    torch.rand(3)
    return fresh


def one_raises(rank: int) -> None:
    print("rank", rank, "says this")
    if rank == 1:
        raise KeyError("only here")
    dist.all_reduce(torch.ones(1))


def all_raise(rank: int) -> None:
    flag = torch.tensor(rank)
    dist.all_reduce(flag)
    time.sleep(0.3 * rank)
    raise ValueError(f"the sum is {int(flag)}")


def sleep_in_one(rank: int) -> str:
    if rank == 1:
        time.sleep(1000)
    return "back"


def return_a_generator(rank: int) -> Any:
    return (number for number in range(rank))


def die(rank: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def die_at_the_third(rank: int) -> int:
    for number in range(3):
        if rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    return rank


def reduce_forever(rank: int, folder: Path) -> None:
    while True:
        dist.all_reduce(torch.ones(1))
        (folder / f"{rank}").touch()


def with_a_child(rank: int) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_values_come_back_by_rank() -> None:
    given = torch.arange(4.0)
    zero, one = run(2, add, given)
    assert isinstance(zero, Pair) and isinstance(one, Pair)
    assert torch.equal(zero.mine, given) and torch.equal(one.mine, given + 1)
    assert torch.equal(zero.total, 2 * given + 1) and torch.equal(one.total, zero.total)


def test_processes_are_kept_and_made_fresh() -> None:
    first = run(2, process)
    assert len({*first, os.getpid()}) == 3
    for _ in range(2):
        for threads, state, size in run(2, settings):
            assert (threads, size) == (1, 2)
            assert torch.equal(state, torch.Generator().manual_seed(0).get_state())
    assert run(2, process) == first


def test_one_rank_raises() -> None:
    before = run(2, process)
    with pytest.raises(RanksFailed, match="rank 1 raised KeyError: 'only here'") as caught:
        run(2, one_raises)
    waiting, raised = caught.value.outcomes
    assert caught.value.errors[1] == ("KeyError", "'only here'")
    assert (waiting.kind, waiting.error) == ("error", "RuntimeError")  # not until the time is up
    assert waiting.seconds < 20
    assert 'raise KeyError("only here")' in raised.traceback
    assert raised.output == "rank 1 says this\n"
    assert "--- rank 1: output\nrank 1 says this" in str(caught.value)
    assert not any(map(alive, before))
    assert set(run(2, process)).isdisjoint(before)


def test_all_raise_the_same() -> None:
    with pytest.raises(RanksFailed) as caught:
        run(2, all_raise)
    assert caught.value.errors == [("ValueError", "the sum is 1")] * 2


def test_a_hang_is_ended_and_shown() -> None:
    with pytest.raises(RanksFailed, match="rank 1 hung") as caught:
        run(2, sleep_in_one, timeout_s=3)
    back, hung = caught.value.outcomes
    assert (back.kind, back.result) == ("result", "back")
    assert hung.kind == "running" and 3 <= hung.seconds < 20
    assert "in sleep_in_one" in hung.stacks and hung.stacks.rstrip() in str(caught.value)


def test_no_result_and_no_function_that_cannot_travel() -> None:
    with pytest.raises(RanksFailed) as caught:
        run(1, return_a_generator)
    assert caught.value.errors == [("TypeError", "cannot pickle 'generator' object")]
    with pytest.raises(ValueError, match="top level of its module"):
        run(1, lambda rank: rank)


def test_a_rank_that_ends_itself() -> None:
    with pytest.raises(RanksFailed, match="rank 0 ended without an answer, exit code 7") as caught:
        run(2, die)
    ended, peer = caught.value.outcomes
    assert (ended.kind, ended.exit_code) == ("exited", 7)
    assert (peer.kind, peer.error) == ("error", "RuntimeError")


def test_the_peer_of_a_killed_rank_raises(tmp_path: Path) -> None:
    with start(2, reduce_forever, tmp_path) as running:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        running.kill(1)
        survivor, killed = running.wait(20)
    assert (survivor.kind, survivor.error) == ("error", "RuntimeError")
    assert (killed.kind, killed.exit_code) == ("exited", -signal.SIGKILL)
    assert killed.seconds <= survivor.seconds < 20


def test_a_rank_that_kills_itself_and_a_hang() -> None:
    survivor, killed = start(2, die_at_the_third).wait(20)
    assert (survivor.error, killed.exit_code) == ("RuntimeError", -signal.SIGKILL)
    with start(2, sleep_in_one) as running:
        pids = [worker.process.pid for worker in running.crew.workers]
        back, hung = running.wait(0.5)
    assert (back.result, hung.kind) == ("back", "running")
    assert "in sleep_in_one" in hung.stacks
    assert not any(map(alive, pids))


def test_children_end_with_their_rank() -> None:
    outcomes = start(1, with_a_child).wait(20)
    assert [outcome.kind for outcome in outcomes] == ["result"]
    until_s = time.monotonic() + 5
    while alive(outcomes[0].result) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not alive(outcomes[0].result)
