"""The demo model's weights file: float16 tensors, with the model's shape and training details in the header."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from kvjax.demo.model import Params, TransformerConfig

SHIPPED = Path(__file__).with_name("weights.safetensors")
"""The weights included in kvjax, written by `examples/train_demo_model.py`."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """A trained model. `training`: steps, seed, Python version, bits per byte."""

    config: TransformerConfig
    params: Params
    training: Mapping[str, str]


def save(path: Path, config: TransformerConfig, params: Params, training: Mapping[str, str]) -> None:
    """Writes `params` as float16, whose error is far below that of any cache dtype."""
    tensors = {name: np.asarray(array, np.float16) for name, array in params.items()}
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    save_file(tensors, path, metadata={"config": json.dumps(fields), **training})


def load(path: Path = SHIPPED) -> Weights:
    """Reads what `save` wrote; parameters are converted to float32, the demo's compute dtype."""
    with safe_open(path, framework="numpy") as file:
        training = dict(file.metadata())
        params = {name: jnp.asarray(file.get_tensor(name), jnp.float32) for name in file.keys()}  # noqa: SIM118
    fields = json.loads(training.pop("config"))
    config = TransformerConfig(**fields | {"layer_types": tuple(fields["layer_types"])})
    return Weights(config, jax.device_put(params), training)
