"""`KvjaxCache`: kvjax's paged cache, in any of its dtypes, for models of Hugging Face transformers.

Only this module and `transformers_attention` import transformers, and no other module of `kvjax_torch` imports them.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

import kvjax
from kvjax import (
    MAX_SCALE,
    MIN_SCALE,
    AttentionSpec,
    CacheLayout,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    KVCacheWarning,
    RequestedKVCacheDType,
    check_scale,
)
from kvjax_torch.arguments import check_scale_values
from kvjax_torch.block_table import BlockTable, Step
from kvjax_torch.dtypes import torch_dtype
from kvjax_torch.ops import Scale, gather_kv, paged_attention, ragged_paged_attention, reshape_and_cache_flash
from kvjax_torch.transformers_attention import PagedStates, attends_to_pages

MAX_DECODE_Q_LEN = 8
"""The most new tokens of a sequence that `paged_attention` serves, as in a step that verifies drafts."""

NVFP4_HEADROOM = 16
"""The factor by which later tokens may exceed a layer's first ones before NVFP4 clips them, with the default scale.

The largest element of the first tokens then has the block scale 448 / 16 = 28. The smallest normal block scale is 2^-6,
so blocks whose largest element is down to 1/1792 of that one keep their full precision.
"""


class KvjaxCache(Cache):
    """A cache for `model.generate(..., past_key_values=cache)` that stores keys and values in kvjax's pages.

    Each layer has a pool of `num_blocks` pages, allocated with its first tokens. Sequences allocate blocks as they
    grow, the same ones in every layer with the same window, and free them in `crop` and `reset`. Beams share blocks.
    Attention reads stored keys and values, those of the current step included.

    A model with `attn_implementation="kvjax"` (importing this module registers it) attends to the pages: decoding never
    makes a layer dense, padding is not stored, and layers with a sliding window free the blocks that it has passed, so
    `num_window_blocks` may be small. Attention must be causal, with or without windows, sinks and soft caps, and
    `config` must be the model's own object, `model.config`, which copies of the cache share. Under any other attention
    a layer's `update` reads all its tokens back, dequantized; every token is kept, and padding is stored like any token
    and hidden by the model's mask, as in transformers' own caches. A model may change its attention between two steps,
    unless some positions were padding.

    Some models (Falcon's newer ones) repeat each KV head for its query heads before they store it. Their layers hold
    every copy, and a `KVCacheWarning` says so with the first tokens.

    Under `torch.compile` a model's graph breaks at each layer's cache, whose block table is on the host, so
    `fullgraph=True` raises.

    Args:
      config: the model's configuration.
      num_blocks: blocks of every layer's pool: `ceil(tokens / block_size)` for each sequence, prompt included.
      num_window_blocks: blocks of the pools of layers with a sliding window, by default `num_blocks`. With
        `attn_implementation="kvjax"` each sequence needs `ceil((sliding_window - 1 + step) / block_size) + 1` of them,
        where `step` is the largest number of tokens of a forward pass: of `generate` the prompt's, or
        `prefill_chunk_size`.
      kv_cache_dtype: a name that `kvjax.parse_kv_cache_dtype` takes, or names by layers, as in
        `kvjax.resolve_layer_dtypes`; `"auto"` is what the checkpoint declares, else the model dtype.
      skip_layers: layers that keep the model dtype, likewise.
      k_scale: decode scale of the keys: a number or a tensor for every layer, or a list with one for each. By default
        1 for fp8; NVFP4 takes `16 * amax / (6 * 448)`, where `amax` is the largest magnitude that the layer stores
        while it is empty, so that nothing is clipped until a token is 16 times larger than that.
      v_scale: the same for the values.
      block_size: tokens in a block.
      layout: order of a block's inner dimensions, `"NHD"` or `"HND"`.
      v_scale_layout: order of NVFP4 V scales, `"linear"` or `"swizzled"`.
      model_dtype: the dtype that the model computes in, if it differs from `config.dtype`.

    Attributes:
      block_tables: the block table of the layers with each sliding window; that of layers without one under None.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `kvjax.ModelKVConfig.from_hf_config` and `kvjax.resolve_layer_specs`; a
        layer that keeps no keys and values of its own, or whose keys and values differ in size; a list of scales that
        does not fit the layers. When a step needs more blocks than there are, `generate` raises before it has written
        anything of that step.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        num_blocks: int,
        num_window_blocks: int | None = None,
        kv_cache_dtype: RequestedKVCacheDType = "auto",
        skip_layers: Sequence[int | str] = (),
        k_scale: Scale | Sequence[Scale] | None = None,
        v_scale: Scale | Sequence[Scale] | None = None,
        block_size: int = 16,
        layout: str | CacheLayout = "NHD",
        v_scale_layout: str = "linear",
        model_dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            of_model = isinstance(getattr(config, "config", None), PreTrainedConfig)
            raise KVCacheTypeError(
                f"config: got a {type(config).__name__}, expected a transformers configuration"
                + (": pass model.config" if of_model else "")
            )
        model = kvjax.ModelKVConfig.from_hf_config(config.to_dict(), model_dtype=model_dtype)
        if model.layers_without_cache:
            raise KVCacheValueError(
                f"config: got {len(model.layers_without_cache)} of {model.num_hidden_layers} layers without a KV cache"
                " of their own, expected a model whose layers each keep keys and values"
            )
        specs = kvjax.resolve_layer_specs(
            model,
            kv_cache_dtype,
            skip_layers=skip_layers,
            block_size=block_size,
            layout=layout,
            v_scale_layout=v_scale_layout,
        )
        k_scales, v_scales = (
            _one_a_layer(what, scale, len(specs)) for what, scale in (("k_scale", k_scale), ("v_scale", v_scale))
        )
        self.block_tables: dict[int | None, BlockTable] = {None: BlockTable(num_blocks, block_size)}
        if num_window_blocks is None:
            window_blocks, option = num_blocks, "num_blocks"
        else:
            window_blocks, option = num_window_blocks, "num_window_blocks"
        for window in {spec.sliding_window for spec in specs} - {None}:
            table = BlockTable(window_blocks, block_size, sliding_window=window, option=option)
            self.block_tables[window] = table
        text_config = config.get_text_config(decoder=True)
        model_dtype = torch_dtype(model.dtype.info.storage_dtype)
        self._kvjax_layers = [
            KvjaxLayer(spec, self.block_tables[spec.sliding_window], text_config, model_dtype, k_scale, v_scale)
            for spec, k_scale, v_scale in zip(specs, k_scales, v_scales, strict=True)
        ]
        super().__init__(layers=list(self._kvjax_layers))

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The spec of each layer's pages."""
        return tuple(layer.spec for layer in self._kvjax_layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers."""
        return sum(spec.bytes_per_token for spec in self.specs)

    def reset(self) -> None:
        """Removes every sequence and keeps the pools."""
        self._keep(0)

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Removes the last `-tokens_to_remove` tokens of every sequence; as in transformers, the number is negative.

        Raises:
          KVCacheValueError: a positive number; or a layer has freed blocks that its window would reach again. The
            tokens of the last step, or all tokens, can always be removed.
        """
        if tokens_to_remove > 0:
            raise KVCacheValueError(f"tokens_to_remove: got {tokens_to_remove}, expected 0 or a negative number")
        # Assisted decoding in transformers 5.17 passes a tensor.
        self._keep(max(self.get_seq_length() + int(tokens_to_remove), 0))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continues sequence `beam_idx[i]` as sequence `i`, without copying full blocks; the host reads `beam_idx`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continues each sequence `repeats` times, side by side."""
        for table in self.block_tables.values():
            table.select(np.repeat(np.arange(table.num_seqs), repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the sequences that `indices` names or, where it is boolean, marks."""
        on_host = indices.numpy(force=True)
        for table in self.block_tables.values():
            table.select(on_host)

    def _keep(self, num_tokens: int) -> None:
        for table in self.block_tables.values():
            table.check_length(num_tokens)
        for table in self.block_tables.values():
            table.truncate(num_tokens)
        for layer in self._kvjax_layers:
            layer.num_tokens = min(layer.num_tokens, num_tokens)


class KvjaxLayer(CacheLayerMixin):
    """One layer's pages. `KvjaxCache` changes the sequences of all layers at once.

    Attributes:
      spec: the spec of the pages; from the first tokens on, with as many heads as the model stores.
      num_tokens: tokens of each sequence, padding included.
      block_table: the blocks of its sequences, shared by all layers with the same window.
      kv: the pages, allocated with the first tokens. They have the shape, element type and bytes of the array in a
        `kvjax.KVCache` of this spec, which is therefore
        `KVCache(to_jax(layer.kv), layer.spec, k_scale=to_jax(layer.k_scale), v_scale=to_jax(layer.v_scale))`.
      k_scale: decode scale of the keys, a float32 tensor, set with the first tokens.
      v_scale: the same for the values.
    """

    is_sliding = False
    is_croppable = True

    kv: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def __init__(
        self,
        spec: AttentionSpec,
        block_table: BlockTable,
        config: Any,
        model_dtype: torch.dtype,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of transformers
        if spec.is_diffkv:
            raise KVCacheValueError(
                f"config: got head sizes {spec.head_size} of keys and {spec.head_size_v} of values, expected equal ones"
            )
        self.spec = spec
        self.num_tokens = 0
        self._given_scales = k_scale, v_scale
        self.block_table = block_table
        self._config = config
        self._model_dtype = model_dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> KvjaxLayer:
        """A copy with pages of its own for the same model, whose configuration it shares: that says which attention."""
        memo[id(self._config)] = self._config
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the pages, zeroed, on the device of `key_states`.

        Raises:
          KVCacheTypeError: keys of another dtype than the configuration says that the model computes in.
          KVCacheValueError: keys or values of other head sizes than the configuration says, or of fewer heads.
        """
        if key_states.dtype != self._model_dtype:
            raise KVCacheTypeError(
                f"key_states: got dtype {key_states.dtype}, expected {self._model_dtype} as the configuration says;"
                " pass model_dtype=model.dtype"
            )
        self.spec = _as_stored(self.spec, key_states, value_states)
        shape = self.spec.cache_shape(self.block_table.num_blocks)
        with torch.inference_mode(False):  # else steps outside inference mode could not write into them
            self.kv = torch.zeros(shape, dtype=torch_dtype(self.spec.array_dtype), device=key_states.device)
        self.is_initialized = True

    @torch.compiler.disable(  # type: ignore[untyped-decorator]  # of torch
        reason="KvjaxCache keeps its block table on the host, where no graph reaches"
    )
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[PagedStates, PagedStates]:
        """Appends tokens to every sequence and reads all of them back.

        Args:
          key_states: `[num_seqs, num_kv_heads, num_new_tokens, head_size]`, of the model dtype, without gradient.
          value_states: the same for the values.
          args: ignored.
          kwargs: ignored.

        Returns:
          `(keys, values)`: `[num_seqs, num_kv_heads, num_tokens, head_size]` of the model dtype, contiguous like those
          of `DynamicCache`, so that attention runs the same kernels and gives the same bits. With
          `attn_implementation="kvjax"`, the unchanged new tokens, twice, for `attend` to store and attend to.

        Raises:
          KVCacheValueError: too few free blocks, another number of sequences than before, or padding that was not
            stored.
          KVCacheValueError, KVCacheTypeError: as `reshape_and_cache_flash`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if attends_to_pages(self._config):
            states = PagedStates(self, key_states, value_states)
            return states, states
        if self.num_tokens and self.block_table.has_padding:
            raise KVCacheValueError(
                f"attn_implementation: got {self._config._attn_implementation!r} for a cache that was filled with"
                " 'kvjax', which stores no padding; expected 'kvjax' until the cache is reset"
            )
        num_seqs, _, num_new, _ = key_states.shape
        end = self.num_tokens + num_new
        step = self.block_table.grow(num_seqs, self.num_tokens, end, key_states.device)
        self._store(key_states, value_states, step)
        keys, values = gather_kv(
            *self._halves(),
            step.block_table,
            step.seq_lens,
            self.spec.dtype.value,
            self.k_scale,
            self.v_scale,
            v_scale_layout=self.spec.v_scale_layout.value,
            dtype=key_states.dtype,
        )
        return keys[:, :end].transpose(1, 2).contiguous(), values[:, :end].transpose(1, 2).contiguous()

    def attend(
        self,
        query: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *,
        is_token: np.ndarray | None,
        sm_scale: float | None,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Appends tokens to every sequence and attends to its pages.

        Args:
          query: `[num_seqs, num_new_tokens, num_heads, head_size]`.
          key_states: as in `update`.
          value_states: as in `update`.
          is_token: bool `[num_seqs, num_tokens + num_new_tokens]`, False for padding, which is not stored; `None` where
            there is none.
          sm_scale: as in `kvjax_torch.paged_attention`.
          sliding_window: as in `kvjax_torch.paged_attention`; that of the spec, where that has one.
          logits_soft_cap: as in `kvjax_torch.paged_attention`.
          sinks: as in `kvjax_torch.paged_attention`.

        Returns:
          Of the query's shape and dtype; 0 for padding.

        Raises:
          KVCacheValueError: as `update`, or padding that differs from before.
          KVCacheValueError, KVCacheTypeError: as `reshape_and_cache_flash`.
        """
        num_seqs, num_new = query.shape[:2]
        end = self.num_tokens + num_new
        step = self.block_table.grow(num_seqs, self.num_tokens, end, query.device, is_token=is_token, free_passed=True)
        self._store(key_states, value_states, step)
        key_cache, value_cache = self._halves()
        arguments: dict[str, Any] = {
            "key_cache": key_cache,
            "value_cache": value_cache,
            "block_table": step.block_table,
            "seq_lens": step.seq_lens,
            "kv_cache_dtype": self.spec.dtype.value,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "v_scale_layout": self.spec.v_scale_layout.value,
            "sm_scale": sm_scale,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "sinks": sinks,
        }
        if step.stored is None and num_new <= MAX_DECODE_Q_LEN:
            return paged_attention(query, **arguments)
        every_row = query.flatten(0, 1)
        rows = every_row if step.stored is None else every_row[step.stored]
        out = ragged_paged_attention(rows, cu_q_lens=step.cu_q_lens, max_q_len=num_new, **arguments)
        if step.stored is not None:
            out = torch.zeros_like(every_row).index_copy_(0, step.stored, out)
        return out.unflatten(0, (num_seqs, num_new))

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor, step: Step) -> None:
        """Writes a step's tokens into its slots."""
        if self.num_tokens == 0:
            self.k_scale, self.v_scale = (
                default_scale(states, self.spec.dtype) if given is None else given.to(states.device)
                for given, states in zip(self._given_scales, (key_states, value_states), strict=True)
            )
        if step.copy_to.numel():
            self.kv[step.copy_to] = self.kv[step.copy_from]
        reshape_and_cache_flash(
            key_states.transpose(1, 2).flatten(0, 1),
            value_states.transpose(1, 2).flatten(0, 1),
            *self._halves(),
            step.slot_mapping,
            self.spec.dtype.value,
            self.k_scale,
            self.v_scale,
            v_scale_layout=self.spec.v_scale_layout.value,
            unique_slots=True,
        )
        self.num_tokens += key_states.shape[2]

    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`key_cache` and `value_cache`, as kvjax_torch's operations take them."""
        in_tokens = (0, 2, 1, 3) if self.spec.layout is CacheLayout.HND else (0, 1, 2, 3)
        key_cache, value_cache = (half.permute(in_tokens) for half in self.kv.unbind(1))
        return key_cache, value_cache

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that the next `query_length` queries see, and the position of the first."""
        return self.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each sequence, padding included."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """The most tokens of a sequence, if it is the only one."""
        return self.block_table.num_blocks * self.block_table.block_size


def _as_stored(spec: AttentionSpec, key_states: torch.Tensor, value_states: torch.Tensor) -> AttentionSpec:
    """`spec` with the number of heads that the model stores, which may repeat each KV head for its query heads."""
    num_heads, expected = key_states.shape[1], spec.num_kv_heads
    for name, states in (("key_states", key_states), ("value_states", value_states)):
        got = states.shape[1], states.shape[3]
        if got != (num_heads, spec.head_size) or num_heads % expected:
            raise KVCacheValueError(
                f"{name}: got {got[0]} heads of size {got[1]}, expected {expected} of size {spec.head_size} as the"
                " configuration says, or each of those repeated"
            )
    if num_heads != expected:
        message = (
            f"key_states: got {num_heads} heads, each of the configuration's {expected} KV heads repeated: this layer"
            f" takes {num_heads // expected} times the bytes that kvjax plan counts"
        )
        warnings.warn(message, KVCacheWarning, stacklevel=2)
    return dataclasses.replace(spec, num_kv_heads=num_heads)


def default_scale(states: torch.Tensor, dtype: KVCacheDType) -> torch.Tensor:
    """The default decode scale of a layer in `KvjaxCache`: a float32 scalar on the device of `states`.

    Args:
      states: the first keys, or the first values, of the layer.
      dtype: the dtype of the layer's pages.
    """
    if dtype.byte_format is not KVCacheDType.NVFP4:
        return torch.ones((), device=states.device)
    scale = states.abs().amax().float() * (NVFP4_HEADROOM / dtype.info.max)
    # Zeros, infinities and NaN determine no scale.
    return torch.where(scale.isfinite() & (scale > 0), scale, 1.0).clamp(MIN_SCALE, MAX_SCALE)


def _one_a_layer(what: str, scale: Scale | Sequence[Scale] | None, num_layers: int) -> list[torch.Tensor | None]:
    if scale is None:
        return [None] * num_layers
    scales = list(scale) if isinstance(scale, (list, tuple)) else [scale] * num_layers
    if len(scales) != num_layers:
        raise KVCacheValueError(f"{what}: got {len(scales)} scales, expected one for each of {num_layers} layers")
    for one in scales:
        if not isinstance(one, torch.Tensor):
            check_scale(what, one)
    tensors = [torch.as_tensor(one, dtype=torch.float32) for one in scales]
    for tensor in tensors:
        check_scale_values({what: tensor})
    return list(tensors)
