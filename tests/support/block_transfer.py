"""A prefix computed in one process and decoded in another: `block_transfer.py PORT` is the one that prefills."""

from __future__ import annotations

import functools
import socket
import sys
from typing import Any, BinaryIO

import jax
import numpy as np

import kvjax
from examples import llama

CONFIG = llama.ModelConfig(61, 32, 48, 2, 4, 2, 16)
SPEC = kvjax.FullAttentionSpec(4, 2, 16, dtype=kvjax.KVCacheDType.NVFP4)
PROMPT = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 22).tolist()
NUM_BLOCKS, NUM_NEW = 16, 6


@functools.cache
def params() -> llama.Params:
    return llama.random_params(CONFIG, jax.random.key(0), "float32")


class Server:
    """A pool, its cache, and steps of one sequence."""

    def __init__(self, num_used: int) -> None:
        """The first `num_used` blocks belong to somebody: two servers give a sequence different blocks."""
        self.pool = kvjax.BlockPool(NUM_BLOCKS, SPEC.block_size)
        self.pool.allocate(num_used)
        cache = kvjax.KVCache.allocate(SPEC, NUM_BLOCKS, num_layers=2)
        self.cache = kvjax.KVCache(cache.kv + np.uint8(0xAB), SPEC, num_layers=2)

    def step(self, sequence: kvjax.PagedSequence, new: list[int]) -> int:
        """Computes new tokens; returns the next."""
        self.pool.append([sequence], [len(new)])
        tokens = 1 if len(new) == 1 else 24
        step = kvjax.StepMetadata.from_sequences([sequence], [len(new)], num_tokens=tokens, max_blocks=8)
        ids = np.pad(new, (0, tokens - len(new))).astype(np.int32)
        following, self.cache = llama.greedy_step(
            params(), ids, np.zeros(1, np.int32), step, self.cache, config=CONFIG, max_q_len=tokens, max_prompts=1
        )
        sequence.commit(new)
        return int(following[0])

    def continued(self, sequence: kvjax.PagedSequence, token: int) -> list[int]:
        found = [token]
        while len(found) < NUM_NEW:
            found.append(self.step(sequence, [found[-1]]))
        return found

    def pages(self, sequence: kvjax.PagedSequence) -> np.ndarray:
        """The pages of the prompt, uint8 `[num_blocks, bytes]`."""
        blocks = sequence.blocks[: -(-len(PROMPT) // SPEC.block_size)]
        return np.asarray(self.cache.kv)[blocks].reshape(len(blocks), -1)


def tokens_alone() -> list[int]:
    server = Server(0)
    sequence = server.pool.sequence(PROMPT)
    return server.continued(sequence, server.step(sequence, PROMPT))


def prefill(file: BinaryIO) -> None:
    """Computes the prompt, and sends the next token, the blocks, and these once more as they are."""
    server = Server(0)
    sequence = server.pool.sequence(PROMPT)
    token = server.step(sequence, PROMPT)
    file.write(token.to_bytes(4, "little"))
    kvjax.export_blocks(server.cache, sequence.blocks, file, hashes=sequence.block_hashes)
    file.write(server.pages(sequence).tobytes())


def decode(file: BinaryIO) -> tuple[list[int], Any, np.ndarray]:
    """Receives what `prefill` sent, and decodes; returns the tokens, the hashes and the pages after the import."""
    server = Server(3)
    token = int.from_bytes(file.read(4), "little")
    stored = kvjax.open_blocks(file)
    sequence = server.pool.sequence()
    server.pool.append([sequence], [len(PROMPT)])
    assert len(sequence.blocks) == stored.num_blocks
    server.cache = kvjax.import_blocks(stored, server.cache, sequence.blocks)
    sequence.commit(PROMPT)
    assert sequence.block_hashes == stored.hashes
    pages = server.pages(sequence)
    return server.continued(sequence, token), stored.hashes, pages


if __name__ == "__main__":
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection, connection.makefile("wb") as to:
        prefill(to)
