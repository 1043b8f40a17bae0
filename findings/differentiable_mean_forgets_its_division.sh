#!/usr/bin/env bash
# Expected: the gradient of torch.distributed.nn.functional.reduce_scatter(op=AVG) is that of a mean, 1 / n of what
# arrives. Found (torch 2.13.0, gloo): the forward divides by n, the backward, an all_gather, does not: n times too large.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$dir/found.py" <<'PYTHON'
import multiprocessing
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable


def on_processes(number, function):
    folder = tempfile.mkdtemp()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=work, args=(rank, number, folder, queue, function))
        for rank in range(number)
    ]
    for worker in workers:
        worker.start()
    found = dict(queue.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    shutil.rmtree(folder)
    return [found[rank] for rank in range(number)]


def work(rank, number, folder, queue, function):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number
    )
    queue.put((rank, function(rank)))
    dist.barrier()
    dist.destroy_process_group()

def gradient(rank):
    x = torch.ones(2, requires_grad=True)
    parts = [part.contiguous() for part in (x * 4).chunk(2)]
    y = differentiable.reduce_scatter(torch.empty(1), parts, op=dist.ReduceOp.AVG)
    y.sum().backward()
    return [y.tolist(), x.grad.tolist()]


if __name__ == "__main__":
    found = on_processes(2, gradient)
    print("torch", torch.__version__, "the mean of 4 * x over two ranks, and its gradient:", found[0])
    sys.exit(found != [[[4.0], [4.0, 4.0]]] * 2)
PYTHON
"$dir/venv/bin/python" "$dir/found.py"
