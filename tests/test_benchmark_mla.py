"""The benchmarks of latents: their programs run, and which targets a row of attention has depends on the device."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest
from support.benchmark_checks import assert_measures, assert_verdicts, timed

from benchmarks import bars
from benchmarks.latents import MLA_ROWS, MLARow
from benchmarks.measurement import Measurement
from benchmarks.peers.attends_mla import MLAJob
from benchmarks.shapes import TIMED_DTYPES
from kvjax import KVCacheDType

BFLOAT16, FP8, NVFP4 = TIMED_DTYPES
FP8_DS_MLA = KVCacheDType.FP8_DS_MLA
DTYPES = [dtype.value for dtype in (BFLOAT16, FP8, FP8_DS_MLA, NVFP4)]
EXPECTED = {
    "mla_attention": [("mla attention", ["kvjax"], DTYPES), ("mla prompts", ["kvjax", "kvjax_torch"], [None])],
    "mla_cache": [(f"mla {what}", ["kvjax", "kvjax_torch"], DTYPES) for what in ("write", "gather")],
}


@pytest.mark.full
@pytest.mark.parametrize("program", EXPECTED)
def test_programs_measure_what_they_say(tmp_path, program):
    assert_measures(tmp_path, program, EXPECTED[program])


def test_verdicts_compare_attention_over_latents_with_targets(monkeypatch):
    def attention(row, dtype, us, peer="kvjax") -> Measurement:
        return timed("mla attention", MLAJob(MLARow.of(row), dtype), us, peer)

    def on(device) -> None:
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=f"NVIDIA {device}")])

    on("H200")
    assert_verdicts(
        (attention("16x1-64x8192", BFLOAT16, 152.0, "FlashInfer FA3"), []),
        (attention("16x1-64x8192", BFLOAT16, 162.0), ["1.07 x FlashInfer FA3 bf16: falls short"]),
        (attention("16x1-64x8192", FP8, 90.0), []),
        (attention("16x1-64x8192", FP8_DS_MLA, 99.0), ["99.00 us: pass"]),
        (attention("64x1-64x8192", NVFP4, 151.0), ["151.00 us: falls short"]),
        (attention("16x4-64x4096", BFLOAT16, 100.0), ["-"]),  # without FlashInfer
        (attention("16x4-64x4096", NVFP4, 120.0), ["1.20 x bf16: pass"]),
        (attention("8x1-64x8192", BFLOAT16, 150.0), []),  # chosen by a flag
    )
    on("H100 80GB HBM3")
    assert_verdicts(
        (attention("16x1-64x8192", BFLOAT16, 220.0, "FlashInfer FA3"), []),
        (attention("16x1-64x8192", NVFP4, 110.0), ["0.50 x FlashInfer FA3 bf16: pass"]),
        (attention("16x1-64x8192", FP8_DS_MLA, 150.0), []),
    )
    held = {name for bar in bars.BARS if bar.operation == "mla attention" for name in bar.where["case"]}
    assert held == {row.name for row in MLA_ROWS}
