"""A rank of `benchmarks/overlap.py`: times every variant in rounds and prints JSON on rank 0."""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.overlap_variants import COMPUTE, OPERATIONS, Setting, Variant, exchange
from benchmarks.quiet import Mark, slowest, time_left
from shardmap_torch.kernels import calibrate
from shardmap_torch.kernels.transports.gloo import GlooTransport
from shardmap_torch.kernels.transports.protocol import run

Round: TypeAlias = dict[str, Any]


def timed(transport: GlooTransport, variant: Variant) -> float:
    """Seconds on this rank, both ranks starting together."""
    dist.barrier()
    begin = time.perf_counter()
    run(variant.kernel(transport))
    return time.perf_counter() - begin


def one_round(transport: GlooTransport, variants: Mapping[str, Variant]) -> Round:
    """Every variant of one operation once, and the plain matmul once more at the end."""
    begin = Mark.now()
    plain = next(name for name, variant in variants.items() if variant.role == COMPUTE)
    seconds = slowest({name: timed(transport, variant) for name, variant in variants.items()})
    again = slowest({plain: timed(transport, variants[plain])})[plain]
    drift = abs(again - seconds[plain]) / min(again, seconds[plain])
    seconds[plain] = (seconds[plain] + again) / 2
    return {"seconds": seconds, "others": begin.others(), "drift": drift}


def undisturbed(result: Round, args: argparse.Namespace) -> bool:
    """Returns whether nobody else used the cores, and their speed stayed the same."""
    return bool(result["others"] <= args.max_load and result["drift"] <= args.max_drift)


def measure(
    transport: GlooTransport, setting: Setting, args: argparse.Namespace
) -> tuple[dict[str, list[Round]], dict[str, int]]:
    """The undisturbed rounds of every operation, and how many were rejected."""
    tables = {op: build(setting) for op, build in OPERATIONS.items()}
    kept: dict[str, list[Round]] = {op: [] for op in tables}
    rejected = dict.fromkeys(tables, 0)
    for variants in tables.values():
        one_round(transport, variants)  # Warm-up: buffers, connections, matmul primitives.
    deadline = time.time() + args.seconds
    while (todo := [op for op in tables if len(kept[op]) < args.rounds]) and time_left(deadline):
        for op in todo:
            result = one_round(transport, tables[op])
            if undisturbed(result, args):
                kept[op].append(result)
            else:
                rejected[op] += 1
    return kept, rejected


def link_and_matmul(transport: GlooTransport, setting: Setting) -> dict[str, float]:
    """Measures for the virtual clock: latency, and a chunk's matmul beside the global one."""
    word = torch.zeros(1)

    def ping() -> None:
        run(exchange_steps(transport, word))

    x, w = (
        setting.tensor(setting.rows, setting.inner),
        setting.tensor(setting.inner, setting.columns),
    )
    rows = setting.rows // (2 * setting.parts)
    return {
        "latency": median_seconds(ping),
        "whole": median_seconds(lambda: x @ w),
        "chunk": median_seconds(lambda: x[:rows] @ w),
    }


def exchange_steps(transport: GlooTransport, word: Tensor) -> Any:
    yield from exchange(transport, word, torch.zeros(1))


def median_seconds(action: Any, repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        action()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--setting", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--max-load", type=float, required=True)
    parser.add_argument("--max-drift", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{args.store}",
        rank=args.rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    transport = GlooTransport(dist.new_group(), "tp")
    setting = Setting(**json.loads(args.setting))
    kept, rejected = measure(transport, setting, args)
    speeds = slowest(link_and_matmul(transport, setting))
    fabric = asdict(calibrate.measure(transport, torch.float32))
    if args.rank == 0:
        print(
            json.dumps({"rounds": kept, "rejected": rejected, "speeds": speeds, "fabric": fabric})
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
