"""The demo's transformer: what its attention sees, what its weights file holds, and that it has learned something."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.demo import model, text, weights
from kvjax.demo.model import FULL, SLIDING, TransformerConfig

SMALL = TransformerConfig(
    hidden_size=32, intermediate_size=48, head_dim=16, sliding_window=4, layer_types=(SLIDING, FULL)
)


def with_layers(*layer_types: str) -> TransformerConfig:
    return dataclasses.replace(SMALL, layer_types=layer_types)


def logits_of(config: TransformerConfig, tokens: np.ndarray) -> np.ndarray:
    params = model.init_params(config, jax.random.key(0))
    return np.asarray(jax.jit(model.dense_logits, static_argnums=1)(params, config, tokens))


def changed_positions(config: TransformerConfig, position: int) -> list[int]:
    """Positions whose logits move when the token at `position` does."""
    tokens = np.arange(12) * 7
    other = tokens.copy()
    other[position] += 1
    moved = np.abs(logits_of(config, tokens) - logits_of(config, other)).max(axis=1) > 1e-6
    return np.flatnonzero(moved).tolist()


def test_a_token_is_seen_by_itself_and_by_all_after_it():
    assert changed_positions(with_layers(FULL), 5) == list(range(5, 12))


def test_a_sliding_layer_sees_its_window_and_no_further():
    assert changed_positions(with_layers(SLIDING), 5) == [5, 6, 7, 8]


def test_two_sliding_layers_see_two_windows():
    assert changed_positions(with_layers(SLIDING, SLIDING), 2) == list(range(2, 9))


@pytest.mark.full
def test_only_relative_positions_count():
    params = model.init_params(SMALL, jax.random.key(0))
    tokens = jnp.arange(10) * 5

    def logits_from(start: int) -> np.ndarray:
        def attend(layer, query, key, value):
            return model.causal_attention(query, key, value, jnp.arange(10), SMALL.window(layer))

        return np.asarray(model.forward(params, SMALL, tokens, start + jnp.arange(10), attend))

    np.testing.assert_allclose(logits_from(0), logits_from(1000), atol=2e-4)
    shuffled = jnp.asarray(np.random.default_rng(0).permutation(tokens)).at[-1].set(tokens[-1])
    unordered = model.dense_logits(params, SMALL, shuffled)[-1]
    assert np.abs(unordered - logits_from(0)[-1]).max() > 1e-3


def test_bits_per_token_of_uniform_logits_is_the_width_of_the_vocabulary():
    bits = model.bits_per_token(jnp.zeros((3, 256)), jnp.array([0, 7, 255]))
    np.testing.assert_allclose(bits, 8.0, rtol=1e-6)


def test_weights_come_back_as_they_were_saved(tmp_path):
    params = model.init_params(SMALL, jax.random.key(1))
    weights.save(tmp_path / "w.safetensors", SMALL, params, {"seed": "1"})
    loaded = weights.load(tmp_path / "w.safetensors")
    assert loaded.config == SMALL
    assert loaded.training == {"seed": "1"}
    assert loaded.params.keys() == params.keys()
    for name, array in loaded.params.items():
        assert array.dtype == jnp.float32
        np.testing.assert_array_equal(array, np.asarray(params[name], np.float16).astype(np.float32))


def test_the_shipped_weights_are_small_and_say_how_they_were_made():
    assert weights.SHIPPED.stat().st_size <= 3_000_000
    shipped = weights.load()
    assert {name: array.shape for name, array in shipped.params.items()} == model.parameter_shapes(shipped.config)
    assert {SLIDING, FULL} == set(shipped.config.layer_types)
    assert {"steps", "seed", "python", "held_out_bits_per_byte"} <= shipped.training.keys()


@pytest.mark.full
def test_the_shipped_model_has_learned_its_text():
    shipped = weights.load()
    root = text.standard_library()
    training, held_out = (text.read(root, side) for side in text.split(text.source_files(root)))
    pieces = np.stack(text.excerpts(held_out, [257] * 16, np.random.default_rng(0))).astype(np.int32)
    dense = jax.jit(jax.vmap(lambda tokens: model.dense_logits(shipped.params, shipped.config, tokens)))
    logits = dense(pieces[:, :-1]).reshape(-1, 256)
    learned = float(jnp.mean(model.bits_per_token(logits, pieces[:, 1:].reshape(-1))))
    assert learned < 0.6 * text.unigram_bits_per_byte(training, pieces[:, 1:].reshape(-1))
    assert learned == pytest.approx(float(shipped.training["held_out_bits_per_byte"]), rel=0.3)
