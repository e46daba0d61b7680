"""docs/migrating.md: kvjax's side of each call gives what attention in NumPy does over the other side's pages."""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kvjax

PAGE = (Path(__file__).parents[1] / "docs/migrating.md").read_text()
PAGE_SIZE, NUM_PAGES, NUM_KV_HEADS, NUM_HEADS, HEAD_DIM = 4, 9, 2, 4, 16
BLOCKS = [[5, 0, 8], [3], [7, 1, 2, 6]]
SEQ_LENS, Q_LENS = [9, 1, 16], [2, 1, 5]
WINDOW, CAP, SCALES = 6, 30.0, (0.011, 0.017)
CU_Q_LENS = np.cumsum([0, *Q_LENS], dtype=np.int32)


def code_of(section: str) -> tuple[list[str], list[str]]:
    """The blocks of Python in a section of the page: the other library's, and kvjax's."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"([^\n]+)\n\n```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    sides: tuple[list[str], list[str]] = ([], [])
    for introduced, code in blocks:
        sides["Before" not in introduced].append(code)
    return sides


def run(blocks: list[str], names: dict[str, Any]) -> dict[str, Any]:
    for code in blocks:
        exec(compile(code, "docs/migrating.md", "exec"), names)
    return names


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def block_table() -> np.ndarray:
    width = max(map(len, BLOCKS))
    return np.array([blocks + [-1] * (width - len(blocks)) for blocks in BLOCKS], np.int32)


def slots_of(sequence: int) -> np.ndarray:
    position = np.arange(SEQ_LENS[sequence])
    return np.array(BLOCKS[sequence])[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, *, cap: float = np.inf, window: int = 10**9
) -> tuple[np.ndarray, np.ndarray]:
    """Of the last rows of one sequence in float64: `[rows, num_heads, head_dim]`, and the log-sum-exp of each."""
    keys, values = (np.repeat(x.astype(np.float64), NUM_HEADS // NUM_KV_HEADS, axis=1) for x in (keys, values))
    logits = np.einsum("rhd,thd->rht", query.astype(np.float64), keys) / np.sqrt(HEAD_DIM)
    logits = logits if np.isinf(cap) else cap * np.tanh(logits / cap)
    own = len(keys) - len(query) + np.arange(len(query))[:, None]
    token = np.arange(len(keys))
    logits = np.where(((token <= own) & (token > own - window))[:, None], logits, -np.inf)
    lse = np.log(np.exp(logits).sum(axis=-1))
    return np.einsum("rht,thd->rhd", np.exp(logits - lse[..., None]), values), lse


def attention_over(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, cu_q_lens: np.ndarray = CU_Q_LENS, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Over `[NUM_PAGES * PAGE_SIZE, num_kv_heads, head_dim]`, for all sequences."""
    parts = [
        attention(query[cu_q_lens[i] : cu_q_lens[i + 1]], keys[slots_of(i)], values[slots_of(i)], **options)
        for i in range(len(BLOCKS))
    ]
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


@pytest.fixture
def pallas() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pytest.importorskip("jax.experimental.pallas.ops.gpu.paged_attention")


def jax_inputs() -> dict[str, Any]:
    k_pages, v_pages = (normal(i, NUM_KV_HEADS, NUM_PAGES, PAGE_SIZE, HEAD_DIM) for i in range(2))
    k_codes, v_codes = (np.clip(np.rint(40 * x), -127, 127).astype(np.int8) for x in (k_pages, v_pages))
    scales = np.random.default_rng(2).uniform(0.01, 0.04, (2, NUM_KV_HEADS, NUM_PAGES, PAGE_SIZE)).astype(np.float32)
    named = {
        "q": normal(3, len(BLOCKS), NUM_HEADS, HEAD_DIM),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_tables": np.maximum(block_table(), 0),
        "lengths": np.array(SEQ_LENS, np.int32),
        "k_codes": k_codes,
        "v_codes": v_codes,
        "k_scales_pages": scales[0],
        "v_scales_pages": scales[1],
        "key": normal(4, 2, NUM_KV_HEADS, HEAD_DIM),
        "value": normal(5, 2, NUM_KV_HEADS, HEAD_DIM),
        "page": np.array([4, 8]),
        "offset": np.array([3, 2]),
    }
    return {"sm_scale": HEAD_DIM**-0.5} | {name: jnp.asarray(array) for name, array in named.items()}


@pytest.fixture(scope="module")
def after_jax() -> dict[str, Any]:
    return run(code_of("From jax's paged_attention")[1], jax_inputs())


def dense_of_jax(pages: Any) -> np.ndarray:
    """`[num_seqs, tokens, num_kv_heads, head_dim]` of jax's pages."""
    gathered = np.asarray(pages)[:, np.maximum(block_table(), 0)]
    return gathered.transpose(1, 2, 3, 0, 4).reshape(len(BLOCKS), -1, NUM_KV_HEADS, HEAD_DIM)


def test_jaxs_pages_give_what_its_reference_does(pallas, after_jax):
    inputs = jax_inputs()
    expected = pallas.paged_attention_reference(
        inputs["q"] * inputs["sm_scale"],
        *(jnp.asarray(dense_of_jax(inputs[pages])) for pages in ("k_pages", "v_pages")),
        inputs["lengths"],
        attn_logits_soft_cap=CAP,
    )
    np.testing.assert_allclose(np.asarray(after_jax["out"]), np.asarray(expected), atol=1e-5)


@pytest.mark.full
def test_jaxs_pages_give_what_its_kernel_does(pallas, after_jax, monkeypatch):
    on_cpu = functools.partial(pallas.paged_attention, interpret=True, pages_per_compute_block=1, k_splits=2)
    monkeypatch.setattr(pallas, "paged_attention", on_cpu)
    [attends, scatters] = code_of("From jax's paged_attention")[0]
    before = run([attends, scatters], jax_inputs())
    np.testing.assert_allclose(np.asarray(after_jax["out"]), np.asarray(before["out"]), atol=1e-5)


def test_a_write_stores_what_jaxs_callers_scatter(after_jax):
    before = run(code_of("From jax's paged_attention")[0][1:], jax_inputs())
    pages = np.stack([before["k_pages"], before["v_pages"]]).transpose(2, 0, 1, 3, 4)
    np.testing.assert_array_equal(np.asarray(after_jax["cache"].kv), pages)


def test_jaxs_integers_are_stored_to_half_a_step(after_jax):
    inputs, cache = jax_inputs(), after_jax["int8_cache"]
    read = kvjax.gather_kv(cache, block_table(), np.array(SEQ_LENS), dtype=jnp.float32)
    for codes, scales, array in zip(("k_codes", "v_codes"), ("k_scales_pages", "v_scales_pages"), read, strict=True):
        expected = dense_of_jax(inputs[codes] * inputs[scales][..., None])
        for i, length in enumerate(SEQ_LENS):
            step = np.abs(expected[i, :length]).max(axis=-1, keepdims=True) / 127
            assert (np.abs(np.asarray(array)[i, :length] - expected[i, :length]) <= 0.501 * step).all()


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    return pytest.importorskip("torch")


def flashinfer_inputs(torch: ModuleType) -> dict[str, Any]:
    last = [(length - 1) % PAGE_SIZE + 1 for length in SEQ_LENS]
    kv_indptr = np.cumsum([0, *map(len, BLOCKS)], dtype=np.int32)
    total = sum(SEQ_LENS)
    arrays = {
        "kv_indptr": kv_indptr,
        "kv_indices": np.concatenate(BLOCKS).astype(np.int32),
        "kv_last_page_len": np.array(last, np.int32),
        "qo_indptr": CU_Q_LENS,
        "batch_indices": np.repeat(np.arange(len(BLOCKS)), SEQ_LENS),
        "positions": np.concatenate([np.arange(length) for length in SEQ_LENS]),
        "key": normal(0, total, NUM_KV_HEADS, HEAD_DIM),
        "value": normal(1, total, NUM_KV_HEADS, HEAD_DIM),
        "q": normal(2, len(BLOCKS), NUM_HEADS, HEAD_DIM),
        "rows": normal(3, sum(Q_LENS), NUM_HEADS, HEAD_DIM),
    }
    pages = torch.full((NUM_PAGES, 2, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM), 0x7F, dtype=torch.uint8)  # NaN
    return {name: torch.from_numpy(array) for name, array in arrays.items()} | {
        "paged_kv_cache": pages.view(torch.float8_e4m3fn),
        "page_size": PAGE_SIZE,
        "max_num_pages": 5,
        "window": WINDOW,
        "k_scale": SCALES[0],
        "v_scale": SCALES[1],
    }


def decoded(pages: Any, scales: tuple[float, float] = SCALES) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values `[NUM_PAGES * PAGE_SIZE, num_kv_heads, head_dim]` of fp8 pages in the layout NHD."""
    stored = np.asarray(pages).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return tuple(stored[:, i].reshape(-1, NUM_KV_HEADS, HEAD_DIM) * scales[i] for i in range(2))


@pytest.fixture(scope="module")
def after_flashinfer(torch) -> dict[str, Any]:
    names = run(code_of("From FlashInfer")[1][:-1], flashinfer_inputs(torch))
    return names | dict(zip(("keys", "values"), decoded(names["paged_kv_cache"].view(torch.uint8)), strict=True))


def test_flashinfers_append_is_a_write_to_the_same_places(after_flashinfer):
    written = np.concatenate([slots_of(i) for i in range(len(BLOCKS))])
    np.testing.assert_array_equal(np.asarray(after_flashinfer["slot_mapping"]), written)
    for stored, given, scale in zip(("keys", "values"), ("key", "value"), SCALES, strict=True):
        close = {"rtol": 2**-4, "atol": 2**-9 * scale}
        np.testing.assert_allclose(after_flashinfer[stored][written], after_flashinfer[given].numpy(), **close)
        others = np.delete(after_flashinfer[stored], written, axis=0)
        assert np.isnan(others).all()


def test_flashinfers_page_table_decodes(after_flashinfer):
    names = after_flashinfer
    ends = np.arange(len(BLOCKS) + 1)
    expected, lse = attention_over(names["q"].numpy(), names["keys"], names["values"], ends, window=WINDOW)
    np.testing.assert_allclose(names["out"].numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(names["lse_of_base_2"].numpy(), lse / np.log(2), atol=1e-5)


def test_flashinfers_ragged_rows_attend(after_flashinfer):
    names = after_flashinfer
    expected, _ = attention_over(names["rows"].numpy(), names["keys"], names["values"], cap=CAP)
    np.testing.assert_allclose(names["ragged"].numpy(), expected, atol=1e-5)


def test_flashinfers_heads_before_tokens_are_the_same_transposed(torch, after_flashinfer):
    inputs = flashinfer_inputs(torch)
    pages = inputs["paged_kv_cache"].view(torch.uint8).transpose(2, 3).contiguous()
    inputs["paged_kv_cache"] = pages.transpose(2, 3).view(torch.float8_e4m3fn)  # as the page has it of HND
    names = run(code_of("From FlashInfer")[1][:-1], inputs)
    assert torch.equal(pages.transpose(2, 3), after_flashinfer["paged_kv_cache"].view(torch.uint8))
    np.testing.assert_allclose(names["out"].numpy(), after_flashinfer["out"].numpy(), atol=1e-6)


@pytest.mark.full
def test_flashinfers_arrays_make_a_step_in_jax(torch):
    inputs = flashinfer_inputs(torch)
    arrays = {name: jnp.asarray(x.numpy()) for name, x in inputs.items() if name in ("kv_indptr", "kv_indices")}
    new = [normal(seed, sum(Q_LENS), NUM_KV_HEADS, HEAD_DIM) for seed in (4, 5)]
    names = run(
        code_of("From FlashInfer")[1][-1:],
        inputs
        | arrays
        | {
            "kvjax": kvjax,
            "seq_lens": jnp.asarray(Q_LENS),  # prompts that start here
            "qo_indptr": jnp.asarray(CU_Q_LENS),
            "rows": jnp.asarray(inputs["rows"].numpy()),
            "new_keys": jnp.asarray(new[0]),
            "new_values": jnp.asarray(new[1]),
            "num_pages": NUM_PAGES,
            "num_kv_heads": NUM_KV_HEADS,
            "head_dim": HEAD_DIM,
        },
    )
    keys, values = decoded(names["cache"].kv)
    for i, q_len in enumerate(Q_LENS):
        rows, own = slice(CU_Q_LENS[i], CU_Q_LENS[i + 1]), slots_of(i)[:q_len]
        np.testing.assert_allclose(keys[own], new[0][rows], rtol=2**-4, atol=2**-9)
        expected, _ = attention(np.asarray(names["rows"])[rows], keys[own], values[own], cap=CAP)
        np.testing.assert_allclose(np.asarray(names["attended"])[rows], expected, atol=1e-5)


def vllm_inputs(torch: ModuleType) -> dict[str, Any]:
    used = np.concatenate([slots_of(i) for i in range(len(BLOCKS))])
    codes = normal(6, 2, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM).astype(ml_dtypes.float8_e4m3fn)
    sides = [torch.from_numpy(side.view(np.uint8)) for side in codes]
    x = 16
    old_keys = sides[0].unflatten(3, (HEAD_DIM // x, x)).permute(0, 2, 3, 1, 4).contiguous()
    return {
        "torch": torch,
        "kvjax": kvjax,
        "kvjax_torch": importlib.import_module("kvjax_torch"),
        "sides": [side.clone() for side in sides],
        "key_cache": sides[0],
        "value_cache": sides[1],
        "old_key_cache": old_keys,
        "old_value_cache": sides[1].permute(0, 2, 3, 1).contiguous(),
        "key": torch.from_numpy(normal(7, len(used) + 3, NUM_KV_HEADS, HEAD_DIM)),  # three of padding
        "value": torch.from_numpy(normal(8, len(used) + 3, NUM_KV_HEADS, HEAD_DIM)),
        "slot_mapping": torch.from_numpy(np.where(np.arange(len(used)) == 4, -1, used)),
        "query": torch.from_numpy(normal(9, sum(Q_LENS), NUM_HEADS, HEAD_DIM)),
        "output": torch.full((sum(Q_LENS), NUM_HEADS, HEAD_DIM), torch.nan),
        "block_table": torch.from_numpy(block_table()).clone(),  # aligned, for JAX to borrow
        "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32),
        "query_start_loc": torch.from_numpy(CU_Q_LENS),
        "max_query_len": max(Q_LENS),
        "k_scale": torch.tensor(SCALES[0]),
        "v_scale": torch.tensor(SCALES[1]),
        "scale": HEAD_DIM**-0.5,
        "window": WINDOW,
        "sinks": torch.full((NUM_HEADS,), -torch.inf),
        "block_size": PAGE_SIZE,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
    }


def test_vllms_calls_write_and_attend(torch):
    writes, attends, *_ = code_of("From vLLM")[1]
    names = run([writes], vllm_inputs(torch))
    pages = np.stack([names["key_cache"].numpy(), names["value_cache"].numpy()], axis=1)
    keys, values = decoded(pages)
    slots = names["slot_mapping"].numpy()
    rows, written = np.flatnonzero(slots >= 0), slots[slots >= 0]
    np.testing.assert_allclose(keys[written], names["key"].numpy()[rows], rtol=2**-4, atol=2**-9 * SCALES[0])
    before = decoded(np.stack([side.numpy() for side in names["sides"]], axis=1))
    kept = np.setdiff1d(np.arange(len(keys)), written)
    for now, then in zip((keys, values), before, strict=True):
        np.testing.assert_array_equal(now[kept], then[kept])
    run([attends], names)
    expected, _ = attention_over(names["query"].numpy(), keys, values, cap=CAP, window=WINDOW)
    np.testing.assert_allclose(names["output"].numpy(), expected, atol=1e-5)


def test_vllms_older_pages_are_split_and_its_pages_are_read_in_jax(torch):
    *_, older, in_jax = code_of("From vLLM")[1]
    names = vllm_inputs(torch)
    sides = names["sides"]
    del names["key_cache"], names["value_cache"]
    run([older, in_jax], names)
    assert torch.equal(names["key_cache"], sides[0])
    assert torch.equal(names["value_cache"], sides[1])
    stored = decoded(np.stack([side.numpy() for side in sides], axis=1), (1.0, 1.0))
    for read, expected in zip(names["read"], stored, strict=True):
        for i, length in enumerate(SEQ_LENS):
            np.testing.assert_array_equal(np.asarray(read[i, :length], np.float64), expected[slots_of(i)])
