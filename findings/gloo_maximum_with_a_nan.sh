#!/usr/bin/env bash
# Expected: a maximum over the ranks of a value that is NaN on one of them is NaN, as torch.amax gives; or at least
# the maximum of the others. Found (torch 2.13.0, gloo): neither. What has arrived is replaced by one comparison, which
# is false for a NaN: by position in the tensor, all_reduce(MAX) gives NaN, or a finite number that is not the largest.
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


def largest(rank):
    x = torch.full((8,), float(rank))
    if rank == 2:
        x[:] = torch.nan
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x.tolist()


if __name__ == "__main__":
    found = on_processes(4, largest)
    print("torch", torch.__version__, "gloo, ranks have 0, 1, NaN, 3")
    print("all_reduce(MAX):", found[0])
    # Neither NaN everywhere, nor 3 everywhere.
    sys.exit(all(x != x for x in found[0]) or found[0] == [3.0] * 8)
PYTHON
"$dir/venv/bin/python" "$dir/found.py"
