"""`make test` runs a third of the cases of tests that compile much; the others are marked `full`."""

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


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (2, 2), (3, 1), (4, 2), (100, 34)])
def test_a_third_of_a_tests_cases_is_kept_and_the_same_ones_in_every_process(count, kept):
    ours = cases("test_write.py::test_a", count)
    again, others = cases("test_write.py::test_a", count), cases("test_write.py::test_b", 9)
    conftest.mark_sample(ours)
    conftest.mark_sample([*others, *again])
    assert sum(not case.marks for case in ours) == kept
    assert ours == again


def test_cases_for_a_gpu_and_of_other_modules_are_all_kept():
    for kept in (cases("test_write.py::test_a", 9, "gpu"), cases("test_resolve.py::test_a", 9)):
        conftest.mark_sample(kept)
        assert all("full" not in case.marks for case in kept)
