"""Compiled kernels against torch.compile's: how long it takes until a model trains.

    python examples/benchmarks/kernels_start.py                # cold and warm
    python examples/benchmarks/kernels_start.py --only cold --layers 12 48

A GPT of width 512 with 12 and 48 equal layers, batch 1, everything in memory; torch.compile
(compile) and elixir_fx (ours). Every start is a process of its own.

cold  nothing is in a cache but what elixir_fx measured of this machine: seconds from the first
      call to the end of the first backward, and how often Inductor was asked for a graph
warm  the deepest model once more, with the caches that its first start left: seconds from the
      start of Python to the end of the first step, its update too (what these scripts import
      is the same on both sides)
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import common
from backend import GPT_27M
from common import GIB
from kernels import Training
from kernels_work import gpt
from torch._dynamo.utils import compilation_time_metrics, counters

from elixir_fx.runtime.measure import cache_folder

SECTIONS = ("cold", "warm")
SIDES = ("compile", "ours")
LOOKUPS = ("miss", "hit", "bypass")  # what Inductor's cache says of a graph

# The bars: of ours, from the shallowest to the deepest model; and at the deepest.
DEEPER_S, WARM_S, COMPILATIONS = 15, 15, 11


# One start, in a process of its own


def start(args: argparse.Namespace) -> None:
    """Train one step and print what it took."""
    [layers] = args.layers
    options = {"memory": 64 * GIB, "kernels": args.kernels} if args.child == "ours" else {}
    training = Training(gpt(replace(GPT_27M, layers=layers), batch=1), args.child, **options)
    begin_s = time.perf_counter()
    training.forward().backward()
    first_backward_s = time.perf_counter() - begin_s
    graphs = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in LOOKUPS}
    # These are counted even where the cache is off.
    graphs["calls"] = len(compilation_time_metrics.get("compile_fx_inner", ()))
    training.optimizer.step()
    print(json.dumps({"first_backward_s": first_backward_s, "graphs": graphs}), flush=True)


def launch(side: str, layers: int, args: argparse.Namespace, **caches: str) -> dict[str, Any]:
    """What a start says of itself, and the seconds until it said so."""
    command = [sys.executable, __file__, f"--child={side}", f"--layers={layers}"]
    command.append(f"--kernels={args.kernels}")
    begin_s = time.perf_counter()
    with subprocess.Popen(
        command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        line = next((line for line in child.stdout if line.startswith("{")), "")
        first_step_s = time.perf_counter() - begin_s
        child.communicate()
    if child.returncode != 0:
        sys.exit(f"the start of {side} with {layers} layers ended with {child.returncode}")
    result = json.loads(line) | {"first_step_s": first_step_s}
    what = f"{side}, {layers} layers: {result['first_backward_s']:.1f} s to the first backward"
    print(f"{what}, {first_step_s:.1f} s from the start of Python", file=sys.stderr)
    return result


# Measuring


def empty_caches(folder: str) -> dict[str, str]:
    """The environment of a first start: empty but for measurements of the machine."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "XDG_CACHE_HOME": f"{folder}/cache"}
    measured = Path(caches["XDG_CACHE_HOME"]) / "elixir_fx"
    measured.mkdir(parents=True)
    for pattern in ("machine-*.json", "operators-*.json"):
        for file in cache_folder().glob(pattern):
            shutil.copy(file, measured)
    return caches


def measure(args: argparse.Namespace, sections: list[str]) -> dict[str, Any]:
    """Every round's starts: of each side, cold by layers, and warm."""
    deepest = max(args.layers)
    depths = args.layers if "cold" in sections else [deepest]
    found: dict[str, Any] = {
        side: {"cold": {layers: [] for layers in depths}, "warm": []} for side in SIDES
    }
    with TemporaryDirectory() as folder:  # so that the machine has been measured for all
        launch("ours", min(depths), args, TORCHINDUCTOR_CACHE_DIR=folder)
    for turn in range(args.rounds):
        for layers in depths:
            for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                with TemporaryDirectory() as folder:
                    caches = empty_caches(folder)
                    found[side]["cold"][layers].append(launch(side, layers, args, **caches))
                    if layers == deepest and "warm" in sections:
                        found[side]["warm"].append(launch(side, layers, args, **caches))
    return found


def median(starts: list[dict[str, Any]], figure: str) -> float:
    return statistics.median(start[figure] for start in starts)


def cold_rows(found: dict[str, Any], layers: list[int]) -> list[tuple[str, str]]:
    seconds = {
        side: {
            depth: median(found[side]["cold"][depth], "first_backward_s")
            for depth in sorted(layers)
        }
        for side in SIDES
    }
    rows = [
        (
            f"cold, {depth} layers: first backward, {', '.join(SIDES)}",
            ", ".join(f"{seconds[side][depth]:.1f} s" for side in SIDES),
        )
        for depth in sorted(layers)
    ]
    deepest, shallowest = max(layers), min(layers)
    deeper = {side: seconds[side][deepest] - seconds[side][shallowest] for side in SIDES}
    what = f"cold, from {shallowest} to {deepest} layers, s"
    rows.append((f"{what}: compile", f"{deeper['compile']:.1f}"))
    rows.append(common.check(f"{what}: ours", deeper["ours"], DEEPER_S))
    graphs = {side: found[side]["cold"][deepest][-1]["graphs"] for side in SIDES}
    what = f"cold, {deepest} layers: graphs that Inductor had"
    rows += [
        (f"{what}: {side}", ", ".join(f"{name} {count}" for name, count in graphs[side].items()))
        for side in SIDES
    ]
    asked = max(sum(graphs["ours"][name] for name in LOOKUPS), graphs["ours"]["calls"])
    rows.append(common.check(f"{what} of ours", asked, COMPILATIONS))
    return rows


def warm_rows(found: dict[str, Any], deepest: int) -> list[tuple[str, str]]:
    seconds = {side: median(found[side]["warm"], "first_step_s") for side in SIDES}
    what = f"warm, {deepest} layers: Python to the first step, s"
    return [
        (f"{what}: compile", f"{seconds['compile']:.1f}"),
        common.check(f"{what}: ours", seconds["ours"], WARM_S),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SECTIONS, help="may be repeated")
    parser.add_argument("--kernels", default="inductor", help="of ours")
    parser.add_argument("--layers", nargs="+", type=int, default=[12, 48])
    parser.add_argument("--rounds", type=int, default=1, help="of every start")
    parser.add_argument("--child", choices=SIDES, help="be one start of this side")
    common.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.child:
        start(args)
        return
    sections = args.only or list(SECTIONS)
    found = measure(args, sections)
    rows: list[tuple[str, str]] = []
    if "cold" in sections:
        rows += cold_rows(found, args.layers)
    if "warm" in sections:
        rows += warm_rows(found, max(args.layers))
    common.report("kernels_start", args, rows, {"kernels": args.kernels, "starts": found})


if __name__ == "__main__":
    main()
