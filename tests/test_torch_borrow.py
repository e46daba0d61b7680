"""Memory lent between torch and JAX: the same address or an error that says why, and never gone while it is read."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvjax import KVCacheTypeError, KVCacheValueError  # noqa: E402
from kvjax_torch import to_jax, to_torch  # noqa: E402
from kvjax_torch.borrow import LENDABLE_DTYPES  # noqa: E402
from kvjax_torch.dtypes import numpy_dtype  # noqa: E402

NEEDS_X64 = (torch.int64, torch.uint64, torch.float64, torch.complex128)
ON_CPU = jax.devices("cpu")[0]


def bits(array) -> bytes:
    return np.asarray(array).tobytes()


def cpu_array(values, dtype) -> jax.Array:
    return jax.device_put(jnp.asarray(values, dtype), ON_CPU)


def assert_lent(tensor, array):
    assert array.shape == tuple(tensor.shape)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.devices() == {ON_CPU}


@pytest.mark.parametrize("dtype", LENDABLE_DTYPES, ids=str)
def test_every_dtype_crosses_both_ways(dtype):
    with jax.enable_x64(dtype in NEEDS_X64):
        source = torch.arange(64, dtype=torch.uint8)
        raw = source % 2 if dtype is torch.bool else source
        tensor = raw.view(dtype)
        array = to_jax(tensor)
        assert_lent(tensor, array)
        assert array.dtype == numpy_dtype(dtype)
        assert bits(array) == bytes(raw.tolist())
        back = to_torch(array)
        assert (back.dtype, back.data_ptr()) == (dtype, tensor.data_ptr())
        assert torch.equal(back.view(torch.uint8), raw)


@pytest.mark.parametrize("dtype", NEEDS_X64, ids=str)
def test_64_bits_are_refused_without_x64(dtype):
    narrow = str(dtype).replace("64", "32").replace("128", "64")
    with pytest.raises(KVCacheTypeError, match=rf"got dtype {dtype}.*x64 mode off.*tensor\.to\({narrow}\)"):
        to_jax(torch.zeros(8, dtype=dtype))


def test_float4_travels_as_bytes():
    packed = torch.arange(64, dtype=torch.uint8)
    array = to_jax(packed.view(torch.float4_e2m1fn_x2))
    assert_lent(packed, array)
    assert array.dtype == np.uint8
    assert torch.equal(to_torch(array).view(torch.float4_e2m1fn_x2).view(torch.uint8), packed)
    with pytest.raises(KVCacheTypeError, match=r"got dtype float4_e2m1fn, expected one of .*uint8.*two a byte"):
        to_torch(cpu_array([1.0, 2.0], jnp.float4_e2m1fn))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.zeros(4, 0, 3).permute(2, 0, 1),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).reshape(2, 1, 12).transpose(0, 2),
        torch.arange(64.0)[16:32],
        torch.arange(32.0).reshape(2, 16)[1:],
        torch.arange(128.0).as_strided((1, 4), (100, 1)),
    ],
    ids=["0d", "empty", "empty_permuted", "permuted", "permuted_with_1", "offset", "row", "stride_of_a_1"],
)
def test_compact_tensors_are_lent_in_any_order(tensor):
    array = to_jax(tensor)
    assert_lent(tensor, array)
    np.testing.assert_array_equal(np.asarray(array), tensor.numpy())
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)


BASE = torch.zeros(4096, dtype=torch.uint8)
REFUSED = {
    "strided": (lambda: torch.zeros(4, 8)[:, :4], r"strides \(8, 1\) for shape \(4, 4\).*\.contiguous\(\)"),
    "every_second": (lambda: torch.zeros(16)[::2], r"strides \(2,\) for shape \(8,\)"),
    "expanded": (lambda: torch.zeros(3).expand(4, 3), r"strides \(0, 1\) for shape \(4, 3\), expected every element"),
    "qkv": (lambda: torch.zeros(5, 3, 64)[:, 1], r"strides \(192, 1\)"),
    "misaligned": (lambda: torch.zeros(32)[4:20], r"storage offset 4\), expected a multiple of 64 bytes on cpu"),
    "gradient": (lambda: torch.zeros(4, requires_grad=True), r"got requires_grad=True.*tensor\.detach\(\)"),
    "conjugate": (lambda: torch.zeros(4, dtype=torch.complex64).conj(), r"got is_conj\(\)=True.*resolve_conj\(\)"),
    "negative": (lambda: torch.zeros(4, dtype=torch.complex64).conj().imag, r"got is_neg\(\)=True.*resolve_neg\(\)"),
    "meta": (lambda: torch.zeros(4, device="meta"), r"got device meta, expected cpu or cuda"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"got layout torch.sparse_coo, expected torch.strided"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), r"quantized.*int_repr"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"got layout nested"),
    "numpy": (lambda: np.zeros(4), r"got a ndarray, expected a torch.Tensor"),
    "no_jax_dtype": (lambda: BASE.view(torch.bits8), r"got dtype torch.bits8, expected one of torch.bool, .*"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|quantiz)")
def test_what_would_need_a_copy_is_refused(case):
    make, message = REFUSED[case]
    with pytest.raises((KVCacheValueError, KVCacheTypeError), match=message):
        to_jax(make())


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
        jax.jit(to_torch)(cpu_array([1.0], jnp.float32))
    deleted = cpu_array([1.0], jnp.float32)
    deleted.delete()
    with pytest.raises(KVCacheValueError, match="got a deleted one"):
        to_torch(deleted)
    with pytest.raises(KVCacheTypeError, match="got dtype int4, expected one of bool, uint8"):
        to_torch(cpu_array([1, 2], jnp.int4))
    with pytest.raises(KVCacheTypeError, match="got dtype key<fry>"):
        to_torch(jax.random.key(0))


class Memory(bytearray):
    """Bytes whose end can be watched."""


def watched_tensor() -> tuple[torch.Tensor, weakref.ref]:
    memory = Memory(1024 + 64)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % 64
    whole[start : start + 1024] = torch.arange(1024) % 251
    return whole[start : start + 1024], weakref.ref(memory)


EXPECTED = bytes(i % 251 for i in range(1024))


def overwrite_freed_memory() -> list[torch.Tensor]:
    return [torch.full((1024,), 0xEE, dtype=torch.uint8) for _ in range(200)]


def test_memory_lives_as_long_as_its_last_borrower():
    tensor, memory = watched_tensor()
    array = to_jax(tensor)
    del tensor
    gc.collect()
    assert memory() is not None
    assert bits(array) == EXPECTED
    back = to_torch(array)
    array.delete()
    del array
    gc.collect()
    assert bytes(back.tolist()) == EXPECTED
    del back
    gc.collect()
    assert memory() is None


def test_an_array_that_is_deleted_leaves_its_tensor():
    array = cpu_array(np.arange(1024) % 251, jnp.uint8)
    tensor = to_torch(array)
    array.delete()
    del array
    gc.collect()
    kept = overwrite_freed_memory(), cpu_array(np.full(1024, 0xEE), jnp.uint8)
    assert bytes(tensor.tolist()) == EXPECTED
    del kept


def give_other_storage(tensor):
    tensor.set_(torch.zeros(3, dtype=torch.uint8))


def give_other_data(tensor):
    tensor.data = torch.zeros(3, dtype=torch.uint8)


@pytest.mark.parametrize("change", [give_other_storage, give_other_data])
def test_a_lender_that_moves_to_other_memory_leaves_the_array(change):
    tensor = (torch.arange(1024) % 251).to(torch.uint8)
    array = to_jax(tensor)
    change(tensor)
    kept = overwrite_freed_memory()
    assert bits(array) == EXPECTED
    del kept


def test_lent_storage_cannot_be_freed_by_resizing():
    tensor = (torch.arange(1024) % 251).to(torch.uint8)
    array = to_jax(tensor)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(4096)
    assert bits(array) == EXPECTED


def test_donating_a_borrowed_array_leaves_the_lender_as_it_was():
    tensor = torch.zeros(1024)
    array = to_jax(tensor)
    written = jax.jit(lambda x: x.at[3].set(1.0), donate_argnums=0)(array)
    assert written[3] == 1.0
    assert not tensor.any()


def test_borrowers_see_what_is_written_through_the_lender():
    tensor = torch.zeros(16)
    array = to_jax(tensor)
    tensor[5] = 2.5
    assert array[5] == 2.5


def test_a_tensor_of_an_array_holds_its_finished_result():
    square = cpu_array(np.full((600, 600), 1 / 600), jnp.float32)
    result = jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, y: y @ x, x))(square)
    tensor = to_torch(result)
    torch.testing.assert_close(tensor, torch.full((600, 600), 1 / 600))


def test_lending_ignores_torchs_default_device():
    with torch.device("meta"):
        assert_lent(BASE, to_jax(BASE))


SEVERAL_DEVICES = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kvjax_torch import to_torch
mesh = Mesh(np.array(jax.devices("cpu")), ("x",))
spread = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
print(to_torch(spread.addressable_shards[1].data).tolist())
to_torch(spread)
"""


def test_an_array_on_several_devices_is_refused_and_its_shards_are_lent():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SEVERAL_DEVICES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[4.0, 5.0, 6.0, 7.0]\n"
    assert "got one on 2 devices, expected one; lend each shard: array.addressable_shards[i].data" in done.stderr
