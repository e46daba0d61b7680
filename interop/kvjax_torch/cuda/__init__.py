"""The operations on CUDA tensors."""
