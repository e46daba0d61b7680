"""The write, into caller-owned memory or JAX arrays."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.errors import UnsupportedError
from kvjax.kernels.aliases import Ref
from kvjax.kernels.codecs import codecs_of
from kvjax.kernels.launchable import (
    ANY_LENGTH,
    PAGES,
    AnyCount,
    Argument,
    Number,
    PageMemory,
    RowMemory,
    Rows,
    RowScaleMemory,
    check_row_scales,
    row_scale_arguments,
    scale_arguments,
    scales_of,
    with_origin,
)
from kvjax.kernels.target import Target
from kvjax.kernels.write import launch_config, program
from kvjax.kernels.write.launch import why_no_staging, write_kernel
from kvjax.kernels.write.launch_config import Rung, WriteConfig
from kvjax.kernels.write.rotation_step import RotatedMemory, rotated_part
from kvjax.kernels.write.slots import Slots
from kvjax.kernels.write.transfer import WriteOperand
from kvjax.kernels.write.window import LAYER, RING_PAGES, RingKind
from kvjax.kernels.write.window import update as update_ring
from kvjax.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class WriteKind:
    """What a write is compiled for.

    Attributes:
      spec: the cache's.
      rows: memory of keys and of values, or of latents and of rope keys where there are any.
      pages: memory of their pages, likewise.
      slot_dtype: int32 or int64.
      scale_sizes: elements of k_scale and v_scale, 1 or `num_kv_heads`.
      unique_slots: whether slots are unique. With `SEARCHED` tokens or more they have to be, and where `config` is
        given, this field has to say so.
      scale_pages: for keys and for values that have a scale for each token and head, the memory that the scales are
        written to, as its only region. It is passed instead of k_scale or v_scale. None for scales beside the data.
      rotated: memory of queries and positions, to rotate keys and queries first.
      num_layers: layers whose pages lie next to each other in a block; None for one. The kernel then reads which layer
        to write, so that pages are not sliced and one kernel serves all layers. A layer out of range writes nothing.
      config: the only configuration, for a known number of tokens; None for any number.
      ring: the ring of an exact window, which the first programs update with the same tokens; not with `rotated`.
    """

    spec: AttentionSpec
    rows: tuple[RowMemory, ...]
    pages: tuple[PageMemory, ...]
    slot_dtype: np.dtype[Any]
    scale_sizes: tuple[int, int]
    unique_slots: bool = False
    scale_pages: RowScaleMemory = (None, None)
    rotated: RotatedMemory | None = None
    num_layers: int | None = None
    config: WriteConfig | None = None
    ring: RingKind | None = None


@with_origin
def any_count(kind: WriteKind, target: Target | None = None) -> AnyCount:
    """The write of a kind, for any number of tokens and blocks; `target` is the GPU, where it is known.

    Returns:
      A kernel that takes slots, keys, values, the keys' and values' pages, the layer if there are several, the
      arguments of `rotated`, k_scale, v_scale, and the arguments of `ring`. With a ring, its amount is the numbers of
      tokens and of sequences.

    Raises:
      UnsupportedError: no kernel encodes the dtype, or shared memory does not hold the rows of a token.
      ValueError: as `check_row_scales`.
    """
    spec, rows, pages, rotated, scale_pages = kind.spec, kind.rows, kind.pages, kind.rotated, kind.scale_pages
    ring = kind.ring
    codecs = codecs_of(spec)
    check_row_scales(spec, pages, scale_pages)
    if reason := why_no_staging(spec, target, rotates=rotated is not None):
        raise UnsupportedError(f"{'concat_and_cache_mla' if spec.is_mla else 'reshape_and_cache_flash'}: {reason}")
    words_per_slot = np.dtype(kind.slot_dtype).itemsize // 4
    if kind.config is None:
        rungs = launch_config.rungs(spec, kind.unique_slots, rotates=rotated is not None)
    else:
        rungs = [Rung(1, kind.config)]
    thresholds = [rung.min_tokens for rung in rungs]
    rotation_arguments = () if rotated is None else rotated.arguments
    layers = () if kind.num_layers is None else (LAYER,)
    page_dtype = spec.array_dtype if spec.dtype.is_quantized else spec.storage_dtype
    as_rows = {name: codec.token_rows for name, codec in zip(("key", "value"), codecs, strict=False)}
    if rotated is not None:
        as_rows[("key", "value")[rotated_part(spec)]] = rotated.rotation.as_columns

    def body(counts: Mapping[str, Number], arrays: Mapping[str, Ref], staged: Sequence[Any]) -> None:
        if ring is None:
            return write_pages(counts, arrays, staged)
        index, first = lax.axis_index("program"), ring.num_programs(counts["num_seqs"])
        update = functools.partial(update_ring, ring, counts, arrays, index)
        program.branch(index < first, "ring", update, "pages", lambda: write_pages(counts, arrays, staged, first))

    def write_pages(
        counts: Mapping[str, Number], arrays: Mapping[str, Ref], staged: Sequence[Any], first_program: Number = 0
    ) -> None:
        num_tokens = counts["num_tokens"]
        destinations = [memory.pages(arrays[name]) for memory, name in zip(pages, PAGES, strict=False)]
        step = None
        if rotated is not None:
            *staged, staged_keys = staged
            step = rotated.step(arrays, counts["last_position"], staged_keys)
        scales, scale_destinations = scales_of(arrays, scale_pages)
        operands = [
            WriteOperand(codec, Rows(arrays[name], memory.alignment), scale, destination, scale_destination)
            for codec, name, memory, scale, destination, scale_destination in zip(
                codecs, ("key", "value"), rows, scales, destinations, scale_destinations, strict=False
            )
        ]

        def write_as(rung: Rung) -> None:
            num_searched = None if kind.unique_slots or rung.min_tokens >= launch_config.SEARCHED else num_tokens
            own_slots = Slots(arrays["slot_mapping"], words_per_slot, counts["last_slot"], num_searched)
            if kind.num_layers is not None:
                own_slots = own_slots.of_layer(arrays["layer"][0], kind.num_layers)
            call = program.WriteCall(spec, rung.config, num_tokens, rows[0].dtype, first_program)
            program.run(own_slots, operands, staged, call, step)

        def select(rung: Rung, later: Rung, write_later: Callable[[], None]) -> None:
            name, later_name = (f"from {each.min_tokens} tokens on" for each in (rung, later))
            is_later = num_tokens >= later.min_tokens
            program.branch(is_later, later_name, write_later, name, functools.partial(write_as, rung))

        # Nested branches rather than one after the other: a program that has written its tokens ends.
        write = functools.partial(write_as, rungs[-1])
        for rung, later in reversed(list(itertools.pairwise(rungs))):
            write = functools.partial(select, rung, later, write)
        write()

    def num_programs(num_tokens: int) -> int:
        return rungs[bisect.bisect_right(thresholds, num_tokens) - 1].config.num_programs(num_tokens)

    def num_programs_with_ring(amount: tuple[int, int]) -> int:
        num_tokens, num_seqs = amount
        return num_programs(num_tokens) + (0 if ring is None else ring.num_programs(num_seqs))

    return AnyCount(
        body,
        functools.partial(
            write_kernel,
            spec=spec,
            tokens=max(rung.config.tokens for rung in rungs),
            grid=ANY_LENGTH,
            rotated_dtype=None if rotated is None else rows[0].dtype,
        ),
        (
            *("num_tokens", "last_slot"),
            *(("last_position",) if rotated is not None else ()),
            *(() if ring is None else ring.counts),
        ),
        (
            Argument("slot_mapping", jax.ShapeDtypeStruct((ANY_LENGTH,), jnp.int32)),
            *(memory.argument(*named) for memory, named in zip(rows, as_rows.items(), strict=True)),
            *(memory.argument(name, page_dtype) for name, memory in zip(PAGES, pages, strict=False)),
            *layers,
            *rotation_arguments,
            *scale_arguments(spec, kind.scale_sizes, scale_pages),
            *(() if ring is None else ring.arguments),
        ),
        writes=(
            *PAGES[: len(pages)],
            *(() if rotated is None else ("rotated_query",)),
            *(argument.name for argument in row_scale_arguments(spec, scale_pages)),
            *(() if ring is None else RING_PAGES),
        ),
        num_programs=num_programs if ring is None else num_programs_with_ring,
    )
