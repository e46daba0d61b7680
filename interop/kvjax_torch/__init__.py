"""kvjax's paged KV cache for torch: the same kernels, writing into torch's own memory."""
