"""FlashInfer attends to the pages that kvjax wrote, through views of the same memory."""

from __future__ import annotations

import itertools
import math
import warnings
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

import kvjax_torch  # noqa: E402

# What FlashInfer and what it imports warn of is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BLOCK_SIZE, NUM_KV_HEADS, NUM_QO_HEADS, HEAD_SIZE = 16, 2, 8, 128
BLOCKS_OF_SEQUENCES = [[5, 0, 9], [3], [7, 1, 2, 8]]
SEQ_LENS = [37, 1, 64]
NUM_BLOCKS = 11  # block 10, 4 and 6 belong to nobody
ROW = {"bfloat16": 2 * HEAD_SIZE, "fp8_e4m3": HEAD_SIZE, "nvfp4": HEAD_SIZE // 2 + HEAD_SIZE // 16}
SCALES = {"bfloat16": (1.0, 1.0), "fp8_e4m3": (0.0173, 0.029), "nvfp4": (0.0021, 0.0017)}


@pytest.fixture(scope="module")
def flashinfer() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("flashinfer", exc_type=ImportError)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ROW)
def test_flashinfer_decodes_from_pages_that_kvjax_wrote(flashinfer, dtype, layout):
    generator = torch.Generator("cuda").manual_seed(0)
    order = (BLOCK_SIZE, NUM_KV_HEADS) if layout == "NHD" else (NUM_KV_HEADS, BLOCK_SIZE)
    pages = torch.full((NUM_BLOCKS, 2, *order, ROW[dtype]), 0xAB, dtype=torch.uint8, device="cuda")
    stored = pages.view(torch.bfloat16) if dtype == "bfloat16" else pages
    caches = [half if layout == "NHD" else half.transpose(1, 2) for half in (stored[:, 0], stored[:, 1])]
    slots = [
        blocks[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE
        for blocks, length in zip(BLOCKS_OF_SEQUENCES, SEQ_LENS, strict=True)
        for token in range(length)
    ]
    normal = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    key, value = (torch.randn((len(slots), NUM_KV_HEADS, HEAD_SIZE), **normal) for _ in range(2))
    query = torch.randn((len(SEQ_LENS), NUM_QO_HEADS, HEAD_SIZE), **normal)
    kvjax_torch.reshape_and_cache_flash(
        key, value, *caches, torch.tensor(slots, device="cuda"), dtype, *SCALES[dtype], unique_slots=True
    )

    views, block_scales = pages_as_flashinfer_has_them(pages, dtype, order)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda"),
        layout,
        # Its NVFP4 is in the tensor cores' kernels alone; those for CUDA cores compile in a tenth of the time.
        **({"use_tensor_cores": True, "backend": "fa2"} if dtype == "nvfp4" else {}),
    )
    wrapper.plan(
        torch.tensor([0, *itertools.accumulate(map(len, BLOCKS_OF_SEQUENCES))], dtype=torch.int32),
        torch.tensor([*itertools.chain(*BLOCKS_OF_SEQUENCES)], dtype=torch.int32, device="cuda"),
        torch.tensor([1 + (length - 1) % BLOCK_SIZE for length in SEQ_LENS], dtype=torch.int32),
        NUM_QO_HEADS,
        NUM_KV_HEADS,
        HEAD_SIZE,
        BLOCK_SIZE,
        q_data_type=torch.bfloat16,
        kv_data_type=views[0].dtype,
    )
    k_scale, v_scale = SCALES[dtype]
    got = wrapper.run(query, tuple(views), k_scale=k_scale, v_scale=v_scale, kv_cache_sf=block_scales)

    expected = attention_over_what_kvjax_gathers(query, caches, dtype)
    error = (got.double() - expected).norm() / expected.norm()
    assert error < 2**-8  # a result that is rounded to bfloat16 once is up to 2^-9 off


def pages_as_flashinfer_has_them(pages, dtype: str, order: tuple[int, int]):
    """Views `[num_blocks, *order, ...]` of keys and of values, and for NVFP4 of their block scales."""
    if dtype != "nvfp4":
        views = pages.view({"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}[dtype])
        return [views[:, 0], views[:, 1]], None
    num_data_bytes = BLOCK_SIZE * NUM_KV_HEADS * HEAD_SIZE // 2
    halves = [half.flatten(1) for half in (pages[:, 0], pages[:, 1])]
    data = [half[:, :num_data_bytes].unflatten(1, (*order, HEAD_SIZE // 2)) for half in halves]
    block_scales = [half[:, num_data_bytes:].unflatten(1, (*order, HEAD_SIZE // 16)) for half in halves]
    assert all(view._base is not None for view in (*data, *block_scales))
    return data, tuple(scales.view(torch.float8_e4m3fn) for scales in block_scales)


def attention_over_what_kvjax_gathers(query, caches, dtype: str):
    """In float64, `[num_seqs, num_qo_heads, head_size]`."""
    width = max(map(len, BLOCKS_OF_SEQUENCES))
    table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in BLOCKS_OF_SEQUENCES], device="cuda")
    lengths = torch.tensor(SEQ_LENS, device="cuda")
    dense = kvjax_torch.gather_kv(*caches, table, lengths, dtype, *SCALES[dtype], dtype=torch.float32)
    results = []
    for number, length in enumerate(SEQ_LENS):
        group = NUM_QO_HEADS // NUM_KV_HEADS
        keys, values = (
            half[number, :length].double().repeat_interleave(group, 1).transpose(0, 1) for half in dense
        )  # [num_qo_heads, length, head_size]
        weights = torch.softmax(keys @ query[number].double()[..., None] / math.sqrt(HEAD_SIZE), 1)
        results.append((weights * values).sum(1))
    return torch.stack(results)
