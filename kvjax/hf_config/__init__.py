"""What the keys of a Hugging Face `config.json` say of the KV cache, for each type of model."""
