"""Serving benchmark: the scenario, the compiled steps, and their times."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from benchmarks import output, timing, workload
from benchmarks.bars import MAX_SEQS, SAME_SEQS
from benchmarks.peers.attention_inputs import compiling, filled_pages, take_pages
from benchmarks.shapes import BLOCK_SIZE
from benchmarks.timing import Clock, Timing
from examples import llama, peer_sum
from examples.engine import Engine
from examples.llama import Llama3Scaling, ModelConfig
from kvjax import AttentionSpec, FullAttentionSpec, KVCache, KVCacheDType

DEVICES = output.define_numbers(
    "devices", "also serve with the heads of the model divided among so many devices (default: one device)", least=1
)
PEER_SUMS = flags.DEFINE_bool("peer_sums", True, "on GPUs, sum over devices by examples.peer_sum, not jax.lax.psum")
AXIS = "tensor"
PEER_SUM_BYTES = 1 << 20  # of a step of 64 tokens of an 8,192 wide model; those of prompts are XLA's
WARM_UP_STEPS = 3
OTHERS, PROMPTS = "others", "prompts"
ROWS = {"same": SAME_SEQS, "most": MAX_SEQS, "others": OTHERS, "prompts": PROMPTS}  # by flag value
SPARE_BYTES = 6 << 30  # of a device, for what is neither weights nor caches
HIDDEN_ERROR = 2**-5
"""Maximum relative RMS error of the hidden states after two layers, with respect to XLA. Hidden states are bfloat16
with 8 bits of precision, and a dozen operations round to it."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A model and the sequences that it serves."""

    name: str  # of the model, as in tables
    config: ModelConfig
    seq_len: int  # tokens of each full sequence
    cache_bytes: int  # limit for the caches of all layers
    same: int  # sequences in the row that all dtypes share
    others: tuple[int, ...]  # more numbers of sequences, if they fit
    tail: int  # tokens to decode per sequence; a multiple of the block size
    prompt_len: int  # prompt tokens of a request
    num_new_tokens: int  # tokens to generate for such a request
    chunk: int  # prompt tokens per step

    def spec(self, dtype: KVCacheDType) -> AttentionSpec:
        return FullAttentionSpec(BLOCK_SIZE, self.config.num_key_value_heads, self.config.head_dim, dtype=dtype)

    @property
    def prompt_blocks(self) -> int:
        """Pages of a request with a prompt."""
        return -(-(self.prompt_len + self.num_new_tokens) // BLOCK_SIZE)

    def bytes_a_sequence(self, dtype: KVCacheDType, exact_window: int | None = None) -> int:
        """Returns the bytes of a full sequence's pages, and of its rows of exact windows."""
        spec, num_layers = self.spec(dtype), self.config.num_hidden_layers
        window = 0 if exact_window is None else kvjax.ExactWindow.num_bytes(spec, 1, exact_window)
        return num_layers * (self.seq_len // BLOCK_SIZE * spec.page_size_bytes + window)

    def most(self, dtype: KVCacheDType, exact_window: int | None = None, devices: int = 1) -> int:
        return devices * self.cache_bytes // self.bytes_a_sequence(dtype, exact_window)

    @property
    def parameter_bytes(self) -> int:
        leaves = jax.tree.leaves(llama.parameter_shapes(self.config), is_leaf=lambda leaf: isinstance(leaf, tuple))
        return sum(int(np.prod(leaf)) for leaf in leaves) * workload.INPUT_DTYPE.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a step reads: all except a separate embedding table."""
        table = self.config.vocab_size * self.config.hidden_size * workload.INPUT_DTYPE.itemsize
        return self.parameter_bytes - (0 if self.config.tie_word_embeddings else table)

    def with_layers(self, number: int) -> Scenario:
        """Returns the model with its first layers, named after their number if that is not all."""
        if number > (every := self.config.num_hidden_layers):
            raise ValueError(f"num_layers: got {number}, expected at most the {every} of {self.name}")
        name = self.name if number == every else f"{self.name}, {number} of {every} layers"
        return dataclasses.replace(self, name=name, config=dataclasses.replace(self.config, num_hidden_layers=number))

    def fits(self, memory: int) -> bool:
        """Whether a device holds the weights and `same` sequences in bfloat16, besides what a step needs."""
        caches = self.same * self.bytes_a_sequence(KVCacheDType.BFLOAT16)
        return self.parameter_bytes + caches + SPARE_BYTES <= memory


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
LLAMA_70B = dataclasses.replace(
    LLAMA_8B,
    name="llama-3.1-70b",
    config=dataclasses.replace(
        LLAMA_8B.config,
        hidden_size=8_192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
    ),
)
MODELS = {each.name: each for each in (LLAMA_8B, LLAMA_70B)}
TINY = Scenario(
    "tiny",
    ModelConfig(256, 64, 96, 2, 16, 8, 16),
    seq_len=64,
    cache_bytes=192 << 10,
    same=2,
    others=(1,),
    tail=16,
    prompt_len=20,
    num_new_tokens=3,
    chunk=8,
)


MODEL = flags.DEFINE_enum("shape", LLAMA_8B.name, [*MODELS], "whose shape is served")
LAYERS = flags.DEFINE_integer(
    "num_layers",
    None,
    "layers of the model (default: as many as one device holds, with pages in bfloat16)",
    lower_bound=1,
)


def scenario() -> Scenario:
    """Returns the model that flags ask for on a GPU, otherwise a tiny one for smoke tests."""
    if not workload.is_gpu() or output.SMOKE.value:
        return TINY.with_layers(LAYERS.value or TINY.config.num_hidden_layers)
    return fitted(MODELS[MODEL.value], jax.devices()[0].memory_stats()["bytes_limit"])


def fitted(of: Scenario, memory: int) -> Scenario:
    """Returns what one device of so many bytes serves, so that several are compared with it.

    Several devices serve twice the sequences if one holds them with the smallest model.
    """
    if DEVICES.value and dataclasses.replace(LLAMA_8B, same=2 * of.same).fits(memory):
        of = dataclasses.replace(of, same=2 * of.same)
    numbers = [LAYERS.value] if LAYERS.value else range(of.config.num_hidden_layers, 0, -1)
    parts = [of.with_layers(number) for number in numbers]
    part = next((each for each in parts if each.fits(memory)), parts[-1])
    if DEVICES.value or part.name != of.name:
        return dataclasses.replace(part, cache_bytes=part.same * part.bytes_a_sequence(KVCacheDType.BFLOAT16))
    return part


def device_counts() -> list[int]:
    """The numbers of devices that serve, one first; `ValueError` if there are fewer."""
    numbers = sorted({1, *(DEVICES.value or [])})
    if numbers[-1] > (there := jax.device_count()):
        raise ValueError(f"devices: got {numbers[-1]}, expected at most the {there} of this machine")
    return numbers


@dataclasses.dataclass(frozen=True)
class ServeJob:
    """One number of full sequences to decode, in one dtype, with exact windows of a size beside it or without.

    Several devices divide the heads.
    """

    of: Scenario
    dtype: KVCacheDType
    num_seqs: int
    exact_window: int | None = None
    devices: int = 1

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
        """The names of the table rows that this job belongs to, as in files."""
        names = {MAX_SEQS: self.of.most(self.dtype, self.exact_window, self.devices), SAME_SEQS: self.of.same}
        return ", ".join(name for name, number in names.items() if number == self.num_seqs)

    @property
    def subject(self) -> dict[str, Any]:
        several = {"devices": self.devices} if DEVICES.value else {}
        heads = {"num_kv_heads": self.spec.num_kv_heads, "head_size": self.spec.head_size, "dtype": self.dtype}
        sizes = {"num_seqs": self.num_seqs, "seq_len": self.of.seq_len}
        return {"case": self.of.name, **several, **heads, **sizes}

    @property
    def bytes_moved(self) -> int:
        """Bytes that a device reads in a step: weights, windows, pages of sequences halfway through their tail."""
        pages = -(-(self.of.seq_len - self.of.tail // 2) // BLOCK_SIZE) * self.num_seqs
        tokens = (self.exact_window or 0) * self.num_seqs
        of_layer = pages * self.spec.real_page_size_bytes
        of_layer += tokens * self.spec.num_kv_heads * sum(self.spec.head_sizes) * workload.INPUT_DTYPE.itemsize
        return (self.of.weight_bytes + self.of.config.num_hidden_layers * of_layer) // self.devices


def jobs(
    of: Scenario,
    dtypes: Sequence[KVCacheDType],
    rows: Sequence[str],
    exact_window: int | None = None,
    devices: int = 1,
) -> list[ServeJob]:
    """Returns the jobs of the requested rows by dtype, fewest sequences first."""
    found = []
    for dtype in dtypes:
        most = of.most(dtype, exact_window, devices)
        numbers = {SAME_SEQS: [of.same], MAX_SEQS: [most], OTHERS: [number for number in of.others if number < most]}
        wanted = {number for row in rows for number in numbers.get(row, [])}
        found += [ServeJob(of, dtype, number, exact_window, devices) for number in sorted(wanted)]
    return found


def placed(devices: int, *axes: str | None) -> NamedSharding | None:
    """Where arrays are that `axes` divide, without axes on every device; None on one device."""
    if devices == 1:
        return None
    return NamedSharding(jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,)), P(*axes))


def by_heads(devices: int) -> NamedSharding | None:
    """Where pages are, divided by heads; None on one device."""
    return placed(devices, None, None, None, AXIS)


def param_structs(of: Scenario, devices: int) -> llama.Params:
    """The shapes of the parameters, and where they are."""
    shapes, axes = llama.parameter_shapes(of.config), llama.parameter_axes(of.config, AXIS)

    def struct(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, workload.INPUT_DTYPE, sharding=placed(devices, *spec))

    return jax.tree.map(struct, shapes, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


@functools.lru_cache(maxsize=1)  # no device holds those of two models
def params(of: Scenario, devices: int) -> llama.Params:
    make = functools.partial(llama.random_params, of.config, dtype=workload.INPUT_DTYPE)
    if devices == 1:
        return make(jax.random.key(0))
    shardings = jax.tree.map(lambda struct: struct.sharding, param_structs(of, devices))
    return {**jax.jit(make, out_shardings=shardings)(jax.random.key(0)), **peers(devices)}


@functools.cache
def peers(devices: int) -> llama.Params:
    """What the devices sum through, beside the parameters: nothing if XLA sums."""
    if devices == 1 or not (workload.is_gpu() and PEER_SUMS.value):
        return {}
    sharding = placed(devices)
    assert sharding is not None
    assert isinstance(sharding.mesh, jax.sharding.Mesh)
    return {"peers": peer_sum.connect(sharding.mesh, AXIS, PEER_SUM_BYTES)}


def divided(run: Callable[..., Any], config: ModelConfig, caches: Any, out: Any, devices: int) -> Callable[..., Any]:
    """A function of `(params, tokens, previous, step, caches)` or without `previous`, on several devices.

    It takes and returns caches; `out` is the spec of what it returns besides.
    """
    if (everywhere := placed(devices)) is None:
        return run
    caches = jax.tree.map(lambda cache: cache.partition_specs, caches, is_leaf=lambda each: isinstance(each, KVCache))

    def call(*args: Any) -> Any:
        axes = {**llama.parameter_axes(config, AXIS), **jax.tree.map(lambda _: P(AXIS), peers(devices))}
        specs = axes, *[P()] * (len(args) - 2), caches
        mapped: Any = jax.shard_map(run, mesh=everywhere.mesh, in_specs=specs, out_specs=(out, caches), check_vma=False)
        return mapped(*args)

    return call


def implementation() -> str | None:
    """Selects the kernels on a GPU, even where kvjax would choose XLA."""
    return output.IMPLEMENTATION.value or ("mosaic" if workload.is_gpu() else None)


def ints(devices: int, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placed(devices))


def step_struct(
    num_tokens: int, num_seqs: int, max_blocks: int, *, has_windows: bool = False, devices: int = 1
) -> kvjax.StepMetadata:
    shapes = {"block_table": (num_seqs, max_blocks), "seq_lens": (num_seqs,), "cu_q_lens": (num_seqs + 1,)}
    shapes |= {"slot_mapping": (num_tokens,)} | ({"window_rows": (num_seqs,)} if has_windows else {})
    return kvjax.StepMetadata(**{name: ints(devices, *shape) for name, shape in shapes.items()})


@functools.cache
def program(job: ServeJob, max_blocks: int, max_q_len: int = 1) -> Future[Any]:
    """Compiles a step of a model: `(params, tokens, previous, step, caches)`."""
    of, num_seqs, devices = job.of, job.num_seqs, job.devices
    num_tokens = num_seqs if max_q_len == 1 else num_seqs + max_q_len
    cache: Any = workload.cache_struct(job.spec, num_seqs * max_blocks, by_heads(devices))
    if job.exact_window:
        window = functools.partial(kvjax.ExactWindow.allocate, job.spec, num_seqs, job.exact_window)
        cache = llama.Windowed(cache, jax.eval_shape(window))
    has_windows = job.exact_window is not None
    step = step_struct(num_tokens, num_seqs, max_blocks, has_windows=has_windows, devices=devices)
    options = {"max_q_len": max_q_len, "max_prompts": int(max_q_len > 1), "implementation": implementation()}
    caches = (cache,) * of.config.num_hidden_layers
    run = functools.partial(llama.greedy_step, **own_part(of.config, devices), **options)
    jitted = jax.jit(divided(run, of.config, caches, P(), devices), donate_argnums=4)
    numbers = ints(devices, num_tokens), ints(devices, num_seqs)
    through = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), peers(devices))
    return compiling(jitted, {**param_structs(of, devices), **through}, *numbers, step, caches)


def own_part(config: ModelConfig, devices: int) -> dict[str, Any]:
    """The arguments `config` and `axis` of a device's part of a model."""
    return {"config": llama.share(config, devices), "axis": None if devices == 1 else AXIS}


class Running:
    """Launches the compiled steps of a model.

    `last` holds the tokens and metadata of the last step, `dispatches` the seconds that each launch took the host.
    """

    def __init__(self, weights: llama.Params, programs: Mapping[int, Any]) -> None:
        self.weights, self.programs = weights, programs
        self.last: tuple[Any, kvjax.StepMetadata] | None = None
        self.dispatches: list[float] = []

    def __call__(self, tokens: Any, previous: Any, step: Any, caches: Any, *, max_q_len: int, **_: int) -> Any:
        self.last, start = (tokens, step), time.perf_counter()
        launched = self.programs[max_q_len](self.weights, tokens, previous, step, caches)
        self.dispatches.append(time.perf_counter() - start)
        return launched


class TimedEngine(Engine):
    """An engine that records how long it waits for the device."""

    waited = 0.0

    def _read(self, following: jax.Array, giving: Any) -> Any:
        start = time.perf_counter()
        jax.block_until_ready(following)
        self.waited += time.perf_counter() - start
        return super()._read(following, giving)


def filled_caches(job: ServeJob, num_blocks: int) -> tuple[KVCache, ...]:
    """Returns caches of normal random numbers; each layer is a random selection of distinct pages."""
    of, spec, rng = job.of, job.spec, np.random.default_rng(3)
    own = dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads // job.devices)
    pages = filled_pages(own, scaled=False)
    sources = [
        rng.integers(pages.num_blocks, size=num_blocks, dtype=np.int32) for _ in range(of.config.num_hidden_layers)
    ]
    sharding, taken = by_heads(job.devices), (take_pages(pages.kv, source) for source in sources)
    if sharding is not None:
        taken = (workload.on_each_device(kv, sharding) for kv in taken)
    return tuple(KVCache(kv, spec, sharding) for kv in taken)


def full_engine(job: ServeJob) -> tuple[TimedEngine, Running]:
    """Returns an engine whose requests are cached except for the last tokens of their sequences.

    The pool knows the prompts, so the engine finds their blocks as for any cached prefix. The blocks of the sequences
    are interleaved, as in a server. Rows of exact windows are filled in the first step.
    """
    weights = params(job.of, job.devices)
    run = Running(weights, {1: program(job, job.blocks_a_seq).result()})
    pool = kvjax.BlockPool(job.num_blocks, BLOCK_SIZE)
    number, num_cached = job.num_seqs, job.of.seq_len - job.of.tail
    ids = np.random.default_rng(4).integers(job.of.config.vocab_size, size=(number, num_cached + 1))
    stored = [pool.sequence() for _ in range(number)]
    for _ in range(num_cached // BLOCK_SIZE):
        pool.append(stored, [BLOCK_SIZE] * number)
    for sequence, prompt in zip(stored, ids, strict=True):
        sequence.commit(prompt[:-1])
        sequence.free()
    caches: Any = filled_caches(job, job.num_blocks)
    windows = None
    if job.exact_window:
        caches = llama.with_exact_windows(caches, number, job.exact_window)
        windows = kvjax.WindowRows(caches[0].window), llama.fill_windows
    sizes: dict[str, Any] = {"num_seqs": [number], "max_blocks": job.blocks_a_seq, "chunk": number}
    engine = TimedEngine(run, caches, pool, **sizes, max_prompts=number, windows=windows, sharding=placed(job.devices))
    for prompt in ids:
        engine.submit(prompt.tolist(), job.of.tail - 1)
    return engine, run


def serve(job: ServeJob) -> tuple[Timing, dict[str, Any]]:
    """Decodes until the sequences are full, then repeats the last step.

    Returns times from one step's tokens to the next step's, and facts: the error of a step where it is checked;
    nanoseconds of the host in a step, excluding waits, of its part that launches the step, and of a step without an
    engine or synchronization; bytes of the program. Caches must not have moved.
    """
    facts: dict[str, Any] = {"error": check(job)} if job.num_seqs == job.of.same else {}
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
    # The last call launches no step.
    steps = np.diff(marks)[WARM_UP_STEPS:-1]
    host = np.median(steps - np.diff(waits)[WARM_UP_STEPS:-1])
    assert run.last is not None
    tokens, step = jax.device_put(run.last, placed(job.devices))
    call = functools.partial(run.programs[1], run.weights)
    in_a_row, _ = steps_in_a_row(call, tokens, step, engine.caches, placed(job.devices))
    seconds = {"device_ns": in_a_row.seconds, "host_ns": float(host)}
    seconds["dispatch_ns"] = float(np.median(run.dispatches[WARM_UP_STEPS:]))
    facts |= {name: max(round(each * 1e9), 1) for name, each in seconds.items()}
    facts["temporary_bytes"] = workload.temporary_bytes(run.programs[1])
    return Timing(tuple(map(float, steps)), Clock.HOST), facts


def steps_in_a_row(
    run: Callable[..., Any], tokens: Any, step: kvjax.StepMetadata, caches: Any, sharding: NamedSharding | None = None
) -> Any:
    """Times back-to-back steps of a token of each sequence, repeatable because they always write the same slots.

    Returns the times and the caches, which must not have moved.
    """
    following, where = jnp.zeros(len(tokens), jnp.int32, device=sharding), workload.pointers(caches)

    def call(_: int) -> jax.Array:
        nonlocal following, caches
        following, caches = run(tokens, following, step, caches)
        return following

    timed = timing.measure_in_a_row(call, count=16, samples=3)
    if workload.pointers(caches) != where:
        raise AssertionError("a step was not in place: it returned a cache elsewhere in memory")
    return timed, caches


def check(job: ServeJob) -> float:
    """Compares the hidden states after two layers with XLA, for two sequences, and returns the relative error."""
    config = dataclasses.replace(job.of.config, num_hidden_layers=min(job.of.config.num_hidden_layers, 2))
    weights = params(job.of, job.devices)
    weights = {**weights, "layers": weights["layers"][: config.num_hidden_layers]}
    few = dataclasses.replace(job, of=dataclasses.replace(job.of, config=config))
    rng = np.random.default_rng(5)
    table = rng.permutation(2 * job.blocks_a_seq).astype(np.int32).reshape(2, -1)
    lengths = np.array([job.of.seq_len - 7, job.of.seq_len // 2], np.int32)
    slots = table[np.arange(2), (lengths - 1) // BLOCK_SIZE] * BLOCK_SIZE + (lengths - 1) % BLOCK_SIZE
    window_rows = None if job.exact_window is None else np.arange(2, dtype=np.int32)
    step = kvjax.StepMetadata(table, lengths, np.arange(3, dtype=np.int32), slots.astype(np.int32), window_rows)
    tokens = jnp.arange(2, dtype=jnp.int32)

    def hidden(by: str | None) -> np.ndarray:
        attend = functools.partial(llama.write_and_attend, max_q_len=1, implementation=by)
        caches: Any = filled_caches(few, 2 * job.blocks_a_seq)
        if job.exact_window:
            caches = llama.with_exact_windows(caches, 2, job.exact_window)
            caches = llama.fill_windows(caches, step, window_rows)

        part = own_part(config, job.devices)

        def call(weights: llama.Params, tokens: Any, step: Any, caches: Any) -> Any:
            return llama.forward(weights, tokens=tokens, step=step, caches=caches, attend=attend, **part)

        run = jax.jit(divided(call, config, caches, P(), job.devices))
        return np.asarray(run(weights, tokens, step, caches)[0], np.float64)

    got, expected = hidden(implementation()), hidden("xla")
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    if not error <= HIDDEN_ERROR:
        raise AssertionError(f"hidden states are {error:.2%} off those by XLA, expected at most {HIDDEN_ERROR:.2%}")
    return error


def prompt_programs(job: ServeJob) -> dict[int, Future[Any]]:
    return {max_q_len: program(job, job.of.prompt_blocks, max_q_len) for max_q_len in (1, job.of.chunk)}


def serve_prompts(job: ServeJob) -> tuple[float, Timing, Timing]:
    """Serves twice as many requests as run concurrently, each with its own prompt.

    Returns the total seconds, and the times of steps with and without prompts.
    """
    of, programs = job.of, {max_q_len: each.result() for max_q_len, each in prompt_programs(job).items()}
    run, max_blocks = Running(params(of, job.devices), programs), of.prompt_blocks
    pool = kvjax.BlockPool(of.same * max_blocks, BLOCK_SIZE)
    caches = filled_caches(job, pool.num_blocks)
    sizes: dict[str, Any] = {"num_seqs": [of.same], "max_blocks": max_blocks, "chunk": of.chunk}
    engine = Engine(run, caches, pool, **sizes, sharding=placed(job.devices))
    ids = np.random.default_rng(6).integers(of.config.vocab_size, size=(2 * of.same, of.prompt_len))
    for prompt in ids:
        engine.submit(prompt.tolist(), of.num_new_tokens)
    ended, seconds = [], {1: [], of.chunk: []}  # type: ignore[var-annotated]
    start = mark = time.perf_counter()
    while not engine.is_idle:
        # A call waits for the step before the one that it launches.
        before = run.last
        ended += engine.step()
        if before is not None:
            seconds[1 if len(before[0]) == of.same else of.chunk].append(time.perf_counter() - mark)
        mark = time.perf_counter()
    if {len(request.generated) for request in ended} != {of.num_new_tokens} or len(ended) != len(ids):
        raise AssertionError(f"{len(ended)} of {len(ids)} requests ended")
    mixed, decodes = (Timing(tuple(seconds[size]), Clock.HOST) for size in (of.chunk, 1))
    return time.perf_counter() - start, mixed, decodes
