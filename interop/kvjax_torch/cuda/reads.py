"""Gathers and attention of CUDA tensors, by kernels on torch's current stream where there are any."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

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

    def attend_part(number: int, rows: torch.Tensor, own_sinks: torch.Tensor | None) -> Results:
        part, _, tokens = parts[number]
        own_tree = None if tree is None else tree.of_rows(tokens)
        own = tensors._replace(seq_lens=lengths_of_part(plan, parts[number], tensors.seq_lens))
        return _attend_to_pages(part, rows, own, own_sinks, None, own_tree)

    return by_parts(plan, parts, query, sinks, attend_part, out)


Results = tuple[torch.Tensor, torch.Tensor]
"""`[num_seqs, q_len, num_heads, head_size_v]` of the query's dtype, and float32 `[num_seqs, q_len, num_heads]`."""


def lengths_of_part(plan: AttentionPlan, part: attending.AttentionPart, lengths: torch.Tensor) -> torch.Tensor:
    """The lengths, int32, of sequences that end with a part, whose tokens are then their last ones."""
    return lengths.clamp(0, choosing.INT32_MAX).to(torch.int32) - (plan.q_len - part.tokens.stop)


def by_parts(
    plan: AttentionPlan,
    parts: Sequence[attending.AttentionPart],
    query: torch.Tensor,
    sinks: torch.Tensor | None,
    attend_part: Callable[[int, torch.Tensor, torch.Tensor | None], Results],
    out: torch.Tensor | None = None,
) -> Results:
    """Attends with more query rows than one run takes: each takes some tokens, or heads that share a KV head.

    `attend_part` is called with the number of a part, its rows and its sinks.
    """
    spec = plan.cache.spec
    out = query.new_empty((*query.shape[:3], spec.head_size_v)) if out is None else out
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    dims = spec.num_kv_heads, plan.num_heads // spec.num_kv_heads
    queries, outs, lses = (x.unflatten(2, dims) for x in (query, out, lse))
    for number, (_, heads, tokens) in enumerate(parts):
        own_sinks = None if sinks is None else sinks.reshape(dims)[:, heads].reshape(-1)
        results = attend_part(number, queries[:, tokens, :, heads].flatten(2, 3), own_sinks)
        for whole, result in zip((outs, lses), results, strict=True):
            whole[:, tokens, :, heads] = result.unflatten(2, (spec.num_kv_heads, -1))
    return out, lse


def _compile_parts(parts: Sequence[attending.AttentionPart], tensors: ReadTensors) -> None:
    """Compiles the kernels of the parts of a call for batches of every size."""
    places, device = arrays.page_places(parts[0].plan.cache, tensors), tensors.key_cache.device
    for plan, _, _ in parts:
        running.compile_once(_kernels_of_part(plan, places, device), device)


def kernels_of_part(plan: AttentionPlan, tensors: ReadTensors) -> tuple[kernels.AnyCount, ...]:
    """The kernels of a call of one part, for batches of every size."""
    return _kernels_of_part(plan, arrays.page_places(plan.cache, tensors), tensors.key_cache.device)


@functools.lru_cache(maxsize=running.REMEMBERED)
def _kernels_of_part(
    plan: AttentionPlan, places: arrays.PagePlaces, device: torch.device
) -> tuple[kernels.AnyCount, ...]:
    with choosing.one_at_a_time:
        every = [attending.attention_kernels(plan, places, device, least, 1) for least in kernels.ATTENTION_BATCHES]
    return tuple(kernel for decode, merge, _ in every for kernel in (decode, merge))


def _attend_to_pages(
    plan: AttentionPlan,
    query: torch.Tensor,
    tensors: ReadTensors,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None = None,
    tree: TreeRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    words = None if tree is None else tree.words(plan.window)
    return run_both(*attending.attention_calls(plan, query, tensors, sinks, out, words))


def run_both(decode: running.Call, merge: running.Call) -> Results:
    """Runs both calls of attention; returns the results of the second."""
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
