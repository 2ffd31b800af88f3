"""Compiled kernels against torch.compile's: time and memory of a step, and what is learned.

    python examples/benchmarks/kernels.py                                # everything
    python examples/benchmarks/kernels.py --only step --case "27M bf16"
    python examples/benchmarks/kernels.py --only models --only tight

step    GPTs of 27M and 92M parameters with everything in memory, fp32 and bf16 autocast: plain
        PyTorch (eager), torch.compile (compile) and elixir_fx (ours)
models  the same for small Llama, Mixtral and ViT configurations of transformers, fp32
tight   the 27M GPT on a disk, in the smallest budget and a quarter of the way from there to
        everything in memory: how far five steps of compiled kernels are from those of PyTorch's
        own, beside how far torch.compile is

Every side trains in a process of its own, all from equal weights on equal batches, and the sides
take turns. What starting costs is kernels_start.py's.
"""

import argparse
import ctypes
import gc
import statistics
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import common
import numpy as np
import torch
from backend import GPT_27M
from common import sizes
from kernels_work import Work, gpt, gpts, models
from torch import Tensor, nn

import elixir_fx

Rows = list[tuple[str, str]]
Weights = dict[str, np.ndarray[Any, np.dtype[np.float32]]]

SECTIONS = ("step", "models", "tight")
LOSSES = 10  # as many first losses are compared
MEMORY_ROUNDS, MEMORY_STEPS = 3, 2

# The bars: of torch.compile's time and memory, of eager's time under bf16, and of the distance
# between torch.compile and eager.
TIME_SHARE, BF16_TIME_SHARE, MEMORY_SHARE, DISTANCE_SHARE = 1.0, 0.97, 1.02, 2.0

ROUNDING = 2.0**-23  # torch.compile may be closer to eager than fp32 can tell by pure luck


# A side


def eager(model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    return model


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return torch.compile(model)


def ours(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> nn.Module:
    return elixir_fx.compile(model, optimizer=optimizer, **options)


SIDES: dict[str, Callable[..., Any]] = {"eager": eager, "compile": compiled, "ours": ours}


class Training:
    """One side at work. `options` are those of `elixir_fx.compile`."""

    def __init__(self, work: Work, side: str, **options: Any) -> None:
        torch.manual_seed(0)
        model = work.build()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        self.model = SIDES[side](model, self.optimizer, **options)
        self.batches = work.batches()
        self.autocast = work.autocast
        self.losses: list[float] = []

    def forward(self) -> Tensor:
        batch = next(self.batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = self.model(**batch) if isinstance(batch, dict) else self.model(*batch)
        return output if isinstance(output, Tensor) else output.loss

    def step(self) -> None:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def past_losses(self) -> list[float]:
        return self.losses

    def weights(self) -> Weights:
        """Every parameter by its name in the plain model."""
        state = self.model.state_dict()
        return {name.removeprefix("_orig_mod."): w.numpy().copy() for name, w in state.items()}

    def memory(self) -> dict[str, int]:
        """The most that the process holds within a few steps, and over what it holds between
        them; the median of some tries."""
        peaks_bytes, growths_bytes = [], []
        for _ in range(MEMORY_ROUNDS):
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # or what the C heap kept of earlier steps is counted
            common.reset_peak()
            between_bytes = common.resident_bytes()
            for _ in range(MEMORY_STEPS):
                self.step()
            peaks_bytes.append(common.peak_resident_bytes())
            growths_bytes.append(peaks_bytes[-1] - between_bytes)
        return {
            "peak_bytes": statistics.median(peaks_bytes),
            "growth_bytes": statistics.median(growths_bytes),
        }


_training: list[Training] = []  # of the process that `Elsewhere` starts


def _begin(work: Work, side: str, options: dict[str, Any]) -> None:
    _training.append(Training(work, side, **options))


def _ask(question: Callable[[Training], Any]) -> Any:
    return question(_training[0])


class Elsewhere:
    """A training in a process of its own, which lives until the `with` block ends."""

    def __init__(self, work: Work, side: str, **options: Any) -> None:
        self.pool = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))
        self.pool.submit(_begin, work, side, options).result()

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def ask(self, question: Callable[[Training], Any]) -> Any:
        """The answer of the training there; `question` is one of its methods."""
        return self.pool.submit(_ask, question).result()

    def step(self) -> None:
        self.ask(Training.step)


# Comparing


def relative_difference(values: list[float], reference: list[float]) -> float:
    """The largest, of pairs."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))


def compare(work: Work, rounds: int, warmup: int, **options: Any) -> dict[str, Any]:
    """Time, first losses and memory of all three sides."""
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(Elsewhere(work, name, **(options if name == "ours" else {})))
            for name in SIDES
        }
        seconds = common.alternate({n: side.step for n, side in sides.items()}, rounds, warmup)
        losses = {name: side.ask(Training.past_losses)[:LOSSES] for name, side in sides.items()}
        memory = {name: side.ask(Training.memory) for name, side in sides.items()}
    return {
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "ours_compile": common.median_ratio(seconds["ours"], seconds["compile"]),
        "ours_eager": common.median_ratio(seconds["ours"], seconds["eager"]),
        "loss_difference": relative_difference(losses["ours"], losses["compile"]),
        "eager_loss_difference": relative_difference(losses["eager"], losses["compile"]),
        "memory": memory,
        "losses": losses,
        "seconds": seconds,
    }


def time_rows(case: str, numbers: dict[str, Any]) -> Rows:
    medians = numbers["median_s"]
    differences = f"{numbers['loss_difference']:.1e} {numbers['eager_loss_difference']:.1e}"
    return [
        (
            f"{case}: step, {', '.join(medians)}",
            ", ".join(f"{seconds:.4f} s" for seconds in medians.values()),
        ),
        common.check(f"{case}: time, ours / compile", numbers["ours_compile"], TIME_SHARE),
        (f"{case}: losses / compile's - 1: ours, eager", differences),
    ]


def step_rows(case: str, numbers: dict[str, Any], autocast: bool) -> Rows:
    ratio = numbers["ours_eager"]
    what = f"{case}: time, ours / eager"
    rows = time_rows(case, numbers)
    rows.append(common.check(what, ratio, BF16_TIME_SHARE) if autocast else (what, f"{ratio:.3f}"))
    for figure, name in (("growth_bytes", "growth within a step"), ("peak_bytes", "peak")):
        found = {side: memory[figure] for side, memory in numbers["memory"].items()}
        share = found["ours"] / found["compile"]
        rows += [
            (f"{case}: {name}, {', '.join(found)}", ", ".join(map(sizes, found.values()))),
            common.check(f"{case}: {name}, ours / compile", share, MEMORY_SHARE),
        ]
    return rows


# A tight budget


def tight_budget(work: Work, disk: str, kernels: str) -> int:
    """Bytes: the least, and a quarter of what is missing from there to all in memory."""
    batch = next(work.batches())
    least = elixir_fx.smallest_memory(work.build(), batch, disk=disk, kernels=kernels)
    whole = elixir_fx.plan(work.build(), batch, kernels=kernels)
    return least + (whole.forecast.peak_device_bytes - least) // 4


def distance(run: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """How far two runs are apart, relatively: the largest difference of a loss; the largest of
    a weight, over the largest of its parameter; and the norm of all differences."""
    pairs = [(run["weights"][name], weight) for name, weight in reference["weights"].items()]
    difference = np.sqrt(sum(float(np.square(a - b).sum()) for a, b in pairs))
    return {
        "losses": relative_difference(run["losses"], reference["losses"]),
        "one weight": max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs),
        "all weights": difference / np.sqrt(sum(float(np.square(b).sum()) for _, b in pairs)),
    }


def tight(args: argparse.Namespace) -> dict[str, Any]:
    work = gpt(replace(GPT_27M, layers=args.layers or GPT_27M.layers), batch=2)
    both = (args.kernels, "eager")
    budget_bytes = max(common.in_child(tight_budget, work, args.disk, name) for name in both)
    limits = {"memory": budget_bytes, "disk": args.disk}
    with ExitStack() as stack:
        sides = {
            "eager": Elsewhere(work, "eager"),
            "compile": Elsewhere(work, "compile"),
            "ours": Elsewhere(work, "ours", kernels=args.kernels, **limits),
            "ours, eager kernels": Elsewhere(work, "ours", kernels="eager", **limits),
        }
        for side in sides.values():
            stack.enter_context(side)
        turns = {name: side.step for name, side in sides.items()}
        seconds = common.alternate(turns, args.steps - 1, warmup=1)
        runs = {
            name: {
                "losses": side.ask(Training.past_losses),
                "weights": side.ask(Training.weights),
            }
            for name, side in sides.items()
        }
    return {
        "budget_bytes": budget_bytes,
        "distance": distance(runs["ours"], runs["ours, eager kernels"]),
        "compile_distance": distance(runs["compile"], runs["eager"]),
        "median_s": {name: statistics.median(values) for name, values in seconds.items()},
        "seconds": seconds,
        "losses": {name: run["losses"] for name, run in runs.items()},
    }


def tight_rows(numbers: dict[str, Any]) -> Rows:
    rows = [("tight: budget", sizes(numbers["budget_bytes"]))]
    rows += [(f"tight: step, {side}", f"{s:.4f} s") for side, s in numbers["median_s"].items()]
    for what, reference in numbers["compile_distance"].items():
        limit = DISTANCE_SHARE * max(reference, ROUNDING)
        name = f"tight: {what}, compiled from eager kernels, in millionths"
        rows.append(common.check(name, 1e6 * numbers["distance"][what], 1e6 * limit))
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SECTIONS, help="may be repeated")
    parser.add_argument("--case", default="", help="of step and models: whose name contains this")
    parser.add_argument("--kernels", default="inductor", help="of ours")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3, help="rounds before them")
    parser.add_argument("--steps", type=int, default=5, help="of tight")
    parser.add_argument("--layers", type=int, help="in the place of each model's own")
    parser.add_argument("--disk", default=".")
    common.add_output_options(parser)
    return parser.parse_args()


def compare_all(works: Mapping[str, Work], args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    options = {"kernels": args.kernels}
    for case in [case for case in works if args.case in case]:
        found[case] = compare(works[case], args.rounds, args.warmup, **options)
        ratio = found[case]["ours_compile"]
        print(f"{case}: {ratio:.3f} of torch.compile's time", file=sys.stderr)
    return found


def main() -> None:
    args = arguments()
    sections = args.only or SECTIONS
    rows: Rows = []
    numbers: dict[str, Any] = {"kernels": args.kernels}
    if "step" in sections:
        works = gpts(args.layers)
        numbers["step"] = found = compare_all(works, args)
        for case, one in found.items():
            rows += step_rows(case, one, works[case].autocast)
    if "models" in sections:
        numbers["models"] = found = compare_all(models(args.layers), args)
        for case, one in found.items():
            rows += time_rows(case, one)
    if "tight" in sections:
        numbers["tight"] = tight(args)
        rows += tight_rows(numbers["tight"])
    common.report("kernels", args, rows, numbers)


if __name__ == "__main__":
    main()
