"""Attention over the pages of a `KvjaxCache`, as transformers' `attn_implementation="kvjax"`.

Vision and audio towers, which keep no keys and values, attend with 'sdpa' under this name too.

In a step transformers calls `kvjax_mask`, which makes one mask for all layers, then for each layer `KvjaxCache.update`
with new keys and values, and `kvjax_attention`. Only `kvjax_attention` gets the mask, which says which tokens are
padding; so `update` returns the new states unchanged, and `kvjax_attention` stores them.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin

from kvjax import KVCacheTypeError, KVCacheValueError
from kvjax_torch.arguments.plan import SoftmaxOptions
from kvjax_torch.transformers.layer import NAME, KvjaxLayer, PagedStates

_PREPARE = inspect.signature(GenerationMixin.prepare_inputs_for_generation)
CACHE_ARGUMENT = "cache" if "cache" in _PREPARE.parameters else "past_key_values"
"""The argument of models and of `generate` that takes a cache, and the output that returns it.

It is `"cache"` from transformers 5.24 on. Before, `generate` refuses `cache=`, but a model's `forward` ignores it.
"""


def kvjax_mask(
    *,
    attention_mask: torch.Tensor | None,
    kv_length: int,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    **others: Any,
) -> torch.Tensor | None:
    """The padding of a batch, on the host, for all layers of a step; causality and windows need no mask.

    A tower gets the mask of 'sdpa'. The host waits for the mask, as it does for transformers' masks of other attention.

    Args:
      attention_mask: bool `[num_seqs, kv_length]`, False for padding, or None.
      kv_length: positions that the queries see, their own included.
      kv_offset: the first of these.
      allow_is_causal_skip: False if the model asks for a mask that is not causal, with or without a window.
      local_size: tokens of a window, or of a chunk.
      config: the model's (text) configuration, or a tower's, which has no vocabulary.
      others: arguments of the mask of 'sdpa'.

    Returns:
      `attention_mask` on the host, or None if there is no padding.

    Raises:
      KVCacheValueError: a model whose attention is not causal, or attends in chunks; or without a cache, for
        `position_ids` of several sequences in one.
    """
    if config is not None and getattr(config, "vocab_size", None) is None:
        return AttentionMaskInterface()["sdpa"](
            attention_mask=attention_mask,
            kv_length=kv_length,
            kv_offset=kv_offset,
            allow_is_causal_skip=allow_is_causal_skip,
            local_size=local_size,
            config=config,
            **others,
        )
    if not allow_is_causal_skip:
        raise KVCacheValueError(
            f"attn_implementation: got {NAME!r} for a mask that is not a causal one, with or without a sliding window;"
            " expected 'sdpa' or 'eager' for this model"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and local_size == chunk and kv_offset + kv_length > chunk:
        raise KVCacheValueError(
            f"attn_implementation: got {NAME!r} for attention in chunks of {chunk} tokens and {kv_offset + kv_length}"
            " tokens, expected 'sdpa' or 'eager' for more than a chunk"
        )
    if attention_mask is None:
        return None
    is_token = attention_mask.cpu()
    # numpy's threads need no waking, unlike torch's: a tenth of the time for a batch's mask.
    return None if is_token.numpy().all() else is_token


@torch.compiler.disable(  # type: ignore[untyped-decorator]  # of torch
    reason="KvjaxCache keeps its block table on the host, where no graph reaches"
)
def kvjax_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: PagedStates,
    value: PagedStates,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Stores a layer's new keys and values and attends to its pages, with the interface of transformers' attention.

    Attention that is not causal and gets tensors as keys is a tower's, and runs as 'sdpa'.

    Args:
      module: the model's attention.
      query: `[num_seqs, num_heads, num_new_tokens, head_size]`.
      key: what `KvjaxCache.update` returned.
      value: the same.
      attention_mask: what `kvjax_mask` returned: bool `[num_seqs, num_tokens]`, or None. Padding is not stored, and
        its results are undefined.
      dropout: 0.
      scaling: factor on the logits, by default `1 / sqrt(head_size)`.
      is_causal: whether attention is causal, by default `module.is_causal`; it must be.
      softcap: cap on the logits, as `logits_soft_cap` of `kvjax_torch.paged_attention`.
      s_aux: `[num_heads]`, as `sinks` of `kvjax_torch.paged_attention`.
      position_bias: None.
      others: `sliding_window`, if the module passes one; `cu_seq_lens_q` and `cu_seq_lens_k`, which must be None; all
        else is ignored.

    Returns:
      `(out, None)`: `[num_seqs, num_new_tokens, num_heads, head_size]`, and no weights.

    Raises:
      KVCacheTypeError: keys that are not `PagedStates`: the cache is of another class or missing, or is a `KvjaxCache`
        of another configuration object than the model's.
      KVCacheValueError: a mask of another shape, another window than the layer's spec has, dropout, a bias, packed
        sequences, or attention that is not causal; and as `KvjaxCache.update`.
    """
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not isinstance(key, PagedStates) and not is_causal:
        others |= {"dropout": dropout, "scaling": scaling, "softcap": softcap, "position_bias": position_bias}
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, is_causal=False, **others)
    if not isinstance(key, PagedStates):
        raise KVCacheTypeError(
            f"{CACHE_ARGUMENT}: got keys of type {type(key).__name__}, expected attn_implementation={NAME!r} with"
            f" {CACHE_ARGUMENT}=KvjaxCache(model.config, ...) of the same configuration object; for another cache, or"
            " none, model.set_attn_implementation('sdpa')"
        )
    for what, got, expected in (("dropout", dropout, 0), ("is_causal", is_causal, True)):
        if got != expected:
            raise KVCacheValueError(f"{what}: got {got}, expected {expected} for attn_implementation={NAME!r}")
    tensors = {"position_bias": position_bias} | {what: others.get(what) for what in ("cu_seq_lens_q", "cu_seq_lens_k")}
    for what, tensor in tensors.items():
        if tensor is not None:
            raise KVCacheValueError(f"{what}: got a tensor, expected None for attn_implementation={NAME!r}")
    layer, num_new = key.layer, key.keys.shape[2]
    if query.shape[2] != num_new:
        raise KVCacheValueError(f"query: got {query.shape[2]} tokens, expected the {num_new} of the keys")
    layer.check_whole()  # else the mask would be too short for tokens of a step that stopped halfway
    is_token = _as_padding(attention_mask, len(query), layer.num_tokens + num_new)
    sinks = None if s_aux is None else s_aux.detach().to(torch.float32)
    softmax = SoftmaxOptions(scaling, _window(layer, others), softcap, sinks)
    return layer.attend(query.transpose(1, 2), key.keys, key.values, is_token, softmax), None


def _as_padding(mask: torch.Tensor | None, num_seqs: int, num_tokens: int) -> np.ndarray | None:
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[0] != num_seqs or mask.shape[1] < num_tokens:
        raise KVCacheValueError(
            f"attention_mask: got shape {[*mask.shape]}, expected [{num_seqs}, {num_tokens}] for"
            f" attn_implementation={NAME!r}"
        )
    return np.asarray(mask[:, :num_tokens].numpy(force=True), np.bool_)


def _window(layer: KvjaxLayer, arguments: dict[str, Any]) -> int | None:
    """The window that the module passes; by default the layer's, for modules that apply it in their mask."""
    expected: int | None = layer.spec.sliding_window
    window: int | None = arguments.get("sliding_window", expected)
    if expected not in (None, window):  # the cache frees the blocks that the layer's window has passed
        raise KVCacheValueError(f"sliding_window: got {window}, expected {expected} as the configuration says")
    return window


AttentionInterface.register(NAME, kvjax_attention)
AttentionMaskInterface.register(NAME, kvjax_mask)
