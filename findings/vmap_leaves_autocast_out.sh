#!/usr/bin/env bash
# Expected: under torch.autocast a function has the same dtype in torch.vmap as without it.
# Found (torch 2.13.0, CPU): linear with a bias, addmm, baddbmm and prelu stay in 32 bits under vmap, and mv, dot and vdot
# come out in bfloat16, where plain calls give 32 bits; linear without a bias is cast in both.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$dir/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torch.nn import functional

w, b, rows = torch.ones(6, 6), torch.ones(6), torch.ones(2, 4, 6)
calls = {
    "linear without a bias": lambda x: functional.linear(x, w),
    "linear": lambda x: functional.linear(x, w, b),
    "addmm": lambda x: torch.addmm(b, x, w),
    "baddbmm": lambda x: torch.baddbmm(b, x[None], w[None]),
    "prelu": lambda x: functional.prelu(x, b),
    "mv": lambda x: torch.mv(x, b),
    "dot": lambda x: torch.dot(x[0], b),
}
differ = {}
for name, call in calls.items():
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        plain = call(rows[0]).dtype
        torch.vmap(lambda x: seen.append(call(x).dtype) or x)(rows)
    print("torch", torch.__version__, name, "plain", plain, "under vmap", seen[0])
    differ[name] = plain != seen[0]
sys.exit([name for name, differs in differ.items() if not differs] != ["linear without a bias"])
PYTHON
