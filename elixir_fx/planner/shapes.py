"""Shapes: the facts of a graph with dynamic dimensions, at other sizes than it was captured with.

A graph whose batch or sequence dimension is a symbol is captured once and serves every size.
Its facts hold the numbers of the call that it was captured with; `Formulas` keep the sizes
that depend on a symbol as sympy expressions, and `at` evaluates them for another call. Where
each node stands does not change, so neither do the places and times of moves: only what is
needed at a time and what it costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy

from elixir_fx.facts import Cost, Facts, Storage

Values = tuple[int, ...]  # of the symbols, in the order of `Formulas.symbols`


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """Sizes as expressions of the dynamic dimensions.

    `symbols` are those that a call gives values to. `storages` and `nodes` say the bytes of a
    storage and the bytes that a node reads and writes, by name; what is not listed is
    constant.
    """

    symbols: tuple[sympy.Symbol, ...] = ()
    storages: Mapping[str, sympy.Expr] = field(default_factory=dict)
    nodes: Mapping[str, sympy.Expr] = field(default_factory=dict)

    @cached_property
    def _distinct(self) -> list[sympy.Expr]:
        return list(dict.fromkeys([*self.storages.values(), *self.nodes.values()]))

    @staticmethod
    def over(
        symbols: tuple[sympy.Symbol, ...],
        *,
        storages: Mapping[str, sympy.Expr],
        nodes: Mapping[str, sympy.Expr],
    ) -> "Formulas":
        """The formulas that these symbols settle. Others, such as the memory around an input
        that is a view, keep the number of the captured call."""
        known = set(symbols)

        def settled(formulas: Mapping[str, sympy.Expr]) -> dict[str, sympy.Expr]:
            return {name: f for name, f in formulas.items() if f.free_symbols <= known}

        return Formulas(symbols=symbols, storages=settled(storages), nodes=settled(nodes))

    def numbers(self, values: Values) -> dict[sympy.Expr, int]:
        """Every expression's value."""
        given = dict(zip(self.symbols, map(sympy.Integer, values), strict=True))
        return {formula: int(formula.xreplace(given)) for formula in self._distinct}


def at(facts: Facts, formulas: Formulas, values: Values) -> Facts:
    """`facts` with the symbols at `values`. A node's time goes with the bytes that it moves."""
    known = formulas.numbers(values)

    def storage(entry: Storage) -> Storage:
        formula = formulas.storages.get(entry.name)
        return entry if formula is None else replace(entry, nbytes=known[formula])

    def cost(entry: Cost) -> Cost:
        formula = formulas.nodes.get(entry.node)
        if formula is None or not entry.bytes:
            return entry
        share = known[formula] / entry.bytes
        return replace(
            entry,
            seconds=entry.seconds * share,
            flops=int(entry.flops * share),
            bytes=known[formula],
        )

    sizes = ",".join(map(str, values))
    return replace(
        facts,
        key=f"{facts.key}@{sizes}",
        storages=tuple(map(storage, facts.storages)),
        costs=tuple(map(cost, facts.costs)),
    )
