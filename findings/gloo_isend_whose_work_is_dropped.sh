#!/usr/bin/env bash
# Expected: what dist.isend has begun arrives, whether or not its result is kept, as it does for a collective with
# async_op=True: the tensor lives, and so do both processes. Found (torch 2.13.0, gloo): once the Work that isend has
# returned is collected, a large message that the other rank has not asked for yet is given up without an error on the
# sender; the other rank waits until the group's timeout. So an exception between isend and wait() stops other ranks.
set -euo pipefail
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.13.0 numpy
cat > "$dir/found.py" <<'PYTHON'
import multiprocessing
import shutil
import sys
import tempfile
import time
from datetime import timedelta

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
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=number,
        timeout=timedelta(seconds=5),
    )
    queue.put((rank, function(rank)))


def sent(rank):
    x = torch.full((2**20,), float(rank))
    dist.barrier()
    if rank == 1:
        dist.isend(x, 0)  # x lives until the end, what is returned does not
        time.sleep(10)
        return "sent"
    time.sleep(1)
    try:
        dist.recv(x, 1)
    except RuntimeError as error:
        return f"{error}"
    return x.tolist()[:2]


def kept(rank):
    x = torch.full((2**20,), float(rank))
    dist.barrier()
    if rank == 1:
        work = dist.isend(x, 0)
        time.sleep(3)
        work.wait()
        return "sent"
    time.sleep(1)
    dist.recv(x, 1)
    return x.tolist()[:2]


if __name__ == "__main__":
    print("torch", torch.__version__, "gloo, 4 MiB from rank 1 to rank 0, which receives a second later")
    with_handle, without = (on_processes(2, each)[0] for each in (kept, sent))
    print("the result of isend is kept:   ", with_handle)
    print("the result of isend is dropped:", without)
    sys.exit(with_handle != [1.0, 1.0] or "Timed out" not in without)
PYTHON
"$dir/venv/bin/python" "$dir/found.py"
