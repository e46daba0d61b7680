"""How fast memory is copied, by each way to do so: what all shares of a copy are of, and whether to believe the clock.

`python -m benchmarks.copies --json=copies.json`, from the source tree; benchmarks/README.md explains the table.
"""

from __future__ import annotations

from absl.testing import absltest

from benchmarks import output, workload
from benchmarks.output import Measurement
from benchmarks.peers import copy

MEGABYTES = output.define_numbers("megabytes", "MiB read plus written (default: 1 to 512)", least=1)

GPU_MEGABYTES, HOST_MEGABYTES, SMOKE_MEGABYTES = (1, 8, 32, 128, 512), (1, 8, 32), (1,)


class CopyBenchmark(output.Program):
    """Fails where the clock cannot tell twice the work."""

    name = "benchmarks.copies"

    def test_sizes(self) -> None:
        default = SMOKE_MEGABYTES if output.SMOKE.value else GPU_MEGABYTES if workload.is_gpu() else HOST_MEGABYTES
        lines = []
        for megabytes in output.numbers(MEGABYTES) or default:
            moved = megabytes << 20
            ways = copy.all_ways(moved)
            self.results.expect(len(ways))
            fastest = min(ways.values(), key=lambda times: times.seconds)
            for way, times in ways.items():
                lines.append(Measurement("copy", {"way": way}, "copy", times, moved, fastest))
                self.results.add(lines[-1])
        self.results.table(
            "Time of a copy",
            ["copied by", "us", "5-95%", "MB moved", "GB/s", "of the fastest", "clock"],
            [
                [
                    str(line.subject["way"]),
                    output.microseconds(line.seconds),
                    output.spread(line.times.samples),
                    *output.rate(line.seconds, line.bytes_moved or 0),
                    output.share(line.copy_share),
                    line.clock,
                ]
                for line in lines
            ],
            note="Bytes read plus bytes written.",
        )


if __name__ == "__main__":
    absltest.main()
