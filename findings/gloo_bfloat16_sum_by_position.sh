#!/usr/bin/env bash
# Expected: equal columns on all ranks have equal sums, and all_reduce of bfloat16 adds as torch.sum does, which rounds
# once. Found (torch 2.13.0, gloo): the sum depends on the position in the tensor. Each hop of the ring rounds to
# bfloat16, and each part of the tensor begins at another rank: 256 + 1 + 1 + 1 is 256 for some entries, more for others.
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


def total(rank):
    x = torch.full((8,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    dist.all_reduce(x)
    return x.tolist()


if __name__ == "__main__":
    found = on_processes(4, total)[0]
    one = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16).sum().item()
    print("torch", torch.__version__, "gloo, ranks have 256, 1, 1, 1 in each of 8 equal columns")
    print("all_reduce:", found, "torch.sum:", one)
    sys.exit(len(set(found)) == 1)
PYTHON
"$dir/venv/bin/python" "$dir/found.py"
