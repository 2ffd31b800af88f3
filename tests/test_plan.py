"""What a plan says of itself: shares and units of chunks, layouts, and the way through JSON."""

from dataclasses import replace
from typing import Any

import pytest
from graphs_facts import ADAMW, SGD, Builder, cpu, gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_fx.demand import Demand
from elixir_fx.errors import PlanError
from elixir_fx.facts import Facts
from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Group, Homes, Layout, Limits, Plan
from elixir_fx.planner import search
from elixir_fx.planner.pack import CUT, pack

HUGE = 1 << 40
RANKS = st.sampled_from([1, 2, 3, 5, 64])
AWAY = Homes(parameters=Tier.DISK, gradients=Tier.DISK, states=Tier.DISK)


@st.composite
def chunks(draw: Any) -> tuple[Chunk, int]:
    """A chunk of parameters of any size and dtype, and the number of its ranks."""
    b = Builder(optimizer=SGD)
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float64"]))
    sizes = st.sampled_from([0, 1, 63, 64, 65, 1000, 5000, 70_000])
    for index, size in enumerate(draw(st.lists(sizes, min_size=1, max_size=9))):
        b.parameter(f"p{index}", size, dtype=dtype)
        b.node(f"f{index}", f"p{index}")
    ranks = draw(RANKS)
    (chunk,) = pack(b.facts(), HUGE, {}, Group(ranks=ranks))
    return chunk, ranks


@settings(max_examples=100, deadline=None)
@given(made=chunks())
def test_every_element_is_one_ranks_own(made: tuple[Chunk, int]) -> None:
    chunk, ranks = made
    assert chunk.shards == ranks and chunk.share_numel * ranks == chunk.numel
    held = [0] * ranks
    for piece in chunk.slices:
        end_of_last = 0
        for rank in range(ranks):
            first, end = chunk.own(piece, rank)
            held[rank] += end - first
            if first == end:
                continue
            assert first == end_of_last  # in the order of the ranks, without a gap
            assert first % CUT == 0
            low, high = piece.offset + first, piece.offset + end
            assert rank * chunk.share_numel <= low < high <= (rank + 1) * chunk.share_numel
            end_of_last = end
        assert end_of_last == piece.span
    assert max(held) <= chunk.share_numel


@settings(max_examples=100, deadline=None)
@given(made=chunks(), update_numel=st.sampled_from([1, 100, 4096, 80_000, 1 << 30]))
def test_units_cover_what_a_rank_has_once(made: tuple[Chunk, int], update_numel: int) -> None:
    chunk, ranks = made
    for rank in range(ranks):
        units = chunk.units(update_numel, rank)
        assert tuple(piece for unit in units for piece in unit) == chunk.slices
        for unit in units:
            sizes = [end - first for first, end in (chunk.own(piece, rank) for piece in unit)]
            assert sum(sizes) <= update_numel or len([size for size in sizes if size]) == 1
            widths = [chunk.own_width(piece, rank) for piece in unit]
            assert all(size <= width for size, width in zip(sizes, widths, strict=True))


@settings(max_examples=50, deadline=None)
@given(made=chunks())
def test_units_are_no_more_than_needed(made: tuple[Chunk, int]) -> None:
    chunk, ranks = made
    for rank in range(ranks):
        assert len(chunk.units(chunk.numel, rank)) == 1


def two_chunks(ranks: int = 1) -> tuple[Facts, tuple[Chunk, ...]]:
    facts = gpt(1, 64, 100, 8, optimizer=ADAMW)
    return facts, pack(facts, 64 << 10, {}, Group(ranks=ranks))


def layout_of(made: tuple[Chunk, ...], group: Group) -> Layout:
    return Layout(
        chunks=made,
        gather_bytes=1 << 20,
        gradient_blocks=2,
        gradient_block_bytes=4096,
        update_numel=1,
        arena_bytes=1 << 21,
        host_bytes=0,
        disk_bytes=0,
        group=group,
    )


@pytest.mark.parametrize("shared", [False, True])
def test_where_chunks_are_read_and_blocks_lie(shared: bool) -> None:
    _, one = two_chunks()
    alone = layout_of(one, Group())
    assert alone.keeps_all and alone.all_home and alone.shared_bytes == 0
    assert not any(alone.takes_block(chunk) or chunk.gathered for chunk in one)
    away = layout_of(tuple(replace(chunk, homes=AWAY) for chunk in one), Group())
    assert not away.keeps_all and not away.all_home
    assert all(away.takes_block(chunk) and chunk.gathered for chunk in away.chunks)

    _, shares = two_chunks(ranks=3)
    group = Group(ranks=3, shared=shared)
    home = layout_of(shares, group)
    assert home.all_home and not home.keeps_all
    assert all(chunk.gathered for chunk in shares)
    assert [home.takes_block(chunk) for chunk in shares] == [not shared] * len(shares)
    assert home.shared_bytes == (home.block_bytes if shared else 0) == 8192 * shared
    away = layout_of(tuple(replace(chunk, homes=AWAY) for chunk in shares), group)
    assert not away.all_home
    assert all(away.takes_block(chunk) for chunk in away.chunks)


def test_a_gradient_block_has_room_for_what_the_others_send() -> None:
    _, shares = two_chunks(ranks=4)
    for chunk in shares:
        whole = replace(chunk, shards=1)
        share = -(-chunk.nbytes // 4 // 4096) * 4096
        assert chunk.nbytes % 4096 == 0
        assert Group(ranks=4, shared=True).gradient_block_bytes(chunk) == chunk.nbytes + share
        assert Group(ranks=4).gradient_block_bytes(chunk) == 2 * chunk.nbytes + share
        assert Group(ranks=4).gradient_block_bytes(whole) == 2 * chunk.nbytes


@pytest.mark.parametrize("group", [Group(), Group(ranks=3), Group(ranks=2, shared=True)])
def test_a_plan_comes_back_from_json_equal(group: Group, tmp_path: Any) -> None:
    facts = gpt(2, 96, 700, 16)
    machine = cpu().with_peers()
    plan = search(facts, machine, Limits(device=12 << 20, disk=HUGE), group=group)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.layout.group == group
    assert {chunk.shards for chunk in again.layout.chunks} == {group.ranks}
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def sized(device: int) -> Plan:
    """A plan with sizes, by hand: 1000 bytes and 10 a sample, or 3 a sample and token."""
    facts = gpt(1, 64, 100, 8)
    made = search(facts, cpu(), Limits(device=HUGE, disk=HUGE))
    demand = Demand(constant_bytes=1000, update_bytes=0, live=("10*batch + 7", "3*batch*sequence"))
    sizes = (("batch", 4), ("sequence", 16))
    schedule = replace(made.schedules[0], sizes=sizes, demand=demand)
    return replace(made.with_known(schedule), limits=Limits(device=device))


def test_the_largest_size_that_fits() -> None:
    plan = sized(3000)
    assert plan.sizes == {"batch": 4, "sequence": 16}
    assert plan.largest("batch") == 2000 // 48
    assert plan.largest("sequence") == 2000 // 12
    assert plan.largest("batch", sequence=1) == 1993 // 10
    assert plan.largest("sequence", batch=10) == 2000 // 30


def test_sizes_come_back_from_json() -> None:
    plan = sized(3000)
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.largest("batch") == plan.largest("batch")
    with pytest.raises(PlanError, match="'heads'; known are"):
        Plan.from_json(plan.to_json().replace("3*batch*sequence", "3*batch*heads"))
    with pytest.raises(PlanError, match="is not a formula"):
        Plan.from_json(plan.to_json().replace("3*batch*sequence", "3*batch*"))


def test_sizes_that_a_plan_does_not_have() -> None:
    plan = sized(3000)
    with pytest.raises(PlanError, match=r"no size 'heads'; it has \['batch', 'sequence'\]"):
        plan.largest("heads")
    with pytest.raises(PlanError, match="no size 'heads'"):
        plan.largest("batch", heads=2)
    with pytest.raises(PlanError, match="sequence=0 is no size"):
        plan.largest("batch", sequence=0)
    with pytest.raises(PlanError, match=r"batch = 1 needs .* with sequence = 5000"):
        plan.largest("batch", sequence=5000)
    with pytest.raises(PlanError, match="it has none: name some with dynamic_shapes"):
        search(gpt(1, 64, 100, 8), cpu(), Limits(device=HUGE)).largest("batch")


MALFORMED = {
    "no JSON": "plan",
    "nothing": "{}",
    "a list": "[]",
    "another version": '{"elixir_fx_plan": 0}',
    "no layout": '{"elixir_fx_plan": 6, "machine": "", "limits": {"device": 1}}',
    "limits": '{"elixir_fx_plan": 6, "machine": "", "limits": [1], "layout": {}}',
    "a text": '"plan"',
    "homes": '{"elixir_fx_plan": 6, "machine": "", "limits": {"device": 1}, '
    '"layout": {"chunks": [{"homes": []}]}}',
}


@pytest.mark.parametrize("name", MALFORMED)
def test_anything_else_is_refused(name: str, tmp_path: Any) -> None:
    with pytest.raises(PlanError, match=r"malformed plan|plan version 0"):
        Plan.from_json(MALFORMED[name])
    (tmp_path / "it").write_text(MALFORMED[name])
    with pytest.raises(PlanError, match="it is not a plan: "):
        Plan.load(tmp_path / "it")
