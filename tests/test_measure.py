"""measure: a machine is filled once, its memory each time, and broken caches are no matter."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from elixir_fx.errors import TierError
from elixir_fx.machine import Machine, Tier
from elixir_fx.runtime import measure, rates
from elixir_fx.runtime.measure import OperatorCache, measure_operators, memory_left, this_machine
from elixir_fx.units import MIB

CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of its own, and experiments that are short."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rates, "EXPERIMENT_S", 0.01)
    monkeypatch.setattr(rates, "MATMUL_S", 1e-4)
    monkeypatch.setattr(rates, "LARGE_MATMUL", 64)
    monkeypatch.setattr(rates, "FILE_BYTES", 32 * MIB)
    return tmp_path / "cache" / "elixir_fx"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever compute is measured."""
    calls: list[str] = []
    real = measure.flops_per_s

    def flops(device: torch.device, threads: int, memory_bytes: int) -> dict[str, float]:
        calls.append("measured")
        return real(device, threads, memory_bytes)

    monkeypatch.setattr(measure, "flops_per_s", flops)
    return calls


def test_a_cpu_with_a_disk(quick: Path, tmp_path: Path):
    threads = torch.get_num_threads()
    machine = this_machine(CPU, tmp_path, threads=1, memory_bytes=64 * MIB)
    assert torch.get_num_threads() == threads
    assert machine.unified and machine.device == "cpu"
    assert set(machine.memory) == {Tier.DEVICE, Tier.DISK}
    assert (
        0
        < machine.memory[Tier.DEVICE]
        <= 0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    assert set(machine.flops_per_s) == {"float32", "bfloat16"}
    assert machine.flops("float32") > 1e8 and machine.stream_bytes_per_s > 1e8
    assert machine.update_bytes_per_s(Tier.DEVICE) == machine.update_stream_bytes_per_s > 1e8
    assert machine.host_stream_bytes_per_s == 0  # host and device are one memory
    read = machine.link(Tier.DISK, Tier.DEVICE)
    write = machine.link(Tier.DEVICE, Tier.DISK)
    assert len(machine.links) == 2
    for link in (read, write):
        assert link.bytes_per_s > 1e6 and 0 < link.latency_s < 1
        assert 0 <= link.compute_share <= 0.95
    assert read.shared_bytes_per_s == write.shared_bytes_per_s > 0
    # The measured file is gone, the cache holds the machine.
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]
    assert Machine.load(quick / f"machine-{machine.fingerprint}.json").links == machine.links


def test_without_a_disk_there_is_no_disk_tier(quick: Path):
    machine = this_machine(CPU, None, threads=1)
    assert set(machine.memory) == {Tier.DEVICE} and machine.links == ()


def test_little_memory_is_enough(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    real = torch.ones

    def ones(*shape: int, **options: object) -> torch.Tensor:
        made = real(*shape, **options)
        asked.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "ones", ones)
    machine = this_machine(CPU, tmp_path, threads=1, memory_bytes=MIB // 8)
    assert len(machine.links) == 2 and asked and max(asked) <= MIB // 16
    with pytest.raises(TierError, match=r"measuring takes 0\.1 MiB; 1\.0 KiB are allowed"):
        this_machine(CPU, tmp_path, threads=1, memory_bytes=1024)


def test_rates_are_kept_and_memory_is_asked_again(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = counted(monkeypatch)
    first = this_machine(CPU, tmp_path, threads=1)
    monkeypatch.setattr(measure, "memory_left", lambda: 1000)
    second = this_machine(CPU, tmp_path, threads=1, ranks=2)
    assert calls == ["measured"]
    assert second.memory[Tier.DEVICE] == 400
    assert (second.links, second.flops_per_s) == (first.links, first.flops_per_s)
    other = this_machine(CPU, tmp_path, threads=2)
    assert calls == ["measured"] * 2 and other.fingerprint != first.fingerprint


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "stream_bytes_per_s": 0}),
        lambda text: json.dumps({**json.loads(text), "stream_bytes_per_s": "fast"}),
        lambda text: json.dumps({**json.loads(text), "update_stream_bytes_per_s": 0}),
        lambda text: json.dumps({**json.loads(text), "flops_per_s": {}}),
    ],
)
def test_a_corrupt_cache_is_measured_again(
    quick: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[str], str]
):
    calls = counted(monkeypatch)
    machine = this_machine(CPU, None, threads=1)
    file = quick / f"machine-{machine.fingerprint}.json"
    file.write_text(damage(file.read_text()))
    assert this_machine(CPU, None, threads=1).flops("float32") > 0
    assert len(calls) == 2
    this_machine(CPU, None, threads=1)
    assert len(calls) == 2 and [entry.name for entry in quick.iterdir()] == [file.name]


def test_a_machine_that_was_measured_under_load_is_measured_again(
    quick: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = counted(monkeypatch)
    machine = this_machine(CPU, None, threads=1)
    flops, copied = machine.flops("float32"), machine.stream_bytes_per_s
    for factors, measured in (((1.0, 1.0), 1), ((9.0, 1.4), 1), ((1.4, 9.0), 1), ((1.6, 1.6), 2)):
        seen = (flops * factors[0], copied * factors[1])
        monkeypatch.setattr(measure, "glance", lambda *_, seen=seen: seen)
        again = this_machine(CPU, None, threads=1)
        assert len(calls) == measured
        assert (again == machine) == (measured == 1)
    # What was measured again is what is kept.
    monkeypatch.setattr(measure, "glance", lambda *_: (0.0, 0.0))
    kept = this_machine(CPU, None, threads=1)
    assert kept.flops_per_s == again.flops_per_s and len(calls) == 2


def test_a_glance_is_a_product_and_a_copy(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    real = torch.ones

    def ones(*shape: int, **options: object) -> torch.Tensor:
        made = real(*shape, **options)
        asked.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "ones", ones)
    threads = torch.get_num_threads()
    for memory_bytes in (MIB // 8, 256 * MIB):
        asked.clear()
        flops, copied = rates.glance(CPU, 1, memory_bytes)
        assert flops > 1e7 and copied > 1e7 and torch.get_num_threads() == threads
        assert sum(asked[:2]) <= memory_bytes and sum(asked[2:]) <= memory_bytes


def test_a_cache_that_cannot_be_written_is_no_error(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert this_machine(CPU, None, threads=1).flops("float32") > 0
    cache = OperatorCache("f")
    cache.add({"mm": 1.0})
    assert cache.get("mm") == 1.0


def test_a_disk_without_direct_io_is_measured_through_the_cache(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    machine = this_machine(CPU, tmp_path, threads=1)
    assert machine.link(Tier.DISK, Tier.DEVICE).bytes_per_s > 1e6


def test_a_disk_that_is_unfit_is_refused(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(TierError, match="is not a folder"):
        this_machine(CPU, tmp_path / "absent", threads=1)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(TierError, match=r"disk=.*No space left"):
        this_machine(CPU, tmp_path, threads=1)
    monkeypatch.setattr(rates, "FILE_BYTES", MIB)
    with pytest.raises(TierError, match="too little for a disk tier"):
        this_machine(CPU, tmp_path, threads=1)
    assert [entry.name for entry in tmp_path.iterdir()] == []


def test_an_error_in_the_streaming_thread_arrives(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = os.preadv
    monkeypatch.setattr(rates, "EXPERIMENT_S", 0.05)
    count = 0

    def fails_later(*arguments: object) -> int:
        nonlocal count
        count += 1
        if count > 5:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", fails_later)
    with pytest.raises(TierError, match="Input/output error"):
        this_machine(CPU, tmp_path, threads=1)


MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\n"


def system(root: Path, cgroup: str, files: dict[str, str]) -> int:
    """What memory_left says of a made-up /proc and /sys/fs/cgroup."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(MEMINFO)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        file = root / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return memory_left(root / "proc", root / "groups")


def test_memory_left_is_the_least_of_system_and_groups(tmp_path: Path):
    def group(folder: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
        return {
            f"{folder}memory.max": f"{limit}\n",
            f"{folder}memory.current": f"{used}\n",
            f"{folder}memory.stat": f"anon 5\ninactive_file {cache}\n",
        }

    assert system(tmp_path / "a", "0::/\n", {}) == 800 * 1024
    assert system(tmp_path / "b", "0::/x/y\n", group("x/y/", "max", 5)) == 800 * 1024
    # The group's own limit is loose, the one above it tight; cache counts as left.
    both = {**group("x/y/", "700000", 1000), **group("x/", "500000", 100000, 50000)}
    assert system(tmp_path / "c", "0::/x/y\n", both) == 450000
    assert system(tmp_path / "d", "0::/x\n", group("x/", "1000", 5000)) == 0
    # In a container: the path is the host's, the limit is at the mount's root.
    assert system(tmp_path / "e", "0::/docker/abc\n", group("", "600", 100)) == 500
    first = {
        "memory/z/memory.limit_in_bytes": "4000",
        "memory/z/memory.usage_in_bytes": "3000",
        "memory/z/memory.stat": "total_inactive_file 500\n",
    }
    assert system(tmp_path / "f", "4:memory:/z\n1:cpu:/q\n0::/\n", first) == 1500


def test_operators_are_timed_within_the_seconds_given():
    ran: list[str] = []

    def operator(name: str, seconds: float = 0.0) -> Callable[[], object]:
        def run() -> None:
            ran.append(name)
            time.sleep(seconds)

        return run

    seen: list[tuple[str, float]] = []
    specs = [("fast", operator("fast")), ("slow", operator("slow", 0.03)), ("fast", operator("no"))]
    measured = measure_operators(specs, 10.0, lambda key, seconds: seen.append((key, seconds)))
    assert list(measured) == ["fast", "slow"] and seen == list(measured.items())
    assert measured["slow"] >= 0.03 > measured["fast"] >= 0
    assert ran == ["fast"] * 6 + ["slow"] * 2  # one warm-up; a long one is not repeated

    late = measure_operators([("a", operator("a", 0.02)), ("b", operator("b"))], 0.01)
    assert list(late) == ["a"] and "b" not in ran


def test_an_operator_out_of_memory_is_left_out():
    def hungry() -> None:
        raise torch.OutOfMemoryError("too much")

    assert list(measure_operators([("x", hungry), ("y", lambda: None)], 1.0)) == ["y"]


def test_the_operator_cache_joins_what_others_wrote(tmp_path: Path):
    one, other = (OperatorCache("print", tmp_path) for _ in range(2))
    one.add({"mm": 1.0, "add": 2.0})
    other.add({"mm": 3.0, "mul": 4.0})
    assert other.known(["mm", "add", "mul", "sub"]) == {"mm": 3.0, "add": 2.0, "mul": 4.0}
    again = OperatorCache("print", tmp_path)
    assert len(again) == 3 and again.get("add") == 2.0 and again.get("sub") is None
    assert len(OperatorCache("another", tmp_path)) == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_the_operator_cache_is_bounded_and_survives_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measure, "CACHED_OPERATORS", 3)
    cache = OperatorCache("print", tmp_path)
    cache.add(dict.fromkeys("abcd", 1.0))
    cache.add({"b": 2.0, "e": 1.0})
    assert OperatorCache("print", tmp_path).known("abcde") == {"d": 1.0, "b": 2.0, "e": 1.0}
    (file,) = tmp_path.iterdir()
    for text in ("{", "[1]", '{"a": "x"}', "null"):
        file.write_text(text)
        assert len(OperatorCache("print", tmp_path)) == 0
