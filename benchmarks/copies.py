"""Measures the copy rate of each copy method. It is the reference for all shares and a check of the clock."""

from __future__ import annotations

from absl.testing import absltest

from benchmarks import output
from benchmarks.measurement import Measurement
from benchmarks.peers import copy


class CopyBenchmark(output.Program):
    def test_sizes(self) -> None:
        sizes: tuple[int, ...] = output.by_device(gpu=(1, 8, 32, 128, 512), host=(1, 8, 32), smoke=(1,))
        for moved in (megabytes << 20 for megabytes in sizes):
            ways = copy.all_ways(moved)
            fastest = min(ways.values(), key=lambda times: times.seconds)
            for way, times in ways.items():
                subject = {"bytes_moved": moved}
                self.results.add(Measurement("copy", subject, "copy", times, moved, fastest, {"way": way}))


if __name__ == "__main__":
    absltest.main()
