#!/usr/bin/env bash
# Expected: dist.all_reduce of a view that is not dense, as a column of a matrix, sums that column, or is refused as
# other backends do. Found (torch 2.13.0, gloo): no error; it sums as many entries as the view has, from where the view
# begins, in the order of memory: neighbours of the column change, and most of the column does not.
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


def column(rank):
    x = torch.ones(3, 3)
    dist.all_reduce(x[:, 0])
    return x.tolist()


if __name__ == "__main__":
    found = on_processes(2, column)[0]
    print("torch", torch.__version__, "gloo, ones(3, 3) on two ranks, the first column is summed")
    print("found:", found)
    right = [[2.0, 1.0, 1.0]] * 3
    sys.exit(found == right)
PYTHON
"$dir/venv/bin/python" "$dir/found.py"
