"""A byte-level transformer served from a paged cache: what each KV cache dtype costs and keeps, on real text.

Reached through `kvjax demo`. Uses kvjax's public names alone, so it doubles as a worked example of them.
"""
