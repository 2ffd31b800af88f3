"""Explained: a plan's reasons as text. Part of the plan, which prints them (`Plan.explain`).

Plain text of the standard library: a plan is read where neither torch nor the planner is.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from elixir_fx.units import GIB, MIB, sizes, times


class Plan(Protocol):
    """What is read of a plan, whose module reads this one."""

    @property
    def forecast(self) -> Any: ...
    @property
    def layout(self) -> Any: ...
    @property
    def limits(self) -> Any: ...
    @property
    def schedules(self) -> Any: ...
    @property
    def what_if(self) -> Any: ...
    @property
    def worth(self) -> Any: ...


PER_GIB = 4 * GIB  # a device with less has its memory's worth told by the 100 MiB
LITTLE = 100 * MIB
NEEDED = "needed"


def explained_text(plan: Plan) -> str:
    """What the device's memory buys, what would change with more or less, what is waited for."""
    forecast = plan.forecast
    near = "no bound is known"
    if forecast.lower_bound_s:
        near = f"no plan takes less than {times(forecast.lower_bound_s)}: gap {forecast.gap:.1%}"
    lines = [
        f"a step of {times(forecast.step_s)} on {sizes(forecast.peak_device_bytes)} of the "
        f"device's {sizes(plan.limits.device)}; {near}",
        "",
        *(_worth(plan) if plan.worth else _known(plan)),
    ]
    if plan.what_if:
        lines += ["", *_what_if(plan)]
    lines += ["", *_waits(plan)]
    if not plan.worth:
        lines += ["", "elixir_fx.plan(...).explain() also says what each part of the memory buys"]
    return "\n".join(lines) + "\n"


def _worth(plan: Plan) -> list[str]:
    """What the bytes are for, and what they buy."""
    small = plan.limits.device < PER_GIB
    unit, name = (LITTLE, "100 MiB") if small else (GIB, "GiB")
    rows = [("what the device holds at the peak", "", "without it", f"for each {name}")]
    for worth in plan.worth:
        lost, each = NEEDED, ""
        if worth.lost_s is not None:
            lost = f"+{times(worth.lost_s)}"
            each = times(worth.lost_s * unit / worth.nbytes)
        rows.append((worth.purpose, sizes(worth.nbytes), lost, each))
    return _aligned(rows)


def _known(plan: Plan) -> list[str]:
    """What the bytes are for, as far as a plan without the planner knows."""
    layout, forecast = plan.layout, plan.forecast
    rows = [("activations and gradients on their way", forecast.activation_bytes)]
    for part in ("parameters", "gradients"):
        rows.append((f"{part} at home", _home_bytes(plan, part)))
    beside = layout.block_bytes - layout.shared_bytes
    rows += [
        ("gathered chunks", layout.gather_bytes),
        ("gradients on their way home", layout.block_bytes),
        ("ring of the update beyond these", layout.arena_bytes - layout.gather_bytes - beside),
    ]
    rest = forecast.peak_device_bytes - sum(nbytes for _, nbytes in rows)
    rows.append(("states at home, buffers and the update's scratch", rest))
    shown = [(what, sizes(nbytes)) for what, nbytes in rows if nbytes > 0]
    return _aligned([("what the device holds at the peak", ""), *shown])


def _home_bytes(plan: Plan, part: str) -> int:
    """Bytes of the parameters, or of their gradients, at home on the device."""
    total = 0
    for chunk in plan.layout.chunks:
        home = chunk.homes.parameters if part == "parameters" else chunk.homes.gradients
        if home == "device" and (part == "parameters" or chunk.trainable):
            spans = sum(piece.span for piece in chunk.slices) * chunk.itemsize
            total += chunk.share_bytes if chunk.sharded else spans
    return total


def _what_if(plan: Plan) -> list[str]:
    step_s = plan.forecast.step_s
    rows = [("with another budget", "a step", "")]
    for other in plan.what_if:
        more = other.limit_bytes - plan.limits.device
        title = f"{sizes(other.limit_bytes)}, {sizes(abs(more))} {'more' if more > 0 else 'less'}"
        if other.step_s is None:
            rows.append((title, "no plan", ""))
            continue
        change = other.step_s - step_s
        rows.append((title, times(other.step_s), f"{'+' if change > 0 else ''}{times(change)}"))
    return _aligned(rows)


def _waits(plan: Plan) -> list[str]:
    """Seconds beyond the computation, by cause, the longest first."""
    forecast = plan.forecast
    longest = sorted(forecast.exposed, key=lambda one: (-one[1], one[0]))
    if not longest:
        return [f"all of the step is computation: {times(forecast.compute_s)}"]
    rows = [("what the step waits for", times(forecast.exposed_s))]
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
