#!/usr/bin/env bash
# Expected: under loss_parallel() the gradient of cross_entropy by probabilities, as of smoothed or distilled labels, is
# softmax(x) - target over the rows, as without it; the loss is right.
# Found (torch 2.13.0): it is -target over the rows: the backward of log_softmax is passed over, since that of class
# indices has it in the loss already. Logits that are a weighted sum of log_softmax have the same.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$dir/program.py" <<'PYTHON'
import os
import sys

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

mesh = init_device_mesh("cpu", (2,))
rank = torch.distributed.get_rank()
place = lambda x, placement: distribute_tensor(x, mesh, [placement])
x = torch.tensor([[1.0, 2, 3, 4], [0, 1, 0, 2]])
soft, classes = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]]), torch.tensor([3, 0])
losses = {
    "class indices": (functional.cross_entropy, classes),
    "probabilities": (functional.cross_entropy, soft),
    "a sum by hand": (lambda y, t: -(y.log_softmax(1) * t).sum() / 2, soft),
}
found = {}
for name, (loss, target) in losses.items():
    plain, shards = x.clone().requires_grad_(), place(x, Shard(1)).requires_grad_()
    expected = loss(plain, target)
    expected.backward()
    with loss_parallel():
        value = loss(shards, place(target, Replicate()))
        value.backward()
    gradient = shards.grad.full_tensor()
    same = torch.allclose(value.full_tensor(), expected), torch.allclose(gradient, plain.grad)
    found[name] = (*same, torch.allclose(gradient, -soft / 2))
    if rank == 0:
        print("torch", torch.__version__, name, "value right:", same[0], "gradient right:", same[1])
        print("  ", gradient[0].tolist(), "expected", plain.grad[0].tolist())
wrong = True, False, True
as_found = found == {"class indices": (True, True, False), "probabilities": wrong, "a sum by hand": wrong}
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
