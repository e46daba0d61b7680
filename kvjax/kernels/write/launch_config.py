"""Launch configurations: how many tokens a program takes."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from kvjax.kernels.codecs import codecs_of
from kvjax.spec import AttentionSpec

PROGRAMS = 264
"""Minimum number of programs of a launch, given enough tokens: two for each multiprocessor of an H200."""

WIDE_ELEMENTS = 1024
"""Elements of a token's keys or values from which on fp8 has one configuration."""

SEARCHED = 16 * PROGRAMS
"""Writes of fewer tokens find repeated slots themselves: every program reads all slots that follow its own. At 4,096
tokens the search takes 1.4 to 4.5 us. For this many tokens and more the caller makes the slots unique."""

RUNG_TOKENS = (1, 2, 4, 16, 64)
"""Tokens per program that a kernel for any number of tokens selects from. More than the last are never needed."""

MAX_ROTATED_TOKENS = 4
"""Maximum tokens per program of a kernel for any number of tokens that rotates: its code is unrolled over tokens."""


def max_elements(spec: AttentionSpec) -> int:
    """Maximum number of key (or value) elements of a program."""
    return min(codec.elements for codec in codecs_of(spec))


def has_to_split(spec: AttentionSpec) -> bool:
    """Whether keys and values are written in different ways, each by programs of its own."""
    return len({codec.is_staged for codec in codecs_of(spec)}) > 1


@dataclasses.dataclass(frozen=True)
class WriteConfig:
    """How the write is launched.

    Attributes:
      tokens: tokens per program.
      split_kv: whether separate programs write the keys and the values of these tokens. With a rotation, the former
        rotate the keys, the latter the queries.
    """

    tokens: int
    split_kv: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"{self.tokens=} must be positive")

    @classmethod
    def by_min_tokens(cls, spec: AttentionSpec, rotates: bool = False) -> dict[int, WriteConfig]:
        """Maps the smallest number of tokens for which a configuration is used to that configuration.

        A program takes up to `max_elements` if the launch still has `PROGRAMS` programs. For few tokens, writes that
        compute scales or rotate have separate programs for keys and values: otherwise one would wait for the other, and
        no other work hides the latency. So does every write in which only keys or only values go through shared memory.
        """
        max_tokens = max_elements(spec) // elements_per_token(spec)
        smallest = cls(1, split_kv=(spec.stores_scales or rotates) and len(codecs_of(spec)) > 1)
        sizes = [1 << i for i in range(1, max(1, max_tokens).bit_length())] or [1]
        larger = [cls(size, split_kv=has_to_split(spec)) for size in sizes]
        return {1: smallest} | {max(config.tokens, 2) * PROGRAMS: config for config in larger if config != smallest}

    @classmethod
    def choose(cls, spec: AttentionSpec, num_tokens: int, rotates: bool = False) -> WriteConfig:
        """The configuration for a known number of tokens."""
        configs = cls.by_min_tokens(spec, rotates)
        return configs[max(least for least in configs if least <= max(num_tokens, 1))]

    def num_programs(self, num_tokens: int) -> int:
        """Programs of a launch."""
        return -(-num_tokens // self.tokens) * (2 if self.split_kv else 1)


def elements_per_token(spec: AttentionSpec) -> int:
    """Elements of a token's keys or values, or of its latent or rope key, whichever are more."""
    return spec.num_kv_heads * max(spec.part_sizes)


class Rung(NamedTuple):
    """A configuration that a kernel for any number of tokens uses from `min_tokens` tokens up to the next rung's."""

    min_tokens: int
    config: WriteConfig


def rungs(spec: AttentionSpec, unique_slots: bool, rotates: bool = False) -> list[Rung]:
    """The configurations that a kernel for any number of tokens selects from.

    Selects those of `WriteConfig.by_min_tokens` that `RUNG_TOKENS` lists, and the largest. Unless slots are unique,
    a rung at `SEARCHED` switches the search for repeated slots off. fp8 of 1,024 elements per token and more has one
    configuration, unless it rotates: saving the selection for few tokens gains more than it costs for very many
    (docs/notes/kernels.md).
    """
    max_tokens = MAX_ROTATED_TOKENS if rotates else RUNG_TOKENS[-1]
    configs = {
        least: config
        for least, config in WriteConfig.by_min_tokens(spec, rotates).items()
        if config.tokens <= max_tokens
    }
    is_fp8 = spec.dtype.is_quantized and not spec.stores_scales
    if is_fp8 and elements_per_token(spec) >= WIDE_ELEMENTS and not rotates:
        configs = {1: configs[1]}
    [*_, largest] = configs.values()
    selected = {least: config for least, config in configs.items() if config.tokens in RUNG_TOKENS or config is largest}
    thresholds = sorted(selected if unique_slots else {*selected, SEARCHED})
    return [Rung(least, selected[max(below for below in selected if below <= least)]) for least in thresholds]
