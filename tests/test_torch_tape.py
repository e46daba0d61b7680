"""Attention that is launched from a recording: which calls, and what they are launched with.

These tests need no GPU: calls on CPU tensors take the code path of a GPU, and a fake kernel records each launch.
`test_torch_attention.py` and others run on a GPU and make each call more than once.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kvjax_torch  # noqa: E402
from kvjax import KVCacheError, kernels  # noqa: E402
from kvjax_torch import library, window_attention  # noqa: E402
from kvjax_torch.arguments import scales  # noqa: E402
from kvjax_torch.arguments.checks import are_plain  # noqa: E402
from kvjax_torch.arguments.plan import Encoding  # noqa: E402
from kvjax_torch.calls import attending, choosing  # noqa: E402
from kvjax_torch.cuda import dense_prompts, latents, ragged, reads, writes  # noqa: E402
from kvjax_torch.eager import host  # noqa: E402
from kvjax_torch.eager import ragged as eager_ragged  # noqa: E402
from kvjax_torch.launch import running, tape  # noqa: E402
from kvjax_torch.launch.tape import Recording  # noqa: E402

NUM_SEQS, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE = 3, 40, 16, 2, 32
ROW = {"nvfp4": HEAD_SIZE // 2 + HEAD_SIZE // 16, "int8_per_token_head": HEAD_SIZE + 4}
OPERATIONS = torch.ops.kvjax


class Recorder:
    """Records launches. Replaces compilation and compiled kernels, and runs calls on CPU tensors as on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[list[int], int]] = []
        self.served = 0
        target = kernels.Target(compute_capability=(9, 0))
        monkeypatch.setattr(tape, "_tapes", {})
        monkeypatch.setattr(running, "check_capability", lambda device: None)
        monkeypatch.setattr(running, "compile_all", lambda *_: None)
        monkeypatch.setattr(running, "_compiled", self._compiled)
        monkeypatch.setattr(choosing, "target_of", lambda _: target)
        for name in ("route_of", "attention_parts"):
            monkeypatch.setattr(attending, name, getattr(attending, name).__wrapped__)
        for name in ("attend", "gather", "gather_rows"):
            monkeypatch.setattr(host, name, getattr(reads, name))
        monkeypatch.setattr(host, "write", lambda plan, tensors: latents.write(plan, tensors, unique_slots=True))
        monkeypatch.setattr(host, "rotate_and_write", _rotate_and_write)
        monkeypatch.setattr(host, "attend_ragged", ragged.attend)
        monkeypatch.setattr(eager_ragged, "attend", dense_prompts.attend)

    def _compiled(self, kernel: kernels.AnyCount, _: torch.device) -> running.Launcher:
        return running.Launcher(self, kernel.num_programs)  # type: ignore[arg-type]

    def __call__(self, entries: Any, num_programs: int) -> None:
        self.launches.append((list(entries), num_programs))

    def call(self, given: tuple[Any, ...], options: dict[str, Any], operation: Any, out: Any = None) -> Any:
        """Calls an operation as `dispatch.call` does for CUDA tensors."""
        operation, given = into(out, operation, given)
        kernel, written = library.IMPLEMENTATIONS[operation]

        def serve() -> Any:
            self.served += 1
            return kernel(*given, **options)

        return tape.call(serve, [kernel, *given, *options.values()], written)

    def is_known(self, *call: Any) -> bool:
        """Whether a call is launched without being served."""
        before = self.served
        self.call(*call)
        return self.served == before


def _rotate_and_write(plan: Any, tensors: Any, rope: Any) -> torch.Tensor:
    stored_as = Encoding(plan.write.cache.spec.dtype.value)
    return writes.rotate_and_write(tensors, rope, stored_as, unique_slots=True)


def into(out: torch.Tensor | None, operation: Any, given: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The operation that stores its result in `out`, if that is given, and its arguments."""
    return (operation, given) if out is None else (getattr(OPERATIONS, f"{operation.__name__}_out"), (out, *given))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def pages(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both halves of one allocation."""
    row, stored = (ROW[dtype], torch.uint8) if dtype in ROW else (HEAD_SIZE, torch.bfloat16)
    kv_cache = torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, row, dtype=stored)
    return kv_cache[:, 0], kv_cache[:, 1]


def decode(dtype: str = "nvfp4", num_seqs: int = NUM_SEQS, width: int = 5, **changes: Any) -> tuple[Any, ...]:
    """A call of `paged_attention`, with memory of its own."""
    key_cache, value_cache = pages(dtype)
    given = {
        "query": torch.zeros(num_seqs, 1, 2 * NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": torch.zeros(num_seqs, width, dtype=torch.int32),
        "seq_lens": torch.ones(num_seqs, dtype=torch.int32),
        "dtype": dtype,
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(0.25),
    }
    options = {"v_scale_layout": "linear", "sm_scale": None, "sliding_window": None, "logits_soft_cap": None}
    options |= {"sinks": None, "batch_invariant": False, "tree_mask": None}
    options |= {name: changes.pop(name) for name in [*changes] if name in options}
    out = changes.pop("out", None)
    return (*(given | changes).values(),), options, OPERATIONS.paged_attention, out


def step(dtype: str = "nvfp4", num_tokens: int = 100, **changes: Any) -> tuple[Any, ...]:
    """A call of `ragged_paged_attention`: a chunk and two sequences that decode."""
    rows = torch.zeros(num_tokens, 2 * NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    (_, *given), options, _, out = decode(dtype, **changes)
    bounds = torch.tensor([0, num_tokens - 2, num_tokens - 1, num_tokens], dtype=torch.int32)
    limits = {"max_q_len": num_tokens - 2, "max_prompts": 1, "decode_q_len": 1, "query_quantization": False}
    given = [*given[:4], bounds, *given[4:]]
    return (rows, *given), options | limits | {"return_lse": False}, OPERATIONS.ragged_paged_attention, out


def dense(num_tokens: int = 200) -> tuple[Any, ...]:
    """A call of `ragged_attention`."""
    rows = [torch.zeros(num_tokens, 2, size, dtype=torch.bfloat16) for size in (192, 192, 128)]
    bounds = [torch.tensor([0, 50, num_tokens], dtype=torch.int32) for _ in range(2)]
    return (*rows, *bounds), {"causal": True, "sm_scale": None}, OPERATIONS.ragged_attention, None


def latent_pages(dtype: str) -> torch.Tensor:
    """Latents of 512 elements and rope keys of 64."""
    row, stored = {"nvfp4": (416, torch.uint8), "fp8_ds_mla": (656, torch.uint8)}.get(dtype, (576, torch.bfloat16))
    return torch.zeros(NUM_BLOCKS, 64, row, dtype=stored)


def write_latents(dtype: str) -> tuple[Any, ...]:
    rows = (torch.zeros(NUM_SEQS, size, dtype=torch.bfloat16) for size in (512, 64))
    given = *rows, latent_pages(dtype), torch.arange(NUM_SEQS), dtype, torch.tensor(0.5)
    return given, {"unique_slots": True}, OPERATIONS.concat_and_cache_mla


def gather_latents(dtype: str) -> tuple[Any, ...]:
    table, bounds = torch.zeros(NUM_SEQS, 5, dtype=torch.int32), torch.arange(NUM_SEQS + 1, dtype=torch.int32)
    dst = torch.zeros(NUM_SEQS, 576, dtype=torch.bfloat16)
    given = latent_pages(dtype), dst, table, bounds, None, NUM_SEQS, dtype, torch.tensor(0.5), None
    return given, {}, OPERATIONS.gather_and_maybe_dequant_cache


def attend_latents(dtype: str) -> tuple[Any, ...]:
    """A call of `mla_paged_attention` with both queries in one tensor; of two, torch makes one."""
    query = torch.zeros(NUM_SEQS, 16, 576, dtype=torch.bfloat16).split((512, 64), dim=2)
    (_, _, _, table, lengths, *_), options, _, _ = decode()
    given = *query, latent_pages(dtype), table, lengths, dtype, torch.tensor(0.5)
    options = {name: options[name] for name in ("sliding_window", "logits_soft_cap", "batch_invariant")}
    return given, {"sm_scale": 0.1} | options, OPERATIONS.mla_paged_attention


def rotate(dtype: str) -> tuple[Any, ...]:
    """A call of `rope_and_cache`."""
    rows = [torch.zeros(NUM_SEQS, heads, HEAD_SIZE, dtype=torch.bfloat16) for heads in (4, NUM_HEADS, NUM_HEADS)]
    places = torch.arange(NUM_SEQS), torch.arange(NUM_SEQS), torch.zeros(8, HEAD_SIZE)
    given = *rows, *pages(dtype), *places, dtype, torch.tensor(0.5), torch.tensor(0.25)
    return given, {"v_scale_layout": "linear", "is_neox": True, "unique_slots": True}, OPERATIONS.rope_and_cache


def gather(dtype: str) -> tuple[Any, ...]:
    """A call of `gather_kv`."""
    (_, *given), _, _, _ = decode(dtype)
    return (*given,), {"v_scale_layout": "linear", "dtype": torch.bfloat16}, OPERATIONS.gather_kv


def result(query: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(query)


SINKS = torch.zeros(2 * NUM_HEADS)
KINDS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "decode, nvfp4": decode,
    "decode, bfloat16": lambda: decode("bfloat16"),
    "decode, a scale for each token and head": lambda: decode("int8_per_token_head"),
    "decode, options": lambda: decode(sinks=SINKS.clone(), sliding_window=40, logits_soft_cap=5.0, sm_scale=0.1),
    "decode, three dimensions": lambda: decode(query=torch.zeros(NUM_SEQS, 4, HEAD_SIZE, dtype=torch.float16)),
    "decode, four query tokens": lambda: decode(query=torch.zeros(NUM_SEQS, 4, 4, HEAD_SIZE, dtype=torch.bfloat16)),
    "decode, into memory": lambda: decode(out=torch.zeros(NUM_SEQS, 1, 4, HEAD_SIZE, dtype=torch.bfloat16)),
    "decode, the same scale": lambda: decode(**dict.fromkeys(("k_scale", "v_scale"), torch.tensor(0.5))),
    "step, nvfp4": step,
    "step, bfloat16, options": lambda: step("bfloat16", sinks=SINKS.clone(), sliding_window=40),
    "step, into memory": lambda: step(out=torch.zeros(100, 2 * NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16)),
    "dense keys and values": dense,
    **{
        f"{make.__name__}, {dtype}": functools.partial(make, dtype)
        for make in (write_latents, gather_latents)
        for dtype in ("nvfp4", "fp8_ds_mla", "bfloat16")
    },
    **{
        f"{make.__name__}, {dtype}": functools.partial(make, dtype)
        for make in (rotate, gather)
        for dtype in ("nvfp4", "bfloat16")
    },
    "attend_latents, nvfp4": lambda: attend_latents("nvfp4"),
    "attend_latents, bfloat16": lambda: attend_latents("bfloat16"),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", KINDS)
def test_a_known_call_launches_what_serving_it_would(recorder: Recorder, kind: str, mode: Any):
    """The same kernels, counts, arguments and results; temporary arrays do not overlap."""
    with mode():
        _check_launches(recorder, KINDS[kind])


def _check_launches(recorder: Recorder, make: Callable[[], tuple[Any, ...]]) -> None:
    assert not recorder.is_known(*make())
    given, options, operation, *out = call = make()
    recorder.launches.clear()
    results = recorder.call(*call)
    launched = recorder.launches[:]
    assert recorder.served == 1
    calls: list[tuple[running.Call, running.Launcher]] = []
    with Recording() as recording, running.recorded(lambda *call: calls.append(call)):
        operation, given = into(*(out or [None]), operation, given)
        served = library.IMPLEMENTATIONS[operation].kernel(*given, **options)
    assert recording.only_launches
    assert len(launched) == len(calls) > 0
    where = {x.untyped_storage().data_ptr(): y.data_ptr() for x, y in zip(served, results, strict=True)}
    arguments = {x.untyped_storage().data_ptr() for x in (*given, *options.values()) if isinstance(x, torch.Tensor)}
    spans: dict[int, tuple[int, int]] = {}
    for (entries, num_programs), (expected, launcher) in zip(launched, calls, strict=True):
        counts = [*kernels.packed(expected.counts)]
        assert entries[: len(counts)] == counts
        assert num_programs == launcher.num_programs(expected.amount)
        for address, array in zip(entries[len(counts) :], expected.tensors, strict=True):
            storage = array.untyped_storage()
            start = storage.data_ptr()
            if not array.numel():
                assert not address
            elif start in where:
                assert address == where[start] + array.data_ptr() - start
            elif start in arguments:
                assert address == array.data_ptr()
            else:
                base = address - (array.data_ptr() - start)
                assert base % 64 == 0
                assert spans.setdefault(start, (base, base + storage.nbytes())) == (base, base + storage.nbytes())
    ordered = sorted(spans.values())
    assert all(end <= following for (_, end), (following, _) in itertools.pairwise(ordered))
    for got, expected_result in zip(results, served, strict=True):
        assert (got.shape, got.dtype) == (expected_result.shape, expected_result.dtype)


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "another number of sequences": lambda: {"num_seqs": NUM_SEQS + 1},
    "a wider table": lambda: {"width": 6},
    "a table of other strides": lambda: {"block_table": torch.zeros(NUM_SEQS, 9, dtype=torch.int32)[:, :5]},
    "another dtype of the query": lambda: {"query": torch.zeros(NUM_SEQS, 1, 4, HEAD_SIZE, dtype=torch.float16)},
    "more heads": lambda: {"query": torch.zeros(NUM_SEQS, 1, 8, HEAD_SIZE, dtype=torch.bfloat16)},
    "another window": lambda: {"sliding_window": 7},
    "another scale of logits": lambda: {"sm_scale": 0.5},
    "sinks": lambda: {"sinks": SINKS.clone()},
    "memory for the result": lambda: {"out": torch.zeros(NUM_SEQS, 1, 4, HEAD_SIZE, dtype=torch.bfloat16)},
    "values of pages of their own": lambda: {"value_cache": pages("nvfp4")[1].clone()},
    "the same scale for both": lambda: dict.fromkeys(("k_scale", "v_scale"), torch.tensor(0.5)),
    "a query that is aligned to 16 bytes alone": lambda: {
        "query": torch.zeros(NUM_SEQS * 128 + 8, dtype=torch.bfloat16)[8:].view(NUM_SEQS, 1, 4, HEAD_SIZE)
    },
    "pages that are not aligned": lambda: {
        name: torch.zeros(x.numel() + 8, dtype=torch.uint8)[8:].view(x.shape)
        for name, x in zip(("key_cache", "value_cache"), pages("nvfp4"), strict=True)
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_change_that_affects_planning_makes_another_kind(recorder: Recorder, name: str):
    assert not recorder.is_known(*decode())
    assert not recorder.is_known(*decode(**OTHERS[name]()))
    assert recorder.is_known(*decode())
    assert recorder.is_known(*decode(**OTHERS[name]()))


NEVER: dict[str, Callable[[], tuple[Any, ...]]] = {
    "lengths of 64 bits, which torch converts": lambda: decode(seq_lens=torch.ones(NUM_SEQS, dtype=torch.int64)),
    "heads that are apart, which torch copies": lambda: decode(
        query=torch.zeros(NUM_SEQS, 1, 4, 64, dtype=torch.bfloat16)[..., :32]
    ),
    "a query that is not aligned, which torch copies": lambda: decode(
        query=torch.zeros(NUM_SEQS * 128 + 1, dtype=torch.bfloat16)[1:].view(NUM_SEQS, 1, 4, HEAD_SIZE)
    ),
    "more rows than one pass takes": lambda: decode(
        query=torch.zeros(NUM_SEQS, 40, 4, HEAD_SIZE, dtype=torch.bfloat16)
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", NEVER)
def test_calls_for_which_torch_computes_are_served_every_time(recorder: Recorder, name: str, mode: Any):
    with mode():
        for _ in range(3):
            assert not recorder.is_known(*NEVER[name]())


def test_a_call_for_which_torch_computes_keeps_no_memory_that_it_frees(recorder: Recorder):
    """Otherwise all tiles of a fallback would be allocated at the same time."""
    kept: list[Any] = []

    def serve() -> tuple[torch.Tensor, ...]:
        for _ in range(3):
            tile = torch.empty(1 << 10)
            kept.append(weakref.ref(tile.untyped_storage()))
            tile.zero_()
            del tile
        assert [each() for each in kept] == [None] * 3
        return (torch.empty(3),)

    tape.call(serve, [serve, torch.zeros(3)])
    assert [*tape._tapes.values()] == [None]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_call_that_reads_a_tensor_is_served_every_time(recorder: Recorder, mode: Any):
    """In inference mode a view at a place that a tensor says is one operation, which reads the tensor on the host."""
    start = torch.tensor(1)

    def serve() -> tuple[torch.Tensor, ...]:
        torch.narrow(torch.empty(3), 0, start, 1)
        return (torch.empty(3),)

    with mode():
        tape.call(serve, [serve, torch.zeros(3)])
    assert [*tape._tapes.values()] == [None]


def test_an_operation_that_is_not_torchs_may_compute(recorder: Recorder):
    """One that returns its argument may have written to it, whatever its schema says."""
    with torch.library._scoped_library("kvjax_tests", "DEF") as scope:
        scope.define("returned(Tensor x) -> Tensor")
        scope.impl("returned", lambda x: x, "CPU")

        def serve() -> tuple[torch.Tensor, ...]:
            return (torch.ops.kvjax_tests.returned(torch.empty(3)),)

        tape.call(serve, [serve, torch.zeros(3)])
    assert [*tape._tapes.values()] == [None]


def test_a_call_whose_result_is_empty_is_served_every_time(recorder: Recorder):
    """Empty results and empty arguments both have address 0, so a recording could confuse them."""
    given = torch.zeros(0, 4), torch.zeros(3)

    def serve() -> tuple[torch.Tensor, ...]:
        return (torch.empty(0, 2),)

    for _ in range(2):
        assert tape.call(serve, [serve, *given])[0].shape == (0, 2)


def test_the_offset_of_each_argument_from_the_keys_is_part_of_the_kind(recorder: Recorder):
    """Two calls with the same offset: in one it is that of the values, in the other that of the scales."""

    def rows(pool: torch.Tensor, start: int) -> torch.Tensor:
        return pool[:, start : start + 1024].view(torch.int8).view(NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE)

    def scales_at(pool: torch.Tensor, start: int) -> torch.Tensor:
        return pool[:, start : start + 128].view(torch.float32).view(NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS)

    pool, other = (torch.zeros(NUM_BLOCKS, 4096, dtype=torch.uint8) for _ in range(2))
    common = {"key_cache": rows(pool, 0), "v_scale": scales_at(other, 512)}
    first = common | {"value_cache": rows(pool, 1024), "k_scale": scales_at(other, 0)}
    second = common | {"value_cache": rows(other, 2048), "k_scale": scales_at(pool, 1024)}
    for call in (first, second):
        assert not recorder.is_known(*decode("int8_per_token_head", **call))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_ds_mla", "nvfp4"])
@pytest.mark.parametrize("joined_first", [False, True])
def test_queries_over_latents_in_one_tensor_and_in_two_are_two_kinds(
    recorder: Recorder, dtype: str, joined_first: bool
):
    given, options, operation = joined = attend_latents(dtype)
    other = torch.zeros(NUM_SEQS, 16, 576, dtype=torch.bfloat16)[..., 512:]  # of the same strides
    apart = (given[0], other, *given[2:]), options, operation
    calls = [joined, apart] if joined_first else [apart, joined]
    for call in calls:
        assert not recorder.is_known(*call)
    assert recorder.is_known(*joined)
    assert not recorder.is_known(*apart)  # torch joins them


def test_an_argument_within_another_makes_another_kind(recorder: Recorder):
    """Rope keys that are read from the cache that they are written to; then from elsewhere, for another cache."""
    (rows, _, _, *others), options, operation = write_latents("bfloat16")
    own, other = latent_pages("bfloat16"), latent_pages("bfloat16")
    elsewhere = torch.zeros(NUM_SEQS, 576, dtype=torch.bfloat16)[:, 512:]
    assert not recorder.is_known((rows, own[0, :NUM_SEQS, 512:], own, *others), options, operation)
    assert not recorder.is_known((rows, elsewhere, other, *others), options, operation)


def test_values_that_overlap_keys_are_refused_after_calls_in_which_they_do_not(recorder: Recorder):
    call = (_, _, *others), options, operation = gather("bfloat16")
    assert not recorder.is_known(*call)
    memory = torch.zeros(NUM_BLOCKS + 2, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    with pytest.raises(KVCacheError, match="value_cache: got memory that overlaps that of key_cache"):
        recorder.call((memory[:-2, 0], memory[2:, 0], *others), options, operation)


@pytest.mark.parametrize(
    ("query_at", "out_at", "overlaps"), [(0, 320, True), (320, 0, True), (0, 384, False), (384, 0, False)]
)
def test_a_result_that_would_overlap_an_argument_is_left_to_the_checks(
    recorder: Recorder, query_at: int, out_at: int, overlaps: bool
):
    """Here by a head; memory that only touches an argument's does not overlap it."""
    query = torch.zeros(NUM_SEQS, 1, 4, HEAD_SIZE, dtype=torch.bfloat16)
    for _ in range(2):
        recorder.call(*decode(query=query, out=torch.zeros_like(query)))
    served = recorder.served
    both = torch.zeros(2 * query.numel(), dtype=torch.bfloat16)
    near = {
        name: both[start : start + query.numel()].view_as(query)
        for name, start in (("query", query_at), ("out", out_at))
    }
    if not overlaps:
        assert recorder.is_known(*decode(**near))
        return
    with pytest.raises(KVCacheError, match="out"):
        recorder.call(*decode(**near))
    assert recorder.served == served + 1


def beside_window(window: Mapping[str, int] = MappingProxyType({}), **changes: Any) -> dict[str, Any]:
    """A step of `exact_window_attention` in which all sequences decode, with memory of its own."""
    key_cache, value_cache = pages("nvfp4")
    sizes = {"num_rows": NUM_SEQS, "size": 24, "num_kv_heads": NUM_HEADS, "head_size": HEAD_SIZE, **window}
    rows = torch.zeros(NUM_SEQS, NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    return {
        "query": torch.zeros(NUM_SEQS, 2 * NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16),
        "key": rows,
        "value": rows.clone(),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": torch.zeros(NUM_SEQS, 5, dtype=torch.int32),
        "seq_lens": torch.full((NUM_SEQS,), 40, dtype=torch.int32),
        "cu_q_lens": torch.arange(NUM_SEQS + 1, dtype=torch.int32),
        "exact_window": kvjax_torch.ExactWindow.allocate(**sizes),
        "window_rows": torch.arange(NUM_SEQS, dtype=torch.int32),
        "kv_cache_dtype": "nvfp4",
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(0.25),
        "slot_mapping": torch.arange(NUM_SEQS),
        "max_q_len": 1,
        "max_prompts": 0,
    } | changes


@pytest.fixture
def served_windows(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of `exact_window_attention` that are served."""
    served: list[Any] = []
    serve = window_attention._serve

    def counted(call: Any, launches: bool) -> Any:
        served.append(call)
        return serve(call, launches)

    monkeypatch.setattr(window_attention, "_serve", counted)
    monkeypatch.setattr(window_attention, "launches_kernels", lambda *_: True)
    monkeypatch.setattr(attending, "joint_kernels", attending.joint_kernels.__wrapped__)
    monkeypatch.setitem(scales._constants, (1.0, -1), torch.ones(()))  # which a GPU keeps
    return served


def addresses(call: dict[str, Any]) -> set[int]:
    window = call["exact_window"]
    tensors = (*call.values(), window.key_cache, window.value_cache)
    return {x.data_ptr() for x in tensors if isinstance(x, torch.Tensor)}


def test_a_known_step_beside_a_window_is_launched_from_its_recording(recorder: Recorder, served_windows: list[Any]):
    """The same kernels with the same numbers, over the memory of the call."""
    calls = beside_window(), beside_window()
    every = []
    for call in calls:
        out = kvjax_torch.exact_window_attention(**call)
        assert out.shape == call["query"].shape
        every.append(recorder.launches[:])
        recorder.launches.clear()
    assert len(served_windows) == 1
    first, second = every
    assert len(first) == len(second) == 6
    own, others = addresses(calls[1]), addresses(calls[0])
    entries = [entry for launch, _ in second for entry in launch]
    assert own <= {*entries}
    assert not {*entries} & (others - own)
    for (one, programs), (other, other_programs) in zip(first, second, strict=True):
        assert (len(one), programs) == (len(other), other_programs)


@pytest.mark.parametrize(
    "change",
    [
        {"unique_slots": True},
        {"slot_mapping": None},
        {"batch_invariant": True},
        {"sliding_window": 30},
        {"logits_soft_cap": 5.0},
        {"sm_scale": 0.1},
        {"sinks": SINKS},
        {"v_scale_layout": "swizzled"},
        {"query_quantization": True},
        {"max_prompts": 1},
        {"decode_q_len": 2},
        {"window": {"size": 25}},
        {"window": {"max_q_len": 2}},
    ],
    ids=str,
)
def test_an_option_beside_a_window_makes_another_kind(served_windows: list[Any], change: dict[str, Any]):
    for changes in ({}, change):
        kvjax_torch.exact_window_attention(**beside_window(**changes))
    assert len(served_windows) == 2


NVFP4_POOL = torch.zeros(3 * NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, ROW["nvfp4"], dtype=torch.uint8)
SCALE_POOL = torch.zeros(3 * NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS)
INT8_ROWS = {
    name: torch.zeros(NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, dtype=torch.int8)
    for name in ("key_cache", "value_cache")
}


@pytest.mark.parametrize(
    ("call", "names", "pool"),
    [
        ({}, ("key_cache", "value_cache"), NVFP4_POOL),
        (INT8_ROWS | {"kv_cache_dtype": "int8_per_token_head"}, ("k_scale", "v_scale"), SCALE_POOL),
    ],
    ids=["pages", "scales of each token and head"],
)
def test_a_step_that_would_write_over_an_argument_is_left_to_the_checks(
    recorder: Recorder, served_windows: list[Any], call: dict[str, Any], names: tuple[str, str], pool: torch.Tensor
):
    """Where two tensors that it writes overlap; their offset is beyond a block, and no part of the kind."""

    def in_pool(start: int) -> dict[str, Any]:
        return call | {names[0]: pool[:NUM_BLOCKS], names[1]: pool[start : start + NUM_BLOCKS]}

    for _ in range(2):
        kvjax_torch.exact_window_attention(**beside_window(**in_pool(NUM_BLOCKS)))
    assert len(served_windows) == 1
    recorder.launches.clear()
    with pytest.raises(KVCacheError, match="overlaps"):
        kvjax_torch.exact_window_attention(**beside_window(**in_pool(1)))
    assert len(recorder.launches) == 1  # which finds where tokens are, and writes to neither


def test_a_call_that_raises_is_not_known(recorder: Recorder):
    def refuse() -> Any:
        raise KVCacheError("no")

    for _ in range(2):
        with pytest.raises(KVCacheError):
            tape.call(refuse, [refuse, torch.zeros(3)])
    assert not tape._tapes


def test_kinds_are_forgotten_when_there_are_many(recorder: Recorder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "REMEMBERED", 2)
    for width in (5, 6, 7):
        assert not recorder.is_known(*decode(width=width))
    assert [recorder.is_known(*decode(width=width)) for width in (7, 5)] == [True, False]


@pytest.mark.filterwarnings("ignore")  # torch deprecates traces
def test_tensors_are_plain_unless_something_sees_operations_on_them():
    """Calls on plain tensors skip torch's dispatcher, which resolves lazy negation and records traces."""
    assert are_plain(torch.zeros(2))
    assert not are_plain(torch.zeros(2, dtype=torch.complex64).conj().imag)
    seen = []

    def traced(x: torch.Tensor) -> torch.Tensor:
        seen.append(are_plain(x))
        return x + 1

    torch.jit.trace(traced, torch.zeros(2))
    assert False in seen
    assert are_plain(torch.zeros(2))


@pytest.mark.gpu
def test_on_a_gpu_checked_mode_and_modes_of_torch_see_every_call():
    from torch.utils._python_dispatch import TorchDispatchMode

    import kvjax
    import kvjax_torch

    class Seen(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    given, *_ = decode()
    attend = functools.partial(
        kvjax_torch.paged_attention, *(x.cuda() if isinstance(x, torch.Tensor) else x for x in given)
    )
    first, second = attend(), attend()
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    number = len(tape._tapes)
    with kvjax.checked():
        attend()
    with Seen():
        attend()
    assert "kvjax.paged_attention.default" in Seen.names
    assert len(tape._tapes) == number
