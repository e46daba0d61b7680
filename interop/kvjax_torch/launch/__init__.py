"""Compiled kernels: loading them into torch's context, and enqueueing them on torch's streams.

A kernel is compiled to a CUDA binary, or one that was compiled before is found on disk (`kvjax.binaries`). The CUDA
driver loads it into torch's context. One compiled kernel serves every call of its kind. A launch is one call of the
driver, which allocates nothing, copies nothing and waits for nothing, so `torch.cuda.graph` records it like any other
kernel. Neither compiling nor launching starts JAX.
"""

from kvjax.binaries import num_compilations as num_compilations
