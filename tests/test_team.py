"""One rank of many without the others: torch's fake process group, whose collectives do nothing.

Values are meaningless then; plans, graphs and bytes are those of a real rank.
"""

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import exact
import pytest
import torch
import torch.distributed as dist
from graphs import Example, gpt
from harness import MakeOptimizer, adamw, call, loss_of, sgd_momentum
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import elixir_fx
from elixir_fx.errors import ElixirError, PlanError
from elixir_fx.module import ElixirModule
from elixir_fx.plan import Group
from elixir_fx.testing import emulated
from elixir_fx.units import MIB, parse_size

THREADS = 1
GPT = gpt(layers=2, width=64, seq=8)


@pytest.fixture(params=[(3, 64)], ids=lambda who: f"rank {who[0]} of {who[1]}")
def fake(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    rank, size = request.param
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    yield rank, size
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def trained(example: Example, make: MakeOptimizer = adamw, **options: Any) -> ElixirModule:
    """Two steps, with what `code` and `stats` then say."""
    model = example.build()
    optimizer = make(list(model.parameters()))
    net = exact.compile(model, optimizer, **options)
    for batch in example.batches(2):
        loss_of(call(net, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def whole_bytes(example: Example) -> int:
    return sum(parameter.nbytes for parameter in example.build().parameters())


@pytest.mark.parametrize("fake", [(0, 64), (3, 64), (63, 64), (1, 3)], indirect=True)
def test_one_rank_of_many_trains(fake: tuple[int, int]) -> None:
    _, size = fake
    net = trained(GPT, memory="64MiB")
    plan = net.plan
    assert plan is not None and plan.layout.group == Group(ranks=size)
    assert net.backward_module is not None
    forward, backward = net.code, net.backward_module.code
    for chunk in plan.layout.chunks:
        assert chunk.shards == size and chunk.numel % (64 * size) == 0
        assert f"elixir.gather.default({chunk.id}," in forward
        assert f"elixir.reduce.default({chunk.id}," in backward
    # Parameters and gradients; AdamW's two states come to as much again.
    engine = net._session.engine
    assert engine is not None
    share = sum(chunk.share_bytes for chunk in plan.layout.chunks)
    assert whole_bytes(GPT) / size <= share < 1.25 * whole_bytes(GPT) / size  # small: padding
    assert engine.shards.resident_bytes == 4 * share
    stats = net.stats()
    assert stats["peak_device_bytes"] <= 64 * MIB
    assert stats["gathered_bytes"] >= sum(chunk.nbytes for chunk in plan.layout.chunks)
    assert stats["reduced_bytes"] == sum(chunk.nbytes for chunk in plan.layout.chunks)


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_with_the_least_memory_a_share_is_away(
    fake: tuple[int, int], tier: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"disk": tmp_path}
    if tier == "host":
        options = {"machine": emulated(), "host_memory": "64MiB"}
    with pytest.raises(PlanError) as refused:
        trained(GPT, memory="16KiB", **options)
    found = re.search(r"memory='(.*)'", str(refused.value))
    assert found is not None
    least = parse_size(found[1])
    net = trained(GPT, memory=least, **options)
    assert net.plan is not None
    layout = net.plan.layout
    assert tier in {str(chunk.homes.states) for chunk in layout.chunks}
    away = layout.disk_bytes if tier == "disk" else layout.host_bytes
    # A block each for a chunk's parameters, gradients and two states, however small its share.
    assert away <= 4 * whole_bytes(GPT) / 64 + 4 * 4096 * len(layout.chunks)
    assert net.stats()["peak_device_bytes"] <= least


def test_another_optimizer_and_what_is_read_between_steps(
    fake: tuple[int, int], tmp_path: Path
) -> None:
    net = trained(GPT, sgd_momentum, memory="64MiB")
    whole = {name: value.shape for name, value in GPT.build().state_dict().items()}
    assert {name: value.shape for name, value in net.state_dict().items()} == whole
    loss_of(call(net, GPT.batches(1)[0])).backward()
    assert torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).shape == ()
    with elixir_fx.full_parameters(net):
        assert all(type(parameter) is nn.Parameter for parameter in net.parameters())


@pytest.mark.parametrize(("shape", "ranks"), [((64,), 64), ((8, 8), 8)])
def test_a_mesh_of_shards_or_of_replicas_and_shards(
    fake: tuple[int, int], shape: tuple[int, ...], ranks: int
) -> None:
    net = trained(GPT, memory="64MiB", process_group=init_device_mesh("cpu", shape))
    assert net.plan is not None and net.plan.layout.group.ranks == ranks


def test_groups_that_cannot_be(fake: tuple[int, int]) -> None:
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (4, 4, 4))
    with pytest.raises(ElixirError, match="a mesh of 3 dimensions: give one"):
        exact.compile(model, process_group=mesh)
    with pytest.raises(ElixirError, match=r"process_group is a str: give a torch\.distributed"):
        exact.compile(model, process_group="everyone")
    with pytest.raises(ElixirError, match="one rank to shard over: use DistributedDataParallel"):
        exact.compile(model, process_group=init_device_mesh("cpu", (64, 1)))


def test_a_plan_for_other_ranks_is_refused(fake: tuple[int, int]) -> None:
    model, batch = GPT.build(), GPT.batches(1)[0]
    plan = exact.plan(model, batch, ranks=2, memory="64MiB")
    net = exact.compile(model, plan=plan, memory="64MiB")
    with pytest.raises(PlanError, match="the plan is for 2 ranks and 64 train this model"):
        call(net, batch)


def test_the_users_group_outlives_a_model(fake: tuple[int, int]) -> None:
    net = trained(GPT, memory="64MiB")
    net._session.engine.close()
    assert dist.is_initialized()


def test_an_optimizer_that_needs_parameters_whole(fake: tuple[int, int]) -> None:
    net = trained(GPT, torch.optim.Adafactor, memory="64MiB")
    assert net.plan is not None
    assert {chunk.shards for chunk in net.plan.layout.chunks} == {1}


def test_an_optimizer_that_needs_all_parameters_is_refused_by_name(fake: tuple[int, int]) -> None:
    with pytest.raises(PlanError) as refused:
        trained(GPT, torch.optim.LBFGS, memory="64MiB")
    assert "LBFGS" in str(refused.value)
