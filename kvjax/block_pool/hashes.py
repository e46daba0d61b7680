"""The hashes of blocks, by which prefixes are found: SHA-256, chained from the salt of a sequence."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvjax.errors import KVCacheTypeError, KVCacheValueError, kind_of, shown

HASH_VERSION = "sha256-int64-1"
"""Names the hash scheme, for hashes that are stored or sent. A different scheme gets a different name."""

HASH_BYTES = hashlib.sha256().digest_size

_SALT, _BLOCK, _GROUP = b"\0", b"\1", b"\2"
"""First bytes of the hashed data, so that no salt has the hash of a block. What follows `_BLOCK` has a fixed length."""


def root_hash(salt: bytes, group: int) -> bytes:
    """Returns the hash that stands for the parent of a sequence's first block in a group of layers."""
    if not isinstance(salt, bytes):
        raise KVCacheTypeError(f"salt: got {shown(salt)} of type {type(salt).__name__}, expected bytes")
    return hashlib.sha256(_GROUP + group.to_bytes(4, "little") + salt if group else _SALT + salt).digest()


def block_hash(parent: bytes, token_ids: array[int]) -> bytes:
    """Returns the hash of a full block, from its parent's hash and its token ids, int64."""
    return hashlib.sha256(_BLOCK + parent + token_ids.tobytes()).digest()


class Chain:
    """The hashes of a prompt's full blocks in a group of layers, each computed when first asked for."""

    def __init__(self, token_ids: array[int], block_size: int, root: bytes) -> None:
        self._ids, self._size, self._root = token_ids, block_size, root
        self._hashes: list[bytes] = []

    def __getitem__(self, index: int) -> bytes:
        while len(self._hashes) <= index:
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(block_hash(parent, self.token_ids(len(self._hashes))))
        return self._hashes[index]

    def token_ids(self, index: int) -> array[int]:
        """Returns the ids of a block's tokens."""
        return self._ids[index * self._size : (index + 1) * self._size]

    def first(self, number: int) -> list[bytes]:
        """Returns the first `number` hashes."""
        return [self[index] for index in range(number)]


def as_ids(token_ids: ArrayLike) -> array[int]:
    """Returns token ids as int64 after checking that they are integers `[num_tokens]`."""
    try:
        ids: Any = np.asarray(token_ids)
    except ValueError:  # rows of different lengths
        raise KVCacheValueError(f"token_ids: got {shown(token_ids)}, expected integers [num_tokens]") from None
    if ids.ndim == 0 and not hasattr(token_ids, "ndim"):
        raise KVCacheTypeError(f"token_ids: got {kind_of(token_ids)}, expected integers [num_tokens]")
    if ids.ndim != 1:
        raise KVCacheValueError(f"token_ids: got shape {ids.shape}, expected [num_tokens]")
    if ids.size and ids.dtype.kind not in "iu":
        given: Any = token_ids
        if all(type(each) is int for each in given):  # NumPy has no dtype of integers for all
            raise KVCacheValueError(f"token_ids: got {shown(max(given, key=abs))}, expected int64")
        raise KVCacheTypeError(f"token_ids: got dtype {ids.dtype}, expected integers")
    if ids.size and ids.dtype.kind == "u" and ids.max() > np.iinfo(np.int64).max:
        raise KVCacheValueError(f"token_ids: got {ids.max()}, expected int64")
    return array("q", ids.astype(np.int64).tobytes())
