"""A small serving engine: continuous batching over `kvjax.BlockPool`, with chunked prefill beside decodes.

The host runs one step ahead: a step reads the previous step's tokens on the device, and the host reads them while the
next step runs. If the pool has blocks on the host, it takes more requests than the device holds: those that came last
wait there while blocks are short, and evicted prefixes come back from there, beside the steps of other requests. What
the host does not hold either is computed again.

docs/serving.md explains it; `examples.llama` provides a step, and `benchmarks.serve` times it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import kvjax


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and its progress.

    Attributes:
      prefill: its tokens to compute in chunks: the prompt, and what it had generated when it last lost its blocks.
      num_started: tokens that steps were started for, including those that the host has not read yet.
      row: the row of its last token in the last step's output; None if the host has read it.
      loading: its blocks on their way from the host.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    sequence: kvjax.PagedSequence
    prefill: Sequence[int] = ()
    generated: list[int] = dataclasses.field(default_factory=list)
    num_started: int = 0
    row: int | None = None
    loading: kvjax.Loading | None = None
    is_done: bool = False


type Batch = list[tuple[Request, np.ndarray]]
"""Requests with their new tokens in a step."""


def swap_states(source: Any, destination: Any, pairs: np.ndarray) -> Any:
    """Copies slots of `source [num_slots, ...]` to those of `destination`, donated; states on the host are NumPy's."""
    from_slots, to_slots = pairs.T
    if isinstance(destination, np.ndarray):
        destination[to_slots] = source[from_slots]
        return destination
    return put_states(destination, to_slots, source[from_slots])


@functools.partial(jax.jit, donate_argnums=0)
def put_states(states: jax.Array, slots: jax.Array, values: jax.Array) -> jax.Array:
    """Writes states into slots of `states [num_slots, ...]`."""
    return states.at[slots].set(values)


class Engine:
    """Runs requests until they have all their tokens, or `eos_token_id`.

    Attributes:
      caches: written by the step, which they are donated to.
      num_preempted: how often a request gave its blocks to others, and was moved to the host if the host had room.
      num_recomputed: how often the host had no room, so that the request starts again with all of its tokens.

    Args:
      run: starts a step, `(tokens, previous, step, caches, *, max_q_len, max_prompts) -> (following, caches)`. A token
        below 0 is `~row` of `previous`, the previous step's output: int32 `[max(num_seqs)]`. If the pool has states, it
        also gets `state_slots`, int32 `[num_seqs]`, each sequence's slot; `pool.num_states` for padding.
      caches: of `pool.num_blocks` blocks; beside them may be arrays of states, `[pool.num_states, ...]`.
      pool: allocates their blocks.
      num_seqs: buckets of sequences in a step; each is compiled once with prompts and once without.
      max_blocks: most blocks of a sequence.
      chunk: most prompt tokens in a step.
      max_prompts: most prompts in a step.
      eos_token_id: ends a request.
      sharding: where `run`'s results are: a device or a sharding; None where no argument of `run` is committed.
      windows: the rows of exact windows that `caches` has beside pages, and what fills them, `(caches, step, fills) ->
        caches`; None without windows.
    """

    def __init__(
        self,
        run: Callable[..., tuple[jax.Array, Any]],
        caches: Any,
        pool: kvjax.BlockPool,
        *,
        num_seqs: Sequence[int],
        max_blocks: int,
        chunk: int = 256,
        max_prompts: int = 1,
        eos_token_id: int | None = None,
        sharding: jax.sharding.Sharding | jax.Device | None = None,
        windows: tuple[kvjax.WindowRows, Callable[..., Any]] | None = None,
    ) -> None:
        if pool.num_host_blocks and windows is not None:
            raise ValueError("windows: got a pool with host blocks too, but rows of a window are not swapped")
        if 0 < pool.num_states < max(num_seqs):
            raise ValueError(f"pool: got {pool.num_states} states, expected one for each of {max(num_seqs)} sequences")
        self.caches, self._windows = caches, windows
        pages, states = self._pages_and_states()
        self._host = kvjax.HostCaches(pages, pool.num_host_blocks) if pool.num_host_blocks else None
        self._host_states = [np.zeros((pool.num_host_states, *x.shape[1:]), x.dtype) for x in states]
        self.num_preempted = self.num_recomputed = 0
        self._run, self._pool, self._eos = run, pool, eos_token_id
        self._num_seqs, self._max_blocks = sorted(num_seqs), max_blocks
        self._chunk, self._max_prompts = chunk, max_prompts
        self._waiting: collections.deque[Request] = collections.deque()
        self._running: list[Request] = []
        self._preempted: collections.deque[Request] = collections.deque()
        # Committed, as results are: the second step would be compiled again otherwise.
        self._previous: Any = jax.device_put(np.zeros(self.max_num_seqs, np.int32), sharding)
        self._unread: tuple[jax.Array, list[tuple[int, Request]]] | None = None

    def submit(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Queues a request."""
        if not len(prompt) or max_new_tokens < 1:
            raise ValueError(
                f"got a prompt of {len(prompt)} tokens and {max_new_tokens=}, expected at least one of each"
            )
        request = Request(prompt, max_new_tokens, self._pool.sequence())
        if self._blocks_of(request) > min(self._max_blocks, self._pool.num_blocks):
            raise ValueError(f"got {len(prompt)} + {max_new_tokens} tokens, more than the pool or a block table holds")
        self._waiting.append(request)
        return request

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in a step."""
        return self._num_seqs[-1]

    @property
    def is_idle(self) -> bool:
        """Whether all requests are done."""
        return not (self._waiting or self._running or self._preempted)

    def step(self) -> list[Request]:
        """Starts a step, then reads the previous one's tokens; returns the requests that this completes."""
        self._admit()
        self._land(wait=False)
        batch, before = self._schedule(), self._unread
        if not batch and self._running and before is None:  # there is nothing else to do
            self._land(wait=True)
            batch = self._schedule()
        batch = self._reserve(batch) if batch else batch
        self._unread = self._start(batch) if batch else None
        return [] if before is None else self._read(*before)

    def _blocks_of(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.max_new_tokens) // self._pool.block_size)

    def _admit(self) -> None:
        """Admits waiting requests while the pool can hold all running ones to their ends, without a host tier."""
        if self._host is not None:
            self._admit_to_host_tier()
            return
        taken = sum(map(self._blocks_of, self._running))
        while self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting[0]
            taken += self._blocks_of(request)
            if taken > self._pool.num_blocks:
                return
            self._start_prefill(request)
            self._running.append(self._waiting.popleft())

    def _start_prefill(self, request: Request) -> None:
        """Gives a request without blocks the cached blocks of its tokens, all of which the host has read."""
        request.prefill = [*request.prompt, *request.generated]
        request.sequence = self._pool.sequence(request.prefill)

    def _admit_to_host_tier(self) -> None:
        """Admits those that were preempted, then waiting ones, while they and a block for each running one fit."""
        while (self._preempted or self._waiting) and len(self._running) < self.max_num_seqs:
            queue = self._preempted or self._waiting
            request = queue[0]
            num_tokens = max(request.sequence.num_tokens, len(request.prompt) + len(request.generated)) + 1
            if -(-num_tokens // self._pool.block_size) + len(self._running) > self._pool.num_free and self._running:
                return
            if request.sequence.is_swapped_out:
                request.sequence.swap_in()
            else:
                self._start_prefill(request)
            queue.popleft()
            self._running.append(request)
            request.loading = self._swap()

    def _reserve(self, batch: Batch) -> Batch:
        """Makes room for a step, if need be without the requests that came last; returns the requests that are left."""
        while True:
            try:
                self._pool.append([request.sequence for request, _ in batch], [len(new) for _, new in batch])
            except kvjax.OutOfBlocksError:
                if self._host is None or self._running[-1] is self._running[0]:
                    raise
                self._land(wait=True)
                preempted = self._running.pop()
                try:
                    preempted.sequence.swap_out()
                except kvjax.OutOfBlocksError:  # of the host: its tokens are computed again, but for cached blocks
                    preempted.sequence.free()
                    self.num_recomputed += 1
                preempted.row = None  # when it continues, the host has read its last token
                self._preempted.appendleft(preempted)
                self.num_preempted += 1
                batch = [entry for entry in batch if entry[0] is not preempted]
                if not batch:
                    return batch
            else:
                return batch

    def _pages_and_states(self) -> tuple[list[kvjax.KVCache], list[Any]]:
        """The caches' pages, and the arrays of states beside them."""
        leaves = jax.tree.leaves(self.caches, is_leaf=lambda x: isinstance(x, kvjax.KVCache))
        pages = [x for x in leaves if isinstance(x, kvjax.KVCache)]
        return pages, [x for x in leaves if not isinstance(x, kvjax.KVCache)]

    def _replace(self, pages: Sequence[kvjax.KVCache], states: Sequence[Any]) -> None:
        of_kind = {True: iter(pages), False: iter(states)}
        is_pages = lambda x: isinstance(x, kvjax.KVCache)  # noqa: E731
        self.caches = jax.tree.map(lambda x: next(of_kind[is_pages(x)]), self.caches, is_leaf=is_pages)

    def _swap(self) -> kvjax.Loading | None:
        """Starts the copies that the pool has collected; returns those of blocks from the host, which `_land` writes.

        Blocks that go to the host may be written again at once.
        """
        swaps = self._pool.take_swaps()
        if self._host is None:
            return None
        pages, states = self._pages_and_states()
        if len(swaps.to_host):
            self._host.store(pages, swaps.to_host)
        if len(swaps.states_to_host):
            for of_layer, on_host in zip(states, self._host_states, strict=True):
                swap_states(of_layer, on_host, swaps.states_to_host)
        if len(swaps.states_from_host):
            both = zip(self._host_states, states, strict=True)
            self._replace(pages, [swap_states(*each, swaps.states_from_host) for each in both])
        return self._host.load(swaps.from_host) if len(swaps.from_host) else None

    def _land(self, *, wait: bool) -> None:
        """Writes blocks from the host that have arrived, or waits for all, in the order of their requests."""
        for request in self._running:
            if request.loading is None:
                continue
            if not (wait or request.loading.is_ready()):
                return
            pages, states = self._pages_and_states()
            self._replace(request.loading.into(pages), states)
            request.loading = None

    def _schedule(self) -> Batch:
        """Returns one token for each decoding request, and as much of the prompts as fits beside them."""
        batch: Batch = []
        left, num_prompts = self._chunk, self._max_prompts
        for request in self._running:
            if request.loading is not None:
                break  # later ones may share its blocks
            position = request.sequence.num_tokens
            if position < len(request.prefill):
                new = np.asarray(request.prefill[position : position + left], np.int32)
                if num_prompts and len(new):
                    batch.append((request, new))
                    left, num_prompts = left - len(new), num_prompts - 1
            elif request.num_started < request.max_new_tokens:
                token = request.generated[-1] if request.row is None else ~request.row
                batch.append((request, np.array([token], np.int32)))
        return batch

    def _start(self, batch: Batch) -> tuple[jax.Array, list[tuple[int, Request]]]:
        """Starts a step that has room; returns its output tokens, and the requests that they belong to."""
        sequences, q_lens = [request.sequence for request, _ in batch], [len(new) for _, new in batch]
        loading = self._swap()
        assert loading is None  # blocks come back for requests that are admitted, not for those that grow
        rows = min(size for size in self._num_seqs if size >= len(batch))
        is_decode = max(q_lens) == 1
        own_rows, fills = self._windows[0].assign(sequences, q_lens) if self._windows else (None, np.zeros(0))
        step = kvjax.StepMetadata.from_sequences(
            sequences,
            q_lens,
            num_tokens=rows if is_decode else rows + self._chunk,
            num_seqs=rows,
            max_blocks=self._max_blocks,
            window_rows=own_rows,
        )
        if self._windows and (fills >= 0).any():  # after a prefix hit
            fills = np.pad(fills, (0, rows - len(fills)), constant_values=-1)
            self.caches = self._windows[1](self.caches, step, fills)
        tokens = np.zeros(len(step.slot_mapping), np.int32)
        tokens[: sum(q_lens)] = np.concatenate([new for _, new in batch])
        options: dict[str, Any] = {"max_q_len": 1, "max_prompts": 0} if is_decode else self._prompt_buckets
        if self._pool.num_states:
            options["state_slots"] = np.full(rows, self._pool.num_states, np.int32)
            options["state_slots"][: len(batch)] = [sequence.state for sequence in sequences]
        self._previous, self.caches = self._run(tokens, self._previous, step, self.caches, **options)
        self._previous.copy_to_host_async()
        outputs = []
        for row, (request, new) in enumerate(batch):
            request.row = row
            if new[0] >= 0:  # known to the host
                request.sequence.commit(new)
            if request.sequence.num_tokens >= len(request.prefill):
                request.num_started += 1
                outputs.append((row, request))
        return self._previous, outputs

    @property
    def _prompt_buckets(self) -> dict[str, int]:
        return {"max_q_len": self._chunk, "max_prompts": self._max_prompts}

    def _read(self, following: jax.Array, outputs: list[tuple[int, Request]]) -> list[Request]:
        """Reads the tokens of a step; returns the requests that this completes."""
        values, ended = np.asarray(following).tolist(), []
        for row, request in outputs:
            if request.is_done:  # it ended after this step had started
                continue
            request.generated.append(values[row])
            if len(request.generated) == request.max_new_tokens or values[row] == self._eos:
                request.is_done = True
                request.sequence.free()
                (self._preempted if request in self._preempted else self._running).remove(request)
                ended.append(request)
            elif request.num_started > len(request.generated):  # the running step writes it
                request.sequence.commit(values[row : row + 1])
        return ended
