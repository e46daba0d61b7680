"""Pallas Mosaic GPU kernels, for sm_90 and later. Tests compare their bytes with XLA's, and attention with float64.

The names exported here are for launchers that pass addresses instead of JAX arrays.

- `target`, `placement`: the GPU that a call is lowered for, and the choice between a kernel and XLA.
- `compat`, `ptx`, `warpgroups`, `lanes`: Pallas on each version of jax and in interpret mode; PTX on arrays; operations
  of a warpgroup; one register of each thread as an array.
- `registers`, `tiles`, `launchable`: layouts in registers and in shared memory; kernels over caller-owned memory.
- `arithmetic`, `nvfp4`, `e2m1`, `four_over_six`, `decoding`, and `codecs`, which has the two directions of each dtype.
- `write`, `gather`, `gather_rows`, `row_places`, `attention`, `mla`, `prompts`: the kernels.
"""

from kvjax.kernels.attention.any_batch import AnyBatch as AnyBatch
from kvjax.kernels.attention.any_batch import BatchKind as BatchKind
from kvjax.kernels.attention.any_batch import any_batch as attention_kernels
from kvjax.kernels.attention.any_joint import JointBatch as JointBatch
from kvjax.kernels.attention.any_joint import joint_batch as joint_attention_kernels
from kvjax.kernels.attention.choice import BATCHES as ATTENTION_BATCHES
from kvjax.kernels.attention.choice import passes as attention_passes
from kvjax.kernels.attention.problem import Softmax as Softmax
from kvjax.kernels.gather import any_count as gather_kernel
from kvjax.kernels.gather_rows import any_rows as row_gather_kernel
from kvjax.kernels.launchable import AnyCount as AnyCount
from kvjax.kernels.launchable import PageMemory as PageMemory
from kvjax.kernels.launchable import RowMemory as RowMemory
from kvjax.kernels.launchable import packed as packed
from kvjax.kernels.launchable import why_not_elements as why_not_elements
from kvjax.kernels.mla.any_batch import any_batch as mla_kernels
from kvjax.kernels.mla.tiles import operand_dtypes as mla_operand_dtypes
from kvjax.kernels.prompts import ALIGNMENT as PROMPT_ALIGNMENT
from kvjax.kernels.prompts import ROWS as PROMPT_ROWS
from kvjax.kernels.prompts import TOKENS as PROMPT_TOKENS
from kvjax.kernels.prompts.any_fp8 import any_fp8_gather as prompt_fp8_gather_kernel
from kvjax.kernels.prompts.any_fp8 import any_units as prompt_units_kernel
from kvjax.kernels.prompts.any_prompts import PromptKind as PromptKind
from kvjax.kernels.prompts.any_prompts import any_gather as prompt_gather_kernel
from kvjax.kernels.prompts.any_prompts import any_prompts as prompt_kernel
from kvjax.kernels.prompts.any_prompts import splits as prompt_splits
from kvjax.kernels.prompts.any_ragged import TILE_TOKENS as TILE_TOKENS
from kvjax.kernels.prompts.any_ragged import HeadRows as HeadRows
from kvjax.kernels.prompts.any_ragged import RaggedKind as RaggedKind
from kvjax.kernels.prompts.any_ragged import any_ragged as ragged_kernel
from kvjax.kernels.prompts.any_ragged import any_tiles as tiles_kernel
from kvjax.kernels.prompts.any_ragged import prompts_size as ragged_prompts_size
from kvjax.kernels.prompts.schedule import StepKind as StepKind
from kvjax.kernels.prompts.schedule import any_schedule as step_schedule_kernel
from kvjax.kernels.prompts.schedule import num_programs as step_schedule_programs
from kvjax.kernels.prompts.tiled import FIELDS as PROMPT_FIELDS
from kvjax.kernels.prompts.transfer import Units as Units
from kvjax.kernels.prompts.transfer import any_placement as placement_kernel
from kvjax.kernels.registers import MAX_VECTOR_BYTES as MAX_VECTOR_BYTES
from kvjax.kernels.row_places import any_places as row_places_kernel
from kvjax.kernels.target import Target as Target
from kvjax.kernels.window_places import any_window_places as window_places_kernel
from kvjax.kernels.write import SEARCHED as SEARCHED
from kvjax.kernels.write import RingKind as RingKind
from kvjax.kernels.write import RotatedMemory as RotatedMemory
from kvjax.kernels.write import Rotation as Rotation
from kvjax.kernels.write import WriteKind as WriteKind
from kvjax.kernels.write import any_count as write_kernel
from kvjax.kernels.write import any_ring as ring_kernel
from kvjax.kernels.write import tokens_of as ring_tokens
from kvjax.pages import PageRegion as PageRegion

__all__ = [
    "ATTENTION_BATCHES",
    "MAX_VECTOR_BYTES",
    "PROMPT_ALIGNMENT",
    "PROMPT_FIELDS",
    "PROMPT_ROWS",
    "PROMPT_TOKENS",
    "SEARCHED",
    "TILE_TOKENS",
    "AnyBatch",
    "AnyCount",
    "BatchKind",
    "HeadRows",
    "JointBatch",
    "PageMemory",
    "PageRegion",
    "PromptKind",
    "RaggedKind",
    "RingKind",
    "RotatedMemory",
    "Rotation",
    "RowMemory",
    "Softmax",
    "StepKind",
    "Target",
    "Units",
    "WriteKind",
    "attention_kernels",
    "attention_passes",
    "gather_kernel",
    "joint_attention_kernels",
    "mla_kernels",
    "mla_operand_dtypes",
    "packed",
    "placement_kernel",
    "prompt_fp8_gather_kernel",
    "prompt_gather_kernel",
    "prompt_kernel",
    "prompt_splits",
    "prompt_units_kernel",
    "ragged_kernel",
    "ragged_prompts_size",
    "ring_kernel",
    "ring_tokens",
    "row_gather_kernel",
    "row_places_kernel",
    "step_schedule_kernel",
    "step_schedule_programs",
    "tiles_kernel",
    "why_not_elements",
    "window_places_kernel",
    "write_kernel",
]
