"""What kvjax's operations cost on a device, next to what a user would pick instead. Run from the source tree."""

import os

# JAX takes three quarters of a GPU's memory when it is first used, torch what it needs when it needs it.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# torch's threads spin while they wait for each other. Where other programs want their cores, that is what torch's times
# would be of: on a machine of two cores 16 ms instead of 10 us.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
