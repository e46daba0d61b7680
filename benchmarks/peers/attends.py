"""Attention over the pages of a cache: kvjax and its alternatives, listed in `PEERS`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import compare, output, workload
from benchmarks.bars import NO_CASCADE
from benchmarks.measurement import OWN
from benchmarks.peers import attends_flashinfer, attends_vllm, in_torch, read
from benchmarks.peers.attention_inputs import (
    FP8_ERROR,
    OWN_ERROR,
    PEER_ERROR,
    AttentionInputs,
    AttentionJob,
    attention,
    compiling,
    dense_implementation,
    reference,
)
from benchmarks.peers.peer import Peer, Run, by_turns, own_peers, why_no_gpu, why_no_kernel
from benchmarks.shapes import BLOCK_SIZE, TIMED_DTYPES, AttentionRow
from kvjax import CacheLayout, KVCacheDType
from kvjax.ops.route import Query, why_no_query_quantization


def read_run(inputs: AttentionInputs) -> Run:
    """Reads as many bytes as the pages of a call hold; each call reads different memory."""
    job, compiled = inputs.job, read.compiled(inputs.job.page_bytes)
    words = read.distinct_words(job.page_bytes, job.num_caches)

    def check(found: jax.Array) -> None:
        """Checks only a part, because checking everything would double the memory."""
        parts = np.asarray(words[0][: 4 * read.BLOCK_WORDS]).reshape(-1, read.VECTORS, read.LOAD_WORDS)
        expected = np.bitwise_xor.reduce(parts, axis=1).sum(-1, dtype=np.int32)
        np.testing.assert_array_equal(np.asarray(found)[: len(expected)], expected)

    return Run(by_turns(compiled, [(each,) for each in words]), check)


def kvjax_run(inputs: AttentionInputs, *, implementation: str | None, most: float = OWN_ERROR, **options: Any) -> Run:
    """Attends by kvjax with `options` of `attention`."""
    compiled = attention(inputs.job, implementation, **options).result()
    numbers = inputs.numbers if options.get("cascade", True) else (inputs.table, inputs.seq_lens)
    query = inputs.query.reshape(inputs.job.query.shape)  # all calls share one query, as with other peers
    sets = [(query, cache, *numbers) for cache in inputs.caches]
    call = by_turns(functools.partial(compiled, **workload.scales()), sets)
    facts = {"temporary_bytes": workload.temporary_bytes(compiled)}
    return Run(call, functools.partial(inputs.check, most=most), facts=facts)


def dense_run(inputs: AttentionInputs) -> Run:
    """Runs JAX's attention over dense caches of the same tokens."""
    compiled = dense_attention(inputs.job).result()
    query = inputs.query.reshape(-1, inputs.job.row.q_len, *inputs.job.query_shape[-2:])
    sets = [(query, *inputs.dense(), inputs.seq_lens) for _ in inputs.caches]
    return Run(by_turns(compiled, sets), functools.partial(inputs.check, most=PEER_ERROR))


@functools.cache
def dense_attention(job: AttentionJob) -> Future[Any]:
    """Compiles `jax.nn.dot_product_attention` for a job: `(query, key, value, seq_lens)`.

    If `q_len` is greater than 1, the query covers all tokens of a sequence.
    """
    row = job.row

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, seq_lens: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"is_causal": True} if row.q_len > 1 else {"key_value_seq_lengths": seq_lens}
        return jax.nn.dot_product_attention(query, key, value, **options, implementation=dense_implementation())

    shapes = (
        (row.num_seqs, row.q_len, row.num_heads, row.head_size),
        (row.num_seqs, row.blocks_a_seq * BLOCK_SIZE, row.num_kv_heads, row.head_size),
    )
    query, dense = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return compiling(attend, query, dense, dense, jax.ShapeDtypeStruct((row.num_seqs,), jnp.int32))


def sdpa_run(inputs: AttentionInputs) -> Run:
    """Gathers the pages of each sequence, then runs torch's attention."""
    import torch

    row = inputs.job.row
    halves = [in_torch.borrow(cache.kv).unbind(1) for cache in inputs.caches]
    table = in_torch.borrow(inputs.table)[:, row.first_block :].long().flatten()
    query = in_torch.borrow(inputs.query).transpose(1, 2)  # [num_seqs, num_heads, q_len, head_size]
    num_tokens = row.seq_len - row.first_block * BLOCK_SIZE
    mask = None
    if row.q_len > 1:
        mask = torch.ones(row.q_len, num_tokens, dtype=torch.bool, device=query.device).tril(num_tokens - row.q_len)

    def attend(*halves: Any) -> Any:
        shape = row.num_seqs, num_tokens, row.num_kv_heads, row.head_size
        key, value = (half.index_select(0, table).view(shape).transpose(1, 2) for half in halves)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return attended.transpose(1, 2)

    return inputs.run_in_torch(by_turns(attend, halves), most=PEER_ERROR)


def step_in_torch_run(inputs: AttentionInputs, *, most: float = OWN_ERROR, **options: Any) -> Run:
    import kvjax_torch

    stored = inputs.job.dtype.value, *workload.SCALES
    query, *numbers = [in_torch.borrow(each) for each in (inputs.query, *inputs.numbers)]
    halves = [kvjax_torch.split_kv_cache(in_torch.borrow(cache.kv), cache.spec) for cache in inputs.caches]
    sets = [(query, *each, *numbers, *stored) for each in halves]
    options = inputs.job.limits | inputs.job.row.options | options
    attend: Any = functools.partial(kvjax_torch.ragged_paged_attention, **options)
    return inputs.run_in_torch(by_turns(attend, sets), most=most)


def _has_fp8_products(job: AttentionJob) -> bool:
    """Returns whether a step's prompts can be attended to by products in fp8."""
    is_served = why_no_query_quantization(job.spec, Query(np.dtype(workload.INPUT_DTYPE))) is None
    return is_served and not job.row.prefix_len and job.limits.get("decode_q_len", 1) < job.row.q_len


def _is_dense(job: AttentionJob) -> bool:
    """Returns whether dense attention supports a job: bfloat16 in NHD, without a window or soft cap.

    In a step, the query must cover all tokens of each sequence.
    """
    row = job.row
    is_whole = row.q_len == row.seq_len and row.num_prompts is None if row.is_step else row.q_len == 1
    is_plain = row.window is None and row.logits_soft_cap is None and row.layout is CacheLayout.NHD
    return job.dtype is KVCacheDType.BFLOAT16 and is_plain and is_whole


def _serves_torch(job: AttentionJob) -> bool:
    row = job.row
    is_whole = not row.varied and row.seq_len % BLOCK_SIZE == 0 and (row.window or 0) % BLOCK_SIZE == 0
    is_causal = row.q_len == 1 or row.window is None
    return job.dtype is KVCacheDType.BFLOAT16 and row.layout is CacheLayout.NHD and is_whole and is_causal


type AttentionPeer = Peer[AttentionJob, AttentionInputs]


def _own(
    name: str, serves: Callable[[AttentionJob], bool], *, most: float = OWN_ERROR, **options: Any
) -> AttentionPeer:
    """Returns kvjax by the implementation that the flag selects, with options of `attention`."""

    def prepare(inputs: AttentionInputs) -> Run:
        return kvjax_run(inputs, implementation=output.IMPLEMENTATION.value, most=most, **options)

    def ahead(job: AttentionJob) -> list[Future[Any]]:
        return [attention(job, output.IMPLEMENTATION.value, **options)]

    needs_gpu = options.keys() - {"cascade"}  # other options need kernels
    return Peer(name, prepare, serves, why_no_gpu if needs_gpu else why_no_kernel, ahead, own=True)


KVJAX, (_, KVJAX_IN_XLA) = _own(OWN, lambda _: True), own_peers(AttentionJob, kvjax_run)
READ: AttentionPeer = Peer("read", read_run, why_missing=why_no_gpu)
CUDNN: AttentionPeer = Peer(
    "cuDNN", dense_run, serves=_is_dense, why_missing=why_no_gpu, ahead=lambda job: [dense_attention(job)]
)
SDPA = in_torch.torch_peer("torch sdpa", sdpa_run, _serves_torch)
WITHOUT_CASCADE = _own(NO_CASCADE, lambda job: job.row.prefix_len > 0, cascade=False)
INVARIANT = _own(
    "kvjax, batch invariant",
    lambda job: not job.row.prefix_len and job.row.head_size <= 256,
    batch_invariant=True,
)
IN_TORCH: AttentionPeer = in_torch.torch_peer(
    "kvjax_torch",
    step_in_torch_run,
    lambda job: not job.row.prefix_len and job.row.layout is CacheLayout.NHD,
    own=True,
)
IN_FP8 = _own("kvjax (fp8 products)", _has_fp8_products, most=FP8_ERROR, query_quantization=True)
IN_FP8_IN_TORCH = dataclasses.replace(
    IN_TORCH,
    name="kvjax_torch (fp8 products)",
    prepare=functools.partial(step_in_torch_run, most=FP8_ERROR, query_quantization=True),
    serves=lambda job: _has_fp8_products(job) and IN_TORCH.serves(job),
)

BUILT = (attends_flashinfer.FA2, attends_flashinfer.XQA)  # their kernels build while other peers are timed
PEERS = (READ, KVJAX, INVARIANT, KVJAX_IN_XLA, CUDNN, SDPA, attends_vllm.FA3, *BUILT)
STEP_PEERS = (
    *(KVJAX, INVARIANT, WITHOUT_CASCADE, CUDNN, IN_TORCH, IN_FP8, IN_FP8_IN_TORCH),
    *(attends_vllm.FA3, attends_flashinfer.FA2, attends_flashinfer.FA3),
)
"""The peers of attention in a server step."""


def measure(
    test: output.Program,
    operation: str,
    rows: Sequence[AttentionRow],
    dtypes: Sequence[KVCacheDType] | None,
    peers: Sequence[AttentionPeer],
) -> None:
    """Measures all rows in dtypes, by default the timed ones. Peers whose kernels are still being built come last."""
    jobs = [AttentionJob(row, dtype) for row in rows for dtype in dtypes or TIMED_DTYPES]
    attends_flashinfer.build_ahead(jobs, peers)
    compile_ahead(jobs, peers)
    for is_built in (False, True):
        some = [peer for peer in peers if (peer in attends_flashinfer.KEYS) is is_built]
        compare.compare_all(test, operation, jobs, some, AttentionInputs, copies=False)


def compile_ahead(jobs: Sequence[AttentionJob], peers: Sequence[AttentionPeer]) -> None:
    """Compiles the programs of all jobs and peers in parallel.

    Waits for all of them, because threads that lower programs hold the GIL and delay the calls that are timed. The
    future's `result` raises any error.
    """
    programs: list[Future[Any]] = []
    for job in jobs:
        serving = [peer for peer in peers if peer is not READ and peer.serves(job)]
        programs += [reference(job)] if serving else []
        programs += [program for peer in serving for program in peer.ahead(job)]
    concurrent.futures.wait(programs)
