"""Which cases of a test every run takes, which CI besides, and which only nightly runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import conftest
import pytest


@dataclasses.dataclass
class Case:
    """As much of a pytest item as is looked at."""

    nodeid: str
    marks: list[str] = dataclasses.field(default_factory=list)

    @property
    def path(self) -> Path:
        return Path(self.nodeid.split("::")[0])

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, name: str) -> None:
        self.marks.append(name)


def cases(test: str, count: int, *marks: str) -> list[Case]:
    return [Case(f"tests/{test}[{i}]", [*marks]) for i in range(count)]


@pytest.mark.parametrize(
    ("count", "in_every_run", "in_ci"), [(1, 1, 0), (2, 2, 0), (3, 1, 1), (5, 1, 1), (10, 2, 1), (100, 13, 11)]
)
def test_of_many_cases_an_eighth_is_in_every_run_and_an_eighth_of_the_others_in_ci(count, in_every_run, in_ci):
    ours = cases("test_write.py::test_a", count)
    conftest.mark_samples(ours)
    assert sum(not case.marks for case in ours) == in_every_run
    assert sum(case.marks == ["full"] for case in ours) == in_ci
    assert all(case.marks == ["full", "nightly"] for case in ours if case.marks not in ([], ["full"]))


def test_every_process_takes_the_same_cases():
    ours, again = (cases("test_write.py::test_a", 40) for _ in range(2))
    conftest.mark_samples(ours)
    conftest.mark_samples([*cases("test_write.py::test_b", 9), *again])
    assert ours == again


def test_cases_for_a_gpu_and_of_other_modules_are_in_every_run():
    for kept in (cases("test_write.py::test_a", 9, "gpu"), cases("test_resolve.py::test_a", 9)):
        conftest.mark_samples(kept)
        assert all("full" not in case.marks for case in kept)


def test_of_cases_that_are_marked_full_some_are_left_to_nightly_runs():
    ours = cases("test_resolve.py::test_a", 9, "full")
    conftest.mark_samples(ours)
    assert sum(case.marks == ["full"] for case in ours) == 2


@pytest.mark.parametrize("left_out", range(3))
def test_ci_takes_one_of_the_cases_that_are_not_left_to_nightly_runs_by_name(left_out):
    ours = cases("test_resolve.py::test_a", 3, "full")
    ours[left_out].add_marker("nightly")
    conftest.mark_samples(ours)
    assert sum(case.marks == ["full"] for case in ours) == 1


def test_each_process_begins_with_another_gpu_and_sees_all():
    assert [conftest.rotated_gpus(f"gw{i}", ["4", "2", "7"]) for i in (0, 1, 5)] == [
        ["4", "2", "7"],
        ["2", "7", "4"],
        ["7", "4", "2"],
    ]
    assert conftest.rotated_gpus("gw10", ["0"]) == ["0"]
