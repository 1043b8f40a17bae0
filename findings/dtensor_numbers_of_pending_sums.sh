#!/usr/bin/env bash
# Expected: x.sum().item() and x.any() * 1.0 of a sharded DTensor are those of the whole tensor on every rank.
# Found (torch 2.13.0): item() is the addend of the rank that asks, so that a condition on it differs between ranks; any()
# times a number is the number of ranks that have one.
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
x = torch.tensor([1.0, 2.0, 3.0, 4.0])
item, number = shard(x).sum().item(), whole((shard(x) > 0).any() * 1.0).item()
items = [None, None]
torch.distributed.all_gather_object(items, item)
if rank == 0:
    print("torch", torch.__version__, "sum().item() of 10 on two ranks:", items, "any() * 1.0:", number)
as_found = items == [3.0, 7.0] and number == 2.0
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
