#!/usr/bin/env bash
# Expected: a TorchFunctionMode that is active sees the functions of torch that an autograd.Function calls in its forward,
# under torch.vmap and torch.func.grad as without them.
# Found (torch 2.13.0): under both the stack of modes is empty in the forward, so that what a mode gives another meaning,
# a default device among them, is without it there.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
"$dir/venv/bin/python" - <<'PYTHON'
import sys

import torch
from torch.overrides import TorchFunctionMode

seen = []


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.sin:
            seen.append(func)
        return func(*args, **(kwargs or {}))


class Sine(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x.cos()


def count(run):
    seen.clear()
    with Watching():
        run(torch.ones(2))
    return len(seen)


ways = {
    "plain": count(Sine.apply),
    "a function under vmap": count(torch.vmap(torch.sin)),
    "a Function under vmap": count(torch.vmap(Sine.apply)),
    "a Function under grad": count(torch.func.grad(lambda x: Sine.apply(x).sum())),
}
print("torch", torch.__version__, "how often the mode sees the sine:", ways)
sys.exit([*ways.values()] != [1, 1, 0, 0])
PYTHON
