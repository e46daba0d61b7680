"""Exact windows on torch tensors have the results of those on JAX arrays, eager, and in graphs on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.exact_windows import Case, Server, cuts_of, random_tokens  # noqa: E402
from support.helpers import assert_same_bytes, matrix  # noqa: E402
from support.interpret_mode import interpret_mode  # noqa: E402
from support.interpreted_calls import run_interpreted  # noqa: E402
from support.torch_helpers import capture, torch_cache  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import KVCacheTypeError, KVCacheValueError, StepMetadata, UnsupportedError, kernels  # noqa: E402
from kvjax_torch import window_attention  # noqa: E402
from kvjax_torch.arguments.plan import Encoding, WriteTensors  # noqa: E402
from kvjax_torch.calls import attending, choosing  # noqa: E402
from kvjax_torch.launch import running  # noqa: E402

LENGTHS = (61, 9, 40)
CUTS = ((1, 1, 1), (17, 3, 8), (61, 9, 40), (24, 1, 33))
"""The most tokens of each sequence in a step."""
DRAFTS = Case(
    "fp8_e4m3", size=13, max_q_len=4, sliding_window=19, cap=3.0, sinks=True, layout="HND", block_size=4, head_size_v=16
)
CASES = [
    Case(),
    DRAFTS,
    Case("int8_per_token_head", size=16, block_size=3, sinks=True),
    Case("fp8_e5m2", size=33, sliding_window=5, max_q_len=3),
    Case("bfloat16", size=9, model_dtype="bfloat16"),
    pytest.param(Case("nvfp4", size=12, sliding_window=12, sinks=True), marks=pytest.mark.full),
    pytest.param(Case("nvfp4", size=12, sliding_window=13, max_q_len=2), marks=pytest.mark.full),
    pytest.param(Case("nvfp4", size=5, block_size=64, max_q_len=3), marks=pytest.mark.full),
    pytest.param(Case("nvfp4", size=500, max_q_len=2), marks=pytest.mark.full),
    pytest.param(Case("fp8_k_nvfp4_v", size=1, cap=2.0), marks=pytest.mark.full),
    pytest.param(Case("nvfp4_4over6", size=64, num_kv_heads=1, group=3), marks=pytest.mark.full),
]


class TorchServer(Server):
    """The same, served by `kvjax_torch`.

    Attributes:
      writes_pages: whether the call that attends also writes to the pages.
    """

    writes_pages = False

    def __init__(self, case: Case, *args: Any, device: str = "cpu", **options: Any) -> None:
        super().__init__(case, *args, **options)
        self.device, spec = device, case.spec
        pages = np.array(self.cache.kv).view(np.uint8).reshape(self.cache.num_blocks, -1)
        self.pages = torch_cache(pages, spec, device=device)
        scales = [case.scales.get(name, np.float32(1)) for name in ("k_scale", "v_scale")]
        self.stored_as = (spec.dtype, *(torch.tensor(scale, device=device) for scale in scales))
        self.ring = kvjax_torch.ExactWindow.allocate(
            self.window.num_rows,
            case.size,
            case.num_kv_heads,
            case.head_size,
            head_size_v=case.head_size_v,
            dtype=getattr(torch, case.model_dtype),
            device=device,
            max_q_len=case.max_q_len,
        )
        for pages in (self.ring.key_cache, self.ring.value_cache):
            pages.fill_(torch.nan)

    def on_device(self, step: StepMetadata) -> dict[str, torch.Tensor]:
        names = "block_table", "seq_lens", "cu_q_lens"
        return {name: torch.tensor(np.asarray(getattr(step, name)), device=self.device) for name in names}

    def fill(self, step: StepMetadata, fills: np.ndarray) -> None:
        rows, of_step = torch.tensor(fills, device=self.device), self.on_device(step)
        caches = self.pages.key, self.pages.value
        kvjax_torch.fill_exact_window(self.ring, *caches, *of_step.values(), rows, *self.stored_as)

    def call(self, new: Any, step: StepMetadata, **options: Any) -> dict[str, Any]:
        """The arguments of a step, after its tokens are in the pages, unless `writes_pages`."""
        dtype = getattr(torch, self.case.query_dtype)  # torch reads no bfloat16 of NumPy's
        query, key, value = (torch.tensor(x.astype(np.float32), device=self.device).to(dtype) for x in new)
        slots = torch.tensor(np.asarray(step.slot_mapping), device=self.device)
        caches = {"key_cache": self.pages.key, "value_cache": self.pages.value}
        if self.writes_pages:
            options |= {"slot_mapping": slots, "unique_slots": True}
        else:
            kvjax_torch.reshape_and_cache_flash(key, value, *caches.values(), slots, *self.stored_as)
        stored_as = dict(zip(("kv_cache_dtype", "k_scale", "v_scale"), self.stored_as, strict=True))
        rows = torch.tensor(np.asarray(step.window_rows), device=self.device)
        given = {"query": query, "key": key, "value": value, "exact_window": self.ring, "window_rows": rows}
        if options["sinks"] is not None:
            options["sinks"] = torch.tensor(options["sinks"], device=self.device)
        options.setdefault("sliding_window", self.case.sliding_window)
        return given | caches | stored_as | self.on_device(step) | options

    def attend(self, new: Any, step: StepMetadata, **options: Any) -> np.ndarray:
        return kvjax_torch.exact_window_attention(**self.call(new, step, **options)).cpu().float().numpy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_jax_wherever_chunks_are_cut(case: Case):
    tokens, wanted = random_tokens(case, LENGTHS)
    for sizes in CUTS:
        steps = cuts_of(LENGTHS, sizes)
        results = TorchServer(case, tokens).serve(steps)
        for got, one in zip(results, wanted, strict=True):
            np.testing.assert_allclose(got, one, rtol=2e-5, atol=2e-5)
        if sizes == CUTS[1]:
            for got, one in zip(results, Server(case, tokens).serve(steps), strict=True):
                np.testing.assert_allclose(got, one, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", [Case(), DRAFTS], ids=str)
def test_a_call_that_also_writes_pages_leaves_the_same_bytes(case: Case):
    tokens, _ = random_tokens(case, LENGTHS)
    for sizes in CUTS[:2]:
        apart, together = TorchServer(case, tokens), TorchServer(case, tokens)
        together.writes_pages = True
        for q_lens in cuts_of(LENGTHS, sizes):
            for got, wanted in zip(together.step(q_lens), apart.step(q_lens), strict=True):
                assert_same_bytes(got, wanted)
        for got, wanted in zip(bytes_of(together), bytes_of(apart), strict=True):
            assert torch.equal(got, wanted)


RAGGED = {
    "decodes": ([21, 6, 1], [0, 1, 2, 3], [2, 0, -1]),
    "longer than rows": ([60, 9], [0, 37, 40], [1, 7]),
}
"""Lengths, bounds of new tokens, and rows of a window of 3."""


@matrix(
    {"case": ["nvfp4", "drafts"], "step": [*RAGGED], "writes_pages": [False, True], "index": ["int32", "int64"]},
    pairs=True,
    whole=True,
)
def test_an_interpreted_kernel_leaves_the_bytes_of_the_host(case, step, writes_pages, index, monkeypatch):
    case = DRAFTS if case == "drafts" else Case(case, num_kv_heads=1, model_dtype="bfloat16")
    step, index, server, calls = RAGGED[step], getattr(torch, index), TorchServer(case, []), []
    ring, torch_dtype = server.ring, getattr(torch, case.model_dtype)
    sequences = [torch.tensor(x, dtype=index) for x in step]
    num_tokens, longest = step[1][-1], int(np.diff(step[1]).max())
    key, value = (torch.randn(num_tokens, *x.shape[2:]).to(torch_dtype) for x in (ring.key_cache, ring.value_cache))
    slots = torch.randperm(server.pages.key.shape[0] * case.block_size)[:num_tokens].to(index)

    def run(call: running.Call) -> None:
        calls.append(call)
        run_interpreted(call)

    def written() -> list[torch.Tensor]:
        """The ring and the pages after the step, from poisoned memory on."""
        window = dataclasses.replace(ring, key_cache=ring.key_cache.clone(), value_cache=ring.value_cache.clone())
        pages = [x.clone() for x in (server.pages.key, server.pages.value)]
        tensors = WriteTensors(key, value, *pages, slots, *server.stored_as[1:])
        to_pages = window_attention._PagesWrite(tensors, Encoding(case.dtype), False) if writes_pages else None
        launches = window_attention.launches_kernels(key, value)
        step = window_attention._NewTokens(window, sequences, (key, value), num_tokens, longest, launches)
        step.update_ring(to_pages)
        return [x.contiguous().view(torch.uint8) for x in (window.key_cache, window.value_cache, *pages)]

    on_host = written()
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    monkeypatch.setattr(running, "run", run)
    monkeypatch.setattr(window_attention, "launches_kernels", lambda *tensors: True)
    by_kernel = written()
    assert len(calls) == 1
    assert all(torch.equal(got, wanted) for got, wanted in zip(by_kernel, on_host, strict=True))
    changed = [not torch.equal(x, y) for x, y in zip(by_kernel, bytes_of(server), strict=True)]
    assert changed == [True, True, writes_pages, writes_pages]


@pytest.fixture
def kernels_of_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Steps on CPU tensors are those of a GPU of few multiprocessors, whose kernels are interpreted; their names."""
    ran: list[str] = []

    def run(call: running.Call) -> None:
        assert call.kernel.origin is not None
        ran.append(call.kernel.origin.function.partition("kernels.")[2])
        run_interpreted(call)

    every = (
        (window_attention, "launches_kernels", lambda *tensors: True),
        (window_attention.tape, "call", lambda serve, *_: serve()),
        (running, "check_capability", lambda device: None),
        (running, "compile_once", lambda *_: None),
        (running, "run", run),
        (choosing, "target_of", lambda _: kernels.Target(multiprocessors=2)),
    )
    cached = attending.joint_kernels, attending._has_workspace, attending.route_of, attending.attention_parts
    for one in cached:
        one.cache_clear()
    for module, name, instead in every:
        monkeypatch.setattr(module, name, instead)
    with interpret_mode():
        yield ran
    for one in cached:
        one.cache_clear()


DECODED = ["attention.any_joint:_decode_of_any_count", "attention.any_joint:_merge_of_any_count"]
STEP = ["prompts.schedule:any_schedule", *DECODED, "prompts.transfer:any_placement"]
"""The kernels of a step without prompts, after its write."""

BEFORE = ["window_places:any_window_places", "write.window:any_ring"]
"""Those before them, where the tokens are in the pages."""


@pytest.mark.parametrize(
    ("case", "num_passes"),
    [
        (Case(size=6, sinks=True), 1),
        pytest.param(Case("fp8_e4m3", size=3, sliding_window=7, max_q_len=2, cap=3.0), 1, marks=pytest.mark.nightly),
        pytest.param(Case(size=6, max_q_len=3, group=6, sinks=True), 2, marks=pytest.mark.nightly),
    ],
    ids=["nvfp4", "drafts", "two passes"],
)
def test_interpreted_rows_that_decode_take_one_kernel_for_both_caches(
    case: Case, num_passes: int, request: pytest.FixtureRequest
):
    changes = {"num_kv_heads": 1, "model_dtype": "bfloat16", "query_dtype": "bfloat16"}
    case = dataclasses.replace(case, **changes)
    tokens, wanted = random_tokens(case, (15, 3))
    server = TorchServer(case, tokens, num_tokens=(6, 12), max_length=16)
    got = [server.step([11, 0])]
    ran = request.getfixturevalue("kernels_of_steps")
    got.append(server.step([case.max_q_len, 1]))
    assert ran == [*BEFORE, STEP[0], *DECODED * num_passes, STEP[-1]]
    for number, one in enumerate(wanted):
        each = np.concatenate([of_step[number] for of_step in got])
        np.testing.assert_allclose(each, one[: len(each)], atol=0.03, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [Case(size=6, sinks=True), Case("bfloat16", size=4, sliding_window=7, cap=3.0)],
    ids=["nvfp4", "a sliding window"],
)
def test_interpreted_prompts_take_one_kernel_for_both_caches_beside_rows_that_decode(
    case: Case, request: pytest.FixtureRequest
):
    case = dataclasses.replace(case, num_kv_heads=1, model_dtype="bfloat16", query_dtype="bfloat16")
    tokens, wanted = random_tokens(case, (15, 9))
    server = TorchServer(case, tokens, num_tokens=(6, 12), max_length=16)
    got = [server.step([11, 0])]
    ran = request.getfixturevalue("kernels_of_steps")
    got.append(server.step([1, 9]))
    assert [ran.count(name) for name in STEP] == [2, 1, 1, 1]
    assert [ran.count(f"prompts.any_prompts:{name}") for name in ("any_gather", "any_prompts")] == [2, 1]
    for number, one in enumerate(wanted):
        each = np.concatenate([of_step[number] for of_step in got])
        np.testing.assert_allclose(each, one[: len(each)], atol=0.03, rtol=0)


@pytest.mark.full
def test_interpreted_prompts_without_rows_that_decode_take_one_kernel_for_both_caches(request: pytest.FixtureRequest):
    case = Case(size=6, num_kv_heads=1, model_dtype="bfloat16", query_dtype="bfloat16")
    tokens, wanted = random_tokens(case, (15, 9))
    server = TorchServer(case, tokens, num_tokens=(6, 12), max_length=16)
    got = [server.step([5, 7])]
    ran = request.getfixturevalue("kernels_of_steps")
    got.append(server.step([10, 2], decode_q_len=0))
    assert not {*ran} & {*DECODED}
    assert [ran.count(f"prompts.any_prompts:{name}") for name in ("any_gather", "any_prompts")] == [2, 1]
    for number, one in enumerate(wanted):
        each = np.concatenate([of_step[number] for of_step in got])
        np.testing.assert_allclose(each, one[: len(each)], atol=0.03, rtol=0)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_step_without_tokens_launches_nothing_but_its_write(batch_invariant: bool, kernels_of_steps: list[str]):
    none, kv_cache = torch.zeros(0, 2, 16, dtype=torch.bfloat16), torch.zeros(4, 2, 8, 2, 16, dtype=torch.bfloat16)
    changes = {"query": none, "key": none, "value": none, "cu_q_lens": torch.zeros(3, dtype=torch.int32)}
    caches = {"key_cache": kv_cache[:, 0], "value_cache": kv_cache[:, 1]}
    window = kvjax_torch.ExactWindow.allocate(2, 4, 2, 16, dtype=torch.bfloat16)
    call = small_call(**changes, **caches, exact_window=window, slot_mapping=torch.zeros(0, dtype=torch.int64))
    out = kvjax_torch.exact_window_attention(**call, batch_invariant=batch_invariant)
    assert out.shape == (0, 2, 16)
    assert not set(kernels_of_steps) & {*STEP}


def bytes_of(server: TorchServer) -> list[torch.Tensor]:
    every = server.ring.key_cache, server.ring.value_cache, server.pages.key, server.pages.value
    return [x.contiguous().view(torch.uint8) for x in every]


def test_drafts_are_truncated():
    tokens, wanted = random_tokens(DRAFTS, LENGTHS)
    server = TorchServer(DRAFTS, tokens)
    server.step([30, 5, 20])
    for rejected in (3, 0, 2, 1):
        for got, one, sequence in zip(server.step([4, 0, 4]), wanted, server.sequences, strict=True):
            np.testing.assert_allclose(
                got, one[sequence.num_tokens - len(got) : sequence.num_tokens], rtol=2e-5, atol=2e-5
            )
        for sequence in (server.sequences[0], server.sequences[2]):
            sequence.truncate(sequence.num_tokens - rejected)


def test_a_lost_row_is_filled_from_the_pages():
    """As JAX's is: with the same bytes, and so the same results."""
    case = Case("nvfp4", size=20, max_q_len=2)
    tokens, _ = random_tokens(case, LENGTHS)
    servers = [TorchServer(case, tokens), Server(case, tokens)]
    for server in servers:
        server.step([40, 7, 30])
        server.rows = kvjax.WindowRows(server.window)  # which forgets all
    for q_lens in ([1, 1, 1], [9, 1, 2]):
        for got, one in zip(*(server.step(q_lens) for server in servers), strict=True):
            np.testing.assert_allclose(got, one, rtol=2e-5, atol=2e-5)
        assert servers[0].filled == servers[1].filled


def small_call(**changes: Any) -> dict[str, Any]:
    """A step of two tokens of two sequences."""
    kv_cache = torch.zeros(4, 2, 8, 2, 16)
    return {
        "query": torch.ones(2, 4, 16),
        "key": torch.ones(2, 2, 16),
        "value": torch.ones(2, 2, 16),
        "key_cache": kv_cache[:, 0],
        "value_cache": kv_cache[:, 1],
        "block_table": torch.tensor([[0], [1]]).int(),
        "seq_lens": torch.tensor([3, 5]),
        "cu_q_lens": torch.arange(3),
        "exact_window": kvjax_torch.ExactWindow.allocate(2, 4, 2, 16, dtype=torch.float32),
        "window_rows": torch.arange(2),
        "kv_cache_dtype": "auto",
        "k_scale": 1.0,
        "v_scale": 1.0,
        "max_q_len": 1,
    } | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"exact_window": 3}, KVCacheTypeError, "exact_window: got"),
        ({"window_rows": torch.arange(3)}, KVCacheValueError, "window_rows: got 3 elements, expected 2"),
        ({"window_rows": torch.ones(2)}, KVCacheTypeError, "window_rows: got dtype torch.float32"),
        ({"cu_q_lens": torch.arange(2)}, KVCacheValueError, "cu_q_lens: got 2 elements, expected 3"),
        ({"key": torch.ones(2, 1, 16)}, KVCacheValueError, r"key: got shape \(2, 1, 16\), expected \(2, 2, 16\)"),
        ({"query": torch.ones(2, 4, 8)}, KVCacheValueError, r"query: got shape \(2, 4, 8\), expected \(2, 4, 16\)"),
        ({"sliding_window": 0}, KVCacheValueError, "sliding_window"),
        ({"max_q_len": 0}, KVCacheValueError, "max_q_len"),
        ({"sinks": torch.ones(3), "sliding_window": 3}, KVCacheValueError, "sinks: got shape"),
        ({"query": torch.ones(2, 3, 16), "sliding_window": 3}, KVCacheValueError, "query: got num_heads=3"),
        ({"sm_scale": float("nan"), "sliding_window": 3}, KVCacheValueError, "sm_scale: got nan"),
        ({"kv_cache_dtype": "fp4", "sliding_window": 3}, KVCacheValueError, "fp4"),
        ({"slot_mapping": torch.arange(3)}, KVCacheValueError, "key: got 2 tokens, expected at least one for each of"),
        ({"slot_mapping": torch.arange(1)}, KVCacheValueError, "slot_mapping: got 1 slots, expected 2, one for each"),
        ({"slot_mapping": [0, 1]}, KVCacheTypeError, "slot_mapping: got a list"),
        ({"slot_mapping": torch.arange(2), "unique_slots": 1}, KVCacheTypeError, "unique_slots: got 1"),
        ({"slot_mapping": torch.arange(2), "v_scale_layout": "x"}, KVCacheValueError, "v_scale_layout: got 'x'"),
        ({"sinks": [1.0]}, KVCacheTypeError, "sinks: got a list"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, KVCacheTypeError, "sinks: got requires_grad=True"),
        ({"k_scale": torch.ones((), requires_grad=True)}, KVCacheTypeError, "k_scale: got requires_grad=True"),
        *(
            ({name: torch.ones(2, heads, 16, requires_grad=True)}, KVCacheTypeError, f"{name}: got requires_grad=True")
            for name, heads in (("query", 4), ("key", 2), ("value", 2))
        ),
    ],
)
def test_invalid_arguments_are_refused_by_name_and_nothing_is_written(
    changes: Any, error: type[Exception], message: str
):
    call = small_call(**changes)
    with pytest.raises(error, match=message):
        kvjax_torch.exact_window_attention(**call)
    if isinstance(call["exact_window"], kvjax_torch.ExactWindow):
        assert not call["exact_window"].key_cache.any()
    assert not call["key_cache"].any()


def test_a_window_of_other_sizes_than_the_cache_is_refused_before_it_is_written():
    window = kvjax_torch.ExactWindow.allocate(2, 4, 2, 16, head_size_v=32, dtype=torch.float32)
    call = small_call(exact_window=window, value=torch.ones(2, 2, 32))
    for options in ({}, {"sliding_window": 3}):
        with pytest.raises(KVCacheValueError, match="exact_window: got head_size_v=32, expected 16, that of the cache"):
            kvjax_torch.exact_window_attention(**call, **options)
    names = "key_cache", "value_cache", "block_table", "seq_lens", "cu_q_lens"
    with pytest.raises(KVCacheValueError, match="exact_window: got head_size_v=32, expected 16"):
        kvjax_torch.fill_exact_window(window, *(call[name] for name in names), torch.arange(2), "auto", 1.0, 1.0)
    assert not window.key_cache.any()


def test_prompts_attend_to_pages_by_products_in_fp8_as_in_jax():
    case = Case(block_size=16, query_dtype="bfloat16", model_dtype="bfloat16")
    tokens, _ = random_tokens(case, LENGTHS)
    steps, in_fp8 = cuts_of(LENGTHS, CUTS[1]), {"query_quantization": True}
    results, exact = TorchServer(case, tokens).serve(steps, **in_fp8), TorchServer(case, tokens).serve(steps)
    wanted = Server(case, tokens).serve(steps, **in_fp8)
    for got, one in zip(results, wanted, strict=True):
        np.testing.assert_allclose(got, one, rtol=2e-2, atol=4e-3)
    # The second sequence is shorter than the ring.
    assert [0.001 < np.abs(x - y).max() < 0.3 for x, y in zip(results, exact, strict=True)] == [True, False, True]


def test_products_in_fp8_are_refused_beside_a_ring_that_has_all_that_queries_see():
    case = Case("bfloat16", sliding_window=8, query_dtype="bfloat16", model_dtype="bfloat16", block_size=16)
    with pytest.raises(UnsupportedError, match="query_quantization: got a cache with keys or values of bfloat16"):
        TorchServer(case, random_tokens(case, LENGTHS)[0]).step([4, 0, 0], query_quantization=True)


def test_a_window_of_tensors_that_are_no_ring_is_refused():
    for shape in ((4, 8, 2, 16), (4, 16), (5, 16, 2, 16)):
        with pytest.raises(KVCacheValueError, match=r"exact_window: got keys .*, expected \[num_rows \* 2, 16"):
            kvjax_torch.ExactWindow(torch.zeros(shape), torch.zeros(shape), 20)
    with pytest.raises(KVCacheTypeError, match=r"exact_window\.key_cache: got"):
        kvjax_torch.ExactWindow(None, None, 20)


@pytest.mark.parametrize("max_q_len", [1, None])
def test_padding_without_sequences_sees_nothing(max_q_len: int | None):
    none = {"block_table": torch.zeros(0, 1).int(), "seq_lens": torch.zeros(0).int(), "cu_q_lens": torch.zeros(1).int()}
    call = small_call(**none, window_rows=torch.zeros(0).int(), max_q_len=max_q_len)
    assert not kvjax_torch.exact_window_attention(**call).any()
    assert not call["exact_window"].key_cache.any()
    kvjax_torch.exact_window_attention(**call, slot_mapping=torch.tensor([3, -1]))
    assert call["key_cache"].sum() == call["key"][0].sum()


GARBAGE = 10**6  # no block


@pytest.mark.parametrize(
    ("q_len", "sliding_window", "first_seen"),
    [(1, None, 0), (20, None, 0), (1, 32, 168 // 8), (20, 32, 148 // 8), (1, 8, 192 // 8)],
    ids=["decodes", "chunks", "a window", "chunks in a window", "a window that reaches no page"],
)
def test_checked_mode_takes_what_queries_may_see(q_len: int, sliding_window: int | None, first_seen: int):
    """Entries of blocks before a sliding window may be anything."""
    table = torch.arange(50).view(2, 25).int()
    table[:, :first_seen] = GARBAGE
    rows = {name: torch.ones(2 * q_len, heads, 16) for name, heads in (("query", 4), ("key", 2), ("value", 2))}
    pages = torch.zeros(50, 2, 8, 2, 16)
    call = small_call(
        **rows,
        key_cache=pages[:, 0],
        value_cache=pages[:, 1],
        block_table=table,
        seq_lens=torch.tensor([200, 200]),
        cu_q_lens=torch.arange(3) * q_len,
        max_q_len=q_len,
        sliding_window=sliding_window,
    )
    found = []
    for mode in (True, False):
        call["exact_window"] = kvjax_torch.ExactWindow.allocate(2, 16, 2, 16, dtype=torch.float32)
        with kvjax.checked(mode):
            found.append(kvjax_torch.exact_window_attention(**call))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("rows", "message"), [([0, 2], r"window_rows\[1\]: got 2"), ([1, 1], "expected each row once")]
)
def test_rows_that_a_window_does_not_have_are_named_in_checked_mode(rows: list[int], message: str):
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=message):
        kvjax_torch.exact_window_attention(**small_call(window_rows=torch.tensor(rows)))


@pytest.mark.parametrize("cu_q_lens", [[1, 2, 3], [0, 2, 1]])
def test_a_fills_tokens_out_of_order_are_named_in_checked_mode(cu_q_lens: list[int]):
    call = small_call(cu_q_lens=torch.tensor(cu_q_lens), rows=torch.tensor([1, -1]))
    names = ("exact_window", "key_cache", "value_cache", "block_table", "seq_lens", "cu_q_lens", "rows")
    names += ("kv_cache_dtype", "k_scale", "v_scale")
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=r"cu_q_lens\[\d\]: got 1, expected 0 first"):
        kvjax_torch.fill_exact_window(**{name: call[name] for name in names})


def test_rows_are_assigned_by_a_window_of_torch():
    window = kvjax_torch.ExactWindow.allocate(2, 20, 2, 16, max_q_len=3)
    assert vars(kvjax.WindowRows(window)) == vars(kvjax.WindowRows(Server(Case(size=20, max_q_len=3), []).window)) | {
        "num_rows": 2
    }


@pytest.mark.parametrize("changes", [{"size": 0}, {"max_q_len": 0}, {"num_rows": 0}, {"num_rows": 2**31}])
def test_numbers_of_a_window_are_checked(changes: Any):
    given = {"num_rows": 1, "size": 4, "num_kv_heads": 2, "head_size": 16} | changes
    with pytest.raises(KVCacheValueError, match=next(iter(changes))):
        kvjax_torch.ExactWindow.allocate(**given)
    with pytest.raises(KVCacheTypeError, match=r"dtype: got torch\.int8"):
        kvjax_torch.ExactWindow.allocate(1, 4, 2, 16, dtype=torch.int8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "nvfp4"])
def test_a_gpu_gives_what_the_host_gives_and_graphs_replay_with_other_lengths(dtype: str):
    case = Case(
        dtype, size=64, max_q_len=2, model_dtype="bfloat16", query_dtype="bfloat16", block_size=16, head_size=64
    )
    tokens, _ = random_tokens(case, (200, 90, 150))
    sizes = {"num_tokens": (6, 160), "max_length": 208}

    class Recorded(TorchServer):
        """Runs steps of each kind in one graph, captured at the first of them."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.graphs: dict[int, Any] = {}

        def attend(self, new: Any, step: StepMetadata, **options: Any) -> np.ndarray:
            call = self.call(new, step, **options)
            kind = len(call["query"])
            if kind not in self.graphs:
                ring = [x.clone() for x in (self.ring.key_cache, self.ring.value_cache)]
                kvjax_torch.exact_window_attention(**call)  # compiles
                torch.cuda.synchronize()
                for x, before in zip((self.ring.key_cache, self.ring.value_cache), ring, strict=True):
                    x.copy_(before)
                graph = torch.cuda.CUDAGraph()
                with capture(graph):
                    out = kvjax_torch.exact_window_attention(**call)
                self.graphs[kind] = graph, call, out
            graph, captured, out = self.graphs[kind]
            for name, tensor in captured.items():
                if isinstance(tensor, torch.Tensor) and name not in ("key_cache", "value_cache"):
                    tensor.copy_(call[name])
            graph.replay()
            return out.cpu().float().numpy()

    servers = [TorchServer(case, tokens, **sizes), TorchServer(case, tokens, device="cuda", **sizes)]
    servers.append(Recorded(case, tokens, device="cuda", **sizes))
    servers.append(Recorded(case, tokens, device="cuda", **sizes))
    servers[-1].writes_pages = True
    for q_lens in ([100, 1, 50], [1, 1, 1], [2, 1, 2], [70, 60, 30], [1, 2, 0], [1, 1, 1]):
        wanted, *results = (server.step(q_lens) for server in servers)
        for result in results:
            for got, one in zip(result, wanted, strict=True):
                np.testing.assert_allclose(got, one, rtol=2**-6, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [20, 80])
def test_on_a_gpu_few_rows_behind_many_tokens_are_attended_to_in_splits(num_tokens: int):
    """Of the last split alone are the tokens of the ring."""
    case = Case(size=64, sinks=True, model_dtype="bfloat16", query_dtype="bfloat16", block_size=16, head_size=64)
    tokens, _ = random_tokens(case, (2300, 40))
    servers = [TorchServer(case, tokens, device=device, max_length=2304) for device in ("cpu", "cuda")]
    for q_lens, room in (([2200, 10], 2300), ([num_tokens, 1], 96)):
        for server in servers:
            server.num_tokens = 2, room
        wanted, got = (server.step(q_lens) for server in servers)
        for of_sequence, one in zip(got, wanted, strict=True):
            np.testing.assert_allclose(of_sequence, one, rtol=2**-6, atol=2**-6)
