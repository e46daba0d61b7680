"""Who attends to the pages of a cache: kvjax, and what a user would pick instead. `PEERS` lists them all."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import output, workload
from benchmarks.peers import attends_flashinfer, in_torch, read
from benchmarks.peers.attention_inputs import (
    OWN_ERROR,
    PEER_ERROR,
    AttentionInputs,
    AttentionJob,
    attention,
    compiling,
    reference,
)
from benchmarks.peers.in_jax import own_peers
from benchmarks.peers.peer import Peer, Run, why_not_importable
from benchmarks.shapes import BLOCK_SIZE
from kvjax import CacheLayout, KVCacheDType


def read_run(inputs: AttentionInputs) -> Run:
    """Reads as many bytes as the pages of a call hold, each call other ones."""
    job, compiled = inputs.job, read.compiled(inputs.job.page_bytes)
    num_words = read.num_blocks(job.page_bytes) * read.BLOCK_WORDS
    words = [distinct_words(number, num_words) for number in range(job.num_caches)]

    def check(found: jax.Array) -> None:
        """Of a part: all of it would take as much memory again."""
        parts = np.asarray(words[0][: 4 * read.BLOCK_WORDS]).reshape(-1, read.VECTORS, read.LOAD_WORDS)
        expected = np.bitwise_xor.reduce(parts, axis=1).sum(-1, dtype=np.int32)
        np.testing.assert_array_equal(np.asarray(found)[: len(expected)], expected)

    return Run(lambda number: compiled(words[number % len(words)]), check)


@functools.partial(jax.jit, static_argnums=1)
def distinct_words(first: int, count: int) -> jax.Array:
    """Different ones, in a moment; they need not be random."""
    return (jnp.arange(count, dtype=jnp.int32) + first) * jnp.int32(-1_640_531_527)


def kvjax_run(inputs: AttentionInputs, *, implementation: str | None) -> Run:
    compiled = attention(inputs.job, implementation).result()
    query = inputs.call_query

    def call(number: int) -> jax.Array:
        cache = inputs.caches[inputs.cache_number(number)]
        return compiled(query, cache, *inputs.numbers, **workload.scales())

    facts = {"temporary_bytes": workload.temporary_bytes(compiled)}
    return Run(call, functools.partial(inputs.check, most=OWN_ERROR), facts=facts)


def dense_run(inputs: AttentionInputs, *, implementation: str = "cudnn") -> Run:
    """Attention of JAX to dense caches of the same tokens: no pages."""
    compiled = dense_attention(inputs.job, implementation).result()
    dense = [inputs.dense() for _ in inputs.caches]
    query = inputs.query.reshape(_dense_shape(inputs.job))

    def call(number: int) -> jax.Array:
        return compiled(query, *dense[inputs.cache_number(number)], inputs.seq_lens)

    return Run(call, functools.partial(inputs.check, most=PEER_ERROR))


def _dense_shape(job: AttentionJob) -> tuple[int, ...]:
    return job.row.num_seqs, job.row.q_len, job.row.num_heads, job.row.head_size


@functools.cache
def dense_attention(job: AttentionJob, implementation: str) -> Future[Any]:
    """`jax.nn.dot_product_attention` for a job, being compiled: `(query, key, value, seq_lens)`.

    Several query tokens of a sequence are all its tokens.
    """
    row = job.row

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, seq_lens: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"is_causal": True} if row.q_len > 1 else {"key_value_seq_lengths": seq_lens}
        return jax.nn.dot_product_attention(query, key, value, **options | {"implementation": implementation})

    dense = jax.ShapeDtypeStruct(
        (row.num_seqs, row.blocks_a_seq * BLOCK_SIZE, row.num_kv_heads, row.head_size), jnp.bfloat16
    )
    query, lengths = (
        jax.ShapeDtypeStruct(_dense_shape(job), jnp.bfloat16),
        jax.ShapeDtypeStruct(row.seq_lens.shape, jnp.int32),
    )
    return compiling(attend, query, dense, dense, lengths)


def triton_run(inputs: AttentionInputs, *, interpret: bool = False) -> Run:
    """JAX's paged attention in Triton: pages of one head each, logits not scaled."""
    compiled = triton_attention(inputs.job, interpret).result()
    pages = [[_by_head(half) for half in inputs.token_pages()] for _ in inputs.caches]
    query = (inputs.query[:, 0].astype(jnp.float32) / inputs.job.row.head_size**0.5).astype(inputs.query.dtype)

    def call(number: int) -> jax.Array:
        return compiled(query, *pages[inputs.cache_number(number)], inputs.table, inputs.seq_lens)

    return Run(call, functools.partial(inputs.check, most=PEER_ERROR))


@functools.cache
def triton_attention(job: AttentionJob, interpret: bool) -> Future[Any]:
    """That of JAX for a job, being compiled: `(query, k_pages, v_pages, table, seq_lens)`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
    row = job.row
    query = jax.ShapeDtypeStruct((row.num_seqs, row.num_heads, row.head_size), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((row.num_kv_heads, row.num_blocks, BLOCK_SIZE, row.head_size), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((row.num_seqs, row.blocks_a_seq), jnp.int32)
    lengths = jax.ShapeDtypeStruct(row.seq_lens.shape, jnp.int32)
    return compiling(functools.partial(paged_attention, interpret=interpret), query, pages, pages, table, lengths)


@jax.jit
def _by_head(pages: jax.Array) -> jax.Array:
    return pages.transpose(2, 0, 1, 3)


def torch_run(inputs: AttentionInputs) -> Run:
    """The pages of each sequence side by side, then torch's attention."""
    import torch

    row = inputs.job.row
    halves = [in_torch.borrow(cache.kv).unbind(1) for cache in inputs.caches]
    first = int(row.first_blocks[0])
    table = in_torch.borrow(inputs.table)[:, first:].long().flatten()
    query = in_torch.borrow(inputs.query).transpose(1, 2)  # [num_seqs, num_heads, q_len, head_size]
    num_tokens = row.seq_len - first * BLOCK_SIZE
    mask = None
    if row.q_len > 1:
        mask = torch.ones(row.q_len, num_tokens, dtype=torch.bool, device=query.device).tril(num_tokens - row.q_len)

    def call(number: int) -> Any:
        key, value = (
            half.index_select(0, table).view(row.num_seqs, num_tokens, row.num_kv_heads, row.head_size).transpose(1, 2)
            for half in halves[inputs.cache_number(number)]
        )
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    def check(attended: Any) -> dict[str, float]:
        return inputs.check(attended.transpose(1, 2).float().cpu().numpy(), most=PEER_ERROR)

    return Run(call, check, in_torch.wait)


TRITON_SPLITS = 16
"""Into so many equal parts it cuts every sequence."""


def _serves_triton(job: AttentionJob) -> bool:
    return _is_dense(job) and job.row.blocks_a_seq % TRITON_SPLITS == 0


def _is_dense(job: AttentionJob) -> bool:
    """Whether dense caches say all of it: bfloat16, one order of bytes, nothing masked but what is past a length."""
    row = job.row
    is_plain = row.q_len == 1 and row.window is None and row.layout is CacheLayout.NHD
    return job.dtype is KVCacheDType.BFLOAT16 and is_plain


def _serves_torch(job: AttentionJob) -> bool:
    row = job.row
    is_whole = row.seq_len % BLOCK_SIZE == 0 and (row.window or 0) % BLOCK_SIZE == 0
    is_causal = row.q_len == 1 or row.window is None
    return job.dtype is KVCacheDType.BFLOAT16 and row.layout is CacheLayout.NHD and is_whole and is_causal


def _why_no_gpu() -> str | None:
    return None if workload.is_gpu() else "needs an NVIDIA GPU"


def _why_no_triton() -> str | None:
    if reason := _why_no_gpu():
        return reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return why_not_importable("jax.experimental.pallas.ops.gpu.paged_attention")


KVJAX: Peer[AttentionJob, AttentionInputs]
KVJAX_IN_XLA: Peer[AttentionJob, AttentionInputs]
KVJAX, KVJAX_IN_XLA = own_peers(kvjax_run)
KVJAX = dataclasses.replace(KVJAX, ahead=lambda job: [attention(job, output.IMPLEMENTATION.value)])
READ = Peer[AttentionJob, AttentionInputs]("read", read_run, why_missing=_why_no_gpu)
CUDNN = Peer[AttentionJob, AttentionInputs](
    "cuDNN", dense_run, serves=_is_dense, why_missing=_why_no_gpu, ahead=lambda job: [dense_attention(job, "cudnn")]
)
TRITON = Peer[AttentionJob, AttentionInputs](
    "JAX Triton",
    triton_run,
    serves=_serves_triton,
    why_missing=_why_no_triton,
    ahead=lambda job: [triton_attention(job, False)],
)
SDPA = Peer[AttentionJob, AttentionInputs](
    "torch sdpa", torch_run, serves=_serves_torch, why_missing=in_torch.why_missing
)
BUILT = (attends_flashinfer.FA2, attends_flashinfer.XQA)
"""Whose kernels are built while the others are timed."""

PEERS = (READ, KVJAX, KVJAX_IN_XLA, CUDNN, TRITON, SDPA, *BUILT)


def compile_ahead[J: AttentionJob](jobs: Sequence[J], peers: Sequence[Peer[J, Any]]) -> None:
    """Compiles what takes longest of what these peers need for these jobs, on several cores.

    It waits for all of it: threads that lower programs keep the one that starts calls from its turn. An error is
    raised where the result is asked for.
    """
    programs: list[Future[Any]] = []
    for job in jobs:
        serving = [peer for peer in peers if peer is not READ and peer.serves(job)]
        programs += [reference(job)] if serving else []
        for peer in serving:
            programs += peer.ahead(job)
    concurrent.futures.wait(programs)
