from graphs_facts import gpt
from hypothesis import given
from hypothesis import strategies as st

from elixir_fx.plan import merged
from elixir_fx.planner.footprint import Footprint, Part
from elixir_fx.planner.order import ORDERS, Order, spread
from elixir_fx.planner.pack import pack

FACTS = gpt(3, 96, 700, 16, frozen=1)
SIZES = Footprint(FACTS, pack(FACTS, 1, {})).sizes
ITEMS = [(size.chunk.id, part) for size in SIZES for part in Part if size.ordinary[part]]
RANKS = spread(len(SIZES))


def ordered(letters="PSFG", quotas=None, first=(), never=frozenset()):
    made = Order(letters=letters, quotas=quotas or {}, first=first, never=never)
    return made.of(ITEMS, SIZES, RANKS)


@given(count=st.integers(1, 200))
def test_any_number_of_first_chunks_lies_spread_evenly(count: int) -> None:
    ranks = spread(count)
    assert sorted(ranks) == list(range(count))
    for taken in range(1, count + 1):
        chosen = sorted(chunk for chunk in range(count) if ranks[chunk] < taken)
        gaps = [b - a for a, b in zip([-1, *chosen], [*chosen, count], strict=True)]
        assert max(gaps) <= 4 * count / taken + 1


def test_letters_rank_the_parts() -> None:
    for letters in ORDERS:
        found = []
        for chunk, part in ordered(letters):
            frozen = not SIZES[chunk].chunk.trainable
            found.append({"p": "F" if frozen else "P", "g": "G", "s": "S"}[part[0]])
        assert sorted(found, key=letters.index) == found
        assert len(found) == len(ITEMS)


def test_first_come_first_and_never_never() -> None:
    first = (ITEMS[7], ITEMS[3])
    never = frozenset(ITEMS[10:15])
    found = ordered(first=first, never=never)
    assert tuple(found[:2]) == first
    assert set(found) == set(ITEMS) - never


def test_a_quota_comes_before_the_rest_and_is_kept() -> None:
    states = [item for item in ITEMS if item[1] is Part.STATES]
    half = sum(SIZES[chunk].ordinary[Part.STATES] for chunk, _ in states) // 2
    found = ordered(quotas={Part.STATES: half})
    within = 0
    for chunk, part in found:
        if part is not Part.STATES:
            break
        within += SIZES[chunk].ordinary[part]
    largest = max(SIZES[chunk].ordinary[Part.STATES] for chunk, _ in states)
    assert half - largest <= within <= half + largest


@given(some=st.lists(st.integers(0, 99), max_size=9), others=st.lists(st.integers(100, 199)))
def test_units_of_both_places_get_on_equally_far(some: list[int], others: list[int]) -> None:
    found = merged(some, others)
    assert [one for one in found if one < 100] == some
    assert [one for one in found if one >= 100] == others
    taken = 0
    for index, one in enumerate(found):
        taken += one < 100
        if some and one < 100:
            assert abs((index + 1 - taken) - len(others) * (taken - 1) / len(some)) <= 1
