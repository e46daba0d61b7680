"""Checked mode: which values it names, what a traced program makes of it, and that it costs nothing when it is off."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.helpers import assert_same_bytes, can_write, kv_tokens, page_bytes, poisoned, simple_spec

import kvjax
from kvjax import (
    KVCache,
    KVCacheDType,
    KVCacheTypeError,
    KVCacheValueError,
    check_sequences,
    check_slots,
    copy_blocks,
    gather_kv,
    paged_attention,
    reshape_and_cache_flash,
    swap_blocks,
)

FP8 = simple_spec(KVCacheDType.FP8_E4M3)
NUM_BLOCKS = 4  # of 8 tokens: 32 slots
KEY, VALUE = kv_tokens(FP8, 5)
GOOD_SLOTS = np.array([31, -1, 0, -7, 8], np.int32)
TABLE = np.array([[3, 0, -2], [-1, 2, 3], [99, 98, 97]], np.int32)
LENS = np.array([16, 17, 0], np.int32)
PAIRS = np.array([[0, 1], [-1, 1], [99, -1], [1, 0]], np.int32)
QUERY = np.ones((3, 2, 64), np.float32)


def with_entry(array: np.ndarray, index: Any, value: Any) -> np.ndarray:
    array = array.copy()
    array[index] = value
    return array


def write(cache: KVCache, **given: Any) -> KVCache:
    return reshape_and_cache_flash(KEY, VALUE, cache, **{"slot_mapping": GOOD_SLOTS, **given})


def gather(cache: KVCache, **given: Any) -> Any:
    return gather_kv(cache, **{"block_table": TABLE, "seq_lens": LENS, **given})


def attend(cache: KVCache, **given: Any) -> jax.Array:
    return paged_attention(QUERY, cache, **{"block_table": TABLE, "seq_lens": LENS, **given})


def copy(cache: KVCache, **given: Any) -> KVCache:
    return copy_blocks(cache, **{"pairs": PAIRS, **given})


def swap(cache: KVCache, **given: Any) -> KVCache:
    """To a cache of twice as many blocks."""
    destination = KVCache(jnp.concatenate([cache.kv, cache.kv]), cache.spec)
    return swap_blocks(cache, destination, **{"pairs": PAIRS, **given})


SCALE_RANGE = "expected between 7.9e-31 and 1.3e+30"
SLOT_ERRORS = [
    (
        {"slot_mapping": with_entry(GOOD_SLOTS, 2, 32)},
        "slot_mapping[2]: got 32, expected less than num_slots=32, or negative for padding",
    ),
    ({"slot_mapping": with_entry(GOOD_SLOTS, 1, 2**31 - 1)}, "slot_mapping[1]: got 2147483647, expected less than"),
    (
        {"slot_mapping": np.array([5, 9, 7, 9, 5], np.int32)},
        "slot_mapping[3]: got 9, expected a unique slot: slot_mapping[1] is the same",
    ),
    ({"slot_mapping": np.array([4, 4, 4, -1, -1], np.int32)}, "slot_mapping[1]: got 4, expected a unique slot"),
]
SCALE_ERRORS = [
    ({"k_scale": jnp.float32(0)}, f"k_scale: got 0.0, {SCALE_RANGE}"),
    ({"k_scale": jnp.array([1.0, -2.5])}, f"k_scale: got -2.5, {SCALE_RANGE}"),
    ({"v_scale": jnp.float32(jnp.nan)}, f"v_scale: got nan, {SCALE_RANGE}"),
    ({"v_scale": jnp.array([jnp.inf, 0.0])}, f"v_scale: got inf, {SCALE_RANGE}"),
]
SEQUENCE_ERRORS = [
    (
        {"seq_lens": with_entry(LENS, 1, 25)},
        "seq_lens[1]: got 25, expected between 0 and 24, the capacity of the 3 blocks of 8 tokens in its block table",
    ),
    ({"seq_lens": with_entry(LENS, 2, -1)}, "seq_lens[2]: got -1, expected between 0 and 24"),
    (
        {"seq_lens": with_entry(LENS, 0, 17)},
        "block_table[0, 2]: got -2, expected between 0 and 3, or -1 for a freed block: it holds some of"
        " the 17 tokens of its sequence",
    ),
    ({"block_table": with_entry(TABLE, (1, 1), 4)}, "block_table[1, 1]: got 4, expected between 0 and 3, or -1"),
]
WINDOW_ERRORS = [({"sliding_window": jnp.int32(-3)}, "sliding_window: got -3, expected at least 1")]
PAIRS_ERRORS = [
    (
        {"pairs": with_entry(PAIRS, 3, [4, 0])},
        "pairs[3]: got source block 4, expected less than num_blocks=4, or a negative one to copy nothing",
    ),
    (
        {"pairs": with_entry(PAIRS, 3, [0, 1])},
        "pairs[3]: got destination block 1, expected a unique one: pairs[0] has the same",
    ),
]
CASES = [
    pytest.param(run, arguments, message, id=f"{run.__name__}-{message[:30]}")
    for run, cases in (
        (write, SLOT_ERRORS + SCALE_ERRORS),
        (gather, SEQUENCE_ERRORS + SCALE_ERRORS),
        (attend, SEQUENCE_ERRORS[:1] + SEQUENCE_ERRORS[-1:] + SCALE_ERRORS[:1] + WINDOW_ERRORS),
        (
            copy,
            [
                *PAIRS_ERRORS,
                (
                    {"pairs": with_entry(PAIRS, 0, [0, 4])},
                    "pairs[0]: got destination block 4, expected less than num_bl",
                ),
            ],
        ),
        (
            swap,
            [
                *PAIRS_ERRORS,
                (
                    {"pairs": with_entry(PAIRS, 0, [0, 8])},
                    "pairs[0]: got destination block 8, expected less than num_bl",
                ),
            ],
        ),
    )
    for arguments, message in cases
]


@functools.cache
def checkified(run: Any) -> Any:
    """A jitted call of which all but shapes is known only when it runs; compiled once for arguments of one kind."""
    return jax.jit(checkify.checkify(lambda cache, arguments: run(cache, **arguments)))


@pytest.mark.parametrize(("run", "arguments", "message"), CASES)
def test_the_first_offender_is_named(run, arguments, message):
    cache = poisoned(FP8, NUM_BLOCKS)
    before = page_bytes(cache)
    run(cache, **arguments)  # is no error when nobody asks
    with kvjax.checked():
        for on_device in (False, True):
            given = jax.tree.map(jnp.asarray, arguments) if on_device else arguments
            with pytest.raises(KVCacheValueError) as raised:
                run(cache, **given)
            assert str(raised.value).startswith(message)
        error, _ = checkified(run)(cache, arguments)
        assert error.get().startswith(message)
    assert_same_bytes(page_bytes(cache), before)


@pytest.mark.parametrize("run", [write, gather, attend, copy, swap])
def test_what_is_allowed_raises_nothing_and_gives_the_same_bytes(run):
    cache = poisoned(FP8, NUM_BLOCKS)
    expected = jax.tree.leaves(run(cache))
    with kvjax.checked():
        error, traced = checkified(run)(cache, {})
        error.throw()
        for results in (run(cache), traced):
            for got, want in zip(jax.tree.leaves(results), expected, strict=True):
                assert_same_bytes(np.asarray(got), np.asarray(want))


def test_what_is_thrown_is_a_value_error_that_names_the_offender():
    with kvjax.checked():
        step = jax.jit(checkify.checkify(lambda cache, slots: write(cache, slot_mapping=slots)))
        error, _ = step(poisoned(FP8, NUM_BLOCKS), with_entry(GOOD_SLOTS, 0, 40))
    with pytest.raises(ValueError, match=r"slot_mapping\[0\]: got 40, expected less than num_slots=32"):
        error.throw()


def test_a_checked_step_is_in_place_and_leaves_out_what_it_refuses(implementation):
    """As an unchecked one does: what a program found is known only after it ran."""
    step = jax.jit(
        checkify.checkify(lambda cache, slots: write(cache, slot_mapping=slots, implementation=implementation)),
        donate_argnums=0,
    )
    cache, slots = poisoned(FP8, 256), with_entry(GOOD_SLOTS, 0, 256 * 8)
    expected = page_bytes(write(poisoned(FP8, 256), slot_mapping=slots))
    with kvjax.checked():
        compiled = step.lower(cache, slots).compile()
        assert compiled.memory_analysis().alias_size_in_bytes == cache.kv.nbytes
        error, written = step(cache, slots)
    assert error.get().startswith("slot_mapping[0]: got 2048, expected less than num_slots=2048")
    assert_same_bytes(page_bytes(written), expected)


def test_a_checked_program_for_a_gpu_holds_the_kernel():
    arguments = poisoned(FP8, NUM_BLOCKS), {"slot_mapping": GOOD_SLOTS}
    with kvjax.checked():
        lowered = checkified(write).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.full
@pytest.mark.parametrize("slots", [GOOD_SLOTS, with_entry(GOOD_SLOTS, 3, 31)], ids=["allowed", "taken"])
def test_checks_run_before_an_interpreted_kernel(slots):
    """The checks see the kernel's program as any other, with the refs that it writes through."""
    plain = page_bytes(write(poisoned(FP8, NUM_BLOCKS), slot_mapping=np.where(slots == 31, -1, slots)))
    step = functools.partial(write, implementation="mosaic")
    with kvjax.checked(), plgpu.force_gpu_interpret_mode():
        error, written = checkified(step)(poisoned(FP8, NUM_BLOCKS), {"slot_mapping": slots})
    assert (error.get() is None) is (slots is GOOD_SLOTS)
    assert_same_bytes(page_bytes(written)[:3], plain[:3])  # which of two tokens has slot 31 is unspecified


def test_checks_run_inside_scan_and_vmap():
    slots = np.stack([GOOD_SLOTS, with_entry(GOOD_SLOTS, 4, 31)])
    cache = poisoned(FP8, NUM_BLOCKS)
    stacked = jax.tree.map(lambda kv: jnp.stack([kv, kv]), cache)

    def scan(cache, slots):
        return jax.lax.scan(lambda cache, slots: (write(cache, slot_mapping=slots), None), cache, slots)[0]

    message = "slot_mapping[4]: got 31, expected a unique slot: slot_mapping[0] is the same"
    with kvjax.checked():
        for run, caches in ((scan, cache), (jax.vmap(lambda c, s: write(c, slot_mapping=s)), stacked)):
            error, _ = jax.jit(checkify.checkify(run))(caches, slots)
            assert error.get().startswith(message)
            error, _ = jax.jit(checkify.checkify(run))(caches, np.stack([GOOD_SLOTS, GOOD_SLOTS]))
            assert error.get() is None


def test_a_jitted_step_without_checkify_is_refused_rather_than_left_unchecked():
    with kvjax.checked(), pytest.raises(ValueError, match=r"not functionalized.*checkify\.checkify"):
        jax.jit(lambda cache, slots: write(cache, slot_mapping=slots))(poisoned(FP8, NUM_BLOCKS), GOOD_SLOTS)


def test_programs_are_kept_apart_by_the_mode():
    """Neither does a checked call run what was compiled without the checks, nor the other way round."""
    traced = []

    def step(cache, slots):
        traced.append(kvjax.is_checked())
        return write(cache, slot_mapping=slots)

    cache, taken = poisoned(FP8, NUM_BLOCKS), with_entry(GOOD_SLOTS, 0, 8)
    jitted = jax.jit(checkify.checkify(step))
    for checked, message in (
        (False, None),
        (True, "slot_mapping[4]: got 8, "),
        (False, None),
        (True, "slot_mapping[4]"),
    ):
        with kvjax.checked(checked):
            found = jitted(cache, taken)[0].get()
        assert found is message is None or found.startswith(message)
    assert jitted(cache, taken)[0].get() is None
    assert traced == [False, True]


GIVEN = {
    write: {"slot_mapping": GOOD_SLOTS, "k_scale": np.float32(2)},
    gather: {"block_table": TABLE, "seq_lens": LENS, "k_scale": np.float32(2)},
    attend: {"block_table": TABLE, "seq_lens": LENS, "k_scale": np.float32(2)},
    copy: {"pairs": PAIRS},
    swap: {"pairs": PAIRS},
}


@pytest.mark.parametrize("run", GIVEN)
def test_without_checked_mode_programs_contain_no_checks(run, monkeypatch: pytest.MonkeyPatch):
    def call(cache, given):
        return run(cache, **given)

    def programs() -> tuple[str, str]:
        """What a call is traced to, and what XLA is given to compile."""
        return str(jax.make_jaxpr(call)(*arguments)), jax.jit(call).lower(*arguments).as_text()

    arguments = poisoned(FP8, NUM_BLOCKS), GIVEN[run]
    with kvjax.checked():
        checked = str(jax.make_jaxpr(checkify.checkify(call))(*arguments))
    off = programs()
    assert checked != off[0]
    # The same programs as of a kvjax that has no checks.
    for module in (kvjax.ops.write, kvjax.ops.gather, kvjax.ops.blocks, kvjax.ops.arguments):
        monkeypatch.setattr(module, "is_checked", lambda: False)
        for name in ("check_slots", "check_sequences", "check_pairs"):
            monkeypatch.delattr(module, name, raising=False)
    jax.clear_caches()
    assert programs() == off


@pytest.mark.gpu
def test_without_checked_mode_nothing_is_copied_from_the_gpu():
    cache = poisoned(FP8, NUM_BLOCKS)
    slots, scale = jnp.asarray(GOOD_SLOTS), jnp.float32(2)
    calls = [
        lambda: write(cache, slot_mapping=slots, k_scale=scale),
        lambda: gather(cache, k_scale=scale),
    ]
    for call in calls:
        jax.block_until_ready(call())
        with jax.transfer_guard_device_to_host("disallow"):
            call()
            with kvjax.checked(), pytest.raises(Exception, match="Disallowed device-to-host transfer"):
                call()
    with jax.transfer_guard_device_to_host("disallow"):
        copy(cache, pairs=PAIRS)


def test_checked_mode_is_local_to_a_thread_and_nests():
    seen = []
    assert not kvjax.is_checked()
    with kvjax.checked():
        thread = threading.Thread(target=lambda: seen.append(kvjax.is_checked()))
        thread.start()
        thread.join()
        with kvjax.checked(False):
            seen.append(kvjax.is_checked())
            with kvjax.checked():
                seen.append(kvjax.is_checked())
        seen.append(kvjax.is_checked())
        with contextlib.suppress(RuntimeError), kvjax.checked(False):
            raise RuntimeError
        seen.append(kvjax.is_checked())
    assert seen == [False, False, True, True, True]
    assert not kvjax.is_checked()


def test_a_mode_that_is_no_bool_is_refused():
    with pytest.raises(KVCacheTypeError, match="enabled: got 'yes' of type str, expected a bool"):
        kvjax.checked("yes")


def test_all_64_bits_of_an_int64_are_checked():
    cache = poisoned(FP8, NUM_BLOCKS)
    with kvjax.checked():
        with pytest.raises(KVCacheValueError, match=r"slot_mapping\[3\]: got 4294967296, expected less than"):
            write(cache, slot_mapping=with_entry(GOOD_SLOTS.astype(np.int64), 3, 2**32))
        with pytest.raises(KVCacheValueError, match=r"pairs\[0\]: got source block 4294967297, expected less"):
            copy(cache, pairs=with_entry(PAIRS.astype(np.int64), 0, [2**32 + 1, 0]))


def test_empty_arrays_pass_every_check():
    cache = poisoned(FP8, NUM_BLOCKS)
    none = np.zeros((0, 2, 64), np.float32)
    with kvjax.checked():
        reshape_and_cache_flash(none, none, cache, np.zeros(0, np.int32))
        gather_kv(cache, np.zeros((0, 3), np.int32), np.zeros(0, np.int32))
        gather_kv(cache, np.zeros((2, 0), np.int32), np.zeros(2, np.int32))
        copy_blocks(cache, np.zeros((0, 2), np.int32))
        with pytest.raises(KVCacheValueError, match=r"seq_lens\[1\]: got 1, expected between 0 and 0"):
            gather_kv(cache, np.zeros((2, 0), np.int32), np.array([0, 1]))
        reshape_and_cache_flash(KEY[:1], VALUE[:1], cache, GOOD_SLOTS[:1])


small = st.integers(-2, 9)


def found_by(check: Any, *args: Any) -> str | None:
    """What a check says, on the host and where it is traced."""
    try:
        check(*args)
        on_host = None
    except KVCacheValueError as error:
        on_host = str(error)
    arrays, sizes = [x for x in args if isinstance(x, np.ndarray)], [x for x in args if isinstance(x, int)]
    traced = _compiled_check(check, *sizes)(*arrays)[0].get()
    assert (traced or "").removesuffix(" (`check` failed)") == (on_host or "")
    return on_host


@functools.cache
def _compiled_check(check: Any, *sizes: int) -> Any:
    return jax.jit(checkify.checkify(lambda *arrays: check(*arrays, *sizes)))


@settings(max_examples=60)
@given(st.lists(small, min_size=6, max_size=6))
def test_the_check_of_slots_matches_a_plain_loop(slots):
    past = next((i for i, slot in enumerate(slots) if slot >= 8), None)
    taken = next((i for i, slot in enumerate(slots) if slot >= 0 and slot in slots[:i]), None)
    found = found_by(check_slots, np.array(slots, np.int32), 8)
    if past is not None:
        assert found.startswith(f"slot_mapping[{past}]: got {slots[past]}, expected less than")
    elif taken is not None:
        earlier = max(i for i in range(taken) if slots[i] == slots[taken])
        assert found == (
            f"slot_mapping[{taken}]: got {slots[taken]}, expected a unique slot: slot_mapping[{earlier}] is the same"
        )
    else:
        assert found is None


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(-1, 7), st.lists(st.integers(-2, 4), min_size=3, max_size=3)), min_size=3, max_size=3
    )
)
def test_the_check_of_sequences_matches_a_plain_loop(sequences):
    lens, table = (np.array(x, np.int32) for x in zip(*sequences, strict=True))
    long = next((i for i, length in enumerate(lens) if not 0 <= length <= 6), None)
    missing = next(
        ((i, c) for i in range(3) for c in range(3) if 2 * c < lens[i] and not -1 <= table[i, c] < 4),
        None,
    )
    found = found_by(check_sequences, table, lens, 4, 2)
    if long is not None:
        assert found.startswith(f"seq_lens[{long}]: got {lens[long]}, ")
    elif missing is not None:
        assert found.startswith(f"block_table[{missing[0]}, {missing[1]}]: got {table[missing]}, ")
    else:
        assert found is None


@pytest.mark.parametrize("dtype", [KVCacheDType.BFLOAT16, KVCacheDType.NVFP4], ids=lambda dtype: dtype.value)
def test_scales_of_every_layer_are_checked(dtype):
    """An unquantized layer ignores its scale, but a wrong one is a mistake there too."""
    cache = poisoned(simple_spec(dtype), NUM_BLOCKS)
    assert can_write("xla", cache.spec)
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=r"k_scale: got 0\.0, expected between"):
        write(cache, k_scale=jnp.float32(0))


def test_the_range_of_scales_is_the_documented_one():
    check = functools.partial(kvjax.check_scale, "k_scale")
    for scale in (2.0**-100, 2.0**100, [1.0, 2.0**-100]):
        check(jnp.asarray(scale, jnp.float32))
    for scale in (2.0**-101, 2.0**101, -1.0):
        with pytest.raises(KVCacheValueError, match="expected between"):
            check(jnp.asarray(scale, jnp.float32))
