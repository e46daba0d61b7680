"""The write of JAX arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.kernels.aliases import Ref
from kvjax.kernels.codecs import codecs_of
from kvjax.kernels.launchable import Pages, Rows
from kvjax.kernels.write import launch_config, program
from kvjax.kernels.write.launch import write_kernel
from kvjax.kernels.write.launch_config import WriteConfig
from kvjax.kernels.write.rotation_step import Positions, Rotated, RotationStep, rotated_part
from kvjax.kernels.write.slots import Slots
from kvjax.kernels.write.transfer import WriteOperand
from kvjax.spec import AttentionSpec


class WriteArrays(NamedTuple):
    """The tokens to write, and how they are stored.

    Attributes:
      key: `[num_tokens, num_kv_heads, head_size]`, or latents `[num_tokens, kv_lora_rank]`.
      value: `[num_tokens, num_kv_heads, head_size_v]`, or rope keys `[num_tokens, qk_rope_head_dim]`.
      slot_mapping: int32 `[num_tokens]`, or int64 where x64 is on. Of tokens with the same slot the last is written;
        from `SEARCHED` tokens on slots have to be unique.
      k_scale: float32 `[1]` or `[num_kv_heads]`.
      v_scale: likewise.
      layer: int32 scalar, the layer to write. The kernel reads it, so that pages are not sliced and one kernel serves
        all layers. A layer out of range writes nothing. None for pages of one layer.
    """

    key: jax.Array
    value: jax.Array
    slot_mapping: jax.Array
    k_scale: jax.Array
    v_scale: jax.Array
    layer: jax.Array | None = None


def write(
    pages: jax.Array,
    tokens: WriteArrays,
    spec: AttentionSpec,
    config: WriteConfig,
    *,
    unique_slots: bool,
    num_layers: int = 1,
    rotated: Rotated | None = None,
) -> Any:
    """Writes tokens into flat pages, in place where the pages are donated.

    Args:
      pages: `[num_blocks, page_elements]`; of several layers `[num_blocks * num_layers, page_elements]`.
      tokens: see there.
      spec: the cache's.
      config: how the kernel is launched.
      unique_slots: whether slots are unique, so that no search is needed.
      num_layers: layers of the cache.
      rotated: queries and positions, to rotate keys and queries first.

    Returns:
      The pages; with `rotated`, the rotated queries and the pages.
    """
    key, value, slot_mapping, k_scale, v_scale, layer = tokens
    num_tokens, num_blocks = key.shape[0], pages.shape[0] // num_layers
    last_slot = min(num_blocks * spec.block_size, 1 << 31) - 1
    words_per_slot = slot_mapping.dtype.itemsize // 4
    if words_per_slot == 2:
        slot_mapping = lax.bitcast_convert_type(slot_mapping, jnp.int32).reshape(-1)

    def body(slots: Ref, *refs: Any) -> None:
        rows, (*scales, pages), others = refs[: len(codecs)], refs[len(codecs) :][:3], refs[len(codecs) + 3 :]
        operands = [
            WriteOperand(codec, Rows(own), scale, Pages(pages, regions, spec.page_size_bytes))
            for codec, own, scale, regions in zip(codecs, rows, scales, spec.regions, strict=False)
        ]
        num_searched = None if unique_slots or num_tokens >= launch_config.SEARCHED else num_tokens
        own_slots, staged = Slots(slots, words_per_slot, last_slot, num_searched), list(others)
        if layer is not None:
            number, staged = others[0][0], staged[1:]
            last = jnp.where((number >= 0) & (number < num_layers), jnp.int32(last_slot), jnp.int32(-1))
            own_slots = own_slots._replace(last_slot=last, layer=number, num_layers=num_layers)
        step = None
        if rotated is not None:
            query, positions, table, rotated_query, *staged, staged_keys = staged
            step = RotationStep(
                Rows(query),
                rotated.query.shape[1],
                Positions(positions, 1, rotated.table.shape[0] - 1),
                Rows(table),
                Rows(rotated_query),
                staged_keys,
                rotated.rotation,
            )
        program.run(own_slots, operands, staged, program.WriteCall(spec, config, num_tokens, dtype), step)

    dtype, codecs = key.dtype, codecs_of(spec)
    rows = [codec.token_rows(x) for codec, x in zip(codecs, (key, value), strict=False)]
    if rotated is not None:
        part = rotated_part(spec)
        rows[part] = rotated.rotation.as_columns((key, value)[part])
    arrays = slot_mapping, *rows, k_scale, v_scale
    rotation_arrays: list[jax.Array] = []
    if rotated is not None:
        rotation_arrays = [rotated.rotation.as_columns(rotated.query), rotated.positions, rotated.table]
    kernel = write_kernel(
        body,
        spec,
        config.tokens,
        grid=config.num_programs(num_tokens),
        out_type=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in rotation_arrays[:1]],
        rotated_dtype=None if rotated is None else dtype,
    )
    layers = [] if layer is None else [lax.optimization_barrier(layer.reshape(1))]
    # XLA on GPUs may fuse slices of stacked arrays with a kernel before or after them, and then forgets that the kernel
    # writes in place: bytes that it leaves unchanged would be lost. Nothing is fused across a barrier.
    ref = jax.new_ref(lax.optimization_barrier(pages))
    query = kernel(
        *map(lax.optimization_barrier, arrays), ref, *layers, *map(lax.optimization_barrier, rotation_arrays)
    )
    written = lax.optimization_barrier(jax.freeze(ref))
    return written if rotated is None else (rotated.rotation.from_columns(query[0], rotated.query.shape), written)
