#!/usr/bin/env bash
# Expected: F.l1_loss(x, y, weight=w) is weighted, whatever TorchFunctionMode is active.
# Found (torch 2.13.0): torch hands l1_loss to modes without its weight, so that under any mode that passes
# calls on, torch.set_default_device("cpu") among them, the loss is the unweighted one, and w has no gradient;
# in the same way torch.chain_matmul(..., out=) leaves `out` as it was.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$dir/venv/bin/python" - <<'PYTHON'
import sys
import warnings

import torch
from torch.nn.functional import l1_loss

warnings.simplefilter("ignore")
x, y = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])
weight = torch.tensor([10.0, 1.0], requires_grad=True)
plain = l1_loss(x, y, weight=weight, reduction="sum")
torch.set_default_device("cpu")
moded = l1_loss(x, y, weight=weight, reduction="sum")
out = torch.zeros(2, 2)
product = torch.chain_matmul(torch.ones(2, 2), torch.ones(2, 2), out=out)
print("torch", torch.__version__)
print("l1_loss with a weight:", plain.item(), "needs a gradient:", plain.requires_grad)
print("the same after torch.set_default_device('cpu'):", moded.item(), "needs a gradient:", moded.requires_grad)
print("chain_matmul:", product.tolist(), "its out=:", out.tolist())
found = (plain.item(), moded.item(), moded.requires_grad, out.any().item())
sys.exit(found != (12.0, 3.0, False, False))
PYTHON
