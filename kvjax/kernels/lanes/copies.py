"""Asynchronous copies from global to shared memory, and the barriers that wait for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from kvjax.kernels import compat, ptx
from kvjax.kernels.aliases import Barriers, Context, Lowered, Ref, Scalar, Transforms, Value
from kvjax.kernels.lanes.access import indices_from, shared_address
from kvjax.kernels.lanes.words import LAYOUT, splat, to_word
from kvjax.kernels.registers import LANES, WARPS


def _statement(code: str) -> None:
    def run(_: Context) -> None:
        ptx.inline(code, [], [], clobber="~{memory}")

    plgpu.inline_mgpu()(run)()


def wait_for_block() -> None:
    """A barrier of all threads of a block; in interpret mode, of a block that is one warpgroup."""
    if compat.interpreting():
        plgpu.commit_smem()
    else:
        _statement("bar.sync 0;")


def wait_before_copies() -> None:
    """`wait_for_block`, after which bulk copies may overwrite shared memory that threads have accessed.

    Threads and bulk copies access memory through different proxies, which a barrier alone does not order.
    """
    if compat.interpreting():
        plgpu.commit_smem()
    else:
        _statement("fence.proxy.async.shared::cta; bar.sync 0;")


FIRST_BARRIER = 8
"""The first of the barriers that `wait_for_warps` takes; a thread block has 16, and Mosaic uses those before."""


def wait_for_warps(group: jax.Array, warps: int) -> None:
    """A barrier of the `warps` warps of a block that pass this `group`, 0 to 7: a register, equal throughout a warp."""
    _at_barrier_of_warps("bar.sync", group, warps)


def arrive_for_warps(group: jax.Array, warps: int) -> None:
    """Arrives at a barrier of `wait_for_warps` without waiting; not in interpret mode."""
    _at_barrier_of_warps("bar.arrive", group, warps)


def _at_barrier_of_warps(instruction: str, group: jax.Array, warps: int) -> None:
    if compat.interpreting():
        plgpu.commit_smem()
        return

    def run(_: Context, barrier: Lowered) -> None:
        ptx.inline(f"{instruction} $0, {warps * LANES};", [to_word(barrier)], [], clobber="~{memory}")

    plgpu.inline_mgpu(arg_types=(LAYOUT,))(run)(group + FIRST_BARRIER)


def show_to_tensor_cores() -> None:
    """Lets tensor cores see what the thread has stored, or its copies that have arrived, after the next barrier."""
    if not compat.interpreting():
        _statement("fence.proxy.async.shared::cta;")


def end_group_of_copies() -> None:
    """Groups each thread's `copy_or_clear` copies since the last call of this; the group may be empty."""
    if not compat.interpreting():
        _statement("cp.async.commit_group;")


def wait_for_own_copies(later: int) -> None:
    """Waits for each thread's own groups of copies, except for the last `later` ones."""
    if not compat.interpreting():
        _statement(f"cp.async.wait_group {later};")


class Copy(NamedTuple):
    """A copy from global to shared memory, by each thread or by one thread of each warp.

    Attributes:
      source: index of the reference to read.
      to: destination byte in shared memory, without `to_immediate`.
      to_immediate: constant to add to `to`.
      row: row in global memory.
      row_bytes: bytes between rows.
      offset: byte in the row, without `immediate`.
      immediate: constant to add to `offset`.
      size: bytes.
      condition: whether anything is copied.
    """

    source: int
    to: jax.Array
    to_immediate: int
    row: jax.Array
    row_bytes: int
    offset: jax.Array
    immediate: int
    size: int | jax.Array
    condition: jax.Array


def copy_async(destination: Ref, sources: Sequence[Ref], copy: Copy) -> None:
    """Starts each thread's copy of 1, 2, 4, 8 or 16 bytes; copies of 1 or 2 bytes are synchronous."""
    which, to, to_immediate, row, row_bytes, offset, immediate, size, condition = copy
    source = sources[which]
    if not isinstance(size, int):
        raise TypeError("threads copy as many bytes each")
    if compat.interpreting():
        data = lax.bitcast_convert_type(source[...], jnp.uint8).reshape(-1)
        start = row * row_bytes + offset + immediate
        words = jnp.take(data, indices_from(start, size), mode="clip")
        flat = destination[...]
        index = jnp.where(condition[:, None], indices_from(to + to_immediate, size), flat.shape[0])
        destination[...] = flat.at[index].set(words, mode="drop")
        return

    def run(
        _: Context,
        destination: Lowered,
        source: Lowered,
        to: Lowered,
        row: Lowered,
        offset: Lowered,
        condition: Lowered,
    ) -> None:
        i64 = ir.IntegerType.get_signless(64)
        base = llvm.ptrtoint(i64, utils.memref_ptr(source))
        address = arith.addi(base, arith.muli(arith.extui(i64, to_word(row)), mgpu.c(row_bytes, i64)))
        address = arith.addi(address, arith.extui(i64, to_word(offset)))
        to_address = arith.addi(shared_address(destination), to_word(to))
        target, origin = f"[$0+{to_immediate}]", f"[$1+{immediate}]"
        if size >= 4:
            cache = "cg" if size == 16 else "ca"
            instruction = f"@p cp.async.{cache}.shared.global {target}, {origin}, {size};"
        else:
            kind = f"u{8 * size}"
            instruction = f".reg .b16 x; @p ld.global.{kind} x, {origin}; @p st.shared.{kind} {target}, x;"
        code = f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; {instruction} }}"
        ptx.inline(code, [to_address, address, to_word(condition)], [], clobber="~{memory}")

    types = plgpu.RefType(), plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT, LAYOUT
    plgpu.inline_mgpu(arg_types=types)(run)(destination, source, to, row, offset, condition)


class Chunks(NamedTuple):
    """What `copy_or_clear` copies: for each thread 16 bytes of each of `runs`; numbers of threads are int32 `[128]`.

    Attributes:
      to: byte in the destination.
      page: page in the source.
      page_bytes: bytes between pages.
      offset: byte in the page.
      size: 16, or 0 to store zeros.
      runs: constants to add to `to` and to `offset`.
      condition: bool `[128]`, whether anything is stored; None for always.
    """

    to: jax.Array
    page: jax.Array
    page_bytes: int
    offset: jax.Array
    size: jax.Array
    runs: Sequence[tuple[int, int]]
    condition: jax.Array | None


def copy_or_clear(destination: Ref, transforms: Transforms, source: Ref, chunks: Chunks) -> None:
    """Starts each thread's copies to shared memory that has a layout; not in interpret mode, where it has none."""

    def run(_: Context, destination: Lowered, source: Lowered, *arrays: Lowered) -> None:
        to, page, offset, size, *condition = map(to_word, arrays)
        i64 = ir.IntegerType.get_signless(64)
        address = arith.muli(arith.extui(i64, page), mgpu.c(chunks.page_bytes, i64))
        address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(source)), address)
        address = arith.addi(address, arith.extui(i64, offset))
        guard = "@p " if condition else ""
        code = " ".join(
            f"{guard}cp.async.cg.shared.global.L2::128B [$0+{i}], [$1+{j}], 16, $2;" for i, j in chunks.runs
        )
        if condition:
            code = f"{{ .reg .pred p; setp.ne.b32 p, $3, 0; {code} }}"
        operands = [arith.addi(shared_address(destination), to), address, size, *condition]
        ptx.inline(code, operands, [], clobber="~{memory}")

    arrays = [chunks.to, chunks.page.astype(jnp.int32), chunks.offset, chunks.size]
    if chunks.condition is not None:
        arrays.append(chunks.condition)
    types = plgpu.RefType(transforms), plgpu.RefType(), *[LAYOUT] * len(arrays)
    plgpu.inline_mgpu(arg_types=types)(run)(destination, source, *arrays)


def initialize_barriers(ref: Ref, thread: jax.Array, arrivals: Sequence[int]) -> None:
    """Initializes barriers in shared memory (int32, two words each), each with its number of arrivals.

    `thread`: each thread's number in the block; all of them call this.
    """
    if compat.interpreting():  # one warpgroup and synchronous copies: no barrier is needed
        return

    def run(_: Context, ref: Lowered, thread: Lowered) -> None:
        address = shared_address(ref)
        inits = " ".join(f"@p mbarrier.init.shared::cta.b64 [$0+{8 * i}], {count};" for i, count in enumerate(arrivals))
        # Copies arrive through another proxy than threads, which requires the fence.
        fence = "@p fence.mbarrier_init.release.cluster;"
        code = f"{{ .reg .pred p; setp.eq.u32 p, $1, 0; {inits} {fence} bar.sync 0; }}"
        ptx.inline(code, [address, to_word(thread)], [], clobber="~{memory}")

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))(run)(ref, thread)


def _with_barrier(ref: Ref, index: Scalar, code: str, *operands: Scalar) -> None:
    """Runs PTX with the address of barrier `index` as `$0`, and numbers as other operands."""

    def run(_: Context, ref: Lowered, index: Lowered, *operands: Lowered) -> None:
        i32 = ir.IntegerType.get_signless(32)
        address = arith.addi(shared_address(ref), arith.muli(to_word(index), mgpu.c(8, i32)))
        ptx.inline(code, [address, *map(to_word, operands)], [], clobber="~{memory}")

    if compat.interpreting():
        return
    numbers = [x if jnp.shape(x) else splat(x, jnp.int32) for x in (index, *operands)]
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *((LAYOUT,) * len(numbers))))(run)(ref, *numbers)


def wait_for_barrier(ref: Ref, index: Scalar, parity: Scalar) -> None:
    """Waits until a barrier has completed the phase of a parity: 0 for its first; the one before that is complete."""
    code = (
        "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;"
        " @done bra OUT; bra AGAIN; OUT: }"
    )
    _with_barrier(ref, index, code, parity)


def copy_bulk(
    destination: Ref,
    sources: Sequence[Ref],
    barriers: Barriers,
    index: Scalar,
    copies: Sequence[Copy],
    transforms: Transforms = (),
    *,
    evict_first: bool = False,
) -> None:
    """One thread of each warp starts bulk copies, and arrives at a barrier that also waits for their bytes.

    All threads of a warp pass the same copies. `transforms` are those of the destination. With `evict_first`, for bytes
    that are hardly read again, the L2 cache evicts them before others.
    """
    if compat.interpreting():
        for copy in copies:
            for warp in range(WARPS):
                _copy_model(destination, sources[copy.source], copy, warp * LANES)
        return

    def run(_: Context, destination: Lowered, *rest: Lowered) -> None:
        pages, (barriers, index, *registers) = rest[: len(sources)], rest[len(sources) :]
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        bases = [llvm.ptrtoint(i64, utils.memref_ptr(source)) for source in pages]
        shared = shared_address(destination)
        counter = arith.addi(shared_address(barriers), arith.muli(to_word(index), mgpu.c(8, i32)))
        operands, code = [counter], []
        hint, policy, create = ("",) * 3
        if evict_first:
            hint, policy = ".L2::cache_hint", ", policy"
            create = " createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        size: Value = mgpu.c(0, i32)
        sizes = itertools.count(4 * len(copies))
        for i, copy in enumerate(copies):
            to, row, offset, condition = map(to_word, registers[4 * i : 4 * i + 4])
            address = arith.muli(arith.extui(i64, row), mgpu.c(copy.row_bytes, i64))
            address = arith.addi(bases[copy.source], address)
            address = arith.addi(address, arith.extui(i64, arith.addi(offset, mgpu.c(copy.immediate, i32))))
            operands += [arith.addi(shared, arith.addi(to, mgpu.c(copy.to_immediate, i32))), address, condition]
            length = mgpu.c(copy.size, i32) if isinstance(copy.size, int) else to_word(registers[next(sizes)])
            operands.append(length)
            size = arith.addi(size, arith.muli(condition, length))
            target, origin, wanted, bytes_ = (f"${4 * i + j + 2}" for j in range(4))
            code.append(
                f"setp.ne.and.b32 q, {wanted}, 0, p;"
                f" @q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes{hint}"
                f" [{target}], [{origin}], {bytes_}, [$0]{policy};"
            )
        # ptxas knows that `elect` selects one thread. For other predicates it generates a loop over threads.
        begin = (
            "{ .reg .pred p, q; .reg .b64 state, policy; elect.sync _|p, 0xffffffff;"
            + create
            + " @p mbarrier.arrive.expect_tx.shared::cta.b64 state, [$0], $1;"
        )
        ptx.inline(" ".join([begin, *code, "}"]), [counter, size, *operands[1:]], [], clobber="~{memory}")

    registers = [splat(index, jnp.int32)]
    for copy in copies:
        registers += [copy.to, copy.row, copy.offset, copy.condition]
    registers += [copy.size for copy in copies if not isinstance(copy.size, int)]
    types = plgpu.RefType(transforms), *((plgpu.RefType(),) * (len(sources) + 1)), *((LAYOUT,) * len(registers))
    plgpu.inline_mgpu(arg_types=types)(run)(destination, *sources, barriers, *registers)


def _copy_model(destination: Ref, source: Ref, copy: Copy, thread: int) -> None:
    row, offset, to, condition = (
        lax.index_in_dim(x, thread, keepdims=False) for x in (copy.row, copy.offset, copy.to, copy.condition)
    )
    data = lax.bitcast_convert_type(source[...], jnp.uint8).reshape(-1)
    size = copy.size if isinstance(copy.size, int) else lax.index_in_dim(copy.size, thread, keepdims=False)
    flat = destination[...]
    at = jnp.arange(flat.shape[0]) - (to + copy.to_immediate)
    copied = jnp.take(data, row * copy.row_bytes + offset + copy.immediate + at, mode="clip")
    destination[...] = jnp.where(condition & (at >= 0) & (at < size), copied, flat)


def arrive_with_copies(ref: Ref, index: Scalar, *, asynchronous: bool) -> None:
    """Each thread arrives at a barrier when its copies have completed; it waits for them unless `asynchronous`."""
    if asynchronous:
        code = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
    else:
        code = "cp.async.wait_all; { .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [$0]; }"
    _with_barrier(ref, index, code)


def arrive_as_warp(ref: Ref, index: Scalar) -> None:
    """One thread of each warp arrives at a barrier, after all threads of the warp."""
    code = (
        "{ .reg .pred p; .reg .u32 lane; .reg .b64 state; bar.warp.sync 0xffffffff;"
        " mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; @p mbarrier.arrive.shared::cta.b64 state, [$0]; }"
    )
    _with_barrier(ref, index, code)
