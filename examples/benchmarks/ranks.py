"""Several ranks on one machine: DDP, FSDP2, ZeRO-3 and elixir_fx, against compute alone.

A GPT of 27M parameters (6 layers, width 512, vocabulary 8192, sequence 256), one thread a rank,
gloo. bf16 means fp32 weights under autocast on every side; `fsdp2_mixed` has FSDP2's own policy
instead. Every measurement is a launch of fresh processes (one_rank.py); the sides take turns,
round by round. A step lasts as long as its slowest rank. `alone` is as many processes at once
that never speak, and what a side takes beyond its step is that side's overhead. (Each of them
updates the whole model; sides that shard divide that work, so theirs can come out below zero.)

    python examples/benchmarks/ranks.py
    python examples/benchmarks/ranks.py --sides alone ddp fsdp2 --dtypes fp32 --batches 1
    python examples/benchmarks/ranks.py --sides alone fsdp2 ours --memory 300MiB --disk /nvme

Memory is a rank's, the largest of all ranks: `peak` within the timed steps, `ever` with the
start as well, `PSS` at the end, with what processes share divided among them.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import common
import torch
from common import MIB, sizes
from one_rank import DTYPES, SEQ, SIDES

WORKER = Path(__file__).with_name("one_rank.py")
LAUNCH_LIMIT_S = 900
COMPILED_SIDES = ("fsdp2_compile", "zero3")  # what they build once stays in a cache on disk

# The bars: overhead and peak memory of ours, each a share of FSDP2's; tokens/s at batch 1 of
# FSDP2's, where a step is mostly communication. And losses: the same training as DDP's.
OVERHEAD_SHARE, TOKENS_SHARE, PEAK_SHARE = 0.5, 1.25, 1.0
LOSS_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Setting:
    dtype: str
    batch: int


@dataclass
class Measured:
    """One side in one setting: each launch's figures of every rank."""

    launches: list[list[dict[str, Any]]] = field(default_factory=list)

    def median(self, of_ranks: Callable[[list[dict[str, Any]]], float]) -> float:
        """The median over launches of a figure that `of_ranks` makes of all ranks'."""
        return statistics.median(of_ranks(ranks) for ranks in self.launches)

    @property
    def step_s(self) -> float:
        return self.median(
            lambda ranks: statistics.median(
                max(seconds) for seconds in zip(*(rank["step_s"] for rank in ranks), strict=True)
            )
        )

    def largest(self, name: str) -> float:
        return self.median(lambda ranks: max(rank[name] for rank in ranks))

    def losses(self) -> list[float]:
        """Of every step, averaged over ranks; of the last launch: all are equal."""
        per_step = zip(*(rank["losses"] for rank in self.launches[-1]), strict=True)
        return [statistics.mean(losses) for losses in per_step]


Results = dict[Setting, dict[str, Measured]]


# Launching


def launch(side: str, setting: Setting, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every rank of one side in fresh processes; their figures, by rank."""
    command = [sys.executable, str(WORKER), f"--side={side}", f"--dtype={setting.dtype}"]
    command += [f"--batch={setting.batch}", f"--steps={args.steps}", f"--warm={args.warm}"]
    command += [f"--memory={args.memory}"] * (args.memory is not None)
    command += [f"--disk={args.disk}"] * (args.disk is not None)
    world = {
        "WORLD_SIZE": str(args.ranks),
        "LOCAL_WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LOCAL_SIZE": str(args.ranks),  # DeepSpeed's name for it
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # about the collectives that peers call
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compilers beside the timed steps
    }
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(args.ranks)
    ]
    try:
        outputs = [process.communicate(timeout=LAUNCH_LIMIT_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    codes = [process.returncode for process in ranks]
    if any(codes):  # what they said is on stderr
        sys.exit(f"{side}, {setting.dtype}, batch {setting.batch}: ranks ended with {codes}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def installed(sides: list[str]) -> list[str]:
    if "zero3" in sides and find_spec("deepspeed") is None:
        print("zero3 skipped: deepspeed is not installed", file=sys.stderr)
        return [side for side in sides if side != "zero3"]
    return sides


def measure(args: argparse.Namespace) -> Results:
    results: Results = {}
    for turn in range(args.rounds):
        for setting in [Setting(dtype, batch) for dtype in args.dtypes for batch in args.batches]:
            # FSDP2's policy is about bf16.
            sides = [s for s in args.sides if s != "fsdp2_mixed" or setting.dtype == "bf16"]
            measured = results.setdefault(setting, {side: Measured() for side in sides})
            for side in sides if turn % 2 == 0 else sides[::-1]:
                if turn == 0 and side in COMPILED_SIDES:
                    launch(side, setting, args)  # so that no launch that counts has to compile
                measured[side].launches.append(launch(side, setting, args))
                step_s = measured[side].step_s
                what = f"round {turn + 1}, {setting.dtype}, batch {setting.batch}, {side}"
                print(f"{what}: {step_s:.3f} s so far", file=sys.stderr)
    return results


# Reporting


def overhead_s(sides: dict[str, Measured], side: str) -> float:
    return sides[side].step_s - sides["alone"].step_s


def loss_difference(sides: dict[str, Measured], side: str) -> float:
    pairs = zip(sides[side].losses(), sides["ddp"].losses(), strict=True)
    return max(abs(loss - reference) for loss, reference in pairs)


HEADER = """
dtype | batch | side | s/step | tokens/s | over alone, s | % | peak, MiB | ever, MiB | PSS, MiB
| loss - DDP's
"""


def line_of(setting: Setting, sides: dict[str, Measured], name: str, ranks: int) -> list[str]:
    """The cells of one side in one setting, in the order of HEADER."""
    side = sides[name]
    memory = ("peak_bytes", "peak_ever_bytes", "proportional_bytes")
    over = ["-", "-"]
    if "alone" in sides and name != "alone":
        seconds = overhead_s(sides, name)
        over = [f"{seconds:+.3f}", f"{seconds / sides['alone'].step_s:+.1%}"]
    # Ranks that never speak train apart: their losses say nothing.
    compared = "ddp" in sides and name not in ("alone", "ddp")
    return [
        setting.dtype,
        str(setting.batch),
        name,
        f"{side.step_s:.3f}",
        f"{ranks * setting.batch * SEQ / side.step_s:.0f}",
        *over,
        *(f"{side.largest(figure) / MIB:.0f}" for figure in memory),
        f"{loss_difference(sides, name):.1e}" if compared else "-",
    ]


def table_text(results: Results, ranks: int) -> str:
    """A line for every side in every setting, in columns as wide as they must be."""
    lines = [
        line_of(setting, sides, name, ranks) for setting, sides in results.items() for name in sides
    ]
    lines.insert(0, [title.strip() for title in HEADER.split("|")])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def bars(where: str, setting: Setting, sides: dict[str, Measured]) -> Iterator[tuple[str, str]]:
    """Whether ours keeps to what is wanted of it, against FSDP2 in the same precision."""
    ours, fsdp2 = sides["ours"], sides["fsdp2"]
    if "alone" in sides:
        # Seconds, not a ratio: between others' work FSDP2's overhead may come out below zero.
        what = f"{where} overhead, s, against {OVERHEAD_SHARE} of FSDP2's"
        limit_s = OVERHEAD_SHARE * overhead_s(sides, "fsdp2")
        yield common.check(what, overhead_s(sides, "ours"), limit_s)
    if setting.batch == 1:
        rate = fsdp2.step_s / ours.step_s
        yield common.check(f"{where} tokens/s, of FSDP2's", rate, TOKENS_SHARE, at_least=True)
    peak = ours.largest("peak_bytes") / fsdp2.largest("peak_bytes")
    yield common.check(f"{where} peak memory, of FSDP2's", peak, PEAK_SHARE)


def rows(results: Results, args: argparse.Namespace) -> list[tuple[str, str]]:
    found = [("ranks, budget of each of ours", f"{args.ranks}, {args.memory or 'what is free'}")]
    for setting, sides in results.items():
        where = f"{setting.dtype}, batch {setting.batch}:"
        if {"ours", "ddp"} <= sides.keys():
            difference = loss_difference(sides, "ours")
            what = f"{where} losses - DDP's, in thousandths"
            found.append(common.check(what, 1000 * difference, 1000 * LOSS_DIFFERENCE))
        if "ours" in sides:
            stats = sides["ours"].launches[-1][0]["stats"]
            moved = f"{sizes(stats['gathered_bytes'])}, {sizes(stats['reduced_bytes'])}"
            found.append((f"{where} gathered, reduced by ours in a step", moved))
        if {"ours", "fsdp2"} <= sides.keys():
            found += bars(where, setting, sides)
    return found


def save_table(table: str) -> None:
    """Beside what `common.report` saves: a table this wide reads best as it was printed."""
    folder = common.HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / "ranks.txt").write_text(f"ranks: {common.machine_line()}\n\n{table}\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 1], help="of one rank")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--rounds", type=int, default=3, help="launches of each side")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a launch")
    parser.add_argument("--warm", type=int, default=3, help="steps before them")
    parser.add_argument("--memory", help="budget of each rank of `ours`")
    parser.add_argument("--disk", help="folder of the disk tier of `ours`")
    common.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # as in the ranks; the first line of the output says so
    args.sides = installed(args.sides)
    results = measure(args)
    table = table_text(results, args.ranks)
    if not args.json:
        print(table)
    if args.save:
        save_table(table)
    numbers = {
        "ranks": args.ranks,
        "memory": args.memory,
        "settings": [
            {"dtype": setting.dtype, "batch": setting.batch, "side": name}
            | {"step_s": side.step_s, "launches": side.launches}
            for setting, sides in results.items()
            for name, side in sides.items()
        ],
    }
    common.report("ranks", args, rows(results, args), numbers)


if __name__ == "__main__":
    main()
