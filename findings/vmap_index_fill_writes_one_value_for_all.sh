#!/usr/bin/env bash
# Expected: torch.func.vmap over the value of torch.index_fill(x, 0, index, value) gives each its own value.
# Found (torch 2.13.0): where x and index are not batched, all get the last value, without an error: the values are
# written one after the other into one tensor.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$dir/venv/bin/python" - <<'PYTHON'
import sys

import torch

x, index, values = torch.zeros(3), torch.tensor([1]), torch.tensor([1.0, 2.0])
fill = lambda value: torch.index_fill(x, 0, index, value)
each = torch.stack([fill(value) for value in values])
batched = torch.func.vmap(fill)(values)
print("torch", torch.__version__)
print("call by call:", each.tolist(), "by vmap:", batched.tolist())
sys.exit(batched.tolist() != [[0.0, 2.0, 0.0], [0.0, 2.0, 0.0]] or each[0, 1].item() != 1.0)
PYTHON
