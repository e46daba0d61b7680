"""A process that compiles kernels for `workers`: requests come on standard input, replies go to standard output.

A request is a line of JSON. A reply is a line of JSON and the bytes of a `Binary`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import IO, Any

import jax

from kvjax.binaries.binary import Binary, Device
from kvjax.binaries.compiling import compile_here
from kvjax.binaries.encoding import decode_kernel
from kvjax.binaries.keys import SOURCES, options, sources_digest


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    """Compiles what is requested until the requests end."""
    for line in requests:
        try:
            content = _compile(json.loads(line)).to_bytes()
        except Exception as error:  # the one who asked compiles it again, and learns of it
            replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        else:
            replies.write(json.dumps({"size": len(content)}).encode() + b"\n" + content)
        replies.flush()


def _compile(request: dict[str, Any]) -> Binary:
    if sources_digest(SOURCES) != request["sources"]:
        raise ValueError("kvjax's sources are not those of the other process")
    own = options()
    for name, value in request["options"].items():
        if value != own.get(name):
            with contextlib.suppress(AttributeError, ValueError, TypeError):
                jax.config.update(name, value)
    if options() != request["options"]:
        raise ValueError("JAX's options are not those of the other process")
    kernel = decode_kernel(request["kernel"])
    return compile_here(kernel.function, kernel.args, Device(**request["device"]))


def main() -> None:
    """Serves this process's pipes. What libraries print goes to standard error."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
