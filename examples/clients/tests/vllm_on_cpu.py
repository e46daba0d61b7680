"""What vLLM's wheel for GPUs lacks to run on a CPU: operations of its CPU build, in torch.

vLLM calls `patch` as a plugin, in each of its processes; `entry_point` writes the metadata that names it.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import torch

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "JAX_PLATFORMS": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def entry_point(folder: pathlib.Path) -> None:
    """Makes `patch` a plugin of vLLM for processes that have `folder` on their path."""
    info = folder / "vllm_on_cpu-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-on-cpu\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\non_cpu = {__name__}:patch\n")


def patch() -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def own_backend(cls: Any, selected: Any, *args: Any, **kwargs: Any) -> str:
        return AttentionBackendEnum["KVJAX"].get_path() if selected is None else selected.get_path()

    check_config = CpuPlatform.check_and_update_config

    def keep_scheduling(cls: Any, config: Any) -> None:
        scheduler, cache = config.scheduler_config, config.cache_config
        kept = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        check_config(config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = kept

    CpuPlatform.get_attn_backend_cls = classmethod(own_backend)  # the platform allows only its own
    # Its own MLA backend serves neither chunked prompts nor prefix caching.
    CpuPlatform.check_and_update_config = classmethod(keep_scheduling)
    CpuPlatform.import_kernels = classmethod(lambda cls: None)
    for signature, implementation in (
        ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
        ("greedy_argmax(Tensor x) -> Tensor", lambda x: x.argmax(-1)),
        (
            "compute_slot_mapping_kernel_impl(Tensor bounds, Tensor positions, Tensor table, Tensor(a!) slots,"
            " int size) -> ()",
            _slot_mapping,
        ),
        (
            "rejection_greedy_sample_kernel_impl(Tensor(a!) accepted, Tensor bounds, Tensor drafts, Tensor likeliest,"
            " Tensor bonus, Tensor? is_greedy, int most) -> ()",
            _accept_greedily,
        ),
    ):
        _library.define(signature)
        _library.impl(signature.split("(")[0], implementation, "CompositeExplicitAutograd")


_library = torch.library.Library("_C", "FRAGMENT")


def _slot_mapping(
    bounds: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, size: int
) -> None:
    num_tokens = int(bounds[-1])
    seq = torch.searchsorted(bounds[1:].long().contiguous(), torch.arange(num_tokens), right=True)
    at = positions[:num_tokens].long()
    slots[:num_tokens] = table[seq, at // size].long() * size + at % size


def _accept_greedily(
    accepted: torch.Tensor,
    bounds: torch.Tensor,
    drafts: torch.Tensor,
    likeliest: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    most: int,
) -> None:
    """Of each sequence the likeliest tokens until a draft is another one, and one more if none is."""
    first = 0
    for seq, end in enumerate(bounds.tolist()):
        own = likeliest[first:end]
        agree = (own == drafts[first:end]).long().cumprod(0).sum().item()
        of_seq = torch.cat([own, bonus.flatten()[seq : seq + 1]])[: agree + 1]
        accepted[seq, : len(of_seq)] = of_seq
        first = end


class DenseMLP(torch.nn.Module):
    """In place of gpt-oss's experts, for whose kernels on a CPU vLLM needs its CPU build."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Linear(hidden_size, hidden_size) for _ in ("up", "down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.up(x)))


def environment(*folders: pathlib.Path, several_processes: bool) -> dict[str, str]:
    """The environment of a process that runs vLLM on a CPU, with `folders` on its path."""
    own = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "VLLM_ENABLE_V1_MULTIPROCESSING": "01"[several_processes]}
    return {**os.environ, **ENVIRONMENT, **own}
