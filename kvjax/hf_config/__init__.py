"""Reads a Hugging Face `config.json`, for each model type, for what concerns the KV cache."""
