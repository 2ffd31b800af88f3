"""More memory, more speed? And ours against the paper's own rule, measured on this machine.

Two tables. The sweep trains the 92M GPT under budgets from the smallest to everything. With --rule,
settings with a disk are trained by our plan and by that of the paper's published rule
(elixir_fx.planner.elixir_rule) with constants of this machine.

Every side is a process of its own that keeps its compiled model; all of them take one step in
each round, one after the other, in turning order, so that a disk that drifts hits all alike. A
budget is slower than the one below it only if the median of its steps is by more than NOISE.

    python examples/benchmarks/budgets.py --disk /nvme --save
    python examples/benchmarks/budgets.py --disk /nvme --rule --save
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import MIB, add_output_options, check, median_ratio, report
from one_setting import MODELS, Setting

WORKER = Path(__file__).with_name("one_setting.py")
WARM, ROUNDS = 2, 5
NOISE = 0.03
SWEEP_MIB = (450, 550, 700, 850, 1000, 1250)
BIG: dict[str, Any] = {"model": "92M", "batch": 1}
AGAINST_RULE = (
    Setting(name="27M, 400 MiB", memory="400MiB"),
    Setting(name="27M, 500 MiB", memory="500MiB"),
    Setting(name="27M, batch 2, 300 MiB", batch=2, memory="300MiB"),
    Setting(name="27M, batch 2, 400 MiB, x4", batch=2, memory="400MiB", micro_batches=4),
    Setting(name="92M, 700 MiB", memory="700MiB", **BIG),
    Setting(name="92M, 1000 MiB", memory="1000MiB", **BIG),
    Setting(name="92M, 700 MiB, x2", memory="700MiB", micro_batches=2, **BIG),
)


class Side:
    """One process with a compiled model that takes steps on demand."""

    def __init__(self, setting: Setting, disk: Path, cache: str) -> None:
        self.setting = setting
        self.seconds: list[float] = []
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(asdict(setting)), str(disk), "--serve"],
            env={**os.environ, "XDG_CACHE_HOME": cache},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told: dict[str, Any] = json.loads(self._line() or "{}")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.seconds.append(float(self._line()))

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds[WARM:])


def in_turns(settings: Sequence[Setting], disk: Path) -> list[Side]:
    """Steps of every setting, the settings taking turns. Those that no plan fits have none."""
    with tempfile.TemporaryDirectory() as cache:
        sides = [Side(setting, disk, cache) for setting in settings]
    running = [side for side in sides if side.told]
    try:
        for turn in range(WARM + ROUNDS):
            for side in running if turn % 2 == 0 else running[::-1]:
                side.step()
    finally:
        for side in sides:
            side.process.kill()
            side.process.wait()
    return sides


def sweep(args: argparse.Namespace) -> None:
    settings = [
        Setting(name=f"{mib} MiB", memory=f"{mib}MiB", **BIG) for mib in args.budgets or SWEEP_MIB
    ]
    sides = in_turns([*settings, Setting(name="everything", **BIG)], args.disk)
    tokens = MODELS["92M"].seq * BIG["batch"]
    rows = [
        (
            side.setting.name,
            f"{tokens / side.step_s:.0f} tokens/s, step {side.step_s:.3f} s, "
            f"forecast {side.told['forecast_s']:.3f} s, "
            f"peak {side.told['forecast_peak_bytes'] / MIB:.0f} MiB",
        )
        for side in sides
    ]
    slower = [more.step_s / less.step_s - 1 for less, more in pairwise(sides)]
    rows.append(check("most time that more memory costs, a share", max(slower), NOISE))
    numbers = {"sides": [{**asdict(s.setting), **s.told, "step_s": s.seconds} for s in sides]}
    report("budgets", args, rows, numbers)


def against_rule(args: argparse.Namespace) -> None:
    rows, numbers, ratios = [], [], []
    for setting in AGAINST_RULE:
        ours, rule = in_turns([setting, replace(setting, rule=True)], args.disk)
        if not ours.told or not rule.told:
            refused = "ours" if not ours.told else "the rule"
            rows.append((setting.name, f"no plan of {refused} fits"))
            continue
        ratio = median_ratio(rule.seconds[WARM:], ours.seconds[WARM:])
        ratios.append(ratio)
        text = f"ours {ours.step_s:.3f} s, the rule {rule.step_s:.3f} s: {ratio:.2f} x as fast"
        rows.append((setting.name, text))
        print(*rows[-1], sep=": ", file=sys.stderr, flush=True)
        pair = {side: {**one.told, "step_s": one.seconds} for side, one in
                (("ours", ours), ("rule", rule))}  # fmt: skip
        numbers.append({"setting": setting.name, "ratio": ratio, **pair})
    rows.append(check("ours at least as fast, the least", min(ratios), 1.0, at_least=True))
    report("budgets_rule", args, rows, {"settings": numbers})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rule", action="store_true", help="ours against the paper's rule")
    parser.add_argument("--budgets", type=int, nargs="+", help="MiB, ascending")
    add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.rule:
        against_rule(args)
    else:
        sweep(args)


if __name__ == "__main__":
    main()
