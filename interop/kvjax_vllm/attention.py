"""A layer's attention: writes and reads its pages with `kvjax_torch`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionImpl, AttentionType, max_decode_query_len

import kvjax_torch
from kvjax import FullAttentionSpec, UnsupportedError, parse_kv_cache_dtype
from kvjax.ops import options
from kvjax.ops.route import Query, Route, route
from kvjax_torch.arguments.dtypes import numpy_dtype
from kvjax_torch.calls import choosing
from kvjax_torch.cuda import prompt_kernels, prompts
from kvjax_torch.launch import running
from kvjax_vllm.pages import cache_views
from kvjax_vllm.scales import ScaledImpl
from kvjax_vllm.step import KvjaxMetadata, StepSequences

logger = init_logger("vllm.kvjax")

VIEWS = "_kvjax_views"
"""Attribute of a layer's `kv_cache`: its views, which must not outlive it."""


class StoredPages(NamedTuple):
    """A layer's pages: `key_cache, value_cache`, and how they are stored, `kv_cache_dtype, k_scale, v_scale`."""

    caches: tuple[torch.Tensor, torch.Tensor]
    how: tuple[str, torch.Tensor, torch.Tensor]


class ArbitraryTokens(NamedTuple):
    """The query of one sequence whose tokens and pages are arbitrary, and memory for its results."""

    rows: torch.Tensor
    of: StepSequences
    out: torch.Tensor


class AttentionKeywords(TypedDict):
    """Keyword arguments of both attention operations."""

    sm_scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: torch.Tensor | None


class KvjaxImpl(ScaledImpl, AttentionImpl[KvjaxMetadata]):
    """The attention of one layer of a model."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise UnsupportedError("alibi_slopes: got slopes, expected None: kvjax has no ALiBi")
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(f"attn_type: got {attn_type!r}, expected {AttentionType.DECODER.value!r}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.vllm_config = get_current_vllm_config_or_none()
        self._sinks = sinks
        self._options: AttentionKeywords = {
            "sm_scale": self.scale,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap or None,
            "sinks": None if sinks is None else torch.empty_like(sinks, dtype=torch.float32, requires_grad=False),
        }
        self._profiled: tuple[torch.Tensor, torch.Tensor] | None = None  # query and output, until kernels are compiled
        self._serves_prompts = False  # whether kernels for prompts are compiled
        self._rotates_keys = False  # once scales are known
        self._in_fp8: bool | None = None  # whether attention to prompts uses fp8 products, once it is known
        running.prepare()  # while vLLM loads the model

    def rotate_keys(self) -> None:
        """Makes the layer store rotated keys, and rotate queries."""
        self._rotates_keys = True

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Writes a step's tokens; those beyond the slots are padding."""
        stored = self._stored(layer, kv_cache)
        rows = self._rotated(key), value
        if self._profiled is not None and key.is_cuda and not torch.cuda.is_current_stream_capturing():
            one = (x[:1].reshape(-1).view(1, *x.shape[1:]) for x in rows)  # has strides of its own
            steps = (*rows, slot_mapping), (*one, slot_mapping[:1])
            self._compile_at_once([functools.partial(_write, stored, *step) for step in steps], *self._profiled, stored)
            self._profiled = None
        _write(stored, *rows, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KvjaxMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends to a layer's pages: `[num_tokens, num_heads, head_size]`, into `output`. Padding is undefined."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale: got a scale, expected None: results are not quantized")
        query = self._rotated(query)
        if attn_metadata is None:  # vLLM measures the memory that a step takes
            self.resolve_scales(layer)
            if not self._serves_prompts:
                self._profiled = _without_memory(query), _without_memory(output)
            self._take_memory_of_prompts(query, output)
            return output.fill_(0)
        stored = self._stored(layer, kv_cache)
        if self._sinks is not None and (sinks := self._options["sinks"]) is not None:
            sinks.copy_(self._sinks.detach())  # in each step, since weights may be updated in place without notice
        if not self._serves_prompts and query.is_cuda and not torch.cuda.is_current_stream_capturing():
            self._compile_for_prompts(query, output, stored)
        if (decodes := attn_metadata.decodes) is not None:
            rows, out = query[decodes.rows], output[decodes.rows]
            if decodes.q_len:
                self._decode(rows, stored, decodes, out)
            else:  # drafts of different lengths
                self._ragged(rows, stored, decodes, out, max_prompts=0, decode_q_len=decodes.max_q_len)
        if (prompts := attn_metadata.prompts) is not None:
            rows, out = query[prompts.rows], output[prompts.rows]
            self._ragged(rows, stored, prompts, out, max_prompts=prompts.num_seqs, decode_q_len=0)
        return output

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Queries or keys as the pages have them."""
        self.known_scales()
        return kvjax_torch.hadamard_transform(x) if self._rotates_keys else x

    def _decode(self, rows: torch.Tensor, stored: StoredPages, of: StepSequences, out: torch.Tensor) -> None:
        if of.q_len > 1:
            rows, out = (x.unflatten(0, (-1, of.q_len)) for x in (rows, out))
        (key_cache, value_cache), how = stored
        kvjax_torch.paged_attention(
            rows, key_cache, value_cache, of.block_table, of.seq_lens, *how, **self._options, out=out
        )

    def _ragged(
        self,
        rows: torch.Tensor,
        stored: StoredPages,
        of: StepSequences,
        out: torch.Tensor,
        *,
        max_prompts: int,
        decode_q_len: int,
    ) -> None:
        (key_cache, value_cache), how = stored
        seqs = of.block_table, of.seq_lens, of.cu_q_lens
        kvjax_torch.ragged_paged_attention(
            rows,
            key_cache,
            value_cache,
            *seqs,
            *how,
            **self._options,
            out=out,
            max_q_len=of.max_q_len,
            max_prompts=max_prompts,
            decode_q_len=decode_q_len,
            query_quantization=max_prompts > 0 and self._attends_in_fp8(rows, out),
        )

    def _compile_at_once(
        self, writes: Sequence[Callable[[], object]], query: torch.Tensor, output: torch.Tensor, stored: StoredPages
    ) -> None:
        """Compiles the kernels of writes, decodes and prompts at once, which takes as long as those of one."""
        q_len = 1 if self.vllm_config is None else max_decode_query_len(self.vllm_config)
        decode, prompt = (self._arbitrary(query, output, stored, tokens) for tokens in (q_len, 2))
        running.compile_operations(
            (
                *writes,
                functools.partial(self._decode, decode.rows, stored, decode.of, decode.out),
                functools.partial(self._prompt, prompt, stored),
            ),
            decode.rows.device,
        )

    def _compile_for_prompts(self, query: torch.Tensor, output: torch.Tensor, stored: StoredPages) -> None:
        """Runs a prompt, because the steps before vLLM is ready have none."""
        self._prompt(self._arbitrary(query, output, stored, 2), stored)
        self._serves_prompts = True

    def _prompt(self, prompt: ArbitraryTokens, stored: StoredPages) -> None:
        self._ragged(prompt.rows, stored, prompt.of, prompt.out, max_prompts=1, decode_q_len=0)

    @staticmethod
    def _arbitrary(query: torch.Tensor, output: torch.Tensor, stored: StoredPages, num_tokens: int) -> ArbitraryTokens:
        # Kernels are compiled for the distance of rows.
        device = stored.caches[0].device
        rows = torch.empty_strided(
            (num_tokens, *query.shape[1:]), query.stride(), dtype=query.dtype, device=device
        ).zero_()
        out = torch.empty((num_tokens, *output.shape[1:]), dtype=output.dtype, device=device)
        table, seq_lens, cu_q_lens = (
            torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((1, 1), (1,), (2,))
        )
        seq_lens += num_tokens
        cu_q_lens[1:] += num_tokens
        of = StepSequences(slice(0, num_tokens), table, seq_lens, num_tokens, num_tokens, cu_q_lens)
        return ArbitraryTokens(rows, of, out)

    def _stored(self, layer: Any, kv_cache: torch.Tensor) -> StoredPages:
        views = getattr(kv_cache, VIEWS, None)
        if views is None:
            views = cache_views(kv_cache, self.head_size, self.kv_quant_mode)
            setattr(kv_cache, VIEWS, views)
        key_cache, value_cache, *scales = views
        return StoredPages((key_cache, value_cache), (self.kv_cache_dtype, *(scales or self.resolve_scales(layer))))

    def _route(self, query: torch.Tensor, output: torch.Tensor, in_fp8: bool) -> Route:
        """What serves prompts."""
        asked = Query(numpy_dtype(query.dtype), self.scale > 0, query_quantization=in_fp8)
        return route(self._spec(query, output), asked, choosing.target_of(query.device))

    def _spec(self, query: torch.Tensor, output: torch.Tensor) -> FullAttentionSpec:
        """The layer's spec, with blocks of 16 tokens: the same kernels serve any multiple."""
        dtype = str(query.dtype).removeprefix("torch.") if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        sizes = self.head_size, output.shape[-1]
        return FullAttentionSpec(16, self.num_kv_heads, *sizes, dtype=parse_kv_cache_dtype(dtype))

    def _attends_in_fp8(self, query: torch.Tensor, output: torch.Tensor) -> bool:
        """Whether vLLM's `use_prefill_query_quantization` is set, and products in fp8 serve the layer."""
        if self._in_fp8 is None:
            config = self.vllm_config
            self._in_fp8 = config is not None and config.attention_config.use_prefill_query_quantization
            if self._in_fp8 and (reason := self._route(query, output, True).why_no_prompt_kernel) is not None:
                self._in_fp8 = False
                if self._spec(query, output).dtype.is_quantized:  # not a layer that vLLM was told to skip
                    logger.warning_once("kvjax: use_prefill_query_quantization: a layer attends in 16 bits: %s", reason)
        return self._in_fp8

    def _take_memory_of_prompts(self, query: torch.Tensor, output: torch.Tensor) -> None:
        """Allocates and frees what a step of prompts takes at most: their dense keys and values, and more."""
        config = self.vllm_config
        if config is None:
            return
        longest = config.model_config.max_model_len
        if (window := self._options["sliding_window"]) is not None:
            longest = min(longest, window + config.scheduler_config.max_num_batched_tokens)
        served = self._route(query, output, self._attends_in_fp8(query, output))
        sizes = self.head_size, output.shape[-1]
        each = prompt_kernels.prompt_bytes(longest, self.num_kv_heads, sizes, served.dense_dtype.itemsize)
        dense = each * options.prompts_at_once(each, config.scheduler_config.max_num_seqs)
        if served.why_no_prompt_kernel is None:
            more = 4 * options.SPLIT_BYTES + output.nbytes  # joined in float32
        else:  # keys and values are arranged anew, and there are logits, weights and rows of a tile
            more = dense + 3 * prompts.LOGITS_BYTES + 4 * max(query.nbytes, output.nbytes)
        torch.empty(dense + more, dtype=torch.uint8, device=query.device)


def _write(stored: StoredPages, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    (key_cache, value_cache), how = stored
    kvjax_torch.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, *how, unique_slots=True)


def _without_memory(x: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same shape and strides; `x.to("meta")` does not keep the strides of views."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
