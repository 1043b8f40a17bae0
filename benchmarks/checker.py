"""Cost of checking a transformer: one block and 32 layers, on 8 and on 8192 ranks.

    .venv/bin/python benchmarks/checker.py

Processor time of the whole training step of examples/gpt, and of forward and backward of plain
layers over "dp" and "tp", of

* the floor: the layers on one rank's shapes, without collectives, under FakeTensorMode and a
  TorchDispatchMode that does nothing, which is what running a program without data costs before
  anything is checked;
* `check_program`, local and global, on abstract meshes, of a function that it has not seen (cold
  for the signature, in a warm process);
* where it is installed (`pip install spmd_types`), spmd_types' `typecheck`, local and global: see
  `benchmarks/checker_spmd_types.py`.

Rounds interleave all of a table's rows; figures are medians.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from benchmarks.timing import compare, show
from benchmarks.transformer import (
    LENGTH,
    SEQUENCES,
    SHAPES,
    SPECS,
    TP,
    WIDTH,
    Layer,
    Parallel,
    shard_of,
)
from examples.gpt import model
from examples.gpt.optim import make_optimizer
from examples.gpt.step import sharded_step
from shardmap_torch import (
    I,
    P,
    R,
    ShapeDtype,
    all_reduce,
    check_program,
    convert,
    make_mesh,
    shard_map,
)

MESHES = ((2, TP), (2048, TP))
ROUNDS = {1: 20, 32: 5}
STRICT: tuple[Literal["local", "global"], ...] = ("local", "global")


class Empty(TorchDispatchMode):
    """Sees every operation, and runs it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


def floor(depth: int) -> None:
    with FakeTensorMode(), Empty():
        layers = [
            {name: torch.empty(shard_of(name), requires_grad=True) for name in SHAPES}
            for _ in range(depth)
        ]
        Parallel().loss(layers, torch.empty(SEQUENCES, LENGTH, WIDTH)).backward()


# The gradients' sums over "dp" are inserted at the boundary.
OURS = Parallel(
    enter=lambda x: convert(x, "tp", src=I, dst=R),
    leave=lambda x: all_reduce(x, "tp", dst=I),
    finish=lambda x: all_reduce(x, "dp", dst=I),
)


def check(shape: tuple[int, int], depth: int, strict: Literal["local", "global"]) -> None:
    def loss(layers: Sequence[Layer], x: Tensor) -> Tensor:  # a new function has no verdicts
        return OURS.loss(layers, x)

    mesh = make_mesh(shape, ("dp", "tp"), kind="abstract")
    specs = ([dict(SPECS)] * depth, P("dp"))
    layer = {name: ShapeDtype(each, requires_grad=True) for name, each in SHAPES.items()}
    x = ShapeDtype((SEQUENCES * shape[0], LENGTH, WIDTH))
    checked = shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P(), check=strict)
    check_program(checked, [dict(layer) for _ in range(depth)], x)


@cache
def arguments_of_step(depth: int, sequences: int) -> tuple[Any, ...]:
    config = model.Config(layers=depth)
    params = model.init(config)
    batch = torch.zeros(sequences, config.length + 1, dtype=torch.int64)
    return params, make_optimizer(config, 100).init(params), batch


def check_step(shape: tuple[int, int], depth: int, strict: Literal["local", "global"]) -> None:
    config = model.Config(layers=depth)
    mesh = make_mesh(shape, ("dp", "tp"), kind="abstract")
    step = sharded_step(mesh, config, make_optimizer(config, 100), strict)
    check_program(step, *arguments_of_step(depth, 4 * shape[0]))


def theirs(depth: int) -> dict[str, Callable[[], object]]:
    if find_spec("spmd_types") is None:
        print("spmd_types is not installed: its rows are left out")
        return {}
    from benchmarks.checker_spmd_types import typechecks

    return typechecks(depth, MESHES, STRICT)


def checks(
    check: Callable[[tuple[int, int], int, Literal["local", "global"]], None], depth: int
) -> dict[str, Callable[[], object]]:
    return {
        f"{strict}, {shape[0] * shape[1]} ranks": partial(check, shape, depth, strict)
        for strict in STRICT
        for shape in MESHES
    }


def of_layers(depth: int) -> dict[str, Callable[[], object]]:
    return {"floor": partial(floor, depth), **checks(check, depth), **theirs(depth)}


def tabulate(
    title: str, calls_of: Callable[[int], Mapping[str, Callable[[], object]]], of: str
) -> None:
    rows = []
    for depth, rounds in ROUNDS.items():
        taken = compare(calls_of(depth), rounds, clock=time.process_time)
        first = next(iter(taken.values()))
        for name, each in taken.items():
            layers = f"{depth} layer{'s' * (depth > 1)}"
            rows.append((layers, name, f"{each * 1e3:.1f} ms", f"{each / first:.2f}x"))
    show(title, ("", "", "median", of), rows)


def main() -> None:
    torch.set_num_threads(1)
    tabulate("forward and backward, checked once", of_layers, "of the floor")
    title = "the training step of examples/gpt, checked once"
    tabulate(title, partial(checks, check_step), "of local, 8 ranks")


if __name__ == "__main__":
    main()
