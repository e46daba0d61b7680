"""Pallas Mosaic GPU kernels, for sm_90 and later; each is held to its XLA form byte for byte."""
