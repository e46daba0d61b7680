"""Checked mode for torch's operations: what they name, that nothing is written then, and when they may not look."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from support.torch_helpers import capture  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import KVCacheValueError, UnsupportedError  # noqa: E402


def new_cache(device: str) -> torch.Tensor:
    """Four blocks of eight tokens, fp8."""
    return torch.full((4, 2, 8, 2, 64), 0xAB, dtype=torch.uint8, device=device)


def tensor(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, device=device)


def write(cache: torch.Tensor, slots: list[int], k_scale: float | torch.Tensor = 1.0) -> None:
    rows = torch.ones(len(slots), 2, 64, device=cache.device)
    halves = cache[:, 0], cache[:, 1]
    kvjax_torch.reshape_and_cache_flash(rows, rows, *halves, tensor(slots, cache.device), "fp8", k_scale, 1.0)


def gather(cache: torch.Tensor, table: list[list[int]], lengths: list[int], k_scale: float = 1.0) -> torch.Tensor:
    indices = tensor(table, cache.device), tensor(lengths, cache.device)
    return kvjax_torch.gather_kv(cache[:, 0], cache[:, 1], *indices, "fp8", k_scale, 1.0)[0]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([3, -1, 32], "slot_mapping[2]: got 32, expected less than num_slots=32, or negative for padding"),
        ([3, -1, 2**40], "slot_mapping[2]: got 1099511627776, expected less than num_slots=32, or negative"),
        ([3, 5, 3], "slot_mapping[2]: got 3, expected a unique slot: slot_mapping[0] is the same"),
    ],
)
def test_slots_are_checked_before_anything_is_written(device, slots, message):
    cache = new_cache(device)
    with kvjax.checked(), pytest.raises(KVCacheValueError) as raised:
        write(cache, slots)
    assert str(raised.value).startswith(message)
    assert (cache == 0xAB).all()
    write(cache, slots)
    assert not (cache == 0xAB).all()


@pytest.mark.parametrize(
    ("table", "lengths", "message"),
    [
        ([[0, 4]], [9], "block_table[0, 1]: got 4, expected between 0 and 3, or -1 for a freed block"),
        ([[0, 1]], [17], "seq_lens[0]: got 17, expected between 0 and 16, the capacity of the 2 blocks of 8 tokens"),
        ([[0, 1]], [-3], "seq_lens[0]: got -3, expected between 0 and 16"),
    ],
)
def test_tables_and_lengths_are_checked(device, table, lengths, message):
    cache = new_cache(device)
    gather(cache, table, lengths)
    with kvjax.checked(), pytest.raises(KVCacheValueError) as raised:
        gather(cache, table, lengths)
    assert str(raised.value).startswith(message)


def test_what_is_allowed_has_the_same_result(device):
    cache, plain = new_cache(device), new_cache(device)
    slots, table = [31, -1, 0, -7, 8], [[3, 0, -2], [-1, 2, 3], [99, 98, 97]]
    write(plain, slots)
    with kvjax.checked():
        for _ in range(2):  # the second call is of a kind that is known
            write(cache, slots)
        got = gather(cache, table, [16, 17, 0])
    assert torch.equal(cache, plain)
    expected = gather(plain, table, [16, 17, 0])
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_a_known_kind_of_call_is_checked_too(device):
    cache = new_cache(device)
    for _ in range(3):
        write(cache, [1, 2, 3])
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=r"slot_mapping\[1\]: got 32"):
        write(cache, [1, 32, 3])


@pytest.mark.parametrize(
    ("operation", "q_lens", "window"), [("paged_attention", (1, 1), 5), ("ragged_paged_attention", (4, 1), 2)]
)
def test_blocks_before_a_window_are_not_checked(operation, q_lens, window, device):
    """Of 13 tokens in blocks of eight, the first row's window begins with the second block."""
    cache, query = new_cache(device), torch.ones(sum(q_lens), 4, 64, device=device)
    indices = [tensor([[99, 0], [3, 2]], device), tensor([13, 4], device)]
    if operation == "ragged_paged_attention":
        indices.append(tensor([0, *itertools.accumulate(q_lens)], device))

    def run(sliding_window: int) -> None:
        halves = cache[:, 0], cache[:, 1]
        getattr(kvjax_torch, operation)(query, *halves, *indices, "fp8", 1.0, 1.0, sliding_window=sliding_window)

    with kvjax.checked():
        run(window)
        with pytest.raises(KVCacheValueError, match=r"^block_table\[0, 0\]: got 99, expected between"):
            run(window + 1)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e38, float("nan")])
def test_scales_are_checked_on_a_gpu_too(device, scale):
    cache = new_cache(device)
    for given in (torch.tensor(scale, device=device), torch.tensor([1.0, scale], device=device)):
        with kvjax.checked(), pytest.raises(KVCacheValueError) as raised:
            write(cache, [1], given)
        assert str(raised.value) == f"k_scale: got {scale}, expected between 7.9e-31 and 1.3e+30"
    assert (cache == 0xAB).all()


def test_the_operations_that_compiled_code_calls_are_checked_too(device):
    cache, one = new_cache(device), torch.ones((), device=device)
    rows, slots = torch.ones(3, 2, 64, device=device), tensor([1, 2, 2], device)
    with kvjax.checked(), pytest.raises(KVCacheValueError, match=r"slot_mapping\[2\]: got 2, expected a unique slot"):
        torch.ops.kvjax.reshape_and_cache_flash(rows, rows, cache[:, 0], cache[:, 1], slots, "fp8", one, one)


@pytest.mark.gpu
def test_checked_mode_is_refused_under_capture():
    cache, slots = new_cache("cuda"), torch.tensor([1, 2], device="cuda")
    rows = torch.ones(2, 2, 64, device="cuda")

    def run() -> None:
        kvjax_torch.reshape_and_cache_flash(rows, rows, cache[:, 0], cache[:, 1], slots, "fp8", 1.0, 1.0)

    run()
    torch.cuda.synchronize()
    with capture(torch.cuda.CUDAGraph()), kvjax.checked():
        with pytest.raises(
            UnsupportedError, match=r"kvjax\.checked\(\) reads \w+ on the host.*kvjax\.checked\(False\)"
        ):
            run()
        with kvjax.checked(False):
            run()
