"""The benchmark programs run, check bytes before they time them, and judge times as they say; no test asserts one."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks import bars, shapes, timing, workload
from benchmarks.peers import cuda
from kvjax import STORED_KV_CACHE_DTYPES, CacheLayout, KVCache, KVCacheDType

ROOT = Path(__file__).parents[1]
BFLOAT16, FP8, NVFP4 = shapes.TIMED_DTYPES
NHD, HND = CacheLayout
SMALL = shapes.Case("small", 2, 32)


def run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{program}", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def run_and_read(tmp_path: Path, program: str, *flags: str) -> dict:
    """Runs a program, checks that it wrote the tables that it printed, and returns its JSON."""
    json_path, markdown_path = tmp_path / "measured.json", tmp_path / "tables.md"
    done = run(program, *flags, f"--json={json_path}", f"--markdown={markdown_path}")
    assert done.returncode == 0, done.stderr
    assert markdown_path.read_text() in done.stdout
    written = json.loads(json_path.read_text())
    assert written["environment"]["command"].startswith(f"python -m benchmarks.{program} {flags[0]}")
    return written["measured"]


def test_write_benchmark(tmp_path):
    flags = ["--cases=gpt-oss-20b", "--tokens=1,7", "--blocks=16,64", "--implementation=xla"]
    measured = run_and_read(tmp_path, "write", *flags)
    cells, lines = measured["cache_sizes"], measured["token_counts"]
    dtypes = [dtype.value for dtype in STORED_KV_CACHE_DTYPES]
    assert [(cell["dtype"], cell["num_blocks"]) for cell in cells] == [
        (name, size) for name in dtypes for size in (16, 64)
    ]
    assert [(line["dtype"], line["num_tokens"]) for line in lines] == [
        (dtype.value, num_tokens) for dtype in shapes.TIMED_DTYPES for num_tokens in (1, 7)
    ]
    assert all(each["seconds"] > 0 for each in [*cells, *lines])


def test_gather_benchmark(tmp_path):
    # 20 tokens leave a part of the second block unread.
    lines = run_and_read(tmp_path, "gather", "--seqs=3", "--seq_len=20")["gathers"]
    assert [(line["dtype"], line["num_seqs"], line["seq_len"]) for line in lines] == [
        (dtype.value, 3, 20) for dtype in shapes.TIMED_DTYPES
    ]


def test_torch_benchmark(tmp_path):
    torch = pytest.importorskip("torch")
    measured = run_and_read(tmp_path, "bridge", "--tokens=1,7")
    calls = [(line["call"].split(",")[0], line["dtype"]) for line in measured["first_calls"]]
    timed = [BFLOAT16, *shapes.TIMED_DTYPES]  # the first is what starts JAX
    assert calls == [(name, dtype.value) for dtype in timed for name in ("write", "gather")]
    names = [line["call"] for line in measured["host_times"]]
    assert names[:3] == ["torch.Tensor.index_copy_", "write, scales as tensors", "write, scales as floats"]
    assert all(line["seconds"] > 0 for line in measured["host_times"])
    assert [(line["dtype"], line["num_tokens"]) for line in measured["kernels"]] == [
        (dtype.value, num_tokens) for dtype in shapes.TIMED_DTYPES for num_tokens in (1, 7)
    ]
    assert all(line["torch_seconds"] > 0 < line["jit_seconds"] for line in measured["kernels"])
    assert ("replays" in measured) == torch.cuda.is_available()


@pytest.mark.gpu
def test_on_a_gpu_calls_from_torch_are_one_kernel_that_nobody_waits_for(tmp_path):
    pytest.importorskip("torch")
    measured = run_and_read(tmp_path, "bridge", "--tokens=64")
    assert [line["waits"] for line in measured["host_times"]] == [False] * 4
    for line in measured["kernels"]:
        assert line["clock"] == timing.Clock.DEVICE
        for kernels in (line["torch_kernels"], line["jit_kernels"]):
            assert [("reshape_and_cache_flash" in name) for name in kernels] == [True]
    assert len(measured["replays"]) == 6
    for line in measured["replays"]:
        assert line["clock"] == timing.Clock.EVENTS
        assert (line["kernel_seconds"] is not None) == (line["num_tokens"] == 64)


@pytest.mark.gpu
def test_on_a_gpu_times_are_those_of_kernels(tmp_path):
    measured = run_and_read(tmp_path, "write", "--quick", "--tokens=7", "--blocks=64")
    for each in [*measured["cache_sizes"], *measured["token_counts"]]:
        assert each["clock"] == timing.Clock.DEVICE
    for line in measured["token_counts"]:
        assert line["kernels"]
        assert line["copy_seconds"] > 0
        assert (line["cuda_seconds"] is not None) == (cuda.nvcc() is not None and line["dtype"] != "nvfp4")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--cases=llama-9", "gpt-oss-20b"),
        ("--tokens=0", "at least 1"),
        ("--blocks=64,many", "at least 16"),
        ("--implementation=triton", "mosaic|xla"),
    ],
)
def test_a_wrong_flag_is_refused_with_what_is_right(flag, expected):
    done = run("write", flag)
    assert done.returncode != 0
    assert expected in done.stderr


@pytest.fixture
def tokens():
    return workload.Tokens(SMALL, max_tokens=8, num_blocks=4, rotation_bytes=4096)


@pytest.mark.parametrize("dtype", STORED_KV_CACHE_DTYPES, ids=lambda dtype: dtype.value)
def test_a_write_is_checked_in_every_byte(tokens, dtype):
    spec = SMALL.spec(dtype)
    expected = tokens.expected(spec, 5)
    workload.check_first_write(workload.Write(tokens.poisoned(spec), tokens.batches(5), "xla"), expected)
    other = KVCache(expected.kv.at[3, 1, 15, 1, 0].set(0), spec)
    with pytest.raises(AssertionError, match=r"1 of .* elements differ"):
        workload.check_first_write(workload.Write(tokens.poisoned(spec), tokens.batches(5), "xla"), other)


def test_a_write_elsewhere_in_memory_is_found(tokens):
    spec = SMALL.spec(BFLOAT16)
    write = workload.Write(tokens.poisoned(spec), tokens.batches(5), "xla")
    in_place = write.compiled
    write.compiled = lambda *args, **kwargs: KVCache(jnp.copy(in_place(*args, **kwargs).kv), spec)
    with pytest.raises(AssertionError, match="not in place"):
        workload.check_first_write(write, tokens.expected(spec, 5))


def test_batches_share_neither_tokens_nor_slots(tokens):
    batches = tokens.batches(8)
    assert len(batches) == 4096 // (8 * 2 * 2 * 32 * 2)
    assert len({tuple(batch.key[0, 0].tolist()) for batch in batches}) == len(batches)
    slots = jnp.concatenate([batch.slot_mapping for batch in batches])
    assert len({*slots.tolist()}) == len(slots)
    assert tokens.num_blocks * 16 > slots.max() >= 0 <= slots.min()


def test_the_wall_clock_times_calls_of_different_numbers():
    numbers = []
    timed = timing.measure(numbers.append, wait=lambda _: None, max_seconds=0.01)
    assert numbers == list(range(len(numbers)))
    assert timing.MIN_CALLS <= timed.calls <= timing.MAX_CALLS < len(numbers)
    assert timed.clock is timing.Clock.WALL


class Profiler:
    """Stands for jax's CUPTI extension on a machine without a GPU: each call launches kernels of 1 and 2 ms."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.error, self.records = error, None

    def _cupti_init(self) -> None:
        if self.error:
            raise self.error
        self.records = []

    def _cupti_get_timings(self, finalize: bool) -> list[tuple[str, float]]:
        records, self.records = self.records, None
        return records

    def call(self, number: int) -> None:
        if self.records is not None:
            self.records += [("cast", 1.0), ("scatter", 2.0)]


def test_device_timestamps_leave_out_the_warm_up(monkeypatch):
    profiler = Profiler()
    monkeypatch.setattr(timing, "_cupti", lambda: profiler)
    timed = timing.measure(profiler.call, wait=lambda _: None)
    assert timed == timing.Timing(0.003, timing.Clock.DEVICE, timing.MAX_CALLS, ("cast", "scatter"))


def test_the_wall_clock_serves_where_another_profiler_is_attached(monkeypatch):
    profiler = Profiler(RuntimeError("another subscriber"))
    monkeypatch.setattr(timing, "_cupti", lambda: profiler)
    with pytest.warns(UserWarning, match="another subscriber"):
        assert timing.measure(profiler.call, wait=lambda _: None).clock is timing.Clock.WALL


def test_kernel_timestamps_are_summed_for_each_call():
    records = [("cast", 1.0), ("scatter", 2.0), ("cast", 3.0), ("scatter", 4.0)]
    assert timing.split_calls(records, 2) == ([0.003, 0.007], ("cast", "scatter"))


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "got 0 kernel timestamps"),
        ([("cast", 1.0)] * 3, "got 3 kernel timestamps, expected a positive multiple of calls=2"),
        ([("cast", 1.0), ("scatter", 1.0)], "got a call of kernels"),
    ],
)
def test_kernel_timestamps_of_unequal_calls_are_refused(records, message):
    with pytest.raises(RuntimeError, match=message):
        timing.split_calls(records, 2)


def write_time(dtype=BFLOAT16, layout=NHD, *, heads=(8, 128), **changes) -> bars.WriteTime:
    line = bars.WriteTime(
        case="a case",
        num_kv_heads=heads[0],
        head_size=heads[1],
        dtype=dtype,
        layout=layout,
        num_tokens=16_384,
        seconds=1.0,
        clock=timing.Clock.DEVICE,
        kernels=("write",),
        temporary_bytes=0,
        bytes_moved=1,
        copy_seconds=0.9,
    )
    return dataclasses.replace(line, **changes)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (write_time(BFLOAT16, num_tokens=65_536), ">= 92.0% of copy"),
        (write_time(FP8), ">= 88.0% of copy"),
        (write_time(NVFP4), ">= 80.0% of copy"),
        (write_time(NVFP4, num_tokens=65_536), ">= 85.0% of copy"),
        (write_time(NVFP4, num_tokens=65_536, heads=(1, 128)), ">= 55.0% of copy"),
        (write_time(FP8, heads=(8, 96)), ">= 80.0% of copy"),
        (write_time(BFLOAT16, num_tokens=1), "<= 0.95 x CUDA"),
        (write_time(NVFP4, num_tokens=256), "<= 1.25 x bf16"),
        (write_time(NVFP4, HND, num_tokens=256), "<= 1.15 x NHD"),
        (write_time(BFLOAT16, num_tokens=2_048), "None"),
        (write_time(BFLOAT16, num_tokens=16_384, heads=(1, 128)), "None"),
    ],
)
def test_bars(line, expected):
    assert str(bars.bar_of(line)) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (write_time(), "90.0% of copy: falls short"),
        (write_time(FP8), "90.0% of copy: pass"),
        (write_time(num_tokens=64, cuda_seconds=1.25), "0.80 x CUDA: pass"),
        (write_time(num_tokens=64, cuda_seconds=1.0), "1.00 x CUDA: falls short"),
        (write_time(num_tokens=64), "-"),  # no nvcc
        (write_time(NVFP4, num_tokens=7, seconds=0.5), "1.25 x bf16: pass"),
        (write_time(NVFP4, HND, num_tokens=7, seconds=0.6), "1.20 x NHD: falls short"),
        (write_time(FP8, HND, num_tokens=7), "-"),  # not timed in NHD
        (write_time(clock=timing.Clock.WALL), "-"),
    ],
)
def test_verdicts(line, expected):
    others = [write_time(num_tokens=7, seconds=0.4), write_time(NVFP4, num_tokens=7, seconds=0.5)]
    bar = bars.bar_of(line)
    assert bars.verdict(bar, bars.value_of(bar.measure, line, [*others, line]), line.clock) == expected


@pytest.mark.parametrize(
    ("bar", "value", "expected"),
    [
        (bars.EAGER_CALL, 1.9, "1.90 x index_copy_: pass"),
        (bars.DLPACK_CALL, 151.0, "151.00 us: falls short"),
        (bars.TORCH_KERNEL, 1.06, "1.06 x jit: falls short"),
        (bars.REPLAY, 1.1, "1.10 x kernels: pass"),
    ],
)
def test_verdicts_of_calls_from_torch(bar, value, expected):
    assert bars.verdict(bar, value, timing.Clock.HOST) == expected
    assert bars.verdict(bar, value, timing.Clock.WALL) == "-"


def test_bars_are_counted():
    assert bars.summary(["1.00 x CUDA: falls short", "-", "0.80 x CUDA: pass"]) == " 1 of 2 bars hold."
    assert bars.summary(["-"]) == ""


def test_bytes_moved():
    # Seven tokens of two heads of 32, keys and values: bfloat16 in, a slot, two codes a byte and a scale for 16 out.
    assert workload.bytes_moved(SMALL.spec(NVFP4), 7) == 7 * 2 * 2 * (32 * 2 + 16 + 2) + 7 * 4


@pytest.mark.skipif(cuda.nvcc() is None, reason="needs CUDA's compiler")
def test_the_cuda_kernels_build(tmp_path):
    cuda.build(tmp_path / "peers.so")
    library = ctypes.CDLL(str(tmp_path / "peers.so"))
    for name in (*cuda.WRITES.values(), "copy_by_kernel", "time_memcpy", "synchronize", "error_string"):
        assert getattr(library, name)


@pytest.mark.parametrize(("row_elements", "fitted"), [(128, 32), (768, 96), (1024, 128), (8192, 512)])
def test_threads_of_the_cuda_kernel(row_elements, fitted):
    assert cuda.fitted_threads(row_elements) == fitted
    assert cuda.vllm_threads(row_elements) == min(row_elements, 512)


def test_only_some_caches_have_a_cuda_kernel():
    assert cuda.serves(SMALL.spec(KVCacheDType.FP8_E4M3))
    assert not cuda.serves(SMALL.spec(KVCacheDType.FP8_E5M2))
    assert not cuda.serves(SMALL.spec(BFLOAT16, HND))
