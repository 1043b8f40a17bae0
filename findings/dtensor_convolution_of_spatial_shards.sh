#!/usr/bin/env bash
# Expected: a convolution of a DTensor whose height is sharded exchanges halos, or raises an error, or gathers first.
# Found (torch 2.13.0): each rank convolves its own rows and pads at its own borders, and the result is called Replicate():
# its shape is that of the whole picture, its tensor has the rows of one rank, others on each, without an error. So for 1,
# 2 and 3 spatial dims, transposed ones too; a sharded batch is right.
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
picture, kernel = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3)
wave, filter_ = torch.randn(2, 4, 8), torch.randn(4, 4, 3)
cases = {
    "conv1d": (lambda x, w: functional.conv1d(x, w, padding=1), wave, filter_, 2),
    "conv2d": (lambda x, w: functional.conv2d(x, w, padding=1), picture, kernel, 2),
    "conv_transpose2d": (lambda x, w: functional.conv_transpose2d(x, w, stride=2), picture, kernel, 2),
    "conv2d of a sharded batch": (lambda x, w: functional.conv2d(x, w, padding=1), picture, kernel, 0),
}
halved = []
for name, (convolve, x, w, dim) in cases.items():
    expected, found = convolve(x, w), convolve(place(x, Shard(dim)), place(w, Replicate()))
    told, full = tuple(found.shape), tuple(found.full_tensor().shape)
    halved.append(found.placements == (Replicate(),) and full[dim] < told[dim] == expected.shape[dim])
    if rank == 0:
        print("torch", torch.__version__, name, found.placements, "shape", told, "full_tensor()", full)
as_found = halved == [True, True, True, False]
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
