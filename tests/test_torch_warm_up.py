"""After a warm-up nothing is compiled when calls come, and the cache holds what it held before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.helpers import assert_same_bytes, kv_tokens, simple_spec

torch = pytest.importorskip("torch")

from support.gpu_compile import why_not  # noqa: E402
from support.mla_cases import SM_SCALE  # noqa: E402
from support.mla_cases import spec_of as latents_of  # noqa: E402
from support.torch_helpers import from_numpy, random_pages, torch_cache  # noqa: E402

import kvjax_torch  # noqa: E402
from kvjax import AttentionSpec, KVCacheDType, KVCacheTypeError, KVCacheValueError, binaries  # noqa: E402
from kvjax_torch import launch  # noqa: E402
from kvjax_torch.arguments.dtypes import torch_dtype  # noqa: E402
from kvjax_torch.arguments.latents import (  # noqa: E402
    GatheredRows,
    LatentPages,
    latent_attention_plan,
    latent_gather_plan,
    latent_write_plan,
)
from kvjax_torch.arguments.plan import (  # noqa: E402
    Encoding,
    LatentQuery,
    ReadTensors,
    SoftmaxOptions,
    WriteTensors,
)
from kvjax_torch.arguments.reads import gather_plan  # noqa: E402
from kvjax_torch.arguments.writes import write_plan  # noqa: E402
from kvjax_torch.calls import attending, gathering, writing  # noqa: E402
from kvjax_torch.cuda import latents, ragged, ragged_step, reads  # noqa: E402
from kvjax_torch.eager import host  # noqa: E402
from kvjax_torch.launch import running  # noqa: E402

NUM_BLOCKS = 40

INT32, INT64 = torch.int32, torch.int64
PER_HEAD, ONE = torch.full((4,), 0.5), torch.tensor([0.25])


def spec_of(dtype: KVCacheDType, head_size: int, **changes: Any) -> AttentionSpec:
    """A layer like no other test's, so that nothing of it is compiled yet."""
    return simple_spec(dtype, num_kv_heads=4, head_size=head_size, **changes)


CASES = {
    "bfloat16": (spec_of(KVCacheDType.BFLOAT16, 48), 1.0, INT64),
    "HND": (spec_of(KVCacheDType.FP8_E5M2, 176, layout="HND"), 0.25, INT32),
    "scales_of_heads": (spec_of(KVCacheDType.FP8_E4M3, 144), PER_HEAD, INT64),
    "diffkv": (spec_of(KVCacheDType.FP8_E4M3, 48, head_size_v=32), ONE, INT32),
    "nvfp4": (spec_of(KVCacheDType.NVFP4, 208), 0.5, INT64),
    "swizzled": (spec_of(KVCacheDType.NVFP4, 192, v_scale_layout="swizzled"), ONE, INT32),
}


def rows_of(spec: AttentionSpec, num_tokens: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Slices of a fused projection."""
    key, value = (from_numpy(x).to(torch.bfloat16).flatten(1) for x in kv_tokens(spec, num_tokens))
    fused = torch.cat([key, key, value], dim=1).to(device)
    _, key, value = fused.split([key.shape[1], key.shape[1], value.shape[1]], dim=1)
    return key.unflatten(1, (spec.num_kv_heads, -1)), value.unflatten(1, (spec.num_kv_heads, -1))


def num_compiled() -> tuple[int, ...]:
    return launch.num_compilations(), host.encode_chunk._cache_size(), host.decode_chunk._cache_size()


@pytest.mark.parametrize("case", CASES)
def test_what_is_warm_is_not_compiled_again(case: str, device: str):
    spec, scale, index_dtype = CASES[case]
    scale = scale.to(device) if isinstance(scale, torch.Tensor) else scale
    pages = random_pages(spec, NUM_BLOCKS)
    cache = torch_cache(pages, spec, form="padded_pages", device=device)
    slots = torch.randperm(NUM_BLOCKS * spec.block_size).to(device, index_dtype)
    stored_as = spec.dtype.value, scale, scale
    options = {"v_scale_layout": spec.v_scale_layout.value, "unique_slots": case == "diffkv"}
    before = num_compiled()
    kvjax_torch.warm_up(
        *rows_of(spec, 2, device), cache.key, cache.value, slots, *stored_as, **options, dtype=torch.float32
    )
    assert_same_bytes(cache.pages(), pages)
    warm = num_compiled()
    assert (warm != before) == (device == "cuda" or spec.dtype.is_quantized)  # torch moves the others on the host
    for num_tokens in (1, 7, 33, 300):
        taken = slots[:num_tokens]
        kvjax_torch.reshape_and_cache_flash(
            *rows_of(spec, num_tokens, device), cache.key, cache.value, taken, *stored_as, **options
        )
        table = torch.arange(num_tokens // 8 + 1).to(device, index_dtype).expand(2, -1)
        lengths = torch.tensor([num_tokens, 3]).to(device, index_dtype)
        read = {"v_scale_layout": spec.v_scale_layout.value, "dtype": torch.float32}
        kvjax_torch.gather_kv(cache.key, cache.value, table, lengths, *stored_as, **read)
    assert num_compiled() == warm
    assert not np.array_equal(cache.pages(), pages)


def test_what_no_operation_takes_is_refused():
    spec, *_ = CASES["nvfp4"]
    cache = torch_cache(random_pages(spec, 2), spec)
    slots, rows = torch.arange(3), rows_of(spec, 3, "cpu")
    with pytest.raises(KVCacheValueError, match="key: got 1 tokens, expected at least 2"):
        kvjax_torch.warm_up(*(x[:1] for x in rows), cache.key, cache.value, slots, "nvfp4", 1.0, 1.0)
    with pytest.raises(KVCacheTypeError, match=r"slot_mapping: got dtype torch\.float32"):
        kvjax_torch.warm_up(*rows, cache.key, cache.value, slots.float(), "nvfp4", 1.0, 1.0)
    with pytest.raises(KVCacheTypeError, match=r"dtype: got torch\.int8"):
        kvjax_torch.warm_up(*rows, cache.key, cache.value, slots, "nvfp4", 1.0, 1.0, dtype=torch.int8)


def test_calls_that_differ_in_nothing_that_a_kernel_depends_on_share_one():
    spec, *_ = CASES["nvfp4"]
    cache, one = torch_cache(random_pages(spec, 2), spec), torch.ones(())
    halves = cache.key, cache.value
    key, value = rows_of(spec, 6, "cpu")
    apart = [
        x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value)
    ]  # copied, and then as packed rows are
    packed = [x.contiguous() for x in (key, value)]

    def write_kernel(rows: list[torch.Tensor], slots: torch.Tensor, unique_slots: bool = False) -> object:
        tensors = WriteTensors(*rows, *halves, slots, one, one)
        return writing.write_call(write_plan(tensors, Encoding("nvfp4")), tensors, unique_slots).kernel

    def gather_kernel(table: torch.Tensor, lengths: torch.Tensor) -> object:
        read = ReadTensors(*halves, table, lengths, one, one)
        return gathering.gather_call(gather_plan(read, Encoding("nvfp4"), None), read).kernel

    slots = torch.arange(6)
    assert write_kernel(packed, slots) is write_kernel(apart, slots) is write_kernel(packed, slots[:3])
    assert write_kernel(packed, slots) is not write_kernel(packed, slots.int())
    assert write_kernel(packed, slots, True) is write_kernel(apart, slots, True) is not write_kernel(packed, slots)
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    assert gather_kernel(table, lengths) is gather_kernel(table.long(), lengths.long())


def latent_call(dtype: str, sizes: tuple[int, int], device: str = "cpu") -> dict[str, Any]:
    """The arguments of a warm-up: slices of a fused projection, and a cache that is not zero."""
    spec = latents_of(dtype, sizes)
    fused = torch.ones(2, 3 + sum(sizes), dtype=torch.bfloat16, device=device)
    kv_c, k_pe = fused[:, 3:].split(sizes, dim=1)
    row = spec.bytes_per_token // spec.array_dtype.itemsize
    cache = torch.full((4, 8, row), 3, dtype=torch.uint8, device=device).to(torch_dtype(spec.array_dtype))
    given = {"kv_c": kv_c, "k_pe": k_pe, "kv_cache": cache, "slot_mapping": torch.arange(2, device=device)}
    options = {"num_heads": 4, "sm_scale": SM_SCALE, "q_lens": (1, 2), "dtype": torch.float32}
    return given | {"kv_cache_dtype": dtype, "scale": 1.0} | options


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("bfloat16", (384, 48)),
        ("nvfp4", (384, 48)),
        ("nvfp4", (48, 2)),  # whose rows kernels read from copies
        ("fp8_ds_mla", (384, 48)),
    ],
)
def test_latents_that_are_warm_are_not_compiled_again(dtype: str, sizes: tuple[int, int], device: str):
    call = latent_call(dtype, sizes, device)
    cache, stored_as, width = call["kv_cache"], (dtype, 1.0), sum(sizes)
    content, before = cache.clone(), num_compiled()
    kvjax_torch.warm_up_mla(**call)
    assert torch.equal(cache, content)
    warm = num_compiled()
    assert (warm != before) == (device == "cuda" or dtype != "bfloat16")
    for count in (1, 7, 31):
        fused = torch.ones(count, 3 + width, dtype=torch.bfloat16, device=device)
        rows, slots = fused[:, 3:].split(sizes, dim=1), torch.arange(count, device=device)
        kvjax_torch.concat_and_cache_mla(*rows, cache, slots, *stored_as)
        table, lengths = torch.zeros(3, 4, dtype=torch.int32, device=device), torch.tensor([count, 2, 0], device=device)
        bounds = torch.tensor([0, count, count, count], device=device)
        dst = torch.zeros(count, sum(sizes), device=device)
        kvjax_torch.gather_and_maybe_dequant_cache(cache, dst, table, bounds, None, count, *stored_as)
        query = [torch.ones(3, 2, 4, size, dtype=torch.bfloat16, device=device) for size in sizes]
        kvjax_torch.mla_paged_attention(*query, cache, table, lengths, *stored_as, sm_scale=SM_SCALE)
    assert num_compiled() == warm
    assert not torch.equal(cache, content)


@pytest.mark.parametrize(
    "compiles",
    [
        False,
        pytest.param(True, marks=[pytest.mark.full, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]),
    ],
)
def test_kernels_of_latents_are_compiled_together(compiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of later calls, of any size, are among them; compiled for a described GPU they are in the folder."""
    monkeypatch.setenv("KVJAX_CACHE_DIR", str(tmp_path / "kvjax"))
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    gpu, compiled = binaries.Device("NVIDIA H200", "9.0", 232_448), []

    def compile_all(every: list[Any], device: torch.device) -> None:
        compiled.append(list(dict.fromkeys(every)))
        if compiles:
            binaries.compiled(compiled[-1], gpu)

    monkeypatch.setattr(running, "compile_all", compile_all)
    call = latent_call("nvfp4", (256, 16))
    pages = LatentPages(call["kv_cache"], "nvfp4", torch.tensor(1.0))

    def calls_of(count: int, num_seqs: int, q_len: int) -> tuple[Any, Any, Any]:
        fused = torch.ones(max(count, 2), 275, dtype=torch.bfloat16)[:count, 3:]
        write = latent_write_plan(*fused.split((256, 16), dim=1), pages, torch.arange(count))
        table, bounds = torch.zeros(num_seqs, count, dtype=torch.int32), torch.zeros(num_seqs + 1, dtype=torch.int32)
        rows = GatheredRows(torch.zeros(count, 272), None, count)
        query = LatentQuery(*(torch.ones(num_seqs, q_len, 4, size, dtype=torch.bfloat16) for size in (256, 16)))
        attend = latent_attention_plan(query, pages, table, bounds[1:], SoftmaxOptions(SM_SCALE))
        return write, latent_gather_plan(pages, rows, table, bounds, None), attend

    write, gather, attend = calls_of(2, 1, 1)
    latents.compile_kernels([write], gather, [attend, calls_of(2, 1, 2)[2]], False)
    [every] = compiled
    if compiles:
        assert len(list((tmp_path / "kvjax").iterdir())) == len(every)
    for count, num_seqs, q_len in ((3, 1, 2), (900, 3, 1), (5, 700, 2)):
        write, gather, attend = calls_of(count, num_seqs, q_len)
        places = gathering.places_call(*gather)
        rows = gathering.rows_call(gather[0], gather[1].at(*places.tensors[-2:]))
        calls = writing.write_call(*write, False), places, rows
        step_kernels = ragged_step.kernels_of(attend[0], None)
        later = [*(call.kernel for call in calls), *attending.kernels_of_call(*attend)[:2], *step_kernels]
        assert set(later) <= set(every)
        if compiles:
            before = binaries.num_compilations()
            binaries.compiled(later, gpu)
            assert binaries.num_compilations() == before


def test_a_warm_up_copies_no_tokens_that_no_kernel_has_found(monkeypatch: pytest.MonkeyPatch):
    """Rows that kernels read from copies; so that all memory holds something, torch fills what is empty."""
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    compiled = []
    monkeypatch.setattr(running, "compile_all", lambda every, device: compiled.extend(every))
    call = latent_call("nvfp4", (48, 2))
    pages = LatentPages(call["kv_cache"], "nvfp4", torch.tensor(1.0))
    table, bounds = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    gather = latent_gather_plan(pages, GatheredRows(torch.zeros(1, 50), None, 1), table, bounds, None)
    torch.use_deterministic_algorithms(True)
    try:
        latents.compile_kernels([], gather, [], False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(compiled) == 2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_c": torch.ones(1, 384)}, KVCacheValueError, r"kv_c: got shape \(1, 384\), expected 2 dimensions and at "),
        ({"k_pe": torch.ones(2, 48, 1)}, KVCacheValueError, r"k_pe: got shape \(2, 48, 1\), expected 2 dimensions"),
        ({"q_lens": ()}, KVCacheValueError, r"q_lens: got \(\), expected a sequence of at least one int"),
        ({"q_lens": 4}, KVCacheValueError, "q_lens: got 4, expected a sequence of at least one int"),
        ({"q_lens": (1, 0)}, KVCacheValueError, "q_lens: got 0, expected an int of at least 1"),
        ({"num_heads": 0}, KVCacheValueError, "num_heads: got 0, expected an int of at least 1"),
        ({"dtype": torch.int8}, KVCacheTypeError, r"dst: got dtype torch\.int8"),
        ({"slot_mapping": torch.ones(2)}, KVCacheTypeError, r"slot_mapping: got dtype torch\.float32"),
        (
            {"kv_cache": torch.ones(2, 384).bfloat16()},
            KVCacheValueError,
            r"kv_cache: got shape \(2, 384\), expected \[num_blocks",
        ),
    ],
)
def test_a_warm_up_of_latents_names_what_does_not_fit(changes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        kvjax_torch.warm_up_mla(**latent_call("bfloat16", (384, 48)) | changes)


def dense_call(num_tokens: int, device: str = "cpu") -> list[torch.Tensor]:
    """A query, and keys and values that are slices of a projection, of sizes like no other test's."""
    query, fused = (torch.ones(num_tokens, 6, size, dtype=torch.bfloat16, device=device) for size in (112, 160))
    return [query, *fused.split((112, 48), dim=2)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_dense_keys_that_are_warm_are_not_compiled_again(causal: bool, device: str):
    """Of one factor for each mask, so that nothing of it is compiled yet."""
    scale, before = 0.5 + causal, num_compiled()
    kvjax_torch.warm_up_ragged_attention(*dense_call(2, device), sm_scale=scale)
    warm = num_compiled()
    has_kernels = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    assert (warm != before) == has_kernels
    for num_tokens in (1, 7, 300):
        bounds = torch.tensor([0, num_tokens // 2, num_tokens], device=device)
        kvjax_torch.ragged_attention(*dense_call(num_tokens, device), bounds, bounds, causal=causal, sm_scale=scale)
    assert num_compiled() == warm


@pytest.mark.parametrize(
    ("index", "changed", "error", "message"),
    [
        (0, torch.ones(1, 6, 112).bfloat16(), KVCacheValueError, "query: got 1 tokens, expected at least 2"),
        (0, torch.ones(2, 6, 96).bfloat16(), KVCacheValueError, r"key: got shape \(2, 6, 112\), expected head_size=96"),
        (1, torch.ones(2, 6, 112), KVCacheTypeError, r"key: got dtype torch\.float32"),
        (2, [1.0], KVCacheTypeError, "value: got a list, expected a torch.Tensor"),
    ],
)
def test_a_warm_up_of_dense_keys_names_what_does_not_fit(
    index: int, changed: Any, error: type[Exception], message: str
):
    call = dense_call(2)
    call[index] = changed
    with pytest.raises(error, match=message):
        kvjax_torch.warm_up_ragged_attention(*call)


OPERATIONS = pytest.mark.parametrize("operation", ["paged_attention", "ragged_paged_attention"])


def attend_to_tree(
    operation: str, num_seqs: int, length: int, *, window: int | None = None, q_len: int = 3, device: str = "cpu"
) -> None:
    """Attends with a tree, over a layer like no other test's; a ragged step has room for a prompt."""
    spec = spec_of(KVCacheDType.NVFP4, 112)
    cache = torch_cache(random_pages(spec, NUM_BLOCKS), spec, device=device)
    query = torch.ones(num_seqs, q_len, 8, 112, dtype=torch.bfloat16, device=device)
    table = torch.zeros(num_seqs, 1 + length // spec.block_size, dtype=torch.int32, device=device)
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
    pages, stored_as = (cache.key, cache.value, table, lens), ("nvfp4", 1.0, 1.0)
    options = {"tree_mask": torch.eye(q_len, dtype=torch.bool, device=device), "sliding_window": window}
    if operation == "paged_attention":
        kvjax_torch.paged_attention(query, *pages, *stored_as, **options)
    else:
        bounds = q_len * torch.arange(num_seqs + 1, device=device) * (length > 0)
        rows = torch.cat([query.flatten(0, 1), query[0], query[0, :1]])  # enough for a prompt
        kvjax_torch.ragged_paged_attention(rows, *pages, bounds, *stored_as, **options, max_prompts=1)


@OPERATIONS
@pytest.mark.parametrize("window", [None, 9])
def test_a_call_of_empty_sequences_compiles_attention_with_a_tree(
    operation: str, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Of any number of sequences, and for no other number of query tokens."""
    compiled, ran = set(), set()
    monkeypatch.setattr(running, "_compile_once", running._compile_once.__wrapped__)
    monkeypatch.setattr(host, "attend", reads.attend)
    monkeypatch.setattr(host, "attend_ragged", ragged.attend)
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    monkeypatch.setattr(running, "compile_all", lambda every, device: compiled.update(every))
    monkeypatch.setattr(running, "run", lambda call: ran.add(call.kernel))
    attend_to_tree(operation, 1, 0, window=window)
    warm = set(compiled)
    assert ran <= warm
    for num_seqs, length in ((1, 20), (40, 300), (300, 20)):
        attend_to_tree(operation, num_seqs, length, window=window)
    assert warm == compiled
    assert ran <= warm
    attend_to_tree(operation, 1, 20, window=window, q_len=4)
    assert not ran <= warm


@pytest.mark.gpu
@OPERATIONS
def test_on_a_gpu_a_call_of_empty_sequences_compiles_attention_with_a_tree(operation: str):
    before, q_len = num_compiled(), 5 if operation == "paged_attention" else 6  # which no other call has
    attend_to_tree(operation, 1, 0, q_len=q_len, device="cuda")
    warm = num_compiled()
    assert warm != before
    for num_seqs, length in ((1, 20), (40, 300), (300, 20)):
        attend_to_tree(operation, num_seqs, length, q_len=q_len, device="cuda")
    assert num_compiled() == warm
