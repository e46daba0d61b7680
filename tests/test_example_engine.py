"""The example's engine gives each request the tokens that it would have alone, whatever runs beside it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import HeldCopies, compilations, poison

import kvjax
from examples import llama
from examples.engine import Engine

CONFIG = llama.ModelConfig(61, 32, 48, 2, 4, 2, 16)
SPEC = kvjax.FullAttentionSpec(4, 2, 16, dtype=kvjax.KVCacheDType.FLOAT32)
NUM_BLOCKS, MAX_BLOCKS = 20, 8
LENGTHS, NEW = (9, 3, 1, 14, 6, 22, 9), (5, 9, 2, 1, 7, 3, 4)


@functools.cache
def params() -> llama.Params:
    return llama.random_params(CONFIG, jax.random.key(0), "float32")


def made(calls: list[dict[str, Any]] | None = None, **options: Any) -> tuple[Engine, kvjax.BlockPool]:
    pool = kvjax.BlockPool(NUM_BLOCKS, SPEC.block_size)
    cache = kvjax.KVCache.allocate(SPEC, NUM_BLOCKS, num_layers=2)
    cache = kvjax.KVCache(jax.numpy.full_like(cache.kv, np.nan), SPEC, num_layers=2)

    def run(tokens: Any, previous: Any, step: Any, caches: Any, **buckets: int) -> Any:
        if calls is not None:
            calls.append({**buckets, "num_tokens": len(tokens), "q_lens": np.diff(step.cu_q_lens).tolist()})
        return llama.greedy_step(params(), tokens, previous, step, caches, config=CONFIG, **buckets)

    options = {"num_seqs": [2, 4], "max_blocks": MAX_BLOCKS, "chunk": 5} | options
    return Engine(run, cache, pool, **options), pool


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    found = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in LENGTHS]
    found[-1] = found[0][:8] + found[-1][8:]  # two blocks in common
    return found


@functools.cache
def alone() -> list[list[int]]:
    """What the model continues each prompt with, by itself and all in one step a token."""
    found = []
    for prompt, number in zip(prompts(), NEW, strict=True):
        known = list(prompt)
        for _ in range(number):
            pool = kvjax.BlockPool(MAX_BLOCKS, SPEC.block_size)
            sequence = pool.sequence()
            pool.append([sequence], [len(known)])
            step = kvjax.StepMetadata.from_sequences([sequence], [len(known)], num_tokens=32, max_blocks=MAX_BLOCKS)
            tokens = np.pad(known, (0, 32 - len(known))).astype(np.int32)
            cache = kvjax.KVCache.allocate(SPEC, MAX_BLOCKS, num_layers=2)
            following, _ = llama.greedy_step(params(), tokens, np.zeros(1, np.int32), step, cache, config=CONFIG)
            known.append(int(following[0]))
        found.append(known[len(prompt) :])
    return found


@pytest.mark.full
@pytest.mark.parametrize("max_prompts", [1, 3])
def test_requests_get_their_tokens_in_any_batch(max_prompts: int):
    calls: list[dict[str, Any]] = []
    engine, pool = made(calls, max_prompts=max_prompts)
    where = engine.caches.kv.unsafe_buffer_pointer()
    requests = [engine.submit(*each) for each in zip(prompts()[:-1], NEW, strict=False)]
    ended = []
    while not engine.is_idle:
        ended += engine.step()
    assert sorted(map(id, ended)) == sorted(map(id, requests))
    requests.append(engine.submit(prompts()[-1], NEW[-1]))
    while not engine.is_idle:
        engine.step()
    assert [request.generated for request in requests] == alone()
    assert pool.num_free == NUM_BLOCKS
    assert engine.caches.kv.unsafe_buffer_pointer() == where
    mixed = [call for call in calls if call["max_q_len"] == 5]
    assert any(1 in call["q_lens"] and max(call["q_lens"]) > 1 for call in mixed)
    assert all(sum(n > 1 for n in call["q_lens"]) <= max_prompts for call in calls)
    sizes = {call["num_tokens"] for call in calls}
    assert {2, 7, 9} <= sizes <= {2, 4, 7, 9}
    assert len(calls[-1]["q_lens"]) == 2
    assert sum(sum(call["q_lens"]) for call in calls) == sum(LENGTHS) + sum(NEW) - len(NEW) - 8


@pytest.mark.full
@pytest.mark.parametrize("num_rows", [4, 6])
def test_requests_get_their_tokens_with_exact_windows(num_rows: int):
    """Which hold what float32 pages do: a token that a window lacked, or had of another request, would show."""
    spec = kvjax.FullAttentionSpec(4, 2, 16, dtype="float32", model_dtype="float32")

    def layer() -> llama.Windowed:
        cache, window = kvjax.KVCache.allocate(spec, NUM_BLOCKS), kvjax.ExactWindow.allocate(spec, num_rows, 6)
        ring = kvjax.KVCache(jax.numpy.full_like(window.ring.kv, np.nan), window.ring.spec)
        return llama.Windowed(cache, kvjax.ExactWindow(ring, 6))

    caches = (layer(), layer())
    fills: list[Any] = []

    def fill(*args: Any) -> Any:
        fills.append(args[2])
        return llama.fill_windows(*args)

    engine, _ = made(max_prompts=2, windows=(kvjax.WindowRows(caches[0].window), fill))
    engine.caches = caches
    requests = [engine.submit(*each) for each in zip(prompts()[:-1], NEW, strict=False)]
    while not engine.is_idle:
        engine.step()
    assert not fills
    requests.append(engine.submit(prompts()[-1], NEW[-1]))
    while not engine.is_idle:
        engine.step()
    assert [request.generated for request in requests] == alone()
    assert len(fills) == 1  # of the prompt whose first blocks were cached


@pytest.mark.full
def test_a_request_ends_with_the_token_that_ends_texts():
    longest = max(range(len(NEW)), key=NEW.__getitem__)
    tokens = alone()[longest]
    eos = tokens[4]
    engine, pool = made(eos_token_id=eos)
    request = engine.submit(prompts()[longest], NEW[longest])
    while not engine.is_idle:
        engine.step()
    assert request.generated == tokens[: tokens.index(eos) + 1]
    assert pool.num_free == NUM_BLOCKS


USER_PROMPT, USER_NEW = 7, 17
BLOCKS_OF_USER = -(-(USER_PROMPT + USER_NEW) // SPEC.block_size)


def served_users(num_blocks: int, num_host_blocks: int) -> tuple[Engine, list[list[int]], list[int]]:
    """Four users at once, then one with the first's prefix: the engine, their tokens, and how many each step computed.

    Pages are NaN before; all blocks are free after.
    """
    rng = np.random.default_rng(1)
    users = [rng.integers(0, CONFIG.vocab_size, USER_PROMPT).tolist() for _ in range(4)]
    pool = kvjax.BlockPool(num_blocks, SPEC.block_size, num_host_blocks=num_host_blocks)
    cache = kvjax.KVCache.allocate(SPEC, num_blocks, num_layers=2, sharding=jax.devices()[0])
    cache = dataclasses.replace(cache, kv=jnp.full_like(cache.kv, jnp.nan))
    calls = []

    def run(tokens: Any, previous: Any, step: Any, caches: Any, **buckets: int) -> Any:
        calls.append(int(step.cu_q_lens[-1]))
        return llama.greedy_step(params(), tokens, previous, step, caches, config=CONFIG, **buckets)

    engine = Engine(run, cache, pool, num_seqs=[4], max_blocks=BLOCKS_OF_USER, chunk=8)
    if engine._host is not None:
        poison(engine._host)
    found = []
    for prompts_of_round in (users, [[*users[0][:4], 5]]):
        requests = [engine.submit(prompt, USER_NEW) for prompt in prompts_of_round]
        while not engine.is_idle:
            engine.step()
        found += [request.generated for request in requests]
    assert (pool.num_free, pool.num_free_host) == (num_blocks, num_host_blocks)
    return engine, found, calls


def test_twice_the_users_that_fit_wait_on_the_host_and_get_their_tokens():
    """Their tokens are those of a pool that holds all, none is computed twice, and an evicted prefix comes back."""
    _, expected, calls_of_all = served_users(5 * BLOCKS_OF_USER, 0)
    engine, found, calls = served_users(2 * BLOCKS_OF_USER, 4 * BLOCKS_OF_USER)
    assert found == expected
    assert engine.num_preempted >= 2
    assert engine.num_recomputed == 0
    assert sum(calls) == sum(calls_of_all) == 4 * (USER_PROMPT + USER_NEW - 1) + 1 + USER_NEW - 1
    assert len(calls) > len(calls_of_all)


@pytest.mark.parametrize("shares", [False, True])
def test_others_go_on_while_blocks_come_from_the_host_but_for_those_that_share_them(
    shares: bool, monkeypatch: pytest.MonkeyPatch
):
    """One that is submitted after them waits if it has the same prefix, which their blocks do not hold yet."""
    engine, found, _ = served_users(2 * BLOCKS_OF_USER, 4 * BLOCKS_OF_USER)
    rng = np.random.default_rng(1)
    users = [rng.integers(0, CONFIG.vocab_size, USER_PROMPT).tolist() for _ in range(4)]
    other = engine.submit([3, 1, 4], 9)
    engine.step()
    held = HeldCopies(monkeypatch)
    texts = [[*users[i], *found[i]] for i in (1, 1 if shares else 2)]
    waiting = [engine.submit(text[:-1], 1) for text in texts]
    while not other.is_done:
        engine.step()
    loading = [request for request in engine._running if request.loading is not None]
    assert loading[0] is waiting[0]
    assert not any(request.generated for request in waiting)
    held.released.set()
    while not engine.is_idle:
        engine.step()
    assert [request.generated for request in waiting] == [text[-1:] for text in texts]


@pytest.mark.parametrize(("num_host_blocks", "num_recomputed"), [pytest.param(1, 2, marks=pytest.mark.full), (6, 1)])
def test_users_that_the_host_has_no_room_for_are_computed_again_and_get_their_tokens(
    num_host_blocks: int, num_recomputed: int
):
    """Of two that are preempted, the host has room for none, or for one beside what is evicted."""
    _, expected, calls_of_all = served_users(5 * BLOCKS_OF_USER, 0)
    engine, found, calls = served_users(2 * BLOCKS_OF_USER, num_host_blocks)
    assert found == expected
    assert all(len(tokens) == USER_NEW for tokens in found)
    assert (engine.num_preempted, engine.num_recomputed) == (2, num_recomputed)
    assert sum(calls) > sum(calls_of_all)


def test_the_next_step_starts_before_the_tokens_of_the_last_are_read():
    reads: list[int] = []

    class Following:
        def __init__(self, number: int) -> None:
            self.number = number

        def copy_to_host_async(self) -> None:
            pass

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            reads.append(self.number)
            return np.full(4, 7)

    started: list[tuple[int, list[int], Any]] = []

    def run(tokens: Any, previous: Any, step: Any, caches: Any, **_: Any) -> Any:
        started.append((len(reads), tokens.tolist(), previous))
        return Following(len(started)), caches

    engine = Engine(run, None, kvjax.BlockPool(8, 4), num_seqs=[1], max_blocks=8)
    request = engine.submit([3], 4)
    while not engine.is_idle:
        engine.step()
    assert [tokens for _, tokens, _ in started] == [[3], [~0], [~0], [~0]]
    assert [before for before, _, _ in started] == [0, 0, 1, 2]
    assert [previous.number for _, _, previous in started[1:]] == [1, 2, 3]
    assert (request.generated, reads) == ([7] * 4, [1, 2, 3, 4])


def test_each_kind_of_step_is_compiled_once_where_weights_and_caches_are_committed():
    device = jax.devices()[0]
    weights = jax.device_put(params(), device)
    cache = kvjax.KVCache.allocate(SPEC, NUM_BLOCKS, num_layers=2, sharding=device)
    run = functools.partial(llama.greedy_step, weights, config=CONFIG)
    pool = kvjax.BlockPool(NUM_BLOCKS, SPEC.block_size)
    engine = Engine(run, cache, pool, num_seqs=[3], max_blocks=MAX_BLOCKS, chunk=4, sharding=device)
    engine.submit(prompts()[0], 3)
    with compilations() as compiled:
        while not engine.is_idle:
            engine.step()
    assert sum("greedy_step" in name for name in compiled) == 2, compiled


def test_a_request_that_never_fits_is_refused():
    engine, _ = made()
    with pytest.raises(ValueError, match=r"got 30 \+ 3 tokens"):
        engine.submit([1] * 30, 3)
