"""What people read in a terminal: a plan, what a step did, and the two side by side.

Plain text without colours. Equal chunks of consecutive layers are folded into one row, so
that a model of a hundred layers fits a screen.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from elixir_fx.errors import PlanError
from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Forecast, Layout, Plan
from elixir_fx.units import sizes, times

WIDTH = 160  # never reached: only titles are long, and they fold
TITLE_WIDTH = 48
LONGEST_PERIOD = 8  # chunks in a repeating pattern of layers
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a path


def plan_text(plan: Plan) -> str:
    """A plan for people: chunks and homes, budgets, memory, forecast and its bound."""
    layout = plan.layout
    parts = [
        f"plan for {plan.machine}",
        _chunks_text(layout.chunks),
        _homes_text(layout.chunks),
        _memory_text(plan),
        _sizes_text(plan),
    ]
    parts += [_schedule_text(plan, index) for index in range(len(plan.schedules))]
    parts += [f"note: {note}" for note in plan.notes]
    return "\n".join(part for part in parts if part) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """A chunk and those further on that are like it, one in each repetition of a pattern."""

    chunks: tuple[Chunk, ...]

    @property
    def ids(self) -> str:
        """ "3", "3..6" where they follow each other, "3, 5 .. 9" where others are between."""
        ids = [chunk.id for chunk in self.chunks]
        if len(ids) <= 2:
            return ", ".join(map(str, ids))
        if ids[1] - ids[0] == 1:
            return f"{ids[0]}..{ids[-1]}"
        return f"{ids[0]}, {ids[1]} .. {ids[-1]}"

    @property
    def title(self) -> str:
        """What it holds, with the numbers that count up as a range: "layers.0..35.fc"."""
        first, last = self.chunks[0], self.chunks[-1]
        if _pattern(first.title) != _pattern(last.title):
            return f"{first.slices[0].path} .. {last.slices[-1].path}"
        until = iter(_NUMBER.findall(last.title))

        def ranged(match: re.Match[str]) -> str:
            end = next(until)
            return match[0] if match[0] == end else f"{match[0]}..{end}"

        return _short(_NUMBER.sub(ranged, first.title))


def _short(title: str) -> str:
    """ "layers.3: attn.weight .. mlp.bias": what first and last path share stands once."""
    first, between, last = title.partition(" .. ")
    names, others = first.split("."), last.split(".")
    shared = 0
    while shared < min(len(names), len(others)) - 1 and names[shared] == others[shared]:
        shared += 1
    if not between or not shared:
        return title
    prefix = ".".join(names[:shared])
    return f"{prefix}: {'.'.join(names[shared:])} .. {'.'.join(others[shared:])}"


def folded(chunks: Sequence[Chunk]) -> list[Fold]:
    """Consecutive chunks that repeat, alone or as a pattern of a few, taken together.

    Chunks are alike if they have the same dtype, size, homes and place of update and, as
    members of a longer pattern, the same paths but for their numbers.
    """
    folds: list[Fold] = []
    start = 0
    while start < len(chunks):
        period, repeats = _repetition(chunks, start)
        end = start + period * repeats
        folds += [
            Fold(chunks=tuple(chunks[start + member : end : period])) for member in range(period)
        ]
        start = end
    return folds


def _repetition(chunks: Sequence[Chunk], start: int) -> tuple[int, int]:
    """The period and number of repeats, from `start` on, that cover the most chunks."""
    best = (1, 1)
    for period in range(1, LONGEST_PERIOD + 1):
        likeness = _size_likeness if period == 1 else _path_likeness
        wanted = [likeness(chunk) for chunk in chunks[start : start + period]]
        repeats = 0
        while [
            likeness(chunk)
            for chunk in chunks[start + repeats * period : start + (repeats + 1) * period]
        ] == wanted and len(wanted) == period:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _size_likeness(chunk: Chunk) -> tuple[object, ...]:
    known = (chunk.dtype, chunk.nbytes, chunk.trainable)
    return (*known, chunk.homes, chunk.shards, chunk.update)


def _path_likeness(chunk: Chunk) -> tuple[object, ...]:
    return (*_size_likeness(chunk), _pattern(chunk.title))


def _pattern(path: str) -> str:
    return _NUMBER.sub("#", path)


def _chunks_text(chunks: Sequence[Chunk]) -> str:
    """A row for each fold; where chunks are updated, if any is on the host."""
    columns = ("chunks", "holds", "count", "dtype", "each", "total", "param", "grad", "states")
    rows = [(fold, _row(fold)) for fold in folded(chunks)]
    if all(chunk.update is Tier.DEVICE for chunk in chunks):
        return table(columns, (row for _, row in rows), left=(0, 1, 3, 6, 7, 8))
    updates = [fold.chunks[0].update if fold.chunks[0].trainable else "-" for fold, _ in rows]
    return table(
        (*columns, "update"),
        ((*row, update) for (_, row), update in zip(rows, updates, strict=True)),
        left=(0, 1, 3, 6, 7, 8, 9),
    )


def _row(fold: Fold) -> tuple[str, ...]:
    chunk = fold.chunks[0]
    count = len(fold.chunks)
    homes = chunk.homes
    return (
        fold.ids,
        fold.title,
        f"x{count}",
        chunk.dtype if chunk.trainable else f"{chunk.dtype} frozen",
        sizes(chunk.nbytes),
        sizes(chunk.nbytes * count),
        homes.parameters,
        homes.gradients if chunk.trainable else "-",
        homes.states if chunk.trainable else "-",
    )


def _homes_text(chunks: Sequence[Chunk]) -> str:
    """How many bytes of parameters are at home on each tier."""
    total = sum(chunk.nbytes for chunk in chunks)
    shares = []
    for tier in Tier:
        nbytes = sum(chunk.share_bytes for chunk in chunks if chunk.homes.parameters == tier)
        if nbytes:
            shares.append(f"{sizes(nbytes)} on {tier}")
    return f"parameters: {sizes(total)} in {len(chunks)} chunks: {', '.join(shares) or 'none'}"


def _memory_text(plan: Plan) -> str:
    layout, limits = plan.layout, plan.limits
    rows = [("device", _peak(plan, "peak_device_bytes"), limits.device, _arena_text(layout))]
    if limits.host:
        staging = f"staging {sizes(layout.staging_bytes)}" if layout.staging_bytes else ""
        rows.append(("host", _peak(plan, "peak_host_bytes"), limits.host, staging))
    if limits.disk:
        mapped = f"of that mapped {sizes(layout.mapped_bytes)}" if layout.mapped_bytes else ""
        rows.append(("disk", layout.disk_bytes, limits.disk, mapped))
    return table(
        ("memory", "planned", "budget", "used", ""),
        (
            (tier, sizes(used), sizes(budget), f"{used / budget:.0%}" if budget else "-", what)
            for tier, used, budget, what in rows
        ),
        left=(0, 4),
    )


def _sizes_text(plan: Plan) -> str:
    """How large each named size may get in this layout, the others as they were captured."""
    parts = []
    for name, captured in plan.sizes.items():
        try:
            parts.append(f"largest {name} {plan.largest(name)} (captured with {captured})")
        except PlanError as error:
            parts.append(str(error))
    return ", ".join(parts)


def _peak(plan: Plan, name: str) -> int:
    return max((int(asdict(entry.forecast)[name]) for entry in plan.schedules), default=0)


def _arena_text(layout: Layout) -> str:
    if not layout.arena_bytes and not layout.shared_bytes:
        return ""
    blocks = f"{layout.gradient_blocks} x {sizes(layout.gradient_block_bytes)}"
    where = ", shared by the ranks" if layout.shared_bytes else ""
    return (
        f"arena {sizes(layout.arena_bytes)}: gathered {sizes(layout.gather_bytes)}, "
        f"gradient blocks {blocks}{where}"
    )


def _schedule_text(plan: Plan, index: int) -> str:
    schedule = plan.schedules[index]
    forecast = schedule.forecast
    gathered = sum(not gather.kept for gather in schedule.gathers)
    kind = "training" if schedule.trains else "forward only"
    lines = [
        f"graph {index} ({kind}): step {times(forecast.step_s)}, compute "
        f"{times(forecast.compute_s)}, optimizer {times(forecast.optimizer_s)}, exposed "
        f"{times(forecast.exposed_s)}",
        f"  at least {times(forecast.lower_bound_s)} under these budgets: gap {forecast.gap:.1%}"
        if forecast.lower_bound_s
        else "",
        f"  moves: {gathered} gathers ({sizes(forecast.gathered_bytes)}), "
        f"{len(schedule.reduces)} reduces ({sizes(forecast.reduced_bytes)}), disk reads "
        f"{sizes(forecast.disk_read_bytes)}, disk writes {sizes(forecast.disk_write_bytes)}",
    ]
    if forecast.exposed:
        causes = ", ".join(f"{cause} {times(seconds)}" for cause, seconds in forecast.exposed)
        lines.append(f"  exposed: {causes}")
    where = f" at {forecast.peak_node}" if forecast.peak_node else ""
    lines.append(f"  peak {sizes(forecast.peak_device_bytes)}{where}")
    if forecast.largest:
        largest = ", ".join(f"{what} {sizes(nbytes)}" for what, nbytes in forecast.largest)
        lines.append(f"  largest: {largest}")
    return "\n".join(line for line in lines if line)


def stats_text(stats: Mapping[str, float]) -> str:
    """What a step did: `ElixirModule.stats()`, one line a number."""
    return table(
        ("step", "measured"), ((name, quantity(name, value)) for name, value in stats.items())
    )


def comparison_text(forecast: Forecast, stats: Mapping[str, float]) -> str:
    """The forecast beside what was measured, for the names that both have."""
    expected = asdict(forecast)
    rows = []
    for name, measured in stats.items():
        if name not in expected:
            continue
        planned = expected[name]
        ratio = f"{measured / planned:.2f}" if planned else "-"
        rows.append((name, quantity(name, planned), quantity(name, measured), ratio))
    return table(("step", "forecast", "measured", "measured/forecast"), rows)


def quantity(name: str, value: float) -> str:
    """A number of `stats()` in the unit that the end of its name says."""
    if name.endswith("_bytes"):
        return sizes(value)
    if name.endswith("_s"):
        return times(value)
    return f"{value:g}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Aligned columns; those in `left` to the left, numbers to the right."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(
            column,
            justify="left" if index in left else "right",
            no_wrap=column != "holds",
            max_width=TITLE_WIDTH if column == "holds" else None,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(str(cell).replace("[", r"\[") for cell in row))
    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None, force_terminal=False)
    console.print(made)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())
