"""vLLM's engine over kvjax's pages on a CPU, in a process of its own.

Reads what to run from stdin as JSON, and writes what that gave in a line of stdout: RESULT and JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from examples.clients.tests import vllm_on_cpu

OPTIONS: dict[str, Any] = {
    "attention_backend": "KVJAX",
    "block_size": 16,
    "compilation_config": {"mode": 0, "custom_ops": ["none"], "cudagraph_mode": "NONE"},
    "dtype": "float32",
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
}


def main() -> None:
    job = json.load(sys.stdin)
    if job["model_type"] == "gpt_oss":
        from vllm.model_executor.models import gpt_oss

        class Dense(vllm_on_cpu.DenseMLP):
            def __init__(self, vllm_config: Any, layer_idx: int, prefix: str) -> None:
                super().__init__(vllm_config.model_config.hf_config.hidden_size)

        gpt_oss.TransformerBlock.mlp_cls = Dense
    from vllm import LLM, SamplingParams

    kinds = _kinds_of_steps() if job["kinds"] else set()
    engine = LLM(job["model"], **OPTIONS | job["options"])
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    how = SamplingParams(temperature=0, max_tokens=job["new_tokens"], logprobs=1, ignore_eos=True, detokenize=False)
    results = engine.generate(prompts, how, use_tqdm=False)
    found = []
    for each in results:
        [made] = each.outputs
        logprobs = [of[token].logprob for of, token in zip(made.logprobs, made.token_ids, strict=True)]
        found.append({"tokens": [*made.token_ids], "logprobs": logprobs, "cached": each.num_cached_tokens})
    metrics = [] if job["options"].get("disable_log_stats", True) else engine.get_metrics()
    counts = {each.name.removeprefix("vllm:"): each.value for each in metrics if hasattr(each, "value")}
    import kvjax_vllm

    facts = {"counts": counts, "kinds": sorted(kinds), "kvjax_vllm": kvjax_vllm.__file__}
    print("\nRESULT " + json.dumps({"sequences": found, **facts}))


def _kinds_of_steps() -> set[str]:
    """The kinds of steps that the backends will have divided batches into, in this process."""
    from kvjax_vllm.mla import KvjaxMLAMetadataBuilder
    from kvjax_vllm.step import KvjaxMetadataBuilder

    kinds: set[str] = set()

    def note(builder: Any, parts: Callable[[Any], tuple[Any, Any]]) -> None:
        build = builder.build

        def noted(*args: Any, **kwargs: Any) -> Any:
            step = build(*args, **kwargs)
            decodes, prompts = parts(step)
            if decodes is not None:
                kinds.add("unequal drafts" if not decodes.q_len else "drafts" if decodes.q_len > 1 else "decodes")
            if prompts is not None:
                kinds.add("prompts" if decodes is None else "prompts beside decodes")
                if getattr(prompts, "chunked_context", None) is not None:
                    kinds.add("prompts with a context")
            return step

        builder.build = noted

    note(KvjaxMetadataBuilder, lambda step: (step.decodes, step.prompts))
    note(KvjaxMLAMetadataBuilder, lambda step: (step.decode, step.prefill))
    return kinds


if __name__ == "__main__":
    main()
