"""Which kernel serves a call, with which counts and arrays."""
