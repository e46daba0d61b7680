"""Attention over pages: the decode kernel, and the kernel that merges its partial results.

Modules:

- `formats`: decoding of stored bytes to matrix operands.
- `stages`: layout of rows in shared memory; a stage is the unit of the copy pipeline.
- `ring`: the asynchronous copies that fill the pipeline.
- `schedule`: division of the work among thread blocks.
- `problem`: the description of a call, and of how it is launched.
- `choice`: what the kernel serves, and how each call is launched.
- `warp`: thread and warp indices.
- `query`, `keys`, `seen` (the mask), `softmax`, `values`: the steps of a stage.
- `loop`: the loop over stages; `decode`: what the kernel does with each stage.
- `segments`: the epilogue, which stores results and partial results.
- `merge`: the second kernel.
- `launch`: both kernels: their grids, workspace and shared memory.
- `any_batch`: both kernels for any number of sequences; `arrays`: over the pages of a JAX array.
- `joint`, `any_joint`: both kernels over pages and the ring of an exact window at once.
"""

from __future__ import annotations

from kvjax.kernels.attention.arrays import OneCache as OneCache
from kvjax.kernels.attention.arrays import decode as decode
from kvjax.kernels.attention.arrays import decode_both as decode_both
from kvjax.kernels.attention.choice import DTYPES as DTYPES
from kvjax.kernels.attention.choice import BatchSizes as BatchSizes
from kvjax.kernels.attention.choice import why_not as why_not
from kvjax.kernels.attention.joint import why_not_both as why_not_both
from kvjax.kernels.attention.problem import TREE_DEPTHS as TREE_DEPTHS
from kvjax.kernels.attention.problem import ReadArrays as ReadArrays
from kvjax.kernels.attention.problem import Softmax as Softmax
