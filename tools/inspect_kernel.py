"""Prints what a kernel compiles to, without a GPU: registers, spills, and its PTX and SASS instructions.

For kvjax's kernels: `python tools/inspect_kernel.py write --dtype nvfp4 --target b200 --show sass`. For other
functions, import this module before jax and call `inspect`, with one target per process.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from support import gpu_compile  # noqa: E402

gpu_compile.prepare_environment()


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A machine instruction. Its warp issues the next one at least `stall` cycles later."""

    address: int
    opcode: str
    operands: str
    stall: int


def inspect(
    function: Callable[..., Any],
    args: Sequence[Any],
    target: str = "h100",
    donate_argnums: int | Sequence[int] = (),
    show: Collection[str] = (),
) -> gpu_compile.CompiledProgram:
    """Compiles `function` for arguments of the shapes and dtypes of `args`, and prints the result.

    `show` selects what to print in full: "hlo", "ptx", "sass".
    """
    program = gpu_compile.compile_here(target, function, *args, donate_argnums=donate_argnums, disassemble=True)
    print(f"program: {' '.join(program.device_ops)}")
    print(f"  {program.alias_size:,} bytes of the results alias arguments, {program.temp_size:,} temporary")
    if "hlo" in show:
        print(program.hlo)
    for kernel in program.kernels:
        print(f"{kernel.name}: {kernel.target}, {kernel.registers} registers, {kernel.spill_bytes} bytes spilled")
        ptx = re.findall(r"[;{}\n]\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)(?=[\s;])", kernel.ptx)
        print(f"  PTX, {len(ptx)} instructions: {histogram(ptx)}")
        print_sass(kernel.sass)
        for kind in ("ptx", "sass"):
            if kind in show:
                print(getattr(kernel, kind))
    return program


def print_sass(sass: str | None) -> None:
    """Prints counts of all instructions, and of those in each loop."""
    if sass is None:
        print("  SASS: needs nvdisasm, from the CUDA toolkit or triton")
        return
    instructions, labels = parse_sass(sass)
    print(f"  SASS, {len(instructions)} instructions: {histogram(i.opcode for i in instructions)}")
    for first, last in find_loops(instructions, labels):
        body = [i for i in instructions if first <= i.address <= last]
        size = f"{len(body)} instructions, {sum(i.stall for i in body)} cycles to issue"
        print(f"  loop {first:#06x} to {last:#06x}, {size}: {histogram(i.opcode for i in body)}")


def parse_sass(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Returns the instructions, without trailing padding, and the address of each label."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    new_labels: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            new_labels.append(label[1])
        elif found := re.match(r"\s*(?:[^:]+:){4}(\d+)\s+/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+ )?([\w.]+)(.*)", line):
            stall, address, opcode, operands = found.groups()
            instructions.append(Instruction(int(address, 16), opcode, operands, int(stall)))
            labels |= dict.fromkeys(new_labels, instructions[-1].address)
            new_labels = []
    while instructions and instructions[-1].opcode in ("NOP", "BRA"):
        instructions.pop()
    return instructions, labels


def find_loops(instructions: Iterable[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Returns the first and last address of each range closed by a backward branch, shortest (innermost) first."""
    ranges = []
    for instruction in instructions:
        label = re.search(r"\.L\w+", instruction.operands) if instruction.opcode.startswith("BRA") else None
        if label and labels[label[0]] < instruction.address:
            ranges.append((labels[label[0]], instruction.address))
    return sorted(ranges, key=lambda addresses: addresses[1] - addresses[0])


def histogram(opcodes: Iterable[str]) -> str:
    """Returns `opcode:count` of each opcode, the most frequent first."""
    return " ".join(f"{opcode}:{count}" for opcode, count in collections.Counter(opcodes).most_common())


def main() -> None:
    """Inspects a kernel of kvjax, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=["write", "gather"])
    parser.add_argument("--target", choices=gpu_compile.TARGETS, default="h100")
    parser.add_argument("--dtype", default="bfloat16", help="KV cache dtype")
    parser.add_argument("--dense-dtype", default="bfloat16", help="dtype of the written or gathered arrays")
    parser.add_argument("--layout", choices=["NHD", "HND"], default="NHD")
    parser.add_argument("--v-scale-layout", choices=["linear", "swizzled"], default="linear")
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-tokens", type=int, default=65536, help="to write, or to gather in 64 sequences")
    parser.add_argument("--tokens", type=int, default=8, help="tokens per program")
    parser.add_argument("--split-kv", action="store_true", help="each program takes either keys or values")
    parser.add_argument("--unique-slots", action="store_true", help="promise that slots are unique")
    parser.add_argument("--show", choices=["hlo", "ptx", "sass"], nargs="*", default=())
    args = parser.parse_args()

    import jax
    import jax.numpy as jnp
    from jax import ShapeDtypeStruct

    from kvjax import FullAttentionSpec, KVCache, KVCacheDType
    from kvjax.kernels.gather import GatherConfig
    from kvjax.kernels.write import WriteConfig
    from kvjax.ops.gather import gather_mosaic
    from kvjax.ops.write import write_mosaic

    spec = FullAttentionSpec(
        args.block_size,
        args.num_kv_heads,
        args.head_size,
        dtype=KVCacheDType(args.dtype),
        layout=args.layout,
        v_scale_layout=args.v_scale_layout,
    )
    num_blocks = -(-args.num_tokens // args.block_size)
    cache = jax.eval_shape(lambda: KVCache.allocate(spec, num_blocks))
    scale = ShapeDtypeStruct((1,), jnp.float32)
    dense_dtype = jnp.dtype(args.dense_dtype)
    if args.kernel == "write":
        rows = ShapeDtypeStruct((args.num_tokens, args.num_kv_heads, args.head_size), dense_dtype)
        slots = ShapeDtypeStruct((args.num_tokens,), jnp.int32)
        config = WriteConfig(args.tokens, args.split_kv)
        function = functools.partial(write_mosaic, config=config, unique_slots=args.unique_slots)
        arrays = cache, rows, rows, slots, None, scale, scale
        inspect(function, arrays, args.target, donate_argnums=0, show=args.show)
    else:
        table = ShapeDtypeStruct((64, -(-num_blocks // 64)), jnp.int32)
        lengths = ShapeDtypeStruct((64,), jnp.int32)
        function = functools.partial(gather_mosaic, dtype=dense_dtype, config=GatherConfig(tokens=args.tokens))
        inspect(function, (cache, table, lengths, None, scale, scale), args.target, show=args.show)


if __name__ == "__main__":
    main()
