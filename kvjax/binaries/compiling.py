"""Compiles kernels for GPUs that need not be here: JAX traces and lowers them, and its CUDA plugin compiles them.

Neither step starts JAX or touches a GPU. The plugin compiles for a described GPU; its serialized result contains the
code.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kvjax.binaries import lowering, module, serialized
from kvjax.binaries.binary import Binary, Device, LaunchUnavailableError

try:
    from jax._src.lib import _jax, xla_client  # type: ignore[attr-defined]
except ImportError as error:
    MISSING: ImportError | None = error
else:
    MISSING = lowering.MISSING or module.MISSING

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

in_turn = threading.RLock()
"""Held while this process compiles a kernel."""

_compiled_for: set[str] = set()


def can_compile_for(device: Device) -> bool:
    """Whether this process may compile for a device.

    The plugin tells ptxas the compute capability of the first GPU that it compiled for, even for another GPU.
    """
    return _compiled_for <= {device.compute_capability}


def compile_here(function: Callable[..., Any], args: Sequence[Any], device: Device) -> Binary:
    """Compiles the only kernel of `function`, in this process; the number of programs is an argument of each launch.

    Args:
      function: a function of JAX arrays.
      args: the shapes and dtypes of its arguments.
      device: the GPU to compile for; `can_compile_for` holds.

    Raises:
      LaunchUnavailableError: JAX or its plugin lacks something that this needs.
    """
    if MISSING is not None:
        raise LaunchUnavailableError(f"JAX {jax.__version__} lacks what the launcher imports of it: {MISSING}")
    with in_turn:
        lowered = lowering.lower(function, args, device)
        with module.expecting_this_form():
            kernel = lowering.kernel_of(lowered)
            rewritten = module.rewritten(kernel.module, len(args))
            program = lowering.program_of(kernel, rewritten.module)
        _compiled_for.add(device.compute_capability)
        try:
            target = _described(device)
            options = xla_client.CompileOptions()
            compiled = target.client.compile(program, _jax.DeviceList((target,)), options).serialize()
            code = serialized.find_code(compiled)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise LaunchUnavailableError(
                f"JAX {jax.__version__}'s CUDA plugin failed to compile a kernel of this form: {error}"
            ) from error
    if code.parameter_bytes != 8 * len(rewritten.passed):
        raise LaunchUnavailableError(
            f"JAX {jax.__version__} compiles kernels to another form: {code.parameter_bytes} bytes of parameters,"
            f" expected {8 * len(rewritten.passed)}"
        )
    return Binary(code.name, rewritten.passed, rewritten.shape, code.elf)


@functools.cache
def _described(device: Device) -> Any:
    """A device that programs can be compiled for, and nothing else."""
    major, minor = device.version
    config = _CONFIG.format(
        major=major,
        minor=minor,
        optin=device.shared_memory_per_block_optin,
        per_core=device.shared_memory_per_block_optin + 1024,
        name=device.device_kind,
    )
    topology: Any = xla_client.make_c_api_device_topology(_plugin(), "kvjax", target_config=config, topology="1x1x1")
    return topology._make_compile_only_devices()[0]


# The kernel's code depends on the compute capability alone. XLA asks for the rest but has nothing to compile with it.
_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {per_core}
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: {optin}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
device_description_str: "{name}"
"""


@functools.cache
def _plugin() -> Any:
    """JAX's CUDA plugin, loaded but not initialized; under a name of its own, since JAX loads a name once."""
    for name in PLUGINS:
        try:
            path = importlib.import_module(name)._get_library_path()
        except (ImportError, AttributeError):
            continue
        if path is not None:
            return xla_client.load_pjrt_plugin_dynamically("kvjax", str(path))
    raise LaunchUnavailableError("JAX has no CUDA plugin here: pip install 'kvjax[cuda13]'")
