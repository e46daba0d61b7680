"""Benchmarks of kvjax's operations and their alternatives. Run them from the source tree."""

import os

# By default JAX preallocates 75% of the GPU memory, which leaves too little for torch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# By default torch's threads spin while they wait. When other programs compete for the cores, spinning dominates torch's
# times: 16 ms instead of 10 us on a machine with two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
