"""report and units: what people read, against what it should look like."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from elixir_fx.errors import PlanError
from elixir_fx.machine import Tier
from elixir_fx.plan import Chunk, Forecast, Gather, Homes, Layout, Limits, Plan, Schedule, Slice
from elixir_fx.report.text import comparison_text, folded, plan_text, stats_text
from elixir_fx.units import GIB, MIB, parse_size, rates, sizes, times


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (12, 12),
        (0, 0),
        ("512", 512),
        ("8GiB", 8 * GIB),
        (" 1.5 mib ", 3 * MIB // 2),
        ("3KB", 3000),
        ("2 TB", 2 * 10**12),
        (".5KiB", 512),
        ("7B", 7),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes_are_read(text: int | str, nbytes: int):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 zb", "1e3", "1GiB2", -3, 2.5, True, None])
def test_what_is_no_size_is_refused(text: object):
    with pytest.raises(PlanError, match=r"not a size|cannot be negative"):
        parse_size(text)  # type: ignore[arg-type]


def test_sizes_and_times_are_written():
    assert [sizes(n) for n in (0, 999, 2048, 28.3 * MIB, 999 * MIB, GIB, -3 * GIB)] == [
        "0 B",
        "999 B",
        "2.0 KiB",
        "28.3 MiB",
        "999.0 MiB",
        "1.0 GiB",
        "-3.0 GiB",
    ]
    assert [times(s) for s in (0, 3e-6, 0.0123, 1.5, 61)] == [
        "0.0 ms",
        "3.0 us",
        "12.3 ms",
        "1500.0 ms",
        "61.0 s",
    ]
    assert rates(2 * GIB) == "2.0 GiB/s"


def chunk(
    number: int, paths: Sequence[str], mib: int, home: Tier = Tier.DISK, trainable: bool = True
) -> Chunk:
    span = mib * MIB // 4 // len(paths)
    return Chunk(
        id=number,
        dtype="float32",
        itemsize=4,
        numel=mib * MIB // 4,
        trainable=trainable,
        homes=Homes(parameters=home, gradients=home, states=Tier.DISK),
        slices=tuple(
            Slice(path=path, offset=index * span, span=span, shape=(span,), strides=(1,))
            for index, path in enumerate(paths)
        ),
    )


def gpt_chunks(layers: int) -> list[Chunk]:
    chunks = [chunk(0, ["wte.weight"], 160, Tier.DEVICE, trainable=False)]
    for layer in range(layers):
        attention = [f"layers.{layer}.attn.qkv.weight", f"layers.{layer}.attn.proj.bias"]
        chunks.append(chunk(1 + 2 * layer, attention, 16))
        chunks.append(chunk(2 + 2 * layer, [f"layers.{layer}.mlp.0.weight"], 32))
    return chunks


FORECAST = Forecast(
    step_s=1.25,
    compute_s=1.0,
    optimizer_s=0.1,
    exposed_s=0.15,
    lower_bound_s=1.2,
    peak_device_bytes=3 * GIB,
    peak_host_bytes=0,
    disk_read_bytes=GIB,
    disk_write_bytes=GIB // 2,
    host_to_device_bytes=0,
    device_to_host_bytes=0,
    gathered_bytes=96 * MIB,
    reduced_bytes=48 * MIB,
    prefetch_hits=3,
    prefetch_misses=0,
    peak_node="mm_12",
    exposed=(("disk->device", 0.1), ("update", 0.05)),
    largest=(("logits", 8 * MIB),),
)


def plan_of(chunks: Sequence[Chunk]) -> Plan:
    gather = Gather(
        chunk=1, backward=False, offset=0, before="mm", after="mm_1", prefetch=None, kept=False
    )
    return Plan(
        machine="AMD EPYC",
        limits=Limits(device=4 * GIB, disk=80 * GIB),
        layout=Layout(
            chunks=tuple(chunks),
            gather_bytes=64 * MIB,
            gradient_blocks=2,
            gradient_block_bytes=32 * MIB,
            update_numel=1 << 20,
            arena_bytes=128 * MIB,
            host_bytes=0,
            disk_bytes=5 * GIB,
        ),
        schedules=(
            Schedule(
                key="k",
                trains=True,
                gathers=(gather, replace(gather, kept=True)),
                reduces=(),
                forecast=FORECAST,
            ),
        ),
        notes=("the disk is half duplex [measured]",),
    )


EXPECTED = """\
plan for AMD EPYC
chunks       holds                                        count   dtype                 each       total   param    grad   states
─────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
0            wte.weight                                      x1   float32 frozen   160.0 MiB   160.0 MiB   device   -      -
1, 3 .. 71   layers.0..35.attn: qkv.weight .. proj.bias     x36   float32           16.0 MiB   576.0 MiB   disk     disk   disk
2, 4 .. 72   layers.0..35.mlp.0.weight                      x36   float32           32.0 MiB     1.1 GiB   disk     disk   disk
parameters: 1.8 GiB in 73 chunks: 160.0 MiB on device, 1.7 GiB on disk
memory   planned     budget   used
─────────────────────────────────────────────────────────────────────────────────────────────────────
device   3.0 GiB    4.0 GiB    75%   arena 128.0 MiB: gathered 64.0 MiB, gradient blocks 2 x 32.0 MiB
disk     5.0 GiB   80.0 GiB     6%
graph 0 (training): step 1250.0 ms, compute 1000.0 ms, optimizer 100.0 ms, exposed 150.0 ms
  at least 1200.0 ms under these budgets: gap 4.2%
  moves: 1 gathers (96.0 MiB), 0 reduces (48.0 MiB), disk reads 1.0 GiB, disk writes 512.0 MiB
  exposed: disk->device 100.0 ms, update 50.0 ms
  peak 3.0 GiB at mm_12
  largest: logits 8.0 MiB
note: the disk is half duplex [measured]
"""  # noqa: E501


def test_a_plan_fits_a_screen():
    assert plan_text(plan_of(gpt_chunks(36))) == EXPECTED


def test_where_chunks_are_updated_is_shown_if_any_is_on_the_host():
    chunks = gpt_chunks(4)
    chunks[5] = replace(chunks[5], update=Tier.HOST)
    rows = plan_text(plan_of(chunks)).splitlines()[1:]
    assert rows[0].endswith("states   update")
    updates = [row.split()[-1] for row in rows[2:] if "layers" in row or "wte" in row]
    assert updates == ["-", "device", "device", "host", "device", "device", "device"]


def test_folding_keeps_every_chunk_once_and_in_order():
    chunks = gpt_chunks(5)
    # Another size in the middle breaks the pattern in two.
    chunks[5] = chunk(5, ["layers.2.attn.qkv.weight", "layers.2.attn.proj.bias"], 17)
    folds = folded(chunks)
    assert sorted(chunk.id for fold in folds for chunk in fold.chunks) == list(range(11))
    assert [(fold.ids, len(fold.chunks)) for fold in folds] == [
        ("0", 1),
        ("1, 3", 2),
        ("2, 4", 2),
        ("5", 1),
        ("6, 8", 2),
        ("7, 9", 2),
        ("10", 1),
    ]


def test_equal_chunks_of_other_names_fold_too():
    paths = [["a.x", "b.y"], ["b.z", "c.x"], ["c.y", "d.w"]]
    (fold,) = folded([chunk(4 + index, pair, 8) for index, pair in enumerate(paths)])
    assert (fold.ids, fold.title) == ("4..6", "a.x .. d.w")


def test_a_plan_that_keeps_everything_and_has_no_bound():
    plan = plan_of([])
    bare = replace(plan.layout, arena_bytes=0, gather_bytes=0)
    forecast = replace(FORECAST, lower_bound_s=0.0, exposed=(), largest=(), peak_node="")
    schedule = replace(plan.schedules[0], trains=False, gathers=(), forecast=forecast)
    text = plan_text(replace(plan, layout=bare, schedules=(schedule,), notes=()))
    assert "parameters: 0 B in 0 chunks: none" in text and "graph 0 (forward only)" in text
    assert "arena" not in text and "at least" not in text and "largest" not in text


STATS = {
    "step_s": 1.3,
    "peak_device_bytes": 3 * GIB,
    "prefetch_hits": 3,
    "prefetch_misses": 1,
    "private": 2,
}


def test_stats():
    assert stats_text(STATS) == (
        "step                 measured\n"
        "─────────────────────────────\n"
        "step_s              1300.0 ms\n"
        "peak_device_bytes     3.0 GiB\n"
        "prefetch_hits               3\n"
        "prefetch_misses             1\n"
        "private                     2"
    )


def test_the_forecast_beside_what_was_measured():
    assert comparison_text(FORECAST, STATS) == (
        "step                 forecast    measured   measured/forecast\n"
        "─────────────────────────────────────────────────────────────\n"
        "step_s              1250.0 ms   1300.0 ms                1.04\n"
        "peak_device_bytes     3.0 GiB     3.0 GiB                1.00\n"
        "prefetch_hits               3           3                1.00\n"
        "prefetch_misses             0           1                   -"
    )
