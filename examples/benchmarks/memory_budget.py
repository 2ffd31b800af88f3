"""Does a run keep to its memory budget, as the operating system sees it?

A 92M GPT (12 layers, width 768, vocabulary 8192, sequence 512, batch 1) needs 1.47 GB of
training state. It gets its activations plus a quarter of that, and a disk. Measured: the
growth of peak resident memory over the run, from after a trivial torch.compile call.

    python examples/benchmarks/memory_budget.py            # growth against budget and forecast
    python examples/benchmarks/memory_budget.py --group    # inside budget + 700 MiB, enforced
"""

import argparse
from dataclasses import replace
from typing import Any

import common
import torch
from common import GIB, MIB, sizes

import elixir_fx

GROUP_ROOM_BYTES = 700 * MIB  # interpreter, libraries, PyTorch's compiler


def activation_bytes(config: common.Config, batch: int) -> dict[str, int]:
    """What activations and temporaries take, from an unlimited plan; and what autograd saves."""
    inputs = next(common.text_batches(batch, config.seq, 0))
    model = common.build(config)
    saved = common.saved_bytes(model, inputs)
    plan = elixir_fx.plan(model, inputs, memory=64 * GIB, optimizer="adamw", kernels="eager")
    return {"planned": plan.forecast.activation_bytes, "saved": saved}


def train(args: argparse.Namespace, config: common.Config, budget_bytes: int) -> dict[str, Any]:
    common.start_torch_compiler()
    torch.manual_seed(0)
    batches = common.text_batches(args.batch, config.seq, 0)
    example = next(batches)
    common.reset_peak()
    start_bytes = common.resident_bytes()

    model: Any = common.build(config, meta=not args.real)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    model = elixir_fx.compile(
        model,
        optimizer=optimizer,
        example_inputs=example,
        memory=budget_bytes,
        disk=args.disk,
        kernels="eager",
        init=None if args.real else common.init_weights,
    )
    losses, resident = [], []
    for _ in range(args.steps):
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        resident.append(common.resident_bytes() - start_bytes)
    return {
        "budget_bytes": budget_bytes,
        "forecast_bytes": model.plan.forecast.peak_device_bytes,
        "counted_bytes": int(model.stats()["peak_device_bytes"]),
        "growth_bytes": common.peak_resident_bytes() - start_bytes,
        "resident_bytes": resident,
        "losses": losses,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.25, help="of the state, for chunks")
    parser.add_argument("--budget", type=int, default=None, help="bytes, instead of --share")
    parser.add_argument("--disk", default=".")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--real", action="store_true", help="build in memory, not on meta")
    parser.add_argument("--group", action="store_true", help="in a memory control group")
    common.add_output_options(parser)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    config = replace(common.GPT_92M, layers=args.layers)
    state_bytes = common.state_bytes(common.build(config, meta=True))
    activations = {"planned": 0, "saved": 0}
    if args.budget is None:
        activations = common.in_child(activation_bytes, config, args.batch)
        args.budget = activations["planned"] + int(args.share * state_bytes)
    numbers: dict[str, Any] = {"state_bytes": state_bytes, "activation_bytes": activations}
    rows = [
        ("training state", sizes(state_bytes)),
        ("activations: planned, saved by autograd", " ".join(map(sizes, activations.values()))),
        ("budget", sizes(args.budget)),
    ]

    if args.group:
        limit_bytes = args.budget + GROUP_ROOM_BYTES
        child = [__file__, "--json", f"--budget={args.budget}", f"--steps={args.steps}"]
        child += [f"--batch={args.batch}", f"--disk={args.disk}", f"--layers={args.layers}"]
        run = common.run_in_group(child + ["--real"] * args.real, limit_bytes)
        numbers |= run.result | {"limit_bytes": limit_bytes, "group_peak_bytes": run.peak_bytes}
        rows.append(("group limit, peak", f"{sizes(limit_bytes)} {sizes(run.peak_bytes)}"))
    else:
        numbers |= train(args, config, args.budget)

    growth, forecast = numbers["growth_bytes"], numbers["forecast_bytes"]
    resident, losses = numbers["resident_bytes"], numbers["losses"]
    allowed = 1.05 * args.budget + 64 * MIB
    drift = resident[-1] / resident[min(2, len(resident) - 1)]
    rows += [
        (
            "forecast, counted by the runtime",
            f"{sizes(forecast)} {sizes(numbers['counted_bytes'])}",
        ),
        ("growth of peak resident memory", sizes(growth)),
        common.check("growth / (1.05 budget + 64 MiB)", growth / allowed, 1),
        common.check("growth / forecast", growth / forecast, 1.05),
        common.check("memory after the last step / after the third", drift, 1.01),
        ("resident growth after each step, MiB", " ".join(f"{r / MIB:.0f}" for r in resident)),
        common.check("last / first loss", losses[-1] / losses[0], 1),
        ("losses", " ".join(f"{loss:.3f}" for loss in losses)),
    ]
    common.report("memory_budget_group" if args.group else "memory_budget", args, rows, numbers)


if __name__ == "__main__":
    main()
