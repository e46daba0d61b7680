"""Memory lent between torch and JAX: the same address or an error that says why, and never gone while it is read."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.torch_helpers import A_WHILE  # noqa: E402

from kvjax import KVCacheTypeError, KVCacheValueError  # noqa: E402
from kvjax_torch import to_jax, to_torch  # noqa: E402
from kvjax_torch.arguments.dtypes import numpy_dtype  # noqa: E402
from kvjax_torch.sharing.borrow import LENDABLE_DTYPES  # noqa: E402

NEEDS_X64 = (torch.int64, torch.uint64, torch.float64, torch.complex128)


@pytest.fixture(autouse=True)
def first_gpu_is_current(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of several GPUs JAX makes the last current when it starts, and puts arrays on the first."""
    with torch.cuda.device(0) if request.node.get_closest_marker("gpu") else contextlib.nullcontext():
        yield


invert, negate = jax.jit(jnp.invert), jax.jit(jnp.negative)


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


def array_on(device: str, values, dtype) -> jax.Array:
    return jax.device_put(jnp.asarray(values, dtype), jax.devices(device)[0])


def assert_lent(tensor, array):
    assert array.shape == tuple(tensor.shape)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.devices() == {jax.devices(tensor.device.type)[tensor.device.index or 0]}


@pytest.mark.parametrize("dtype", LENDABLE_DTYPES, ids=str)
def test_every_dtype_crosses_both_ways(dtype, device):
    with jax.enable_x64(dtype in NEEDS_X64):
        source = torch.arange(64, dtype=torch.uint8, device=device)
        raw = source % 2 if dtype is torch.bool else source
        tensor = raw.view(dtype)
        array = to_jax(tensor)
        assert_lent(tensor, array)
        assert array.dtype == numpy_dtype(dtype)
        assert bits(array) == bytes(raw.tolist())
        back = to_torch(array)
        assert (back.dtype, back.device, back.data_ptr()) == (dtype, tensor.device, tensor.data_ptr())
        assert torch.equal(back.view(torch.uint8), raw)


@pytest.mark.parametrize("dtype", NEEDS_X64, ids=str)
def test_64_bits_are_refused_without_x64(dtype, device):
    narrow = str(dtype).replace("64", "32").replace("128", "64")
    with pytest.raises(KVCacheTypeError, match=rf"got dtype {dtype}.*x64 mode off.*tensor\.to\({narrow}\)"):
        to_jax(torch.zeros(8, dtype=dtype, device=device))


def test_float4_travels_as_bytes(device):
    packed = torch.arange(64, dtype=torch.uint8, device=device)
    array = to_jax(packed.view(torch.float4_e2m1fn_x2))
    assert_lent(packed, array)
    assert array.dtype == np.uint8
    assert torch.equal(to_torch(array).view(torch.float4_e2m1fn_x2).view(torch.uint8), packed)


def test_arrays_of_float4_are_refused():
    with pytest.raises(KVCacheTypeError, match=r"got dtype float4_e2m1fn, expected one of .*uint8.*two a byte"):
        to_torch(array_on("cpu", [1.0, 2.0], jnp.float4_e2m1fn))


COMPACT = {
    "0d": lambda: torch.tensor(3.5),
    "empty": lambda: torch.zeros(0, 3),
    "empty_permuted": lambda: torch.zeros(4, 0, 3).permute(2, 0, 1),
    "permuted": lambda: torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "permuted_with_1": lambda: torch.arange(24.0).reshape(2, 1, 12).transpose(0, 2),
    "offset": lambda: torch.arange(64.0)[16:32],
    "row": lambda: torch.arange(32.0).reshape(2, 16)[1:],
    "stride_of_a_1": lambda: torch.arange(128.0).as_strided((1, 4), (100, 1)),
}


@pytest.mark.parametrize("case", COMPACT)
def test_compact_tensors_are_lent_in_any_order(case, device):
    with torch.device(device):
        tensor = COMPACT[case]()
    array = to_jax(tensor)
    assert_lent(tensor, array)
    np.testing.assert_array_equal(np.asarray(array), tensor.cpu().numpy())
    back = to_torch(array)
    assert (back.device, back.data_ptr()) == (tensor.device, tensor.data_ptr())
    assert torch.equal(back, tensor)


def test_memory_may_begin_where_xla_loads_vectors_from(device):
    memory, alignment = torch.arange(256, dtype=torch.uint8, device=device), {"cpu": 64, "cuda": 16}[device]
    for start in range(0, 132, 4):
        tensor = memory[start : start + 64]
        if start % alignment:
            message = rf"storage offset {start}\), expected a multiple of {alignment} bytes on {device};"
            with pytest.raises(KVCacheValueError, match=message):
                to_jax(tensor)
        else:
            array = to_jax(tensor)
            assert_lent(tensor, array)
            assert bits(array) == bytes(range(start, start + 64))
            assert bits(invert(array)) == bytes(255 - i for i in range(start, start + 64))


REFUSED = {
    "strided": (lambda: torch.zeros(4, 8)[:, :4], r"strides \(8, 1\) for shape \(4, 4\).*\.contiguous\(\)"),
    "every_second": (lambda: torch.zeros(16)[::2], r"strides \(2,\) for shape \(8,\)"),
    "expanded": (lambda: torch.zeros(3).expand(4, 3), r"strides \(0, 1\) for shape \(4, 3\), expected every element"),
    "qkv": (lambda: torch.zeros(5, 3, 64)[:, 1], r"strides \(192, 1\)"),
    "misaligned": (
        lambda: torch.zeros(32, dtype=torch.bfloat16)[4:20],
        r"storage offset 4\), expected a multiple of \d\d bytes on {device}; lend",
    ),
    "gradient": (lambda: torch.zeros(4, requires_grad=True), r"got requires_grad=True.*tensor\.detach\(\)"),
    "conjugate": (lambda: torch.zeros(4, dtype=torch.complex64).conj(), r"got is_conj\(\)=True.*resolve_conj\(\)"),
    "negative": (lambda: torch.zeros(4, dtype=torch.complex64).conj().imag, r"got is_neg\(\)=True.*resolve_neg\(\)"),
    "meta": (lambda: torch.zeros(4, device="meta"), r"got device meta, expected cpu or cuda"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"got layout torch.sparse_coo, expected torch.strided"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), r"quantized.*int_repr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"got layout nested"),
    "numpy": (lambda: np.zeros(4), r"got a ndarray, expected a torch.Tensor"),
    "no_jax_dtype": (
        lambda: torch.zeros(64, dtype=torch.uint8).view(torch.bits8),
        r"got dtype torch.bits8, expected one of torch.bool, .*",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|quantiz)")
def test_what_would_need_a_copy_is_refused(case, device):
    make, message = REFUSED[case]
    with torch.device(device):
        tensor = make()
    with pytest.raises((KVCacheValueError, KVCacheTypeError), match=message.replace("{device}", device)):
        to_jax(tensor)


def test_fake_tensors_are_refused():
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(4)
    with pytest.raises(KVCacheTypeError, match=r"got a FakeTensor, expected a plain torch\.Tensor"):
        to_jax(fake)


def test_a_copy_that_nobody_announced_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda tensor, copy: jnp.array(tensor.numpy(), copy=True))
    with pytest.raises(KVCacheValueError, match=r"memory at 0x\w+ was copied to 0x\w+ instead of being lent"):
        to_jax(torch.zeros(64))


def test_arrays_that_torch_cannot_borrow_are_refused():
    with pytest.raises(KVCacheTypeError, match=r"got a ndarray, expected a jax\.Array"):
        to_torch(np.zeros(3))
    with pytest.raises(KVCacheTypeError, match="being traced, expected a concrete array"):
        jax.jit(to_torch)(array_on("cpu", [1.0], jnp.float32))
    deleted = array_on("cpu", [1.0], jnp.float32)
    deleted.delete()
    with pytest.raises(KVCacheValueError, match="got a deleted one"):
        to_torch(deleted)
    with pytest.raises(KVCacheTypeError, match="got dtype int4, expected one of bool, uint8"):
        to_torch(array_on("cpu", [1, 2], jnp.int4))
    with pytest.raises(KVCacheTypeError, match="got dtype key<fry>"):
        to_torch(jax.random.key(0))


class Memory(bytearray):
    """Bytes whose end can be watched."""


LARGE = 1 << 26
"""Bytes, more than tests before may still be giving back."""


def numbered(memory: torch.Tensor) -> torch.Tensor:
    """Bytes inside a tensor, written."""
    start = -memory.data_ptr() % 64
    return memory[start : start + 1024].copy_(torch.arange(1024) % 251)


def watched_tensor(device: str) -> tuple[torch.Tensor, Callable[[], bool]]:
    """A tensor inside memory of its own, and whether that is still there."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        memory = torch.empty(LARGE, dtype=torch.uint8, device=device)
        return numbered(memory), lambda: torch.cuda.memory_allocated() > before
    memory = Memory(1024 + 64)
    watch = weakref.ref(memory)
    return numbered(torch.frombuffer(memory, dtype=torch.uint8)), lambda: watch() is not None


EXPECTED = bytes(i % 251 for i in range(1024))


def overwrite_freed_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    kept = [torch.full((size,), 0xEE, dtype=torch.uint8, device=device) for size in [1024] * 200 + [LARGE]]
    kept_by_jax = [array_on(device, np.full(1024, 0xEE), jnp.uint8) for _ in range(200)]
    jax.block_until_ready(kept_by_jax)
    if device == "cuda":
        torch.cuda.synchronize()
    del kept


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something holds when JAX has given memory back, which on a GPU a thread of its own does."""
    for _ in range(200):
        gc.collect()
        if holds():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.full
def test_memory_lives_as_long_as_its_last_borrower(device):
    tensor, is_there = watched_tensor(device)
    array = to_jax(tensor)
    del tensor
    gc.collect()
    assert is_there()
    overwrite_freed_memory(device)
    assert bits(array) == EXPECTED
    back = to_torch(array)
    array.delete()
    del array
    gc.collect()
    assert is_there()
    overwrite_freed_memory(device)
    assert bytes(back.tolist()) == EXPECTED
    del back
    assert eventually(lambda: not is_there())


def test_an_array_that_is_deleted_leaves_its_tensor(device):
    array = array_on(device, np.arange(1024) % 251, jnp.uint8)
    tensor = to_torch(array)
    array.delete()
    del array
    overwrite_freed_memory(device)
    assert bytes(tensor.tolist()) == EXPECTED


@pytest.mark.gpu
def test_jax_has_its_memory_back_when_torch_has_dropped_it():
    def in_use() -> int:
        return jax.devices("cuda")[0].memory_stats()["bytes_in_use"]

    before = in_use()
    array = array_on("cuda", np.full(LARGE, 7, np.uint8), jnp.uint8)
    tensor = to_torch(array)
    array.delete()
    del array
    gc.collect()
    assert in_use() > before
    overwrite_freed_memory("cuda")
    assert (tensor == 7).all()
    del tensor
    assert eventually(lambda: in_use() <= before)


@pytest.mark.gpu
def test_memory_lives_until_a_program_that_waits_has_read_it():
    stream, finished = torch.cuda.Stream(), torch.cuda.Event()
    for round_ in range(21):
        tensor = (torch.arange(1024, device="cuda") % 251).to(torch.uint8)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(A_WHILE)
            result = invert(to_jax(tensor))
            finished.record()
        del tensor
        # Written at once, on the default stream; `torch.cuda.empty_cache` would wait for the other.
        kept = [torch.full((1024,), 0xEE, dtype=torch.uint8, device="cuda") for _ in range(200)]
        assert round_ == 0 or not finished.query(), "the program did not wait"
        assert bits(result) == bytes(255 - byte for byte in EXPECTED)
        del kept


def give_other_storage(tensor):
    tensor.set_(torch.zeros(3, dtype=torch.uint8, device=tensor.device))


def give_other_data(tensor):
    tensor.data = torch.zeros(3, dtype=torch.uint8, device=tensor.device)


@pytest.mark.parametrize("change", [give_other_storage, give_other_data])
def test_a_lender_that_moves_to_other_memory_leaves_the_array(change, device):
    tensor = (torch.arange(1024, device=device) % 251).to(torch.uint8)
    array = to_jax(tensor)
    change(tensor)
    overwrite_freed_memory(device)
    assert bits(array) == EXPECTED


def test_lent_storage_cannot_be_freed_by_resizing():
    tensor = (torch.arange(1024) % 251).to(torch.uint8)
    array = to_jax(tensor)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(4096)
    assert bits(array) == EXPECTED


def test_donating_a_borrowed_array_writes_into_the_lender_on_a_gpu_alone(device):
    tensor = torch.zeros(1024, device=device)
    written = jax.jit(lambda x: x.at[3].set(1.0), donate_argnums=0)(to_jax(tensor))
    assert written[3] == 1.0
    assert (written.unsafe_buffer_pointer() == tensor.data_ptr()) == (device == "cuda")
    assert tensor.tolist() == [0.0] * 3 + [float(device == "cuda")] + [0.0] * 1020


def test_borrowers_see_what_is_written_through_the_lender(device):
    tensor = torch.zeros(16, device=device)
    array = to_jax(tensor)
    tensor[5] = 2.5
    if device == "cuda":
        torch.cuda.synchronize()
    assert array[5] == 2.5


def test_a_tensor_of_an_array_holds_its_finished_result():
    square = array_on("cpu", np.full((600, 600), 1 / 600), jnp.float32)
    result = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))(square)
    tensor = to_torch(result)
    torch.testing.assert_close(tensor, torch.full((600, 600), 1 / 600))


ON_ANY_STREAM = pytest.mark.parametrize(
    "new_stream", [torch.cuda.default_stream, torch.cuda.Stream], ids=["default", "side"]
)


def read_by_a_program(array) -> np.ndarray:
    return -np.asarray(negate(array))


def zeros_there(device: str = "cuda") -> torch.Tensor:
    """Numbers that no stream has to wait for."""
    tensor = torch.zeros(1 << 20, dtype=torch.int32, device=device)
    torch.cuda.synchronize(tensor.device)
    return tensor


def fill_late(tensor: torch.Tensor, value: int) -> None:
    """On the current stream, behind what keeps it busy.

    In its first round a test may take longer than that: it loads and compiles what runs on the GPU.
    """
    torch.cuda._sleep(A_WHILE)
    tensor.fill_(value)


@pytest.mark.gpu
@ON_ANY_STREAM
@pytest.mark.parametrize("read", [np.asarray, read_by_a_program], ids=["host", "program"])
def test_an_array_waits_for_what_torch_has_not_finished_and_the_host_does_not(read, new_stream):
    stream, finished, tensor = new_stream(), torch.cuda.Event(), zeros_there()
    unfinished, turns = 0, 21
    for value in range(turns):
        with torch.cuda.stream(stream):
            fill_late(tensor, value)
            array = to_jax(tensor)
            finished.record()
        unfinished += not finished.query()
        assert (read(array) == value).all()
    assert unfinished > turns // 2, "the host waited for the stream"  # a busy one may be late


@pytest.mark.gpu
@ON_ANY_STREAM
def test_a_tensor_waits_for_what_jax_has_not_finished_and_the_host_does_not(new_stream):
    producer, consumer, finished = torch.cuda.Stream(), new_stream(), torch.cuda.Event()
    source = zeros_there()
    unfinished, turns = 0, 21
    for value in range(turns):
        with torch.cuda.stream(producer):
            fill_late(source, value)
            array = negate(to_jax(source))  # which JAX begins when that is done
            finished.record()
        with torch.cuda.stream(consumer):
            tensor = to_torch(array)
            read = tensor.clone()
        unfinished += not finished.query()
        consumer.synchronize()
        assert (read == -value).all()
    assert unfinished > turns // 2, "the host waited for JAX"  # a busy one may be late


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
def test_memory_is_lent_on_its_own_gpu_whichever_is_current(index):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensor, finished = zeros_there(f"cuda:{index}"), torch.cuda.Event()
    unfinished, turns = 0, 5
    for value in range(turns):
        with torch.cuda.stream(torch.cuda.Stream(index)):
            fill_late(tensor, value)
            finished.record()
            with torch.cuda.device(1 - index):
                array = to_jax(tensor)
        unfinished += not finished.query()
        assert_lent(tensor, array)
        assert (np.asarray(array) == value).all()
        with torch.cuda.device(1 - index):
            back = to_torch(array)
        assert (back.device, back.data_ptr()) == (tensor.device, tensor.data_ptr())
        assert torch.equal(back, tensor)
    assert unfinished > turns // 2, "the host waited for the stream"  # a busy one may be late


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
def test_torchs_current_gpu_stays_while_another_lends(index):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensor = torch.zeros(1024, dtype=torch.uint8, device=f"cuda:{index}")
    with torch.cuda.stream(torch.cuda.Stream(index)):
        torch.cuda._sleep(A_WHILE)
        with torch.cuda.device(1 - index):
            array = to_jax(tensor)
            assert torch.cuda.current_device() == 1 - index
            back = to_torch(array)
            assert torch.cuda.current_device() == 1 - index
    torch.cuda.synchronize(index)
    assert not back.any()


def test_lending_ignores_torchs_default_device(device):
    tensor = torch.zeros(4096, dtype=torch.uint8, device=device)
    with torch.device("meta"):
        assert_lent(tensor, to_jax(tensor))


SEVERAL_DEVICES = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kvjax_torch import to_torch
mesh = Mesh(np.array(jax.devices("cpu")), ("x",))
spread = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
print(to_torch(spread.addressable_shards[1].data).tolist())
to_torch(spread)
"""


@pytest.mark.full
def test_an_array_on_several_devices_is_refused_and_its_shards_are_lent():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SEVERAL_DEVICES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[4.0, 5.0, 6.0, 7.0]\n"
    assert "got one on 2 devices, expected one; lend each shard: array.addressable_shards[i].data" in done.stderr
