"""What one program of the write kernel does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kvjax.kernels import compat, warpgroups
from kvjax.kernels.aliases import DTypeLike, Ref
from kvjax.kernels.codecs import LoadedRows
from kvjax.kernels.launchable import Number, Rows
from kvjax.kernels.write.launch_config import WriteConfig
from kvjax.kernels.write.rotation_step import RotationStep, rotated_part
from kvjax.kernels.write.slots import Position, TokenSlots
from kvjax.kernels.write.transfer import RowCopy, Scatter, WriteOperand
from kvjax.spec import AttentionSpec

StagedOperand = tuple[WriteOperand, Sequence[Any]]
"""Keys or values, and the shared memory for their data and scales, if they go through it."""


class Program(NamedTuple):
    """The tokens of a program.

    Attributes:
      spec: the cache's.
      dtype: dtype of keys and values.
      slots: slots of the call.
      tokens: tokens of the program.
      first: the first of them.
      first_owned: the first that the program writes. The last program starts early instead of reading past the end;
        the tokens before `first_owned` belong to the program before it.
      writes_keys: whether it writes keys, which it rotates first if asked to; or rope keys.
      writes_values: whether it writes values. If so it also rotates the queries. Or latents.
    """

    spec: AttentionSpec
    dtype: DTypeLike
    slots: TokenSlots
    tokens: int
    first: jax.Array
    first_owned: jax.Array
    writes_keys: bool = True
    writes_values: bool = True


class WriteCall(NamedTuple):
    """What is written: tokens of `dtype` into pages of `spec`, by programs of `config`, from `first_program` on."""

    spec: AttentionSpec
    config: WriteConfig
    num_tokens: Number
    dtype: Any
    first_program: Number = 0


def run(
    slots: TokenSlots,
    operands: Sequence[WriteOperand],
    staged: Sequence[Any],
    call: WriteCall,
    rotation: RotationStep | None = None,
) -> None:
    """The body of the kernel.

    `operands` are the keys and the values; `staged` is shared memory for data and scales of those that are staged.
    """
    spec, config, num_tokens, dtype, first_program = call
    index = lax.axis_index("program")
    if not isinstance(first_program, int) or first_program:
        index = index - first_program
    which = lax.rem(index, jnp.int32(2)) if config.split_kv else None
    first_owned = (lax.div(index, jnp.int32(2)) if config.split_kv else index) * config.tokens
    first = first_owned if config.tokens == 1 else jnp.minimum(first_owned, num_tokens - config.tokens)
    program = Program(spec, dtype, slots, config.tokens, first, first_owned)
    refs = iter(staged)
    both = [(operand, [next(refs) for _ in range(operand.codec.num_staged)]) for operand in operands]
    if which is None:
        _write(program, both, rotation)
        return
    programs = [program._replace(writes_values=False), program._replace(writes_keys=False)]
    first_part, second_part = programs[::-1] if rotated_part(spec) else programs
    branch(
        *(which == 0, "keys", lambda: _write(first_part, both[:1], rotation)),
        *("values", lambda: _write(second_part, both[1:], rotation)),
    )


def write_rows(program: Program, operands: Sequence[WriteOperand]) -> None:
    """Writes rows that keep their elements where they are."""
    _write(program, [(operand, ()) for operand in operands], None)


def _write(program: Program, both: Sequence[StagedOperand], rotation: RotationStep | None) -> None:
    """Writes the operands of a program, all through registers or all through shared memory."""
    operands, refs = zip(*both, strict=True)
    if not any(refs):
        (_write_token if program.tokens == 1 else _write_tokens)(program, operands, rotation)
    elif program.tokens == 1:
        _write_token_staged(program, both, rotation)
    else:
        if rotation is not None:
            both = list(zip(_rotated(program, operands, rotation), refs, strict=True))
        _write_tokens_staged(program, both)


def branch(
    condition: bool | jax.Array, name: str, then: Callable[[], None], other_name: str, otherwise: Callable[[], None]
) -> None:
    """Runs one of two functions; their names keep the compiler from merging the ends of the branches."""
    if isinstance(condition, bool):
        (then if condition else otherwise)()
        return

    def named(name: str, run: Callable[[], None]) -> Callable[[], None]:
        def run_to_end() -> None:
            run()
            warpgroups.prevent_tail_merging(name)

        return run_to_end

    lax.cond(condition, named(name, then), named(other_name, otherwise))


def _write_token(program: Program, operands: Sequence[WriteOperand], rotation: RotationStep | None) -> None:
    """Writes one token through registers."""
    positions, copies, loaded = _load_rows(program, operands, rotation)
    # Otherwise the compiler would sink the loads of rows below the check of the slot; none moves past a barrier.
    warpgroups.barrier()
    # The addresses of scales may be in another line of constant memory, for which the loads of rows need not wait.
    encoders = _row_encoders(program, operands, copies)
    _store_rows(program, operands, positions, copies, encoders, loaded)


def _write_tokens(program: Program, operands: Sequence[WriteOperand], rotation: RotationStep | None) -> None:
    """Writes several tokens through registers; scales are loaded before the barrier, which takes fewer registers."""
    positions, copies, loaded = _load_rows(program, operands, rotation)
    encoders = _row_encoders(program, operands, copies)
    warpgroups.barrier()  # as in `_write_token`
    _store_rows(program, operands, positions, copies, encoders, loaded)


def _load_rows(
    program: Program, operands: Sequence[WriteOperand], rotation: RotationStep | None
) -> tuple[list[Position], list[RowCopy], list[list[jax.Array]]]:
    """Loads slots and rows: a position per token, a copy per operand, and the rows of each token and operand."""
    slots, spec = program.slots, program.spec
    tokens = [program.first + i for i in range(program.tokens)]
    positions = [slots.position(token, token >= program.first_owned, spec) for token in tokens]
    copies = [_row_copy(spec, operand, program.dtype) for operand in operands]

    def load(which: int, rows: Rows) -> list[jax.Array]:
        return [copies[which].load(rows, token) for token in tokens]

    if rotation is None:
        loaded = [load(which, operand.rows) for which, operand in enumerate(operands)]
    else:
        # Values are loaded first, so that these loads overlap the rotation of the keys.
        keys = _rotated_operand(program, operands)
        values = {i: load(i, operand.rows) for i, operand in enumerate(operands) if i != keys}
        rotated = _rotated(program, operands, rotation)
        loaded = [values[i] if i != keys else load(i, operand.rows) for i, operand in enumerate(rotated)]
    return positions, copies, [list(rows) for rows in zip(*loaded, strict=True)]


def _row_copy(spec: AttentionSpec, operand: WriteOperand, dtype: DTypeLike) -> RowCopy:
    """The copy of rows of `dtype` whose encoding leaves every element in its place."""
    itemsize = jnp.dtype(operand.pages.ref.dtype).itemsize
    copy = RowCopy.of(spec, operand.pages, 0, itemsize, by_head=operand.has_head_scales)
    max_vector = min(copy.max_vector, operand.rows.alignment // jnp.dtype(dtype).itemsize)
    return dataclasses.replace(copy, max_vector=max_vector)


def _row_encoders(
    program: Program, operands: Sequence[WriteOperand], copies: Sequence[RowCopy]
) -> list[Callable[[jax.Array], jax.Array]]:
    return [
        operand.codec.row_encoder(operand.scale, copy.layout, copy.columns)
        for operand, copy in zip(operands, copies, strict=True)
    ]


def _store_rows(
    program: Program,
    operands: Sequence[WriteOperand],
    positions: Sequence[Position],
    copies: Sequence[RowCopy],
    encoders: Sequence[Callable[[jax.Array], jax.Array]],
    loaded: Sequence[Sequence[jax.Array]],
) -> None:
    """Encodes the rows of each token, and stores those of tokens that are written."""
    repeated = program.slots.repeated(program.first, program.tokens)
    encoded = [[encode(row) for encode, row in zip(encoders, rows, strict=True)] for rows in loaded]
    skipped = 0 if repeated is None else warpgroups.any_thread(repeated, program.tokens)
    for i, (position, rows) in enumerate(zip(positions, encoded, strict=True)):

        @pl.when(position.written & ((skipped >> i) & 1 == 0))
        def _(position: Position = position, rows: list[jax.Array] = rows) -> None:
            for copy, operand, row in zip(copies, operands, rows, strict=True):
                copy.store(row, operand.pages, position)


def _rotated(program: Program, operands: Sequence[WriteOperand], rotation: RotationStep) -> list[WriteOperand]:
    """Rotates keys and queries, as far as these are the program's, and returns the operands with the rotated keys."""
    tokens, first, which = program.tokens, program.first, _rotated_operand(program, operands)
    if tokens == 1:
        key = None if which is None else operands[which].rows
        rotation.rotate_token(key, program.spec, first, with_query=program.writes_values)
    else:
        if which is not None:
            rotation.rotate_keys(operands[which].rows, program.spec, tokens, first)
        if program.writes_values:
            rotation.rotate_queries(tokens, first, program.first_owned)
    results = list(operands)
    if which is not None:
        warpgroups.barrier()
        results[which] = operands[which]._replace(rows=rotation.rotated_keys(program.spec, first))
    return results


def _rotated_operand(program: Program, operands: Sequence[WriteOperand]) -> int | None:
    """Which of a program's operands are the keys that a rotation changes; None if it does not write these."""
    if not program.writes_keys:
        return None
    return rotated_part(program.spec) if len(operands) > 1 else 0


class _Staged(NamedTuple):
    """An operand on its way through shared memory.

    Attributes:
      operand: keys or values.
      refs: shared memory for data and for scales.
      scatters: their way from there into pages.
      positions: of each scatter, where its chunks go.
    """

    operand: WriteOperand
    refs: Sequence[Ref]
    scatters: Sequence[Scatter]
    positions: Sequence[Position]


def _write_token_staged(program: Program, operands: Sequence[StagedOperand], rotation: RotationStep | None) -> None:
    """Writes one token through shared memory.

    With `rotation`, rotates the keys first, or rotates the queries while the values are on their way.
    """
    if rotation is not None:
        scales = _layer_scales(operands)
    staged, loaded = _load_staged(program, operands, rotation if program.writes_keys else None)
    if rotation is not None and not program.writes_keys:
        rotation.rotate_token(None, program.spec, program.first, with_query=True)
    if rotation is None:
        warpgroups.barrier()  # as in `_write_token`
        scales = _layer_scales(operands)
    # The search overlaps the loads of the rows.
    repeated = program.slots.repeated(program.first, program.tokens)
    _store_staged(program, staged, loaded, scales, repeated)


def _write_tokens_staged(program: Program, operands: Sequence[StagedOperand]) -> None:
    """Writes several tokens through shared memory.

    Repeated slots are searched for first, because the search takes registers: with rows in registers too, fewer
    programs would fit a multiprocessor.
    """
    repeated = program.slots.repeated(program.first, program.tokens)
    staged, loaded = _load_staged(program, operands)
    _store_staged(program, staged, loaded, _layer_scales(operands), repeated)


def _load_staged(
    program: Program, operands: Sequence[StagedOperand], rotation: RotationStep | None = None
) -> tuple[list[_Staged], list[LoadedRows]]:
    """Loads slots and rows; with `rotation`, slots, and then rows with rotated keys."""
    spec, tokens, first = program.spec, program.tokens, program.first
    scatters = [
        [Scatter(RowCopy.of(spec, pages, which, 1), tokens) for pages, which in operand.destinations]
        for operand, _ in operands
    ]
    positions = [
        [scatter.positions(program.slots, first, program.first_owned, spec) for scatter in pair] for pair in scatters
    ]
    if rotation is not None:
        rows, refs = zip(*operands, strict=True)
        operands = list(zip(_rotated(program, rows, rotation), refs, strict=True))
    loaded = [operand.codec.load(operand.rows, first, tokens, refs) for operand, refs in operands]
    staged = [
        _Staged(operand, refs, pair, where)
        for (operand, refs), pair, where in zip(operands, scatters, positions, strict=True)
    ]
    return staged, loaded


def _layer_scales(operands: Sequence[StagedOperand]) -> list[jax.Array | None]:
    """The layer's scales; None where each token and head has one."""
    return [operand.codec.load_scale(operand.scale) for operand, _ in operands]


def _store_staged(
    program: Program,
    staged: Sequence[_Staged],
    loaded: Sequence[LoadedRows],
    scales: Sequence[jax.Array | None],
    repeated: jax.Array | None,
) -> None:
    """Encodes rows into shared memory, and scatters them from there into pages."""
    tokens = program.tokens
    for rows, scale, (operand, refs, *_) in zip(loaded, scales, staged, strict=True):
        encoded = operand.codec.encode(rows, scale, program.dtype)
        for codes_or_scales, ref in zip(encoded, refs, strict=True):
            compat.store(ref.at[pl.ds(0, tokens)], codes_or_scales)
    if repeated is None:
        warpgroups.barrier()
    skipped = None if repeated is None else warpgroups.any_thread(repeated, tokens)
    for operand, refs, scatters, positions in staged:
        for scatter, ref, (pages, _), position in zip(scatters, refs, operand.destinations, positions, strict=True):
            scatter.store(ref, pages, position, skipped)
