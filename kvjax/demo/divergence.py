"""How far a model's predictions are from those of the same model with an unquantized cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Divergence(NamedTuple):
    """Measurements at positions of a text, `[positions]` each.

    Attributes:
      kl: Kullback-Leibler divergence of the prediction from the reference's, in nats: sum of `p log(p / q)` over the
        vocabulary, where `p` is the reference's.
      agrees: whether the likeliest token is the reference's.
      predicts: whether the likeliest token is the text's next.
      nll: minus the log-probability of the text's next token, in nats.
    """

    kl: np.ndarray
    agrees: np.ndarray
    predicts: np.ndarray
    nll: np.ndarray


class Summary(NamedTuple):
    """Means over positions. `accuracy` is of the likeliest token.

    `kl_error` is the standard error of the mean of texts, whose positions are not independent. Those of a single text
    are taken as if they were.
    """

    kl: float
    kl_error: float
    agreement: float
    accuracy: float
    perplexity: float


def diverge(logits: jax.Array, reference: jax.Array, targets: np.ndarray) -> Divergence:
    """Compares logits, `[positions, vocab_size]`; `targets [positions]` are the next tokens."""
    return Divergence(*map(np.asarray, _diverge(logits, reference, jnp.asarray(targets))))


def summarize(parts: Sequence[Divergence]) -> Summary:
    """Returns the means over all positions of all texts."""
    kl, agrees, predicts, nll = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*parts, strict=True))
    samples = np.array([part.kl.mean() for part in parts]) if len(parts) > 1 else kl
    return Summary(
        kl=float(kl.mean()),
        kl_error=float(samples.std(ddof=1) / np.sqrt(len(samples))),
        agreement=float(agrees.mean()),
        accuracy=float(predicts.mean()),
        perplexity=float(np.exp(nll.mean())),
    )


@jax.jit
def _diverge(logits: jax.Array, reference: jax.Array, targets: jax.Array) -> tuple[jax.Array, ...]:
    got, expected = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    kl = jnp.sum(jnp.exp(expected) * (expected - got), axis=-1)
    likeliest = jnp.argmax(logits, axis=-1)
    agrees, predicts = likeliest == jnp.argmax(reference, axis=-1), likeliest == targets
    return kl, agrees, predicts, -jnp.take_along_axis(got, targets[:, None], axis=-1)[:, 0]
