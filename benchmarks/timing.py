"""How long a call takes on its device: by the device's own timestamps where there are any, else by the wall clock.

`python -m benchmarks.timing` times copies of known size, which shows whether the clock can be believed.
"""

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

WARM_UP_SECONDS = 0.02
"""A GPU that was idle, as it is while a kernel compiles, takes some milliseconds to raise its clocks."""

MIN_CALLS, MAX_CALLS = 10, 100


class Clock(enum.StrEnum):
    """What a time was read from."""

    DEVICE = "device timestamps of kernels (CUPTI)"
    EVENTS = "CUDA's events around calls in a row"
    HOST = "the host's clock around calls in a row that nobody waits for"
    WALL = "wall clock around a call, dispatch included"


@dataclasses.dataclass(frozen=True)
class Timing:
    """The median of several calls.

    Attributes:
      seconds: the median; by the device's clock, of the sum of a call's kernels.
      clock: what it was read from.
      calls: how many calls were timed.
      kernels: the kernels that each call launched; empty by the wall clock, which does not see them.
    """

    seconds: float
    clock: Clock
    calls: int
    kernels: tuple[str, ...] = ()


def measure(
    call: Callable[[int], Any], *, wait: Callable[[Any], Any] = jax.block_until_ready, max_seconds: float = 0.3
) -> Timing:
    """Times `call(0)`, `call(1)` and so on, after a warm-up that takes the first of these numbers.

    Args:
      call: starts one call; its number is there to choose among inputs, so that no cache holds them.
      wait: waits for what the last `call` returned, and so for all before it.
      max_seconds: for how long to repeat, within `MIN_CALLS` and `MAX_CALLS`.
    """
    numbers = itertools.count()
    wait(call(next(numbers)))  # compiles
    start, runs = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < WARM_UP_SECONDS or not runs:
        wait(call(next(numbers)))
        runs += 1
    calls = min(max(int(max_seconds * runs / elapsed), MIN_CALLS), MAX_CALLS)
    return _measure_on_device(call, wait, numbers, calls) or _measure_by_wall_clock(call, wait, numbers, calls)


def _measure_on_device(
    call: Callable[[int], Any], wait: Callable[[Any], Any], numbers: itertools.count[int], calls: int
) -> Timing | None:
    # jax.experimental.mosaic.gpu.profiler.measure repeats a call with the same arguments, which a donated cache does
    # not survive; hence what it is made of.
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
        records = cupti._cupti_get_timings(False)
    seconds, kernels = split_calls(records, calls)
    return Timing(statistics.median(seconds), Clock.DEVICE, calls, kernels)


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
    """Seconds of each call, and the kernels of each, from (kernel, milliseconds) in the order of launch.

    Raises:
      RuntimeError: the records are not those of so many equal calls.
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


def _measure_by_wall_clock(
    call: Callable[[int], Any], wait: Callable[[Any], Any], numbers: itertools.count[int], calls: int
) -> Timing:
    seconds = []
    for number in itertools.islice(numbers, calls):
        start = time.perf_counter()
        wait(call(number))
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds), Clock.WALL, calls)


if __name__ == "__main__":
    from benchmarks.peers import copy

    copy.print_rates()
