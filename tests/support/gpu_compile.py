"""Compiles programs for GPUs that this machine need not have (`TARGETS`), from jax to machine code.

jax's CUDA plugin compiles for a described GPU without a driver or CUDA's libraries. Asked by environment variables,
Mosaic GPU prints what it makes of each kernel: the PTX, what ptxas says of it and, where a disassembler is at hand, the
machine code (SASS).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import util
from pathlib import Path
from typing import IO, Any

TARGETS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "targets").glob("*.txtpb"))}
"""Descriptions of the GPUs, as XLA's GpuTargetConfigProto."""

HOPPER_AND_BLACKWELL = "h100", "b200"
"""The targets of large matrices. On the third, which differs in shared memory and has no wgmma, fewer cases compile."""

ARCHITECTURES = {"h100": "sm_90a", "b200": "sm_100a", "rtx6000pro": "sm_120a"}

MOST_DEVICES = 8

COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "reduce-scatter"}

_FREE_OPCODES = {"bitcast", "constant", "get-tuple-element", "parameter", "tuple"}


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """One Mosaic GPU kernel: its PTX, what ptxas reports, and its machine code with control codes if asked for."""

    ptx: str = dataclasses.field(repr=False)
    ptxas_log: str
    sass: str | None = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        return _find(r"\.entry (\w+)", self.ptx)

    @property
    def target(self) -> str:
        """The architecture of the PTX, such as "sm_90a"."""
        return _find(r"^\.target (\w+)", self.ptx)

    @property
    def parameters(self) -> list[str]:
        """The declarations of its parameters, without their names."""
        found = re.findall(r"^\s*\.param (.*?) \w+_param_\d+((?:\[\d+\])?)", self.ptx, re.MULTILINE)
        return [kind + size for kind, size in found]

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return int(_find(r"Used (\d+) registers", self.ptxas_log))

    @property
    def spill_bytes(self) -> int:
        """What a thread stores to local memory, and loads again, for want of registers."""
        return sum(int(_find(rf"(\d+) bytes spill {kind}", self.ptxas_log)) for kind in ("stores", "loads"))


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A function compiled for a GPU: optimized HLO, bytes of memory, and its Mosaic GPU kernels."""

    hlo: str = dataclasses.field(repr=False)
    argument_size: int
    output_size: int
    alias_size: int
    temp_size: int
    kernels: tuple[CompiledKernel, ...]

    @property
    def collectives(self) -> set[str]:
        """What devices exchange, wherever in the program, as HLO opcodes."""
        opcodes = re.findall(r" ([a-z][\w-]*)\(", self.hlo)
        return COLLECTIVES & {opcode.removesuffix("-start") for opcode in opcodes}

    @property
    def device_ops(self) -> tuple[str, ...]:
        """What runs on the device, as HLO opcodes: `("custom-call",)` where it is one Mosaic GPU kernel alone."""
        entry = self.hlo[self.hlo.index("\nENTRY ") :]
        opcodes = re.findall(r"^  (?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", entry, re.MULTILINE)
        return tuple(opcode for opcode in opcodes if opcode not in _FREE_OPCODES)


def why_not() -> str | None:
    """Why nothing can be compiled here, or `None`."""
    return None if util.find_spec("jax_plugins.xla_cuda13") else "needs jax-cuda13-plugin and jax-cuda13-pjrt"


def compile_for(
    target: str, function: Callable[..., Any], *args: Any, donate_argnums: int | Sequence[int] = (), **options: Any
) -> CompiledProgram:
    """Compiles `function` for one of `TARGETS`, in a process that compiles for nothing else.

    `args` are pytrees of anything with a shape and a dtype. They and the function travel by pickle: the function is one
    of a module, or a `functools.partial` of one. Arguments whose sharding is over an abstract mesh are for so many
    devices, up to `MOST_DEVICES` in one host; all others are for one.
    """
    job = _compiler(target).submit(compile_here, target, function, *args, donate_argnums=donate_argnums, **options)
    return job.result()


@functools.cache
def _compiler(target: str) -> concurrent.futures.Executor:
    spawn = multiprocessing.get_context("spawn")
    compiler = concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=prepare_environment)
    _compilers.append(compiler)
    return compiler


_compilers: list[concurrent.futures.Executor] = []


def end_compilers() -> None:
    """Ends the processes that compile. pytest-xdist's workers end without Python's own end, which would do it."""
    while _compilers:
        _compilers.pop().shutdown()
    _compiler.cache_clear()


def prepare_environment() -> None:
    """Lets jax load its CUDA plugin where there is no driver; to be called before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # without a driver, looking for CUDA's devices would end the process
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["MOSAIC_GPU_DUMP_PTX"] = os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"


def compile_here(
    target: str,
    function: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    disassemble: bool = False,
    change_kernel: Callable[[bytes], bytes] | None = None,
) -> CompiledProgram:
    """What `compile_for` does, in this process; also for functions that cannot be pickled, and with SASS.

    `change_kernel` is applied to the serialized module of each Mosaic GPU kernel before that is compiled.
    """
    import jax
    from jax.experimental.mosaic.gpu.core import artificial_shared_memory_limit

    devices = _devices(target)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_on(devices, getattr(x, "sharding", None))), args
    )
    if disassemble and (tools := folder_of_nvdisasm()):
        os.environ["MOSAIC_GPU_DUMP_SASS_CTRL"] = "1"
        os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(tools.parent)
    # Mosaic GPU asks the first of JAX's devices, a CPU here, and would assume that a block has 227 KiB.
    shared_memory = artificial_shared_memory_limit(devices[0].shared_memory_per_block_optin)
    with jax.default_device(devices[0]), shared_memory, _captured_stdout() as output:
        lowered = jax.jit(function, donate_argnums=donate_argnums).trace(*args).lower(lowering_platforms=("cuda",))
        if change_kernel is not None:
            _change_kernels(lowered.compiler_ir(), change_kernel)
        compiled = lowered.compile()
        output.seek(0)
        dump = output.read()
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    return CompiledProgram(
        hlo,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        _kernels(hlo, dump),
    )


def _change_kernels(module: Any, change: Callable[[bytes], bytes]) -> None:
    from jaxlib.mlir import ir

    def visit(op: Any) -> Any:
        if "call_target_name" in op.attributes and "mosaic_gpu" in str(op.attributes["call_target_name"]):
            config = {named.name: named.attr for named in op.attributes["mhlo.backend_config"]}
            config["module"] = ir.StringAttr.get(change(config["module"].value_bytes))
            op.attributes["mhlo.backend_config"] = ir.DictAttr.get(config)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)


def _on(devices: Sequence[Any], sharding: Any) -> Any:
    import jax
    import numpy as np

    if not isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.SingleDeviceSharding(devices[0])
    mesh = sharding.mesh
    grid = np.array(devices[: mesh.size]).reshape(mesh.axis_sizes)
    return jax.sharding.NamedSharding(jax.sharding.Mesh(grid, mesh.axis_names, mesh.axis_types), sharding.spec)


@functools.cache
def _devices(target: str) -> list[Any]:
    from jax.experimental import topologies

    # Mosaic GPU tells ptxas the compute capability of the first GPU that its process compiled for, whatever the second.
    if _devices.cache_info().currsize:
        raise RuntimeError(f"target: got {target!r}, but this process compiles for another; use compile_for")
    config = TARGETS[target].read_text()
    topology = f"1x1x{MOST_DEVICES}"  # one slice of one host
    return topologies.get_topology_desc(target, "cuda", target_config=config, topology=topology).devices


@contextlib.contextmanager
def _captured_stdout() -> Iterator[IO[str]]:
    """A file that gets what this process writes to standard output, from C++ too."""
    sys.stdout.flush()
    stdout = os.dup(1)
    try:
        with tempfile.TemporaryFile("w+") as file:
            os.dup2(file.fileno(), 1)
            yield file
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


_known_kernels: dict[str, CompiledKernel] = {}


def _kernels(hlo: str, dump: str) -> tuple[CompiledKernel, ...]:
    """The kernels of a program, in its order. One that this process compiled before is not dumped again."""
    hashes = re.findall(r'custom_call_target="mosaic_gpu\w*".*?kernel_hash = "(.*?)"[,}]', hlo)
    new = [hash_ for hash_ in dict.fromkeys(hashes) if hash_ not in _known_kernels]
    _known_kernels.update(zip(new, map(_parse_kernel, _split_dump(dump)), strict=True))
    return tuple(_known_kernels[hash_] for hash_ in hashes)


def _split_dump(dump: str) -> list[str]:
    return re.split(r"^//\n(?=// Generated by LLVM NVPTX)", dump, flags=re.MULTILINE)[1:]


def _parse_kernel(dump: str) -> CompiledKernel:
    """One kernel's part of a dump: PTX, the lines of ptxas, SASS, in this order."""
    ptx, rest = re.split(r"^(?=ptxas info)", dump, maxsplit=1, flags=re.MULTILINE)
    log, *sass = re.split(r"^(?=\s*\.(?:headerflags|target)\s)", rest, maxsplit=1, flags=re.MULTILINE)
    return CompiledKernel(ptx, log, sass[0] if sass else None)


def folder_of_nvdisasm() -> Path | None:
    """Of CUDA's toolkit or of triton, which torch brings."""
    triton = util.find_spec("triton")
    brought = [Path(triton.origin).parent / "backends/nvidia/bin"] if triton and triton.origin else []
    found = shutil.which("nvdisasm", path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, brought)]))
    return Path(found).parent if found else None


def _find(pattern: str, text: str) -> str:
    if (found := re.search(pattern, text, re.MULTILINE)) is None:
        raise ValueError(f"no {pattern!r} in:\n{text}")
    return found[1]
