"""Times the first and the second start of a torch process that uses kvjax: without compiled kernels, then with them.

    python tools/time_startup.py                 # NVFP4, the shape of Llama-3.1-8B
    python tools/time_startup.py --processes 0   # nothing in parallel

Each start is a fresh process that imports torch and kvjax_torch, warms up writes and gathers, rotates and writes, and
attends to decode steps and prompts, as an engine does before it is ready. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def start(args: argparse.Namespace) -> None:
    """One start, in this process; prints its times as JSON."""
    begun = time.perf_counter()
    times = {}

    def lap(name: str) -> None:
        nonlocal begun
        torch.cuda.synchronize()
        now = time.perf_counter()
        times[name], begun = now - begun, now

    import torch

    torch.zeros(1, device="cuda")
    lap("import torch, first allocation")
    import kvjax_torch
    from kvjax_torch import launch

    lap("import kvjax_torch")
    heads, kv_heads, size, blocks, block_size = 32, 8, 128, 256, 16
    row, dtype = {
        "nvfp4": (size // 2 + size // 16, torch.uint8),
        "fp8": (size, torch.uint8),
        "bfloat16": (size, torch.bfloat16),
    }[args.dtype]
    pages = torch.zeros(blocks, 2, block_size, kv_heads, row, dtype=dtype, device="cuda")
    cache = pages[:, 0], pages[:, 1]
    qkv = torch.randn(64, heads + 2 * kv_heads, size, dtype=torch.bfloat16, device="cuda")
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    slots = torch.full((64,), -1, device="cuda")
    scale = torch.tensor(0.02, device="cuda")
    stored = args.dtype, scale, scale
    kvjax_torch.warm_up(key, value, *cache, slots, *stored)
    lap("warm_up")
    table, lengths = (
        torch.zeros(4, 8, dtype=torch.int32, device="cuda"),
        torch.ones(4, dtype=torch.int32, device="cuda"),
    )
    kvjax_torch.paged_attention(query[:4, None], *cache, table, lengths, *stored)
    lap("paged_attention")
    starts = torch.tensor([0, 1, 2, 3, 64], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([1, 1, 1, 61], dtype=torch.int32, device="cuda")
    hints = {"max_q_len": 61, "max_prompts": 1, "decode_q_len": 1}
    kvjax_torch.ragged_paged_attention(query.contiguous(), *cache, table, lengths, starts, *stored, **hints)
    lap("ragged_paged_attention")
    positions, angles = torch.zeros(64, dtype=torch.int64, device="cuda"), torch.ones(64, size, device="cuda")
    kvjax_torch.rope_and_cache(query, key, value, *cache, slots, positions, angles.bfloat16(), *stored)
    lap("rope_and_cache")
    print(json.dumps({"times": times, "compilations": launch.num_compilations()}))


def main() -> None:
    """Runs two starts, and prints their times side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["nvfp4", "fp8", "bfloat16"], default="nvfp4", help="KV cache dtype")
    parser.add_argument("--processes", help="KVJAX_COMPILE_PROCESSES (default: kvjax's)")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start:
        start(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"KVJAX_CACHE_DIR": os.path.join(folder, "kvjax")}
        if args.processes is not None:
            environment["KVJAX_COMPILE_PROCESSES"] = args.processes
        command = [sys.executable, __file__, "--start", "--dtype", args.dtype]
        starts = []
        for _ in ("first", "second"):
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            starts.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = (each["times"] for each in starts)
    print(f"{'seconds':32}{'first':>10}{'second':>10}")
    for name in first:
        print(f"{name:32}{first[name]:10.2f}{second[name]:10.2f}")
    print(f"{'all':32}{sum(first.values()):10.2f}{sum(second.values()):10.2f}")
    print(f"{'kernels compiled':32}{starts[0]['compilations']:10}{starts[1]['compilations']:10}")


if __name__ == "__main__":
    main()
