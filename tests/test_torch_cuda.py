"""The operations on CUDA tensors: streams, graphs, threads, devices, and one compilation for every number of tokens.

`test_torch_write.py` holds the bytes, on CPU and on CUDA; what is written here is compared with the write on CPU.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
from support.torch_helpers import A_WHILE, capture, resident_bytes  # noqa: E402

import kvjax_torch  # noqa: E402
from kvjax import KVCacheTypeError, KVCacheValueError  # noqa: E402
from kvjax_torch import launch  # noqa: E402
from kvjax_torch.launch import driver  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "fp8_e4m3", "nvfp4")
HEAD_SIZE = 128
BLOCK_SIZE = 16
SCALES = (0.0173, 0.029)

Read = Callable[..., Sequence[torch.Tensor]]
"""`as_bytes` or `as_tokens`."""


def new_cache(dtype: str, num_heads: int, num_blocks: int) -> torch.Tensor:
    """Poisoned memory `[num_blocks, 2, block_size, num_kv_heads, row]`."""
    row = {"bfloat16": 2 * HEAD_SIZE, "fp8_e4m3": HEAD_SIZE, "nvfp4": HEAD_SIZE // 2 + HEAD_SIZE // 16}[dtype]
    cache = torch.full((num_blocks, 2, BLOCK_SIZE, num_heads, row), 0xAB, dtype=torch.uint8, device="cuda")
    return cache.view(torch.bfloat16) if dtype == "bfloat16" else cache


def new_rows(num_tokens: int, num_heads: int, seed: int = 0) -> torch.Tensor:
    """`[num_tokens, 3, num_kv_heads, head_size]`: queries, keys and values of a fused projection."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = num_tokens, 3, num_heads, HEAD_SIZE
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def new_slots(num_tokens: int, num_blocks: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randperm(num_blocks * BLOCK_SIZE, generator=generator, device="cuda")[:num_tokens]


def write(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, dtype: str, scales=SCALES, **given) -> None:
    arguments = rows[:, 1], rows[:, 2], cache[:, 0], cache[:, 1], slots, dtype, *scales
    kvjax_torch.reshape_and_cache_flash(*arguments, **given)


def written(rows: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, dtype: str, scales=SCALES) -> torch.Tensor:
    """What the CPU makes of the same call."""
    on_cpu = cache.cpu()
    write(rows.cpu(), on_cpu, slots.cpu(), dtype, scales)
    return on_cpu


def as_bytes(cache: torch.Tensor, dtype: str, scales=SCALES) -> Sequence[torch.Tensor]:
    return [cache]


def as_tokens(cache: torch.Tensor, dtype: str, scales=SCALES) -> Sequence[torch.Tensor]:
    """What is gathered of all blocks, as one sequence; nothing here makes the host wait."""
    table = torch.arange(len(cache), dtype=torch.int32, device=cache.device)[None]
    lengths = torch.full((1,), len(cache) * BLOCK_SIZE, dtype=torch.int32, device=cache.device)
    return kvjax_torch.gather_kv(cache[:, 0], cache[:, 1], table, lengths, dtype, *scales)


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))


def assert_all_same(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for each, wanted in zip(got, expected, strict=True):
        assert_same(each, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_several_tokens_for_a_slot_the_last_is_written_whole(dtype: str):
    for num_tokens in (7, 300, 2000, 9001, 9001):
        rows, num_blocks = new_rows(num_tokens, 8), 1 + num_tokens // 64
        slots = torch.randint(-1, num_blocks * BLOCK_SIZE, (num_tokens,), device="cuda")
        cache = new_cache(dtype, 8, num_blocks)
        expected = written(rows, cache, slots, dtype)
        for _ in range(5):
            cache = new_cache(dtype, 8, num_blocks)
            write(rows, cache, slots, dtype)
            assert_same(cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [1, 8])
@pytest.mark.parametrize("unique_slots", [False, True])
def test_one_compilation_serves_every_number_of_tokens(dtype: str, num_heads: int, unique_slots: bool):
    num_blocks = 300
    cache = new_cache(dtype, num_heads, num_blocks)
    write(new_rows(3, num_heads), cache, new_slots(3, num_blocks), dtype, unique_slots=unique_slots)
    compilations = launch.num_compilations()
    for num_tokens in (0, 1, 2, 7, 127, 527, 528, 1055, 1057, 2113, 4223, 4225, 4800):
        rows, slots = new_rows(num_tokens, num_heads, num_tokens), new_slots(num_tokens, num_blocks, num_tokens)
        slots[::5] = -1
        cache.view(torch.uint8).fill_(0xCD)
        expected = written(rows, cache, slots, dtype)
        write(rows, cache, slots, dtype, unique_slots=unique_slots)
        assert_same(cache, expected)
    other = new_cache(dtype, num_heads, num_blocks + 7)
    write(new_rows(5, num_heads), other, new_slots(5, num_blocks), dtype, unique_slots=unique_slots)
    assert launch.num_compilations() == compilations


def test_a_gather_of_any_size_is_one_compilation():
    cache = new_cache("nvfp4", 8, 40)
    rows, slots = new_rows(640, 8), new_slots(640, 40)
    write(rows, cache, slots, "nvfp4")
    on_cpu = cache.cpu()
    compilations = None
    for num_seqs, max_blocks in ((1, 1), (3, 5), (2, 17), (0, 3), (3, 0)):
        table = torch.randint(0, 40, (num_seqs, max_blocks + 2), device="cuda", dtype=torch.int32)[:, 1:-1]
        lengths = torch.randint(0, max_blocks * BLOCK_SIZE + 1, (num_seqs,), device="cuda", dtype=torch.int32)
        read = kvjax_torch.gather_kv(cache[:, 0], cache[:, 1], table, lengths, "nvfp4", *SCALES)
        wanted = kvjax_torch.gather_kv(on_cpu[:, 0], on_cpu[:, 1], table.cpu(), lengths.cpu(), "nvfp4", *SCALES)
        assert_all_same(read, wanted)
        compilations = compilations or launch.num_compilations()
    assert launch.num_compilations() == compilations


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_nothing_is_read_where_the_table_names_no_block(index: torch.dtype):
    cache = new_cache("nvfp4", 8, 10)
    write(new_rows(10 * BLOCK_SIZE, 8), cache, torch.arange(10 * BLOCK_SIZE, device="cuda"), "nvfp4")
    past = {torch.int32: 2**31 - 1, torch.int64: 2**32}[index]  # the low half of the latter is a block
    table = torch.tensor([[-1, 2], [past, 10], [9, -past], [3, 4]], dtype=index, device="cuda")
    lengths = torch.tensor([20, 32, 32, 32], dtype=index, device="cuda")
    on_cpu = cache.cpu()
    read = kvjax_torch.gather_kv(cache[:, 0], cache[:, 1], table, lengths, "nvfp4", *SCALES)
    wanted = kvjax_torch.gather_kv(on_cpu[:, 0], on_cpu[:, 1], table.cpu(), lengths.cpu(), "nvfp4", *SCALES)
    assert_all_same(read, wanted)
    for dense in read:
        is_block = ((table >= 0) & (table < 10)).repeat_interleave(BLOCK_SIZE, 1)
        assert not dense[~is_block].any()
        assert dense[3].any()


@pytest.mark.parametrize("new_stream", [torch.cuda.default_stream, torch.cuda.Stream], ids=["default", "side"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("read", [as_bytes, as_tokens])
def test_calls_wait_for_their_stream_and_for_nothing_else(read: Read, dtype: str, new_stream):
    """On a stream that is busy for a while before the rows are there: a call on another would come too early."""
    num_blocks, stream, idle = 40, new_stream(), torch.cuda.Event()
    cache, slots = new_cache(dtype, 8, num_blocks), new_slots(64, num_blocks)
    rows = torch.zeros_like(new_rows(64, 8))
    scales = [torch.tensor(scale, device="cuda") for scale in SCALES]
    write(rows, cache, slots, dtype, scales)
    read(cache, dtype, scales)
    torch.cuda.synchronize()
    for seed in range(20):
        source = new_rows(64, 8, seed)
        expected = written(source, cache, slots, dtype)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(A_WHILE)
            rows.copy_(source)
            write(rows, cache, slots, dtype, scales)
            used = [each.clone() for each in read(cache, dtype, scales)]
            rows.zero_()
            idle.record()
        assert not idle.query(), "the host waited for the stream"
        stream.synchronize()
        assert_all_same(used, read(expected, dtype))
        assert_same(cache, expected)


def test_the_default_stream_comes_after_all_that_block():
    """What others have queued on streams that CUDA lets the default one wait for comes before a write on it."""
    handle = ctypes.c_void_p()
    driver.call("cuStreamCreate", ctypes.byref(handle), 0)
    cache, slots, source = new_cache("nvfp4", 8, 40), new_slots(64, 40), new_rows(64, 8)
    rows = torch.zeros_like(source)
    write(rows, cache, slots, "nvfp4")
    expected = written(source, cache, slots, "nvfp4")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.get_stream_from_external(handle.value)):
        torch.cuda._sleep(A_WHILE)
        rows.copy_(source)
    write(rows, cache, slots, "nvfp4")
    torch.cuda.synchronize()
    assert_same(cache, expected)
    driver.call("cuStreamDestroy_v2", handle)


@pytest.mark.parametrize(("read", "turns"), [(as_bytes, 8), (as_tokens, 4)])
def test_eight_calls_wait_for_a_busy_gpu_in_its_queue(read: Read, turns: int):
    """Those of a GPU that comes later: JAX lets so many more than one be queued, though not any number."""
    cache, rows, slots, done = new_cache("nvfp4", 8, 40), new_rows(64, 8), new_slots(64, 40), torch.cuda.Event()
    expected = written(rows, cache, slots, "nvfp4")
    write(rows, cache, slots, "nvfp4")
    read(cache, "nvfp4")
    torch.cuda.synchronize()
    torch.cuda._sleep(A_WHILE * turns // 4)
    for _ in range(turns):
        write(rows, cache, slots, "nvfp4")
        last = read(cache, "nvfp4")
    done.record()
    assert not done.query(), "the host waited"
    assert_same(cache, expected)
    assert_all_same(last, read(expected, "nvfp4"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_of_32_layers_replays_with_what_is_then_in_the_buffers(dtype: str):
    num_layers, num_blocks, num_tokens = 32, 20, 33
    caches = [new_cache(dtype, 8, num_blocks) for _ in range(num_layers)]
    rows = [new_rows(num_tokens, 8, layer) for layer in range(num_layers)]
    slots = new_slots(num_tokens, num_blocks)
    scales = [torch.tensor(scale, device="cuda") for scale in SCALES]
    write(rows[0], caches[0], slots, dtype, scales)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        for layer_rows, cache in zip(rows, caches, strict=True):
            write(layer_rows, cache, slots, dtype, scales)
    for cache in caches:
        cache.view(torch.uint8).fill_(0xCD)
    for seed in (1, 2):
        slots.copy_(new_slots(num_tokens, num_blocks, seed))
        for layer, layer_rows in enumerate(rows):
            layer_rows.copy_(new_rows(num_tokens, 8, 100 * seed + layer))
        expected = [written(*call, slots, dtype) for call in zip(rows, caches, strict=True)]
        graph.replay()
        assert_all_same(caches, expected)


def test_a_gather_is_recorded_too():
    cache, table = new_cache("nvfp4", 8, 20), torch.arange(20, device="cuda", dtype=torch.int32)[None]
    lengths = torch.tensor([300], device="cuda", dtype=torch.int32)
    scales = [torch.tensor(scale, device="cuda") for scale in SCALES]
    arguments = (cache[:, 0], cache[:, 1], table, lengths, "nvfp4", *scales)
    kvjax_torch.gather_kv(*arguments)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        keys, values = kvjax_torch.gather_kv(*arguments)
    write(new_rows(320, 8), cache, torch.arange(320, device="cuda"), "nvfp4")
    lengths.fill_(287)
    graph.replay()
    assert_all_same((keys, values), kvjax_torch.gather_kv(*arguments))


@pytest.mark.parametrize("read", [as_bytes, as_tokens])
def test_threads_may_write_and_read_on_streams_of_their_own(read: Read):
    num_blocks, failures = 40, []
    cases = [(dtype, new_cache(dtype, 8, num_blocks), new_rows(64, 8, seed)) for seed, dtype in enumerate(DTYPES[1:])]
    slots = new_slots(64, num_blocks)
    expected = [read(written(rows, cache, slots, dtype), dtype) for dtype, cache, rows in cases]
    torch.cuda.synchronize()

    def serve(index: int) -> None:
        dtype, cache, rows = cases[index]
        stream = torch.cuda.Stream()
        try:
            for _ in range(200):
                with torch.cuda.stream(stream):
                    cache.view(torch.uint8).fill_(0xAB)
                    write(rows, cache, slots, dtype)
                    used = [each.clone() for each in read(cache, dtype)]
                stream.synchronize()
                assert_all_same(used, expected[index])
        except BaseException as error:  # a thread's failures are the test's
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_thread_may_write_while_another_captures():
    cache, rows, slots = new_cache("nvfp4", 8, 40), new_rows(64, 8), new_slots(64, 40)
    expected, failures, ends = written(rows, cache, slots, "nvfp4"), [], threading.Event()
    write(rows, cache, slots, "nvfp4")
    torch.cuda.synchronize()
    num_writes, in_captures = 0, 0

    def serve() -> None:
        nonlocal num_writes
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not ends.is_set():
                    write(rows, cache, slots, "nvfp4")
                    num_writes += 1
        except BaseException as error:  # a thread's failures are the test's
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        x = torch.zeros(100, device="cuda")
        for _ in range(20):
            with capture(torch.cuda.CUDAGraph()):
                before = num_writes
                for _ in range(50):
                    x += 1
                time.sleep(0.01)
                in_captures += num_writes - before
    finally:
        ends.set()
        thread.join()
    assert not failures
    assert in_captures
    torch.cuda.synchronize()
    assert_same(cache, expected)


@pytest.mark.parametrize("written_on", ["producer", "consumer"])
def test_keys_and_pages_may_come_from_another_stream(written_on: str):
    """Of a stream that has nothing to do but to wait for it."""
    cache, slots, source = new_cache("nvfp4", 8, 40), new_slots(64, 40), new_rows(64, 8)
    rows, producer, consumer = torch.zeros_like(source), torch.cuda.Stream(), torch.cuda.Stream()
    write(rows, cache, slots, "nvfp4")
    as_tokens(cache, "nvfp4")
    expected = written(source, cache, slots, "nvfp4")
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(A_WHILE)
        rows.copy_(source)
        if written_on == "producer":
            write(rows, cache, slots, "nvfp4")
    with torch.cuda.stream(consumer):
        consumer.wait_stream(producer)
        if written_on == "consumer":
            write(rows, cache, slots, "nvfp4")
        read = as_tokens(cache, "nvfp4")
    consumer.synchronize()
    assert_same(cache, expected)
    assert_all_same(read, as_tokens(expected, "nvfp4"))


def test_a_thread_may_write_as_its_first_work_on_the_gpu():
    cache, rows, slots = new_cache("nvfp4", 8, 4), new_rows(3, 8), new_slots(3, 4)
    expected = written(rows, cache, slots, "nvfp4")
    scales = [torch.tensor(scale, device="cuda") for scale in SCALES]
    write(rows, new_cache("nvfp4", 8, 4), slots, "nvfp4", scales)
    torch.cuda.synchronize()
    thread = threading.Thread(target=write, args=(rows, cache, slots, "nvfp4", scales))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert_same(cache, expected)


@pytest.mark.parametrize("read", [as_bytes, as_tokens])
def test_tensors_of_another_gpu_are_written_and_read_there(read: Read):
    """On the current stream of that GPU, whichever GPU is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    current = torch.cuda.current_device()
    other = torch.device("cuda", (current + 1) % torch.cuda.device_count())
    first = new_cache("nvfp4", 8, 4), new_rows(3, 8), new_slots(3, 4)
    cache, source, slots = (tensor.to(other) for tensor in first)
    rows, stream = torch.zeros_like(source), torch.cuda.Stream(other)
    expected = written(source, cache, slots, "nvfp4")
    write(rows, cache, slots, "nvfp4")
    read(cache, "nvfp4")
    assert torch.cuda.current_device() == current
    torch.cuda.synchronize(other)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(A_WHILE)
        rows.copy_(source)
        with torch.cuda.device(current):
            write(rows, cache, slots, "nvfp4")
            used = [each.clone() for each in read(cache, "nvfp4")]
            assert torch.cuda.current_device() == current
    stream.synchronize()
    assert {each.device for each in used} == {other}
    assert_all_same(used, read(expected, "nvfp4"))
    assert_same(cache, expected)
    write(first[1], first[0], first[2], "nvfp4")
    assert_same(first[0], expected)


STARTS_JAX = """
import torch, kvjax_torch
torch.zeros(1, device="cuda:0")
kvjax_torch.to_jax(torch.zeros(16))
assert torch.cuda.current_device() == 0, torch.cuda.current_device()
"""


def test_torchs_current_gpu_stays_when_jax_starts():
    subprocess.run([sys.executable, "-c", STARTS_JAX], check=True)


RECORDS = """
import sys, time, torch, kvjax_torch
from jax._src import xla_bridge

mode, started = sys.argv[1:]

def memory(device):
    cache = torch.zeros(4, 2, 16, 8, 72, dtype=torch.uint8, device=device)
    rows = torch.randn(48, 3, 8, 128, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    return cache, rows, torch.arange(48, device=device), torch.tensor(0.02, device=device)

def call(cache, rows, slots, scale):
    halves = cache[:, 0], cache[:, 1]
    kvjax_torch.reshape_and_cache_flash(rows[:, 1], rows[:, 2], *halves, slots, "nvfp4", scale, scale)
    return kvjax_torch.gather_kv(*halves, slots[:3, None], slots[:3] + 1, "nvfp4", scale, scale)[0]

on_gpu, on_host = memory("cuda"), memory("cpu")
call(*on_gpu)
expected = on_gpu[0].clone()
on_gpu[0].zero_()
assert not xla_bridge.backends_are_initialized(), "launching a kernel has started JAX"
if started != "not":
    call(*on_host)
    assert torch.equal(on_host[0], expected.cpu())
lent = kvjax_torch.to_jax(torch.ones(64, device="cuda")) if started == "on GPUs" else None
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode=mode):
    read = call(*on_gpu)
    time.sleep(11)
    call(*on_gpu)
graph.replay()
assert torch.equal(on_gpu[0], expected) and torch.equal(read, call(*on_gpu))
assert lent is None or (lent + 1).sum() == 128
"""


@pytest.mark.parametrize(
    ("mode", "started"), [("global", "not"), ("global", "on the host"), ("thread_local", "on GPUs")]
)
def test_a_capture_may_take_its_time(mode: str, started: str):
    """JAX looks at its streams every five seconds, which CUDA forbids during a capture in its global mode."""
    env = os.environ | ({"JAX_PLATFORMS": "cpu"} if started == "on the host" else {})
    subprocess.run([sys.executable, "-c", RECORDS, mode, started], check=True, env=env)


def test_ten_thousand_calls_leave_no_memory_behind():
    cache, rows, slots = new_cache("nvfp4", 8, 40), new_rows(64, 8), new_slots(64, 40)
    calls = [rows, rows.transpose(1, 2).contiguous().transpose(1, 2)]  # the second is copied at each call
    table = torch.tensor([[3, 1]], device="cuda", dtype=torch.int32)
    lengths = torch.tensor([20], device="cuda", dtype=torch.int32)
    doubled = jax.jit(lambda array: array * 2)

    def call(index: int) -> None:
        write(calls[index % 2], cache, slots, "nvfp4")
        kvjax_torch.gather_kv(cache[:, 0], cache[:, 1], table, lengths, "nvfp4", *SCALES)
        lent = kvjax_torch.to_jax(torch.empty(2 << 20, dtype=torch.uint8, device="cuda"))
        kvjax_torch.to_torch(lent)
        kvjax_torch.to_torch(doubled(lent))

    def serve(count: int) -> tuple[list[int], int]:
        for index in range(count):
            call(index)
        torch.cuda.synchronize()
        gc.collect()
        time.sleep(0.5)  # JAX gives back what it has borrowed on a thread of its own
        on_gpu = [torch.cuda.memory_allocated(), jax_bytes(), len(jax.live_arrays())]
        return on_gpu, resident_bytes()

    serve(500)
    gpu_before, host_before = serve(500)
    gpu_after, host_after = serve(10_000)
    assert gpu_after == gpu_before
    assert host_after - host_before < 4 << 20


def jax_bytes() -> int:
    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)


@pytest.mark.parametrize("start", [16, 208])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_may_begin_anywhere(dtype: str, start: int):
    """JAX's own arrays begin at multiples of 256 bytes, and its kernels take no others."""
    cache, around = late(new_cache(dtype, 8, 10), start)
    slots, _ = late(new_slots(33, 10), 8)
    scales = [late(torch.tensor([scale], device="cuda"), 4 * i)[0] for i, scale in enumerate(SCALES, start=1)]
    for num_tokens in (33, 5):
        rows, _ = late(new_rows(num_tokens, 8, num_tokens), start)
        packed = [late(each.contiguous(), start)[0] for each in (rows[:, 1], rows[:, 2])]
        for key, value in ((rows[:, 1], rows[:, 2]), packed):
            on_cpu = cache.cpu()
            kvjax_torch.reshape_and_cache_flash(
                key.cpu(), value.cpu(), on_cpu[:, 0], on_cpu[:, 1], slots[:num_tokens].cpu(), dtype, *SCALES
            )
            halves = cache[:, 0], cache[:, 1]
            for _ in range(2):  # planned, and of a known kind
                kvjax_torch.reshape_and_cache_flash(key, value, *halves, slots[:num_tokens], dtype, *scales)
                assert_same(cache, on_cpu)
            slots += 1
    assert (around[:start] == 0xAB).all()
    assert (around[start + cache.nbytes :] == 0xAB).all()
    table, _ = late(torch.tensor([[3, 1], [6, 0]], device="cuda", dtype=torch.int32), 12)
    lengths, _ = late(torch.tensor([20, 9], device="cuda", dtype=torch.int32), 4)
    read = kvjax_torch.gather_kv(*halves, table, lengths, dtype, *scales)
    wanted = kvjax_torch.gather_kv(on_cpu[:, 0], on_cpu[:, 1], table.cpu(), lengths.cpu(), dtype, *SCALES)
    assert_all_same(read, wanted)


def late(tensor: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same so many bytes after a multiple of 256, and the memory that it lies in, poisoned."""
    memory = torch.full((start + tensor.nbytes + 48,), 0xAB, dtype=torch.uint8, device="cuda")
    assert memory.data_ptr() % 256 == 0
    moved = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return moved.copy_(tensor), memory


def test_slots_may_be_strided():
    metadata = torch.stack([new_slots(9, 4), torch.full((9,), 2, device="cuda")], dim=1)
    for num_tokens in (1, 1, 9, 3):
        cache, rows, slots = new_cache("fp8_e4m3", 8, 4), new_rows(num_tokens, 8), metadata[:num_tokens, 0]
        expected = written(rows, cache, slots, "fp8_e4m3")
        write(rows, cache, slots, "fp8_e4m3")
        assert_same(cache, expected)


WRONG = {
    "device": (lambda call: call | {"slots": call["slots"].cpu()}, KVCacheValueError, "slot_mapping: got device cpu"),
    "dtype": (lambda call: call | {"dtype": "fp8"}, KVCacheTypeError, "key_cache: got dtype torch.bfloat16"),
    "rows": (lambda call: call | {"rows": call["rows"][:5]}, KVCacheValueError, "key: got 5 tokens"),
    "heads": (lambda call: call | {"rows": call["rows"][:, :, :4]}, KVCacheValueError, "num_kv_heads=4"),
    "negative_scale": (
        lambda call: call | {"scales": (-1.0, 1.0)},
        KVCacheValueError,
        r"k_scale: got -1\.0, expected between 7\.9e-31 and 1\.3e\+30",
    ),
    "gradient": (lambda call: call | {"rows": call["rows"].requires_grad_()}, KVCacheTypeError, "requires_grad=True"),
    "slots": (lambda call: call | {"slots": call["slots"][None]}, KVCacheValueError, "slot_mapping: got 2 dimensions"),
    "scale": (lambda call: call | {"scales": ("one", 1.0)}, KVCacheTypeError, "k_scale: got 'one'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_refused_has_written_nothing(wrong: str):
    change, error, message = WRONG[wrong]
    cache = new_cache("bfloat16", 8, 4)
    call = {"rows": new_rows(9, 8), "cache": cache, "slots": new_slots(9, 4), "dtype": "bfloat16"}
    write(**call | {"slots": torch.full_like(call["slots"], -1)})  # a kind of call that is remembered from here on
    with pytest.raises(error, match=message):
        write(**change(call))
    assert (cache.view(torch.uint8) == 0xAB).all()
