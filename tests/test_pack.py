import pytest
from graphs_facts import Builder, accelerator, cpu, gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_fx.errors import PlanError
from elixir_fx.machine import Tier
from elixir_fx.plan import ALIGNMENT_BYTES, Limits
from elixir_fx.planner.pack import chunk_sizes, pack, pinned_tiers

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
