"""The layers of kvjax and of kvjax_torch, in the order in which they may import each other."""

from __future__ import annotations

# A module of kvjax imports only from its own layer and from those that stand before it. A subpackage is one layer;
# "kvjax" itself, the public names, stands where a module may use them as any caller does.
LAYERS = (
    "errors",
    "layer_names",
    "tensor_files",
    "dtypes",
    "layouts",
    "pages",
    "spec",
    "shared_pages",
    "block_pool",
    "partition",
    "memory",
    "scale_values",
    "checkpoint",
    "hf_config",
    "model_config",
    "layer_choice",
    "resolve",
    "quant",
    "cache",
    "cache_views",
    "kernels",
    "binaries",
    "ops",
    "scales",
    "calibration",
    "dtype_choice",
    "step_metadata",
    "exact_window",
    "window_attention",
    "window_rows",
    "step",
    "kvjax",
    "table",
    "demo",
    "cli",
    "__main__",
)
# Likewise of kvjax_torch.
TORCH_LAYERS = (
    "arguments",
    "launch",
    "calls",
    "memory",
    "eager",
    "cuda",
    "library",
    "attention",
    "ops",
    "kvjax_torch",
    "transformers",
    "transformers_cache",
)
