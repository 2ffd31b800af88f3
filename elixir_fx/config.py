"""The options of `compile()`, checked and turned into numbers once, at the door."""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from elixir_fx.catalogue import names
from elixir_fx.errors import ElixirError, PlanError, TierError
from elixir_fx.machine import HOMES, Machine, Tier
from elixir_fx.pipeline import PIPELINE, Pipeline
from elixir_fx.plan import Limits, Plan
from elixir_fx.units import parse_size

KERNELS = ("inductor", "eager")
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for. Sizes in bytes; None where the machine decides."""

    memory: int | None = None
    host_memory: int | None = None
    disk: Path | None = None
    disk_memory: int | None = None
    kernels: str | Callable[..., Any] = "inductor"
    init: Callable[[nn.Module], object] | None = None
    weights: Path | None = None
    process_group: Any = None
    reduction: str = "mean"
    keep: Mapping[str, Tier] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    plan: Plan | None = None
    machine: Machine | None = None
    micro_batches: int = 1
    respect_checkpointing: bool = True
    passes: Pipeline = PIPELINE
    dump: Path | None = None
    dynamic_shapes: Any = None

    def keep_by_path(self, paths: Sequence[str]) -> dict[str, str]:
        """Tiers that the user fixed, by parameter path. `keep={"wte": ...}` names a parameter
        or a module; `ignore` leaves parameters where they are. PlanError for a name that
        matches nothing."""
        fixed = {}
        for name, tier in [*self.keep.items(), *((path, Tier.DEVICE) for path in self.ignore)]:
            found = [path for path in paths if path == name or path.startswith(f"{name}.")]
            if not found:
                raise PlanError(f"keep/ignore names {name!r}: the model has no such parameter")
            fixed.update(dict.fromkeys(found, tier.value))
        return fixed


def read_options(
    given: Mapping[str, Any], of: str = "compile()", others: Sequence[str] = ()
) -> Options:
    """Options from keywords. ElixirError names an unknown or impossible one.

    `of` says what has these options, for the message, and `others` what else it takes.
    """
    known = {*Options.__dataclass_fields__, *others}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ElixirError(f"{of} has no option {name!r}{hint}. It has {sorted(known)}")
    values = {name: value for name, value in given.items() if value is not None}
    for name in ("memory", "host_memory", "disk_memory"):
        if name in values:
            values[name] = parse_size(values[name])
    for name in ("weights", "dump"):
        if name in values:
            values[name] = Path(values[name])
    if "disk" in values:
        values["disk"] = _folder(values["disk"])
    if "keep" in values:
        values["keep"] = {path: _tier(path, tier) for path, tier in values["keep"].items()}
    if "plan" in values and not isinstance(values["plan"], Plan):
        values["plan"] = Plan.load(values["plan"])
    if "machine" in values:
        values["machine"] = _machine(values["machine"])
    kernels = values.get("kernels", "inductor")
    if kernels not in KERNELS and not callable(kernels):
        raise ElixirError(
            f"kernels={kernels!r}: give one of {list(KERNELS)}, or a function that takes a "
            "GraphModule of pure operations and its inputs to a function of these inputs"
        )
    if values.get("reduction", "mean") not in REDUCTIONS:
        raise ElixirError(
            f"reduction={values['reduction']!r}: gradients are combined over ranks by one of "
            f"{list(REDUCTIONS)}"
        )
    micro_batches = values.get("micro_batches", 1)
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ElixirError(
            f"micro_batches={micro_batches!r}: give the number of backwards in a step, 1 or more"
        )
    return Options(**values)


def check_disk(options: Options) -> None:
    """ElixirError for a budget of a disk that nobody named; a plan alone needs no folder."""
    if options.disk_memory is not None and options.disk is None:
        raise ElixirError("disk_memory is given without disk: name the folder of the disk tier")


def _folder(disk: str | os.PathLike[str]) -> Path:
    folder = Path(disk)
    if not folder.is_dir():
        raise TierError(f"disk={str(folder)!r} is not a folder: make it, or name another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise TierError(f"disk={str(folder)!r} cannot be written to")
    return folder


def _tier(path: str, tier: object) -> Tier:
    names = [known.value for known in HOMES]
    if str(tier) not in names:
        raise PlanError(f"keep={{{path!r}: {tier!r}}}: a home is one of {names}")
    return Tier(str(tier))


def _machine(machine: object) -> Machine:
    if isinstance(machine, Machine):
        return machine
    if isinstance(machine, str) and machine in names():
        return Machine.named(machine)
    if isinstance(machine, (str, os.PathLike)):
        if not Path(machine).is_file():
            raise PlanError(
                f"machine={str(machine)!r} is no file and not in the catalogue, which has "
                f"{', '.join(names())}"
            )
        return Machine.load(Path(machine))
    raise ElixirError(
        f"machine={machine!r}: give a Machine, such as elixir_fx.testing.emulated(...), the name "
        "of one in the catalogue, or the path of a machine file"
    )


def check_machine(options: Options, device: str) -> None:
    """ElixirError if the machine to plan for cannot be the one that runs, on `device`."""
    machine = options.machine
    if machine is not None and not machine.emulated and machine.device != device:
        raise ElixirError(
            f"machine={machine.name!r} computes on {machine.device} and this model on {device}: "
            "elixir_fx.plan(...) plans for another machine, compile() runs on this one"
        )


def limits(options: Options, machine: Machine, ranks: int = 1) -> Limits:
    """The budgets in force, of one rank: what was asked for, else what the machine has for each
    of the `ranks` on it, unless it is one rank's part already."""
    ranks = 1 if machine.ranks > 1 else ranks
    if machine.unified and options.host_memory:
        raise PlanError(
            "host_memory is refused on a CPU: host and device are one memory, bounded by `memory`; "
            "give a `disk` for what does not fit"
        )
    device = machine.memory[Tier.DEVICE] // (ranks if machine.unified else 1)
    device = options.memory if options.memory is not None else device
    host = 0
    if not machine.unified:
        host = machine.memory.get(Tier.HOST, 0) // ranks
        host = options.host_memory if options.host_memory is not None else host
    disk = options.disk_memory
    if disk is None:
        disk = machine.memory.get(Tier.DISK, 0) // ranks if options.disk is not None else 0
    return Limits(device=device, host=host, disk=disk)
