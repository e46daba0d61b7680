"""Runs each kind of kernel, for tools that inspect running kernels on a GPU.

The kinds are a write and a gather of every storage dtype, in NHD and HND, with linear and swizzled V scales, with one
scale and with one per head; each write with repeated slots, and with slots that are promised to be unique. From the
root of the source tree, with a Python whose jax sees the GPU:

    export XLA_PYTHON_CLIENT_ALLOCATOR=platform
    compute-sanitizer --tool memcheck --kernel-regex kns=mosaic python3 tools/sanitize_kernels.py
    compute-sanitizer --tool racecheck --kernel-regex kns=mosaic python3 tools/sanitize_kernels.py
    ncu --clock-control none -k regex:mosaic --set full python3 tools/sanitize_kernels.py --dtype nvfp4

That allocator makes a separate allocation for each array. By default arrays share one, and memcheck misses accesses
past the end of an array. For meaningful times, use `--num-tokens 65536 --num-kv-heads 8`.

`--attention` also runs the kernels of `paged_attention`, on whole sequences and on parts; `--prompts` those of prompts,
with products in fp8 too where these serve the dtype; `--windows` a step of prompts and one of sequences that decode,
with an exact window whose ring they write. `--layouts` leaves out others.

`--latents` runs the kernels of latents (MLA) instead: of every dtype, with 64 and with 32 rope elements, the write, the
write with rotation (of neighbours where slots are repeated, of halves where they are unique) and the gather of ranges;
with `--attention` those of `mla_paged_attention`, for 16 and for 64 heads, and from torch those that pack ragged
queries. On Hopper 16 heads over quantized latents take the kernel for few rows, all else takes `wgmma`'s.

`--dense` runs those of `ragged_attention` instead, over keys and values of equal and of different sizes.

`--from-torch` launches the kernels from torch instead, as `kvjax_torch` compiles them for any number of tokens, on
tensors that start between multiples of 256 bytes. The memory is then torch's: use
`export PYTORCH_NO_CUDA_MEMORY_CACHING=1` for separate allocations.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "interop"))

from kvjax import (
    MLA_KV_CACHE_DTYPES,
    STORED_KV_CACHE_DTYPES,
    CacheLayout,
    ExactWindow,
    FullAttentionSpec,
    KVCache,
    KVCacheDType,
    MLAAttentionSpec,
    StepMetadata,
    VScaleLayout,
    attend,
    concat_and_cache_mla,
    gather_kv,
    gather_mla,
    mla_paged_attention,
    paged_attention,
    ragged_attention,
    ragged_paged_attention,
    reshape_and_cache_flash,
    rope_and_cache_mla,
)
from kvjax.kernels import codecs
from kvjax.ops.route import Query, route, why_no_query_quantization

if TYPE_CHECKING:
    import torch

_write = jax.jit(reshape_and_cache_flash, static_argnames=("implementation", "unique_slots"), donate_argnames="cache")
_gather = jax.jit(gather_kv, static_argnames="implementation")
_LIMITS = "max_q_len", "max_prompts", "query_quantization"
_ATTENTION = {
    operation.__name__: jax.jit(operation, static_argnames=("implementation", "sliding_window", "return_lse", *options))
    for operation, options in ((paged_attention, ()), (ragged_paged_attention, _LIMITS))
}
_attend_step = jax.jit(attend, static_argnames="implementation", donate_argnames=("cache", "exact_window"))
_attend_dense = jax.jit(ragged_attention, static_argnames=("implementation", "causal", "return_lse"))
_STATIC = "implementation", "unique_slots"
_concat = jax.jit(concat_and_cache_mla, static_argnames=_STATIC, donate_argnames="cache")
_rope = jax.jit(rope_and_cache_mla, static_argnames=(*_STATIC, "is_neox"), donate_argnames="cache")
_gather_ranges = jax.jit(gather_mla, static_argnames=("implementation", "num_tokens", "dtype"))
_attend_latents = jax.jit(
    mla_paged_attention, static_argnames=("implementation", "sliding_window", "return_lse", "sm_scale")
)

_CHUNKS, _DECODES = (70, 35), (1, 1)
"""Query tokens of two sequences: of prompts, and of a step in which they decode."""

_DENSE = [(sizes, causal) for sizes in ((192, 128), (128, 128), (64, 48)) for causal in (True, False)]
"""Sizes of dense keys and values, and whether attention is causal."""

_WINDOW = 24
"""Tokens of exact windows."""

_OFFSET, _POISON = 16, 0xAB
"""Offset in bytes of tensors from a multiple of 256, and the fill byte before them."""


def kinds(
    dtypes: Sequence[KVCacheDType], num_kv_heads: int, head_size: int
) -> Iterator[tuple[FullAttentionSpec, tuple[int, ...]]]:
    """Yields every spec that has kernels of its own, and the shape of its scales."""
    for dtype, layout, v_scale_layout in itertools.product(dtypes, CacheLayout, VScaleLayout):
        if v_scale_layout is VScaleLayout.SWIZZLED and not dtype.parts[1].info.elements_per_scale:
            continue
        choices = {"dtype": dtype, "layout": layout, "v_scale_layout": v_scale_layout}
        spec = FullAttentionSpec(16, num_kv_heads, head_size, **choices)
        yield spec, ()
        if spec.dtype in (KVCacheDType.FP8_E4M3, KVCacheDType.FP8_E5M2):
            yield spec, (num_kv_heads,)


def latent_kinds(dtypes: Sequence[KVCacheDType]) -> Iterator[MLAAttentionSpec]:
    """Yields specs of latents of every dtype, with two sizes of rope keys."""
    for dtype, rope in itertools.product(dtypes, (64, 32)):
        yield MLAAttentionSpec(16, 512, rope, dtype=dtype)


def attention_calls(
    spec: FullAttentionSpec, attends: bool, has_prompts: bool
) -> Iterator[tuple[str, tuple[int, ...], dict[str, object]]]:
    """Yields calls of attention: the operation, its query tokens of two sequences, and its options."""
    asked = Query(np.dtype(jnp.bfloat16))
    for window in (None, 20):
        if attends:
            yield "paged_attention", (2, 2), {"sliding_window": window, "return_lse": True}
        if has_prompts:
            options = {"sliding_window": window, "max_q_len": max(_CHUNKS), "max_prompts": 2, "return_lse": True}
            yield "ragged_paged_attention", _CHUNKS, options
            if why_no_query_quantization(spec, asked) is None:
                yield "ragged_paged_attention", _CHUNKS, options | {"query_quantization": True}


class Batch(NamedTuple):
    """Two sequences in a cache's blocks, one of them in the opposite order, and what kernels are called with.

    Attributes:
      table: their blocks.
      lengths: their tokens.
      calls: calls of attention, with their queries and the bounds of the sequences' rows, None where all have as many.
      steps: of exact windows, the query, keys, values and the bounds of each step.
    """

    table: np.ndarray
    lengths: np.ndarray
    calls: list[tuple[str, jax.Array, np.ndarray | None, dict[str, object]]]
    steps: list[tuple[jax.Array, jax.Array, jax.Array, np.ndarray]]


def _batch(rng: np.random.Generator, spec: FullAttentionSpec, num_blocks: int, args: argparse.Namespace) -> Batch:
    table, num_slots = np.arange(num_blocks, dtype=np.int32), num_blocks * spec.block_size
    batch = Batch(np.stack([table, table[::-1]]), np.int32([num_slots, num_slots // 2 + 3]), [], [])
    if route(spec, Query(np.dtype(jnp.bfloat16)), None).why_no_decode_kernel is not None:
        return batch
    heads = 4 * spec.num_kv_heads, spec.num_kv_heads, spec.num_kv_heads
    for name, q_lens, options in attention_calls(spec, args.attention, args.prompts):
        is_ragged = name == "ragged_paged_attention"
        rows = (sum(q_lens),) if is_ragged else (len(q_lens), q_lens[0])
        query = _normal(rng, *rows, heads[0], spec.head_size)
        batch.calls.append((name, query, _bounds(q_lens) if is_ragged else None, options))
    for q_lens in (_CHUNKS, _DECODES) if args.windows else ():
        bounds = _bounds(np.minimum(q_lens, batch.lengths))
        query, key, value = (_normal(rng, bounds[-1], number, spec.head_size) for number in heads)
        batch.steps.append((query, key, value, bounds))
    return batch


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)


def _bounds(q_lens: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *q_lens], dtype=np.int32)


def run(spec: FullAttentionSpec, scale_shape: tuple[int, ...], num_tokens: int, args: argparse.Namespace) -> None:
    """Writes a whole cache, except tokens without a slot or with another's, and reads all of it.

    Then repeats it with unique slots, some of them invalid, and the promise that they are unique.
    """
    rng = np.random.default_rng(0)
    num_blocks = -(-num_tokens // spec.block_size)
    slots, unique_slots = _slots(rng, num_tokens, num_blocks * spec.block_size)
    key, value = (_normal(rng, num_tokens, spec.num_kv_heads, spec.head_size) for _ in range(2))
    scales = {name: jnp.full(scale_shape, 0.02, jnp.float32) for name in ("k_scale", "v_scale")}
    batch = _batch(rng, spec, num_blocks, args)
    for slot_mapping, is_unique in ((slots, False), (unique_slots, True)):
        cache = KVCache.allocate(spec, num_blocks)
        if args.from_torch:
            _run_from_torch(spec, is_unique, batch, key, value, cache.kv, slot_mapping, *scales.values())
            continue
        options = {"unique_slots": is_unique, "implementation": "mosaic"}
        cache = _write(key, value, cache, slot_mapping, **scales, **options)
        jax.block_until_ready(_gather(cache, batch.table, batch.lengths, **scales, implementation="mosaic"))
        for name, query, bounds, options in batch.calls:
            sequences = batch.table, batch.lengths, *(() if bounds is None else (bounds,))
            jax.block_until_ready(
                _ATTENTION[name](query, cache, *sequences, **scales, **options, implementation="mosaic")
            )
        window = ExactWindow.allocate(spec, 2, _WINDOW)
        for *rows, bounds in batch.steps:
            step = StepMetadata(batch.table, batch.lengths, bounds, np.resize(slots, bounds[-1]), np.int32([1, 0]))
            out, cache, window = _attend_step(
                *rows, cache, step, exact_window=window, **scales, implementation="mosaic"
            )
            jax.block_until_ready(out)


def _slots(rng: np.random.Generator, num_tokens: int, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns slots, some of no cache: some of two tokens, and unique ones."""
    unique = rng.permutation(num_slots)[:num_tokens].astype(np.int32)
    unique[5::7], unique[6::7] = -1, num_slots
    repeated = unique.copy()
    repeated[4::7] = np.resize(repeated[3::7], repeated[4::7].shape)
    return repeated, unique


@contextlib.contextmanager
def _in_torch(*arrays: jax.Array) -> Iterator[list[torch.Tensor]]:
    """Copies to torch's memory; memcheck checks accesses past its end, this those before its start."""
    import torch

    import kvjax_torch

    memories = []

    def copied(array: jax.Array) -> torch.Tensor:
        tensor = kvjax_torch.to_torch(array)
        memories.append(torch.full((_OFFSET + array.nbytes,), _POISON, dtype=torch.uint8, device=tensor.device))
        return memories[-1][_OFFSET:].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    yield [copied(array) for array in arrays]
    if any((memory[:_OFFSET] != _POISON).any() for memory in memories):
        raise AssertionError("a kernel wrote before the start of a tensor")


def _run_from_torch(spec: FullAttentionSpec, unique_slots: bool, batch: Batch, *given: jax.Array | np.ndarray) -> None:
    calls = [x for _, *arrays, _ in batch.calls for x in arrays if x is not None]
    arrays = *given, batch.table, batch.lengths, *calls, *itertools.chain(*batch.steps)
    with _in_torch(*jax.block_until_ready([jnp.asarray(x) for x in arrays])) as tensors:
        _run_on_tensors(spec, unique_slots, batch, iter(tensors))


def _run_on_tensors(spec: FullAttentionSpec, unique_slots: bool, batch: Batch, tensors: Iterator[torch.Tensor]) -> None:
    import kvjax_torch

    key, value, kv, slots, k_scale, v_scale, table, lengths = itertools.islice(tensors, 8)
    caches, stored = kvjax_torch.split_kv_cache(kv, spec), (spec.dtype.value, k_scale, v_scale)
    layout = {"v_scale_layout": spec.v_scale_layout.value}
    kvjax_torch.reshape_and_cache_flash(key, value, *caches, slots, *stored, **layout, unique_slots=unique_slots)
    keys, values = kvjax_torch.gather_kv(*caches, table, lengths, *stored, **layout)
    keys.cpu(), values.cpu()  # arrays are freed only after this
    for name, _, bounds, options in batch.calls:
        query, sequences = next(tensors), (table, lengths, *(() if bounds is None else (next(tensors),)))
        out, lse = getattr(kvjax_torch, name)(query, *caches, *sequences, *stored, **layout, **options)
        out.cpu(), lse.cpu()
    heads = spec.num_kv_heads, spec.head_size
    window = kvjax_torch.ExactWindow.allocate(2, _WINDOW, *heads, dtype=key.dtype, device=key.device)
    for _ in batch.steps:
        *rows, bounds = itertools.islice(tensors, 4)
        given = *rows, *caches, table, lengths, bounds, window, lengths.new_tensor([1, 0])
        kvjax_torch.exact_window_attention(*given, *stored, **layout).cpu()


def run_latents(spec: MLAAttentionSpec, num_tokens: int, is_from_torch: bool, attends: bool = False) -> None:
    """As `run` with latents: writes them, writes them with rotated rope keys, and gathers ranges of two sequences."""
    rng = np.random.default_rng(0)
    num_blocks = -(-num_tokens // spec.block_size)
    num_slots = num_blocks * spec.block_size

    normal = functools.partial(_normal, rng)
    slots, unique_slots = _slots(rng, num_tokens, num_slots)
    rank, rope = spec.part_sizes
    kv_c, k_pe, q_pe = normal(num_tokens, rank), normal(num_tokens, rope), normal(num_tokens, 3, rope)
    rotation = rng.permutation(num_tokens).astype(np.int32), normal(num_tokens, rope)
    blocks, lengths = np.arange(num_blocks, dtype=np.int32), np.int32([num_slots, num_slots // 2 + 3])
    table = np.stack([blocks, np.roll(blocks, 1)])  # neighbours in one page, and in pages that are not
    table[1, -1] = num_blocks  # which is none
    starts = np.int32([1, num_slots - lengths[1] - 1])
    bounds = np.int32([0, num_slots - 1, num_slots - 1 + lengths[1]])
    ranges = table, bounds, starts
    queries = [(normal(2, 1, heads, rank), normal(2, 1, heads, rope)) for heads in _heads(spec) if attends]
    for slot_mapping, is_unique in ((slots, False), (unique_slots, True)):
        cache, scale = KVCache.allocate(spec, num_blocks), jnp.float32(0.02)
        if is_from_torch:
            arrays = kv_c, k_pe, q_pe, cache.kv, slot_mapping, *rotation, *ranges, lengths, scale, *sum(queries, ())
            with _in_torch(*jax.block_until_ready([jnp.asarray(x) for x in arrays])) as tensors:
                _run_latents_on_tensors(spec, is_unique, *tensors)
            continue
        options = {"scale": scale, "implementation": "mosaic"}
        cache = _concat(kv_c, k_pe, cache, slot_mapping, **options, unique_slots=is_unique)
        choices = {**options, "unique_slots": is_unique, "is_neox": is_unique}
        rotated, cache = _rope(q_pe, kv_c, k_pe, cache, slot_mapping, *rotation, **choices)
        num_rows = int(bounds[-1]) + 3
        gathered = _gather_ranges(cache, *ranges[:2], seq_starts=starts, num_tokens=num_rows, **options)
        jax.block_until_ready((rotated, gathered))
        for query, window in itertools.product(queries, (None, 20)):
            attention = {**options, "sm_scale": 0.1, "sliding_window": window, "return_lse": True}
            jax.block_until_ready(_attend_latents(*query, cache, table, lengths, **attention))


def _heads(spec: MLAAttentionSpec) -> list[int]:
    """Returns numbers of query heads that kernels serve, for each kernel one."""
    query = Query(np.dtype(jnp.bfloat16))
    return [heads for heads in (16, 64) if route(spec, query._replace(rows=heads), None).why_no_decode_kernel is None]


def _run_latents_on_tensors(spec: MLAAttentionSpec, unique_slots: bool, *tensors: torch.Tensor) -> None:
    import torch

    import kvjax_torch

    kv_c, k_pe, q_pe, cache, slots, positions, cos_sin_cache, table, bounds, starts, lengths, scale, *rest = tensors
    stored = spec.dtype.value, scale
    kvjax_torch.concat_and_cache_mla(kv_c, k_pe, cache, slots, *stored, unique_slots=unique_slots)
    turned, rope = (positions, q_pe, k_pe, kv_c, cos_sin_cache, unique_slots), {"unique_slots": unique_slots}
    kvjax_torch.concat_and_cache_mla_rope_fused(*turned, slots, cache, *stored, **rope)
    num_rows = int(bounds[-1]) + 3
    dense = kv_c.new_empty(num_rows, sum(spec.part_sizes))
    kvjax_torch.gather_and_maybe_dequant_cache(cache, dense, table, bounds, None, num_rows, *stored, starts)
    dense.cpu()  # arrays are freed only after this
    for (q_nope, q_pe), window in itertools.product(zip(rest[::2], rest[1::2], strict=True), (None, 20)):
        options = {"sm_scale": 0.1, "sliding_window": window, "return_lse": True}
        out, lse = kvjax_torch.mla_paged_attention(q_nope, q_pe, cache, table, lengths, *stored, **options)
        ends = torch.arange(3, dtype=torch.int32, device=out.device)
        packed = q_nope[:, 0], q_pe[:, 0], cache, table, lengths, ends, *stored
        rows, _ = kvjax_torch.mla_ragged_paged_attention(*packed, **options)
        out.cpu(), lse.cpu(), rows.cpu()


def run_dense(sizes: tuple[int, int], causal: bool, num_tokens: int, num_kv_heads: int, is_from_torch: bool) -> None:
    """Attends to the first half of dense tokens and to the second, but for the last three, which no sequence has."""
    rng, heads = np.random.default_rng(0), (4 * num_kv_heads, num_kv_heads, num_kv_heads)
    counts = sum(_CHUNKS) + 3, num_tokens, num_tokens
    shapes = zip(counts, heads, (sizes[0], *sizes), strict=True)
    bounds = _bounds(_CHUNKS), np.int32([0, num_tokens // 2, max(num_tokens - 3, num_tokens // 2)])
    arrays = [*(_normal(rng, *shape) for shape in shapes), *map(jnp.asarray, bounds)]
    if not is_from_torch:
        jax.block_until_ready(_attend_dense(*arrays, causal=causal, return_lse=True, implementation="mosaic"))
        return
    import kvjax_torch

    with _in_torch(*jax.block_until_ready(arrays)) as tensors:
        out, lse = kvjax_torch.ragged_attention(*tensors, causal=causal, return_lse=True)
        out.cpu(), lse.cpu()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the requested kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [dtype.value for dtype in STORED_KV_CACHE_DTYPES if dtype in codecs.DTYPES]
    latent = [dtype.value for dtype in MLA_KV_CACHE_DTYPES]
    choices = list(dict.fromkeys([*every, *latent]))
    parser.add_argument("--dtype", choices=choices, nargs="*", help="KV cache dtypes; default: all")
    parser.add_argument("--latents", action="store_true", help="run the kernels of latents (MLA) instead")
    parser.add_argument("--dense", action="store_true", help="run the kernels over dense keys and values instead")
    parser.add_argument(
        "--num-tokens",
        type=int,
        nargs="+",
        default=[33, 1001],
        help="default: one for a single program, one for several",
    )
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--attention", action="store_true", help="also run attention")
    parser.add_argument("--prompts", action="store_true", help="also run the prompt kernel")
    parser.add_argument("--windows", action="store_true", help="also run steps with an exact window")
    parser.add_argument("--layouts", choices=list(CacheLayout), nargs="*", default=list(CacheLayout))
    parser.add_argument("--from-torch", action="store_true", help="launch on torch's stream")
    args = parser.parse_args(arguments)
    if args.latents and (args.prompts or args.windows):
        parser.error("--latents excludes --prompts and --windows")
    if args.dense:
        if args.latents or args.dtype:
            parser.error("--dense excludes --latents and --dtype")
        for (sizes, causal), num_tokens in itertools.product(_DENSE, args.num_tokens):
            run_dense(sizes, causal, num_tokens, args.num_kv_heads, args.from_torch)
            print(f"attended to {num_tokens} keys of {sizes[0]} and values of {sizes[1]}, {causal=}", flush=True)
        return
    served = latent if args.latents else every
    if unserved := set(args.dtype or ()).difference(served):
        parser.error(f"--dtype: got {', '.join(sorted(unserved))}, expected some of {', '.join(served)}")
    dtypes = [KVCacheDType(name) for name in args.dtype or served]
    for latents in latent_kinds(dtypes) if args.latents else ():
        for num_tokens in args.num_tokens:
            run_latents(latents, num_tokens, args.from_torch, args.attention)
        print(f"wrote and gathered latents of {latents.dtype.value}, {latents.qk_rope_head_dim} rope", flush=True)
    for spec, scale_shape in () if args.latents else kinds(dtypes, args.num_kv_heads, args.head_size):
        if spec.layout not in args.layouts:
            continue
        for num_tokens in args.num_tokens:
            run(spec, scale_shape, num_tokens, args)
        scales = "scale per head" if scale_shape else "scale"
        print(f"wrote and gathered {spec.dtype.value} {spec.layout} {spec.v_scale_layout}, one {scales}", flush=True)


if __name__ == "__main__":
    main()
