"""One of two processes with four devices each that share caches: `two_processes.py PORT PROCESS`."""

from __future__ import annotations

import sys

import jax

jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
sys.argv[1:] = ["Explicit", "2", "4", "full"]

from support import sharded_caches  # noqa: E402  # asks for the devices of both processes


def main() -> None:
    assert {device.process_index for device in sharded_caches.MESH.devices.flat} == {0, 1}
    # Blocks in one process or the other; and heads of both.
    for division in ("both", "heads over both axes"):
        sharded_caches.check_division(division, sharded_caches.FEW, "xla", divided=False)
    sharded_caches.check_carried_scales("fp8_e4m3-HND", "both")


if __name__ == "__main__":
    main()
