"""Reads what concerns the KV cache from a Hugging Face `config.json`, for each model type."""
