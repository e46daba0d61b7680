"""A kernel compiled for a GPU, with what launching it takes, as bytes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


class LaunchUnavailableError(RuntimeError):
    """JAX or its CUDA plugin lacks something that launching on torch's streams needs."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The properties of a GPU that a kernel's code depends on, named as in `jax.sharding.AbstractDevice`.

    Attributes:
      device_kind: the model's name.
      compute_capability: such as "9.0".
      shared_memory_per_block_optin: bytes of shared memory that a thread block may have.
    """

    device_kind: str
    compute_capability: str
    shared_memory_per_block_optin: int
    platform: str = "gpu"
    num_cores: int | None = None

    @property
    def version(self) -> tuple[int, int]:
        """The major and minor compute capability."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The constants of a kernel's launches.

    Attributes:
      grid: thread blocks along y and z. The number of programs, those along x, is an argument of each launch.
      block: threads of a block along x, y and z.
      shared_bytes: dynamic shared memory of a block.
    """

    grid: tuple[int, int]
    block: tuple[int, int, int]
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class Binary:
    """A kernel compiled for a GPU.

    Attributes:
      name: its symbol in the code.
      passed: indices of the arguments that it takes. Its one parameter is a structure of these, of 64 bits each.
      shape: the constants of its launches.
      code: a CUDA binary (cubin), an ELF file for one GPU architecture.
    """

    name: str
    passed: tuple[int, ...]
    shape: Shape
    code: bytes = dataclasses.field(repr=False)

    def to_bytes(self) -> bytes:
        """The inverse of `from_bytes`."""
        fields = dataclasses.asdict(self)
        del fields["code"]
        head = json.dumps(fields, sort_keys=True).encode()
        return len(head).to_bytes(4, "little") + head + self.code

    @classmethod
    def from_bytes(cls, content: bytes) -> Binary:
        """What `to_bytes` was given.

        Raises:
          ValueError: the bytes are not of this form.
        """
        end = 4 + int.from_bytes(content[:4], "little")
        try:
            head: dict[str, Any] = json.loads(content[4:end])
            (y, z), (block_x, block_y, block_z) = head["shape"]["grid"], head["shape"]["block"]
            shape = Shape(
                (int(y), int(z)), (int(block_x), int(block_y), int(block_z)), int(head["shape"]["shared_bytes"])
            )
            return cls(str(head["name"]), tuple(map(int, head["passed"])), shape, content[end:])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a kernel: {error!r}") from error
