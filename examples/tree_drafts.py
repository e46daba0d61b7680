"""Greedy decoding with drafts that are a tree: a step checks several continuations of each sequence at once.

    python -m examples.tree_drafts

Where a text has gone on in two ways before, `examples.speculative` has to choose one; here a step checks both. The
tokens are still those of decoding without drafts. A tree is a list of tokens, parents before children, that begins with
the last known token. The order of the calls, for each step:

1. `append` makes room for the tree of each sequence; they may have different sizes.
2. The step writes the trees, and gives the token that follows each row. A row's position, for RoPE, is that of the last
   known token plus the row's depth in the tree. Its slot is that of its place in the list, and `tree_mask` hides all
   but its ancestors.
3. The longest path in which every token is the one that follows its parent is accepted. Its rows are written again, to
   the slots that their positions have. Keys need no other rotation.
4. `truncate` takes back what follows the path, and `commit` makes it known.

A sliding window counts from a row's position too, its depth: the row sees what it would without the other branches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from examples import llama
from examples.speculative import Speculator, lookup

type Branches = Callable[[Sequence[int], int], Sequence[Sequence[int]]]
"""`(known tokens, most guesses) -> guesses of the next ones, in several ways`, which may begin alike."""


class Tree(NamedTuple):
    """Tokens, the last known one first, and the place of each one's parent; that of the first is -1."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def of(cls, root: int, branches: Sequence[Sequence[int]], most: int) -> Tree:
        """Joins branches where they begin alike; of more than `most` drafts the deepest are dropped."""
        tree, children, ends = cls([root], [-1]), {}, [0] * len(branches)
        for depth in range(max(map(len, branches), default=0)):
            for number, branch in enumerate(branches):
                if depth < len(branch):
                    child = ends[number], branch[depth]
                    if child not in children:
                        if len(tree.tokens) > most:
                            return tree
                        children[child] = len(tree.tokens)
                        tree.tokens.append(child[1])
                        tree.parents.append(child[0])
                    ends[number] = children[child]
        return tree

    def mask(self, width: int) -> np.ndarray:
        """Returns what each of `width` rows sees of the others, `[width, width]`: its ancestors and itself."""
        seen = np.eye(width, dtype=bool)
        for row, parent in enumerate(self.parents[1:], 1):
            seen[row] |= seen[parent]
        return seen

    def accepted(self, following: Sequence[int]) -> list[int]:
        """Returns the places of the path whose tokens follow each other, by the token that follows each row."""
        children = {(parent, token): row for row, (token, parent) in enumerate(zip(*self, strict=True))}
        path = [0]
        while (child := children.get((path[-1], following[path[-1]]))) is not None:
            path.append(child)
        return path


def lookups(known: Sequence[int], most: int, *, ngram: int = 1, count: int = 2) -> list[Sequence[int]]:
    """Returns what followed the last `ngram` tokens before, in the `count` last ways that begin differently."""
    found: dict[int, Sequence[int]] = {}
    for end in range(len(known) - 1, ngram - 1, -1):
        if list(known[end - ngram : end]) == list(known[-ngram:]) and len(found) < count and most:
            found.setdefault(known[end], known[end : end + most])
    return list(found.values())


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def verify_trees(
    params: llama.Params,
    tokens: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    step: kvjax.StepMetadata,
    cache: kvjax.KVCache,
    *,
    config: llama.ModelConfig,
) -> tuple[jax.Array, kvjax.KVCache, jax.Array]:
    """Runs a step of trees of up to `mask.shape[1]` tokens.

    Returns:
      The most likely token after every row, int32 `[num_tokens]`; the cache; and what was written to it,
      `[keys and values, num_layers, num_tokens, num_kv_heads, head_dim]`.
    """

    def attend(query, key, value, carried, step, layer):  # type: ignore[no-untyped-def]
        cache, rows = carried
        options = {"tree_mask": mask, "max_q_len": mask.shape[1], "max_prompts": 0}
        attended, cache = kvjax.attend(query, key, value, cache, step, layer=layer, unique_slots=True, **options)
        return attended, (cache, rows.at[:, layer].set(jnp.stack([key, value])))

    sizes = 2, config.num_hidden_layers, len(tokens), config.num_key_value_heads, config.head_dim
    carried = cache, jnp.zeros(sizes, params["embedding"].dtype)
    tokens = jnp.asarray(tokens)
    hidden, (cache, rows) = llama.forward(params, config, tokens, step, carried, attend, positions=positions)
    return jnp.argmax(llama.logits(params, hidden), axis=-1).astype(jnp.int32), cache, rows


@functools.partial(jax.jit, donate_argnames="cache")
def write_again(cache: kvjax.KVCache, rows: jax.Array, slots: jax.Array) -> kvjax.KVCache:
    """Writes the rows of `verify_trees` to other slots, -1 for those that are not to be written."""
    for layer in range(rows.shape[1]):
        cache = kvjax.reshape_and_cache_flash(*rows[:, layer], cache, slots, layer=layer, unique_slots=True)
    return cache


class TreeSpeculator(Speculator):
    """Continues prompts greedily, several tokens a step where a branch of the drafts is right.

    The arguments are those of `Speculator`, but for `draft`, which returns branches; `num_drafts` is the most tokens of
    a tree without its first, for which the pool and `max_blocks` need room after the last token.
    """

    def __init__(self, *args: Any, draft: Branches = lookups, **options: Any) -> None:
        super().__init__(*args, draft=draft, **options)

    def _drafted(self, known: list[int], most: int) -> Tree:
        return Tree.of(known[-1], [branch[:most] for branch in self._draft(known, most)], self._num_drafts)

    def _verify(self, sequences: list[kvjax.PagedSequence], trees: list[Tree], rows: int) -> list[list[int]]:
        """Runs a step over trees; returns the tokens that each sequence gains."""
        starts, q_lens = [sequence.num_tokens for sequence in sequences], [len(tree.tokens) for tree in trees]
        firsts = np.cumsum([0, *q_lens])[:-1].tolist()
        tokens, positions, mask = self._packed(trees, starts, firsts, rows)
        self._pool.append(sequences, q_lens)
        step = kvjax.StepMetadata.from_sequences(
            sequences, q_lens, num_tokens=len(tokens), num_seqs=rows, max_blocks=self._max_blocks
        )
        following, self._cache, written = verify_trees(
            self._params, tokens, positions, mask, step, self._cache, config=self._config
        )
        after = np.asarray(following).tolist()
        paths = [
            first + np.array(tree.accepted(after[first : first + q_len]))
            for tree, first, q_len in zip(trees, firsts, q_lens, strict=True)
        ]
        slots = np.full(len(tokens), -1, np.int32)
        for sequence, start, first, path in zip(sequences, starts, firsts, paths, strict=True):
            is_moved = path != first + np.arange(len(path))
            slots[path] = np.where(is_moved, sequence.slots(start, start + len(path)), -1)
        if (slots >= 0).any():
            self._cache = write_again(self._cache, written, slots)
        for sequence, start, path in zip(sequences, starts, paths, strict=True):
            sequence.truncate(start + len(path))
            sequence.commit(tokens[path])
            self.num_accepted += len(path) - 1
        self.num_steps += 1
        return [[after[row] for row in path] for path in paths]

    def _packed(self, trees: list[Tree], starts: list[int], firsts: list[int], rows: int) -> tuple[np.ndarray, ...]:
        """Returns the tokens of trees, from rows `firsts` on, their positions and masks; padded for `rows` trees."""
        width = 1 + self._num_drafts
        tokens, positions = np.zeros((2, rows * width), np.int32)
        mask = np.zeros((rows, width, width), bool)
        for row, (tree, start, first) in enumerate(zip(trees, starts, firsts, strict=True)):
            own, mask[row] = slice(first, first + len(tree.tokens)), tree.mask(width)
            tokens[own], positions[own] = tree.tokens, start + mask[row, : len(tree.tokens)].sum(axis=1) - 1
        return tokens, positions, mask


def main() -> None:
    config = llama.ModelConfig(61, 32, 48, 2, 4, 2, 16)
    params = llama.random_params(config, jax.random.key(0), "float32")
    spec = kvjax.FullAttentionSpec(16, 2, 16, dtype=kvjax.KVCacheDType.FLOAT32)
    prompts = [np.random.default_rng(seed).integers(0, config.vocab_size, 20).tolist() for seed in range(2)]
    ways = {
        "no drafts": (Speculator, {"num_drafts": 0}),
        "one branch of 6": (Speculator, {"num_drafts": 6, "draft": functools.partial(lookup, ngram=1)}),
        "a tree of 6": (TreeSpeculator, {"num_drafts": 6}),
    }
    for name, (kind, options) in ways.items():
        cache = kvjax.KVCache.allocate(spec, 32, num_layers=config.num_hidden_layers)
        pool = kvjax.BlockPool(32, spec.block_size)
        speculator = kind(params, config, cache, pool, max_blocks=16, **options)
        tokens = speculator.generate(prompts, 100)
        print(f"{name}: {speculator.num_steps} steps, {speculator.num_accepted} drafts right; {tokens[0][-20:]}")


if __name__ == "__main__":
    main()
