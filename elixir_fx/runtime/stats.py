"""Statistics of the last step, measured where things happen.

A step runs from the end of one optimizer step to the end of the next. Seconds are the wall
clock's; bytes moved are the store's counters; device bytes are counted in the first run of
each captured graph, over every storage that its operators make, on top of what always stays.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from elixir_fx.machine import Machine, Tier
from elixir_fx.plan import Limits
from elixir_fx.runtime.engine import Engine
from elixir_fx.runtime.meter import DeviceMeter
from elixir_fx.runtime.store import Counters

NAMES = (
    "step_s",
    "compute_s",
    "optimizer_s",
    "exposed_s",
    "peak_device_bytes",
    "peak_host_bytes",
    "disk_read_bytes",
    "disk_write_bytes",
    "host_to_device_bytes",
    "device_to_host_bytes",
    "gathered_bytes",
    "reduced_bytes",
    "prefetch_hits",
    "prefetch_misses",
)

SIZES = 512  # halves of steps, at different sizes of inputs, whose peaks are remembered


class Stats:
    """Collects while steps run; `last` is the flat dict of the last whole step."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._bounded = False  # a played accelerator: its memory has a hard limit
        self._limit_bytes = 0
        self._peaks: dict[object, int] = {}
        self._begin_s = time.perf_counter()
        self._busy_s = 0.0
        self._peak = 0
        self._counted = Counters()
        self._marks: dict[str, float] = {}
        self.last: dict[str, float] = dict.fromkeys(NAMES, 0)

    def start(self, engine: Engine, limits: Limits, machine: Machine) -> None:
        """Begin to count for an engine."""
        self._engine = engine
        self._peaks.clear()
        self._bounded = machine.emulated
        self._limit_bytes = limits.device
        self._mark()

    @contextmanager
    def half(
        self, run: object, saved: list[Tensor], spare_bytes: int, held_bytes: int
    ) -> Iterator[None]:
        """Around one half of a step. `run` names it and the sizes of its inputs; `saved` are the
        forward's values that the backward takes and is emptied; `spare_bytes` may be used
        beyond the budget, by outputs; `held_bytes` are other graphs' activations."""
        engine = self._engine
        assert engine is not None
        started = time.perf_counter()
        key = (run, engine.gradient_mode())
        held = engine.gradient_bytes()
        if key in self._peaks and not self._bounded:
            saved.clear()
            with engine.lending(held + self._peaks[key]):
                yield
        else:
            limit = self._limit_bytes - engine.constant_bytes() - held + spare_bytes
            meter = DeviceMeter(limit if self._bounded else None)
            meter.adopt(saved)
            saved.clear()
            meter.adopt(engine.recycler.blocks())
            engine.recycler.shrink_idle(0)
            with meter, engine.watched_memory():
                yield
            peak = max(self._peaks.pop(key, 0), meter.peak_bytes)
            self._peaks[key] = peak  # the latest last
            if len(self._peaks) > SIZES:
                del self._peaks[next(iter(self._peaks))]
        self._busy_s += time.perf_counter() - started
        self._peak = max(self._peak, self._peaks[key] + held + held_bytes)

    def end_step(self) -> None:
        """The optimizer has finished a step."""
        engine = self._engine
        if engine is None:
            return
        now = time.perf_counter()
        counters, cache = engine.store.counters.snapshot(), engine.cache
        waited = cache.waited_s + engine.reducer.waited_s - self._marks["waited"]
        optimizer_s = engine.optimizer_s - self._marks["optimizer"]
        before = self._counted
        self.last = {
            "step_s": now - self._begin_s,
            "compute_s": self._busy_s - waited,
            "optimizer_s": optimizer_s,
            "exposed_s": waited + optimizer_s,
            "peak_device_bytes": self._peak + engine.constant_bytes(),
            "peak_host_bytes": engine.store.used(Tier.HOST),
            "disk_read_bytes": counters.disk_read_bytes - before.disk_read_bytes,
            "disk_write_bytes": counters.disk_write_bytes - before.disk_write_bytes,
            "host_to_device_bytes": counters.host_to_device_bytes - before.host_to_device_bytes,
            "device_to_host_bytes": counters.device_to_host_bytes - before.device_to_host_bytes,
            "gathered_bytes": cache.gathered_bytes - self._marks["gathered"],
            "reduced_bytes": engine.reducer.reduced_bytes - self._marks["reduced"],
            "prefetch_hits": cache.hits - self._marks["hits"],
            "prefetch_misses": cache.misses - self._marks["misses"],
        }
        self._mark()

    def _mark(self) -> None:
        engine = self._engine
        assert engine is not None
        self._begin_s = time.perf_counter()
        self._busy_s, self._peak = 0.0, 0
        self._counted = engine.store.counters.snapshot()
        self._marks = {
            "waited": engine.cache.waited_s + engine.reducer.waited_s,
            "optimizer": engine.optimizer_s,
            "gathered": engine.cache.gathered_bytes,
            "reduced": engine.reducer.reduced_bytes,
            "hits": engine.cache.hits,
            "misses": engine.cache.misses,
        }
