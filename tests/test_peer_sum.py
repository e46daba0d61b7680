"""Sums over devices through memory of each other: `examples/peer_sum.py`."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support import gpu_compile
from support.gpu_compile import HOPPER_AND_BLACKWELL, compile_for
from support.helpers import matrix
from support.peer_sums import AXIS, ROWS, peers_for
from support.programs import run_program

from examples import peer_sum
from examples.peer_sum import BLOCKS, DTYPES, MAX_BYTES, MAX_VECTORS, THREADS, VECTOR, Peers

SHARE = THREADS * VECTOR  # what the threads of a block move at once


TAKEN = [
    *(((rows, 4096), dtype, MAX_BYTES) for rows in ROWS for dtype in DTYPES),
    ((SHARE // 4,), "float32", SHARE),
    ((2, 8, SHARE // 32), "bfloat16", SHARE),
    ((MAX_BYTES // 2,), "float16", MAX_BYTES),
    ((BLOCKS * SHARE // 4,), "float32", MAX_BYTES),
]
LEFT = [
    ((64, 4096), "float32", MAX_BYTES // 4),  # more than the memory is for
    ((MAX_BYTES // 4 + SHARE // 4,), "float32", 2 * MAX_BYTES),  # more than threads hold
    ((SHARE // 4 + 1,), "float32", MAX_BYTES),
    ((3, 5), "bfloat16", MAX_BYTES),
    (((BLOCKS + 3) * SHARE // 4,), "float32", MAX_BYTES),  # of 67 shares, a prime, no block gets as many as another
    ((0, 4096), "float32", MAX_BYTES),
    ((), "float32", MAX_BYTES),
    *(((64, 4096), dtype, MAX_BYTES) for dtype in ("int32", "int8", "float8_e4m3fn")),
]


def traced(shape: tuple[int, ...], dtype: str, peers: Peers) -> str:
    mesh = AbstractMesh((2,), (AXIS,), (AxisType.Auto,))
    run = partial(peer_sum.peer_sum, axis=AXIS)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False)
    return str(jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct(shape, dtype), peers))


@pytest.mark.parametrize(("cases", "is_taken"), [(TAKEN, True), (LEFT, False)], ids=["taken", "left"])
def test_what_the_kernel_does_not_sum_is_left_to_xla(cases, is_taken):
    for shape, dtype, max_bytes in cases:
        jaxpr = traced(shape, dtype, peers_for(max_bytes, 2, num_rows=2))
        assert ("psum" not in jaxpr) is is_taken, (shape, dtype, max_bytes)
        assert ("inline_mgpu" in jaxpr) is is_taken, (shape, dtype, max_bytes)


def test_blocks_share_all_bytes_evenly():
    for num_bytes in range(0, MAX_BYTES + 2 * SHARE, SHARE // 2):
        num_parts = peer_sum._num_parts(num_bytes)
        if num_parts:
            vectors, rest = divmod(num_bytes, num_parts * SHARE)
            assert num_parts <= BLOCKS
            assert 0 < vectors <= MAX_VECTORS
            assert not rest
        else:
            assert num_bytes % SHARE or not any(
                num_bytes // SHARE % each == 0 and 0 < num_bytes // SHARE // each <= BLOCKS
                for each in range(1, MAX_VECTORS + 1)
            )


def test_xla_sums_what_is_left_to_it():
    program = run_program("peer_sums.py", "2", "what_is_left_to_xla", num_devices=2)
    output, _ = program.communicate()
    assert program.returncode == 0, output


def test_peers_that_are_not_divided_are_refused():
    with pytest.raises(ValueError, match="peers: got 2 rows, expected this device's: divide peers over 'tensor'"):
        peer_sum.peer_sum(jnp.ones((64, 4096)), peers_for(MAX_BYTES, 2, num_rows=2), AXIS)


def mesh_of(platform: str = "gpu", processes: tuple[int, ...] = (0, 0), axes: tuple[str, ...] = (AXIS,)) -> Any:
    devices = [
        SimpleNamespace(platform=platform, process_index=p, local_hardware_id=i) for i, p in enumerate(processes)
    ]
    return SimpleNamespace(axis_names=axes, devices=SimpleNamespace(flat=devices))


@pytest.mark.parametrize(
    ("mesh", "max_bytes", "message"),
    [
        (mesh_of(), 0, "max_bytes: got 0, expected 1 to 2097152"),
        (mesh_of(), -1, "max_bytes: got -1, expected 1 to"),
        (mesh_of(), MAX_BYTES + 1, "max_bytes: got 2097153, expected 1 to"),
        (mesh_of("cpu"), 1, r"mesh: got .*'cpu'.*, expected NVIDIA GPUs of process 0"),
        (mesh_of(processes=(0, 1)), 1, r"mesh: got .*process_index=1.*, expected NVIDIA GPUs of process 0"),
        (mesh_of(axes=("data",)), 1, r"mesh: got the axes \('data',\), expected 'tensor' alone"),
        (mesh_of(axes=("data", AXIS)), 1, r"mesh: got the axes \('data', 'tensor'\), expected 'tensor' alone"),
    ],
)
def test_what_cannot_be_connected_is_refused(mesh, max_bytes, message):
    """Before the driver is asked."""
    with mock.patch.object(ctypes, "CDLL", side_effect=AssertionError), pytest.raises(ValueError, match=message):
        peer_sum.connect(mesh, AXIS, max_bytes)


def test_devices_of_a_cpu_are_named():
    mesh = jax.make_mesh((1,), (AXIS,), devices=jax.devices("cpu")[:1])
    with pytest.raises(ValueError, match=r"mesh: got \[CpuDevice\(id=0\)\], expected NVIDIA GPUs of process 0"):
        peer_sum.connect(mesh, AXIS, 1)


@pytest.mark.parametrize(("status", "can"), [(0, 0), (101, 1)])
def test_gpus_that_cannot_address_each_other_are_refused(status, can):
    def ask(result: Any, one: int, other: int) -> int:
        result._obj.value = can if (one, other) == (1, 0) else 1
        return status if (one, other) == (1, 0) else 0

    driver = SimpleNamespace(cuDeviceCanAccessPeer=ask)
    refused = pytest.raises(ValueError, match="mesh: got GPU 1, which cannot address the memory of GPU 0")
    with mock.patch.object(ctypes, "CDLL", return_value=driver), refused:
        peer_sum.connect(mesh_of(), AXIS, 1)


def test_gpus_without_the_driver_of_nvidia_are_refused():
    with mock.patch.object(ctypes, "CDLL", side_effect=OSError), pytest.raises(ValueError, match="NVIDIA's driver"):
        peer_sum.connect(mesh_of(), AXIS, 1)


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@matrix({"target": HOPPER_AND_BLACKWELL, "num_devices": [2, 4, 8], "element": DTYPES}, whole=True)
def test_the_kernel_compiles_without_spills(target, num_devices, element):
    """At the largest size, where threads hold most."""
    x = jax.ShapeDtypeStruct((MAX_BYTES // 4096 // jnp.dtype(element).itemsize, 4096), element)
    program = compile_for(target, partial(peer_sum.peer_sum, axis=AXIS), x, peers_for(MAX_BYTES, num_devices))
    assert program.device_ops == ("custom-call",)
    (kernel,) = program.kernels
    assert kernel.spill_bytes == 0
    # Flags of all devices are sent in one branch: in several, the first of a warp would keep the others from sending.
    assert kernel.ptx.count("st.release.sys") == kernel.ptx.count("ld.acquire.sys") == 1


@dataclasses.dataclass(frozen=True)
class Protocol:
    """What the blocks of devices do in turn, each operation atomic; by default as the kernel does."""

    num_devices: int
    sums: tuple[tuple[int, int], ...]
    """Of each sum the number of parts, and the words of a part."""
    num_blocks: int = 1
    num_inboxes: int = 2
    waits_before_it_sends: bool = False  # the next flag
    kernels_overlap: bool = False
    idle_blocks_skip: bool = False

    def operations(self, device: int, block: int) -> Iterator[tuple[str, tuple[Any, ...], int]]:
        """Writes of a value, waits for at least that value, and reads that should find it."""
        others = [(device + i) % self.num_devices for i in range(1, self.num_devices)]
        count = 0
        for number, (num_parts, num_words) in enumerate(self.sums, start=1):
            if not self.kernels_overlap:
                yield from (("wait", ("ended", device, each), number - 1) for each in range(self.num_blocks))
            words = range(block * num_words, (block + 1) * num_words) if block < num_parts else ()
            inbox = count % self.num_inboxes
            yield from (("write", ("inbox", each, inbox, device, word), number) for each in others for word in words)
            if words or not self.idle_blocks_skip:
                count += 1
                sent = [("write", ("flag", each, block, device), count) for each in others]
                awaited = [("wait", ("flag", device, block, each), count) for each in others]
                pairs = itertools.chain(*zip(sent, awaited, strict=True))
                yield from pairs if self.waits_before_it_sends else sent + awaited
            yield from (("read", ("inbox", device, inbox, each, word), number) for each in others for word in words)
            yield "write", ("ended", device, block), number

    def failures(self) -> set[str]:
        """What goes wrong in any order of the operations of different blocks."""
        blocks = itertools.product(range(self.num_devices), range(self.num_blocks))
        programs = [list(self.operations(*block)) for block in blocks]
        cells = {cell: i for i, cell in enumerate({cell for program in programs for _, cell, _ in program})}
        todo = [((0,) * len(programs), (0,) * len(cells))]
        seen, found = set(todo), set()
        while todo:
            places, memory = todo.pop()
            left = [(i, programs[i][place]) for i, place in enumerate(places) if place < len(programs[i])]
            ready = [(i, each) for i, each in left if each[0] != "wait" or memory[cells[each[1]]] >= each[2]]
            if left and not ready:
                found.add("all wait")
            for i, (kind, cell, value) in ready:
                at = cells[cell]
                if kind == "read" and memory[at] != value:
                    found.add("a part of another sum")
                changed = (*memory[:at], value, *memory[at + 1 :]) if kind == "write" else memory
                state = (*places[:i], places[i] + 1, *places[i + 1 :]), changed
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
        return found


TWO = Protocol(2, ((1, 2),) * 5)
THREE = Protocol(3, ((1, 1),) * 5)
SIZES = Protocol(2, ((1, 2), (2, 1), (2, 1), (1, 2), (2, 1)), num_blocks=2)


@pytest.mark.parametrize("protocol", [TWO, THREE, SIZES], ids=["two", "three", "sizes"])
def test_in_any_order_devices_read_the_parts_of_one_sum(protocol):
    assert protocol.failures() == set()


@pytest.mark.parametrize(
    ("protocol", "change", "failure"),
    [
        (TWO, {"num_inboxes": 1}, "a part of another sum"),
        (THREE, {"num_inboxes": 1}, "a part of another sum"),
        (THREE, {"waits_before_it_sends": True}, "all wait"),
        (SIZES, {"kernels_overlap": True}, "a part of another sum"),
        (SIZES, {"idle_blocks_skip": True}, "a part of another sum"),
    ],
)
def test_without_any_rule_of_the_protocol_an_order_fails(protocol, change, failure):
    assert failure in dataclasses.replace(protocol, **change).failures()


def test_two_devices_alone_may_wait_before_they_send():
    """So tests on two GPUs do not show that flags are sent before any is awaited."""
    assert dataclasses.replace(TWO, waits_before_it_sends=True).failures() == set()


@pytest.mark.gpu
@pytest.mark.parametrize("num_devices", [2, 3, 4, 8])
@pytest.mark.parametrize("check", ["what_is_left_to_xla", "sums_are_exact", "devices_that_arrive_at_different_times"])
def test_gpus_sum(check, num_devices):
    if jax.device_count("cuda") < num_devices:
        pytest.skip(f"needs {num_devices} GPUs")
    program = run_program("peer_sums.py", str(num_devices), check, num_devices=None)
    output, _ = program.communicate()
    assert program.returncode == 0, output
