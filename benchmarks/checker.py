"""What checking a transformer costs: one block and 32 layers, on 8 and on 8192 ranks.

    .venv/bin/python benchmarks/checker.py

`check_program` of forward and backward over "dp" and "tp", on abstract meshes, of a function that
it has not seen (cold for the signature, in a warm process). Beside it the floor: the same layers
on one rank's shapes, forward and backward, under FakeTensorMode and a TorchDispatchMode that does
nothing, which is what interpreting a program without data costs before anything is checked.
Rounds interleave all of a table's rows; figures are medians.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from benchmarks.timing import compare, show
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

WIDTH, HEADS, LENGTH, TP = 64, 8, 16, 4
HEAD = WIDTH // HEADS
SHAPES = {
    "norm_1": (WIDTH,),
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "norm_2": (WIDTH,),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
SPECS = {
    "norm_1": P(),
    "qkv": P(None, "tp"),
    "out": P("tp"),
    "norm_2": P(),
    "up": P(None, "tp"),
    "down": P("tp"),
}
MESHES = ((2, TP), (2048, TP))
ROUNDS = {1: 20, 32: 5}

Layers = Sequence[Mapping[str, Any]]


def attend(qkv: Tensor) -> Tensor:
    """[b, t, 3h] -> [b, t, h], causal, of the heads that this rank has."""
    q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in qkv.chunk(3, -1))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(1, 2).flatten(2)


def enter(x: Tensor) -> Tensor:
    return convert(x, "tp", src=I, dst=R)


def leave(x: Tensor) -> Tensor:
    return all_reduce(x, "tp", dst=I)


def nothing(x: Tensor) -> Tensor:
    return x


def transformer(
    layers: Layers,
    x: Tensor,
    enter: Callable[[Tensor], Tensor] = enter,
    leave: Callable[[Tensor], Tensor] = leave,
) -> Tensor:
    """The mean square of the last residual stream of this rank's sequences."""
    for layer in layers:
        h = enter(functional.layer_norm(x, [WIDTH], layer["norm_1"]))
        x = x + leave(attend(h @ layer["qkv"]) @ layer["out"])
        h = enter(functional.layer_norm(x, [WIDTH], layer["norm_2"]))
        x = x + leave(functional.gelu(h @ layer["up"]) @ layer["down"])
    return x.square().mean()


def loss(layers: Layers, x: Tensor) -> Tensor:
    return all_reduce(transformer(layers, x), "dp", dst=I, op="mean")


def check(shape: tuple[int, int], depth: int) -> None:
    mesh = make_mesh(shape, ("dp", "tp"), kind="abstract")
    specs = ([SPECS] * depth, P("dp"))
    layer = {name: ShapeDtype(each, requires_grad=True) for name, each in SHAPES.items()}
    x = ShapeDtype((2 * shape[0], LENGTH, WIDTH))
    # A new function has no verdicts.
    check_program(
        shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P()),
        [dict(layer) for _ in range(depth)],
        x,
    )


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


def shard_of(name: str) -> tuple[int, ...]:
    entries = (*SPECS[name].entries, None, None)
    cut = (TP if entry else 1 for entry in entries)
    return tuple(size // by for size, by in zip(SHAPES[name], cut, strict=False))


def floor(depth: int) -> None:
    with FakeTensorMode(), Empty():
        layers = [
            {name: torch.empty(shard_of(name), requires_grad=True) for name in SHAPES}
            for _ in range(depth)
        ]
        value = transformer(layers, torch.empty(2, LENGTH, WIDTH), nothing, nothing)
        torch.autograd.grad(value, [each for layer in layers for each in layer.values()])


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for depth, rounds in ROUNDS.items():
        calls = {"floor": partial(floor, depth)}
        calls |= {f"{dp * tp} ranks": partial(check, (dp, tp), depth) for dp, tp in MESHES}
        taken = compare(calls, rounds)
        for name, each in taken.items():
            layers = f"{depth} layer{'s' * (depth > 1)}"
            ratio = f"{each / taken['floor']:.2f}x"
            rows.append((layers, name, f"{each * 1e3:.1f} ms", ratio))
    title = "check_program, forward and backward, cold signature"
    show(title, ("", "", "median", "of the floor"), rows)


if __name__ == "__main__":
    main()
