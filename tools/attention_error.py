"""Measures the error of `paged_attention` for each dtype of the cache, as a Markdown table.

    PYTHONPATH=.:tests python tools/attention_error.py [--lengths=128,1328,8192] [--query_dtype=bfloat16]

On a GPU the kernel attends, elsewhere XLA. The reference is float64 attention over the stored elements. The bound is
twice the error of float32 logits with weights rounded to bfloat16 (tests/support/attention_suite.py).
"""

from __future__ import annotations

import argparse
import functools

import jax
import numpy as np
from support import attention_suite as suite

import kvjax

DTYPES = ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "nvfp4")


def errors(case: suite.Case) -> tuple[float, float, float]:
    """Returns the largest of each sequence's errors: relative to its results, absolute, and relative to its bound.

    The first and the last are root mean squares.
    """
    implementation = "mosaic" if jax.default_backend() == "gpu" else "xla"
    attend = functools.partial(kvjax.paged_attention, return_lse=True, implementation=implementation)
    problem = suite.build(case)
    out, lse = problem.run(attend)
    suite.assert_right(problem, out, lse)
    wanted = [suite.expected(problem, seq) for seq in range(len(out))]
    of_each = [np.float64(got) - want.out for got, want in zip(out, wanted, strict=True)]
    relative = [np.sqrt(np.mean(e**2) / np.mean(want.out**2)) for e, want in zip(of_each, wanted, strict=True)]
    share = max(suite.error_shares(problem, out)) / 2
    return float(max(relative)), float(max(np.abs(e).max() for e in of_each)), float(share)


def main() -> None:
    """Prints the device and a row for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="128,1328,8192")
    parser.add_argument("--query_dtype", default="bfloat16")
    args = parser.parse_args()
    lengths = tuple(map(int, args.lengths.split(",")))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    print("| dtype | relative error | largest error | share of the bound |\n| --- | ---: | ---: | ---: |")
    for dtype in DTYPES:
        case = suite.Case(dtype, args.query_dtype, head_size=128, num_kv_heads=8, group=4, lengths=lengths)
        relative, largest, share = errors(case)
        print(f"| {dtype} | {relative:.2%} | {largest:.2g} | {share:.0%} |")


if __name__ == "__main__":
    main()
