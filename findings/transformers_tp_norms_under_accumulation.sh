#!/usr/bin/env bash
# Expected: two backwards before a step give a parallelized model the sum of two gradients, as on one device.
# Found (transformers 5.24.0, torch 2.13.0): what a plan marks "replicated_with_grad_allreduce", as the norms of queries and
# keys in Qwen3, is summed over the ranks after each backward with what had been accumulated: the first microbatch counts
# once for each rank. One backward a step is right.
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
from transformers import Qwen3Config, Qwen3ForCausalLM

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
if rank == 0:
    Qwen3ForCausalLM(config).save_pretrained(folder)
dist.barrier()
load = lambda **plan: Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32, **plan)
one, two = load(), load(tp_plan="auto")
batches = torch.randint(64, (2, 2, 6), generator=torch.Generator().manual_seed(1))
grads = lambda model: [x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad for x in model.parameters()]
names = [name for name, _ in one.named_parameters()]
wrong, firsts = {}, {}
for number in (1, 2):
    for model in (one, two):
        model.zero_grad()
        for ids in batches[:number]:
            model(input_ids=ids, labels=ids).loss.backward()
    for name, got, expected in zip(names, grads(two), grads(one), strict=True):
        if number == 1:
            firsts[name] = expected.clone()
        if not torch.allclose(got, expected, rtol=1e-3, atol=1e-5):
            wrong.setdefault(number, {})[name] = torch.allclose(got, expected + firsts[name], rtol=1e-3, atol=1e-5)
if rank == 0:
    print("transformers", transformers.__version__, "wrong after 1 and 2 backwards:", len(wrong.get(1, ())), len(wrong[2]))
    print("gradients in which the first batch counts twice:", wrong[2])
as_found = 1 not in wrong and all("_norm" in name and twice for name, twice in wrong[2].items())
dist.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" "$dir/model" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
