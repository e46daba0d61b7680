"""A model that serves full sequences: what is served, the programs of a step, and how long steps take."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import memory, output, timing, workload
from benchmarks.bars import MOST, SAME
from benchmarks.peers.attention_inputs import compiling, filled_page_bytes, filled_pages, take_pages
from benchmarks.shapes import BLOCK_SIZE
from benchmarks.timing import Clock, Timing
from examples import llama
from examples.engine import Engine
from examples.llama import Llama3Scaling, ModelConfig
from kvjax import AttentionSpec, FullAttentionSpec, KVCache, KVCacheDType

WARM_UP_STEPS = 3
OTHERS, PROMPTS = "others", "prompts"
ROWS = {"same": SAME, "most": MOST, "others": OTHERS, "prompts": PROMPTS}  # by the names that a flag has
HIDDEN_ERROR = 2**-5
"""Of hidden states behind two layers, the largest error relative to those by XLA, by root mean squares: theirs are
bfloat16 with 8 bits, and a dozen operations round to it."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is served on a device."""

    name: str  # of the model, as tables have it
    config: ModelConfig
    seq_len: int  # tokens of each sequence at the end
    cache_bytes: int  # that the caches of all layers may take
    same: int  # sequences in the row that all dtypes have alike
    others: tuple[int, ...]  # further numbers of sequences, for those that fit
    tail: int  # tokens of each sequence that are decoded; a multiple of the block size
    prompt_len: int  # of a request that comes with a prompt
    num_new_tokens: int  # of such a request
    chunk: int  # tokens of prompts in a step

    def spec(self, dtype: KVCacheDType) -> AttentionSpec:
        return FullAttentionSpec(BLOCK_SIZE, self.config.num_key_value_heads, self.config.head_dim, dtype=dtype)

    @property
    def prompt_blocks(self) -> int:
        """Pages of a request that comes with a prompt."""
        return -(-(self.prompt_len + self.num_new_tokens) // BLOCK_SIZE)

    def bytes_a_sequence(self, dtype: KVCacheDType) -> int:
        return self.config.num_hidden_layers * self.seq_len // BLOCK_SIZE * self.spec(dtype).page_size_bytes

    def most(self, dtype: KVCacheDType) -> int:
        return self.cache_bytes // self.bytes_a_sequence(dtype)

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the weights: all but the rows of the embedding that its tokens are not."""
        shapes = dict(llama.parameter_shapes(self.config))
        if "unembedding" in shapes:
            del shapes["embedding"]
        leaves = jax.tree.leaves(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
        return sum(int(np.prod(leaf)) for leaf in leaves) * workload.INPUT_DTYPE.itemsize


LLAMA_8B = Scenario(
    "llama-3.1-8b",
    ModelConfig(128_256, 4_096, 14_336, 32, 32, 8, 128, 1e-5, 5e5, Llama3Scaling(8.0, 1.0, 4.0, 8_192)),
    seq_len=8_192,
    cache_bytes=40 << 30,
    same=32,
    others=(8, 64),
    tail=64,
    prompt_len=1_024,
    num_new_tokens=128,
    chunk=512,
)
TINY = Scenario(
    "tiny",
    ModelConfig(256, 64, 96, 2, 4, 2, 16),
    seq_len=64,
    cache_bytes=48 << 10,
    same=2,
    others=(1,),
    tail=16,
    prompt_len=20,
    num_new_tokens=3,
    chunk=8,
)


def scenario() -> Scenario:
    """That of this device: the model on a GPU, elsewhere something that shows that it runs."""
    return LLAMA_8B if workload.is_gpu() and not output.SMOKE.value else TINY


@dataclasses.dataclass(frozen=True)
class ServeJob:
    """So many full sequences that decode."""

    of: Scenario
    dtype: KVCacheDType
    num_seqs: int

    @property
    def spec(self) -> AttentionSpec:
        return self.of.spec(self.dtype)

    @property
    def blocks_a_seq(self) -> int:
        return self.of.seq_len // BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        return self.num_seqs * self.blocks_a_seq

    @property
    def rows(self) -> str:
        """Which rows of the table it is, words for the file."""
        names = {MOST: self.of.most(self.dtype), SAME: self.of.same}
        return ", ".join(name for name, number in names.items() if number == self.num_seqs)

    @property
    def subject(self) -> dict[str, Any]:
        return {
            "case": self.of.name,
            "num_kv_heads": self.of.config.num_key_value_heads,
            "head_size": self.of.config.head_dim,
            "dtype": self.dtype,
            "num_seqs": self.num_seqs,
            "seq_len": self.of.seq_len,
        }

    @property
    def bytes_moved(self) -> int:
        """What a step reads: weights, and the pages of sequences that are about half way through their tail."""
        pages = -(-(self.of.seq_len - self.of.tail // 2) // BLOCK_SIZE) * self.num_seqs
        return self.of.weight_bytes + self.of.config.num_hidden_layers * pages * self.spec.real_page_size_bytes

    def why_too_large(self) -> str | None:
        """Why memory is too small for its caches, beside the weights that are there already."""
        needed = self.num_seqs * self.of.bytes_a_sequence(self.dtype) + filled_page_bytes(self.spec)
        return memory.why_too_large(needed)


def jobs(of: Scenario, dtypes: Sequence[KVCacheDType], rows: Sequence[str]) -> list[ServeJob]:
    """What is served in each dtype, fewest sequences first: the rows of the bars, and with "others" what fits."""
    found = []
    for dtype in dtypes:
        most = of.most(dtype)
        numbers = {of.same} if SAME in rows else set()
        numbers |= {most} if MOST in rows else set()
        numbers |= {number for number in of.others if number < most} if OTHERS in rows else set()
        found += [ServeJob(of, dtype, number) for number in sorted(numbers)]
    return found


@functools.cache
def params(of: Scenario) -> llama.Params:
    return llama.random_params(of.config, jax.random.key(0), workload.INPUT_DTYPE)


def implementation() -> str | None:
    """The kernels on a GPU, also where kvjax would choose XLA."""
    return output.IMPLEMENTATION.value or ("mosaic" if workload.is_gpu() else None)


def struct_of(of: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), of)


def step_struct(num_tokens: int, num_seqs: int, max_blocks: int) -> kvjax.StepMetadata:
    shapes = {"block_table": (num_seqs, max_blocks), "seq_lens": (num_seqs,), "cu_q_lens": (num_seqs + 1,)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    return kvjax.StepMetadata(**arrays, slot_mapping=jax.ShapeDtypeStruct((num_tokens,), jnp.int32))


@functools.cache
def program(of: Scenario, dtype: KVCacheDType, num_seqs: int, max_blocks: int, max_q_len: int = 1) -> Future[Any]:
    """A step of a model, being compiled: `(params, tokens, previous, step, caches)`."""
    num_tokens = num_seqs if max_q_len == 1 else num_seqs + max_q_len
    tokens, previous = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (num_tokens, num_seqs))
    caches = (workload.cache_struct(of.spec(dtype), num_seqs * max_blocks),) * of.config.num_hidden_layers
    options = {"max_q_len": max_q_len, "max_prompts": int(max_q_len > 1), "implementation": implementation()}
    arguments = struct_of(params(of)), tokens, previous, step_struct(num_tokens, num_seqs, max_blocks), caches
    return compiling(llama.greedy_step, *arguments, config=of.config, **options)


class Running:
    """Starts the compiled steps of a model; `last` is what the last one was given, as the engine made it."""

    def __init__(self, weights: llama.Params, programs: Mapping[int, Any]) -> None:
        self.weights, self.programs = weights, programs
        self.last: tuple[Any, kvjax.StepMetadata] | None = None

    def __call__(self, tokens: Any, previous: Any, step: Any, caches: Any, *, max_q_len: int, **_: int) -> Any:
        self.last = tokens, step
        return self.programs[max_q_len](self.weights, tokens, previous, step, caches)


class TimedEngine(Engine):
    """Notes for how long it waits for the device."""

    waited = 0.0

    def _read(self, following: jax.Array, giving: Any) -> Any:
        start = time.perf_counter()
        jax.block_until_ready(following)
        self.waited += time.perf_counter() - start
        return super()._read(following, giving)


def filled_caches(of: Scenario, dtype: KVCacheDType, num_blocks: int) -> tuple[KVCache, ...]:
    """Caches of normal numbers: a thousand different pages, drawn at random for each layer."""
    pages, rng = filled_pages(of.spec(dtype), scaled=False), np.random.default_rng(3)
    sources = [
        rng.integers(pages.num_blocks, size=num_blocks, dtype=np.int32) for _ in range(of.config.num_hidden_layers)
    ]
    return tuple(KVCache(take_pages(pages.kv, source), pages.spec) for source in sources)


def full_engine(job: ServeJob) -> tuple[TimedEngine, Running]:
    """An engine whose requests have all but the last tokens of their sequences in the caches already.

    Their prompts are known to the pool, so that the engine finds their blocks as it finds any prefix's. Blocks were
    handed out to all sequences by turns, as they are in a server.
    """
    weights = params(job.of)
    run = Running(weights, {1: program(job.of, job.dtype, job.num_seqs, job.blocks_a_seq).result()})
    pool = kvjax.BlockPool(job.num_blocks, BLOCK_SIZE)
    number, num_cached = job.num_seqs, job.of.seq_len - job.of.tail
    ids = np.random.default_rng(4).integers(job.of.config.vocab_size, size=(number, num_cached + 1))
    stored = [pool.sequence() for _ in range(number)]
    for _ in range(num_cached // BLOCK_SIZE):
        pool.append(stored, [BLOCK_SIZE] * number)
    for sequence, prompt in zip(stored, ids, strict=True):
        sequence.commit(prompt[:-1])
        sequence.free()
    caches = filled_caches(job.of, job.dtype, job.num_blocks)
    engine = TimedEngine(
        run, caches, pool, num_seqs=[number], max_blocks=job.blocks_a_seq, chunk=number, max_prompts=number
    )
    for prompt in ids:
        engine.submit(prompt.tolist(), job.of.tail - 1)
    return engine, run


@dataclasses.dataclass(frozen=True)
class Served:
    """How long steps took."""

    steps: Timing  # from one step's tokens to the next's, as the engine runs them
    host: Timing  # that the host was busy in each, while it did not wait
    device: Timing  # back-to-back steps without synchronization, without an engine
    temporary_bytes: int  # of the program


def serve(job: ServeJob) -> Served:
    """Decodes until the sequences are full, then runs the last step again and again.

    Raises:
      AssertionError: a cache has moved, or a sequence has not its tokens.
    """
    engine, run = full_engine(job)
    where = workload.pointers(engine.caches)
    ended, marks, waits = [], [time.perf_counter()], [0.0]
    while not engine.is_idle:
        ended += engine.step()
        marks.append(time.perf_counter())
        waits.append(engine.waited)
    if workload.pointers(engine.caches) != where:
        raise AssertionError("a step was not in place: it returned a cache elsewhere in memory")
    if (lengths := {len(request.generated) for request in ended}) != {job.of.tail - 1} or len(ended) != job.num_seqs:
        raise AssertionError(f"{len(ended)} requests ended with {lengths} tokens")
    # The last call starts no step.
    steps = np.diff(marks)[WARM_UP_STEPS:-1]
    host = np.maximum(steps - np.diff(waits)[WARM_UP_STEPS:-1], 1e-9)
    of_steps, of_host = (Timing(tuple(map(float, each)), Clock.HOST) for each in (steps, host))
    return Served(of_steps, of_host, steps_in_a_row(run, engine), workload.temporary_bytes(run.programs[1]))


def steps_in_a_row(run: Running, engine: Engine) -> Timing:
    """Times the last step of an engine, which it can repeat: it writes the same slots."""
    assert run.last is not None
    tokens, step = jax.device_put(run.last)
    following = jnp.zeros(engine.max_num_seqs, jnp.int32)

    def call(_: int) -> jax.Array:
        nonlocal following
        following, engine.caches = run(tokens, following, step, engine.caches, max_q_len=1)
        return following

    return timing.measure_in_a_row(call, count=16, samples=3)


def check(job: ServeJob) -> float:
    """Compares two layers of two sequences with what they are by XLA; the error of the hidden states.

    Raises:
      AssertionError: it is too large, or hidden states are not finite.
    """
    config = dataclasses.replace(job.of.config, num_hidden_layers=2)
    weights = {**params(job.of), "layers": params(job.of)["layers"][:2]}
    few = dataclasses.replace(job.of, config=config)
    caches = filled_caches(few, job.dtype, 2 * job.blocks_a_seq)
    rng = np.random.default_rng(5)
    table = rng.permutation(2 * job.blocks_a_seq).astype(np.int32).reshape(2, -1)
    lengths = np.array([job.of.seq_len - 7, job.of.seq_len // 2], np.int32)
    slots = table[np.arange(2), (lengths - 1) // BLOCK_SIZE] * BLOCK_SIZE + (lengths - 1) % BLOCK_SIZE
    step = kvjax.StepMetadata(table, lengths, np.arange(3, dtype=np.int32), slots.astype(np.int32))
    tokens = jnp.arange(2, dtype=jnp.int32)

    def hidden(by: str | None) -> np.ndarray:
        attend = functools.partial(llama.write_and_attend, max_q_len=1, implementation=by)
        run = jax.jit(functools.partial(llama.forward, config=config, attend=attend))
        return np.asarray(run(weights, tokens=tokens, step=step, caches=caches)[0], np.float64)

    got, expected = hidden(implementation()), hidden("xla")
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    if not error <= HIDDEN_ERROR:
        raise AssertionError(f"hidden states are {error:.2%} off those by XLA, expected at most {HIDDEN_ERROR:.2%}")
    return error


def prompt_programs(of: Scenario, dtype: KVCacheDType) -> dict[int, Future[Any]]:
    return {max_q_len: program(of, dtype, of.same, of.prompt_blocks, max_q_len) for max_q_len in (1, of.chunk)}


def serve_prompts(of: Scenario, dtype: KVCacheDType) -> tuple[float, Timing, Timing]:
    """Twice as many requests as run at once, each with a prompt of its own, served to their ends.

    Returns:
      The seconds that all take, and the times of steps with and without prompts.

    Raises:
      AssertionError: a request has not its tokens.
    """
    programs = {max_q_len: each.result() for max_q_len, each in prompt_programs(of, dtype).items()}
    run, max_blocks = Running(params(of), programs), of.prompt_blocks
    pool = kvjax.BlockPool(of.same * max_blocks, BLOCK_SIZE)
    caches = filled_caches(of, dtype, pool.num_blocks)
    engine = Engine(run, caches, pool, num_seqs=[of.same], max_blocks=max_blocks, chunk=of.chunk)
    ids = np.random.default_rng(6).integers(of.config.vocab_size, size=(2 * of.same, of.prompt_len))
    for prompt in ids:
        engine.submit(prompt.tolist(), of.num_new_tokens)
    ended, seconds = [], {1: [], of.chunk: []}  # type: ignore[var-annotated]
    start = mark = time.perf_counter()
    while not engine.is_idle:
        # What a call waits for is the step before the one that it starts.
        before = run.last
        ended += engine.step()
        if before is not None:
            seconds[1 if len(before[0]) == of.same else of.chunk].append(time.perf_counter() - mark)
        mark = time.perf_counter()
    if {len(request.generated) for request in ended} != {of.num_new_tokens} or len(ended) != len(ids):
        raise AssertionError(f"{len(ended)} of {len(ids)} requests ended")
    mixed, decodes = (Timing(tuple(seconds[size]), Clock.HOST) for size in (of.chunk, 1))
    return time.perf_counter() - start, mixed, decodes
