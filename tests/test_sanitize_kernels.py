"""The driver for sanitizers and profilers runs every kind of kernel, and the kernels themselves."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from support.interpret_mode import interpret_mode

from kvjax import STORED_KV_CACHE_DTYPES, UnsupportedError

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
def test_it_says_what_it_ran(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
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
