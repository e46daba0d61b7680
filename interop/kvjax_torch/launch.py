"""Launches kvjax's kernels on torch's current stream, with the addresses of torch's tensors.

JAX traces and lowers a Pallas kernel, and JAX's CUDA plugin compiles it: `MosaicGpuCompile` returns a host function
that launches the kernel on a stream, given a list of addresses. Before compiling, this module changes two things. The
size of the grid, a constant, becomes one more entry of the list. And the kernel's parameters become integers: Mosaic
GPU assumes that addresses are multiples of 256, as JAX's are, but torch's tensors begin anywhere, and counts travel in
the list too. So one compiled kernel serves every call of its kind. A launch is one call into compiled code, which
allocates nothing, copies nothing and waits for nothing, so `torch.cuda.graph` records it like any other kernel.

Compiling does not start JAX. Once started, JAX queries its streams on the GPU every five seconds, which invalidates any
capture by `torch.cuda.graph` in CUDA's global mode. A process that computes on the GPU with torch alone has no use for
a started JAX.

`MosaicGpuCompile` and the form of what JAX hands to it are not public. This module looks for what it needs of them when
it compiles a kernel, and raises `LaunchUnavailableError` where something is missing.
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
from typing import Any, NamedTuple

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

TESTED = "jax 0.11.1 to 0.12 with its CUDA plugin"
"""The versions that the launcher was tested with, for the error where something is missing."""

_JAXLIB = tuple(int(number) for number in importlib.metadata.version("jaxlib").split(".")[:2])
_NAMESPACE = "stable_mosaic_gpu."
_compile_lock = threading.Lock()
_thread = threading.local()
_compilations = 0


class LaunchUnavailableError(RuntimeError):
    """JAX or its CUDA plugin lacks something that launching on torch's streams needs."""


def num_compilations() -> int:
    """The number of kernels compiled for torch in this process so far."""
    return _compilations


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel compiled for one CUDA device.

    Attributes:
      device: index of the device.
      context: the CUDA context that it was loaded in.
      launch: enqueues the kernel on a stream, given the packed list of its arguments and the number of programs.
      pack: packs the list: the kernel's arguments, then the number of programs.
    """

    device: int
    context: ctypes.c_void_p
    launch: Callable[[int, bytes], None]
    pack: Callable[..., bytes]

    def __call__(self, arguments: Sequence[int], num_programs: int) -> None:
        """Enqueues the kernel on torch's current stream of the device, without waiting for anything."""
        packed = self.pack(*arguments, num_programs)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        is_torchs_device = torch._C._cuda_getDevice() == self.device
        if is_torchs_device and getattr(_thread, "has_context", False):
            self.launch(stream, packed)
            return
        with driver.unchanged_context():
            driver.make_current(self.context)
            self.launch(stream, packed)
        if is_torchs_device:  # torch makes it current at the thread's first operation
            driver.make_current(self.context)
            _thread.has_context = True


def compile_kernel(function: Callable[..., Any], args: Sequence[Any], device: torch.device) -> Kernel:
    """Compiles the only kernel of `function`; the number of programs is an argument of each launch.

    Args:
      function: a function of JAX arrays.
      args: the shapes and dtypes of its arguments.
      device: a CUDA device.

    Raises:
      LaunchUnavailableError: JAX or its plugin lacks something that this needs.
    """
    global _compilations
    if _MISSING is not None:
        raise LaunchUnavailableError(f"JAX {jax.__version__} lacks what the launcher imports of it: {_MISSING}")
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
                "MosaicGpuCompile of JAX's CUDA plugin failed to compile a kernel of this form"
            )
        _compilations += 1
        pack = struct.Struct(f"={len(args) + 1}Q").pack
        return Kernel(index, context, _launcher(compiled, index), pack)


def _launcher(compiled: Any, device: int) -> Callable[[int, bytes], None]:
    """A function of a stream and a packed list that calls the host code as this jaxlib expects."""
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
    """Supplies the devices that lowering a kernel asks for, since asking JAX for them would start it.

    `jit` needs a device but uses nothing of it: it gets one of the host. Mosaic GPU reads the shared memory size of the
    first of `jax.local_devices()`: it gets `target`. A Mosaic kernel that another thread lowers meanwhile gets `target`
    too. A later JAX that asks in other ways starts; kernels are then launched all the same.
    """
    mosaic.jax = _JaxOfOneDevice(target)
    try:
        with jax.default_device(_host_device()):
            yield
    finally:
        mosaic.jax = jax


class _JaxOfOneDevice:
    """The module `jax`, except that its only device is a given one."""

    def __init__(self, target: _Target) -> None:
        self._target = target

    def local_devices(self, *_: Any, **__: Any) -> list[_Target]:
        return [self._target]

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


@functools.cache
def _host_device() -> jax.Device:
    """A CPU device of a client of its own, which is not one of JAX's backends."""
    try:
        client: Any = xla_client.make_cpu_client()
        device: jax.Device = client.local_devices()[0]
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise LaunchUnavailableError(f"JAX {jax.__version__} has no CPU client to lower with: {error}") from error
    return device


def _kernel_module(lowered: Any) -> bytes:
    """The serialized module of the only kernel in a lowered program."""
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
    """The properties of a device that lowering a kernel reads."""

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
    """Rewrites a kernel's module so that a launch passes integers and the number of programs.

    The host code of the result takes a list of `num_args` 64-bit integers, the kernel's arguments, followed by the
    number of programs.

    Raises:
      LaunchUnavailableError: JAX launches the kernel, or passes its arguments, in a form that this does not know.
    """
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown():
        module = ir.Module.parse(serialized)
        launches = [op for op in _operations(module.operation) if op.name == f"{_NAMESPACE}gpu.launch"]
        if len(launches) != 1 or len(launches[0].block.arguments) != 2:
            raise LaunchUnavailableError(f"JAX {jax.__version__} launches Mosaic GPU kernels in another form")
        [launch] = launches
        _pass_integers(launch, _argument_ops(launch, num_args))
        _take_grid_from_entry(launch, num_args)
        changed = io.BytesIO()
        module.operation.write_bytecode(changed)
    return changed.getvalue()


class _ArgumentOp(NamedTuple):
    """An operation of the host code that the kernel's arguments are computed by.

    Attributes:
      op: the operation.
      is_load: whether it loads an address from the list; else it computes with one.
      constants: indices of the operands that do not depend on an address.
    """

    op: Any
    is_load: bool
    constants: tuple[int, ...]


def _argument_ops(launch: Any, num_args: int) -> list[_ArgumentOp]:
    """The operations that compute the kernel's arguments from the list of addresses, in the host code's order.

    JAX lists the arrays that a kernel writes twice: as arguments, and after all arguments as results. The list that a
    launch passes has no addresses of results, so the kernel must not use them.

    Raises:
      LaunchUnavailableError: there are fewer than `num_args` addresses, or the kernel uses the address of a result.
    """
    pointer = launch.block.arguments[1].type
    host = [op.operation for op in launch.block.operations]
    num_addresses, found = 0, []
    from_arguments: list[Any] = []
    from_results: list[Any] = []
    for op in host[: host.index(launch)]:
        if op.name == f"{_NAMESPACE}llvm.load" and op.results[0].type == pointer:
            num_addresses += 1
            if num_addresses > num_args:
                from_results.append(op.results[0])
                continue
            found.append(_ArgumentOp(op, True, ()))
            from_arguments.append(op.results[0])
        elif any(operand in from_results for operand in op.operands):
            from_results.extend(op.results)
        elif any(operand in from_arguments for operand in op.operands):
            constants = tuple(i for i, operand in enumerate(op.operands) if operand not in from_arguments)
            found.append(_ArgumentOp(op, False, constants))
            from_arguments.extend(op.results)
    uses_results = any(operand in from_results for op in _operations(launch) for operand in op.operands)
    if num_addresses < num_args or uses_results:
        raise LaunchUnavailableError(f"JAX {jax.__version__} passes arguments of Mosaic GPU kernels in another form")
    return found


def _pass_integers(launch: Any, arguments: Sequence[_ArgumentOp]) -> None:
    """Moves what computes the kernel's arguments into the kernel, which is passed integers instead of addresses."""
    pointer, kernel = launch.block.arguments[1].type, launch.regions[0].blocks[0].operations[0]
    integer, of_global_memory = ir.IntegerType.get_signless(64), ir.Type.parse("!llvm.ptr<1>")
    for op, is_load, constants in arguments:
        if is_load:
            with ir.InsertionPoint(op):
                passed = _add("llvm.load", integer, op.operands[0], ordering=op.attributes["ordering"])
            with ir.InsertionPoint(kernel):
                address = _add("llvm.inttoptr", of_global_memory, passed)
                address = _add("llvm.addrspacecast", pointer, address)
            op.results[0].replace_all_uses_with(address)
        else:
            with ir.InsertionPoint(kernel):
                for i in constants:
                    op.operands[i] = op.operands[i].owner.clone().results[0]
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
        i64 = ir.IntegerType.get_signless(64)
        num_programs = _add("llvm.load", i64, entry, ordering=ir.IntegerAttr.get(i64, 0))
        num_programs = _add("arith.index_cast", ir.IndexType.get(), num_programs)
    asynchronous = ir.DenseI32ArrayAttr(launch.attributes["operandSegmentSizes"])[0]
    launch.operands[asynchronous] = num_programs


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
