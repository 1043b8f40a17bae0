#!/usr/bin/env bash
# Expected: under the tensor-parallel plan that a model of transformers carries, every gradient is that of one device.
# Found (transformers 5.24.0, torch 2.13.0): the learned slopes of Apertus' activation, whose inputs the plan shards, get
# each rank's own gradient, so that two ranks' copies of one parameter part in the first step; loss and others are right.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate numpy
cat > "$dir/program.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import ApertusConfig, ApertusForCausalLM

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
config = ApertusConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
if rank == 0:
    ApertusForCausalLM(config).save_pretrained(folder)
dist.barrier()
load = lambda **plan: ApertusForCausalLM.from_pretrained(folder, dtype=torch.float32, **plan)
one, two = load(), load(tp_plan="auto")
ids = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(1))
losses = []
for model in (one, two):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    losses.append(round(loss.item(), 5))
wrong = {}
for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
    got = q.grad.full_tensor() if isinstance(q.grad, DTensor) else q.grad
    if not torch.allclose(got, p.grad, rtol=1e-3, atol=1e-5):
        wrong[name] = f"{got.item():.5f} instead of {p.grad.item():.5f}"
print(f"transformers {transformers.__version__}, rank {rank}: losses {losses}, wrong gradients {wrong}")
as_found = losses[0] == losses[1] and wrong and all("act_fn.alpha" in name for name in wrong)
dist.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" "$dir/model" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
