#!/usr/bin/env bash
# Expected: the gradient of a mean loss of a DTensor whose rows are sharded is that of the same loss of a plain tensor.
# Found (torch 2.13.0): the value is right, and the gradient too large by the number of ranks: the backward of the loss
# divides by the entries of one rank. Adam hides it, since its steps do not depend on the scale.
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
x, y = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.zeros(4, 1)
factors = []
for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"):
    loss = getattr(functional, name)
    plain, sharded = x.clone().requires_grad_(), shard(x).requires_grad_()
    expected, found = loss(plain, y + 1), loss(sharded, shard(y + 1))
    expected.backward(), found.backward()
    same, factor = torch.allclose(whole(found), expected), (whole(sharded.grad) / plain.grad)[-1].item()
    factors.append((same, round(factor, 4)))
    if rank == 0:
        print("torch", torch.__version__, name, "equal value:", same, "gradient, relative to the right one:", factor)
as_found = factors == [(True, 2.0)] * 4
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
