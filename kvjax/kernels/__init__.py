"""Pallas Mosaic GPU kernels, for sm_90 and later; each is held to its XLA form byte for byte.

What is named here is for launchers of their own, which pass addresses instead of arrays.
"""

from kvjax.kernels.compat import BASE_ALIGNMENT as BASE_ALIGNMENT
from kvjax.kernels.gather import any_count as gather_kernel
from kvjax.kernels.memory import AnyCount as AnyCount
from kvjax.kernels.memory import Argument as Argument
from kvjax.kernels.memory import PageMemory as PageMemory
from kvjax.kernels.memory import RowMemory as RowMemory
from kvjax.kernels.memory import packed as packed
from kvjax.kernels.registers import MAX_VECTOR_BYTES as MAX_VECTOR_BYTES
from kvjax.kernels.write import SEARCHED as SEARCHED
from kvjax.kernels.write import any_count as write_kernel
from kvjax.pages import PageRegion as PageRegion

__all__ = [
    "BASE_ALIGNMENT",
    "MAX_VECTOR_BYTES",
    "SEARCHED",
    "AnyCount",
    "Argument",
    "PageMemory",
    "PageRegion",
    "RowMemory",
    "gather_kernel",
    "packed",
    "write_kernel",
]
