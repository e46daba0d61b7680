"""A byte-level transformer served from a paged cache: each KV cache dtype's cost and accuracy on real text.

Run by `kvjax demo`. It uses only kvjax's public names, so it is also an example of them.
"""
