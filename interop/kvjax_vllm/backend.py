"""The backends that vLLM chooses by their names: what each serves, and its classes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, ClassVar

import kvjax_vllm

kvjax_vllm.check_version()
# kvjax compiles and launches kernels without JAX on the GPU, whose memory is vLLM's. jax reads this when imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

try:
    import torch
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.attention.backend import AttentionBackend, MultipleOf, max_decode_query_len
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

    from kvjax import MLAAttentionSpec
    from kvjax.kernels import Target
    from kvjax.ops.route import Query, route
    from kvjax_torch.arguments.dtypes import numpy_dtype, resolve_latent_dtype
    from kvjax_vllm.attention import KvjaxImpl
    from kvjax_vllm.mla import KvjaxMLAImpl, KvjaxMLAMetadataBuilder
    from kvjax_vllm.pages import LAYOUTS, packed_spec
    from kvjax_vllm.scales import file_of_scales
    from kvjax_vllm.step import KvjaxMetadataBuilder
except ImportError as error:
    raise kvjax_vllm.other_interface(error) from error


class PagesBackend(AttentionBackend):
    """What both backends have in common."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Multiples of 16 tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """9.0 and later."""
        return capability.major >= 9

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: a batch is divided on the host."""
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts with contiguous blocks, the preferred one first."""
        return LAYOUTS


class KvjaxBackend(PagesBackend):
    """Causal attention over kvjax's pages, on GPUs of compute capability 9.0 or later; on a CPU for tests."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "int8_per_token_head",
        "fp8_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
        *kvjax_vllm.MIXED_DTYPES,
    ]

    @staticmethod
    def get_name() -> str:
        """The backend's name in vLLM."""
        return kvjax_vllm.NAME

    @staticmethod
    def get_impl_cls() -> type[KvjaxImpl]:
        """The class of a layer's attention."""
        return KvjaxImpl

    @staticmethod
    def get_builder_cls() -> type[KvjaxMetadataBuilder]:
        """The class that divides batches."""
        return KvjaxMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 16, as kernels take; above 256 prompts are slow."""
        return head_size % 16 == 0

    @classmethod
    def supports_sink(cls) -> bool:
        """A logit of each head that joins the softmax."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """A window of each layer's own."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """fp8 with a scale of each KV head."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why a model that passes every other check is refused, for example because another backend serves MLA."""
        if use_mla:
            return f"models of MLA are served by {kvjax_vllm.MLA_NAME}"
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None:
            return None
        if vllm_config.model_config is not None and vllm_config.model_config.uses_alibi:
            return "ALiBi not supported"
        if vllm_config.cache_config.kv_sharing_fast_prefill:
            return "kv_sharing_fast_prefill not supported: it copies query lengths to the host without waiting for them"
        return None

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The spec with the bytes of rows that are packed."""
        return packed_spec(spec)


OWN_WRITES = frozenset({"kimi_k3"})
"""Models whose layers write and expand latents themselves, with the checkpoint's scales."""

FUSED_WRITE = "fuse_rope_kvcache_cat_mla"
"""A pass of vLLM's compilation that replaces a layer's write by vLLM's own operation."""


class KvjaxMLABackend(PagesBackend, MLACommonBackend):
    """Multi-head latent attention: vLLM's prefill, and kvjax's writes and kernels for sequences that decode."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        """The backend's name in vLLM."""
        return kvjax_vllm.MLA_NAME

    @staticmethod
    def get_impl_cls() -> type[KvjaxMLAImpl]:
        """The class of a layer's attention."""
        return KvjaxMLAImpl

    @staticmethod
    def get_builder_cls() -> type[KvjaxMLAMetadataBuilder]:
        """The class that divides batches."""
        return KvjaxMLAMetadataBuilder

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """64, the size that kernels over latents were timed with."""
        return max(default_block_size, 64)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why a model that passes every other check is refused, for example because no kernel reads its latents."""
        vllm_config = get_current_vllm_config_or_none()
        model_config = None if vllm_config is None else vllm_config.model_config
        if model_config is None or dtype not in cls.supported_dtypes or not cls.supports_kv_cache_dtype(kv_cache_dtype):
            return None  # what is wrong has been said
        stored = (
            dtype if kv_cache_dtype in (None, "auto") else kv_cache_dtype_str_to_dtype(kv_cache_dtype, model_config)
        )
        if stored.itemsize > 1 and stored is not dtype:  # vLLM's gather for prompts takes one for the other
            return f"kv_cache_dtype {kv_cache_dtype} of a model of {dtype} not supported"
        if getattr(getattr(vllm_config.compilation_config, "pass_config", None), FUSED_WRITE, False):
            return f"compilation pass {FUSED_WRITE} not supported: it writes latents itself, with another scale"
        if model_config.hf_config.model_type in OWN_WRITES and file_of_scales(vllm_config) is not None:
            name = model_config.hf_config.model_type
            return f"a file of scales for {name} not supported: its layers write latents with the checkpoint's scales"
        if getattr(getattr(vllm_config, "attention_config", None), "use_prefill_query_quantization", False):
            return "use_prefill_query_quantization not supported for latents"
        config, parallel = model_config.hf_text_config, vllm_config.parallel_config
        heads = model_config.get_num_attention_heads(parallel) * parallel.decode_context_parallel_size
        stored_as = resolve_latent_dtype(kv_cache_dtype or "auto", stored)
        spec = MLAAttentionSpec(block_size or 16, config.kv_lora_rank, config.qk_rope_head_dim, dtype=stored_as)
        query = Query(numpy_dtype(dtype), rows=heads * max_decode_query_len(vllm_config))
        gpu = Target.of(SimpleNamespace(compute_capability=device_capability.as_version_str()))
        return route(spec, query, gpu).why_no_decode_kernel
