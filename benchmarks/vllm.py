"""Times vLLM's engine with kvjax's attention backend, and with its own: steps, prompts, starts, and how much fits.

Run `python -m benchmarks.vllm --json=vllm.json` from the source tree, where vLLM is installed; benchmarks/README.md
explains the table. `--check` compares results of the backends instead (`vllm_checks.py`). Each row runs in a process
of its own, so an error or a time limit ends that row alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from typing import Any

from absl import flags
from absl.testing import absltest

from benchmarks import output, vllm_checks
from benchmarks.measurement import OWN, Measurement
from benchmarks.timing import Clock, Timing

KVJAX, FLASH, FLASHINFER = "KVJAX", "FLASH_ATTN", "FLASHINFER"
BACKENDS = (f"nvfp4:{KVJAX}", f"fp8:{KVJAX}", f"auto:{KVJAX}", f"fp8:{FLASH}", f"auto:{FLASH}", f"nvfp4:{FLASHINFER}")
CASES = DECODE, DRAFTED, FITTING, DEFAULTS = "decode", "3 drafts", "as many as fit", "vLLM's defaults"

LATENT_BACKENDS = "fp8:KVJAX_MLA", "auto:KVJAX_MLA", "auto:FLASH_ATTN_MLA", "fp8:FLASHMLA", "auto:FLASHMLA"

PAIRS = flags.DEFINE_list("backends", None, "DTYPE:BACKEND of the rows, of vLLM's names (default: those of the model)")
ROWS = output.define_some("rows", {case: case for case in CASES}, "kinds of rows (default: decode)")
LAYERS = output.define_numbers("layers", "layers of the model (default: 32)", least=1)
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
AT_ONCE = flags.DEFINE_integer("at_once", 9, "with --check: processes at once", lower_bound=1)
REQUESTS = flags.DEFINE_integer("requests", 1_000, "with --check: random requests", lower_bound=4)
LONGEST = flags.DEFINE_integer("longest", 8_000, "with --check: the most tokens of a prompt", lower_bound=64)
CHECK_LAYERS = flags.DEFINE_integer("check_layers", 4, "with --check: layers of the model", lower_bound=1)

SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}
LLAMA = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500_000.0,
}
DEEPSEEK = SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 2_048,
    "intermediate_size": 10_944,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_theta": 10_000.0,
}
"""DeepSeek-V2-Lite's, with dense layers alone: 16 heads are those of a device that shares DeepSeek-V3 with seven."""
MODELS = {
    "llama": (LLAMA, BACKENDS, vllm_checks.KEYS_AND_VALUES),
    "deepseek": (DEEPSEEK, LATENT_BACKENDS, vllm_checks.LATENTS),
}
MODEL = flags.DEFINE_enum("model", "llama", [*MODELS], "sizes of the model: keys and values, or latents (MLA)")
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
# Pydantic tells in a line of its own what is wrong.
ERROR = re.compile(r"\b[\w.]*(?:Error|Exception|Exit|Interrupt)\b: \S.*|\b(?:Value|Assertion) error, \S.*")
ECHOES = "Engine core", "EngineCore", "WorkerProc", "root cause"
"""What a process says of the error of another."""


def small(flag: flags.FlagHolder[int], smallest: int) -> int:
    """A flag's value; with --smoke a small one, unless the flag is set."""
    return smallest if output.SMOKE.value and not flag.present else flag.value


def is_own(backend: str) -> bool:
    """Whether an attention backend is kvjax's."""
    return backend.startswith(KVJAX)


class FailedError(Exception):
    """A process of vLLM's ended without a result."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A model, and how vLLM is to serve it. Its weights are vLLM's dummy ones, or random."""

    dtype: str
    backend: str
    layers: int
    is_random: bool = False

    def options(self, **more: Any) -> dict[str, Any]:
        compilation = {"compilation_config": json.loads(COMPILATION.value)} if COMPILATION.value else {}
        return {
            "attention_backend": self.backend,
            "kv_cache_dtype": self.dtype,
            "dtype": "bfloat16",
            "load_format": "dummy",
            "max_num_batched_tokens": MAX_BATCHED_TOKENS,
            "gpu_memory_utilization": 0.9,
            "tensor_parallel_size": TENSOR_PARALLEL.value,
            "disable_log_stats": False,
            **compilation,
            **more,
            **json.loads(OPTIONS.value),
        }

    def run(self, options: dict[str, Any], environment: dict[str, str] | None = None, **runs: dict[str, Any]) -> Any:
        """Runs jobs of `serves_vllm`, by their names and arguments, in a process of its own.

        Raises:
          FailedError: with the last error of the process, or its time limit.
        """
        of_model, _, _ = MODELS[MODEL.value]
        sizes = {**of_model, **(SMALL if output.SMOKE.value else {}), "num_hidden_layers": self.layers}
        if of_model is DEEPSEEK:
            sizes["first_k_dense_replace"] = self.layers
        job = {"config": sizes, "vocabulary": sizes["vocab_size"], "random": self.is_random}
        job |= {"options": options, "runs": runs}
        status, text = run_alone("benchmarks.peers.serves_vllm", job, environment or {})
        if status is None:
            raise FailedError(
                f"took more than {LIMIT.value} seconds; the last line was {text.strip().splitlines()[-1:]}"
            )
        if status:
            raise FailedError(f"{error_of(text)} (status {status})")
        # Where it ends, vLLM may log more.
        found = [line for line in text.splitlines() if line.startswith("{")]
        if not found:
            raise FailedError("printed no result: " + repr(text[-200:]))
        return json.loads(found[-1])


def run_alone(module: str, job: Any, environment: dict[str, str]) -> tuple[int | None, str]:
    """Runs a module that reads a job: its status, None after the time limit, and what it printed.

    Processes that it leaves behind are killed, whose memory on the GPU the next one needs.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        command = [sys.executable, "-m", module]
        environment = {**os.environ, **environment}
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            env=environment,
            text=True,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(job), timeout=LIMIT.value)
        except subprocess.TimeoutExpired:
            status = None
        else:
            status = process.returncode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        return status, printed.read()


def error_of(text: str) -> str:
    """The last error that a process printed, of its own or of the process that it started and that failed first."""
    errors = [found[0] for line in text.splitlines() if (found := ERROR.search(line))]
    own = [error for error in errors if not any(echo in error for echo in ECHOES)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (own or errors or lines or ["no error"])[-1]


class VllmBenchmark(output.Program):
    def test_1_times(self) -> None:
        if CHECK.value:
            return
        _, pairs, _ = MODELS[MODEL.value]
        for layers in LAYERS.value or [2 if output.SMOKE.value else 32]:
            for case in ROWS.value or CASES[:1]:
                for dtype, backend in (pair.split(":") for pair in PAIRS.value or pairs):
                    self.time(case, Engine(dtype, backend, layers))

    def time(self, case: str, engine: Engine) -> None:
        """Adds a row. What does not run is listed with its error, and fails the program if it is kvjax's."""
        what = f"{engine.backend}, {engine.dtype}, {engine.layers} layers, {case}"
        num_seqs, prompt_len = 0 if case == FITTING else small(SEQS, 4), small(PROMPT, 64)
        is_drafted = case == DRAFTED
        options = engine.options(
            max_model_len=prompt_len + 2_048,
            max_num_seqs=num_seqs or 512,
            enable_prefix_caching=False,
            **({"speculative_config": DRAFTS} if is_drafted else {}),
        )
        environment = {}
        if case == DEFAULTS:
            del options["compilation_config"]
            environment = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
        job = {"num_seqs": num_seqs, "prompt_len": prompt_len, "new_tokens": small(STEPS, 4), "drafts": is_drafted}
        with tempfile.TemporaryDirectory() as folder, self.subTest(what):
            # Kernels of kvjax, and what vLLM, inductor and Triton compile.
            caches = "KVJAX_CACHE_DIR", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
            fresh = {**environment, **{name: f"{folder}/{name}" for name in caches}}
            first = None
            try:
                if STARTS.value and case in (DECODE, DEFAULTS):
                    first = engine.run(options, fresh, start={})
                whole = engine.run(options, fresh if first else environment, times=job)
            except FailedError as error:
                self.results.skip(what, str(error), asked_for=is_own(engine.backend))
                return
        found = whole["times"]
        subject = {
            "case": case,
            "dtype": "bfloat16" if engine.dtype == "auto" else engine.dtype,
            "layers": engine.layers,
            "num_seqs": found["num_seqs"],
            "seq_len": prompt_len,
        }
        facts = {
            "tokens_a_second": round(found["tokens_a_second"]),
            "kv_tokens": whole["kv_tokens"],
            "ready_again": whole["ready"],
            **({"ready": first["ready"]} if first else {}),
            **({"accepted": found["accepted"]} if "accepted" in found else {}),
        }
        if "prompt_tokens_a_second" in found:
            facts["prompt_tokens_a_second"] = round(found["prompt_tokens_a_second"])
        peer = OWN if is_own(engine.backend) else engine.backend
        times = Timing(tuple(found["samples"]), Clock.WALL)
        self.results.add(Measurement("vllm", subject, peer, times, facts=facts))

    def test_2_checks(self) -> None:
        if not CHECK.value:
            return
        requests, longest = small(REQUESTS, 12), small(LONGEST, 200)
        _, _, compare = MODELS[MODEL.value]
        runs = vllm_checks.plan(compare, requests=requests, longest=longest, is_small=output.SMOKE.value)

        def run(key: vllm_checks.Key, options: dict[str, Any], jobs: dict[str, Any]) -> Any:
            engine = Engine(key.dtype, key.backend, CHECK_LAYERS.value, is_random=True)
            # `apply_model` sends a function only within a process.
            environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
            return engine.run(engine.options(**options), environment, **jobs)

        found, failed = vllm_checks.run_all(runs, run, FailedError, at_once=AT_ONCE.value, say=output.say)
        for check in vllm_checks.judge(compare, found, failed, requests=requests, is_small=output.SMOKE.value):
            with self.subTest(check.name):
                self.results.check(check.name, check.holds, check.text)
                assert check.holds is not False, check.text

    def test_the_clock_tells_twice_the_work(self) -> None:
        if not CHECK.value:
            super().test_the_clock_tells_twice_the_work()


if __name__ == "__main__":
    absltest.main()
