"""Generates with an unmodified Llama-style model, of random weights, from kvjax's paged cache in each dtype.

Needs `pip install 'kvjax[transformers]'`, no network and no GPU. For the effect of quantization on a trained model, see
`make demo`.
"""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvjax_torch.transformers_cache import CACHE_ARGUMENT, KvjaxCache

device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.05,
    dtype="bfloat16",
)
torch.manual_seed(0)
model = LlamaForCausalLM(config).to(device, torch.bfloat16)
prompts = torch.randint(1, 256, (2, 12), device=device)
mask = torch.ones_like(prompts)
mask[0, :5] = 0  # the first prompt is shorter: left padding


def generate(cache: DynamicCache | KvjaxCache) -> torch.Tensor:
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(prompts, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **options)[:, 12:]


expected = generate(DynamicCache(config=config))
model.set_attn_implementation("kvjax")  # or from_pretrained(..., attn_implementation="kvjax")
for dtype in ("auto", "fp8_e4m3", "fp8_e5m2", "nvfp4"):
    cache = KvjaxCache(model.config, kv_cache_dtype=dtype, num_blocks=8)
    same = (generate(cache) == expected).sum().item()
    print(f"{dtype:>8}: {cache.bytes_per_token:4} bytes/token, {same} of {expected.numel()} tokens as DynamicCache")
