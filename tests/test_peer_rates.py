"""peer_rates: two processes learn the links between them, and a line is fitted to what they saw."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs_facts import cpu
from ranks import run

from elixir_fx.errors import PlanError
from elixir_fx.machine import Link, Tier
from elixir_fx.runtime.peer_rates import fitted, measure_peers
from elixir_fx.units import MIB

CPU = torch.device("cpu")


def links(rank: int) -> list[dict[str, Any]]:
    group = dist.group.WORLD
    assert group is not None
    return [asdict(link) for link in measure_peers(group, CPU)]


def test_two_processes_measure_the_links_between_them() -> None:
    first, other = run(2, links)
    assert first == other  # and so one plan follows from them
    into, back = (Link(**link) for link in first)
    assert (into.source, into.target) == (Tier.PEERS, Tier.DEVICE)
    assert (back.source, back.target) == (Tier.DEVICE, Tier.PEERS)
    for link in (into, back):
        assert 1e6 < link.bytes_per_s < 1e12
        assert 0 <= link.latency_s < 1
        assert 1e6 < link.shared_bytes_per_s < 1e12 and 0 < link.compute_share < 1
    machine = replace(cpu(), links=(*cpu().links, into, back))
    assert machine.with_peers() == machine.with_ranks(2) == machine  # these, and not made-up ones


def alone(rank: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(PlanError) as refused:
        measure_peers(group, CPU)
    return str(refused.value)


def test_one_rank_has_no_peers() -> None:
    assert run(1, alone) == ["the group has one rank: there are no peers to measure links to"]


@pytest.mark.parametrize(("latency_s", "rate"), [(0.0, 1e9), (2e-4, 1.4e9), (5e-5, 2e11)])
def test_a_line_is_found_again(latency_s: float, rate: float) -> None:
    times = {nbytes: latency_s + nbytes / rate for nbytes in (MIB // 32, MIB // 2, 8 * MIB)}
    assert fitted(times) == pytest.approx((latency_s, rate), rel=1e-6, abs=1e-12)


def test_small_exchanges_count_as_much_as_large_ones() -> None:
    """By relative error: 8 MiB that come late do not hide what 32 KiB take."""
    times = {MIB // 32: 1e-4, MIB // 2: 6e-4, 8 * MIB: 9e-3}
    latency_s, rate = fitted(times)
    for nbytes, seconds in times.items():
        assert 0.8 < (latency_s + nbytes / rate) / seconds < 1.2


def test_neither_is_ever_negative() -> None:
    assert fitted({1: 2.0, 10: 1.0}) == (0.0, 10.0)  # a larger one that was faster
    latency_s, rate = fitted({10: 1.0, 20: 4.0})
    assert latency_s == 0.0 and rate > 0
