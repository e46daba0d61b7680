"""Attention over latents (MLA): two decode kernels, whose parts `attention.merge` combines.

`decode` serves any number of query rows with Hopper's `wgmma`; `few_rows` serves up to 32 with `mma.sync`.

Modules:

- `problem`: what the kernels serve, which one serves a call, and how it is launched.
- `few_rows_stages`: rows of tokens in shared memory, and the shares of them that warps read.
- `few_rows`: the kernel for few rows.
- `tiles`: rows of queries and of tokens in shared memory, and the copies that bring them there.
- `packed`: quantized latents on their way from memory to a tile.
- `exchange`: weights and numbers that a warpgroup hands to the other.
- `decode`: the loop over tiles of tokens, and the epilogue.
- `launch`: both kernels: their grids and shared memory.
- `any_batch`: both for any number of sequences; `arrays`: over the pages of a JAX array.
"""

from __future__ import annotations

from kvjax.kernels.mla.arrays import decode as decode
from kvjax.kernels.mla.problem import MLAConfig as MLAConfig
from kvjax.kernels.mla.problem import choose as choose
from kvjax.kernels.mla.problem import why_not as why_not
