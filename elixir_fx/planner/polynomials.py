"""Polynomials: what is live at each position, as formulas of the dynamic dimensions.

Where `shapes` evaluates sizes at numbers, this keeps them symbolic: live(i) is a sum of terms
"coefficient x monomial", the most of which over all positions i is what a graph needs at any
size. Many positions share a polynomial, and most are covered by another:

    p covers q   if  p - q >= 0 for all sizes >= 1, seen coefficient by coefficient
                     once every size is written as 1 + y, y >= 0

What is no polynomial (a rounded division, a remainder, a maximum) is a factor of its own and is
kept as it is, so that the formulas are exact at whole numbers, neither below nor above the truth.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product

import numpy as np
import sympy
from numpy.typing import NDArray

from elixir_fx.errors import PlanError
from elixir_fx.facts import Storage

ONE = sympy.Integer(1)

Terms = Mapping[sympy.Expr, int]  # whole coefficients, by monomial


def live_formulas(
    length: int,
    lives: Iterable[tuple[Storage, int]],
    formulas: Mapping[str, sympy.Expr],
) -> tuple[str, ...]:
    """Formulas of which the most is live anywhere among `length` positions: each storage of
    `lives` from where it is born to where it dies. `formulas` are the bytes of those that are no
    constant, in symbols with the names that the text shall have."""
    known: dict[sympy.Expr, Terms] = {}
    columns: dict[sympy.Expr, int] = {ONE: 0}
    changes: list[tuple[int, int, Terms]] = []
    for storage, dies in lives:
        formula = formulas.get(storage.name)
        if formula is None:
            found: Terms = {ONE: storage.nbytes}
        else:
            found = (
                known[formula] if formula in known else known.setdefault(formula, terms(formula))
            )
        for monomial in found:
            columns.setdefault(monomial, len(columns))
        changes.append((min(storage.born, length), min(dies, length - 1) + 1, found))
    change = np.zeros((length + 1, len(columns)), dtype=np.int64)
    for born, gone, found in changes:
        for monomial, coefficient in found.items():
            change[born, columns[monomial]] += coefficient
            change[gone, columns[monomial]] -= coefficient
    words = [(text(monomial), _degree(monomial)) for monomial in columns]
    live = np.unique(np.cumsum(change[:-1], axis=0), axis=0)
    return tuple(_sum(row, words) for row in _uncovered(live, list(columns)))


def terms(formula: sympy.Expr) -> Terms:
    """A size as a sum: the coefficient of every monomial. One with coefficients that are not
    whole is a factor of its own."""
    found = sympy.expand(formula).as_coefficients_dict()
    if all(coefficient.is_Integer for coefficient in found.values()):
        return {monomial: int(coefficient) for monomial, coefficient in found.items()}
    return {formula: 1}


def _uncovered(
    rows: NDArray[np.int64], monomials: Sequence[sympy.Expr]
) -> Iterable[NDArray[np.int64]]:
    """The rows that no other covers, the largest first."""
    compared = rows @ _comparison(monomials)
    order = np.argsort(-compared.sum(axis=1), kind="stable")
    kept: list[int] = []
    for index in order:
        if not kept or not (compared[kept] >= compared[index]).all(axis=1).any():
            kept.append(int(index))
    return rows[kept]


def _comparison(monomials: Sequence[sympy.Expr]) -> NDArray[np.int64]:
    """A matrix from coefficients to numbers of which all must be as large in a row that covers
    another: the coefficients in y, every size being 1 + y. What may be negative must be equal,
    which is as large together with its opposite."""
    columns: dict[object, dict[int, int]] = {}
    for index, monomial in enumerate(monomials):
        powers = _powers(monomial)
        if powers is not None:
            for lower in product(*(range(power + 1) for power in powers.values())):
                ways = math.prod(map(math.comb, powers.values(), lower))
                key = tuple((s, p) for s, p in zip(powers, lower, strict=True) if p)
                columns.setdefault(frozenset(key), {})[index] = ways
        else:
            columns[monomial, 1] = {index: 1}
            if not _never_negative(monomial):
                columns[monomial, -1] = {index: -1}
    matrix = np.zeros((len(monomials), len(columns)), dtype=np.int64)
    for place, column in enumerate(columns.values()):
        for index, ways in column.items():
            matrix[index, place] = ways
    return matrix


def _powers(monomial: sympy.Expr) -> dict[sympy.Symbol, int] | None:
    """The power of each size in a product of sizes; None for anything else."""
    found = monomial.as_powers_dict() if monomial != ONE else {}
    if all(s.is_Symbol and p.is_Integer and p > 0 for s, p in found.items()):
        return {size: int(power) for size, power in found.items()}
    return None


def _never_negative(formula: sympy.Expr) -> bool:
    """Whether a size cannot be negative where all dynamic dimensions are 1 or more, as far as
    its form shows."""
    if formula.is_Number:
        return bool(formula >= 0)
    name, arguments = type(formula).__name__, formula.args
    if name in ("Mod", "PythonMod"):
        return _never_negative(arguments[1])
    if name == "Max":
        return any(map(_never_negative, arguments))
    if arguments and not formula.is_Add:
        return all(map(_never_negative, arguments))
    found = terms(formula)
    if all(_powers(monomial) is not None for monomial in found):
        row = np.array(list(found.values()), dtype=np.int64) @ _comparison(list(found))
        return bool((row >= 0).all())
    return all(map(_never_negative, arguments)) and bool(arguments)


# -- as text ---------------------------------------------------------------------------------


def _sum(row: NDArray[np.int64], words: Sequence[tuple[str, int]]) -> str:
    """Terms with their coefficients, the highest degrees first, the constant last."""
    terms = [(degree, word, int(c)) for (word, degree), c in zip(words, row, strict=True) if c]
    terms.sort(key=lambda term: (-term[0], term[1]))
    parts = [f"{c}*{word}" if degree else str(c) for degree, word, c in terms]
    return " + ".join(parts).replace("+ -", "- ") or "0"


def _degree(monomial: sympy.Expr) -> int:
    powers = _powers(monomial)
    return sum(powers.values()) if powers is not None else 1


def text(formula: sympy.Expr) -> str:
    """A size as `formula.evaluate` reads it. PlanError for what cannot be said there."""
    if formula.is_Integer:
        return str(formula) if formula >= 0 else f"({formula})"
    if formula.is_Symbol:
        return str(formula.name)
    above, below = sympy.fraction(formula)
    if below != ONE:
        return f"({text(above)}//{text(below)})"
    if formula.is_Add:
        return f"({' + '.join(map(text, formula.args))})"
    if formula.is_Mul:
        return "*".join(map(text, formula.args))
    if formula.is_Pow and formula.exp.is_Integer:
        return f"{text(formula.base)}**{formula.exp}"
    write = _FUNCTIONS.get(type(formula).__name__)
    if write is None:
        raise PlanError(
            f"the bytes of a tensor are {formula}, and {type(formula).__name__} is more than a "
            "plan can say of other sizes: leave that dimension out of dynamic_shapes"
        )
    return write(*formula.args)


def _divided(above: sympy.Expr, below: sympy.Expr = ONE) -> str:
    more, less = sympy.fraction(sympy.together(above))
    return f"(({text(more)})//({text(less * below)}))"


def _rounded_up(argument: sympy.Expr) -> str:
    return f"(-{_divided(-argument)})"


def _remainder(number: sympy.Expr, divisor: sympy.Expr) -> str:
    return f"(({text(number)}) % ({text(divisor)}))"


def _digits(number: sympy.Expr, divisor: sympy.Expr, modulus: sympy.Expr) -> str:
    return f"({_divided(number, divisor)} % ({text(modulus)}))"


def _most(*arguments: sympy.Expr) -> str:
    return f"max({', '.join(sorted(map(text, arguments)))})"


def _least(*arguments: sympy.Expr) -> str:
    return f"min({', '.join(sorted(map(text, arguments)))})"


# sympy's functions of whole numbers and those that torch adds to them, by the class's name: this
# module knows no torch.
_FUNCTIONS: Mapping[str, Callable[..., str]] = {
    "floor": _divided,
    "FloorDiv": _divided,
    "CleanDiv": _divided,
    "ceiling": _rounded_up,
    "Mod": _remainder,
    "PythonMod": _remainder,
    "ModularIndexing": _digits,
    "Max": _most,
    "Min": _least,
    "Identity": text,
}
