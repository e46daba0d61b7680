"""kvjax_torch.paged_attention passes the suite that kvjax's own implementations pass, on tensors as torch has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import attention_suite as suite  # noqa: E402
from attention_suite import Attend, Case  # noqa: E402
from helpers import assert_same_bytes, page_bytes  # noqa: E402
from torch_helpers import from_numpy, to_numpy, torch_cache  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import KVCache, KVCacheTypeError, KVCacheValueError, KVQuantMode  # noqa: E402


def on(device: str, value: Any) -> Any:
    return from_numpy(value).to(device) if isinstance(value, np.ndarray) else value


@pytest.fixture
def attend(device: str) -> Attend:
    """On tensors of a device, that are strided as callers have them."""

    def run(query: np.ndarray, cache: KVCache, table: np.ndarray, lens: np.ndarray, **options: Any) -> Any:
        spec = cache.spec
        pages = torch_cache(page_bytes(cache), spec, device=device)
        scales = [on(device, np.asarray(options.pop(name))) for name in ("k_scale", "v_scale")]
        options["v_scale_layout"] = spec.v_scale_layout.value if spec.quant_mode is KVQuantMode.NVFP4 else "linear"
        options["sinks"] = on(device, options["sinks"])
        fused = on(device, np.concatenate([query, query], axis=-2))[..., : query.shape[-2], :]
        out, lse = kvjax_torch.paged_attention(
            fused,
            pages.key,
            pages.value,
            on(device, table),
            on(device, lens.astype(np.int64)),
            spec.dtype.value,
            *scales,
            return_lse=True,
            **options,
        )
        return to_numpy(out, query.dtype), to_numpy(lse, np.dtype(np.float32))

    return run


CASES = [
    Case(num_kv_heads=1, group=1, lengths="one", q_len=4),
    Case("nvfp4", "float16", "HND", "swizzled", 80, q_len=3, window=9, cap=4.0, sinks=True, scales="scalar"),
    Case("fp8_e4m3", "float32", head_size=64, head_size_v=32, block_size=8, q_len=2, scales="per_head"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_case(attend, case):
    suite.check(case, attend)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in suite.cases(2) if case.lengths != "long"], ids=str)
def test_each_pair_of_choices(attend, case):
    if case.dtype == "nvfp4" and case.head_size_v not in (None, case.head_size):
        pytest.skip("the halves of such a page are not two tensors")
    suite.check(case, attend)


def test_one_token_a_sequence_needs_no_axis_of_rows(attend):
    problem = suite.build(Case("nvfp4", window=9))
    query, *rest = problem.args
    for got, rows in zip(attend(query[:, 0], *rest, **problem.options), problem.run(attend), strict=True):
        assert_same_bytes(got, rows[:, 0])


def arguments(device: str = "cpu", dtype: str = "nvfp4") -> dict[str, Any]:
    kv_cache = torch.zeros((4, 2, 8, 2, 36), dtype=torch.uint8, device=device)
    if dtype == "auto":
        kv_cache = torch.zeros((4, 2, 8, 2, 64), dtype=torch.bfloat16, device=device)
    one = torch.ones((), device=device)
    return {
        "query": torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0)).to(device),
        "key_cache": kv_cache[:, 0],
        "value_cache": kv_cache[:, 1],
        "block_table": torch.tensor([[1, 0], [3, 2]], device=device),
        "seq_lens": torch.tensor([13, 4], device=device),
        "kv_cache_dtype": dtype,
        "k_scale": one,
        "v_scale": one,
    }


@pytest.mark.parametrize("dtype", ["auto", "nvfp4"])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 5, "logits_soft_cap": 3.0, "sinks": torch.ones(4)}], ids=len
)
def test_opcheck(options, dtype, device):
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    given = arguments(device, dtype)
    torch.library.opcheck(torch.ops.kvjax.paged_attention.default, tuple(given.values()), options)
    rows = given["query"][:, None].expand(2, 3, 4, 64)
    torch.library.opcheck(torch.ops.kvjax.paged_attention.default, (rows, *[*given.values()][1:]), options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled(device):
    torch._dynamo.reset()

    def layer(given: dict[str, Any]) -> Any:
        return kvjax_torch.paged_attention(**given, sliding_window=5, sm_scale=0.5, return_lse=True)

    given = arguments(device)
    for got, eager in zip(torch.compile(layer, backend="aot_eager", fullgraph=True)(given), layer(given), strict=True):
        torch.testing.assert_close(got, eager)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(2, 64)}, KVCacheValueError, "query: got 2 dimensions, expected [num_seqs, num_heads, h"),
        (
            {"query": torch.zeros(2, 4, 32)},
            KVCacheValueError,
            "query: got shape (2, 4, 32), expected num_seqs=2 and hea",
        ),
        (
            {"query": torch.zeros(3, 4, 64)},
            KVCacheValueError,
            "query: got shape (3, 4, 64), expected num_seqs=2 and hea",
        ),
        (
            {"query": torch.zeros(2, 3, 64)},
            KVCacheValueError,
            "query: got num_heads=3, expected a multiple of num_kv_he",
        ),
        (
            {"query": torch.zeros(2, 4, 64).int()},
            KVCacheTypeError,
            "query: got dtype torch.int32, expected torch.float32",
        ),
        (
            {"query": torch.zeros(2, 4, 64, requires_grad=True)},
            KVCacheTypeError,
            "query: got requires_grad=True, but at",
        ),
        ({"query": np.zeros((2, 4, 64))}, KVCacheTypeError, "query: got a ndarray, expected a torch.Tensor"),
        ({"sinks": torch.zeros(3)}, KVCacheValueError, "sinks: got shape (3,), expected [num_heads=4]"),
        ({"sinks": torch.zeros(4).half()}, KVCacheTypeError, "sinks: got dtype torch.float16, expected torch.float32"),
        ({"sinks": [0.0] * 4}, KVCacheTypeError, "sinks: got a list, expected a torch.Tensor"),
        ({"sliding_window": 0}, KVCacheValueError, "sliding_window: got 0, expected a positive int or None"),
        ({"sliding_window": 2.0}, KVCacheTypeError, "sliding_window: got 2.0 of type float, expected an int or None"),
        (
            {"sm_scale": float("nan")},
            KVCacheValueError,
            "sm_scale: got nan, expected a number that is finite in float32",
        ),
        ({"sm_scale": 10**400}, KVCacheValueError, "sm_scale: got 1000"),
        ({"sm_scale": "1"}, KVCacheTypeError, "sm_scale: got '1' of type str, expected a float or None"),
        ({"logits_soft_cap": -1}, KVCacheValueError, "logits_soft_cap: got -1.0, expected a positive number or None"),
        (
            {"logits_soft_cap": True},
            KVCacheTypeError,
            "logits_soft_cap: got True of type bool, expected a float or None",
        ),
        ({"seq_lens": torch.zeros(3).int()}, KVCacheValueError, "seq_lens: got shape (3,), expected [num_seqs=2]"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    with pytest.raises(error) as raised:
        kvjax_torch.paged_attention(**arguments() | change)
    assert str(raised.value).startswith(message)


def test_blocks_before_a_window_are_not_looked_for():
    """Checked mode names blocks that are needed alone."""
    given = arguments() | {"block_table": torch.tensor([[99, 0], [3, 2]])}
    with kvjax.checked():
        kvjax_torch.paged_attention(**given, sliding_window=5)
        with pytest.raises(KVCacheValueError, match=r"^block_table\[0, 0\]: got 99, expected between"):
            kvjax_torch.paged_attention(**given)
