"""Whatever a configuration, a tensor file or exported blocks hold, reading gives a result or a documented error.

`make fuzz` runs the same properties for longer, led by what they cover in kvjax (tools/fuzz_parsers.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from support.any_json import JSON, nested

import kvjax
from kvjax import KVCacheTypeError, KVCacheValueError, KVCacheWarning, ModelKVConfig
from kvjax.cli import main
from kvjax.dtypes import parse_model_dtype
from kvjax.hf_config.model_types import MODEL_TYPES
from kvjax.model_config import MAX_LAYERS
from kvjax.tensor_files import INDEX, open_tensors

CONFIGS = Path(__file__).parent / "data/configs"
REAL = [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]
LONGEST_MESSAGE = 2000

fuzz = settings(derandomize=True, max_examples=120, suppress_health_check=list(HealthCheck))


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Each `(container, key)` of a JSON document."""
    if isinstance(document, (dict, list)):
        for key in document if isinstance(document, dict) else range(len(document)):
            yield document, key
            yield from places(document[key])


class Unprinted:
    """Holds what hypothesis should not print: it may be endless, or `repr` may raise."""

    def __init__(self, value: Any):
        self.value = value


QUANTIZATION = [real for real in REAL if "quantization" in real]
QUANTIZATION += [
    {"quantization": {"kv_cache_quantized_layers": {"model.layers.0.self_attn": {"quant_algo": "FP8"}}}},
    {
        "quant_method": "quark",
        "export": {"kv_cache_group": ["*k_proj"]},
        "layer_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}},
    },
]
QUANTIZATION += [real["quantization_config"] for real in REAL if "quantization_config" in real]
VALUES = [document[key] for real in REAL for document, key in places(real)]
NAMES = sorted({key for document in REAL for _, key in places(document) if isinstance(key, str)})
# What kvjax reads and no configuration here holds.
NAMES += ["kv_cache_quantized_layers", "kv_cache_schema_version", "kv_cache_group"]
NAMES += ["compress_ratios", "kv_lora_rank", "sliding_window_pattern", "quantization", "swa_head_dim", "strategy"]

INTEGERS = [0, 1, -1, 2, 3, 16, 17, 10**4, 10**9, 2**31, 2**63, 10**30, -(10**30)]
OTHERS = [
    None,
    True,
    False,
    1.0,
    0.5,
    float("nan"),
    float("inf"),
    1e308,
    "",
    "0",
    "auto",
    "\ud800",
    "x" * 10**5,
    [],
    {},
]
LARGE = st.builds(pow, st.just(10), st.sampled_from([400, 5000]))  # Python prints no number of 5,000 digits
ANYTHING = st.sampled_from(VALUES) | st.sampled_from([*INTEGERS, *OTHERS]) | LARGE | JSON


@st.composite
def anything(draw: st.DrawFn) -> Any:
    return copy.deepcopy(draw(ANYTHING))


def place(draw: st.DrawFn, document: Any) -> tuple[Any, Any]:
    """Container and key of some entry of a document that has one."""
    while True:
        key = draw(st.sampled_from(list(document) if isinstance(document, dict) else range(len(document))))
        if not isinstance(document[key], (dict, list)) or not document[key] or draw(st.booleans()):
            return document, key
        document = document[key]


@st.composite
def changed(draw: st.DrawFn, kind: str) -> Any:
    """A real configuration with a few of its entries replaced, removed, put in or moved; or anything at all."""
    documents = {"model": REAL, "quantization": QUANTIZATION}[kind]
    if draw(st.integers(0, 9)) == 0:
        return draw(anything() | st.builds(nested, st.sampled_from([5, 500, 20_000])))
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    if draw(st.integers(0, 7)) == 0:
        document = {"text_config": document}
    for _ in range(draw(st.integers(0, 5))):
        if not document:
            break
        container, key = place(draw, document)
        match draw(st.sampled_from(["replace", "remove", "put", "move"])):
            case "replace":
                container[key] = draw(anything())
            case "remove":
                del container[key]
            case "put":
                into = container if isinstance(container, dict) else document
                into[draw(st.sampled_from(NAMES))] = draw(anything())
            case "move":
                other, other_key = place(draw, document)
                container[key] = copy.deepcopy(other[other_key])
    if document and draw(st.integers(0, 19)) == 0:
        container, key = place(draw, document)
        container[key] = nested(draw(st.sampled_from([100, 500, 20_000])))
    return document


@st.composite
def skip_layers(draw: st.DrawFn) -> Any:
    entry = st.sampled_from([0, 1, "0", "2", "9" * 5000, "sliding_window", "full_attention"])
    return draw(st.lists(entry | anything(), max_size=3) | anything())


@st.composite
def dtypes(draw: st.DrawFn) -> Any:
    """What a user asks for: a dtype, or a map of them."""
    layers = st.sampled_from([0, 1, "0", "0-3", "1-1", "3-0", "-1", "9-" + "9" * 5000, "sliding_window", "*", "", None])
    return draw(dtype() | st.dictionaries(layers, dtype(), max_size=4))


@st.composite
def dtype(draw: st.DrawFn) -> Any:
    return draw(st.sampled_from([*kvjax.ACCEPTED_KV_CACHE_DTYPES, "torch.bfloat16", "float64"]) | anything())


@st.composite
def size(draw: st.DrawFn) -> Any:
    return draw(st.sampled_from([1, 4, 16, 784]) | anything())


REFUSED = "refused"


def outcome[Result](call: Callable[[], Result]) -> Result | str:
    """What a call returns, or `REFUSED` where it refuses as documented. Any other error or warning goes through."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", KVCacheWarning)
        try:
            return call()
        except (KVCacheValueError, KVCacheTypeError) as error:
            message = str(error)
    assert len(message) <= LONGEST_MESSAGE
    return REFUSED


def parse(data: st.DataObject) -> dict[str, Any]:
    """Runs all that reads what users and checkpoints state, in a program's order; says what came of each."""

    def draw(strategy: st.SearchStrategy[Any]) -> Any:
        return data.draw(strategy.map(Unprinted)).value

    results: dict[str, Any] = {}
    requested, model_dtype, declared = draw(dtypes()), draw(dtype()), draw(changed("quantization"))
    results["dtype"] = outcome(lambda: kvjax.parse_kv_cache_dtype(requested))
    results["model dtype"] = outcome(lambda: parse_model_dtype(model_dtype))
    results["resolved"] = outcome(
        lambda: kvjax.resolve_kv_cache_dtype(requested, model_dtype="bfloat16", quantization_config=declared)
    )
    config, instead = draw(changed("model")), draw(st.sampled_from([{}, {"quantization_config": declared}]))
    results["model"] = model = outcome(lambda: ModelKVConfig.from_hf_config(config, **instead))
    if model is REFUSED:
        return results
    assert len(model.layers) <= MAX_LAYERS
    tensor_parallel, skipped = draw(size()), draw(skip_layers())
    results["shard"] = shard = outcome(lambda: model.shard(tensor_parallel))
    model = model if shard is REFUSED else shard
    block_size, layout = draw(size()), draw(st.sampled_from(["NHD", "HND"]) | anything())
    results["specs"] = specs = outcome(
        lambda: kvjax.resolve_layer_specs(model, requested, skip_layers=skipped, block_size=block_size, layout=layout)
    )
    if specs is not REFUSED:
        unified, budget = kvjax.unify_page_sizes(specs), draw(st.sampled_from([-1, 2**40]) | size())
        assert len({spec.page_size_bytes for spec in unified}) == 1
        results["tokens"] = outcome(lambda: kvjax.max_tokens(unified, budget))
    return results


@fuzz
@given(st.data())
def test_parsers_give_a_result_or_a_documented_error(data: st.DataObject):
    parse(data)


@fuzz
@given(st.sampled_from(sorted(MODEL_TYPES)), st.data())
def test_every_type_of_model_is_read_or_refused_whatever_its_keys_hold(model_type: str, data: st.DataObject):
    row = MODEL_TYPES[model_type]
    keys = [*row.keys, *(name for names in row.names.values() for name in names)]
    sound = {"num_hidden_layers": 6, "num_attention_heads": 4, "hidden_size": 64}
    sound = {row.names.get(key, (key,))[0]: value for key, value in sound.items()}
    drawn = data.draw(st.dictionaries(st.sampled_from(keys), anything(), max_size=3).map(Unprinted)).value
    config = {"model_type": model_type, "dtype": "bfloat16", **sound, **drawn}
    outcome(lambda: ModelKVConfig.from_hf_config(config))


class AllSeen(Exception):  # noqa: N818
    """Ends the drawing."""


def test_what_is_drawn_reaches_results_and_refusals():
    names = ["dtype", "model dtype", "resolved", "model", "shard", "specs", "tokens"]
    wanted, seen = {(name, refused) for name in names for refused in (True, False)}, set()

    # Of what is drawn some depends on what else is imported.
    @settings(fuzz, database=None, max_examples=1000, phases=[Phase.generate])
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        seen.update((name, result is REFUSED) for name, result in parse(data).items())
        if seen == wanted:
            raise AllSeen

    with pytest.raises(AllSeen):
        collect()


def as_file(document: Any) -> bytes:
    """A document as a file would hold it, and other such for those that JSON's own writer refuses."""
    try:
        return json.dumps(document).encode()
    except ValueError:
        return b'{"num_hidden_layers": 1%s}' % (b"0" * 5000)
    except RecursionError:
        return b"[" * 100_000


WORDS = st.sampled_from(
    [
        "0",
        "1",
        "8",
        "16",
        "-1",
        "0-3",
        "0-1=fp8,*=nvfp4",
        "x=fp8",
        "x",
        "40GiB",
        "1.5 TB",
        "9" * 400,
        "9" * 5000,
        "nvfp4",
        "bfloat16",
        "sliding_window",
    ]
)
OPTIONS = st.sampled_from(
    ["--kv-cache-dtype", "--model-dtype", "--skip-layers", "--memory", "--block-size", "--tensor-parallel", "--layout"]
)
ARGUMENTS = st.lists(st.tuples(OPTIONS, WORDS) | st.just(("--json",)), max_size=3)


@fuzz
@given(changed("model").map(Unprinted) | st.binary(), ARGUMENTS)
def test_plan_prints_a_plan_or_one_line_of_error(config: Unprinted | bytes, arguments: list[tuple[str, ...]]):
    argv = ["plan", "--config", "-", *(word for words in arguments for word in words)]
    text = config if isinstance(config, bytes) else as_file(config.value)
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO(text))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.object(sys, "stdin", stdin):
        try:
            status = main(argv)
        except SystemExit as exit:
            status = exit.code
    if status == 0:
        assert (json.loads(out.getvalue())["num_layers"] > 0) if ("--json",) in arguments else out.getvalue()
    else:
        assert (status, out.getvalue()) == (2, "")
        assert err.getvalue().splitlines()[-1].startswith("kvjax plan: error: ")


FLOATS = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
OF_SAFETENSORS = {*FLOATS, "F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "BOOL", "C64"}
OF_SAFETENSORS |= {f"{sign}{bits}" for sign in "UI" for bits in (8, 16, 32, 64)}
SCALED = ModelKVConfig.from_hf_config(
    {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "dtype": "bfloat16"}
)
TENSORS = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in (0, 1) for kind in "kv"]
TENSORS += ["a", "x" * 10**4 + ".layers.0.k_scale"]
OFFSETS = st.lists(st.integers(0, 40), min_size=2, max_size=2)
METADATA: tuple[dict[str, str], ...] = ({"kvjax_amax_divisor": "448"}, {"kvjax_key_rotation": "0,1"})
HEADERS: list[dict[str, Any]] = [{}, {}, *({"__metadata__": each} for each in METADATA)]


@st.composite
def tensor_file(draw: st.DrawFn) -> bytes:
    """A safetensors file, most often with something wrong."""
    header: dict[str, Any] = draw(st.sampled_from(HEADERS))
    header, data = dict(header), b""
    for name in draw(st.lists(st.sampled_from(TENSORS), unique=True, max_size=4)):
        dtype, shape = draw(st.sampled_from(sorted(FLOATS))), draw(st.lists(st.integers(0, 3), max_size=2))
        size = math.prod(shape) * np.dtype(FLOATS[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += draw(st.binary(min_size=size, max_size=size))
    header = copy.deepcopy(header)
    for _ in range(draw(st.integers(0, 2)) if header else 0):
        container, key = place(draw, header)
        other = st.integers(-1, 40) | st.sampled_from([*OF_SAFETENSORS, "?"]) | OFFSETS | anything()
        container[key] = draw(other)
    text = as_file(header)
    if draw(st.booleans()):
        text += b" " * draw(st.integers(1, 9))
    size = len(text)
    match draw(st.sampled_from(["whole", "whole", "size", "bytes", "cut", "more", "twice"])):
        case "size":
            size = draw(st.integers(0, 200) | st.integers(0, 2**64 - 1))
        case "bytes":
            at = draw(st.integers(0, len(text)))
            text = text[:at] + draw(st.binary(max_size=3)) + text[at + draw(st.integers(0, 3)) :]
            size = len(text)
        case "cut":
            data = data[: draw(st.integers(0, len(data)))]
        case "more":
            data += draw(st.binary(min_size=1, max_size=8))
        case "twice" if header and text.startswith(b"{"):
            text = text.rstrip()[:-1] + b"," + text[1:]
            size = len(text)
    return size.to_bytes(8, "little") + text + data


def has_a_key_twice(text: bytes) -> bool:
    found = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found.append(len(pairs) != len(dict(pairs)))
        return dict(pairs)

    json.loads(text, object_pairs_hook=look)
    return any(found)


@settings(fuzz, deadline=None)  # files may be slow
@given(tensor_file().map(Unprinted))
def test_any_file_is_read_as_safetensors_reads_it_or_refused(file: Unprinted):
    """Files with a key twice are refused, and those with a dtype that is in no table are read, but for its tensors."""
    content = file.value
    text = content[8:][: int.from_bytes(content[:8], "little")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.safetensors")
        path.write_bytes(content)
        read = outcome(lambda: {name: outcome(tensor) for name, tensor in open_tensors(path).items()})
        scales = outcome(lambda: kvjax.load_kv_scales(path, SCALED, "fp8"))
    assert scales is REFUSED or read is not REFUSED
    try:
        expected = dict(deserialize(content))
    except SafetensorError:
        assert read is REFUSED or {json.loads(text)[name]["dtype"] for name in read} - OF_SAFETENSORS
        return
    if read is REFUSED:
        assert has_a_key_twice(text)
        return
    assert {*read} == {*expected}
    for name, tensor in expected.items():
        if tensor["dtype"] in FLOATS:
            with np.errstate(all="ignore"):
                array = np.frombuffer(tensor["data"], FLOATS[tensor["dtype"]]).astype(np.float32)
            np.testing.assert_array_equal(read[name], array.reshape(tensor["shape"]))
        else:
            assert read[name] is REFUSED


@settings(fuzz, deadline=None)
@given(st.data())
def test_any_index_gives_scales_or_a_documented_error(data: st.DataObject):
    file = (
        st.sampled_from(["a.safetensors", "b.safetensors", "../a.safetensors", "", "..", "a\0", "x" * 300]) | anything()
    )
    files = st.dictionaries(st.sampled_from(TENSORS), file)
    index = data.draw((st.fixed_dictionaries({"weight_map": files | anything()}) | anything()).map(Unprinted)).value
    contents = data.draw(st.dictionaries(st.sampled_from(["a", "b"]), tensor_file()).map(Unprinted)).value
    with tempfile.TemporaryDirectory() as folder:
        for name, content in contents.items():
            Path(folder, f"{name}.safetensors").write_bytes(content)
        if data.draw(st.booleans()):
            Path(folder, INDEX).write_bytes(as_file(index))
        outcome(lambda: kvjax.load_kv_scales(folder, SCALED, "fp8"))


EXPORTED = kvjax.FullAttentionSpec(2, 1, 16, dtype=kvjax.KVCacheDType.FP8_E4M3)
WRITTEN = [1, 3]


@functools.cache
def destination() -> tuple[kvjax.KVCache, jax.Array]:
    """Pages, and states of which a slot is 16 bytes."""
    return kvjax.KVCache.allocate(EXPORTED, 4), jnp.zeros((3, 2, 2), jnp.float32)


@functools.cache
def exported() -> bytes:
    cache, states = destination()
    cache = kvjax.KVCache(cache.kv + np.uint8(7), EXPORTED)
    return kvjax.export_blocks([cache, states + 7], [2, 0], hashes=[b"h" * 32], state=1)


def sealed(header: bytes, pages: bytes) -> bytes:
    """An export of any header, a hash and pages, with digests that are right."""
    start = b"KVJAXBLK" + len(header).to_bytes(8, "little") + header + b"h" * 32
    start += hashlib.sha256(start).digest() + pages
    return start + hashlib.sha256(start).digest()


@st.composite
def exported_blocks(draw: st.DrawFn) -> bytes:
    """An export, most often with something wrong."""
    data = exported()
    size = int.from_bytes(data[8:16], "little")
    header, pages = json.loads(data[16 : 16 + size]), data[16 + size + 64 : -32]
    match draw(st.sampled_from(["header", "bytes", "cut", "pages", "anything", "whole"])):
        case "header":
            for _ in range(draw(st.integers(1, 3))):
                container, key = place(draw, header)
                container[key] = draw(anything())
            if draw(st.integers(0, 9)) == 0:
                header["caches"] = nested(draw(st.sampled_from([5, 20_000])))
            return sealed(as_file(header), pages)
        case "bytes":
            at = draw(st.integers(0, len(data)))
            return data[:at] + draw(st.binary(max_size=3)) + data[at + draw(st.integers(0, 3)) :]
        case "cut":
            return data[: draw(st.integers(0, len(data)))]
        case "pages":
            return sealed(data[16 : 16 + size], draw(st.binary(max_size=2 * len(pages))))
        case "anything":
            return draw(st.binary(max_size=40) | st.builds(sealed, st.binary(max_size=40), st.just(pages)))
    return data


@settings(fuzz, deadline=None)
@given(exported_blocks().map(Unprinted), st.booleans())
def test_any_bytes_are_imported_as_blocks_or_refused(drawn: Unprinted, as_stream: bool):
    """Nothing is written of what is refused. Of other pages and states with right digests, those are imported."""
    data, caches = drawn.value, [*destination()]
    source = io.BytesIO(data) if as_stream else data
    imported = outcome(lambda: kvjax.import_blocks(source, caches, WRITTEN, state=2))
    if imported is REFUSED:
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(caches))
        return
    written, states = imported
    destination.cache_clear()
    size = int.from_bytes(data[8:16], "little")
    pages = np.frombuffer(data[16 + size + 64 :][: 2 * EXPORTED.page_size_bytes], np.uint8)
    np.testing.assert_array_equal(np.asarray(written.kv)[WRITTEN].reshape(-1), pages)
    state = np.frombuffer(data[16 + size + 64 + len(pages) :][:16], np.uint8)
    np.testing.assert_array_equal(np.asarray(states)[2].reshape(-1).view(np.uint8), state)
    assert not np.asarray(written.kv)[[0, 2]].any()
    assert not np.asarray(states)[:2].any()
    unspoiled = (
        json.loads(data[16 : 16 + size]),
        json.loads(exported()[16:][: int.from_bytes(exported()[8:16], "little")]),
    )
    for name in ("caches", "states", "num_blocks", "format", "hash"):
        assert unspoiled[0][name] == unspoiled[1][name]
