"""`KvjaxCache`: kvjax's paged cache, in any of its dtypes, for models of Hugging Face transformers."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import numpy as np
import torch
import transformers
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

import kvjax
from kvjax import (
    AttentionSpec,
    CacheLayout,
    KVCacheTypeError,
    KVCacheValueError,
    KVCacheWarning,
    RequestedKVCacheDType,
    UnsupportedError,
    check_scale,
)
from kvjax.ops.options import as_int, kind_of, window_blocks
from kvjax_torch.arguments.checks import check_scale_values
from kvjax_torch.arguments.dtypes import torch_dtype
from kvjax_torch.arguments.scales import Scale
from kvjax_torch.transformers.attention import CACHE_ARGUMENT
from kvjax_torch.transformers.block_table import BlockTable
from kvjax_torch.transformers.latents import LatentLayer
from kvjax_torch.transformers.layer import KvjaxLayer
from kvjax_torch.transformers.recent import RecentTokens
from kvjax_torch.transformers.steps import Steps

__all__ = ["CACHE_ARGUMENT", "KvjaxCache", "KvjaxLayer"]

WINDOWS_OF_CACHE_ALONE = frozenset({"kyutai_speech_to_text", "moshi", "moshi_depth"})
"""Model types with a `sliding_window` that is not in the masks they make.

Their queries see what `DynamicCache(config=...)` returns: a window's tokens and all of the chunk. Neither a cache that
returns every token, for masks to hide some, nor attention within the window gives the same logits.
"""


class KvjaxCache(Cache):
    """A cache for `model.generate(..., cache=cache)` that stores keys and values in kvjax's pages.

    Before transformers 5.24 the argument is `past_key_values=`; `**{CACHE_ARGUMENT: cache}` fits every version. In
    older versions, a cache that is deleted before a model has stored a token in it warns (`KVCacheWarning`): it was
    passed as `cache=`.

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
    every copy, and a `KVCacheWarning` says so with the first tokens. Where KV heads are split over devices, each rank's
    cache holds its share.

    Models of multi-head latent attention (DeepSeek-V3, Kimi, Mistral 4) store latents, with `k_scale` as their scale.
    transformers expands them before it attends, so `attn_implementation="kvjax"` is refused; `v_scale`, `exact_window`
    and `key_rotation`, too.

    A step that stops halfway, out of memory for example, leaves layers at different lengths; the next step raises until
    `crop` has removed its tokens, or `reset` all. Under autocast, keys, values and queries are cast to the model dtype.

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
      k_scale: decode scale of the keys: a number or a tensor for every layer, or a list with one or None for each. By
        default 1 for fp8; NVFP4 takes `16 * amax / (6 * 448)`, where `amax` is the largest magnitude that the layer
        stores while it is empty or holds zeros alone, so that nothing is clipped until a token is 16 times larger.
      v_scale: the same for the values.
      block_size: tokens in a block.
      layout: order of a block's inner dimensions, `"NHD"` or `"HND"`.
      v_scale_layout: order of NVFP4 V scales, `"linear"` or `"swizzled"`.
      model_dtype: the dtype that the model computes in, if it differs from `config.dtype`.
      exact_window: how many of each sequence's last tokens quantized layers also keep in the model dtype, where queries
        read them; all earlier ones are read from the pages. With `attn_implementation="kvjax"` those are each query's
        last tokens, its own included; else the last tokens of what is read back. None for none.
      max_q_len: for the exact window, the most new tokens of a sequence in a step of which some may be cropped while
        all tokens of the window stay exact; for drafts, one more than their number.
      key_rotation: indices of the layers that store keys rotated by `kvjax_torch.hadamard_transform`, such as
        `kvjax.DTypeChoice.key_rotation`. Queries are rotated too, or keys that are read back, rotated back. `k_scale`
        is then that of rotated keys.

    Attributes:
      block_tables: the block table of the layers with each sliding window; that of layers without one under None.

    Raises:
      KVCacheValueError, KVCacheTypeError: as `kvjax.ModelKVConfig.from_hf_config` and `kvjax.resolve_layer_specs`; a
        layer that keeps no keys and values of its own, or something else beside them, or whose keys and values differ
        in size; a list of scales that does not fit the layers; for latents, options that they do not have. When a step
        needs more blocks than there are, `generate` raises before it has written anything of that step.
      UnsupportedError: a model whose own masks lack its sliding window (Moshi, Kyutai's speech to text).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        num_blocks: int,
        num_window_blocks: int | None = None,
        kv_cache_dtype: RequestedKVCacheDType = "auto",
        skip_layers: Sequence[int | str] = (),
        k_scale: Scale | Sequence[Scale | None] | None = None,
        v_scale: Scale | Sequence[Scale | None] | None = None,
        block_size: int = 16,
        layout: str | CacheLayout = "NHD",
        v_scale_layout: str = "linear",
        model_dtype: torch.dtype | None = None,
        exact_window: int | None = None,
        max_q_len: int = 1,
        key_rotation: Sequence[int | str] = (),
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            of_model = isinstance(getattr(config, "config", None), PreTrainedConfig)
            raise KVCacheTypeError(
                f"config: got a {type(config).__name__}, expected a transformers configuration"
                + (": pass model.config" if of_model else "")
            )
        text_config = config.get_text_config(decoder=True)
        model = kvjax.ModelKVConfig.from_hf_config(config.to_dict(), model_dtype=model_dtype)
        if model.layers_without_cache:
            raise KVCacheValueError(
                f"config: got {len(model.layers_without_cache)} of {model.num_hidden_layers} layers without a KV cache"
                " of their own, expected a model whose layers each keep keys and values"
            )
        _check_layers(text_config)
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
        if any(spec.is_mla for spec in specs):
            given: dict[str, object] = {
                "v_scale": v_scale if any(scale is not None for scale in v_scales) else None,
                "exact_window": exact_window,
            }
            given |= {
                "key_rotation": tuple(key_rotation) or None,
                "layout": None if layout in ("NHD", CacheLayout.NHD) else layout,
            }
            for what in [what for what, value in given.items() if value is not None]:
                raise KVCacheValueError(f"{what}: got {given[what]!r} for a model of latents (MLA), expected none")
        is_rotated = _rotated_layers(key_rotation, model.layer_indices, specs)
        self.block_tables: dict[int | None, BlockTable] = {None: BlockTable(num_blocks, block_size)}
        if num_window_blocks is None:
            window_blocks, option = num_blocks, "num_blocks"
        else:
            window_blocks, option = num_window_blocks, "num_window_blocks"
        for window in {spec.sliding_window for spec in specs} - {None}:
            table = BlockTable(window_blocks, block_size, sliding_window=window, option=option)
            self.block_tables[window] = table
        model_dtype = torch_dtype(model.dtype.info.storage_dtype)
        tables = [self.block_tables[spec.sliding_window] for spec in specs]
        self._steps = Steps(tables, CACHE_ARGUMENT)
        self._exact_window = _as_sizes(exact_window, max_q_len)
        if self._exact_window is not None:
            self._steps.recent = [
                RecentTokens(*self._exact_window) if spec.dtype.is_quantized else None for spec in specs
            ]
        self._kvjax_layers = [
            (LatentLayer if spec.is_mla else KvjaxLayer)(
                index, spec, self._steps, text_config, model_dtype, scales, is_rotated[index]
            )
            for index, (spec, scales) in enumerate(zip(specs, zip(k_scales, v_scales, strict=True), strict=True))
        ]
        super().__init__(layers=list(self._kvjax_layers))

    if CACHE_ARGUMENT != "cache":
        # A model's `forward` swallows `cache=` there, and no code of the cache runs.
        def __del__(self) -> None:
            layers = getattr(self, "_kvjax_layers", ())
            if layers and not any(layer.is_initialized for layer in layers):
                message = (
                    f"KvjaxCache: no model stored a token in it. A model called by itself ignores cache= before"
                    f" transformers 5.24, and this is {transformers.__version__}: pass {CACHE_ARGUMENT}="
                )
                warnings.warn(message, KVCacheWarning, stacklevel=2)

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The spec of each layer's pages."""
        return tuple(layer.spec for layer in self._kvjax_layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers."""
        return sum(spec.bytes_per_token for spec in self.specs)

    @property
    def exact_window_bytes(self) -> int:
        """Bytes that the exact window of one sequence takes in all layers, as `kvjax plan --exact-window` counts."""
        if self._exact_window is None:
            return 0
        size, max_q_len = self._exact_window
        quantized = [spec for spec in self.specs if spec.dtype.is_quantized]
        return sum(kvjax.ExactWindow.num_bytes(spec, 1, size, max_q_len=max_q_len) for spec in quantized)

    def reset(self) -> None:
        """Removes every sequence and keeps the pools."""
        self._steps.keep(0)

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Removes the last `-tokens_to_remove` tokens of every sequence; as in transformers, the number is negative.

        Raises:
          KVCacheValueError: a positive number; or a layer has freed blocks that its window would reach again. The
            tokens of the last step, or all tokens, can always be removed.
        """
        if tokens_to_remove > 0:
            raise KVCacheValueError(f"tokens_to_remove: got {tokens_to_remove}, expected 0 or a negative number")
        # Assisted decoding in transformers 5.17 passes a tensor.
        self._steps.keep(max(self.get_seq_length() + int(tokens_to_remove), 0))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continues sequence `beam_idx[i]` as sequence `i`, without copying full blocks; the host reads `beam_idx`."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continues each sequence `repeats` times, side by side."""
        self._steps.select(np.repeat(np.arange(self._steps.num_seqs), repeats))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int] | Sequence[bool]) -> None:
        """Keeps the sequences that `indices` names or, where it is boolean, marks."""
        self._steps.select(torch.as_tensor(indices).numpy(force=True))


def _as_sizes(exact_window: int | None, max_q_len: int) -> tuple[int, int] | None:
    """The sizes of an exact window, None without one."""
    most = as_int("max_q_len", max_q_len, least=1)
    if exact_window is None:
        if most > 1:
            raise KVCacheValueError(f"max_q_len: got {most} without an exact_window, which alone has room for drafts")
        return None
    sizes = as_int("exact_window", exact_window, least=1), most
    window_blocks(*sizes)  # which refuses those that are too large
    return sizes


def _rotated_layers(
    key_rotation: Sequence[int | str], indices: Sequence[int | str], specs: Sequence[AttentionSpec]
) -> list[bool]:
    """Whether each layer's keys are rotated."""
    if isinstance(key_rotation, str) or not isinstance(key_rotation, Collection):
        raise KVCacheTypeError(f"key_rotation: got {kind_of(key_rotation)}, expected the indices of layers")
    for layer in key_rotation:
        if isinstance(layer, bool) or layer not in indices:
            raise KVCacheValueError(f"key_rotation: got {layer!r}, expected indices of the {len(indices)} layers")
        if (size := specs[indices.index(layer)].head_size) % 2:
            raise KVCacheValueError(f"key_rotation: got layer {layer!r} of head_size={size}, expected an even one")
    return [layer in key_rotation for layer in indices]


def _check_layers(config: PreTrainedConfig) -> None:
    """Checks that layers of transformers' own cache keep keys and values alone, and drop none that masks would show."""
    if config.model_type in WINDOWS_OF_CACHE_ALONE:
        raise UnsupportedError(
            f"config: got a {config.model_type} model, whose masks lack its sliding window of"
            f" {config.sliding_window} tokens, expected one whose masks have it; use transformers'"
            " DynamicCache(config=model.config), which drops the tokens before it"
        )
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise KVCacheValueError(
                f"config: got a {config.model_type} model, whose layer {index} has a {type(layer).__name__} in"
                " transformers' own cache, expected layers that keep keys and values alone, and no state"
            )


def _one_a_layer(what: str, scale: Scale | Sequence[Scale | None] | None, num_layers: int) -> list[torch.Tensor | None]:
    if scale is None:
        return [None] * num_layers
    scales = list(scale) if isinstance(scale, (list, tuple)) else [scale] * num_layers
    if len(scales) != num_layers:
        raise KVCacheValueError(f"{what}: got {len(scales)} scales, expected one for each of {num_layers} layers")
    for one in scales:
        if one is not None and not isinstance(one, torch.Tensor):
            check_scale(what, one)
    tensors = [None if one is None else torch.as_tensor(one, dtype=torch.float32) for one in scales]
    for tensor in tensors:
        if tensor is not None:
            check_scale_values({what: tensor})
    return tensors
