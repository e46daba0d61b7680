"""Lazily read tensors of a checkpoint: a safetensors file, a folder of them, or a mapping.

This does not use the safetensors package, which as of 0.8 does not return float8 as NumPy. Only the header of a file
and the bytes of the requested tensors are read. Headers are checked as in that package
(https://huggingface.co/docs/safetensors); names must also be unique, which it does not check.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvjax.errors import KVCacheTypeError, KVCacheValueError, is_of_torch, kind_of, shown

INDEX = "model.safetensors.index.json"
"""Maps each tensor of a folder to its file."""

MAX_HEADER_BYTES = 100_000_000
"""The longest accepted header, as in the safetensors package."""

_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "F64": np.dtype(np.float64),
        "F32": np.dtype(np.float32),
        "F16": np.dtype(np.float16),
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
        "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
        "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    }
)

_BITS: Mapping[str, int] = MappingProxyType(
    {name: 8 * dtype.itemsize for name, dtype in _DTYPES.items()}
    | {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64}
    | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
)
"""Size of a number, also of dtypes that no scale has. The sizes of other dtypes' tensors are not checked."""

type Tensors = Mapping[str, Callable[[], np.ndarray]]
"""Functions that read each tensor as float32, by name."""


def open_tensors(checkpoint: str | os.PathLike[str] | Mapping[str, Any]) -> Tensors:
    """Opens the tensors of a checkpoint without reading them.

    Args:
      checkpoint: a safetensors file; a folder with `model.safetensors.index.json`, or else with safetensors files; or
        a mapping from names to arrays or tensors.

    Raises:
      KVCacheValueError: a folder without such files; a file that is malformed, or not a regular file; an index that
        names files that are not there, or hold no such tensor; a tensor of which two files hold different values. On
        opening, or on reading a tensor. The message names the file.
      KVCacheTypeError: neither a path nor a mapping from strings. On reading, a tensor that does not hold real numbers.
      OSError: `checkpoint` does not exist, or a file cannot be read.
    """
    if isinstance(checkpoint, Mapping):
        for name in checkpoint:
            if not isinstance(name, str):
                raise KVCacheTypeError(f"checkpoint: got the key {shown(name)}, expected names of tensors")
        return {name: functools.partial(_as_float32, name, tensor) for name, tensor in checkpoint.items()}
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise KVCacheTypeError(
            f"checkpoint: got {shown(checkpoint)} of type {type(checkpoint).__name__}, expected the path of a folder or"
            " of a safetensors file, or a mapping from names to tensors"
        )
    path = Path(checkpoint)
    return _open_folder(path) if path.is_dir() else _open_file(path)


def has_tensors(folder: Path) -> bool:
    """Returns whether a folder holds files that `open_tensors` reads."""
    return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def read_metadata(path: Path) -> Mapping[str, str]:
    """Reads the metadata of a safetensors file.

    Raises:
      KVCacheValueError: a malformed file, or not a regular file.
      OSError: it cannot be read.
    """
    return _read_header(path).metadata


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
      KVCacheValueError: not a regular file; not JSON; an object with a key twice.
      OSError: it cannot be read.
    """
    with _open_regular(path) as file:
        return _parse(path, file.read(), "JSON", "a JSON file")


def _open_folder(folder: Path) -> Tensors:
    if (folder / INDEX).exists():
        return _open_index(folder / INDEX)
    files = {path.name: _open_file(path) for path in sorted(folder.glob("*.safetensors"))}
    if not files:
        raise KVCacheValueError(
            f"checkpoint: got the folder {_quoted(folder)}, expected {INDEX} or *.safetensors in it"
        )
    names = dict.fromkeys(name for tensors in files.values() for name in tensors)
    return {name: functools.partial(_read_from_all, folder, files, name) for name in names}


def _open_index(index: Path) -> Tensors:
    parsed = read_json(index)
    files = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(files, dict):
        raise KVCacheValueError(f"{_quoted(index)}: got no weight_map, expected the file of each tensor")
    for name, file in files.items():
        # Path("..").name is "..".
        if not isinstance(file, str) or file in ("", "..") or "\0" in file or Path(file).name != file:
            raise KVCacheValueError(
                f"{_quoted(index)}: got {shown(file)} for {shown(name)}, expected the name of a file beside it"
            )

    @functools.cache
    def opened() -> dict[str, Tensors]:
        """Opens the files that exist: files without scales need not exist."""
        paths = {file: index.with_name(file) for file in dict.fromkeys(files.values())}
        return {file: _open_file(path) for file, path in paths.items() if os.path.exists(path)}

    def read(name: str, file: str) -> np.ndarray:
        if name not in opened().get(file, ()):
            expected = "a file that holds it" if file in opened() else "a file that exists"
            raise KVCacheValueError(f"{_quoted(index)}: got {shown(file)} for {shown(name)}, expected {expected}")
        return _read_from_all(index.parent, opened(), name)

    return {name: functools.partial(read, name, file) for name, file in files.items()}


def _read_from_all(folder: Path, files: Mapping[str, Tensors], name: str) -> np.ndarray:
    """Reads a tensor from each file of a folder that holds it, which must agree."""
    found = {file: tensors[name]() for file, tensors in files.items() if name in tensors}
    (first, tensor), *others = found.items()
    for other, its_tensor in others:
        if not np.array_equal(tensor, its_tensor, equal_nan=True):
            raise KVCacheValueError(
                f"{_quoted(folder)}: got different values of {shown(name)} in {first!r} and {other!r}, expected one"
            )
    return tensor


class _Entry(NamedTuple):
    """What a header says of a tensor: its bytes are those from `begin` to `end` behind the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Header(NamedTuple):
    metadata: Mapping[str, str]
    entries: Mapping[str, _Entry]
    end: int


def _open_file(path: Path) -> Tensors:
    header = _read_header(path)
    return {
        name: functools.partial(_read_tensor, path, header.end, name, entry) for name, entry in header.entries.items()
    }


def _read_header(path: Path) -> _Header:
    with _open_regular(path) as file:
        file_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        size = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 + size or size > MAX_HEADER_BYTES:
            raise KVCacheValueError(
                f"{_quoted(path)}: got a header of {size:,} bytes in a file of {file_bytes:,}, expected a safetensors"
                f" file, whose header has at most {MAX_HEADER_BYTES:,}"
            )
        header = _parse(path, file.read(size), "a header", "a safetensors file")
    if not isinstance(header, dict):
        raise KVCacheValueError(f"{_quoted(path)}: got a header that is not an object, expected a safetensors file")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise KVCacheValueError(f"{_quoted(path)}: got __metadata__ {shown(metadata)}, expected strings by name")
    entries = {name: _entry(_what(path, name), entry) for name, entry in header.items()}
    _check_offsets(path, entries, file_bytes - 8 - size)
    return _Header(metadata or {}, entries, 8 + size)


def _what(path: Path, name: str) -> str:
    return f"tensor {shown(name)} of {_quoted(path)}"


def _entry(what: str, entry: Any) -> _Entry:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise KVCacheValueError(f"{what}: got {shown(entry)}, expected dtype, shape and data_offsets") from None
    numbers = (*shape, begin, end)
    # As in safetensors, no product of the first sizes exceeds 64 bits, whatever follows them.
    if not (
        isinstance(dtype, str)
        and all(type(number) is int and 0 <= number < 2**64 for number in numbers)
        and all(product < 2**64 for product in itertools.accumulate(shape, operator.mul))
        and begin <= end
    ):
        raise KVCacheValueError(f"{what}: got {shown(entry)}, expected a dtype, sizes, and data_offsets in order")
    if dtype in _BITS and math.prod(shape) * _BITS[dtype] != (end - begin) * 8:
        raise KVCacheValueError(f"{what}: got {shown(entry)}, expected data_offsets that match the shape and dtype")
    return _Entry(dtype, shape, begin, end)


def _check_offsets(path: Path, entries: Mapping[str, _Entry], num_bytes: int) -> None:
    """Checks that tensors follow each other without gap or overlap, and take all bytes behind the header."""
    taken = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != taken:
            raise KVCacheValueError(
                f"{_what(path, name)}: got data_offsets {[entry.begin, entry.end]}, expected them to begin at {taken},"
                " where the tensor before it ends"
            )
        taken = entry.end
    if taken != num_bytes:
        raise KVCacheValueError(
            f"{_quoted(path)}: got {num_bytes:,} bytes behind the header, expected {taken:,} as its data_offsets say"
        )


def _read_tensor(path: Path, start: int, name: str, entry: _Entry) -> np.ndarray:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise KVCacheValueError(
            f"{_what(path, name)}: got dtype {shown(entry.dtype)}, expected one of {', '.join(_DTYPES)}"
        )
    with _open_regular(path) as file:
        file.seek(start + entry.begin)
        data = file.read(entry.end - entry.begin)
    if len(data) != entry.end - entry.begin:
        raise KVCacheValueError(f"{_what(path, name)}: got a file that was cut meanwhile, expected one at rest")
    numbers = _to_float32(np.frombuffer(data, dtype))
    try:
        return numbers.reshape(entry.shape)
    except ValueError:  # too many dimensions, or too large ones beside a 0
        raise KVCacheValueError(
            f"{_what(path, name)}: got shape {shown(entry.shape)}, expected one that NumPy can hold"
        ) from None


def _open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, unless it is of a kind whose opening or reading might not end, such as a FIFO."""
    try:
        mode = path.stat().st_mode
    except ValueError:  # a NUL, or what the file system's encoding lacks
        raise KVCacheValueError(f"{_quoted(path)}: got characters that no file name has, expected a path") from None
    if not stat.S_ISREG(mode):
        kind = next((kind for kind, is_kind in _KINDS.items() if is_kind(mode)), "a special file")
        raise KVCacheValueError(f"{_quoted(path)}: got {kind}, expected a regular file")
    return path.open("rb")


_KINDS: Mapping[str, Callable[[int], bool]] = {
    "a folder": stat.S_ISDIR,
    "a FIFO": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


def _quoted(path: Path) -> str:
    return shown(str(path))


class _InvalidJSONError(ValueError):
    """JSON that Python reads and safetensors does not; says why."""


def _parse(path: Path, text: bytes, what: str, expected: str) -> Any:
    try:
        # Decoded here: given bytes, json also takes UTF-16 and UTF-32.
        return json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_no_constant)
    except _InvalidJSONError as error:
        why = str(error)
    except (ValueError, RecursionError):
        why = f"{what} that cannot be read"
    raise KVCacheValueError(f"{_quoted(path)}: got {why}, expected {expected}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _InvalidJSONError(f"the key {shown(key)} twice")
        found[key] = value
    try:
        "".join(text for pair in pairs for text in pair if isinstance(text, str)).encode()
    except UnicodeEncodeError:
        raise _InvalidJSONError("half of a surrogate pair") from None
    return found


def _no_constant(name: str) -> Any:
    raise _InvalidJSONError(f"the number {name}")


def _as_float32(name: str, tensor: Any) -> np.ndarray:
    got = f"dtype {tensor.dtype}" if hasattr(tensor, "dtype") else kind_of(tensor)
    if is_of_torch(tensor):
        tensor = tensor.detach().cpu()
        tensor = (tensor.float() if tensor.is_floating_point() else tensor).numpy()  # NumPy lacks narrow floats
    try:
        array = np.asarray(tensor)
        is_number = any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer))
    except (TypeError, ValueError):  # lists of different lengths
        is_number = False
    if not is_number:  # NumPy would convert a bool, a complex number, and the text of a number
        raise KVCacheTypeError(f"{name}: got {got}, expected an array of numbers")
    return _to_float32(array)


def _to_float32(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # a scale of infinity or NaN is refused by its name
        return array.astype(np.float32)
