"""kvjax: a paged KV cache for JAX, with fp8 and NVFP4 storage.

The flow: a user's string -> `parse_kv_cache_dtype` -> `resolve_layer_specs` -> one `AttentionSpec` per layer ->
`KVCache.allocate` -> `reshape_and_cache_flash` -> `gather_kv` or `paged_attention`; or `attend`, which does both.
"""

import kvjax.started  # noqa: F401 (before all others)
from kvjax.block_pool import AllBlocksCleared as AllBlocksCleared
from kvjax.block_pool import BlockPool as BlockPool
from kvjax.block_pool import BlockRemoved as BlockRemoved
from kvjax.block_pool import BlockStored as BlockStored
from kvjax.block_pool import PagedSequence as PagedSequence
from kvjax.block_pool import Swaps as Swaps
from kvjax.cache import KVCache as KVCache
from kvjax.cache_views import nvfp4_kv_cache_full_dim as nvfp4_kv_cache_full_dim
from kvjax.cache_views import nvfp4_split_views as nvfp4_split_views
from kvjax.calibration import CalibrationMethod as CalibrationMethod
from kvjax.calibration import calibrate as calibrate
from kvjax.dtype_choice import DTypeChoice as DTypeChoice
from kvjax.dtype_choice import ErrorMeasure as ErrorMeasure
from kvjax.dtype_choice import choose_layer_dtypes as choose_layer_dtypes
from kvjax.dtypes import ACCEPTED_KV_CACHE_DTYPES as ACCEPTED_KV_CACHE_DTYPES
from kvjax.dtypes import MLA_KV_CACHE_DTYPES as MLA_KV_CACHE_DTYPES
from kvjax.dtypes import STORED_KV_CACHE_DTYPES as STORED_KV_CACHE_DTYPES
from kvjax.dtypes import KVCacheDType as KVCacheDType
from kvjax.dtypes import KVQuantMode as KVQuantMode
from kvjax.dtypes import parse_kv_cache_dtype as parse_kv_cache_dtype
from kvjax.errors import KVCacheError as KVCacheError
from kvjax.errors import KVCacheMemoryError as KVCacheMemoryError
from kvjax.errors import KVCacheTypeError as KVCacheTypeError
from kvjax.errors import KVCacheValueError as KVCacheValueError
from kvjax.errors import KVCacheWarning as KVCacheWarning
from kvjax.errors import OutOfBlocksError as OutOfBlocksError
from kvjax.errors import UnsupportedError as UnsupportedError
from kvjax.exact_window import ExactWindow as ExactWindow
from kvjax.exact_window import copy_window_rows as copy_window_rows
from kvjax.exact_window import fill_exact_window as fill_exact_window
from kvjax.layouts import CacheLayout as CacheLayout
from kvjax.layouts import VScaleLayout as VScaleLayout
from kvjax.memory import host_sharding as host_sharding
from kvjax.model_config import AttentionKind as AttentionKind
from kvjax.model_config import LayerKVConfig as LayerKVConfig
from kvjax.model_config import ModelKVConfig as ModelKVConfig
from kvjax.ops.attention import paged_attention as paged_attention
from kvjax.ops.block_bytes import StoredBlocks as StoredBlocks
from kvjax.ops.block_bytes import export_blocks as export_blocks
from kvjax.ops.block_bytes import import_blocks as import_blocks
from kvjax.ops.block_bytes import open_blocks as open_blocks
from kvjax.ops.blocks import copy_blocks as copy_blocks
from kvjax.ops.blocks import swap_blocks as swap_blocks
from kvjax.ops.gather import gather_kv as gather_kv
from kvjax.ops.hadamard import hadamard_transform as hadamard_transform
from kvjax.ops.merge import merge_attention_states as merge_attention_states
from kvjax.ops.mla_attention import mla_paged_attention as mla_paged_attention
from kvjax.ops.mla_attention import mla_ragged_paged_attention as mla_ragged_paged_attention
from kvjax.ops.mla_gather import gather_mla as gather_mla
from kvjax.ops.mla_rope import rope_and_cache_mla as rope_and_cache_mla
from kvjax.ops.mla_write import concat_and_cache_mla as concat_and_cache_mla
from kvjax.ops.ragged import ragged_paged_attention as ragged_paged_attention
from kvjax.ops.ragged_attention import ragged_attention as ragged_attention
from kvjax.ops.rope import rope_and_cache as rope_and_cache
from kvjax.ops.value_checks import check_positions as check_positions
from kvjax.ops.value_checks import check_query_lens as check_query_lens
from kvjax.ops.value_checks import check_sequences as check_sequences
from kvjax.ops.value_checks import check_slots as check_slots
from kvjax.ops.value_checks import checked as checked
from kvjax.ops.value_checks import is_checked as is_checked
from kvjax.ops.write import reshape_and_cache_flash as reshape_and_cache_flash
from kvjax.ops.write import reshape_and_cache_flash_diffkv as reshape_and_cache_flash_diffkv
from kvjax.pages import swizzled_position as swizzled_position
from kvjax.resolve import DTypeSource as DTypeSource
from kvjax.resolve import RequestedKVCacheDType as RequestedKVCacheDType
from kvjax.resolve import ResolvedKVCacheDType as ResolvedKVCacheDType
from kvjax.resolve import resolve_kv_cache_dtype as resolve_kv_cache_dtype
from kvjax.resolve import resolve_layer_dtypes as resolve_layer_dtypes
from kvjax.resolve import resolve_layer_specs as resolve_layer_specs
from kvjax.scale_values import MAX_SCALE as MAX_SCALE
from kvjax.scale_values import MIN_SCALE as MIN_SCALE
from kvjax.scale_values import check_scale as check_scale
from kvjax.scales import KVScales as KVScales
from kvjax.scales import load_key_rotation as load_key_rotation
from kvjax.scales import load_kv_scales as load_kv_scales
from kvjax.shared_pages import LayerGroup as LayerGroup
from kvjax.shared_pages import group_layers as group_layers
from kvjax.shared_pages import max_blocks as max_blocks
from kvjax.shared_pages import max_group_blocks as max_group_blocks
from kvjax.shared_pages import max_tokens as max_tokens
from kvjax.shared_pages import unify_page_sizes as unify_page_sizes
from kvjax.spec import AttentionSpec as AttentionSpec
from kvjax.spec import FullAttentionSpec as FullAttentionSpec
from kvjax.spec import MLAAttentionSpec as MLAAttentionSpec
from kvjax.spec import SlidingWindowSpec as SlidingWindowSpec
from kvjax.step import attend as attend
from kvjax.step_metadata import StepMetadata as StepMetadata
from kvjax.window_attention import exact_window_attention as exact_window_attention
from kvjax.window_rows import WindowRows as WindowRows

__version__ = "0.2.0"
