"""Makes jax use the CPU if there is no NVIDIA driver; environments made by `setup_env.sh` run it at startup.

With jax's CUDA plugin and CUDA's libraries (from torch) but no driver, the process would end with a segmentation fault
as soon as jax looks for devices.
"""

import ctypes
import os

if "JAX_PLATFORMS" not in os.environ:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        os.environ["JAX_PLATFORMS"] = "cpu"
