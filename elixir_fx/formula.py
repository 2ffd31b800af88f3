"""Formulas: sizes as text over named whole numbers, evaluated exactly.

A plan for dynamic dimensions says how many bytes it needs at any size of them, in a form that a
person reads and JSON holds: "4096*batch*sequence + 8*((sequence + 1)//2)". Whole numbers, names,
`+ - * // % **`, `max` and `min`, no more; standard library only, and nothing is ever executed.
"""

import ast
import operator
from collections.abc import Callable, Mapping

from elixir_fx.errors import PlanError

_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {"max": max, "min": min}
_HIGHEST_POWER = 64  # more is no size, and could take forever


def evaluate(formula: str, values: Mapping[str, int]) -> int:
    """The value of a formula with its names at `values`. PlanError for anything that is not a
    formula of these names."""
    try:
        return _value(ast.parse(formula, mode="eval").body, values)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:
        raise PlanError(f"{formula!r} is not a formula of sizes: {error}") from error


def _value(node: ast.expr, values: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            if name not in values:
                raise PlanError(f"a formula has the size {name!r}; known are {sorted(values)}")
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _value(left, values), _value(right, values)
            if isinstance(op, ast.Pow) and not 0 <= second <= _HIGHEST_POWER:
                raise PlanError(f"{ast.unparse(node)!r}: {second} is not a power of a size")
            return _BINARY[type(op)](first, second)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]) if (
            name in _FUNCTIONS
        ):
            return _FUNCTIONS[name]([_value(one, values) for one in arguments])
    raise PlanError(f"{ast.unparse(node)!r} is no part of a formula of sizes")
