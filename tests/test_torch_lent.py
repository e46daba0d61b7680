"""How long the end of Python waits for memory that JAX has of torch's: with the GPU taken away, and on one."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
import weakref

import pytest

pytest.importorskip("torch")

import jax
import jax.numpy as jnp

from kvjax_torch import lent
from kvjax_torch.lent import Lent


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
        self.slept.append(seconds)
        for time in [time for time in self.happens if time <= self.monotonic()]:
            self.happens.pop(time)()


@pytest.fixture
def arrays(monkeypatch) -> list[jax.Array]:
    """JAX's, all that it has of a GPU; nothing is lent yet."""
    arrays = []
    monkeypatch.setattr(lent, "_lent", weakref.WeakSet())
    monkeypatch.setattr(Lent, "ever", False)
    monkeypatch.setattr(jax, "live_arrays", lambda platform: {"gpu": arrays}[platform])
    return arrays


@pytest.fixture
def clock(monkeypatch, arrays) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lent, "time", clock)
    return clock


def test_where_nothing_was_lent_nothing_waits(clock, monkeypatch):
    monkeypatch.setattr(jax, "live_arrays", lambda _: pytest.fail("JAX is asked, which may start it"))
    lent._wait()
    assert clock.slept == []


def test_what_only_programs_read_is_waited_for(clock):
    both = [Lent(256), Lent(512)]
    clock.happens = {0.5: both.pop, 0.7: both.pop}
    lent._wait()
    assert both == []
    assert clock.monotonic() == pytest.approx(0.7 + lent._TO_TAKE_BACK, abs=0.002)


def test_a_thread_takes_back_while_python_waits(arrays):
    given_back = [Lent(256)]
    threading.Timer(0.05, given_back.clear).start()
    lent._wait()
    assert not lent._lent


def test_the_thread_that_takes_back_may_want_python_once_more(clock):
    """What was lent is gone before all that goes with it."""
    Lent(256)
    lent._wait()
    assert clock.slept == [lent._TO_TAKE_BACK]


def test_nobody_waits_for_ever(clock):
    kept = Lent(256)
    lent._wait()
    assert [*lent._lent] == [kept]
    assert clock.monotonic() == pytest.approx(lent._LONGEST_END + lent._TO_TAKE_BACK, abs=0.002)


def test_what_arrays_hold_is_not_waited_for(clock, arrays):
    arrays += [jnp.zeros(4), jnp.ones(4)]
    kept = [Lent(array.unsafe_buffer_pointer()) for array in arrays]
    lent._wait()
    assert clock.slept == [lent._TO_TAKE_BACK]
    arrays.pop()  # of whose memory a program still reads
    clock.happens = {0.5: kept.pop}
    clock.slept.clear()
    lent._wait()
    assert clock.monotonic() == pytest.approx(0.5 + lent._TO_TAKE_BACK, abs=0.002)
    assert [*lent._lent] == kept


def test_a_share_of_an_array_holds_what_was_lent(clock, arrays):
    shares = [types.SimpleNamespace(data=jnp.zeros(4)) for _ in range(2)]
    arrays.append(types.SimpleNamespace(addressable_shards=shares))
    kept = [Lent(share.data.unsafe_buffer_pointer()) for share in shares]
    lent._wait()
    assert clock.slept == [lent._TO_TAKE_BACK]
    assert {*lent._lent} == {*kept}


def test_an_array_that_is_gone_holds_nothing(clock, arrays):
    deleted = jnp.zeros(4)
    kept = Lent(deleted.unsafe_buffer_pointer())
    arrays += [deleted, jnp.ones(4)]
    deleted.delete()
    clock.happens = {0.3: lambda: lent._lent.discard(kept)}
    lent._wait()
    assert clock.monotonic() == pytest.approx(0.3 + lent._TO_TAKE_BACK, abs=0.002)


ENDS = {
    "nobody_has_the_result": "double(lend())",
    "the_result_is_kept": "result = double(lend())",
    "an_array_is_kept": "array = lend(); result = double(array)",
    "an_alias_of_an_array_is_kept": "alias = jax.device_put(lend(), jax.devices()[0]); result = double(alias)",
}


@pytest.mark.gpu
@pytest.mark.parametrize("end", ENDS)
def test_python_ends_while_jax_reads_what_torch_lent(end: str):
    """With JAX and torch alone, an H200 aborts so in one to three of seven ends of the first kind."""
    code = f"""
import atexit, os, jax
atexit.register(lambda: lent._is_coming_back() and os._exit(3))  # runs after what is registered from here on
import torch
from kvjax_torch import lent, to_jax

lent._LONGEST_END = 1000  # longer than this test
cycles, double, slept = 0, jax.jit(lambda array: array * 2), torch.cuda.Event()

def lend():
    tensor = torch.ones(1 << 20, device="cuda")
    torch.cuda._sleep(cycles)
    slept.record()
    return to_jax(tensor)

double(lend()).block_until_ready()
cycles = 400_000_000  # a fifth of a second, in which Python ends
{ENDS[end]}
assert not slept.query()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, "terminate" in done.stderr) == (0, False), done.stderr
