"""What a compiler may fuse, where a cut costs nothing, and which layers are equal.

Read by `align`, which moves our nodes to such places, and by `kernels`, which cuts there.
A library call (a matrix product, attention) is never fused; elementwise operations and reductions
between the same calls are. A cut through such a chain makes a value be written and read
again that would have stayed in registers; a cut beside a library call costs nothing.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, fx

from elixir_fx.step import FUSES, is_item, number, storage_bytes, value, viewed_input

FEWEST = 3  # equal layers that are worth a cut
SHORTEST = 8  # nodes of a layer
CANDIDATES = 12  # lengths of a layer that are tried


def cut_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """By position, and behind the last: bytes that a cut before that node would have written
    for nothing but it. `nodes` are pure operations in their order."""
    position = {node: index for index, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for node, (fused, _) in _fused_readers(nodes).items():
        if fused:
            nbytes = result_bytes(node)
            change[position[node] + 1] += nbytes
            change[max(position[reader] for reader in fused) + 1] -= nbytes
    costs, total = [], 0
    for step_change in change:
        total += step_change
        costs.append(total)
    return costs


def in_registers(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Those of pure operations whose result is never written: all that read it are fused
    with it. An estimate: a compiler may write some of them."""
    return {node for node, (fused, others) in _fused_readers(nodes).items() if fused and not others}


def _fused_readers(nodes: Sequence[fx.Node]) -> dict[fx.Node, tuple[list[fx.Node], list[fx.Node]]]:
    """By node that may be fused: the readers of its result that are fused with it, and others."""
    inside = set(nodes)
    level = _levels(nodes)
    found = {}
    for node in nodes:
        if node.meta.get(FUSES):
            readers = _readers(node)
            alone = len(readers) == 1
            fused = [
                reader
                for reader in readers
                if reader in inside
                and reader.meta.get(FUSES)
                and (alone or level[reader] == level[node])
            ]
            found[node] = fused, [reader for reader in readers if reader not in fused]
    return found


def result_bytes(node: fx.Node) -> int:
    """Bytes of memory that a node's results take."""
    results = value(node)
    made = results if isinstance(results, (list, tuple)) else [results]
    return sum(number(storage_bytes(one)) for one in made if isinstance(one, Tensor))


def _levels(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many library calls a node waits for, one after the other."""
    level: dict[fx.Node, int] = {}
    for node in nodes:
        before = [
            level[source] + (not source.meta.get(FUSES) and not is_light(source))
            for source in node.all_input_nodes
            if source in level
        ]
        level[node] = max(before, default=0)
    return level


def is_light(node: fx.Node) -> bool:
    """Whether a node does no work: a view, one of several results, a size."""
    sizes = not isinstance(value(node), (Tensor, list, tuple))
    return is_item(node) or viewed_input(node) is not None or sizes


def _readers(node: fx.Node) -> list[fx.Node]:
    """Who reads a result, through views or not."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        if (is_item(user) or viewed_input(user) is not None) and not user.meta.get(FUSES):
            found.update(dict.fromkeys(_readers(user)))
        else:
            found[user] = None
    return list(found)


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` equal stretches of `period` nodes, the first at position `start`."""

    start: int
    period: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.count


def repeats(tokens: Sequence[Hashable], start: int = 0, end: int | None = None) -> list[Repeat]:
    """The equal layers among nodes that are described by `tokens`, in their order: the longest
    repetition, and those before and after it."""
    end = len(tokens) if end is None else end
    best: Repeat | None = None
    for period in _periods(tokens, start, end):
        found = _longest(tokens, start, end, period)
        longer = best is None or found.period * found.count > best.period * best.count
        if found.count >= FEWEST and longer:
            best = found
    if best is None:
        return []
    return [*repeats(tokens, start, best.start), best, *repeats(tokens, best.end, end)]


def _periods(tokens: Sequence[Hashable], start: int, end: int) -> list[int]:
    """Distances at which equal nodes follow each other, the most frequent first; equally
    frequent ones from the shortest."""
    last: dict[Hashable, int] = {}
    gaps: Counter[int] = Counter()
    for position in range(start, end):
        token = tokens[position]
        if token in last:
            gaps[position - last[token]] += 1
        last[token] = position
    frequent = sorted(gaps, key=lambda gap: (-gaps[gap], gap))
    return [gap for gap in frequent if gap >= SHORTEST][:CANDIDATES]


def _longest(tokens: Sequence[Hashable], start: int, end: int, period: int) -> Repeat:
    """The longest stretch that equals itself `period` nodes later."""
    breaks = [
        position
        for position in range(start, end - period)
        if tokens[position] != tokens[position + period]
    ]
    edges = [start - 1, *breaks, max(start, end - period)]
    first, after = max(pairwise(edges), key=lambda pair: pair[1] - pair[0])
    length = after - first - 1 + period
    return Repeat(first + 1, period, length // period)
