"""The benchmark programs run, check bytes before they time them, and judge times as they say; no test asserts one."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from helpers import FEW_DTYPES, each_case, matrix

from benchmarks import bars, compare, memory, operations, output, shapes, timing, workload, write
from benchmarks.measurement import EVERY_FIELD, Measurement, Rows
from benchmarks.peers import cuda, packs, writes
from benchmarks.peers.inputs import WriteInputs
from benchmarks.peers.peer import Peer, Run
from benchmarks.shapes import Slots
from benchmarks.workload import WriteJob
from kvjax import STORED_KV_CACHE_DTYPES, CacheLayout, KVCache, KVCacheDType, ModelKVConfig, quant

ROOT = Path(__file__).parents[1]
BFLOAT16, FP8, NVFP4 = shapes.TIMED_DTYPES
NHD, HND = CacheLayout
SMALL = shapes.Case("small", 2, 32)


DTYPES = [dtype.value for dtype in shapes.TIMED_DTYPES]
TORCH_WRITERS = ["torch index_copy_", "torch index_put_"]
EXPECTED = {
    "write": [
        ("write", ["kvjax"], DTYPES),
        ("write", ["XLA scatter", *TORCH_WRITERS], DTYPES[:2]),
        ("write by cache size", ["kvjax"], DTYPES),
    ],
    "gather": [("gather", ["kvjax"], DTYPES), ("gather", ["XLA gather", "torch index_select"], DTYPES[:2])],
    "pack": [("pack", ["kvjax", "kvjax write", "torch eager"], ["nvfp4"])],
    "bridge": [
        ("bridge kernel", ["kvjax", "kvjax_torch"], DTYPES),
        ("bridge first call", ["kvjax_torch"], DTYPES),
        ("bridge host", ["kvjax under jit", "kvjax_torch, scales as floats", "torch index_copy_"], ["nvfp4"]),
    ],
    "host": [
        ("host write", ["kvjax", "kvjax_torch"], DTYPES),
        ("host write", TORCH_WRITERS, DTYPES[:2]),
        ("host write", ["kvjax, cache not donated", "XLA scatter"], ["bfloat16"]),
    ],
    "calls": [
        ("trace and lower", ["kvjax"], ["bfloat16", "nvfp4"]),
        ("dispatch", ["64 caches, read", "64 arrays, read", "64 caches, donated and returned"], ["bfloat16"]),
    ],
    "copies": [("copy", ["copy"], [None])],
    "sharded": [(f"sharded {what}", ["one device", "2 devices"], DTYPES) for what in ("write", "gather")],
    "layers": [("step over layers", [operations.SCAN, operations.UNROLLED, operations.SEPARATE], ["nvfp4"])],
    "attention": [("attention", ["kvjax"], DTYPES), ("attention", ["torch sdpa"], ["bfloat16"])],
    "ragged": [("ragged attention", ["kvjax", "kvjax without cascade", "kvjax_torch"], DTYPES)],
    "generate": [
        ("decode step", ["DynamicCache, sdpa"], ["bfloat16"]),
        ("decode step", ["KvjaxCache, sdpa", "KvjaxCache, kvjax"], DTYPES),
    ],
    "serve": [
        ("serve", ["kvjax"], DTYPES),
        ("serve", ["cuDNN, dense"], ["bfloat16"]),
        ("serve prompts", ["kvjax"], DTYPES),
    ],
}
"""What a smoke run measures: operations, peers and dtypes."""


def run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{program}", *flags]
    # Most of a smoke run's time goes to compiling, and nobody reads its figures.
    environment = os.environ | ({"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} if "--smoke" in flags else {})
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def run_and_read(tmp_path: Path, program: str, *flags: str) -> dict:
    """Runs a program, checks that it wrote the tables that it printed, and returns its JSON."""
    json_path, markdown_path = tmp_path / "measured.json", tmp_path / "tables.md"
    done = run(program, *flags, f"--json={json_path}", f"--markdown={markdown_path}", "--commit=a-commit")
    assert done.returncode == 0, done.stderr
    assert markdown_path.read_text() in done.stdout
    written = json.loads(json_path.read_text())
    assert (written["schema"], written["program"]) == (1, f"benchmarks.{program}")
    assert written["environment"]["command"].startswith(f"python -m benchmarks.{program} {flags[0]}")
    assert written["environment"]["commit"] == "a-commit"
    assert "a-commit" not in written["environment"]["command"]
    for each in written["measurements"]:
        assert each.keys() >= {*EVERY_FIELD}
        low, high = min(each["samples"]), max(each["samples"])
        assert 0 < low <= each["seconds"] <= high
    for each in written["skipped"]:
        assert each["what"]
        assert each["reason"]
    return written


@matrix({"program": [*EXPECTED]}, few={"program": ["copies"]})
def test_every_program_runs(tmp_path, program, monkeypatch):
    if program in ("bridge", "generate"):
        pytest.importorskip("torch")
    if program == "generate":
        pytest.importorskip("transformers")
    if program == "sharded":  # which needs two devices
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    written = run_and_read(tmp_path, program, "--smoke")
    has_torch = importlib.util.find_spec("torch") is not None
    measured = {(each["operation"], each["peer"], each.get("dtype")) for each in written["measurements"]}
    skipped = {each["what"] for each in written["skipped"]}
    for operation, peers, dtypes in EXPECTED[program]:
        there = [peer for peer in peers if has_torch or "torch" not in peer]
        assert measured >= {(operation, peer, dtype) for peer in there for dtype in dtypes}
    if program == "write":
        assert skipped >= {"vLLM", "FlashInfer"}
    if program == "serve":
        pytest.importorskip("matplotlib")
        done = run("report", str(tmp_path / "measured.json"), f"--output={tmp_path / 'page.md'}", f"--plots={tmp_path}")
        assert done.returncode == 0, done.stderr
        assert len([*tmp_path.glob("*serve*.png")]) == 1
    if has_torch and program != "bridge":
        assert not {what for what in skipped if "torch" in what}


WRITE_FLAGS = ["--cases=qwen3-32b-tp4", "--dtypes=float16,fp8_e5m2", "--layouts=HND", "--slots=padded", "--tokens=5"]
CHOSEN = {
    "write": (
        [*WRITE_FLAGS, "--peers=kvjax", "--blocks=16", "WriteBenchmark.test_token_counts"],
        ("case", "dtype", "layout", "slots", "num_tokens", "peer"),
        [["qwen3-32b-tp4", dtype, "HND", "padded", 5, "kvjax"] for dtype in ("float16", "fp8_e5m2")],
    ),
    "attention": (
        ["--rows=2x48-window-16,2x48", "--dtypes=fp8_e4m3", "--peers=kvjax", "--implementation=xla"],
        ("case", "num_seqs", "seq_len", "q_len", "window_len", "dtype", "peer"),
        [["2x48-window-16", 2, 48, 1, 16, "fp8_e4m3", "kvjax"], ["2x48", 2, 48, 1, None, "fp8_e4m3", "kvjax"]],
    ),
}


@matrix({"program": [*CHOSEN]}, few={"program": ["write"]})
def test_flags_choose_what_is_measured(tmp_path, program):
    flags, names, expected = CHOSEN[program]
    measured = run_and_read(tmp_path, program, "--smoke", *flags)["measurements"]
    assert [[each.get(name) for name in names] for each in measured] == expected
    if program == "attention":
        assert all(0 < each["error"] < 0.01 for each in measured)


@pytest.mark.full
def test_what_is_unavailable_is_reported_and_the_rest_runs(tmp_path):
    flags = ["--smoke", "--implementation=mosaic", "--cases=gpt-oss-20b", f"--json={tmp_path / 'measured.json'}"]
    done = run("pack", *flags)
    if jax.default_backend() == "gpu":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1
    line = "skipped kvjax write: --implementation=mosaic: got cpu, expected an NVIDIA GPU (sm_90 or later)"
    assert line in done.stderr.splitlines()
    written = json.loads((tmp_path / "measured.json").read_text())
    assert "kvjax" in [each["peer"] for each in written["measurements"]]
    assert written["skipped"][0]["what"] == "kvjax write"  # and without torch its peer, too


@pytest.mark.gpu
def test_on_a_gpu_calls_from_torch_are_one_kernel_without_synchronization(tmp_path):
    pytest.importorskip("torch")
    measured = run_and_read(tmp_path, "bridge", "--tokens=64")["measurements"]
    operations = ["host", "kernel", "replay", "replay of add_"]
    of = {operation: [m for m in measured if m["operation"] == f"bridge {operation}"] for operation in operations}
    assert [each["waits"] for each in of["host"]] == [False] * 7
    for each in of["kernel"]:
        assert each["clock"] == timing.Clock.DEVICE
        assert [("reshape_and_cache_flash" in name) for name in each["kernels"]] == [True]
    assert len(of["replay"]) == 12
    for each in of["replay"]:
        assert each["clock"] == timing.Clock.EVENTS
        assert (each["kernel_seconds"] is not None) == (each["num_tokens"] == 64)
    assert [each["peer"] for each in of["replay of add_"]] == ["torch", "torch, two streams"] * 2


@pytest.mark.gpu
def test_on_a_gpu_times_are_those_of_kernels(tmp_path):
    flags = ["--cases=llama-3.1-8b", "--layouts=NHD", "--slots=scattered", "--tokens=7", "--blocks=64"]
    measured = run_and_read(tmp_path, "write", *flags)["measurements"]
    for each in measured:
        assert each["clock"] == timing.Clock.DEVICE
        assert each["kernels"]
        assert each["copy_seconds"] > 0
        assert len(each["samples"]) >= 50
    for name in ("kvjax", "kvjax xla"):
        assert {each["dtype"] for each in measured if each["peer"] == name} >= {*DTYPES}
    by_cuda = {each["dtype"] for each in measured if each["peer"] == "CUDA"}
    assert by_cuda == ({"bfloat16", "fp8_e4m3"} if cuda.nvcc() else set())


@pytest.mark.gpu
def test_on_a_gpu_attention_is_timed_next_to_reading(tmp_path):
    flags = ["--rows=1x8192,64x8192-window-1024", "--peers=read,kvjax,cuDNN"]
    measured = run_and_read(tmp_path, "attention", *flags)["measurements"]
    seconds = {(each["case"], each["dtype"], each["peer"]): each["seconds"] for each in measured}
    assert len(seconds) == 2 * 2 * 3 + 1  # cuDNN has one dtype, and no window
    for each in measured:
        assert each["clock"] == timing.Clock.DEVICE
        assert each["kernels"]
        if each["peer"] == "read":
            assert [("read_alone" in name) for name in each["kernels"]] == [True]
    for (case, dtype, peer), time in seconds.items():
        assert peer == "read" or time > seconds[case, dtype, "read"]


@pytest.mark.parametrize(
    ("flag", "given", "expected"),
    [
        (write.CASES, "llama-9", "gpt-oss-20b"),
        (write.NUM_TOKENS, "0", "at least 1"),
        (write.NUM_BLOCKS, "64,many", "at least 16"),
        (output.IMPLEMENTATION, "triton", "mosaic|xla"),
        (write.PEERS, "numpy", "'XLA scatter'"),
        (write.DTYPES, "int4", "'nvfp4'"),
        (write.SLOTS, "", "'padded'"),
    ],
    ids=lambda value: value.name if isinstance(value, flags.FlagHolder) else None,
)
def test_a_wrong_flag_is_refused_with_what_is_right(flag, given, expected):
    values = flags.FlagValues()
    values[flag.name] = copy.deepcopy(flags.FLAGS[flag.name])
    with pytest.raises(flags.IllegalFlagValueError, match=re.escape(expected)):
        values(["a program", f"--{flag.name}={given}"])


@pytest.mark.parametrize(
    ("config", "tensor_parallel", "name"),
    [
        ("Llama-3.1-8B-Instruct", 1, "llama-3.1-8b"),
        ("Qwen3-32B-NVFP4", 4, "qwen3-32b-tp4"),
        ("gpt-oss-20b", 1, "gpt-oss-20b"),
    ],
)
def test_cases_are_those_of_the_models_they_are_named_after(config, tensor_parallel, name):
    read = json.loads((ROOT / f"tests/data/configs/{config}.json").read_text())
    layers = ModelKVConfig.from_hf_config(read).shard(tensor_parallel).layers
    case = shapes.CASES_BY_NAME[name]
    assert {(layer.num_kv_heads, layer.head_size) for layer in layers} == {(case.num_kv_heads, case.head_size)}


@pytest.fixture
def tokens():
    return workload.Tokens(SMALL, max_tokens=8, num_blocks=4, rotation_bytes=4096)


@matrix({"dtype": STORED_KV_CACHE_DTYPES}, few={"dtype": FEW_DTYPES})
def test_a_write_is_checked_in_every_byte(tokens, dtype):
    spec = SMALL.spec(dtype)
    expected = tokens.expected(spec, 5)
    write = workload.Write(tokens.poisoned(spec), tokens.batches(5), "xla")
    write(0)
    write.check(expected)
    with pytest.raises(AssertionError, match=r"1 of .* elements differ"):
        write.check(KVCache(expected.kv.at[3, 1, 15, 1, 0].set(0), spec))
    write.cache = KVCache(jnp.copy(write.cache.kv), spec)
    with pytest.raises(AssertionError, match="not in place"):
        write.check(expected)


def test_batches_share_neither_tokens_nor_slots(tokens):
    batches = tokens.batches(8)
    assert len(batches) == 4096 // (8 * 2 * 2 * 32 * 2)
    assert len({tuple(batch.key[0, 0].tolist()) for batch in batches}) == len(batches)
    slots = jnp.concatenate([batch.slot_mapping for batch in batches])
    assert len({*slots.tolist()}) == len(slots)
    assert tokens.num_blocks * 16 > slots.max() >= 0 <= slots.min()


@pytest.mark.parametrize("slots", Slots)
def test_slots_are_of_their_kind(slots):
    tokens = workload.Tokens(SMALL, max_tokens=8, num_blocks=4, rotation_bytes=4096, slots=slots)
    found = [np.asarray(batch.slot_mapping) for batch in tokens.batches(8)]
    written = [[*each[: 8 - slots.num_padded(8)]] for each in found]
    assert all((each[8 - slots.num_padded(8) :] == -1).all() for each in found)
    assert min(map(min, written)) >= 0
    in_order = [sorted(each) == each and each[-1] - each[0] == len(each) - 1 for each in written]
    assert all(in_order) if slots is Slots.CONTIGUOUS else not any(in_order)


@pytest.mark.parametrize(("bits", "codes"), [(8, 1 << 12), (4, 1 << 13)])
def test_a_peer_may_round_a_few_codes_the_other_way(bits, codes):
    expected = jnp.full(1 << 12, 0x12, jnp.uint8)
    a_step = expected.at[: codes // 1000].set(0x13)
    assert workload.check_codes(a_step, expected, bits=bits) == {"codes_apart": codes // 1000}
    for got in (expected.at[0].set(0x15), expected.at[: codes // 1000 + 1].set(0x13), expected.at[0].set(0x92)):
        with pytest.raises(AssertionError, match="codes differ"):
            workload.check_codes(got, expected, bits=bits)
    zero = jnp.full(1 << 12, 1 << (bits - 1), jnp.uint8)  # -0, next to the smallest number of either sign
    for code in (0x00, 0x01, 1 + (1 << (bits - 1))):
        assert workload.check_codes(zero.at[0].set(code), zero, bits=bits) == {"codes_apart": 1}


JOBS_OF_PEERS = [
    {"peer": peer.name, "dtype": dtype, "layout": layout, "slots": slots}
    for peer in (writes.XLA_SCATTER, writes.INDEX_COPY, writes.INDEX_PUT, writes.VLLM, writes.FLASHINFER)
    for dtype, layout, slots in itertools.product(STORED_KV_CACHE_DTYPES, CacheLayout, Slots)
    if peer.serves(WriteJob(SMALL, dtype, 8, layout, slots))
]


@each_case(JOBS_OF_PEERS, pairs=True)
def test_every_peer_writes_what_kvjax_writes(case, libraries_of_torch):
    job = WriteJob(SMALL, case["dtype"], 8, case["layout"], case["slots"])
    [peer] = [peer for peer in writes.PEERS if peer.name == case["peer"]]
    tokens = workload.Tokens(SMALL, max_tokens=8, num_blocks=4, rotation_bytes=4096, slots=job.slots)
    inputs = WriteInputs(job, tokens, tokens.batches(8))
    ready = peer.prepare(inputs)
    ready.wait(ready.call(0))
    assert (ready.check(None) or {}).get("codes_apart", 0) <= 1
    ready = peer.prepare(inputs)
    ready.wait(ready.call(1))  # other tokens
    with pytest.raises(AssertionError, match="differ"):
        ready.check(None)


@pytest.fixture
def libraries_of_torch(monkeypatch):
    """Stands for vLLM and FlashInfer on a machine without them: their operations as torch would write them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("kvjax_torch")

    def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
        assert slot_mapping.dtype is torch.int64
        assert key_cache.shape[1] == shapes.BLOCK_SIZE
        assert k_scale.shape == v_scale.shape == (1,)
        fp8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(kv_cache_dtype)
        written = slot_mapping >= 0
        index = slot_mapping[written] // shapes.BLOCK_SIZE, slot_mapping[written] % shapes.BLOCK_SIZE
        for x, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            rows = x[written] if fp8 is None else (x[written].float() / scale).to(fp8).view(torch.uint8)
            cache.index_put_(index, rows)

    def append_paged_kv_cache(
        append_key, append_value, batch_indices, positions, cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout
    ):
        assert kv_last_page_len.shape == (1,)
        pages = cache if kv_layout == "NHD" else cache.transpose(2, 3)
        first = kv_indptr[batch_indices.long()].long()
        page = kv_indices[first + positions.long() // shapes.BLOCK_SIZE].long()
        for half, x in enumerate((append_key, append_value)):
            pages[:, half].index_put_((page, positions.long() % shapes.BLOCK_SIZE), x)

    def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        append_key, append_value, slot_mapping, caches, scale_caches, k_scale, v_scale, kv_layout
    ):
        written = slot_mapping >= 0
        slots = slot_mapping[written].long()
        index = slots // shapes.BLOCK_SIZE, slots % shapes.BLOCK_SIZE
        for x, cache, scale_cache, scale in zip(
            (append_key, append_value), caches, scale_caches, (k_scale, v_scale), strict=True
        ):
            data, block_scales = packs.torch_pack(x[written], scale)
            for into, rows in ((cache, data), (scale_cache.view(torch.uint8), block_scales)):
                (into if kv_layout == "NHD" else into.transpose(1, 2)).index_put_(index, rows)

    modules = {"vllm": "_custom_ops", "flashinfer": "page"}
    operations = (
        [reshape_and_cache_flash],
        [append_paged_kv_cache, nvfp4_quantize_append_paged_kv_cache_with_slot_mapping],
    )
    for (package, name), functions in zip(modules.items(), operations, strict=True):
        module = types.SimpleNamespace(**{function.__name__: function for function in functions})
        monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(**{name: module}))
        monkeypatch.setitem(sys.modules, f"{package}.{name}", module)


def test_packing_in_torch_is_packing():
    torch = pytest.importorskip("torch")
    ends = [0.0, -0.0, 448.0, 3e38, -1e-30, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, 1e-3, -7.0]
    rows = np.stack([np.float32(ends), *np.random.default_rng(0).standard_normal((500, 16), np.float32)])
    for scale in (0.037, 1.0):
        expected = quant.encode_nvfp4(jnp.asarray(rows), np.float32(scale))
        data, block_scales = packs.torch_pack(torch.from_numpy(rows), float(np.float32(scale)))
        np.testing.assert_array_equal(data.numpy(), expected[0])
        np.testing.assert_array_equal(block_scales.numpy(), np.asarray(expected[1]).view(np.uint8))


def test_the_wall_clock_times_calls_of_different_numbers():
    numbers = []
    timed = timing.measure(numbers.append, wait=lambda _: None, max_seconds=0.01)
    assert numbers == list(range(len(numbers)))
    assert 50 <= timing.LIMITS.min_calls <= len(timed.samples) <= timing.LIMITS.max_calls < len(numbers)
    low, high = timed.spread
    assert min(timed.samples) <= low <= timed.seconds <= high <= max(timed.samples)
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
    samples = (0.003,) * timing.LIMITS.max_calls
    assert timed == timing.Timing(samples, timing.Clock.DEVICE, ("cast", "scatter"))


@pytest.mark.parametrize(("seconds", "blind"), [((0.01, 0.02), False), ((0.01, 0.011), True), ((0.01, 0.04), True)])
def test_a_clock_that_does_not_tell_twice_the_work_fails_the_program(monkeypatch, seconds, blind):
    timings = tuple(timing.Timing((each,) * 3, timing.Clock.WALL) for each in seconds)
    monkeypatch.setattr(timing, "once_and_twice", lambda: timings)
    program = output.Program("test_the_clock_tells_twice_the_work")
    with pytest.raises(AssertionError, match="no time of this run") if blind else contextlib.nullcontext():
        program.test_the_clock_tells_twice_the_work()


@dataclasses.dataclass(frozen=True)
class FakeJob:
    subject: dict = dataclasses.field(default_factory=lambda: {"case": "a case", "num_tokens": 3}, hash=False)
    bytes_moved: int = 4096


def fake_peer(name, call, check=lambda _: None, **fields) -> Peer:
    return Peer(name, lambda _: Run(call, check, wait=lambda _: None), **fields)


@pytest.fixture
def results():
    flags.FLAGS.mark_as_parsed()
    return output.Report("benchmarks.fake")


def compare_all(results, peers, why_too_large=lambda _: None, make_inputs=lambda _: ()):
    program = output.Program("test_what_was_asked_for_is_there")
    program.results = results
    compare.compare_all(program, "fake", [FakeJob()], peers, make_inputs, why_too_large)
    return {each.peer: each for each in results.measurements}


def fail(error):
    raise error


def test_a_peer_that_is_wrong_or_fails_is_not_timed_and_the_rest_is(results, capsys):
    wrong = fake_peer("wrong", lambda _: None, lambda _: fail(AssertionError("3 elements differ\nand more")))
    broken = fake_peer("broken", lambda _: fail(ValueError("no such op")))
    own = fake_peer("kvjax", lambda _: None, lambda _: fail(AssertionError("it differs")), own=True)
    right = fake_peer("right", lambda _: None, lambda _: {"codes_apart": 1})
    elsewhere = fake_peer("elsewhere", lambda _: None, serves=lambda job: False)
    with pytest.raises(AssertionError, match="it differs"):  # once the others are through
        compare_all(results, [wrong, broken, elsewhere, own, right])
    assert [(each.peer, each.facts) for each in results.measurements] == [("right", {"codes_apart": 1})]
    assert results.skipped == {
        "wrong (fake: a case, 3)": "wrong: 3 elements differ\nand more",
        "broken (fake: a case, 3)": "ValueError: no such op",
        "kvjax (fake: a case, 3)": "wrong: it differs",
    }
    assert "skipped wrong (fake: a case, 3): wrong: 3 elements differ\nskipped broken" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "cuda"])
def test_what_does_not_fit_into_memory_is_skipped(results, error):
    error = RuntimeError("CUDA out of memory. Tried to allocate") if error == "cuda" else error
    own = fake_peer("kvjax", lambda _: fail(error), own=True)
    compare_all(results, [own])
    assert compare_all(results, [own], make_inputs=lambda _: fail(error)) == {}
    assert [*results.skipped] == ["kvjax (fake: a case, 3)", "fake: a case, 3"]


def test_what_would_not_fit_into_memory_is_not_tried(results):
    assert memory.why_too_large(1, 1) is None
    peers = [fake_peer("kvjax", lambda _: fail(MemoryError()))]
    assert compare_all(results, peers, lambda _: memory.why_too_large(1 << 60)) == {}
    assert re.match(r"too little memory: needs 1,0.*GiB on the device", results.skipped["fake: a case, 3"])
    huge = WriteJob(shapes.LLAMA_8B, BFLOAT16, 1 << 40)
    assert "too little memory" in huge.why_too_large(1 << 40)


def test_a_peer_that_a_flag_names_has_to_be_there(results):
    absent = fake_peer("absent", lambda _: None, why_missing=lambda: "not importable: no such module")
    there = fake_peer("there", lambda _: None)
    assert compare.present(results, [absent, there], None) == [there]
    assert results.missing == []
    assert compare.present(results, [absent, there], ["absent"]) == []
    assert results.missing == ["absent: not importable: no such module"]


def test_a_file_has_every_sample_of_what_was_measured(results, tmp_path):
    times = timing.Timing((0.001, 0.003, 0.002), timing.Clock.WALL)
    results.measurements.append(Measurement("fake", {"dtype": NVFP4}, "kvjax", times, 10, times, {"more": 1}))
    results.skip("vLLM", "not importable")
    results.save(tmp_path / "file.json")
    written = json.loads((tmp_path / "file.json").read_text())
    known = {"operation": "fake", "dtype": "nvfp4", "peer": "kvjax", "clock": "wall", "bytes_moved": 10, "more": 1}
    found = {"seconds": 0.002, "samples": [0.001, 0.003, 0.002], "copy_seconds": 0.002, "kernels": []}
    assert written["measurements"] == [known | found]
    assert written["copy_rates"][0]["samples"] == [0.001, 0.003, 0.002]
    assert written["skipped"] == [{"what": "vLLM", "reason": "not importable"}]


def test_the_wall_clock_serves_where_another_profiler_is_attached(monkeypatch):
    profiler = Profiler(RuntimeError("another subscriber"))
    monkeypatch.setattr(timing, "_cupti", lambda: profiler)
    with pytest.warns(UserWarning, match="another subscriber"):
        assert timing.measure(profiler.call, wait=lambda _: None).clock is timing.Clock.WALL


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "got 0 kernel timestamps"),
        ([("cast", 1.0)] * 3, "got 3 kernel timestamps, expected a positive multiple of calls=2"),
        ([("cast", 1.0), ("scatter", 1.0)], "got a call of kernels"),
    ],
)
def test_kernel_timestamps_are_summed_for_each_of_equal_calls(records, message):
    right = [("cast", 1.0), ("scatter", 2.0), ("cast", 3.0), ("scatter", 4.0)]
    assert timing.split_calls(right, 2) == ([0.003, 0.007], ("cast", "scatter"))
    with pytest.raises(RuntimeError, match=message):
        timing.split_calls(records, 2)


def write_time(
    dtype=BFLOAT16, layout=NHD, *, heads=(8, 128), seconds=1.0, clock=timing.Clock.DEVICE, peer="kvjax", **changes
) -> Measurement:
    case = shapes.Case("a case", *heads)
    subject = {**case.subject(dtype, layout), "slots": "scattered", "num_tokens": 16_384, **changes}
    times, copied = (timing.Timing((each,), clock) for each in (seconds, 0.9))
    return Measurement("write", subject, peer, times, 1, copied)


@pytest.mark.parametrize(
    ("line", "cuda", "expected"),
    [
        (write_time(), None, ["90.0% of copy: falls short"]),
        (write_time(FP8), None, ["90.0% of copy: pass"]),
        (write_time(FP8, heads=(8, 96)), None, ["90.0% of copy: pass"]),
        (write_time(KVCacheDType.NVFP4_4OVER6, num_tokens=65_536, seconds=1.1), None, ["81.8% of copy: pass"]),
        (write_time(NVFP4, num_tokens=65_536, seconds=1.1), None, ["81.8% of copy: falls short"]),
        (write_time(NVFP4, num_tokens=65_536, heads=(1, 128), seconds=1.1), None, ["81.8% of copy: pass"]),
        (write_time(num_tokens=64), 1.25, ["0.80 x CUDA: pass"]),
        (write_time(num_tokens=64), 1.0, ["1.00 x CUDA: falls short"]),
        (write_time(num_tokens=64), None, ["-"]),  # no nvcc
        (write_time(NVFP4, num_tokens=7, seconds=0.5), None, ["1.25 x bf16: pass"]),
        (write_time(NVFP4, HND, num_tokens=7, seconds=0.6), None, ["1.20 x NHD: falls short"]),
        (write_time(FP8, HND, num_tokens=7), None, ["-"]),  # not timed in NHD
        (write_time(clock=timing.Clock.WALL), None, ["-"]),
        (write_time(num_tokens=2_048), None, []),
        (write_time(num_tokens=1, slots=Slots.PADDED), None, []),
        (write_time(heads=(1, 128)), None, []),
        (write_time(peer="CUDA"), None, []),
    ],
)
def test_verdicts(line, cuda, expected):
    others = [write_time(num_tokens=7, seconds=0.4), write_time(NVFP4, num_tokens=7, seconds=0.5)]
    if cuda:
        others.append(write_time(num_tokens=64, peer="CUDA", seconds=cuda))
    assert bars.verdicts(line, Rows([*others, line])) == expected


def torch_time(operation, peer, us, clock=timing.Clock.HOST, **facts) -> Measurement:
    subject = {**WriteJob(SMALL, NVFP4, 64).subject, **({"num_writes": 32} if operation == "replay" else {})}
    return Measurement(f"bridge {operation}", subject, peer, timing.Timing((us * 1e-6,), clock), facts=facts)


FLOATS = "kvjax_torch, scales as floats"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (torch_time("host", FLOATS, 19.0), "1.90 x index_copy_: pass"),
        (torch_time("host", FLOATS, 19.0, index_copy_ratio=2.1), "2.10 x index_copy_: falls short"),
        (torch_time("host", FLOATS, 19.0, waits=True), "the host waits: falls short"),
        (torch_time("kernel", "kvjax_torch", 1.06, timing.Clock.DEVICE), "1.06 x jit: falls short"),
        (torch_time("replay", "kvjax_torch", 35.2, kernel_seconds=1e-6), "1.10 x kernels: pass"),
        (torch_time("replay", "kvjax_torch", 35.2), "-"),
    ],
)
def test_verdicts_of_calls_from_torch(line, expected):
    others = [torch_time("host", "torch index_copy_", 10.0), torch_time("kernel", "kvjax", 1.0)]
    assert bars.verdicts(line, Rows([*others, line])) == [expected]
    by_wall = dataclasses.replace(line, times=timing.Timing(line.times.samples, timing.Clock.WALL))
    assert bars.verdicts(by_wall, Rows(others)) == ["-"]


def test_bytes_moved():
    assert WriteJob(SMALL, NVFP4, 7, slots=Slots.PADDED).bytes_moved == 6 * 2 * 2 * (32 * 2 + 16 + 2) + 7 * 4
    # Seven tokens of two heads of 32, keys and values: bfloat16 in, a slot, two codes a byte and a scale for 16 out.
    assert WriteJob(SMALL, NVFP4, 7).bytes_moved == 7 * 2 * 2 * (32 * 2 + 16 + 2) + 7 * 4


@pytest.mark.full
@pytest.mark.skipif(cuda.nvcc() is None, reason="needs CUDA's compiler")
def test_the_cuda_kernels_build(tmp_path):
    cuda.build(tmp_path / "peers.so")
    library = ctypes.CDLL(str(tmp_path / "peers.so"))
    for name in (*cuda.WRITES.values(), "copy_by_kernel", "time_memcpy", "synchronize", "error_string"):
        assert getattr(library, name)


def test_cuda_kernels_have_threads_for_their_rows_and_serve_some_caches():
    fitted = {128: 32, 768: 96, 1024: 128, 8192: 512}
    assert {elements: cuda.fitted_threads(elements) for elements in fitted} == fitted
    assert [cuda.vllm_threads(elements) for elements in fitted] == [128, 512, 512, 512]
    specs = SMALL.spec(FP8), SMALL.spec(KVCacheDType.FP8_E5M2), SMALL.spec(BFLOAT16, HND)
    assert [cuda.serves(spec) for spec in specs] == [True, False, False]
