#!/usr/bin/env bash
# Expected: torch.func.vmap of a functional collective is the collective of each batched value, or raises, as for
# operators without a batching rule. Found (torch 2.13.0): it returns what the rank itself had, unreduced, without an error.
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

def batched(rank):
    x = torch.ones(3, 2)
    total = lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) * 1
    return [torch.vmap(total)(x).tolist(), torch.as_tensor(total(x)).tolist()]


if __name__ == "__main__":
    by_vmap, plain = on_processes(2, batched)[0]
    print("torch", torch.__version__, "sums over two ranks of ones, by vmap:", by_vmap, "plain:", plain)
    sys.exit((by_vmap, plain) != ([[1.0, 1.0]] * 3, [[2.0, 2.0]] * 3))
PYTHON
"$dir/venv/bin/python" "$dir/found.py"
