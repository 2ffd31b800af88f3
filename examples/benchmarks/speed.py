"""How fast is a step, against plain PyTorch with everything in memory?

(a) no limits: what the transformation itself costs. (b) under a budget (activations plus a
quarter of the training state) and a disk, four micro-batches a step. The two sides take turns,
each in a process of its own. The disk's bandwidth is measured in the same run; it gives the
least time that the bytes of this plan need: forward and backward, and then the update, cannot
be faster than plain PyTorch's nor than their own bytes over the disk.

    python examples/benchmarks/speed.py
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import common
import torch
from common import GIB, sizes
from memory_budget import activation_bytes
from torch import Tensor

import elixir_fx
from elixir_fx.machine import Tier

Batches = Iterator[tuple[Tensor, Tensor]]


class Side:
    """One of the two sides: a model, its optimizer, and how long its last update took."""

    def __init__(self, config: common.Config, batch: int, micro_batches: int, **limits: Any):
        torch.manual_seed(0)
        self.batches: Batches = common.text_batches(batch, config.seq, 0)
        self.micro_batches = micro_batches
        self.model: Any = common.build(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.update_s: list[float] = []
        self.losses: list[float] = []
        if limits:
            self.model = elixir_fx.compile(
                self.model,
                optimizer=self.optimizer,
                example_inputs=next(self.batches),
                kernels="eager",
                **limits,
            )

    def step(self) -> None:
        total = 0.0
        for _ in range(self.micro_batches):
            loss = self.model(*next(self.batches)) / self.micro_batches
            loss.backward()
            total += loss.item()
        self.update_s.append(common.timed(self.optimizer.step))
        self.optimizer.zero_grad()
        self.losses.append(total)


_plain: list[Side] = []  # of the process that `PlainElsewhere` starts


def _make_plain(*arguments: Any) -> None:
    _plain.append(Side(*arguments))


def _step_plain() -> float:
    _plain[0].step()
    return _plain[0].update_s[-1]


class PlainElsewhere:
    """Plain PyTorch in a process of its own: a budget changes how this one's C heap works."""

    def __init__(self, config: common.Config, batch: int, micro_batches: int):
        self.pool = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))
        self.pool.submit(_make_plain, config, batch, micro_batches).result()
        self.update_s: list[float] = []

    def step(self) -> None:
        self.update_s.append(self.pool.submit(_step_plain).result())


def update_bytes(side: Side) -> int:
    """Bytes that the update alone moves between device and disk: read, and written back."""
    total = 0
    for chunk in side.model.plan.layout.chunks:
        if not chunk.trainable:
            continue
        homes = chunk.homes
        total += chunk.nbytes * (homes.gradients == Tier.DISK)
        total += 2 * chunk.nbytes * (homes.parameters == Tier.DISK)
        total += 2 * 2 * chunk.nbytes * (homes.states == Tier.DISK)  # AdamW: two moments
    return total


def compare(plain: PlainElsewhere, ours: Side, rounds: int) -> dict[str, Any]:
    sides: dict[str, Callable[[], object]] = {"plain": plain.step, "ours": ours.step}
    seconds = common.alternate(sides, rounds)
    return {
        "plain_s": statistics.median(seconds["plain"]),
        "ours_s": statistics.median(seconds["ours"]),
        "ratio": common.median_ratio(seconds["ours"], seconds["plain"]),
        "plain_update_s": statistics.median(plain.update_s[-rounds:]),
        "stats": dict(ours.model.stats()),
        "forecast_s": ours.model.plan.forecast.step_s,
        "lower_bound_s": ours.model.plan.forecast.lower_bound_s,
    }


def unlimited(args: argparse.Namespace, config: common.Config) -> dict[str, Any]:
    plain = PlainElsewhere(config, args.batch, 1)
    return compare(plain, Side(config, args.batch, 1, memory=64 * GIB), args.rounds)


def limited(args: argparse.Namespace, config: common.Config, budget_bytes: int) -> dict[str, Any]:
    disk_before = common.disk_bandwidth(args.disk)
    plain = PlainElsewhere(config, args.batch, args.micro_batches)
    ours = Side(config, args.batch, args.micro_batches, memory=budget_bytes, disk=args.disk)
    numbers = compare(plain, ours, args.rounds)
    disk_after = common.disk_bandwidth(args.disk)
    disk = {kind: (disk_before[kind] + disk_after[kind]) / 2 for kind in disk_before}

    stats = numbers["stats"]
    moved = stats["disk_read_bytes"] + stats["disk_write_bytes"]
    updated = min(update_bytes(ours), moved)
    graph_s = numbers["plain_s"] - numbers["plain_update_s"]
    bound_s = max(graph_s, (moved - updated) / disk["mixed"]) + max(
        numbers["plain_update_s"], updated / disk["mixed"]
    )
    return numbers | {"disk": disk, "update_bytes": updated, "bound_s": bound_s}


def limited_rows(numbers: dict[str, Any], budget_bytes: int) -> list[tuple[str, str]]:
    disk, stats = numbers["disk"], numbers["stats"]
    rates = ", ".join(f"{kind} {disk[kind] / 1e9:.2f}" for kind in ("read", "write", "mixed"))
    plain_s, ours_s, bound_s = numbers["plain_s"], numbers["ours_s"], numbers["bound_s"]
    moved = f"{sizes(stats['disk_read_bytes'])} {sizes(stats['disk_write_bytes'])}"
    forecast = f"{numbers['forecast_s']:.3f} s, {numbers['lower_bound_s']:.3f} s"
    counts = ("prefetch_hits", "prefetch_misses", "gathered_bytes", "reduced_bytes")
    return [
        ("(b) budget", sizes(budget_bytes)),
        ("plain, ours", f"{plain_s:.3f} s, {ours_s:.3f} s"),
        common.check("tokens/s of plain", 1 / numbers["ratio"], 0.75, at_least=True),
        ("disk, GB/s" + ("" if disk["direct"] else " (page cache)"), rates),
        ("bytes read, written", moved),
        ("of these by the update", sizes(numbers["update_bytes"])),
        ("bound: plain compute, or these bytes at the mixed rate", f"{bound_s:.3f} s"),
        ("the bound's tokens/s of plain", f"{plain_s / bound_s:.3f}"),
        ("ours above the bound", f"{ours_s / bound_s - 1:.1%}"),
        ("forecast, its lower bound", forecast),
        *((f"stats: {k}", f"{stats[k]:.3f} s") for k in sorted(stats) if k.endswith("_s")),
        *((f"stats: {name}", f"{stats[name]}") for name in counts),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.25, help="of the state, for chunks")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--disk", default=".")
    parser.add_argument("--only", choices=["a", "b"])
    common.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = replace(common.GPT_92M, layers=args.layers)
    numbers: dict[str, Any] = {}
    rows: list[tuple[str, str]] = []
    if args.only != "b":
        numbers["unlimited"] = one = common.in_child(unlimited, args, config)
        rows += [
            ("(a) no limits: plain, ours", f"{one['plain_s']:.3f} s, {one['ours_s']:.3f} s"),
            common.check("ours / plain", one["ratio"], 1.03),
        ]
    if args.only != "a":
        activations = common.in_child(activation_bytes, config, args.batch)
        state_bytes = common.state_bytes(common.build(config, meta=True))
        budget_bytes = activations["planned"] + int(args.share * state_bytes)
        numbers["limited"] = two = common.in_child(limited, args, config, budget_bytes)
        numbers["budget_bytes"] = budget_bytes
        rows += limited_rows(two, budget_bytes)
    common.report("speed", args, rows, numbers)


if __name__ == "__main__":
    main()
