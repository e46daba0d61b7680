"""The benchmark of attention: its rows, its peers' arguments, its bars and its table; no test asserts a time."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import sys
import types

import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from helpers import matrix
from interpret_mode import interpret_mode

from benchmarks import ahead, bars, shapes, timing
from benchmarks.measurement import Measurement, Rows
from benchmarks.operations import ATTENTION, RAGGED
from benchmarks.peers import attends, attends_flashinfer, read
from benchmarks.peers.attention_inputs import OWN_ERROR, AttentionInputs, AttentionJob
from benchmarks.peers.peer import Run
from benchmarks.shapes import BLOCK_SIZE, AttentionRow, Step
from kvjax import CacheLayout, KVCacheDType
from kvjax.quant import E2M1_VALUES

BFLOAT16, FP8, NVFP4 = shapes.TIMED_DTYPES
NHD, HND = CacheLayout
TINY = AttentionRow("tiny", 3, 64, num_heads=4, num_kv_heads=2, head_size=32)
TINY_MIXED = Step("tiny", 3, 61, num_heads=4, num_kv_heads=2, head_size=32, q_len=20, num_prompts=1)


@pytest.fixture(autouse=True)
def one_cache(monkeypatch):
    """As few bytes as there can be, and flags that can be read."""
    monkeypatch.setattr(AttentionJob, "num_caches", 2)
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def error_of(run: Run, inputs: AttentionInputs) -> float:
    """What a peer's check says of its results from each cache."""
    errors = []
    for number in range(2):
        attended = run.call(number)
        run.wait(attended)
        errors.append(run.check(attended)["error"])
    return max(errors)


def test_rows_are_those_of_the_bars():
    held = {name: bar.measure for bar in bars.BARS if bar.operation == "attention" for name in bar.where["case"]}
    assert {*held} <= {row.name for row in shapes.ATTENTION_ROWS}
    of_two = bars.X_WINDOW, bars.X_ONE_TOKEN, bars.X_NHD
    assert {row.name for row in shapes.ATTENTION_ROWS if row.base} == {name for name in held if held[name] in of_two}
    for row in shapes.ATTENTION_ROWS:
        assert row.base is None or shapes.ATTENTION_ROWS_BY_NAME[row.base].base is None
    assert len(shapes.ATTENTION_ROWS_BY_NAME) == sum(
        map(len, (shapes.ATTENTION_ROWS, shapes.HOST_ATTENTION_ROWS, shapes.SMOKE_ATTENTION_ROWS))
    )


@pytest.mark.parametrize(
    ("row", "pages"),
    [
        (TINY, 3 * 4),
        (dataclasses.replace(TINY, seq_len=65), 3 * 5),
        (dataclasses.replace(TINY, window=16), 3 * 1),
        (dataclasses.replace(TINY, window=17), 3 * 2),
        (dataclasses.replace(TINY, window=16, q_len=4), 3 * 2),
        (dataclasses.replace(TINY, window=1_000), 3 * 4),
    ],
)
def test_pages_that_a_call_reads(row, pages):
    job = AttentionJob(row, NVFP4)
    assert row.num_blocks_read == pages
    # A token's keys and values of two heads of 32: two codes a byte and a scale for 16.
    assert job.page_bytes == pages * BLOCK_SIZE * 2 * 2 * (32 // 2 + 32 // 16)
    query = 3 * row.q_len * 4 * 32 * 2
    assert job.bytes_moved == job.page_bytes + 4 * (pages + 3) + 2 * query


def test_the_read_kernel_reads_every_word():
    words = np.random.default_rng(0).integers(-(2**31), 2**31, 3 * read.BLOCK_WORDS, dtype=np.int32)

    def found(words: np.ndarray) -> list[int]:
        with interpret_mode():
            return np.asarray(jax.block_until_ready(read.read(jnp.asarray(words)))).tolist()

    first = found(words)
    expected = np.bitwise_xor.reduce(words.reshape(3, read.VECTORS, -1), axis=1).sum(-1, dtype=np.int32)
    assert first == expected.tolist()
    for index in (0, read.BLOCK_WORDS - 1, read.BLOCK_WORDS, words.size - 1):
        changed = words.copy()
        changed[index] ^= 1
        differs = [a != b for a, b in zip(found(changed), first, strict=True)]
        assert differs == [block == index // read.BLOCK_WORDS for block in range(3)]


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@matrix({"target": gpu_compile.TARGETS}, few={"target": ["h100"]})
def test_the_read_kernel_is_its_loads(target):
    """All of a thread's before anything is made of one, and the widest that there are."""
    words = jax.ShapeDtypeStruct((5 * read.BLOCK_WORDS,), jnp.int32)
    program = gpu_compile.compile_for(target, read.read, words)
    [kernel] = program.kernels
    assert (kernel.spill_bytes, program.device_ops) == (0, ("custom-call",))
    assert kernel.registers <= 64  # 8 blocks of threads a multiprocessor, or more
    memory = re.findall(r"(ld\.global\.v4\.b32|ld\.global|xor\.b32|st\.global)", kernel.ptx)
    combined = read.VECTOR_WORDS * (read.VECTORS - 1)
    assert memory == ["ld.global.v4.b32"] * read.VECTORS + ["xor.b32"] * combined + ["st.global"]


def test_a_wrong_result_is_found():
    inputs = AttentionInputs(AttentionJob(TINY, BFLOAT16))
    run = attends.KVJAX.prepare(inputs)
    right = np.asarray(run.call(0), np.float32)
    run.check(right)
    for wrong, message in ((right * 1.01, "1.0.% off"), (right[::-1], "off"), (right * np.nan, "are NaN or infinite")):
        with pytest.raises(AssertionError, match=message):
            run.check(wrong)


def decoded(pages, scales):
    """Elements of such views, in float32."""
    import torch

    if scales is None:
        return pages.float()
    codes = torch.stack([pages & 0xF, pages >> 4], -1).flatten(-2).long()
    values = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])[codes]
    return (values.unflatten(-1, (-1, 16)) * scales.float()[..., None]).flatten(-2)


def attended(query, caches, scales, table, lengths, layout, sm_scale, q_lens, window, soft_cap=None):
    """Attention as FlashInfer's documentation has it, in torch: `query` of `[sum(q_lens), ...]`."""
    import torch

    halves = [
        decoded(half, of) if layout == "NHD" else decoded(half, of).transpose(1, 2)
        for half, of in zip(caches, scales or (None, None), strict=True)
    ]
    rows, tokens = [], iter(query)
    for q_len, blocks, length in zip(q_lens, table, lengths, strict=True):
        key, value = (half[blocks].flatten(0, 1)[:length].transpose(0, 1) for half in halves)
        group = query.shape[1] // key.shape[0]
        key, value = (x.repeat_interleave(group, 0) for x in (key, value))  # [num_heads, length, head_size]
        for token in range(q_len):
            position = length - q_len + token
            logits = torch.einsum("hd,htd->ht", next(tokens).float(), key) * sm_scale
            logits = soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits
            age = position - torch.arange(length)
            logits[:, (age < 0) | (age >= (window or length + 1))] = -math.inf
            rows.append(torch.einsum("ht,htd->hd", logits.softmax(-1), value))
    return torch.stack(rows).to(query.dtype)


class Wrapper:
    """Stands for FlashInfer's `BatchDecodeWithPagedKVCacheWrapper`."""

    def __init__(self, workspace, kv_layout, backend, use_tensor_cores=None):
        is_prefill = isinstance(self, PrefillWrapper)
        assert (backend in ("fa2", "fa3"), use_tensor_cores) == (True, None if is_prefill else True)
        self.layout = kv_layout

    def plan(self, indptr, indices, last_page_len, *sizes, q_data_type, kv_data_type, sm_scale, **options):
        heads, kv_heads, head_size, page_size = sizes
        window_left = options.pop("window_left", -1)
        assert (heads, kv_heads, head_size, page_size) == (4, 2, 32, BLOCK_SIZE)
        self.table = [indices[a:b].long() for a, b in itertools.pairwise(indptr.tolist())]
        pages = zip(self.table, last_page_len.tolist(), strict=True)
        self.lengths = [(len(blocks) - 1) * page_size + last for blocks, last in pages]
        self.dtype, self.sm_scale = kv_data_type, sm_scale
        self.window = None if window_left == -1 else window_left + 1
        self.soft_cap = options.pop("logits_soft_cap")
        self.q_lens = [options.pop("q_len_per_req", 1)] * len(self.lengths)
        assert not options

    def run(self, query, caches, *, kv_cache_sf, enable_pdl, out=None):
        assert caches[0].dtype is self.dtype
        assert not enable_pdl
        about = self.table, self.lengths, self.layout, self.sm_scale, self.q_lens, self.window, self.soft_cap
        found = attended(query, caches, kv_cache_sf, *about)
        return found if out is None else out.copy_(found)


class PrefillWrapper(Wrapper):
    """Stands for FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`."""

    def plan(self, qo_indptr, *args, causal, **options):
        import torch

        assert causal
        assert (options["q_data_type"], qo_indptr.dtype) == (torch.bfloat16, torch.int32)
        super().plan(*args, **options)
        self.q_lens = qo_indptr.diff().tolist()


def xqa_batch_decode_with_kv_cache(
    query, caches, workspace, table, lengths, max_length, *, bmm1_scale, bmm2_scale, window_left, kv_layout, **options
):
    """Stands for FlashInfer's function of this name."""
    import torch

    q_len, rest = options.get("q_len_per_req", 1), {*options} - {"q_len_per_req", "mask", "enable_pdl"}
    assert not rest
    assert (workspace.count_nonzero(), lengths.dtype, table.dtype) == (0, torch.uint32, torch.int32)
    assert max_length == table.shape[1] * BLOCK_SIZE
    if q_len > 1:
        bits = [[1, 0], [3, 0], [7, 0], [15, 0]]
        assert options["mask"].view(torch.int16).tolist() == [bits] * len(table)
    window = None if window_left == -1 else window_left + 1
    q_lens = [q_len] * len(table)
    found = attended(query, caches, None, table.long(), lengths.tolist(), kv_layout, bmm1_scale, q_lens, window)
    return found * bmm2_scale


@pytest.fixture
def flashinfer(monkeypatch):
    """Stands for FlashInfer on a machine without it, and notes what is built."""
    pytest.importorskip("torch")
    pytest.importorskip("kvjax_torch")
    built = []
    wrappers = {"BatchDecodeWithPagedKVCacheWrapper": Wrapper, "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper}
    package = types.SimpleNamespace(**wrappers)
    modules = {
        "flashinfer": package,
        "flashinfer.decode": types.SimpleNamespace(xqa_batch_decode_with_kv_cache=xqa_batch_decode_with_kv_cache),
        "flashinfer.prefill": types.SimpleNamespace(get_batch_prefill_module=lambda *key: built.append(key)),
        "flashinfer.xqa": types.SimpleNamespace(get_xqa_module=lambda *key: built.append(key)),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    caches = attends_flashinfer.module, attends_flashinfer._deadline
    for cache in caches:
        cache.cache_clear()
    yield built
    for cache in caches:
        cache.cache_clear()


PEERS = {peer.name: peer for peer in (*attends.PEERS, *attends.STEP_PEERS) if peer is not attends.READ}
ON_A_CPU = {
    attends.CUDNN: functools.partial(attends.dense_run, implementation="xla"),
    attends.TRITON: functools.partial(attends.triton_run, interpret=True),
}
TINY_ROWS = {
    "plain": TINY,
    "4 tokens": dataclasses.replace(TINY, q_len=4),
    "window": dataclasses.replace(TINY, window=32),
    "window in HND": dataclasses.replace(TINY, seq_len=61, window=20, layout=HND),
    "window, 4 tokens, HND": dataclasses.replace(TINY, q_len=4, window=20, layout=HND),
    "partial page": dataclasses.replace(TINY, seq_len=61),
    "4 tokens, partial page, HND": dataclasses.replace(TINY, seq_len=61, q_len=4, layout=HND),
    "long": dataclasses.replace(TINY, seq_len=256),
    "mixed": TINY_MIXED,
    "speculative": dataclasses.replace(TINY_MIXED, q_len=4, num_prompts=None),
    "whole": dataclasses.replace(TINY_MIXED, seq_len=48, q_len=48, num_prompts=None),
    "shared": dataclasses.replace(TINY_MIXED, q_len=1, num_prompts=None, prefix_len=32),
    "window and soft cap": dataclasses.replace(TINY_MIXED, window=10, logits_soft_cap=0.5),
}


def is_served(peer: str, row: str, dtype: KVCacheDType) -> bool:
    """Whether a benchmark times it: XQA takes no window with several tokens, and some peers have only steps."""
    of, is_step = PEERS[peer], TINY_ROWS[row].is_step
    listed = of in (attends.STEP_PEERS if is_step else attends.PEERS)
    is_timed = of not in attends.BUILT or row != "window, 4 tokens, HND"
    return listed and is_timed and of.serves(AttentionJob(TINY_ROWS[row], dtype))


@matrix(
    {"peer": [*PEERS], "row": [*TINY_ROWS], "dtype": shapes.TIMED_DTYPES},
    few={"dtype": [BFLOAT16, NVFP4]},
    valid=lambda case: is_served(**case),
)
def test_peers_attend_to_what_kvjax_attends_to(peer, row, dtype, request):
    of, inputs = PEERS[peer], AttentionInputs(AttentionJob(TINY_ROWS[row], dtype))
    in_torch = of in (attends.SDPA, attends.IN_TORCH, *attends_flashinfer.KEYS)
    built = request.getfixturevalue("flashinfer") if in_torch else []
    if of is attends.TRITON:
        pytest.importorskip("jax.experimental.pallas.ops.gpu", exc_type=ImportError)
    error = error_of(ON_A_CPU.get(of, of.prepare)(inputs), inputs)
    assert error < OWN_ERROR * (2 if of in attends_flashinfer.KEYS else 1)  # one that rounds before it scales
    assert len(built) == (of in attends_flashinfer.KEYS)


def test_dense_attention_serves_whole_prompts():
    served = [name for name in TINY_ROWS if attends.CUDNN.serves(AttentionJob(TINY_ROWS[name], BFLOAT16))]
    assert served == ["plain", "partial page", "long", "whole"]


def test_a_step_packs_tokens_and_shares_pages():
    assert TINY_MIXED.cu_q_lens.tolist() == [0, 20, 21, 22]
    job = AttentionJob(TINY_MIXED, NVFP4)
    assert job.query_shape == (22, 4, 32)
    assert {19, 20, 21} <= {*job.sampled.tolist()}  # the last token of each sequence
    inputs = AttentionInputs(job)
    lengths = dict(zip(job.sampled.tolist(), np.asarray(inputs.sampled_sequences[1]).tolist(), strict=True))
    assert (lengths[0], lengths[19], lengths[20]) == (42, 61, 61)
    shared = dataclasses.replace(TINY_MIXED, q_len=1, num_prompts=None, prefix_len=32)
    assert shared.num_blocks_read == shared.num_blocks == 2 + 3 * 2
    assert shared.table(np.arange(8)).tolist() == [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]


def test_what_flashinfer_builds_is_built_once_and_waited_for_a_while(flashinfer, monkeypatch):
    jobs = [AttentionJob(row, dtype) for row in shapes.ATTENTION_ROWS for dtype in shapes.TIMED_DTYPES]
    steps = [AttentionJob(row, dtype) for row in shapes.RAGGED_ROWS for dtype in shapes.TIMED_DTYPES]
    for some, peers, count in ((jobs, attends.PEERS, 3 * 3 + 2 * 5), (steps, attends.STEP_PEERS, 6 * 3 + 2 * 5 + 6)):
        attends_flashinfer.build_ahead(some, peers)
        for job, peer in itertools.product(some, {*peers} & {*attends_flashinfer.KEYS}):
            if peer.serves(job):
                attends_flashinfer.wait_for(attends_flashinfer.KEYS[peer](job))
        assert len(flashinfer) == len({*flashinfer}) == count
    assert [key[0] for key in flashinfer].count("fa3") == 6
    never: ahead.Future[None] = ahead.Future()
    monkeypatch.setattr(attends_flashinfer, "_deadline", lambda: 0.0)
    monkeypatch.setattr(attends_flashinfer, "module", lambda *_: never)
    with pytest.raises(TimeoutError, match="not built within --build_seconds=240"):
        attends_flashinfer.wait_for(())


def test_workers_hand_back_results_and_errors():
    workers = ahead.Workers(2)
    futures = [workers.submit(divmod, 7, divisor) for divisor in (2, 0, 3)]
    assert (futures[0].result(10), futures[2].result(10)) == ((3, 1), (2, 1))
    with pytest.raises(ZeroDivisionError):
        futures[1].result(10)


def measured(row: str, dtype: KVCacheDType, **us: float) -> list[Measurement]:
    """Times of a row or a step, by peer."""
    is_step = row in shapes.RAGGED_ROWS_BY_NAME
    subject = (shapes.RAGGED_ROWS_BY_NAME if is_step else shapes.ATTENTION_ROWS_BY_NAME)[row].subject(dtype)
    operation = "ragged attention" if is_step else "attention"
    times = {peer: timing.Timing((each * 1e-6,) * 3, timing.Clock.DEVICE) for peer, each in us.items()}
    return [Measurement(operation, subject, NAMES.get(peer, peer), each, 1) for peer, each in times.items()]


NAMES = {"fa2": "FlashInfer FA2", "fa3": "FlashInfer FA3", "no_cascade": "kvjax without cascade"}
ROWS = Rows(
    [
        *measured("64x8192", BFLOAT16, read=460.0, kvjax=495.0, cuDNN=484.0, fa2=490.0),
        *measured("64x8192", NVFP4, read=132.0, kvjax=200.0, fa2=670.0),
        *measured("64x8192-HND", NVFP4, kvjax=231.0),
        *measured("1x8192", FP8, kvjax=11.0),
        *measured("64x1024", NVFP4, kvjax=30.0),
        *measured("64x8192-window-1024", NVFP4, kvjax=38.0),
        *measured("64x4096-4-tokens", FP8, kvjax=38.0),
    ]
)
STEPS = Rows(
    [
        *measured("chunk", NVFP4, kvjax=500.0, kvjax_torch=900.0, fa2=1_010.0),
        *measured("chunk", BFLOAT16, kvjax=480.0, fa3=440.0),
        *measured("mixed", NVFP4, kvjax=320.0, fa2=800.0),
        *measured("speculative", NVFP4, kvjax=137.0),
        *measured("shared-prefix", NVFP4, kvjax=180.0, no_cascade=540.0),
        *measured("shared-prefix", FP8, kvjax=180.0),
    ]
)


@pytest.mark.parametrize(
    ("rows", "row", "dtype", "expected"),
    [
        (ROWS, "64x8192", BFLOAT16, ["92.9% of reading: pass"]),
        (ROWS, "64x8192", NVFP4, ["66.0% of reading: falls short", "2.42 times as fast as bf16: pass"]),
        (ROWS, "64x8192-HND", NVFP4, ["1.16 x NHD: falls short"]),
        (ROWS, "1x8192", FP8, ["11.00 us: pass"]),
        (ROWS, "64x1024", NVFP4, []),
        (ROWS, "64x8192-window-1024", NVFP4, ["1.27 x the window's length: pass"]),
        (ROWS, "64x4096-4-tokens", FP8, ["-"]),  # the row of one token was not timed
        (STEPS, "chunk", NVFP4, ["0.50 x FlashInfer FA2: pass", "0.88 times as fast as bf16: falls short"]),
        (STEPS, "chunk", BFLOAT16, []),
        (STEPS, "mixed", NVFP4, ["0.40 x FlashInfer FA2: falls short"]),
        (STEPS, "speculative", NVFP4, ["-"]),  # FlashInfer was not timed
        (STEPS, "shared-prefix", NVFP4, ["3.00 times as fast as without cascade: pass"]),
        (STEPS, "shared-prefix", FP8, []),
    ],
)
def test_bars_of_attention(rows, row, dtype, expected):
    [line] = rows.find("kvjax", case=row, dtype=dtype.value)
    assert bars.verdicts(line, rows) == expected
    by_wall = dataclasses.replace(line, times=timing.Timing(line.times.samples, timing.Clock.WALL))
    assert bars.verdicts(by_wall, rows) == ["-"] * len(expected)


def test_lines_of_the_tables():
    assert ATTENTION.bars(ROWS) == " 4 of 6 bars hold."
    [line] = ROWS.find("kvjax", case="64x8192", dtype="nvfp4")
    words = {column.heading: column.text(line, ROWS) for column in ATTENTION.columns}
    assert (words["reading us"], words["share"], words["times as fast"]) == ("132.00", "66.0%", "2.42")
    assert (words["next best"], words["fastest bf16"]) == ("FlashInfer FA2", "cuDNN")
    of_steps = [bar for bar in bars.BARS if bar.operation == "ragged attention"]
    without_bars = {"chunk-soft-cap", "chunk-window-1024"} | {f"chunk-heads-of-{size}" for size in (64, 256, 512)}
    names = {row.name for row in shapes.RAGGED_ROWS}
    assert {name for bar in of_steps for name in bar.where["case"]} == names - without_bars
    [line] = STEPS.find("kvjax", case="chunk", dtype="nvfp4")
    words = {column.heading: column.text(line, STEPS) for column in RAGGED.columns}
    assert (words["from torch us"], words["no cascade us"]) == ("900.00", "-")
    assert (words["next best"], words["fastest bf16"]) == ("FlashInfer FA2", "FlashInfer FA3")
