"""sglang-jax's engine over kvjax's pages: replaces its token pool and attention backend.

Needs a source tree at commit cddbf6f1 (2026-08-21); the released package requires an older jax:

    git clone https://github.com/sgl-project/sglang-jax && git -C sglang-jax checkout cddbf6f1
    export PYTHONPATH=sglang-jax/python

    sglang_jax.use_pages("fp8", scales)
    engine = Engine(model_path=folder, page_size=16, enable_single_process=True)

The scheduler, the radix cache and the allocator handle page numbers and stay as they are.

- A subclass of the model runner creates the pool and the backend, in this process: `enable_single_process=True`.
- Heads keep the model's size (sglang-jax pads to 128); the bytes of a page determine how many tokens fit.
- The pool is a list with one array per layer, which the model returns and the runner stores: caches take their place.
- Each data-parallel rank numbers its own pages, so the backend attends inside a `jax.shard_map`.
- Metadata is that of the TPU kernel: flat page indices, and cumulative lengths in whole pages.
- On a GPU, jax runs ptxas. The engine's handler of SIGCHLD takes the exit status from it, so that handler is removed.

Layers with a sliding window share the pool (`disable_hybrid_swa_memory=True`). Offloading to the host and
disaggregation expect arrays and are not supported; the backend refuses sinks, masks and a dtype for softmax.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.layers.attention.flashattention_backend import FlashAttention
from sgl_jax.srt.managers import tp_worker
from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
from sgl_jax.srt.model_executor.model_runner import ModelRunner

import kvjax


@jax.tree_util.register_pytree_node_class
class PagedPool(MHATokenToKVPool):
    """A cache for each layer; `scales` are decode scales of keys and values."""

    kv_cache_dtype: kvjax.KVCacheDType
    scales: Sequence[tuple[float, float]] | None

    @classmethod
    def spec(cls, page_size: int, num_kv_heads: int, head_size: int) -> kvjax.FullAttentionSpec:
        return kvjax.FullAttentionSpec(page_size, num_kv_heads, head_size, dtype=cls.kv_cache_dtype)

    def _create_buffers(self) -> None:
        spec = self.spec(self.page_size, self.head_num, self.head_dim)
        sharding = NamedSharding(self.mesh, P("data", None, None, "tensor"))
        num_blocks = self.size // self.page_size + self.dp_size  # page 0 of each rank belongs to no sequence
        scales = self.scales or [(1.0, 1.0)] * self.layer_num
        self.kv_buffer = [
            kvjax.KVCache.allocate(spec, num_blocks, sharding=sharding, k_scale=k_scale, v_scale=v_scale)
            for k_scale, v_scale in scales
        ]
        self.kv_sharding = self.kv_buffer[0].shardings

    def _calculate_memory_usage(self) -> None:
        self.mem_usage = sum(leaf.nbytes for leaf in jax.tree.leaves(self.kv_buffer)) / 2**30


class PagedAttention(FlashAttention):
    """Writes to pages and attends to them; `max_blocks` is the most pages of a sequence."""

    max_blocks: int

    def __call__(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, token_to_kv_pool: Any,
                 attention_sink: Any = None) -> tuple[jax.Array, kvjax.KVCache]:  # fmt: skip
        """Writes, then attends; rows are `[num_tokens, heads, head_size]`, those of each rank together."""
        given, cache = self.forward_metadata, token_to_kv_pool.get_fused_kv_buffer(layer.layer_id)
        if any(x is not None for x in (attention_sink, given.custom_mask, layer.softmax_dtype)):
            raise NotImplementedError("attention sinks, masks and a dtype for softmax")
        options = {"sm_scale": layer.scaling, "logits_soft_cap": layer.logit_cap}
        options |= {"sliding_window": layer.sliding_window_size}
        options |= {"max_q_len": 1 if forward_batch.forward_mode.is_decode() else None}

        def attend(query: Any, key: Any, value: Any, cache: Any, given: Any) -> tuple[jax.Array, kvjax.KVCache]:
            indices = given.page_indices, given.seq_lens, given.cu_q_lens
            sizes = {"block_size": self.page_size, "num_tokens": len(query), "max_blocks": self.max_blocks}
            step = kvjax.StepMetadata.from_page_indices(
                *indices, **sizes, cu_kv_lens=given.cu_kv_lens, num_seqs=given.distribution[-1]
            )
            return kvjax.attend(query, key, value, cache, step, unique_slots=True, **options)

        heads, pages = P("data", "tensor"), cache.partition_specs
        specs = {"in_specs": (heads, heads, heads, pages, P("data")), "out_specs": (heads, pages)}
        run = jax.shard_map(attend, mesh=self.mesh, **specs, check_vma=False)
        sizes = layer.head_dim, layer.head_dim, layer.v_head_dim
        rows = (x.reshape(len(x), -1, size) for x, size in zip((q, k, v), sizes, strict=True))
        attended, cache = run(*rows, cache, given)
        return attended.reshape(len(q), -1), cache


class PagedModelRunner(ModelRunner):
    """A model runner with that pool and that backend."""

    def initialize(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        super().initialize()

    def _get_attention_backend(self) -> PagedAttention:
        config, heads = self.model_config, (self.num_attn_heads, self.num_kv_heads)
        backend = PagedAttention(*heads, config.head_dim, self.page_size, mesh=self.mesh)
        backend.max_blocks = -(-config.context_len // self.page_size)
        return backend

    def _maybe_wrap_hybrid_kv_pool(self, _: type, **sizes: Any) -> Any:
        return super()._maybe_wrap_hybrid_kv_pool(PagedPool, **sizes | {"head_dim": self.model_config.head_dim})

    def _compute_cell_size(self) -> int:
        """Bytes of a token in all layers, on one device."""
        heads = self.model_config.get_num_kv_heads(self.attention_tp_size)
        spec = PagedPool.spec(self.page_size, heads, self.model_config.head_dim)
        return self._kv_pool_layer_count() * spec.page_size_bytes // self.page_size


def use_pages(kv_cache_dtype: str, scales: Sequence[tuple[float, float]] | None = None) -> None:
    """Makes the engines of this process use pages; `scales` has one pair per layer, by default 1."""
    PagedPool.kv_cache_dtype, PagedPool.scales = kvjax.parse_kv_cache_dtype(kv_cache_dtype), scales
    tp_worker.ModelRunner = PagedModelRunner
