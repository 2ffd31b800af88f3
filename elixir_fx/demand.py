"""Demand: the device memory that a planned step needs, at any size of its dynamic dimensions.

The one place that says what a layout with a graph in it takes: a call is admitted, or refused,
by `peak`; `largest` asks the same question the other way round. Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from elixir_fx.errors import PlanError
from elixir_fx.formula import evaluate
from elixir_fx.units import sizes

MOST = 1 << 40  # a size that is still allowed at this value is not what limits memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Device bytes of a step.

    `constant_bytes` are there all the time: what is at home there, buffers, the arena. Beside
    them are, at different times, the `update_bytes` and what is live while the graph runs: the
    most of `live`, formulas of the named sizes, one for each position that no other covers.
    """

    constant_bytes: int
    update_bytes: int
    live: tuple[str, ...]

    def peak(self, values: Mapping[str, int], held_bytes: int = 0) -> int:
        """Device bytes at the step's peak. `held_bytes` are activations of other graphs that are
        there in forward and backward."""
        running = max((evaluate(formula, values) for formula in self.live), default=0)
        return self.constant_bytes + max(running + held_bytes, self.update_bytes)

    def largest(self, name: str, others: Mapping[str, int], limit_bytes: int) -> int:
        """The largest value of a size at which the peak keeps to a limit, by bisection: the next
        larger one does not. PlanError if 1 does not, or if any does."""
        at_one = self.peak({**others, name: 1})
        if at_one > limit_bytes:
            raise PlanError(
                f"{name} = 1 needs {sizes(at_one)} already; {sizes(limit_bytes)} are allowed"
                + "".join(f", with {other} = {value}" for other, value in others.items())
            )
        fits, above = 1, 2
        while self.peak({**others, name: above}) <= limit_bytes:
            if above >= MOST:
                raise PlanError(f"{name} may be any size: the memory of this plan does not grow")
            fits, above = above, 2 * above
        while above - fits > 1:
            middle = (fits + above) // 2
            if self.peak({**others, name: middle}) <= limit_bytes:
                fits = middle
            else:
                above = middle
        return fits
