"""The plugin's backend of latents, without an engine: vLLM's layer, specs and metadata, against float64.

`make test-client-vllm` runs this, on the CPU. `test_vllm_engine.py` runs vLLM's engine.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import os
import pathlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

import transformers
from safetensors.numpy import save_file
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonImpl
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheTensor, create_kv_cache_views

import kvjax
import kvjax_torch
import kvjax_vllm
from examples.clients.tests.test_vllm import STEPS, Step
from kvjax import KVCacheValueError, UnsupportedError
from kvjax_vllm.mla import KvjaxMLADecodeMetadata

kvjax_vllm.register()
BACKEND = AttentionBackendEnum[kvjax_vllm.MLA_NAME].get_class()
LAYOUTS = BACKEND.supported_kv_cache_layouts()
HEADS, RANK, ROPE, NOPE, VALUE = 4, 256, 64, 32, 48
BLOCK_SIZE, BLOCKS, LAYERS = 16, 12, 3
SCALE = 0.17
POISON = 0xA5
NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]


def model(**changed: Any) -> transformers.DeepseekV3Config:
    sizes = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    few = {"hidden_size": 128, "num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS, "vocab_size": 64}
    return transformers.DeepseekV3Config(
        **sizes | heads | few | {"q_lora_rank": None, "max_position_embeddings": 256, "dtype": "float32"} | changed
    )


@pytest.fixture(scope="session")
def config_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes vLLM's configuration of a model with options of its engine."""

    @functools.cache
    def make(dtype: str = "float32", **options: Any) -> Any:
        folder = tmp_path_factory.mktemp("model")
        model(architectures=["DeepseekV3ForCausalLM"]).save_pretrained(folder)
        given = {"block_size": BLOCK_SIZE, "max_model_len": 256, "skip_tokenizer_init": True, "enforce_eager": True}
        return EngineArgs(str(folder), dtype=dtype, **given | options).create_engine_config()

    return make


class Expansion(torch.nn.Module):
    """`kv_b_proj`: a latent's keys without positions and its values, of all heads."""

    quant_method = None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(HEADS * (NOPE + VALUE), RANK) * RANK**-0.5
        self.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)

    def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor, None]:
        return latents @ self.weight.T, None


def layers_of(config: Any, layout: KVCacheLayout = LAYOUTS[0]) -> tuple[Any, list[MLAAttention]]:
    """vLLM's spec and layers, with a cache whose every byte is POISON."""
    forward_context = config.compilation_config.static_forward_context
    forward_context.clear()
    dtype = config.model_config.dtype
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config):
            heads = HEADS, SCALE, NOPE, ROPE, VALUE, None, RANK
            layers = [
                MLAAttention(
                    *heads, Expansion(dtype), cache_config=config.cache_config, prefix=name, attn_backend=BACKEND
                )
                for name in NAMES
            ]
            for layer in layers:
                layer.process_weights_after_loading(dtype)
    finally:
        torch.set_default_dtype(default)
    spec = BACKEND.customize_spec(layers[0].get_kv_cache_spec(config))
    page = spec.page_size_bytes
    layer_stride, block_stride = (page * BLOCKS, page) if layout.is_layer_compact else (page, page * LAYERS)
    size = page * BLOCKS * LAYERS
    memory = KVCacheTensor(size=size, layers=NAMES, layer_stride=layer_stride, block_stride=block_stride)
    raw = torch.full((size,), POISON, dtype=torch.uint8).view(torch.int8)
    for layer, view in zip(layers, create_kv_cache_views(raw, spec, BLOCKS, layout, memory), strict=True):
        layer.bind_kv_cache(view)
    return spec, layers


def attention(layer: MLAAttention, query: Any, latents: Any, rope_keys: Any) -> torch.Tensor:
    """Attention of the last tokens of a sequence over keys and values of each head, in float64."""
    q_len, num_keys = query.shape[0], latents.shape[0]
    weight = layer.kv_b_proj.weight.double()
    keys, values = (latents.double() @ weight.T).unflatten(-1, (HEADS, NOPE + VALUE)).split([NOPE, VALUE], -1)
    keys = torch.cat([keys, rope_keys.double()[:, None].expand(-1, HEADS, -1)], -1)
    logits = torch.einsum("qhd,khd->hqk", query.double(), keys) * SCALE
    row, key = torch.arange(num_keys - q_len, num_keys)[:, None], torch.arange(num_keys)[None]
    weights = logits.masked_fill(key > row, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


@dataclasses.dataclass
class Ran:
    """A step that ran: its metadata, the layer and what it holds."""

    metadata: Any
    layer: MLAAttention
    latents: list[torch.Tensor]
    rope_keys: list[torch.Tensor]
    table: torch.Tensor
    step: Step


def run(config: Any, step: Step, layout: KVCacheLayout = LAYOUTS[0], scale: float = 1.0, atol: float = 1e-5) -> Ran:
    """Writes and attends as vLLM's runner does, in the second of three layers, and checks results and bytes."""
    torch.manual_seed(0)
    spec, layers = layers_of(config, layout)
    layer, model_dtype, kv_cache_dtype = layers[1], config.model_config.dtype, layers[1].kv_cache_dtype
    layer._k_scale.fill_(scale)
    is_quantized = kv_cache_dtype.startswith("fp8")
    speculative = SimpleNamespace(num_speculative_tokens=step.drafts, parallel_drafting=False, method="ngram")
    with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patched:
        patched.setattr(config, "speculative_config", speculative if step.drafts else None)
        builder = BACKEND.get_builder_cls()(spec, [layer.layer_name], config, torch.device("cpu"))

    num_seqs, order = len(step.seq_lens), iter(torch.randperm(BLOCKS).tolist())
    table = torch.full((num_seqs + step.padding, 8), -1, dtype=torch.int32)
    for row, length in zip(table, step.seq_lens, strict=False):
        blocks = -(-length // BLOCK_SIZE)
        row[:blocks] = torch.tensor([next(order) for _ in range(blocks)], dtype=torch.int32)
    latents, rope_keys = ([torch.randn(n, size).to(model_dtype) for n in step.seq_lens] for size in (RANK, ROPE))

    def write(parts: list[slice]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        positions = [torch.arange(length)[part] for part, length in zip(parts, step.seq_lens, strict=True)]
        slots = torch.cat(
            [
                row[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
                for row, at in zip(table, positions, strict=False)
            ]
        )
        # A batch that is padded for a graph has more tokens than slots. Both are views of one projection in vLLM.
        rows = [torch.cat([x[part] for x, part in zip(of, parts, strict=True)]) for of in (latents, rope_keys)]
        both = torch.cat([torch.cat(rows, -1), torch.full((3, RANK + ROPE), torch.nan).to(model_dtype)])
        kv_c, k_pe = both[:, :RANK], both[:, None, RANK:]
        layer.update_kv_cache(kv_c, k_pe, layer.kv_cache, slots, None, kv_cache_dtype, layer._k_scale)
        return slots, kv_c, k_pe

    write([slice(0, old) for old in step.before])
    slots, kv_c, k_pe = write([slice(old, None) for old in step.before])
    for other in (layers[0], layers[2]):
        assert (other.kv_cache.view(torch.uint8) == POISON).all()

    bounds = torch.tensor([0, *itertools.accumulate(step.q_lens)], dtype=torch.int32)
    total = int(bounds[-1]) + step.padding * step.q_lens[0]
    bounds = torch.cat([bounds, bounds[-1:].expand(step.padding)])
    seq_lens = torch.tensor([*step.seq_lens, *[0] * step.padding], dtype=torch.int32)
    query = torch.randn(total + 2, HEADS, NOPE + ROPE).to(model_dtype)
    output = torch.full((total + 2, HEADS * VALUE), 7).to(model_dtype)
    metadata = builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=bounds,
            query_start_loc_cpu=bounds,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=num_seqs + step.padding,
            num_actual_tokens=total,
            max_query_len=max(step.q_lens),
            max_seq_len=max(step.seq_lens),
            block_table_tensor=table,
            slot_mapping=slots,
        ),
    )
    layer.forward_impl(query, kv_c, k_pe, layer.kv_cache, metadata, output)
    assert (output[total:] == 7).all()

    stored = read(layer, table, step)
    for seq, (_, before, new) in enumerate(zip(step.seq_lens, step.before, step.q_lens, strict=True)):
        rows = slice(int(bounds[seq]), int(bounds[seq + 1]))
        # Prompts attend to their own tokens before these are quantized.
        is_prompt = new > 1 + step.drafts
        assert before == 0 or not is_prompt or not is_quantized
        own = (latents[seq], rope_keys[seq]) if is_prompt else stored[seq].split([RANK, ROPE], -1)
        expected = attention(layer, query[rows], *own)
        torch.testing.assert_close(output[rows].double(), expected, rtol=atol, atol=atol)
        if not is_quantized:
            assert torch.equal(stored[seq], torch.cat([latents[seq], rope_keys[seq]], -1).float())
    return Ran(metadata, layer, latents, rope_keys, table, step)


def read(layer: MLAAttention, table: torch.Tensor, step: Step) -> list[torch.Tensor]:
    """The rows that a layer stores of each sequence, dequantized: float32 `[length, RANK + ROPE]`."""
    bounds = torch.tensor([0, *itertools.accumulate(step.seq_lens)], dtype=torch.int32)
    rows = torch.empty(int(bounds[-1]), RANK + ROPE)
    kvjax_torch.gather_and_maybe_dequant_cache(
        layer.kv_cache,
        rows,
        table[: len(step.seq_lens)],
        bounds,
        None,
        rows.shape[0],
        layer.kv_cache_dtype,
        layer._k_scale,
    )
    return [*rows.split(step.seq_lens)]


def decodes(table: torch.Tensor, seq_lens: torch.Tensor) -> Any:
    """The metadata of one query token of each sequence."""
    num_seqs = len(seq_lens)
    bounds = torch.arange(num_seqs + 1, dtype=torch.int32)
    decode = KvjaxMLADecodeMetadata(table, seq_lens, None, q_len=1, max_q_len=1, cu_q_lens=bounds)
    return SimpleNamespace(decode=decode)


@pytest.mark.parametrize("step", STEPS)
def test_every_kind_of_step_attends_to_what_was_written(config_of: Any, step: str):
    run(config_of(), STEPS[step])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_16_bits_attend_to_what_was_written(config_of: Any, dtype: str):
    for kv_cache_dtype in ("auto", dtype):
        run(config_of(dtype, kv_cache_dtype=kv_cache_dtype), STEPS["decodes and prompts"], atol=0.03)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_fp8_latents_are_attended_to_in_every_layout(config_of: Any, dtype: str, layout: KVCacheLayout):
    config = config_of(kv_cache_dtype=dtype)
    for step in (*(STEPS[name] for name in STEPS if "prompts" not in name), Step((1, 9, 33), (20, 0, 0))):
        run(config, step, layout, scale=0.03)


def test_fp8_bytes_are_quotients_by_the_scale_rounded_to_nearest(config_of: Any):
    """As vLLM's write defines them, whose operation is of GPUs alone."""
    ran = run(config_of("bfloat16", kv_cache_dtype="fp8"), STEPS["decodes"], scale=0.25, atol=0.03)
    for row, length, *parts in zip(ran.table, ran.step.seq_lens, ran.latents, ran.rope_keys, strict=True):
        pages = ran.layer.kv_cache[row[: -(-length // BLOCK_SIZE)].long()].view(torch.uint8).flatten(0, 1)
        expected = (torch.cat(parts, -1).float() / 0.25).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(pages[:length], expected.view(torch.uint8))


def test_steps_are_divided_by_their_query_lengths(config_of: Any):
    kinds = {}
    for name, step in STEPS.items():
        found = run(config_of(), step).metadata
        decodes = found.decode
        kinds[name] = (decodes and (found.num_decodes, decodes.q_len, decodes.max_q_len), found.num_prefills)
    assert kinds == {
        "decodes": ((3, 1, 1), 0),
        "decodes and prompts": ((2, 1, 1), 2),
        "prompts": (None, 2),
        "drafts": ((2, 3, 3), 0),
        "drafts of different lengths": ((3, 0, 3), 0),
        "drafts of different lengths and prompts": ((2, 0, 3), 1),
        "padded decodes": ((4, 1, 1), 0),
        "padded drafts": ((3, 3, 3), 0),
    }


def test_shards_of_decode_context_parallelism_are_merged_by_natural_logarithms(config_of: Any):
    """Each rank has every other token, one of them none of a sequence, and the queries of all heads in one tensor."""
    _, layers = layers_of(config_of())
    lengths, layer = torch.tensor([37, 1]), layers[0]
    rows = torch.randn(2, 37, RANK + ROPE)
    query = torch.randn(2, 2 * HEADS, RANK + ROPE)
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    parts = []
    for rank in range(2):
        own = (lengths - rank + 1) // 2
        for seq in range(2):
            mine = rows[seq, rank : lengths[seq] : 2]
            slots = seq * 2 * BLOCK_SIZE + torch.arange(len(mine))
            args = mine[:, :RANK], mine[:, None, RANK:], layer.kv_cache, slots
            layer.impl.do_kv_cache_update(*args, "auto", layer._k_scale)
        metadata = decodes(table, own.to(torch.int32))
        parts.append(layer.impl.forward_mqa(query, layer.kv_cache, metadata, layer))
    outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    assert lses.shape == (2, 2, 2 * HEADS)
    assert (lses[1, 1] == -torch.inf).all()
    merged = (outs * (lses - lses.logsumexp(0)).exp()[..., None]).sum(0)
    for seq, length in enumerate(lengths):
        logits = query[seq].double() @ rows[seq, :length].double().T * SCALE
        torch.testing.assert_close(lses.logsumexp(0)[seq].double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        expected = logits.softmax(-1) @ rows[seq, :length, :RANK].double()
        torch.testing.assert_close(merged[seq].double(), expected, rtol=1e-5, atol=1e-5)


def test_queries_of_an_fp8_cache_are_not_quantized(config_of: Any):
    _, layers = layers_of(config_of(kv_cache_dtype="fp8"))
    assert not layers[0].impl.supports_quant_query_input


def test_the_measuring_run_has_neither_pages_nor_metadata(config_of: Any):
    _, layers = layers_of(config_of())
    output = torch.full((5, HEADS * VALUE), 7.0)
    query, kv_c, k_pe = torch.randn(5, HEADS, NOPE + ROPE), torch.randn(5, RANK), torch.randn(5, 1, ROPE)
    layers[0].forward_impl(query, kv_c, k_pe, torch.tensor([]), None, output)
    assert (output == 0).all()


# Scales of a file.


def test_a_file_gives_each_layer_its_scale_for_writes_context_and_decodes(
    config_of: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "scales.safetensors"
    names = [f"model.layers.{index}.self_attn.k_scale" for index in range(LAYERS)]
    save_file({name: np.array(2.0**-index, np.float32) for index, name in enumerate(names)}, path)
    config = config_of(kv_cache_dtype="fp8")
    monkeypatch.setattr(config, "additional_config", {"kvjax": {"scales": str(path)}})
    _, layers = layers_of(config)
    layers[1].impl.reserve_workspace()
    seen: list[float] = []
    monkeypatch.setattr(MLACommonImpl, "forward_mha", lambda self, *args: seen.append(args[5].item()))
    for index, layer in enumerate(layers):
        kv_c, k_pe = torch.full((1, RANK), 3.0), torch.full((1, 1, ROPE), 3.0)
        layer.impl.do_kv_cache_update(kv_c, k_pe, layer.kv_cache, torch.tensor([5]), "fp8", layer._k_scale)
        layer.impl.forward_mha(*[None] * 5, layer._k_scale, None)
        stored = layer.kv_cache.view(torch.float8_e4m3fn)
        assert (stored[0, 5].float() == 3 * 2**index).all()
        args = torch.zeros(1, HEADS, RANK + ROPE), stored
        metadata = decodes(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
        stored.view(torch.uint8)[0, :5] = stored.view(torch.uint8)[0, 5]
        found, _ = layer.impl.forward_mqa(*args, metadata, layer)
        torch.testing.assert_close(found, torch.full_like(found, 3.0))
    assert seen == [2.0**-index for index in range(LAYERS)]


def test_a_file_without_a_layer_stops_the_measuring_run(
    config_of: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "scales.safetensors"
    save_file({"model.layers.0.self_attn.k_scale": np.array(0.5, np.float32)}, path)
    config = config_of(kv_cache_dtype="fp8")
    monkeypatch.setattr(config, "additional_config", {"kvjax": {"scales": str(path)}})
    _, layers = layers_of(config)
    with pytest.raises(KVCacheValueError, match="no scales of layer 1"):
        layers[0].impl.reserve_workspace()


# What is refused.

ACCEPTED: dict[str, Any] = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "fp8",
    "block_size": 64,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": AttentionType.DECODER,
}


def config_with(heads: int = 128, rank: int = 512, rope: int = 64, drafts: int = 0) -> Any:
    """What `validate_configuration` reads of vLLM's configuration."""
    sizes = SimpleNamespace(kv_lora_rank=rank, qk_rope_head_dim=rope)
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
    return SimpleNamespace(
        compilation_config=SimpleNamespace(custom_ops=[]),
        additional_config={},
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(model_type="deepseek_v3"),
            hf_text_config=sizes,
            get_num_attention_heads=lambda parallel: heads,
            dtype=torch.bfloat16,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=speculative,
        use_v2_model_runner=True,
    )


def test_what_writes_or_reads_latents_with_another_scale_is_refused():
    config = config_with()
    config.attention_config = SimpleNamespace(use_prefill_query_quantization=True)
    with set_current_vllm_config(config):
        assert "use_prefill_query_quantization" in BACKEND.validate_configuration(**ACCEPTED)[0]
    config.attention_config.use_prefill_query_quantization = False
    config.compilation_config.pass_config = SimpleNamespace(fuse_rope_kvcache_cat_mla=True)
    with set_current_vllm_config(config):
        assert "fuse_rope_kvcache_cat_mla" in BACKEND.validate_configuration(**ACCEPTED)[0]
    config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = False
    config.model_config.hf_config.model_type = "kimi_k3"
    with set_current_vllm_config(config):
        assert BACKEND.validate_configuration(**ACCEPTED) == []
        config.additional_config = {"kvjax": {"scales": "scales.safetensors"}}
        assert "a file of scales for kimi_k3" in BACKEND.validate_configuration(**ACCEPTED)[0]


@pytest.mark.parametrize("dtype", BACKEND.supported_kv_cache_dtypes)
@pytest.mark.parametrize("sizes", [(512, 64), (256, 64), (512, 0)])
def test_models_of_latents_are_accepted_on_hopper(dtype: str, sizes: tuple[int, int]):
    model_dtype = torch.float16 if dtype == "float16" else torch.bfloat16
    accepted = ACCEPTED | {"kv_cache_dtype": dtype, "head_size": sum(sizes), "dtype": model_dtype}
    for heads, drafts in ((16, 0), (128, 3)):
        with set_current_vllm_config(config_with(heads, *sizes, drafts)):
            assert BACKEND.validate_configuration(**accepted | {"use_dcp": True}) == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"use_mla": False}, "non-MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"head_size": 288}, "head_size"),
        ({"block_size": 8}, "block_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 of a model of torch.bfloat16"),
        ({"has_sink": True}, "sinks"),
        ({"has_sliding_window": True}, "sliding window"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_per_head_quant_scales": True}, "per-head"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "ENCODER_ONLY"),
        ({"use_non_causal": True}, "non-causal"),
        ({"use_batch_invariant": True}, "batch invariance"),
        ({"use_pcp": True}, "PCP"),
        ({"use_adaptive_verification": True}, "adaptive verification"),
        ({"device_capability": DeviceCapability(8, 0)}, "compute capability"),
        ({"device_capability": DeviceCapability(10, 0)}, "`wgmma` is of compute capability 9"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(changed: dict[str, Any], reason: str):
    with set_current_vllm_config(config_with()):
        found = BACKEND.validate_configuration(**ACCEPTED | changed)
    assert any(reason in each for each in found), found


def test_what_no_kernel_reads_is_refused_by_its_sizes():
    for device, heads, drafts, is_served in (((10, 0), 16, 1, True), ((10, 0), 16, 2, False), ((9, 0), 128, 7, True)):
        with set_current_vllm_config(config_with(heads, drafts=drafts)):
            found = BACKEND.validate_configuration(**ACCEPTED | {"device_capability": DeviceCapability(*device)})
        assert (found == []) is is_served, found
    with set_current_vllm_config(config_with(rank=528, rope=48)):
        [reason] = BACKEND.validate_configuration(**ACCEPTED)
    assert "kv_lora_rank=528" in reason


def test_vllm_itself_refuses_nvfp4(config_of: Any):
    with pytest.raises(ValueError, match="nvfp4 KV cache is not supported with MLA"):
        config_of(kv_cache_dtype="nvfp4")


@pytest.mark.parametrize("option", ["alibi_slopes", "sliding_window", "logits_soft_cap"])
def test_options_that_vllms_prefill_lacks_are_refused(option: str):
    given = dict.fromkeys(inspect.signature(MLACommonImpl).parameters) | {"attn_type": AttentionType.DECODER, option: 8}
    with pytest.raises(UnsupportedError, match=option):
        BACKEND.get_impl_cls()(**given)


def test_the_platform_of_a_gpu_chooses_the_backend_by_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("of CUDA"))
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.v1.attention.selector import AttentionSelectorConfig

    class Hopper(CudaPlatformBase):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))

    wanted = {name: value for name, value in ACCEPTED.items() if name != "device_capability"}
    chosen = AttentionSelectorConfig(**wanted)
    with set_current_vllm_config(config_with()):
        found = Hopper.get_attn_backend_cls(AttentionBackendEnum[kvjax_vllm.MLA_NAME], chosen)
        assert found == "kvjax_vllm.backend.KvjaxMLABackend"
        with pytest.raises(ValueError, match=kvjax_vllm.MLA_NAME):
            Hopper.get_attn_backend_cls(AttentionBackendEnum[kvjax_vllm.NAME], chosen)


def test_pages_are_those_of_a_spec_of_kvjax(config_of: Any):
    for dtype in ("auto", "fp8"):
        spec, _ = layers_of(config_of("bfloat16", kv_cache_dtype=dtype))
        stored = "bfloat16" if dtype == "auto" else dtype
        own = kvjax.MLAAttentionSpec(BLOCK_SIZE, RANK, ROPE, dtype=kvjax.parse_kv_cache_dtype(stored))
        assert spec.page_size_bytes == own.page_size_bytes
