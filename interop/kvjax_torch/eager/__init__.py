"""What torch and JAX compute where no kernel serves: the operations on CPU tensors, and parts of those on a GPU."""
