#!/usr/bin/env bash
# Expected: torch.empty_like(x).fill_(1.0) is ones, as torch.ones_like(x) is, whatever the placement of x.
# Found (torch 2.13.0): empty_like keeps the pending sum, and fill_ writes the number on each rank: the sum is the number
# times the ranks. nn.init.constant_ and new_empty do the same, and so does 1 - x inside cosine_embedding_loss of features
# that are sharded: its value is too large by one.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$dir/program.py" <<'PYTHON'
import os
import sys

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

mesh = init_device_mesh("cpu", (2,))
rank = torch.distributed.get_rank()
place = lambda x, placement: distribute_tensor(x, mesh, [placement])
torch.manual_seed(0)
x = torch.randn(4, 3)
pending = place(x, Shard(0)).sum(0)
filled = torch.empty_like(pending).fill_(1.0).full_tensor()
ones = torch.ones_like(pending).full_tensor()
left, right, equal = torch.randn(4, 6), torch.randn(4, 6), torch.ones(4)
loss = functional.cosine_embedding_loss(left, right, equal)
sharded = functional.cosine_embedding_loss(place(left, Shard(1)), place(right, Shard(1)), place(equal, Replicate()))
excess = (sharded.full_tensor() - loss).item()
if rank == 0:
    print("torch", torch.__version__, "filled with 1:", filled.tolist(), "ones_like:", ones.tolist())
    print("cosine_embedding_loss is too large by", round(excess, 4))
as_found = filled.tolist() == [2.0] * 3 and ones.tolist() == [1.0] * 3 and abs(excess - 1) < 1e-5
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
