"""A rank of `benchmarks/overlap_auto.py`: times `auto` beside the composition, case by case."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.quiet import Limits, Mark, joined, slowest, time_left
from shardmap_torch import R, all_gather, all_reduce, make_mesh, reduce_scatter
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.collectives.scope import Scope, enter_scope
from shardmap_torch.kernels import (
    all_gather_matmul,
    last_plan,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

Layer: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Action: TypeAlias = Callable[[], object]

PIECE_SECONDS = 0.01  # What is timed at once, so that neither clock nor barrier counts.

# Whether the layer is a column layer, which mirrors the others; the composition; the operation.
LAYERS: dict[str, tuple[bool, Layer, Layer]] = {
    "all_gather_matmul": (
        True,
        lambda x, w: all_gather(x, "tp", dst=R) @ w,
        lambda x, w: all_gather_matmul(x, w, "tp"),
    ),
    "matmul_reduce_scatter": (
        False,
        lambda x, w: reduce_scatter(x @ w, "tp"),
        lambda x, w: matmul_reduce_scatter(x, w, "tp"),
    ),
    "matmul_all_reduce": (
        False,
        lambda x, w: all_reduce(x @ w, "tp", dst=R),
        lambda x, w: matmul_all_reduce(x, w, "tp", dst=R),
    ),
}


def operands(column: bool, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    rows, inner, columns = shape
    if column:
        return torch.randn(rows, inner), torch.randn(inner, columns)
    return torch.randn(rows * dist.get_world_size(), columns), torch.randn(columns, inner)


def cases(shapes: dict[str, Any]) -> Iterator[tuple[str, dict[str, Action]]]:
    """Name, and what is timed: the composition, `auto`, the composition again."""
    for op, (column, *layers) in LAYERS.items():
        for name, shape in shapes.items():
            x, w = operands(column, shape)
            for training in (False, True):
                title = f"{op}, {name}" + (", with gradients" if training else "")
                composition, auto = (action(layer, x, w, training) for layer in layers)
                control = composition
                yield title, {"composition": composition, "auto": auto, "control": control}


def action(layer: Layer, x: Tensor, w: Tensor, training: bool) -> Action:
    if not training:
        return lambda: layer(x, w)
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()

    def forward_and_backward() -> None:
        y = layer(x, w)
        torch.autograd.grad(y, (x, w), torch.ones_like(y))

    return forward_and_backward


def timed(run: Action, calls: int) -> tuple[float, float]:
    """Seconds of a call on this rank, and CPU seconds of it; all ranks start together."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        run()
    return (time.perf_counter() - begin) / calls, (time.process_time() - cpu) / calls


@dataclass(frozen=True)
class Round:
    """Seconds of a call by name, and CPU seconds; cores of others; change of the composition."""

    seconds: dict[str, float]
    cpu: dict[str, float]
    others: float
    drift: float


def one_round(actions: dict[str, Action], calls: int) -> Round:
    """Runs each there and back."""
    begin = Mark.now()
    there = {name: timed(run, calls) for name, run in actions.items()}
    back = {name: timed(actions[name], calls) for name in reversed(actions)}
    out, home = (slowest({name: wall for name, (wall, _) in way.items()}) for way in (there, back))
    first, second = out["composition"], home["composition"]
    return Round(
        seconds={name: (out[name] + home[name]) / 2 for name in out},
        cpu={name: (there[name][1] + back[name][1]) / 2 for name in there},
        others=begin.others(),
        drift=abs(first - second) / min(first, second),
    )


def measure(actions: dict[str, Action], limits: Limits) -> dict[str, Any]:
    """Returns undisturbed rounds, how many were rejected, and the plan that `auto` ran."""
    for run in actions.values():
        run()
    actions["auto"]()
    plan = last_plan()
    assert plan is not None
    once = max(slowest({name: timed(run, 1)[0] for name, run in actions.items()}).values())
    calls = max(1, round(PIECE_SECONDS / once))
    kept: list[dict[str, float]] = []
    cpu: list[dict[str, float]] = []
    deadline = time.time() + limits.seconds
    while len(kept) < limits.rounds and time_left(deadline):
        result = one_round(actions, calls)
        cpu.append(result.cpu)
        if limits.admit(result.others, result.drift):
            kept.append(result.seconds)
    ran = "composition" if plan.choice is None else str(plan.choice)
    return {"plan": ran, "rounds": kept, "cpu": cpu}


def main() -> None:
    with joined() as (rank, options):
        limits = Limits.of(options)
        backend = ProcessGroupBackend(make_mesh((2,), ("tp",)))
        with enter_scope(Scope(backend, frozenset(("tp",)))):
            timed_cases = cases(options["shapes"])
            results = [{"name": name, **measure(each, limits)} for name, each in timed_cases]
        if rank == 0:
            print(json.dumps(results))


if __name__ == "__main__":
    main()
