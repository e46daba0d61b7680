"""How long the end of Python waits for memory that JAX has of torch's."""

from __future__ import annotations

import subprocess
import sys
import threading
import types

import pytest

pytest.importorskip("torch")

import jax
import jax.numpy as jnp
from support.helpers import matrix

from kvjax_torch.sharing import exports
from kvjax_torch.sharing.exports import Export


class Clock:
    """Time that passes where somebody sleeps; at each of some times something happens.

    Attributes:
      slept: how long they slept, each time.
      happens: by time.
    """

    def __init__(self) -> None:
        self.slept, self.happens = [], {}

    def monotonic(self) -> float:
        return sum(self.slept)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        assert self.monotonic() < 10, "this is for ever"
        self.slept.append(seconds)
        for time in [time for time in self.happens if time <= self.monotonic()]:
            self.happens.pop(time)()


@pytest.fixture
def arrays(monkeypatch) -> list[jax.Array]:
    """JAX's, all that it has of a GPU; it has none of the CPU, and torch has lent nothing yet."""
    arrays = []
    monkeypatch.setattr(exports, "_exports", set())
    monkeypatch.setattr(Export, "was_made", False)
    monkeypatch.setattr(jax, "live_arrays", lambda platform: {"cuda": arrays, "cpu": []}[platform])
    return arrays


@pytest.fixture
def clock(monkeypatch, arrays) -> Clock:
    clock = Clock()
    monkeypatch.setattr(exports, "time", clock)
    return clock


def lent(*arrays: jax.Array) -> list[Export]:
    return [Export(array.unsafe_buffer_pointer(), "cuda") for array in arrays]


def alive() -> list[Export]:
    return [reference() for reference in exports._exports]


@pytest.fixture
def waited(clock):
    """For how long the end waited until this is asked, without what it always adds."""

    def waited() -> float:
        assert clock.slept[-1] == exports._RELEASE_TIME
        return pytest.approx(sum(clock.slept[:-1]), abs=0.002)

    return waited


def test_where_nothing_was_lent_nothing_waits(clock, monkeypatch):
    monkeypatch.setattr(jax, "live_arrays", lambda _: pytest.fail("JAX is asked, which may start it"))
    exports._wait()
    assert clock.slept == []


def test_where_everything_is_back_jax_is_not_asked(clock, waited, monkeypatch):
    """The thread that took it back may want Python once more all the same: a loan goes before all that goes with it."""
    monkeypatch.setattr(jax, "live_arrays", lambda _: pytest.fail("JAX is asked, which may start it"))
    Export(256, "cuda")
    exports._wait()
    assert waited() == 0


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_what_only_programs_read_is_waited_for(platform: str, clock, waited):
    both = [Export(256, platform), Export(512, platform)]
    clock.happens = {0.5: both.pop, 0.7: both.pop}
    exports._wait()
    assert both == alive() == []
    assert waited() == 0.7


def test_a_thread_takes_back_while_python_waits(arrays):
    given_back = [Export(256, "cuda")]
    threading.Timer(0.05, given_back.clear).start()
    exports._wait()
    assert alive() == []


def test_nobody_waits_for_ever(clock, waited):
    kept = Export(256, "cuda")
    exports._wait()
    assert alive() == [kept]
    assert waited() == exports._MAX_WAIT


def test_what_arrays_hold_is_not_waited_for(clock, waited, arrays):
    arrays += [jnp.zeros(4), jnp.ones(4), jnp.ones(5)]
    kept = lent(*arrays[:2])
    exports._wait()
    assert waited() == 0
    del arrays[0]  # of whose memory a program still reads
    clock.slept.clear()
    clock.happens = {0.5: lambda: kept.pop(0)}
    exports._wait()
    assert waited() == 0.5
    assert alive() == kept


def test_memory_lent_twice_is_held_by_two_arrays(clock, waited, arrays):
    arrays.append(jnp.zeros(4))
    kept = lent(arrays[0], arrays[0])
    clock.happens = {0.5: kept.pop}
    exports._wait()
    assert waited() == 0.5
    assert alive() == kept


def test_a_share_of_an_array_holds_what_was_lent(clock, waited, arrays):
    shares = [types.SimpleNamespace(data=jnp.zeros(4)) for _ in range(2)]
    arrays.append(types.SimpleNamespace(devices=lambda: {0, 1}, addressable_shards=shares))
    kept = lent(*(share.data for share in shares))
    exports._wait()
    assert waited() == 0
    assert len(kept) == len(alive()) == 2


def test_an_array_that_is_gone_holds_nothing(clock, waited, arrays):
    arrays += [jnp.zeros(4), jnp.ones(4)]
    kept = lent(*arrays)
    arrays[0].delete()
    clock.happens = {0.3: lambda: kept.pop(0)}
    exports._wait()
    assert waited() == 0.3
    assert alive() == kept


def test_other_threads_may_lend_meanwhile(arrays, monkeypatch):
    """One that Python does not wait for, say: it goes on to the very end."""
    lending, ended = [Export(256, "cuda")], threading.Event()

    def lend():
        while not ended.is_set():
            lending[1:] = [Export(number, "cuda") for number in range(20)]

    monkeypatch.setattr(exports, "_MAX_WAIT", 0.2)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=lend)
    thread.start()
    try:
        exports._wait()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)


PROGRAMS = {
    "cpu": "jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x), array)",
    "cuda": "array * rounds",
}
"""What still runs when Python ends: many rounds on a CPU; on a GPU anything, for that is kept busy before."""

# How Python ends, and what then is so, which would not be if the end waited less, or more.
ENDS = {
    "nobody_has_the_result": ("program(lend(), many)", "memory.expired()"),
    "the_result_is_kept": ("result = program(lend(), many)", "result.is_ready() and memory.expired()"),
    "results_of_several_programs_are_kept": (
        "results = [program(lend(), 20) for _ in range(4)]",
        "all(result.is_ready() for result in results) and memory.expired()",
    ),
    "memory_of_an_array_is_lent_again": (
        "tensor = new(); lend(); array = to_jax(tensor); result = program(to_jax(tensor), many)",
        "result.is_ready()",
    ),
    "an_array_is_kept": ("array = lend(); result = program(array, many)", "not result.is_ready()"),
    "an_alias_is_kept": (
        "array = jax.device_put(lend(), where); result = program(array, many)",
        "not result.is_ready()",
    ),
}


@pytest.mark.full
@matrix({"end": ENDS}, few={"end": ["results_of_several_programs_are_kept"]})
def test_python_ends_while_jax_reads_what_torch_lent(end: str, device: str):
    """With JAX and torch alone, an H200 aborts so in one to three of seven ends of the first kind, two cores in one."""
    last_call, so = ENDS[end]
    code = f"""
import atexit, os, jax, jax.numpy as jnp
atexit.register(lambda: {so} or os._exit(3))  # runs after what is registered from here on
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from kvjax_torch import to_jax
from kvjax_torch.sharing import exports

exports._MAX_WAIT = 1000  # longer than this test
program = jax.jit(lambda array, rounds: {PROGRAMS[device]})

def new():
    return torch.ones(512, 512, device="{device}")

def lend():
    global memory
    tensor = new()
    memory = StorageWeakRef(tensor.untyped_storage())
    if tensor.is_cuda:
        torch.cuda._sleep(1_000_000_000)  # half a second, in which Python ends
    return to_jax(tensor)

where, many = jax.devices("{device}")[0], 200
program(lend(), 1).block_until_ready()
{last_call}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr
