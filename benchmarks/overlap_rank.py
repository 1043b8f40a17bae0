"""A rank of `benchmarks/overlap.py`: times every variant in rounds and prints JSON on rank 0."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.overlap_variants import COMPUTE, OPERATIONS, Setting, Variant, exchange
from benchmarks.quiet import Limits, Mark, joined, slowest, time_left
from shardmap_torch.kernels import endpoint
from shardmap_torch.kernels.transport import GlooTransport, run

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


def measure(
    transport: GlooTransport, setting: Setting, limits: Limits
) -> tuple[dict[str, list[Round]], dict[str, int]]:
    """The undisturbed rounds of every operation, and how many were rejected."""
    tables = {op: build(setting) for op, build in OPERATIONS.items()}
    kept: dict[str, list[Round]] = {op: [] for op in tables}
    rejected = dict.fromkeys(tables, 0)
    for variants in tables.values():
        one_round(transport, variants)  # Warm-up: buffers, connections, matmul primitives.
    deadline = time.time() + limits.seconds
    while (todo := [op for op in tables if len(kept[op]) < limits.rounds]) and time_left(deadline):
        for op in todo:
            result = one_round(transport, tables[op])
            if limits.admit(result["others"], result["drift"]):
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
    torch.manual_seed(0)
    with joined() as (rank, options):
        transport = GlooTransport(dist.new_group(), "tp")
        setting = Setting(**options["setting"])
        kept, rejected = measure(transport, setting, Limits.of(options))
        speeds = slowest(link_and_matmul(transport, setting))
        fabric = asdict(endpoint.measure(transport, torch.float32))
        result = {"rounds": kept, "rejected": rejected, "speeds": speeds, "fabric": fabric}
        if rank == 0:
            print(json.dumps(result))


if __name__ == "__main__":
    main()
