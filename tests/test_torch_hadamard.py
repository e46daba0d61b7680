"""`kvjax_torch.hadamard_transform` gives what `kvjax.hadamard_transform` gives."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import KVCacheTypeError, KVCacheValueError  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(128,), (5, 3, 64), (2, 3, 4, 96), (0, 2, 80), (7, 2)])
def test_values_are_those_of_jax(device: str, shape: tuple[int, ...], dtype: str):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32) * 30
    expected = np.float32(kvjax.hadamard_transform(jnp.asarray(x, dtype)))
    given = torch.tensor(x, device=device).to(getattr(torch, dtype))
    got = kvjax_torch.hadamard_transform(given)
    assert (got.dtype, got.shape, got.device) == (given.dtype, given.shape, given.device)
    # float32 sums of up to 128 elements in another order; one code of 16 bits where that rounds otherwise.
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(got.float().cpu().numpy(), expected, rtol=eps, atol=2**-14)
    as_jax = got.float().cpu().numpy() == expected
    assert dtype == "float32" or not x.size or as_jax.mean() > 0.99
    swapped = given.transpose(0, -2) if given.ndim > 2 else given
    assert torch.equal(kvjax_torch.hadamard_transform(swapped), got.transpose(0, -2) if given.ndim > 2 else got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_exact_where_sums_are(device: str, dtype: str):
    """Whatever autocast and torch's precision of products say, and in inference mode first."""
    signs = torch.where(torch.rand(9, 256, generator=torch.Generator().manual_seed(0)) < 0.5, -3.0, 1.0)
    x = signs.to(device, getattr(torch, dtype))
    expected = np.float32(kvjax.hadamard_transform(jnp.asarray(signs.numpy(), dtype)))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            got = kvjax_torch.hadamard_transform(x)
    finally:
        torch.set_float32_matmul_precision(precision)
    np.testing.assert_array_equal(got.float().cpu().numpy(), expected)
    x = x.clone().requires_grad_()
    kvjax_torch.hadamard_transform(x).backward(x.detach())
    assert torch.equal(x.grad, got)


def test_a_trace_of_fake_tensors_leaves_nothing_for_later_calls():
    x = torch.ones(2, 3 << 6)  # a size like no other test's
    for _ in range(2):
        assert make_fx(kvjax_torch.hadamard_transform, tracing_mode="fake")(x)(x).shape == x.shape
        assert kvjax_torch.hadamard_transform(x).sum() == pytest.approx(6 * 8)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("dynamic", [None, True])
def test_torch_compiles_it_for_one_head_size_after_the_other(dynamic: bool | None):
    compiled = torch.compile(kvjax_torch.hadamard_transform, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for size in (64, 128, 96, 80):
        x = torch.randn(3, size)
        torch.testing.assert_close(compiled(x), kvjax_torch.hadamard_transform(x))


def test_meta_tensors_have_its_shape():
    rotated = kvjax_torch.hadamard_transform(torch.ones(2, 96, device="meta"))
    assert (rotated.shape, rotated.device.type) == ((2, 96), "meta")


def test_it_overflows_only_where_its_results_do(device: str):
    got = kvjax_torch.hadamard_transform(torch.full((1, 128), 1e37, device=device)).double().cpu()
    assert got[0, 0] == pytest.approx(1e37 * np.sqrt(128), rel=1e-6)
    assert got[0, 1:].abs().max() < 1e-6 * got[0, 0]


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(2, 0), KVCacheValueError, "x: got head_size=0, expected a positive even number"),
        (torch.ones(2, 5), KVCacheValueError, "x: got head_size=5, expected a positive even number"),
        (torch.ones(()), KVCacheValueError, r"x: got shape \[\], expected \[\.\.\., head_size\]"),
        (torch.ones(2, 4, dtype=torch.int32), KVCacheTypeError, "x: got dtype torch.int32, expected torch.float"),
        (np.ones((2, 4)), KVCacheTypeError, "x: got a numpy array, expected a torch.Tensor|x: got .*ndarray"),
    ],
)
def test_invalid_arguments_are_refused(x: Any, error: type, message: str):
    with pytest.raises(error, match=message):
        kvjax_torch.hadamard_transform(x)
