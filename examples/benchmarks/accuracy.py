"""Is the forecast right? Step time and peak memory, forecast and measured, in 20 settings.

Each setting is a fresh process that measures the machine anew, compiles, warms up for 2 steps and
measures 5, of which the median counts (one_setting.py). The disk is measured again just after: if
its rates have changed by more than 20 % the setting is repeated, at most 3 times, and the table
says so. Peaks are what stats() counts. Settings with kernels="inductor" stand apart: their memory
is planned operator by operator, and fused kernels need less.

    python examples/benchmarks/accuracy.py --disk /nvme --save
    python examples/benchmarks/accuracy.py --disk /nvme --only 92M
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import MIB, add_output_options, check, report
from one_setting import Setting
from ranks import free_port

WORKER = Path(__file__).with_name("one_setting.py")
LIMIT_S = 180
DRIFT, TRIES = 0.2, 3
STEP_MEDIAN, STEP_WORST, PEAK_WORST = 0.08, 0.15, 0.03


def settings() -> list[Setting]:
    big: dict[str, Any] = {"model": "92M", "batch": 1}
    return [
        Setting(name="27M, everything fits"),
        Setting(name="27M, 600 MiB", memory="600MiB"),
        Setting(name="27M, 500 MiB", memory="500MiB"),
        Setting(name="27M, 400 MiB", memory="400MiB"),
        Setting(name="27M, batch 2, 300 MiB", batch=2, memory="300MiB"),
        Setting(name="27M, batch 2, 300 MiB, x4", batch=2, memory="300MiB", micro_batches=4),
        Setting(name="27M, batch 2, 450 MiB, x4", batch=2, memory="450MiB", micro_batches=4),
        Setting(name="27M, SGD, 300 MiB", batch=2, memory="300MiB", optimizer="sgd"),
        Setting(name="27M, fused AdamW, 400 MiB", memory="400MiB", optimizer="adamw fused"),
        Setting(name="27M, bf16, 400 MiB", memory="400MiB", bf16=True),
        Setting(name="27M, 2 ranks, everything fits", batch=2, ranks=2),
        Setting(name="27M, 2 ranks, 250 MiB each", batch=2, ranks=2, memory="250MiB"),
        Setting(name="92M, everything fits", **big),
        Setting(name="92M, 1000 MiB", memory="1000MiB", **big),
        Setting(name="92M, 500 MiB", memory="500MiB", **big),
        Setting(name="92M, 600 MiB, x4", memory="600MiB", micro_batches=4, **big),
        *(
            Setting(
                name=f"27M, batch 8, link {rate:g} GB/s, {memory} MiB",
                batch=8,
                memory=f"{memory}MiB",
                link_bytes_per_s=rate * 1e9,
            )
            for rate in (0.5, 2.0, 8.0)
            for memory in (800, 600)
        ),
        Setting(name="27M, inductor, 500 MiB", memory="500MiB", kernels="inductor"),
        Setting(name="92M, inductor, 600 MiB", memory="600MiB", kernels="inductor", **big),
    ]


def launch(setting: Setting, disk: Path) -> dict[str, Any] | str:
    """The worker's figures, of its slowest rank; or its last word, if it failed."""
    command = [sys.executable, str(WORKER), json.dumps(asdict(setting)), str(disk)]
    with tempfile.TemporaryDirectory() as cache:
        world = {"XDG_CACHE_HOME": cache}
        if setting.ranks > 1:
            world |= {
                "WORLD_SIZE": str(setting.ranks),
                "LOCAL_WORLD_SIZE": str(setting.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
                "OMP_NUM_THREADS": "1",
            }
        ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(setting.ranks)
        ]
        try:
            outputs = [process.communicate(timeout=LIMIT_S) for process in ranks]
        except subprocess.TimeoutExpired:
            return f"took more than {LIMIT_S} s"
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        if process.returncode:
            return (errors.strip().splitlines() or ["no word"])[-1]
    results = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    slowest = max(results, key=lambda result: statistics.median(steps(result)))
    return {**slowest, "peak_bytes": max(result["peak_bytes"] for result in results)}


def steps(result: dict[str, Any]) -> list[float]:
    return [a + b for a, b in zip(result["graphs_s"], result["update_s"], strict=True)]


def drift(result: dict[str, Any]) -> float:
    """How far the disk's rates after the steps are from those before."""
    pairs = zip(result["disk_before"], result["disk_after"], strict=True)
    return max((abs(after / before - 1) for before, after in pairs), default=0.0)


def measured(setting: Setting, disk: Path) -> dict[str, Any]:
    """A setting, repeated while the disk does not stand still."""
    tries = 0
    while True:
        result = launch(setting, disk)
        tries += 1
        if isinstance(result, str):
            return {"setting": setting.name, "failed": result}
        if drift(result) <= DRIFT or tries == TRIES:
            break
    step_s = statistics.median(steps(result))
    return {
        "setting": setting.name,
        "kernels": setting.kernels,
        "step_s": step_s,
        "step_error": result["forecast_s"] / step_s - 1,
        "peak_error": result["forecast_peak_bytes"] / result["peak_bytes"] - 1,
        "tries": tries,
        "drift": drift(result),
        **result,
    }


def row(found: dict[str, Any]) -> tuple[str, str]:
    if "failed" in found:
        return found["setting"], f"failed: {found['failed']}"
    drifting = f"; disk moved {found['drift']:.0%}" if found["drift"] > DRIFT else ""
    tries = f"; try {found['tries']}" if found["tries"] > 1 else ""
    return found["setting"], (
        f"step {found['forecast_s']:.3f} s, measured {found['step_s']:.3f} s "
        f"({found['step_error']:+.1%}); peak {found['forecast_peak_bytes'] / MIB:.1f} MiB, "
        f"measured {found['peak_bytes'] / MIB:.1f} ({found['peak_error']:+.1%}){tries}{drifting}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--only", default="", help="settings whose name has this in it")
    add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = []
    for setting in settings():
        if args.only in setting.name:
            found.append(measured(setting, args.disk))
            print(*row(found[-1]), sep=": ", file=sys.stderr, flush=True)
    good = [one for one in found if "failed" not in one and one["kernels"] == "eager"]
    errors = [abs(one["step_error"]) for one in good]
    peaks = [one["peak_error"] for one in good]
    rows = [row(one) for one in found]
    if good:
        rows += [
            check("step time, median error", statistics.median(errors), STEP_MEDIAN),
            check("step time, worst error", max(errors), STEP_WORST),
            check("peak, least above measured", min(peaks), 0.0, at_least=True),
            check("peak, most above measured", max(peaks), PEAK_WORST),
        ]
    report("accuracy", args, rows, {"settings": found})


if __name__ == "__main__":
    main()
