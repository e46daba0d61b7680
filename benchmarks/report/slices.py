"""What of many measurements belongs side by side: in a table, or as lines of one plot."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from benchmarks.report.results import CASE, DTYPE, NUM_TOKENS, OWN, Measurement, Word


def grouped[Key: Hashable](
    measurements: Iterable[Measurement], key: Callable[[Measurement], Key]
) -> dict[Key, list[Measurement]]:
    """Measurements by a key, in the order in which the keys come first."""
    groups: dict[Key, list[Measurement]] = {}
    for each in measurements:
        groups.setdefault(key(each), []).append(each)
    return groups


def by_case(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Measurements by their case, `""` for those without one."""
    return grouped(measurements, lambda each: str(each.subject.get(CASE, "")))


def names(measurements: Sequence[Measurement]) -> list[str]:
    """The fields that these are about: words, then sizes, the number of tokens last."""
    found = dict.fromkeys(name for each in measurements for name in each.subject)
    return sorted(found, key=lambda name: (is_size(measurements, name), name == NUM_TOKENS))


def is_size(measurements: Iterable[Measurement], name: str) -> bool:
    """Whether a field is a number wherever it is."""
    return all(isinstance(each.subject.get(name, 0), int) for each in measurements)


def values(measurements: Sequence[Measurement], name: str) -> list[Word | None]:
    """The values of a field: numbers by size, words in the order in which they come first."""
    found = list(dict.fromkeys(each.subject.get(name) for each in measurements))
    return sorted(found, key=lambda value: value if isinstance(value, int) else -1)


def varying(measurements: Sequence[Measurement]) -> list[str]:
    """The fields in which some of these differ."""
    return [name for name in names(measurements) if len(values(measurements, name)) > 1]


def constants(measurements: Sequence[Measurement]) -> dict[str, Word]:
    """The fields that all of these have the same value of."""
    vary = varying(measurements)
    return {name: value for name, value in measurements[0].subject.items() if name not in vary}


def peers(measurements: Iterable[Measurement]) -> list[str]:
    """Who did it, kvjax first, else in the order in which they come first."""
    return sorted(dict.fromkeys(each.peer for each in measurements), key=lambda peer: peer != OWN)


def headline(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Those of the case that was measured most."""
    return max(by_case(measurements).values(), key=len)


def label(name: str) -> str:
    """The name of a field, for a reader."""
    return name.removeprefix("num_").replace("_", " ").replace("kv ", "KV ")


@dataclasses.dataclass(frozen=True)
class Slice:
    """Measurements of one operation and case that differ in dtype, in peer and in size.

    Attributes:
      size: the name of the size that they are drawn against.
      fixed: the fields in which others of the same case differ, with the values that these have.
      along: sizes that vary from one to the next without being drawn.
      measurements: those of the dtypes that were measured in the most sizes, in the order of the file.
    """

    size: str
    fixed: Mapping[str, Word]
    along: tuple[str, ...]
    measurements: tuple[Measurement, ...]

    @property
    def sizes(self) -> list[int]:
        """Every size that something was measured in."""
        return sorted({*self.sizes_of(self.measurements)})

    @property
    def dtypes(self) -> list[Word | None]:
        """The dtypes, `None` among them where there is one without."""
        return values(self.measurements, DTYPE)

    @property
    def sizes_a_line(self) -> int:
        """In how many sizes each dtype was measured."""
        first = self.dtypes[0]
        return len({each.subject[self.size] for each in self.measurements if each.subject.get(DTYPE) == first})

    def lines(self, dtype: Word | None) -> list[list[Measurement]]:
        """Those of one dtype by each peer that has some, by size."""
        of_dtype = [each for each in self.measurements if each.subject.get(DTYPE) == dtype]
        lines = ([each for each in of_dtype if each.peer == peer] for peer in peers(of_dtype))
        return [sorted(line, key=lambda each: each.subject[self.size]) for line in lines]

    def sizes_of(self, line: Iterable[Measurement]) -> list[int]:
        """The size of each."""
        return [int(each.subject[self.size]) for each in line]


def densest(measurements: Sequence[Measurement]) -> Slice | None:
    """The slice of one operation and case that has most sizes, against tokens rather than anything else.

    `None` where nothing was measured in two sizes.
    """
    vary = varying(measurements)
    sizes = [name for name in vary if is_size(measurements, name)]
    words = [name for name in vary if name not in (*sizes, DTYPE)]
    found = []
    for size in reversed(sizes):
        sized = [each for each in measurements if size in each.subject]
        others = [name for name in sizes if name != size]
        if size == NUM_TOKENS:
            found.append(_densest(sized, size, words, others))
        found.append(_densest(sized, size, [*words, *others], []))
    return max((each for each in found if each), key=lambda each: each.sizes_a_line, default=None)


def _densest(
    measurements: Sequence[Measurement], size: str, fixed: Sequence[str], along: Sequence[str]
) -> Slice | None:
    groups = grouped(measurements, lambda each: tuple(each.subject.get(name) for name in fixed))
    found = max(groups.values(), key=len)
    if len({(each.subject.get(DTYPE), each.peer, each.subject[size]) for each in found}) < len(found):
        return None  # a line would have two points at one size
    counts = collections.Counter(
        dtype for dtype, _ in {(each.subject.get(DTYPE), each.subject[size]) for each in found}
    )
    most = max(counts.values())
    chosen = tuple(each for each in found if counts[each.subject.get(DTYPE)] == most)
    same = {name: chosen[0].subject[name] for name in fixed if name in chosen[0].subject}
    vary = tuple(name for name in along if name in varying(chosen))
    return Slice(size, same, vary, chosen) if most > 1 else None
