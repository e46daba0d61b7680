"""Lazily read tensors of a checkpoint: a safetensors file, a folder of them, or a mapping.

Not the safetensors package: as of 0.8 it does not return float8 as NumPy. Only the header of a file and the bytes of
the requested tensors are read. The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from kvjax.errors import KVCacheTypeError, KVCacheValueError, is_of_torch, shown

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

type Tensors = Mapping[str, Callable[[], np.ndarray]]
"""Functions that read each tensor as float32, by name."""


def open_tensors(checkpoint: str | os.PathLike[str] | Mapping[str, Any]) -> Tensors:
    """Opens the tensors of a checkpoint without reading them.

    Args:
      checkpoint: a safetensors file; a folder with `model.safetensors.index.json`, or else with safetensors files; or
        a mapping from names to arrays or tensors.

    Raises:
      KVCacheValueError: a folder without such files, or a malformed file; the message names it.
      KVCacheTypeError: neither a path nor a mapping from strings.
      OSError: a file cannot be read.
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


def _open_folder(folder: Path) -> Tensors:
    if (folder / INDEX).exists():
        return _open_index(folder / INDEX)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise KVCacheValueError(f"checkpoint: got the folder {str(folder)!r}, expected {INDEX} or *.safetensors in it")
    return {name: read for file in reversed(files) for name, read in _open_file(file).items()}


def has_tensors(folder: Path) -> bool:
    """Returns whether a folder holds files that `open_tensors` reads."""
    return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def _open_index(index: Path) -> Tensors:
    parsed = _parse(index, index.read_bytes())
    files = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(files, dict):
        raise KVCacheValueError(f"{str(index)!r}: got no weight_map, expected the file of each tensor")
    opened = functools.cache(_open_file)

    def read(name: str, file: Any) -> np.ndarray:
        if not isinstance(file, str) or Path(file).name != file:
            raise KVCacheValueError(f"{str(index)!r}: got {shown(file)} for {shown(name)}, expected a file beside it")
        tensors = opened(index.with_name(file))
        if name not in tensors:
            raise KVCacheValueError(f"{str(index)!r}: got {file!r} for {shown(name)}, expected a file that holds it")
        return tensors[name]()

    return {name: functools.partial(read, name, file) for name, file in files.items()}


def _open_file(path: Path) -> Tensors:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size) if size <= MAX_HEADER_BYTES else b""
    header = _parse(path, text)
    if not isinstance(header, dict):
        raise KVCacheValueError(f"{str(path)!r}: got a header that is not an object, expected a safetensors file")
    start = 8 + size
    return {
        name: functools.partial(_read_tensor, path, start, name, entry)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _read_tensor(path: Path, start: int, name: str, entry: Any) -> np.ndarray:
    what = f"tensor {shown(name)} of {str(path)!r}"
    try:
        dtype, shape, (begin, end) = _DTYPES.get(entry["dtype"]), entry["shape"], entry["data_offsets"]
        is_valid = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise KVCacheValueError(f"{what}: got {shown(entry)}, expected dtype, shape and data_offsets") from None
    if dtype is None:
        raise KVCacheValueError(f"{what}: got dtype {shown(entry['dtype'])}, expected one of {', '.join(_DTYPES)}")
    if not is_valid or math.prod(shape) * dtype.itemsize != end - begin:
        raise KVCacheValueError(f"{what}: got {shown(entry)}, expected data_offsets that match the shape and dtype")
    with path.open("rb") as file:
        if start + end > file.seek(0, os.SEEK_END):
            raise KVCacheValueError(f"{what}: got {shown(entry)}, expected data_offsets within the file")
        file.seek(start + begin)
        data = file.read(end - begin)
    return np.frombuffer(data, dtype).reshape(shape).astype(np.float32)


def _parse(path: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise KVCacheValueError(
            f"{str(path)!r}: got {'JSON' if path.suffix == '.json' else 'a header'} that cannot be read, expected"
            f" {'the index of a checkpoint' if path.suffix == '.json' else 'a safetensors file'}"
        ) from None


def _as_float32(name: str, tensor: Any) -> np.ndarray:
    if is_of_torch(tensor):
        tensor = tensor.detach().cpu().float().numpy()  # NumPy lacks torch's narrow float dtypes
    try:
        return np.asarray(tensor).astype(np.float32)
    except (TypeError, ValueError):
        raise KVCacheTypeError(f"{name}: got a {type(tensor).__name__}, expected an array of numbers") from None
