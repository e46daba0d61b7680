"""Attention over latents (MLA) on Hopper's tensor cores: the decode kernel, whose parts `attention.merge` combines.

Modules:

- `problem`: what the kernel serves, and how each call is launched.
- `tiles`: rows of queries and of tokens in shared memory, and the copies that bring them there.
- `packed`: the bytes of fp8 latents, and their decoding to a tile.
- `decode`: the loop over tiles of tokens, and the epilogue.
- `arrays`: both kernels over the pages of a JAX array.
- `any_batch`: both over caller-owned memory, for launchers.
"""

from __future__ import annotations

from kvjax.kernels.mla.arrays import decode as decode
from kvjax.kernels.mla.problem import MLAConfig as MLAConfig
from kvjax.kernels.mla.problem import choose as choose
from kvjax.kernels.mla.problem import operand_dtype as operand_dtype
from kvjax.kernels.mla.problem import why_not as why_not
