"""sglang-jax's engine over pages, in a process of its own, for it takes the process's signals.

Reads what to run from stdin and writes what that gave as the last line of stdout, both as JSON. After `time_limit`
seconds it ends, and says on stderr where each thread was.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from typing import Any

import jax
import numpy as np
from sgl_jax.srt.entrypoints.engine import Engine

from examples.clients import sglang_jax

OPTIONS = {
    "context_length": 256,
    "disable_precompile": True,
    "dtype": "float32",
    "enable_single_process": True,
    "log_level": "error",
    "max_running_requests": 4,
    "max_total_tokens": 1024,
    "skip_tokenizer_init": True,
}


class Watched:
    """A runner's steps: the new prompt tokens of each, and whether pages stayed where they were."""

    def __init__(self, runner: Any) -> None:
        self.new_tokens: list[list[int]] = []
        self.in_place = True
        self._runner, self._forward = runner, runner._forward
        runner._forward = self

    def __call__(self, batch: Any, *others: Any) -> Any:
        if batch.forward_mode.is_extend():
            self.new_tokens.append(np.asarray(batch.extend_seq_lens).tolist())
        where = self._pointers()
        found = self._forward(batch, *others)
        self.in_place &= self._pointers() == where
        return found

    def _pointers(self) -> list[int]:
        leaves = jax.tree.leaves(self._runner.token_to_kv_pool.kv_buffer)
        return [shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards]


def logprobs(top: list[Any]) -> list[list[float]]:
    """`[positions, vocabulary]`, of the tokens after the first, from the log-probabilities of all."""
    rows = np.zeros((len(top) - 1, len(top[-1])))
    for row, tokens in zip(rows, top[1:], strict=True):
        for logprob, token, *_ in tokens:
            row[token] = logprob
    return rows.tolist()


def exit_status() -> int:
    """Of a process that fails, to a caller that waits for it only then, as XLA may for ptxas."""
    child = subprocess.Popen(["false"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # and leaves the status
    return child.wait()


def main() -> None:
    asked = json.load(sys.stdin)
    faulthandler.dump_traceback_later(asked["time_limit"], exit=True)
    sglang_jax.use_pages(asked["kv_cache_dtype"], asked["scales"])
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    engine = Engine(model_path=asked["folder"], device=device, **OPTIONS | asked["options"])
    runner = engine.scheduler_info["scheduler"].tp_worker.worker.model_runner
    watched = Watched(runner)
    result: dict[str, Any] = {"tokens": [], "num_cached": [], "bytes_per_token": runner._compute_cell_size()}
    sampling = {"temperature": 0, "max_new_tokens": asked["num_new"], "ignore_eos": True}
    for prompts in asked["rounds"]:
        found = engine.generate(input_ids=prompts, sampling_params=sampling, **asked["generate"])
        result["tokens"].append([each["output_ids"] for each in found])
        result["num_cached"].append([each["meta_info"]["cached_tokens"] for each in found])
        if asked["generate"]:
            result["logprobs"] = [logprobs(each["meta_info"]["input_top_logprobs"]) for each in found]
    caches = runner.token_to_kv_pool.kv_buffer
    result["scales"] = [[float(x) for x in (cache.k_scale, cache.v_scale) if x is not None] for cache in caches]
    result |= {"new_tokens": watched.new_tokens, "in_place": watched.in_place, "exit_status": exit_status()}
    print(json.dumps(result), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
