"""The paged KV cache of kvjax for torch: the same kernels, on memory that torch owns."""

from kvjax_torch.attention import merge_attention_states as merge_attention_states
from kvjax_torch.attention import paged_attention as paged_attention
from kvjax_torch.attention import ragged_attention as ragged_attention
from kvjax_torch.attention import ragged_paged_attention as ragged_paged_attention
from kvjax_torch.exact_window import ExactWindow as ExactWindow
from kvjax_torch.exact_window import fill_exact_window as fill_exact_window
from kvjax_torch.hadamard import hadamard_transform as hadamard_transform
from kvjax_torch.mla import concat_and_cache_mla as concat_and_cache_mla
from kvjax_torch.mla import concat_and_cache_mla_rope_fused as concat_and_cache_mla_rope_fused
from kvjax_torch.mla import gather_and_maybe_dequant_cache as gather_and_maybe_dequant_cache
from kvjax_torch.mla import mla_paged_attention as mla_paged_attention
from kvjax_torch.mla import mla_ragged_paged_attention as mla_ragged_paged_attention
from kvjax_torch.ops import gather_kv as gather_kv
from kvjax_torch.ops import reshape_and_cache_flash as reshape_and_cache_flash
from kvjax_torch.ops import rope_and_cache as rope_and_cache
from kvjax_torch.pages import split_kv_cache as split_kv_cache
from kvjax_torch.sharing.borrow import to_jax as to_jax
from kvjax_torch.sharing.borrow import to_torch as to_torch
from kvjax_torch.start_up import warm_up as warm_up
from kvjax_torch.start_up import warm_up_mla as warm_up_mla
from kvjax_torch.start_up import warm_up_ragged_attention as warm_up_ragged_attention
from kvjax_torch.window_attention import exact_window_attention as exact_window_attention
