"""Calls of `kvjax_torch.ragged_paged_attention`: their arguments, and models of the kernels that a GPU runs in them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import kvjax_torch
from kvjax import KVCache, kernels
from kvjax_torch.arguments.plan import RaggedPlan
from kvjax_torch.calls import attending, choosing
from kvjax_torch.cuda import ragged as on_gpu
from kvjax_torch.cuda import ragged_step, reads
from kvjax_torch.cuda.ragged_step import PackedRows, RaggedStep, Schedule
from kvjax_torch.eager import dense, host
from kvjax_torch.launch import running
from support import ragged_suite
from support.attention_suite import Attend, Case
from support.helpers import page_bytes
from support.torch_helpers import from_numpy, to_numpy, torch_cache


def given(
    device: str,
    query: np.ndarray,
    cache: KVCache,
    table: np.ndarray,
    lens: np.ndarray,
    bounds: np.ndarray,
    *,
    form: str = "one_allocation",
    **options: Any,
) -> dict[str, Any]:
    """The arguments of a call, strided as callers have them: a slice of a projection, and of a larger table."""
    spec = cache.spec
    pages = torch_cache(page_bytes(cache), spec, form=form, device=device)
    options["v_scale_layout"] = spec.v_scale_layout.value
    options |= {name: from_numpy(np.asarray(options[name])).to(device) for name in ("k_scale", "v_scale")}
    for name in ("sinks", "tree_mask"):
        if options.get(name) is not None:
            options[name] = from_numpy(options[name]).to(device)
    return options | {
        "query": from_numpy(np.concatenate([query, query], axis=-2)).to(device)[..., : query.shape[-2], :],
        "key_cache": pages.key,
        "value_cache": pages.value,
        "block_table": from_numpy(np.pad(table, ((0, 0), (1, 2)), constant_values=1)).to(device)[:, 1:-2],
        "seq_lens": from_numpy(lens.astype(np.int64)).to(device),
        "cu_q_lens": from_numpy(bounds.astype(np.int64)).to(device),
        "kv_cache_dtype": spec.dtype.value,
        "return_lse": True,
    }


def attend_on(device: str, *, is_rounded: bool = False, **how: Any) -> Attend:
    """What attends; `is_rounded`: queries of quantized caches are rounded to float16."""

    def run(query: np.ndarray, *args: Any, **options: Any) -> Any:
        out, lse = kvjax_torch.ragged_paged_attention(**given(device, query, *args, **options, **how))
        return to_numpy(out, query.dtype), to_numpy(lse, np.dtype(np.float32))

    run.by_kernels = is_rounded  # to ragged_suite.slack
    return run


def schedule_model(plan: RaggedPlan, step: RaggedStep, kernel: Any, num_zeros: int) -> Schedule:
    """`ragged_step.schedule` on the host; what it leaves to others is NaN."""
    most, (num_rows, *row) = plan.attention.q_len, step.query.shape
    decoding = min(most, plan.max_q_len)
    bounds = step.cu_q_lens.clamp(0, num_rows).tolist()
    step.out.fill_(torch.nan)
    step.lse.fill_(torch.nan)
    rows = step.query.new_zeros(len(bounds) - 1, most, *row)
    places, lens = torch.full(rows.shape[:2], -1, dtype=torch.int32), torch.zeros(rows.shape[:2], dtype=torch.int32)
    sees, found = torch.zeros(num_rows, dtype=torch.bool), 0
    for seq, (start, end) in enumerate(itertools.pairwise(bounds)):
        q_len = end - start
        is_prompt = most < q_len <= plan.max_q_len and found < plan.max_prompts
        found += is_prompt
        sees[start:end] = q_len <= decoding or is_prompt
        for row in range(start, end) if q_len <= decoding else ():
            place = most - (end - row)
            rows[seq, place], places[seq, place] = step.query[row], row
            lens[seq, place] = (step.tensors.seq_lens[seq] - (end - 1 - row)).clamp(0, 2**31 - 1)
    step.out[~sees] = 0
    step.lse[~sees] = -torch.inf if step.sinks is None else step.sinks
    lens = lens.flatten() if ragged_step.are_alone(plan.attention) else lens[:, -1] if most else None
    none = torch.zeros(0, dtype=torch.int32)
    return Schedule(none, none, PackedRows(rows, places.flatten(), lens) if most else None)


def place_model(step: RaggedStep, kernel: Any, places: torch.Tensor, rows: torch.Tensor, lses: torch.Tensor) -> None:
    """`ragged_step.place` on the host."""
    assert places.dtype is torch.int32
    assert all(x.is_contiguous() for x in (places, rows, lses))
    is_any = places >= 0
    assert len({*places[is_any].tolist()}) == int(is_any.sum())
    step.out[places[is_any].long()] = rows[is_any]
    step.lse[places[is_any].long()] = lses[is_any]


def product_model(a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """`dense.product`, on the host also of 16 bits."""
    assert a.dtype == b.dtype
    assert a.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return factor * (a.float() @ b.float())


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs calls with CPU tensors as those of a GPU, with the host in place of kernels."""
    monkeypatch.setattr(host, "attend_ragged", on_gpu.attend)
    monkeypatch.setattr(reads, "attend", host.attend)
    monkeypatch.setattr(reads, "gather", host.gather)
    monkeypatch.setattr(running, "compile_once", lambda *_: None)
    monkeypatch.setattr(reads, "parts_of", lambda *_: ())
    monkeypatch.setattr(ragged_step, "schedule", schedule_model)
    monkeypatch.setattr(ragged_step, "place", place_model)
    monkeypatch.setattr(choosing, "target_of", lambda _: kernels.Target(compute_capability=(10, 0)))
    monkeypatch.setattr(attending, "route_of", attending.route_of.__wrapped__)
    monkeypatch.setattr(dense, "product", product_model)


def on_cuda(case: Case, **options: Any) -> dict[str, Any]:
    """The arguments of a call, with three rows of no sequence; `options` are those of `suite.build`."""
    problem = ragged_suite.build(case, **options)
    query, cache, table, lens = problem.args
    rows = np.concatenate([*query, np.full((3, *query[0].shape[1:]), np.nan, query[0].dtype)])
    bounds = np.cumsum([0, *map(len, query)], dtype=np.int32)
    return given("cuda", rows, cache, table, lens, bounds, **problem.options)
