"""Operations on latents (MLA) in torch tensors: bytes against those of the formats, attention against float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support import mla_reference  # noqa: E402
from support.helpers import assert_same_bytes  # noqa: E402
from support.interpret_mode import interpret_mode  # noqa: E402
from support.interpreted_calls import run_interpreted  # noqa: E402
from support.mla_cases import SM_SCALE, Problem, build, queries, spec_of  # noqa: E402
from support.torch_helpers import assert_same, capture  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import (  # noqa: E402
    MLA_KV_CACHE_DTYPES,
    KVCacheError,
    KVCacheTypeError,
    KVCacheValueError,
    MLAAttentionSpec,
)
from kvjax_torch.arguments.dtypes import torch_dtype  # noqa: E402
from kvjax_torch.arguments.latents import (  # noqa: E402
    GatheredRows,
    LatentPages,
    latent_attention_plan,
    latent_gather_plan,
    latent_write_plan,
)
from kvjax_torch.arguments.plan import GatherPlan, LatentQuery, ReadTensors, SoftmaxOptions  # noqa: E402
from kvjax_torch.calls import attending, choosing, gathering, writing  # noqa: E402
from kvjax_torch.cuda import latents, reads  # noqa: E402
from kvjax_torch.eager import host  # noqa: E402
from kvjax_torch.launch import running  # noqa: E402

NAMES = [dtype.value for dtype in MLA_KV_CACHE_DTYPES]
POISON = 0xAB
SLOTS = [3, -1, 30, 8, 3, 99, 9, 10, 11]
"""One of them twice, and two that are none."""


def tensor_of(x: Any) -> torch.Tensor:
    """A copy of an array; torch knows ml_dtypes by their bytes alone."""
    x = np.array(x)
    return torch.from_numpy(x.view(np.uint8).reshape(-1)).view(torch_dtype(x.dtype)).view(x.shape)


def cache_of(spec: MLAAttentionSpec, pages: np.ndarray, gap: int = 0) -> tuple[torch.Tensor, Any]:
    """The pages `[num_blocks, page_size_bytes]` as torch's cache, with `gap` bytes after each; and what reads them."""
    held = torch.full((len(pages), pages.shape[1] + gap), POISON, dtype=torch.uint8)
    held[:, : pages.shape[1]] = torch.from_numpy(pages)
    rows = held.view(torch_dtype(spec.array_dtype))[:, : pages.shape[1] // spec.array_dtype.itemsize]

    def read() -> np.ndarray:
        assert (held[:, pages.shape[1] :] == POISON).all()
        return held[:, : pages.shape[1]].numpy().copy()

    return rows.unflatten(1, (spec.block_size, -1)), read


def tokens_of(spec: MLAAttentionSpec, count: int, dtype: np.dtype | type = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((count, size)).astype(np.float32).astype(dtype) for size in spec.part_sizes]


def poisoned(spec: MLAAttentionSpec, num_blocks: int = 4) -> np.ndarray:
    return np.full((num_blocks, spec.page_size_bytes), POISON, np.uint8)


@pytest.mark.parametrize("sizes", [(512, 64), (256, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_a_write_has_the_bytes_of_the_format_and_changes_no_others(name: str, sizes: tuple[int, int]):
    spec = spec_of(name, sizes)
    rows, pages, scale = tokens_of(spec, len(SLOTS)), poisoned(spec), np.float32(0.01)
    for gap in (0, 48):
        cache, read = cache_of(spec, pages, gap)
        fused = torch.from_numpy(np.concatenate([*rows, rows[0]], axis=1))  # of which each is a slice
        given = fused[:, : sizes[0]], fused[:, sizes[0] : sum(sizes)]
        kvjax_torch.concat_and_cache_mla(*given, cache, torch.tensor(SLOTS), name, scale)
        assert_same_bytes(read(), mla_reference.write(pages, spec, mla_reference.rows(spec, *rows, scale), SLOTS))


@pytest.mark.parametrize("name", NAMES)
def test_a_write_has_jaxs_bytes_of_any_number(name: str):
    """Of 16 bits, NaN, infinities and zeros included; in the memory of a `KVCache` of the same spec."""
    spec, scale = spec_of(name), np.float32(0.37)
    kv_c, k_pe = tokens_of(spec, 20, ml_dtypes.bfloat16)
    kv_c[0, :4], k_pe[0, :4] = [np.nan, np.inf, -np.inf, -0.0], [np.nan, np.inf, -np.inf, -0.0]
    empty = kvjax.KVCache.allocate(spec, 4)
    expected = kvjax.concat_and_cache_mla(kv_c, k_pe, empty, np.arange(20, dtype=np.int32), scale=scale)
    cache = tensor_of(empty.kv)
    assert cache.shape == (4, 8, spec.bytes_per_token // spec.array_dtype.itemsize)
    slots = torch.arange(20, dtype=torch.int32)
    kvjax_torch.concat_and_cache_mla(tensor_of(kv_c), tensor_of(k_pe), cache, slots, name, torch.tensor([scale]))
    assert_same_bytes(cache.view(torch.uint8).numpy(), np.asarray(expected.kv).view(np.uint8))


@pytest.mark.parametrize("name", ["fp8_ds_mla", "nvfp4"])
def test_a_write_has_the_golden_bytes(name: str):
    golden = np.load(Path(__file__).parent / "data/mla_golden.npz")
    kv_c, k_pe = (tensor_of(golden[key].view(ml_dtypes.bfloat16)) for key in ("kv_c", "k_pe"))
    spec = spec_of(name)
    cache, read = cache_of(spec, poisoned(spec, -(-len(kv_c) // 8)))
    kvjax_torch.concat_and_cache_mla(kv_c, k_pe, cache, torch.arange(len(kv_c)), name, float(golden["scale"]))
    assert_same_bytes(read().reshape(-1, spec.bytes_per_token)[: len(kv_c)], golden[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_auto_is_the_caches_own_dtype(dtype: torch.dtype):
    rows = torch.ones(2, 512), torch.ones(2, 64)
    cache = torch.zeros(1, 8, 576).to(dtype)
    kvjax_torch.concat_and_cache_mla(*rows, cache, torch.arange(2), "auto", 1.0)
    assert (cache[0, :2].float() == 1).all()
    assert not cache[0, 2:].float().any()


@pytest.mark.parametrize("sizes", [(512, 64), (256, 0)])
@pytest.mark.parametrize("name", NAMES)
def test_a_gather_returns_the_numbers_that_are_stored(name: str, sizes: tuple[int, int]):
    spec, scale = spec_of(name, sizes), np.float32(0.01)
    slots = np.arange(32)
    pages = mla_reference.write(poisoned(spec), spec, mla_reference.rows(spec, *tokens_of(spec, 32), scale), slots)
    table, bounds, starts = torch.tensor([[1, 0, 5], [3, -1, 9]]), torch.tensor([0, 3, 8]), torch.tensor([1, 6])
    slots = [9, 10, 11, 30, 31]
    stored = pages.reshape(32, -1)[slots]
    want = np.concatenate(mla_reference.decoded(spec, stored, scale), axis=1)
    for gap, token_to_seq in ((0, None), (48, torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1, 0]))):
        cache, read = cache_of(spec, pages, gap)
        dst = torch.full((12, sum(sizes)), 7.0)
        given = cache, dst, table, bounds, token_to_seq, 10, name, scale, starts
        kvjax_torch.gather_and_maybe_dequant_cache(*given)
        assert_same_bytes(dst[:5].numpy(), want)
        assert not dst[5:10].any(), "blocks that are none, and rows of no sequence"
        assert (dst[10:] == 7).all()
        assert_same_bytes(read(), pages)


@pytest.mark.parametrize("name", ["bfloat16", "nvfp4"])
def test_a_gather_is_that_of_jax(name: str):
    """In another dtype, without starts, of tables in int32."""
    spec = spec_of(name)
    problem = build(spec, (20, 9))
    bounds = np.array([0, 20, 29], np.int32)
    want = kvjax.gather_mla(
        problem.cache, problem.block_table, bounds, num_tokens=29, scale=problem.scale, dtype="float16"
    )
    dst = torch.empty(29, 576, dtype=torch.float16)
    args = torch.from_numpy(problem.block_table), torch.from_numpy(bounds), None, 29, name, problem.scale
    kvjax_torch.gather_and_maybe_dequant_cache(tensor_of(problem.cache.kv), dst, *args)
    assert_same_bytes(dst.numpy(), np.concatenate([np.asarray(x) for x in want], axis=1))


def test_a_gather_of_nothing_writes_nothing():
    spec = spec_of("bfloat16")
    cache, _ = cache_of(spec, poisoned(spec))
    dst = torch.full((3, 576), 7.0)
    none = torch.zeros(0, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    kvjax_torch.gather_and_maybe_dequant_cache(cache, dst, *none, None, 0, "auto", 1.0)
    assert (dst == 7).all()
    kvjax_torch.gather_and_maybe_dequant_cache(cache, dst, *none, None, 2, "auto", 1.0)
    assert dst[:, 0].tolist() == [0, 0, 7]


def on(device: str, problem: Problem, q: Sequence[np.ndarray]) -> dict[str, Any]:
    """The arguments of a call."""
    q_nope, q_pe = (tensor_of(x).to(device) for x in q)
    return {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "kv_cache": tensor_of(problem.cache.kv).to(device),
        "block_table": torch.from_numpy(problem.block_table).to(device),
        "seq_lens": torch.from_numpy(problem.seq_lens).to(device),
        "kv_cache_dtype": problem.spec.dtype,
        "scale": torch.tensor(problem.scale, device=device),
        "sm_scale": SM_SCALE,
    }


def assert_near(
    problem: Problem, q: Sequence[np.ndarray], got: Any, eps: float, *, is_rounded: bool = False, **options: Any
) -> None:
    """`is_rounded` if keys are rounded to bfloat16, as the kernel for many rows does with those of `fp8_ds_mla`."""
    query = np.concatenate([np.asarray(x, np.float64) for x in q], axis=-1)
    out, lse = (x.double().cpu().numpy() for x in got)
    for seq, keys in enumerate(problem.keys):
        keys = keys.astype(ml_dtypes.bfloat16) if is_rounded else keys
        want, want_lse = mla_reference.attention(query[seq], keys, problem.spec.kv_lora_rank, SM_SCALE, **options)
        np.testing.assert_allclose(out[seq], want, rtol=eps, atol=2 * eps)
        np.testing.assert_allclose(lse[seq], want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (7, 3.0)])
@pytest.mark.parametrize("name", NAMES)
def test_attention_is_that_of_float64(name: str, window: int | None, cap: float | None):
    """What no row sees, and blocks of no sequence, are NaN."""
    problem = build(spec_of(name), (20, 1, 0, 9), None if window is None else window + 1)
    q = queries(problem.spec, (4, 2, 3), "float32")
    call = on("cpu", problem, q) | {"sliding_window": window, "logits_soft_cap": cap}
    got = kvjax_torch.mla_paged_attention(**call, return_lse=True)
    assert_near(problem, q, got, 2e-5, window=window, cap=cap)
    out = torch.full_like(call["q_nope"], torch.nan)
    assert kvjax_torch.mla_paged_attention(**call, out=out) is out
    assert torch.equal(out, got[0])
    one = call | {"q_nope": call["q_nope"][:, 1], "q_pe": call["q_pe"][:, 1]}  # the last token alone
    for x, y in zip(kvjax_torch.mla_paged_attention(**one, return_lse=True), got, strict=True):
        torch.testing.assert_close(x, y[:, 1], rtol=1e-5, atol=1e-5)


def test_results_go_to_memory_of_any_alignment(monkeypatch: pytest.MonkeyPatch):
    """The kernel stores two elements at once."""
    problem = build(spec_of("bfloat16"), (9, 1))
    call = on("cpu", problem, queries(problem.spec, (2, 3), "bfloat16"))
    given = []

    def attend_to(*args: Any) -> Any:
        given.append(args[4] if len(args) > 4 else None)
        return host_attend(*args)

    host_attend = host.attend
    monkeypatch.setattr(reads, "attend", attend_to)
    monkeypatch.setattr(host, "attend", latents.attend)
    want = kvjax_torch.mla_paged_attention(**call)
    memory = torch.zeros(want.numel() + 1, dtype=torch.bfloat16)
    for first in (0, 1):
        out = memory[first : first + want.numel()].view(want.shape)
        assert kvjax_torch.mla_paged_attention(**call, out=out) is out
        assert torch.equal(out, want)
        assert (given[-1] is None) == bool(first)


@pytest.mark.parametrize("device", ["cpu", "cuda, emulated"])
@pytest.mark.parametrize(("name", "window"), [("nvfp4", None), pytest.param("bfloat16", 4, marks=pytest.mark.full)])
def test_ragged_attention_is_that_of_jax(name: str, window: int | None, device: str, monkeypatch: pytest.MonkeyPatch):
    """With rows of no sequence; on a GPU by attention of padded sequences, of which one is longer than it may be.

    Kernels pack the rows and place their results. Before the window of a sequence's rows may be NaN.
    """
    problem = build(spec_of(name), (20, 3, 9), window and window + 4)
    rows = [x[:, 0] for x in queries(problem.spec, (8, 1, 3), "float32")]
    bounds = np.array([0, 2, 2, 6], np.int32)
    call = on("cpu", problem, rows) | {"cu_q_lens": torch.from_numpy(bounds), "sliding_window": window}
    if device != "cpu":
        monkeypatch.setattr(host, "attend_ragged", latents.attend_ragged)
        monkeypatch.setattr(reads, "attend", host.attend)
        monkeypatch.setattr(running, "compile_once", lambda *_: None)
        monkeypatch.setattr(running, "run", run_interpreted)
    want = kvjax.mla_ragged_paged_attention(
        *rows,
        problem.cache,
        problem.block_table,
        problem.seq_lens,
        bounds,
        scale=problem.scale,
        sm_scale=SM_SCALE,
        sliding_window=window,
        return_lse=True,
    )
    for options in ({}, {"max_q_len": 5}, {"out": torch.full((8, 3, 512), torch.nan)}):
        got = kvjax_torch.mla_ragged_paged_attention(**call, **options, return_lse=True)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    for max_q_len in (3, 2) if device != "cpu" else ():  # of 3 each is padded to 4
        out, lse = kvjax_torch.mla_ragged_paged_attention(**call, max_q_len=max_q_len, return_lse=True)
        np.testing.assert_allclose(out[:2], want[0][:2], rtol=2e-5, atol=2e-5)
        assert not out[2:].any()
        assert (lse[2:] == -torch.inf).all()


def test_packed_rows_that_int32_does_not_index_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Before anything is launched: kernels would store them elsewhere."""
    problem = build(spec_of("bfloat16"), (20, 3, 9))
    rows = [x[:, 0] for x in queries(problem.spec, (8, 1, 3), "float32")]
    call = on("cpu", problem, rows) | {"cu_q_lens": torch.tensor([0, 2, 2, 6])}
    monkeypatch.setattr(host, "attend_ragged", latents.attend_ragged)
    monkeypatch.setattr(choosing, "INT32_MAX", 3 * 8 * 3 * 576 - 1)
    message = "got 3 sequences, each padded to 8 query tokens of 3 heads: 41472 elements, expected at most 41471; pass"
    with pytest.raises(kvjax.UnsupportedError, match=message):
        kvjax_torch.mla_ragged_paged_attention(**call)


def write(**changes: Any) -> None:
    spec = spec_of("fp8_e4m3")
    cache, read = cache_of(spec, poisoned(spec, 2))
    given = {"kv_c": torch.ones(3, 512), "k_pe": torch.ones(3, 64), "kv_cache": cache, "slot_mapping": torch.arange(3)}
    try:
        kvjax_torch.concat_and_cache_mla(**given | {"kv_cache_dtype": "fp8", "scale": 1.0} | changes)
    finally:
        changed = (read() != POISON).any()
        assert changed == (not changes)


def gather(**changes: Any) -> None:
    cache = torch.zeros(2, 8, 576, dtype=torch.uint8)
    given = {"src_cache": cache, "dst": torch.zeros(5, 576), "block_table": torch.zeros(2, 2, dtype=torch.int32)}
    given |= {"cu_seq_lens": torch.tensor([0, 3, 5]), "token_to_seq": None, "num_tokens": 5}
    kvjax_torch.gather_and_maybe_dequant_cache(**given | {"kv_cache_dtype": "fp8", "scale": 1.0} | changes)


ATTEND = {
    "q_nope": torch.zeros(2, 4, 512),
    "q_pe": torch.zeros(2, 4, 64),
    "kv_cache": torch.zeros(2, 8, 576, dtype=torch.bfloat16),
    "block_table": torch.zeros(2, 2, dtype=torch.int32),
    "seq_lens": torch.ones(2, dtype=torch.int32),
    "kv_cache_dtype": "auto",
    "scale": 1.0,
    "sm_scale": 0.1,
}


def attend(**changes: Any) -> None:
    kvjax_torch.mla_paged_attention(**ATTEND | changes)


def attend_ragged(**changes: Any) -> None:
    kvjax_torch.mla_ragged_paged_attention(**ATTEND | {"cu_q_lens": torch.tensor([0, 1, 2])} | changes)


VALUE, TYPE = KVCacheValueError, KVCacheTypeError

with torch.inference_mode():
    IN_INFERENCE = torch.zeros(5, 576)


OF_LATENTS = "auto, float32, float16, bfloat16, fp8_e4m3, nvfp4, nvfp4_4over6, fp8_ds_mla"


@pytest.mark.parametrize(
    ("run", "changes", "error", "message"),
    [
        (write, {"kv_c": torch.ones(3, 500)}, VALUE, "kv_cache: got shape (2, 8, 576), expected [num_blocks, block_si"),
        (write, {"kv_c": torch.ones(3, 1, 512)}, VALUE, "kv_c: got 3 dimensions, expected [num_tokens, kv_lora_rank]"),
        (write, {"kv_c": torch.ones(3, 512).double()}, TYPE, "kv_c: got dtype torch.float64, expected torch.float32 o"),
        (write, {"kv_c": torch.ones(512, 3).T}, VALUE, "kv_c: got strides (1, 3), expected 1 along kv_lora_rank; copy"),
        (write, {"kv_c": [[1.0]]}, TYPE, "kv_c: got a list, expected a torch.Tensor"),
        (write, {"k_pe": torch.ones(3, 64).half()}, TYPE, "k_pe: got dtype torch.float16, expected torch.float32"),
        (write, {"k_pe": torch.ones(2, 64)}, VALUE, "k_pe: got 2 tokens, expected at least one for each of the 3 slot"),
        (write, {"slot_mapping": torch.ones(3)}, TYPE, "slot_mapping: got dtype torch.float32, expected torch.int32 o"),
        (write, {"kv_cache_dtype": "fp8_ds_mla"}, VALUE, "kv_cache: got shape (2, 8, 576), expected [num_blocks, bloc"),
        (write, {"kv_cache_dtype": "fp8_ds"}, VALUE, f"kv_cache_dtype: got 'fp8_ds', expected one of {OF_LATENTS}"),
        (write, {"kv_cache_dtype": "bfloat16"}, TYPE, "kv_cache: got dtype torch.uint8, expected torch.bfloat16 for k"),
        (write, {"kv_cache_dtype": "int8_per_token_head"}, VALUE, "kv_cache_dtype: got 'int8_per_token_head', expecte"),
        (write, {"kv_cache_dtype": "auto"}, VALUE, "kv_cache_dtype: got 'auto' with a torch.uint8 cache, expected one"),
        (write, {"kv_cache": torch.zeros(2, 8, 1, 576)}, TYPE, "kv_cache: got dtype torch.float32, expected torch.uin"),
        (write, {"kv_cache": torch.zeros(2, 576, dtype=torch.uint8)}, VALUE, "kv_cache: got shape (2, 576), expected"),
        (write, {"scale": 0.0}, VALUE, "scale: got 0.0, expected between 7.9e-31 and 1.3e+30"),
        (write, {"scale": torch.ones(2)}, VALUE, "scale: got shape (2,), expected one element"),
        (write, {"scale": torch.ones(1).half()}, TYPE, "scale: got dtype torch.float16, expected torch.float32"),
        (write, {"unique_slots": 1}, TYPE, "unique_slots: got 1 of type int, expected a bool"),
        (write, {"kv_c": torch.ones(3, 512, requires_grad=True)}, TYPE, "kv_c: got requires_grad=True, but a write in"),
        (gather, {"dst": torch.zeros(5, 580)}, VALUE, "dst: got rows of 580 elements, expected kv_lora_rank + qk_rope"),
        (gather, {"dst": torch.zeros(5, 576).int()}, TYPE, "dst: got dtype torch.int32, expected torch.float32 or tor"),
        (gather, {"dst": torch.zeros(5, 1).expand(5, 576)}, VALUE, "dst: got "),
        (gather, {"dst": torch.zeros(1000).as_strided((5, 576), (100, 1))}, VALUE, "dst: got strides"),
        (gather, {"src_cache": torch.zeros(())}, VALUE, "src_cache: got shape"),
        (gather, {"src_cache": torch.zeros(2, 8, 576)}, TYPE, "src_cache: got dtype torch.float32, expected"),
        (gather, {"src_cache": torch.zeros(2, 8, 1152).byte()[..., ::2]}, VALUE, "src_cache: got strides"),
        (gather, {"dst": IN_INFERENCE}, VALUE, "dst: got a tensor of inference mode outside of it, expected one"),
        (gather, {"num_tokens": 6}, VALUE, "num_tokens: got 6, expected 0 to 5, the rows of dst"),
        (gather, {"num_tokens": 5.0}, TYPE, "num_tokens: got 5.0 of type float, expected an int"),
        (gather, {"cu_seq_lens": torch.tensor([0, 3])}, VALUE, "cu_seq_lens: got shape (2,), expected [num_seqs + 1=3"),
        (gather, {"seq_starts": torch.tensor([0])}, VALUE, "seq_starts: got shape (1,), expected [num_seqs=2]"),
        (gather, {"token_to_seq": torch.tensor([0])}, VALUE, "token_to_seq: got 1 entries, expected at least num_toke"),
        (attend, {"sm_scale": None}, TYPE, "sm_scale: got None, expected a number, usually (qk_nope_head_dim + qk_rop"),
        (attend, {"q_nope": torch.zeros(2, 512)}, VALUE, "q_nope: got 2 dimensions, expected [num_seqs, num_heads, kv"),
        (attend, {"q_pe": torch.zeros(2, 3, 64)}, VALUE, "q_pe: got shape (2, 3, 64), expected [2, 4] as q_nope, then"),
        (attend, {"q_pe": torch.zeros(2, 4, 64).half()}, TYPE, "q_pe: got dtype torch.float16, expected torch.float32"),
        (attend, {"seq_lens": torch.ones(3).int()}, VALUE, "seq_lens: got shape (3,), expected [num_seqs=2]"),
        (attend, {"block_table": torch.zeros(3, 2).int(), "seq_lens": torch.ones(3).int()}, VALUE, "q_nope: got shape"),
        (attend, {"sliding_window": 0}, VALUE, "sliding_window: got 0, expected a positive int"),
        (attend, {"out": torch.zeros(2, 4, 64)}, VALUE, "out: got shape (2, 4, 64), expected (2, 4, 512)"),
        (attend, {"out": ATTEND["q_nope"]}, VALUE, "out: got memory that overlaps that of query, expected memory of i"),
        (attend_ragged, {"cu_q_lens": torch.arange(2)}, VALUE, "cu_q_lens: got shape (2,), expected [num_seqs + 1=3]"),
        (attend_ragged, {"max_q_len": 0}, VALUE, "max_q_len: got 0, expected an int of at least 1"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name_and_change_nothing(run, changes, error: type[KVCacheError], message: str):
    with pytest.raises(error) as raised:
        run(**changes)
    assert str(raised.value).startswith(message)
    run()


@pytest.mark.parametrize(
    ("run", "changes", "message"),
    [
        (write, {"slot_mapping": torch.tensor([0, 16, 1])}, r"slot_mapping\[1\]: got 16, expected l"),
        (gather, {"cu_seq_lens": torch.tensor([0, 3, 2])}, r"cu_seq_lens: got \[0, 3, 2\], expected 0 first, then not"),
        (gather, {"seq_starts": torch.tensor([0, -2])}, r"seq_starts: got \[0, -2\], expected at least 0"),
        (gather, {"block_table": torch.tensor([[0, 9], [2, 9]])}, r"block_table\[1, 0\]: got 2, expected betw"),
        (attend, {"seq_lens": torch.tensor([1, 17])}, r"seq_lens\[1\]: got 17, expected between 0 an"),
        (attend_ragged, {"cu_q_lens": torch.tensor([0, 2, 1])}, r"cu_q_lens\[2\]: got 1, expected 0 "),
    ],
)  # fmt: skip
def test_checked_mode_refuses_values_out_of_range(run: Any, changes: dict[str, Any], message: str):
    with kvjax.checked():
        run()
        with pytest.raises(KVCacheValueError, match=message):
            run(**changes)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(("fp8_e4m3", (128, 16)), ("fp8_ds_mla", (256, 16)), ("float16", (32, 0))),
        ("nvfp4", (48, 2)),  # whose rows of 31 bytes have rope keys at odd addresses
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                *((name, (128, 16)) for name in ("float32", "float16", "bfloat16", "fp8_ds_mla", "nvfp4_4over6")),
                *(("nvfp4", sizes) for sizes in ((64, 16), (16, 0))),
                ("bfloat16", (17, 0)),
            )
        ),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("nvfp4", (48, 0)), ("fp8_ds_mla", (384, 0)))),
    ],
)
def test_interpreted_kernels_write_and_read_the_bytes_of_cpu_tensors(name: str, sizes: tuple[int, int]):
    """Into memory of any alignment, and of whole sequences."""
    spec, width = spec_of(name, sizes), sum(sizes)
    rows, pages = [torch.from_numpy(x) for x in tokens_of(spec, len(SLOTS))], poisoned(spec)
    scale, slots = torch.tensor(0.01), torch.tensor(SLOTS)
    cache, read = cache_of(spec, pages, 48)
    plan, tensors = latent_write_plan(*rows, LatentPages(cache, name, scale), slots)
    run_interpreted(writing.write_call(plan, tensors, False))
    expected, expect = cache_of(spec, pages)
    kvjax_torch.concat_and_cache_mla(*rows, expected, slots, name, scale)
    assert_same_bytes(read(), expect())
    table, bounds, starts = torch.tensor([[1, 0, 5], [3, -1, 9]]), torch.tensor([0, 8, 13]), torch.tensor([8, 6])
    want = torch.zeros(14, width)
    kvjax_torch.gather_and_maybe_dequant_cache(expected, want, table, bounds, None, 14, name, scale, starts)
    for each in (cache, expected):  # with gaps, and without
        for dst in (torch.full((15, width + 8), 7.0), torch.full((15, width + 9), 7.0)):
            into = GatheredRows(dst[:, 3 : 3 + width], None, 14)
            gather_of, read_from = latent_gather_plan(LatentPages(each, name, scale), into, table, bounds, starts)
            places = gathering.places_call(gather_of, read_from)
            run_interpreted(places)
            run_interpreted(gathering.rows_call(gather_of, read_from.at(*places.tensors[-2:])))
            assert_same_bytes(dst[:14, 3 : 3 + width].numpy(), want.numpy())
            assert (dst[14] == 7).all()
            assert (dst[:, :3] == 7).all()
            assert (dst[:, 3 + width :] == 7).all()
    lengths, gather_of = torch.tensor([11, 8]), GatherPlan(plan.cache, torch.float32, (1, 1))
    whole = ReadTensors(tensors.key_cache, tensors.value_cache, table, lengths, scale, scale)
    call = gathering.gather_call(gather_of, whole)
    run_interpreted(call)
    want = host.gather(gather_of, whole)
    assert_same(call.tensors[-plan.cache.num_parts :], want[: plan.cache.num_parts])


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("fp8_ds_mla", marks=pytest.mark.full)])
def test_a_cache_at_an_odd_address_is_gathered_and_attended_to(name: str, monkeypatch: pytest.MonkeyPatch):
    """On a GPU, emulated: kernels read copies."""
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    monkeypatch.setattr(running, "run", run_interpreted)
    problem = build(spec_of(name, (128, 16)), (9, 1))
    call = on("cpu", problem, queries(problem.spec, (2, 1, 3), "bfloat16"))
    whole = torch.cat([torch.zeros(1, dtype=torch.uint8), call["kv_cache"].flatten()])
    call["kv_cache"] = whole[1:].view_as(call["kv_cache"])
    plan, query, tensors = planned(call)
    results = [module.attend(plan, query, tensors, None) for module in (reads, host)]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    rows = torch.zeros(2, 2, 144)
    bounds, pages = torch.tensor([0, 1, 2]), LatentPages(call["kv_cache"], name, call["scale"])
    for module, own in zip((reads, host), rows, strict=True):
        own = GatheredRows(own, None, 2)
        module.gather_rows(*latent_gather_plan(pages, own, call["block_table"], bounds, torch.tensor([6, 0])))
    assert rows[0].any()
    assert_same_bytes(*rows.numpy())


@pytest.mark.gpu
def test_on_a_gpu_rows_at_odd_addresses_are_gathered_and_attended_to():
    problem = build(spec_of("nvfp4", (48, 2)), (20, 1, 0, 9))  # rows of 31 bytes
    q = queries(problem.spec, (4, 2, 3), "bfloat16")
    gathered = []
    for device in ("cpu", "cuda"):
        call = on(device, problem, q)
        assert_near(problem, q, kvjax_torch.mla_paged_attention(**call, return_lse=True), 2**-7)
        dst, bounds = torch.zeros(30, 50, device=device), torch.tensor([0, 20, 21, 21, 30], device=device)
        stored = "nvfp4", call["scale"]
        kvjax_torch.gather_and_maybe_dequant_cache(
            call["kv_cache"], dst, call["block_table"], bounds, None, 30, *stored
        )
        gathered.append(dst)
    assert_same(gathered[:1], gathered[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_on_a_gpu_a_graph_gathers_the_ranges_of_each_replay(dtype: torch.dtype):
    """As many sequences as rows, with holes, in tables with gaps; with the sequences of rows, and without."""
    rng, spec, num_seqs = np.random.default_rng(0), spec_of("fp8_e4m3", block_size=16), 300
    cache = torch.from_numpy(rng.integers(0, 0x78, (64, 16, 576), np.uint8))
    ranges = []
    for count in (700, 50):
        lengths = rng.multinomial(count, rng.dirichlet(np.full(num_seqs, 0.1)))
        seqs = np.repeat(np.arange(num_seqs), lengths).tolist() + [-1] * (700 - count)
        given = rng.integers(-3, 70, (num_seqs, 50)), [0, *np.cumsum(lengths)], rng.integers(0, 400, num_seqs), seqs
        ranges.append([torch.from_numpy(np.array(x)).to(dtype) for x in given])
    on_gpu = [x.cuda() for x in ranges[0]]
    on_gpu[0] = torch.cat([on_gpu[0]] * 2, dim=1)[:, :50]
    dst, stored = torch.empty(2, 700, 576, device="cuda"), (spec.dtype, 0.5)

    def gather(cache: torch.Tensor, dst: torch.Tensor, table: Any, bounds: Any, starts: Any, seqs: Any) -> None:
        for own, known in zip(dst, (None, seqs), strict=True):
            kvjax_torch.gather_and_maybe_dequant_cache(cache, own, table, bounds, known, 700, *stored, starts)

    cached = cache.cuda()
    gather(cached, dst, *on_gpu)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        gather(cached, dst, *on_gpu)
    for each in ranges:
        for own, x in zip(on_gpu, each, strict=True):
            own.copy_(x)
        dst.fill_(7)
        graph.replay()
        want = torch.full((2, 700, 576), 7.0)
        gather(cache, want, *each)
        assert want.any()
        assert_same([want], [dst])


def planned(call: dict[str, Any], **softmax: Any) -> tuple[Any, ...]:
    query = LatentQuery(call["q_nope"], call["q_pe"])
    pages = LatentPages(call["kv_cache"], call["kv_cache_dtype"].value, call["scale"])
    options = SoftmaxOptions(SM_SCALE, **softmax)
    plan, tensors = latent_attention_plan(query, pages, call["block_table"], call["seq_lens"], options)
    return plan, query.joined, tensors


@pytest.mark.parametrize(
    ("name", "sizes", "window", "heads"),
    [
        ("bfloat16", (128, 16), None, 3),
        pytest.param("float16", (256, 0), 70, 3, marks=pytest.mark.nightly),
        pytest.param("fp8_e4m3", (256, 16), None, 3, marks=pytest.mark.nightly),
        pytest.param("nvfp4", (256, 16), None, 3, marks=pytest.mark.nightly),
        pytest.param("fp8_ds_mla", (512, 16), 70, 3, marks=pytest.mark.nightly),
        pytest.param("fp8_ds_mla", (512, 64), None, 32, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("invariant", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_interpreted_kernel_attends_in_torchs_memory(name, sizes, window, heads, invariant):
    """With gaps between blocks, into the caller's memory; one kernel for every number of sequences and of blocks."""
    spec = spec_of(name, sizes, 16)
    problem = build(spec, (150, 1, 0, 64, 70), None if window is None else window + 1)
    q = queries(spec, (5, 2, heads), "bfloat16")
    call = on("cpu", problem, q)
    pages = np.array(problem.cache.kv).view(np.uint8).reshape(problem.cache.num_blocks, -1)
    call["kv_cache"], _ = cache_of(spec, pages, 48)
    plan, query, tensors = planned(call, sliding_window=window, batch_invariant=invariant)
    out = torch.full((5, 2, heads, sizes[0]), torch.nan, dtype=torch.bfloat16)
    with interpret_mode():
        [part] = attending.attention_parts(plan, query.device)
        calls = attending.attention_calls(part.plan, query, tensors, None, out)
    for each in calls:
        run_interpreted(each)
    assert calls[1].tensors[-2].data_ptr() == out.data_ptr()
    is_rounded = (name, heads) == ("fp8_ds_mla", 32)
    assert_near(problem, q, (out, calls[1].tensors[-1]), 2**-7, is_rounded=is_rounded, window=window)


def test_a_kind_has_one_decode_kernel_whatever_the_batch():
    problem = build(spec_of("bfloat16", block_size=64), (150, 1))
    plan, _, tensors = planned(on("cpu", problem, queries(problem.spec, (2, 16), "bfloat16")))
    fewer = dataclasses.replace(plan)
    many = tensors._replace(block_table=torch.zeros(300, 9, dtype=torch.int32))
    one, other = attending.kernels_of_call(plan, tensors), attending.kernels_of_call(fewer, many)
    assert one.decode is other.decode
    assert one.decode.origin.make().counts == one.decode.counts  # as another process makes it


@pytest.mark.parametrize(("start", "is_given"), [(0, True), (4, True), (2, False), (1, False)])
def test_results_are_stored_in_place_unless_that_is_unaligned(start, is_given, monkeypatch):
    memory, results = torch.zeros(70, dtype=torch.bfloat16), torch.ones(2, 1, 2, 16, dtype=torch.bfloat16)
    out, lse = memory[start : start + 64].view(results.shape), torch.zeros(2, 1, 2)

    def attend(plan: Any, query: Any, tensors: Any, sinks: Any, own: torch.Tensor | None = None) -> Any:
        assert (own is out) is is_given
        return (results if own is None else own.copy_(results)), lse

    monkeypatch.setattr(reads, "attend", attend)
    none: Any = None
    assert latents.attend(none, none, none, None, out)[0] is out
    assert torch.equal(out, results)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "heads"), [*((name, 16) for name in NAMES), ("fp8_ds_mla", 64)])
def test_on_a_gpu_it_is_attention_in_eager_mode_and_in_a_graph(name: str, heads: int):
    """By the kernel, but for float32; and what torch writes and gathers there has the bytes of CPU tensors."""
    problem = build(spec_of(name, block_size=64), (3000, 1, 0, 777, 64))
    q = queries(problem.spec, (5, 2, heads), "bfloat16")
    call = on("cuda", problem, q)
    out = torch.full_like(call["q_nope"], torch.nan)
    eager = kvjax_torch.mla_paged_attention(**call, out=out, return_lse=True)
    assert eager[0] is out
    is_rounded = name == "fp8_ds_mla"  # by the kernel for more than 16 rows
    assert_near(problem, q, eager, 2**-7, is_rounded=is_rounded)
    expected = [x.clone() for x in eager]
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        captured = kvjax_torch.mla_paged_attention(**call, out=out, return_lse=True)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(captured, expected, strict=True):
        assert torch.equal(x, y)
    rows, slots = [tensor_of(x) for x in tokens_of(problem.spec, 9, ml_dtypes.bfloat16)], torch.tensor(SLOTS)
    results = []
    for device in ("cpu", "cuda"):
        cache = torch.zeros_like(call["kv_cache"][:4], device=device)
        kvjax_torch.concat_and_cache_mla(*(x.to(device) for x in rows), cache, slots.to(device), name, 0.01)
        dst = torch.zeros(5, 576, dtype=torch.bfloat16, device=device)
        table, bounds = (torch.tensor(x, device=device) for x in ([[0, 1], [3, 9]], [0, 2, 5]))
        kvjax_torch.gather_and_maybe_dequant_cache(cache, dst, table, bounds, None, 5, name, 0.01)
        results.append((cache, dst))
    assert_same(*results)
    bounds = torch.tensor([0, 2, 2, 2, 4, 5], device="cuda")
    rows = {key: call[key].flatten(0, 1)[:5] for key in ("q_nope", "q_pe")}
    ragged = kvjax_torch.mla_ragged_paged_attention(**call | rows, cu_q_lens=bounds, max_q_len=2)
    whole = torch.stack([rows["q_nope"][:2], rows["q_nope"][2:4]]), torch.stack([rows["q_pe"][:2], rows["q_pe"][2:4]])
    of_two = dict(zip(("q_nope", "q_pe"), whole, strict=True)) | {
        key: call[key][[0, 3]] for key in ("block_table", "seq_lens")
    }
    torch.testing.assert_close(
        ragged[:4], kvjax_torch.mla_paged_attention(**call | of_two).flatten(0, 1), rtol=0.01, atol=0.01
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "vllm_name"), [("bfloat16", "auto"), ("fp8_e4m3", "fp8"), ("fp8_ds_mla", "fp8_ds_mla")]
)
def test_on_a_gpu_a_write_has_the_bytes_of_vllms_own_operation(name: str, vllm_name: str):
    pytest.importorskip("vllm._C_stable_libtorch", exc_type=ImportError)
    generator = torch.Generator("cuda").manual_seed(0)
    kv_c, k_pe = (torch.randn(500, size, generator=generator, device="cuda").bfloat16() for size in (512, 64))
    kv_c[3, :256], kv_c[4, 7] = 0, 448
    if name == "fp8_ds_mla":  # blocks up to 2^60 apart, and largest magnitudes of 448 * 2^k
        factors = torch.tensor([1, 2.0**30, 2.0**-30, 1], device="cuda").repeat_interleave(128).bfloat16()
        kv_c[100:200] *= factors
        kv_c[200:300] /= factors
        for k in range(-16, 100):
            kv_c[320 + k] = kv_c[320 + k].clamp(-4, 4) * 2.0**k
            kv_c[320 + k, ::128] = torch.tensor([448, -448, 450, 446], device="cuda") * 2.0**k
    slots = torch.randperm(512, generator=generator, device="cuda")[:500]
    slots[::50] = -1
    spec, scale = spec_of(name, block_size=64), torch.tensor([0.37], device="cuda")
    own, theirs = (cache_of(spec, poisoned(spec, 8))[0].cuda() for _ in range(2))
    kvjax_torch.concat_and_cache_mla(kv_c, k_pe, own, slots, name, scale)
    cache = theirs if vllm_name == "auto" else theirs.view(torch.uint8)  # as vLLM keeps fp8
    torch.ops._C_cache_ops.concat_and_cache_mla(kv_c, k_pe, cache, slots, vllm_name, scale, False)
    assert_same_bytes(own.cpu().view(torch.uint8).numpy(), theirs.cpu().view(torch.uint8).numpy())


@pytest.mark.parametrize("name", ["concat", "gather", "attention", "ragged attention"])
def test_operations_have_schemas_and_fakes(name: str):
    cache, scale = torch.zeros(2, 8, 576, dtype=torch.bfloat16), torch.tensor(1.0)
    table, lengths, bounds = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2).int(), torch.tensor([0, 1, 2])
    q, stored = (torch.zeros(2, 4, 512), torch.zeros(2, 4, 64)), ("bfloat16", scale)
    operation, args = {
        "concat": ("concat_and_cache_mla", (torch.ones(3, 512), torch.ones(3, 64), cache, torch.arange(3), *stored)),
        "gather": (
            "gather_and_maybe_dequant_cache",
            (cache, torch.zeros(3, 576), table, bounds, None, 3, *stored, lengths),
        ),
        "attention": ("mla_paged_attention", (*q, cache, table, lengths, *stored)),
        "ragged attention": ("mla_ragged_paged_attention", (*q, cache, table, lengths, bounds, *stored)),
    }[name]
    options = {"sm_scale": 0.1} if name.endswith("attention") else {}
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(getattr(torch.ops.kvjax, operation).default, args, options, test_utils=tests)


QUERIES = torch.randn(3, 2, 48, generator=torch.Generator().manual_seed(0))
APART = {
    "memory of their own": (QUERIES[..., :32].clone(), QUERIES[..., 32:].clone()),
    "the other order": (QUERIES[..., 32:], QUERIES[..., :32]),
    "elements between them": (QUERIES[..., :16], QUERIES[..., 32:]),
    "other rows": (QUERIES[1:, :, :32], QUERIES[:2, :, 32:]),
    "one of two heads": (QUERIES[:, :1, :32], QUERIES[:, :1, 32:]),
    "no rows": (QUERIES[:0, :, :32], QUERIES[:0, :, 32:]),
    "no rope": (QUERIES[..., :32], QUERIES[..., 32:32]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_queries_that_are_the_parts_of_a_tensor_are_that_tensor(mode: Any):
    with mode():
        for whole in (QUERIES, QUERIES[1:], QUERIES[None]):
            joined = LatentQuery(*whole.split((32, 16), dim=-1)).joined
            assert joined.data_ptr() == whole.data_ptr()
            assert torch.equal(joined, whole)


@pytest.mark.parametrize("name", APART)
def test_other_queries_are_copied_to_one_tensor(name: str):
    joined = LatentQuery(*APART[name]).joined
    assert joined.is_contiguous()
    assert torch.equal(joined, torch.cat(APART[name], dim=-1))
