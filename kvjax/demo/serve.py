"""Serves requests from one block pool: chunked prefill, batched decode, a limited number of sequences at once.

Sequences allocate blocks as they grow, so the blocks of concurrent sequences are interleaved; a finished sequence frees
its blocks for the next.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvjax import BlockPool, PagedSequence
from kvjax.demo.engine import PADDING_SLOT, Batch, Engine, StepOutput

type NextToken = Callable[[int, np.ndarray], int]
"""`(position, logits [vocab_size] of the position before it) -> token`."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A sequence to serve: `prompt` (integers `[tokens]`), continued by `next_token` to `length` tokens in total.

    Raises:
      ValueError: an empty prompt, or one without tokens left to continue.
    """

    prompt: np.ndarray
    length: int
    next_token: NextToken

    def __post_init__(self) -> None:
        if not 0 < len(self.prompt) < self.length:
            raise ValueError(f"prompt: got {len(self.prompt)} tokens, expected 1 to length - 1 = {self.length - 1}")


def follow(text: np.ndarray, prompt_length: int) -> Request:
    """Returns a teacher-forced request: the tokens are those of `text`, whatever the model predicts."""
    return Request(text[:prompt_length], len(text), lambda position, _: int(text[position]))


def sample(prompt: np.ndarray, num_tokens: int, *, temperature: float, seed: int) -> Request:
    """Returns a request for `num_tokens` tokens sampled from the model; temperature 0 is greedy."""
    rng = np.random.default_rng(seed)

    def next_token(_: int, logits: np.ndarray) -> int:
        if temperature == 0:
            return int(logits.argmax())
        return int(np.argmax(logits / temperature + rng.gumbel(size=logits.shape)))

    return Request(prompt, len(prompt) + num_tokens, next_token)


@dataclasses.dataclass(frozen=True)
class Served:
    """The result of a request.

    Attributes:
      tokens: the whole sequence, int32 `[length]`.
      output: for every token but the last: logits `[length - 1, vocab_size]` that predict the next token, and each
        layer's inputs and outputs of attention.
      blocks: its blocks, in the order of its tokens.
    """

    tokens: np.ndarray
    output: StepOutput
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Static sizes of the two compiled steps.

    Attributes:
      max_running: sequences that run at once: the rows of a decode step.
      chunk: prompt tokens of one sequence in a prefill step.
      max_length: the longest sequence, in tokens.
    """

    max_running: int
    chunk: int
    max_length: int


def pool_size(requests: Sequence[Request], config: ServeConfig, block_size: int) -> int:
    """Returns blocks for any `config.max_running` of `requests`: fewer than all need, so later ones reuse them."""
    needed = sorted((-(-request.length // block_size) for request in requests), reverse=True)
    return sum(needed[: config.max_running])


def serve(
    engine: Engine,
    requests: Sequence[Request],
    pool: BlockPool,
    config: ServeConfig,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> list[Served]:
    """Runs `requests` to completion; calls `on_tokens` with the number of tokens that each step computed.

    Raises:
      ValueError: a request is longer than `config.max_length`.
      OutOfBlocksError: `pool` ran out of blocks; `pool_size` returns a sufficient number.
    """
    if too_long := [request.length for request in requests if request.length > config.max_length]:
        raise ValueError(f"requests: got lengths {too_long}, expected at most {config.max_length=}")
    waiting = collections.deque(enumerate(requests))
    running: list[_Sequence] = []
    served: dict[int, Served] = {}
    while waiting or running:
        while waiting and len(running) < config.max_running:
            index, request = waiting.popleft()
            running.append(_Sequence(index, request, pool.sequence()))
        for sequence in running:
            if sequence.is_prefilling:
                on_tokens(_prefill(engine, sequence, pool, config))
        decoding = [sequence for sequence in running if not (sequence.is_prefilling or sequence.is_done)]
        if decoding:
            on_tokens(_decode(engine, decoding, pool, config))
        for sequence in [sequence for sequence in running if sequence.is_done]:
            running.remove(sequence)
            served[sequence.index] = sequence.finish()
            sequence.paged.free()
    return [served[index] for index in range(len(requests))]


class _Sequence:
    """A running request."""

    def __init__(self, index: int, request: Request, paged: PagedSequence) -> None:
        self.index = index
        self.request = request
        self.paged = paged
        self.tokens = [int(token) for token in request.prompt]
        self.num_computed = 0
        self.outputs: list[StepOutput] = []

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < len(self.request.prompt)

    @property
    def is_done(self) -> bool:
        return self.num_computed == self.request.length - 1

    def record(self, output: StepOutput, rows: slice) -> None:
        """Keeps this sequence's `rows` of a step, and appends the next token if it is not known yet."""
        logits, *trace = output
        self.outputs.append(StepOutput(logits[rows], *(array[:, rows] for array in trace)))
        self.num_computed += rows.stop - rows.start
        if self.num_computed == len(self.tokens):
            self.tokens.append(self.request.next_token(len(self.tokens), logits[rows][-1]))

    def finish(self) -> Served:
        logits, *traces = zip(*self.outputs, strict=True)
        output = StepOutput(np.concatenate(logits), *(np.concatenate(trace, axis=1) for trace in traces))
        return Served(np.asarray(self.tokens, np.int32), output, tuple(self.paged.blocks.tolist()))


def _prefill(engine: Engine, sequence: _Sequence, pool: BlockPool, config: ServeConfig) -> int:
    """Computes the next chunk of a prompt; returns its number of tokens."""
    start = sequence.num_computed
    stop = min(start + config.chunk, len(sequence.request.prompt))
    pool.append([sequence.paged], [stop - start])
    batch = Batch(
        tokens=_padded(sequence.tokens[start:stop], config.chunk),
        positions=np.arange(start, start + config.chunk, dtype=np.int32),
        slots=_padded(sequence.paged.slots(start, stop), config.chunk, PADDING_SLOT),
        block_tables=_block_table([sequence], pool, config),
        seq_lens=np.asarray([stop], np.int32),
    )
    sequence.record(engine.prefill(batch), slice(0, stop - start))
    return stop - start


def _decode(engine: Engine, sequences: Sequence[_Sequence], pool: BlockPool, config: ServeConfig) -> int:
    """Computes one token of each of `sequences`; returns their number."""
    pool.append([sequence.paged for sequence in sequences], [1] * len(sequences))
    positions = [sequence.num_computed for sequence in sequences]
    slots = [one.paged.slots(position, position + 1)[0] for one, position in zip(sequences, positions, strict=True)]
    rows = config.max_running
    batch = Batch(
        tokens=_padded([sequence.tokens[-1] for sequence in sequences], rows),
        positions=_padded(positions, rows),
        slots=_padded(slots, rows, PADDING_SLOT),
        block_tables=_padded(_block_table(sequences, pool, config), rows),
        seq_lens=_padded([position + 1 for position in positions], rows),
    )
    output = engine.decode(batch)
    for row, sequence in enumerate(sequences):
        sequence.record(output, slice(row, row + 1))
    return len(sequences)


def _block_table(sequences: Sequence[_Sequence], pool: BlockPool, config: ServeConfig) -> np.ndarray:
    """Returns int32 `[len(sequences), max_blocks]`, zeros past each sequence's own blocks."""
    max_blocks = -(-config.max_length // pool.block_size)
    return np.stack([_padded(sequence.paged.blocks, max_blocks) for sequence in sequences])


def _padded(values: ArrayLike, length: int, fill: int = 0) -> np.ndarray:
    """Returns `values` as int32, padded with `fill` along the first axis to `length`."""
    array = np.asarray(values, np.int32)
    return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1), constant_values=fill)
