"""`KvjaxCache` of models that keep latents (MLA): what transformers' own cache returns, or of rounded latents."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import tiny_models, transformers_models  # noqa: E402
from support.torch_helpers import from_numpy, to_numpy  # noqa: E402
from support.transformers_models import VOCABULARY, taking  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import kvjax  # noqa: E402
from kvjax import KVCacheValueError, UnsupportedError  # noqa: E402
from kvjax_torch.arguments.dtypes import numpy_dtype  # noqa: E402
from kvjax_torch.transformers_cache import KvjaxCache  # noqa: E402

NUM_BLOCKS, BLOCK_SIZE = 48, 4
MODEL_TYPES = ["deepseek_v3", "deepseek_v2", "mistral4", "minicpm3", "glm4_moe_lite", "youtu", "axk1"]
OTHERS = [pytest.param(name, marks=pytest.mark.full) for name in MODEL_TYPES[2:]]


def make_model(device: str, model_type: str = "deepseek_v3", dtype: str = "float32", **changes: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "dtype": dtype, **changes}
    config = tiny_models.load(model_type, tiny_models.changed(next(tiny_models.tiny_configs(model_type)), sizes))
    model_class = getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))
    torch.manual_seed(0)
    return model_class(config).to(getattr(torch, dtype)).eval().to(device)


def make_cache(model: Any, dtype: str = "auto", **options: Any) -> KvjaxCache:
    return KvjaxCache(model.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kv_cache_dtype=dtype, **options)


def generate(model: Any, cache: Any, **options: Any) -> Any:
    return transformers_models.generate(model, cache, **{"max_new_tokens": 5, **options})


class RoundedLatents(DynamicCache):
    """transformers' cache of latents and rope keys that JAX's operations have stored and read back."""

    def __init__(self, specs: Any, k_scale: float):
        super().__init__()
        self.specs, self.k_scale = specs, k_scale

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        spec, dtype = self.specs[layer_idx], numpy_dtype(key_states.dtype)
        num_seqs, _, num_new, _ = key_states.shape
        parts = [to_numpy(x[:, 0].flatten(0, 1).cpu(), dtype) for x in (key_states, value_states)]
        count = num_seqs * num_new
        cache = kvjax.KVCache.allocate(spec, -(-count // spec.block_size), k_scale=np.float32(self.k_scale))
        cache = kvjax.concat_and_cache_mla(*map(jnp.asarray, parts), cache, jnp.arange(count))
        table = jnp.arange(cache.num_blocks)[None]
        read = kvjax.gather_mla(cache, table, jnp.array([0, count]), num_tokens=count, dtype=dtype)
        rounded = [from_numpy(np.array(x)).view(num_seqs, 1, num_new, -1).to(key_states.device) for x in read]
        return super().update(*rounded, layer_idx, *args, **kwargs)


def assert_same(got: Any, expected: Any) -> None:
    assert got.sequences.tolist() == expected.sequences.tolist()
    for logits, wanted in zip(got.logits, expected.logits, strict=True):
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("model_type", [*MODEL_TYPES[:2], *OTHERS])
def test_the_models_own_dtype_gives_the_bits_of_dynamic_cache(device: str, model_type: str):
    for dtype in ("float32", "bfloat16"):
        model = make_model(device, model_type, dtype)
        cache = make_cache(model)
        assert_same(generate(model, cache), generate(model, DynamicCache(config=model.config)))
        assert all(spec.is_mla for spec in cache.specs)
        elements = sum(sum(spec.part_sizes) for spec in cache.specs)
        assert cache.bytes_per_token == elements * model.dtype.itemsize


@pytest.mark.parametrize("dtype", ["fp8", "nvfp4", "nvfp4_4over6"])
def test_any_dtype_gives_the_bits_of_rounded_latents(device: str, dtype: str):
    model = make_model(device, dtype="bfloat16")
    cache = make_cache(model, dtype, k_scale=0.004)
    got = generate(model, cache)
    assert_same(got, generate(model, RoundedLatents(cache.specs, 0.004)))
    assert not torch.equal(got.logits[0], generate(model, DynamicCache(config=model.config)).logits[0])


def test_fp8_ds_mla_stores_the_sizes_that_it_has(device: str):
    model = make_model(device, dtype="bfloat16", kv_lora_rank=512, qk_rope_head_dim=64)
    cache = make_cache(model, "fp8_ds_mla")
    got = generate(model, cache)
    assert_same(got, generate(model, RoundedLatents(cache.specs, 1.0)))
    assert cache.bytes_per_token == 2 * 656


def test_beams_share_blocks_and_are_those_of_dynamic_cache(device: str):
    model = make_model(device)
    options = {"num_beams": 3, "output_logits": False}
    got, expected = (
        generate(model, cache, **options) for cache in (make_cache(model), DynamicCache(config=model.config))
    )
    assert got.sequences.tolist() == expected.sequences.tolist()


def test_a_crop_takes_back_tokens(device: str):
    model = make_model(device)
    ids = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(2)).to(device)
    cache = make_cache(model)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        model(ids[:, :10], **taking(cache))
        cache.crop(-4)
        assert cache.get_seq_length() == 6
        logits = model(ids[:, 6:], **taking(cache)).logits
    torch.testing.assert_close(logits, whole[:, 6:], rtol=1e-4, atol=1e-4)


def test_the_default_scale_of_nvfp4_leaves_room_for_later_tokens(device: str):
    model = make_model(device)
    cache = make_cache(model, "nvfp4")
    seen = DynamicCache(config=model.config)
    ids = torch.randint(1, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(2)).to(device)
    with torch.no_grad():
        model(ids, **taking(cache))
        model(ids, **taking(seen))
    largest = seen.layers[0].keys.abs().max()
    torch.testing.assert_close(cache.layers[0].k_scale, 16 * largest / (6 * 448))


def test_attention_over_pages_is_refused(device: str):
    model = make_model(device)
    cache = make_cache(model)
    model.set_attn_implementation("kvjax")
    ids = torch.ones((1, 3), dtype=torch.long, device=device)
    message = r"^attn_implementation: got 'kvjax' for a model of latents \(MLA\), expected another"
    with pytest.raises(KVCacheValueError, match=message), torch.no_grad():
        model(ids, **taking(cache))
    with pytest.raises(KVCacheValueError, match=message):
        make_cache(model)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(ids, **taking(cache))  # nothing was stored
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"v_scale": [None, 1.0]}, r"^v_scale: got \[None, 1\.0\] for a model of latents", id="one of two"),
        ({"v_scale": 1.0}, r"^v_scale: got 1\.0 for a model of latents \(MLA\), expected none"),
        ({"exact_window": 64}, r"^exact_window: got 64 for a model of latents"),
        ({"layout": "HND"}, r"^layout: got 'HND' for a model of latents"),
        ({"key_rotation": [0]}, r"^key_rotation: got \(0,\) for a model of latents"),
        ({"k_scale": [1.0]}, r"^k_scale: got 1 scales, expected one for each of 2 layers"),
        ({"dtype": "int8_per_token_head"}, r"^kv_cache_dtype of layer 0: got 'int8_per_token_head', expected one of"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_latents_do_not_have_is_refused(options: dict[str, Any], message: str):
    model = make_model("cpu")
    with pytest.raises((KVCacheValueError, UnsupportedError), match=message):
        make_cache(model, **options)


def test_a_layer_without_a_scale_of_its_own_has_the_default():
    """As lists of a checkpoint's scales have them."""
    layers = make_cache(make_model("cpu"), "nvfp4", k_scale=[0.5, None], v_scale=[None, None])._kvjax_layers
    states = torch.full((1, 1, 3, 48), 21.0), torch.ones(1, 1, 3, 64)
    for layer in layers:
        layer.update(*states)
    assert [float(layer.k_scale) for layer in layers] == [0.5, 0.125]


def test_expanded_keys_are_refused():
    """Those of a model that stores each head's keys and values, as some did before transformers 5.24."""
    cache = make_cache(make_model("cpu"))
    with pytest.raises(KVCacheValueError, match=r"^key_states: got 4 heads of size 48, expected one of size 48: the"):
        cache.update(torch.zeros(1, 4, 3, 48), torch.zeros(1, 4, 3, 16), 0)
