"""The torch.compile backend: what it costs where nothing moves, and the memory it keeps to.

    python examples/benchmarks/backend.py             # both
    python examples/benchmarks/backend.py --only overhead

overhead  a 27M GPT with no limits: a training step through backend="elixir_fx" against one
          through backend="aot_eager", alternating in one process
memory    a 92M GPT, its activations and a quarter of its training state: growth of peak
          resident memory against the budget
"""

import argparse
import statistics
from dataclasses import replace
from typing import Any

import common
import torch
from common import GIB, MIB, sizes

import elixir_fx
from elixir_fx.backend import state

GPT_27M = common.Config(layers=8, width=512, heads=8, seq=256, vocab=4096, tied=True)


class Training:
    """One model, and a step of it through a backend."""

    def __init__(self, config: common.Config, batch: int, backend: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.batches = common.text_batches(batch, config.seq, 0)
        self.original = common.build(config)
        self.optimizer = torch.optim.AdamW(self.original.parameters(), lr=3e-4)
        if backend == "elixir_fx":
            options |= {"model": self.original, "optimizer": self.optimizer, "kernels": "eager"}
        self.model = torch.compile(self.original, backend=backend, options=options or None)

    def step(self) -> float:
        loss = self.model(*next(self.batches))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def overhead(rounds: int, batch: int) -> dict[str, list[float]]:
    """Seconds of steps through either backend."""
    sides = {name: Training(GPT_27M, batch, name) for name in ("aot_eager", "elixir_fx")}
    return common.alternate({name: side.step for name, side in sides.items()}, rounds)


def memory(disk: str, layers: int, steps: int) -> dict[str, Any]:
    """Growth of resident memory under a budget."""
    common.start_torch_compiler()
    config = replace(common.GPT_92M, layers=layers)
    inputs = next(common.text_batches(1, config.seq, 0))
    whole = common.build(config, meta=True)
    plan = elixir_fx.plan(whole, inputs, memory=64 * GIB, optimizer="adamw", kernels="eager")
    budget_bytes = plan.forecast.activation_bytes + common.state_bytes(whole) // 4
    common.reset_peak()
    start_bytes = common.resident_bytes()
    training = Training(config, 1, "elixir_fx", memory=budget_bytes, disk=disk)
    losses, resident = [training.step()], []
    # What came before the parameters were mapped was the user's own model, all in memory.
    common.reset_peak()
    for _ in range(steps):
        losses.append(training.step())
        resident.append(common.resident_bytes() - start_bytes)
    return {
        "budget_bytes": budget_bytes,
        "state_bytes": common.state_bytes(whole),
        "growth_bytes": common.peak_resident_bytes() - start_bytes,
        "resident_bytes": resident,
        "losses": losses,
        "notes": list(state(training.original).plan.notes),
        "stats": state(training.original).stats(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("overhead", "memory"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--disk", default=".")
    common.add_output_options(parser)
    args = parser.parse_args()
    rows: list[tuple[str, str]] = []
    numbers: dict[str, Any] = {}
    if args.only != "memory":
        seconds = common.in_child(overhead, args.rounds, args.batch)
        ratio = common.median_ratio(seconds["elixir_fx"], seconds["aot_eager"])
        rows += [
            (f"step through {name}, median s", f"{statistics.median(values):.4f}")
            for name, values in seconds.items()
        ]
        rows.append(common.check("elixir_fx / aot_eager, median of ratios", ratio, 1.03))
        numbers |= {"seconds": seconds, "ratio": ratio}
    if args.only != "overhead":
        found = common.in_child(memory, args.disk, args.layers, args.steps)
        allowed = 1.05 * found["budget_bytes"] + 64 * MIB
        rows += [
            (
                "training state, budget",
                f"{sizes(found['state_bytes'])} {sizes(found['budget_bytes'])}",
            ),
            ("growth of peak resident memory", sizes(found["growth_bytes"])),
            common.check("growth / (1.05 budget + 64 MiB)", found["growth_bytes"] / allowed, 1),
            ("resident growth after each step", " ".join(map(sizes, found["resident_bytes"]))),
            ("step, s", f"{found['stats']['step_s']:.2f}"),
            common.check("last / first loss", found["losses"][-1] / found["losses"][0], 1),
        ]
        numbers |= found
    common.report("backend", args, rows, numbers)


if __name__ == "__main__":
    main()
