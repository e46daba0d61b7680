"""Keeps jax from looking for NVIDIA GPUs where there is no driver; `setup_env.sh` has environments run it at start.

jax's CUDA plugin is there to compile kernels, and torch brings CUDA's libraries: with both and without a driver, the
plugin ends the process with a segmentation fault as soon as jax looks for devices.
"""

import ctypes
import os

if "JAX_PLATFORMS" not in os.environ:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        os.environ["JAX_PLATFORMS"] = "cpu"
