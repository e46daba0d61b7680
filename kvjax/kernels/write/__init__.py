"""The write kernel: encodes rows of keys and values and stores them into their pages.

A program (one warpgroup) takes `tokens` neighbouring tokens. It issues the loads of their slots and rows before it uses
any of them, encodes the rows, and stores each token's rows into its page, or skips the token where its slot says so.

- Unquantized and per-tensor fp8 rows stay in registers from load to store, because encoding leaves every element where
  it is.
- Formats whose pages hold scales go through shared memory: the threads that compute a scale hold more elements than the
  encoded bytes need. The program encodes all of its tokens, stages the bytes in shared memory, and scatters them from
  there. For few tokens, separate programs write keys and values.

How rows are encoded is `kvjax.kernels.codecs`. Modules:

- `launch_config`: launch configurations.
- `slots`: where tokens go, and the search for repeated slots.
- `transfer`: from registers, or from shared memory, into pages.
- `rotation`, `rotation_step`: rotary position embedding before the write.
- `program`: what one program does.
- `window`: the update of an exact window's ring with the same tokens, in the same kernel or in one of its own.
- `any_count`: the entry point, for JAX arrays and for caller-owned memory.
"""

from kvjax.kernels.write.any_count import WriteKind as WriteKind
from kvjax.kernels.write.any_count import any_count as any_count
from kvjax.kernels.write.launch import why_no_staging as why_no_staging
from kvjax.kernels.write.launch_config import SEARCHED as SEARCHED
from kvjax.kernels.write.launch_config import WriteConfig as WriteConfig
from kvjax.kernels.write.rotation import Rotation as Rotation
from kvjax.kernels.write.rotation_step import Rotated as Rotated
from kvjax.kernels.write.rotation_step import RotatedMemory as RotatedMemory
from kvjax.kernels.write.window import RING_PAGES as RING_PAGES
from kvjax.kernels.write.window import RingKind as RingKind
from kvjax.kernels.write.window import WindowRing as WindowRing
from kvjax.kernels.write.window import any_ring as any_ring
from kvjax.kernels.write.window import tokens_of as tokens_of
