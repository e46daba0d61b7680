"""The plugin for vLLM, without an engine: vLLM's specs, views and metadata, against attention in float64.

`make test-client-vllm` runs this, on the CPU. `test_vllm_engine.py` runs vLLM's engine.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "JAX_PLATFORMS": "cpu"}

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from safetensors.numpy import save_file
from vllm.config import CacheConfig, set_current_vllm_config
from vllm.config.cache import get_kv_cache_dtype_handler
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import DeviceCapability
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, nvfp4_split_data_scale
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheTensor,
    create_kv_cache_views,
    get_kv_quant_mode,
)
from vllm.v1.spec_decode.utils import extend_all_queries_by_N

import kvjax
import kvjax_torch
import kvjax_vllm
import kvjax_vllm.attention as attention_of_layers
from kvjax import KVCacheValueError, UnsupportedError
from kvjax_vllm.step import KvjaxMetadata

kvjax_vllm.register()
BACKEND = AttentionBackendEnum[kvjax_vllm.NAME].get_class()
DTYPES = BACKEND.supported_kv_cache_dtypes
LAYOUTS = BACKEND.supported_kv_cache_layouts()
HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS, LAYERS = 8, 2, 64, 16, 12, 3
POISON = 0xA5


@dataclasses.dataclass(frozen=True)
class Step:
    """New tokens of each sequence and those before, and sequences that pad the batch for a graph."""

    q_lens: tuple[int, ...]
    before: tuple[int, ...]
    drafts: int = 0
    padding: int = 0

    @property
    def seq_lens(self) -> list[int]:
        return [new + old for new, old in zip(self.q_lens, self.before, strict=True)]


STEPS = {
    "decodes": Step((1, 1, 1), (20, 0, 37)),
    "decodes and prompts": Step((1, 1, 9, 17), (20, 5, 30, 0)),
    "prompts": Step((9, 33), (30, 0)),
    "drafts": Step((3, 3), (18, 29), drafts=2),
    "drafts of different lengths": Step((2, 3, 1), (18, 29, 40), drafts=2),
    "drafts of different lengths and prompts": Step((3, 1, 20), (18, 29, 3), drafts=2),
    "padded decodes": Step((1, 1), (18, 29), padding=2),
    "padded drafts": Step((3, 3), (18, 29), drafts=2, padding=1),
}


def cache_of(
    dtype: str,
    layout: KVCacheLayout,
    model_dtype: torch.dtype,
    head_size: int = HEAD_SIZE,
    head_size_v: int | None = None,
) -> tuple[Any, list[torch.Tensor]]:
    """vLLM's spec and its views of the layers, whose every byte is POISON."""
    stored = model_dtype if dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[dtype]
    mode = get_kv_quant_mode(dtype)
    spec = BACKEND.customize_spec(
        FullAttentionSpec(
            block_size=BLOCK_SIZE,
            num_kv_heads=KV_HEADS,
            head_size=head_size,
            head_size_v=head_size_v,
            dtype=stored,
            kv_quant_mode=mode,
        )
    )
    page = spec.page_size_bytes
    layer_stride, block_stride = (page * BLOCKS, page) if layout.is_layer_compact else (page, page * LAYERS)
    memory = KVCacheTensor(
        size=page * BLOCKS * LAYERS,
        layers=[str(layer) for layer in range(LAYERS)],
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    raw = torch.full((memory.size,), POISON, dtype=torch.uint8).view(torch.int8)
    return spec, create_kv_cache_views(raw, spec, BLOCKS, layout, memory)


def attention(query: Any, keys: Any, values: Any, window: int | None, cap: float | None, sinks: Any) -> torch.Tensor:
    """Attention of the last tokens of a sequence in float64: `[q_len, heads, head_size]`."""
    q_len, num_keys = query.shape[0], keys.shape[0]
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", query.double(), keys) * HEAD_SIZE**-0.5
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    row, key = torch.arange(num_keys - q_len, num_keys)[:, None], torch.arange(num_keys)[None]
    hidden = (key > row) | ((key <= row - window) if window else False)
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, q_len, 1)], -1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :num_keys], values)


@dataclasses.dataclass
class Ran:
    """A step that ran: its metadata, a layer's memory and what it holds."""

    metadata: Any
    spec: Any
    kv_cache: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    seq_lens: list[int]
    scale: torch.Tensor


def run(
    dtype: str,
    layout: KVCacheLayout,
    step: Step,
    *,
    window: int | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    model_dtype: torch.dtype = torch.bfloat16,
    in_fp8: bool = False,
    rotates_keys: bool = False,
) -> Ran:
    """Writes and attends as vLLM's runner does, in the second of three layers, and checks results and bytes."""
    torch.manual_seed(0)
    spec, views = cache_of(dtype, layout, model_dtype)
    kv_cache, others = views[1], [view.view(torch.uint8) for view in (views[0], views[2])]
    scale = torch.tensor(0.03 if get_kv_quant_mode(dtype) else 1.0)
    layer = SimpleNamespace(_k_scale=scale, _v_scale=scale)
    speculative = SimpleNamespace(num_speculative_tokens=step.drafts, parallel_drafting=False) if step.drafts else None
    config = SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        use_v2_model_runner=True,
    )
    builder = BACKEND.get_builder_cls()(spec, ["1"], config, torch.device("cpu"))
    options = {} if sinks is None else {"sinks": sinks}
    shape = HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS
    impl = BACKEND.get_impl_cls()(*shape, None, window, dtype, cap, AttentionType.DECODER, None, **options)
    impl.process_weights_after_loading(model_dtype)
    if in_fp8:
        impl.vllm_config = quantizing_queries()
    rotated = kvjax_torch.hadamard_transform if rotates_keys else torch.clone
    if rotates_keys:
        impl.rotate_keys()

    num_seqs, order = len(step.seq_lens), iter(torch.randperm(BLOCKS).tolist())
    table = torch.full((num_seqs + step.padding, 8), -1, dtype=torch.int32)
    for row, length in zip(table, step.seq_lens, strict=False):
        blocks = -(-length // BLOCK_SIZE)
        row[:blocks] = torch.tensor([next(order) for _ in range(blocks)], dtype=torch.int32)
    keys, values = (
        [torch.randn(n, KV_HEADS, HEAD_SIZE).to(model_dtype) for n in step.seq_lens] for _ in ("keys", "values")
    )

    def write(parts: list[slice]) -> tuple[torch.Tensor, torch.Tensor]:
        positions = [torch.arange(length)[part] for part, length in zip(parts, step.seq_lens, strict=True)]
        slots = torch.cat(
            [
                row[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
                for row, at in zip(table, positions, strict=False)
            ]
        )
        rows = [torch.cat([x[part] for x, part in zip(of, parts, strict=True)]) for of in (keys, values)]
        # A batch that is padded for a graph has more tokens than slots.
        padding = torch.full((3, KV_HEADS, HEAD_SIZE), torch.nan).to(model_dtype)
        key, value = (torch.cat([x, padding]) for x in rows)
        impl.do_kv_cache_update(layer, key, value, kv_cache, slots)
        return slots, key

    untouched = [other.clone() for other in others]
    write([slice(0, old) for old in step.before])
    slots, key = write([slice(old, None) for old in step.before])
    assert all(torch.equal(*pair) for pair in zip(others, untouched, strict=True))

    bounds = torch.tensor([0, *itertools.accumulate(step.q_lens)], dtype=torch.int32)
    total = int(bounds[-1]) + step.padding * step.q_lens[0]
    bounds = torch.cat([bounds, bounds[-1:].expand(step.padding)])
    query = torch.randn(total + 2, HEADS, HEAD_SIZE).to(model_dtype)
    output = torch.full_like(query, 7)
    metadata = builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=torch.tensor([*step.seq_lens, *[0] * step.padding], dtype=torch.int32),
            num_reqs=num_seqs + step.padding,
            num_actual_tokens=total,
            max_query_len=max(step.q_lens),
            max_seq_len=max(step.seq_lens),
            block_table_tensor=table,
            slot_mapping=slots,
        ),
    )
    impl.forward(layer, query, key, key, kv_cache, metadata, output)
    assert (output[total:] == 7).all()

    stored, lens = impl._stored(layer, kv_cache), torch.tensor(step.seq_lens)
    gathered = kvjax_torch.gather_kv(*stored.caches, table[:num_seqs], lens, *stored.how, dtype=torch.float32)
    for seq, length in enumerate(step.seq_lens):
        rows = slice(int(bounds[seq]), int(bounds[seq + 1]))
        own = (x[seq, :length] for x in gathered)
        expected = attention(rotated(query[rows]), *own, window, cap, sinks)
        is_rounded = in_fp8 and step.q_lens[seq] > 1 + step.drafts and dtype not in ("auto", "fp8_e5m2")
        tolerance = 0.3 if is_rounded else 0.01
        torch.testing.assert_close(output[rows].double(), expected, rtol=tolerance, atol=tolerance)
        error = (output[rows].double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert (error > 0.01) == is_rounded
        assert error < 0.1
        if get_kv_quant_mode(dtype) == 0:
            assert torch.equal(gathered[0][seq, :length], rotated(keys[seq]).float())
    return Ran(metadata, spec, kv_cache, *gathered, table, step.seq_lens, scale)


def test_the_tokens_of_a_head_are_contiguous_by_default():
    assert get_supported_kv_cache_layouts([BACKEND])[0] is KVCacheLayout.LBHNC


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_step_attends_to_what_was_written(dtype: str, layout: KVCacheLayout):
    for step in STEPS.values():
        run(dtype, layout, step)


@pytest.mark.parametrize("dtype", ["auto", "fp8", "nvfp4", "int8_k_nvfp4_v"])
@pytest.mark.parametrize("step", STEPS)
def test_attention_applies_windows_soft_caps_and_sinks(dtype: str, step: str):
    run(dtype, LAYOUTS[0], STEPS[step], window=7, cap=20.0, sinks=torch.linspace(-1, 1, HEADS))


def quantizing_queries() -> Any:
    return SimpleNamespace(
        attention_config=SimpleNamespace(use_prefill_query_quantization=True),
        additional_config={},
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


@pytest.mark.parametrize("dtype", ["nvfp4", "fp8", "fp8_k_nvfp4_v", "fp8_e5m2", "auto"])
def test_prompts_are_attended_to_by_products_in_fp8_where_vllm_is_asked_to(dtype: str, monkeypatch: Any):
    """Other layers attend in 16 bits, of which quantized ones warn."""
    warned: list[Any] = []
    monkeypatch.setattr(attention_of_layers.logger, "warning_once", lambda *args: warned.append(args))
    for name in ("decodes and prompts", "drafts of different lengths"):
        run(dtype, LAYOUTS[0], STEPS[name], in_fp8=True)
    assert len(warned) == (dtype == "fp8_e5m2")


@pytest.mark.parametrize("dtype", ["nvfp4", "int8_per_token_head", "auto"])
def test_layers_of_rotated_keys_rotate_queries(dtype: str):
    run(dtype, LAYOUTS[0], STEPS["decodes and prompts"], rotates_keys=True)


def test_a_float16_model_attends_to_what_was_written():
    for dtype in ("nvfp4", *kvjax_vllm.MIXED_DTYPES):
        run(dtype, LAYOUTS[0], STEPS["decodes and prompts"], model_dtype=torch.float16)
    run("auto", LAYOUTS[0], STEPS["decodes and prompts"], model_dtype=torch.float16)


def test_steps_are_divided_by_their_query_lengths():
    kinds = {}
    for name, step in STEPS.items():
        found = run("auto", LAYOUTS[0], step).metadata
        decodes, prompts = found.decodes, found.prompts
        kinds[name] = (decodes and (decodes.num_seqs, decodes.q_len), prompts and prompts.num_seqs)
    assert kinds == {
        "decodes": ((3, 1), None),
        "decodes and prompts": ((2, 1), 2),
        "prompts": (None, 2),
        "drafts": ((2, 3), None),
        "drafts of different lengths": ((3, 0), None),
        "drafts of different lengths and prompts": ((2, 0), 1),
        "padded decodes": ((4, 1), None),
        "padded drafts": ((3, 3), None),
    }


@pytest.mark.parametrize("new", [1, 2])
def test_a_drafts_first_pass_sees_the_tokens_that_it_adds(new: int):
    """vLLM adds them to the lengths of sequences, but not to the upper bound that the host knows."""
    spec, _ = cache_of("auto", LAYOUTS[0], torch.bfloat16)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        use_v2_model_runner=True,
    )
    builder = BACKEND.get_builder_cls()(spec, ["1"], config, torch.device("cpu"))
    bounds, lens = torch.tensor([0, 3, 6], dtype=torch.int32), torch.tensor([2 * BLOCK_SIZE, 20], dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=bounds,
        query_start_loc_cpu=bounds,
        seq_lens=lens,
        num_reqs=2,
        num_actual_tokens=6,
        max_query_len=3,
        max_seq_len=2 * BLOCK_SIZE,
        block_table_tensor=torch.arange(16, dtype=torch.int32).view(2, 8),
        slot_mapping=torch.arange(6),
        seq_lens_cpu_upper_bound=lens,
    )
    longer = extend_all_queries_by_N(step, new, torch.arange(3, dtype=torch.int32), torch.arange(6 + 2 * new))
    metadata = builder.build(0, longer)
    assert metadata.prompts.block_table.shape == (2, 3)


def test_a_prompts_table_has_the_columns_that_its_step_needs():
    metadata = run("auto", LAYOUTS[0], STEPS["decodes and prompts"]).metadata
    assert metadata.prompts.block_table.shape == (2, 3)
    assert metadata.decodes.block_table.shape == (2, 8)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_nvfp4_bytes_read_by_vllms_own_split_are_those_of_kvjax(layout: KVCacheLayout):
    ran = run("nvfp4", layout, STEPS["decodes"])
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.cat([codes, -codes])
    num_blocks, _, size, row = ran.kv_cache.shape
    is_hnd = ran.kv_cache.stride()[1:] == (size * row, row, 1)
    dims = (KV_HEADS, size) if is_hnd else (size, KV_HEADS)
    for side, mine in enumerate((ran.keys, ran.values)):
        strides = (ran.kv_cache.stride(0), dims[1] * row, row, 1)
        offset = ran.kv_cache.storage_offset() + side * KV_HEADS * size * row
        data, scales = nvfp4_split_data_scale(ran.kv_cache.as_strided((num_blocks, *dims, row), strides, offset))
        if is_hnd:
            data, scales = data.transpose(1, 2), scales.transpose(1, 2)
        decoded = torch.stack([codes[(data & 15).long()], codes[(data >> 4).long()]], -1).flatten(-2)
        decoded = decoded * scales.float().repeat_interleave(16, -1) * ran.scale
        for seq, length in enumerate(ran.seq_lens):
            theirs = decoded[ran.table[seq].long()].flatten(0, 1)[:length]
            torch.testing.assert_close(mine[seq, :length], theirs, rtol=1e-6, atol=0)


def test_a_page_of_nvfp4_has_the_bytes_of_vllms():
    assert run("nvfp4", LAYOUTS[0], STEPS["decodes"]).spec.page_size_bytes == 2 * KV_HEADS * BLOCK_SIZE * (32 + 4)


MIXED_LAYERS = (
    *((dtype, HEAD_SIZE, HEAD_SIZE) for dtype in kvjax_vllm.MIXED_DTYPES),
    ("fp8_k_nvfp4_v", 48, 64),
    ("int8_k_nvfp4_v", 64, 32),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize(("dtype", "head_size", "head_size_v"), MIXED_LAYERS)
def test_a_page_of_a_mixed_dtype_has_the_bytes_of_kvjax(
    dtype: str, head_size: int, head_size_v: int, layout: KVCacheLayout
):
    """All keys, then all values, whichever of tokens and heads vLLM's layout has first."""
    spec, views = cache_of(dtype, layout, torch.bfloat16, head_size, head_size_v)
    own = kvjax.FullAttentionSpec(BLOCK_SIZE, KV_HEADS, head_size, head_size_v, dtype=kvjax.parse_kv_cache_dtype(dtype))
    assert spec.page_size_bytes == own.page_size_bytes
    page = views[1]
    from kvjax_vllm.pages import cache_views

    key_cache, value_cache = cache_views(page, head_size, spec.kv_quant_mode)
    assert value_cache.storage_offset() - key_cache.storage_offset() == own.regions.v[0].base
    assert key_cache.storage_offset() == page.storage_offset()
    key_cache.fill_(1)
    value_cache.fill_(2)
    [start] = {view[2].storage_offset() for view in (page, key_cache)}
    found = torch.tensor(page.untyped_storage()).view(torch.uint8)[start:][: spec.page_size_bytes]
    end = own.regions.v[0].base
    assert (found[:end] == 1).all()
    assert (found[end:] == 2).all()
    assert all((other.view(torch.uint8) == POISON).all() for other in (views[0], views[2]))


def test_nvfp4_values_of_another_head_size_are_refused():
    with pytest.raises(UnsupportedError, match="head_size_v: got 24, expected a multiple of 16"):
        cache_of("fp8_k_nvfp4_v", LAYOUTS[0], torch.bfloat16, 64, 24)


# What is refused.

ACCEPTED: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "nvfp4",
    "block_size": 16,
    "use_mla": False,
    "has_sink": True,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": AttentionType.DECODER,
    "has_sliding_window": True,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_that_kernels_read_are_accepted_on_a_gpu(dtype: str):
    assert BACKEND.validate_configuration(**ACCEPTED | {"kv_cache_dtype": dtype}) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_size": 100}, "head_size"),
        ({"block_size": 8}, "block_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "turboquant_k8v4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype"),
        ({"use_mla": True}, kvjax_vllm.MLA_NAME),
        ({"use_sparse": True}, "sparse"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "ENCODER_ONLY"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "ENCODER_DECODER"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_dcp": True}, "DCP"),
        ({"use_adaptive_verification": True}, "adaptive verification"),
        ({"device_capability": DeviceCapability(8, 0)}, "compute capability"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(changed: dict[str, Any], reason: str):
    found = BACKEND.validate_configuration(**ACCEPTED | changed)
    assert reason in found[-1]


def test_alibi_and_fast_prefill_are_refused_by_name():
    config = SimpleNamespace(
        model_config=SimpleNamespace(uses_alibi=True),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=True),
        compilation_config=SimpleNamespace(custom_ops=[]),
    )
    with set_current_vllm_config(config):
        assert BACKEND.validate_configuration(**ACCEPTED) == ["ALiBi not supported"]
        config.model_config.uses_alibi = False
        assert "kv_sharing_fast_prefill not supported" in BACKEND.validate_configuration(**ACCEPTED)[0]
    with pytest.raises(UnsupportedError, match="alibi_slopes"):
        BACKEND.get_impl_cls()(HEADS, HEAD_SIZE, 1.0, KV_HEADS, [1.0] * HEADS)


def test_attention_that_is_not_causal_is_refused():
    with pytest.raises(UnsupportedError, match="causal"):
        BACKEND.get_builder_cls().build(None, 0, SimpleNamespace(causal=False))


# The name in vLLM, and its versions.


def test_registering_twice_changes_nothing():
    names = kvjax_vllm.NAME, kvjax_vllm.MLA_NAME
    before = [AttentionBackendEnum[name] for name in names]
    handlers = [get_kv_cache_dtype_handler(dtype) for dtype in kvjax_vllm.MIXED_DTYPES]
    kvjax_vllm.register()
    assert [AttentionBackendEnum[name] for name in names] == before
    assert [get_kv_cache_dtype_handler(dtype) for dtype in kvjax_vllm.MIXED_DTYPES] == handlers
    assert None not in handlers


@pytest.mark.parametrize("dtype", kvjax_vllm.MIXED_DTYPES)
def test_mixed_dtypes_are_arguments_of_vllm_that_only_this_backend_takes(dtype: str):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = EngineArgs.from_cli_args(parser.parse_args(["--model", "m", "--kv-cache-dtype", dtype]))
    assert CacheConfig(cache_dtype=arguments.kv_cache_dtype).cache_dtype == dtype
    for other in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"):
        try:
            backend = AttentionBackendEnum[other].get_class()
        except ImportError:  # of what a CPU lacks
            continue
        assert not backend.supports_kv_cache_dtype(dtype)


@pytest.mark.parametrize("backend", ["KvjaxBackend", "KvjaxMLABackend"])
def test_a_process_without_the_plugin_reads_a_configuration_that_names_the_backend(backend: str):
    name = kvjax_vllm.NAME if backend == "KvjaxBackend" else kvjax_vllm.MLA_NAME
    pickled = pickle.dumps({"backend": AttentionBackendEnum[name]})
    code = f"import pickle; print(pickle.loads({pickled!r})['backend'].get_path())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == f"kvjax_vllm.backend.{backend}"


def test_registering_imports_neither_kvjax_nor_jax():
    code = "import sys, kvjax_vllm; kvjax_vllm.register(); print(*({'kvjax', 'jax', 'torch'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} <= {"torch"}  # which vLLM imports


@pytest.mark.parametrize("version", ["0.32.0", "0.34.0", "0.330.0", "1.0", "0.0.0+dev"])
def test_another_vllm_gets_an_error_that_names_both_versions(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(kvjax_vllm, "_installed", lambda: version)
    with pytest.raises(UnsupportedError, match=rf"got version {version.replace('+', '.')}.*tested with 0\.33\.0"):
        kvjax_vllm.check_version()
    with pytest.warns(RuntimeWarning, match=rf"{version.replace('+', '.')}.*tested with 0\.33\.0"):
        kvjax_vllm.register()


@pytest.mark.parametrize("version", ["0.33.0", "0.33.1", "0.33.0+cu130", "0.33"])
def test_the_tested_series_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(kvjax_vllm, "_installed", lambda: version)
    kvjax_vllm.check_version()


# Scales of a file.


def scaled_config(path: Any, num_layers: int = 2, **settings: Any) -> Any:
    hf_config = {
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_size": HEADS * HEAD_SIZE,
        "head_dim": HEAD_SIZE,
        "torch_dtype": "bfloat16",
    }
    own = settings or {"scales": str(path)}
    return SimpleNamespace(
        additional_config={"kvjax": own},
        model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="llama", to_dict=lambda: hf_config)),
        cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[]),
    )


def scaled_layers(dtype: str, num_layers: int = 2) -> dict[str, Any]:
    def layer() -> Any:
        return SimpleNamespace(
            kv_cache_dtype=dtype,
            kv_sharing_target_layer_name=None,
            is_draft_layer=False,
            num_kv_heads=KV_HEADS,
            _k_scale=torch.tensor(1.0),
            _v_scale=torch.tensor(1.0),
            _k_scale_float=1.0,
            _v_scale_float=1.0,
        )

    return {f"model.layers.{index}.self_attn.attn": layer() for index in range(num_layers)}


def scale_file(path: Any, scales: dict[int, float | list[float]], **metadata: str) -> Any:
    tensors = {
        f"model.layers.{index}.self_attn.{kind}_scale": np.array(value, np.float32)
        for index, value in scales.items()
        for kind in "kv"
    }
    save_file(tensors, path, metadata)
    return path


def test_a_file_gives_each_layer_its_scales(tmp_path: Any):
    from kvjax_vllm.scales import scales_of_layers

    path = scale_file(tmp_path / "scales.safetensors", {0: 0.25, 1: 0.125})
    for dtype in ("nvfp4", "fp8", "fp8_e5m2", "fp8_k_nvfp4_v"):
        found = scales_of_layers(scaled_config(path), scaled_layers(dtype))
        assert [scale.item() for scales in found.values() for scale in scales] == [0.25, 0.25, 0.125, 0.125]


@pytest.mark.parametrize(
    ("dtype", "rotated"), [("nvfp4", [1]), ("int8_per_token_head", [1]), ("auto", [])], ids=lambda x: str(x)
)
def test_a_file_of_rotated_keys_makes_its_quantized_layers_rotate(tmp_path: Any, dtype: str, rotated: list[int]):
    from kvjax_vllm.scales import ScaledImpl, scales_of_layers

    rotation = {"kvjax_key_rotation": "1", "kvjax_amax_divisor": "2688"}
    config = scaled_config(scale_file(tmp_path / "scales.safetensors", {0: 0.25, 1: 0.125}, **rotation))
    layers = scaled_layers(dtype)
    config.compilation_config = SimpleNamespace(static_forward_context=layers)
    for layer in layers.values():
        layer.impl = BACKEND.get_impl_cls()(HEADS, HEAD_SIZE, 1.0, KV_HEADS, kv_cache_dtype=dtype)
        layer.impl.vllm_config = config
    first, *_ = layers.values()
    scales = first.impl.resolve_scales(first)
    assert [layer.impl._rotates_keys for layer in layers.values()] == [index in rotated for index in (0, 1)]
    if dtype == "nvfp4":
        assert [scale.item() for scale in scales] == [0.25, 0.25]
        assert len(scales_of_layers(config, layers)) == 2
    latents = ScaledImpl()
    first.impl, latents.vllm_config = latents, config
    config.additional_config["kvjax"]["scales"] = str(
        scale_file(tmp_path / "latents.safetensors", {0: 0.25, 1: 0.125}, **rotation | {"kvjax_key_rotation": "0"})
    )
    if rotated:
        with pytest.raises(KVCacheValueError, match="rotated keys for a model of latents"):
            latents.known_scales()


@pytest.mark.parametrize("dtype", ["int8_k_nvfp4_v", "int8_k_nvfp4_4over6_v"])
def test_a_file_gives_layers_of_int8_keys_the_scale_of_values(tmp_path: Any, dtype: str):
    from kvjax_vllm.scales import scales_of_layers

    path = scale_file(tmp_path / "scales.safetensors", {0: 0.25, 1: 0.125})
    found = scales_of_layers(scaled_config(path), scaled_layers(dtype))
    assert [scale.item() for scales in found.values() for scale in scales] == [1, 0.25, 1, 0.125]


def test_scales_of_each_head_are_divided_among_ranks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    from kvjax_vllm import scales

    path = scale_file(tmp_path / "scales.safetensors", {0: [0.25, 0.5]})
    both = [scaled_layers(dtype, num_layers=1) for dtype in ("fp8", "fp8_k_nvfp4_v")]
    for layers in both:
        [layer] = layers.values()
        layer.num_kv_heads = 1
    for ranks, expected in ((2, [[0.25], [0.5]]), (4, [[0.25], [0.25], [0.5], [0.5]])):
        monkeypatch.setattr(scales, "get_tensor_model_parallel_world_size", lambda ranks=ranks: ranks)
        for rank, own in enumerate(expected):
            monkeypatch.setattr(scales, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            [fp8], [mixed] = (scales.scales_of_layers(scaled_config(path, 1), layers).values() for layers in both)
            assert [scale.tolist() for scale in fp8] == [own, own]
            assert [scale.tolist() for scale in mixed] == [own, 0.5]  # NVFP4 takes one


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({0: 0.25}, "no scales of layer 1"),
        ({1: 0.25}, "no scales of layer 0"),
        ({0: 0.25, 1: 0.25, 2: 0.25}, "scales of layer 2, expected those of a model of 2"),
    ],
)
def test_a_file_of_another_model_is_refused_before_serving(tmp_path: Any, scales: Any, message: str):
    from kvjax_vllm.scales import scales_of_layers

    path = scale_file(tmp_path / "scales.safetensors", scales)
    with pytest.raises(KVCacheValueError, match=message):
        scales_of_layers(scaled_config(path), scaled_layers("nvfp4"))


@pytest.mark.parametrize("name", ["mtp.layers.0.self_attn.attn", "model.layers.2.self_attn.attn", "draft.0.1.attn"])
def test_a_draft_models_layers_keep_their_scales_unless_they_read_the_models_pages(tmp_path: Any, name: str):
    """Whatever their names: vLLM marks them."""
    from kvjax_vllm.scales import rotated_layers, scales_of_layers

    rotation = {"kvjax_key_rotation": "0", "kvjax_amax_divisor": "2688"}
    config = scaled_config(scale_file(tmp_path / "scales.safetensors", {0: 0.25, 1: 0.125}, **rotation))
    layers = scaled_layers("nvfp4")
    first, *_ = layers
    [layers[name]] = scaled_layers("nvfp4", num_layers=1).values()
    layers[name].is_draft_layer = True
    assert scales_of_layers(config, layers)[name] == (torch.tensor(1.0), torch.tensor(1.0))
    assert rotated_layers(config, layers) == [first]
    layers[name].kv_sharing_target_layer_name = first
    assert scales_of_layers(config, layers)[name] == (torch.tensor(0.25), torch.tensor(0.25))
    assert rotated_layers(config, layers) == [first, name]


def test_a_layer_with_two_modules_of_attention_has_the_scales_of_each(tmp_path: Any):
    """LongCat-Flash. Without a file no name is read."""
    from kvjax_vllm.scales import rotated_layers, scales_of_layers

    layers = scaled_layers("fp8", num_layers=4)
    layers = {f"model.layers.{i // 2}.self_attn.{i % 2}.attn": each for i, each in enumerate(layers.values())}
    config = scaled_config(scale_file(tmp_path / "scales.safetensors", {i: 0.5**i for i in range(4)}), num_layers=4)
    config.model_config.hf_config.model_type = "longcat_flash"
    assert [k_scale.item() for k_scale, _ in scales_of_layers(config, layers).values()] == [1, 0.5, 0.25, 0.125]
    assert rotated_layers(config, layers) == []
    config.additional_config = {}
    assert len(scales_of_layers(config, layers)) == 4
    assert rotated_layers(config, layers) == []


@pytest.mark.parametrize("settings", [{"scale": "f"}, {"scales": 1}, {"scales": "f", "exact_window": 64}])
def test_a_wrong_setting_is_refused(settings: dict[str, Any]):
    from kvjax_vllm.scales import file_of_scales

    with pytest.raises(KVCacheValueError, match="additional_config"):
        file_of_scales(scaled_config(None, **settings))


def test_a_missing_file_is_named(tmp_path: Any):
    from kvjax_vllm.scales import scales_of_layers

    with pytest.raises(OSError, match="absent"):
        scales_of_layers(scaled_config(tmp_path / "absent"), scaled_layers("nvfp4"))


def test_nvfp4_at_scales_of_one_warns_once(monkeypatch: pytest.MonkeyPatch):
    from kvjax_vllm import scales

    warned: list[str] = []
    monkeypatch.setattr(scales.logger, "warning", lambda message, *rest: warned.append(message))
    config = SimpleNamespace(additional_config={})
    scales.scales_of_layers(config, scaled_layers("nvfp4"))
    assert len(warned) == 1
    assert "kvjax calibrate" in warned[0]
    scales.scales_of_layers(config, scaled_layers("fp8"))
    layers = scaled_layers("nvfp4")
    next(iter(layers.values()))._k_scale_float = 0.5
    scales.scales_of_layers(config, layers)
    assert len(warned) == 1
    for num, dtype in enumerate(kvjax_vllm.MIXED_DTYPES):
        layers = scaled_layers(dtype)
        for layer in layers.values():
            layer._k_scale_float = 0.5
        scales.scales_of_layers(config, layers)
        assert len(warned) == 2 + num
        layer._v_scale_float = 0.5
        scales.scales_of_layers(config, layers)
        assert len(warned) == 2 + num


def test_every_dtype_that_kvjax_names_as_vllm_does_is_served_or_refused():
    assert {dtype for dtype in STR_DTYPE_TO_TORCH_DTYPE if dtype in kvjax.ACCEPTED_KV_CACHE_DTYPES} - {
        "float32", "float", "half", "fp8_inc", "fp8_ds_mla"
    } <= {*DTYPES}  # fmt: skip


def test_prompts_can_be_compiled_before_any_comes():
    for dtype in ("auto", "nvfp4", *kvjax_vllm.MIXED_DTYPES):
        _, views = cache_of(dtype, LAYOUTS[0], torch.bfloat16)
        shape = HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS
        impl = BACKEND.get_impl_cls()(*shape, None, None, dtype)
        one = torch.tensor(1.0)
        stored = impl._stored(SimpleNamespace(_k_scale=one, _v_scale=one), views[0])
        query = torch.zeros(1, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
        impl._compile_for_prompts(query, query.clone(), stored)
        writes = mock.Mock(), mock.Mock()
        impl._compile_at_once(writes, query.to("meta"), query.to("meta"), stored)
        for write in writes:
            write.assert_called_once_with()


def test_each_step_reads_the_current_sinks():
    """Weights may be updated in place, and vLLM's sleep discards the copy; graphs read it where it was."""
    sinks = torch.linspace(-1, 1, HEADS).bfloat16()
    impl = BACKEND.get_impl_cls()(HEADS, HEAD_SIZE, 1.0, KV_HEADS, sinks=sinks)
    copy = impl._options["sinks"]
    _, views = cache_of("auto", LAYOUTS[0], torch.bfloat16)
    query, one = torch.zeros(1, HEADS, HEAD_SIZE, dtype=torch.bfloat16), torch.tensor(1.0)
    for _ in range(2):
        copy.fill_(torch.nan)
        sinks.mul_(2)
        layer = SimpleNamespace(_k_scale=one, _v_scale=one)
        impl.forward(layer, query, query, query, views[0], KvjaxMetadata(None, None), query)
        assert torch.equal(copy, sinks.float())
    assert impl._options["sinks"] is copy
