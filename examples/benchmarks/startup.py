"""Start a model that is far larger than memory: 774M parameters in 3 GiB, from nothing.

A GPT of 36 layers and width 1280 is built on the meta device, planned, materialised onto the
disk and trained, all inside a memory control group. Its training state is 12.4 GB.

    python examples/benchmarks/startup.py --disk /nvme
"""

import argparse
import json
import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import common
import torch
from common import GIB, sizes

import elixir_fx
import elixir_fx.lowering


def start(args: argparse.Namespace, config: common.Config) -> dict[str, Any]:
    """Everything, in this process. Seconds of each part and the first losses."""
    torch.manual_seed(0)
    batches = common.text_batches(args.batch, config.seq, 0)
    inputs = next(batches)
    model: Any = common.build(config, meta=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    search, search_s = elixir_fx.lowering.search, []

    def timed_search(*values: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return search(*values, **named)
        finally:
            search_s.append(time.perf_counter() - begin)

    begin = time.perf_counter()
    with patch.object(elixir_fx.lowering, "search", timed_search):
        plan = elixir_fx.plan(
            model,
            inputs,
            memory=args.memory,
            disk_memory=64 * GIB,
            optimizer="adamw",
            kernels="eager",
        )
    plan_s = time.perf_counter() - begin

    begin = time.perf_counter()
    model = elixir_fx.compile(
        model,
        optimizer=optimizer,
        example_inputs=inputs,
        memory=args.memory,
        disk=args.disk,
        kernels="eager",
        init=common.init_weights,
        plan=plan,
    )
    compile_s = time.perf_counter() - begin

    step_s, losses = [], []
    for _ in range(args.steps):
        begin = time.perf_counter()
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step_s.append(time.perf_counter() - begin)
    return {
        "plan_s": plan_s,
        "search_s": sum(search_s),
        "compile_s": compile_s,
        "step_s": step_s,
        "losses": losses,
        "peak_resident_bytes": common.peak_resident_bytes(),
        "counted_bytes": int(model.stats()["peak_device_bytes"]),
        "forecast_bytes": model.plan.forecast.peak_device_bytes,
        "forecast_s": model.plan.forecast.step_s,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", default="2GiB", help="budget of the step")
    parser.add_argument("--limit", type=float, default=3.0, help="of the control group, in GiB")
    parser.add_argument("--disk", default=".")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--ungrouped", action="store_true", help="in this process, no limit")
    common.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = replace(common.GPT_774M, layers=args.layers)
    if args.ungrouped:
        print(json.dumps(start(args, config)))
        return
    limit_bytes = int(args.limit * GIB)
    child = [__file__, "--ungrouped", f"--memory={args.memory}", f"--disk={args.disk}"]
    child += [f"--steps={args.steps}", f"--batch={args.batch}", f"--layers={args.layers}"]
    run = common.run_in_group(child, limit_bytes)
    numbers = run.result | {"group_peak_bytes": run.peak_bytes, "limit_bytes": limit_bytes}
    model = common.build(config, meta=True)
    rows = [
        ("parameters", f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} million"),
        ("training state", sizes(common.state_bytes(model))),
        ("budget, limit of the group", f"{args.memory} {sizes(limit_bytes)}"),
        common.check("from the model to its plan, s", numbers["plan_s"], 20),
        common.check("the search within it, s", numbers["search_s"], 2),
        ("compile: capture again, rewrite, materialise", f"{numbers['compile_s']:.1f} s"),
        ("steps", " ".join(f"{seconds:.1f} s" for seconds in numbers["step_s"])),
        ("forecast of a step", f"{numbers['forecast_s']:.1f} s"),
        ("all, with the start of Python", f"{run.seconds:.1f} s"),
        ("peak of the group", sizes(run.peak_bytes)),
        ("peak of the process", sizes(numbers["peak_resident_bytes"])),
        (
            "peak of the step: counted, forecast",
            f"{sizes(numbers['counted_bytes'])} {sizes(numbers['forecast_bytes'])}",
        ),
        ("losses", " ".join(f"{loss:.3f}" for loss in numbers["losses"])),
    ]
    common.report("startup", args, rows, numbers)


if __name__ == "__main__":
    main()
