"""Measures decode throughput for each cache dtype, compared with peers and with reading the same number of bytes.

Run `python -m benchmarks.serve --json=serve.json` from the source tree. benchmarks/README.md explains the table.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl.testing import absltest

from benchmarks import bars, output, serving, shapes, timing, workload
from benchmarks.measurement import OWN, Measurement, Rows, plain
from benchmarks.peers import in_torch, read, serves_dense, serves_torch
from benchmarks.serving import Scenario, ServeJob
from benchmarks.timing import Timing
from kvjax import KVCacheDType

PEER_NAMES = (OWN, serves_dense.NAME, *serves_torch.NAMES)
DTYPES = output.define_dtypes(shapes.TIMED_DTYPES)
ROWS = output.define_some(
    "rows",
    serving.ROWS,
    "same: a number that every dtype holds; most: as many as fit; others: further numbers, for the plot; prompts:"
    " requests with prompts (default: all)",
)
WINDOWS = output.define_numbers(
    "exact_windows", "tokens that stay exact beside quantized caches, in further rows (default: none)", least=1
)
PEERS = output.define_some("peers", {name: name for name in PEER_NAMES}, "who serves (default: all but transformers)")
READ_BYTES = 1 << 30
type Served = tuple[Timing, Mapping[str, Any]]


class ServeBenchmark(output.Program):
    def test_1_steps(self) -> None:
        of, rows, counts = serving.scenario(), ROWS.value or [*serving.ROWS.values()], serving.device_counts()
        wanted = serving.jobs(of, dtypes(), rows)
        if serving.DEVICES.value:
            for name, got in (("exact_windows", WINDOWS.value), ("peers", PEERS.value)):
                if got not in (None, [OWN]):
                    raise ValueError(f"{name}: got {got} with --devices, on which kvjax's pages alone are served")
        peers = PEERS.value or ([OWN] if serving.DEVICES.value else PEER_NAMES[:2])
        own = wanted if OWN in peers else []
        dense = [job for job in wanted if serves_dense.serves(job)] if serves_dense.NAME in peers else []
        windowed = {
            f"{OWN}, {size} exact": serving.jobs(of, [each for each in dtypes() if each.is_quantized], rows, size)
            for size in ((WINDOWS.value or []) if own else [])
        }
        divided = [serving.jobs(of, dtypes(), rows, devices=count) for count in counts[1:]]
        compile_ahead(of, [*own, *itertools.chain.from_iterable([*windowed.values(), *divided])], dense)
        rate = reading_rate()
        if rate is not None:
            self.results.facts["reading"] = f"{rate / 1e9:,.0f} GB/s"
        for name, own_jobs in ((OWN, own), *windowed.items(), *((OWN, jobs) for jobs in divided)):
            self.measure(name, own_jobs, rate, serving.serve)
        self.measure(serves_dense.NAME, dense, rate, lambda job: (serves_dense.serve(job), {}))
        for name in serves_torch.NAMES:
            if name not in peers:
                continue
            if reason := in_torch.why_missing("transformers", "kvjax_torch.transformers_cache"):
                self.results.skip(name, reason, asked_for=True)
                continue
            served = [job for job in wanted if serves_torch.serves(name, job)]
            self.measure(name, served, rate, functools.partial(serves_torch.serve, name))
        serves_torch.free()

    def test_2_requests_with_prompts(self) -> None:
        if serving.PROMPTS not in (ROWS.value or serving.ROWS.values()) or OWN not in (PEERS.value or PEER_NAMES):
            return
        of = serving.scenario()
        for job in prompt_jobs(of):
            with self.subTest(**plain(job.subject)):
                gc.collect()
                seconds, mixed, decodes = serving.serve_prompts(job)
                subject = {**job.subject, "seq_len": of.prompt_len + of.num_new_tokens}
                number = 2 * of.same
                facts = {
                    "generated_a_second": round(number * of.num_new_tokens / seconds),
                    "prompt_tokens_a_second": round(number * of.prompt_len / seconds),
                }
                for kind, times in (("prompt chunks", mixed), ("decodes", decodes)):
                    self.results.add(Measurement("serve prompts", {**subject, "steps": kind}, OWN, times, facts=facts))

    def measure(self, name: str, jobs: list[ServeJob], rate: float | None, serve: Callable[..., Served]) -> None:
        """Measures the jobs that fit in memory. A failing peer does not stop the others."""
        for job in jobs:
            gc.collect()  # frees the caches of the previous job
            what = f"{name} ({job.dtype.value}, {job.num_seqs})"
            with self.subTest(**plain(job.subject)):
                is_own = name.startswith(OWN) or name in serves_torch.OWN_NAMES
                if found := self.results.attempt(what, serve, job, own=is_own):
                    times, facts = found
                    known = {"rows": job.rows, "tokens_a_second": round(job.num_seqs / times.seconds), **facts}
                    known |= {} if rate is None else {"read_ns": round(job.bytes_moved / rate * 1e9)}
                    m = Measurement("serve", job.subject, name, times, job.bytes_moved, facts=known)
                    if job.devices > 1:
                        m.facts["x_one_device"] = bars.X_ONE_DEVICE.value(m, Rows(self.results.measurements))
                    self.results.add(m)


def dtypes() -> Sequence[KVCacheDType]:
    return DTYPES.value or shapes.TIMED_DTYPES


def prompt_jobs(of: Scenario) -> list[ServeJob]:
    """The jobs of requests with prompts, by number of devices."""
    every = itertools.product(serving.device_counts(), dtypes())
    return [ServeJob(of, dtype, of.same, devices=count) for count, dtype in every]


def compile_ahead(of: Scenario, own: list[ServeJob], dense: list[ServeJob]) -> None:
    """Compiles all steps in parallel and waits, because threads that lower programs hold the GIL."""
    programs = [serving.program(job, job.blocks_a_seq) for job in own]
    programs += [serves_dense.program(of, job.num_seqs) for job in dense]
    if own and serving.PROMPTS in (ROWS.value or serving.ROWS.values()):
        programs += [each for job in prompt_jobs(of) for each in serving.prompt_programs(job).values()]
    concurrent.futures.wait(programs)


def reading_rate() -> float | None:
    """Returns the bytes per second of a read-only kernel, or `None` without a GPU.

    Uses the same clock as the steps, because CUPTI slows down launches.
    """
    if not workload.is_gpu():
        return None
    compiled = read.compiled(READ_BYTES)
    words = read.distinct_words(READ_BYTES, 2)
    return READ_BYTES / timing.measure_in_a_row(lambda number: compiled(words[number % 2])).seconds


if __name__ == "__main__":
    absltest.main()
