#!/usr/bin/env bash
# Expected: a functional collective (torch.distributed._functional_collectives) under forward-mode AD has the tangent's
# sum as its tangent, or raises, as operators without a forward derivative do. Found (torch 2.13.0): torch.func.jvp
# through all_reduce returns a tangent of zeros, without an error.
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
import torch.distributed._functional_collectives as functional


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


def tangent(rank):
    x = torch.ones(2)
    total = lambda x: functional.all_reduce(x, "sum", dist.group.WORLD)
    value, moved = torch.func.jvp(total, (x,), (torch.ones(2),))
    return [torch.as_tensor(value * 1).tolist(), torch.as_tensor(moved * 1).tolist()]


if __name__ == "__main__":
    found = on_processes(2, tangent)
    print("torch", torch.__version__, "value and tangent of a sum over two ranks:", found[0])
    sys.exit(found[0] != [[2.0, 2.0], [0.0, 0.0]])
PYTHON
"$dir/venv/bin/python" "$dir/found.py"
