#!/usr/bin/env bash
# Expected: LoRA factors that peft adds to the layers of a tensor-parallel model of transformers train as on one device.
# Found (peft 0.21.2, transformers 5.24.0, torch 2.13.0): on a column-parallel layer they do; on a row-parallel one (o_proj,
# down_proj) peft shards the factor by its input, and the forward raises an error about a shape in torch.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate peft==0.21.2 numpy
cat > "$dir/program.py" <<'PYTHON'
import os
import sys

import peft
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
if rank == 0:
    LlamaForCausalLM(config).save_pretrained(folder)
dist.barrier()
ids = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(1))
found = {}
for target in ("q_proj", "o_proj", "down_proj"):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, tp_plan="auto")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=[target]))
    try:
        model(input_ids=ids, labels=ids).loss.backward()
        found[target] = "runs"
    except RuntimeError as error:
        found[target] = f"{error}"
if rank == 0:
    print("peft", peft.__version__, found)
as_found = found["q_proj"] == "runs" and all("is invalid for input of size" in found[x] for x in ("o_proj", "down_proj"))
dist.barrier()
sys.stdout.flush()
os._exit(not as_found)  # torch may abort while it destroys what gloo has
PYTHON
OMP_NUM_THREADS=1 "$dir/venv/bin/torchrun" --nproc-per-node 2 "$dir/program.py" "$dir/model" 2> "$dir/err" || { tail -5 "$dir/err"; exit 1; }
