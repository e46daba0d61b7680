"""Caches in the host's memory, whose blocks are copied beside the programs of a device."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from kvjax.cache import SCALES, KVCache
from kvjax.errors import KVCacheTypeError, KVCacheValueError, UnsupportedError, kind_of
from kvjax.memory import host_sharding, without_mesh, zeroed_pages
from kvjax.ops import host_copies
from kvjax.ops.arguments import INDEX_DTYPES, check_array, check_cache
from kvjax.ops.blocks import is_traced, named_views, put, sharding_of_pages, take
from kvjax.ops.host_copies import HostCopy
from kvjax.spec import AttentionSpec, as_int

type Pages = tuple[jax.Array, ...]
"""Pages of each cache, as integers, `[num_pages, ...]`."""

SLAB_BYTES = 128 << 20
"""The largest slab of blocks. All slabs have one size, so that each program is compiled once. The unused part of a slab
does not move over the bus."""

_NO_BLOCK = 2**31 - 1
"""Past the last block of every cache: what is written there is dropped."""


class HostCaches:
    """Blocks in the host's memory for those that caches on a device have no room for.

    `store` copies blocks of the caches to the host, `load` brings them back. Both return at once, and the bytes move
    while the device runs the programs that it is given next: a GPU's copy engines move them, not its kernels. A call
    sees what the calls before it have copied. Pinned host memory holds the blocks (on a CPU, its own memory), all
    layers of a block together if one cache has them (`num_layers`): copies of small pieces are slower.

    The caches may be divided among devices of this process, but not by blocks; each device moves what it holds.

    A page's bytes have meaning only with its cache's scales. All calls must be given caches with those scales that the
    first caches had. Scales are compared when bytes move; the next call raises if they differ.

    It is not thread-safe. An error of a copy is raised by a later call; without one it is not reported.

    Args:
      caches: a `KVCache`, or a list, tuple or dictionary of those that share block numbers. Only their specs, scales
        and shardings are used.
      num_blocks: blocks on the host.

    Attributes:
      num_blocks: blocks on the host.

    Raises:
      KVCacheTypeError: something other than caches.
      KVCacheValueError: `num_blocks` is less than 1, or one cache is given twice.
      KVCacheMemoryError: the host has too little memory.
      UnsupportedError: a traced call; caches that are divided by blocks, on different devices, in part on devices of
        other processes, or neither on CPUs nor on CUDA's GPUs.
    """

    def __init__(self, caches: Any, num_blocks: int) -> None:
        flat, self._tree = _flat(caches)
        self._kinds = [_Kind.of(each) for each in flat]
        devices = self._kinds[0].sharding.device_set
        for number, kind in enumerate(self._kinds):
            if kind.sharding.device_set != devices:
                raise UnsupportedError(
                    f"caches[{number}]: got a cache on {kind.sharding}, expected the devices of caches[0]: make a"
                    " HostCaches for each"
                )
        for device in devices:
            host_copies.check(device)
        self._scales = [np.asarray(each) for each in _scales_of(flat)]
        self.num_blocks = as_int("num_blocks", num_blocks, least=1)
        self._kv = [
            zeroed_pages(each.spec, self.num_blocks, each.num_layers, host_sharding(each.sharding))
            for each in self._kinds
        ]
        fitting = max(SLAB_BYTES * self.num_blocks // sum(kv.nbytes for kv in self._kv), 1)
        self._slab = 1 << min(fitting.bit_length() - 1, (self.num_blocks - 1).bit_length())
        self._requested = np.zeros(self.num_blocks, bool)  # which blocks `store` was given
        self._holds = np.zeros(self.num_blocks, bool)  # which blocks hold something; for the thread alone
        self._places = tuple(sharding_of_pages(each.kv, None) for each in flat)
        # One thread, so that copies are made in the order of the calls.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvjax-host-caches")
        self._unchecked: list[concurrent.futures.Future[None]] = []

    def store(self, caches: Any, pairs: ArrayLike) -> None:
        """Copies blocks of `caches` to the host, as earlier programs leave them.

        The blocks may be written again by the next program: the call starts a program that copies them elsewhere on the
        device first, to slabs of up to 128 MiB that are free again when their blocks are on the host.

        Args:
          caches: as those of `HostCaches(caches, ...)`, with any number of blocks.
          pairs: int32 or int64 `[num_pairs, 2]`: block of `caches` and block on the host, as `Swaps.to_host`;
            preferably a NumPy array.

        Raises:
          KVCacheValueError: caches of another kind; a block that does not exist; a host block that is given twice; or
            an earlier call was given other scales.
          KVCacheTypeError, UnsupportedError: as for `HostCaches`.
        """
        caches = self._checked(caches)
        blocks, host_blocks = self._sorted(pairs, 1, min(each.num_blocks for each in caches))
        scales = _scales_of(caches)
        with without_mesh():
            taken, kvs = _take(self._places), tuple(each.kv for each in caches)
            slabs = [taken(kvs, each) for each in self._slabs(blocks, 0)]
        if slabs:
            self._requested[host_blocks] = True
            self._start(self._store, slabs, host_blocks, scales)

    def load(self, pairs: ArrayLike) -> Loading:
        """Starts to copy blocks from the host; `Loading.into` writes them to caches.

        Until then they are in slabs of up to 128 MiB on the device.

        Args:
          pairs: int32 or int64 `[num_pairs, 2]`: block on the host and block of the caches, as `Swaps.from_host`.

        Raises:
          KVCacheValueError: a block on the host that does not exist or that nothing was stored in; a block that is
            negative or given twice; or an earlier call was given other scales.
          KVCacheTypeError: no array of integers.
          UnsupportedError: a traced call.
        """
        self._start_call()
        blocks, host_blocks = self._sorted(pairs, 0, _NO_BLOCK)
        _check_held(self._requested, host_blocks)
        with without_mesh():
            memory, like = _memory(self._places), self._slab_like
            slabs = [memory(like) for _ in self._slabs(blocks, 0)]
        return Loading(self, blocks, slabs, self._start(self._load, slabs, host_blocks))

    def wait(self) -> None:
        """Waits until all copies are made.

        Raises:
          KVCacheValueError: an earlier call was given other scales.
        """
        concurrent.futures.wait(self._unchecked)
        self._start_call()

    @property
    def _slab_like(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        shapes = [(self._slab, *kv.shape[1:]) for kv in self._kv]
        dtypes = [f"uint{8 * kv.dtype.itemsize}" for kv in self._kv]
        return tuple(map(jax.ShapeDtypeStruct, shapes, dtypes))

    def _slabs(self, blocks: np.ndarray, padding: int) -> Iterator[np.ndarray]:
        """Divides blocks into those of slabs, of which the last is padded."""
        padded = np.pad(blocks, (0, -len(blocks) % self._slab), constant_values=padding)
        return iter(padded.reshape(-1, self._slab))

    def _checked(self, caches: Any) -> list[KVCache]:
        """Returns the caches of a call, which are like the first ones."""
        self._start_call()
        flat, tree = _flat(caches)
        if tree != self._tree:
            raise KVCacheValueError(f"caches: got {tree}, expected {self._tree}, as HostCaches was given")
        for number, (cache, expected) in enumerate(zip(flat, self._kinds, strict=True)):
            kind = _Kind.of(cache)
            if kind.sharding.is_equivalent_to(expected.sharding, cache.kv.ndim):
                kind = kind._replace(sharding=expected.sharding)
            for what, got, wanted in zip(_Kind._fields, kind, expected, strict=True):
                if got != wanted:
                    raise KVCacheValueError(
                        f"caches[{number}].{what}: got {got}, expected {wanted}, as HostCaches was given"
                    )
        return flat

    def _sorted(self, pairs: Any, host_side: int, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the caches' blocks and the host's of checked pairs, in the order of the latter: they move in runs."""
        check_array("pairs", pairs, [("num_pairs", None), ("blocks", 2)], INDEX_DTYPES)
        pairs = np.asarray(pairs)
        for side, what, number in ((1 - host_side, "block", num_blocks), (host_side, "host block", self.num_blocks)):
            _check_blocks(pairs[:, side], what, number)
        written = pairs[:, 1]
        values, counts = np.unique(written, return_counts=True)
        if (counts > 1).any():
            raise KVCacheValueError(f"pairs: got block {values[counts > 1][0]} as two destinations, expected one")
        pairs = pairs[np.argsort(pairs[:, host_side], kind="stable")].astype(np.int32)
        return pairs[:, 1 - host_side], pairs[:, host_side]

    def _start(self, run: Any, *args: Any) -> concurrent.futures.Future[None]:
        started = self._thread.submit(run, *args)
        self._unchecked.append(started)
        return started

    def _start_call(self) -> None:
        """Raises the first error of copies that have ended, and refuses traced calls."""
        _refuse_tracing()
        ended = {each for each in self._unchecked if each.done()}
        first = next((each for each in self._unchecked if each in ended and each.exception()), None)
        self._unchecked = [each for each in self._unchecked if each not in ended]
        if first is not None:
            first.result()

    def _store(self, slabs: Sequence[Pages], host_blocks: np.ndarray, scales: Sequence[jax.Array]) -> None:
        self._holds[host_blocks] = False
        self._check_scales(scales)
        self._move(slabs, host_blocks, to_host=True)
        self._holds[host_blocks] = True

    def _load(self, slabs: Sequence[Pages], host_blocks: np.ndarray) -> None:
        _check_held(self._holds, host_blocks)  # what was to be stored may have failed
        self._move(slabs, host_blocks, to_host=False)

    def _move(self, slabs: Sequence[Pages], host_blocks: np.ndarray, *, to_host: bool) -> None:
        """Copies slabs to host blocks or from them, in a thread that waits for the programs that make the slabs."""
        with contextlib.ExitStack() as ends:  # also after an error: the slabs are freed afterwards
            for device in self._kinds[0].sharding.device_set:
                ends.callback(host_copies.wait, device)
            for first, slab in zip(range(0, len(host_blocks), self._slab), slabs, strict=True):
                numbers = host_blocks[first : first + self._slab]
                for kv, pages in zip(self._kv, slab, strict=True):
                    pages.block_until_ready()
                    on_host = {shard.device: shard.data for shard in kv.addressable_shards}
                    for shard in pages.addressable_shards:
                        host_copies.start(shard.device, _copies(shard.data, on_host[shard.device], numbers, to_host))

    def _check_scales(self, scales: Sequence[jax.Array]) -> None:
        for scale, expected in zip(scales, self._scales, strict=True):
            if (differ := np.flatnonzero((got := np.asarray(scale)) != expected)).size:
                at = differ[0]
                raise KVCacheValueError(
                    f"caches: got a scale {got.reshape(-1)[at]}, expected {expected.reshape(-1)[at]}, with which"
                    " HostCaches was made: blocks of one scale are not those of another"
                )


class _Kind(NamedTuple):
    """What caches have in common whose blocks can be copied to one HostCaches."""

    spec: AttentionSpec
    num_layers: int | None
    sharding: jax.sharding.Sharding
    scale_shapes: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, cache: KVCache) -> _Kind:
        """Raises `UnsupportedError` for a cache that is not copied."""
        kv = cache.kv
        if not kv.is_fully_addressable:
            raise UnsupportedError(f"caches: got a cache on {kv.sharding}, expected one on devices of this process")
        if kv.sharding.shard_shape(kv.shape)[0] != kv.shape[0]:
            raise UnsupportedError(
                f"caches: got a cache on {kv.sharding}, expected blocks that are not divided among devices"
            )
        scales = (getattr(cache, name) for name in SCALES)
        shapes = tuple(None if each is None else each.shape for each in scales)
        return cls(cache.spec, cache.num_layers, kv.sharding, shapes)


class Loading:
    """Blocks on their way from the host, which `HostCaches.load` returns."""

    def __init__(
        self, host: HostCaches, blocks: np.ndarray, slabs: list[Pages], started: concurrent.futures.Future[None]
    ) -> None:
        self._host, self._blocks, self._slabs, self._started = host, blocks, slabs, started
        self._is_written = False

    def is_ready(self) -> bool:
        """Whether `into` returns without waiting for copies."""
        return self._started.done()

    def into(self, caches: Any) -> Any:
        """Writes the blocks to `caches`, which are donated, and returns these. Waits until the copies are made.

        If a device fails while it writes, the caches may be lost.

        Raises:
          KVCacheValueError: caches of another kind; a block that they do not have; or blocks that were written before.
            In these cases, and if copies failed, nothing is donated.
          KVCacheTypeError, UnsupportedError: as for `HostCaches`.
        """
        if self._is_written:
            raise KVCacheValueError("into: got a second call, expected one: the blocks were written before")
        concurrent.futures.wait([self._started])
        flat = self._host._checked(caches)
        self._started.result()  # again, if an earlier call raised its error
        _check_blocks(self._blocks, "block", min(each.num_blocks for each in flat))
        kv, scales = tuple(each.kv for each in flat), _scales_of(flat)
        with without_mesh(), named_views("caches"):
            for slab, blocks in zip(self._slabs, self._host._slabs(self._blocks, _NO_BLOCK), strict=True):
                kv = _put(kv, slab, blocks)
        self._slabs, self._is_written = [], True
        if scales:
            self._host._start(self._host._check_scales, scales)
        written = [dataclasses.replace(cache, kv=each) for cache, each in zip(flat, kv, strict=True)]
        return jax.tree.unflatten(self._host._tree, written)


def _flat(caches: Any) -> tuple[list[KVCache], Any]:
    flat, tree = jax.tree.flatten(caches, is_leaf=lambda each: isinstance(each, KVCache))
    if not flat:
        raise KVCacheTypeError(f"caches: got {kind_of(caches)} without a KVCache, expected at least one")
    first: dict[int, int] = {}
    for number, each in enumerate(flat):
        check_cache(each, f"caches[{number}]")
        _refuse_tracing(each.kv)
        if (same := first.setdefault(id(each.kv), number)) != number:
            raise KVCacheValueError(f"caches[{number}]: got the cache that is caches[{same}], expected another")
    return flat, tree


def _refuse_tracing(*arrays: jax.Array) -> None:
    if is_traced(jax.lax.full((), 0), *arrays):  # the former inside jit, whatever the arrays are
        raise UnsupportedError("HostCaches: got a traced call, expected one outside jit")


def _check_held(holds: np.ndarray, host_blocks: np.ndarray) -> None:
    if (empty := host_blocks[~holds[host_blocks]]).size:
        raise KVCacheValueError(f"pairs: got host block {empty[0]}, expected one that something was stored in")


def _check_blocks(blocks: np.ndarray, what: str, number: int) -> None:
    if (outside := blocks[(blocks < 0) | (blocks >= number)]).size:
        raise KVCacheValueError(f"pairs: got {what} {outside[0]}, expected from 0 to {number - 1}")


def _scales_of(caches: Sequence[KVCache]) -> tuple[jax.Array, ...]:
    """Returns the scales in arrays of their own: a step that follows may donate the caches'."""
    scales = tuple(each for cache in caches for name in SCALES if (each := getattr(cache, name)) is not None)
    with without_mesh():
        return _copied(scales) if scales else ()


@jax.jit
def _copied(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(map(jnp.copy, arrays))


@functools.cache
def _take(places: tuple[jax.sharding.Sharding, ...]) -> Callable[[tuple[jax.Array, ...], np.ndarray], Pages]:
    """A program that copies blocks of each cache."""

    def taken(kvs: tuple[jax.Array, ...], blocks: jax.Array) -> Pages:
        return tuple(take(kv, blocks, None) for kv in kvs)

    return jax.jit(taken, out_shardings=places)


@functools.cache
def _memory(places: tuple[jax.sharding.Sharding, ...]) -> Callable[[tuple[jax.ShapeDtypeStruct, ...]], Pages]:
    """A program that returns memory for pages."""

    def memory(like: tuple[jax.ShapeDtypeStruct, ...]) -> Pages:
        return tuple(jnp.zeros(each.shape, each.dtype) for each in like)

    return jax.jit(memory, static_argnums=0, out_shardings=places)


@functools.partial(jax.jit, donate_argnums=0)
def _put(kvs: tuple[jax.Array, ...], pages: Pages, blocks: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(put(kv, each, blocks, None) for kv, each in zip(kvs, pages, strict=True))


def _copies(pages: jax.Array, on_host: jax.Array, host_blocks: np.ndarray, to_host: bool) -> Iterator[HostCopy]:
    """The copies of a device's first pages, one for each run of host blocks, which are in ascending order."""
    size = pages.nbytes // len(pages)
    page, host = pages.unsafe_buffer_pointer(), on_host.unsafe_buffer_pointer()
    firsts = [0, *(np.flatnonzero(np.diff(host_blocks) != 1) + 1).tolist(), len(host_blocks)]
    for first, end in itertools.pairwise(firsts):
        sides = page + first * size, host + int(host_blocks[first]) * size
        source, to = sides if to_host else sides[::-1]
        yield HostCopy(to, source, (end - first) * size)
