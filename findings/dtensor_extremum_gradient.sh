#!/usr/bin/env bash
# Expected: the gradient of amax, or of an inf-norm, of a sharded DTensor is 1 at the largest entry and 0 elsewhere.
# Found (torch 2.13.0): NaN and infinity, unless the first rank has the largest entry; max() is right.
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
x, grads = torch.tensor([1.0, 3.0, 2.0, 3.5]), {}
for name, f in {"amax": lambda x: x.amax(), "inf-norm": lambda x: x.norm(torch.inf), "max": lambda x: x.max()}.items():
    leaf = shard(x).requires_grad_()
    f(leaf).backward()
    grads[name] = str(whole(leaf.grad).tolist())
if rank == 0:
    print("torch", torch.__version__, grads)
wrong = "[nan, nan, nan, inf]"
as_found = grads == {"amax": wrong, "inf-norm": wrong, "max": "[0.0, 0.0, 0.0, 1.0]"}
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
