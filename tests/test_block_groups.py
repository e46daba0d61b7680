"""Pools of several groups of layers: windows free and find blocks, all groups grow or none; events, states, sizes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import random
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.helpers import matrix, refused

import kvjax
from kvjax import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    FullAttentionSpec,
    KVCacheTypeError,
    KVCacheValueError,
    ModelKVConfig,
    OutOfBlocksError,
    PagedSequence,
    SlidingWindowSpec,
    StepMetadata,
)
from kvjax.block_pool.groups import as_groups, cached_prefix
from kvjax.cli import main
from kvjax.cli.arguments import kv_cache_dtypes

CONFIGS = Path(__file__).parent / "data/configs"


class Layers(NamedTuple):
    block_size: int
    sliding_window: int | None = None


class Walk:
    """Calls in any order; `pages` holds what an engine would have written: of each block, its group's tokens."""

    def __init__(self, rng: random.Random, num_host_blocks: int = 0) -> None:
        self.rng = rng
        self.num_host, self.host_pages, self.is_synced = num_host_blocks, {}, True
        sizes = rng.choice([(1, 2), (2, 2), (2, 3), (4, 2)])
        kinds = [Layers(sizes[0]), Layers(sizes[1], rng.randint(1, 7)), Layers(sizes[1], rng.randint(1, 5))]
        self.groups = rng.sample(kinds, rng.randint(1, 3))
        num_blocks = rng.randint(4, 20 if num_host_blocks else 40)
        options = {"num_host_blocks": num_host_blocks, "records_events": True}
        self.pool = BlockPool(num_blocks, groups=self.groups, **options)
        self.pages: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset) -> ids up to the token's
        self.ids: dict[PagedSequence, list[int]] = {}
        self.num_known: dict[PagedSequence, int] = {}
        self.least: dict[PagedSequence, int] = {}  # the first position that a query may still be at
        self.cached: dict[bytes, BlockStored] = {}

    def held(self) -> collections.Counter[int]:
        blocks = (block for s in self.ids for g in range(len(self.groups)) for block in s.blocks_of(g).tolist())
        return collections.Counter(block for block in blocks if block >= 0)

    def step(self) -> None:
        calls = [self.start, self.append, self.append, self.append, self.commit, self.commit]
        calls += [self.fork, self.truncate, self.free]
        calls += [self.start, self.swap_out, self.swap_in, self.swap_in] * bool(self.num_host)
        self.rng.choice(calls if self.ids else [self.start])()
        self.note_events()
        if self.rng.random() < 0.3:
            self.sync()
        self.check()

    def note_events(self) -> None:
        for event in self.pool.take_events():
            if isinstance(event, BlockStored):
                assert event.block_hash not in self.cached
                self.cached[event.block_hash] = event
                assert event.block_size == self.groups[event.group].block_size == len(event.token_ids)
                group = b"\2" + event.group.to_bytes(4, "little") if event.group else b"\0"
                parent = event.parent_hash or hashlib.sha256(group).digest()
                hashed = b"\1" + parent + np.array(event.token_ids, np.int64).tobytes()
                assert event.block_hash == hashlib.sha256(hashed).digest()
            else:
                assert isinstance(event, BlockRemoved)
                assert self.cached.pop(event.block_hash).block == event.block

    def longest_prefix(self, ids: list[int]) -> int:
        for found in range(len(ids) - 1, 0, -1):
            if all(self.is_cached(group, ids[:found]) for group in range(len(self.groups))):
                return found
        return 0

    def is_cached(self, group: int, ids: list[int]) -> bool:
        size, window = self.groups[group]
        if len(ids) % size:
            return False
        first = 0 if window is None else max(len(ids) - window + 1, 0) // size
        hashes = self.pool.block_hashes(ids, group=group)
        assert len(hashes) == len(ids) // size
        return all(key in self.cached for key in hashes[first:])

    def start(self) -> None:
        known = self.rng.choice(list(self.ids.values()) or [[]])
        ids = known[: self.rng.randint(0, 14)] + self.rng.choices((0, 1), k=self.rng.randint(0, 4))
        expected, before = self.longest_prefix(ids), self.held()
        if self.num_host:  # more than the device has; which, the contents show
            assert self.pool.num_cached_tokens(ids) >= expected
            expected, self.is_synced = self.pool.num_cached_tokens(ids), False
        assert self.pool.num_cached_tokens(ids) == expected
        assert self.held() == before
        sequence = self.pool.sequence(ids)
        assert sequence.num_tokens == expected
        self.ids[sequence], self.num_known[sequence], self.least[sequence] = ids[:expected], expected, expected

    def here(self) -> list[PagedSequence]:
        return [sequence for sequence in self.ids if not sequence.is_swapped_out]

    def sync(self) -> None:
        """Makes the copies, in the order in which an engine does."""
        swaps = self.pool.take_swaps()
        assert len({to for _, to in swaps.to_host.tolist()}) == len(swaps.to_host)
        assert len({to for _, to in swaps.from_host.tolist()}) == len(swaps.from_host)
        for pairs, source, destination in (
            (swaps.to_host, self.pages, self.host_pages),
            (swaps.from_host, self.host_pages, self.pages),
        ):
            read = [[source.get((block, offset), ()) for offset in range(4)] for block in pairs[:, 0].tolist()]
            for block, tokens in zip(pairs[:, 1].tolist(), read, strict=True):
                destination.update({(block, offset): of for offset, of in enumerate(tokens)})
        self.is_synced = True
        num_swapped = len({b for s in self.ids for blocks in s._swapped or [] for b in blocks})
        assert self.pool.num_free_host == self.num_host - num_swapped

    def swap_out(self) -> None:
        if not self.here():
            return
        sequence, held = self.rng.choice(self.here()), self.held()
        self.is_synced = False
        num_free, blocks = self.pool.num_free_host, sequence.blocks.tolist()
        if error := refused(sequence.swap_out):
            assert error.what == "host blocks"
            assert error.num_needed > error.num_free
            assert (self.pool.num_free_host, sequence.blocks.tolist(), self.held()) == (num_free, blocks, held)
            return
        assert all((sequence.blocks_of(group) == -1).all() for group in range(len(self.groups)))
        with pytest.raises(KVCacheValueError, match="is swapped out, expected swap_in before"):
            self.pool.append([sequence], [1])

    def swap_in(self) -> None:
        away = [sequence for sequence in self.ids if sequence.is_swapped_out]
        if not away:
            return
        sequence, held = self.rng.choice(away), self.held()
        self.is_synced = False
        if error := refused(sequence.swap_in):
            assert error.num_needed > error.num_free
            assert self.held() == held
            assert sequence.is_swapped_out

    def append(self) -> None:
        if not self.here():
            return
        chosen = self.rng.sample(self.here(), min(len(self.here()), self.rng.randint(1, 3)))
        numbers = [self.rng.choice((0, 1, 1, 2, 6)) for _ in chosen]
        before = [[s.blocks_of(g).tolist() for g in range(len(self.groups))] for s in self.ids]
        held, needed = self.held(), 0
        for sequence, number in zip(chosen, numbers, strict=True):
            for g, (_, window) in enumerate(self.groups):
                if number and window:
                    held -= collections.Counter(self.passed(sequence, g))
        for sequence, number in zip(chosen, numbers, strict=True):
            length = sequence.num_tokens
            for g, (size, _) in enumerate(self.groups):
                needed += -(-(length + number) // size) - -(-length // size)
                if number and length % size and held[last := int(sequence.blocks_of(g)[-1])] > 1:
                    held[last] -= 1
                    needed += 1
        num_free = self.pool.num_blocks - len(+held)
        if needed > num_free:
            with pytest.raises(OutOfBlocksError) as raised:
                self.pool.append(chosen, numbers)
            assert raised.value.num_needed == needed
            assert [[s.blocks_of(g).tolist() for g in range(len(self.groups))] for s in self.ids] == before
            return
        starts = [sequence.num_tokens for sequence in chosen]
        copies = self.pool.append(chosen, numbers)
        self.sync()
        for source, destination in copies.tolist():
            for offset in range(4):
                self.pages[destination, offset] = self.pages.get((source, offset), ())
        for sequence, number, start in zip(chosen, numbers, starts, strict=True):
            self.ids[sequence] += self.rng.choices((0, 1), k=number)
            self.least[sequence] = start if number else self.least[sequence]
            for g, (size, _) in enumerate(self.groups):
                for position, slot in enumerate(sequence.slots(start, start + number, group=g).tolist(), start):
                    self.pages[divmod(slot, size)] = tuple(self.ids[sequence][: position + 1])

    def passed(self, sequence: PagedSequence, group: int) -> list[int]:
        """Blocks that no query from the next token on sees, token by token."""
        size, window = self.groups[group]
        seen = {position // size for position in range(max(sequence.num_tokens - window + 1, 0), 1000)}
        blocks = sequence.blocks_of(group).tolist()
        return [block for index, block in enumerate(blocks) if index not in seen and block >= 0]

    def commit(self) -> None:
        sequence = self.rng.choice(list(self.ids))
        known = self.num_known[sequence]
        number = self.rng.randint(0, sequence.num_tokens - known)
        sequence.commit(self.ids[sequence][known : known + number])
        self.num_known[sequence] += number

    def fork(self) -> None:
        if not self.here():
            return
        sequence = self.rng.choice(self.here())
        other = sequence.fork()
        self.ids[other], self.num_known[other] = self.ids[sequence][:], self.num_known[sequence]
        self.least[other] = self.least[sequence]

    def truncate(self) -> None:
        if not self.here():
            return
        sequence = self.rng.choice(self.here())
        number = self.rng.randint(0, sequence.num_tokens)
        first = [np.argmax(np.append(sequence.blocks_of(g), 0) >= 0) for g in range(len(self.groups))]
        is_there = all(
            not start or number - window + 1 >= start * size
            for start, (size, window) in zip(first, self.groups, strict=True)
            if window
        )
        if 0 < number < sequence.num_tokens and not is_there:
            with pytest.raises(KVCacheValueError, match="expected 0 or at least"):
                sequence.truncate(number)
            assert number < self.least[sequence], "a draft that is rejected is never refused"
            return
        sequence.truncate(number)
        del self.ids[sequence][number:]
        self.num_known[sequence] = min(self.num_known[sequence], number)
        self.least[sequence] = min(self.least[sequence], number)

    def free(self) -> None:
        sequence = self.rng.choice(list(self.ids))
        sequence.free()
        for of in (self.ids, self.num_known, self.least):
            del of[sequence]

    def check(self) -> None:
        held = self.held()
        assert [self.pool.ref_cnt(b) for b in range(self.pool.num_blocks)] == [
            held[b] for b in range(self.pool.num_blocks)
        ]
        assert self.pool.num_free == self.pool.num_blocks - len(held)
        assert self.pool.num_cached == len(self.cached)
        for sequence, ids in self.ids.items():
            for group, (_, window) in enumerate(self.groups):
                first = 0 if window is None else max(self.least[sequence] - window + 1, 0)
                size, blocks = self.groups[group].block_size, sequence.blocks_of(group).tolist()
                assert len(blocks) == -(-len(ids) // size)
                for position in range(first, len(ids)) if self.is_synced and not sequence.is_swapped_out else ():
                    assert self.pages[blocks[position // size], position % size] == tuple(ids[: position + 1])


@matrix({"seed": range(25)}, few={"seed": range(8)})
def test_random_calls_keep_blocks_in_windows_and_find_cached_prefixes(seed: int):
    walk = Walk(random.Random(seed))
    for _ in range(120):
        walk.step()


@matrix({"seed": range(40)}, few={"seed": range(12)})
def test_random_calls_with_blocks_on_the_host_restore_every_token(seed: int):
    rng = random.Random(seed)
    walk = Walk(rng, num_host_blocks=rng.choice((1, 3, 10, 40)))
    for _ in range(150):
        walk.step()


def grown(pool: BlockPool, ids: list[int], chunk: int | None = None) -> PagedSequence:
    """A sequence of these tokens, as an engine makes it, chunk by chunk."""
    sequence = pool.sequence(ids)
    while new := ids[sequence.num_tokens :][:chunk]:
        pool.append([sequence], [len(new)])
        sequence.commit(new)
    return sequence


FULL, WINDOW = Layers(2), Layers(2, 3)


def test_append_frees_what_the_window_has_passed_and_full_attention_keeps_it():
    pool = BlockPool(12, groups=[FULL, WINDOW])
    sequence = grown(pool, list(range(8)), chunk=2)
    assert sequence.blocks_of(0).tolist() == [0, 2, 4, 6]
    assert sequence.blocks_of(1).tolist() == [-1, -1, 5, 7]  # the query at 6 sees 4, 5 and itself
    assert sequence.blocks.tolist() == sequence.blocks_of(0).tolist()
    assert pool.num_free == 6
    with pytest.raises(KVCacheValueError, match="free_before: got a sequence of 2 groups, expected one"):
        sequence.free_before(4)


def test_a_prefix_needs_only_the_windows_blocks():
    pool = BlockPool(8, groups=[FULL, WINDOW])
    first = grown(pool, list(range(8)), chunk=2)
    pool.append([first], [2])  # takes both blocks that the window has freed
    other = pool.sequence(range(9))
    assert other.num_tokens == 8
    assert other.blocks_of(1).tolist() == [-1, -1, -1, int(first.blocks_of(1)[3])]
    assert pool.sequence(range(5)).num_tokens == 0  # the window's blocks of shorter ones are gone
    with pytest.raises(KVCacheValueError, match="num_tokens: got 7, expected 0 or at least 8"):
        other.truncate(7)


def test_out_of_blocks_counts_what_windows_free_first():
    pool = BlockPool(4, groups=[Layers(1, 2)])
    sequence = grown(pool, [0, 1, 2, 3])
    pool.append([sequence], [3])  # the query at 4 sees 3 and itself
    assert sequence.blocks.tolist() == [-1, -1, -1, 3, 2, 1, 0]
    with pytest.raises(OutOfBlocksError, match="out of blocks: 4 needed, and 3 of the pool's 4 are free"):
        pool.append([sequence], [4])
    assert sequence.blocks.tolist() == [-1, -1, -1, 3, 2, 1, 0]


def test_drafts_are_rejected_whatever_the_window():
    """Room for drafts frees by the first of them: all of them can be taken back."""
    pool = BlockPool(20, groups=[Layers(1, 1), Layers(2, 4)])
    sequence = grown(pool, list(range(9)), chunk=1)
    for accepted in (0, 3, 1):
        start = sequence.num_tokens
        pool.append([sequence], [4])
        sequence.truncate(start + 1 + accepted)
    assert sequence.num_tokens == 9 + 7


def test_a_look_up_changes_neither_references_nor_the_eviction_order():
    pool = BlockPool(3, 1, records_events=True)
    for ids in ([1, 0], [2, 0]):
        grown(pool, ids).free()
    assert (pool.num_cached_tokens([1, 0]), pool.num_free) == (1, 3)
    pool.allocate(2)  # the one that is not cached, then the least recently used: a look-up does not count
    assert (pool.num_cached_tokens([1, 5]), pool.num_cached_tokens([2, 5])) == (0, 1)
    assert pool.num_cached_tokens([2, 5], salt=b"adapter") == 0


def test_events_name_parents_and_tokens():
    pool = BlockPool(3, 2, records_events=True)
    sequence = grown(pool, [1, 2, 3, 4, 5])
    one, two = sequence.block_hashes
    assert pool.block_hashes([1, 2, 3, 4, 5]) == (one, two)
    assert pool.take_events() == [BlockStored(0, one, None, (1, 2), 2), BlockStored(1, two, one, (3, 4), 2)]
    sequence.truncate(3)
    pool.append([sequence], [1])
    assert pool.take_events() == [BlockRemoved(1, two)]
    sequence.free()
    pool.allocate(3)
    assert pool.take_events() == [BlockRemoved(0, one)]
    pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()]
    with pytest.raises(KVCacheValueError, match=r"records_events: got False, expected a BlockPool made with"):
        BlockPool(3, 2).take_events()


def test_after_a_reset_nothing_of_before_is_found():
    pool = BlockPool(6, 1)
    running, ended = grown(pool, [1, 2]), grown(pool, [7, 8])
    ended.free()
    pool.reset_prefix_cache()
    assert (pool.num_cached, pool.num_cached_tokens([1, 2]), pool.num_cached_tokens([7, 8])) == (0, 0, 0)
    pool.append([running], [1])
    running.commit([3])  # computed from what the old weights wrote
    assert pool.num_cached == 0
    running.fork().commit([])
    assert grown(pool, [1, 2]).block_hashes == running.block_hashes[:2]
    assert pool.num_cached == 2
    running.free()
    pool.append([running], [1])
    running.commit([9])
    assert pool.num_cached_tokens([9, 0]) == 1


def test_a_sequence_that_has_no_tokens_at_a_reset_caches_later_ones():
    pool = BlockPool(2, 1)
    waiting = pool.sequence()
    pool.reset_prefix_cache()
    pool.append([waiting], [1])
    waiting.commit([8])
    assert pool.num_cached_tokens([8, 0]) == 1


def test_states_are_allocated_with_blocks_and_shared_by_forks():
    pool = BlockPool(8, 2, num_states=2)
    one, two, three = (pool.sequence([1, 2, 3]) for _ in range(3))
    assert (one.state, pool.num_free_states) == (-1, 2)
    with pytest.raises(OutOfBlocksError, match="out of states: 3 needed, and 2 of the pool's 2 are free") as raised:
        pool.append([one, two, three], [1, 1, 1])
    assert (raised.value.what, pool.num_free, one.num_tokens, one.state) == ("states", 8, 0, -1)
    pool.append([one], [3])
    fork, second = one.fork(), one.fork()
    assert (one.state, fork.state, pool.num_free_states) == (0, 0, 1)
    second.free()
    pool.append([fork, one], [1, 1])  # the last keeps it
    assert (one.state, fork.state, pool.num_free_states) == (0, 1, 0)
    assert pool.take_swaps().state_copies.tolist() == [[0, 1]]
    assert pool.take_swaps().state_copies.shape == (0, 2)
    third = one.fork()
    with pytest.raises(OutOfBlocksError, match="out of states: 1 needed, and 0 of"):
        pool.append([third], [1])
    assert (third.state, third.num_tokens) == (0, 4)
    third.free()
    with pytest.raises(KVCacheValueError, match="num_tokens: got 2, expected 0 or 4: the sequence has a state"):
        one.truncate(2)
    one.commit([1, 2, 3])
    assert pool.num_cached_tokens([1, 2, 3]) == pool.num_cached == 0  # no state of that prefix is kept
    one.free()
    pool.append([two], [1])
    assert (two.state, one.state, pool.num_free_states) == (0, -1, 0)


def test_each_group_has_a_step_of_its_own():
    pool = BlockPool(12, groups=[Layers(4), Layers(2, 3)])
    sequence = grown(pool, list(range(7)), chunk=3)
    pool.append([sequence], [1])
    steps = [StepMetadata.from_sequences([sequence], [1], group=group) for group in (0, 1)]
    for group, step in enumerate(steps):
        assert step.block_table.tolist() == [sequence.blocks_of(group).tolist()]
        assert step.slot_mapping.tolist() == sequence.slots(7, 8, group=group).tolist()
        assert step.seq_lens.tolist() == [8]
    with pytest.raises(KVCacheValueError, match="group: got 2, expected an int of at most 1"):
        StepMetadata.from_sequences([sequence], [1], group=2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: BlockPool(4), KVCacheValueError, "block_size: got None with groups=None, expected one of the two"),
        (lambda: BlockPool(4, 2, groups=[FULL]), KVCacheValueError, "block_size: got 2 with groups="),
        (lambda: BlockPool(4, groups=[]), KVCacheValueError, "groups: got none, expected at least one"),
        (lambda: BlockPool(4, groups=[2]), KVCacheTypeError, r"groups\[0\]: got an int, expected a spec, or one of gr"),
        (lambda: BlockPool(4, groups=[Layers(0)]), KVCacheValueError, r"groups\[0\].block_size: got 0, expected an"),
        (lambda: BlockPool(4, groups=[Layers(2, 0)]), KVCacheValueError, r"groups\[0\].sliding_window: got 0, expect"),
        (lambda: BlockPool(2**28, groups=[FULL, Layers(9)]), KVCacheValueError, "num_blocks: got 268435456 of 9 tok"),
        (lambda: BlockPool(4, 2).sequence().blocks_of(1), KVCacheValueError, "group: got 1, expected an int of at m"),
        (lambda: kvjax.group_layers([]), KVCacheValueError, "group_layers: got no specs, expected one for each"),
        (lambda: kvjax.max_group_blocks([FULL], 1), KVCacheTypeError, r"groups\[0\]: got Layers\(.*, expected one of"),
        (lambda: kvjax.max_group_blocks(3, 1), KVCacheTypeError, "groups: got an int, expected what group_layers ret"),
        (lambda: kvjax.max_group_blocks([], 1), KVCacheValueError, "max_group_blocks: got no specs"),
    ],
)
def test_invalid_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_layers_of_a_kind_are_grouped_in_equal_numbers():
    full, window = (
        FullAttentionSpec(16, 2, 64, dtype="nvfp4"),
        SlidingWindowSpec(16, 2, 64, dtype="bfloat16", sliding_window=128),
    )
    groups = kvjax.group_layers([window, window, full, window, window, full])
    assert [group.layers for group in groups] == [(0, 1), (3, 4), (2, 5)]
    assert [(group.block_size, group.sliding_window) for group in groups] == [(16, 128), (16, 128), (48, None)]
    assert {group.spec.page_size_bytes for group in groups} == {window.page_size_bytes}
    assert kvjax.max_group_blocks(groups, 2 * 7 * window.page_size_bytes + 5) == 7
    fewer = kvjax.group_layers([window, window, full, window, window, full], layers_per_group=4)
    assert [group.layers for group in fewer] == [(0, 1, 3, 4), (2, 5)]


def plan_of(config: Path, dtype: str, budget: int) -> str:
    """What `kvjax plan` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["plan", "--config", str(config), "--kv-cache-dtype", dtype, "--memory", str(budget)]) == 0
    return out.getvalue()


@pytest.mark.parametrize("dtype", ["nvfp4", "sliding_window=bfloat16,*=nvfp4"])
def test_a_pool_holds_as_many_tokens_as_the_plan_says(dtype):
    """Of every configuration here with windows, by filling a pool."""
    seen = 0
    for path in sorted(CONFIGS.glob("*.json")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kvjax.KVCacheWarning)
            try:
                model = ModelKVConfig.from_hf_config(json.loads(path.read_text()))
                specs = kvjax.resolve_layer_specs(model, kv_cache_dtypes(dtype))
            except kvjax.KVCacheError:
                continue
        if all(spec.sliding_window is None for spec in specs):
            continue
        groups, budget = kvjax.group_layers(specs), 2**30
        expected = kvjax.max_tokens(kvjax.unify_page_sizes(specs), budget)  # what `kvjax plan` prints
        pool = BlockPool(kvjax.max_group_blocks(groups, budget), groups=groups)
        for left in (1, 0):
            sequence = pool.sequence()
            if left:
                with pytest.raises(OutOfBlocksError):
                    pool.append([sequence], [expected + 1])
            pool.append([sequence], [expected])
            sequence.free()
        alone = BlockPool(kvjax.max_blocks(specs, budget), 16)  # a cache for each layer
        alone.append([alone.sequence()], [tokens := kvjax.max_blocks(specs, budget) * 16])
        assert alone.num_free == 0
        assert f"hold {expected:,} tokens" in plan_of(path, dtype, budget)
        assert expected == tokens or f"hold {tokens:,} tokens" in plan_of(path, dtype, budget)
        seen += 1
    assert seen >= 5


def test_a_pool_of_one_group_is_that_of_a_block_size():
    found = []
    for pool in (BlockPool(6, 2), BlockPool(6, groups=[FULL])):
        first = grown(pool, [1, 2, 3, 4, 5])
        second = pool.sequence([1, 2, 3, 4, 6])
        pool.append([second], [3])
        second.free_before(3)
        found.append((first.blocks.tolist(), second.blocks.tolist(), first.block_hashes, pool.num_free, pool.groups))
    assert found[0] == found[1]
    assert found[0][:2] == ([0, 1, 2], [-1, 1, 3, 4])


@pytest.mark.full
def test_layers_with_and_without_a_window_attend_in_shared_arrays():
    """Against a cache for each layer, in which nothing is ever freed."""
    specs = [
        FullAttentionSpec(4, 2, 16, dtype="float32"),
        SlidingWindowSpec(4, 2, 32, dtype="float32", sliding_window=5),
    ]
    groups = kvjax.group_layers(specs)
    assert [group.layers for group in groups] == [(0,), (1,)]
    pool, own = BlockPool(12, groups=groups), BlockPool(24, 4)
    shared = kvjax.KVCache.allocate(groups[0].spec, 12)
    shared = kvjax.KVCache(jnp.full_like(shared.kv, 0xFF), shared.spec)  # NaN
    caches = [kvjax.KVCache.allocate(spec, 24) for spec in specs]
    sequences, others = [pool.sequence() for _ in range(2)], [own.sequence() for _ in range(2)]
    rng, attend = np.random.default_rng(0), jax.jit(kvjax.attend)
    for _ in range(7):
        q_lens = [3, 3]
        pool.append(sequences, q_lens)
        own.append(others, q_lens)
        for index, group in enumerate(groups):
            rows = [rng.standard_normal((6, 2, group.spec.head_size), np.float32) for _ in range(3)]
            step = StepMetadata.from_sequences(sequences, q_lens, max_blocks=24, group=index)
            got, written = attend(*rows, dataclasses.replace(shared, spec=group.spec), step)
            shared = dataclasses.replace(written, spec=shared.spec)
            whole = StepMetadata.from_sequences(others, q_lens, max_blocks=24)
            expected, caches[index] = attend(*rows, caches[index], whole)
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert (own.num_free, pool.num_free) == (12, 0)


def test_what_is_evicted_goes_to_the_host_and_comes_back():
    pool = BlockPool(3, 1, num_host_blocks=2, records_events=True)
    grown(pool, [1, 2, 3]).free()
    pool.take_events()
    other = grown(pool, [7, 8, 9])  # evicts 3, 2 and 1: the host keeps the last two
    assert sorted(pool.take_swaps().to_host.tolist()) == [[0, 0], [1, 1]]
    assert [type(event) for event in pool.take_events()] == [BlockRemoved] * 3 + [BlockStored] * 3
    assert pool.num_cached_tokens([1, 2, 3]) == 0  # nowhere to put them
    other.free()
    assert pool.num_cached_tokens([1, 2, 3]) == 2
    again = pool.sequence([1, 2, 3])
    swaps = pool.take_swaps()
    assert [again.blocks[from_to[1] == again.blocks].tolist() for from_to in swaps.from_host] == [
        [block] for block in again.blocks.tolist()
    ]
    assert sorted(swaps.from_host[:, 0].tolist()) == [0, 1]
    assert [event.token_ids for event in pool.take_events() if isinstance(event, BlockStored)] == [(1,), (2,)]
    assert pool.take_swaps().from_host.shape == (0, 2)


def test_the_host_keeps_what_was_used_last_on_the_device():
    pool = BlockPool(2, 1, num_host_blocks=2)
    for token in (1, 2, 3, 1, 4, 5, 6):  # 1 is evicted, comes back, and is evicted again for 5
        sequence = grown(pool, [token]) if not pool.num_cached_tokens([token, 0]) else pool.sequence([token, 0])
        pool.take_swaps()
        sequence.free()
    assert [pool.num_cached_tokens([token, 0]) for token in range(1, 7)] == [1, 0, 0, 1, 1, 1]


def test_a_prefix_comes_back_where_there_is_room_for_its_blocks_and_no_more():
    pool = BlockPool(3, 4, num_host_blocks=6)
    grown(pool, list(range(12))).free()
    grown(pool, list(range(100, 112))).free()  # evicts the others to the host
    pool.take_swaps()
    held = pool.sequence()
    pool.append([held], [1])
    assert pool.num_cached_tokens(list(range(12))) == 8  # the last token is computed anew, and so its block
    pool.append([held], [4])
    assert pool.num_cached_tokens(list(range(12))) == 0  # one block for two
    held.free()
    assert pool.sequence(list(range(12))).num_tokens == 8


def test_blocks_that_wait_for_the_copy_of_a_fork_are_held():
    """A block from the host goes neither to one that a fork's copy reads nor to one that it writes."""
    pool = BlockPool(4, 2, num_host_blocks=4)
    other, parent = pool.sequence(), pool.sequence()
    pool.append([other, parent], [2, 3])
    other.swap_out()
    pool.take_swaps()
    child, dropped = parent.fork(), parent.fork()
    assert pool.append([child, dropped], [1, 0]).tolist() == [[2, 0]]
    parent.free()
    dropped.free()
    assert [pool.ref_cnt(block) for block in (2, 0)] == [1, 2]
    other.swap_in()
    assert other.blocks.tolist() == [3]
    child.free()
    assert pool.num_free == 1
    assert pool.take_swaps().from_host.tolist() == [[0, 3]]
    assert pool.num_free == 3


def test_a_fork_that_is_preempted_before_its_copy_is_saved_from_where_its_tokens_are():
    pool = BlockPool(6, 2, num_host_blocks=4)
    parent = pool.sequence()
    pool.append([parent], [3])
    child = parent.fork()
    assert pool.append([child], [1]).tolist() == [[1, 2]]
    child.truncate(3)
    grandchild = child.fork()
    assert pool.append([grandchild], [1]).tolist() == [[1, 3]]
    child.swap_out()
    assert sorted(block for block, _ in pool.take_swaps().to_host.tolist()) == [0, 1]
    assert pool.num_free == 6 - len({*parent.blocks.tolist(), *grandchild.blocks.tolist()})


def test_states_are_swapped_with_their_sequences():
    pool = BlockPool(8, 2, num_states=1, num_host_blocks=4, num_host_states=1)
    one, two = pool.sequence(), pool.sequence()
    pool.append([one], [3])
    pool.take_swaps()
    one.swap_out()
    assert (one.state, pool.num_free_states) == (-1, 1)
    pool.append([two], [1])
    with pytest.raises(OutOfBlocksError, match="out of states: 1 needed, and 0 of the pool's 1 are free"):
        one.swap_in()
    with pytest.raises(OutOfBlocksError, match="out of host states: 1 needed, and 0 of the pool's 1 are free"):
        two.swap_out()
    swaps = pool.take_swaps()
    assert (swaps.states_to_host.tolist(), swaps.states_from_host.tolist()) == ([[0, 0]], [])
    two.free()
    one.swap_in()
    swaps = pool.take_swaps()
    assert (swaps.states_to_host.tolist(), swaps.states_from_host.tolist()) == ([], [[0, 0]])
    one.swap_out()
    one.swap_in()
    one.swap_out()  # it has not come back yet: it stays where it is
    assert pool.take_swaps().states_to_host.tolist() == [[0, 0]]
    one.free()
    assert (pool.num_free_host, pool.num_free, pool.num_free_states) == (4, 8, 1)
    pool.append([two], [2])
    two.swap_out()


def test_a_swapped_sequence_can_be_committed_and_freed_and_nothing_else():
    pool = BlockPool(8, 2, num_host_blocks=8)
    sequence = pool.sequence()
    pool.append([sequence], [4])
    sequence.swap_out()
    sequence.commit([1, 2, 3, 4])  # of a step that was running
    for call in (sequence.fork, sequence.swap_out, lambda: sequence.truncate(2), lambda: sequence.free_before(2)):
        with pytest.raises(KVCacheValueError, match="got a sequence that is swapped out, expected swap_in before"):
            call()
    assert pool.num_cached_tokens([1, 2, 3, 4, 5]) == 0
    sequence.swap_in()
    assert pool.num_cached_tokens([1, 2, 3, 4, 5]) == 4
    with pytest.raises(KVCacheValueError, match="swap_in: got a sequence that is not swapped out"):
        sequence.swap_in()
    sequence.swap_out()
    sequence.free()
    pool.take_swaps()  # until then the host's blocks are held
    assert (sequence.num_tokens, pool.num_free_host, sequence.is_swapped_out) == (0, 8, False)
    with pytest.raises(OutOfBlocksError, match="out of host blocks: 1 needed, and 0 of the pool's 0 are free"):
        grown(BlockPool(2, 2), [1]).swap_out()


def test_after_a_reset_no_sequence_takes_its_blocks_from_others():
    """Those with its tokens were computed with other weights since."""
    pool = BlockPool(8, 1, num_host_blocks=8)
    old = grown(pool, [1, 2])
    old.swap_out()
    pool.take_swaps()
    pool.reset_prefix_cache()
    new = grown(pool, [1, 2])
    old.swap_in()
    assert not set(old.blocks.tolist()) & set(new.blocks.tolist())
    assert len(pool.take_swaps().from_host) == 2
    old.swap_out()
    assert len(pool.take_swaps().to_host) == 2


@pytest.mark.parametrize("windows", [(64, 40), (1024, 1024), (None, 64, 1024)])
@pytest.mark.parametrize("missing", [1, 2, 3, 7])
def test_a_prefix_search_looks_no_block_up_twice(windows: tuple[int | None, ...], missing: int):
    """One group has all blocks, others lack every `missing`th, so that prefixes shrink by a few blocks at a time."""
    num_blocks, block_size = 512, 4
    groups = as_groups([Layers(block_size, window) for window in windows])
    chains = [[(group.index, i) for i in range(num_blocks)] for group in groups]
    looked_up: collections.Counter[tuple[int, int]] = collections.Counter()

    def is_there(key: Any) -> bool:
        index, block = key
        return index == 0 or block % missing != index % missing

    def is_cached(key: Any) -> bool:
        looked_up[key] += 1
        return is_there(key)

    found = cached_prefix(groups, chains, num_blocks * block_size, is_cached)  # type: ignore[arg-type]
    assert max(looked_up.values()) == 1
    sizes = range((num_blocks - 1) * block_size, 0, -block_size)
    whole = (
        size
        for size in sizes
        if all(
            is_there((group.index, i)) for group in groups for i in range(group.num_passed(size), size // block_size)
        )
    )
    assert found == next(whole, 0)
