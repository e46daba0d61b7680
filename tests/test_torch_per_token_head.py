"""kvjax_torch's caches with a scale for each token and head, the scales in tensors of their own: vLLM's layouts."""

from __future__ import annotations

import re

import numpy as np
import pytest
from support import reference
from support.helpers import INPUT_DTYPES, assert_same_bytes, kv_tokens, matrix

from kvjax import FullAttentionSpec, KVCacheTypeError, KVCacheValueError, kernels

torch = pytest.importorskip("torch")
from support.interpret_mode import interpret_mode  # noqa: E402
from support.interpreted_calls import run_interpreted  # noqa: E402
from support.torch_helpers import from_numpy, to_numpy  # noqa: E402

import kvjax_torch  # noqa: E402
from kvjax_torch.arguments.attention import attention_plan  # noqa: E402
from kvjax_torch.arguments.plan import Encoding, ReadTensors, RopeInputs, SoftmaxOptions, WriteTensors  # noqa: E402
from kvjax_torch.arguments.reads import gather_plan  # noqa: E402
from kvjax_torch.arguments.writes import rope_plan, write_plan  # noqa: E402
from kvjax_torch.calls.attending import attention_calls  # noqa: E402
from kvjax_torch.calls.gathering import gather_call  # noqa: E402
from kvjax_torch.calls.writing import rope_call, write_call  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUTS = ("interleaved", "halves", "apart", "HND", "padded")
NUM_BLOCKS = 5
SLOTS = np.array([3, -1, 70, 16, 79, 0, 10**6, 17, 41, 9])
LENGTHS = np.array([33, 0, 16])
TABLE = np.array([[4, 0, 2], [9, 9, 9], [1, -1, 7]])
FLOAT32 = np.dtype(np.float32)


class Pages:
    """A cache of one allocation of random bytes, and views of it as vLLM hands them over.

    `layout`: "interleaved" is `[block, token, head, K | K scale | V | V scale]`, "halves" what vLLM had until 0.25,
    `[block, 2, token, head, row | scale]`; "apart" has scales in tensors of their own, "HND" heads before tokens, and
    "padded" is "interleaved" with other bytes between its blocks.
    """

    def __init__(self, spec: FullAttentionSpec, layout: str, element: torch.dtype, device: str = "cpu"):
        tokens, heads, size, size_v = spec.block_size, spec.num_kv_heads, spec.head_size, spec.head_size_v
        row = size + size_v + 8
        page = tokens * heads * row + (64 if layout == "padded" else 0)
        raw = np.random.default_rng(0).integers(0, 256, NUM_BLOCKS * page, np.uint8)
        raw[3::4] |= 0x30  # no scale is subnormal
        self.bytes = torch.from_numpy(raw).to(device)
        at_key, at_value = 0, size + 4
        strides = page, heads * row, row
        if layout == "HND":
            strides = page, row, tokens * row
        elif layout == "halves":
            strides, at_value = (page, heads * (size + 4), size + 4), tokens * heads * (size + 4)
        shape = NUM_BLOCKS, tokens, heads

        def data(start: int, width: int) -> torch.Tensor:
            return self.bytes.as_strided((*shape, width), (*strides, 1), start).view(element)

        def scales(start: int) -> torch.Tensor:
            if layout == "apart":
                return torch.full((*shape, 2), torch.nan, device=device)[..., 1]
            words = self.bytes.view(torch.float32)
            return words.as_strided(shape, tuple(stride // 4 for stride in strides), start // 4)

        self.key, self.value = data(at_key, size), data(at_value, size_v)
        self.k_scale, self.v_scale = scales(at_key + size), scales(at_value + size_v)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.key, self.value

    @property
    def scales(self) -> tuple[torch.Tensor, ...]:
        return self.k_scale, self.v_scale

    def copy(self) -> list[np.ndarray]:
        """The bytes, and what is not among them."""
        return [self.bytes.cpu().numpy().copy(), *(to_numpy(scales, FLOAT32) for scales in self.scales)]


def make_spec(dtype: str, layout: str = "interleaved", **changes) -> FullAttentionSpec:
    sizes = {"head_size": 64, "head_size_v": 64 if layout == "halves" else 48} | changes
    return FullAttentionSpec(16, 3, sizes["head_size"], sizes["head_size_v"], dtype=kvjax_dtype(dtype))


def kvjax_dtype(name: str):
    return next(dtype for dtype in reference.PER_TOKEN_HEAD if dtype.value == name)


def put(pages: Pages, key: np.ndarray, value: np.ndarray, dtype: str) -> None:
    """What a write has to leave, put there element by element."""
    halves = (key, pages.key, pages.k_scale), (value, pages.value, pages.v_scale)
    for x, cache, scale_cache in halves:
        codes, scales = reference.encode_per_token_head(x, kvjax_dtype(dtype))
        for i, slot in enumerate(SLOTS):
            if 0 <= slot < NUM_BLOCKS * 16:
                block, token = divmod(int(slot), 16)
                cache.view(torch.uint8)[block, token] = torch.from_numpy(codes[i].view(np.uint8)).to(cache.device)
                scale_cache[block, token] = torch.from_numpy(scales[i, :, 0]).to(cache.device)


def decoded(cache: torch.Tensor, scales: torch.Tensor, dtype: str) -> np.ndarray:
    """`[num_blocks, block_size, num_kv_heads, head_size]` float32."""
    element = reference.ELEMENT[kvjax_dtype(dtype)]
    with np.errstate(all="ignore"):
        return reference.one_nan(to_numpy(cache, element).astype(np.float32) * to_numpy(scales, FLOAT32)[..., None])


def expected_reads(pages: Pages, dtype: str) -> list[np.ndarray]:
    results = []
    for cache, scales in zip(pages.tensors, pages.scales, strict=True):
        dense = decoded(cache, scales, dtype)
        rows = np.where((TABLE >= 0) & (TABLE < NUM_BLOCKS), TABLE, NUM_BLOCKS)
        whole = np.concatenate([dense, np.zeros_like(dense[:1])])[rows].reshape(3, -1, *dense.shape[2:])
        results.append(np.where((np.arange(48) < LENGTHS[:, None])[..., None, None], whole, np.float32(0)))
    return results


@pytest.mark.parametrize("device", DEVICES)
@matrix(
    {
        "dtype": [dtype.value for dtype in reference.PER_TOKEN_HEAD],
        "layout": LAYOUTS,
        "input_dtype": INPUT_DTYPES,
        "element": ["bytes", "own"],
    }
)
def test_vllms_layouts_are_written_and_read_in_place(dtype, layout, input_dtype, element, device):
    spec = make_spec(dtype, layout)
    own = torch.int8 if dtype.startswith("int8") else torch.float8_e4m3fn
    pages, wanted = (Pages(spec, layout, own if element == "own" else torch.uint8, where) for where in (device, "cpu"))
    key, value = kv_tokens(spec, len(SLOTS), INPUT_DTYPES[input_dtype])
    put(wanted, key, value, dtype)
    rows = (from_numpy(key).to(device), from_numpy(value).to(device))
    slots = torch.from_numpy(SLOTS).to(device)
    kvjax_torch.reshape_and_cache_flash(*rows, *pages.tensors, slots, dtype, *pages.scales)
    for got, expected in zip(pages.copy(), wanted.copy(), strict=True):
        assert_same_bytes(got.view(np.uint8), expected.view(np.uint8))

    table, lengths = (torch.from_numpy(x).to(device) for x in (TABLE, LENGTHS))
    read = kvjax_torch.gather_kv(*pages.tensors, table, lengths, dtype, *pages.scales, dtype=torch.float32)
    for got, expected in zip(read, expected_reads(wanted, dtype), strict=True):
        assert_same_bytes(to_numpy(got, FLOAT32), expected)


@pytest.mark.parametrize("device", DEVICES)
@matrix(
    {
        "dtype": [dtype.value for dtype in reference.PER_TOKEN_HEAD],
        "layout": LAYOUTS,
        "input_dtype": INPUT_DTYPES,
        "is_neox": [True, False],
    },
    pairs=True,
)
def test_rotated_keys_are_written_to_vllms_layouts(dtype, layout, input_dtype, is_neox, device):
    spec = make_spec(dtype, layout)
    pages, wanted = (Pages(spec, layout, torch.uint8, where) for where in (device, "cpu"))
    key, value = kv_tokens(spec, len(SLOTS), INPUT_DTYPES[input_dtype])
    query = np.concatenate([key, key[::-1]], axis=1)
    table = np.random.default_rng(3).uniform(-1, 1, (40, 32)).astype(np.float32)
    positions = np.arange(len(SLOTS)) * 4
    put(wanted, reference.rotate(key, table, positions, is_neox), value, dtype)
    rows = [from_numpy(x).to(device) for x in (query, key, value)]
    others = [torch.from_numpy(x).to(device) for x in (SLOTS, positions, table)]
    rotated = kvjax_torch.rope_and_cache(*rows, *pages.tensors, *others, dtype, *pages.scales, is_neox=is_neox)
    assert_same_bytes(to_numpy(rotated, key.dtype), reference.rotate(query, table, positions, is_neox))
    for got, expected in zip(pages.copy(), wanted.copy(), strict=True):
        assert_same_bytes(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [dtype.value for dtype in reference.PER_TOKEN_HEAD])
def test_attention_reads_vllms_layout(dtype, device):
    spec = make_spec(dtype)
    pages = Pages(spec, "interleaved", torch.uint8, device)
    rng = np.random.default_rng(1)
    key, value = (rng.standard_normal((80, 3, size)).astype(np.float32) for size in (64, 48))
    rows = from_numpy(key).to(device), from_numpy(value).to(device)
    slots = torch.arange(80, device=device)
    kvjax_torch.reshape_and_cache_flash(*rows, *pages.tensors, slots, dtype, *pages.scales)
    query = rng.standard_normal((3, 6, 64)).astype(np.float32)
    table, lengths = (torch.from_numpy(x).to(device) for x in (TABLE, LENGTHS))
    got = kvjax_torch.paged_attention(
        from_numpy(query).to(device), *pages.tensors, table, lengths, dtype, *pages.scales
    )
    ends = torch.arange(4, device=device)  # a row of each sequence
    step = kvjax_torch.ragged_paged_attention(
        from_numpy(query).to(device), *pages.tensors, table, lengths, ends, dtype, *pages.scales
    )
    np.testing.assert_allclose(to_numpy(step, FLOAT32), to_numpy(got, FLOAT32), atol=1e-6)
    keys, values = (x.astype(np.float64) for x in expected_reads(pages, dtype))
    for i, length in enumerate(LENGTHS):
        for head in range(6):
            logits = keys[i, :length, head // 2] @ query[i, head].astype(np.float64) / 8
            weights = np.exp(logits - logits.max(initial=-np.inf))
            wanted = weights @ values[i, :length, head // 2] / max(weights.sum(), 1e-30)
            np.testing.assert_allclose(to_numpy(got, FLOAT32)[i, head], wanted, atol=1e-5)


def test_torch_knows_that_scales_in_tensors_of_their_own_are_written():
    pages = Pages(make_spec("int8_per_token_head"), "interleaved", torch.int8)
    key, value = (torch.ones(2, 3, size) for size in (64, 48))
    stored_as = "int8_per_token_head", *pages.scales
    tensors = key, value, *pages.tensors, torch.arange(2)
    written = torch.ops.kvjax.reshape_and_cache_flash_per_token_head
    rotated = torch.ops.kvjax.rope_and_cache_per_token_head
    for operation, arguments in (
        (written, (*tensors, *stored_as)),
        (rotated, (key, *tensors, torch.arange(2), torch.ones(4, 64), *stored_as)),
    ):
        torch.library.opcheck(operation.default, arguments, test_utils=("test_schema", "test_faketensor"))
    for operation in (torch.ops.kvjax.reshape_and_cache_flash, torch.ops.kvjax.rope_and_cache):
        arguments = tensors if operation.__name__.startswith("reshape") else (key, *tensors, tensors[-1], key[0])
        with pytest.raises(KVCacheTypeError, match=r"expected torch\.ops\.kvjax\.\w+_per_token_head"):
            operation(*arguments, *stored_as)


@pytest.mark.full
@matrix(
    {"layout": LAYOUTS, "dtype": [dtype.value for dtype in reference.PER_TOKEN_HEAD]},
    few={"layout": ["apart"], "dtype": ["int8_per_token_head"]},
)
def test_the_interpreted_kernel_writes_rotated_keys_to_vllms_layouts(layout, dtype):
    spec = make_spec(dtype, layout)
    pages, wanted = (Pages(spec, layout, torch.uint8) for _ in range(2))
    key, value = kv_tokens(spec, len(SLOTS), INPUT_DTYPES["bfloat16"])
    table = np.random.default_rng(3).uniform(-1, 1, (40, 32)).astype(np.float32)
    positions = np.arange(len(SLOTS)) * 4
    put(wanted, reference.rotate(key, table, positions, is_neox=True), value, dtype)
    rows = [from_numpy(x) for x in (key, key, value)]
    slots, *others = (torch.from_numpy(x) for x in (SLOTS, positions, table))
    tensors, rope = WriteTensors(*rows[1:], *pages.tensors, slots, *pages.scales), RopeInputs(rows[0], *others, True)
    call, rotated = rope_call(rope_plan(tensors, rope, Encoding(dtype)), tensors, rope, True)
    run_interpreted(call)
    assert_same_bytes(to_numpy(rotated, key.dtype), reference.rotate(key, table, positions, is_neox=True))
    for got, expected in zip(pages.copy(), wanted.copy(), strict=True):
        assert_same_bytes(got.view(np.uint8), expected.view(np.uint8))


def assert_near(out: np.ndarray, pages: Pages, dtype: str, query: np.ndarray) -> None:
    """Compares results of 16 bits with attention in float64 to the bytes that pages hold."""
    keys, values = (x.astype(np.float64) for x in expected_reads(pages, dtype))
    for i, head in np.ndindex(3, 6):
        own_keys, own_values = (x[i, : LENGTHS[i], head // 2] for x in (keys, values))
        logits = own_keys @ query[i, head].astype(np.float64) / 8
        weights = np.exp(logits - logits.max(initial=-np.inf))
        wanted = weights @ own_values / max(weights.sum(), 1e-30)
        np.testing.assert_allclose(
            out[i, head].astype(np.float64), wanted, atol=0.01 * np.abs(own_values).max(initial=0)
        )


def written(layout: str, dtype: str, query_dtype: str, device: str) -> tuple[Pages, np.ndarray, list[torch.Tensor]]:
    """Pages full of tokens, a query of a row for each sequence, and the block table and lengths.

    Tokens are of the query's dtype, as a model's are: prompts read rows that have scales in it, so that beyond float16
    they would be infinite.
    """
    pages = Pages(spec := make_spec(dtype, layout), layout, torch.uint8, device)
    rows = [from_numpy(x).to(device) for x in kv_tokens(spec, 80, INPUT_DTYPES[query_dtype])]
    slots = torch.arange(80, device=device)
    kvjax_torch.reshape_and_cache_flash(*rows, *pages.tensors, slots, dtype, *pages.scales)
    query = np.random.default_rng(1).standard_normal((3, 6, 64)).astype(INPUT_DTYPES[query_dtype])
    return pages, query, [torch.from_numpy(x).to(device) for x in (TABLE, LENGTHS)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "dtype", "query_dtype"),
    [("interleaved", "int8_per_token_head", "bfloat16"), ("apart", "fp8_per_token_head", "float16")],
)
def test_the_interpreted_kernel_attends_to_vllms_layouts(layout, dtype, query_dtype):
    pages, query, numbers = written(layout, dtype, query_dtype, "cpu")
    rows = from_numpy(query)[:, None]
    tensors = ReadTensors(*pages.tensors, *numbers, *pages.scales)
    plan = attention_plan(rows, tensors, Encoding(dtype), SoftmaxOptions())
    with interpret_mode():  # it has no barrier of several warpgroups, so kernels are made for it
        decode, merge = attention_calls(plan, rows, tensors, None)
    run_interpreted(decode)
    run_interpreted(merge)
    assert_near(to_numpy(merge.tensors[-2][:, 0], query.dtype), pages, dtype, query)


@pytest.mark.gpu
@matrix(
    {
        "layout": LAYOUTS,
        "dtype": [dtype.value for dtype in reference.PER_TOKEN_HEAD],
        "query_dtype": ["bfloat16", "float16"],
    },
    pairs=True,
)
def test_kernels_attend_to_vllms_layouts(layout, dtype, query_dtype):
    pages, query, numbers = written(layout, dtype, query_dtype, "cuda")
    given = from_numpy(query).cuda(), *pages.tensors, *numbers
    out = kvjax_torch.paged_attention(*given, dtype, *pages.scales)
    ends = torch.arange(4, device="cuda")  # a row of each sequence, served as prompts
    step = kvjax_torch.ragged_paged_attention(*given, ends, dtype, *pages.scales, decode_q_len=0)
    for got in (step, out):
        assert_near(to_numpy(got, query.dtype), pages, dtype, query)


@pytest.mark.parametrize("operation", ["paged_attention", "ragged_paged_attention"])
def test_torch_knows_what_attention_over_scales_in_tensors_of_their_own_returns(operation):
    pages = Pages(make_spec("int8_per_token_head"), "apart", torch.int8)
    pages.bytes.fill_(1)
    pages.k_scale.fill_(0.5), pages.v_scale.fill_(0.5)
    bounds = (torch.arange(4),) if operation == "ragged_paged_attention" else ()
    arguments = (torch.ones(3, 6, 64), *pages.tensors, torch.from_numpy(TABLE), torch.from_numpy(LENGTHS), *bounds)
    torch.library.opcheck(
        getattr(torch.ops.kvjax, operation).default,
        (*arguments, "int8_per_token_head", *pages.scales),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_compiled_calls_write_scales_in_tensors_of_their_own():
    key, value = torch.randn(8, 2, 64), torch.randn(8, 2, 64)

    def write(key, caches, own_scales):
        options = torch.arange(8), "int8_per_token_head", *own_scales
        kvjax_torch.reshape_and_cache_flash(key, value, *caches, *options)

    results = []
    for run in (write, torch.compile(write, backend="aot_eager", fullgraph=True)):
        caches = [torch.zeros(3, 16, 2, 64, dtype=torch.int8) for _ in range(2)]
        own_scales = [torch.ones(3, 16, 2) for _ in range(2)]
        run(key, caches, own_scales)
        results.append([*caches, *own_scales])
    for eager, compiled in zip(*results, strict=True):
        assert_same_bytes(compiled.numpy(), eager.numpy())
        assert eager[0, :8].unique().numel() > 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"k_scale": torch.ones(5, 16, 2)},
            KVCacheValueError,
            "k_scale: got shape (5, 16, 2), expected [num_blocks=5,",
        ),
        ({"v_scale": torch.ones(())}, KVCacheValueError, "v_scale: got shape (), expected [num_blocks, block_size,"),
        ({"v_scale": 1.0}, KVCacheValueError, "v_scale: got shape (), expected [num_blocks, block_size,"),
        ({"k_scale": torch.ones(5, 16, 3).double()}, KVCacheTypeError, "k_scale: got dtype torch.float64, expected"),
        ({"k_scale": torch.ones(()).expand(5, 16, 3)}, KVCacheValueError, "k_scale: got strides (0, 0, 0) for shape"),
        (
            {"dtype": "fp8"},
            KVCacheValueError,
            "k_scale: got shape (5, 16, 3), expected one element or [num_kv_heads=3]",
        ),
        (
            {"k_scale": 1.0, "v_scale": 1.0},
            KVCacheValueError,
            "key_cache: got shape (5, 16, 3, 64), expected [num_blocks, block_size, num_kv_heads=3, 68] for head size"
            " 64 in 'fp8_per_token_head'; or k_scale and v_scale [num_blocks, block_size,",
        ),
    ],
)
def test_invalid_arguments_are_refused_by_name(change, error, message):
    pages = Pages(make_spec("fp8_per_token_head"), "interleaved", torch.uint8)
    given = {"k_scale": pages.k_scale, "v_scale": pages.v_scale, "dtype": "fp8_per_token_head"} | change
    key, value = (torch.ones(2, 3, size) for size in (64, 48))
    before = pages.copy()
    with pytest.raises(error, match=re.escape(message)):
        kvjax_torch.reshape_and_cache_flash(
            key, value, *pages.tensors, torch.arange(2), given["dtype"], given["k_scale"], given["v_scale"]
        )
    for got, expected in zip(pages.copy(), before, strict=True):
        assert_same_bytes(got.view(np.uint8), expected.view(np.uint8))


def test_kernels_are_told_of_scales_where_they_lie():
    """vLLM's rows leave four bytes of alignment, and scales in them are found from the tensor's own first element."""
    spec = make_spec("int8_per_token_head")
    pages = Pages(spec, "interleaved", torch.int8)
    key, value = (torch.ones(2, 3, size) for size in (64, 48))
    written, encoding = (
        WriteTensors(key, value, *pages.tensors, torch.arange(2), *pages.scales),
        Encoding(spec.dtype.value),
    )
    plan = write_plan(written, encoding)
    row = 64 + 48 + 8
    stride, regions = plan.cache.scales[0]
    assert (stride, regions) == (16 * 3 * row, (kernels.PageRegion(0, 3 * row, row, 4),))
    assert plan.cache.keys == (stride, (kernels.PageRegion(0, 3 * row, row, 64),))
    call = write_call(plan, written, False)
    addresses = [tensor.data_ptr() - pages.bytes.data_ptr() for tensor in call.tensors[3:]]
    assert addresses == [0, 68, 64, 68 + 48]
    assert call.kernel.written == (3, 4, 5, 6)
    table, lengths = torch.from_numpy(TABLE), torch.from_numpy(LENGTHS)
    tensors = ReadTensors(*pages.tensors, table, lengths, *pages.scales)
    read = gather_call(gather_plan(tensors, encoding, None), tensors)
    assert [tensor.data_ptr() for tensor in read.tensors[2:6]] == [
        tensor.data_ptr() for tensor in (*pages.scales, *pages.tensors)
    ]
    assert isinstance(read.kernel, kernels.AnyCount)


def test_the_operation_that_leaves_scales_alone_takes_none_to_write():
    tokens, cache = torch.ones(2, 2, 16), torch.zeros(3, 4, 2, 16, dtype=torch.int8)
    scales = [torch.zeros(3, 4, 2) for _ in range(2)]
    slots = torch.tensor([0, 5])
    with pytest.raises(KVCacheTypeError, match=r"expected torch\.ops\.kvjax\.reshape_and_cache_flash_per_token_head$"):
        torch.ops.kvjax.reshape_and_cache_flash(
            tokens, tokens, cache, cache.clone(), slots, "int8_per_token_head", *scales
        )
    assert not scales[0].any()
