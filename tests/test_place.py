from collections.abc import Sequence

from graphs_facts import Builder, gpt
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_fx.plan import align
from elixir_fx.planner.pack import pack
from elixir_fx.planner.place import (
    Stay,
    Use,
    core_bytes,
    extent,
    first_call,
    place,
    returning,
    uses,
)


def ring(chunks: int, nbytes: int = 4096) -> list[Use]:
    """Chunks read one after the other, and in the backward the other way."""
    end = 40 * chunks
    return [
        Use(i, nbytes, (10 + 10 * i, 19 + 10 * i), (end - 10 * i, end + 9 - 10 * i))
        for i in range(chunks)
    ]


def check(stays, capacity, earliest):
    """The laws of place, written out again."""
    for stay in stays:
        assert earliest <= stay.start <= stay.first <= stay.last or stay.kept
        assert stay.offset >= 0 and stay.offset + stay.nbytes <= capacity
    lives = []
    for stay in stays:
        start = stay.start
        if stay.kept:
            (before,) = [s for s in stays if s.chunk == stay.chunk and not s.backward]
            assert before.offset == stay.offset
            start = before.last + 1
        lives.append((start, stay))
    for i, (start, stay) in enumerate(lives):
        for other_start, other in lives[:i]:
            bytes_meet = (
                stay.offset < other.offset + other.nbytes
                and other.offset < stay.offset + stay.nbytes
            )
            assert not (bytes_meet and start <= other.last and other_start <= stay.last)
    moved = [s.start for s in stays if not s.kept]
    assert moved == sorted(moved)


@st.composite
def random_uses(draw):
    found = []
    for chunk in range(draw(st.integers(0, 12))):
        spans = []
        for low, high in ((5, 50), (50, 100)):
            first = draw(st.integers(low, high - 1))
            span = (first, min(high - 1, first + draw(st.integers(0, 12))))
            spans.append(span if draw(st.booleans()) else None)
        nbytes = 4096 * draw(st.integers(1, 5))
        if any(spans):
            found.append(Use(chunk, nbytes, *spans))
    return found


@settings(max_examples=200, deadline=None)
@given(stays=random_uses(), spare=st.integers(0, 20))
def test_stays_that_share_a_byte_share_no_position(stays, spare):
    capacity = core_bytes(stays) + 4096 * spare
    found = place(stays, capacity, 3)
    assert found is not None
    check(found, capacity, 3)
    wanted = [
        (u.chunk, b) for u in stays for b in (False, True) if (u.backward if b else u.forward)
    ]
    assert sorted((s.chunk, s.backward) for s in found) == sorted(wanted)


def test_three_blocks_prefetch_two_ahead_and_keep_three():
    found = place(ring(6), 3 * 4096, 0)
    check(found, 3 * 4096, 0)
    starts = {s.chunk: s.start for s in found if not s.backward}
    assert starts == {0: 0, 1: 0, 2: 0, 3: 20, 4: 30, 5: 40}
    assert [s.chunk for s in found if s.kept] == [5, 4, 3]
    backward = {s.chunk: (s.start, s.first) for s in found if s.backward and not s.kept}
    assert backward == {2: (200, 220), 1: (210, 230), 0: (220, 240)}


def test_one_block_has_no_room_for_a_prefetch():
    found = place(ring(3), 4096, 0)
    assert [s.start == s.first for s in found if not s.kept] == [False, True, True, True, True]
    assert place(ring(3), 4095, 0) is None


def test_with_room_for_all_nothing_moves_twice():
    found = place(ring(4), 4 * 4096, 7)
    assert all(s.kept for s in found if s.backward)
    assert {s.start for s in found if not s.backward} == {7}
    assert extent(found) == 4 * 4096


def test_uses_come_from_both_phases_and_skip_what_nobody_reads():
    b = Builder()
    b.parameter("a", 4)
    b.parameter("never", 4)
    b.parameter("empty", 0)
    b.node("x", "a", "empty")
    b.backward()
    b.node("dx", "a")
    facts = b.facts()
    found = uses(facts, pack(facts, 1, {}))
    assert [(u.forward, u.backward) for u in found] == [((3, 3), (4, 4))]
    assert first_call(facts) == 3


def test_gathers_of_a_real_graph_stay_within_their_phase():
    facts = gpt(4, 32, 64, 8)
    chunks = pack(facts, 16 << 10, {})
    found = uses(facts, chunks)
    capacity = 2 * core_bytes(found)
    stays = place(found, capacity, first_call(facts))
    check(stays, capacity, first_call(facts))
    for stay in stays:
        assert (stay.first >= facts.backward) == (stay.last >= facts.backward) == stay.backward


class Cache:
    """The rules of runtime/cache.py for calls that come in order: blocks by chunk; a load drops
    whatever meets its place, and a chunk is at one place at a time."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, int]] = {}

    def find(self, stay: Stay) -> bool:
        """Whether the chunk is at its place; it is afterwards."""
        end = stay.offset + align(stay.nbytes)
        if self.blocks.get(stay.chunk) == (stay.offset, end):
            return True
        self.blocks = {
            chunk: (low, high)
            for chunk, (low, high) in self.blocks.items()
            if chunk != stay.chunk and not (low < end and stay.offset < high)
        }
        self.blocks[stay.chunk] = (stay.offset, end)
        return False


def replayed(stays: Sequence[Stay], passes: int) -> set[int]:
    """The forward's stays that find their chunk in the last of so many passes."""
    cache = Cache()
    order = sorted(range(len(stays)), key=lambda i: (stays[i].start, stays[i].first))
    found: set[int] = set()
    for _ in range(passes):
        found = set()
        for index in order:
            if cache.find(stays[index]) and not stays[index].backward:
                found.add(index)
    return found


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 5]), min_size=1, max_size=7),
    room=st.integers(0, 20),
)
def test_what_returns_is_what_the_cache_still_has(sizes: list[int], room: int) -> None:
    end = 40 * len(sizes)
    needed = [
        Use(i, size * 4096, (10 + 10 * i, 19 + 10 * i), (end - 10 * i, end + 9 - 10 * i))
        for i, size in enumerate(sizes)
    ]
    stays = place(needed, core_bytes(needed) + room * 4096, 1)
    assert stays is not None
    for passes in (2, 3):
        assert returning(stays) == replayed(stays, passes)


def test_a_chunk_that_fits_alone_returns_and_one_that_was_replaced_does_not() -> None:
    one = Stay(0, False, 4096, 0, 1, 10, 19)
    assert returning([one]) == {0}
    assert returning([one, Stay(1, True, 4096, 0, 20, 20, 29)]) == frozenset()
    assert returning([one, Stay(1, True, 4096, 4096, 20, 20, 29)]) == {0}
    assert returning([one, Stay(0, True, 4096, 4096, 20, 20, 29)]) == frozenset()  # elsewhere
    assert returning([Stay(0, False, 0, 0, 1, 10, 19, resident=True)]) == frozenset()
