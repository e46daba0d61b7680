"""Gathers and attention of CUDA tensors, by kernels on torch's current stream where there are any."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kvjax import UnsupportedError, kernels
from kvjax_torch.arguments.plan import AttentionPlan, GatherPlan, RangeTensors, ReadTensors
from kvjax_torch.calls import arrays, attending, choosing, gathering
from kvjax_torch.eager import dense
from kvjax_torch.eager.trees import TreeRows
from kvjax_torch.launch import running


def gather(plan: GatherPlan, tensors: ReadTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_kv` of CUDA tensors that `plan` describes; or whole sequences of latents and rope keys, of one head."""
    running.check_capability(tensors.key_cache.get_device())
    with choosing.one_at_a_time:
        call = gathering.gather_call(plan, tensors)
    running.run(call)
    keys, *values = call.tensors[-plan.cache.num_parts :]
    return keys, values[0] if values else keys[..., :0]


def gather_rows(plan: GatherPlan, tensors: RangeTensors) -> None:
    """`gather_and_maybe_dequant_cache` of CUDA tensors that `plan` describes."""
    running.check_capability(tensors.key_cache.get_device())
    with choosing.one_at_a_time:
        places = gathering.places_call(plan, tensors)
    running.run(places)
    with choosing.one_at_a_time:
        call = gathering.rows_call(plan, tensors.at(*places.tensors[-2:]))
    running.run(call)
    parts = tensors.dst.split(plan.cache.spec.part_sizes, dim=1)
    for own, filled in zip(parts, call.tensors[-plan.cache.num_parts :], strict=False):
        if own.data_ptr() != filled.data_ptr():
            own.copy_(filled)


def parts_of(plan: AttentionPlan, num_seqs: int, tensors: ReadTensors) -> Sequence[attending.AttentionPart]:
    """What the kernels are called for, one after another; nothing if torch attends.

    Raises:
      UnsupportedError: the GPU has no kernels, or none that is batch-invariant if that is requested; the workspace of
        a batch-invariant call is too large.
    """
    running.check_capability(tensors.key_cache.get_device())
    serves = attending.has_attention(plan, num_seqs, tensors)
    parts = attending.attention_parts(plan, tensors.key_cache.device) if serves else ()
    if plan.batch_invariant:  # before anything is compiled or run
        with choosing.one_at_a_time:
            for of_part, _, _ in parts:
                attending.kernels_of_call(of_part, tensors)
        if not parts and num_seqs and tensors.block_table.numel():
            raise UnsupportedError(
                f"got batch_invariant=True for a query of {plan.dtype} and a cache of {plan.cache.spec.dtype.value!r},"
                " which no kernel launched on torch's stream serves; expected False, or CPU tensors"
            )
    return parts


def attend(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    tree: TreeRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`paged_attention` of CUDA tensors that `plan` describes, into `out` if it is given.

    Kernels attend to the pages if there are kernels for such a call. There are none for a float32 query, for example.
    Otherwise torch attends to gathered keys and values.
    """
    parts = parts_of(plan, query.shape[0], tensors)
    if not parts:
        return _attend_to_gathered(plan, query, tensors, sinks, out, tree)
    _compile_parts(parts, tensors)
    if len(parts) == 1:
        return _attend_to_pages(plan, query, tensors, sinks, out, tree)
    # There are more query rows than one run takes: each takes some of the tokens, or of the heads that share a KV head.
    spec = plan.cache.spec
    out = query.new_empty((*query.shape[:3], spec.head_size_v)) if out is None else out
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    dims = spec.num_kv_heads, plan.num_heads // spec.num_kv_heads
    queries, outs, lses = (x.unflatten(2, dims) for x in (query, out, lse))
    lengths = tensors.seq_lens.clamp(0, choosing.INT32_MAX).to(torch.int32)
    for part, heads, tokens in parts:
        # A part's tokens are the last ones of sequences that end with the part.
        part_tensors = tensors._replace(seq_lens=lengths - (plan.q_len - tokens.stop))
        own_sinks = None if sinks is None else sinks.reshape(dims)[:, heads].reshape(-1)
        rows, own_tree = queries[:, tokens, :, heads].flatten(2, 3), None if tree is None else tree.of_rows(tokens)
        results = _attend_to_pages(part, rows, part_tensors, own_sinks, None, own_tree)
        for whole, result in zip((outs, lses), results, strict=True):
            whole[:, tokens, :, heads] = result.unflatten(2, (spec.num_kv_heads, -1))
    return out, lse


def _compile_parts(parts: Sequence[attending.AttentionPart], tensors: ReadTensors) -> None:
    """Compiles the kernels of the parts of a call for batches of every size."""
    places, device = arrays.page_places(parts[0].plan.cache, tensors), tensors.key_cache.device
    for plan, _, _ in parts:
        _compile_part(plan, places, device)


@functools.lru_cache(maxsize=running.REMEMBERED)
def _compile_part(plan: AttentionPlan, places: arrays.PagePlaces, device: torch.device) -> None:
    running.compile_all(_kernels_of_part(plan, places, device), device)


def kernels_of_part(plan: AttentionPlan, tensors: ReadTensors) -> list[kernels.AnyCount]:
    """The kernels of a call of one part, for batches of every size."""
    return _kernels_of_part(plan, arrays.page_places(plan.cache, tensors), tensors.key_cache.device)


def _kernels_of_part(plan: AttentionPlan, places: arrays.PagePlaces, device: torch.device) -> list[kernels.AnyCount]:
    with choosing.one_at_a_time:
        every = [attending.attention_kernels(plan, places, device, least, 1) for least in kernels.ATTENTION_BATCHES]
    return [kernel for decode, merge, _ in every for kernel in (decode, merge)]


def _attend_to_pages(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    tree: TreeRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    words = None if tree is None else tree.words(plan.window)
    decode, merge = attending.attention_calls(plan, query, tensors, sinks, out, words)
    running.run(decode)
    running.run(merge)
    out, lse = merge.tensors[-2:]
    return out, lse


def _attend_to_gathered(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    tree: TreeRows | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    gathered = gather(dense.as_gather(plan), tensors)
    if plan.cache.spec.is_mla:
        keys, values = dense.keys_of_latents(*gathered)
    else:
        keys, values = (x.transpose(1, 2) for x in gathered)
    tokens = dense.DenseTokens(keys, values, tensors.block_table, tensors.seq_lens, tensors.num_blocks, tree)
    return dense.attend(plan, query, tokens, sinks, out=out)
