"""`concat_and_cache_mla_rope_fused`: the bytes of `kvjax.rope_and_cache_mla`, and queries and rope keys in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.helpers import assert_same_bytes  # noqa: E402
from support.interpreted_calls import run_interpreted  # noqa: E402
from support.mla_cases import spec_of  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import KVCacheTypeError, KVCacheValueError, quant  # noqa: E402
from kvjax_torch.arguments.dtypes import torch_dtype  # noqa: E402
from kvjax_torch.arguments.latents import LatentPages, latent_rope_plan  # noqa: E402
from kvjax_torch.arguments.plan import RopeInputs  # noqa: E402
from kvjax_torch.cuda import latents  # noqa: E402
from kvjax_torch.launch import running  # noqa: E402

SLOTS = torch.tensor([3, -1, 30, 8, 3, 99, 9])
RANK, ROPE, HEADS = 128, 32, 3


def call_of(name: str, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Slices of fused projections."""
    generator, spec = torch.Generator().manual_seed(0), spec_of(name, (RANK, ROPE))
    query = torch.randn(7, HEADS, 16 + ROPE, generator=generator).to(device, dtype)
    fused = torch.randn(7, RANK + ROPE, generator=generator).to(device, dtype)
    cache = torch.full((4, spec.page_size_bytes), 0xAB, dtype=torch.uint8, device=device).view(
        torch_dtype(spec.array_dtype)
    )
    return {
        "positions": torch.tensor([0, 5, 19, 7, 2, 20, -1], device=device),
        "q_pe": query[..., 16:],
        "k_pe": fused[:, RANK:],
        "kv_c": fused[:, :RANK],
        "cos_sin_cache": torch.rand(20, 16, generator=generator).to(device),
        "is_neox": False,
        "slot_mapping": SLOTS.to(device),
        "kv_cache": cache.unflatten(1, (8, -1)),
        "kv_cache_dtype": name,
        "scale": 0.037,
    }


def expected_of(call: dict[str, Any]) -> list[np.ndarray]:
    """The rotated query, the rotated rope keys and the cache, of rotating with JAX and writing after."""
    table, at = call["cos_sin_cache"].cpu().numpy(), call["positions"].cpu().clamp(0, 19)
    cos, sin = np.split(table[at], 2, axis=1)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return kvjax_torch.to_torch(quant.rotate(kvjax_torch.to_jax(x.cpu().contiguous()), cos, sin, call["is_neox"]))

    q_pe, k_pe, cache = turned(call["q_pe"]), turned(call["k_pe"][:, None])[:, 0], call["kv_cache"].cpu().clone()
    kvjax_torch.concat_and_cache_mla(call["kv_c"].cpu(), k_pe, cache, SLOTS, call["kv_cache_dtype"], call["scale"])
    return [as_bytes(x) for x in (q_pe, k_pe, cache)]


def as_bytes(x: torch.Tensor) -> np.ndarray:
    return x.cpu().contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bfloat16", "fp8_e4m3", "fp8_ds_mla", "nvfp4"])
def test_it_rotates_in_place_and_writes(name: str, dtype: torch.dtype, device: str):
    call = call_of(name, dtype, device)
    expected = expected_of(call)
    kvjax_torch.concat_and_cache_mla_rope_fused(**call)
    for x, want in zip((call["q_pe"], call["k_pe"], call["kv_cache"]), expected, strict=True):
        assert_same_bytes(as_bytes(x), want)


@pytest.mark.parametrize("name", ["fp8_ds_mla", pytest.param("bfloat16", marks=pytest.mark.full)])
@pytest.mark.parametrize("is_neox", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_interpreted_kernel_does_the_same(name: str, is_neox: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "check_capability", lambda device: None)
    monkeypatch.setattr(running, "run", run_interpreted)
    call = call_of(name, torch.bfloat16) | {"is_neox": is_neox}
    expected = expected_of(call)
    rope = RopeInputs(call["q_pe"], call["positions"], call["cos_sin_cache"], is_neox)
    pages = LatentPages(call["kv_cache"], name, torch.tensor(call["scale"]))
    plan, tensors = latent_rope_plan(rope, call["kv_c"], call["k_pe"], pages, call["slot_mapping"])
    q_pe, k_pe = latents.rotate_and_write(plan, tensors, rope, False)
    for x, want in zip((q_pe, k_pe[:, 0], call["kv_cache"]), expected, strict=True):
        assert_same_bytes(as_bytes(x), want)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_pe": torch.ones(7, 3, 32)}, KVCacheTypeError, r"q_pe: got dtype torch\.float32, expected torch\.bfloat16"),
        ({"q_pe": torch.ones(7, 3, 16).bfloat16()}, KVCacheValueError, "q_pe: got qk_rope_head_dim=16, expected 32 as"),
        ({"positions": torch.arange(6)}, KVCacheValueError, "positions: got 6 tokens, expected 7, one for each slot"),
        ({"cos_sin_cache": torch.ones(9, 34)}, KVCacheValueError, "rot_dim=34, expected .* 2 to qk_rope_head_dim=32"),
        ({"is_neox": 1}, KVCacheTypeError, "is_neox: got 1 of type int, expected a bool"),
        (
            {"q_pe": torch.ones(7, 1, 32).bfloat16().expand(7, 3, 32)},
            KVCacheValueError,
            "q_pe: got strides .* expected rows that do not overlap",
        ),
        ({"k_pe": torch.ones(7, 0).bfloat16()}, KVCacheValueError, "kv_cache: got shape"),
    ],
)
def test_invalid_arguments_are_refused_by_name_and_change_nothing(
    changes: dict[str, Any], error: type[Exception], message: str
):
    call = call_of("bfloat16", torch.bfloat16) | changes
    before = as_bytes(call["kv_cache"]), as_bytes(call["q_pe"])
    with pytest.raises(error, match=message):
        kvjax_torch.concat_and_cache_mla_rope_fused(**call)
    for x, want in zip((call["kv_cache"], call["q_pe"]), before, strict=True):
        assert_same_bytes(as_bytes(x), want)


@pytest.mark.parametrize("name", ["q_pe", "k_pe"])
def test_tensors_that_torch_does_not_rotate_in_place_are_refused_before_anything_is_written(name: str):
    call = call_of("bfloat16", torch.bfloat16)
    with torch.inference_mode():
        call[name] = call[name].clone()
    before = {what: x.clone() for what, x in call.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(KVCacheValueError, match=f"^{name}: got a tensor of inference mode outside of it"):
        kvjax_torch.concat_and_cache_mla_rope_fused(**call)
    for what, x in before.items():
        assert_same_bytes(as_bytes(call[what]), as_bytes(x))


def test_rope_keys_in_the_memory_of_queries_are_refused():
    """Both are rotated in place; side by side in rows of one projection they have memory of their own."""
    call = call_of("bfloat16", torch.bfloat16)
    both = torch.ones(7, HEADS + 1, ROPE).bfloat16()
    query, after, before = both[:, :HEADS], both[:, HEADS], both.clone()
    message = "^k_pe: got memory that overlaps that of q_pe, expected memory of its own"
    for k_pe in (query[:, 0], both.flatten(1)[:, 40 : 40 + ROPE]):
        with pytest.raises(KVCacheValueError, match=message):
            kvjax_torch.concat_and_cache_mla_rope_fused(**call | {"q_pe": query, "k_pe": k_pe})
        assert torch.equal(both, before)
    kvjax_torch.concat_and_cache_mla_rope_fused(**call | {"q_pe": query, "k_pe": after})
    assert not torch.equal(both, before)


def test_checked_mode_names_a_position_without_a_row():
    call = call_of("bfloat16", torch.bfloat16) | {"slot_mapping": torch.arange(7)}
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=r"positions\[5\]: got 20, expected"):
        kvjax_torch.concat_and_cache_mla_rope_fused(**call)


def test_the_operation_has_a_schema_and_a_fake():
    call = call_of("bfloat16", torch.bfloat16) | {"scale": torch.tensor(1.0)}
    call |= {name: call[name].contiguous() for name in ("q_pe", "k_pe", "kv_c")}
    tests = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    operation = torch.ops.kvjax.concat_and_cache_mla_rope_fused.default
    torch.library.opcheck(operation, tuple(call.values()), test_utils=tests)
