"""No operation of kvjax_torch has a gradient: each argument that could have one is refused, however torch asks.

What operations write is known to autograd, so that no gradient of other operations is computed from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

import kvjax  # noqa: E402
import kvjax_torch  # noqa: E402
from kvjax import KVCacheTypeError  # noqa: E402


def cache() -> dict[str, Any]:
    kv_cache = torch.full((4, 2, 8, 2, 16), 7.0)
    scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    return {"key_cache": kv_cache[:, 0], "value_cache": kv_cache[:, 1], "kv_cache_dtype": "float32", **scales}


def write() -> dict[str, Any]:
    return cache() | {"key": torch.ones(3, 2, 16), "value": torch.ones(3, 2, 16), "slot_mapping": torch.arange(3)}


def rope() -> dict[str, Any]:
    angles = {"positions": torch.arange(3), "cos_sin_cache": torch.ones(8, 16)}
    return write() | {"query": torch.ones(3, 4, 16), **angles}


def read() -> dict[str, Any]:
    return cache() | {"block_table": torch.zeros(2, 1).int(), "seq_lens": torch.tensor([3, 5])}


def attention() -> dict[str, Any]:
    return read() | {"query": torch.ones(2, 4, 16), "sinks": torch.ones(4)}


def ragged() -> dict[str, Any]:
    return attention() | {"cu_q_lens": torch.arange(3)}


def dense() -> dict[str, Any]:
    rows = {"query": torch.ones(2, 4, 16), "key": torch.ones(3, 2, 16), "value": torch.ones(3, 2, 8)}
    return rows | {"cu_q_lens": torch.tensor([0, 2]), "cu_kv_lens": torch.tensor([0, 3])}


def merge() -> dict[str, Any]:
    return {"outs": torch.ones(2, 3, 4, 16), "lses": torch.ones(2, 3, 4)}


def latents() -> dict[str, Any]:
    return {"kv_cache": torch.full((4, 8, 48), 7.0), "kv_cache_dtype": "float32", "scale": torch.ones(())}


def write_latents() -> dict[str, Any]:
    return latents() | {"kv_c": torch.ones(3, 32), "k_pe": torch.ones(3, 16), "slot_mapping": torch.arange(3)}


def rotate_latents() -> dict[str, Any]:
    angles = {"positions": torch.arange(3), "cos_sin_cache": torch.ones(8, 16), "is_neox": True}
    return write_latents() | {"q_pe": torch.ones(3, 4, 16), **angles}


def gather_latents() -> dict[str, Any]:
    rows = {"block_table": torch.zeros(1, 1).int(), "cu_seq_lens": torch.tensor([0, 3]), "token_to_seq": None}
    given = latents() | rows | {"dst": torch.ones(3, 48), "num_tokens": 3}
    return {"src_cache": given.pop("kv_cache")} | given


def attend_latents() -> dict[str, Any]:
    queries = {"q_nope": torch.ones(2, 4, 32), "q_pe": torch.ones(2, 4, 16), "sm_scale": 0.1}
    return latents() | queries | {"block_table": torch.zeros(2, 1).int(), "seq_lens": torch.tensor([3, 5])}


def attend_ragged_latents() -> dict[str, Any]:
    return attend_latents() | {"cu_q_lens": torch.arange(3)}


def window() -> dict[str, Any]:
    new = {"key": torch.ones(2, 2, 16), "value": torch.ones(2, 2, 16), "window_rows": torch.arange(2)}
    return ragged() | new | {"exact_window": kvjax_torch.ExactWindow.allocate(2, 8, 2, 16, dtype=torch.float32)}


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "reshape_and_cache_flash": write,
    "rope_and_cache": rope,
    "gather_kv": read,
    "paged_attention": attention,
    "ragged_paged_attention": ragged,
    "ragged_attention": dense,
    "merge_attention_states": merge,
    "concat_and_cache_mla": write_latents,
    "concat_and_cache_mla_rope_fused": rotate_latents,
    "gather_and_maybe_dequant_cache": gather_latents,
    "mla_paged_attention": attend_latents,
    "mla_ragged_paged_attention": attend_ragged_latents,
    "exact_window_attention": window,
}


def differentiable(operation: str) -> list[str]:
    arguments = CALLS[operation]().items()
    return [name for name, x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]


EACH_OPERATION = pytest.mark.parametrize("operation", CALLS)


def parameter(run: Callable[..., Any], x: torch.Tensor) -> None:
    run(torch.nn.Parameter(x.clone()))


def reverse(run: Callable[..., Any], x: torch.Tensor) -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        results = run(x)
        return torch.stack([x.sum(), *(each.sum() for each in results or () if each.requires_grad)]).sum()

    torch.func.grad(total)(x)


def forward(run: Callable[..., Any], x: torch.Tensor) -> None:
    torch.func.jvp(lambda x: (x, run(x))[0], (x,), (x,))


def dual(run: Callable[..., Any], x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        run(forward_ad.make_dual(x, x))


@EACH_OPERATION
@pytest.mark.parametrize("ask", [parameter, reverse, forward, dual], ids=lambda ask: ask.__name__)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's own imports for forward mode
def test_each_argument_that_could_have_a_gradient_is_refused(operation: str, ask: Callable[..., None]):
    for name in differentiable(operation):
        call = CALLS[operation]()

        def run(x: torch.Tensor, name: str = name, call: dict[str, Any] = call) -> Any:
            return getattr(kvjax_torch, operation)(**call | {name: x})

        message = rf"^{name}(\[0\])?: got (requires_grad=True|a tangent), but .* no gradient"
        with pytest.raises(KVCacheTypeError, match=message):
            ask(run, call[name])
        assert all((x == 7).all() for what, x in call.items() if what.endswith("_cache") and what != "cos_sin_cache")


@EACH_OPERATION
def test_without_gradients_parameters_are_accepted(operation: str):
    for mode in (torch.no_grad, torch.inference_mode):
        call = CALLS[operation]()
        for name in differentiable(operation):
            call[name] = call[name].requires_grad_()
        with mode():
            results = getattr(kvjax_torch, operation)(**call)
        each = results if isinstance(results, tuple) else () if results is None else (results,)
        assert not any(x.requires_grad for x in each)


def test_registered_operations_refuse_gradients_too():
    call = read()
    call["key_cache"] = call["key_cache"].clone().requires_grad_()
    with pytest.raises(KVCacheTypeError, match=r"key_cache: got requires_grad=True, but a gather has no gradient"):
        torch.ops.kvjax.gather_kv(**call)


def fill() -> dict[str, Any]:
    names = {"window_rows": "rows"}
    return {names.get(name, name): x for name, x in window().items() if name not in ("query", "key", "value", "sinks")}


def write_scales() -> dict[str, Any]:
    pages = {f"{name}_cache": torch.zeros(4, 8, 2, 16, dtype=torch.int8) for name in ("key", "value")}
    scales = {"k_scale": torch.ones(4, 8, 2), "v_scale": torch.ones(4, 8, 2)}
    return write() | pages | scales | {"kv_cache_dtype": "int8_per_token_head"}


def into(call: Callable[[], dict[str, Any]], *shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: call() | {"out": torch.empty(shape)}


CACHES, RING = {"key_cache", "value_cache"}, {"exact_window.key_cache", "exact_window.value_cache"}
WRITES: dict[str, tuple[str, Callable[[], dict[str, Any]], set[str]]] = {
    "a write": ("reshape_and_cache_flash", write, CACHES),
    "with scales": ("reshape_and_cache_flash", write_scales, CACHES | {"k_scale", "v_scale"}),
    "with rope": ("rope_and_cache", rope, CACHES),
    "with rope and scales": (
        "rope_and_cache",
        lambda: rope() | {name: x for name, x in write_scales().items() if name not in ("key", "value")},
        CACHES | {"k_scale", "v_scale"},
    ),
    "latents": ("concat_and_cache_mla", write_latents, {"kv_cache"}),
    "latents with rope": ("concat_and_cache_mla_rope_fused", rotate_latents, {"kv_cache", "q_pe", "k_pe"}),
    "a gather of latents": ("gather_and_maybe_dequant_cache", gather_latents, {"dst"}),
    "a window": ("exact_window_attention", window, RING),
    "a window and pages": (
        "exact_window_attention",
        lambda: window() | {"slot_mapping": torch.arange(2)},
        CACHES | RING,
    ),
    "a window from pages": ("fill_exact_window", fill, RING),
    "attention into out": ("paged_attention", into(attention, 2, 4, 16), {"out"}),
    "ragged attention into out": ("ragged_paged_attention", into(ragged, 2, 4, 16), {"out"}),
    "dense attention into out": ("ragged_attention", into(dense, 2, 4, 8), {"out"}),
    "attention to latents into out": ("mla_paged_attention", into(attend_latents, 2, 4, 32), {"out"}),
    "ragged attention to latents into out": (
        "mla_ragged_paged_attention",
        into(attend_ragged_latents, 2, 4, 32),
        {"out"},
    ),
    "attention": ("paged_attention", attention, set()),
    "a gather": ("gather_kv", read, set()),
}
"""An operation, its call, and the arguments that it writes."""


def tensors_of(call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by name, those of its window too."""
    found = {name: x for name, x in call.items() if isinstance(x, torch.Tensor)}
    ring = call.get("exact_window")
    caches = {} if ring is None else {"key_cache": ring.key_cache, "value_cache": ring.value_cache}
    return found | {f"exact_window.{name}": x for name, x in caches.items()}


def on_device(call: dict[str, Any], device: str) -> dict[str, Any]:
    """A call with its tensors on a device; bfloat16 on a GPU, whose kernels serve no float32 latents."""

    def moved(name: str, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            is_stored = x.is_floating_point() and "scale" not in name and name != "sinks"
            return x.to(device, torch.bfloat16 if is_stored and device == "cuda" else x.dtype)
        if isinstance(x, kvjax_torch.ExactWindow):
            return dataclasses.replace(x, key_cache=moved("", x.key_cache), value_cache=moved("", x.value_cache))
        return "auto" if name == "kv_cache_dtype" and x == "float32" else x

    return {name: moved(name, x) for name, x in call.items()}


EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@EACH_DEVICE
@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.inference_mode], ids=["default", "inference mode"])
@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
@pytest.mark.parametrize("kind", WRITES)
def test_each_call_raises_the_versions_of_what_it_writes_and_of_nothing_else(
    kind: str, checked: bool, mode: Any, device: str
):
    operation, make, written = WRITES[kind]
    call = on_device(make(), device)
    for _ in range(3):  # on a GPU the first call is recorded, and later ones are launched from the recording
        before = {name: x._version for name, x in tensors_of(call).items()}
        with mode(), kvjax.checked(checked):
            getattr(kvjax_torch, operation)(**call)
        assert {name for name, x in tensors_of(call).items() if x._version != before[name]} == written


@EACH_DEVICE
@pytest.mark.parametrize("kind", [kind for kind, (*_, written) in WRITES.items() if written])
def test_backward_raises_if_what_it_needs_was_written(kind: str, device: str):
    operation, make, written = WRITES[kind]
    for name in sorted(written):
        call = on_device(make(), device)
        weight = torch.ones((), device=device, requires_grad=True)
        loss = (weight * tensors_of(call)[name]).sum()
        with torch.no_grad():
            getattr(kvjax_torch, operation)(**call)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_backward_raises_within_a_function_that_is_differentiated():
    def loss(weight: torch.Tensor) -> torch.Tensor:
        call = write()
        total = (weight * call["key_cache"]).sum()
        kvjax_torch.reshape_and_cache_flash(**call)
        return total

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.func.grad(loss)(torch.ones(()))
