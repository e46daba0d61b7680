"""Caches in the host's memory, whose blocks are copied beside the programs of a device."""

from __future__ import annotations

import concurrent.futures
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
"""Blocks move in slabs of at most so many bytes, so that programs are compiled for one number of them. The
rest of one that is not full does not move over the bus."""

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

    Not to be used by several threads at once.

    Args:
      caches: a `KVCache`, or a list, tuple or dictionary of those that share block numbers. Only their specs, scales
        and places matter here.
      num_blocks: blocks on the host.

    Attributes:
      num_blocks: blocks on the host.

    Raises:
      KVCacheTypeError: something other than caches.
      KVCacheValueError: a number that is no size.
      KVCacheMemoryError: the host has too little memory.
      UnsupportedError: caches that are traced, divided by blocks, or in part on devices of other processes.
    """

    def __init__(self, caches: Any, num_blocks: int) -> None:
        flat, self._tree = _flat(caches)
        self._kinds = [_Kind.of(each) for each in flat]
        scales = _scales_of(flat)
        self._scales = np.zeros(0, np.float32) if scales is None else np.asarray(scales)
        self.num_blocks = as_int("num_blocks", num_blocks, least=1)
        self._kv = [
            zeroed_pages(each.spec, self.num_blocks, each.num_layers, host_sharding(each.sharding))
            for each in self._kinds
        ]
        fitting = max(SLAB_BYTES * self.num_blocks // sum(kv.nbytes for kv in self._kv), 1)
        self._slab = 1 << min(fitting.bit_length() - 1, (self.num_blocks - 1).bit_length())
        self._holds = np.zeros(self.num_blocks, bool)  # which blocks something was stored in
        self._places = tuple(sharding_of_pages(each.kv, None) for each in flat)
        # One thread, so that copies are made in the order of the calls.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvjax-host-caches")
        self._unchecked: list[concurrent.futures.Future[None]] = []

    def store(self, caches: Any, pairs: ArrayLike) -> None:
        """Copies blocks of `caches` to the host, as earlier programs leave them.

        The blocks may be written again by the next program: the call starts a program that copies them elsewhere on the
        device first, which takes memory of their size until they are on the host.

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
            self._holds[host_blocks] = True
            self._start(self._store, slabs, host_blocks, scales)

    def load(self, pairs: ArrayLike) -> Loading:
        """Starts to copy blocks from the host; `Loading.into` writes them to caches.

        Args:
          pairs: int32 or int64 `[num_pairs, 2]`: block on the host and block of the caches, as `Swaps.from_host`.

        Raises:
          KVCacheValueError: a block on the host that does not exist or that nothing was stored in; a block that is
            negative or given twice; or an earlier call was given other scales.
          KVCacheTypeError: no array of integers.
        """
        self._raise_errors()
        blocks, host_blocks = self._sorted(pairs, 0, None)
        self._check_held(host_blocks)
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
        self._raise_errors()

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
        self._raise_errors()
        flat, tree = _flat(caches)
        if tree != self._tree:
            raise KVCacheValueError(f"caches: got {tree}, expected {self._tree}, as HostCaches was given")
        for number, (cache, expected) in enumerate(zip(flat, self._kinds, strict=True)):
            for what, got, wanted in zip(_Kind._fields, _Kind.of(cache), expected, strict=True):
                if got != wanted:
                    raise KVCacheValueError(
                        f"caches[{number}].{what}: got {got}, expected {wanted}, as HostCaches was given"
                    )
        return flat

    def _sorted(self, pairs: Any, host_side: int, num_blocks: int | None) -> tuple[np.ndarray, np.ndarray]:
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

    def _raise_errors(self) -> None:
        """Raises the first error of copies that have ended."""
        ended = [each for each in self._unchecked if each.done()]
        self._unchecked = [each for each in self._unchecked if not each.done()]
        for each in ended:
            each.result()

    def _check_held(self, host_blocks: np.ndarray) -> None:
        if (empty := host_blocks[~self._holds[host_blocks]]).size:
            raise KVCacheValueError(f"pairs: got host block {empty[0]}, expected one that something was stored in")

    def _store(self, slabs: Sequence[Pages], host_blocks: np.ndarray, scales: jax.Array | None) -> None:
        try:
            if scales is not None:
                self._check_scales(scales)
            self._move(slabs, host_blocks, to_host=True)
        except BaseException:
            self._holds[host_blocks] = False
            raise
        self._holds[host_blocks] = True  # again, since what was to be stored before may have failed

    def _load(self, slabs: Sequence[Pages], host_blocks: np.ndarray) -> None:
        self._check_held(host_blocks)  # again, since what was to be stored may have failed
        self._move(slabs, host_blocks, to_host=False)

    def _move(self, slabs: Sequence[Pages], host_blocks: np.ndarray, *, to_host: bool) -> None:
        """Copies slabs to host blocks or from them, in a thread that waits for the programs that make the slabs."""
        devices: set[jax.Device] = set()
        try:
            for first, slab in zip(range(0, len(host_blocks), self._slab), slabs, strict=True):
                for kv, pages in zip(self._kv, slab, strict=True):
                    pages.block_until_ready()
                    on_host = {shard.device: shard.data for shard in kv.addressable_shards}
                    for shard in pages.addressable_shards:
                        numbers = host_blocks[first : first + self._slab]
                        devices.add(shard.device)
                        host_copies.start(shard.device, _copies(shard.data, on_host[shard.device], numbers, to_host))
        finally:  # the slabs are freed
            for device in devices:
                host_copies.wait(device)

    def _check_scales(self, scales: jax.Array) -> None:
        got = np.asarray(scales)
        if (differ := np.flatnonzero(got != self._scales)).size:
            raise KVCacheValueError(
                f"caches: got a scale {got[differ[0]]}, expected {self._scales[differ[0]]}, with which HostCaches was"
                " made: blocks of one scale are not those of another"
            )


class _Kind(NamedTuple):
    """What caches have in common whose blocks can be copied to one HostCaches."""

    spec: AttentionSpec
    num_layers: int | None
    sharding: jax.sharding.Sharding
    scales: tuple[bool, ...]

    @classmethod
    def of(cls, cache: KVCache) -> _Kind:
        """Raises `UnsupportedError` for a cache that is not copied."""
        kv = cache.kv
        if is_traced(kv):
            raise UnsupportedError("caches: got traced caches, expected a call outside jit")
        if not kv.is_fully_addressable:
            raise UnsupportedError(f"caches: got a cache on {kv.sharding}, expected one on devices of this process")
        if kv.sharding.shard_shape(kv.shape)[0] != kv.shape[0]:
            raise UnsupportedError(f"caches: got a cache on {kv.sharding}, expected blocks that are not divided")
        scales = tuple(getattr(cache, name) is not None for name in SCALES)
        return cls(cache.spec, cache.num_layers, kv.sharding, scales)


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

        Raises:
          KVCacheValueError: caches of another kind; a block that they do not have; or blocks that were written before.
            Nothing is donated.
          KVCacheTypeError, UnsupportedError: as for `HostCaches`.
        """
        if self._is_written:
            raise KVCacheValueError("into: got a second call, expected one: the blocks were written before")
        concurrent.futures.wait([self._started])
        flat = self._host._checked(caches)
        self._started.result()  # again, if an earlier call raised its error
        _check_blocks(self._blocks, "block", min(each.num_blocks for each in flat))
        kv = tuple(each.kv for each in flat)
        with without_mesh(), named_views("caches"):
            for slab, blocks in zip(self._slabs, self._host._slabs(self._blocks, _NO_BLOCK), strict=True):
                kv = _put(kv, slab, blocks)
        self._slabs, self._is_written = [], True
        if (scales := _scales_of(flat)) is not None:
            self._host._start(self._host._check_scales, scales)
        written = [dataclasses.replace(cache, kv=each) for cache, each in zip(flat, kv, strict=True)]
        return jax.tree.unflatten(self._host._tree, written)


def _flat(caches: Any) -> tuple[list[KVCache], Any]:
    flat, tree = jax.tree.flatten(caches, is_leaf=lambda each: isinstance(each, KVCache))
    if not flat:
        raise KVCacheTypeError(f"caches: got {kind_of(caches)} without a KVCache, expected at least one")
    for number, each in enumerate(flat):
        check_cache(each, f"caches[{number}]")
    return flat, tree


def _check_blocks(blocks: np.ndarray, what: str, number: int | None) -> None:
    outside = (blocks < 0) if number is None else (blocks < 0) | (blocks >= number)
    if outside.any():
        expected = "at least 0" if number is None else f"from 0 to {number - 1}"
        raise KVCacheValueError(f"pairs: got {what} {blocks[outside][0]}, expected {expected}")


def _scales_of(caches: Sequence[KVCache]) -> jax.Array | None:
    """Returns all scales in one array of its own: a step that follows may donate the caches' arrays."""
    scales = [each for cache in caches for name in SCALES if (each := getattr(cache, name)) is not None]
    with without_mesh():
        return _concatenated(scales) if scales else None


@jax.jit
def _concatenated(scales: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([each.astype(jnp.float32).reshape(-1) for each in scales])


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
