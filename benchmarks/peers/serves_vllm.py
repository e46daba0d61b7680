"""vLLM's engine in a process of its own: reads a job from stdin, and prints what it found as the last line, in JSON.

A job names the model's sizes, vLLM's options, and what to run: a function of `JOBS` and its arguments. Weights are
random; they are written once for each model, or vLLM makes them up where only times matter (`load_format="dummy"`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
NUM_DRAFTS = 3


class Drafts:
    """Proposes, for every sequence, the tokens after the last occurrence of its newest token; without numba."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Has no model."""

    def propose(self, sampled: list[list[int]], num_tokens: Any, tokens: Any, **kwargs: Any) -> list[list[int]]:
        return [self._after(tokens[row, : num_tokens[row]]) if new else [] for row, new in enumerate(sampled)]

    def _after(self, known: Any) -> list[int]:
        found = (known[:-1] == known[-1]).nonzero()[0]
        after = known[found[-1] + 1 :][:NUM_DRAFTS].tolist() if len(found) else []
        return [*after, *[int(known[-1])] * (NUM_DRAFTS - len(after))]


class Engine:
    """An engine and its clock."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.imported = time.perf_counter() - STARTED
        self.llm = LLM(model, skip_tokenizer_init=True, **options)
        self.engine = self.llm.llm_engine
        self.ready = time.perf_counter() - STARTED
        self._names = iter(range(10**9))

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the cache."""
        cache = self.engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    def add(self, prompt: list[int], **how: Any) -> str:
        from vllm import SamplingParams

        params = SamplingParams(**{"temperature": 0, "ignore_eos": True, "detokenize": False} | how)
        name = str(next(self._names))
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name  # the engine's own name of a request, which it returns, is not that of its outputs

    def steps(self) -> Iterator[tuple[float, list[Any]]]:
        """Runs to the end: the seconds of each step and the requests that it went on with."""
        while self.engine.has_unfinished_requests():
            before = time.perf_counter()
            found = self.engine.step()
            yield time.perf_counter() - before, found

    def run(self, prompts: list[list[int]], **how: Any) -> list[Any]:
        """Runs requests together; the results in their order."""
        names = [self.add(prompt, **how) for prompt in prompts]
        done: dict[str, Any] = {}
        for _, found in self.steps():
            done |= {each.request_id: each for each in found if each.finished}
        return [done[name] for name in names]

    def count(self, metric: str) -> int:
        found = [each.value for each in self.engine.get_metrics() if each.name == f"vllm:{metric}"]
        return int(sum(found))


def tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    return [(seed * 7919 + at * 104729 + at * at % 1013) % (vocabulary - 10) + 5 for at in range(count)]


def start(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Only starts, and serves one token."""
    engine.run([tokens(0, 8, job["vocabulary"])], max_tokens=1)
    return {}


def times(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Times prompts alone, then steps in which every sequence decodes. 0 sequences are as many as fit."""
    num_seqs, prompt_len = job["num_seqs"] or engine.kv_tokens // job["prompt_len"], job["prompt_len"]
    # Until the last prompt is read, others already decode.
    ahead = 4 + round(1.1 * num_seqs * prompt_len / job["options"]["max_num_batched_tokens"])
    num_new = (1 + (NUM_DRAFTS if job["drafts"] else 0)) * (ahead + job["new_tokens"])
    if not job["num_seqs"]:
        num_seqs = engine.kv_tokens // (-(-(prompt_len + num_new) // 16) * 16)
    prompts = [tokens(seq, prompt_len, job["vocabulary"]) for seq in range(num_seqs)]
    engine.run(prompts[:2], max_tokens=4)  # compiles
    found: dict[str, Any] = {"num_seqs": num_seqs}
    if job["num_seqs"]:
        before = time.perf_counter()
        engine.run(prompts, max_tokens=1)
        found["prompt_tokens_a_second"] = num_seqs * prompt_len / (time.perf_counter() - before)
    drafted = engine.count("spec_decode_num_drafts"), engine.count("spec_decode_num_accepted_tokens")
    for prompt in prompts:
        engine.add(prompt, max_tokens=num_new)
    made: dict[str, int] = {}
    samples, generated = [], []
    for seconds, outputs in engine.steps():
        counts = {each.request_id: len(each.outputs[0].token_ids) for each in outputs}
        if any(each.finished for each in outputs):
            break
        if len(made) == num_seqs and outputs:
            samples.append(seconds)
            generated.append(sum(count - made[name] for name, count in counts.items()))
        made |= counts
    engine.engine.abort_request([*made])
    if not samples:
        raise RuntimeError(f"no step with all {num_seqs} sequences: prompts took more than {ahead} steps")
    found |= {"samples": samples, "tokens_a_second": sum(generated) / sum(samples)}
    if job["drafts"]:
        drafts = engine.count("spec_decode_num_drafts") - drafted[0]
        accepted = engine.count("spec_decode_num_accepted_tokens") - drafted[1]
        found["accepted"] = accepted / max(drafts, 1)
    return found


def logprobs(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Teacher-forced log-probabilities: of prompts in one pass, and of single tokens behind a cached prefix."""
    prompts = [tokens(seq, length, job["vocabulary"]) for seq, length in enumerate(job["lengths"])]
    whole = engine.run(prompts, max_tokens=1, prompt_logprobs=1)
    of_prompts = [
        [(token, at[token].logprob) for token, at in zip(prompt[1:], each.prompt_logprobs[1:], strict=True)]
        for prompt, each in zip(prompts, whole, strict=True)
    ]
    # One token behind whole blocks, which are cached now, is a step of the decode kernel.
    cut = [prompt[: (len(prompt) - 1) // 16 * 16 + 1 - 16 * back] for prompt in prompts for back in range(4)]
    behind = engine.run(cut, max_tokens=1, logprobs=20)
    tops = [{token: each.logprob for token, each in one.outputs[0].logprobs[0].items()} for one in behind]
    return {"prompts": of_prompts, "tops": tops}


def generated(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """The tokens that prompts go on with."""
    prompts = [tokens(seq, length, job["vocabulary"]) for seq, length in enumerate(job["lengths"])]
    done = engine.run(prompts, max_tokens=job["new_tokens"])
    return {"tokens": [[*each.outputs[0].token_ids] for each in done]}


def requests(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Random requests with shared prefixes and aborts, then some of them one at a time; and what is left behind."""
    import random

    import torch

    rng = random.Random(job["seed"])
    shared = [tokens(1_000 + of, job["max_len"], job["vocabulary"]) for of in range(8)]
    waiting = []
    for number in range(job["requests"]):
        length = rng.randint(1, job["max_len"])
        own = tokens(number, length, job["vocabulary"])
        head = rng.randint(0, length) if rng.random() < 0.5 else 0
        waiting.append([*rng.choice(shared)[:head], *own[head:]])
    prompts: dict[str, list[int]] = {}
    done: dict[str, Any] = {}
    aborted: set[str] = set()
    first_memory = 0
    while waiting or engine.engine.has_unfinished_requests():
        for prompt in waiting[: rng.randint(0, 4)]:
            prompts[engine.add(prompt, max_tokens=rng.randint(1, 64), logprobs=1)] = waiting.pop(0)
        for each in engine.engine.step():
            if each.finished:
                done[each.request_id] = each
        running = [*prompts.keys() - done.keys() - aborted]
        if running and rng.random() < 0.02:
            aborted.add(gone := rng.choice(running))
            engine.engine.abort_request([gone])
        if len(done) == job["requests"] // 4:
            first_memory = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    served = [name for name in prompts if name in done and name not in aborted]
    chosen, errors = rng.sample(served, min(job["alone"], len(served))), []
    engine.engine.reset_prefix_cache()
    for name in chosen:
        made = [*done[name].outputs[0].token_ids]
        mine = [at[token].logprob for at, token in zip(done[name].outputs[0].logprobs, made, strict=True)]
        [alone] = engine.run([[*prompts[name], *made]], max_tokens=1, prompt_logprobs=1)
        theirs = [at[token].logprob for at, token in zip(alone.prompt_logprobs[-len(made) :], made, strict=True)]
        errors += [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    is_empty = engine.engine.reset_prefix_cache()  # refused while blocks are in use
    last_memory = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return {
        "ended": len(done.keys() | aborted),
        "aborted": len(aborted),
        "preempted": engine.count("num_preemptions"),
        "blocks_free": bool(is_empty),
        "memory_grew": last_memory - first_memory,
        "errors": errors,
    }


JOBS = {each.__name__: each for each in (start, times, logprobs, generated, requests)}


def write_model(folder: Path, config: dict[str, Any], *, with_weights: bool) -> None:
    """Writes a `config.json`, and random weights of normal distributions unless they are to be made up."""
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "config.json").exists():
        return
    if with_weights:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            model: Any = LlamaForCausalLM(LlamaConfig(**config))
        model.to(torch.bfloat16)
        model.save_pretrained(folder)
        del model
        return
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    job = json.load(sys.stdin)
    write_model(Path(job["model"]), job["config"], with_weights=job["options"].get("load_format") != "dummy")
    global STARTED
    STARTED = time.perf_counter()
    engine = Engine(job["model"], job["options"])
    found = {"ready": engine.ready, "imported": engine.imported, "kv_tokens": engine.kv_tokens}
    print("\n" + json.dumps(found | JOBS[job["run"]](engine, job)), flush=True)


if __name__ == "__main__":
    main()
