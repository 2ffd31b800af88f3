"""Sweep: time and memory of one model over budgets, ranks and sizes of its inputs.

Above the public functions: the step is captured once, its operators are timed once, and then
there is a plan for every combination, as `plan()` would make it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn

from elixir_fx import planner
from elixir_fx.api import Inputs, check_model, check_ranks, positional_and_keyword
from elixir_fx.config import limits as default_limits
from elixir_fx.config import read_options
from elixir_fx.errors import ElixirError, PlanError
from elixir_fx.facts import Facts
from elixir_fx.guarded import GuardedSession, planned_group
from elixir_fx.lowering import Admitted
from elixir_fx.machine import Machine
from elixir_fx.plan import Group, Limits
from elixir_fx.report.sweep import Row, Sweep
from elixir_fx.units import parse_size

Budget = int | str


def sweep(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    optimizer: torch.optim.Optimizer | str | None = "adamw",
    memory: Sequence[Budget] | Budget | None = None,
    ranks: Sequence[int] | int = 1,
    sizes: Mapping[str, Sequence[int]] | None = None,
    **options: Any,
) -> Sweep:
    """What to expect of training under every combination of budgets, ranks and input sizes.

    Args:
        model, example_inputs, optimizer, options: as for `plan()`; nothing runs.
        memory: budgets of the compute device, of each rank; None: what the machine has.
        ranks: numbers of ranks. Give a `machine` whose links to peers were measured.
        sizes: values of sizes that `dynamic_shapes` names: {"batch": [1, 2, 4, 8]}; each is that
            of one rank. Named sizes that are not given are those of the example inputs.

    The step is captured once. At other sizes than the example's an operator's time is taken to
    grow with the bytes that it moves, so give an example of about the size that you mean. A row
    has samples/s if a size is called "batch", and tokens/s if another is called "sequence".
    Where no plan fits, the row says why and which memory would do. Raises as `plan()` does for
    everything else.
    """
    check_model(model)
    args, kwargs = positional_and_keyword(example_inputs)
    read = read_options(options, "sweep()", ("memory", "ranks", "sizes", "optimizer"))
    if read.plan is not None:
        raise ElixirError("sweep() makes its own plans: leave out plan=")
    memories = _listed("memory", memory, (int, str)) if memory is not None else []
    groups = _listed("ranks", ranks, (int,))
    for count in groups:
        check_ranks(count)
    session = GuardedSession(model, optimizer, read)
    session.lowering.times_all = True
    step = session.captured_only(args, kwargs)
    machine = session.lowering.machine
    known = [parse_size(one) for one in memories]
    rows: list[Row] = []
    for named, facts in _at_sizes(step, sizes or {}):
        for count in groups:
            linked, group = planned_group(machine, count)
            of_rank = default_limits(read, linked)
            budgets = [replace(of_rank, device=one) for one in known or [of_rank.device]]
            rows += _rows(facts, linked, group, budgets, named, read.micro_batches)
    return Sweep(model=type(model).__name__, machine=machine.name, rows=tuple(rows))


def _listed(option: str, given: Any, kinds: tuple[type, ...]) -> list[Any]:
    """An option that may be one value or several."""
    values = [given] if isinstance(given, kinds) else given
    if not isinstance(values, (list, tuple, range)) or not values:
        raise ElixirError(f"{option}={given!r}: give one value, or a list of them")
    return list(values)


def _at_sizes(
    step: Admitted, wanted: Mapping[str, Sequence[int]]
) -> Iterator[tuple[dict[str, int], Facts]]:
    """The facts of the step at every combination of sizes, the first size outermost."""
    formulas = step.formulas
    captured = formulas.sizes if formulas is not None else {}
    for name, values in wanted.items():
        if name not in captured:
            raise ElixirError(
                f"sizes has {name!r}, which dynamic_shapes does not name; known are "
                f"{sorted(captured)}"
            )
        for value in _listed(f"sizes[{name!r}]", values, (int,)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ElixirError(f"sizes[{name!r}] has {value!r}: give whole numbers, 1 or more")
    lists = [_listed(name, values, (int,)) for name, values in wanted.items()]
    for combination in product(*lists):
        sizes = {**captured, **dict(zip(wanted, combination, strict=True))}
        if formulas is None or sizes == captured:
            yield sizes, step.facts
        else:
            yield sizes, planner.at(step.facts, formulas, formulas.values(sizes))


def _rows(
    facts: Facts,
    machine: Machine,
    group: Group,
    budgets: Sequence[Limits],
    sizes: dict[str, int],
    micro_batches: int,
) -> Iterator[Row]:
    for limits in budgets:
        row = Row(memory_bytes=limits.device, ranks=group.ranks, sizes=tuple(sizes.items()))
        try:
            plan = planner.search(facts, machine, limits, {}, group, micro_batches)
        except PlanError as error:
            least = _smallest(facts, machine, limits, group)
            yield replace(row, refusal=str(error), smallest_bytes=least)
        else:
            yield replace(row, forecast=plan.forecast)


def _smallest(facts: Facts, machine: Machine, limits: Limits, group: Group) -> int | None:
    """The least device memory with which there is a plan; None where none would help."""
    try:
        return planner.smallest(facts, machine, limits, {}, group)
    except PlanError:
        return None
