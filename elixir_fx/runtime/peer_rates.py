"""How fast the ranks of a process group give each other their parts, by size.

Two exchanges are timed as a step makes them: a gather, in which every rank receives all others'
parts of one tensor, and a reduce-scatter, in which it sends them its gradients. A latency and a
rate are fitted to sizes from 64 KiB to 16 MiB.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elixir_fx.errors import PlanError
from elixir_fx.machine import CPU_PEERS, Link, Tier
from elixir_fx.runtime.channels import ALL_GATHER, REDUCE_SCATTER
from elixir_fx.units import KIB, MIB

SIZES = (64 * KIB, MIB, 16 * MIB)  # of the whole tensor
RUNS = 5  # of each, after a first one; the same number on every rank


def measure_peers(group: dist.ProcessGroup, device: torch.device) -> tuple[Link, Link]:
    """The links PEERS -> DEVICE and DEVICE -> PEERS of a rank, equal on all of them.

    Every rank of `group` calls it, with nothing else under way; it takes a second or two over
    gloo. `bytes_per_s` counts what a rank receives of the others (the bus bandwidth of
    nccl-tests), `shared_bytes_per_s` both exchanges at once. What the exchange takes of a CPU's
    compute is not measured but taken from `CPU_PEERS`. PlanError if the group has one rank.
    """
    ranks = dist.get_world_size(group)
    if ranks < 2:
        raise PlanError("the group has one rank: there are no peers to measure links to")
    gathers, reduces, both = (
        {
            nbytes * (ranks - 1) // ranks: _slowest(seconds, group, device)
            for nbytes, seconds in _timed(group, device, which).items()
        }
        for which in ((_gather,), (_reduce,), (_gather, _reduce))
    )
    together = max(2 * nbytes / seconds for nbytes, seconds in both.items())
    links = []
    for source, target, times in (
        (Tier.PEERS, Tier.DEVICE, gathers),
        (Tier.DEVICE, Tier.PEERS, reduces),
    ):
        latency_s, rate = fitted(times)
        links.append(
            Link(
                source=source,
                target=target,
                bytes_per_s=rate,
                shared_bytes_per_s=together,
                latency_s=latency_s,
                compute_share=CPU_PEERS[2] if device.type == "cpu" else 0.0,
            )
        )
    return links[0], links[1]


def fitted(seconds_by_bytes: Mapping[int, float]) -> tuple[float, float]:
    """Latency in s and bytes/s of the line  seconds = latency + bytes / rate  that is nearest to
    what was measured, by relative error: sum of ((latency + bytes / rate) / seconds - 1)^2.

    Neither is negative: where the line would say so, it goes through nothing or is the rate of
    the largest alone.
    """
    weights = {nbytes: seconds**-2 for nbytes, seconds in seconds_by_bytes.items()}
    total = sum(weights.values())
    mean_bytes = sum(w * nbytes for nbytes, w in weights.items()) / total
    mean_s = sum(w * seconds_by_bytes[nbytes] for nbytes, w in weights.items()) / total
    spread = sum(w * (nbytes - mean_bytes) ** 2 for nbytes, w in weights.items())
    joint = sum(
        w * (nbytes - mean_bytes) * (seconds_by_bytes[nbytes] - mean_s)
        for nbytes, w in weights.items()
    )
    largest = max(seconds_by_bytes)
    if joint <= 0:
        return 0.0, largest / seconds_by_bytes[largest]
    rate = spread / joint
    return max(0.0, mean_s - mean_bytes / rate), rate


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory of one exchange: this rank's part, and a whole tensor, to read and to write."""

    group: dist.ProcessGroup
    part: Tensor
    result: Tensor
    whole: Tensor
    gathered: Tensor


_Exchange = Callable[[_Buffers], Any]


def _gather(buffers: _Buffers) -> Any:
    return ALL_GATHER(buffers.gathered, buffers.part, group=buffers.group, async_op=True)


def _reduce(buffers: _Buffers) -> Any:
    return REDUCE_SCATTER(buffers.result, buffers.whole, group=buffers.group, async_op=True)


def _timed(
    group: dist.ProcessGroup, device: torch.device, which: Sequence[_Exchange]
) -> dict[int, float]:
    """The shortest seconds of exchanges at once on this rank, by bytes of the whole tensor."""
    ranks = dist.get_world_size(group)
    found = {}
    for nbytes in SIZES:
        part, result = (torch.ones(nbytes // ranks // 4, device=device) for _ in range(2))
        whole, gathered = (torch.ones(part.numel() * ranks, device=device) for _ in range(2))
        buffers = _Buffers(group, part, result, whole, gathered)
        runs = [_seconds(which, buffers) for _ in range(RUNS + 1)]
        found[nbytes] = min(runs[1:])
    return found


def _seconds(which: Sequence[_Exchange], buffers: _Buffers) -> float:
    device = buffers.part.device
    dist.barrier(buffers.group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    works = [exchange(buffers) for exchange in which]
    for work in works:
        work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def _slowest(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    """The longest that any rank took."""
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group)
    return float(value)
