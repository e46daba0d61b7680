"""`merge_attention_states` of torch's tensors is that of kvjax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.torch_helpers import assert_same, from_numpy, to_numpy  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import KVCacheTypeError, KVCacheValueError  # noqa: E402
from kvjax_torch.arguments.dtypes import numpy_dtype  # noqa: E402


def parts(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Three parts of five tokens; the weightless ones hold NaN."""
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(3, 5, 4, 16, generator=generator)
    lses = 20 * torch.randn(3, 5, 4, generator=generator)
    lses[0, 0] = lses[1, 1:3] = lses[:, 4, 2] = -torch.inf
    outs[lses == -torch.inf] = torch.nan
    return outs.to(device, dtype), lses.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_merged_states_are_those_of_jax(dtype: torch.dtype, device: str):
    outs, lses = parts(dtype, device)
    merged = kvjax_torch.merge_attention_states(outs, lses)
    assert_same(kvjax_torch.merge_attention_states(list(outs), tuple(lses)), merged)
    assert (merged[0].dtype, merged[1].dtype) == (dtype, torch.float32)
    expected = kvjax.merge_attention_states(to_numpy(outs, numpy_dtype(dtype)), lses.cpu().numpy())
    for got, wanted, tolerance in zip(merged, expected, (torch.finfo(dtype).eps, 1e-6), strict=True):
        wanted = from_numpy(np.array(wanted))
        torch.testing.assert_close(got.cpu().float(), wanted.float(), rtol=tolerance, atol=1e-6)
    assert (merged[0][4, 2] == 0).all()
    assert merged[1][4, 2] == -torch.inf


def test_a_part_alone_keeps_its_bits():
    outs, lses = parts(torch.bfloat16)
    outs, lses = outs[1:2, :1], lses[1:2, :1]
    assert_same(kvjax_torch.merge_attention_states(outs, lses), (outs[0], lses[0]))


def test_large_parts_do_not_overflow():
    outs, lses = torch.full((2, 1, 1, 4), 3e38), torch.zeros(2, 1, 1)
    merged, lse = kvjax_torch.merge_attention_states(outs, lses)
    assert (merged == torch.tensor(3e38)).all()
    torch.testing.assert_close(lse, torch.full((1, 1), 2.0).log())


def test_parts_of_a_sequence_come_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(6, 2, 8, 2, 32, generator=generator)
    query, one = torch.randn(1, 4, 32, generator=generator), torch.ones(())

    def attend(table: list[int], length: int) -> Any:
        sequences = torch.tensor([table]), torch.tensor([length])
        return kvjax_torch.paged_attention(query, kv[:, 0], kv[:, 1], *sequences, "auto", one, one, return_lse=True)

    merged = kvjax_torch.merge_attention_states(*zip(attend([4, 1], 16), attend([2, 0], 11), strict=True))
    torch.testing.assert_close(merged, attend([4, 1, 2, 0], 27))


OUT, LSE = torch.zeros(5, 4, 16), torch.zeros(5, 4)
WRONG = {
    "no parts": (([], []), KVCacheValueError, "outs: got no parts, expected at least one"),
    "no stacked parts": ((torch.zeros(0, 5, 4, 16), [LSE]), KVCacheValueError, "outs: got no parts"),
    "no log-sum-exp": (([OUT], []), KVCacheValueError, "lses: got no parts, expected at least one"),
    "number": ((torch.zeros(()), [LSE]), KVCacheValueError, "outs: got shape (), expected [num_parts, ...]"),
    "array": (([OUT], LSE.numpy()), KVCacheTypeError, "lses: got a ndarray, expected a tensor or a sequence of"),
    "arrays": (([OUT.numpy()], [LSE]), KVCacheTypeError, "outs[0]: got a ndarray, expected a torch.Tensor"),
    "dtype": (([OUT.int()], [LSE]), KVCacheTypeError, "outs[0]: got dtype torch.int32, expected torch.float32 or"),
    "dtypes": (([OUT, OUT.half()], [LSE, LSE]), KVCacheValueError, "outs[1]: got torch.float16[5, 4, 16], expected"),
    "lse dtype": (([OUT], [LSE.half()]), KVCacheTypeError, "lses[0]: got dtype torch.float16, expected torch.float32"),
    "dimensions": (([OUT[0, 0]], [LSE[0, 0]]), KVCacheValueError, "outs[0]: got shape (16,), expected [..., num_heads"),
    "shapes": (([OUT], [LSE[:4]]), KVCacheValueError, "lses: got shape (1, 4, 4), expected (1, 5, 4), that of outs"),
    "count": (([OUT, OUT], [LSE]), KVCacheValueError, "lses: got shape (1, 5, 4), expected (2, 5, 4), that of outs"),
    "device": (([OUT], [LSE.to("meta")]), KVCacheValueError, "lses[0]: got device meta, expected cpu, that of outs[0]"),
    "gradient": (
        ([OUT.clone().requires_grad_()], [LSE]),
        KVCacheTypeError,
        "outs[0]: got requires_grad=True, but a merge of states has no gradient",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_states_to_merge_are_refused(case: str):
    given, error, message = WRONG[case]
    with pytest.raises(error) as raised:
        kvjax_torch.merge_attention_states(*given)
    assert message in str(raised.value)


def test_torchs_opcheck_accepts_the_operation(device: str):
    outs, lses = parts(torch.bfloat16, device)
    torch.library.opcheck(torch.ops.kvjax.merge_attention_states.default, (list(outs), list(lses)))


def test_compiled_code_merges_as_eager_code_does(device: str):
    torch._dynamo.reset()
    compiled = torch.compile(kvjax_torch.merge_attention_states, backend="aot_eager", fullgraph=True)
    outs, lses = parts(device=device)
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in lses]  # by heads, as FlashAttention has them
    for given in ((outs, lses), (list(outs), apart)):
        eager = kvjax_torch.merge_attention_states(*given)
        assert all(x.is_contiguous() for x in eager)
        assert_same(compiled(*given), eager)
    torch.library.opcheck(torch.ops.kvjax.merge_attention_states.default, (list(outs), apart))
