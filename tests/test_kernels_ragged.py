"""The GPU's way of ragged_paged_attention: interpreted, and compiled for H100 and B200 around cuDNN's calls."""

from __future__ import annotations

import functools
import re
from typing import Any

import attention_suite as suite
import gpu_compile
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_ragged_attention as ragged_suite
from gpu_compile import TARGETS, CompiledProgram, compile_for
from helpers import simple_spec
from interpret_mode import interpret_mode
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kvjax import KVCache, KVCacheDType, ragged_paged_attention
from kvjax.kernels import compat
from kvjax.kernels.target import Target
from kvjax.ops import prompt_kernel
from kvjax.ops.prompts import why_not_cudnn

CUDNN = "__cudnn$fmhaSoftmax"
STATIC = ragged_suite.STATIC


def interpreted(*args: Any, **options: Any) -> Any:
    attend = functools.partial(ragged_paged_attention, return_lse=True, implementation="mosaic")
    with interpret_mode():
        return jax.tree.map(np.asarray, jax.jit(attend, static_argnames=STATIC)(*args, **options))


@pytest.mark.full
@pytest.mark.parametrize("options", [{"sinks": True, "scales": "scalar"}, {"window": 5}, {"cap": 5.0}], ids=str)
def test_interpreted_it_is_right(options):
    lengths, q_lens = (30, 7, 0, 3), (11, 1, 0, 3)
    case = ragged_suite.ragged(q_lens, lengths, dtype="nvfp4", num_kv_heads=1, block_size=8, **options)
    problem = ragged_suite.build(case)
    suite.assert_right(problem, *ragged_suite.run(problem, interpreted), lse_factor=64, max_factor=1.5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_the_model_of_cudnn_is_attention(is_causal, window):
    if window and not is_causal:
        pytest.skip("cuDNN has windows with causal masks alone")
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 9, 4, 8)).astype(np.float32)
    key, value = rng.standard_normal((2, 2, 7, 2, 8)).astype(np.float32)
    query_lens, kv_lens = np.int32([9, 5]), np.int32([7, 4])
    got = compat.cudnn_model(query, key, value, query_lens, kv_lens, sm_scale=0.5, is_causal=is_causal, window=window)
    for seq, (rows, tokens) in enumerate(zip(query_lens, kv_lens, strict=True)):
        row, token = np.arange(rows)[:, None], np.arange(tokens)[None, :]
        seen = (token <= row if is_causal else token >= 0) & (window is None or token > row - window)
        logits = 0.5 * np.einsum("qhgd,thd->qhgt", query[seq, :rows].reshape(rows, 2, 2, 8), key[seq, :tokens])
        weights = np.where(seen[:, None, None, :], np.exp(logits), 0)
        out = np.einsum("qhgt,thd->qhgd", weights, value[seq, :tokens]) / weights.sum(-1)[..., None]
        is_any = np.broadcast_to(seen, (rows, tokens)).any(axis=1)
        np.testing.assert_allclose(got[0][seq, :rows][is_any], out.reshape(rows, 4, 8)[is_any], rtol=1e-4, atol=1e-5)
        lse = np.log(weights.sum(-1)).reshape(rows, 4)
        np.testing.assert_allclose(got[1][seq, :rows][is_any], lse[is_any], rtol=1e-4, atol=1e-5)
        assert np.isnan(got[0][seq, rows:]).all()


def test_what_cudnn_cannot_serve_has_a_reason():
    bfloat16, float16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
    assert why_not_cudnn(simple_spec(KVCacheDType.NVFP4), bfloat16) is None
    assert why_not_cudnn(simple_spec(KVCacheDType.BFLOAT16), bfloat16) is None
    assert "one dtype; got bfloat16 pages and float16" in str(why_not_cudnn(simple_spec(), float16))
    assert "got 64 and 32" in str(why_not_cudnn(simple_spec(head_size_v=32), bfloat16))
    assert "up to 256; got 264" in str(why_not_cudnn(simple_spec(head_size=264), bfloat16))


def attend(query: Any, cache: KVCache, table: Any, lens: Any, bounds: Any, layer: Any = None, **options: Any) -> Any:
    return ragged_paged_attention(
        query, cache, table, lens, bounds, layer=layer, return_lse=True, implementation="mosaic", **options
    )


def arguments(dtype: str, num_seqs: int, num_tokens: int, num_layers: int | None = None, **changes: Any) -> list[Any]:
    spec = simple_spec(KVCacheDType(dtype), **{"block_size": 16, "num_kv_heads": 8, "head_size": 128} | changes)
    shape = spec.cache_shape(4096)
    shape = shape if num_layers is None else (shape[0], num_layers, *shape[1:])
    cache = KVCache(jax.ShapeDtypeStruct(shape, spec.array_dtype), spec, num_layers=num_layers)
    query = jax.ShapeDtypeStruct((num_tokens, 4 * spec.num_kv_heads, spec.head_size), jnp.bfloat16)
    indices = [(num_seqs, 256), (num_seqs,), (num_seqs + 1,), *([()] if num_layers else [])]
    return [query, cache, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in indices)]


def producer(program: CompiledProgram, name: str) -> str:
    """The opcode of what made an array, and its target."""
    opcode = "bitcast"
    while opcode in ("bitcast", "get-tuple-element"):
        definition = rf"^\s+(?:ROOT )?%{re.escape(name)} = .*? ([a-z][\w-]*)\((?:%([\w.-]+))?(.*)"
        opcode, name, rest = re.search(definition, program.hlo, re.MULTILINE).groups()
    target = re.search(r'custom_call_target="([^"]*)"', rest)
    return f"{opcode} {target[1]}" if target else opcode


ALL_TARGETS = [pytest.param(name, marks=() if name == "h100" else pytest.mark.full) for name in TARGETS]


@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
@pytest.mark.parametrize("target", ALL_TARGETS)
@pytest.mark.parametrize(
    ("dtype", "changes", "options", "calls"),
    [
        ("nvfp4", {}, {"max_q_len": 512, "max_prompts": 2}, 2),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("bfloat16", {}, {"max_q_len": 512, "max_prompts": 2, "sliding_window": 256}, 1),
                ("fp8_e4m3", {"layout": "HND", "num_layers": 3}, {"max_q_len": 300, "max_prompts": 1}, 2),
                ("nvfp4", {"v_scale_layout": "swizzled"}, {"max_q_len": 512, "logits_soft_cap": 30.0}, 0),
                ("nvfp4", {}, {"max_q_len": 4}, 0),
                ("nvfp4", {}, {"decode_q_len": 4}, 2),
            )
        ),
    ],
    ids=str,
)
def test_it_compiles_and_copies_nothing(target, dtype, changes, options, calls):
    """What the gather made is what cuDNN or the prompt kernel reads; with a window, after its first block was cleared.

    `calls` are cuDNN's on a B200; on an H100 one kernel does what they do, and what cuDNN does not.
    """
    program = compile_for(target, functools.partial(attend, **options), *arguments(dtype, 16, 1024, **changes))
    operands = re.findall(r"custom-call\(([^)]*)\)[^\n]*" + re.escape(f'custom_call_target="{CUDNN}"'), program.hlo)
    is_kernel = target == "h100" and options != {"max_q_len": 4}
    assert sum("prompt_attention" in kernel.name for kernel in program.kernels) == is_kernel
    assert len(operands) == (0 if is_kernel else calls)
    made = "fusion" if "sliding_window" in options else "custom-call mosaic_gpu_v2"
    for names in operands:
        _, key, value, *_ = (name.strip().split("%")[-1] for name in names.split(","))
        assert producer(program, key) == producer(program, value) == made
    copied = re.findall(r" = \w+\[([\d,]*)\]\S* copy\(", program.hlo)
    sizes = [int(np.prod([int(size) for size in dims.split(",") if size])) for dims in copied]
    assert not (calls or is_kernel) or max(sizes, default=0) < 4096, "an array is copied"


@pytest.mark.full
@pytest.mark.skipif(gpu_compile.why_not() is not None, reason=str(gpu_compile.why_not()))
def test_a_share_of_the_heads_is_attended_to_without_communication():
    mesh = AbstractMesh((8,), ("tensor",), (AxisType.Auto,))
    query, cache, *rest = arguments("nvfp4", 4, 512)

    def on(x: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*axes)))

    kv = on(cache.kv, None, None, None, "tensor")
    args = on(query, None, "tensor"), KVCache(kv, cache.spec, kv.sharding), *(on(x) for x in rest)
    program = compile_for("b200", functools.partial(attend, max_q_len=256, max_prompts=1), *args)
    assert program.hlo.count(f'custom_call_target="{CUDNN}"') == 2
    assert not program.collectives


@pytest.mark.parametrize(
    ("axes", "window"),
    [((0, 0, None, None, None), None), ((1, None, 0, 0, 0), 64)],
)
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.full
def test_under_vmap_no_call_is_repeated(axes, window, capability, monkeypatch):
    monkeypatch.setattr(prompt_kernel, "current", lambda: Target(compute_capability=capability))
    jax.clear_caches()  # of what was traced for another target

    def batched(x: Any, axis: int | None) -> Any:
        shape = x.shape if axis is None else (*x.shape[:axis], 3, *x.shape[axis:])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    run = functools.partial(attend, max_q_len=100, max_prompts=2, sliding_window=window)
    args = [
        jax.tree.map(functools.partial(batched, axis=axis), x)
        for x, axis in zip(arguments("nvfp4", 4, 200), axes, strict=True)
    ]
    traced = jax.jit(jax.vmap(run, in_axes=axes)).trace(*args)
    by_cudnn = 0 if capability == (9, 0) else 2 if window is None else 1
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count(CUDNN) == by_cudnn
    # The decode kernel, its merge, the gather, and the prompt kernel.
    assert capability != (9, 0) or lowered.count("mosaic_gpu_v2") == 4
