"""Models served from a paged cache: each KV cache dtype's cost and accuracy on real text.

Run by `kvjax demo`. The model is a small byte-level transformer that kvjax includes, or a pretrained one that it
fetches. Uses only kvjax's public names, so it is also an example of them.
"""
