"""Greedy decoding with drafts: a step checks several guesses of each sequence, and takes the wrong ones back.

    python -m examples.speculative

The tokens are those of decoding without drafts. Drafts here come from the text itself, as in prompt lookup: what
followed the last time that its last tokens occurred. Any function from known tokens to guesses will do, such as a
smaller model. The order of the calls on a sequence, for each step:

1. `append` makes room for the last known token and its drafts. A pool that knows windows frees the blocks that they
   have passed at the first of these tokens. With another pool, call `free_before(num_tokens - window + 1)` now, before
   `append`: counted from the drafts, it would free blocks that a shorter sequence needs again.
2. The step writes all of them, and gives the token that follows each.
3. `truncate` takes back the drafts from the first wrong one on.
4. `commit` makes known those that stay. A rejected draft is never committed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from examples import llama

type Draft = Callable[[Sequence[int], int], Sequence[int]]
"""`(known tokens, most guesses) -> guesses of the next ones`."""


def lookup(known: Sequence[int], most: int, *, ngram: int = 2) -> Sequence[int]:
    """Returns what followed the last earlier occurrence of the last `ngram` tokens."""
    last = list(known[-ngram:])
    for end in range(len(known) - 1, ngram - 1, -1):
        if list(known[end - ngram : end]) == last:
            return known[end : end + most]
    return []


@functools.partial(
    jax.jit, static_argnames=("config", "max_q_len", "max_prompts", "decode_q_len"), donate_argnames="cache"
)
def verify_step(
    params: llama.Params,
    tokens: jax.Array,
    step: kvjax.StepMetadata,
    cache: kvjax.KVCache,
    *,
    config: llama.ModelConfig,
    **options: int,
) -> tuple[jax.Array, kvjax.KVCache]:
    """Returns the most likely token after every row, int32 `[num_tokens]`, and the cache of all layers."""

    def attend(query, key, value, cache, step, layer):  # type: ignore[no-untyped-def]
        return kvjax.attend(query, key, value, cache, step, layer=layer, unique_slots=True, **options)

    hidden, cache = llama.forward(params, config, jnp.asarray(tokens), step, cache, attend)
    return jnp.argmax(llama.logits(params, hidden), axis=-1).astype(jnp.int32), cache


class Speculator:
    """Continues prompts greedily, several tokens a step where drafts are right.

    Attributes:
      num_steps: steps of decoding so far.
      num_accepted: drafts that were right.

    Args:
      params: of the model.
      config: of the model.
      cache: of all layers and `pool.num_blocks` blocks.
      pool: of one group of layers.
      draft: guesses tokens.
      num_drafts: most guesses for a sequence in a step.
      max_blocks: most blocks of a sequence.
    """

    def __init__(
        self,
        params: llama.Params,
        config: llama.ModelConfig,
        cache: kvjax.KVCache,
        pool: kvjax.BlockPool,
        *,
        draft: Draft = lookup,
        num_drafts: int = 4,
        max_blocks: int,
    ) -> None:
        if num_drafts < 0:
            raise ValueError(f"num_drafts: got {num_drafts}, expected at least 0")
        self.num_steps = self.num_accepted = 0
        self._params, self._config, self._cache, self._pool = params, config, cache, pool
        self._draft, self._num_drafts, self._max_blocks = draft, num_drafts, max_blocks

    def generate(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> list[list[int]]:
        """Returns each prompt with its new tokens; `ValueError` for an empty prompt or a negative number of tokens.

        `OutOfBlocksError` if the pool runs out of blocks. The blocks of the call are free afterwards in any case.
        """
        if num_new_tokens < 0:
            raise ValueError(f"num_new_tokens: got {num_new_tokens}, expected at least 0")
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompts[{index}]: got no tokens, expected at least one")
        if not num_new_tokens:
            return [list(prompt) for prompt in prompts]
        sequences: list[kvjax.PagedSequence] = []
        try:
            sequences += (self._pool.sequence(prompt) for prompt in prompts)
            return self._continued(sequences, prompts, num_new_tokens)
        finally:
            for sequence in sequences:
                sequence.free()

    def _continued(
        self, sequences: list[kvjax.PagedSequence], prompts: Sequence[Sequence[int]], num_new_tokens: int
    ) -> list[list[int]]:
        known = [list(prompt) for prompt in prompts]
        for sequence, tokens in zip(sequences, known, strict=True):
            tokens.append(self._prefill(sequence, tokens))
        ends = [len(prompt) + num_new_tokens for prompt in prompts]
        while running := [i for i, tokens in enumerate(known) if len(tokens) < ends[i]]:
            new = [self._drafted(known[i], min(self._num_drafts, ends[i] - len(known[i]) - 1)) for i in running]
            found = self._verify([sequences[i] for i in running], new, rows=len(prompts))
            for i, tokens in zip(running, found, strict=True):
                known[i] += tokens
        return known

    def _drafted(self, known: list[int], most: int) -> list[int]:
        """Returns the last token, which is known and not yet written, and its drafts."""
        return [known[-1], *self._draft(known, most)[:most]]

    def _prefill(self, sequence: kvjax.PagedSequence, prompt: Sequence[int]) -> int:
        """Computes what is not cached of a prompt; returns the next token."""
        new = list(prompt[sequence.num_tokens :])
        size = -(-len(new) // 16) * 16  # few sizes are compiled
        following = self._run([sequence], [new], 1, size, max_q_len=size, max_prompts=1)
        sequence.commit(new)
        return int(following[len(new) - 1])

    def _verify(self, sequences: list[kvjax.PagedSequence], new: list[list[int]], rows: int) -> list[list[int]]:
        """Runs a step over tokens and their drafts; returns the tokens that each sequence gains."""
        starts, width = [sequence.num_tokens for sequence in sequences], 1 + self._num_drafts
        options = {"max_q_len": width, "decode_q_len": width, "max_prompts": 0}
        following = self._run(sequences, new, rows, rows * width, **options).tolist()
        gained, first = [], 0
        for sequence, start, tokens in zip(sequences, starts, new, strict=True):
            after = following[first : first + len(tokens)]
            right = next((i for i, guess in enumerate(tokens[1:]) if guess != after[i]), len(tokens) - 1)
            sequence.truncate(start + 1 + right)
            sequence.commit(tokens[: 1 + right])
            gained.append(after[: right + 1])
            self.num_accepted += right
            first += len(tokens)
        self.num_steps += 1
        return gained

    def _run(
        self, sequences: list[kvjax.PagedSequence], new: list[list[int]], rows: int, num_tokens: int, **options: int
    ) -> np.ndarray:
        q_lens = list(map(len, new))
        self._pool.append(sequences, q_lens)
        step = kvjax.StepMetadata.from_sequences(
            sequences, q_lens, num_tokens=num_tokens, num_seqs=rows, max_blocks=self._max_blocks
        )
        tokens = np.zeros(num_tokens, np.int32)
        tokens[: sum(q_lens)] = np.concatenate(new)
        following, self._cache = verify_step(self._params, tokens, step, self._cache, config=self._config, **options)
        return np.asarray(following)


def main() -> None:
    config = llama.ModelConfig(61, 32, 48, 2, 4, 2, 16)
    params = llama.random_params(config, jax.random.key(0), "float32")
    spec = kvjax.FullAttentionSpec(16, 2, 16, dtype=kvjax.KVCacheDType.FLOAT32)
    prompts = [np.random.default_rng(seed).integers(0, config.vocab_size, 20).tolist() for seed in range(2)]
    for num_drafts in (0, 4):
        cache = kvjax.KVCache.allocate(spec, 32, num_layers=config.num_hidden_layers)
        pool = kvjax.BlockPool(32, spec.block_size)
        speculator = Speculator(params, config, cache, pool, num_drafts=num_drafts, max_blocks=8)
        tokens = speculator.generate(prompts, 40)
        print(f"{num_drafts} drafts: {speculator.num_steps} steps, {speculator.num_accepted} drafts right; {tokens[0]}")


if __name__ == "__main__":
    main()
