"""The made-up machine and the memory limit that other tests lean on."""

import subprocess
import sys
from dataclasses import replace

import pytest

from elixir_fx.errors import PlanError
from elixir_fx.machine import HOMES, Machine, Tier
from elixir_fx.testing import MemoryGroupError, emulated, memory_group

MIB = 1 << 20


def test_emulated_is_a_machine_with_links_both_ways(tmp_path):
    machine = emulated(device_memory=1, host_memory=2, disk_memory=3, bytes_per_s=10.0)
    assert machine.emulated and not machine.unified
    assert machine.memory == {Tier.DEVICE: 1, Tier.HOST: 2, Tier.DISK: 3}
    for source in HOMES:
        for target in HOMES:
            if source != target:
                assert machine.link(source, target).bytes_per_s > 0
    assert machine.link(Tier.HOST, Tier.DEVICE).shared_bytes_per_s == 20.0
    machine.save(tmp_path / "machine.json")
    assert (
        Machine.load(tmp_path / "machine.json")
        == machine
        == emulated(device_memory=1, host_memory=2, disk_memory=3, bytes_per_s=10.0)
    )


def test_an_optimizer_on_the_host_has_a_rate_of_its_own():
    without, with_one = emulated(), emulated(host_stream_bytes_per_s=3e9)
    assert not without.updates_on_host and with_one.updates_on_host
    assert with_one.update_bytes_per_s(Tier.HOST) == 3e9
    assert with_one.update_bytes_per_s(Tier.DEVICE) == without.update_bytes_per_s(Tier.DEVICE)


def test_without_a_disk_there_is_no_link_to_one():
    with pytest.raises(PlanError, match="no link from disk"):
        emulated(device_memory=1, host_memory=2).link(Tier.DISK, Tier.HOST)


def test_a_memory_group_measures_and_limits_a_child():
    program = "import sys; sys.stdin.readline(); data = bytes(b'x' * int(sys.argv[1])); print('ok')"

    def run(nbytes: int) -> tuple[str, int]:
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            with memory_group(64 * MIB, child.pid) as group:
                output, _ = child.communicate("go\n")
                peak_bytes = group.peak_bytes
        finally:
            child.kill()
            child.communicate()
        assert not group.folder.exists()
        return output, peak_bytes

    try:
        output, peak_bytes = run(16 * MIB)
    except MemoryGroupError as reason:
        pytest.skip(str(reason))
    assert output == "ok\n" and 16 * MIB <= peak_bytes <= 64 * MIB
    assert run(256 * MIB)[0] == ""  # killed


def test_an_accelerator_like_a_measured_machine_computes_as_fast_as_that():
    here = replace(
        emulated(flops_per_s=3e11, stream_bytes_per_s=4e10),
        fingerprint="measured",
        update_stream_bytes_per_s=5e9,
    )
    played = emulated(bytes_per_s=2e9, like=here)
    assert played.emulated and played.fingerprint == "measured"
    assert played.flops("float32") == 3e11 and played.stream_bytes_per_s == 4e10
    assert played.update_bytes_per_s(Tier.DEVICE) == 5e9
    assert played.link(Tier.HOST, Tier.DEVICE).bytes_per_s == 2e9
    assert not emulated().fingerprint  # nothing was measured: nothing is timed
