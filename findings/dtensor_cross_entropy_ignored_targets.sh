#!/usr/bin/env bash
# Expected: cross_entropy of sharded logits divides by the number of all targets that are not ignored.
# Found (torch 2.13.0): each rank divides by its own number, and the result is the mean of these means.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$dir/program.py" <<'PYTHON'
import os
import sys

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

mesh = init_device_mesh("cpu", (2,))
rank = torch.distributed.get_rank()
shard = lambda x: distribute_tensor(x, mesh, [Shard(0)])
whole = lambda x: x.full_tensor() if isinstance(x, DTensor) else x
logits, target = torch.arange(8.0).view(4, 2) ** 2 / 9, torch.tensor([0, -100, 1, 1])
expected = functional.cross_entropy(logits, target).item()
found = whole(functional.cross_entropy(shard(logits), shard(target))).item()
halves = [functional.cross_entropy(logits[i : i + 2], target[i : i + 2]).item() for i in (0, 2)]
if rank == 0:
    print("torch", torch.__version__, "one device:", expected, "two ranks:", found, "mean of their means:", sum(halves) / 2)
as_found = abs(found - expected) > 1e-3 and abs(found - sum(halves) / 2) < 1e-5
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
