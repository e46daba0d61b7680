"""vLLM's engine in a process of its own: reads a job from stdin, and prints what it found as the last line, in JSON.

A job names the model's sizes, vLLM's options, and what to run: functions of `JOBS` and their arguments. Weights are
vLLM's dummy ones, or of normal distributions where results matter.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import zlib
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

    def fitting(self, seq_len: int) -> int:
        """Sequences that fit into the cache: vLLM keeps a block, and reserves tokens of a step ahead."""
        cache = self.engine.vllm_config.cache_config
        return (cache.num_gpu_blocks - 1) // -(-(seq_len + 1 + NUM_DRAFTS) // cache.block_size)

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

    def forget(self) -> bool:
        """Empties the cache of prefixes; False while blocks are in use."""
        return bool(self.engine.reset_prefix_cache())

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
        num_seqs = engine.fitting(prompt_len + num_new)
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
    of_prompts, tops, uncached = [], [], 0
    for first in range(0, len(prompts), job["at_once"]):
        lot = prompts[first : first + job["at_once"]]
        engine.forget()
        for prompt, each in zip(lot, engine.run(lot, max_tokens=1, prompt_logprobs=1), strict=True):
            known = zip(prompt[1:], each.prompt_logprobs[1:], strict=True)
            of_prompts.append([(token, at[token].logprob) for token, at in known])
        # One token behind whole blocks, which are cached now, is a step of the decode kernel.
        block = job["block_size"]
        cut = [prompt[: ((len(prompt) - 1) // block - back) * block + 1] for prompt in lot for back in range(4)]
        behind = engine.run(cut, max_tokens=1, logprobs=20)
        uncached += sum(each.num_cached_tokens != len(prompt) - 1 for prompt, each in zip(cut, behind, strict=True))
        tops += [{token: each.logprob for token, each in one.outputs[0].logprobs[0].items()} for one in behind]
    return {"prompts": of_prompts, "tops": tops, "uncached": uncached}


def generated(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """The tokens that prompts go on with, and the log-probabilities of the two likeliest at each."""
    prompts = [tokens(seq, length, job["vocabulary"]) for seq, length in enumerate(job["lengths"])]
    engine.forget()
    done = [each.outputs[0] for each in engine.run(prompts, max_tokens=job["new_tokens"], logprobs=2)]
    tops = [[{token: of.logprob for token, of in at.items()} for at in each.logprobs] for each in done]
    return {"tokens": [[*each.token_ids] for each in done], "tops": tops}


def asleep(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """The tokens that prompts go on with, before and after vLLM's sleep, and the memory that it freed."""
    import torch

    before = generated(engine, job)["tokens"]
    free = torch.cuda.mem_get_info()[0]
    engine.llm.sleep(level=1)
    freed = torch.cuda.mem_get_info()[0] - free
    engine.llm.wake_up()
    return {"same": generated(engine, job)["tokens"] == before, "freed": freed}


def requests(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Random requests with shared prefixes and aborts, then some of them one at a time; and what is left behind."""
    import random

    rng = random.Random(job["seed"])
    shared = [tokens(1_000 + of, job["max_len"], job["vocabulary"]) for of in range(8)]
    waiting = []
    for number in range(job["requests"]):
        length = rng.randint(1, job["max_len"])
        own = tokens(number, length, job["vocabulary"])
        head = rng.randint(0, length) if rng.random() < 0.5 else 0
        waiting.append([*rng.choice(shared)[:head], *own[head:]])
    engine.forget()
    preempted = engine.count("num_preemptions")
    prompts: dict[str, list[int]] = {}
    done: dict[str, Any] = {}
    aborted: set[str] = set()
    first_memory = None
    while waiting or engine.engine.has_unfinished_requests():
        for prompt in waiting[: rng.randint(0, 4)]:
            prompts[engine.add(prompt, max_tokens=rng.randint(1, 64), logprobs=1)] = waiting.pop(0)
        for each in engine.engine.step():
            if each.finished:
                done[each.request_id] = each
        running = [name for name in prompts if name not in done and name not in aborted]
        if running and rng.random() < 0.02:
            aborted.add(gone := rng.choice(running))
            engine.engine.abort_request([gone])
        if first_memory is None and len(done) >= job["requests"] // 4:
            first_memory = _allocated()
    is_empty = engine.forget()
    served = [name for name in prompts if name in done and name not in aborted]
    errors = []
    for name in rng.sample(served, min(job["alone"], len(served))):
        made = [*done[name].outputs[0].token_ids]
        mine = [at[token].logprob for at, token in zip(done[name].outputs[0].logprobs, made, strict=True)]
        [alone] = engine.run([[*prompts[name], *made]], max_tokens=1, prompt_logprobs=1)
        theirs = [at[token].logprob for at, token in zip(alone.prompt_logprobs[-len(made) :], made, strict=True)]
        errors.append([abs(a - b) for a, b in zip(mine, theirs, strict=True)])
    return {
        "ended": len(done.keys() | aborted),
        "aborted": len(aborted),
        "preempted": engine.count("num_preemptions") - preempted,
        "blocks_free": is_empty and engine.forget(),
        "memory_grew": _allocated() - (first_memory or 0),
        "errors": errors,  # of each token of each of these requests
    }


def _allocated() -> int:
    """Bytes of the GPU that torch's tensors hold."""
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def randomize(model: Any) -> None:
    """Gives matrices normal numbers, the same in every process, and norms ones."""
    import torch

    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.data.fill_(1)
            continue
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
        weight.data.normal_(0, 1.3 * weight.shape[-1] ** -0.5, generator=generator)


JOBS = {each.__name__: each for each in (start, times, logprobs, generated, asleep, requests)}


def main() -> None:
    global STARTED
    job = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(job["config"]))
        STARTED = time.perf_counter()
        engine = Engine(folder, job["options"])
        if job["random"]:
            engine.llm.apply_model(randomize)
        found: dict[str, Any] = {"ready": engine.ready, "imported": engine.imported, "kv_tokens": engine.kv_tokens}
        for name, arguments in job["runs"].items():
            before = time.perf_counter()
            found[name] = JOBS[name](engine, {**job, **arguments})
            found[name]["seconds"] = time.perf_counter() - before
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
