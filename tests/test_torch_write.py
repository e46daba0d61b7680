"""torch's caches after a write and what is read back, byte for byte as support/reference.py has it, however strided."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from support import reference
from support.helpers import FP8_NAMES, INPUT_DTYPES, assert_same_bytes, each_case, kv_tokens, pairwise, simple_spec

torch = pytest.importorskip("torch")

from support.torch_helpers import (  # noqa: E402
    FORMS,
    assert_same,
    from_numpy,
    nested,
    random_pages,
    resident_bytes,
    to_numpy,
    torch_cache,
)

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import (  # noqa: E402
    STORED_KV_CACHE_DTYPES,
    AttentionSpec,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
)
from kvjax_torch.arguments import reads as reads_plans  # noqa: E402
from kvjax_torch.arguments import writes as writes_plans  # noqa: E402
from kvjax_torch.arguments.dtypes import storage_dtypes  # noqa: E402
from kvjax_torch.arguments.plan import Encoding, ReadTensors  # noqa: E402
from kvjax_torch.calls import gathering  # noqa: E402
from kvjax_torch.eager import host  # noqa: E402

MAP_NORESERVE = 0x4000
"""Of Linux; Python names it from 3.13 on."""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEAD_SIZE_V = {64: 80, 80: 64, 96: 192, 112: 16, 128: 96, 192: 128, 256: 32, 512: 48}
AXES = {
    "dtype": [dtype.value for dtype in STORED_KV_CACHE_DTYPES],
    "input_dtype": list(INPUT_DTYPES),
    "layout": ["NHD", "HND", "NHD-diffkv", "HND-diffkv"],
    "v_scale_layout": ["linear", "swizzled"],
    "head_size": list(HEAD_SIZE_V),
    "num_kv_heads": [1, 2, 3, 4, 5, 8, 10, 16],
    "block_size": [1, 8, 16, 32, 64, 128, 784],
    "num_tokens": [20, 1, 2, 7, 127],
    "scale": ["float", "tensor", "per_head"],
    "slots": ["int64", "int32", "padded", "out_of_range", "fewer_than_rows", "none"],
    "rows": ["contiguous", "fused_qkv", "heads_first", "offset"],
    "form": FORMS,
    "element": ["bytes", "own"],
}


def is_valid(case: dict) -> bool:
    swizzles = "nvfp4" in case["dtype"] and case["block_size"] % 4 == 0
    fp8 = case["dtype"] in FP8_NAMES
    return (
        (swizzles or case["v_scale_layout"] == "linear")
        and (fp8 or (case["scale"] != "per_head" and case["element"] == "bytes"))
        and not ("diffkv" in case["layout"] and case["form"] == "two_tensors")
    )


def make_spec(case: dict) -> AttentionSpec:
    layout, _, diffkv = case["layout"].partition("-")
    return simple_spec(
        KVCacheDType(case["dtype"]),
        block_size=case["block_size"],
        num_kv_heads=case["num_kv_heads"],
        head_size=case["head_size"],
        head_size_v=HEAD_SIZE_V[case["head_size"]] if diffkv else None,
        layout=layout,
        v_scale_layout=case["v_scale_layout"],
    )


def make_slots(kind: str, num_slots: int, num_tokens: int) -> np.ndarray:
    slots = np.random.default_rng(1).permutation(num_slots)[:num_tokens]
    if kind == "padded":
        slots[::3] = -1
    elif kind == "out_of_range":
        slots[::3] = np.resize([num_slots, num_slots + 7, -5, 2**40, -(2**62)], slots[::3].size)
    elif kind in ("none", "fewer_than_rows"):
        slots = slots[: 0 if kind == "none" else 3]
    return slots.astype(np.int32 if kind == "int32" else np.int64)


def make_rows(kind: str, key: np.ndarray, value: np.ndarray, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """The same tokens with other strides: between them lie NaNs that must not be read."""
    key, value = from_numpy(key).to(device), from_numpy(value).to(device)
    num_tokens, num_heads, _ = key.shape
    if kind == "fused_qkv":
        query = torch.full((num_tokens, 2 * num_heads * key.shape[2]), torch.nan, dtype=key.dtype, device=device)
        fused = torch.cat([query, key.flatten(1), value.flatten(1)], dim=1)
        sizes = [part.shape[1] for part in (query, key.flatten(1), value.flatten(1))]
        _, fused_key, fused_value = fused.split(sizes, dim=1)
        return fused_key.unflatten(1, key.shape[1:]), fused_value.unflatten(1, value.shape[1:])
    if kind == "heads_first":
        return tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value))
    if kind == "offset":
        return tuple(torch.cat([torch.full_like(x[:1], torch.nan), x])[1:] for x in (key, value))
    return key, value


def make_scales(kind: str, num_heads: int) -> tuple[float | np.ndarray, float | np.ndarray]:
    if kind != "per_head":
        return 0.0173, 1.9
    scales = np.exp2(np.linspace(-3.3, 2.9, num_heads)).astype(np.float32)
    return scales, scales[::-1].copy()


def as_argument(scale: float | np.ndarray, kind: str, device: str) -> float | torch.Tensor:
    return scale if kind == "float" else torch.tensor(scale, dtype=torch.float32, device=device).reshape(-1)


def write(rows, cache, slots, dtype, scales=(1.0, 1.0), **options) -> None:
    kvjax_torch.reshape_and_cache_flash(*rows, cache.key, cache.value, slots, dtype, *scales, **options)


CASES = pairwise(AXES, is_valid)


@pytest.mark.parametrize("device", DEVICES)
@each_case(CASES)
def test_every_byte_is_the_references_and_is_read_back_as_it_decodes(case: dict, device: str):
    spec = make_spec(case)
    num_tokens = case["num_tokens"]
    num_blocks = max(3, -(-2 * num_tokens // spec.block_size))
    pages = random_pages(spec, num_blocks)
    element = storage_dtypes(spec.dtype)[-1 if case["element"] == "own" else 0]
    cache = torch_cache(pages, spec, form=case["form"], dtype=element, device=device)
    slots = make_slots(case["slots"], num_blocks * spec.block_size, num_tokens)
    key, value = kv_tokens(spec, num_tokens, INPUT_DTYPES[case["input_dtype"]])
    scales = make_scales(case["scale"], spec.num_kv_heads)
    arguments = [as_argument(scale, case["scale"], device) for scale in scales]
    options = {"v_scale_layout": case["v_scale_layout"]}

    rows = make_rows(case["rows"], key, value, device)
    write(rows, cache, torch.from_numpy(slots).to(device), case["dtype"], arguments, **options)
    expected = reference.write(pages, spec, key, value, slots, *scales)
    assert_same_bytes(cache.pages(), expected)

    block_table = np.array([[1, 0, 2], [2, 2, 1]])
    seq_lens = np.array([0, min(3 * spec.block_size - 1, 40)])
    read = kvjax_torch.gather_kv(
        cache.key,
        cache.value,
        torch.from_numpy(block_table).to(device),
        torch.from_numpy(seq_lens).to(device),
        case["dtype"],
        *arguments,
        dtype=torch.float32,
        **options,
    )
    for half, dense, scale in zip((0, 1), read, scales, strict=True):
        dtype = np.dtype(np.float32)
        wanted = reference.read(expected, spec, half, block_table, seq_lens, scale, dtype)
        assert_same_bytes(to_numpy(dense, dtype), wanted)


def simple_cache(dtype: KVCacheDType = KVCacheDType.BFLOAT16, num_blocks: int = 4, **changes):
    spec = simple_spec(dtype, **changes)
    pages = random_pages(spec, num_blocks)
    return spec, pages, torch_cache(pages, spec)


def simple_rows(spec: AttentionSpec, num_tokens: int, dtype=np.float32):
    key, value = kv_tokens(spec, num_tokens, dtype)
    return key, value, (from_numpy(key), from_numpy(value))


GOLDEN = np.load(Path(__file__).parent / "data/nvfp4_golden.npz")


@pytest.mark.parametrize("case", range(int(GOLDEN["num_cases"])))
def test_nvfp4_has_the_golden_bytes(case: int):
    golden = {name.removeprefix(f"case{case}/"): GOLDEN[name] for name in GOLDEN.files if f"case{case}/" in name}
    key, value = (golden[f"{name}_bits"].view(INPUT_DTYPES[str(golden["dtype"])]) for name in ("key", "value"))
    num_blocks, block_size, num_heads, half = golden["k_data"].shape
    spec = simple_spec(KVCacheDType.NVFP4, block_size=block_size, num_kv_heads=num_heads, head_size=2 * half)
    regions = [golden[name].reshape(num_blocks, -1) for name in ("k_data", "k_block_scale", "v_data", "v_block_scale")]
    poison = [np.full_like(region, byte) for region, byte in zip(regions, (0xAB, 0xCD, 0xAB, 0xCD), strict=True)]
    cache = torch_cache(np.concatenate(poison, axis=1), spec)
    scales = torch.from_numpy(golden["k_scale"]), torch.from_numpy(golden["v_scale"])
    write((from_numpy(key), from_numpy(value)), cache, torch.from_numpy(golden["slot_mapping"]), "nvfp4", scales)
    assert_same_bytes(cache.pages(), np.concatenate(regions, axis=1))


def test_auto_is_the_caches_own_dtype():
    for dtype in (row for row in STORED_KV_CACHE_DTYPES if len({*row.parts}) == 1 and not row.info.scale_dtype):
        spec, pages, _ = simple_cache(dtype)
        cache = torch_cache(pages, spec, dtype=storage_dtypes(dtype)[-1])
        key, value, rows = simple_rows(spec, 5)
        write(rows, cache, torch.arange(5), "auto", (0.5, 0.25))
        assert_same_bytes(cache.pages(), reference.write(pages, spec, key, value, np.arange(5), 0.5, 0.25))
    bytes_cache = simple_cache(KVCacheDType.NVFP4)[2]
    with pytest.raises(
        KVCacheValueError,
        match=r"got 'auto' with a torch\.uint8 cache, expected one of fp8_e4m3, fp8_e5m2, fp8_per_token_head, int8_per",
    ):
        write(rows, bytes_cache, torch.arange(5), "auto")


def test_a_scale_may_be_a_number_of_numpy():
    spec, pages, cache = simple_cache(KVCacheDType.FP8_E4M3)
    key, value, rows = simple_rows(spec, 5)
    write(rows, cache, torch.arange(5), "fp8", (np.float32(0.5), np.float64(0.25)))
    assert_same_bytes(cache.pages(), reference.write(pages, spec, key, value, np.arange(5), 0.5, 0.25))


def test_one_compilation_serves_every_number_of_tokens():
    spec, pages, cache = simple_cache(KVCacheDType.FP8_E4M3, 8, num_kv_heads=7, head_size=48)
    counts = []
    for num_tokens in (1, 0, 2, 15, 16, 17, 40):
        key, value, rows = simple_rows(spec, num_tokens)
        slots = np.arange(num_tokens) + 3
        write(rows, cache, torch.from_numpy(slots), "fp8", (0.5, 0.25))
        pages = reference.write(pages, spec, key, value, slots, 0.5, 0.25)
        assert_same_bytes(cache.pages(), pages)
        table, length = torch.arange(1 + num_tokens // 8)[None], torch.tensor([num_tokens])
        kvjax_torch.gather_kv(cache.key, cache.value, table, length, "fp8", 0.5, 0.25)
        compiled = host.encode_chunk._cache_size(), host.decode_chunk._cache_size()
        planned = writes_plans._write_plan.cache_info().misses, reads_plans._gather_plan.cache_info().misses
        counts.append((*compiled, *planned))
    assert len(set(counts)) == 1


def test_of_tokens_with_one_slot_one_wins_whole():
    num_tokens, num_heads, head_size = 300, 8, 256
    key = torch.arange(1.0, num_tokens + 1)[:, None, None].repeat(1, num_heads, head_size)
    kv_cache = torch.zeros(2, 2, 8, num_heads, head_size)
    slots = torch.where(torch.arange(num_tokens) % 3 == 0, 5, 11)
    for _ in range(10):
        kvjax_torch.reshape_and_cache_flash(key, -key, kv_cache[:, 0], kv_cache[:, 1], slots, "auto", 1.0, 1.0)
        for slot in (5, 11):
            stored = kv_cache[slot // 8, :, slot % 8]
            winner = int(stored[0, 0, 0])
            assert slots[winner - 1] == slot
            assert (stored[0] == winner).all()
            assert (stored[1] == -winner).all()


def test_of_tokens_with_one_slot_the_last_is_written():
    for dtype in (KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3):
        spec, pages, cache = simple_cache(dtype)
        key, value, rows = simple_rows(spec, 40)
        slots = np.random.default_rng(0).integers(-1, 12, 40)
        write(rows, cache, torch.from_numpy(slots), dtype.value)
        assert_same_bytes(cache.pages(), reference.write(pages, spec, key, value, slots, 1.0, 1.0))


def test_many_tokens_are_encoded_and_decoded_at_once():
    spec, pages, cache = simple_cache(KVCacheDType.FP8_E4M3, 80, num_kv_heads=7, head_size=48)
    key, value, rows = simple_rows(spec, 600)
    slots = np.random.default_rng(0).permutation(640)[:600]
    write(rows, cache, torch.from_numpy(slots), "fp8", (0.5, 0.25))
    expected = reference.write(pages, spec, key, value, slots, 0.5, 0.25)
    assert_same_bytes(cache.pages(), expected)
    table, lengths, dtype = np.arange(80)[None], np.array([633]), np.dtype(np.float32)
    on_torch = torch.from_numpy(table), torch.from_numpy(lengths)
    read = kvjax_torch.gather_kv(cache.key, cache.value, *on_torch, "fp8", 0.5, 0.25, dtype=torch.float32)
    for half, dense, scale in zip((0, 1), read, (0.5, 0.25), strict=True):
        assert_same_bytes(to_numpy(dense, dtype), reference.read(expected, spec, half, table, lengths, scale, dtype))


def test_unquantized_tokens_of_cpu_tensors_do_not_pass_through_jax(monkeypatch):
    monkeypatch.setattr(host, "to_jax", lambda tensor: pytest.fail("a tensor is lent to JAX"))
    spec, pages, cache = simple_cache(KVCacheDType.FLOAT16)
    key, value, rows = simple_rows(spec, 5)
    write(rows, cache, torch.arange(5), "float16")
    assert_same_bytes(cache.pages(), reference.write(pages, spec, key, value, np.arange(5), 1.0, 1.0))
    table, lengths = torch.zeros(1, 1).int(), torch.tensor([5])
    stored = cache.key, cache.value, table, lengths, "float16", 1.0, 1.0
    kvjax_torch.gather_kv(*stored)
    kvjax_torch.paged_attention(torch.ones(1, 2, 64), *stored)


def test_tokens_of_a_cache_can_be_written_to_other_slots_of_it():
    kv_cache = torch.arange(2.0 * 2 * 8)[:, None, None].expand(32, 2, 4).reshape(2, 2, 8, 2, 4).contiguous()
    before = kv_cache.clone()
    key_cache, value_cache = kv_cache[:, 0], kv_cache[:, 1]
    kvjax_torch.reshape_and_cache_flash(
        key_cache[0], value_cache[0], key_cache, value_cache, torch.arange(1, 9), "auto", 1.0, 1.0
    )
    for half in (0, 1):
        tokens = before[:, half].flatten(0, 1)
        assert_same([kv_cache[:, half].flatten(0, 1)], [torch.cat([tokens[:1], tokens[:8], tokens[9:]])])


def test_int32_slots_may_address_a_cache_of_2_31_slots():
    """Of which the untouched ones take no memory."""
    size, flags = 2**31, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    key_cache, value_cache = (
        torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8).view(-1, 1, 1, 1) for _ in "kv"
    )
    slots, row = torch.tensor([5, -1, 2**31 - 1, 7], dtype=torch.int32), torch.ones(4, 1, 1)
    kvjax_torch.reshape_and_cache_flash(row, 2 * row, key_cache, value_cache, slots, "fp8", 1.0, 1.0)
    table = torch.tensor([[5, 6, 2**31 - 1, 7]], dtype=torch.int32)
    keys, values = kvjax_torch.gather_kv(
        key_cache, value_cache, table, torch.tensor([4]), "fp8", 1.0, 1.0, dtype=torch.float32
    )
    assert keys.flatten().tolist() == [1, 0, 1, 1]
    assert values.flatten().tolist() == [2, 0, 2, 2]
    out = kvjax_torch.paged_attention(
        row[:1], key_cache, value_cache, table, torch.tensor([4]), "fp8", 1.0, 1.0, sm_scale=0.0
    )
    assert out.item() == 1.5


def test_values_within_the_rows_of_keys_are_read():
    """As in multi-head latent attention: the values of a token are a part of its keys."""
    latent = torch.randn(4, 8, 1, 24, generator=torch.Generator().manual_seed(0))
    sequences = torch.tensor([[2, 1]]), torch.tensor([13])
    apart = kvjax_torch.gather_kv(latent, latent[..., :16].clone(), *sequences, "float32", 1.0, 1.0)
    assert_same(kvjax_torch.gather_kv(latent, latent[..., :16], *sequences, "float32", 1.0, 1.0), apart)
    with pytest.raises(KVCacheValueError, match=r"value_cache: got memory that overlaps .* or rows within its rows"):
        kvjax_torch.gather_kv(latent[:3], latent[1:], *sequences, "float32", 1.0, 1.0)


@pytest.mark.parametrize("dtype", [KVCacheDType.AUTO, KVCacheDType.FP8_E4M3])
def test_a_dtype_may_be_the_enums_member(dtype: KVCacheDType):
    results = []
    for name in (dtype, dtype.value):
        _, _, cache = simple_cache(KVCacheDType.FLOAT16 if dtype is KVCacheDType.AUTO else dtype)
        rows = simple_rows(simple_spec(), 5)[2]
        write(rows, cache, torch.arange(5), name)
        read = cache.key, cache.value, torch.tensor([[0]]), torch.tensor([5]), name, 1.0, 1.0
        attended = kvjax_torch.paged_attention(torch.ones(1, 2, 64), *read)
        results.append([torch.from_numpy(cache.pages()), *kvjax_torch.gather_kv(*read), attended])
    assert_same(*results)


def test_a_write_of_no_tokens_from_numpy_changes_nothing():
    _, pages, cache = simple_cache()
    nothing = torch.from_numpy(np.zeros((0, 2, 64), np.float32))
    write((nothing, nothing), cache, torch.from_numpy(np.zeros(0, np.int64)), "bfloat16")
    assert_same_bytes(cache.pages(), pages)


def test_blocks_past_the_end_of_a_table_may_hold_anything():
    spec, pages, cache = simple_cache(KVCacheDType.FP8_E5M2)
    table = np.array([[2, 1, 99, -7], [3, 2**31 - 1, -(2**31), 0]], np.int32)
    lengths = np.array([13, 8], np.int32)
    read = kvjax_torch.gather_kv(
        cache.key, cache.value, torch.from_numpy(table), torch.from_numpy(lengths), "fp8_e5m2", 0.5, 2.0
    )
    for half, dense, scale in zip((0, 1), read, (0.5, 2.0), strict=True):
        assert dense.dtype is torch.bfloat16
        dtype = np.dtype(ml_dtypes.bfloat16)
        assert_same_bytes(to_numpy(dense, dtype), reference.read(pages, spec, half, table, lengths, scale, dtype))
    assert cache.pages().tobytes() == pages.tobytes()


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_nothing_is_read_where_the_table_names_no_block(index):
    """Zeros, and never what another sequence has in the first or the last page; the other blocks are read as usual."""
    spec, pages, cache = simple_cache(KVCacheDType.FP8_E5M2)
    past = {torch.int32: 2**31 - 1, torch.int64: 2**32}[index]  # the low half of the latter is a block
    table, lengths = torch.tensor([[-1, 2], [past, len(pages)], [1, -past]], dtype=index), torch.tensor([16, 16, 13])
    read = kvjax_torch.gather_kv(cache.key, cache.value, table, lengths, "fp8_e5m2", 0.5, 2.0)
    sequences, dtype = (table.numpy(), lengths.numpy()), np.dtype(ml_dtypes.bfloat16)
    for half, dense, scale in zip((0, 1), read, (0.5, 2.0), strict=True):
        assert_same_bytes(to_numpy(dense, dtype), reference.read(pages, spec, half, *sequences, scale, dtype))


def test_rows_with_gaps_between_heads_and_tokens_are_written_where_they_lie():
    key, value, rows = simple_rows(simple_spec(), 9)
    memory = torch.full((4, 8, 3, 2, 2, 80), 7.0, dtype=torch.float16)  # block, token, gap, key or value, head, row
    before = memory.clone()
    key_cache, value_cache = memory[:, :, 1, 0, :, :64], memory[:, :, 1, 1, :, :64]
    slots = torch.randperm(32)[:9]
    kvjax_torch.reshape_and_cache_flash(*rows, key_cache, value_cache, slots, "float16", 1.0, 1.0)
    for half, x in ((0, key), (1, value)):
        stored = from_numpy(reference.cast(x, np.dtype(np.float16)))
        for i, slot in enumerate(slots.tolist()):
            before[slot // 8, slot % 8, 1, half, :, :64] = stored[i]
    assert_same_bytes(memory.numpy(), before.numpy())


def test_operations_ignore_torchs_default_device_and_grad_mode():
    spec, pages, cache = simple_cache(KVCacheDType.NVFP4, block_size=4, v_scale_layout="swizzled")
    key, value, rows = simple_rows(spec, 6)
    rows = [x.requires_grad_() for x in rows]
    slots, table, lengths = torch.arange(6), torch.arange(2)[None], torch.tensor([6])
    with torch.device("meta"), torch.no_grad():
        write(rows, cache, slots, "nvfp4", v_scale_layout="swizzled")
        read = kvjax_torch.gather_kv(
            cache.key, cache.value, table, lengths, "nvfp4", 1.0, 1.0, v_scale_layout="swizzled"
        )
    assert_same_bytes(cache.pages(), reference.write(pages, spec, key, value, slots.numpy(), 1.0, 1.0))
    assert all(dense.device.type == "cpu" for dense in read)
    with torch.inference_mode():
        write(rows, cache, slots + 6, "nvfp4", v_scale_layout="swizzled")


def valid_write() -> dict:
    kv_cache = torch.full((4, 2, 8, 2, 64), 0xAB, dtype=torch.uint8)
    rows = torch.ones(6, 2, 64, dtype=torch.bfloat16)
    return {
        "key": rows,
        "value": rows.clone(),
        "key_cache": kv_cache[:, 0],
        "value_cache": kv_cache[:, 1],
        "slot_mapping": torch.arange(6),
        "kv_cache_dtype": "fp8",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }


LATENTS = (
    "kv_cache_dtype: got 'fp8_ds_mla', expected one of float32, float16, bfloat16, fp8_e4m3, fp8_e5m2,"
    " fp8_per_token_head, int8_per_token_head, nvfp4, nvfp4_4over6, fp8_k_nvfp4_v, fp8_k_nvfp4_4over6_v,"
    " int8_k_nvfp4_v, int8_k_nvfp4_4over6_v (it stores latents (MLA), which"
    " kvjax_torch.concat_and_cache_mla and mla_paged_attention take)"
)


def nvfp4(**changes) -> dict:
    kv_cache = torch.full((4, 2, 8, 2, 36), 0xAB, dtype=torch.uint8)
    return {"kv_cache_dtype": "nvfp4", "key_cache": kv_cache[:, 0], "value_cache": kv_cache[:, 1], **changes}


def misaligned(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    unaligned = np.zeros(count + 64, np.uint8)[1 : 1 + count].view(np.float32).reshape(*shape[:-1], -1)
    return torch.from_numpy(unaligned).view(dtype)


ROWS, BYTES = torch.ones(6, 2, 64, dtype=torch.bfloat16), torch.full((4, 8, 2, 64), 0xAB, dtype=torch.uint8)
SHARED = torch.full((4, 8, 2, 128), 0xAB, dtype=torch.uint8)
WRONG = {
    "key_dtype": ({"key": ROWS.int()}, "key: got dtype torch.int32, expected torch.float32 or torch.float16 or"),
    "value_dtype": ({"value": ROWS.float()}, "value: got dtype torch.float32, expected torch.bfloat16"),
    "key_2d": ({"key": ROWS.flatten(1)}, "key: got 2 dimensions, expected [num_tokens, num_kv_heads, head_size]"),
    "value_heads": ({"value": ROWS[:, :1]}, "value: got num_kv_heads=1, expected 2 as in key"),
    "key_heads": ({"key": ROWS[:, :1], "value": ROWS[:, :1]}, "expected [num_blocks, block_size, num_kv_heads=1, 64]"),
    "key_dim_stride": (
        {"key": ROWS.transpose(1, 2).contiguous().transpose(1, 2)},
        "key: got strides (128, 1, 2), expected 1 along head_size; copy with key.contiguous()",
    ),
    "head_size": ({"value": ROWS[..., :48]}, "value_cache: got shape (4, 8, 2, 64), expected [num_blocks, block_size,"),
    "few_keys": ({"key": ROWS[:5]}, "key: got 5 tokens, expected at least one for each of the 6 slots"),
    "few_values": ({"value": ROWS[:5]}, "value: got 5 tokens, expected at least one for each of the 6 slots"),
    "slot_dtype": ({"slot_mapping": torch.ones(6)}, "slot_mapping: got dtype torch.float32, expected torch.int32 or"),
    "slot_dims": ({"slot_mapping": torch.ones(6, 1).int()}, "slot_mapping: got 2 dimensions, expected [num_tokens]"),
    "gradient": (
        {"key": ROWS.clone().requires_grad_()},
        "key: got requires_grad=True, but a write into a cache has no",
    ),
    "cache_3d": ({"key_cache": BYTES[0]}, "key_cache: got shape (8, 2, 64), expected [num_blocks, block_size,"),
    "no_blocks": ({"value_cache": BYTES[:0]}, "value_cache: got shape (0, 8, 2, 64), expected at least one block"),
    "blocks": (
        {"value_cache": BYTES[:3]},
        "value_cache: got shape (3, 8, 2, 64), expected [num_blocks=4, block_size=8,",
    ),
    "cache_dtypes": ({"value_cache": BYTES.half()}, "value_cache: got dtype torch.float16, expected torch.uint8 as"),
    "cache_dtype": (
        {"key_cache": BYTES.half(), "value_cache": BYTES.half()},
        "key_cache: got dtype torch.float16, expected torch.uint8 or torch.float8_e4m3fn for kv_cache_dtype 'fp8_e4m3'",
    ),
    "small_rows": (
        {"key_cache": BYTES[..., :48]},
        "key_cache: got shape (4, 8, 2, 48), expected [num_blocks, block_size",
    ),
    "cache_dim_stride": (
        {"key_cache": BYTES.transpose(2, 3).contiguous().transpose(2, 3)},
        "1 along the last dimension",
    ),
    "overlap": (
        {"key_cache": BYTES[:1].expand(4, 8, 2, 64)},
        "key_cache: got strides (0, 128, 64, 1) for shape (4, 8,",
    ),
    "shared_memory": (
        {"key_cache": BYTES, "value_cache": BYTES},
        "value_cache: got memory that overlaps that of key_ca",
    ),
    "shared_block": (
        {"key_cache": BYTES[:3], "value_cache": BYTES[1:]},
        "overlaps that of key_cache, 1024 bytes after its start, expected memory of its own",
    ),
    "shared_rows": (
        {"key_cache": SHARED[..., :64], "value_cache": SHARED[..., 63:127]},
        "overlaps that of key_cache, 63 bytes after its start, expected memory of its own",
    ),
    "layouts": (
        {"value_cache": BYTES.transpose(1, 2).contiguous().transpose(1, 2)},
        "which are HND, expected NHD as those of key_cache, (2048, 128, 64, 1)",
    ),
    "nvfp4_head_size": (
        nvfp4(key=ROWS[..., :24], value=ROWS[..., :24]),
        "head_size: got 24, expected a multiple of 16",
    ),
    "nvfp4_too_small": (
        nvfp4(key_cache=BYTES[..., :32]),
        "key_cache: got shape (4, 8, 2, 32), expected [num_blocks, block_size, num_kv_heads=2, 36] for head size 64",
    ),
    "nvfp4_with_gaps": (
        nvfp4(value_cache=BYTES[..., :36]),
        "value_cache: got strides (1024, 128, 64, 1), expected (any, 72, 36, 1): the 576 bytes of a block in 'nvfp4'",
    ),
    "dtype_of_latents": ({"kv_cache_dtype": "fp8_ds_mla"}, LATENTS),
    "dtype_of_latents_for_bfloat16": (
        {"kv_cache_dtype": "fp8_ds_mla"}
        | dict.fromkeys(("key_cache", "value_cache"), torch.zeros(4, 8, 2, 64, dtype=torch.bfloat16)),
        LATENTS,
    ),
    "unknown_dtype": ({"kv_cache_dtype": "fp8_e4m4"}, "kv_cache_dtype: got 'fp8_e4m4', expected one of auto, float32"),
    "unknown_order": (nvfp4(v_scale_layout="zigzag"), "v_scale_layout: got 'zigzag', expected one of linear, swizzled"),
    "fp8_swizzled": ({"v_scale_layout": "swizzled"}, "v_scale_layout: got 'swizzled' with dtype 'fp8_e4m3'"),
    "zero_scale": ({"k_scale": 0.0}, "k_scale: got 0.0, expected between 7.9e-31"),
    "negative_scale": ({"v_scale": torch.tensor([1.0, -2.0])}, "v_scale: got -2.0, expected between"),
    "nan_scale": ({"v_scale": torch.tensor(torch.nan)}, "v_scale: got nan, expected between 7.9e-31"),
    "huge_scale": ({"k_scale": 1e38}, "k_scale: got 1e+38, expected between 7.9e-31 and 1.3e+30"),
    "int_scale": ({"k_scale": 10**400}, "k_scale: got 1000000"),
    "bool_scale": ({"k_scale": True}, "k_scale: got True of type bool, expected a number or a tensor"),
    "list_scale": ({"k_scale": [0.0, -1.0]}, "k_scale: got [0.0, -1.0] of type list, expected a number or a tensor"),
    "array_scale": (
        {"k_scale": np.ones(2, np.float32)},
        "k_scale: got array([1., 1.], dtype=float32) of type ndarray, expected a number or a tensor: torch.as_tensor(",
    ),
    "scale_shape": (
        {"k_scale": torch.ones(3)},
        "k_scale: got shape (3,), expected one element or [num_kv_heads=2] for",
    ),
    "nvfp4_heads_scale": (nvfp4(v_scale=torch.ones(2)), "v_scale: got shape (2,), expected one element for 'nvfp4'"),
    "scale_dtype": ({"k_scale": torch.ones(1).half()}, "k_scale: got dtype torch.float16, expected torch.float32"),
    "scale_type": ({"k_scale": "1.0"}, "k_scale: got '1.0' of type str, expected a number or a tensor"),
    "key_device": ({"key": ROWS.to("meta")}, "key: got device meta, expected {device}, that of key_cache"),
    "slot_device": ({"slot_mapping": torch.ones(6, device="meta")}, "slot_mapping: got device meta, expected {device}"),
    "scale_device": ({"k_scale": torch.ones(1, device="meta")}, "k_scale: got device meta, expected {device}"),
    "key_address": (
        {"key": misaligned(torch.bfloat16, 6, 2, 64)},
        ", expected a multiple of 2, the bytes of a torch.bfloat16",
    ),
    "value_address": ({"value": misaligned(torch.bfloat16, 6, 2, 64)}, "value: got address 0x"),
    "cache_addresses": (
        {
            "kv_cache_dtype": "float32",
            "key_cache": misaligned(torch.float32, 4, 8, 2, 64),
            "value_cache": misaligned(torch.float32, 4, 8, 2, 64),
        },
        ", expected a multiple of 4, the bytes of a torch.float32",
    ),
    "key_list": ({"key": ROWS.tolist()}, "key: got a list, expected a torch.Tensor"),
    "slot_list": ({"slot_mapping": [0, 1]}, "slot_mapping: got a list, expected a torch.Tensor"),
    "slot_unsigned": (
        {"slot_mapping": torch.ones(6, dtype=torch.uint32)},
        "slot_mapping: got dtype torch.uint32, expected torch.int32 or torch.int64",
    ),
    "dtype_type": ({"kv_cache_dtype": 8}, "kv_cache_dtype: got 8 of type int, expected a string or KVCacheDType"),
    "no_slots": ({"slot_mapping": None}, "slot_mapping: got None, expected a torch.Tensor"),
    "sparse": ({"key": ROWS.to_sparse()}, "key: got layout torch.sparse_coo, expected torch.strided: key.to_dense()"),
    "sparse_scale": ({"k_scale": torch.ones(1).to_sparse()}, "k_scale: got layout torch.sparse_coo, expected"),
    "nested": ({"value": nested(ROWS)}, "value: got layout nested, expected torch.strided"),
}


def on(device: str, argument: object, memories: dict[int, torch.Tensor] | None = None) -> object:
    """A tensor with the strides and the remainder of its address that it has on the host; all else as it is.

    Tensors of one storage share one there too, if `memories`, of storages that were moved before, is given.
    """
    if not isinstance(argument, torch.Tensor) or device == "cpu" or argument.device.type == "meta":
        return argument
    if argument.layout is not torch.strided or argument.is_nested:
        return argument.to(device)
    storage = argument.untyped_storage()
    first, size = storage.data_ptr() % 16, storage.nbytes()
    memories = {} if memories is None else memories
    if storage.data_ptr() not in memories:
        memories[storage.data_ptr()] = torch.zeros(first + size, dtype=torch.uint8, device=device)
        memories[storage.data_ptr()][first:] = torch.empty(0, dtype=torch.uint8).set_(storage)
    memory = memories[storage.data_ptr()]
    part = torch._C._construct_storage_from_data_pointer(memory.data_ptr() + first, memory.device, size)
    moved = torch.empty(0, dtype=argument.dtype, device=device)
    moved.set_(part, argument.storage_offset(), argument.shape, argument.stride())
    moved.memory = memory
    return moved.requires_grad_(argument.requires_grad)


def test_moving_a_tensor_to_another_device_keeps_what_is_wrong_with_it():
    for tensor in (misaligned(torch.bfloat16, 6, 2, 64), BYTES[:1].expand(4, 8, 2, 64), ROWS[..., :48]):
        moved = on("cpu:0", tensor)
        assert moved is not tensor
        assert moved.data_ptr() % 16 == tensor.data_ptr() % 16
        assert moved.stride() == tensor.stride()
        assert torch.equal(moved, tensor)
    memories: dict[int, torch.Tensor] = {}
    first, second = (on("cpu:0", tensor, memories) for tensor in (BYTES, BYTES[1:]))
    assert second.data_ptr() - first.data_ptr() == BYTES.stride(0)


@pytest.mark.parametrize("case", WRONG)
def test_invalid_arguments_are_refused_by_name_and_nothing_is_written(case: str, device: str):
    changes, message = WRONG[case]
    memories: dict[int, torch.Tensor] = {}
    arguments = {name: on(device, argument, memories) for name, argument in (valid_write() | changes).items()}
    device = str(arguments["key_cache"].device)
    # Compared on the host: torch's kernels for a GPU fault at an address that its elements do not fit.
    caches = [cache.to("cpu", copy=True) for cache in (arguments["key_cache"], arguments["value_cache"])]
    # The values of scales that lie on a GPU are looked at only then.
    with kvjax.checked("cuda" in device), pytest.raises((KVCacheValueError, KVCacheTypeError)) as error:
        kvjax_torch.reshape_and_cache_flash(**arguments)
    assert message.replace("{device}", device) in str(error.value)
    for name, before in zip(("key_cache", "value_cache"), caches, strict=True):
        assert torch.equal(arguments[name].cpu(), before)


def test_the_arguments_that_the_wrong_ones_are_made_from_are_right(device: str):
    for changes in ({}, nvfp4()):
        arguments = {name: on(device, argument) for name, argument in (valid_write() | changes).items()}
        kvjax_torch.reshape_and_cache_flash(**arguments)
        assert (arguments["key_cache"][0, 0] != 0xAB).any()


def test_arguments_that_are_no_tensors_are_refused_by_name():
    with pytest.raises(KVCacheTypeError, match=r"key_cache: got a ndarray, expected a torch\.Tensor"):
        kvjax_torch.reshape_and_cache_flash(**valid_write() | {"key_cache": BYTES.numpy()})
    with pytest.raises(KVCacheTypeError, match=r"key: got a ndarray, expected a torch\.Tensor"):
        kvjax_torch.warm_up(**valid_write() | {"key": ROWS.float().numpy()})


def test_jax_operations_point_torchs_tensors_to_theirs():
    spec, rows, slots = simple_spec(), np.zeros((3, 2, 64), np.float32), np.arange(3)
    cache = kvjax.KVCache.allocate(spec, 2)
    key, table, kv = torch.zeros(3, 2, 64), torch.zeros(1, 1, dtype=torch.int32), torch.nn.Parameter(torch.zeros(2))
    for call, name in (
        (lambda: kvjax.reshape_and_cache_flash(key, rows, cache, slots), "key"),
        (lambda: kvjax.gather_kv(cache, table, np.ones(1, np.int32)), "block_table"),
        (lambda: kvjax.paged_attention(key, cache, table, table[0]), "query"),
        (lambda: kvjax.copy_blocks(kv, np.zeros((1, 2), np.int32)), "cache"),
        (lambda: kvjax.gather_kv(kvjax.KVCache(kv, spec), slots, slots), "cache.kv"),
    ):
        with pytest.raises(KVCacheTypeError, match=rf"^{name}: got a .*kvjax_torch has the operations on torch's ten"):
            call()


def test_what_is_not_torchs_dtype_or_a_bool_is_refused():
    with pytest.raises(KVCacheTypeError, match=r"dtype: got 'float32' of type str, expected one of torch\.float32,"):
        kvjax_torch.warm_up(**valid_write(), dtype="float32")
    with pytest.raises(KVCacheTypeError, match=r"unique_slots: got 'yes' of type str, expected a bool"):
        kvjax_torch.reshape_and_cache_flash(**valid_write(), unique_slots="yes")
    kvjax_torch.reshape_and_cache_flash(**valid_write(), unique_slots=np.True_)


@pytest.mark.filterwarnings("ignore:.*(deprecat|quantiz)")
def test_quantized_tensors_are_refused():
    quantized = torch.quantize_per_tensor(ROWS.float(), 0.1, 0, torch.qint8)
    with pytest.raises(KVCacheTypeError, match=r"value: got a quantized tensor, expected its numbers: value\.dequ"):
        kvjax_torch.reshape_and_cache_flash(**valid_write() | {"value": quantized})


def test_torch_has_no_negative_strides():
    """So there is no message for them: whoever has a reversed array is told so by torch."""
    with pytest.raises(ValueError, match="negative"):
        torch.from_numpy(np.ones((6, 2, 64), np.float32)[::-1])
    with pytest.raises(RuntimeError, match="Negative strides are not supported"):
        ROWS.as_strided((6, 2, 64), (-128, 64, 1), 640)


WRONG_READS = {
    "table_dtype": ({"block_table": torch.ones(2, 3)}, "block_table: got dtype torch.float32, expected torch.int32 or"),
    "table_dims": (
        {"block_table": torch.ones(3).int()},
        "block_table: got 1 dimensions, expected [num_seqs, max_blocks]",
    ),
    "lengths": ({"seq_lens": torch.ones(3).int()}, "seq_lens: got shape (3,), expected [num_seqs=2]"),
    "dtype": (
        {"dtype": torch.int8},
        "dtype: got torch.int8, expected one of torch.float32, torch.float16, torch.bfloat16",
    ),
    "latents": ({"kv_cache_dtype": "fp8_ds_mla"}, LATENTS),
    "row": ({"kv_cache_dtype": "nvfp4"}, "key_cache: got rows of 64 bytes, expected a multiple of 9 for 'nvfp4'"),
    "device": ({"seq_lens": torch.ones(2, device="meta").int()}, "seq_lens: got device meta, expected {device}"),
    "scale": ({"v_scale": torch.inf}, "v_scale: got inf, expected between 7.9e-31"),
    "table_list": ({"block_table": [[0, 1, 2]] * 2}, "block_table: got a list, expected a torch.Tensor"),
    "sparse": ({"value_cache": BYTES.to_sparse()}, "value_cache: got layout torch.sparse_coo, expected torch.strided"),
}


@pytest.mark.parametrize("case", WRONG_READS)
def test_invalid_reads_are_refused_by_name(case: str, device: str):
    changes, message = WRONG_READS[case]
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    caches = {
        name: valid_write()[name] for name in ("key_cache", "value_cache", "kv_cache_dtype", "k_scale", "v_scale")
    }
    arguments = caches | {"block_table": table, "seq_lens": lengths} | changes
    arguments = {name: on(device, argument) for name, argument in arguments.items()}
    with pytest.raises((KVCacheValueError, KVCacheTypeError)) as error:
        kvjax_torch.gather_kv(**arguments)
    assert message.replace("{device}", str(arguments["key_cache"].device)) in str(error.value)


@pytest.mark.full
def test_calls_leave_no_memory_behind():
    spec, _, cache = simple_cache(KVCacheDType.FP8_E4M3, num_blocks=8)
    _, _, rows = simple_rows(spec, 64)
    slots, table, lengths = torch.arange(64), torch.arange(8)[None], torch.tensor([64])

    def call() -> None:
        write(rows, cache, slots, "fp8")
        kvjax_torch.gather_kv(cache.key, cache.value, table, lengths, "fp8", 1.0, 1.0)
        kvjax_torch.to_torch(kvjax_torch.to_jax(rows[0]))

    for _ in range(100):
        call()
    gc.collect()
    before, arrays = resident_bytes(), len(jax.live_arrays())
    for _ in range(400):  # what one call handles is some 120 kB: 48 MB, were it kept
        call()
    gc.collect()
    assert len(jax.live_arrays()) <= arrays
    assert resident_bytes() - before < 16 * 2**20


def test_numbers_outside_the_cache_stay_outside_as_int32():
    """Kernels are given int32, in which the low half of an int64 could be a block."""
    spec = simple_spec(KVCacheDType.BFLOAT16)
    cache, lengths = torch_cache(random_pages(spec, 4), spec), torch.zeros(1, dtype=torch.int64)
    table = torch.tensor([[3, 4, -1, 2**32, 1 - 2**32, 2**63 - 1, -(2**63), 0]])
    read = ReadTensors(cache.key, cache.value, table, lengths, torch.ones(1), torch.ones(1))
    call = gathering.gather_call(reads_plans.gather_plan(read, Encoding("bfloat16"), None), read)
    given, last_block = call.tensors[0], call.counts[-1]
    assert ((given >= 0) & (given <= last_block)).tolist() == [[True, *[False] * 6, True]]
