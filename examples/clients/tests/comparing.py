"""What tests of clients share: prompts, how far logits are apart, and bounds on that."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

VOCABULARY, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 97, 2, 4, 2, 16
LENGTHS = 5, 11, 8
NUM_NEW = 12

AGREEMENT = {"bfloat16": 0.98, "fp8": 0.85, "nvfp4": 0.7}
"""Least share of positions, teacher forced, whose likeliest token is that of the library's own bfloat16 cache."""

DEVIATION = {"bfloat16": 0.02, "fp8": 0.1, "nvfp4": 0.3}
"""Largest root mean square of the difference of logits, over that of the library's own."""


def prompts() -> list[np.ndarray]:
    """Tokens that are neither 0, padding, nor the last, which ends texts."""
    rng = np.random.default_rng(0)
    return [rng.integers(2, VOCABULARY - 1, length) for length in LENGTHS]


def texts() -> np.ndarray:
    """int32 `[8, 48]`, to be teacher forced."""
    return np.random.default_rng(1).integers(2, VOCABULARY - 1, (8, 48)).astype(np.int32)


def check(dtype: str, got: np.ndarray, expected: np.ndarray) -> None:
    """Compares logits `[..., vocabulary]`, and says how far they are apart."""
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    agreement = float(np.mean(got.argmax(-1) == expected.argmax(-1)))
    deviation = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    print(f"{dtype}: {agreement:.1%} of likeliest tokens agree, logits deviate by {deviation:.2%}")
    assert agreement >= AGREEMENT[dtype]
    assert deviation <= DEVIATION[dtype]


def in_float32() -> Any:
    """Has float32 matrices multiplied in float32; a GPU takes TF32, whose rounding could change which token leads."""
    return jax.default_matmul_precision("highest")


def check_kernels(jitted: Any, *arguments: Any) -> None:
    """Checks that for a GPU, which need not be there, kernels of kvjax attend besides the one that writes."""
    lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") > 1
