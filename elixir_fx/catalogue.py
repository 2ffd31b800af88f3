"""The catalogue: machines that nobody has to own to plan for, as data files in `machines/`.

A file is a `Sheet`: figures of one accelerator and of the node that it is sold or usually built
in, each with the datasheet that it was taken from. `Machine.named` makes a machine of it. A
figure is the datasheet's `value`; where programs reach less than that, `share` says how much of
it counts. FLOP/s are dense peaks and have no share. What no datasheet says is marked "assumed".

To add a machine, add a file: its name is the machine's.
"""

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from elixir_fx.errors import PlanError

FLOPS = "_flops_per_s"
# What every sheet has beside the FLOP/s of one or more dtypes ("float32_flops_per_s"). Rates are
# of one accelerator, those of network, host and disk of the node.
FIGURES = (
    "device_memory_bytes",
    "stream_bytes_per_s",
    "host_link_bytes_per_s",  # each way, and both at once
    "host_link_latency_s",
    "gpus_per_node",
    "peer_bytes_per_s",  # at which one receives from the others of its node, all at once
    "peer_latency_s",  # of one step of a ring in the node
    "network_bytes_per_s",  # into a node, all its ports
    "network_latency_s",  # of one step of a ring between nodes
    "collective_latency_s",  # before the first step
    "host_memory_bytes",
    "host_stream_bytes_per_s",
    "disk_memory_bytes",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "disk_latency_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One number of a datasheet. `share` of it counts."""

    value: float
    source: str
    share: float = 1.0

    @property
    def counts(self) -> float:
        return self.value * self.share


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """One file of the catalogue: units are in the names of `FIGURES`."""

    name: str
    title: str
    device: str
    figures: dict[str, Figure]

    def __getitem__(self, figure: str) -> float:
        """A figure, by its name in `FIGURES`."""
        return self.figures[figure].counts

    @property
    def flops_per_s(self) -> dict[str, float]:
        """Dense FLOP/s by dtype; "tfloat32" is float32 where TF32 is allowed."""
        return {
            name.removesuffix(FLOPS): figure.counts
            for name, figure in self.figures.items()
            if name.endswith(FLOPS)
        }


def names() -> tuple[str, ...]:
    """The machines of the catalogue, sorted."""
    folder = resources.files("elixir_fx").joinpath("machines")
    files = [file.name for file in folder.iterdir() if file.name.endswith(".json")]
    return tuple(sorted(name.removesuffix(".json") for name in files))


def sheet(name: str) -> Sheet:
    """The figures of a machine. PlanError lists the names that there are if it is none of them,
    and names the figure that a file lacks or has beyond them."""
    if name not in names():
        raise PlanError(f"no machine is called {name!r}; the catalogue has {', '.join(names())}")
    file = resources.files("elixir_fx").joinpath("machines", f"{name}.json")
    return read(name, file.read_text())


def read(name: str, text: str) -> Sheet:
    """The sheet that a file of the catalogue holds. PlanError if it holds none."""
    try:
        data = json.loads(text)
        figures = {key: _figure(entry) for key, entry in data["figures"].items()}
        read = Sheet(name=name, title=data["title"], device=data["device"], figures=figures)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"malformed sheet of machine {name!r}: {error!r}") from error
    wanted = {*FIGURES, f"float32{FLOPS}"}
    strange = {key for key in figures if not key.endswith(FLOPS)} - wanted
    if wanted - set(figures) or strange:
        raise PlanError(
            f"the sheet of machine {name!r} lacks {sorted(wanted - set(figures))} and has "
            f"{sorted(strange)}, which nobody reads"
        )
    return read


def _figure(entry: dict[str, Any]) -> Figure:
    figure = Figure(**entry)
    if not (figure.value > 0 and 0 < figure.share <= 1 and figure.source):
        raise ValueError(f"{entry}: a value above 0, a share of it and a source are needed")
    return figure
