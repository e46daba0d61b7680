"""What `python -m benchmarks.vllm --check` compares: which processes run which jobs, and what must hold of the results.

Weights are random, of normal distributions, and the same in every process. Processes run at the same time, on one GPU.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

NEW_TOKENS, ALONE = 64, 256
BLOCK_SIZE = 16
NEAR = 0.05
"""Two tokens whose log-probabilities differ by less are as likely, in bfloat16."""


class Compare(NamedTuple):
    """What is compared: kvjax's backend and vLLM's, in vLLM's names, and the dtypes of kvjax's caches."""

    own: str
    peer: str
    dtypes: tuple[str, ...]


KEYS_AND_VALUES = Compare("KVJAX", "FLASH_ATTN", ("nvfp4", "fp8", "auto"))
LATENTS = Compare("KVJAX_MLA", "FLASH_ATTN_MLA", ("fp8", "auto"))


class Key(NamedTuple):
    """A process: its cache's dtype and its backend, in vLLM's names, and what it is for."""

    dtype: str
    backend: str
    kind: str = "graphs"

    def __str__(self) -> str:
        return f"{self.dtype}:{self.backend}, {self.kind}"


@dataclasses.dataclass(frozen=True)
class Check:
    """Whether something holds, or None if that could not be tried, and a line of what was found."""

    name: str
    holds: bool | None
    text: str


type Runs = dict[Key, tuple[dict[str, Any], dict[str, Any]]]
"""vLLM's options of each process, and its jobs by their names."""


def plan(of: Compare, *, requests: int, longest: int, is_small: bool) -> Runs:
    """Which processes run what. A cache holds eight of the longest prompts: other requests wait or are preempted."""
    count = 6 if is_small else 24
    lengths = [min(65 + 331 * number, longest) for number in range(count)]
    generated = {"lengths": lengths, "new_tokens": 8 if is_small else NEW_TOKENS}
    teacher = {"lengths": lengths, "at_once": 6, "block_size": BLOCK_SIZE}
    random = {"requests": requests, "max_len": longest, "seed": 0, "alone": 4 if is_small else ALONE}
    options = {
        "block_size": BLOCK_SIZE,
        "max_model_len": longest + 128,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 64 if is_small else 4_096,
        "enable_prefix_caching": True,
        # Processes that start at the same time do not measure what is free.
        "kv_cache_memory_bytes": 2 << 30,
        "gpu_memory_utilization": 0.05,
        "num_gpu_blocks_override": 8 * -(-(longest + 128) // BLOCK_SIZE),
    }
    runs: Runs = {}
    for dtype in of.dtypes:
        jobs = {"generated": generated, "logprobs": teacher, **({"requests": random} if dtype == "auto" else {})}
        runs[Key(dtype, of.own)] = options, jobs
        runs[Key(dtype, of.own, "eager")] = {**options, "enforce_eager": True}, {"generated": generated}
    runs[Key("auto", of.peer)] = options, {"logprobs": teacher, "requests": random}
    runs[Key("fp8", of.peer)] = options, {"logprobs": teacher}
    runs[Key(of.dtypes[0], of.own, "asleep")] = {**options, "enable_sleep_mode": True}, {"asleep": generated}
    return runs


def run_all(
    runs: Runs,
    run: Callable[[Key, dict[str, Any], dict[str, Any]], Any],
    error: type[Exception],
    *,
    at_once: int,
    say: Callable[[str], None],
) -> tuple[dict[Key, Any], dict[Key, str]]:
    """The results of all processes, and the errors of those that failed; says in a line when each has ended."""
    found, failed = {}, {}
    with ThreadPoolExecutor(at_once) as pool:
        # The longest first.
        order = sorted(runs, key=lambda key: "requests" not in runs[key][1])
        futures = {pool.submit(run, key, *runs[key]): key for key in order}
        for future in as_completed(futures):
            key = futures[future]
            try:
                found[key] = future.result()
            except error as reason:
                failed[key] = str(reason)
            say(f"[{len(found) + len(failed)}/{len(runs)}] {key}: {failed.get(key) or _seconds(found[key])}")
    return found, failed


def _seconds(result: Any) -> str:
    jobs = {name: part for name, part in result.items() if isinstance(part, dict)}
    parts = [
        f"{result['ready']:.0f} s to start",
        *(f"{part['seconds']:.0f} s of {name}" for name, part in jobs.items()),
    ]
    return ", ".join(parts)


def judge(
    compare: Compare, found: dict[Key, Any], failed: dict[Key, str], *, requests: int, is_small: bool
) -> Iterator[Check]:
    """One check after another. One whose processes failed fails, if they are kvjax's; else it was not tried."""

    def attempt(name: str, keys: list[Key], check: Callable[..., Check], *more: Any) -> Check:
        if missing := [key for key in keys if key in failed]:
            holds = False if any(key.backend == compare.own and key.kind != "asleep" for key in missing) else None
            return Check(name, holds, "; ".join(f"{key}: {failed[key]}" for key in missing))
        return check(name, *(found[key] for key in keys), *more)

    for dtype in compare.dtypes:
        keys = [Key(dtype, compare.own), Key(dtype, compare.own, "eager")]
        yield attempt(f"graphs give the tokens of eager steps, {dtype}", keys, _same_tokens)
    of, own = Key("auto", compare.peer), Key("auto", compare.own)
    name = f"bfloat16's likeliest tokens are those of {compare.peer}, or as likely"
    yield attempt(name, [of, own], _agrees)
    name = f"fp8 is as close to bfloat16 as {compare.peer}'s fp8"
    yield attempt(name, [of, Key("fp8", compare.peer), Key("fp8", compare.own)], _is_as_close)
    first = compare.dtypes[0]
    yield attempt(f"{first} next to bfloat16", [of, Key(first, compare.own)], _next_to)
    for key in (own, of):
        name = f"random requests end and leave nothing behind, {key.backend}"
        yield attempt(name, [key], _leaves_nothing, requests, is_small)
    name = f"random requests deviate from one at a time as {compare.peer}'s do"
    yield attempt(name, [own, of], _deviates_as)
    yield attempt("sleep keeps the tokens", [Key(first, compare.own, "asleep")], _sleeps)


def _same_tokens(name: str, graphs: Any, eager: Any) -> Check:
    mine, theirs = graphs["generated"], eager["generated"]
    same, gaps, deviations = 0, [], [0.0]
    for a, b, tops, of in zip(mine["tokens"], theirs["tokens"], mine["tops"], theirs["tops"], strict=True):
        at = next((at for at, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
        deviations += [
            abs(tops[each][str(a[each])] - of[each][str(a[each])]) for each in range(len(a) if at is None else at)
        ]
        if at is None:
            same += 1
        else:
            gaps.append(tops[at][str(a[at])] - tops[at].get(str(b[at]), -float("inf")))
    deviation, gap = statistics.fmean(deviations), max(gaps, default=0.0)
    text = f"{same} of {len(mine['tokens'])} sequences are the same, log-probabilities deviate by {deviation:.2g}"
    text += f"; elsewhere the first other token is less likely by at most {gap:.2g}" if gaps else ""
    return Check(name, gap <= NEAR + 8 * deviation, text)


def _agrees(name: str, of: Any, own: Any) -> Check:
    found = compared(of["logprobs"], own["logprobs"])
    uncached = of["logprobs"]["uncached"], own["logprobs"]["uncached"]
    holds = found.agreement >= 0.99 or found.largest_gap <= 8 * found.of_tops + 0.01
    return Check(name, holds and not any(uncached), f"{found}" + (f", uncached: {uncached}" if any(uncached) else ""))


def _is_as_close(name: str, of: Any, flash: Any, own: Any) -> Check:
    theirs, mine = (compared(of["logprobs"], each["logprobs"]) for each in (flash, own))
    holds = mine.of_prompts <= 1.1 * theirs.of_prompts and mine.of_tops <= 1.1 * theirs.of_tops
    return Check(name, holds, f"kvjax: {mine}; vLLM: {theirs}")


def _next_to(name: str, of: Any, own: Any) -> Check:
    return Check(name, True, f"{compared(of['logprobs'], own['logprobs'])}")


def _leaves_nothing(name: str, process: Any, requests: int, is_small: bool) -> Check:
    found = {key: value for key, value in process["requests"].items() if key != "errors"}
    holds = found["ended"] == requests and found["blocks_free"] and found["memory_grew"] < 64 << 20
    return Check(name, holds and (is_small or found["preempted"] > 0), f"{found}")


def _deviates_as(name: str, own: Any, of: Any) -> Check:
    mine, theirs = (Deviations.of(each["requests"]["errors"]) for each in (own, of))
    return Check(name, mine.mean <= 1.25 * theirs.mean, f"log-probabilities by {mine}; vLLM's by {theirs}")


class Deviations(NamedTuple):
    """Of log-probabilities: a few requests that are wrong show in `of_worst_request`, rounding does not."""

    mean: float
    median: float
    of_worst_request: float

    @classmethod
    def of(cls, errors: list[list[float]]) -> Deviations:
        """Of the errors of each request's tokens."""
        flat = [error for request in errors for error in request]
        return cls(statistics.fmean(flat), statistics.median(flat), max(map(statistics.fmean, errors)))

    def __str__(self) -> str:
        return f"{self.mean:.2g} (median {self.median:.2g}, worst request {self.of_worst_request:.2g})"


def _sleeps(name: str, process: Any) -> Check:
    found = process["asleep"]
    return Check(name, found["same"] and found["freed"] > 0, f"{found['freed'] / 2**30:.1f} GiB were free meanwhile")


@dataclasses.dataclass(frozen=True)
class Compared:
    """Log-probabilities next to those of another run: mean differences, and how often the likeliest token is the same.

    Attributes:
      of_prompts: of every token of the prompts, teacher-forced.
      of_tops: of the likeliest tokens behind a cached prefix, each from a step of one token.
      agreement: the part of those whose likeliest token is the same.
      largest_gap: how much less likely the other run finds a likeliest token that is not its own.
    """

    of_prompts: float
    of_tops: float
    agreement: float
    largest_gap: float

    def __str__(self) -> str:
        return (
            f"prompts deviate by {self.of_prompts:.2g}, single tokens by {self.of_tops:.2g}; {self.agreement:.1%} of"
            f" the likeliest are the same, others less likely by at most {self.largest_gap:.2g}"
        )


def compared(of: Any, other: Any) -> Compared:
    pairs = [
        abs(mine[1] - theirs[1])
        for a, b in zip(of["prompts"], other["prompts"], strict=True)
        for mine, theirs in zip(a, b, strict=True)
    ]
    tops, gaps, same = [], [], 0
    for a, b in zip(of["tops"], other["tops"], strict=True):
        tops += [abs(a[token] - b[token]) for token in a.keys() & b.keys()]
        first, theirs = max(a, key=a.__getitem__), max(b, key=b.__getitem__)
        same += first == theirs
        gaps.append(a[first] - a.get(theirs, min(a.values())))
    return Compared(statistics.fmean(pairs), statistics.fmean(tops), same / len(gaps), max(gaps))
