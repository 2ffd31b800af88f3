"""Tokens a second against memory, where activations are most of it: ours beside what PyTorch has.

    python examples/benchmarks/activations.py --disk /nvme --save
    python examples/benchmarks/activations.py --disk /nvme --shares 0.25 0.5 --rounds 3

The 92M GPT at sequence 1024, batch 4, in float32, with PyTorch's own kernels. Sides: plain PyTorch
with all memory; torch.utils.checkpoint around every block; torch's memory-budget partitioner
(torch._functorch.config.activation_memory_budget); ours under shares of what plain PyTorch needs.
Only ours can move parameters and optimizer states too, so the others end where their states do
not fit any more. Every side is a process; all take one step in each round, in turning order. Peak
is the resident memory beyond that of the imports. Losses of ours must equal plain PyTorch's.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import (
    GPT_92M,
    MIB,
    add_output_options,
    build,
    check,
    peak_resident_bytes,
    report,
    reset_peak,
    resident_bytes,
    start_torch_compiler,
    text_batches,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import elixir_fx

CONFIG = replace(GPT_92M, seq=1024)
BATCH = 4
SHARES = (0.2, 0.25, 0.35, 0.5, 0.75)
BUDGETS = (0.3, 0.6)  # of torch's partitioner, unless told otherwise
WARM, ROUNDS = 1, 4
TOGETHER = 3  # sides beside plain PyTorch that take turns


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`kind`: plain, checkpoint, partitioner or ours. `share` is the partitioner's budget, or of
    `memory`, which is what plain PyTorch needs."""

    kind: str
    share: float = 1.0
    memory: int = 0

    @property
    def name(self) -> str:
        names = {"plain": "plain PyTorch", "checkpoint": "checkpoint on every block"}
        known = {"partitioner": "memory budget", "ours": "ours"}
        return names.get(self.kind) or f"{known[self.kind]} {self.share:.0%}"


def checkpointed(model: nn.Module) -> nn.Module:
    """Every block's forward runs again in the backward."""
    for block in model.blocks:  # type: ignore[union-attr]
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    return model


def made(setting: Setting, disk: Path, inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """The model of a side and its optimizer."""
    torch.manual_seed(0)
    model = build(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if setting.kind == "checkpoint":
        return checkpointed(model), optimizer
    if setting.kind == "partitioner":
        torch._functorch.config.activation_memory_budget = setting.share
        return torch.compile(model, backend="aot_eager_decomp_partition"), optimizer
    if setting.kind == "ours":
        compiled = elixir_fx.compile(
            model,
            optimizer=optimizer,
            example_inputs=tuple(inputs),
            memory=int(setting.share * setting.memory),
            disk=disk,
            kernels="eager",
        )
        return compiled, optimizer
    return model, optimizer


def serve(setting: Setting, disk: Path) -> None:
    """Take a step for every line of input; print seconds, loss and peak so far."""
    start_torch_compiler()
    base_bytes = resident_bytes()
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]] = text_batches(BATCH, CONFIG.seq, seed=0)
    inputs = next(batches)
    model, optimizer = made(setting, disk, inputs)
    told: dict[str, Any] = {}
    if setting.kind == "ours":
        forecast, schedule = model.plan.forecast, model.plan.schedules[0]
        told = {
            "forecast_s": forecast.step_s,
            "bound_s": forecast.lower_bound_s,
            "forecast_peak_bytes": forecast.peak_device_bytes,
            "repeated": len(schedule.recomputes),
            "away_bytes": sum(entry.nbytes for entry in schedule.offloads),
        }
    print(json.dumps(told), flush=True)
    gc.collect()
    for number, _ in enumerate(sys.stdin):
        if number == WARM:
            reset_peak()
        begin_s = perf_counter()
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = perf_counter() - begin_s
        stats = model.stats() if setting.kind == "ours" else {}
        line = {
            "seconds": seconds,
            "loss": loss.item(),
            "peak_bytes": peak_resident_bytes() - base_bytes,
            "counted_bytes": stats.get("peak_device_bytes", 0),
        }
        print(json.dumps(line), flush=True)


class Side:
    """A process that takes steps on demand."""

    def __init__(self, setting: Setting, disk: Path) -> None:
        self.setting = setting
        self.lines: list[dict[str, Any]] = []
        command = [sys.executable, __file__, "--serve", json.dumps(asdict(setting)), str(disk)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.told: dict[str, Any] = json.loads(self._line() or "{}")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.lines.append(json.loads(self._line()))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def seconds(self) -> list[float]:
        return [line["seconds"] for line in self.lines[WARM:]]

    @property
    def tokens_per_s(self) -> float:
        return BATCH * CONFIG.seq / statistics.median(self.seconds)

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    @property
    def peak_bytes(self) -> int:
        return int(self.lines[-1]["peak_bytes"])

    @property
    def counted_bytes(self) -> int:
        return int(self.lines[-1]["counted_bytes"])


def plain_bytes() -> int:
    """What plain PyTorch needs: states and activations, counted."""
    model = build(CONFIG)
    inputs = next(text_batches(BATCH, CONFIG.seq, seed=0))
    plan = elixir_fx.plan(model, inputs, optimizer="adamw_fused", memory="64GiB", kernels="eager")
    return plan.forecast.peak_device_bytes


def in_turns(settings: Sequence[Setting], disk: Path, rounds: int) -> list[Side]:
    sides = [Side(setting, disk) for setting in settings]
    try:
        for turn in range(WARM + rounds):
            for side in sides if turn % 2 == 0 else sides[::-1]:
                side.step()
    finally:
        for side in sides:
            side.stop()
    return sides


def row(side: Side, plain: Side, memory: int) -> tuple[str, str]:
    speed = side.tokens_per_s / plain.tokens_per_s
    text = (
        f"{side.tokens_per_s:.0f} tokens/s, {speed:.3f} of plain, "
        f"peak {side.peak_bytes / MIB:.0f} MiB"
    )
    if side.setting.kind == "ours":
        text += (
            f", counted {side.counted_bytes / MIB:.0f} of "
            f"{side.setting.share * memory / MIB:.0f}, "
            f"forecast {side.told['forecast_peak_bytes'] / MIB:.0f}; "
            f"step "
            f"{statistics.median(side.seconds):.2f} s, forecast {side.told['forecast_s']:.2f}; "
            f"{side.told['repeated']} operators again, "
            f"{side.told['away_bytes'] / MIB:.0f} MiB away"
        )
    return side.setting.name, text


def checks(pairs: Sequence[tuple[Side, Side]]) -> Iterator[tuple[str, str]]:
    """Of sides, each with the plain one that took turns with it."""
    ours = [pair for pair in pairs if pair[0].setting.kind == "ours"]
    for share, least in ((0.25, 0.8), (0.5, 0.92)):
        for side, plain in ours:
            if side.setting.share == share:
                speed = side.tokens_per_s / plain.tokens_per_s
                yield check(f"tokens/s at {share:.0%}, of plain", speed, least, at_least=True)
    equal = sum(side.losses == plain.losses for side, plain in ours)
    yield check("sides of ours with plain PyTorch's losses", equal, len(ours), at_least=True)
    peaks = [abs(s.counted_bytes / s.told["forecast_peak_bytes"] - 1) for s, _ in ours]
    yield check("peak off its forecast, the most", max(peaks), 0.03)


def picture(sides: Sequence[Side], file: Path) -> None:
    """The curve as an SVG, without any library."""
    points = [(s.peak_bytes / MIB, s.tokens_per_s, s.setting) for s in sides]
    right, top = max(p[0] for p in points) * 1.05, max(p[1] for p in points) * 1.15
    width, height, left, foot = 640, 400, 60, 40

    def at(memory: float, speed: float) -> tuple[float, float]:
        x = left + memory / right * (width - left - 20)
        return x, height - foot - speed / top * (height - foot - 20)

    colors = {"plain": "#333", "checkpoint": "#c33", "partitioner": "#c80", "ours": "#06c"}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    path = " ".join(
        f"{x:.0f},{y:.0f}"
        for x, y in sorted(at(m, v) for m, v, setting in points if setting.kind == "ours")
    )
    lines.append(f'<polyline points="{path}" fill="none" stroke="#06c"/>')
    for memory, speed, setting in points:
        x, y = at(memory, speed)
        lines.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" fill="{colors[setting.kind]}"/>')
        lines.append(
            f'<text x="{x:.0f}" y="{y - 8:.0f}" text-anchor="middle">{setting.name}</text>'
        )
    for speed in range(0, int(top), 50):
        x, y = at(0, speed)
        lines.append(f'<text x="{x - 6:.0f}" y="{y + 4:.0f}" text-anchor="end">{speed}</text>')
    for memory in range(0, int(right), 1000):
        x, y = at(memory, 0)
        lines.append(f'<text x="{x:.0f}" y="{y + 16:.0f}" text-anchor="middle">{memory}</text>')
    lines.append(f'<text x="{width / 2}" y="{height - 6}">peak resident MiB</text>')
    lines.append('<text x="8" y="14">tokens/s</text></svg>')
    file.write_text("\n".join(lines) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--budgets", type=float, nargs="*", default=list(BUDGETS))
    add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(Setting(**json.loads(sys.argv[2])), Path(sys.argv[3]))
        return
    args = arguments()
    memory = plain_bytes()
    settings = [
        Setting(kind="checkpoint"),
        *(Setting(kind="ours", share=share, memory=memory) for share in args.shares),
        *(Setting(kind="partitioner", share=share) for share in args.budgets),
    ]
    pairs: list[tuple[Side, Side]] = []
    for first in range(0, len(settings), TOGETHER):  # memory holds no more of them at once
        group = [Setting(kind="plain"), *settings[first : first + TOGETHER]]
        plain, *others = in_turns(group, args.disk, args.rounds)
        pairs += [(side, plain) for side in others]
    rows = [("plain PyTorch needs", f"{memory / MIB:.0f} MiB, counted")]
    rows += [row(side, plain, memory) for side, plain in [(plain, plain), *pairs]]
    rows += checks(pairs)
    sides = [plain, *(side for side, _ in pairs)]
    numbers = [{**asdict(s.setting), **s.told, "steps": s.lines} for s in sides]
    report("activations", args, rows, {"sides": numbers})
    if args.save:
        picture(sides, Path(__file__).parent / "results" / "activations.svg")


if __name__ == "__main__":
    main()
