"""Traces and lowers a kernel to Mosaic GPU's module, without starting JAX.

Once started, JAX queries its streams on the GPU every five seconds, which invalidates any capture by `torch.cuda.graph`
in CUDA's global mode. A process that computes on the GPU with torch alone has no use for a started JAX.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, use_abstract_mesh

from kvjax.binaries.binary import Device, LaunchUnavailableError
from kvjax.binaries.module import expecting_this_form, host_ops

try:
    from jax._src.lib import xla_client  # type: ignore[attr-defined]
    from jax._src.lib.mlir import ir  # type: ignore[attr-defined]

    mosaic: Any = importlib.import_module("jax.experimental.mosaic.gpu.core")
except ImportError as error:
    MISSING: ImportError | None = error
else:
    MISSING = None


class Lowered(NamedTuple):
    """A lowered kernel.

    Attributes:
      call: the MLIR attributes, by name, of XLA's call to Mosaic GPU.
      module: the serialized module of the kernel, which is an option of the call.
    """

    call: dict[str, Any]
    module: bytes


def lower(function: Callable[..., Any], args: Sequence[Any], device: Device) -> Any:
    """`function` of `args`, lowered for a device."""
    with expecting_this_form():
        mesh = AbstractMesh((), (), abstract_device=device)
    with use_abstract_mesh(mesh), without_starting_jax(device):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))


_CONFIG = "mhlo.backend_config"
_CALL = ("call_target_name", "api_version", "backend_config", _CONFIG)


def kernel_of(lowered: Any) -> Lowered:
    """The only kernel in a lowered program."""
    module = lowered.compiler_ir()
    with module.context:
        calls = [
            {name: op.attributes[name] for name in _CALL if name in op.attributes}
            for op in host_ops(module)
            if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value.startswith("mosaic_gpu")
        ]
        if len(calls) != 1 or "module" not in calls[0].get(_CONFIG, ()):
            raise LaunchUnavailableError(f"JAX {jax.__version__} lowers a Pallas kernel to another form")
        return Lowered(calls[0], calls[0][_CONFIG]["module"].value_bytes)


def program_of(lowered: Lowered, module: bytes) -> Any:
    """A program for XLA that is the call of a kernel alone, of this module, without arguments: they are no part of it.

    XLA would report that the arguments used for tracing, whose sizes mean nothing, exceed the GPU's memory.
    """
    with lowered.call[_CONFIG].context:
        program = ir.Module.parse(_PROGRAM)
        [call] = [op for op in host_ops(program) if op.name == "stablehlo.custom_call"]
        config = {named.name: named.attr for named in lowered.call[_CONFIG]}
        config["module"] = ir.StringAttr.get(module)
        # The plugin knows compiled kernels by this hash.
        config["kernel_hash"] = ir.StringAttr.get(hashlib.sha256(module).digest())
        for name, attribute in (lowered.call | {_CONFIG: ir.DictAttr.get(config)}).items():
            call.attributes[name] = attribute
    return program


_PROGRAM = """
module @kvjax attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main() -> tensor<1xi32> {
    %0 = "stablehlo.custom_call"() {call_target_name = "", has_side_effect = true} : () -> tensor<1xi32>
    return %0 : tensor<1xi32>
  }
}
"""


@contextlib.contextmanager
def without_starting_jax(device: Device) -> Iterator[None]:
    """Supplies the devices that lowering a kernel asks for, since asking JAX for them would start it.

    `jit` needs a device but uses nothing of it, so it gets one of the host. Mosaic GPU reads the shared memory size of
    the first of `jax.local_devices()`, so it gets `device`, as does a Mosaic kernel that another thread lowers
    meanwhile. A later JAX may ask in other ways and thereby start; kernels are launched all the same.
    """
    mosaic.jax = _JaxOfOneDevice(device)
    try:
        with jax.default_device(host_device()):
            yield
    finally:
        mosaic.jax = jax


class _JaxOfOneDevice:
    """The module `jax`, except that its only device is a given one."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def local_devices(self, *_: Any, **__: Any) -> list[Device]:
        return [self._device]

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)


@functools.cache
def host_device() -> jax.Device:
    """A CPU device of a client of its own, which is not one of JAX's backends."""
    try:
        client: Any = xla_client.make_cpu_client()
        device: jax.Device = client.local_devices()[0]
    except (AttributeError, LookupError, RuntimeError, TypeError) as error:
        raise LaunchUnavailableError(f"JAX {jax.__version__} has no CPU client to lower with: {error}") from error
    return device
