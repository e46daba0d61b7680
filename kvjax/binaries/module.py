"""Rewrites the module that Mosaic GPU makes of a kernel, so that one compilation serves every launch of its kind.

Two things change. The size of the grid, a constant, becomes an entry of the list that the host code is given. The
kernel's parameters become one structure of integers: Mosaic GPU assumes that addresses are multiples of 256, as JAX's
are, but torch's tensors begin anywhere. The structure also passes counts.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from kvjax.binaries.binary import LaunchUnavailableError, Shape

try:
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir  # type: ignore[attr-defined]
except ImportError as error:
    MISSING: ImportError | None = error
else:
    MISSING = None

_NAMESPACE = "stable_mosaic_gpu."


@contextlib.contextmanager
def expecting_this_form() -> Iterator[None]:
    """Raises `LaunchUnavailableError` where errors show that JAX makes kernels of another form."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ir.MLIRError) as error:
        raise _of_another_form(f"makes Mosaic GPU kernels of another form: {error}") from error


def _of_another_form(what: str) -> LaunchUnavailableError:
    return LaunchUnavailableError(f"JAX {jax.__version__} {what}")


def given_integers(serialized: bytes, num_args: int) -> bytes:
    """Rewrites a kernel's module so that a launch passes integers and the number of programs.

    The host code of the result takes a list of `num_args` 64-bit integers, the kernel's arguments, followed by the
    number of programs. The kernel takes one parameter, a structure of the arguments that it uses.

    Raises:
      LaunchUnavailableError: JAX launches the kernel, or passes its arguments, in a form that this does not know.
    """
    return rewritten(serialized, num_args)[0]


class Rewritten(NamedTuple):
    """A rewritten module.

    Attributes:
      module: what `given_integers` returns.
      shape: the constants of the kernel's launches.
      passed: indices of the arguments that the kernel uses, in the order of its parameter.
    """

    module: bytes
    shape: Shape
    passed: tuple[int, ...]


def rewritten(serialized: bytes, num_args: int) -> Rewritten:
    """What `given_integers` returns, and what a launch needs to know."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        module = ir.Module.parse(serialized)
        launches = [op for op in host_ops(module) if op.name == f"{_NAMESPACE}gpu.launch"]
        if len(launches) != 1 or len(launches[0].block.arguments) != 2:
            raise _of_another_form("launches Mosaic GPU kernels in another form")
        [launch] = launches
        shape, arguments = _shape(launch), _arguments(launch, num_args)
        _pass_integers(launch, [argument for argument in arguments if argument.is_used])
        _take_grid_from_entry(launch, num_args)
        changed = io.BytesIO()
        module.operation.write_bytecode(changed)
    return Rewritten(changed.getvalue(), shape, tuple(i for i, argument in enumerate(arguments) if argument.is_used))


def host_ops(module: Any) -> Iterator[Any]:
    """The operations in a module's functions, without those nested in them: a kernel has thousands.

    Each time the bindings return an operation whose dialect has no Python module, they search for that module. For all
    operations of a kernel, this takes seconds.
    """
    for function in _ops_of(module.operation):
        yield from _ops_of(function)


def _ops_of(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


class _Argument(NamedTuple):
    """An address in the list that the host code is given.

    Attributes:
      load: the operation that loads it.
      ops: operations of the host code that compute with it, in order.
      is_used: whether the kernel uses what they compute.
    """

    load: Any
    ops: list[Any]
    is_used: bool


def _arguments(launch: Any, num_args: int) -> list[_Argument]:
    """The kernel's arguments, in the order of the list.

    JAX lists the arrays that a kernel writes twice: as arguments, and after all arguments as results. The list that a
    launch passes has no addresses of results, so the kernel must not use them.

    Raises:
      LaunchUnavailableError: there are fewer than `num_args` addresses, or the kernel uses the address of a result.
    """
    pointer = launch.block.arguments[1].type
    host = [op.operation for op in launch.block.operations]
    host = host[: host.index(launch)]
    loads = [op for op in host if op.name == f"{_NAMESPACE}llvm.load" and op.results[0].type == pointer]
    found = []
    for load in loads:
        computed, ops = [load.results[0]], []
        for op in host[host.index(load) + 1 :]:
            if any(operand in computed for operand in op.operands):
                ops.append(op)
                computed.extend(op.results)
        users = (use.owner.operation for value in computed for use in value.uses)
        is_used = any(user not in ops and not _is_unused(user) for user in users)
        found.append(_Argument(load, ops, is_used))
    if len(found) < num_args or any(result.is_used for result in found[num_args:]):
        raise _of_another_form("passes arguments of Mosaic GPU kernels in another form")
    return found[:num_args]


_WITHOUT_EFFECTS = {_NAMESPACE + name for name in ("memref.subview", "memref.load")}


def _is_unused(op: Any) -> bool:
    """Whether nothing uses an operation, which the compiler then removes: scales are read though there may be none."""
    return op.name in _WITHOUT_EFFECTS and all(
        _is_unused(use.owner.operation) for result in op.results for use in result.uses
    )


def _pass_integers(launch: Any, arguments: Sequence[_Argument]) -> None:
    """Moves what computes the kernel's arguments into the kernel, which is passed integers instead of addresses."""
    addresses, kernel = launch.block.arguments[1], launch.regions[0].blocks[0].operations[0]
    integer, of_global_memory = ir.IntegerType.get_signless(64), ir.Type.parse("!llvm.ptr<1>")
    with ir.InsertionPoint(launch):
        # A structure is one parameter, whose layout is known. An array would be passed in memory.
        passed = _load(ir.Type.parse(f"!llvm.struct<({', '.join(['i64'] * len(arguments))})>"), addresses)
    for index, (load, ops, _) in enumerate(arguments):
        with ir.InsertionPoint(kernel):
            entry = _add("llvm.extractvalue", integer, passed, position=ir.DenseI64ArrayAttr.get([index]))
            address = _add("llvm.inttoptr", of_global_memory, entry)
            address = _add("llvm.addrspacecast", addresses.type, address)
        load.results[0].replace_all_uses_with(address)
        computed = [address]
        for op in ops:
            with ir.InsertionPoint(kernel):
                for i, operand in enumerate(op.operands):
                    if operand not in computed:  # a constant
                        op.operands[i] = operand.owner.clone().results[0]
            computed.extend(op.results)
            op.move_before(kernel)


def _take_grid_from_entry(launch: Any, index: int) -> None:
    """Has the host code read the number of programs, a constant before, from an entry of the list."""
    addresses = launch.block.arguments[1]
    with ir.InsertionPoint(launch):
        entry = _add(
            "llvm.getelementptr",
            addresses.type,
            addresses,
            elem_type=ir.TypeAttr.get(addresses.type),
            rawConstantIndices=ir.DenseI32ArrayAttr.get([index]),
        )
        num_programs = _load(ir.IntegerType.get_signless(64), entry)
        num_programs = _add("arith.index_cast", ir.IndexType.get(), num_programs)
    launch.operands[_segments(launch)[0]] = num_programs


_GRID, _BLOCK, _CLUSTER, _SHARED, _STREAM = slice(1, 4), slice(4, 7), slice(7, 10), 10, 11
"""Where the operands of a launch are in its `operandSegmentSizes`; those that it depends on come first."""


def _segments(launch: Any) -> list[int]:
    return list(ir.DenseI32ArrayAttr(launch.attributes["operandSegmentSizes"]))


def _shape(launch: Any) -> Shape:
    """The constants of a launch, which must have no other features than a grid, blocks and shared memory."""
    segments = _segments(launch)
    is_known = segments[_GRID] == segments[_BLOCK] == [1, 1, 1] and segments[_SHARED] <= 1
    if not is_known or any(segments[_CLUSTER]) or any(segments[_STREAM:]):
        raise _of_another_form("launches Mosaic GPU kernels in another form")
    if "mosaic_gpu.uses_pdl" in launch.parent.parent.attributes:
        raise _of_another_form("launches kernels before those that they follow have ended")
    _, y, z, *block = (_constant(operand) for operand in list(launch.operands)[segments[0] :][:6])
    shared_bytes = _constant(launch.operands[segments[0] + 6]) if segments[_SHARED] else 0
    return Shape((y, z), (block[0], block[1], block[2]), shared_bytes)


def _constant(value: Any) -> int:
    return int(ir.IntegerAttr(value.owner.attributes["value"]).value)


def _load(result: Any, address: Any) -> Any:
    return _add("llvm.load", result, address, ordering=ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0))


def _add(name: str, result: Any, operand: Any, **attributes: Any) -> Any:
    return ir.Operation.create(_NAMESPACE + name, [result], [operand], attributes).result
