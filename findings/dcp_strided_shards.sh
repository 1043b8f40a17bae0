#!/usr/bin/env bash
# Expected: a DTensor whose ranks have rows of each of three parts (_StridedShard, as a packed query-key-value matrix)
# is saved by torch.distributed.checkpoint, and set_model_state_dict(broadcast_from_rank0=True) gives each rank its rows.
# Found (torch 2.13.0): the save is refused, for chunks that overlap, and set_model_state_dict copies as many rows from
# the first of them on, which are others, without a word. distribute_tensor and full_tensor are right.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$dir/program.py" <<'PYTHON'
import logging
import os
import sys

import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

logging.disable(logging.CRITICAL)
mesh = init_device_mesh("cpu", (2,))
rank = torch.distributed.get_rank()
whole = nn.Linear(1, 12, bias=False)
whole.weight.data = torch.arange(12.0).view(12, 1)


def make():
    module = nn.Linear(1, 12, bias=False)
    placed = distribute_tensor(whole.weight.detach(), mesh, [_StridedShard(0, split_factor=3)])
    module.weight = nn.Parameter(placed)
    return module


placed_right = torch.equal(make().weight.full_tensor(), whole.weight)
try:
    checkpoint.save(make().state_dict(), checkpoint_id=sys.argv[1])
    saved = "saved"
except checkpoint.CheckpointException as error:
    saved = "overlapping chunks" if "overlapping chunks" in str(error) else str(error)
module = make()
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(module, whole.state_dict(), options=options)
found = module.weight.full_tensor().flatten().tolist()
if rank == 0:
    print("torch", torch.__version__, "placed right:", placed_right)
    print("saved:", saved)
    print("set_model_state_dict of 0 to 11:", found)
as_found = placed_right and saved == "overlapping chunks" and found != [*range(12)]
torch.distributed.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" "$dir/saved" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
