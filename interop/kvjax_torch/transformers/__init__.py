"""A cache for models of Hugging Face transformers, and the calibration of checkpoints; only this folder imports it."""
