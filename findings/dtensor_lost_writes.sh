#!/usr/bin/env bash
# Expected: a write into a row, a diagonal or other view of a sharded DTensor is seen in it, or raises an error.
# Found (torch 2.13.0): the view is a copy where it had to be gathered, so that nothing is written, without a word.
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
lost = {}
for name, write in {
    "x[0].zero_()": lambda x: x[0].zero_(),
    "x[0] = x[3]": lambda x: x.__setitem__(0, x[3]),
    "x.diagonal().zero_()": lambda x: x.diagonal().zero_(),
    "x.flatten()[1:3].zero_()": lambda x: x.flatten()[1:3].zero_(),
}.items():
    x = torch.arange(1.0, 9.0).view(4, 2)
    y = shard(x)
    before, _, _ = whole(y).clone(), write(x), write(y)
    lost[name] = torch.equal(whole(y), before) and not torch.equal(x, before)
if rank == 0:
    print("torch", torch.__version__, "nothing was written:", lost)
as_found = all(lost.values())
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
