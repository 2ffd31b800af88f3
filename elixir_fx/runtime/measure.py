"""This machine as the planner sees it: rates by measuring, memory by asking.

`this_machine` fills a `Machine`. Rates take a second or two to measure and are kept as JSON
in the user's cache folder, by a fingerprint of what they depend on; memory is asked anew each
time. Rates that were measured while something else ran are not kept for good: each start has a
glance at the machine, and measures it again if that shows it much faster than it is written.
`measure_operators` times the operators of a graph and `OperatorCache` keeps their seconds by the
same fingerprint. Nothing here allocates more than the bytes it is given.
"""

import hashlib
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import disk_usage
from time import perf_counter

import torch

from elixir_fx.errors import PlanError, TierError
from elixir_fx.machine import Link, Machine, Tier
from elixir_fx.runtime.rates import (
    copy_links,
    disk_rates,
    flops_per_s,
    glance,
    stream_bytes_per_s,
    update_bytes_per_s,
)
from elixir_fx.units import MIB, sizes

VERSION = 3  # of what is measured and how: another one is measured again
MEASURE_BYTES = 256 * MIB  # of memory that measuring may take
LEAST_BYTES = MIB // 8  # below this nothing can be measured
FASTER = 1.5  # than what is kept, in compute and memory alike: that was measured under load
CPU_SHARE = 0.8  # of the memory left that is used unless the user says otherwise
REPEATS = 5  # of one operator, at most
REPEAT_S = 0.02  # after which one operator is not repeated any more
CACHED_OPERATORS = 50_000  # per fingerprint; the oldest go


def this_machine(
    device: torch.device,
    disk: Path | None,
    *,
    threads: int,
    memory_bytes: int = MEASURE_BYTES,
    ranks: int = 1,
) -> Machine:
    """The machine that `device` belongs to, with `disk` as its slowest tier.

    On a CPU the tiers are DEVICE (RAM) and, given a folder, DISK. On CUDA they are DEVICE,
    HOST and DISK. DEVICE of a CPU, and HOST, are 0.8 of the memory left over `ranks`
    processes; DISK is what its file system has free. `threads` compute threads are measured.
    TierError if the folder of `disk` cannot be used, or `memory_bytes` is under 128 KiB.
    """
    if memory_bytes < LEAST_BYTES:
        raise TierError(f"measuring takes {sizes(LEAST_BYTES)}; {sizes(memory_bytes)} are allowed")
    if disk is not None and not disk.is_dir():
        raise TierError(f"{disk} is not a folder: the disk tier needs one")
    name = _device_name(device)
    fingerprint = _fingerprint(name, disk, threads)
    file = cache_folder() / f"machine-{fingerprint}.json"
    machine = _cached(file)
    if machine is None or _was_busy(machine, device, threads, memory_bytes):
        here = torch.device("cpu")
        machine = Machine(
            name=name,
            fingerprint=fingerprint,
            device=device.type,
            memory={},
            links=_links(device, disk, threads, memory_bytes),
            flops_per_s=flops_per_s(device, threads, memory_bytes),
            stream_bytes_per_s=stream_bytes_per_s(device, threads, memory_bytes),
            update_stream_bytes_per_s=update_bytes_per_s(device, threads, memory_bytes),
            host_stream_bytes_per_s=0.0
            if device.type == "cpu"
            else update_bytes_per_s(here, threads, memory_bytes),
        )
        _store(file, lambda path: machine.save(path))
    return replace(machine, memory=_memory(device, disk, ranks))


def _was_busy(machine: Machine, device: torch.device, threads: int, memory_bytes: int) -> bool:
    """Whether something else must have run when this machine was measured. Both rates have to say
    so: a copy alone may be of memory that a cache holds."""
    flops, copied = glance(device, threads, memory_bytes)
    return flops > FASTER * machine.flops("float32") and copied > FASTER * (
        machine.stream_bytes_per_s
    )


def _links(
    device: torch.device, disk: Path | None, threads: int, memory_bytes: int
) -> tuple[Link, ...]:
    unified = device.type == "cpu"
    links: list[Link] = [] if unified else copy_links(device, memory_bytes)
    if disk is not None:
        rates = disk_rates(disk, threads, memory_bytes)
        memory = Tier.DEVICE if unified else Tier.HOST
        for source, target, rate, share in (
            (Tier.DISK, memory, rates.read_bytes_per_s, rates.read_compute_share),
            (memory, Tier.DISK, rates.write_bytes_per_s, rates.write_compute_share),
        ):
            links.append(
                Link(
                    source=source,
                    target=target,
                    bytes_per_s=rate,
                    shared_bytes_per_s=rates.both_bytes_per_s,
                    latency_s=rates.latency_s,
                    # An accelerator computes undisturbed while the CPU reads.
                    compute_share=share if unified else 0.0,
                )
            )
    return tuple(links)


def _memory(device: torch.device, disk: Path | None, ranks: int) -> dict[Tier, int]:
    ram = int(CPU_SHARE * memory_left()) // ranks
    if device.type == "cpu":
        memory = {Tier.DEVICE: ram}
    else:
        free, _ = torch.cuda.mem_get_info(device)
        memory = {Tier.DEVICE: int(free), Tier.HOST: ram}
    if disk is not None:
        memory[Tier.DISK] = disk_usage(disk).free
    return memory


def memory_left(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of RAM that this process may still take: what the system has available, or what
    its control group (version 1 or 2, or one above it) leaves if that is less. Page cache
    that the group could drop counts as left."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line}
        available = fields["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(0, min([available, *_group_left(proc, groups)]))


def _group_left(proc: Path, groups: Path) -> Iterable[int]:
    """What each control group from this process's up to the root leaves."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, limit, usage, cache = (
            (groups / "memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file")
            if controllers
            else (groups, "max", "current", "inactive_file")
        )
        here = root / path.strip("/")
        # In a container the path may be the host's; its own group is then the mount's root.
        for folder in (here, *here.parents):
            try:
                text = (folder / f"memory.{limit}").read_text().strip()
                used = int((folder / f"memory.{usage}").read_text())
                stat = (folder / "memory.stat").read_text().split()
                droppable = dict(zip(stat[::2], stat[1::2], strict=True)).get(cache, "0")
                if text != "max":
                    yield int(text) - used + int(droppable)
            except (OSError, ValueError):
                pass  # a group without this file limits nothing
            if folder == root:
                break


def measure_operators(
    specs: Iterable[tuple[str, Callable[[], object]]],
    seconds: float,
    on_progress: Callable[[str, float], object] | None = None,
    *,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Seconds of each callable by its key: the median of up to five runs after a first one.

    A callable that runs long is repeated less. It stops taking new ones when `seconds` are
    spent: what is missing in the result was not measured. A callable that runs out of memory
    is left out too. `on_progress(key, seconds)` is called after each.
    """
    measured: dict[str, float] = {}
    deadline = perf_counter() + seconds
    for key, operator in specs:
        if perf_counter() >= deadline:
            break
        if key in measured:
            continue
        try:
            measured[key] = _median_s(operator, device)
        except torch.OutOfMemoryError:
            continue
        if on_progress is not None:
            on_progress(key, measured[key])
    return measured


def _median_s(operator: Callable[[], object], device: torch.device | None) -> float:
    on_cuda = device is not None and device.type == "cuda"
    runs: list[float] = []
    warm = False
    while len(runs) < REPEATS and sum(runs) < REPEAT_S:
        if on_cuda:
            torch.cuda.synchronize(device)
        start = perf_counter()
        operator()
        if on_cuda:
            torch.cuda.synchronize(device)
        if warm:
            runs.append(perf_counter() - start)
        warm = True
    return statistics.median(runs)


class OperatorCache:
    """Measured seconds by operator key, kept as JSON for one fingerprint of a machine.

    Processes may share it: each `add` joins what is on disk by then and replaces the file as
    a whole. A file that cannot be read counts as empty, one that cannot be written is given
    up in silence: the cache saves time and nothing depends on it.
    """

    def __init__(self, fingerprint: str, folder: Path | None = None) -> None:
        self._file = (folder or cache_folder()) / f"operators-{fingerprint}.json"
        self._seconds = self._read()

    def __len__(self) -> int:
        return len(self._seconds)

    def get(self, key: str) -> float | None:
        """Seconds of an operator, None if it was never measured here."""
        return self._seconds.get(key)

    def known(self, keys: Iterable[str]) -> dict[str, float]:
        """The measured ones among `keys`."""
        return {key: self._seconds[key] for key in keys if key in self._seconds}

    def add(self, measured: Mapping[str, float]) -> None:
        """Keep `measured`; the oldest keys go when there are too many."""
        joined = {**self._read(), **self._seconds}
        for key, seconds in measured.items():
            joined.pop(key, None)
            joined[key] = seconds
        self._seconds = dict(list(joined.items())[-CACHED_OPERATORS:])
        _store(self._file, lambda path: path.write_text(json.dumps(self._seconds)))

    def _read(self) -> dict[str, float]:
        try:
            data = json.loads(self._file.read_text())
            return {str(key): float(seconds) for key, seconds in data.items() if seconds > 0}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}


def cache_folder() -> Path:
    """Where measurements are kept: $XDG_CACHE_HOME/elixir_fx, or ~/.cache/elixir_fx."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elixir_fx"


def _cached(file: Path) -> Machine | None:
    """The machine in `file`; None if there is none or it makes no sense."""
    try:
        machine = Machine.load(file)
        rates = [*machine.flops_per_s.values(), machine.stream_bytes_per_s]
        rates += [machine.update_stream_bytes_per_s]
        rates += [link.bytes_per_s for link in machine.links]
        rates += [link.shared_bytes_per_s for link in machine.links]
        sound = min(rates) > 0 and "float32" in machine.flops_per_s
    except (PlanError, TypeError, ValueError, AttributeError):
        return None
    return machine if sound else None


def _store(file: Path, write: Callable[[Path], object]) -> None:
    """Replace a file of the cache as a whole. A cache that cannot be written is not an error."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, fresh = tempfile.mkstemp(prefix=".fresh-", dir=file.parent)
        os.close(descriptor)
        try:
            write(Path(fresh))
            os.replace(fresh, file)
        except OSError:
            os.unlink(fresh)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("model name"))
        return found.split(":", 1)[1].strip()
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


def _fingerprint(name: str, disk: Path | None, threads: int) -> str:
    """A digest of all that the rates depend on."""
    parts = {
        "version": VERSION,
        "device": name,
        "host": _device_name(torch.device("cpu")),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": torch.__version__,
        "threads": threads,
        "disk": None if disk is None else os.stat(disk).st_dev,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
