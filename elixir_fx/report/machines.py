"""What people read of a machine: its memories, links and rates, and where figures are from."""

from collections.abc import Iterable

from elixir_fx.catalogue import Sheet
from elixir_fx.machine import HOMES, Machine, Node
from elixir_fx.report.text import table
from elixir_fx.units import rates, sizes, times


def machine_text(machine: Machine) -> str:
    """A machine for people. Nothing is said of what it does not have."""
    parts = [
        f"machine {machine.name} ({machine.device})",
        table(
            ("memory", "size"),
            ((tier, sizes(machine.memory[tier])) for tier in HOMES if machine.memory.get(tier)),
        ),
        _links_text(machine),
        table(("rate of", "per second"), _rates(machine)),
        _node_text(machine.node) if machine.node is not None else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _links_text(machine: Machine) -> str:
    if not machine.links:
        return ""
    return table(
        ("link", "alone", "both ways", "latency", "takes of compute"),
        (
            (
                f"{link.source} -> {link.target}",
                rates(link.bytes_per_s),
                rates(link.shared_bytes_per_s),
                times(link.latency_s),
                f"{link.compute_share:.0%}",
            )
            for link in machine.links
        ),
    )


def _rates(machine: Machine) -> Iterable[tuple[str, str]]:
    for dtype, flops in sorted(machine.flops_per_s.items()):
        yield f"products in {dtype}", flops_text(flops)
    yield "streaming the device's memory", rates(machine.stream_bytes_per_s)
    for where, rate in (
        ("device", machine.update_stream_bytes_per_s),
        ("host", machine.host_stream_bytes_per_s),
    ):
        if rate:
            yield f"an optimizer on the {where}", rates(rate)


def _node_text(node: Node) -> str:
    return (
        f"{node.ranks} to a node: {rates(node.peer_bytes_per_s)} each from the others in it, "
        f"{rates(node.network_bytes_per_s)} into a node from other nodes"
    )


def flops_text(flops_per_s: float) -> str:
    """FLOP/s for people ("312.0 TFLOP/s")."""
    if flops_per_s >= 1e12:
        return f"{flops_per_s / 1e12:.1f} TFLOP/s"
    return f"{flops_per_s / 1e9:.1f} GFLOP/s"


def catalogue_text(sheets: Iterable[Sheet]) -> str:
    """The machines that can be named, one a line."""
    rows = (
        (
            sheet.name,
            sheet.title,
            sizes(sheet["device_memory_bytes"]),
            flops_text(sheet.flops_per_s["bfloat16"]),
            rates(sheet["peer_bytes_per_s"]),
            sizes(sheet["host_memory_bytes"]),
        )
        for sheet in sheets
    )
    columns = ("name", "what it is", "memory", "bfloat16", "from peers", "host memory")
    return table(columns, rows, left=(0, 1)) + "\n"


def sources_text(sheet: Sheet) -> str:
    """Where each figure of a sheet is from, and how much of it counts."""
    lines = [sheet.title]
    for name, figure in sheet.figures.items():
        share = f" x {figure.share:g}" if figure.share != 1 else ""
        lines.append(f"  {name} {figure.value:g}{share}: {figure.source}")
    return "\n".join(lines) + "\n"
