"""What kvjax's operations cost on a device, next to what a user would pick instead. Run from the source tree."""

import os

# JAX takes three quarters of a GPU's memory when it is first used, torch what it needs when it needs it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
