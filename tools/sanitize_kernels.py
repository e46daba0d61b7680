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

`--attention` also runs the kernels of `paged_attention`, on whole sequences and on parts, `--prompts` the prompt
kernel; `--layouts` leaves out others.

`--from-torch` launches the kernels from torch instead, as `kvjax_torch` compiles them for any number of tokens, on
tensors that start between multiples of 256 bytes. The memory is then torch's: use
`export PYTORCH_NO_CUDA_MEMORY_CACHING=1` for separate allocations.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "interop"))

from kvjax import (
    STORED_KV_CACHE_DTYPES,
    CacheLayout,
    FullAttentionSpec,
    KVCache,
    KVCacheDType,
    VScaleLayout,
    gather_kv,
    paged_attention,
    ragged_paged_attention,
    reshape_and_cache_flash,
)
from kvjax.kernels import codecs
from kvjax.ops.route import Query, route

_write = jax.jit(reshape_and_cache_flash, static_argnames=("implementation", "unique_slots"), donate_argnames="cache")
_gather = jax.jit(gather_kv, static_argnames="implementation")
_attend = jax.jit(paged_attention, static_argnames=("implementation", "sliding_window", "return_lse"))
_attend_ragged = jax.jit(
    ragged_paged_attention, static_argnames=("implementation", "sliding_window", "max_q_len", "max_prompts")
)

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


def run(
    spec: FullAttentionSpec,
    scale_shape: tuple[int, ...],
    num_tokens: int,
    is_from_torch: bool,
    attends: bool = False,
    has_prompts: bool = False,
) -> None:
    """Writes a whole cache, except tokens without a slot or with another's, and reads all of it.

    Then repeats it with unique slots, some of them invalid, and the promise that they are unique.
    """
    rng = np.random.default_rng(0)
    num_blocks = -(-num_tokens // spec.block_size)
    unique_slots = rng.permutation(num_blocks * spec.block_size)[:num_tokens].astype(np.int32)
    unique_slots[5::7], unique_slots[6::7] = -1, num_blocks * spec.block_size
    slots = unique_slots.copy()
    slots[4::7] = np.resize(slots[3::7], slots[4::7].shape)
    shape = num_tokens, spec.num_kv_heads, spec.head_size
    key, value = (jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for _ in range(2))
    scales = {name: jnp.full(scale_shape, 0.02, jnp.float32) for name in ("k_scale", "v_scale")}
    table = np.arange(num_blocks, dtype=np.int32)[None]
    lengths = np.array([num_blocks * spec.block_size], np.int32)
    query = jnp.asarray(rng.standard_normal((2, 2, 4 * spec.num_kv_heads, spec.head_size), np.float32), jnp.bfloat16)
    chunks = jnp.asarray(rng.standard_normal((105, *query.shape[2:]), np.float32), jnp.bfloat16)
    sequences = np.concatenate([table, table[:, ::-1]]), np.array([lengths[0], lengths[0] // 2 + 3], np.int32)
    is_served = route(spec, Query(query.dtype), None).why_no_decode_kernel is None
    attends, has_prompts = attends and is_served, has_prompts and is_served
    for slot_mapping, is_unique in ((slots, False), (unique_slots, True)):
        cache = KVCache.allocate(spec, num_blocks)
        if is_from_torch:
            arrays = key, value, cache.kv, *map(jnp.asarray, (slot_mapping, table, lengths)), *scales.values()
            attention = (query, *map(jnp.asarray, sequences)) if attends else ()
            _run_from_torch(spec, is_unique, *jax.block_until_ready((*arrays, *attention)))
            continue
        options = {"unique_slots": is_unique, "implementation": "mosaic"}
        cache = _write(key, value, cache, slot_mapping, **scales, **options)
        jax.block_until_ready(_gather(cache, table, lengths, **scales, implementation="mosaic"))
        for window in (None, 20) if attends else ():
            options = {"sliding_window": window, "implementation": "mosaic", "return_lse": True}
            jax.block_until_ready(_attend(query, cache, *sequences, **scales, **options))
        for window in (None, 20) if has_prompts else ():
            options = {"sliding_window": window, "implementation": "mosaic", "max_q_len": 70, "max_prompts": 2}
            jax.block_until_ready(
                _attend_ragged(chunks, cache, *sequences, np.int32([0, 70, 105]), **scales, **options)
            )


def _run_from_torch(spec: FullAttentionSpec, unique_slots: bool, *arrays: jax.Array) -> None:
    import torch

    import kvjax_torch

    memories = []

    def copied(array: jax.Array) -> torch.Tensor:
        """Copies to torch's memory; memcheck checks accesses past its end, the caller those before its start."""
        tensor = kvjax_torch.to_torch(array)
        memories.append(torch.full((_OFFSET + array.nbytes,), _POISON, dtype=torch.uint8, device=tensor.device))
        return memories[-1][_OFFSET:].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    key, value, kv, slots, table, lengths, k_scale, v_scale, *attention = map(copied, arrays)
    scales = k_scale, v_scale
    is_hnd, pages = spec.layout is CacheLayout.HND, kv.flatten(1)
    sizes = [sum(row) // kv.element_size() for row in spec.row_bytes]
    halves = pages.split([spec.block_size * spec.num_kv_heads * size for size in sizes], dim=1)
    inner = (spec.num_kv_heads, spec.block_size) if is_hnd else (spec.block_size, spec.num_kv_heads)
    caches = tuple(half.unflatten(1, (*inner, size)) for half, size in zip(halves, sizes, strict=True))
    if is_hnd:
        caches = tuple(cache.transpose(1, 2) for cache in caches)
    dtype, layout = spec.dtype.value, {"v_scale_layout": spec.v_scale_layout.value}
    kvjax_torch.reshape_and_cache_flash(key, value, *caches, slots, dtype, *scales, **layout, unique_slots=unique_slots)
    keys, values = kvjax_torch.gather_kv(*caches, table, lengths, dtype, *scales, **layout)
    keys.cpu(), values.cpu()  # arrays are freed only after this
    for window in (None, 20) if attention else ():
        query, *sequences = attention
        options = {**layout, "sliding_window": window, "return_lse": True}
        out, lse = kvjax_torch.paged_attention(query, *caches, *sequences, dtype, *scales, **options)
        out.cpu(), lse.cpu()
    if any((memory[:_OFFSET] != _POISON).any() for memory in memories):
        raise AssertionError("a kernel wrote before the start of a tensor")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the requested kinds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dtypes = [dtype.value for dtype in STORED_KV_CACHE_DTYPES if dtype in codecs.DTYPES]
    parser.add_argument("--dtype", choices=dtypes, nargs="*", default=dtypes, help="KV cache dtypes")
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
    parser.add_argument("--prompts", action="store_true", help="also run the prompt kernel, from JAX only")
    parser.add_argument("--layouts", choices=list(CacheLayout), nargs="*", default=list(CacheLayout))
    parser.add_argument("--from-torch", action="store_true", help="launch on torch's stream")
    args = parser.parse_args(arguments)
    if args.prompts and args.from_torch:
        parser.error("--prompts excludes --from-torch")
    for spec, scale_shape in kinds([KVCacheDType(name) for name in args.dtype], args.num_kv_heads, args.head_size):
        if spec.layout not in args.layouts:
            continue
        for num_tokens in args.num_tokens:
            run(spec, scale_shape, num_tokens, args.from_torch, args.attention, args.prompts)
        scales = "scale per head" if scale_shape else "scale"
        print(f"wrote and gathered {spec.dtype.value} {spec.layout} {spec.v_scale_layout}, one {scales}", flush=True)


if __name__ == "__main__":
    main()
