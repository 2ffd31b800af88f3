"""Is training under a budget the same training, bit for bit?

A GPT of 6 layers and width 256 takes 20 steps, plainly and under a budget of 30 % of its
training state + 1.5 x its activations + 2 MiB, with a disk (and once with the host memory of
an emulated accelerator). Every loss, final weight and optimizer state must have equal bits.

    python examples/benchmarks/exactness.py
"""

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import common
import torch
from common import GIB, GPT, MIB, sizes
from harness import MakeOptimizer, assert_equal_runs, train

import elixir_fx
from elixir_fx.testing import emulated

MOVES = ("host_to_device_bytes", "device_to_host_bytes", "disk_read_bytes", "disk_write_bytes")
CONFIG = common.Config(layers=6, width=256, heads=8, seq=128, vocab=256)


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def freeze_half(model: GPT) -> None:
    for block in model.blocks[: CONFIG.layers // 2]:
        block.requires_grad_(False)
    model.tokens.requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    optimizer: MakeOptimizer = adamw
    accumulate: int = 1
    tied: bool = False
    prepare: Callable[[GPT], None] = lambda model: None
    host: bool = False  # on the emulated accelerator, with host memory instead of a disk


CASES = (
    Case(name="AdamW"),
    Case(name="SGD with momentum", optimizer=momentum),
    Case(name="4 accumulated micro-batches", accumulate=4),
    Case(name="tied embedding and head", tied=True),
    Case(name="frozen embedding and half of the layers", prepare=freeze_half),
    Case(name="emulated accelerator, host tier", host=True),
)


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = common.build(replace(CONFIG, tied=case.tied))
    case.prepare(model)
    source = common.text_batches(args.batch, CONFIG.seq, 0)
    batches = [next(source) for _ in range(args.steps * case.accumulate)]

    states = 2 if case.optimizer is adamw else 1
    trainable = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    state_bytes = sum(p.nbytes for p in model.parameters()) + (1 + states) * trainable
    unlimited = elixir_fx.plan(
        model, batches[0], memory=64 * GIB, optimizer="adamw", kernels="eager"
    )
    activation_bytes = unlimited.forecast.activation_bytes
    budget_bytes = int(0.3 * state_bytes + 1.5 * activation_bytes) + 2 * MIB
    limits: dict[str, Any] = {"memory": budget_bytes, "disk": args.disk}
    if case.host:
        limits = {"memory": budget_bytes, "host_memory": 2 * GIB, "machine": emulated()}

    plain = train(copy.deepcopy(model), case.optimizer, batches, accumulate=case.accumulate)
    options = {**limits, "example_inputs": batches[0]}
    ours = train(model, case.optimizer, batches, accumulate=case.accumulate, compile=options)
    try:
        assert_equal_runs(plain, ours)
        verdict = "equal"
    except AssertionError as error:
        verdict = str(error)
    assert ours.stats is not None
    moves = MOVES[:2] if case.host else MOVES[2:]
    return {
        "verdict": verdict,
        "compared": len(plain.losses) + len(plain.weights) + len(plain.states),
        "state_bytes": state_bytes,
        "activation_bytes": activation_bytes,
        "budget_bytes": budget_bytes,
        "peak_bytes": ours.stats["peak_device_bytes"],
        "loss": (plain.losses[0].item(), plain.losses[-1].item()),
        **{name: ours.stats[name] for name in moves},
    }


def describe(result: dict[str, Any]) -> str:
    moved = [sizes(value) for name, value in result.items() if name in MOVES]
    return (
        f"{result['verdict'].splitlines()[0]} ({result['compared']} tensors); state "
        f"{sizes(result['state_bytes'])}, budget {sizes(result['budget_bytes'])}, peak "
        f"{sizes(result['peak_bytes'])}; moved in the last step: {' in, '.join(moved)} out"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--disk", default=".")
    parser.add_argument("--case", help="run only the cases whose name contains this")
    common.add_output_options(parser)
    args = parser.parse_args()
    results = {case.name: run(case, args) for case in CASES if (args.case or "") in case.name}
    rows = [(name, describe(result)) for name, result in results.items()]
    common.report("exactness", args, rows, results)
    wrong = [f"{name}: {r['verdict']}" for name, r in results.items() if r["verdict"] != "equal"]
    idle = [n for n, r in results.items() if not any(v for k, v in r.items() if k in MOVES)]
    if wrong or idle:
        sys.exit("\n".join(wrong + [f"{name}: nothing was moved" for name in idle]))


if __name__ == "__main__":
    main()
