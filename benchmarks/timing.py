"""Measures the time of a call by device timestamps if available, otherwise by the wall clock."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass
class Limits:
    min_calls: int = 50
    max_calls: int = 100
    warm_up_seconds: float = 0.02  # an idle GPU needs time to raise its clocks


LIMITS = Limits()
MAX_SECONDS = 0.3


def shorten() -> None:
    """Reduces repetitions to a minimum for smoke tests."""
    LIMITS.min_calls, LIMITS.max_calls, LIMITS.warm_up_seconds = 3, 3, 0.0


class Clock(enum.StrEnum):
    """The source of a time."""

    DEVICE = "CUPTI"
    EVENTS = "events"
    HOST = "host"
    WALL = "wall"


CLOCK_WORDS = {
    Clock.DEVICE: "device timestamps of kernels (CUPTI)",
    Clock.EVENTS: "CUDA's events around calls in a row",
    Clock.HOST: "the host's clock around back-to-back calls without synchronization",
    Clock.WALL: "wall clock around a call, dispatch included",
}
"""Descriptions of the clocks in tables."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """The times of several calls."""

    samples: tuple[float, ...]  # seconds per call; for device timestamps, the sum of its kernels
    clock: Clock
    kernels: tuple[str, ...] = ()  # kernels that each call launched, for device timestamps

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The 5th and 95th percentiles."""
        low, high = np.percentile(self.samples, (5, 95))
        return float(low), float(high)


def measure(
    call: Callable[[int], Any],
    *,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    calls: int | None = None,
) -> Timing:
    """Times `call(0)`, `call(1)` and so on; the first numbers warm up.

    Args:
      call: Starts a call. The number selects the inputs, so that they are not in a cache.
      wait: Waits for the result of the last call, and hence for all calls before it.
      calls: The number of calls; by default as many as take `MAX_SECONDS`, subject to `LIMITS`.
    """
    numbers = itertools.count()
    wait(call(next(numbers)))  # compiles
    start, runs = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < LIMITS.warm_up_seconds or not runs:
        wait(call(next(numbers)))
        runs += 1
    calls = calls or min(max(int(MAX_SECONDS * runs / elapsed), LIMITS.min_calls), LIMITS.max_calls)
    if (records := _kernel_records(call, wait, numbers, calls)) is None:
        seconds = []
        for number in itertools.islice(numbers, calls):
            start = time.perf_counter()
            wait(call(number))
            seconds.append(time.perf_counter() - start)
        return Timing(tuple(seconds), Clock.WALL)
    seconds, kernels = split_calls(records, calls)
    return Timing(tuple(seconds), Clock.DEVICE, kernels)


def _kernel_records(
    call: Callable[[int], Any], wait: Callable[[Any], Any], numbers: itertools.count[int], calls: int
) -> Sequence[tuple[str, float]] | None:
    """Returns (kernel, milliseconds) pairs of `calls` calls in launch order, or `None` without device timestamps."""
    # jax.experimental.mosaic.gpu.profiler.measure repeats a call with the same arguments, which is incompatible with
    # donation, so use its internals.
    cupti = _cupti()
    if cupti is None:
        return None
    try:
        cupti._cupti_init()
    except RuntimeError as error:  # another profiler is attached
        warnings.warn(f"timing by the wall clock: {error}", stacklevel=3)
        return None
    try:
        for number in itertools.islice(numbers, calls):
            result = call(number)
        wait(result)
    finally:
        records: Sequence[tuple[str, float]] = cupti._cupti_get_timings(False)
    return records


def _cupti() -> Any | None:
    if jax.default_backend() != "gpu":
        return None
    from jax.experimental.mosaic.gpu import profiler

    extension = getattr(getattr(profiler, "mosaic_gpu_lib", None), "_mosaic_gpu_ext", None)
    if hasattr(extension, "_cupti_init") and hasattr(extension, "_cupti_get_timings"):
        return extension
    warnings.warn(f"timing by the wall clock: jax {jax.__version__} gives no device timestamps", stacklevel=4)
    return None


def split_calls(records: Sequence[tuple[str, float]], calls: int) -> tuple[list[float], tuple[str, ...]]:
    """Splits (kernel, milliseconds) pairs in launch order into the seconds of each call and the kernels of a call.

    `RuntimeError` if the records are not those of `calls` equal calls.
    """
    kernels_a_call, rest = divmod(len(records), calls)
    if rest or not kernels_a_call:
        raise RuntimeError(f"got {len(records)} kernel timestamps, expected a positive multiple of {calls=}")
    names = tuple(name for name, _ in records[:kernels_a_call])
    seconds = []
    for first in range(0, len(records), kernels_a_call):
        group = records[first : first + kernels_a_call]
        if (others := tuple(name for name, _ in group)) != names:
            raise RuntimeError(f"got a call of kernels {others}, expected {names} in every call")
        seconds.append(sum(milliseconds for _, milliseconds in group) / 1e3)
    return seconds, names


def measure_in_a_row(
    call: Callable[[int], Any],
    *,
    wait: Callable[[Any], Any] = jax.block_until_ready,
    count: int = 50,
    samples: int = 11,
) -> Timing:
    """Times back-to-back calls that synchronize only at the end, bound by the host or the device."""
    count, samples = min(count, LIMITS.max_calls), min(samples, LIMITS.max_calls)
    wait(call(0))  # compiles
    seconds = []
    for _ in range(samples):
        start = time.perf_counter()
        for number in range(count):
            result = call(number)
        wait(result)
        seconds.append((time.perf_counter() - start) / count)
    return Timing(tuple(seconds), Clock.HOST)


def once_and_twice() -> tuple[Timing, Timing]:
    """Times some work and twice as much: memory traffic on a GPU, otherwise a sleep."""
    if jax.default_backend() == "gpu":
        work = jax.jit(jnp.invert)
        sizes = 1 << 26, 1 << 27  # 0.25 and 0.5 GiB exceed any L2
        few, many = (jnp.arange(count, dtype=jnp.uint32) for count in sizes)
        return measure(lambda _: work(few)), measure(lambda _: work(many))
    once = measure(lambda _: time.sleep(0.005), wait=lambda _: None, calls=15)
    return once, measure(lambda _: time.sleep(0.01), wait=lambda _: None, calls=15)
