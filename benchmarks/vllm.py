"""Times vLLM's engine with kvjax's attention backend, and with its own: steps, prompts, starts, and how much fits.

Run `python -m benchmarks.vllm --json=vllm.json` from the source tree, where vLLM is installed; benchmarks/README.md
explains the table. `--check` compares results of the backends instead. Each row runs in a process of its own, so an
error or a time limit ends that row alone.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from absl.testing import absltest

from benchmarks import output
from benchmarks.measurement import OWN, Measurement
from benchmarks.timing import Clock, Timing

KVJAX, FLASH, FLASHINFER = "KVJAX", "FLASH_ATTN", "FLASHINFER"
BACKENDS = (f"nvfp4:{KVJAX}", f"fp8:{KVJAX}", f"auto:{KVJAX}", f"fp8:{FLASH}", f"auto:{FLASH}", f"nvfp4:{FLASHINFER}")
CASES = ("decode", "3 drafts", "as many as fit")

PAIRS = flags.DEFINE_list("backends", [*BACKENDS], "DTYPE:BACKEND of the rows, of vLLM's names")
ROWS = output.define_some("rows", CASES, "kinds of rows (default: decode)")
LAYERS = output.define_numbers("layers", "layers of the model, of Llama-3.1-8B's sizes (default: 32)", least=1)
SEQS = flags.DEFINE_integer("sequences", 64, "sequences at once", lower_bound=1)
PROMPT = flags.DEFINE_integer("prompt", 8_192, "tokens of each prompt", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 64, "steps to time", lower_bound=1)
TENSOR_PARALLEL = flags.DEFINE_integer("tensor_parallel", 1, "GPUs", lower_bound=1)
COMPILATION = flags.DEFINE_string(
    "compilation", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}', "vLLM's compilation_config; empty: its default"
)
OPTIONS = flags.DEFINE_string("options", "{}", "more options of vLLM's engine, in JSON")
STARTS = flags.DEFINE_bool("starts", True, "start each row twice, at first without any kernel that was compiled before")
LIMIT = flags.DEFINE_integer("limit", 420, "seconds that a process may take", lower_bound=1)
CHECK = flags.DEFINE_bool("check", False, "compare results instead of taking times")
REQUESTS = flags.DEFINE_integer("requests", 1_000, "with --check: random requests", lower_bound=4)
LONGEST = flags.DEFINE_integer("longest", 8_000, "with --check: the most tokens of a prompt", lower_bound=64)
CHECK_LAYERS = flags.DEFINE_integer("check_layers", 4, "with --check: layers of the model", lower_bound=1)

SIZES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
SMALL |= {"vocab_size": 512}
DRAFTS = {"method": "custom_class", "model": "benchmarks.peers.serves_vllm.Drafts", "num_speculative_tokens": 3}
MAX_BATCHED_TOKENS = 8_192


class FailedError(Exception):
    """A process of vLLM's ended without a result."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model, and how vLLM is to serve it."""

    dtype: str
    backend: str
    layers: int
    is_dummy: bool = True

    def options(self, **more: Any) -> dict[str, Any]:
        compilation = {"compilation_config": json.loads(COMPILATION.value)} if COMPILATION.value else {}
        dummy = {"load_format": "dummy"} if self.is_dummy else {}
        return {
            "attention_backend": self.backend,
            "kv_cache_dtype": self.dtype,
            "dtype": "bfloat16",
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "gpu_memory_utilization": 0.9,
            "tensor_parallel_size": TENSOR_PARALLEL.value,
            "disable_log_stats": False,
            **compilation,
            **dummy,
            **more,
            **json.loads(OPTIONS.value),
        }

    def run(self, what: str, options: dict[str, Any], environment: dict[str, str] | None = None, **job: Any) -> Any:
        """Runs a job of `serves_vllm` in a process of its own.

        Raises:
          FailedError: with the last error of the process, or its time limit.
        """
        sizes = {**SIZES, **(SMALL if output.SMOKE.value else {}), "num_hidden_layers": self.layers}
        kind = f"{'small' if output.SMOKE.value else 'llama'}-{self.layers}-{'dummy' if self.is_dummy else 'random'}"
        model = Path(tempfile.gettempdir()) / "kvjax-benchmarks-vllm" / kind
        known = {"model": str(model), "config": sizes, "vocabulary": sizes["vocab_size"], "run": what}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.peers.serves_vllm"],
                input=json.dumps({**known, **job, "options": options}),
                env={**os.environ, **(environment or {})},
                capture_output=True,
                text=True,
                timeout=LIMIT.value,
            )
        except subprocess.TimeoutExpired:
            raise FailedError(f"took more than {LIMIT.value} seconds") from None
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if "Error" in line]
            raise FailedError((lines or ["no error"])[-1].strip() + f" (status {done.returncode})")
        # Where it ends, vLLM may log more.
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not found:
            raise FailedError("printed no result: " + repr(done.stdout[-200:]))
        return json.loads(found[-1])


class VllmBenchmark(output.Program):
    def test_1_times(self) -> None:
        if CHECK.value:
            return
        for layers in output.chosen(LAYERS, int, [2 if output.SMOKE.value else 32]):
            for case in ROWS.value or CASES[:1]:
                for dtype, backend in (pair.split(":") for pair in PAIRS.value):
                    self.time(case, Engine(dtype, backend, layers))

    def time(self, case: str, engine: Engine) -> None:
        """Adds a row. What does not run is listed with its error, and fails the program if it is kvjax's."""
        what = f"{engine.backend}, {engine.dtype}, {engine.layers} layers, {case}"
        if engine.backend == FLASHINFER and importlib.util.find_spec("flashinfer") is None:
            return self.results.skip(what, "no module flashinfer")
        num_seqs = 0 if case == CASES[2] else SEQS.value
        options = engine.options(
            max_model_len=PROMPT.value + 2_048,
            max_num_seqs=num_seqs or 512,
            enable_prefix_caching=False,
            **({"speculative_config": DRAFTS} if case == CASES[1] else {}),
        )
        job = {"num_seqs": num_seqs, "prompt_len": PROMPT.value, "new_tokens": STEPS.value, "drafts": case == CASES[1]}
        with tempfile.TemporaryDirectory() as folder, self.subTest(what):
            # Kernels of kvjax, and what vLLM and Triton compile.
            fresh = {name: f"{folder}/{name}" for name in ("KVJAX_CACHE_DIR", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR")}
            try:
                first = engine.run("start", options, fresh) if STARTS.value and case == CASES[0] else {}
                found = engine.run("times", options, fresh if first else None, **job)
            except FailedError as error:
                self.results.skip(what, str(error), asked_for=engine.backend == KVJAX)
                return None
        subject = {
            "case": case,
            "dtype": "bfloat16" if engine.dtype == "auto" else engine.dtype,
            "layers": engine.layers,
            "num_seqs": found["num_seqs"],
            "seq_len": PROMPT.value,
        }
        facts = {
            "tokens_a_second": round(found["tokens_a_second"]),
            "kv_tokens": found["kv_tokens"],
            "ready_again": found["ready"],
            **({"ready": first["ready"]} if first else {}),
            **({"accepted": found["accepted"]} if "accepted" in found else {}),
        }
        if "prompt_tokens_a_second" in found:
            facts["prompt_tokens_a_second"] = round(found["prompt_tokens_a_second"])
        peer = OWN if engine.backend == KVJAX else engine.backend
        times = Timing(tuple(found["samples"]), Clock.WALL)
        return self.results.add(Measurement("vllm", subject, peer, times, facts=facts))


class Checks(absltest.TestCase):
    """What must hold on a GPU, with random weights of normal distributions."""

    def setUp(self) -> None:
        if not CHECK.value:
            self.skipTest("only with --check")

    def engine(self, dtype: str, backend: str) -> Engine:
        return Engine(dtype, backend, CHECK_LAYERS.value, is_dummy=False)

    def lengths(self) -> list[int]:
        return [min(65 + 331 * number, LONGEST.value) for number in range(24)]

    def options(self, engine: Engine, **more: Any) -> dict[str, Any]:
        return engine.options(max_model_len=LONGEST.value + 128, max_num_seqs=64, **more)

    def test_graphs_give_the_same_tokens(self) -> None:
        for dtype in ("nvfp4", "fp8", "auto"):
            engine = self.engine(dtype, KVJAX)
            job: dict[str, Any] = {"lengths": self.lengths(), "new_tokens": 64}
            with_graphs = engine.run("generated", self.options(engine), **job)["tokens"]
            eager = engine.run("generated", self.options(engine, enforce_eager=True), **job)["tokens"]
            say(f"{dtype}: {agreement(with_graphs, eager):.4f} of the sequences are the same with and without graphs")
            assert with_graphs == eager

    def test_log_probabilities_are_as_close_to_bfloat16_as_those_of_flash_attn(self) -> None:
        found = {}
        for dtype, backend in (("auto", FLASH), ("auto", KVJAX), ("fp8", FLASH), ("fp8", KVJAX), ("nvfp4", KVJAX)):
            engine = self.engine(dtype, backend)
            options = self.options(engine, enable_prefix_caching=True)
            found[dtype, backend] = engine.run("logprobs", options, lengths=self.lengths())
        of = found["auto", FLASH]
        errors = {key: compared(of, each) for key, each in found.items()}
        for key, each in errors.items():
            say(f"{key}: {each}")
        # A disagreement is explained by two tokens that are as likely.
        own = errors["auto", KVJAX]
        assert own.agreement >= 0.99 or own.largest_gap < 4 * own.of_tops + 0.01, own
        assert errors["fp8", KVJAX].of_prompts <= 1.1 * errors["fp8", FLASH].of_prompts
        assert errors["fp8", KVJAX].of_tops <= 1.1 * errors["fp8", FLASH].of_tops

    def test_random_requests_end_and_leave_nothing(self) -> None:
        worst = {}
        for backend in (KVJAX, FLASH):
            engine = self.engine("auto", backend)
            blocks = 4 * -(-LONGEST.value // 16)  # four of the longest: others wait or are preempted
            options = self.options(engine, enable_prefix_caching=True, num_gpu_blocks_override=blocks)
            job: dict[str, Any] = {"requests": REQUESTS.value, "max_len": LONGEST.value, "seed": 0, "alone": 32}
            found = engine.run("requests", options, **job)
            errors = found.pop("errors")
            worst[backend] = statistics.fmean(errors)
            say(f"{backend}: {found}, log-probabilities deviate by {worst[backend]:.2g} from those of one at a time")
            assert found["ended"] == REQUESTS.value
            assert found["blocks_free"]
            assert found["memory_grew"] < 64 << 20
        assert worst[KVJAX] <= 1.25 * worst[FLASH]


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


def agreement(a: Sequence[Any], b: Sequence[Any]) -> float:
    return statistics.fmean(mine == theirs for mine, theirs in zip(a, b, strict=True))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    absltest.main()
