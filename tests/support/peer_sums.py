"""Sums over devices by `examples.peer_sum`: `peer_sums.py NUM_DEVICES CHECK ...`, those of the kernel on GPUs alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from examples import peer_sum
from examples.peer_sum import DTYPES, Peers
from support.helpers import assert_same_bytes

AXIS, WIDTH = "tensor", 4096
ROWS = 1, 3, 37, 48, 64, 128  # up to what the kernel takes of float32


def divided(mesh: jax.sharding.Mesh, run: Callable[..., Any]) -> Callable[..., Any]:
    """A jitted function of each device's row of its arguments, whose results are each device's."""

    def of_a_device(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], run(*args))

    return jax.jit(jax.shard_map(of_a_device, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))


def summed(x: jax.Array, peers: Peers) -> jax.Array:
    return peer_sum.peer_sum(x[0], peers, AXIS)


def on_every_device(parts: np.ndarray) -> np.ndarray:
    """What all devices should have: the sum in float32, in the order of devices, rounded once."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total += part.astype(np.float32)
    return np.broadcast_to(total.astype(parts.dtype), parts.shape)


def peers_for(max_bytes: int, num_devices: int, num_rows: int = 1) -> Peers:
    """The shapes of what `connect` returns, of so many devices."""
    words = (peer_sum._first_inbox(num_devices) + 2 * num_devices * peer_sum._rounded(max_bytes)) // 4
    addresses = jax.ShapeDtypeStruct((num_rows, num_devices + 1, 2), jnp.uint32)
    return Peers(jax.ShapeDtypeStruct((num_rows, words), jnp.int32), addresses)


def check_what_is_left_to_xla(mesh: jax.sharding.Mesh) -> None:
    """Through memory for less. Devices of a CPU do not connect: theirs are zeros, which nothing reads."""
    if mesh.devices.flat[0].platform == "gpu":
        peers = peer_sum.connect(mesh, AXIS, 4096)
    else:
        peers = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), peers_for(4096, mesh.size, mesh.size))
    for shape, dtype in [
        ((64, 64), "float32"),
        ((3, 5), "bfloat16"),
        ((8, 128), "int32"),
        ((0, 128), "float16"),
        ((), "float32"),
    ]:
        parts = np.random.default_rng(0).integers(-9, 10, (mesh.size, *shape)).astype(jnp.dtype(dtype))
        assert_same_bytes(np.asarray(divided(mesh, summed)(parts, peers)), on_every_device(parts))


def check_sums_are_exact(mesh: jax.sharding.Mesh) -> None:
    peers = peer_sum.connect(mesh, AXIS, peer_sum.MAX_BYTES)
    for dtype in DTYPES:
        for rows in ROWS:
            parts = np.random.default_rng(rows).normal(size=(mesh.size, rows, WIDTH)).astype(jnp.dtype(dtype))
            run = divided(mesh, summed)
            assert "mosaic_gpu" in run.lower(parts, peers).as_text(), (dtype, rows)
            assert_same_bytes(np.asarray(run(parts, peers)), on_every_device(parts))


def check_devices_that_arrive_at_different_times(mesh: jax.sharding.Mesh) -> None:
    """In a loop: each device in turn computes for longer than the others before a sum, of one size and of several."""
    peers = peer_sum.connect(mesh, AXIS, peer_sum.MAX_BYTES)
    for dtype in DTYPES:
        for sizes in ((64,), (64, 1, 37)):
            # Sums are whole numbers that all dtypes have, and others in each step.
            parts = np.random.default_rng(0).integers(0, 4, (mesh.size, 64, WIDTH)).astype(jnp.dtype(dtype))
            factors = np.arange(40) % 4 + 1
            zero = np.zeros((mesh.size, 1), parts.dtype)
            got = divided(mesh, partial(in_a_loop, sizes=sizes, factors=factors))(parts, peers, zero)
            for sums, rows in zip(got, sizes, strict=True):
                expected = on_every_device(parts)[:, None, :rows] * factors.astype(parts.dtype)[:, None, None]
                assert_same_bytes(np.asarray(sums), expected)


def in_a_loop(
    parts: jax.Array, peers: Peers, zero: jax.Array, *, sizes: Sequence[int], factors: np.ndarray
) -> list[jax.Array]:
    """Sums of the first rows, multiplied by a step's factor. What is computed meanwhile is added `zero` times."""
    part, zero, number = parts[0], zero[0, 0], jax.lax.axis_index(AXIS)
    num_devices = jax.lax.axis_size(AXIS)
    square = jnp.sin(jnp.arange(256 * 256, dtype=jnp.float32)).reshape(256, 256)

    def step(before: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        i, factor = step
        sums = []
        for j, rows in enumerate(sizes):
            count = jnp.where((i + j + number) % num_devices == 0, 100, 0)
            worked = jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(x @ x), square + before.astype(jnp.float32))
            late = zero * worked.max().astype(part.dtype)
            sums.append(peer_sum.peer_sum(part[:rows] * factor + late, peers, AXIS))
            before = zero * sums[-1].max()
        return before, sums

    return jax.lax.scan(step, zero, (jnp.arange(len(factors)), jnp.asarray(factors, part.dtype)))[1]


CHECKS = {name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")}


def main() -> None:
    number, *checks = sys.argv[1:]
    mesh = jax.make_mesh((int(number),), (AXIS,), (AxisType.Auto,), devices=jax.devices()[: int(number)])
    for check in checks:
        CHECKS[check](mesh)


if __name__ == "__main__":
    main()
