"""Files of a checkpoint are read as safetensors reads them, or refused by name; test_fuzz_parsers.py tries any."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvjax import KVCacheTypeError, KVCacheValueError, ModelKVConfig, load_key_rotation, load_kv_scales
from kvjax.tensor_files import INDEX, open_tensors

LAYER = "model.layers.0.self_attn."
K, V, WEIGHT = (LAYER + name for name in ("k_scale", "v_scale", "k_proj.weight"))
SOUND = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
MODEL = ModelKVConfig.from_hf_config(
    {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 64, "dtype": "bfloat16"}
)


def file_of(header: Any, data: bytes = b"", *, header_size: int | None = None) -> bytes:
    """A safetensors file's bytes, however wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if header_size is None else header_size).to_bytes(8, "little") + text + data


def save(tensors: Mapping[str, Any], path: str | Path) -> None:
    save_file({name: np.asarray(tensor) for name, tensor in tensors.items()}, path)


def scale(path: Path) -> float:
    """The scale of keys that a user gets."""
    return float(load_kv_scales(path, MODEL, "fp8", amax_divisor=448)[0].k_scale)


def refusal(path: Path) -> str:
    with pytest.raises(KVCacheValueError) as raised:
        load_kv_scales(path, MODEL, "fp8", amax_divisor=448)
    return str(raised.value)


MALFORMED = [
    (b"", "got a header of 0 bytes in a file of 0"),
    (b"\x02\0\0", "got a header of 2 bytes in a file of 3"),
    (file_of(b"{}", header_size=9), "got a header of 9 bytes in a file of 10"),
    (file_of(b"{}", header_size=2**62), "in a file of 10"),
    (file_of(b"{}", bytes(4)), "got 4 bytes behind the header, expected 0"),
    (file_of(b""), "a header that cannot be read"),
    (file_of(b"{"), "a header that cannot be read"),
    (file_of(b"[" * 100_000), "a header that cannot be read"),
    (file_of(json.dumps({K: SOUND}).encode("utf-16"), bytes(4)), "a header that cannot be read"),
    (file_of([]), "a header that is not an object"),
    (file_of(b'{"a": NaN}'), "got the number NaN"),
    (file_of({"\ud800": SOUND}, bytes(4)), "got half of a surrogate pair"),
    (file_of(b'{"%s": {}, "%s": {}}' % (K.encode(), K.encode())), f"got the key '{K}' twice"),
    (file_of(b'{"a": {"dtype": "F32", "dtype": "I8"}}'), "got the key 'dtype' twice"),
    (file_of({"__metadata__": {"format": 1}}), "got __metadata__ {'format': 1}, expected strings"),
    (file_of({"__metadata__": []}), "got __metadata__ [], expected strings"),
    (file_of({K: 3}), "expected dtype, shape and data_offsets"),
    (file_of({K: SOUND | {"data_offsets": [0]}}, bytes(4)), "expected dtype, shape and data_offsets"),
    (file_of({K: SOUND | {"dtype": "I32"}}, bytes(4)), "got dtype 'I32', expected one of F64, F32"),
    (file_of({K: SOUND | {"dtype": ["F32"]}}, bytes(4)), "expected a dtype, sizes, and data_offsets in order"),
    (file_of({K: SOUND | {"shape": [-1]}}, bytes(4)), "expected a dtype, sizes, and data_offsets in order"),
    (file_of({K: SOUND | {"shape": [1.0]}}, bytes(4)), "expected a dtype, sizes, and data_offsets in order"),
    (file_of({K: SOUND | {"shape": [True]}}, bytes(4)), "expected a dtype, sizes, and data_offsets in order"),
    (file_of({K: SOUND | {"shape": [2**62, 2**62, 0]}}), "expected a dtype, sizes, and data_offsets in order"),
    (file_of({K: SOUND | {"data_offsets": [4, 0]}}, bytes(4)), "expected a dtype, sizes, and data_offsets in order"),
    (file_of({K: SOUND | {"data_offsets": [10**30, 10**30]}}), "expected a dtype, sizes, and data_offsets in order"),
    (file_of({K: SOUND | {"shape": [2]}}, bytes(4)), "expected data_offsets that match the shape and dtype"),
    (file_of({K: SOUND | {"dtype": "F4", "shape": [7]}}, bytes(4)), "expected data_offsets that match the shape"),
    (file_of({WEIGHT: SOUND | {"shape": [2]}}, bytes(4)), f"tensor '{WEIGHT}' of"),
    (file_of({K: SOUND | {"shape": [1] * 65}}, bytes(4)), "expected one that NumPy can hold"),
    (file_of({K: SOUND, V: SOUND}, bytes(4)), "got data_offsets [0, 4], expected them to begin at 4"),
    (file_of({K: SOUND, V: SOUND | {"shape": [2], "data_offsets": [2, 10]}}, bytes(10)), "to begin at 4"),
    (file_of({K: SOUND | {"data_offsets": [4, 8]}}, bytes(8)), "got data_offsets [4, 8], expected them to begin at 0"),
    (file_of({K: SOUND, V: SOUND | {"data_offsets": [8, 12]}}, bytes(12)), "expected them to begin at 4"),
    (file_of({K: SOUND}, bytes(5)), "got 5 bytes behind the header, expected 4"),
    (file_of({K: SOUND}, bytes(3)), "got 3 bytes behind the header, expected 4"),
    (file_of({K: SOUND | {"shape": [10**9], "data_offsets": [0, 4 * 10**9]}}), "got 0 bytes behind the header"),
]


def test_only_scales_are_read(tmp_path: Path):
    """Another tensor's dtype may be one that is not known."""
    header = {K: SOUND, V: SOUND | {"data_offsets": [4, 8]}, WEIGHT: SOUND | {"dtype": "?", "data_offsets": [8, 9]}}
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(header, np.float32([0.25, 0.5]).tobytes() + b"x"))
    assert scale(path) == 0.25


@pytest.mark.parametrize(("content", "message"), MALFORMED, ids=map(str, range(len(MALFORMED))))
def test_a_file_that_is_not_what_it_should_be_is_named(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    said = refusal(path)
    assert str(path) in said
    assert message in said
    assert len(said) < 2000


def test_every_cut_of_a_file_is_refused(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save({K: np.float32(0.25), V: np.float32(0.5)}, path)
    whole = path.read_bytes()
    assert scale(path) == 0.25
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refusal(path)


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a device", "a folder"])
@pytest.mark.parametrize("place", ["the file", "in the folder", "a shard", "the index", "hf_quant_config.json"])
def test_what_is_no_regular_file_is_refused_and_not_opened(
    tmp_path: Path, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    name = {"the index": INDEX, "hf_quant_config.json": place}.get(place, "a.safetensors")
    if place == "a shard":
        Path(INDEX).write_text(json.dumps({"weight_map": {K: name}}))
    elif place == "hf_quant_config.json":
        save({K: np.float32(1), V: np.float32(1)}, "model.safetensors")
    match kind:
        case "a FIFO":
            os.mkfifo(name)
        case "a socket":
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(name)
        case "a device":
            os.symlink(os.devnull, name)
        case "a folder":
            Path(name, "inside").mkdir(parents=True)
    if place == "the file" and kind == "a folder":
        assert "expected model.safetensors.index.json or *.safetensors in it" in refusal(Path(name))
    else:
        said = refusal(Path(name if place == "the file" else "."))
        assert said == f"{name!r}: got {kind}, expected a regular file"


@pytest.mark.parametrize("path", ["a\0b", "a\0/model.safetensors", "\ud800.safetensors"], ids=ascii)
def test_a_path_that_no_file_has_is_refused(path: str):
    assert refusal(Path(path)).startswith(f"{path!r}: got characters that no file name has")


def test_a_long_file_name_of_an_index_is_shortened(tmp_path: Path):
    index = {"weight_map": {K: "x" * 10**5}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(tmp_path)
    assert "expected a file that exists" in message
    assert len(message) < 1000


def test_a_files_own_divisor_holds_unless_another_is_given(tmp_path: Path):
    path = tmp_path / "scales.safetensors"
    scales = {K: np.float32([0.25]), V: np.float32([0.5])}
    save_file(scales, path, metadata={"kvjax_amax_divisor": "2688"})
    for dtype, largest in (("nvfp4", 2688), ("fp8", 448), ("fp8_e5m2", 57344)):
        k_scale, v_scale = load_kv_scales(path, MODEL, dtype)[0]
        assert (k_scale, v_scale) == (np.float32(0.25) * np.float32(2688 / largest), 2 * k_scale)
    assert load_kv_scales(path, MODEL, "fp8", amax_divisor=448)[0] == (0.25, 0.5)
    with pytest.raises(KVCacheValueError, match=r"^checkpoint: got a folder with scales of kvjax calibrate, expected"):
        load_kv_scales(tmp_path, MODEL, "fp8")  # would not know the divisor
    for wrong in ("", "many", "0", "-1", "nan", "inf", "1e-300"):
        save_file(scales, path, metadata={"kvjax_amax_divisor": wrong})
        with pytest.raises(KVCacheValueError, match=rf"^kvjax_amax_divisor of '{path}': got "):
            load_kv_scales(path, MODEL, "fp8")


def test_scales_of_rotated_keys_are_loaded_for_the_layers_that_rotate_them(tmp_path: Path):
    path = tmp_path / "scales.safetensors"
    scales, metadata = {K: np.float32([0.25]), V: np.float32([0.5])}, {"kvjax_amax_divisor": "448"}
    save_file(scales, path, metadata=metadata | {"kvjax_key_rotation": "0"})
    assert load_key_rotation(path) == (0,)
    assert load_kv_scales(path, MODEL, "fp8", key_rotation=[0])[0] == (0.25, 0.5)
    for layers in ((), (0,)):
        with pytest.raises(KVCacheValueError, match=r"^checkpoint: got a folder with scales of kvjax calibrate"):
            load_kv_scales(tmp_path, MODEL, "fp8", key_rotation=layers)
    for wrong_layers in ([[0]], [False], [0.5]):
        with pytest.raises((KVCacheTypeError, KVCacheValueError), match=r"^key_rotation: got "):
            load_kv_scales(path, MODEL, "fp8", key_rotation=wrong_layers)  # type: ignore[arg-type]
    with pytest.raises(KVCacheValueError, match=r"^key_rotation: got \(\), expected \(0,\), the layers"):
        load_kv_scales(path, MODEL, "fp8")
    for wrong in ("", "0,", "-1", "0-3", "\u0663", "1" * 9):
        save_file(scales, path, metadata=metadata | {"kvjax_key_rotation": wrong})
        with pytest.raises(KVCacheValueError, match=rf"^kvjax_key_rotation of '{path}': got "):
            load_kv_scales(path, MODEL, "fp8")
    save_file(scales, path, metadata=metadata)
    assert load_key_rotation(str(path)) == ()
    with pytest.raises(KVCacheValueError, match=r"^key_rotation: got \(0,\), expected \(\), the layers"):
        load_kv_scales(path, MODEL, "fp8", key_rotation=[0])
    with pytest.raises(KVCacheTypeError, match=r"^key_rotation: got a str, expected the indices of layers"):
        load_kv_scales(path, MODEL, "fp8", key_rotation="0")  # type: ignore[arg-type]


def test_a_folder_without_weights_is_refused_and_a_missing_file_is_not_found(tmp_path: Path):
    assert "expected model.safetensors.index.json or *.safetensors in it" in refusal(tmp_path)
    with pytest.raises(FileNotFoundError):
        scale(tmp_path / "missing.safetensors")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[", "JSON that cannot be read"),
        ("[]", "got no weight_map"),
        (f'{{"weight_map": {{"{K}": "a.safetensors", "{K}": "b.safetensors"}}}}', f"got the key '{K}' twice"),
        *(
            (json.dumps({"weight_map": {WEIGHT: file}}), "expected the name of a file beside it")
            for file in ("../a.safetensors", "/a.safetensors", "..", ".", "", "a\0.safetensors", None, 3, [])
        ),
        *(
            (json.dumps({"weight_map": {K: file}}), f"got {file!r} for '{K}', expected a file that exists")
            for file in ("b.safetensors", "x" * 400)
        ),
        (
            json.dumps({"weight_map": {K: "a.safetensors"}}),
            f"got 'a.safetensors' for '{K}', expected a file that holds",
        ),
    ],
    ids=lambda value: ascii(value)[-60:],
)
def test_an_index_that_is_not_what_it_should_be_is_named(tmp_path: Path, index: str, message: str):
    (tmp_path / INDEX).write_text(index)
    (tmp_path / "a.safetensors").write_bytes(file_of({}))
    said = refusal(tmp_path)
    assert str(tmp_path / INDEX) in said
    assert message in said


@pytest.mark.parametrize("with_index", [True, False])
def test_files_that_contradict_each_other_are_refused(tmp_path: Path, with_index: bool):
    """Whichever the index names; the same values in two files are no contradiction."""
    files = {"a.safetensors": {K: np.float32(0.25), V: np.float32(1)}, "b.safetensors": {K: np.float32(0.5)}}
    for file, tensors in files.items():
        save(tensors, tmp_path / file)
    if with_index:
        weight_map = {K: "a.safetensors", V: "a.safetensors", WEIGHT: "b.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    expected = f"{str(tmp_path)!r}: got different values of '{K}' in 'a.safetensors' and 'b.safetensors', expected one"
    assert refusal(tmp_path) == expected
    save({K: np.float32(0.25)}, tmp_path / "b.safetensors")
    assert scale(tmp_path) == 0.25


def test_a_broken_hf_quant_config_is_named(tmp_path: Path):
    save({K: np.float32(1), V: np.float32(1)}, tmp_path / "model.safetensors")
    (tmp_path / "hf_quant_config.json").write_text("{")
    said = refusal(tmp_path)
    assert said.startswith(f"{str(tmp_path / 'hf_quant_config.json')!r}: got JSON that cannot be read")


def test_a_number_beyond_float32_is_refused_as_a_scale(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    save({K: np.float64(1e300), V: np.float64(1)}, path)
    assert refusal(path).startswith(f"{K}: got inf, expected between")


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda dtype: dtype.__name__
)
def test_tensors_of_any_rank_are_read(tmp_path: Path, dtype: type):
    path = tmp_path / "model.safetensors"
    tensors = {"a": np.arange(6).reshape(1, 2, 3), "empty": np.zeros((0, 3)), "b": np.float32(7)}
    tensors = {name: np.asarray(tensor).astype(dtype) for name, tensor in tensors.items()}
    save(tensors, path)
    for name, read in open_tensors(path).items():
        np.testing.assert_array_equal(read(), tensors[name].astype(np.float32))
