#!/usr/bin/env bash
# Expected: x.gather(1, index) of DTensors that are sharded by rows takes row i of x by row i of the index.
# Found (torch 2.13.0): where the index has fewer rows than x, each rank takes its rows of the index beside its own rows of
# x, which are others: wrong numbers without an error. scatter and scatter_add give the right value, and a wrong gradient
# of what is scattered, which a gather computes.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$dir/program.py" <<'PYTHON'
import os
import sys

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

mesh = init_device_mesh("cpu", (2,))
rank = torch.distributed.get_rank()
place = lambda x, placement: distribute_tensor(x, mesh, [placement])
torch.manual_seed(0)
x, source = torch.randn(8, 5), torch.randn(4, 5)
index = torch.randint(0, 5, (4, 5))
rows = Shard(0)
expected, found = x.gather(1, index), place(x, rows).gather(1, place(index, rows))
off = (found.full_tensor() - expected).abs().amax(1)
weights = torch.arange(40.0).reshape(8, 5)
plain, shards = source.clone().requires_grad_(), place(source, rows).requires_grad_()
(x.scatter_add(1, index, plain) * weights).sum().backward()
scattered = place(x, rows).scatter_add(1, place(index, rows), shards).full_tensor()
(scattered * weights).sum().backward()
value = (scattered - x.scatter_add(1, index, source)).abs().max().item()
gradient = (shards.grad.full_tensor() - plain.grad).abs().amax(1)
if rank == 0:
    print("torch", torch.__version__, "gather, largest difference in each row:", [round(v, 3) for v in off.tolist()])
    print("scatter_add, value off by", value, "gradient off in each row by", gradient.tolist())
as_found = off[:2].max() == 0 < off[2:].min() and value < 1e-6 and gradient[:2].max() == 0 < gradient[2:].min()
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
