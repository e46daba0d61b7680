"""A prefix cache on disk: what one process computed of a prompt, another reads.

    python -m examples.prefix_on_disk FOLDER --question 1    # computes the whole prompt
    python -m examples.prefix_on_disk FOLDER --question 2    # reads the text before the question

A block is a file, named by its hash, which depends on its token ids and on all before them, but not on the model: use a
folder for each model, version of its weights and way of computing (adapters, RoPE). Caches of other shapes or dtypes
are recognized, other weights are not. Digests find damage, not intent: let only trusted users write to the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from examples import llama
from examples.engine import Engine


class PrefixFolder:
    """The blocks of prefixes in a folder, which several processes may use at once.

    Args:
      folder: of one model; created if it does not exist.
      pool: of one group of layers, without blocks on the host or states, whose prefixes are not cached.
      max_bytes: of all files; those of the prefixes that were used least recently are removed.
    """

    def __init__(self, folder: Path, pool: kvjax.BlockPool, max_bytes: int) -> None:
        if len(pool.groups) > 1 or pool.num_host_blocks or pool.num_states:
            raise ValueError(
                f"pool: got {len(pool.groups)} groups, {pool.num_host_blocks} blocks on the host and {pool.num_states}"
                " states, expected one group and no others"
            )
        self._folder, self._pool, self._max_bytes = folder, pool, max_bytes
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, caches: Any, token_ids: Sequence[int]) -> Any:
        """Reads what the pool lacks of a prompt's prefix; returns the caches, which are donated.

        The blocks are then cached and free: `BlockPool.sequence` finds them.
        """
        size, sequence = self._pool.block_size, self._pool.sequence(token_ids)
        hashes = self._pool.block_hashes(token_ids[:-1])  # its last token is computed in any case
        for index in range(sequence.num_tokens // size, len(hashes)):
            path = self._path(hashes[index])
            if not path.exists() or not self._pool.num_free:
                break
            self._pool.append([sequence], [size])
            try:
                with path.open("rb") as file:
                    stored = kvjax.open_blocks(file)
                    if stored.hashes != (hashes[index],):
                        raise ValueError("got blocks of another hash")
                    caches = kvjax.import_blocks(stored, caches, sequence.blocks[-1:])
            except (ValueError, OSError) as error:  # damaged, of other caches, or removed meanwhile
                warnings.warn(f"{path}: not read, and computed again: {error}", stacklevel=2)
                with contextlib.suppress(OSError):
                    path.unlink()  # `store` writes it again
                sequence.truncate(index * size)
                break
            sequence.commit(token_ids[index * size : (index + 1) * size])
        self._mark_used(sequence.block_hashes)
        sequence.free()
        return caches

    def store(self, caches: Any, token_ids: Sequence[int]) -> None:
        """Writes the blocks that the pool has of a text and the folder lacks. Waits for the step that computes them."""
        sequence = self._pool.sequence(token_ids)
        for block, block_hash in zip(sequence.blocks, sequence.block_hashes, strict=True):
            path = self._path(block_hash)
            if path.exists():
                continue
            try:
                self._write(path, kvjax.export_blocks(caches, [block], hashes=[block_hash]))
            except OSError as error:  # such as a full disk, which is no reason to stop serving
                warnings.warn(f"{path}: not written: {error}", stacklevel=2)
                break
        self._mark_used(sequence.block_hashes)
        sequence.free()
        self._remove_oldest()

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / f"{block_hash.hex()}.kv"

    def _write(self, path: Path, data: bytes) -> None:
        """Writes a file under another name, so that no reader finds a part of it."""
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_bytes(data)
        unfinished.replace(path)

    def _mark_used(self, hashes: Sequence[bytes]) -> None:
        """Sets times by which the last block of a prefix is removed first: without those before it, it is not found."""
        now = time.time_ns()
        for index, block_hash in enumerate(hashes):
            with contextlib.suppress(OSError):  # removed meanwhile, or of a user who lets others only read
                os.utime(self._path(block_hash), ns=(now - 1000 * index,) * 2)

    def _remove_oldest(self) -> None:
        found = []
        for path in filter(_is_own, self._folder.iterdir()):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._max_bytes:
                return
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                total -= size


def _is_own(path: Path) -> bool:
    """Whether a file is a block, or one that a process which was killed has not renamed; a folder may hold others."""
    return re.fullmatch(r"[0-9a-f]{64}(\.kv|\.\d+\.tmp)", path.name) is not None


def serve(folder: Path, prompts: Sequence[Sequence[int]], max_bytes: int = 2**20) -> tuple[list[list[int]], int]:
    """Serves prompts from an empty cache and a folder; returns new tokens, and how many tokens steps computed."""
    config = llama.ModelConfig(61, 32, 48, 2, 4, 2, 16)
    device, num_blocks = jax.devices()[0], 32
    params = jax.device_put(llama.random_params(config, jax.random.key(0), "float32"), device)
    spec = kvjax.FullAttentionSpec(8, 2, 16, dtype=kvjax.KVCacheDType.FLOAT32)
    cache = kvjax.KVCache.allocate(spec, num_blocks, num_layers=2, sharding=device)
    pool, computed = kvjax.BlockPool(num_blocks, spec.block_size), []

    def run(tokens: Any, previous: Any, step: kvjax.StepMetadata, *args: Any, **buckets: int) -> Any:
        computed.append(int(step.cu_q_lens[-1]))
        return llama.greedy_step(params, tokens, previous, step, *args, config=config, **buckets)

    engine = Engine(run, cache, pool, num_seqs=[4], max_blocks=16, chunk=32, sharding=device)
    prefixes = PrefixFolder(folder, pool, max_bytes)
    requests = []
    for prompt in prompts:
        engine.caches = prefixes.load(engine.caches, prompt)
        requests.append(engine.submit(prompt, 8))
    while not engine.is_idle:
        for request in engine.step():
            prefixes.store(engine.caches, [*request.prompt, *request.generated])
    return [request.generated for request in requests], sum(computed)


def prompt_of(question: int) -> list[int]:
    """A text of 50 tokens, and a question of 5."""
    parts = [np.random.default_rng([seed]).integers(0, 61, size) for seed, size in ((0, 50), (question, 5))]
    return np.concatenate(parts).tolist()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--question", type=int, default=1, help="seed of the end of a prompt")
    given = parser.parse_args(arguments)
    if given.question < 0:
        parser.error(f"argument --question: got {given.question}, expected at least 0")
    try:
        given.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(
            f"argument folder: got {str(given.folder)!r}, expected a folder, or where one can be made: {error.strerror}"
        )
    [tokens], computed = serve(given.folder, [prompt_of(given.question)])
    print(f"steps computed {computed} tokens, new are {tokens}")


if __name__ == "__main__":
    main()
