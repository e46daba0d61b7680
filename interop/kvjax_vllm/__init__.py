"""kvjax as attention backends of vLLM: `vllm serve MODEL --attention-backend KVJAX --kv-cache-dtype nvfp4`.

vLLM calls `register` in each of its processes: it is the entry point of the group `vllm.general_plugins`. docs/vllm.md
is for users.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import Any

# kvjax is not imported here: it imports jax, which a process that uses another backend does not need.

NAME = "KVJAX"
"""The backend's name in vLLM."""

MLA_NAME = "KVJAX_MLA"
"""The name of the MLA backend: as in vLLM, models with MLA have a separate backend."""

_CLASSES = {NAME: "kvjax_vllm.backend.KvjaxBackend", MLA_NAME: "kvjax_vllm.backend.KvjaxMLABackend"}

TESTED = "0.33.0"
"""The version of vLLM that the plugin was tested with. Other patch versions of its series are accepted."""

MIXED_DTYPES = "fp8_k_nvfp4_v", "fp8_k_nvfp4_4over6_v", "int8_k_nvfp4_v", "int8_k_nvfp4_4over6_v"
"""Dtypes of kvjax that vLLM has no name for: keys of 8 bits, values of NVFP4."""

_SERIES = TESTED.rpartition(".")[0]


def register() -> None:
    """Makes the backends and `MIXED_DTYPES` known to vLLM. Nothing else changes until they are chosen.

    If vLLM has another interface, this only warns: vLLM stops if a plugin raises, even if nobody uses these backends.
    """
    try:
        check_version()
        register_dtypes()
        for name in _CLASSES:
            register_name(name)
    except NotImplementedError as error:
        names = " and ".join(_CLASSES)
        warnings.warn(f"vLLM runs without the attention backends {names}: {error}", RuntimeWarning, stacklevel=2)


def register_name(name: str) -> Any:
    """Registers a backend's class with vLLM, unless that is done, and returns its name in vLLM's enumeration."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise other_interface(error) from error
    if name not in AttentionBackendEnum.__members__:
        register_backend(name, _CLASSES[name])
        # A process that vLLM spawns reads its configuration, a pickle, before it loads plugins.
        AttentionBackendEnum[name].__reduce_ex__ = lambda protocol: (register_name, (name,))
    return AttentionBackendEnum[name]


def register_dtypes() -> None:
    """Registers `MIXED_DTYPES` as values of `--kv-cache-dtype`, unless that is done.

    Other backends refuse them, as every dtype that they do not list.
    """
    try:
        import torch
        from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype
    except ImportError as error:
        raise other_interface(error) from error
    for name in MIXED_DTYPES:
        if not is_known_kv_cache_dtype(name):
            # The element dtype is all that a spec of vLLM has to tell which keys a page has.
            stored = torch.int8 if name.startswith("int8") else torch.uint8
            register_kv_cache_dtype(name)(_handler(name, stored))


def _handler(dtype: str, stored: Any) -> type:
    """A `KVCacheDTypeHandler` of vLLM: a dtype whose pages have elements of the torch.dtype `stored`."""

    class Handler:
        name = dtype

        def torch_dtype(self) -> Any:
            return stored

        def quant_mode(self) -> Any:
            from vllm.v1.kv_cache_interface import KVQuantMode

            return KVQuantMode.CUSTOM

    return Handler


def check_version() -> None:
    """Raises `kvjax.UnsupportedError` unless the installed vLLM is of the series that the plugin was tested with."""
    if not f"{_installed()}.".startswith(f"{_SERIES}."):
        raise other_interface()


def other_interface(reason: object = None) -> NotImplementedError:
    """The `kvjax.UnsupportedError` of a vLLM whose interface is not the one that the plugin was tested with."""
    from kvjax import UnsupportedError

    detail = "" if reason is None else f" ({reason})"
    return UnsupportedError(
        f"vllm: got version {_installed()}{detail}, expected {_SERIES}.*, as tested with {TESTED}: pip install"
        f" 'vllm=={_SERIES}.*'"
    )


def _installed() -> str:
    return importlib.metadata.version("vllm")
