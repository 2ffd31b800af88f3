from dataclasses import replace

import pytest
from graphs_facts import ADAMW, Builder, accelerator, cpu, gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_fx.errors import PlanError
from elixir_fx.machine import Tier
from elixir_fx.plan import ALIGNMENT_BYTES, Group, Limits
from elixir_fx.planner.pack import CUT, PADDING, chunk_sizes, pack, pinned_tiers

MIB = 1 << 20
LIMITS = Limits(device=1 << 40, disk=1 << 40)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 1 << 22), tied=st.booleans(), frozen=st.integers(0, 2))
def test_every_parameter_lies_in_one_chunk_aligned_and_apart(size, tied, frozen):
    facts = gpt(3, 64, 500, 16, tied=tied, frozen=frozen)
    chunks = pack(facts, size, {})
    by_path = {p.path: p for p in facts.parameters}
    paths = [piece.path for chunk in chunks for piece in chunk.slices]
    assert sorted(paths) == sorted(by_path)
    assert [chunk.id for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        end = 0
        for piece in chunk.slices:
            parameter = by_path[piece.path]
            assert (parameter.dtype, parameter.trainable) == (chunk.dtype, chunk.trainable)
            assert piece.offset * chunk.itemsize % ALIGNMENT_BYTES == 0
            assert piece.offset >= end
            end = piece.offset + piece.span
        assert end <= chunk.numel
        assert chunk.nbytes % ALIGNMENT_BYTES == 0
        assert chunk.nbytes <= size or len(chunk.slices) == 1


def test_chunks_follow_the_order_of_first_use():
    facts = gpt(3, 64, 500, 16)
    first = {p.path: p.reads[0] for p in facts.parameters}
    begins = [first[chunk.slices[0].path] for chunk in pack(facts, 64 << 10, {})]
    assert begins == sorted(begins)


def test_a_tied_embedding_has_a_chunk_of_its_own():
    facts = gpt(4, 64, 100, 16, tied=True)
    (chunk,) = [c for c in pack(facts, 10 * MIB, {}) if "wte" in [s.path for s in c.slices]]
    assert len(chunk.slices) == 1


def test_weights_of_an_unrolled_cell_share_a_chunk():
    b = Builder()
    cell = [b.parameter(f"cell.{i}", 32, 32) for i in range(4)]
    for step in range(20):
        for weight in cell:
            b.node(f"{weight}_{step}", weight)
    assert [len(chunk.slices) for chunk in pack(b.facts(), MIB, {})] == [4]


def test_dtypes_pins_and_unread_parameters_are_apart():
    b = Builder()
    for path, dtype in (("a", "float32"), ("b", "bfloat16"), ("c", "float32"), ("d", "float32")):
        b.parameter(path, 16, dtype=dtype)
    b.node("x", "a", "b", "c")
    chunks = pack(b.facts(), MIB, {"c": Tier.DEVICE})
    assert sorted([s.path for s in c.slices] for c in chunks) == [["a"], ["b"], ["c"], ["d"]]


def test_chunk_sizes_start_at_the_typical_parameter_and_not_at_the_outsized_one():
    facts = gpt(6, 64, 50000, 16, tied=True)
    assert chunk_sizes(facts)[0] == 4 * 64 * 64 * 4
    assert chunk_sizes(gpt(1, 8, 10, 4))[0] == ALIGNMENT_BYTES  # small: one chunk for each
    assert chunk_sizes(Builder().facts()) == (ALIGNMENT_BYTES,)


def test_a_pin_names_a_parameter_or_a_module():
    facts = gpt(2, 16, 10, 4)
    pinned = pinned_tiers(facts, cpu(), LIMITS, {"h.1": Tier.DISK, "h.1.fc.bias": Tier.DEVICE})
    assert len(pinned) == 12
    assert pinned["h.1.fc.bias"] == Tier.DEVICE
    assert pinned["h.1.fc.weight"] == Tier.DISK


def test_pins_that_cannot_be_are_refused_by_name():
    facts = gpt(1, 16, 10, 4)
    with pytest.raises(PlanError, match="keep names 'wtf', which is neither"):
        pinned_tiers(facts, cpu(), LIMITS, {"wtf": Tier.DEVICE})
    with pytest.raises(PlanError, match="wte is pinned to host, but this plan has no host"):
        pinned_tiers(facts, cpu(), LIMITS, {"wte": Tier.HOST})
    with pytest.raises(PlanError, match="wte is pinned to disk, but this plan has no disk"):
        pinned_tiers(facts, accelerator(), Limits(device=1, host=1), {"wte": Tier.DISK})


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(1, 1 << 22),
    ranks=st.integers(2, 64),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_shares_of_a_chunk_are_equal_and_cost_little_padding(size, ranks, dtype):
    facts = gpt(3, 64, 500, 16, dtype=dtype)
    alone = pack(facts, size, {})
    for whole, chunk in zip(alone, pack(facts, size, {}, Group(ranks=ranks)), strict=True):
        assert chunk == replace(whole, numel=chunk.numel, shards=ranks)
        assert chunk.share_numel * ranks == chunk.numel and chunk.share_numel % CUT == 0
        added = chunk.numel - whole.numel
        assert 0 <= added <= max(PADDING * whole.numel, ranks * CUT - 1)


@pytest.mark.parametrize("ranks", [2, 3, 7, 64])
def test_padding_of_chunks_of_some_size_is_below_one_percent(ranks):
    facts = gpt(2, 512, 8192, 16)
    alone = pack(facts, 8 * MIB, {})
    for whole, chunk in zip(alone, pack(facts, 8 * MIB, {}, Group(ranks=ranks)), strict=True):
        if whole.nbytes >= 2 * MIB:
            assert chunk.numel - whole.numel < 0.01 * whole.numel
    assert sum(whole.nbytes >= 2 * MIB for whole in alone) > 3


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_shares_of_large_chunks_are_whole_disk_blocks(ranks):
    facts = gpt(2, 512, 8192, 16)
    for chunk in pack(facts, 8 * MIB, {}, Group(ranks=ranks)):
        if chunk.nbytes >= 8 * MIB:
            assert chunk.share_bytes % ALIGNMENT_BYTES == 0


def test_what_an_optimizer_needs_whole_every_rank_has():
    whole = replace(ADAMW, elementwise=False)
    facts = gpt(4, 64, 500, 16, frozen=2, optimizer=whole)
    chunks = pack(facts, 64 << 10, {}, Group(ranks=4))
    assert {(chunk.trainable, chunk.shards) for chunk in chunks} == {(True, 1), (False, 4)}
    facts = gpt(4, 64, 500, 16, frozen=2, optimizer=None)
    assert {chunk.shards for chunk in pack(facts, 64 << 10, {}, Group(ranks=4))} == {4}
