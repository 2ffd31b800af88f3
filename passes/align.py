"""Align: our nodes move to places where they cut no chain that a compiler would fuse.

Stands last: their order is final. Does nothing where PyTorch's own kernels run.

Before    y = aten.mm(x, t); elixir.release(6); s = aten.add(y, x); elixir.prefetch(8); r = relu(s)
After     y = aten.mm(x, t); elixir.release(6); elixir.prefetch(8); s = aten.add(y, x); r = relu(s)
Law       our nodes keep their order, a gather stays ahead of its readers, a release and a reduce
          behind theirs (laws 2, 4, 5)

Among all ways to place a phase's nodes in their order, the one is taken with the fewest bytes
cut and operations passed (`PASSED_BYTES` for each): a shortest path, position by position.
Between places that are alike those behind a library call win, the same ones in every layer, so
that layers are cut alike and compiled once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from elixir_fx import ops
from elixir_fx.passes.fusion import cut_bytes, is_light, result_bytes
from elixir_fx.plan import Plan
from elixir_fx.step import (
    FUSES,
    StepGraph,
    is_backward,
    is_item,
    memory_root,
    readers,
    value,
    viewed_input,
)

PASSED_BYTES = 32 * 1024  # cut bytes that are worth moving a node past one operation
UNALIKE_BYTES = 512 * 1024  # and those that a cut costs which other layers may not have
FARTHEST = 64  # operations that a node is moved past


def align(step: StepGraph, plan: Plan) -> None:
    """Move our nodes of either phase."""
    if not step.compiled:
        return
    assert step.schedule is not None
    spare_bytes = plan.limits.device - step.schedule.forecast.peak_device_bytes
    for backward in (False, True):
        _align(step, backward, spare_bytes)


@dataclass(frozen=True, slots=True)
class _Event:
    """A node of ours with what is made of its result, and where it may stand: before the
    operations at positions `first` to `last`."""

    nodes: tuple[fx.Node, ...]
    position: int
    first: int
    last: int


def _align(step: StepGraph, backward: bool, spare_bytes: int) -> None:
    phase = [
        node
        for node in step.nodes
        if node.op not in ("placeholder", "output") and is_backward(node) == backward
    ]
    groups = [_group(node) for node in phase if node.target in ops.ALL]
    ours = {node for group in groups for node in group}
    operations = [node for node in phase if node not in ours]
    if not groups:
        return
    position = {node: index for index, node in enumerate(operations)}
    events = []
    passed = 0
    places = {group[0]: group for group in groups}
    for node in phase:
        if node in places:
            waiting_bytes = _gradient_bytes(node)
            waits = waiting_bytes <= spare_bytes  # while others allocate
            spare_bytes -= waiting_bytes if waits else 0
            events.append(_event(places[node], passed, position, operations, waits=waits))
        elif node in position:
            passed += 1
    behind = phase[-1].next
    for event, place in zip(events, _places(events, _costs(operations)), strict=True):
        target = operations[place] if place < len(operations) else behind
        for node in event.nodes:
            target.prepend(node)


def _group(node: fx.Node) -> tuple[fx.Node, ...]:
    """A node of ours, and the views of its chunk or the answers that are picked from it."""
    if node.target is ops.GATHER:
        return (node, *(made for part in node.users for made in (part, *part.users)))
    return (node, *node.users) if node.target is ops.REDUCE else (node,)


def _event(
    group: tuple[fx.Node, ...],
    place: int,
    position: dict[fx.Node, int],
    operations: Sequence[fx.Node],
    *,
    waits: bool,
) -> _Event:
    node, end = group[0], len(position)
    first, last = 0, end
    if node.target in (ops.GATHER, ops.RELOAD):
        read = [position[reader] for reader in readers(node) if reader in position]
        last = min(read, default=end)
    elif node.target in (ops.RELEASE, ops.DROP):
        first = place
    elif node.target in (ops.REDUCE, ops.OFFLOAD):
        first, last = place, end if waits else _until_growth(operations, place)
    return _Event(group, place, max(first, place - FARTHEST), min(last, place + FARTHEST))


def _gradient_bytes(node: fx.Node) -> int:
    """Bytes that wait for a node of ours: the gradients of a reduce, what is sent away."""
    if node.target not in (ops.REDUCE, ops.OFFLOAD):
        return 0
    return sum({memory_root(n): result_bytes(n) for n in node.all_input_nodes}.values())


def _until_growth(operations: Sequence[fx.Node], place: int) -> int:
    """How far a gradient may wait without room for it: until something is allocated."""
    for index in range(place, len(operations)):
        if not is_light(operations[index]):
            return index
    return len(operations)


def _costs(operations: Sequence[fx.Node]) -> list[int]:
    """What a cut costs at each position."""
    costs = cut_bytes(operations)
    for index in range(1, len(operations)):
        before = operations[index - 1]
        library = not before.meta.get(FUSES) and isinstance(value(before), Tensor)
        if not library or viewed_input(before) is not None or is_item(before):
            costs[index] += UNALIKE_BYTES
    return costs


def _places(events: Sequence[_Event], costs: Sequence[int]) -> list[int]:
    """The cheapest places of events in their order."""
    best: list[dict[int, tuple[int, int]]] = []  # by event and place: cost, the place before
    for event in events:
        ways: dict[int, tuple[int, int]] = {}
        cheapest: tuple[int, int] | None = (0, 0) if not best else None
        earlier = sorted(best[-1].items()) if best else []
        for place in range(event.first, event.last + 1):
            same = None
            while earlier and earlier[0][0] <= place:
                other, (cost, _) = earlier.pop(0)
                if cheapest is None or cost < cheapest[0]:
                    cheapest = (cost, other)
                same = (cost, other) if other == place else None
            if cheapest is None:
                continue
            moved = PASSED_BYTES * abs(place - event.position)
            cost, before = cheapest[0] + costs[place] + moved, cheapest[1]
            if same is not None and same[0] + moved < cost:  # the cut is there already
                cost, before = same[0] + moved, same[1]
            ways[place] = (cost, before)
        best.append(ways)
    found: list[int] = []
    place = min(best[-1], key=lambda one: best[-1][one][0])
    for ways in reversed(best):
        found.append(place)
        place = ways[place][1]
    return found[::-1]
