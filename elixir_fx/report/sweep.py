"""A sweep: what is expected of one step under many budgets, ranks and sizes, as data and a table.

`elixir_fx.sweep` makes it. Frozen; printing it gives the table.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from elixir_fx.plan import Forecast
from elixir_fx.report.text import table
from elixir_fx.units import round_up, sizes, times

VERSION = 1
NONE = "-"  # of a cell that has no number


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One combination: the device budget of each rank, how many ranks there are, and the values of
    the named sizes of each rank's inputs.

    `forecast` is that of the plan, None where there is none: then `refusal` says why, and
    `smallest_bytes` the least budget that would do, None where no budget would.
    """

    memory_bytes: int
    ranks: int = 1
    sizes: tuple[tuple[str, int], ...] = ()
    forecast: Forecast | None = None
    refusal: str = ""
    smallest_bytes: int | None = None

    @property
    def step_s(self) -> float | None:
        return self.forecast.step_s if self.forecast is not None else None

    @property
    def lower_bound_s(self) -> float | None:
        return self.forecast.lower_bound_s if self.forecast is not None else None

    @property
    def gap(self) -> float | None:
        """How far above the lower bound the step is; None where there is no bound."""
        bounded = self.forecast is not None and self.forecast.lower_bound_s > 0
        return self.forecast.gap if self.forecast is not None and bounded else None

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks together; None unless a size is called "batch"."""
        return self._per_s("batch")

    @property
    def tokens_per_s(self) -> float | None:
        """Of all ranks together; None unless sizes are called "batch" and "sequence"."""
        return self._per_s("batch", "sequence")

    def _per_s(self, *names: str) -> float | None:
        known = dict(self.sizes)
        if not self.step_s or not all(name in known for name in names):
            return None
        count = self.ranks
        for name in names:
            count *= known[name]
        return count / self.step_s

    @property
    def peak_device_bytes(self) -> int | None:
        return self.forecast.peak_device_bytes if self.forecast is not None else None

    @property
    def peak_host_bytes(self) -> int | None:
        return self.forecast.peak_host_bytes if self.forecast is not None else None

    @property
    def disk_bytes(self) -> int | None:
        """Read from the disk and written to it, of one rank."""
        if self.forecast is None:
            return None
        return self.forecast.disk_read_bytes + self.forecast.disk_write_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The rows of a sweep: sizes outermost, then ranks, then budgets, each in the order given."""

    model: str
    machine: str
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return sweep_text(self)

    def to_json(self) -> str:
        """The rows as JSON: what was asked, the whole forecast, and what follows from it."""
        rows = [
            {
                **asdict(row),
                "sizes": dict(row.sizes),
                "gap": row.gap,
                "samples_per_s": row.samples_per_s,
                "tokens_per_s": row.tokens_per_s,
            }
            for row in self.rows
        ]
        head = {"elixir_fx_sweep": VERSION, "model": self.model, "machine": self.machine}
        return json.dumps({**head, "rows": rows}, indent=1)


def sweep_text(sweep: Sweep) -> str:
    """One line a row; columns of which nothing is known are left out."""
    rows = sweep.rows
    names = list(dict.fromkeys(name for row in rows for name, _ in row.sizes))
    columns: list[tuple[str, list[str]]] = [
        ("memory", [sizes(row.memory_bytes) for row in rows]),
        ("ranks", [str(row.ranks) for row in rows]),
        *((name, [str(dict(row.sizes).get(name, NONE)) for row in rows]) for name in names),
        ("step", [_cell(times, row.step_s) for row in rows]),
        ("samples/s", [_cell(_rate, row.samples_per_s) for row in rows]),
        ("tokens/s", [_cell(_rate, row.tokens_per_s) for row in rows]),
        ("at least", [_cell(times, row.lower_bound_s) for row in rows]),
        ("gap", [_cell(_percent, row.gap) for row in rows]),
        ("device", [_cell(sizes, row.peak_device_bytes) for row in rows]),
        ("host", [_cell(sizes, row.peak_host_bytes or None) for row in rows]),
        ("disk moved", [_cell(sizes, row.disk_bytes or None) for row in rows]),
        ("", [_remark(row) for row in rows]),
    ]
    shown = [(head, cells) for head, cells in columns if set(cells) - {NONE, ""}]
    if all(row.ranks == 1 for row in rows):
        shown = [(head, cells) for head, cells in shown if head != "ranks"]
    body = table(
        [head for head, _ in shown],
        list(zip(*(cells for _, cells in shown), strict=True)),
        left=[index for index, (head, _) in enumerate(shown) if not head],
    )
    return f"{sweep.model} on {sweep.machine}\n{body}\n"


def _remark(row: Row) -> str:
    if row.forecast is not None:
        return ""
    if row.smallest_bytes is None:
        return f"no plan: {row.refusal}"
    return f"no plan: memory={round_up(row.smallest_bytes)!r} would do"


def _cell(write: Callable[[float], str], number: float | None) -> str:
    return NONE if number is None else write(number)


def _rate(per_s: float) -> str:
    return f"{per_s:.3g}" if per_s < 100 else f"{per_s:.0f}"


def _percent(share: float) -> str:
    return f"{share:.1%}"
