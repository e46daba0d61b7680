"""Warp-level programming: one register of every thread as an array.

A `[128]` array of 32-bit elements in `LANES` is one register of each thread of a warpgroup. Arithmetic on such arrays
is `jax.numpy`'s; this module adds warp-level instructions (matrix products, shuffles, transposes), and loads and stores
at per-thread addresses. Each has a model in `jax.numpy`, which interpret mode runs.

Threads of a warp are numbered as in the matrix instructions. Thread `4 * g + c` of a warp is row `g` (0 to 7)
and column `c` (0 to 3) of an 8 by 4 grid; `_grid` shows a register in that form.
"""

from __future__ import annotations

from kvjax.kernels.lanes.access import Bytes as Bytes
from kvjax.kernels.lanes.access import load_global as load_global
from kvjax.kernels.lanes.access import load_global_bytes as load_global_bytes
from kvjax.kernels.lanes.access import load_global_words as load_global_words
from kvjax.kernels.lanes.access import load_shared as load_shared
from kvjax.kernels.lanes.access import load_transposed as load_transposed
from kvjax.kernels.lanes.access import max_global as max_global
from kvjax.kernels.lanes.access import prefetch_global as prefetch_global
from kvjax.kernels.lanes.access import prefetch_global_bytes as prefetch_global_bytes
from kvjax.kernels.lanes.access import store_global as store_global
from kvjax.kernels.lanes.access import store_global_words as store_global_words
from kvjax.kernels.lanes.access import store_shared as store_shared
from kvjax.kernels.lanes.blocks import over_block as over_block
from kvjax.kernels.lanes.copies import FIRST_BARRIER as FIRST_BARRIER
from kvjax.kernels.lanes.copies import Chunks as Chunks
from kvjax.kernels.lanes.copies import Copy as Copy
from kvjax.kernels.lanes.copies import arrive_as_warp as arrive_as_warp
from kvjax.kernels.lanes.copies import arrive_for_warps as arrive_for_warps
from kvjax.kernels.lanes.copies import arrive_with_copies as arrive_with_copies
from kvjax.kernels.lanes.copies import copy_async as copy_async
from kvjax.kernels.lanes.copies import copy_bulk as copy_bulk
from kvjax.kernels.lanes.copies import copy_or_clear as copy_or_clear
from kvjax.kernels.lanes.copies import end_group_of_copies as end_group_of_copies
from kvjax.kernels.lanes.copies import initialize_barriers as initialize_barriers
from kvjax.kernels.lanes.copies import show_to_tensor_cores as show_to_tensor_cores
from kvjax.kernels.lanes.copies import wait_before_copies as wait_before_copies
from kvjax.kernels.lanes.copies import wait_for_barrier as wait_for_barrier
from kvjax.kernels.lanes.copies import wait_for_block as wait_for_block
from kvjax.kernels.lanes.copies import wait_for_own_copies as wait_for_own_copies
from kvjax.kernels.lanes.copies import wait_for_warps as wait_for_warps
from kvjax.kernels.lanes.warps import any_in_warp as any_in_warp
from kvjax.kernels.lanes.warps import ballot as ballot
from kvjax.kernels.lanes.warps import max_over_rows as max_over_rows
from kvjax.kernels.lanes.warps import max_over_warp as max_over_warp
from kvjax.kernels.lanes.warps import mma as mma
from kvjax.kernels.lanes.warps import of_first_thread as of_first_thread
from kvjax.kernels.lanes.warps import shuffle_up as shuffle_up
from kvjax.kernels.lanes.warps import shuffle_xor as shuffle_xor
from kvjax.kernels.lanes.warps import sum_over_rows as sum_over_rows
from kvjax.kernels.lanes.warps import sum_over_warp as sum_over_warp
from kvjax.kernels.lanes.warps import transpose as transpose
from kvjax.kernels.lanes.words import LAYOUT as LAYOUT
from kvjax.kernels.lanes.words import asm as asm
from kvjax.kernels.lanes.words import bits as bits
from kvjax.kernels.lanes.words import both_halves as both_halves
from kvjax.kernels.lanes.words import exp2 as exp2
from kvjax.kernels.lanes.words import half2 as half2
from kvjax.kernels.lanes.words import lower_half as lower_half
from kvjax.kernels.lanes.words import permute as permute
from kvjax.kernels.lanes.words import splat as splat
from kvjax.kernels.lanes.words import thread_index as thread_index
