"""Explained: a plan's reasons as text. Part of the plan, which prints them (`Plan.explain`).

Plain text of the standard library: a plan is read where neither torch nor the planner is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elixir_fx.units import GIB, MIB, sizes, times

PER_GIB = 4 * GIB  # a device with less has its memory's worth told by the 100 MiB
LITTLE = 100 * MIB
NEEDED = "needed"
HOLDS = "what the device holds at the peak"


@dataclass(frozen=True, kw_only=True, slots=True)
class Worth:
    """What some of the device's bytes are for, at the step's peak. `lost_s` are the seconds that a
    step would take longer without them, as far as the planner found; None where it has no other
    way."""

    purpose: str
    nbytes: int
    lost_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The step of the plan under another device budget; None where there is no plan."""

    limit_bytes: int
    step_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What a plan's device memory buys, and what other budgets would change."""

    worth: tuple[Worth, ...] = ()
    what_if: tuple[WhatIf, ...] = ()


class Why:
    """A plan's account, worked out when it is first asked for: that takes several searches."""

    def __init__(self, work_out: Callable[[], Account]) -> None:
        self._work_out = work_out
        self.known: Account | None = None

    def account(self) -> Account:
        """The account, from now on `known`."""
        if self.known is None:
            self.known = self._work_out()
        return self.known


@dataclass(frozen=True, kw_only=True, slots=True)
class Reasons:
    """All that a plan says of itself. `held` are the bytes at the peak by purpose, for where there
    is no `worth`; `exposed` seconds by cause."""

    step_s: float
    compute_s: float
    lower_bound_s: float
    gap: float
    peak_bytes: int
    limit_bytes: int
    exposed: tuple[tuple[str, float], ...]
    held: tuple[tuple[str, int], ...]
    worth: tuple[Worth, ...]
    what_if: tuple[WhatIf, ...]


def explained_text(reasons: Reasons) -> str:
    """What the device's memory buys, what would change with more or less, what is waited for."""
    near = "no bound is known"
    if reasons.lower_bound_s:
        near = f"no plan takes less than {times(reasons.lower_bound_s)}: gap {reasons.gap:.1%}"
    lines = [
        f"a step of {times(reasons.step_s)} on {sizes(reasons.peak_bytes)} of the "
        f"device's {sizes(reasons.limit_bytes)}; {near}",
        "",
        *(_worth(reasons) if reasons.worth else _held(reasons)),
    ]
    if reasons.what_if:
        lines += ["", *_what_if(reasons)]
    lines += ["", *_waits(reasons)]
    if not reasons.worth:
        lines += ["", "elixir_fx.plan(...).explain() also says what each part of the memory buys"]
    return "\n".join(lines) + "\n"


def _worth(reasons: Reasons) -> list[str]:
    """What the bytes are for, and what they buy."""
    small = reasons.limit_bytes < PER_GIB
    unit, name = (LITTLE, "100 MiB") if small else (GIB, "GiB")
    rows = [(HOLDS, "", "without it", f"for each {name}")]
    for worth in reasons.worth:
        lost, each = NEEDED, ""
        if worth.lost_s is not None:
            lost = f"+{times(worth.lost_s)}"
            each = times(worth.lost_s * unit / worth.nbytes)
        rows.append((worth.purpose, sizes(worth.nbytes), lost, each))
    return _aligned(rows)


def _held(reasons: Reasons) -> list[str]:
    """What the bytes are for, as far as a plan without the planner knows."""
    shown = [(what, sizes(nbytes)) for what, nbytes in reasons.held if nbytes > 0]
    return _aligned([(HOLDS, ""), *shown])


def _what_if(reasons: Reasons) -> list[str]:
    step_s = reasons.step_s
    rows = [("with another budget", "a step", "")]
    for other in reasons.what_if:
        more = other.limit_bytes - reasons.limit_bytes
        title = f"{sizes(other.limit_bytes)}, {sizes(abs(more))} {'more' if more > 0 else 'less'}"
        if other.step_s is None:
            rows.append((title, "no plan", ""))
            continue
        change = other.step_s - step_s
        rows.append((title, times(other.step_s), f"{'+' if change > 0 else ''}{times(change)}"))
    return _aligned(rows)


def _waits(reasons: Reasons) -> list[str]:
    """Seconds beyond the computation, by cause, the longest first."""
    longest = sorted(reasons.exposed, key=lambda one: (-one[1], one[0]))
    if not longest:
        return [f"all of the step is computation: {times(reasons.compute_s)}"]
    rows = [("what the step waits for", times(sum(seconds for _, seconds in longest)))]
    return _aligned([*rows, *((cause, times(seconds)) for cause, seconds in longest)])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns: the first to the left, the others to the right; all rows but the first indented."""
    shown = [(row[0] if not index else f"  {row[0]}", *row[1:]) for index, row in enumerate(rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(rows[0]))]
    lines = []
    for first, *others in shown:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("   ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines
