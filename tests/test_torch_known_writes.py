"""Writes that are launched without being checked and planned again: which ones, and what they are launched with.

No GPU is asked: what would be launched on one is written down instead. `test_torch_cuda.py` launches.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.torch_helpers import nested  # noqa: E402

import kvjax  # noqa: E402
from kvjax import KVCacheError, UnsupportedError, binaries, kernels  # noqa: E402
from kvjax_torch.arguments import scales as scale_tensors  # noqa: E402
from kvjax_torch.arguments.plan import Encoding, ReadTensors, WriteTensors  # noqa: E402
from kvjax_torch.arguments.reads import gather_plan  # noqa: E402
from kvjax_torch.calls import choosing, gathering, writing  # noqa: E402
from kvjax_torch.cuda import reads, writes  # noqa: E402
from kvjax_torch.launch import loading, running  # noqa: E402

NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE = 400, 16, 2, 32
LAST_SLOT = NUM_BLOCKS * BLOCK_SIZE - 1


class Recorder:
    """In place of a compiled kernel, and of all that compiles one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[list[int], int]] = []
        self.planned = 0
        write_plan = writes.write_plan

        def plan(*args: Any) -> Any:
            self.planned += 1
            return write_plan(*args)

        def compiled(kernel: kernels.AnyCount, _: torch.device) -> running.Launcher:
            return running.Launcher(self, kernel.num_programs)

        monkeypatch.setattr(writes, "_known_writes", {})
        monkeypatch.setattr(running, "check_capability", lambda device: None)
        monkeypatch.setattr(running, "_compiled", compiled)
        monkeypatch.setattr(writes, "write_plan", plan)

    def __call__(self, entries: Any, num_programs: int) -> None:
        self.launches.append((list(entries), num_programs))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def arguments(num_tokens: int = 5, **changes: Any) -> dict[str, Any]:
    """Of a write into one allocation, from a fused projection."""
    qkv = torch.zeros(num_tokens, 3, NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    row = HEAD_SIZE // 2 + HEAD_SIZE // 16
    kv_cache = torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, row, dtype=torch.uint8)
    return {
        "key": qkv[:, 1],
        "value": qkv[:, 2],
        "key_cache": kv_cache[:, 0],
        "value_cache": kv_cache[:, 1],
        "slot_mapping": torch.arange(num_tokens),
        "kv_cache_dtype": "nvfp4",
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(0.25),
        "v_scale_layout": "linear",
        "unique_slots": True,
    } | changes


def entries(call: dict[str, Any]) -> list[int]:
    """What a launch of these arguments as they are passes."""
    names = "slot_mapping", "key", "value", "key_cache", "value_cache", "k_scale", "v_scale"
    return [call["slot_mapping"].numel() | LAST_SLOT << 32, *(call[name].data_ptr() for name in names)]


def test_other_counts_and_addresses_are_launched_without_a_plan(recorder: Recorder):
    for num_tokens in (5, 1000, 1 << 16, 7):
        call = arguments(num_tokens)
        write(**call)
        planned = WriteTensors(*tensors(call), *scales(call)), Encoding(call["kv_cache_dtype"])
        kernel = writing.write_call(writes.write_plan(*planned), planned[0], True).kernel
        assert recorder.launches[-1] == (entries(call), kernel.num_programs(num_tokens))
    assert recorder.planned == 1 + 4  # the first write, and the four above


def tensors(call: dict[str, Any]) -> list[torch.Tensor]:
    return [call[name] for name in ("key", "value", "key_cache", "value_cache", "slot_mapping")]


def scales(call: dict[str, Any]) -> list[torch.Tensor]:
    return [call["k_scale"], call["v_scale"]]


def write(kv_cache_dtype: str, v_scale_layout: str, unique_slots: bool, **call: torch.Tensor) -> None:
    writes.write((*tensors(call), *scales(call)), (kv_cache_dtype, v_scale_layout), unique_slots)


def halves_of(*shape: int, dtype: torch.dtype = torch.uint8, start: int = 0) -> dict[str, torch.Tensor]:
    """The two halves of one allocation, which begins so many elements after a multiple of 64 bytes."""
    kv_cache = rows(*shape, dtype=dtype, start=start)
    return {"key_cache": kv_cache[:, 0], "value_cache": kv_cache[:, 1]}


def rows(*shape: int, start: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Zeros that begin so many elements after a multiple of 64 bytes."""
    size = int(np.prod(shape))
    flat = torch.zeros(size + start + 64, dtype=dtype)
    start += -flat.data_ptr() % 64 // flat.element_size()
    return flat[start : start + size].view(shape)


QKV, ROW = (5, 3, NUM_HEADS, HEAD_SIZE), HEAD_SIZE // 2 + HEAD_SIZE // 16
PAGES = NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS
FP8 = halves_of(*PAGES, HEAD_SIZE) | {"kv_cache_dtype": "fp8_e4m3"}

# Of each pair of calls one is known when the other comes, which differs in one thing.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "slot dtype": ({}, {"slot_mapping": torch.arange(5, dtype=torch.int32)}),
    "slots that are not promised": ({}, {"unique_slots": False}),
    "order of V scales": ({}, {"v_scale_layout": "swizzled"}),
    "strides of keys": ({}, {"key": rows(5, 4, NUM_HEADS, HEAD_SIZE)[:, 1]}),
    "strides of values": ({}, {"value": rows(5, 4, NUM_HEADS, HEAD_SIZE)[:, 1]}),
    "keys elsewhere": ({"key": rows(*QKV)[:, 1]}, {"key": rows(*QKV, start=8)[:, 1]}),
    "values elsewhere": ({"value": rows(*QKV)[:, 1]}, {"value": rows(*QKV, start=8)[:, 1]}),
    "dtype of keys and values": (
        {name: rows(*QKV)[:, 1] for name in ("key", "value")},
        {name: rows(*QKV, dtype=torch.float16)[:, 1] for name in ("key", "value")},
    ),
    "blocks": (halves_of(*PAGES, ROW), halves_of(NUM_BLOCKS + 1, *PAGES[1:], ROW)),
    "strides of caches": (halves_of(*PAGES, ROW), halves_of(NUM_BLOCKS, 3, *PAGES[2:], ROW)),
    "a cache elsewhere": (halves_of(*PAGES, ROW), halves_of(*PAGES, ROW, start=8)),
    "strides of one cache": ({}, {"key_cache": halves_of(NUM_BLOCKS, 3, *PAGES[2:], ROW)["key_cache"]}),
    "strides of the other": ({}, {"value_cache": halves_of(NUM_BLOCKS, 3, *PAGES[2:], ROW)["value_cache"]}),
    "one cache elsewhere": ({}, {"key_cache": halves_of(*PAGES, ROW, start=8)["key_cache"]}),
    "the other elsewhere": ({}, {"value_cache": halves_of(*PAGES, ROW, start=8)["value_cache"]}),
    "shape of k_scale": ({}, {"k_scale": torch.ones(1)}),
    "shape of v_scale": ({}, {"v_scale": torch.ones(1)}),
    "what bytes stand for": (FP8, FP8 | {"kv_cache_dtype": "fp8_e5m2"}),
    "cache dtype": (
        FP8 | {"kv_cache_dtype": "auto", **halves_of(*PAGES, HEAD_SIZE, dtype=torch.bfloat16)},
        FP8 | {"kv_cache_dtype": "auto", **halves_of(*PAGES, HEAD_SIZE, dtype=torch.float16)},
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_change_that_a_kernel_depends_on_is_planned_anew(name: str, recorder: Recorder):
    one, other = (arguments(**changes) for changes in OTHERS[name])
    for call, planned_before in ((one, 0), (one, 1), (other, 1), (other, 2), (one, 2)):
        assert recorder.planned == planned_before
        write(**call)
        assert recorder.launches[-1][0][1:6] == entries(call)[1:6]


def test_checked_mode_plans_every_write(recorder: Recorder):
    call = arguments()
    write(**call)
    with kvjax.checked():
        write(**call)
    assert recorder.planned == 2


def test_threads_that_make_the_first_call_of_a_kind_make_one_kernel(monkeypatch: pytest.MonkeyPatch):
    """On different GPUs too: a kernel is known by itself, so that one of two would be compiled for nobody."""
    is_held = []
    write_call, gather_call = writing.write_call, gathering.gather_call
    for module, name, made in ((writing, "write_call", write_call), (gathering, "gather_call", gather_call)):

        def call(*args: Any, made: Any = made) -> Any:
            is_held.append(choosing.one_at_a_time.locked())
            return made(*args)

        monkeypatch.setattr(module, name, call)
    Recorder(monkeypatch)
    given = arguments()
    write(**given)
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    read = ReadTensors(given["key_cache"], given["value_cache"], table, lengths, *scales(given))
    reads.gather(gather_plan(read, Encoding("nvfp4"), None), read)
    assert is_held == [True, True]


def test_a_write_of_no_slots_launches_nothing(recorder: Recorder):
    write(**arguments())
    write(**arguments(slot_mapping=torch.arange(0)))
    assert len(recorder.launches) == 1


MORE = halves_of(NUM_BLOCKS + 1, *PAGES[1:], ROW)
FLOAT8 = halves_of(*PAGES, ROW, dtype=torch.float8_e4m3fn)
WRONG = {
    "fewer keys than slots": {"key": rows(4, 3, NUM_HEADS, HEAD_SIZE)[:, 1]},
    "fewer values than slots": {"value": rows(4, 3, NUM_HEADS, HEAD_SIZE)[:, 1]},
    "dimensions": {"key": rows(5)},
    "scales of heads": {"k_scale": torch.ones(NUM_HEADS)},
    "dtype of k_scale": {"k_scale": torch.ones((), dtype=torch.float64)},
    "dtype of v_scale": {"v_scale": torch.ones((), dtype=torch.float64)},
    "dtype of keys": {"key": rows(*QKV, dtype=torch.float16)[:, 1]},
    "dtype of values": {"value": rows(*QKV, dtype=torch.float16)[:, 1]},
    "heads of keys": {"key": rows(*QKV)[:, 1, :1]},
    "heads of values": {"value": rows(*QKV)[:, 1, :1]},
    "head size of keys": {"key": rows(*QKV)[:, 1, :, :16]},
    "head size of values": {"value": rows(*QKV)[:, 1, :, :16]},
    "blocks of keys": {"key_cache": MORE["key_cache"]},
    "blocks of values": {"value_cache": MORE["value_cache"]},
    "dtype of key_cache": {"key_cache": FLOAT8["key_cache"]},
    "dtype of value_cache": {"value_cache": FLOAT8["value_cache"]},
    "sparse keys": {"key": rows(5, NUM_HEADS, HEAD_SIZE).to_sparse()},
    "sparse slots": {"slot_mapping": torch.arange(5).to_sparse()},
    "sparse cache": {"value_cache": torch.zeros(*PAGES, ROW, dtype=torch.uint8).to_sparse()},
    "sparse scale": {"v_scale": torch.ones(1).to_sparse()},
    "nested values": {"value": nested(rows(5, NUM_HEADS, HEAD_SIZE))},
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_calls_of_a_known_kind_are_refused(name: str, recorder: Recorder):
    aligned = halves_of(*PAGES, ROW) | {"key": rows(*QKV)[:, 1], "value": rows(*QKV)[:, 1]}  # as what is wrong
    write(**arguments(**aligned))
    with pytest.raises(KVCacheError):
        write(**arguments(**aligned | WRONG[name]))
    assert len(recorder.launches) == 1


COPIED = {
    "slot_mapping": torch.arange(10)[::2],
    "key": rows(NUM_HEADS, 5, HEAD_SIZE).transpose(0, 1),
    "value": rows(NUM_HEADS, 5, HEAD_SIZE).transpose(0, 1),
}


@pytest.mark.parametrize("name", COPIED)
def test_calls_with_arguments_to_copy_are_planned_each_time(name: str, recorder: Recorder):
    call = arguments()
    write(**call)
    call[name] = COPIED[name]
    for planned_before in range(1, 4):
        assert recorder.planned == planned_before
        write(**call)
        assert recorder.launches[-1][0] != entries(call)


def test_scales_of_heads_are_never_taken_for_one(recorder: Recorder):
    cache = halves_of(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE) | {"kv_cache_dtype": "fp8_e4m3"}
    for num_scales in (1, NUM_HEADS, 1, NUM_HEADS):
        by_head = {name: torch.full((num_scales,), 0.5) for name in ("k_scale", "v_scale")}
        write(**arguments(**cache, **by_head))
    assert recorder.planned == 3  # that of one scale is known the second time
    assert len(recorder.launches) == 4


def test_large_writes_find_the_last_token_of_each_slot_before_the_launch(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
):
    found = []
    only_last_tokens = writing.only_last_tokens

    def find(slot_mapping: torch.Tensor, num_slots: int) -> torch.Tensor:
        assert num_slots == LAST_SLOT + 1
        found.append(only_last_tokens(slot_mapping, num_slots))
        return found[-1]

    monkeypatch.setattr(writing, "only_last_tokens", find)
    for num_tokens in (5, kernels.SEARCHED - 1, kernels.SEARCHED, kernels.SEARCHED + 1):
        call = arguments(num_tokens, unique_slots=False)
        write(**call)
        [counts, slots, *_], _ = recorder.launches[-1]
        assert counts == num_tokens | LAST_SLOT << 32
        assert slots == (call["slot_mapping"] if num_tokens < kernels.SEARCHED else found[-1]).data_ptr()
    assert len(found) == 2
    assert recorder.planned == 1


def test_without_the_launcher_calls_raise_and_name_the_tested_versions(monkeypatch: pytest.MonkeyPatch):
    def unavailable(*_: object) -> None:
        raise binaries.LaunchUnavailableError("JAX 0.99 lacks a part")

    monkeypatch.setattr(writes, "_known_writes", {})
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    monkeypatch.setattr(loading, "compile_kernel", unavailable)
    call = arguments()
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    read = ReadTensors(call["key_cache"], call["value_cache"], table, lengths, *scales(call))
    plan = gather_plan(read, Encoding("nvfp4"), None)
    for _ in range(2):
        for run in (lambda: write(**call), lambda: reads.gather(plan, read)):
            with pytest.raises(UnsupportedError, match=r"JAX 0\.99 lacks a part; tested with jax 0\.11\.1 to 0\.12"):
                run()
    assert not writes._known_writes


def test_numbers_of_any_type_are_one_constant(monkeypatch: pytest.MonkeyPatch):
    """A graph may read it: it is never replaced."""
    monkeypatch.setattr(scale_tensors, "_constants", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cache = mock.Mock(is_cuda=True, device=torch.device("cpu"), get_device=lambda: -1, fake_mode=None)
    first = scale_tensors.as_tensor("k_scale", 1.0, cache)
    for same in (1, np.float64(1), 1.0):
        assert scale_tensors.as_tensor("k_scale", same, cache) is first
    assert scale_tensors.as_tensor("k_scale", 2, cache).item() == 2
    cache.fake_mode = mock.Mock()  # in a trace
    for scale in (1.0, 3.0):
        assert scale_tensors.as_tensor("k_scale", scale, cache) is not first
    assert len(scale_tensors._constants) == 2
