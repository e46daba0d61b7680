"""`kvjax plan`: computes a model's KV cache size in a dtype, and how many tokens a memory budget holds."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvjax
from kvjax.cli.arguments import argument_of, at_least, kv_cache_dtypes, memory
from kvjax.cli.memory_plan import Layer, MemoryPlan, WindowPlan
from kvjax.dtypes import parse_model_dtype
from kvjax.scales import LayerScales, check_folder, read_layer_scales
from kvjax.tensor_files import has_tensors, open_tensors

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to `kvjax`'s parser."""
    parser = subparsers.add_parser(
        "plan",
        help="print a model's KV cache size and how many tokens fit",
        description="Prints each layer's KV cache dtype and its source, bytes per token, pages and their padding, and"
        " how many tokens a memory budget holds, compared with bfloat16. Reads a configuration and the caches' scales"
        " from safetensors files beside it; needs no other weights and no device.",
    )
    parser.add_argument(
        "--config",
        type=_read_config,
        required=True,
        metavar="CONFIG.json",
        help="a model's config.json or its folder, optionally with ModelOpt's hf_quant_config.json beside it; - for"
        " standard input",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        type=kv_cache_dtypes,
        default="auto",
        metavar="DTYPE",
        help=f"one of {', '.join(kvjax.ACCEPTED_KV_CACHE_DTYPES)}; or dtypes by layers (indices, ranges, kinds, * for"
        " the others), as in '0-3=bfloat16,sliding_window=fp8,*=nvfp4' (default: %(default)s)",
    )
    parser.add_argument(
        "--model-dtype",
        type=argument_of(parse_model_dtype),
        metavar="DTYPE",
        help="the model's compute dtype (default: the configuration's dtype)",
    )
    parser.add_argument(
        "--skip-layers",
        nargs="+",
        default=(),
        metavar="LAYER",
        help="layers that keep the model dtype: indices from 0, ranges (0-3), and kinds of attention,"
        f" {' or '.join(kvjax.AttentionKind)}",
    )
    parser.add_argument(
        "--memory",
        type=memory,
        default="1GiB",
        metavar="BYTES",
        help="budget of one device, such as 40GiB, 40GB, 512MiB or plain bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--max-seqs",
        type=at_least(0),
        default=0,
        metavar="SEQUENCES",
        help="sequences that run at once: the memory holds their recurrent states and exact windows besides"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--state-bytes",
        type=memory,
        metavar="BYTES",
        help="recurrent state of one sequence in all layers and devices (default: that of the configuration's model"
        " type, if it is known)",
    )
    parser.add_argument(
        "--block-size", type=at_least(1), default=16, metavar="TOKENS", help="tokens of a block (default: %(default)s)"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=at_least(1),
        default=1,
        metavar="DEVICES",
        help="devices that share each layer's KV heads (default: %(default)s)",
    )
    parser.add_argument(
        "--layout",
        choices=[layout.value for layout in kvjax.CacheLayout],
        default=kvjax.CacheLayout.NHD.value,
        help="order of a block's inner dimensions (default: %(default)s)",
    )
    parser.add_argument(
        "--v-scale-layout",
        choices=[layout.value for layout in kvjax.VScaleLayout],
        default=kvjax.VScaleLayout.LINEAR.value,
        help="order of NVFP4 V scales (default: %(default)s)",
    )
    parser.add_argument(
        "--exact-window",
        type=at_least(1),
        metavar="TOKENS",
        help="count exact windows of so many tokens beside quantized layers, for --max-seqs sequences",
    )
    parser.add_argument("--json", action="store_true", help="print only one JSON document")
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Prints the plan; returns the exit status.

    Raises:
      SystemExit: from argparse, if the arguments do not fit the model.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kvjax.KVCacheWarning)
        plan = _plan(parser, args)
    plan = dataclasses.replace(plan, warnings=tuple(dict.fromkeys(str(warning.message) for warning in caught)))
    if args.json:
        for message in plan.warnings:
            print(f"{parser.prog}: warning: {message}", file=sys.stderr)
    print(plan.as_json() if args.json else plan.as_text())
    return 0


def _plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> MemoryPlan:
    # Errors of kvjax name the configuration's key, the field, or the file.
    with _argument_errors(parser):
        model = _model(args)
        unskipped = kvjax.resolve_layer_dtypes(model, args.kv_cache_dtype)
    with _argument_errors(parser, "argument --skip-layers: "):
        resolved = kvjax.resolve_layer_dtypes(model, args.kv_cache_dtype, skip_layers=args.skip_layers)
    with _argument_errors(parser):
        scales = _scales(args, model)
    if args.state_bytes is not None:
        model = dataclasses.replace(model, state_bytes=args.state_bytes)
    if args.max_seqs and model.state_bytes is None:
        parser.error("argument --max-seqs: the size of this model's states is unknown: give --state-bytes")
    if args.exact_window is not None and not args.max_seqs:
        parser.error("argument --exact-window: expected with --max-seqs, the sequences that have a window at once")
    with _argument_errors(parser, "argument --tensor-parallel: "):
        model = model.shard(args.tensor_parallel)
    with _argument_errors(parser):
        specs = kvjax.resolve_layer_specs(
            model,
            args.kv_cache_dtype,
            skip_layers=args.skip_layers,
            block_size=args.block_size,
            layout=args.layout,
            v_scale_layout=args.v_scale_layout,
        )
        window = None
        if args.exact_window is not None:
            with _argument_errors(parser, "argument --exact-window: "):
                window = WindowPlan.of(specs, args.exact_window, args.max_seqs)
        skipped = [own != other for own, other in zip(resolved, unskipped, strict=True)]
        facts = zip(specs, resolved, scales or [None] * len(specs), skipped, strict=True)
        return MemoryPlan.make(
            model,
            [Layer(*each) for each in facts],
            tensor_parallel=args.tensor_parallel,
            memory_bytes=args.memory,
            max_seqs=args.max_seqs,
            exact_window=window,
        )


def _model(args: argparse.Namespace) -> kvjax.ModelKVConfig:
    config, hf_quant_config, _ = args.config
    model = kvjax.ModelKVConfig.from_hf_config(config, model_dtype=args.model_dtype)
    if not model.quantization_config:
        return dataclasses.replace(model, quantization_config=hf_quant_config)
    return model


def _scales(args: argparse.Namespace, model: kvjax.ModelKVConfig) -> tuple[LayerScales, ...] | None:
    """Returns the scales of the configuration's checkpoint; None without weights beside it."""
    _, _, folder = args.config
    if folder is None or not has_tensors(folder):
        return None
    layers = read_layer_scales(open_tensors(folder), model, args.kv_cache_dtype, skip_layers=args.skip_layers)
    if any(layer.dtype.takes_scale for layer in layers):
        check_folder(folder)
    return layers


def _read_config(name: str) -> tuple[Any, Any, Path | None]:
    """Reads what `--config` names: config.json, hf_quant_config.json or None, and their folder."""
    if name == "-":
        return _parse("standard input", sys.stdin.buffer.read()), None, None
    path = Path(name)
    try:
        if path.is_dir():
            path /= "config.json"
        beside = path.with_name("hf_quant_config.json")
        return _read(path), _read(beside) if beside.exists() else None, path.parent
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {error.filename!r}: {error.strerror}") from None


def _read(path: Path) -> Any:
    return _parse(repr(str(path)), path.read_bytes())


def _parse(name: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name} is not JSON: {error}") from None
    except RecursionError:
        raise argparse.ArgumentTypeError(f"{name} is nested too deeply to read") from None


@contextlib.contextmanager
def _argument_errors(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[None]:
    """Turns kvjax's errors into argparse's: usage, one line, status 2."""
    try:
        yield
    except (kvjax.KVCacheValueError, kvjax.KVCacheTypeError, kvjax.UnsupportedError) as error:
        parser.error(f"{prefix}{error}")
    except OSError as error:
        parser.error(f"{prefix}cannot read {error.filename!r}: {error.strerror}")
