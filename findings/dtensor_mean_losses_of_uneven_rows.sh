#!/usr/bin/env bash
# Expected: the mean squared error of 5 rows on 2 ranks (3 and 2) is that of 5 rows, as x.mean() of the same DTensor is.
# Found (torch 2.13.0): it is the mean of the two ranks' means, so that rows of the smaller shard count more; l1_loss and
# mean() are right, and cross_entropy raises an error that says why.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$dir/program.py" <<'PYTHON'
import os
import sys

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn import functional

mesh = init_device_mesh("cpu", (2,))
rank = torch.distributed.get_rank()
place = lambda x, placement: distribute_tensor(x, mesh, [placement])
torch.manual_seed(0)
x, y = torch.tensor([0.0, 0, 0, 1, 1])[:, None], torch.zeros(5, 1)
names = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "l1_loss")
found = {name: getattr(functional, name)(place(x, Shard(0)), place(y + 1, Shard(0))).full_tensor().item() for name in names}
expected = {name: getattr(functional, name)(x, y + 1).item() for name in names}
mean = place(x, Shard(0)).mean().full_tensor().item()
if rank == 0:
    for name in names:
        print("torch", torch.__version__, name, "expected", round(expected[name], 4), "found", round(found[name], 4))
    print("mean()", round(mean, 4))
wrong = [abs(found[name] - expected[name]) > 1e-3 for name in names]
as_found = wrong == [True, True, True, True, False] and abs(mean - 0.4) < 1e-6
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
