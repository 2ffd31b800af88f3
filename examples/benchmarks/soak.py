"""Does anything leak? 200 steps, 200 with changing shapes, ten compilations, a killed process.

python examples/benchmarks/soak.py
"""

import argparse
import gc
import os
import signal
import subprocess
import sys
import time
from tempfile import TemporaryDirectory
from typing import Any

import common
import torch
from common import GIB, MIB, sizes

import elixir_fx
from elixir_fx.backend import state

CONFIG = common.Config(layers=4, width=256, heads=8, seq=64, vocab=256)


class Training:
    """A small GPT under a quarter of its training state plus activations, with a disk."""

    def __init__(self, disk: str, backend: bool = False):
        torch.manual_seed(0)
        self.batches = common.text_batches(2, CONFIG.seq, 0)
        self.original = model = common.build(CONFIG)
        inputs = next(self.batches)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plan = elixir_fx.plan(model, inputs, memory=64 * GIB, optimizer="adamw", kernels="eager")
        budget_bytes = int(1.5 * plan.forecast.activation_bytes)
        budget_bytes += int(0.25 * common.state_bytes(model)) + 2 * MIB
        self.model: Any
        if backend:
            options = {"model": model, "optimizer": self.optimizer, "kernels": "eager"}
            options |= {"memory": 2 * budget_bytes, "disk": disk}
            self.model = torch.compile(model, backend="elixir_fx", options=options)
            return
        self.model = elixir_fx.compile(
            model,
            optimizer=self.optimizer,
            example_inputs=inputs,
            memory=budget_bytes,
            disk=disk,
            kernels="eager",
        )

    def step(self, rows: int = 2, length: int = CONFIG.seq) -> float:
        loss = self.model(*(tensor[:rows, :length] for tensor in next(self.batches)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def steps(count: int, disk: str) -> dict[str, Any]:
    training = Training(disk)
    resident, files, threads, losses = [], [], [], []
    for _ in range(count):
        losses.append(training.step())
        resident.append(common.resident_bytes())
        files.append(common.open_files())
        threads.append(common.threads())
    early, late = max(resident[10:30]), max(resident[-20:])
    return {
        "early_bytes": early,
        "late_bytes": late,
        "files": (files[10], files[-1]),
        "threads": (threads[10], threads[-1]),
        "losses": (losses[0], losses[-1]),
    }


def shapes(count: int, disk: str, backend: bool) -> dict[str, Any]:
    """Steps whose batches have one or two rows and 20 lengths, the longest one first."""
    training = Training(disk, backend)
    training.step()
    lengths = [CONFIG.seq - 2 * (7 * index % 20) for index in range(count)]
    resident, started = [], time.perf_counter()
    for index, length in enumerate(lengths):
        training.step(1 + index % 2, length)
        resident.append(common.resident_bytes())
    plan = state(training.original).plan if backend else training.model.plan
    return {
        "shapes": len({(1 + index % 2, length) for index, length in enumerate(lengths)}),
        "schedules": len(plan.schedules),
        "early_bytes": max(resident[50:100]),
        "late_bytes": max(resident[-50:]),
        "seconds": time.perf_counter() - started,
    }


def compilations(count: int, disk: str) -> dict[str, Any]:
    """What the process holds after each of `count` compilations is deleted, from the second on.

    The first one also loads PyTorch's compiler, so the start is what is left after it.
    """
    resident, files, threads = [], [], []
    for _ in range(count + 1):
        training = Training(disk)
        training.step()
        training.step()
        del training
        gc.collect()
        resident.append(common.resident_bytes())
        files.append(common.open_files())
        threads.append(common.threads())
    return {
        "resident_bytes": resident,
        "files": (files[0], files[-1]),
        "threads": (threads[0], threads[-1]),
    }


def killed(disk: str) -> dict[str, Any]:
    """Files left in the disk's folder by a run that is killed in the middle of its steps."""
    with TemporaryDirectory(dir=disk) as folder:
        command = [sys.executable, __file__, "--endless", "--disk", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _ in range(3):
                child.stdout.readline()  # one line a step
            running = child.poll() is None
            child.send_signal(signal.SIGKILL)
            child.wait()
        left = [name for _, _, names in os.walk(folder) for name in names]
    return {"was_running": running, "files_left": left}


def shape_rows(entry: str, found: dict[str, Any]) -> list[tuple[str, str]]:
    growth = found["late_bytes"] / found["early_bytes"]
    return [
        (f"{entry}, {found['shapes']} shapes: schedules kept", str(found["schedules"])),
        common.check(f"{entry}: memory of the last 50 / of steps 50 to 100", growth, 1.01),
        (f"{entry}: took", f"{found['seconds']:.1f} s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compilations", type=int, default=10)
    parser.add_argument("--disk", default=".")
    parser.add_argument("--endless", action="store_true", help="train until killed")
    common.add_output_options(parser)
    args = parser.parse_args()
    if args.endless:
        training = Training(args.disk)
        while True:
            print(training.step(), flush=True)

    start = time.perf_counter()
    long = common.in_child(steps, args.steps, args.disk)
    changing = {
        entry: common.in_child(shapes, args.steps, args.disk, entry == "backend")
        for entry in ("compile", "backend")
    }
    again = common.in_child(compilations, args.compilations, args.disk)
    kill = killed(args.disk)
    resident = again["resident_bytes"]
    early, late = max(resident[:3]), max(resident[-3:])
    rows = [
        (
            f"{args.steps} steps: memory in steps 10 to 30, in the last 20",
            f"{sizes(long['early_bytes'])} {sizes(long['late_bytes'])}",
        ),
        common.check("late / early", long["late_bytes"] / long["early_bytes"], 1.01),
        ("open files, early and late", str(long["files"])),
        ("threads, early and late", str(long["threads"])),
        ("loss, first and last", str(long["losses"])),
        *(row for entry, found in changing.items() for row in shape_rows(entry, found)),
        (
            f"{args.compilations} compilations: memory after each was deleted, MiB",
            " ".join(f"{value / MIB:.0f}" for value in resident),
        ),
        common.check("most of the last 3 / of the first 3", late / early, 1.05),
        ("open files, first and last", str(again["files"])),
        ("threads, first and last", str(again["threads"])),
        ("killed while it was running", str(kill["was_running"])),
        ("files left behind by it", str(kill["files_left"])),
        ("all of this took", f"{time.perf_counter() - start:.0f} s"),
    ]
    numbers = {"steps": long, "shapes": changing, "compilations": again, "killed": kill}
    common.report("soak", args, rows, numbers)


if __name__ == "__main__":
    main()
