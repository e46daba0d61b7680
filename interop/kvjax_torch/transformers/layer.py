"""A layer of `KvjaxCache`: its pages, how they are written and what reads them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from kvjax import (
    MAX_SCALE,
    MIN_SCALE,
    AttentionSpec,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    KVCacheWarning,
    UnsupportedError,
)
from kvjax.ops.options import MAX_DECODE_Q_LEN
from kvjax_torch.arguments.dtypes import torch_dtype
from kvjax_torch.arguments.plan import SoftmaxOptions
from kvjax_torch.attention import paged_attention, ragged_paged_attention
from kvjax_torch.hadamard import hadamard_transform
from kvjax_torch.ops import gather_kv, reshape_and_cache_flash
from kvjax_torch.pages import split_kv_cache
from kvjax_torch.transformers.block_table import AppendStep
from kvjax_torch.transformers.steps import Steps
from kvjax_torch.window_attention import exact_window_attention, write_exact_window

NAME = "kvjax"
"""The name of this attention in transformers."""

IN_PAGES = (
    f"keys and values of a KvjaxCache are in pages, which transformers' attention interface alone can read, with"
    f" attn_implementation={NAME!r}; expected 'sdpa' or 'eager' for a model that computes with them itself"
)

NVFP4_HEADROOM = 16
"""The factor by which later tokens may exceed a layer's first ones before NVFP4 clips them, with the default scale.

The largest element of the first tokens then has the block scale 448 / 16 = 28. The smallest normal block scale is 2^-6,
so blocks whose largest element is down to 1/1792 of that one keep their full precision.
"""


class PagedStates:
    """The result of `KvjaxCache.update` under `kvjax_attention`, which alone can read it.

    Attributes:
      layer: the layer of the cache.
      keys: the new tokens' keys, not stored yet: `[num_seqs, num_kv_heads, num_new_tokens, head_size]`.
      values: the same for the values.
    """

    __slots__ = ("keys", "layer", "values")

    def __init__(self, layer: KvjaxLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name}: {IN_PAGES}")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        raise KVCacheTypeError(f"{getattr(function, '__name__', function)}: {IN_PAGES}")


def attends_to_pages(config: Any) -> bool:
    """Whether the attention of a model of this (text) configuration is `kvjax_attention`."""
    return bool(config._attn_implementation == NAME)


class KvjaxLayer(CacheLayerMixin):
    """One layer's pages. `KvjaxCache` changes the sequences of all layers at once.

    Args:
      index: the layer's index.
      spec: the spec of its pages.
      steps: the steps of all layers.
      config: the model's (text) configuration, which says what attends.
      model_dtype: the dtype of keys and values.
      scales: decode scales of the keys and of the values; `None` for the default.
      key_rotation: whether to store keys rotated by `kvjax_torch.hadamard_transform`.

    Attributes:
      spec: the spec of the pages; from the first tokens on, with as many heads as the model stores.
      block_table: the blocks of its sequences, shared by all layers with the same window.
      kv: the pages, allocated with the first tokens. They have the shape, element type and bytes of the array in a
        `kvjax.KVCache` of this spec, which is therefore
        `KVCache(to_jax(layer.kv), layer.spec, k_scale=to_jax(layer.k_scale), v_scale=to_jax(layer.v_scale))`.
      k_scale: decode scale of the keys, a float32 tensor, set with the first tokens; a default one for NVFP4 with the
        first that are not all zeros, and 1 before.
      v_scale: the same for the values.
    """

    is_sliding = False
    is_croppable = True

    kv: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor

    def __init__(
        self,
        index: int,
        spec: AttentionSpec,
        steps: Steps,
        config: Any,
        model_dtype: torch.dtype,
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
        key_rotation: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of transformers
        if spec.is_diffkv and not spec.is_mla:
            raise KVCacheValueError(
                f"config: got head sizes {spec.head_size} of keys and {spec.head_size_v} of values, expected equal ones"
            )
        self.spec = spec
        self.block_table = steps.tables[index]
        self._index, self._steps = index, steps
        self._given_scales, self._key_rotation = scales, key_rotation
        self._scaled_from = {"k_scale": math.inf, "v_scale": math.inf}  # tokens before those that determined each
        self._config = config
        self._model_dtype = model_dtype

    @property
    def num_tokens(self) -> int:
        """Tokens of each sequence, padding included."""
        return self._steps.lengths[self._index]

    def __deepcopy__(self, memo: dict[int, Any]) -> KvjaxLayer:
        """A copy with pages of its own for the same model. It shares the configuration, which says what attends."""
        memo[id(self._config)] = self._config
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        vars(copied).pop("_halves", None)
        return copied

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the pages, zeroed, on the device of `key_states`.

        Raises:
          KVCacheTypeError: keys of another dtype than the configuration says that the model computes in.
          KVCacheValueError: keys or values of other head sizes than the configuration says, or of a number of heads
            that neither repeats nor divides the configuration's KV heads.
        """
        if key_states.dtype != self._model_dtype:
            raise KVCacheTypeError(
                f"key_states: got dtype {key_states.dtype}, expected {self._model_dtype} as the configuration says;"
                " pass model_dtype=model.dtype"
            )
        self._check_states(key_states, value_states)
        shape = self.spec.cache_shape(self.block_table.num_blocks)
        with torch.inference_mode(False):  # else steps outside inference mode could not write into them
            self.kv = torch.zeros(shape, dtype=torch_dtype(self.spec.array_dtype), device=key_states.device)
        self._steps.pages[self._index] = self.kv
        self.is_initialized = True

    @torch.compiler.disable(  # type: ignore[untyped-decorator]  # of torch
        reason="KvjaxCache keeps its block table on the host, where no graph reaches"
    )
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[PagedStates, PagedStates]:
        """Appends tokens to every sequence and reads all of them back.

        Args:
          key_states: `[num_seqs, num_kv_heads, num_new_tokens, head_size]`, of the model dtype, without gradient; under
            autocast of any dtype, since that leaves keys and values in different ones.
          value_states: the same for the values.
          args: ignored.
          kwargs: ignored.

        Returns:
          `(keys, values)`: `[num_seqs, num_kv_heads, num_tokens, head_size]` of the model dtype, contiguous like those
          of `DynamicCache()`, so that attention runs the same kernels and gives the same bits. With
          `attn_implementation="kvjax"`, the unchanged new tokens, twice, for `attend` to store and attend to.

        Raises:
          KVCacheValueError: too few free blocks, another number of sequences than before, padding that was not stored,
            or layers that a step which stopped halfway left at different lengths.
          KVCacheValueError, KVCacheTypeError: as `reshape_and_cache_flash`.
        """
        key_states, value_states = self._in_model_dtype(key_states), self._in_model_dtype(value_states)
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
        key_states = self._rotated(key_states)
        step = self._steps.join(self._index, num_seqs, num_new, key_states.device)
        self._store(key_states, value_states, step)
        keys, values = self._read(step, self.num_tokens + num_new, key_states.dtype)
        if (recent := self._steps.recent[self._index]) is not None:
            window = recent.begin(key_states, self._steps.on_host(self._index), step, self._stored())
            rows = torch.arange(num_seqs, dtype=torch.int32, device=key_states.device)
            write_exact_window(window, *_by_token(key_states, value_states), step.seq_lens, step.cu_q_lens, rows)
            recent.restore(window, keys, values)
        self._steps.leave(self._index, num_new)
        keys = self._rotated(keys)  # the rotation is its own inverse
        return keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()

    def attend(
        self,
        query: torch.Tensor,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        is_token: np.ndarray | None,
        softmax: SoftmaxOptions,
    ) -> torch.Tensor:
        """Appends tokens to every sequence and attends to its pages.

        Args:
          query: `[num_seqs, num_new_tokens, num_heads, head_size]`.
          key_states: as in `update`.
          value_states: as in `update`.
          is_token: bool `[num_seqs, num_tokens + num_new_tokens]`, False for padding, which is not stored; `None` where
            there is none.
          softmax: options of `kvjax_torch.paged_attention`; the window is that of the spec, where that has one.

        Returns:
          Of the query's shape and dtype; 0 for padding.

        Raises:
          KVCacheValueError: as `update`, or padding that differs from before.
          KVCacheValueError, KVCacheTypeError: as `reshape_and_cache_flash`.
        """
        num_seqs, num_new = query.shape[:2]
        query, key_states = self._rotated(self._in_model_dtype(query)), self._rotated(key_states)
        step = self._steps.join(self._index, num_seqs, num_new, query.device, is_token=is_token, free_passed=True)
        self._store(key_states, value_states, step)
        sequences = {"block_table": step.block_table, "seq_lens": step.seq_lens}
        arguments = self._stored() | sequences | softmax._asdict()
        if (recent := self._steps.recent[self._index]) is not None:
            del arguments["tree_mask"]  # which a window does not take
            key, value = _by_token(key_states, value_states, step.stored)
            window = recent.begin(key_states, self._steps.on_host(self._index), step, self._stored())
            rows = torch.arange(num_seqs, dtype=torch.int32, device=query.device)
            arguments |= {"key": key, "value": value, "exact_window": window, "window_rows": rows}
        with torch.autocast(query.device.type, enabled=False):
            out = _attention(query, step, arguments)
        self._steps.leave(self._index, num_new)
        return out

    def check_whole(self) -> None:
        """Checks that no step stopped halfway, before a step's mask is made or read.

        Raises:
          KVCacheValueError: as `update`, for layers of different lengths.
        """
        self._steps.check_whole(self._index)

    def _in_model_dtype(self, states: torch.Tensor) -> torch.Tensor:
        """`states`, which autocast leaves in a dtype that depends on the operations before."""
        return states.to(self._model_dtype) if torch.is_autocast_enabled(states.device.type) else states

    def _rotated(self, states: torch.Tensor) -> torch.Tensor:
        """Queries or keys `[..., head_size]` as the pages have them."""
        return hadamard_transform(states) if self._key_rotation else states

    def _check_states(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Checks the first keys and values, and takes the number of heads from them."""
        self.spec = _as_stored(self.spec, key_states, value_states)

    def _set_scales(self, key_states: torch.Tensor, value_states: torch.Tensor, step: AppendStep) -> None:
        """Sets the scales with the first tokens that determine them: zeros are stored alike under any scale."""
        if self.num_tokens > max(self._scaled_from.values()):
            return
        stored = _by_token(key_states, value_states, step.stored)
        for name, given, states, part in zip(
            self._scaled_from, self._given_scales, stored, self.spec.parts, strict=True
        ):
            if self.num_tokens > self._scaled_from[name]:
                continue
            scale = default_scale(states, part) if given is None else given.to(states.device)
            self._scaled_from[name] = math.inf if scale is None else self.num_tokens
            setattr(self, name, torch.ones((), dtype=torch.float32, device=states.device) if scale is None else scale)

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor, step: AppendStep) -> None:
        """Writes a step's tokens into its slots."""
        self._set_scales(key_states, value_states, step)
        reshape_and_cache_flash(
            *_by_token(key_states, value_states),
            slot_mapping=step.slot_mapping,
            **self._stored(),
            unique_slots=True,
        )

    def _read(self, step: AppendStep, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The first tokens of every sequence: keys and values `[num_seqs, num_tokens, num_kv_heads, head_size]`."""
        keys, values = gather_kv(block_table=step.block_table, seq_lens=step.seq_lens, **self._stored(), dtype=dtype)
        return keys[:, :num_tokens], values[:, :num_tokens]

    def _stored(self) -> dict[str, Any]:
        """The arguments of kvjax_torch's operations that say where the pages are and how they are encoded."""
        key_cache, value_cache = self._halves
        return {
            "key_cache": key_cache,
            "value_cache": value_cache,
            "kv_cache_dtype": self.spec.dtype.value,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "v_scale_layout": self.spec.v_scale_layout.value,
        }

    @functools.cached_property
    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`key_cache` and `value_cache`, as kvjax_torch's operations take them."""
        return split_kv_cache(self.kv, self.spec)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that the next `query_length` queries see, and the position of the first.

        Raises:
          KVCacheValueError: as `check_whole`.
        """
        self.check_whole()
        return self.num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each sequence, padding included."""
        return self.num_tokens

    def get_max_length(self) -> int:
        """The most tokens of a sequence, if it is the only one."""
        return self.block_table.num_blocks * self.block_table.block_size

    def offload(self) -> NoReturn:
        """Not served.

        Raises:
          UnsupportedError: always.
        """
        raise UnsupportedError(
            "offload: a KvjaxCache does not move its pages to the host; expected fewer num_blocks, a smaller"
            " kv_cache_dtype, or transformers' DynamicCache(offloading=True)"
        )

    def prefetch(self) -> NoReturn:
        """As `offload`."""
        self.offload()


def _by_token(
    key_states: torch.Tensor, value_states: torch.Tensor, stored: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step's keys and values, `[num_tokens, num_kv_heads, head_size]`; those at the indices `stored`, where given."""
    keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
    return (keys, values) if stored is None else (keys[stored], values[stored])


def _attention(query: torch.Tensor, step: AppendStep, arguments: dict[str, Any]) -> torch.Tensor:
    """Attention of a step's queries `[num_seqs, num_new_tokens, num_heads, head_size]`; 0 for padding."""
    num_new, is_exact = query.shape[1], "exact_window" in arguments
    if step.stored is None and num_new <= MAX_DECODE_Q_LEN and not is_exact:
        return paged_attention(query, **arguments)
    every_row = query.flatten(0, 1)
    rows = every_row if step.stored is None else every_row[step.stored]
    attention = exact_window_attention if is_exact else ragged_paged_attention
    out = attention(rows, cu_q_lens=step.cu_q_lens, max_q_len=num_new, **arguments)
    if step.stored is not None:
        out = torch.zeros_like(every_row).index_copy_(0, step.stored, out)
    return out.unflatten(0, query.shape[:2])


def _as_stored(spec: AttentionSpec, key_states: torch.Tensor, value_states: torch.Tensor) -> AttentionSpec:
    """`spec` with the number of heads that the model stores.

    It may repeat each KV head for its query heads or, split over several devices, hold a share of them.
    """
    num_heads, expected = key_states.shape[1], spec.num_kv_heads
    for name, states in (("key_states", key_states), ("value_states", value_states)):
        got = states.shape[1], states.shape[3]
        if got != (num_heads, spec.head_size) or not num_heads or (num_heads % expected and expected % num_heads):
            raise KVCacheValueError(
                f"{name}: got {got[0]} heads of size {got[1]}, expected {expected} of size {spec.head_size} as the"
                " configuration says, each of those repeated, or a rank's share of them"
            )
    if num_heads > expected:
        message = (
            f"key_states: got {num_heads} heads, each of the configuration's {expected} KV heads repeated: this layer"
            f" takes {num_heads // expected} times the bytes that kvjax plan counts"
        )
        warnings.warn(message, KVCacheWarning, stacklevel=2)
    return dataclasses.replace(spec, num_kv_heads=num_heads)


def default_scale(states: torch.Tensor, dtype: KVCacheDType) -> torch.Tensor | None:
    """The default decode scale of a layer in `KvjaxCache`: a float32 scalar on the device of `states`.

    For NVFP4 the host waits for the states.

    Args:
      states: the first keys, or the first values, that the layer stores.
      dtype: the dtype that they are stored in.

    Returns:
      None if all of them are zeros, which determine no scale.
    """
    if dtype.info.elements_per_scale is None:
        return torch.ones((), dtype=torch.float32, device=states.device)
    if not states.any():
        return None
    scale = states.abs().amax().float() * (NVFP4_HEADROOM / dtype.info.max)
    # Infinities and NaN determine no scale either, and leave none to later tokens.
    return torch.where(scale.isfinite() & (scale > 0), scale, 1.0).clamp(MIN_SCALE, MAX_SCALE)
