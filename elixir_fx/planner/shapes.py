"""Shapes: the facts of a graph with dynamic dimensions, at other sizes than it was captured with.

A graph whose batch or sequence dimension is a symbol is captured once and serves every size.
Its facts hold the numbers of the call that it was captured with; `Formulas` keep the sizes
that depend on a symbol as sympy expressions, and `at` evaluates them for another call. Where
each node stands does not change, so neither do the places and times of moves: only what is
needed at a time and what it costs. `demand` says the device memory of a layout at every size at
once, for `Plan.largest`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy

from elixir_fx.demand import Demand
from elixir_fx.facts import Cost, Facts, Storage, again
from elixir_fx.plan import Layout
from elixir_fx.planner.footprint import Footprint
from elixir_fx.planner.polynomials import live_formulas

Values = tuple[int, ...]  # of the symbols, in the order of `Formulas.symbols`


@dataclass(frozen=True, kw_only=True)
class Formulas:
    """Sizes as expressions of the dynamic dimensions.

    `symbols` are those that a call gives values to. `storages` and `nodes` say the bytes of a
    storage and the bytes that a node reads and writes, by name; what is not listed is
    constant. `names` are the user's for the symbols, empty where a symbol has none, and
    `captured` their values in the captured call; both are empty where no symbol has a name.
    """

    symbols: tuple[sympy.Symbol, ...] = ()
    names: tuple[str, ...] = ()
    captured: Values = ()
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
        names: tuple[str, ...] = (),
        captured: Values = (),
    ) -> "Formulas":
        """The formulas that these symbols settle. Others, such as the memory around an input
        that is a view, keep the number of the captured call."""
        known = set(symbols)

        def settled(formulas: Mapping[str, sympy.Expr]) -> dict[str, sympy.Expr]:
            return {name: f for name, f in formulas.items() if f.free_symbols <= known}

        return Formulas(
            symbols=symbols,
            names=names,
            captured=captured,
            storages=settled(storages),
            nodes=settled(nodes),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The named sizes, with their values in the captured call."""
        named = zip(self.names, self.captured, strict=True)
        return {name: value for name, value in named if name}

    def values(self, sizes: Mapping[str, int]) -> Values:
        """Values of all symbols: of the named ones as given, else as captured."""
        named = zip(self.names, self.captured, strict=True)
        return tuple(sizes.get(name, value) for name, value in named)

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


def demand(facts: Facts, formulas: Formulas, layout: Layout) -> Demand:
    """The device bytes of a layout with this graph in it, its activations decided, in formulas of
    its named sizes; symbols without a name are as captured. At any sizes its peak is the one that
    `schedule` compares with the budget. PlanError for bytes that are no formula of a plan's."""
    given = {
        symbol: sympy.Symbol(name, integer=True, positive=True) if name else sympy.Integer(value)
        for symbol, name, value in zip(
            formulas.symbols, formulas.names, formulas.captured, strict=True
        )
    }
    footprint = Footprint(facts, layout.chunks, layout.group)
    lives = footprint.kept_deaths if layout.keeps_all else footprint.last_deaths
    named = {name: formula.xreplace(given) for name, formula in formulas.storages.items()}
    named |= {again(name): formula for name, formula in named.items()}
    return footprint.demand(layout, live_formulas(len(facts.nodes), lives, named))
