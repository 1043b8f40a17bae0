"""The program on each host: steps over dp x tp with "tp" inside a host, each of them checked.

It writes one line of JSON a step, and one of the error that ends it.
"""

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from shardmap_torch import I, P, ShardMapError, all_reduce, make_mesh, shard_map


def say(**told: object) -> None:
    """Writes a line in one piece: torch warns on other threads, at times without its end."""
    line = json.dumps({"rank": int(os.environ["RANK"]), "at": time.time(), **told})
    os.write(sys.stdout.fileno(), f"\n{line}\n".encode())


def main(hosts: int, timeout: float, width: int) -> None:
    """Steps until an error ends it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = make_mesh((hosts, dist.get_world_size() // hosts), ("dp", "tp"), timeout=timeout)

    def body(x: torch.Tensor) -> torch.Tensor:
        inside = all_reduce(x.sum(1), "tp", dst=I)
        return all_reduce(inside.sum(0), "dp", dst=I)

    step = shard_map(body, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P())
    x = torch.arange(8.0)[:, None, None] + torch.ones(8, 8, width)
    for number in range(10**6):
        total = step(x + number)
        say(step=number, right=torch.equal(total, (x + number).sum((0, 1))))
        time.sleep(0.02)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
    except ShardMapError as error:
        say(error=type(error).__name__, text=str(error))
    except Exception as error:
        say(error=f"raw {type(error).__name__}", text=str(error))
    os._exit(0)
