#!/usr/bin/env bash
# Expected: the gradient of torch.func.vmap(torch.select_scatter) is that of the unbatched calls, one after the other.
# Found (torch 2.13.0): the gradient of the source is too large, by the length of the dim: the batching rule is a
# scatter of the source repeated along the dim, all of whose copies get the gradient. Values are right.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$dir/venv/bin/python" - <<'PYTHON'
import sys

import torch

x, y = torch.zeros(2, 3, 5), torch.zeros(2, 3, requires_grad=True)
write = lambda x, y: torch.select_scatter(x, y, 1, 0)
each = torch.stack([write(*pair) for pair in zip(x, y)])
batched = torch.func.vmap(write)(x, y)
(plain,) = torch.autograd.grad(each.sum(), y)
(found,) = torch.autograd.grad(batched.sum(), y)
print("torch", torch.__version__)
print("equal values:", torch.equal(each, batched))
print("gradient of the source, call by call:", plain.unique().tolist(), "by vmap:", found.unique().tolist())
sys.exit((plain.unique().tolist(), found.unique().tolist()) != ([1.0], [5.0]))
PYTHON
