"""Attention that is launched without being checked and planned again: which calls, and what they are launched with.

No GPU is asked: what would be launched on one is written down instead. `test_torch_attention.py` launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kvjax  # noqa: E402
from kvjax import KVCacheError, kernels  # noqa: E402
from kvjax_torch.arguments.attention import attention_plan  # noqa: E402
from kvjax_torch.arguments.plan import Encoding, ReadTensors, SoftmaxOptions  # noqa: E402
from kvjax_torch.calls import attending, choosing  # noqa: E402
from kvjax_torch.cuda import known_attention  # noqa: E402
from kvjax_torch.cuda.known_attention import AttentionCall  # noqa: E402
from kvjax_torch.launch import running  # noqa: E402

NUM_SEQS, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE = 3, 40, 16, 2, 32
ROW = {"nvfp4": HEAD_SIZE // 2 + HEAD_SIZE // 16, "int8_per_token_head": HEAD_SIZE + 4}


class Recorder:
    """In place of a compiled kernel, and of all that compiles one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[list[int], int]] = []
        self.served = 0
        monkeypatch.setattr(known_attention, "_known", {})
        monkeypatch.setattr(running, "check_capability", lambda device: None)
        monkeypatch.setattr(
            running,
            "_compiled",
            lambda kernel, _: running.Launcher(self, kernel.num_programs),  # type: ignore[arg-type]
        )
        monkeypatch.setattr(choosing, "target_of", lambda _: kernels.Target(compute_capability=(9, 0)))
        monkeypatch.setattr(attending, "route_of", attending.route_of.__wrapped__)
        monkeypatch.setattr(attending, "attention_parts", attending.attention_parts.__wrapped__)

    def __call__(self, entries: Any, num_programs: int) -> None:
        self.launches.append((list(entries), num_programs))

    def attend(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        def serve() -> tuple[torch.Tensor, torch.Tensor]:
            self.served += 1
            return torch.empty(0), torch.empty(0)

        return known_attention.attend(call, serve)

    def is_known(self, call: AttentionCall) -> bool:
        """Whether the call is launched without being served."""
        before = self.served
        self.attend(call)
        return self.served == before


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def make(dtype: str = "nvfp4", num_seqs: int = NUM_SEQS, width: int = 5, **changes: Any) -> AttentionCall:
    """A call over one allocation, with memory of its own."""
    row, stored = (ROW[dtype], torch.uint8) if dtype in ROW else (HEAD_SIZE, torch.bfloat16)
    kv_cache = torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, row, dtype=stored)
    given = {
        "query": torch.zeros(num_seqs, 1, 2 * NUM_HEADS, HEAD_SIZE, dtype=torch.bfloat16),
        "key_cache": kv_cache[:, 0],
        "value_cache": kv_cache[:, 1],
        "block_table": torch.zeros(num_seqs, width, dtype=torch.int32),
        "seq_lens": torch.ones(num_seqs, dtype=torch.int32),
        "k_scale": torch.tensor(0.5),
        "v_scale": torch.tensor(0.25),
        "encoding": (dtype, "linear"),
        "softmax": SoftmaxOptions(),
    } | changes
    tensors = ReadTensors(*(given[name] for name in ReadTensors._fields))
    return AttentionCall(given["query"], tensors, given["encoding"], given["softmax"])


def planned(call: AttentionCall) -> tuple[running.Call, running.Call]:
    plan = attention_plan(call.query, call.tensors, Encoding(*call.encoding), call.softmax)
    rows = call.query if call.query.ndim == 4 else call.query[:, None]
    return attending.attention_calls(plan, rows, call.tensors, call.softmax.sinks)


SINKS = SoftmaxOptions(sinks=torch.zeros(2 * NUM_HEADS))
KINDS: dict[str, dict[str, Any]] = {
    "nvfp4": {},
    "bfloat16": {"dtype": "bfloat16"},
    "sinks, window and cap": {"softmax": SINKS._replace(sliding_window=40, logits_soft_cap=5.0, sm_scale=0.1)},
    "three dimensions": {"query": torch.zeros(NUM_SEQS, 4, HEAD_SIZE, dtype=torch.float16)},
    "four query tokens": {"query": torch.zeros(NUM_SEQS, 4, 4, HEAD_SIZE, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_call_launches_what_planning_would(recorder: Recorder, kind: str):
    assert not recorder.is_known(make(**KINDS[kind]))
    assert not recorder.launches
    call = make(**KINDS[kind])
    out, lse = recorder.attend(call)
    assert recorder.served == 1
    (decode, programs), (merge, merge_programs) = recorder.launches
    for launched, num_programs, expected in zip(
        (decode, merge), (programs, merge_programs), planned(call), strict=True
    ):
        counts = [*kernels.packed(expected.counts)]
        assert launched[: len(counts)] == counts
        assert num_programs == expected.kernel.num_programs(expected.amount)
        assert len(launched) == len(counts) + len(expected.tensors)
    expected_decode, expected_merge = planned(call)
    num_inputs = len(expected_decode.tensors) - known_attention.NUM_OUTPUTS
    inputs = [tensor.data_ptr() for tensor in expected_decode.tensors[:num_inputs]]
    arrays = decode[-len(expected_decode.tensors) :]
    assert arrays[:num_inputs] == inputs
    assert arrays[num_inputs : num_inputs + 2] == [out.data_ptr(), lse.data_ptr()]
    between = arrays[num_inputs + 2 :]
    sizes = [tensor.nbytes for tensor in expected_decode.tensors[-3:]]
    for start, size, following in zip(between, sizes, [*between[1:], None], strict=True):
        assert start % 16 == 0
        assert following is None or start + size <= following
    sinks = [] if call.softmax.sinks is None else [call.softmax.sinks.data_ptr()]
    results = [out.data_ptr(), lse.data_ptr()]
    assert merge[-len(expected_merge.tensors) :] == [call.tensors.seq_lens.data_ptr(), *sinks, *between, *results]
    assert (out.shape, out.dtype) == (call.query.shape, call.query.dtype)
    assert (lse.shape, lse.dtype) == (call.query.shape[:-1], torch.float32)


def halves(**changes: Any) -> dict[str, torch.Tensor]:
    kv_cache = torch.zeros(NUM_BLOCKS + 1, 2, BLOCK_SIZE, NUM_HEADS, ROW["nvfp4"], dtype=torch.uint8)
    return {"key_cache": kv_cache[1:, 0], "value_cache": kv_cache[1:, 1]} | changes


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "another number of sequences": lambda: {"num_seqs": NUM_SEQS + 1},
    "a wider table": lambda: {"width": 6},
    "a table of other strides": lambda: {"block_table": torch.zeros(NUM_SEQS, 9, dtype=torch.int32)[:, :5]},
    "another dtype of the query": lambda: {"query": make().query.half()},
    "more heads": lambda: {"query": torch.zeros(NUM_SEQS, 1, 8, HEAD_SIZE, dtype=torch.bfloat16)},
    "another window": lambda: {"softmax": SoftmaxOptions(sliding_window=7)},
    "another scale of logits": lambda: {"softmax": SoftmaxOptions(sm_scale=0.5)},
    "sinks": lambda: {"softmax": SINKS},
    "pages that are not aligned": lambda: {
        name: torch.zeros(x.numel() + 8, dtype=torch.uint8)[8:].view(x.shape)
        for name, x in make().tensors._asdict().items()
        if name.endswith("cache")
    },
    "values of pages of their own": lambda: {"value_cache": make().tensors.value_cache.clone()},
    "an aligned query": lambda: {
        "query": torch.zeros(NUM_SEQS * 128 + 1, dtype=torch.bfloat16)[1:].view(make().query.shape)
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_planning_depends_on_makes_another_kind(recorder: Recorder, name: str):
    assert not recorder.is_known(make())
    assert not recorder.is_known(make(**OTHERS[name]()))
    assert recorder.is_known(make())
    assert recorder.served == 2


NEVER: dict[str, Callable[[], dict[str, Any]]] = {
    "lengths of 64 bits, which are copied": lambda: {"seq_lens": torch.ones(NUM_SEQS, dtype=torch.int64)},
    "a scale for each token and head": lambda: {"dtype": "int8_per_token_head"},
    "a scale for each head": lambda: {"k_scale": torch.ones(NUM_HEADS)},
    "a query whose heads are apart": lambda: {"query": torch.zeros(NUM_SEQS, 1, 4, 64, dtype=torch.bfloat16)[..., :32]},
    "a float32 query, which torch serves": lambda: {"query": make().query.float()},
    "more rows than one pass takes": lambda: {"query": torch.zeros(NUM_SEQS, 40, 4, HEAD_SIZE, dtype=torch.bfloat16)},
    "a batch-invariant call": lambda: {"softmax": SoftmaxOptions(batch_invariant=True)},
    "a factor of another type": lambda: {"softmax": SoftmaxOptions(sm_scale=True)},
    "no sequence": lambda: {"num_seqs": 0},
}


@pytest.mark.parametrize("name", NEVER)
def test_other_calls_are_served_every_time(recorder: Recorder, name: str):
    for _ in range(3):
        assert not recorder.is_known(make(**NEVER[name]()))
    assert not recorder.launches


def test_checked_mode_serves_every_call(recorder: Recorder):
    assert not recorder.is_known(make())
    with kvjax.checked():
        assert not recorder.is_known(make())
    assert recorder.is_known(make())


def test_a_call_that_raises_is_not_known(recorder: Recorder):
    def refuse() -> Any:
        raise KVCacheError("no")

    for _ in range(2):
        with pytest.raises(KVCacheError):
            known_attention.attend(make(), refuse)
    assert not known_attention._known


def test_kinds_are_forgotten_when_there_are_many(recorder: Recorder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "REMEMBERED", 2)
    for width in (5, 6, 7):
        assert not recorder.is_known(make(width=width))
    assert [recorder.is_known(make(width=width)) for width in (7, 5)] == [True, False]
