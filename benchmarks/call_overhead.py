"""Cost of a call of a shard_mapped function, beside torch's `local_map`.

    .venv/bin/python benchmarks/call_overhead.py

The identity of two DTensors of 8 numbers, on a process-group mesh of one gloo rank: no data moves,
so what is left is the way in and out. The target is to be faster than `local_map` of the same
identity, checked (the default; the checker has seen the signature before) and with check=False.
Then what a later call pays for having been checked: by the number of its leaves (the target is
10 us and 1 us a leaf), for a body that refers to a module of 20 layers or of 3,000 (the target is
1 ms), and for one that makes 100 conversions, each of which is compared with the checked program
(0.35 us each). Medians of interleaved rounds.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import local_map

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from benchmarks.timing import compare, show, verdict
from shardmap_torch import I, Mesh, P, R, convert, device_put, make_mesh, shard_map

ROUNDS, CALLS = 200, 50
LEAVES = (1, 8, 64)


def identity(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, y


def identities(mesh: Mesh, x: DTensor) -> dict[str, Callable[..., object]]:
    rows = [Shard(0)]
    mapped = partial(shard_map, identity, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
    return {
        "local_map": local_map(identity, (rows, rows), (rows, rows), device_mesh=x.device_mesh),
        "shard_map, checked": mapped(),
        "shard_map, unchecked": mapped(check=False),
    }


def call_rows(mesh: Mesh, requires_grad: bool) -> list[tuple[str, ...]]:
    """The three identities, of inputs that need no gradient or that do."""
    x = device_put(torch.ones(8), mesh, P("tp")).requires_grad_(requires_grad)
    y = device_put(torch.ones(8), mesh, P("tp")).requires_grad_(requires_grad)
    assert isinstance(x, DTensor)
    calls = {name: partial(each, x, y) for name, each in identities(mesh, x).items()}
    taken = compare(calls, ROUNDS, CALLS)
    kind = "with gradients" if requires_grad else "identity"
    rows: list[tuple[str, ...]] = []
    for name, each in taken.items():
        ratio = each / taken["local_map"]
        target = "" if name == "local_map" else verdict(ratio, 1.0)
        rows.append((kind, name, f"{each * 1e6:.1f} us", f"{ratio:.2f}x", target))
    return rows


def first(leaves: Sequence[Tensor]) -> Tensor:
    return leaves[0]


def referring_to(count: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """A body that refers to a module of so many layers, which each call compares."""
    layers = nn.Sequential(*[nn.Linear(1, 1) for _ in range(count)]).requires_grad_(False)
    return lambda xs: xs[0] if layers.training else xs[0] * 2


def converting(xs: Sequence[Tensor]) -> Tensor:
    x = xs[0]
    for _ in range(50):
        x = convert(x, "tp", src=I, dst=R)
        x = convert(x, "tp", src=R, dst=I)
    return x


def checking_rows(mesh: Mesh) -> list[tuple[str, ...]]:
    """Measures the process time that a later call pays for having been checked."""
    sharded, equal = P("tp"), P(invariant="tp")
    x = device_put(torch.ones(8), mesh, sharded).requires_grad_()
    cases: list[tuple[str, Callable[..., Any], P, list[Tensor], float | None]] = [
        (f"{count} leaves", first, sharded, [x] * count, 10.0 + count) for count in LEAVES
    ]
    cases.append(("refers to 20 layers", referring_to(20), sharded, [x], None))
    cases.append(("refers to 3,000 layers", referring_to(3_000), sharded, [x], 1_000.0))
    cases.append(("100 conversions", converting, equal, [torch.ones(8)], 11 + 0.35 * 100))
    rows: list[tuple[str, ...]] = []
    for name, body, spec, xs, target in cases:
        make = partial(shard_map, body, mesh=mesh, in_specs=spec, out_specs=spec)
        calls = {str(check): partial(make(check=check), xs) for check in (False, True)}
        number = max(1, CALLS // len(xs))
        taken = compare(calls, ROUNDS, number, time.process_time)
        more = (taken["True"] - taken["False"]) * 1e6
        told = "" if target is None else f"{target:g} us: {'met' if more <= target else 'missed'}"
        rows.append((name, f"{taken['False'] * 1e6:.1f} us", f"{more:+.1f} us", told))
    return rows


def main() -> None:
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        mesh = make_mesh((1,), ("tp",), kind="process_group")
        rows = call_rows(mesh, False) + call_rows(mesh, True)
        checking = checking_rows(mesh)
        dist.destroy_process_group()
    show("A call on one gloo rank", ("", "", "median", "of the first", "target"), rows)
    show("What having been checked adds", ("", "unchecked", "added", "target"), checking)


if __name__ == "__main__":
    main()
