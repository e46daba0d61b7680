"""Recurrent states beside pages: sequences that share slots, fork and move to the host are as if each ran alone."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import poison

import kvjax
from examples import hybrid
from examples.engine import Engine, swap_states

ROOT = Path(__file__).parents[1]
NUM_NEW = 14
PROMPTS = [
    np.random.default_rng(seed).integers(0, hybrid.VOCABULARY, size).tolist() for seed, size in enumerate([9] * 4)
]


@functools.cache
def weights() -> Any:
    return jax.device_put(hybrid.random_weights(jax.random.key(0)), jax.devices()[0])


def poisoned(num_blocks: int, num_states: int) -> hybrid.Caches:
    def nan(x: jax.Array) -> jax.Array:
        return jax.device_put(jnp.full(x.shape, jnp.nan), x.sharding)

    return jax.tree.map(nan, hybrid.allocate(num_blocks, num_states))


def alone(tokens: list[int]) -> tuple[int, hybrid.Caches]:
    """The token after a text that is computed in one step, and caches with that text only: its state is slot 0."""
    pool, caches = kvjax.BlockPool(8, 4, num_states=1), poisoned(8, 1)
    sequence = pool.sequence()
    pool.append([sequence], [len(tokens)])
    step = kvjax.StepMetadata.from_sequences([sequence], [len(tokens)], num_tokens=32, max_blocks=8)
    padded, slots = np.pad(tokens, (0, 32 - len(tokens))).astype(np.int32), np.zeros(1, np.int32)
    following, caches = hybrid.run(weights(), padded, np.zeros(1, np.int32), step, caches, state_slots=slots)
    assert np.isfinite(caches[0]).all()
    assert np.isfinite(caches[2]).all()
    return int(following[0]), caches


@functools.cache
def expected() -> list[list[int]]:
    texts = [list(prompt) for prompt in PROMPTS]
    for text in texts:
        for _ in range(NUM_NEW):
            text.append(alone(text)[0])
    return [text[len(prompt) :] for text, prompt in zip(texts, PROMPTS, strict=True)]


@pytest.mark.parametrize(("num_host_states", "num_recomputed"), [(4, 0), (1, 1)])
def test_the_engine_gives_requests_their_tokens_where_blocks_for_half_of_them_fit(num_host_states, num_recomputed):
    pool = kvjax.BlockPool(12, 4, num_states=4, num_host_blocks=24, num_host_states=num_host_states)
    engine = Engine(
        functools.partial(hybrid.run, weights()),
        poisoned(12, 4),
        pool,
        num_seqs=[4],
        max_blocks=6,
        chunk=8,
        sharding=jax.devices()[0],
    )
    poison(engine._host)
    for states in engine._host_states:
        states[...] = np.nan
    requests = [engine.submit(prompt, NUM_NEW) for prompt in PROMPTS]
    while not engine.is_idle:
        engine.step()
    assert [request.generated for request in requests] == expected()
    assert (engine.num_preempted, engine.num_recomputed) == (2, num_recomputed)
    assert (pool.num_free_states, pool.num_free, pool.num_free_host) == (4, 12, 24)


def test_an_engine_has_a_state_for_each_sequence_of_a_step():
    with pytest.raises(ValueError, match="pool: got 1 states, expected one for each of 2 sequences"):
        Engine(hybrid.run, None, kvjax.BlockPool(4, 4, num_states=1), num_seqs=[2], max_blocks=4)


class Steps:
    """Runs steps of a pool with two states here and two on the host, and blocks for all."""

    def __init__(self) -> None:
        self.pool = kvjax.BlockPool(16, 4, num_states=2, num_host_blocks=16, num_host_states=2)
        self.caches = poisoned(16, 2)
        self.host = poison(kvjax.HostCaches(self.pages(), 16))
        self.host_states = [np.full(x.shape, np.nan, x.dtype) for x in self.caches if isinstance(x, jax.Array)]
        self.texts: dict[kvjax.PagedSequence, list[int]] = {}

    def sequence(self) -> kvjax.PagedSequence:
        made = self.pool.sequence()
        self.texts[made] = []
        return made

    def pages(self) -> list[kvjax.KVCache]:
        return [x for x in self.caches if isinstance(x, kvjax.KVCache)]

    def copy(self, pairs: np.ndarray) -> None:
        swaps = self.pool.take_swaps()
        self.host.store(self.pages(), swaps.to_host)
        pages, on_host = iter(self.host.load(swaps.from_host).into(self.pages())), iter(self.host_states)

        def swapped(x: Any) -> Any:
            if isinstance(x, kvjax.KVCache):
                return next(pages)
            states = swap_states(x, next(on_host), swaps.states_to_host)
            return swap_states(states, x, swaps.states_from_host)

        self.caches = hybrid.copied([swapped(x) for x in self.caches], pairs, swaps)

    def fork(self, sequence: kvjax.PagedSequence) -> kvjax.PagedSequence:
        child = sequence.fork()
        self.texts[child] = list(self.texts[sequence])
        return child

    def grow(self, new: dict[kvjax.PagedSequence, list[int]]) -> None:
        """Runs a step of two rows at most, and compares all there is with that of each sequence alone."""
        sequences, q_lens = list(new), list(map(len, new.values()))
        self.copy(self.pool.append(sequences, q_lens))
        step = kvjax.StepMetadata.from_sequences(sequences, q_lens, num_tokens=32, num_seqs=2, max_blocks=8)
        tokens, slots = np.zeros(32, np.int32), np.full(2, 2, np.int32)
        tokens[: sum(q_lens)], slots[: len(new)] = np.concatenate(list(new.values())), [x.state for x in sequences]
        following, self.caches = hybrid.run(
            weights(), tokens, np.zeros(2, np.int32), step, self.caches, state_slots=slots
        )
        for row, sequence in enumerate(sequences):
            text = self.texts[sequence]
            text += new[sequence]
            token, of_text = alone(text)
            assert following[row] == token
            np.testing.assert_array_equal(self.caches[0][sequence.state], of_text[0][0])  # before any attention
            np.testing.assert_allclose(self.caches[2][sequence.state], of_text[2][0], rtol=1e-5, atol=1e-5)


def test_states_follow_their_sequences_through_forks_and_swaps():
    steps = Steps()
    one, other = steps.sequence(), steps.sequence()
    steps.grow({one: [3, 1, 4, 1, 5, 9], other: [2, 6]})
    steps.grow({other: [5], one: [3]})
    other.free()
    fork = steps.fork(one)  # one of them takes the slot of `other`, and what that left there goes
    steps.grow({one: [5, 8, 9], fork: [7]})
    slot = one.state
    one.swap_out()
    third = steps.fork(fork)
    steps.grow({third: [2, 3, 8], fork: [4]})
    assert third.state == slot  # the state that was there goes to the host before that of the fork comes
    third.free()
    later = steps.sequence()
    steps.grow({later: [9, 7, 9], fork: [3, 2]})
    assert later.state == slot  # it begins with zeros
    fork.swap_out()
    later.free()
    one.swap_in()
    steps.grow({one: [3, 8]})
    fork.swap_in()
    one.swap_out()
    one.swap_in()  # before any copy is made
    steps.grow({fork: [4], one: [6, 2]})
    one.free()
    second = steps.fork(fork)
    steps.grow({second: [6, 4], fork: [3]})
    second.free()
    fork.free()
    assert (steps.pool.num_free_states, steps.pool.num_free) == (2, 16)


def test_a_sequence_goes_on_in_another_process_from_its_bytes():
    """Of a fork, whose state and last block are copies."""
    here, there = Steps(), Steps()
    one = here.sequence()
    here.grow({one: [3, 1, 4, 1, 5, 9]})
    fork = here.fork(one)
    here.grow({fork: [2, 6], one: [7]})
    data = kvjax.export_blocks(here.caches, fork.blocks, state=fork.state)
    other, arrived = there.sequence(), there.sequence()
    there.grow({other: [2, 7]})
    there.copy(there.pool.append([arrived], [fork.num_tokens]))
    assert arrived.state != fork.state or arrived.blocks.tolist() != fork.blocks.tolist()
    there.caches = kvjax.import_blocks(data, there.caches, arrived.blocks, state=arrived.state)
    there.texts[arrived] = list(here.texts[fork])
    there.grow({arrived: [5, 3], other: [1]})


def test_the_page_shows_the_examples_own_code():
    page = (ROOT / "docs/serving.md").read_text().split("### Windows and states\n")[1].split("\n### ")[0]
    shown = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[1:]
    sources = [(ROOT / f"examples/{name}.py").read_text() for name in ("hybrid", "engine")]
    assert [re.findall(r"^def (\w+)", code, re.MULTILINE) for code in shown] == [["recur"], ["swap_states"]]
    for code, source in zip(shown, sources, strict=True):
        assert f"\n{code}\n\n" in source
