"""Decode scales of a model's layers in vLLM: those of its checkpoint, or of a file that `kvjax calibrate` wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

import kvjax
from kvjax import KVCacheValueError, KVScales, ModelKVConfig

logger = init_logger("vllm.kvjax")

SETTING = "additional_config['kvjax']"
NVFP4_VALUES = KVQuantMode.NVFP4, KVQuantMode.CUSTOM  # the latter are mixed dtypes
SCALED = KVQuantMode.FP8_PER_TENSOR, *NVFP4_VALUES

DOUBLE_LAYERS = frozenset({"longcat_flash"})
"""Models with two modules of attention in a layer, whose names end with the number of the layer and of the module."""

type LayerScales = tuple[torch.Tensor, torch.Tensor]
"""`k_scale, v_scale`: float32 tensors of one element, or of one for each of the rank's KV heads."""


class ScaledImpl:
    """The part of a layer's attention that knows its decode scales: those of the checkpoint, or of a file.

    A file may also say which layers rotate their keys.

    Attributes:
      vllm_config: vLLM's configuration, or None.
    """

    vllm_config: Any
    _scales: LayerScales | None = None

    def resolve_scales(self, layer: Any) -> LayerScales:
        """The layer's scales."""
        return self.known_scales() or (layer._k_scale, layer._v_scale)

    def known_scales(self) -> LayerScales | None:
        """The layer's scales, None without a configuration of vLLM.

        The first layer to ask resolves those of all, so that errors come before requests.
        """
        if self._scales is None and self.vllm_config is not None:
            known = self.vllm_config.compilation_config.static_forward_context
            layers = {name: each for name, each in known.items() if isinstance(getattr(each, "impl", None), ScaledImpl)}
            found = scales_of_layers(self.vllm_config, layers)
            for name in rotated_layers(self.vllm_config, layers):
                layers[name].impl.rotate_keys()
            for name, scales in found.items():  # last, so that nothing is known after an error
                layers[name].impl._scales = scales
        return self._scales

    def rotate_keys(self) -> None:
        """Makes the layer store rotated keys.

        Raises:
          KVCacheValueError: it cannot.
        """
        raise KVCacheValueError(f"{SETTING}: got a file of rotated keys for a model of latents (MLA), expected another")


def file_of_scales(vllm_config: Any) -> str | None:
    """The file that `--additional-config '{"kvjax": {"scales": FILE}}'` names; vLLM passes it to every process.

    Raises:
      KVCacheValueError: other keys, or something that is no path.
    """
    additional = vllm_config.additional_config
    own = additional.get("kvjax", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(own, Mapping) or set(own) - {"scales"} or not isinstance(own.get("scales", ""), str):
        raise KVCacheValueError(f"{SETTING}: got {own!r}, expected {{'scales': FILE}}")
    return own.get("scales")


def scales_of_layers(vllm_config: Any, layers: Mapping[str, Any]) -> dict[str, LayerScales]:
    """The scales that each of vLLM's attention layers stores its cache with, by the layers' names.

    Args:
      vllm_config: vLLM's configuration.
      layers: this process's layers of these backends: modules whose weights are loaded.

    Raises:
      KVCacheValueError: a file of scales that is not this model's: the message names the layers.
      OSError: the file cannot be read.
    """
    own = {name: (layer._k_scale, layer._v_scale) for name, layer in layers.items()}
    scaled = {name: layer for name, layer in layers.items() if _mode(layer) in SCALED}
    path = file_of_scales(vllm_config)
    if path is None or not scaled:
        _warn_of_ones([layer for layer in scaled.values() if _mode(layer) in NVFP4_VALUES])
        return own
    dtypes = {layer.kv_cache_dtype for layer in scaled.values()}
    by_dtype = {dtype: load_scales(path, vllm_config, dtype) for dtype in dtypes}
    for name, layer in scaled.items():
        if (index := _index(name, vllm_config, layers)) is None:
            continue
        by_index = by_dtype[layer.kv_cache_dtype]
        if (found := by_index.get(index)) is None:
            raise KVCacheValueError(f"{path}: got no scales of layer {index}, expected those of {name!r}")
        k_scale, v_scale = (_of_rank(scale, layer.num_kv_heads, layer._k_scale.device) for scale in found)
        own[name] = k_scale, v_scale
    logger.info("kvjax: decode scales of %d layers from %s", len(scaled), path)
    return own


def rotated_layers(vllm_config: Any, layers: Mapping[str, Any]) -> list[str]:
    """The layers with quantized keys that a file of `kvjax calibrate --key-rotation` names.

    Raises:
      KVCacheValueError: the file's metadata is not what `kvjax calibrate` writes.
      OSError: the file cannot be read.
    """
    path = file_of_scales(vllm_config)
    rotated = kvjax.load_key_rotation(path) if path else ()
    quantized = [name for name, layer in layers.items() if _mode(layer) is not KVQuantMode.NONE]
    return [name for name in quantized if rotated and _index(name, vllm_config, layers) in rotated]


def load_scales(path: str, vllm_config: Any, dtype: str) -> dict[int, KVScales | None]:
    """The scales that a file has for the model's layers that it names, by their indices.

    Raises:
      KVCacheValueError: scales of layers that the model does not have, or invalid ones.
      OSError: the file cannot be read.
    """
    # The checkpoint's declaration describes its own scales, not the file's.
    config = {**vllm_config.model_config.hf_config.to_dict(), "quantization_config": None}
    model = ModelKVConfig.from_hf_config(config)
    with safetensors.safe_open(path, "numpy") as file:
        named = {int(part) for name in file.keys() for part in name.split(".")[:-1] if part.isdecimal()}  # noqa: SIM118
    if more := named - {*model.layer_indices}:
        raise KVCacheValueError(
            f"{path}: got scales of layer {max(more)}, expected those of a model of {model.num_hidden_layers} layers"
        )
    skipped = [*{*model.layer_indices} - named]  # of which no scale is missed
    rotated = kvjax.load_key_rotation(path)
    scales = kvjax.load_kv_scales(path, model, dtype, skip_layers=skipped, key_rotation=rotated)
    by_index = zip(model.layer_indices, scales, strict=True)
    return {index: found for index, found in by_index if index in named}


def _index(name: str, vllm_config: Any, layers: Mapping[str, Any]) -> int | None:
    """The index in the model of the layer whose cache a layer reads; None for one of a draft model.

    A draft model's layers may have any names, and calibration did not see them.
    """
    owner = getattr(layers[name], "kv_sharing_target_layer_name", None) or name
    if layers.get(owner, layers[name]).is_draft_layer:
        return None
    is_double = vllm_config.model_config.hf_config.model_type in DOUBLE_LAYERS
    index: int = extract_layer_index(owner, 2 if is_double else 1)
    return index


def _mode(layer: Any) -> KVQuantMode:
    return get_kv_quant_mode(layer.kv_cache_dtype)


def _of_rank(scale: np.ndarray | np.float32, num_kv_heads: int, device: torch.device) -> torch.Tensor:
    """One scale, or those of the KV heads of this rank of tensor parallelism, which may share heads with others."""
    scale = np.array(scale, np.float32)
    if scale.ndim:
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        first = rank * len(scale) // ranks
        scale = scale[first : first + num_kv_heads]
    return torch.as_tensor(scale, device=device)


def _warn_of_ones(layers: list[Any]) -> None:
    # Keys of mixed dtypes do not lose small magnitudes, whatever their scale.
    if layers and all(
        layer._v_scale_float == 1.0 and (layer._k_scale_float == 1.0 or _mode(layer) is KVQuantMode.CUSTOM)
        for layer in layers
    ):
        logger.warning(
            "kvjax: every layer of NVFP4 has decode scales of 1: blocks of 16 with no magnitude above 0.0059 read as"
            " zero. Write scales with `kvjax calibrate`, and pass --additional-config"
            ' \'{"kvjax": {"scales": FILE}}\''
        )
