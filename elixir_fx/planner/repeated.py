"""Repeated: the facts of a step in which the backward computes again what the forward dropped.

Part of the planner's third stage, activations: a decision goes in (which storages are dropped,
which leave the device), the facts of the rewritten step and the repetitions that the passes carry
out come out. It walks the backward once:

    a forward value is at hand there if it was kept: an activation that nobody dropped, a
    parameter, and an input or output that the backward read already
    one that is not is computed again before its first reader, behind what that needs of it;
    every node at most once
    what must run only once (it draws random numbers) and is needed for that is kept after all

A view of a storage that comes back is made again from it. `rewritten` gives the facts that the
analyses would find in the rewritten graph; a test holds it to that.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from elixir_fx.facts import Departure, Facts, Parameter, Role, Storage, again
from elixir_fx.plan import Recompute

GIVEN = frozenset({Role.INPUT, Role.BUFFER, Role.OUTPUT})  # memory that is the caller's
COUNTED = frozenset({Role.ACTIVATION, Role.TEMPORARY, Role.GRADIENT})
_KEPT, _AGAIN, _AWAY = range(3)
_Memory = tuple[int, int]  # one of these, and the position of the node that allocated it


class BlockedError(Exception):
    """Something that the decision drops cannot be computed again."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One captured step as the walk needs it."""

    facts: Facts

    @cached_property
    def position(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.facts.nodes)}

    @cached_property
    def storage(self) -> dict[int, Storage]:
        """Storages by the position of the node that is their root."""
        known = self.position
        return {known[s.name]: s for s in self.facts.storages if s.name in known}

    @cached_property
    def crossing(self) -> frozenset[int]:
        """Roots in the forward that the backward reads."""
        start, end = self.facts.backward, len(self.facts.nodes) - 1
        return frozenset(
            root
            for root, storage in self.storage.items()
            if root < start and any(start <= reader < end for reader in storage.readers)
        )

    @cached_property
    def changed(self) -> frozenset[int]:
        """Roots that somebody writes in place."""
        flow = self.facts.flow
        return frozenset(f.root for n, f in enumerate(flow) if f.root != n and not f.repeats)

    @cached_property
    def may_repeat(self) -> frozenset[str]:
        """Storages that something may be computed into again."""
        names, flow = self.facts.nodes, self.facts.flow
        return frozenset(
            names[root] for root in self.storage if flow[root].repeats and root not in self.changed
        )

    @cached_property
    def picks(self) -> Mapping[int, list[int]]:
        """By an operator with several results, what is picked of them."""
        found = defaultdict(list)
        for root, storage in self.storage.items():
            if storage.born != root:
                found[storage.born].append(root)
        return found

    @cached_property
    def unpicked(self) -> Mapping[int, list[Storage]]:
        """By an operator, the results that nobody picks."""
        found = defaultdict(list)
        for storage in self.facts.storages:
            if storage.name not in self.position:
                found[storage.born].append(storage)
        return found

    @cached_property
    def several(self) -> frozenset[int]:
        """Operators with several results."""
        return frozenset((*self.picks, *self.unpicked))

    def again_s(self, root: int) -> float:
        """Seconds of computing a storage again where nothing else is dropped; infinite where that
        cannot be."""
        flow, seen, stack, seconds = self.facts.flow, {root}, [root], 0.0
        if root in self.changed:
            return float("inf")
        while stack:
            node = stack.pop()
            if not flow[node].repeats:
                storage = self.storage.get(flow[node].root)
                held = storage is not None and storage.role in COUNTED and node != root
                if not held:
                    return float("inf")
                continue
            seconds += self.facts.costs[node].seconds
            for source in flow[node].sources:
                dropped = flow[source].root == root
                if source not in seen and (dropped or not self.at_hand(source)):
                    seen.add(source)
                    stack.append(source)
        return seconds

    def at_hand(self, node: int) -> bool:
        """Whether the backward finds the memory of a forward value, if nothing is dropped."""
        root = self.facts.flow[node].root
        storage = self.storage.get(root)
        if storage is None:
            return root not in self.several  # a size, a constant
        if root in self.crossing:
            return True
        return storage.role is Role.PARAMETER and root not in self.changed


class Walk:
    """What one decision makes of a step: the nodes repeated, in order, each before one of the
    backward. BlockedError if that cannot be."""

    def __init__(self, step: Step, dropped: Iterable[str], away: Iterable[str] = ()) -> None:
        self.step = step
        self.dropped = {step.position[name] for name in dropped}
        self.away = {step.position[name] for name in away}
        self.before: dict[int, int] = {}  # repeated nodes: the position ahead of which each runs
        self.held: set[int] = set()  # roots that are kept after all
        blocked = (self.dropped | self.away) & step.changed
        if blocked:
            raise BlockedError(step.facts.nodes[min(blocked)])
        facts = step.facts
        for position in range(facts.backward, len(facts.nodes) - 1):  # the last returns
            for source in facts.flow[position].sources:
                if source < facts.backward:
                    self._need(source, position)

    def _at_hand(self, node: int) -> bool:
        root = self.step.facts.flow[node].root
        if root in self.dropped:
            return False
        if root in self.away:
            return node == root
        return root in self.held or self.step.at_hand(node)

    def _need(self, node: int, position: int) -> None:
        """Have a forward value at hand before a node of the backward."""
        flow, stack = self.step.facts.flow, [node]
        while stack:
            node = stack[-1]
            if node in self.before or self._at_hand(node):
                stack.pop()
                continue
            if not flow[node].repeats:
                self._hold(node)
                stack.pop()
                continue
            missing = [
                s for s in flow[node].sources if s not in self.before and not self._at_hand(s)
            ]
            if missing:
                stack += missing
            else:
                self.before[node] = position
                stack.pop()

    def _hold(self, node: int) -> None:
        """Keep what must not run twice."""
        root = self.step.facts.flow[node].root
        storage = self.step.storage.get(root)
        if root in self.dropped or storage is None or storage.role not in COUNTED:
            raise BlockedError(self.step.facts.nodes[node])
        self.held.add(root)

    @property
    def repeated_s(self) -> float:
        """Seconds of all repetitions."""
        costs = self.step.facts.costs
        return sum(costs[node].seconds for node in self.before)

    def recomputes(self) -> tuple[Recompute, ...]:
        """The repetitions, as the passes carry them out."""
        nodes = self.step.facts.nodes
        return tuple(Recompute(node=nodes[n], before=nodes[p]) for n, p in self.before.items())


def rewritten(walk: Walk) -> Facts:
    """The facts of the step after that decision."""
    return _Rewriting(walk).facts()


class _Rewriting:
    """The new order of nodes, and who reads what in it."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.step = walk.step
        self.old: list[int] = []  # new positions of the captured nodes
        self.copy: dict[int, int] = {}  # and of the repetitions, by what they repeat
        self.order: list[tuple[int, bool]] = []  # (captured position, whether it is a repetition)
        ahead = defaultdict(list)
        for node, position in walk.before.items():
            ahead[position].append(node)
        for position in range(len(self.step.facts.nodes)):
            for node in ahead.get(position, ()):
                self.copy[node] = len(self.order)
                self.order.append((node, True))
            self.old.append(len(self.order))
            self.order.append((position, False))
        self.readers: dict[_Memory, list[int]] = defaultdict(list)
        self.users: dict[int, list[int]] = defaultdict(list)  # in the backward, itself not a view
        for new, (node, repeated) in enumerate(self.order):
            late = repeated or self.step.facts.backward <= node < len(self.step.facts.nodes) - 1
            sources = self.step.facts.flow[node].sources
            for memory in {self._memory(source, late) for source in sources}:
                self.readers[memory].append(new)
            for source in sources if late else ():
                self.users[source].append(new)

    def _memory(self, node: int, late: bool) -> _Memory:
        """Where a value lies as a node of the backward (`late`) or of the forward reads it."""
        root = self.step.facts.flow[node].root
        if late and root < self.step.facts.backward:
            if root in self.copy:
                return _AGAIN, root
            if root in self.walk.away:
                return _AWAY, root
        return _KEPT, root

    def facts(self) -> Facts:
        facts = self.step.facts
        names = [again(facts.nodes[n]) if copied else facts.nodes[n] for n, copied in self.order]
        return replace(
            facts,
            nodes=tuple(names),
            costs=tuple(
                replace(facts.costs[n], node=name) if copied else facts.costs[n]
                for (n, copied), name in zip(self.order, names, strict=True)
            ),
            storages=tuple(sorted(self._storages(), key=lambda s: (s.born, s.name))),
            parameters=self._parameters(),
            flow=(),
            departures=tuple(self._departures()),
        )

    def _storages(self) -> Iterator[Storage]:
        position = self.step.position
        for storage in self.step.facts.storages:
            root = position.get(storage.name)
            if root is None:
                yield self._moved(storage, self.old[storage.born], self.old[storage.dies], [])
                continue
            readers = self.readers.get((_KEPT, root), [])
            picked = [self.old[n] for n in self.step.picks.get(storage.born, ())]
            last = max([self.old[root], *picked, *readers])
            yield self._moved(storage, self.old[storage.born], last, readers)
        for node, new in self.copy.items():
            yield from self._repeated(node, new)

    def _moved(self, storage: Storage, born: int, dies: int, readers: list[int]) -> Storage:
        role = storage.role
        if role in (Role.ACTIVATION, Role.TEMPORARY):
            start = self.old[self.step.facts.backward] if self.step.facts.trains else born
            start = min([start, *self.copy.values()])
            crosses = born < start <= max(readers, default=born)
            role = Role.ACTIVATION if crosses else Role.TEMPORARY
        return replace(storage, born=born, dies=dies, readers=tuple(readers), role=role)

    def _repeated(self, node: int, new: int) -> Iterator[Storage]:
        """The memory that a repetition allocates."""
        step = self.step
        if node in step.several:
            picks = step.picks.get(node, [])
            picked = [self.copy[n] for n in picks if n in self.copy]
            for root in picks:
                readers = self.readers.get((_AGAIN, root), []) if root in self.copy else []
                yield self._copied(step.storage[root], new, max([new, *picked, *readers]), readers)
            for storage in step.unpicked.get(node, ()):
                yield self._copied(storage, new, max([new, *picked]), [])
        elif node in step.storage and step.storage[node].born == node:
            readers = self.readers.get((_AGAIN, node), [])
            yield self._copied(step.storage[node], new, max([new, *readers]), readers)

    @staticmethod
    def _copied(storage: Storage, born: int, dies: int, readers: list[int]) -> Storage:
        return replace(
            storage,
            name=again(storage.name),
            role=Role.TEMPORARY,
            born=born,
            dies=dies,
            readers=tuple(readers),
        )

    def _parameters(self) -> tuple[Parameter, ...]:
        facts, step = self.step.facts, self.step
        end = len(self.order) - 1
        derived = defaultdict(list)  # what the forward made of a parameter by a copy, by path
        for node, flow in enumerate(facts.flow[: facts.backward]):
            storage = step.storage.get(flow.root)
            own = storage is not None and storage.role is not Role.PARAMETER
            own = own and flow.root not in self.walk.away
            if flow.derives and own and node not in self.copy:
                derived[flow.derives].append(node)
        place = {s.path: root for root, s in step.storage.items() if s.role is Role.PARAMETER}
        found = []
        for parameter in facts.parameters:
            reads = set(self.readers.get((_KEPT, place.get(parameter.path, -1)), ())) - {end}
            for node in derived.get(parameter.path, ()):
                reads.update(sorted(u for u in self.users.get(node, ()) if u != end)[:1])
            gradient = parameter.gradient
            found.append(
                replace(
                    parameter,
                    reads=tuple(sorted(reads)),
                    gradient=None if gradient is None else self.old[gradient],
                )
            )
        return tuple(found)

    def _departures(self) -> Iterator[Departure]:
        start = self.step.facts.backward
        for root in sorted(self.walk.away):
            storage = self.step.storage[root]
            readers = self.readers[(_AWAY, root)]
            left = [r for r in self.readers.get((_KEPT, root), []) if r < start]
            picked = [n for n in self.step.picks.get(storage.born, ()) if n < start]
            yield Departure(
                storage=storage.name,
                nbytes=storage.nbytes,
                leaves=max([root, *picked, *left]),
                first=min(readers),
                last=max(readers),
            )
