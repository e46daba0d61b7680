"""Sums over the devices of one host by one kernel, through memory that each device can write on the others."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

BLOCKS, THREADS, VECTOR = 64, 128, 16
"""Blocks of a kernel, threads of a block, bytes that a thread moves at once."""
MAX_VECTORS = 16
"""Most vectors of a thread, which are in registers."""
MAX_BYTES = BLOCKS * THREADS * VECTOR * MAX_VECTORS
DTYPES = "float32", "bfloat16", "float16"
ALIGNMENT = 128


class Peers(NamedTuple):
    """What the devices of an axis need in order to sum, a pytree: both arrays are divided over the axis.

    Keep it while programs that use it run, and do not donate it: XLA does not know that kernels use the memory.
    """

    memory: jax.Array
    """int32 `[num_devices, words]`: a device's row has counts, flags and inboxes, which other devices write too."""
    addresses: jax.Array
    """uint32 `[num_devices, num_devices + 1, 2]`: of each device the addresses of all rows of `memory`, from its own on
    and around, and then its number; low halves first."""


def connect(mesh: jax.sharding.Mesh, axis: str, max_bytes: int) -> Peers:
    """Returns memory for sums of at most `max_bytes` over an axis, which is the mesh's only one.

    Raises:
      ValueError: if `max_bytes` is more than the kernel sums (`MAX_BYTES`) or not positive, or if a device of the mesh
        is not an NVIDIA GPU of this process or cannot address the memory of another one.
    """
    if not 0 < max_bytes <= MAX_BYTES:
        raise ValueError(f"max_bytes: got {max_bytes}, expected 1 to {MAX_BYTES}; what is larger, XLA sums")
    devices = list(mesh.devices.flat)
    if mesh.axis_names != (axis,):
        raise ValueError(f"mesh: got the axes {mesh.axis_names}, expected {axis!r} alone")
    if any(each.platform != "gpu" or each.process_index != jax.process_index() for each in devices):
        raise ValueError(f"mesh: got {devices}, expected NVIDIA GPUs of process {jax.process_index()}")
    _check_access([each.local_hardware_id for each in devices])
    by_device = NamedSharding(mesh, PartitionSpec(axis))
    words = (_first_inbox(len(devices)) + 2 * len(devices) * _rounded(max_bytes)) // 4
    zeros = jax.jit(lambda: jnp.zeros((len(devices), words), jnp.int32), out_shardings=by_device)()
    zeros.block_until_ready()
    rows = {each.device: each.data.unsafe_buffer_pointer() for each in zeros.addressable_shards}
    known = np.array([rows[each] for each in devices], "<u8")
    numbers = np.stack([[*np.roll(known, -i), np.uint64(i)] for i in range(len(devices))])
    halves = numbers.view("<u4").reshape(len(devices), -1, 2)
    return Peers(zeros, jax.device_put(halves, by_device))


def peer_sum(x: jax.Array, peers: Peers, axis: str) -> jax.Array:
    """Returns the sum of `x` over an axis, inside `jax.shard_map`, in float32 and rounded once.

    All devices get the same bits. What the kernel does not sum, `jax.lax.psum` does: more bytes than `peers` is for,
    bytes that blocks cannot share evenly, and other dtypes than `DTYPES`.

    Sums of one program have to depend on each other, as those of a model's layers do: they share the memory.
    """
    num_rows, num_addresses, _ = peers.addresses.shape
    if num_rows != 1:
        raise ValueError(f"peers: got {num_rows} rows, expected this device's: divide peers over {axis!r}")
    num_devices = num_addresses - 1
    capacity = (peers.memory.shape[1] * 4 - _first_inbox(num_devices)) // (2 * num_devices)
    num_bytes = x.size * x.dtype.itemsize
    num_parts = _num_parts(num_bytes) if x.dtype.name in DTYPES and num_bytes <= capacity else 0
    if not num_parts:
        return jax.lax.psum(x, axis)
    run = plgpu.kernel(
        functools.partial(_kernel, num_devices=num_devices, capacity=capacity),
        out_type=jax.ShapeDtypeStruct((num_parts, x.size // num_parts), x.dtype),
        grid=(BLOCKS,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return run(x.reshape(num_parts, -1), peers.addresses[0]).reshape(x.shape)


def _num_parts(num_bytes: int) -> int:
    """How many blocks share so many bytes, their threads with as many whole vectors each; 0 if that is impossible."""
    shares, rest = divmod(num_bytes, THREADS * VECTOR)
    possible = [shares // each for each in range(1, MAX_VECTORS + 1) if shares % each == 0]
    return 0 if rest else next((each for each in possible if each <= BLOCKS), 0)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _first_inbox(num_devices: int) -> int:
    """Where inboxes start in a device's memory: after a count of sums and a flag of every device, for each block."""
    return _rounded(4 * BLOCKS * (1 + num_devices))


def _check_access(ordinals: list[int]) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ValueError(f"mesh: got GPUs {ordinals}, expected those of NVIDIA's driver, which is missing") from error
    for one in ordinals:
        for other in ordinals:
            can = ctypes.c_int()
            if one != other and (driver.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) or not can.value):
                raise ValueError(f"mesh: got GPU {one}, which cannot address the memory of GPU {other}")


def _kernel(x_ref: Any, addresses_ref: Any, y_ref: Any, *, num_devices: int, capacity: int) -> None:
    """Each block sends its part of `x` to all devices, waits until it has theirs, and adds them in their order.

    A device has two inboxes for each device, used in turns. Another device writes to one again only when it has
    received a flag of the sum between, which this device sent after it had read: its kernels run one after another.
    Blocks without a part count and exchange flags too, so that all use the same inboxes.
    """

    def run(_: Any, x: Any, addresses: Any, y: Any) -> None:
        i32, i64, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.F32Type.get()
        num_parts, part_size = ir.MemRefType(x.type).shape
        element: Any = ir.MemRefType(x.type).element_type
        part_bytes = part_size * element.width // 8
        vector_type = ir.VectorType.get((8 * VECTOR // element.width,), element)
        sum_type = ir.VectorType.get(vector_type.shape, f32)
        block, thread = (arith.index_cast(i32, of(gpu.Dimension.x)) for of in (gpu.block_id, gpu.thread_id))

        def constant(value: int) -> Any:
            return mgpu.c(value, i32)

        def pointer(base: Any, *offsets: Any) -> Any:
            address = functools.reduce(lambda sum_, each: arith.addi(sum_, arith.extui(i64, each)), offsets, base)
            return llvm.inttoptr(llvm.PointerType.get(), address)

        def address(ref: Any) -> Any:
            return llvm.ptrtoint(i64, utils.memref_ptr(ref))

        def is_equal(one: Any, other: Any) -> Any:
            return arith.cmpi(arith.CmpIPredicate.eq, one, other)

        def is_active() -> Any:
            return utils.when(arith.cmpi(arith.CmpIPredicate.slt, block, constant(num_parts)))

        def vectors(base: Any, *offsets: Any) -> list[Any]:
            """Where this thread's vectors of the block's part are, if all parts begin there."""
            first = arith.addi(arith.muli(block, constant(part_bytes)), arith.muli(thread, constant(VECTOR)))
            steps = range(0, part_bytes, THREADS * VECTOR)
            return [pointer(base, *offsets, first, constant(step)) for step in steps]

        def known(index: Any) -> Any:
            return llvm.load(i64, pointer(address(addresses), arith.muli(index, constant(8))))

        own, *others, number = (known(constant(i)) for i in range(num_devices + 1))
        number = arith.trunci(i32, number)
        of_block = arith.muli(block, constant(4))
        count = llvm.load(i32, pointer(own, of_block))
        inboxes = arith.muli(arith.andi(count, constant(1)), constant(num_devices * capacity))
        inboxes = arith.addi(inboxes, constant(_first_inbox(num_devices)))

        def inbox(base: Any, sender: Any) -> list[Any]:
            return vectors(base, inboxes, arith.muli(sender, constant(capacity)))

        def flag(base: Any, sender: Any) -> Any:
            return pointer(base, of_block, arith.muli(arith.addi(sender, constant(1)), constant(4 * BLOCKS)))

        with is_active():
            part = [llvm.load(vector_type, each) for each in vectors(address(x))]
            for other in others:
                for value, to in zip(part, inbox(other, number), strict=True):
                    llvm.store(value, to)
        utils.warpgroup_barrier()
        following = arith.addi(count, constant(1))
        # A thread for each other device. They have one branch, not one each: threads of a warp that have left a branch
        # wait for those in it, so the first would wait for flags before the second had sent its own.
        with utils.when(arith.cmpi(arith.CmpIPredicate.slt, thread, constant(num_devices - 1))):
            step = arith.addi(thread, constant(1))
            sender = arith.remui(arith.addi(number, step), constant(num_devices))
            _ptx("st.release.sys.global.b32 [$0], $1;", flag(known(step), number), following)
            _ptx(WAIT, flag(own, sender), following)
        utils.warpgroup_barrier()
        with is_active():
            rows = [inbox(own, constant(i)) for i in range(num_devices)]
            totals = []
            for i, mine in enumerate(vectors(address(x))):
                total = None
                for sender, row in enumerate(rows):
                    from_ = arith.select(is_equal(number, constant(sender)), mine, row[i])
                    value = llvm.load(vector_type, from_)
                    value = value if element == f32 else arith.extf(sum_type, value)
                    total = value if total is None else arith.addf(total, value)
                totals.append(total if element == f32 else arith.truncf(vector_type, total))
            for total, to in zip(totals, vectors(address(y)), strict=True):
                llvm.store(total, to)
        with utils.when(is_equal(thread, constant(0))):
            llvm.store(following, pointer(own, of_block))

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)(run)(x_ref, addresses_ref, y_ref)


WAIT = """
{
.reg .b32 x; .reg .pred p;
again:
ld.acquire.sys.global.b32 x, [$0];
sub.s32 x, x, $1;
setp.lt.s32 p, x, 0;
@p bra again;
}
"""
"""Waits until a count, which may wrap, is at least another one."""


def _ptx(code: str, at: Any, value: Any) -> None:
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [at, value], code, "l,r,~{memory}", has_side_effects=True)
