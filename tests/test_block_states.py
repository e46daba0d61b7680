"""State slots of a pool: whatever forks, grows, moves to the host or ends before copies are made, states follow."""

from __future__ import annotations

import random

import pytest
from support.helpers import refused

from kvjax import BlockPool, OutOfBlocksError, PagedSequence

type Text = tuple[int, ...]
"""The tokens that a state has seen: what a slot holds in these tests."""


class Calls:
    """Calls in any order; `slots` and `host_slots` hold what an engine's arrays would."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.num_states, self.num_host = rng, rng.randint(1, 5), rng.randint(0, 4)
        self.pool = BlockPool(500, 2, num_states=self.num_states, num_host_blocks=500, num_host_states=self.num_host)
        self.slots: dict[int, Text] = {}
        self.host_slots: dict[int, Text] = {}
        self.texts: dict[PagedSequence, Text] = {}
        self.growing: dict[PagedSequence, Text] = {}
        self.next_token = 0

    def here(self) -> list[PagedSequence]:
        return [sequence for sequence in self.texts if not sequence.is_swapped_out]

    def call(self) -> None:
        calls = [self.start, self.append, self.append, self.fork, self.fork, self.swap_out, self.swap_in, self.free]
        self.rng.choice(calls)()
        if self.rng.random() < 0.4:
            self.step()

    def start(self) -> None:
        if len(self.texts) < 8:
            self.texts[self.pool.sequence()] = ()

    def append(self) -> None:
        able = [sequence for sequence in self.here() if sequence not in self.growing]
        chosen = self.rng.sample(able, min(len(able), self.rng.randint(1, 3)))
        before = {sequence: (sequence.state, sequence.num_tokens) for sequence in self.texts}
        num_free = self.pool.num_free_states
        users = [sequence.state for sequence in self.here()]
        needed, left = 0, {slot: users.count(slot) for slot in users}
        for sequence in chosen:
            if sequence.state < 0:
                needed += 1
            elif left[sequence.state] > 1:
                left[sequence.state] -= 1
                needed += 1
        if error := refused(lambda: self.pool.append(chosen, [1] * len(chosen))):
            assert (error.what, error.num_needed, error.num_free) == ("states", needed, num_free)
            assert needed > num_free
            assert before == {sequence: (sequence.state, sequence.num_tokens) for sequence in self.texts}
            assert self.pool.num_free_states == num_free
            return
        assert self.pool.num_free_states == num_free - needed
        for sequence in chosen:
            self.next_token += 1
            self.growing[sequence] = (*self.texts[sequence], self.next_token)

    def step(self) -> None:
        """Makes the copies in the documented order, then computes what was appended."""
        swaps = self.pool.take_swaps()
        for pairs, source, destination in (
            (swaps.states_to_host, self.slots, self.host_slots),
            (swaps.states_from_host, self.host_slots, self.slots),
            (swaps.state_copies, self.slots, self.slots),
        ):
            assert len({to for _, to in pairs.tolist()}) == len(pairs)
            read = [source.get(slot, (-1,)) for slot, _ in pairs.tolist()]
            destination.update(zip(pairs[:, 1].tolist(), read, strict=True))
        for sequence, text in self.growing.items():
            before = self.slots.get(sequence.state, (-1,)) if len(text) > 1 else ()
            assert before == text[:-1]
            self.texts[sequence] = self.slots[sequence.state] = text
        assert len({sequence.state for sequence in self.growing}) == len(self.growing)
        self.growing.clear()
        for sequence, text in self.texts.items():
            if text:
                assert (sequence.state < 0) == sequence.is_swapped_out
                held = self.host_slots[sequence._host_state] if sequence.is_swapped_out else self.slots[sequence.state]
                assert held == text
        states = {sequence.state for sequence in self.here()} - {-1}
        assert self.pool.num_free_states == self.num_states - len(states)

    def fork(self) -> None:
        able = [sequence for sequence in self.here() if sequence not in self.growing]
        if able and len(self.texts) < 8:
            parent = self.rng.choice(able)
            num_free = self.pool.num_free_states
            child = parent.fork()
            assert (child.state, self.pool.num_free_states) == (parent.state, num_free)
            self.texts[child] = self.texts[parent]

    def swap_out(self) -> None:
        if self.here():
            sequence = self.rng.choice(self.here())
            state, num_free = sequence.state, self.pool.num_free_host
            if error := refused(sequence.swap_out):
                assert (error.what, error.num_needed, error.num_free) == ("host states", 1, 0)
                assert (sequence.state, self.pool.num_free_host, sequence.is_swapped_out) == (state, num_free, False)
            else:
                self.growing.pop(sequence, None)  # before the step: the state is that of the text before

    def swap_in(self) -> None:
        away = [sequence for sequence in self.texts if sequence.is_swapped_out]
        if away:
            sequence = self.rng.choice(away)
            if error := refused(sequence.swap_in):
                assert (error.what, error.num_needed, error.num_free) == ("states", 1, 0)
                assert sequence.is_swapped_out

    def free(self) -> None:
        if self.texts:
            sequence = self.rng.choice(list(self.texts))
            sequence.free()
            del self.texts[sequence]
            self.growing.pop(sequence, None)


@pytest.mark.parametrize("seed", range(60))
def test_a_state_is_that_of_its_sequence_whatever_the_order_of_calls(seed):
    calls = Calls(random.Random(seed))
    for _ in range(150):
        calls.call()
    calls.step()
    for sequence in list(calls.texts):
        sequence.free()
    calls.pool.take_swaps()
    assert calls.pool.num_free_states == calls.num_states
    assert calls.pool._states.host.store.num_free == calls.num_host
    assert calls.pool.num_free == calls.pool.num_blocks


def test_a_copy_that_is_not_made_yet_comes_from_where_the_state_is():
    """Of a fork of a fork: the slot between them is empty until the copies are made."""
    pool = BlockPool(8, 4, num_states=3)
    one = pool.sequence()
    pool.append([one], [1])
    two = one.fork()
    pool.append([two], [1])
    three = two.fork()
    pool.append([three], [1])
    assert pool.take_swaps().state_copies.tolist() == [[0, 1], [0, 2]]
    one.free()
    assert pool.num_free_states == 1


def test_a_slot_that_a_copy_comes_from_is_not_given_away_before():
    pool = BlockPool(8, 4, num_states=2)
    one, other = pool.sequence(), pool.sequence()
    pool.append([one], [1])
    two = one.fork()
    pool.append([two], [1])
    one.free()
    with pytest.raises(OutOfBlocksError, match="out of states: 1 needed, and 0 of the pool's 2 are free"):
        pool.append([other], [1])
    assert pool.take_swaps().state_copies.tolist() == [[0, 1]]
    pool.append([other], [1])
    assert (other.state, two.state) == (0, 1)
