"""The whole of a small engine: two layers, three prompts, at most four sequences at a time (docs/serving.md)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, VOCABULARY = 2, 4, 2, 16, 97
MAX_SEQS, MAX_BLOCKS, CHUNK = 4, 8, 8  # the buckets: what programs are compiled for

# 1. What a layer stores, and how many blocks of every layer the memory holds.
spec = kvjax.FullAttentionSpec(16, NUM_KV_HEADS, HEAD_SIZE, dtype=kvjax.parse_kv_cache_dtype("fp8"))
num_blocks = kvjax.max_blocks([spec] * NUM_LAYERS, 64 * 2**10)
device = jax.devices()[0]  # whatever goes from step to step is committed to it, or steps would be compiled twice
caches = tuple(kvjax.KVCache.allocate(spec, num_blocks, sharding=device) for _ in range(NUM_LAYERS))
pool = kvjax.BlockPool(num_blocks, spec.block_size)

shapes = {"qkv": (64, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE), "output": (NUM_HEADS * HEAD_SIZE, 64)}
keys = iter(jax.random.split(jax.random.key(0), 1 + NUM_LAYERS * len(shapes)))
weights = {
    "embedding": jax.random.normal(next(keys), (VOCABULARY, 64)),
    "layers": [
        {name: jax.random.normal(next(keys), shape) / 8 for name, shape in shapes.items()} for _ in range(NUM_LAYERS)
    ],
}
weights = jax.device_put(weights, device)


# 2. One program for a step of the model, with the caches donated.
@functools.partial(jax.jit, static_argnames=("max_q_len", "max_prompts"), donate_argnames="caches")
def run(weights, tokens, previous, step, caches, *, max_q_len, max_prompts):
    tokens = jnp.where(tokens < 0, previous[jnp.maximum(~tokens, 0)], tokens)  # ~row: the token in previous[row]
    x, new_caches = weights["embedding"][tokens], []
    for layer, cache in zip(weights["layers"], caches, strict=True):
        rows = (x @ layer["qkv"]).reshape(len(x), -1, HEAD_SIZE)
        query, key, value = jnp.split(rows, [NUM_HEADS, NUM_HEADS + NUM_KV_HEADS], axis=1)
        cache = kvjax.reshape_and_cache_flash(key, value, cache, step.slot_mapping, unique_slots=True)
        attended = kvjax.ragged_paged_attention(
            query, cache, step.block_table, step.seq_lens, step.cu_q_lens, max_q_len=max_q_len, max_prompts=max_prompts
        )
        x += attended.reshape(len(x), -1) @ layer["output"]
        new_caches.append(cache)
    last = jnp.maximum(step.cu_q_lens[1:] - 1, 0)  # the row of each sequence's last token
    next_tokens = jnp.argmax(x[last] @ weights["embedding"].T, axis=-1).astype(jnp.int32)
    return next_tokens, tuple(new_caches)


# 3. The host: requests, their sequences in the pool, and a step's metadata.
requests = [
    {"prompt": list(range(2, 2 + length)), "generated": [], "started": 0, "row": None} for length in (21, 3, 40)
]
for request in requests:
    request["sequence"] = pool.sequence(request["prompt"])  # holds the blocks of a prefix that is cached
running = list(requests)


def schedule(num_new_tokens):
    """The requests of the next step and their new tokens: all that decode, and a chunk of one prompt."""
    batch, left = [], CHUNK
    for request in running:
        position = request["sequence"].num_tokens
        if position < len(request["prompt"]):
            if left:
                batch.append((request, request["prompt"][position : position + left]))
                left = 0
        elif request["started"] < num_new_tokens:
            batch.append((request, [~request["row"]]))
    return batch


def start(batch, previous, caches):
    """Starts a step; the device computes it while the host continues. `owners` says whose token a row is."""
    sequences = [request["sequence"] for request, _ in batch]
    q_lens = [len(new) for _, new in batch]
    pool.append(sequences, q_lens)  # returns no blocks to copy, as no sequence is forked
    has_prompt = max(q_lens) > 1
    num_tokens = MAX_SEQS + CHUNK if has_prompt else MAX_SEQS
    step = kvjax.StepMetadata.from_sequences(
        sequences, q_lens, num_tokens=num_tokens, num_seqs=MAX_SEQS, max_blocks=MAX_BLOCKS
    )
    tokens = np.zeros(num_tokens, np.int32)
    tokens[: sum(q_lens)] = np.concatenate([new for _, new in batch])
    buckets = {"max_q_len": CHUNK, "max_prompts": 1} if has_prompt else {"max_q_len": 1, "max_prompts": 0}
    next_tokens, caches = run(weights, tokens, previous, step, caches, **buckets)
    next_tokens.copy_to_host_async()
    owners = []
    for row, (request, new) in enumerate(batch):
        length = request["sequence"].num_tokens
        if length <= len(request["prompt"]):
            request["sequence"].commit(new)  # from now on other sequences may share these blocks
        if length >= len(request["prompt"]):  # the row's result is a new token, not one of the prompt
            request["row"] = row
            request["started"] += 1
            owners.append((row, request))
    return next_tokens, caches, owners


# 4. The next step starts before the tokens of the last are read.
previous, unread = jax.device_put(np.zeros(MAX_SEQS, np.int32), device), None
while (batch := schedule(num_new_tokens=6)) or unread:
    before, unread = unread, None
    if batch:
        previous, caches, owners = start(batch, previous, caches)
        unread = previous, owners
    if before:
        values = np.asarray(before[0])  # waits for the step before the one that runs
        for row, request in before[1]:
            request["generated"].append(int(values[row]))
            if len(request["generated"]) == 6:
                request["sequence"].free()
                running.remove(request)
