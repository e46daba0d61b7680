"""Attention by FlashAttention-3 as vLLM builds it (`vllm.vllm_flash_attn`), if it is installed."""

from __future__ import annotations

from typing import Any

from benchmarks import workload
from benchmarks.peers.attends_flashinfer import stored_dtype
from benchmarks.peers.attention_inputs import PEER_ERROR, AttentionInputs, AttentionJob
from benchmarks.peers.in_torch import borrow, torch_peer
from benchmarks.peers.peer import Peer, Run, by_turns
from kvjax import CacheLayout, KVCacheDType

DTYPES = KVCacheDType.BFLOAT16, KVCacheDType.FP8_E4M3


def run(inputs: AttentionInputs) -> Run:
    """Attends over pages. For fp8, the query is in fp8 before the call: vLLM has a kernel for that, not timed."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    job, row = inputs.job, inputs.job.row
    query = borrow(inputs.query).flatten(0, -3)
    cu_q_lens = torch.from_numpy(row.cu_q_lens).to(query.device)
    options: dict[str, Any] = {}
    if job.dtype is KVCacheDType.FP8_E4M3:
        scale = query.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
        query = (query.float() / scale).to(torch.float8_e4m3fn)
        scales = torch.tensor(workload.SCALES, device=query.device)
        each = row.num_seqs, row.num_kv_heads
        names = "q_descale", "k_descale", "v_descale"
        options = {name: x.expand(each) for name, x in zip(names, (scale, *scales), strict=True)}

    def attend(key: Any, value: Any) -> Any:
        return flash_attn_varlen_func(
            query,
            key,
            value,
            max_seqlen_q=row.q_len,
            cu_seqlens_q=cu_q_lens,
            max_seqlen_k=row.seq_len,
            seqused_k=borrow(inputs.seq_lens),
            block_table=borrow(inputs.table),
            softmax_scale=row.head_size**-0.5,
            causal=True,
            window_size=None if row.window is None else [row.window - 1, 0],
            softcap=row.logits_soft_cap or 0.0,
            fa_version=3,
            **options,
        )

    caches = [borrow(cache.kv).view(stored_dtype(job.dtype)).unbind(1) for cache in inputs.caches]
    return inputs.run_in_torch(by_turns(attend, caches), most=PEER_ERROR)


FA3: Peer[AttentionJob, AttentionInputs] = torch_peer(
    "vLLM FA3",
    run,
    lambda job: job.dtype in DTYPES and job.row.layout is CacheLayout.NHD and not job.row.prefix_len,
    library="vllm.vllm_flash_attn",
)
