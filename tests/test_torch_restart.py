"""A second process launches what a first one compiled: the same bytes, without compiling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.gpu

RUNS = """
import hashlib, json, warnings
import torch
import kvjax_torch
from kvjax_torch import launch

warnings.simplefilter("error")
generator = torch.Generator("cuda").manual_seed(0)
def digest(*tensors):
    return [hashlib.sha256(x.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest() for x in tensors]

qkv = torch.randn(64, 16 + 4 + 4, 128, generator=generator, device="cuda").bfloat16()
query, key, value = qkv.split([16, 4, 4], dim=1)
pages = torch.full((40, 2, 16, 4, 72), 0xAB, dtype=torch.uint8, device="cuda")
cache, slots = (pages[:, 0], pages[:, 1]), torch.arange(64, device="cuda") * 7
stored = "nvfp4", *(torch.tensor(scale, device="cuda") for scale in (0.02, 0.03))
kvjax_torch.warm_up(key, value, *cache, slots, *stored)
found = digest(pages)
kvjax_torch.reshape_and_cache_flash(key, value, *cache, slots, *stored)
table = torch.arange(40, dtype=torch.int32, device="cuda").view(4, 10)
lengths = torch.tensor([1, 77, 160, 0], dtype=torch.int32, device="cuda")
found += digest(pages, *kvjax_torch.gather_kv(*cache, table, lengths, *stored))
found += digest(*kvjax_torch.paged_attention(query[:4, None], *cache, table, lengths, *stored, return_lse=True))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    kvjax_torch.reshape_and_cache_flash(key, value, *cache, slots, *stored)
    attended = kvjax_torch.paged_attention(query[:4, None], *cache, table, lengths, *stored)
qkv.neg_()
graph.replay()
found += digest(pages, attended)
print(json.dumps([launch.num_compilations(), found]))
"""


def run(folder: Path, **variables: str) -> Any:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "KVJAX_CACHE_DIR": str(folder)} | variables
    done = subprocess.run([sys.executable, "-c", RUNS], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing_and_gives_the_same_bytes(tmp_path: Path):
    compilations, first = run(tmp_path / "kvjax")
    assert compilations == len(list((tmp_path / "kvjax").iterdir())) > 4
    assert run(tmp_path / "kvjax") == [0, first]
    [damaged, *_] = (tmp_path / "kvjax").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert run(tmp_path / "kvjax", KVJAX_COMPILE_PROCESSES="0") == [1, first]
    assert run(tmp_path / "kvjax") == [0, first]
