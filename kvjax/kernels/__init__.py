"""Pallas Mosaic GPU kernels, for sm_90 and later; each is held to its XLA form byte for byte.

What is named here is for launchers of their own, which pass addresses instead of arrays.
"""

from kvjax.kernels.compat import BASE_ALIGNMENT as BASE_ALIGNMENT
from kvjax.kernels.compat import NUMBER_SHIFT as NUMBER_SHIFT
from kvjax.kernels.gather import any_count as gather_kernel
from kvjax.kernels.memory import AnyCount as AnyCount
from kvjax.kernels.memory import Argument as Argument
from kvjax.kernels.memory import PageMemory as PageMemory
from kvjax.kernels.memory import RowMemory as RowMemory
from kvjax.kernels.write import SEARCHED as SEARCHED
from kvjax.kernels.write import any_count as write_kernel
from kvjax.pages import PageRegion as PageRegion

__all__ = [
    "BASE_ALIGNMENT",
    "NUMBER_SHIFT",
    "SEARCHED",
    "AnyCount",
    "Argument",
    "PageMemory",
    "PageRegion",
    "RowMemory",
    "gather_kernel",
    "write_kernel",
]
