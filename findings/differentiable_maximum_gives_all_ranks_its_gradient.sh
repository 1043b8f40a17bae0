#!/usr/bin/env bash
# Expected: torch.distributed.nn.functional has the derivatives of what its forwards compute: of the mean over n ranks
# 1 / n, of a maximum 1 for the rank that has it and 0 for the others. Found (torch 2.13.0, gloo): the backward of
# all_reduce(MAX) takes the maximum of the cotangents and hands it to every rank, also to those whose value was smaller.
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
    x = torch.tensor([float(rank)], requires_grad=True)
    differentiable.all_reduce(x, op=dist.ReduceOp.MAX).sum().backward()
    return x.grad.tolist()


if __name__ == "__main__":
    found = on_processes(2, gradient)
    print("torch", torch.__version__, "ranks have 0 and 1; the gradient of their maximum:", found)
    sys.exit(found == [[0.0], [1.0]])
PYTHON
"$dir/venv/bin/python" "$dir/found.py"
