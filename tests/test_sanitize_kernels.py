"""The driver for sanitizers and profilers runs every kind of kernel, and the kernels themselves."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from support.interpret_mode import interpret_mode

from kvjax import MLA_KV_CACHE_DTYPES, STORED_KV_CACHE_DTYPES, KVCacheDType, UnsupportedError
from kvjax.kernels import mla
from kvjax.kernels.attention.choice import BatchSizes, plain_problem
from kvjax.kernels.target import Target

KINDS = 3 * 2 + 2 * 2 * 2 + 2 * 2 + 2 * 2 * 2 + 2 * 2 * 2 * 2
"""Of unquantized caches, fp8, a scale for each token and head, NVFP4, and fp8 and int8 keys with both kinds of NVFP4
values.
"""

DRIVER = runpy.run_path(str(Path(__file__).parents[1] / "tools/sanitize_kernels.py"))


def test_every_kind_of_kernel_is_run_once():
    every = [(spec, shape) for spec, shape in DRIVER["kinds"](STORED_KV_CACHE_DTYPES, 2, 128)]
    assert len(set(every)) == len(every) == KINDS
    assert {spec.dtype for spec, _ in every} == set(STORED_KV_CACHE_DTYPES)


@pytest.mark.full
def test_each_write_and_gather_that_ran_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    promises = []

    def watched_write(*args: object, **options: object) -> object:
        promises.append(options["unique_slots"])
        return write(*args, **options)

    write = DRIVER["_write"]
    monkeypatch.setitem(DRIVER["run"].__globals__, "_write", watched_write)
    with interpret_mode():
        DRIVER["main"](["--dtype", "fp8_e4m3", "--num-tokens", "9", "--num-kv-heads", "1"])
    assert promises == [False, True] * 4
    assert capsys.readouterr().out.splitlines() == [
        f"wrote and gathered fp8_e4m3 {layout} linear, one {scales}"
        for layout in ("NHD", "HND")
        for scales in ("scale", "scale per head")
    ]


@pytest.mark.full
def test_from_torch_it_runs_what_torch_calls(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Every dtype, layout and kind of scales, in torch's terms; on the CPU, which has no kernels."""
    torch, kvjax_torch = pytest.importorskip("torch"), pytest.importorskip("kvjax_torch")
    write, gather_kv = kvjax_torch.reshape_and_cache_flash, kvjax_torch.gather_kv
    written, read = [], []

    def watched_write(*args: object, **options: object) -> None:
        write(*args, **options)
        written.append((args[:5], options["unique_slots"]))

    def watched_gather(*args: object, **options: object) -> object:
        read.append(gather_kv(*args, **options))
        return read[-1]

    monkeypatch.setattr(kvjax_torch, "reshape_and_cache_flash", watched_write)
    monkeypatch.setattr(kvjax_torch, "gather_kv", watched_gather)
    DRIVER["main"](["--from-torch", "--num-tokens", "33", "--num-kv-heads", "2"])
    assert len(capsys.readouterr().out.splitlines()) == KINDS
    assert [is_unique for _, is_unique in written] == [False, True] * KINDS
    for (*_, slots), is_unique in written:
        stored = slots[(slots >= 0) & (slots < 48)]
        assert (len(stored.unique()) == len(stored)) == is_unique
    for tensor in (tensor for tensors, _ in written for tensor in tensors):
        assert tensor._base.storage_offset() * tensor.element_size() >= DRIVER["_OFFSET"] > 0
    rng = np.random.default_rng(0)
    slots = rng.permutation(48)[:33]
    row = torch.from_numpy(rng.standard_normal((33, 2, 128), np.float32))[0]  # the first token has its slot alone
    assert len(read) == 2 * KINDS
    for keys, _ in read:
        got = keys.float().flatten(0, 1)[slots[0]]
        assert torch.nn.functional.cosine_similarity(got.flatten(), row.flatten(), dim=0) > 0.98


def test_it_attends_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch):
    """To a whole sequence and to a part of it, with a window and without, in every dtype that kernels serve."""
    kvjax_torch = pytest.importorskip("kvjax_torch")
    attend, attended = kvjax_torch.paged_attention, []

    def watched_attend(*args: object, **options: object) -> object:
        attended.append((args[4].tolist(), args[5], options["sliding_window"]))
        return attend(*args, **options)

    monkeypatch.setattr(kvjax_torch, "paged_attention", watched_attend)
    arguments = ["--from-torch", "--attention", "--num-tokens", "20", "--num-kv-heads", "1", "--dtype"]
    DRIVER["main"]([*arguments, "nvfp4", "int8_per_token_head"])
    assert attended == [
        ([32, 19], dtype, window)
        for dtype, calls in (("nvfp4", 2 * 2 * 2), ("int8_per_token_head", 2 * 2))  # layouts, and those of scales
        for _ in range(calls)
        for window in (None, 20)
    ]


PROMPT_CALLS = {"bfloat16": (False, False), "fp8_e4m3": (False, True) * 2, "nvfp4": (False, True) * 2}
"""Of a storage dtype, whether each call of prompts has products in fp8."""


@pytest.mark.parametrize("dtype", PROMPT_CALLS)
def test_prompts_have_products_in_fp8_where_these_serve_the_dtype(dtype: str, monkeypatch: pytest.MonkeyPatch):
    """From JAX, whose kernels take minutes to be interpreted and are not run, and from torch, on the CPU."""
    kvjax_torch = pytest.importorskip("kvjax_torch")
    attend, from_jax, from_torch = kvjax_torch.ragged_paged_attention, [], []

    def in_jax(*args: object, **options: object) -> None:
        assert options["implementation"] == "mosaic"
        from_jax.append((args[-1].tolist(), options.get("query_quantization", False)))

    def in_torch(*args: object, **options: object) -> object:
        from_torch.append((args[5].tolist(), options.get("query_quantization", False)))
        out, lse = attend(*args, **options)
        assert out.isfinite().all()
        return out, lse

    monkeypatch.setattr(kvjax_torch, "ragged_paged_attention", in_torch)
    for name in ("_write", "_gather"):
        monkeypatch.setitem(DRIVER["run"].__globals__, name, lambda *_, **__: None)
    monkeypatch.setitem(DRIVER["_ATTENTION"], "ragged_paged_attention", in_jax)
    arguments = ["--prompts", "--num-tokens", "130", "--num-kv-heads", "1", "--dtype", dtype, "--layouts", "NHD"]
    DRIVER["main"](arguments)
    DRIVER["main"]([*arguments, "--from-torch"])
    num_kinds = len([spec for spec, _ in DRIVER["kinds"]([KVCacheDType(dtype)], 1, 128) if spec.layout.value == "NHD"])
    assert from_jax == from_torch == [([0, 70, 105], in_fp8) for in_fp8 in PROMPT_CALLS[dtype]] * 2 * num_kinds


def test_steps_with_an_exact_window_write_its_ring(monkeypatch: pytest.MonkeyPatch):
    """A step of prompts, which is attended to over a copy, and one of sequences that decode."""
    kvjax_torch = pytest.importorskip("kvjax_torch")
    attend, steps = kvjax_torch.exact_window_attention, []

    def watched(*args: object, **options: object) -> object:
        window = args[8]
        before = window.key_cache.clone()
        out = attend(*args, **options)
        assert out.isfinite().all()
        steps.append((args[7].tolist(), bool((window.key_cache != before).any())))
        return out

    monkeypatch.setattr(kvjax_torch, "exact_window_attention", watched)
    arguments = ["--windows", "--num-tokens", "130", "--num-kv-heads", "1", "--dtype", "fp8_e5m2", "--layouts", "NHD"]
    DRIVER["main"]([*arguments, "--from-torch"])
    assert steps == [([0, 70, 105], True), ([0, 1, 2], True)] * 2 * 2  # kinds of scales, and of slots


def test_in_jax_steps_with_an_exact_window_are_those_of_a_cache_that_is_written(monkeypatch: pytest.MonkeyPatch):
    """In XLA: interpreted kernels take minutes."""
    run, outs = DRIVER["run"].__globals__, []

    def in_xla(name: str) -> None:
        operation = run[name]

        def watched(*args: object, **options: object) -> object:
            outs.append(operation(*args, **options | {"implementation": "xla"}))
            return outs[-1]

        monkeypatch.setitem(run, name, watched)

    for name in ("_write", "_gather", "_attend_step"):
        in_xla(name)
    DRIVER["main"](["--windows", "--num-tokens", "20", "--num-kv-heads", "1", "--dtype", "nvfp4", "--layouts", "HND"])
    steps = [out[0] for out in outs if isinstance(out, tuple) and len(out) == 3]
    assert [len(step) for step in steps] == [32 + 19, 2] * 2 * 2  # orders of scales, and kinds of slots
    assert all(np.isfinite(np.float32(step)).all() for step in steps)


def test_dense_keys_and_values_are_attended_to(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Rows of no sequence too; from JAX in XLA, as interpreted kernels take minutes."""
    pytest.importorskip("kvjax_torch")
    run, outs = DRIVER["run_dense"].__globals__, []
    attend = run["_attend_dense"]

    def in_xla(*args: object, **options: object) -> object:
        assert options["implementation"] == "mosaic"
        outs.append(attend(*args, **options | {"implementation": "xla"}))
        return outs[-1]

    monkeypatch.setitem(run, "_attend_dense", in_xla)
    for options in ([], ["--from-torch"]):
        DRIVER["main"](["--dense", "--num-tokens", "33", "--num-kv-heads", "1", *options])
        said = capsys.readouterr().out.splitlines()
        assert len(said) == len(set(said)) == 6
    assert [out.shape for out, _ in outs] == [(108, 4, size) for size in (128, 128, 128, 128, 48, 48)]
    assert all(np.isfinite(np.float32(out)).all() for out, _ in outs)


LATENTS = [(dtype, rope) for dtype in MLA_KV_CACHE_DTYPES for rope in (64, 32)]


def test_latents_of_every_dtype_are_attended_to_by_both_kernels():
    """On Hopper, of what each serves; that for few rows serves 16 bits on other GPUs alone."""
    every = list(DRIVER["latent_kinds"](MLA_KV_CACHE_DTYPES))
    assert [(spec.dtype, spec.qk_rope_head_dim) for spec in every] == LATENTS
    kinds = set()
    for spec in every:
        for heads in DRIVER["_heads"](spec):
            problem = plain_problem(spec, BatchSizes(num_seqs=1, q_len=1, group=heads, max_blocks=1))
            kinds.add((spec.dtype, type(mla.choose(problem, Target())).__name__))
    of_16_bits = {KVCacheDType.FLOAT16, KVCacheDType.BFLOAT16}
    quantized = set(MLA_KV_CACHE_DTYPES) - of_16_bits - {KVCacheDType.FLOAT32}
    assert kinds == {(dtype, "MLAConfig") for dtype in of_16_bits | quantized} | {
        (dtype, "DecodeConfig") for dtype in quantized
    }


@pytest.mark.full
def test_each_operation_on_latents_that_ran_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Writes, rotation and gathers are interpreted; attention, which takes minutes, is not run."""
    run_latents, calls = DRIVER["run_latents"].__globals__, []

    def watch(name: str, describe: Callable[..., object], runs: bool = True) -> None:
        operation = run_latents[name]

        def watched(*args: object, **options: object) -> object:
            assert options["implementation"] == "mosaic"
            calls.append(describe(args, options))
            return operation(*args, **options) if runs else ()

        monkeypatch.setitem(run_latents, name, watched)

    watch("_concat", lambda _, options: options["unique_slots"])
    watch("_rope", lambda _, options: (options["unique_slots"], options["is_neox"]))
    watch("_gather_ranges", lambda _, options: options["num_tokens"])
    watch("_attend_latents", lambda args, options: (args[0].shape[2], options["sliding_window"]), runs=False)
    with interpret_mode():
        DRIVER["main"](["--latents", "--attention", "--dtype", "fp8_ds_mla", "--num-tokens", "9"])
    assert calls == [
        call
        for rope in (64, 32)
        for is_unique in (False, True)
        for call in (
            *(is_unique, (is_unique, is_unique), 15 + 11 + 3),
            *((heads, window) for heads in (16, 64) for window in (None, 20)),
        )
    ]
    said = capsys.readouterr().out.splitlines()
    assert said == [f"wrote and gathered latents of fp8_ds_mla, {rope} rope" for rope in (64, 32)]


@pytest.mark.parametrize("dtypes", [["nvfp4"], pytest.param([], marks=pytest.mark.full)], ids=["one", "all"])
def test_from_torch_it_runs_what_torch_calls_of_latents(
    dtypes: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    torch, kvjax_torch = pytest.importorskip("torch"), pytest.importorskip("kvjax_torch")
    calls: dict[str, list[tuple[object, ...]]] = {}

    def watch(name: str) -> None:
        operation = getattr(kvjax_torch, name)

        def watched(*args: object, **options: object) -> object:
            result = operation(*args, **options)
            calls.setdefault(name, []).append((args, options, result))
            return result

        monkeypatch.setattr(kvjax_torch, name, watched)

    writes, read = ("concat_and_cache_mla", "concat_and_cache_mla_rope_fused"), "gather_and_maybe_dequant_cache"
    attention = "mla_paged_attention", "mla_ragged_paged_attention"
    for name in (*writes, read, *attention):
        watch(name)
    DRIVER["main"](["--latents", "--from-torch", "--attention", "--num-tokens", "20", "--dtype", *dtypes])
    kinds = [kind for kind in LATENTS if not dtypes or kind[0].value in dtypes]
    assert len(capsys.readouterr().out.splitlines()) == len(kinds)
    for name in writes:
        assert [options["unique_slots"] for _, options, _ in calls[name]] == [False, True] * len(kinds)
    for (*_, slots, _, _, _), options, _ in calls[writes[1]]:
        stored = slots[(slots >= 0) & (slots < 32)]
        assert (len(stored.unique()) == len(stored)) == options["unique_slots"]
    for args, _, _ in calls[writes[0]]:
        assert all(x._base.storage_offset() * x.element_size() >= DRIVER["_OFFSET"] for x in args[:4])
    assert len(calls[read]) == 2 * len(kinds)
    for (cache, dense, table, bounds, *_), _, _ in calls[read]:
        assert torch.isfinite(dense).all()
        assert not dense[int(bounds[-1]) :].any(), "rows of no sequence"
        assert dense[: int(bounds[-1])].any()
        assert int(table.max()) == len(cache), "a block that is none"
    specs = [
        spec for spec in DRIVER["latent_kinds"](MLA_KV_CACHE_DTYPES) if (spec.dtype, spec.qk_rope_head_dim) in kinds
    ]
    expected = [
        (heads, window) for spec in specs for _ in (0, 1) for heads in DRIVER["_heads"](spec) for window in (None, 20)
    ]
    for name in attention:
        assert [(args[0].shape[-2], options["sliding_window"]) for args, options, _ in calls[name]] == expected
        assert all(torch.isfinite(out).all() for _, _, (out, _) in calls[name])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--latents", "--dtype", "fp8_e5m2"], "--dtype: got fp8_e5m2, expected some of float32, "),
        (["--dtype", "fp8_ds_mla", "nvfp4"], "--dtype: got fp8_ds_mla, expected some of float32, "),
        (["--dense", "--dtype", "nvfp4"], "--dense excludes --latents and --dtype"),
        (["--latents", "--prompts"], "--latents excludes --prompts and --windows"),
    ],
)
def test_arguments_that_exclude_each_other_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        DRIVER["main"](arguments)
    assert message in capsys.readouterr().err


def test_what_is_written_before_a_tensor_is_noticed(monkeypatch: pytest.MonkeyPatch):
    torch, kvjax_torch = pytest.importorskip("torch"), pytest.importorskip("kvjax_torch")

    def write_before(key: torch.Tensor, *_: object, **__: object) -> None:
        torch.empty(0, dtype=torch.uint8).set_(key.untyped_storage())[DRIVER["_OFFSET"] - 1] = 0

    monkeypatch.setattr(kvjax_torch, "reshape_and_cache_flash", write_before)
    with pytest.raises(AssertionError, match="before the start of a tensor"):
        DRIVER["main"](["--from-torch", "--num-tokens", "9", "--dtype", "bfloat16"])


def test_where_no_kernel_can_run_it_fails():
    with jax.default_device(jax.devices("cpu")[0]), pytest.raises(UnsupportedError, match="this runs on cpu"):
        DRIVER["main"](["--num-tokens", "9"])
