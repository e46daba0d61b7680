"""Lists of words to recall, for `benchmarks.accuracy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def running_words(prose: str) -> list[str]:
    """Returns the lowercase words of a text, as often as it has them.

    Of tokens drawn from a vocabulary, many are rare fragments, which a model does not recall from any cache.
    """
    return [word for word in prose.split() if word.isascii() and word.isalpha() and word.islower()]


def repeated(
    words: Sequence[str], encode: Callable[[str], Sequence[int]], *, num_lists: int, num_tokens: int, seed: int
) -> list[np.ndarray]:
    """Returns lists of random words, then the same again, int32 `[num_tokens]` each.

    A list depends on its number and on the seed, not on the number of lists.
    """
    lists = []
    for number in range(num_lists):
        drawn = np.random.default_rng((seed, number)).choice(words, num_tokens // 2)
        tokens = encode("".join(f" {word}" for word in drawn))[: num_tokens // 2]
        lists.append(np.tile(np.asarray(tokens, np.int32), 2))
    return lists
