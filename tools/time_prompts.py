"""Checks prompts from torch on this GPU against float64, then times them beside JAX's, kernel by kernel.

    PYTHONPATH=.:interop python tools/time_prompts.py [--dtype=nvfp4 bfloat16] [--rows=chunk chunks whole mixed]

Checks results of caches of several kinds, graphs that are replayed with other lengths, tables and bounds, and that
batch-invariant results do not depend on the batch; fails where one is wrong. Times are CUPTI's medians in microseconds,
of calls that read other memory each; they are not checked.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch

import kvjax_torch
from benchmarks import shapes, timing
from benchmarks.peers import attends
from benchmarks.peers.attention_inputs import AttentionInputs, AttentionJob
from kvjax import KVCacheDType

HEADS, KV_HEADS = 8, 2
ROWS = "chunk", "chunks", "whole", "mixed"
CALLS = 30

CASES: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "nvfp4"},
    {"dtype": "fp8_e4m3", "sizes": (64, 64)},
    {"dtype": "fp8_e5m2", "sizes": (80, 48), "num_heads": 6},
    {"dtype": "nvfp4", "sizes": (256, 256), "sliding_window": 100},
    {"dtype": "nvfp4", "v_scale_layout": "swizzled", "logits_soft_cap": 20.0, "sinks": True},
    {"dtype": "bfloat16", "sizes": (32, 16), "sliding_window": 33, "block_size": 48},
    {"dtype": "nvfp4", "decode_q_len": 1, "sinks": True},
    {"dtype": "bfloat16", "decode_q_len": 1},
    {"dtype": "bfloat16", "num_heads": 3, "num_kv_heads": 1},
    {"dtype": "nvfp4", "q_lens": (40,), "lens": (5000,)},  # in segments
    {"dtype": "bfloat16", "q_lens": (3,), "lens": (700,), "sinks": True},
]


class Step:
    """A step's tensors, of random contents; what no sequence has is poisoned."""

    def __init__(
        self,
        *,
        dtype: str,
        sizes: tuple[int, int] = (128, 128),
        num_heads: int = HEADS,
        num_kv_heads: int = KV_HEADS,
        block_size: int = 16,
        q_lens: tuple[int, ...] = (5, 0, 200, 1, 33, 129),
        lens: tuple[int, ...] = (40, 0, 450, 12, 33, 700),
        room: int = 1000,
        v_scale_layout: str = "linear",
        sinks: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        random = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=random)

        self.size, self.options = block_size, {"v_scale_layout": v_scale_layout, **options}
        self.stored = dtype, *((0.013, 0.021) if dtype != "bfloat16" else (1.0, 1.0))
        width = -(-max(*lens, room) // block_size)
        num_blocks = len(lens) * width + 3
        is_plain = dtype == "bfloat16"
        rows = [size * 2 if is_plain else size // 2 + size // 16 if dtype == "nvfp4" else size for size in sizes]
        self.caches = [
            torch.full((num_blocks, block_size, num_kv_heads, row), 0xFF, dtype=torch.uint8, device="cuda")
            for row in rows
        ]
        if is_plain:
            self.caches = [cache.view(torch.bfloat16) for cache in self.caches]
        elif dtype.startswith("fp8"):
            kind = torch.float8_e4m3fn if dtype == "fp8_e4m3" else torch.float8_e5m2
            self.caches = [cache.view(kind) for cache in self.caches]
        order = torch.randperm(num_blocks, device="cuda", generator=random)[: len(lens) * width]
        self.table = order.view(len(lens), width).to(torch.int32)
        for seq, length in enumerate(lens):
            token = torch.arange(length, device="cuda")
            slots = self.table[seq].long()[token // block_size] * block_size + token % block_size
            new = [normal(length, num_kv_heads, size).bfloat16() for size in sizes]
            write: Any = kvjax_torch.reshape_and_cache_flash
            write(*new, *self.caches, slots, *self.stored, v_scale_layout=v_scale_layout)
        if len(lens) > 2:
            self.table[2, 3] = -1  # absent tokens
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        bounds = [0, *itertools.accumulate(q_lens)]
        self.bounds = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        fused = normal(bounds[-1] + 3, 2 * num_heads, sizes[0]).bfloat16()
        self.query = fused[:, :num_heads]
        self.options["sinks"] = normal(num_heads) if sinks else None

    def attend(self, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """By kvjax."""
        out, lse = kvjax_torch.ragged_paged_attention(
            self.query, *self.caches, self.table, self.lens, self.bounds, *self.stored,
            return_lse=True, **self.options | more,
        )  # fmt: skip
        return out, lse

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In float64."""
        gather: Any = kvjax_torch.gather_kv
        layout = self.options["v_scale_layout"]
        dense = gather(*self.caches, self.table, self.lens, *self.stored, dtype=torch.float32, v_scale_layout=layout)
        window, cap, sinks = (self.options.get(x) for x in ("sliding_window", "logits_soft_cap", "sinks"))
        query = self.query.double()
        out = query.new_zeros((*query.shape[:2], dense[1].shape[-1]))
        lse = (
            query.new_full(query.shape[:2], -torch.inf)
            if sinks is None
            else sinks.double().expand(query.shape[:2]).clone()
        )
        num_blocks, group = self.caches[0].shape[0], query.shape[1] // dense[0].shape[2]
        bounds, lens = self.bounds.tolist(), self.lens.tolist()
        for seq, (start, end) in enumerate(itertools.pairwise(bounds)):
            if start == end:
                continue
            length = min(lens[seq], dense[0].shape[1])
            key, value = (x[seq, :length].double().repeat_interleave(group, dim=1) for x in dense)
            row = torch.arange(lens[seq] - (end - start), lens[seq], device="cuda")[:, None]
            token = torch.arange(length, device="cuda")
            block = self.table[seq][token // self.size]
            sees = (token <= row) & (block >= 0) & (block < num_blocks)
            if window is not None:
                sees &= token > row - window
            logits = torch.einsum("rhd,thd->hrt", query[start:end], key) * query.shape[2] ** -0.5
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            logits = logits.masked_fill(~sees, -torch.inf)
            total = torch.logsumexp(logits, -1)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.double()[:, None])
            weights = torch.exp(logits - torch.where(total == -torch.inf, 0.0, total)[..., None])
            out[start:end] = torch.einsum("hrt,thd->rhd", weights, value)
            lse[start:end] = total.T
        return out, lse


def check(name: str, got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compares results with those in float64."""
    (out, lse), (wanted, wanted_lse) = got, expected
    assert torch.isfinite(out).all(), f"{name}: {int((~torch.isfinite(out)).sum())} elements are not finite"
    assert ((lse == -torch.inf) == (wanted_lse == -torch.inf)).all(), f"{name}: rows that see nothing"
    error = float((out.double() - wanted).norm() / wanted.norm())
    there = wanted_lse > -torch.inf
    of_lse = float((lse.double() - wanted_lse)[there].abs().max())
    print(f"{name}: error {error:.2e}, log-sum-exp {of_lse:.1e}", flush=True)
    assert error < 4e-3, name
    assert of_lse < 4e-3, name


def check_replays() -> None:
    """A graph serves other lengths, tables and bounds."""
    for decode_q_len in (0, 1):
        sizes = {"dtype": "nvfp4", "decode_q_len": decode_q_len, "max_q_len": 300, "max_prompts": 6, "room": 1000}
        step = Step(**sizes)
        step.attend()
        torch.cuda.synchronize()
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(step.query).contiguous()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            _, lse = step.attend(out=out)
        shapes_of = [
            ((5, 0, 200, 1, 33, 129), (40, 0, 450, 12, 33, 700)),
            ((100, 100, 100, 1, 1, 2), (950, 101, 100, 1, 900, 3)),
            ((0, 0, 0, 0, 0, 300), (1, 2, 3, 4, 5, 1000)),
            ((0, 0, 0, 0, 0, 0), (1, 2, 3, 4, 5, 6)),
        ]
        for number, (q_lens, lens) in enumerate(shapes_of):
            other = Step(**sizes | {"q_lens": q_lens, "lens": lens, "seed": number})
            for mine, its in zip(
                (*step.caches, step.table, step.lens, step.bounds),
                (*other.caches, other.table, other.lens, other.bounds),
                strict=True,
            ):
                mine.copy_(its)
            rows = other.query.shape[0]
            step.query[:rows].copy_(other.query)
            out.fill_(7.0)
            graph.replay()
            torch.cuda.synchronize()
            if number < 3:
                check(
                    f"replay {number}, decode_q_len={decode_q_len}",
                    (out[: rows - 3], lse[: rows - 3]),
                    tuple(x[: rows - 3] for x in other.expected()),
                )
            assert not out[rows - 3 :].any()


def check_invariance() -> None:
    """A sequence has the same bits alone as beside others."""
    for options in ({"dtype": "nvfp4"}, {"dtype": "bfloat16", "sliding_window": 50}):
        options |= {
            "decode_q_len": 0,
            "max_q_len": 512,
            "batch_invariant": True,
            "q_lens": (90, 7, 200),
            "lens": (4000, 30, 350),
        }
        step = Step(**options, room=4000)
        whole, lses = step.attend()
        bounds = step.bounds.tolist()
        for seq, (start, end) in enumerate(itertools.pairwise(bounds)):
            alone = kvjax_torch.ragged_paged_attention(
                step.query[start:end], *step.caches, step.table[seq : seq + 1], step.lens[seq : seq + 1],
                torch.tensor([0, end - start], dtype=torch.int32, device="cuda"), *step.stored,
                return_lse=True, **step.options,
            )  # fmt: skip
            assert torch.equal(alone[0], whole[start:end]), f"{options}: sequence {seq} depends on the batch"
            assert torch.equal(alone[1], lses[start:end]), f"{options}: sequence {seq} depends on the batch"
        print(f"batch-invariant: {options['dtype']}", flush=True)


def kernel_times(call: Callable[[int], Any], wait: Callable[[Any], Any]) -> tuple[float, dict[str, float]]:
    """Microseconds of a call, and of its kernels by name."""
    for number in range(5):
        wait(call(number))
    records = timing._kernel_records(call, wait, itertools.count(), CALLS)
    if records is None:
        return float("nan"), {}
    seconds, _ = timing.split_calls(records, CALLS)
    by_name: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * CALLS)
    per_call = len(records) // CALLS
    for i, (name, milliseconds) in enumerate(records):
        by_name[name.removesuffix("_mosaic_gpu_kernel")][i // per_call] += milliseconds * 1e3
    return 1e6 * statistics.median(seconds), {name: statistics.median(each) for name, each in by_name.items()}


def time_rows(rows: list[str], dtypes: list[str]) -> None:
    """Times rows of the benchmarks."""
    jobs = [AttentionJob(shapes.RAGGED_ROWS_BY_NAME[row], KVCacheDType(dtype)) for row in rows for dtype in dtypes]
    for job in jobs:
        inputs, totals = AttentionInputs(job), {}
        for name, peer in (("jax", attends.KVJAX), ("torch", attends.IN_TORCH)):
            try:
                run = peer.prepare(inputs)
                facts = run.check(run.call(0))
                totals[name], kernels = kernel_times(run.call, run.wait)
            except Exception:
                traceback.print_exc()
                continue
            parts = ", ".join(f"{x[:40]} {us:.1f}" for x, us in sorted(kernels.items(), key=lambda each: -each[1])[:12])
            print(f"{job.row.name} {job.dtype.value} {name}: {totals[name]:.1f} us {facts} [{parts}]", flush=True)
        if len(totals) == 2:
            print(f"{job.row.name} {job.dtype.value}: torch / jax = {totals['torch'] / totals['jax']:.3f}", flush=True)


def main() -> None:
    """Checks, then times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["nvfp4", "bfloat16"])
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--no-checks", action="store_true")
    args = parser.parse_args()
    print(jax.devices(), torch.cuda.get_device_name(), flush=True)
    failed = []
    for name, run in (
        []
        if args.no_checks
        else [
            *(
                (str(case), lambda case=case: check(str(case), (step := Step(**case)).attend(), step.expected()))
                for case in CASES
            ),
            ("replays", check_replays),
            ("invariance", check_invariance),
        ]
    ):
        start = time.perf_counter()
        try:
            run()
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"  {time.perf_counter() - start:.1f} s", flush=True)
    time_rows(args.rows, args.dtype)
    if failed:
        raise SystemExit(f"wrong: {failed}")


if __name__ == "__main__":
    main()
