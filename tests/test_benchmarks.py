"""The benchmark programs run, check bytes before they time them, and judge times as they say; no test asserts one."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import json
import re
import types
import unittest
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from support.benchmark_checks import assert_measures, assert_verdicts, run_and_read, timed
from support.helpers import FEW_DTYPES, matrix

from benchmarks import bars, compare, output, serving, shapes, tables, timing, workload, write
from benchmarks.measurement import Measurement, read
from benchmarks.peers import attends, cuda, serves_torch, writes
from benchmarks.peers.attention_inputs import AttentionJob
from benchmarks.peers.inputs import WriteInputs
from benchmarks.peers.peer import Peer, Run
from benchmarks.serving import LLAMA_8B, LLAMA_70B, TINY, ServeJob
from benchmarks.shapes import TIMED_DTYPES, Slots
from benchmarks.timing import Clock
from benchmarks.workload import WriteJob
from examples import llama
from kvjax import STORED_KV_CACHE_DTYPES, CacheLayout, KVCache, KVCacheDType

BFLOAT16, FP8, NVFP4 = TIMED_DTYPES
NHD, HND = CacheLayout
SMALL = shapes.Case("small", 2, 32)

DTYPES = [dtype.value for dtype in TIMED_DTYPES]
TORCH_WRITERS = ["torch index_copy_", "torch index_put_"]
EXPECTED = {
    "write": [
        ("write", ["kvjax"], DTYPES),
        ("write", ["XLA scatter", *TORCH_WRITERS], DTYPES[:2]),
        ("write by cache size", ["kvjax", "kvjax_torch"], DTYPES),
        ("write by cache size", TORCH_WRITERS, DTYPES[:2]),
        ("write by cache size", ["kvjax, cache not donated", "XLA scatter"], ["bfloat16"]),
    ],
    "gather": [("gather", ["kvjax"], DTYPES), ("gather", ["XLA gather", "torch index_select"], DTYPES[:2])],
    "bridge": [
        ("bridge kernel", ["kvjax", "kvjax_torch"], DTYPES),
        ("bridge first call", ["kvjax_torch"], DTYPES),
        ("bridge host", ["kvjax under jit", "kvjax_torch, scales as floats", "torch index_copy_"], ["nvfp4"]),
        ("bridge host attention", ["paged_attention", "paged_attention, out="], ["nvfp4"]),
    ],
    "copies": [("copy", ["copy"], [None])],
    "sharded": [(f"sharded {what}", ["one device", "2 devices"], DTYPES) for what in ("write", "gather")],
    "attention": [("attention", ["kvjax"], DTYPES), ("attention", ["torch sdpa"], ["bfloat16"])],
    "ragged": [("ragged attention", ["kvjax", "kvjax without cascade", "kvjax_torch"], DTYPES)],
    "serve": [
        ("serve", ["kvjax"], DTYPES),
        ("serve", ["kvjax, 20 exact"], DTYPES[1:]),
        ("serve", ["cuDNN, dense"], ["bfloat16"]),
        ("serve prompts", ["kvjax"], DTYPES),
    ],
}
"""What a smoke run measures: operations, peers and dtypes."""


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.nightly] * (x != "attention")) for x in EXPECTED])
def test_every_program_runs(tmp_path, name):
    if name == "bridge":
        pytest.importorskip("torch")
    flags = ["--exact_windows=20"] if name == "serve" else []
    skipped = assert_measures(tmp_path, name, EXPECTED[name], *flags, devices=2 if name == "sharded" else 1)
    if name == "write":
        assert "FlashInfer" in skipped


@pytest.mark.full
def test_devices_divide_the_heads_of_a_model(tmp_path):
    flags = ["--devices=2,4", "--num_layers=1", "--dtypes=nvfp4", "--rows=same", "ServeBenchmark.test_1_steps"]
    measured = run_and_read(tmp_path, "serve", "--smoke", *flags, devices=4)["measurements"]
    one, *several = measured
    assert [each["devices"] for each in measured] == [1, 2, 4]
    for each in measured:
        assert (each["case"], each["num_seqs"]) == ("tiny, 1 of 2 layers", one["num_seqs"])
        assert len(each["samples"]) == TINY.tail - 1 - serving.WARM_UP_STEPS  # to the ends of the sequences
        assert 0 < each["dispatch_ns"] <= each["host_ns"] <= max(each["samples"]) * 1e9
        assert each["error"] <= serving.HIDDEN_ERROR
    ratios = [pytest.approx(each["seconds"] / one["seconds"], rel=1e-3) for each in several]
    assert [each.get("x_one_device") for each in measured] == [None, *ratios]


@pytest.mark.full
def test_flags_choose_what_is_measured(tmp_path):
    flags = ["--cases=qwen3-32b-tp4", "--dtypes=float16,fp8_e5m2", "--layouts=HND", "--slots=padded", "--tokens=5"]
    flags += ["--peers=kvjax", "WriteBenchmark.test_token_counts"]
    measured = run_and_read(tmp_path, "write", "--smoke", *flags)["measurements"]
    names = "case", "dtype", "layout", "slots", "num_tokens", "peer"
    expected = [["qwen3-32b-tp4", dtype, "HND", "padded", 5, "kvjax"] for dtype in ("float16", "fp8_e5m2")]
    assert [[each.get(name) for name in names] for each in measured] == expected


@pytest.mark.gpu
def test_on_a_gpu_calls_from_torch_are_one_kernel_without_synchronization(tmp_path):
    pytest.importorskip("torch")
    measured = run_and_read(tmp_path, "bridge", "--tokens=64")["measurements"]
    of = tables.grouped(measured, lambda each: each["operation"].removeprefix("bridge "))
    assert [each["waits"] for each in of["host"]] == [False] * 4
    for each in of["kernel"]:
        assert each["clock"] == Clock.DEVICE
        assert [("reshape_and_cache_flash" in name) for name in each["kernels"]] == [True]
    assert [each["clock"] for each in of["replay"]] == [Clock.EVENTS] * 6
    assert all((each["kernel_seconds"] is not None) == (each["num_tokens"] == 64) for each in of["replay"])


@pytest.mark.parametrize(
    ("flag", "given", "expected"),
    [(write.CASES, "llama-9", "gpt-oss-20b"), (write.NUM_TOKENS, "0", "at least 1"), (write.SLOTS, "", "'padded'")],
)
def test_a_wrong_flag_is_refused_with_what_is_right(flag, given, expected):
    values = flags.FlagValues()
    values[flag.name] = copy.deepcopy(flags.FLAGS[flag.name])
    with pytest.raises(flags.IllegalFlagValueError, match=re.escape(expected)):
        values(["a program", f"--{flag.name}={given}"])


@pytest.fixture
def tokens():
    return workload.Tokens(SMALL, max_tokens=8, num_blocks=4, rotation_bytes=4096)


@pytest.mark.full
@matrix({"dtype": STORED_KV_CACHE_DTYPES}, few={"dtype": FEW_DTYPES})
def test_a_write_is_checked_in_every_byte(tokens, dtype):
    spec = SMALL.spec(dtype)
    expected = tokens.expected(spec, 5)
    write = workload.Write(tokens.poisoned(spec), tokens.batches(5), "xla")
    write(0)
    write.check(expected)
    somewhere = tuple(np.argwhere(np.asarray(expected.kv, np.float32) > 0)[-1])
    with pytest.raises(AssertionError, match=r"1 of .* elements differ"):
        write.check(KVCache(expected.kv.at[somewhere].set(0), spec))
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


@pytest.mark.parametrize(("bits", "codes"), [(8, 1 << 12), (4, 1 << 13)])
def test_a_peer_may_round_a_few_codes_the_other_way(bits, codes):
    expected = jnp.full(1 << 12, 0x12, jnp.uint8)
    a_step = expected.at[: codes // 1000].set(0x13)
    assert workload.check_codes(a_step, expected, bits=bits) == codes // 1000
    for got in (expected.at[0].set(0x15), expected.at[: codes // 1000 + 1].set(0x13), expected.at[0].set(0x92)):
        with pytest.raises(AssertionError, match="codes differ"):
            workload.check_codes(got, expected, bits=bits)
    zero = jnp.full(1 << 12, 1 << (bits - 1), jnp.uint8)  # -0, next to the smallest number of either sign
    for code in (0x00, 0x01, 1 + (1 << (bits - 1))):
        assert workload.check_codes(zero.at[0].set(code), zero, bits=bits) == 1


WRITERS = {peer.name: peer for peer in (writes.XLA_SCATTER, writes.INDEX_COPY, writes.INDEX_PUT)}


@pytest.mark.full
@matrix(
    {"peer": [*WRITERS], "dtype": STORED_KV_CACHE_DTYPES, "layout": [*CacheLayout], "slots": [*Slots]},
    valid=lambda of: WRITERS[of["peer"]].serves(WriteJob(SMALL, of["dtype"], 8, of["layout"], of["slots"])),
    pairs=True,
)
def test_every_peer_writes_what_kvjax_writes(peer, dtype, layout, slots):
    if peer.startswith("torch"):
        pytest.importorskip("kvjax_torch")
    tokens = workload.Tokens(SMALL, max_tokens=8, num_blocks=4, rotation_bytes=4096, slots=slots)
    inputs = WriteInputs(WriteJob(SMALL, dtype, 8, layout, slots), tokens)
    ready = WRITERS[peer].prepare(inputs)
    ready.wait(ready.call(0))
    assert (ready.check(None) or {}).get("codes_apart", 0) <= 1
    ready = WRITERS[peer].prepare(inputs)
    ready.wait(ready.call(1))  # other tokens
    with pytest.raises(AssertionError, match="differ"):
        ready.check(None)


def test_device_timestamps_are_summed_for_each_of_equal_calls_after_the_warm_up(monkeypatch):
    """A mock stands for jax's CUPTI extension; call n launches kernels of n and 2 ms."""
    records: list[tuple[str, float]] = []
    profiler = Mock(_cupti_init=records.clear, _cupti_get_timings=lambda finalize: [*records])
    monkeypatch.setattr(timing, "_cupti", lambda: profiler)
    found = timing.measure(lambda n: records.extend([("cast", n), ("scatter", 2.0)]), wait=lambda _: None)
    assert (found.clock, found.kernels) == (Clock.DEVICE, ("cast", "scatter"))
    expected = (np.arange(timing.LIMITS.max_calls) + records[0][1] + 2.0) / 1e3
    np.testing.assert_allclose(found.samples, expected)
    assert records[0][1] >= 2  # one call compiled, others warmed up
    with pytest.raises(RuntimeError, match="got 3 kernel timestamps, expected a positive multiple of calls=2"):
        timing.split_calls(records[:3], 2)
    with pytest.raises(RuntimeError, match="got a call of kernels"):
        timing.split_calls(records[:2], 2)


@pytest.mark.parametrize("twice", [0.011, 0.04])
def test_a_program_fails_where_twice_the_work_does_not_take_twice_the_time(monkeypatch, twice):
    timings = [timing.Timing((each,) * 3, Clock.WALL) for each in (0.01, twice)]
    monkeypatch.setattr(timing, "once_and_twice", lambda: timings)
    with pytest.raises(AssertionError, match="no time of this run"):
        output.Program("test_the_clock_tells_twice_the_work").test_the_clock_tells_twice_the_work()


def fake_peer(name, call=lambda _: None, check=lambda _: None, **fields) -> Peer:
    return Peer(name, lambda _: Run(call, check, wait=lambda _: None), **fields)


@pytest.fixture(autouse=True)
def results():
    flags.FLAGS.mark_as_parsed()
    return output.Report("benchmarks.fake")


def compare_all(results, peers, make_inputs=lambda _: ()) -> list[str]:
    """Runs a program that compares peers, and returns what fails it."""
    job = types.SimpleNamespace(subject={"case": "a case", "num_tokens": 3}, bytes_moved=4096)
    test = unittest.FunctionTestCase(lambda: compare.compare_all(test, "fake", [job], peers, make_inputs))
    test.results, found = results, unittest.TestResult()
    test.run(found)
    return [text for _, text in (*found.failures, *found.errors)]


def test_a_peer_that_is_wrong_or_fails_is_not_timed_and_the_rest_is(results, capsys):
    wrong = fake_peer("wrong", check=Mock(side_effect=AssertionError("3 elements differ\nand more")))
    broken = fake_peer("broken", Mock(side_effect=ValueError("no such op")))
    own = fake_peer("kvjax", check=Mock(side_effect=AssertionError("it differs")), own=True)
    right = fake_peer("right", check=lambda _: {"codes_apart": 1})
    elsewhere = fake_peer("elsewhere", serves=lambda job: False)
    [failure] = compare_all(results, [wrong, broken, elsewhere, own, right])
    assert "it differs" in failure
    assert [(each.peer, each.facts) for each in results.measurements] == [("right", {"codes_apart": 1})]
    assert results.skipped == {
        "wrong (fake: a case, 3)": "wrong: 3 elements differ\nand more",
        "broken (fake: a case, 3)": "ValueError: no such op",
        "kvjax (fake: a case, 3)": "wrong: it differs",
    }
    assert "skipped wrong (fake: a case, 3): wrong: 3 elements differ\nskipped broken" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError, RuntimeError("RESOURCE_EXHAUSTED"), RuntimeError("CUDA out of memory")])
def test_what_does_not_fit_into_memory_is_skipped(results, error):
    own = fake_peer("kvjax", Mock(side_effect=error), own=True)
    assert compare_all(results, [own]) == compare_all(results, [own], make_inputs=Mock(side_effect=error)) == []
    assert results.measurements == []
    assert [*results.skipped] == ["kvjax (fake: a case, 3)", "fake: a case, 3"]


def test_a_peer_that_a_flag_names_has_to_be_there(results):
    absent = fake_peer("absent", why_missing=lambda: "not importable: no such module")
    there = fake_peer("there")
    assert compare.present(results, [absent, there], None) == [there]
    assert results.missing == []
    assert compare.present(results, [absent, there], ["absent"]) == []
    assert results.missing == ["absent: not importable: no such module"]


def test_a_file_and_the_table_have_what_was_measured(results, tmp_path):
    times = timing.Timing((0.001, 0.003, 0.002), Clock.WALL)
    for peer, facts in (("kvjax", {"more": 1}), ("CUDA", {})):
        results.measurements.append(Measurement("fake", {"dtype": NVFP4, "size": 8}, peer, times, 10, times, facts))
    results.measurements.append(Measurement("fake", {"dtype": FP8, "size": 8}, "a|b", times))
    results.skip("FlashInfer", "not importable")
    results.save(tmp_path / "file.json")
    written = json.loads(text := (tmp_path / "file.json").read_text())
    assert [line.count('"operation": ') for line in text.splitlines()] == [0, 1, 1, 1]
    known = {"operation": "fake", "dtype": "nvfp4", "size": 8, "peer": "kvjax", "clock": "wall", "bytes_moved": 10}
    found = {"seconds": 0.002, "samples": [0.001, 0.003, 0.002], "copy_seconds": 0.002, "kernels": [], "more": 1}
    assert written["measurements"][0] == known | found | {"about": ["dtype", "size"]}
    assert written["skipped"] == [{"what": "FlashInfer", "reason": "not importable"}]
    _, rows = read(tmp_path / "file.json")
    assert [each.record() for each in rows] == [each.record() for each in results.measurements]
    heading, caption, table = tables.of_operations(rows)
    assert (heading, caption[:28]) == ("### Fake", "Size 8. Medians of 3 calls, ")
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    assert lines[0] == ["dtype", "by", "us", "5-95%", "x kvjax", "MB moved", "GB/s", "of copy", "more"]
    spread = "1,100.00-2,900.00"
    assert lines[2] == ["nvfp4", "kvjax", "2,000.00", spread, "-", "0.000", "5e-06", "100.0%", "1"]
    assert lines[3][1:5] == ["CUDA", "2,000.00", spread, "1.00"]
    assert lines[4] == ["fp8_e4m3", "a\\|b", "2,000.00", spread, "-", "-", "-", "-", "-"]


@pytest.mark.full
def test_plots_and_readmes_table_are_of_the_measurements(results, tmp_path):
    plots = pytest.importorskip("benchmarks.plots")
    (tmp_path / "docs/plots").mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"before\n{plots.BEGIN}old\n{plots.END}after\n")
    rows = [shapes.ATTENTION_ROWS_BY_NAME[row] for row in plots.ROWS]
    attention = [AttentionJob(row, dtype) for row in rows for dtype in TIMED_DTYPES]
    written = [WriteJob(shapes.LLAMA_8B, dtype, count) for dtype in TIMED_DTYPES for count in (1, 64)]
    for operation, jobs, peers in (
        ("attention", attention, {"kvjax": 100.0, "cuDNN": 150.0, "read": 90.0}),
        ("serve", [ServeJob(LLAMA_8B, dtype, 8) for dtype in TIMED_DTYPES], {"kvjax": 1e4, "cuDNN, dense": 2e4}),
        ("write", written, {"kvjax": 1.0, "CUDA": 2.0}),
    ):
        results.measurements += [timed(operation, job, us, by) for job in jobs for by, us in peers.items()]
    results.save(tmp_path / "every.json")
    plots.main([str(tmp_path / "every.json")], tmp_path)
    drawn = {path.name.rpartition("-")[2]: path.read_text() for path in (tmp_path / "docs/plots").iterdir()}
    assert drawn.keys() == {"attention.svg", "serve.svg", "write.svg"}
    assert drawn["attention.svg"].count(">1.50<") == 18
    before, table, after = re.split("<!--.*-->\n", (tmp_path / "README.md").read_text())
    assert (before, after) == ("before\n", "after\n")
    assert "| `kvjax.paged_attention` | nvfp4 | 100 | 1,165,072 |" in table
    assert "| cuDNN, dense keys and values | bfloat16 | 150 | 327,680 |" in table


def test_verdicts_compare_writes_with_targets():
    def write(dtype, num_tokens, us=1.0, peer="kvjax", layout=NHD, clock=Clock.DEVICE) -> Measurement:
        return timed("write", WriteJob(shapes.LLAMA_8B, dtype, num_tokens, layout), us, peer, clock)

    assert_verdicts(
        (write(BFLOAT16, 16_384), ["90.0% of copy: falls short"]),
        (write(BFLOAT16, 16_384, clock=Clock.WALL), ["-"]),
        (write(FP8, 16_384), ["90.0% of copy: pass"]),
        (write(BFLOAT16, 64, 0.8), ["0.80 x CUDA: pass"]),
        (write(BFLOAT16, 64, peer="CUDA"), []),
        (write(NVFP4, 64), ["1.25 x bf16: pass"]),
        (write(NVFP4, 64, 1.2, layout=HND), ["1.20 x NHD: falls short"]),
        (write(FP8, 7), ["-"]),  # without nvcc
    )
    assert bars.summary(["90.0% of copy: pass", "-", "1.20 x NHD: falls short"]) == " 1 of 2 targets are met."


def test_verdicts_compare_calls_from_torch_with_targets():
    def call(us, peer="kvjax_torch, scales as floats", **facts) -> Measurement:
        return timed("bridge host", WriteJob(SMALL, NVFP4, 64), us, peer, Clock.HOST, **facts)

    assert_verdicts(
        (call(10.0, "torch index_copy_"), []),
        (call(19.0), ["1.90 x index_copy_: pass"]),
        (call(19.0, index_copy_ratio=2.1), ["2.10 x index_copy_: falls short"]),
        (call(19.0, waits=True), ["the host waits: falls short"]),
    )


def attention(name, dtype, us, peer="kvjax") -> Measurement:
    row = (shapes.ATTENTION_ROWS_BY_NAME | shapes.RAGGED_ROWS_BY_NAME)[name]
    return timed("ragged attention" if row.is_step else "attention", AttentionJob(row, dtype), us, peer)


def test_verdicts_compare_attention_with_targets():
    int8, mixed = KVCacheDType.INT8_PER_TOKEN_HEAD, KVCacheDType.FP8_K_NVFP4_V
    assert_verdicts(
        (attention("64x8192", BFLOAT16, 495.0), ["92.9% of reading: pass"]),
        (attention("64x8192", BFLOAT16, 460.0, "read"), []),
        (attention("64x8192", BFLOAT16, 484.0, "cuDNN"), []),
        (attention("64x8192", NVFP4, 200.0), ["66.0% of reading: falls short", "2.42 times as fast as bf16: pass"]),
        (attention("64x8192", NVFP4, 132.0, "read"), []),
        (attention("64x8192-HND", NVFP4, 231.0), ["1.16 x NHD: falls short"]),
        (attention("1x8192", FP8, 11.0), ["11.00 us: pass"]),
        (attention("64x4096-4-tokens", FP8, 38.0), ["-"]),  # the row of one token was not timed
        (attention("chunk", NVFP4, 500.0), ["0.50 x FlashInfer FA2: pass", "-"]),
        (attention("chunk", NVFP4, 530.0, "kvjax_torch"), ["1.06 x JAX: falls short", "-"]),
        (attention("chunk", NVFP4, 1_010.0, "FlashInfer FA2"), []),
        (attention("shared-prefix", NVFP4, 180.0), ["3.00 times as fast as without cascade: pass"]),
        (attention("shared-prefix", NVFP4, 540.0, "kvjax without cascade"), []),
        (attention("late-chunk", FP8, 100.0), []),
        (attention("late-chunk", int8, 102.0), ["1.02 x fp8: pass"]),
        (attention("chunk", NVFP4, 341.0, attends.IN_FP8.name), ["341.00 us: falls short"]),
        (attention("whole", FP8, 745.0, attends.IN_FP8.name), ["745.00 us: pass"]),
        (attention("64x1024", FP8, 120.0), []),
        (attention("64x1024", NVFP4, 80.0), []),
        (attention("64x1024", mixed, 107.0), ["1.07 x the mean of fp8 and nvfp4: pass"]),
        (attention("64x1024", int8, 133.0), ["1.11 x fp8: falls short"]),
        (attention("64x8192", mixed, 107.0), ["-"]),  # fp8 was not timed
    )


def step(dtype, num_seqs, ms, peer="kvjax", devices=1, **facts) -> Measurement:
    job = ServeJob(LLAMA_8B, dtype, num_seqs, devices=devices)
    known = {"rows": job.rows, "device_ns": round(ms * 0.97e6), "host_ns": 10**6, "read_ns": 10**7} | facts
    return timed("serve", job, ms * 1e3, peer, Clock.HOST, **known)


def test_verdicts_compare_serving_with_targets():
    exposed, too_much = "3.0% of a step exposed: pass", "of a step exposed: falls short"
    most = step(NVFP4, 142, 16.0)
    assert_verdicts(
        (most, ["2.66 x bf16 tokens/s: pass", exposed]),
        (step(NVFP4, 32, 8.0), ["0.80 x bf16: falls short", exposed]),
        (step(BFLOAT16, 32, 10.0), ["1.00 x reading: pass", exposed]),
        (step(BFLOAT16, 40, 12.0, device_ns=11 * 10**6), ["1.20 x reading: falls short", f"8.3% {too_much}"]),
        (step(NVFP4, 128, 16.0, "kvjax, 64 exact", rows=bars.MAX_SEQS), ["2.40 x bf16 tokens/s: falls short"]),
        (step(FP8, 80, 17.0), ["1.41 x bf16 tokens/s: falls short", exposed]),
        (step(FP8, 8, 5.0), []),
        (step(NVFP4, 142, 16.0, read_ns=None), []),  # on a device without a reading rate
        (step(BFLOAT16, 40, 12.0, "cuDNN, dense"), []),
    )
    assert [str(bar) for bar in bars.of(most)] == [">= 2.20 x bf16 tokens/s", "<= 5.0% of a step exposed"]


@flagsaver.flagsaver(devices=[2])
def test_verdicts_compare_divided_models_with_targets():
    exposed, waits = "3.0% of a step exposed: pass", "10.0% of a step in its dispatch: pass"
    too_much = "95.0% of a step in its dispatch: falls short"
    assert_verdicts(
        (step(BFLOAT16, 32, 10.0, dispatch_ns=1e5), ["1.00 x reading: pass", exposed]),
        (step(BFLOAT16, 32, 6.1, devices=2, dispatch_ns=6.1e5), ["0.61 x one device: falls short", exposed, waits]),
        (step(NVFP4, 32, 6.0, dispatch_ns=1e5), ["0.60 x bf16: pass", exposed]),
        (step(NVFP4, 32, 4.0, devices=2, dispatch_ns=3.8e6), ["0.67 x one device: pass", exposed, too_much]),
        (step(NVFP4, 32, 3.0, devices=4, dispatch_ns=3e5), [exposed, waits]),
    )


def test_bytes_moved_are_those_of_rows_slots_and_pages():
    # Tokens of two heads of 32, keys and values: bfloat16 in, a slot, two codes a byte and a scale for 16 out.
    for slots, written in ((Slots.SCATTERED, 7), (Slots.PADDED, 6)):
        assert WriteJob(SMALL, NVFP4, 7, slots=slots).bytes_moved == written * 2 * 2 * (32 * 2 + 16 + 2) + 7 * 4
    assert LLAMA_8B.parameter_bytes == 2 * 8_030_261_248  # what the model's card says
    assert LLAMA_8B.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4_096)
    assert ServeJob(LLAMA_8B, BFLOAT16, 32).bytes_moved - LLAMA_8B.weight_bytes == 32 * 8_160 * (128 << 10)
    tied = dataclasses.replace(TINY, config=dataclasses.replace(TINY.config, tie_word_embeddings=True))
    assert tied.weight_bytes == TINY.weight_bytes


@pytest.mark.full
@pytest.mark.skipif(cuda.nvcc() is None, reason="needs CUDA's compiler")
def test_the_cuda_kernels_build(tmp_path):
    cuda.build(tmp_path / "peers.so")
    library = ctypes.CDLL(str(tmp_path / "peers.so"))
    assert all(getattr(library, name) for name in (*cuda.WRITES.values(), "copy_by_kernel", "time_memcpy"))


def test_several_devices_serve_the_rows_that_one_device_holds():
    """An H200 holds 64 sequences of 8,192 tokens in bfloat16 beside Llama-3.1-8B, an H100 32 of them."""
    h100, h200 = 59 << 30, 98 << 30  # three quarters of their memory, as jax allocates
    assert [LLAMA_8B.most(dtype) for dtype in TIMED_DTYPES] == [40, 80, 142]
    assert (LLAMA_8B.seq_len - LLAMA_8B.tail) % shapes.BLOCK_SIZE == 0
    assert serving.fitted(LLAMA_8B, h200) == LLAMA_8B
    assert serving.fitted(LLAMA_70B, h200).name == "llama-3.1-70b, 33 of 80 layers"
    with flagsaver.flagsaver(devices=[2]):
        several = [serving.fitted(of, memory) for of in (LLAMA_8B, LLAMA_70B) for memory in (h100, h200)]
        assert [(of.same, of.config.num_hidden_layers) for of in several] == [(32, 32), (64, 32), (32, 18), (64, 24)]
        assert [of.most(BFLOAT16, devices=2) for of in several] == [64, 128, 64, 128]
    with flagsaver.flagsaver(num_layers=81), pytest.raises(ValueError, match=r"num_layers: got 81, .* the 80"):
        serving.fitted(LLAMA_70B, h200)
    assert LLAMA_70B.parameter_bytes == 2 * 70_553_706_496  # what the model's card says
    assert LLAMA_70B.bytes_a_sequence(BFLOAT16) == 8_192 * (320 << 10)


@pytest.mark.full
def test_full_caches_leave_only_the_last_tokens_to_compute():
    """The engine finds all but the last tokens in the caches, in blocks that lie apart."""
    engine, run = serving.full_engine(ServeJob(TINY, BFLOAT16, 3))
    engine.step()
    step = run.last[1]
    assert step.seq_lens.tolist() == [TINY.seq_len - TINY.tail + 1] * 3
    assert np.diff(step.cu_q_lens).tolist() == [1, 1, 1]
    assert not (np.diff(step.block_table[:, :3]) == 1).any()
    while not engine.is_idle:
        engine.step()
    assert run.last[1].seq_lens.tolist() == [TINY.seq_len - 1] * 3
    assert {len(np.unique(run.last[1].block_table)), engine.max_num_seqs * 4} == {12}


@pytest.mark.full
def test_a_wrong_step_is_found(monkeypatch):
    right = llama.write_and_attend

    def wrong(query: Any, *args: Any, implementation: str | None, **options: Any) -> Any:
        attended, caches = right(query, *args, implementation=implementation, **options)
        return attended * (1 if implementation == "xla" else 1.5), caches

    monkeypatch.setattr(llama, "write_and_attend", wrong)
    with pytest.raises(AssertionError, match="off those by XLA"):
        serving.check(ServeJob(TINY, FP8, 2))


@pytest.mark.full
@pytest.mark.parametrize("name", serves_torch.NAMES)
def test_transformers_decodes_from_full_caches_and_wrong_attention_over_pages_is_found(name, monkeypatch):
    pytest.importorskip("transformers")
    job = ServeJob(TINY, BFLOAT16, TINY.same)
    assert serves_torch.serves(name, job)
    _, facts = serves_torch.serve(name, job)
    assert ("error" in facts) == (name == serves_torch.PAGED)
    monkeypatch.setattr(serves_torch, "MAX_ERROR", 0.0)
    with pytest.raises(AssertionError, match="logits are off") if "error" in facts else contextlib.nullcontext():
        serves_torch.serve(name, dataclasses.replace(job, dtype=NVFP4))
    serves_torch.free()
