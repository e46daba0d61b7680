"""`kvjax calibrate`: computes the scales of a model's cache from a text, or chooses its dtypes, and writes a file."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import secrets
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

import kvjax
from kvjax.cli.arguments import argument_of, at_least, percentage
from kvjax.dtype_choice import bits_in_words
from kvjax.dtypes import parse_model_dtype
from kvjax.scales import AMAX_DIVISOR, KEY_ROTATION, MADE_FOR
from kvjax.table import markdown_table

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from kvjax_torch.transformers.calibrate import CalibratedLayer, Calibration

EXTRA_MODULES = frozenset({"torch", "transformers", "safetensors", "tqdm"})
"""Modules that the extra `transformers` installs."""

FAILED = 2
"""Exit status if nothing was written."""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `kvjax`'s parser."""
    parser = subparsers.add_parser(
        "calibrate",
        help="compute a model's KV cache scales from a text",
        description="Runs a transformers model over samples of a text, computes each layer's decode scales from the"
        " keys and values that it stores, and writes them to a safetensors file, which kvjax.load_kv_scales reads."
        " Needs kvjax[transformers]; runs no code of the checkpoint's.",
    )
    parser.add_argument("model", metavar="MODEL", help="a model's folder, or its name on the Hugging Face hub")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="sample text, UTF-8")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.safetensors", help="the file to write"
    )
    parser.add_argument("--force", action="store_true", help="replace the output file if it exists")
    parser.add_argument(
        "--dtype",
        type=argument_of(_scaled_dtype),
        metavar="DTYPE",
        help=f"the cache's dtype, one of {', '.join(_SCALED)} (default: nvfp4)",
    )
    parser.add_argument(
        "--choose",
        type=argument_of(_dtypes),
        default=(),
        metavar="DTYPE,DTYPE",
        help="choose each layer's dtype of these, instead of --dtype; needs --bits",
    )
    parser.add_argument(
        "--bits", type=float, help="of --choose: the most bits of an element, as a mean of all layers (NVFP4 has 4.5)"
    )
    parser.add_argument(
        "--choose-by",
        choices=[measure.value for measure in kvjax.ErrorMeasure],
        help="of --choose: the error of each layer's attention (default), or the divergence of the model's predictions"
        " with that layer alone quantized, which finds better dtypes and runs the model for each layer and dtype",
    )
    parser.add_argument(
        "--key-rotation",
        action="store_true",
        help="of --choose: rotate keys, and in the model queries, of layers that have less error so",
    )
    parser.add_argument(
        "--method",
        choices=[method.value for method in kvjax.CalibrationMethod],
        default=kvjax.CalibrationMethod.AMAX.value,
        help="how scales are computed (default: %(default)s)",
    )
    parser.add_argument(
        "--percentile", type=percentage, default=99.99, help="of --method percentile (default: %(default)s)"
    )
    parser.add_argument("--per-head", action="store_true", help="a scale for each KV head, in fp8")
    parser.add_argument(
        "--length",
        type=at_least(1),
        metavar="TOKENS",
        help="tokens of a sample (default: 2048, or what the model takes)",
    )
    parser.add_argument(
        "--twice",
        action="store_true",
        help="each sample is half as much text, and then the same again; --choose-by divergence then counts predictions"
        " of the second time, which recall the first",
    )
    parser.add_argument(
        "--samples", type=at_least(1), help="number of samples (default: as many as the text has, at most 512)"
    )
    parser.add_argument("--device", help="torch's device (default: a GPU if there is one)")
    parser.add_argument(
        "--model-dtype",
        type=argument_of(parse_model_dtype),
        metavar="DTYPE",
        help="the dtype to compute in (default: the checkpoint's)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Calibrates, writes the file and prints what was found; returns the exit status."""
    if bool(args.choose) != (args.bits is not None):
        return _failed("--choose, --bits: got one of them, expected both or none")
    for option, is_given in (("--key-rotation", args.key_rotation), ("--choose-by", args.choose_by is not None)):
        if is_given and not args.choose:
            return _failed(f"{option}: got it without --choose, expected both, or neither")
    if args.choose and args.dtype is not None:
        return _failed(f"--dtype: got {args.dtype.value!r} beside --choose, expected one of them")
    # torch and JAX share a GPU here.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        from safetensors.numpy import save

        from kvjax_torch.transformers.calibrate import Allowed, Options, calibrate_model
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_MODULES:
            raise
        return _failed(f"{error.name} is not installed: pip install 'kvjax[transformers]'")
    allowed = None
    if args.choose:
        by = kvjax.ErrorMeasure(args.choose_by or kvjax.ErrorMeasure.ATTENTION)
        allowed = Allowed(args.choose, args.bits, args.key_rotation, by)
    options = Options(
        dtype=args.dtype or kvjax.KVCacheDType.NVFP4,
        allowed=allowed,
        method=kvjax.CalibrationMethod(args.method),
        percentile=args.percentile,
        per_head=args.per_head,
        length=args.length,
        twice=args.twice,
        num_samples=args.samples,
        device=args.device,
        model_dtype=args.model_dtype and args.model_dtype.value,
    )
    try:
        with warnings.catch_warnings(record=True) as caught, _new_file(args.output, replace=args.force) as file:
            warnings.simplefilter("always", kvjax.KVCacheWarning)
            found = calibrate_model(args.model, args.text, options)
            file.write(save(_tensors(found.layers), metadata=_metadata(args, found)))
    except kvjax.KVCacheError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename!r}: {error.strerror}" if error.filename else str(error))
    for message in dict.fromkeys(
        str(warning.message) for warning in caught if warning.category is kvjax.KVCacheWarning
    ):
        print(f"kvjax calibrate: warning: {message}", file=sys.stderr)
    print(_table(found.layers))
    print(
        f"\n{args.output}: scales for {_requested(found)} of {len(found.layers)} layers, from"
        f" {found.num_samples:,} samples of {found.length:,} tokens; read it with kvjax.load_kv_scales"
    )
    if found.choice:
        print(
            f"{bits_in_words(found.choice.bits)} bits of an element, {found.choice.bytes_per_token:,} bytes of a token"
        )
        if rotated := found.choice.key_rotation:
            print(f"rotate queries and keys: key_rotation={list(rotated)}")
    return 0


def _scaled_dtype(name: str) -> kvjax.KVCacheDType:
    dtype = kvjax.parse_kv_cache_dtype(name)
    if not dtype.takes_scale:
        raise kvjax.KVCacheValueError(f"got {name!r}, which takes no scales, expected one of {', '.join(_SCALED)}")
    return dtype


_SCALED = [dtype.value for dtype in kvjax.STORED_KV_CACHE_DTYPES if dtype.takes_scale]


def _dtypes(names: str) -> tuple[kvjax.KVCacheDType, ...]:
    return tuple(kvjax.parse_kv_cache_dtype(name.strip()) for name in names.split(","))


def _divisor(layers: Iterable[CalibratedLayer]) -> float:
    """The divisor of the largest magnitudes in the file: the largest number of the first part with a scale."""
    parts = (part for layer in layers for part in layer.dtype.parts)
    return next((part.info.max for part in parts if part.takes_scale), 1.0)


def _tensors(layers: Sequence[CalibratedLayer]) -> dict[str, np.ndarray]:
    """Scales by vLLM's names, which `load_kv_scales` reads; all have the divisor that the metadata says."""
    divisor = _divisor(layers)
    return {
        f"model.layers.{layer.index}.self_attn.attn.{name}": np.asarray(
            scale * np.float32(part.info.max / divisor), np.float32
        )
        for layer in layers
        for (name, scale), part, scaled in zip(
            layer.scales._asdict().items(), layer.dtype.parts, layer.scaled, strict=True
        )
        if scaled
    }


def _requested(found: Calibration) -> str:
    """The dtypes as `kvjax plan --kv-cache-dtype` takes them: a name, or `0-3=fp8_e4m3,4=nvfp4`."""
    if found.choice is None:
        return found.layers[0].dtype.value
    entries = []
    for dtype, group in itertools.groupby(found.layers, key=lambda layer: layer.dtype):
        first, *_, last = [layer.index for layer in group] * 2
        entries.append(f"{first if first == last else f'{first}-{last}'}={dtype.value}")
    return ",".join(entries)


def _metadata(args: argparse.Namespace, found: Calibration) -> dict[str, str]:
    rotated = found.choice.key_rotation if found.choice else ()
    return {
        **({KEY_ROTATION: ",".join(map(str, rotated))} if rotated else {}),
        "kvjax_version": kvjax.__version__,
        AMAX_DIVISOR: f"{_divisor(found.layers):g}",
        MADE_FOR: _requested(found),
        "model": args.model,
        "method": args.method,
        **({"choose_by": args.choose_by or kvjax.ErrorMeasure.ATTENTION.value} if args.choose else {}),
        **({"twice": "true"} if args.twice else {}),
        "num_samples": f"{found.num_samples}",
        "sample_length": f"{found.length}",
    }


def _table(layers: Sequence[CalibratedLayer]) -> str:
    key, value = ("latent", "rope key") if layers[0].is_mla else ("key", "value")
    header = ("layer", "dtype", "window", f"largest {key}", "k_scale", f"largest {value}", "v_scale")
    return markdown_table(
        header,
        [
            (
                f"{layer.index}",
                layer.dtype.value,
                f"{layer.sliding_window or '-'}",
                f"{layer.k_amax:.4g}",
                _in_words(layer.scales.k_scale) if layer.scaled[0] else "-",
                f"{layer.v_amax:.4g}",
                _in_words(layer.scales.v_scale) if layer.scaled[1] else "-",
            )
            for layer in layers
        ],
        left=0,
    )


def _in_words(scale: np.ndarray | np.float32) -> str:
    least, largest = f"{np.min(scale):.4g}", f"{np.max(scale):.4g}"
    return least if least == largest else f"{least} to {largest}"


@contextlib.contextmanager
def _new_file(path: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """Opens a file that appears whole under `path` at the end, or, after an error, not at all.

    It is opened before anything is computed, so that a folder that cannot be written costs no time. If something else
    has taken the path meanwhile, the file stays beside it.
    """
    _check_output(path, replace)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        file = temporary.open("xb")
    except OSError as error:
        raise kvjax.KVCacheValueError(
            f"--output: got {str(path)!r}, expected a file in a folder that can be written: {error.strerror}"
        ) from error
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    try:
        _check_output(path, replace)
    except kvjax.KVCacheValueError as error:
        raise kvjax.KVCacheValueError(f"{error}; what was computed is in {str(temporary)!r}") from None
    os.replace(temporary, path)


def _check_output(path: Path, replace: bool) -> None:
    if os.path.lexists(path) and not replace:
        raise kvjax.KVCacheValueError(f"--output: got {str(path)!r}, which exists, expected a new file, or --force")
    if path.exists() and not path.is_file():
        raise kvjax.KVCacheValueError(f"--output: got {str(path)!r}, expected the path of a file")


def _failed(message: str) -> int:
    print(f"kvjax calibrate: error: {message}", file=sys.stderr)
    return FAILED
