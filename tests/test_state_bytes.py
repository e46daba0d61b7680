"""States as bytes, beside blocks: a sequence goes on where its export is imported, and anything else is refused."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from support.helpers import assert_same_bytes, page_bytes, poisoned, simple_spec

from kvjax import KVCacheTypeError, KVCacheValueError, export_blocks, import_blocks
from kvjax.ops import block_bytes

SPEC = simple_spec()
SHAPE = (2, 5)


def states(dtype: Any = np.float32, num_states: int = 4, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Slots of random bytes: signalling NaNs, subnormal numbers and negative zeros among them."""
    size = (num_states, *shape, np.dtype(dtype).itemsize)
    raw = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return raw.reshape(num_states, -1).view(dtype).reshape(num_states, *shape)


def state_bytes(array: Any) -> np.ndarray:
    """`[num_states, bytes]`, without JAX's conversions."""
    return np.ascontiguousarray(np.asarray(array)).reshape(len(array), -1).view(np.uint8)


def placed(array: np.ndarray, on_device: bool) -> Any:
    return jax.device_put(array.copy(), jax.devices()[0]) if on_device else array.copy()


@pytest.mark.parametrize("on_device", [False, True], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.int32])
def test_a_state_is_imported_as_it_was_exported(dtype, on_device):
    first, second = states(dtype), states(np.float32, 6, seed=1, shape=())
    data = export_blocks([placed(first, on_device), poisoned(SPEC, 7), second], [5, 0], state=3)
    others = states(dtype, 5, seed=2), states(np.float32, 5, seed=3, shape=())
    destinations = [placed(others[0], on_device), poisoned(SPEC, 8, 1), placed(others[1], not on_device)]
    written = import_blocks(io.BytesIO(data), destinations, [2, 6], state=4)
    for array, before, source in ((written[0], others[0], first), (written[2], others[1], second)):
        expected = state_bytes(before).copy()
        expected[4] = state_bytes(source)[3]
        assert_same_bytes(state_bytes(array), expected)
    expected = page_bytes(poisoned(SPEC, 8, 1))
    expected[[2, 6]] = page_bytes(poisoned(SPEC, 7))[[5, 0]]
    assert_same_bytes(page_bytes(written[1]), expected)
    in_place = destinations[2] if on_device else destinations[0]
    assert in_place is (written[2] if on_device else written[0])
    assert (destinations[0] if on_device else destinations[2]).is_deleted()


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64])
def test_a_state_of_64_bits_keeps_all_of_them_whether_or_not_x64_is_on(dtype, x64):
    source, before = states(dtype), states(dtype, 5, seed=2)
    memory = SingleDeviceSharding(jax.devices()[0])
    with jax.enable_x64(True):
        first, second = (jax.device_put(jnp.asarray(array), memory) for array in (source, before))
    with jax.enable_x64(x64):
        data = export_blocks([poisoned(SPEC, 7), first], [5], state=3)
        _, written = import_blocks(data, [poisoned(SPEC, 8, 1), second], [2], state=4)
    assert data == export_blocks([poisoned(SPEC, 7), source], [5], state=3)
    assert (written.dtype, written.sharding) == (dtype, memory)
    assert second.is_deleted()
    expected = state_bytes(before).copy()
    expected[4] = state_bytes(source)[3]
    assert_same_bytes(state_bytes(written), expected)


def test_the_format_is_that_of_blocks_with_the_state_behind_the_pages():
    cache, own = poisoned(SPEC, 4), states()
    without = export_blocks(cache, [2])
    size = int.from_bytes(without[8:16], "little")
    header = json.loads(without[16 : 16 + size])
    assert "states" not in header
    described = {name: header[name] for name in ("format", "hash", "caches")}
    described |= {"states": [{"dtype": "float32", "shape": [2, 5]}], "num_blocks": 1, "num_hashes": 0}
    encoded = json.dumps(described).encode()
    expected = b"KVJAXBLK" + len(encoded).to_bytes(8, "little") + encoded
    expected += hashlib.sha256(expected).digest()
    expected += page_bytes(cache)[2].tobytes() + own[1].tobytes()
    expected += hashlib.sha256(expected).digest()
    assert export_blocks([cache, own], [2], state=1) == expected


def exported() -> bytes:
    return export_blocks([poisoned(SPEC, 7), states()], [5, 0], state=3)


def refused(call: Any, destinations: list[Any], message: str, error: type[Exception] = KVCacheValueError) -> None:
    """Checks that nothing of the destinations has changed."""
    before = [state_bytes(x).copy() if isinstance(x, (np.ndarray, jax.Array)) else page_bytes(x) for x in destinations]
    with pytest.raises(error) as raised:
        call(destinations)
    assert message in str(raised.value)
    for destination, expected in zip(destinations, before, strict=True):
        is_states = isinstance(destination, (np.ndarray, jax.Array))
        assert_same_bytes(state_bytes(destination) if is_states else page_bytes(destination), expected)


@pytest.mark.parametrize("on_device", [False, True], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (states(np.int32), "source: got states[0].dtype='float32', expected 'int32', as the destination has it"),
        (states(shape=(5, 2)), "source: got states[0].shape[0]=2, expected 5"),
        (states(shape=(10,)), "source: got len(states[0].shape)=2, expected 1"),
    ],
)
def test_a_state_of_another_kind_is_refused_by_its_first_difference(other, message, on_device):
    destinations = [poisoned(SPEC, 8, 1), placed(other, on_device)]
    refused(lambda caches: import_blocks(exported(), caches, [1, 2], state=0), destinations, message)


def test_an_export_without_a_state_is_refused_where_one_is_expected_and_the_reverse():
    without = export_blocks(poisoned(SPEC, 7), [5, 0])
    both = [poisoned(SPEC, 8, 1), states()]
    refused(lambda caches: import_blocks(without, caches, [1, 2], state=0), both, "source: got states=None, expected [")
    refused(
        lambda caches: import_blocks(exported(), caches, [1, 2]), both[:1], "source: got states=[{'dtype': 'float32'"
    )
    data = export_blocks([poisoned(SPEC, 7), states(), states()], [5, 0], state=3)
    refused(lambda caches: import_blocks(data, caches, [1, 2], state=0), both, "source: got len(states)=2, expected 1")


@pytest.mark.parametrize("on_device", [False, True], ids=["numpy", "jax"])
def test_bytes_that_are_torn_or_changed_anywhere_in_a_state_are_refused(on_device):
    data, num_bytes = exported(), 40
    destinations = [poisoned(SPEC, 8, 1), placed(states(seed=2), on_device)]
    for at in (len(data) - 32 - num_bytes, len(data) - 33):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        refused(lambda caches, x=changed: import_blocks(x, caches, [1, 2], state=0), destinations, "bytes were changed")
        refused(lambda caches, x=data[:at]: import_blocks(x, caches, [1, 2], state=0), destinations, "it is torn")


def test_a_device_without_memory_for_a_state_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(block_bytes, "state_from_host", fails)
    destinations = [poisoned(SPEC, 8, 1), placed(states(seed=2), True)]
    refused(lambda caches: import_blocks(exported(), caches, [1, 2], state=0), destinations, "", MemoryError)


def read_only() -> np.ndarray:
    array = states()
    array.flags.writeable = False
    return array


CACHE = poisoned(SPEC, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: export_blocks([CACHE, states()], [1]), KVCacheValueError, "state: got None, expected the slot"),
        (lambda: export_blocks(CACHE, [1], state=0), KVCacheValueError, "state: got 0, expected None: caches has no"),
        (lambda: export_blocks([CACHE, states()], [1], state=4), KVCacheValueError, "state: got 4, expected an int"),
        (lambda: export_blocks([CACHE, states()], [1], state=-1), KVCacheValueError, "state: got -1, expected an int"),
        (lambda: export_blocks([CACHE, states()], [1], state=1.0), KVCacheTypeError, "state: got 1.0 of type float"),
        (lambda: export_blocks([states()], [], state=0), KVCacheValueError, "expected at least one KVCache"),
        (
            lambda: export_blocks([CACHE, np.array(3.0)], [1], state=0),
            KVCacheValueError,
            r"caches\[1\]: got states of shape \(\), expected \[num_states, ...\]",
        ),
        (lambda: export_blocks([CACHE, np.zeros(3, bool)], [1], state=0), KVCacheTypeError, "got states of bool, exp"),
        (
            lambda: export_blocks([CACHE, np.zeros(3, complex)], [1], state=0),
            KVCacheTypeError,
            "of complex128, expected",
        ),
        (lambda: export_blocks([CACHE, np.zeros(3, ">f4")], [1], state=0), KVCacheTypeError, "got states of >f4, exp"),
        (
            lambda: export_blocks([CACHE, np.zeros(3, ml_dtypes.int4)], [1], state=0),
            KVCacheTypeError,
            r"caches\[1\]: got states of int4, expected integers or floats of whole bytes",
        ),
        (
            lambda: import_blocks(exported(), [CACHE, read_only()], [1, 2], state=0),
            KVCacheValueError,
            "got states in a read-only array",
        ),
        (
            lambda: jax.jit(lambda x: export_blocks([CACHE, x], [1], state=0))(jnp.zeros(3)),
            KVCacheTypeError,
            r"caches\[1\]: got traced states, expected a call outside jit",
        ),
    ],
)
def test_invalid_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
    assert not CACHE.kv.is_deleted()


def test_a_donated_array_of_states_says_so():
    array, data = jnp.zeros((3, *SHAPE)), exported()
    import_blocks(data, [poisoned(SPEC, 8), array], [1, 2], state=0)
    with pytest.raises(KVCacheValueError, match=r"caches\[1\]: got states that were donated; use those that"):
        export_blocks([CACHE, array], [1], state=0)
    twice = jnp.zeros((3, *SHAPE))
    with pytest.raises(KVCacheValueError, match="caches: got a cache twice"):
        export_blocks([CACHE, twice, twice], [1], state=0)
