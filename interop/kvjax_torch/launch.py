"""Launching kvjax's kernels from torch: on its current stream, with its addresses, and with nothing between.

A Pallas kernel is traced and lowered by JAX and compiled by JAX's CUDA plugin, whose `MosaicGpuCompile` returns a host
function that launches it on a stream, given a list of addresses. Two things are changed before that. The size of the
grid, a constant, becomes one more entry of the list. And what the kernel is given are integers: of addresses it would
take for granted that they are multiples of 256, as JAX's are, but torch's tensors begin anywhere, and numbers travel as
addresses too. So a kernel serves every call of its kind, and a launch is one call into compiled code: nothing is
allocated, copied, or waited for, so that `torch.cuda.graph` records it like any other kernel.

JAX is not started for that. Once started it looks at its streams on the GPU every five seconds, which ends whatever
`torch.cuda.graph` is capturing in CUDA's global mode; and where only torch computes on a GPU, JAX has no use for it.

`MosaicGpuCompile` and the form of what JAX hands to it are no public interface. What this module needs of them is
looked for when a kernel is compiled; where it is missing, `LaunchUnavailableError` is raised.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import io
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import torch
from jax.sharding import AbstractMesh, use_abstract_mesh

from kvjax_torch import driver

try:
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client  # type: ignore[attr-defined]
    from jax._src.lib.mlir import ir  # type: ignore[attr-defined]

    mosaic: Any = importlib.import_module("jax.experimental.mosaic.gpu.core")
except ImportError as error:
    _MISSING: ImportError | None = error
else:
    _MISSING = None

_JAXLIB = tuple(int(number) for number in importlib.metadata.version("jaxlib").split(".")[:2])
_NAMESPACE = "stable_mosaic_gpu."
_compile_lock = threading.Lock()
_thread = threading.local()
_compilations = 0


class LaunchUnavailableError(RuntimeError):
    """JAX or its CUDA plugin lacks a part that launching on torch's streams needs."""


def num_compilations() -> int:
    """Kernels compiled for torch in this process so far."""
    return _compilations


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel compiled for one CUDA device.

    Attributes:
      device: index of the device.
      context: the CUDA context that it was loaded in.
      launch: puts the kernel on a stream, given a list of its arguments and the number of programs.
      pack: makes the list of numbers: the kernel's arguments and then the number of programs.
    """

    device: int
    context: ctypes.c_void_p
    launch: Callable[[int, bytes], None]
    pack: Callable[..., bytes]

    def __call__(self, arguments: Sequence[int], num_programs: int) -> None:
        """Puts a launch on torch's current stream of the device, without waiting for anything."""
        packed = self.pack(*arguments, num_programs)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        is_torchs_device = torch._C._cuda_getDevice() == self.device
        if is_torchs_device and getattr(_thread, "has_context", False):
            self.launch(stream, packed)
            return
        with driver.unchanged_context():
            driver.make_current(self.context)
            self.launch(stream, packed)
        if is_torchs_device:  # as torch would make it at the thread's first operation
            driver.make_current(self.context)
            _thread.has_context = True


def compile_kernel(function: Callable[..., Any], args: Sequence[Any], device: torch.device) -> Kernel:
    """Compiles the one kernel that `function` holds, for a launch that says how many programs it has.

    Args:
      function: of JAX arrays.
      args: their shapes and dtypes.
      device: a CUDA device.

    Raises:
      LaunchUnavailableError: JAX lacks what this takes.
    """
    global _compilations
    if _MISSING is not None:
        raise LaunchUnavailableError(f"JAX {jax.__version__} lacks what this module imports of it: {_MISSING}")
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    context = driver.primary_context(index)
    with _compile_lock, driver.unchanged_context():
        lowered = _lower(function, args, _Target.of(device))
        with _expecting_this_form():
            module = given_integers(_kernel_module(lowered), len(args))
        plugin = _plugin()
        driver.make_current(context)
        compiled = plugin.MosaicGpuCompile(module, len(module))
        if not compiled:
            raise LaunchUnavailableError(
                "MosaicGpuCompile of JAX's CUDA plugin compiles no kernel in the form it has now"
            )
        _compilations += 1
        pack = struct.Struct(f"={len(args) + 1}Q").pack
        return Kernel(index, context, _launcher(compiled, index), pack)


def _launcher(compiled: Any, device: int) -> Callable[[int, bytes], None]:
    """What calls the host code, with the stream and the list alone."""
    pointer, entries = ctypes.c_void_p, ctypes.c_char_p
    function, code = compiled[:2]
    if _JAXLIB < (0, 12):
        return functools.partial(ctypes.CFUNCTYPE(None, pointer, pointer, entries)(code), function)
    launch = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, entries, ctypes.c_int)(code)
    kernel = compiled[2]
    return lambda stream, packed: launch(kernel, function, stream, packed, device)


@contextlib.contextmanager
def _expecting_this_form() -> Iterator[None]:
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ir.MLIRError) as error:
        raise LaunchUnavailableError(
            f"JAX {jax.__version__} makes Mosaic GPU kernels of another form: {error}"
        ) from error


def _lower(function: Callable[..., Any], args: Sequence[Any], target: _Target) -> Any:
    with _expecting_this_form():
        mesh = AbstractMesh((), (), abstract_device=target)
    with use_abstract_mesh(mesh), _without_starting_jax(target):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def _without_starting_jax(target: _Target) -> Iterator[None]:
    """Answers those who ask JAX for a device while a kernel is lowered, for which JAX would start.

    `jit` wants any device, and uses nothing of it. Mosaic GPU asks the first of `jax.local_devices` how much shared
    memory it has; so does, and is told of this GPU, who lowers another Mosaic kernel on another thread in the meantime.
    A later JAX that asks in other ways starts, and kernels are launched all the same.
    """
    mosaic.jax = _JaxOfOneDevice(target)
    try:
        with jax.default_device(_host_device()):
            yield
    finally:
        mosaic.jax = jax


class _JaxOfOneDevice:
    """The module `jax`, but for the devices."""

    def __init__(self, target: _Target) -> None:
        self._target = target

    def local_devices(self, *_: Any, **__: Any) -> list[_Target]:
        return [self._target]

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


@functools.cache
def _host_device() -> jax.Device:
    """A device of a client that JAX does not know."""
    try:
        client: Any = xla_client.make_cpu_client()
        device: jax.Device = client.local_devices()[0]
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise LaunchUnavailableError(
            f"JAX {jax.__version__} has no client of the host to lower with: {error}"
        ) from error
    return device


def _kernel_module(lowered: Any) -> bytes:
    """The serialized module of the one kernel in a lowered program."""
    module = lowered.compiler_ir()
    with module.context:
        calls = [
            op.attributes["mhlo.backend_config"]
            for op in _operations(module.operation)
            if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value.startswith("mosaic_gpu")
        ]
        if len(calls) != 1 or "module" not in calls[0]:
            raise LaunchUnavailableError(f"JAX {jax.__version__} lowers a Pallas kernel to another form")
        serialized: bytes = calls[0]["module"].value_bytes
    return serialized


@dataclasses.dataclass(frozen=True)
class _Target:
    """What lowering asks of the device that it lowers for."""

    device_kind: str
    compute_capability: str
    shared_memory_per_block_optin: int
    platform: str = "gpu"
    num_cores: int | None = None

    @classmethod
    def of(cls, device: torch.device) -> _Target:
        properties: Any = torch.cuda.get_device_properties(device)  # not all versions declare all that they have
        capability = f"{properties.major}.{properties.minor}"
        return cls(properties.name, capability, properties.shared_memory_per_block_optin)


def given_integers(serialized: bytes, num_args: int) -> bytes:
    """The module with its kernel given integers, and as many programs as entry `num_args` of the host's list says."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        module = ir.Module.parse(serialized)
        launches = [op for op in _operations(module.operation) if op.name == f"{_NAMESPACE}gpu.launch"]
        if len(launches) != 1 or len(launches[0].block.arguments) != 2:
            raise LaunchUnavailableError(f"JAX {jax.__version__} launches Mosaic GPU kernels in another form")
        [launch] = launches
        if not _pass_integers(launch, num_args):
            raise LaunchUnavailableError(
                f"JAX {jax.__version__} passes arguments of Mosaic GPU kernels in another form"
            )
        _take_grid_from_entry(launch, num_args)
        changed = io.BytesIO()
        module.operation.write_bytecode(changed)
    return changed.getvalue()


def _take_grid_from_entry(launch: Any, index: int) -> None:
    addresses = launch.block.arguments[1]
    with ir.InsertionPoint(launch):
        entry = _add(
            "llvm.getelementptr",
            addresses.type,
            addresses,
            elem_type=ir.TypeAttr.get(addresses.type),
            rawConstantIndices=ir.DenseI32ArrayAttr.get([index]),
        )
        i64 = ir.IntegerType.get_signless(64)
        num_programs = _add("llvm.load", i64, entry, ordering=ir.IntegerAttr.get(i64, 0))
        num_programs = _add("arith.index_cast", ir.IndexType.get(), num_programs)
    asynchronous = ir.DenseI32ArrayAttr(launch.attributes["operandSegmentSizes"])[0]
    launch.operands[asynchronous] = num_programs


def _pass_integers(launch: Any, num_args: int) -> bool:
    """Has the references that the host makes of so many addresses made in the kernel.

    JAX lists the arrays that a kernel writes twice, as arguments and after them as results. Nothing may use these: the
    caller's list has something else there, and ends. Returns whether that is so, and all arguments were found.
    """
    addresses, kernel = launch.block.arguments[1], launch.regions[0].blocks[0].operations[0]
    integer, pointer = ir.IntegerType.get_signless(64), addresses.type
    of_global_memory = ir.Type.parse("!llvm.ptr<1>")
    host = [op.operation for op in launch.block.operations]
    num_addresses, made, results = 0, [], []
    for op in host[: host.index(launch)]:
        if op.name == f"{_NAMESPACE}llvm.load" and op.results[0].type == pointer:
            num_addresses += 1
            if num_addresses > num_args:
                results.append(op.results[0])
                continue
            with ir.InsertionPoint(op):
                passed = _add("llvm.load", integer, op.operands[0], ordering=op.attributes["ordering"])
            with ir.InsertionPoint(kernel):
                address = _add("llvm.inttoptr", of_global_memory, passed)
                address = _add("llvm.addrspacecast", pointer, address)
            op.results[0].replace_all_uses_with(address)
            made.append(address)
        elif any(operand in results for operand in op.operands):
            results.extend(op.results)
        elif any(operand in made for operand in op.operands):
            with ir.InsertionPoint(kernel):
                for i, operand in enumerate(op.operands):
                    if operand not in made:  # a constant
                        op.operands[i] = operand.owner.clone().results[0]
            op.move_before(kernel)
            made.extend(op.results)
    uses_results = any(operand in results for op in _operations(launch) for operand in op.operands)
    return num_addresses >= num_args and not uses_results


def _add(name: str, result: Any, operand: Any, **attributes: Any) -> Any:
    return ir.Operation.create(_NAMESPACE + name, [result], [operand], attributes).result


def _operations(op: Any) -> Iterator[Any]:
    for block in (block for region in op.regions for block in region.blocks):
        for inner in block.operations:
            yield inner.operation
            yield from _operations(inner.operation)


@functools.cache
def _plugin() -> ctypes.CDLL:
    for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        try:
            path = importlib.import_module(name)._get_library_path()
        except (ImportError, AttributeError):
            continue
        try:
            plugin = ctypes.CDLL(str(path))
        except OSError:
            continue
        if hasattr(plugin, "MosaicGpuCompile"):
            plugin.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
            plugin.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
            return plugin
    raise LaunchUnavailableError(
        "JAX has no CUDA plugin here that exports MosaicGpuCompile: pip install 'kvjax[cuda13]'"
    )
