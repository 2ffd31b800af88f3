"""What the benchmarks share: the model, memory as the kernel sees it, fair timing, output.

Every script prints a table; `--json` prints the numbers instead and `--save` also writes them
to `results/`. Comparisons alternate between the two sides in one process and use medians of
ratios, so that a noisy machine disturbs both alike.
"""

import argparse
import gc
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
for folder in (HERE.parent, HERE.parents[1] / "tests"):
    sys.path.append(str(folder))  # train_gpt; harness (bit-exact comparison)

from train_gpt import GPT, Config, build, init_weights, text_batches  # noqa: E402

from elixir_fx.testing import MemoryGroupError, memory_group  # noqa: E402
from elixir_fx.units import GIB, MIB, sizes  # noqa: E402

__all__ = ["GIB", "GPT", "MIB", "Config", "build", "init_weights", "sizes", "text_batches"]

GPT_92M = Config(layers=12, width=768, heads=12, seq=512, vocab=8192, tied=True)
GPT_774M = Config(layers=36, width=1280, heads=20, seq=256, vocab=50257, tied=True)


# Memory


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most that it held since it began, or since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def start_torch_compiler() -> None:
    """Compile something trivial, so that PyTorch's own compiler is in memory and not counted."""
    layer = nn.Linear(4, 4)
    torch.compile(layer, backend="aot_eager")(torch.randn(2, 4)).sum().backward()


def state_bytes(model: nn.Module, states: int = 2) -> int:
    """Parameters, gradients and `states` optimizer states of each (AdamW: 2)."""
    return (2 + states) * sum(p.nbytes for p in model.parameters())


def saved_bytes(model: nn.Module, inputs: tuple[Any, ...]) -> int:
    """Bytes that plain PyTorch saves for backward, each storage once, parameters not counted.

    The model must be a real one: on meta, attention takes another path and saves more.
    """
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    alive: dict[int, torch.UntypedStorage] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            alive[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        output = model(*inputs)
    del output
    return sum(storage.nbytes() for storage in alive.values())


# A child process, in a memory control group or not


@dataclass(frozen=True)
class GroupRun:
    """What came of a command in a memory control group. `result` is its JSON, if it wrote any."""

    peak_bytes: int
    seconds: float
    result: dict[str, Any]


def run_in_group(arguments: list[str], limit_bytes: int) -> GroupRun:
    """Run one of these scripts with `arguments` in a group; its last line may be JSON.

    A shell waits until it is in the group and then becomes the script, so that all of Python
    is counted. Exits with a word on why where no group can be made.
    """
    shell = ["sh", "-c", 'read go && exec "$@"', "sh", sys.executable, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(shell, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            with memory_group(limit_bytes, child.pid) as group:
                start = time.perf_counter()
                output, _ = child.communicate("go\n")
                seconds = time.perf_counter() - start
                peak_bytes = group.peak_bytes
        except MemoryGroupError as error:
            child.kill()
            sys.exit(f"skipped: {error}")
    if child.returncode != 0:
        sys.exit(f"the run inside {sizes(limit_bytes)} ended with {child.returncode}")
    last = output.strip().splitlines()[-1:]
    result = json.loads(last[0]) if last and last[0].startswith("{") else {}
    return GroupRun(peak_bytes, seconds, result)


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a fresh process: what it imports and caches stays there."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# Time


def timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def alternate(
    actions: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of each action, the actions taking turns and turns changing order."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(warmup + rounds):
        names = list(actions) if turn % 2 == 0 else list(actions)[::-1]
        for name in names:
            gc.collect()
            taken = timed(actions[name])
            if turn >= warmup:
                seconds[name].append(taken)
    return seconds


def median_ratio(upper: list[float], lower: list[float]) -> float:
    """The median of the ratios of neighbouring measurements."""
    return statistics.median(a / b for a, b in zip(upper, lower, strict=True))


def disk_bandwidth(
    folder: str | Path, nbytes: int = 2 * GIB, block_bytes: int = 8 * MIB, workers: int = 2
) -> dict[str, float]:
    """Bytes per second of the disk under `folder`, past the page cache: write, read, mixed.

    `mixed` counts both directions, half of the workers reading and half writing. If the file
    system knows no direct I/O the figures are of the page cache, and `direct` is 0.
    """
    blocks = nbytes // block_bytes
    with TemporaryFile(dir=folder, buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, blocks * block_bytes)
        path = f"/proc/self/fd/{file.fileno()}"
        try:
            descriptor, direct = os.open(path, os.O_RDWR | os.O_DIRECT), 1.0
        except OSError:
            descriptor, direct = os.open(path, os.O_RDWR), 0.0
        buffers = [mmap.mmap(-1, block_bytes) for _ in range(2 * workers)]
        for buffer in buffers:
            buffer.write(os.urandom(block_bytes))

        def work(worker: int, step: int, writes: bool) -> None:
            for block in range(worker, blocks, step):
                if writes:
                    os.pwritev(descriptor, [buffers[worker]], block * block_bytes)
                else:
                    os.preadv(descriptor, [buffers[worker]], block * block_bytes)

        def rate(directions: list[bool]) -> float:
            count = len(directions)
            workers_ = [
                threading.Thread(target=work, args=(index, count, writes))
                for index, writes in enumerate(directions)
            ]
            start = time.perf_counter()
            for worker in workers_:
                worker.start()
            for worker in workers_:
                worker.join()
            return blocks * block_bytes / (time.perf_counter() - start)

        rate([True] * workers)  # first write allocates
        result = {
            "write": rate([True] * workers),
            "read": rate([False] * workers),
            "mixed": rate([True, False] * workers),
            "direct": direct,
        }
        os.close(descriptor)
        for buffer in buffers:
            buffer.close()
    return result


# Output


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON line")
    parser.add_argument("--save", action="store_true", help="also write results/NAME.json and .md")


def machine_line() -> str:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{os.cpu_count()} CPUs ({platform.machine()}), {memory_bytes / GIB:.0f} GiB, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


def report(
    name: str, args: argparse.Namespace, rows: list[tuple[str, str]], numbers: dict[str, Any]
) -> None:
    """Print `rows` (what, value) or `numbers`, and keep both if asked to."""
    numbers = {"benchmark": name, "machine": machine_line(), **numbers}
    width = max(len(what) for what, _ in rows)
    if args.json:
        print(json.dumps(numbers), flush=True)
    else:
        print(f"\n{name}: {machine_line()}")
        for what, value in rows:
            print(f"  {what:<{width}}  {value}")
    if args.save:
        folder = HERE / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
        table = "\n".join(f"| {what} | {value} |" for what, value in rows)
        title = f"# {name}\n\n{machine_line()}\n\n"
        (folder / f"{name}.md").write_text(f"{title}| measured | |\n|---|---|\n{table}\n")


def check(what: str, value: float, limit: float, *, at_least: bool = False) -> tuple[str, str]:
    """A row that says whether `value` keeps to `limit`."""
    good = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    return what, f"{value:.3f} (wanted {sign} {limit:.3f}: {'yes' if good else 'NO'})"
