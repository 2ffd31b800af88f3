"""Order: which parts come home to the device first.

A byte of parameters at home saves two gathers, and a load and a store in the update; a byte of
states a load and a store; a byte of gradients a store in the backward and a load. What of
that takes time depends on the step: transfers beside the forward and backward may be hidden.
Hence several orders, and quotas: so many bytes of each part, as the relaxation has them. Within a
part chunks come in bit-reversed order, so that any number of them is spread evenly between the
others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elixir_fx.planner.footprint import ChunkBytes, Part

Item = tuple[int, Part]  # a part of the chunk with this id

# Orders in which parts come home: P parameters, F frozen parameters, S states, G gradients.
ORDERS = ("PSFG", "PFSG", "PGSF", "SPGF", "PSGF", "GPSF")
LETTERS = {Part.PARAMETERS: "P", Part.GRADIENTS: "G", Part.STATES: "S"}


@dataclass(frozen=True, kw_only=True)
class Order:
    """Items in `first`, then of each part as many bytes as its quota, then the rest; each by
    the rank of its letter, and spread over the chunks. `never` are left out."""

    letters: str
    quotas: Mapping[Part, int]
    first: Sequence[Item]
    never: frozenset[Item]

    def of(
        self, items: Iterable[Item], sizes: Sequence[ChunkBytes], spread: Sequence[int]
    ) -> list[Item]:
        """`items` in the order in which they come home."""
        urgent = {item: index for index, item in enumerate(self.first)}
        left = dict(self.quotas)
        ranked = []
        for item in sorted(items, key=lambda item: spread[item[0]]):
            if item in self.never:
                continue
            chunk, part = item
            nbytes = sizes[chunk].ordinary[part]
            within = left.get(part, 0) >= nbytes // 2 and bool(self.quotas)
            if within:
                left[part] -= nbytes
            letter = LETTERS[part]
            if part is Part.PARAMETERS and not sizes[chunk].chunk.trainable:
                letter = "F"
            rank = self.letters.index(letter)
            place = urgent.get(item, len(urgent))
            ranked.append((place, not within, rank, spread[chunk], item))
        return [item for *_, item in sorted(ranked)]


def spread(count: int) -> tuple[int, ...]:
    """A rank for each of `count` chunks, such that the first of any number lie evenly spread."""
    bits = max(1, (count - 1).bit_length())
    order = [n for n in (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)) if n < count]
    ranks = [0] * count
    for rank, chunk in enumerate(order):
        ranks[chunk] = rank
    return tuple(ranks)
