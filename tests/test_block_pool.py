"""The block pool against a naive model of it: who holds what, what is found again, and what is evicted first."""

from __future__ import annotations

import copy
import hashlib
import pickle
import random

import numpy as np
import pytest

from kvjax import BlockPool, KVCacheTypeError, KVCacheValueError, OutOfBlocksError, PagedSequence
from kvjax.block_pool import core, groups, hashes, host, store
from kvjax.block_pool import pool as pool_module
from kvjax.block_pool import sequence as sequence_module
from kvjax.block_pool.hashes import root_hash

SALTS = (b"", b"adapter")


class Token(tuple):
    """What a token's keys and values depend on: its sequence's salt and the ids up to its own."""


class NaiveSequence:
    """Every token of a sequence, and the number of those whose blocks were given back."""

    def __init__(self, tokens: list[Token], num_known: int, salt: bytes):
        self.tokens, self.num_known, self.salt, self.given_back = tokens, num_known, salt, 0

    def next_token(self, token_id: int) -> Token:
        before = self.tokens[-1][1:] if self.tokens else ()
        return Token((self.salt, *before, token_id))


class Walk:
    """Calls in any order. The cache is a dictionary from slots to tokens, written as an engine writes it."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        num_blocks, block_size = rng.randint(1, 16), rng.randint(1, 3)
        self.pool = BlockPool(num_blocks, block_size)
        self.num_blocks, self.size = num_blocks, block_size
        self.cache: dict[int, Token] = {}
        self.naive: dict[PagedSequence, NaiveSequence] = {}
        self.known: dict[tuple[Token, ...], int] = {}  # the tokens of a full block -> the block
        self.blank = list(range(num_blocks))[::-1]
        self.cached_free: list[int] = []  # the least recently used first

    def held(self) -> list[int]:
        """The holders' blocks, one entry a holder."""
        return [int(block) for sequence in self.naive for block in sequence.blocks if block >= 0]

    def forget(self, block: int) -> None:
        self.known = {tokens: other for tokens, other in self.known.items() if other != block}

    def take(self) -> int:
        if self.blank:
            return self.blank.pop()
        self.forget(block := self.cached_free.pop(0))
        return block

    def give_back(self, blocks: list[int]) -> None:
        """Called when the pool has taken them back."""
        freed = [block for block in blocks if block not in self.held()]
        self.blank += [block for block in freed if block not in self.known.values()]
        self.cached_free += [block for block in reversed(freed) if block in self.known.values()]

    def any_sequence(self) -> PagedSequence:
        return self.rng.choice(list(self.naive))

    def step(self) -> None:
        calls = [self.start, self.append, self.append, self.commit, self.commit]
        calls += [self.fork, self.truncate, self.pass_a_window, self.free]
        self.rng.choice(calls if self.naive else [self.start])()
        self.check_sequences()
        self.check_counts()

    def start(self) -> None:
        salt, ids = self.rng.choice(SALTS), self.rng.choices((0, 1), k=self.rng.randint(0, 9))
        naive = NaiveSequence([], 0, salt)
        for token_id in ids:
            naive.tokens.append(naive.next_token(token_id))
        shared = []
        for start in range(0, len(ids), self.size):
            block = self.known.get(tuple(naive.tokens[start : start + self.size]))
            if block is None or start + self.size >= len(ids):  # the last token is never taken from the cache
                break
            shared.append(block)
        naive.tokens = naive.tokens[: len(shared) * self.size]
        naive.num_known = len(naive.tokens)
        sequence = self.pool.sequence(ids, salt=salt)
        self.cached_free = [block for block in self.cached_free if block not in shared]
        assert sequence.blocks.tolist() == shared
        self.naive[sequence] = naive

    def append(self) -> None:
        chosen = self.rng.sample(list(self.naive), min(len(self.naive), self.rng.randint(1, 3)))
        numbers = [self.rng.choice((0, 1, 1, 2, 5)) for _ in chosen]
        before = [sequence.blocks.tolist() for sequence in self.naive]
        # By trial: what a pool with blocks without end would take.
        held, needed = self.held(), 0
        for sequence, number in zip(chosen, numbers, strict=True):
            length = sequence.num_tokens
            needed += -(-(length + number) // self.size) - -(-length // self.size)
            if number and length % self.size and held.count(last := int(sequence.blocks[-1])) > 1:
                held.remove(last)
                needed += 1
        num_free = self.num_blocks - len(set(self.held()))
        if needed > num_free:
            with pytest.raises(OutOfBlocksError) as raised:
                self.pool.append(chosen, numbers)
            assert (raised.value.num_needed, raised.value.num_free) == (needed, num_free)
            assert [sequence.blocks.tolist() for sequence in self.naive] == before
            return
        copies = self.pool.append(chosen, numbers)
        fresh = [self.take() for _ in range(needed)]
        assert copies.dtype == np.int32
        assert copies.shape[1] == 2
        new = {int(b) for s in self.naive for b in s.blocks if b >= 0} - {b for blocks in before for b in blocks}
        assert new == set(fresh)
        for source, destination in copies.tolist():
            for offset in range(self.size):
                self.cache[destination * self.size + offset] = self.cache.get(source * self.size + offset)
        for sequence, number in zip(chosen, numbers, strict=True):
            naive, start = self.naive[sequence], len(self.naive[sequence].tokens)
            if number and start % self.size:
                self.forget(int(sequence.blocks[start // self.size]))  # it is written into: its own, and full no more
            for slot in sequence.slots(start, start + number).tolist():
                naive.tokens.append(naive.next_token(self.rng.randint(0, 1)))
                assert slot >= 0
                self.cache[slot] = naive.tokens[-1]
            assert sequence.num_tokens == len(naive.tokens)

    def commit(self) -> None:
        sequence = self.any_sequence()
        naive = self.naive[sequence]
        left = len(naive.tokens) - naive.num_known
        number = self.rng.choice((left, self.rng.randint(0, left)))
        sequence.commit([token[-1] for token in naive.tokens[naive.num_known : naive.num_known + number]])
        first, naive.num_known = naive.num_known // self.size, naive.num_known + number
        for index in range(first, naive.num_known // self.size):
            tokens, block = tuple(naive.tokens[index * self.size : (index + 1) * self.size]), sequence.blocks[index]
            if block >= 0 and block not in self.known.values():
                self.known.setdefault(tokens, int(block))

    def fork(self) -> None:
        sequence = self.any_sequence()
        self.naive[sequence.fork()] = copy.deepcopy(self.naive[sequence])

    def truncate(self) -> None:
        sequence = self.any_sequence()
        naive, before = self.naive[sequence], sequence.blocks
        number = self.rng.choice((0, self.rng.randint(0, len(naive.tokens)), self.rng.randint(0, len(naive.tokens))))
        if 0 < number < naive.given_back:
            with pytest.raises(KVCacheValueError, match="expected 0 or at least"):
                sequence.truncate(number)
            return
        sequence.truncate(number)
        del naive.tokens[number:]
        naive.num_known, naive.given_back = min(naive.num_known, number), min(naive.given_back, number)
        behind = before[-(-number // self.size) :]
        self.give_back(behind[behind >= 0].tolist())

    def pass_a_window(self) -> None:
        sequence = self.any_sequence()
        naive, before = self.naive[sequence], sequence.blocks
        position = len(naive.tokens) - self.rng.randint(1, 6) + 1
        sequence.free_before(position)
        naive.given_back = max(naive.given_back, position // self.size * self.size)
        self.give_back([int(b) for b in before[: naive.given_back // self.size] if b >= 0])

    def free(self) -> None:
        sequence = self.any_sequence()
        before = sequence.blocks
        sequence.free()
        del self.naive[sequence]
        self.give_back(before[before >= 0].tolist())

    def check_sequences(self) -> None:
        for sequence, naive in self.naive.items():
            assert len(sequence.blocks) == -(-len(naive.tokens) // self.size)
            slots = sequence.slots(0, len(naive.tokens)).tolist()
            found = [None if slot < 0 else self.cache[slot] for slot in slots]
            assert found == [None] * naive.given_back + naive.tokens[naive.given_back :]
            assert sequence.token_ids.tolist() == [token[-1] for token in naive.tokens[: naive.num_known]]

    def check_counts(self) -> None:
        held = self.held()
        assert [self.pool.ref_cnt(b) for b in range(self.num_blocks)] == [held.count(b) for b in range(self.num_blocks)]
        assert self.pool.num_free == self.num_blocks - len(set(held)) == len(self.blank) + len(self.cached_free)
        assert self.pool.num_cached == len(self.known)
        for tokens, block in self.known.items():
            assert tuple(self.cache[block * self.size + offset] for offset in range(self.size)) == tokens


@pytest.mark.parametrize("seed", range(30))
def test_random_calls_match_the_naive_model(seed: int):
    walk = Walk(random.Random(seed))
    for _ in range(150):
        walk.step()


def grown(pool: BlockPool, ids: list[int]) -> PagedSequence:
    """A sequence of these tokens, as an engine makes it."""
    sequence = pool.sequence(ids)
    pool.append([sequence], [len(ids) - sequence.num_tokens])
    sequence.commit(ids[len(sequence.token_ids) :])
    return sequence


def test_a_prefix_is_shared_and_found_after_its_sequence_ended():
    pool = BlockPool(6, 2)
    first = grown(pool, [1, 2, 3, 4, 5])
    second = pool.sequence([1, 2, 3, 4, 6, 7])
    assert second.blocks.tolist() == first.blocks[:2].tolist() == [0, 1]
    assert (second.num_tokens, pool.ref_cnt(0), pool.num_free) == (4, 2, 3)
    first.free()
    second.free()
    assert pool.num_free == 6
    assert pool.sequence([1, 2, 3, 4, 5]).blocks.tolist() == [0, 1]


def test_the_last_token_of_a_cached_prompt_is_computed_again():
    pool = BlockPool(6, 2)
    grown(pool, [1, 2, 3, 4])
    assert pool.sequence([1, 2, 3, 4]).num_tokens == 2
    assert pool.sequence([1, 2]).num_tokens == pool.sequence([1]).num_tokens == pool.sequence().num_tokens == 0


def test_a_block_is_known_by_all_tokens_up_to_its_end_and_the_salt():
    pool = BlockPool(8, 2)
    grown(pool, [1, 2, 3, 4])
    assert pool.sequence([9, 2, 3, 4, 5]).num_tokens == 0
    assert pool.sequence([1, 2, 9, 4, 5]).num_tokens == 2
    assert pool.sequence([1, 2, 3, 4, 5], salt=b"v2").num_tokens == 0
    assert pool.sequence(np.array([1, 2, 3, 4, 5], np.uint16)).num_tokens == 4


@pytest.mark.parametrize("prefix", [b"", b"\0", b"\1"], ids=repr)
def test_no_salt_has_the_hash_of_another_salts_block(prefix):
    """A salt made of what a block is hashed from: a sequence would find the other's second block as its first."""
    pool = BlockPool(4, 2)
    first = pool.sequence([1, 2, 3, 4, 5])
    pool.append([first], [5])
    first.commit([1, 2, 3, 4, 5])
    ids = np.array([1, 2], np.int64).tobytes()
    for root in (hashlib.sha256(prefix).digest(), prefix, root_hash(b"", 0)):
        for salt in (root + ids, prefix + root + ids):
            assert pool.sequence([3, 4, 5], salt=salt).num_tokens == 0


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end():
    pool = BlockPool(6, 1)
    old, new = grown(pool, [1, 2, 3]), grown(pool, [4, 5])
    assert old.blocks.tolist() == [0, 1, 2]
    old.free()
    new.free()
    pool.sequence([1, 0]).free()  # uses block 0 again
    assert pool.allocate(6) == [5, 2, 1, 4, 3, 0]


def test_tokens_that_were_not_committed_are_not_shared():
    pool = BlockPool(4, 2)
    sequence = pool.sequence([1, 2, 3])
    pool.append([sequence], [3])
    assert pool.sequence([1, 2, 3]).num_tokens == 0
    sequence.commit([1])
    sequence.commit([2])
    assert pool.sequence([1, 2, 3]).num_tokens == 2


def test_a_block_of_forks_is_cached_with_the_tokens_committed_first():
    pool = BlockPool(4, 2)
    first = pool.sequence()
    pool.append([first], [2])
    second = first.fork()
    first.commit([1, 2])
    second.commit([3, 4])
    assert (pool.sequence([1, 2, 0]).num_tokens, pool.sequence([3, 4, 0]).num_tokens, pool.num_cached) == (2, 0, 1)


def test_a_full_block_that_was_cut_is_not_found_with_what_is_written_into_it():
    pool = BlockPool(4, 2)
    sequence = grown(pool, [1, 2, 3, 4])
    sequence.truncate(3)
    assert pool.sequence([1, 2, 3, 4, 5]).num_tokens == 4
    other = pool.sequence([1, 2, 3, 4, 5])
    assert pool.append([sequence], [1]).tolist() == [[1, 2]], "others read it: it is copied"
    other.free()


def test_beams_copy_the_block_they_write_into():
    pool = BlockPool(6, 4)
    first = grown(pool, [1, 2, 3, 4, 5])
    beams = [first, first.fork(), first.fork()]
    assert pool.append(beams, [1, 0, 1]).tolist() == [[1, 2], [1, 3]]
    assert [beam.blocks.tolist() for beam in beams] == [[0, 2], [0, 1], [0, 3]]
    assert pool.append(beams, [1, 1, 1]).tolist() == []


def test_out_of_blocks_says_what_was_asked_and_takes_nothing():
    pool = BlockPool(4, 2)
    sequences = [pool.sequence() for _ in range(3)]
    pool.append(sequences[:1], [3])
    message = "out of blocks: 3 needed, and 2 of the pool's 4 are free"
    with pytest.raises(OutOfBlocksError, match=message) as raised:
        pool.append(sequences, [1, 4, 1])
    assert isinstance(raised.value, MemoryError)
    assert [sequence.num_tokens for sequence in sequences] == [3, 0, 0]
    assert pool.num_free == 2
    with pytest.raises(OutOfBlocksError, match="3 needed, and 2 of the pool"):
        pool.allocate(3)
    assert str(pickle.loads(pickle.dumps(raised.value))) == message


def test_a_fork_adds_a_reference_to_each_block():
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    pool.fork(blocks)
    pool.free(blocks)
    assert (pool.ref_cnt(0), pool.num_free) == (1, 1)
    with pytest.raises(KVCacheValueError, match="got block 0, with 1 references, expected at least 2"):
        pool.free([1, 0, 0])
    pool.free(np.array(blocks))
    assert pool.allocate(3) == [1, 0, 2]


def test_a_block_behind_the_window_is_still_found_until_it_is_needed():
    pool = BlockPool(4, 2)
    sequence = grown(pool, [1, 2, 3, 4, 5, 6])
    sequence.free_before(5)
    assert sequence.blocks.tolist() == [-1, -1, 2]
    assert sequence.slots(2, 6).tolist() == [-1, -1, 4, 5]
    assert (sequence.num_tokens, pool.num_free) == (6, 3)
    assert pool.sequence([1, 2, 3]).blocks.tolist() == [0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pool: BlockPool(0, 4), KVCacheValueError, "num_blocks: got 0, expected an int of at least 1"),
        (lambda pool: BlockPool(4, 0), KVCacheValueError, "block_size: got 0, expected an int of at least 1"),
        (lambda pool: BlockPool(2**27, 16), KVCacheValueError, "num_blocks: got 134217728 of 16 tokens, expected at"),
        (lambda pool: pool.free([3]), KVCacheValueError, "got block 3, with 0 references, expected at least 1"),
        (lambda pool: pool.fork([-1]), KVCacheValueError, "blocks: got block -1, of a pool of 4"),
        (lambda pool: pool.ref_cnt(4), KVCacheValueError, "block: got 4, expected an int of at most 3"),
        (lambda pool: pool.sequence([1.5, 2.0]), KVCacheTypeError, "token_ids: got dtype float64, expected integers"),
        (lambda pool: pool.sequence(np.array([2**63], ">u8")), KVCacheValueError, "token_ids: got 9223372036854775808"),
        (
            lambda pool: pool.sequence([1, 2**64]),
            KVCacheValueError,
            "token_ids: got 18446744073709551616, expected int64",
        ),
        (lambda pool: pool.sequence([-1, 2**63]), KVCacheValueError, "token_ids: got 9223372036854775808, expected"),
        (lambda pool: pool.sequence([[1]]), KVCacheValueError, r"token_ids: got shape \(1, 1\), expected \[num_"),
        (lambda pool: pool.sequence(salt="a"), KVCacheTypeError, "salt: got 'a' of type str, expected bytes"),
        (lambda pool: pool.sequence().commit([1]), KVCacheValueError, "token_ids: got 1 after the 0 known ones"),
        (lambda pool: pool.sequence().truncate(1), KVCacheValueError, "num_tokens: got 1, expected an int of at most"),
        (lambda pool: pool.sequence().slots(0, 1), KVCacheValueError, "stop: got 1, expected an int of at most 0"),
        (lambda pool: pool.append([pool.sequence()], []), KVCacheValueError, "num_new_tokens: got 0 numbers, expected"),
        (lambda pool: pool.append([pool.sequence()], [-1]), KVCacheValueError, "num_new_tokens: got -1, expected an"),
        (lambda pool: pool.append([pool.sequence()] * 2, [1, 1]), KVCacheValueError, "sequences: got a dup"),
        (lambda pool: pool.append([BlockPool(1, 1).sequence()], [1]), KVCacheValueError, r"sequences\[0\]: got a seq"),
    ],
)
def test_invalid_arguments_are_refused_by_name(call, error, message):
    with pytest.raises(error, match=message):
        call(BlockPool(4, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda pool, _: BlockPool(4, groups=3),
            KVCacheTypeError,
            "^groups: got an int, expected a sequence of specs, ",
        ),
        (
            lambda pool, _: BlockPool(4, groups=np.arange(2)),
            KVCacheTypeError,
            r"^groups\[0\]: got an int64, expected a",
        ),
        (lambda pool, _: pool.fork(0), KVCacheTypeError, "^blocks: got an int, expected a sequence of block numbers"),
        (lambda pool, _: pool.fork([[0]]), KVCacheTypeError, r"^blocks: got \[0\] of type list, expected an int"),
        (lambda pool, _: pool.free(None), KVCacheTypeError, "^blocks: got None, expected a sequence of block numbers"),
        (lambda pool, _: pool.free("0"), KVCacheTypeError, "^blocks: got a str, expected a sequence of block numbers"),
        (lambda pool, _: pool.free(np.array(0)), KVCacheTypeError, "^blocks: got a ndarray, expected a sequence of bl"),
        (
            lambda pool, _: pool.free(np.array([[0]])),
            KVCacheTypeError,
            r"^blocks: got array\(\[0\]\) of type ndarray, e",
        ),
        (lambda pool, _: pool.free([0, 1.5]), KVCacheTypeError, "^blocks: got 1.5 of type float, expected an int"),
        (lambda pool, one: pool.append(one, [1]), KVCacheTypeError, "^sequences: got a PagedSequence, expected a seq"),
        (lambda pool, one: pool.append({one}, [1]), KVCacheTypeError, "^sequences: got a set, expected a sequence of"),
        (lambda pool, one: pool.append([one], 1), KVCacheTypeError, "^num_new_tokens: got an int, expected a sequence"),
        (
            lambda pool, one: pool.append([one], None),
            KVCacheTypeError,
            "^num_new_tokens: got None, expected a sequence",
        ),
        (
            lambda pool, one: pool.append([one, 7], [1, 1]),
            KVCacheTypeError,
            r"^sequences\[1\]: got an int, expected a Pa",
        ),
        (
            lambda pool, one: pool.append([[one]], [1]),
            KVCacheTypeError,
            r"^sequences\[0\]: got a list, expected a PagedS",
        ),
        (
            lambda pool, one: pool.sequence(None),
            KVCacheTypeError,
            r"^token_ids: got None, expected integers \[num_toke",
        ),
        (
            lambda pool, one: pool.sequence({1, 2}),
            KVCacheTypeError,
            r"^token_ids: got a set, expected integers \[num_to",
        ),
        (lambda pool, one: pool.num_cached_tokens("hi"), KVCacheTypeError, "^token_ids: got a str, expected integers"),
        (
            lambda pool, one: pool.block_hashes([[1], [1, 2]]),
            KVCacheValueError,
            r"^token_ids: got \[\[1\], \[1, 2\]\], e",
        ),
        (
            lambda pool, one: one.commit([[1], [1, 2]]),
            KVCacheValueError,
            r"^token_ids: got \[\[1\], \[1, 2\]\], expected in",
        ),
    ],
)
def test_arguments_of_another_kind_are_named_and_change_nothing(call, error, message):
    pool = BlockPool(4, 2)
    held, one = pool.allocate(1), pool.sequence()
    with pytest.raises(error, match=message):
        call(pool, one)
    assert ([pool.ref_cnt(block) for block in range(4)], held, one.num_tokens) == ([1, 0, 0, 0], [0], 0)


def test_block_pools_do_not_import_jax():
    for module in (pool_module, core, sequence_module, store, host, groups, hashes):
        assert not {"jax", "jnp"} & set(vars(module))
