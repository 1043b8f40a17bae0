"""Typed calls of the kernels that several tests share."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShapeDtype,
    convert,
    make_mesh,
    shard_map,
    trace,
)
from shardmap_torch.checker.ir.program import Equation
from shardmap_torch.kernels import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

ABSTRACT = make_mesh((2, 4), ("dp", "tp"), kind="abstract")
Body = Callable[..., Any]
Forget = Callable[[], None]


def float32(*shape: int, requires_grad: bool = True) -> ShapeDtype:
    return ShapeDtype(shape, requires_grad=requires_grad)


def held_in(
    body: Body, in_specs: Any, out_specs: Any, *args: Any, **options: Any
) -> list[Equation]:
    mapped = shard_map(body, mesh=ABSTRACT, in_specs=in_specs, out_specs=out_specs, **options)
    return [equation for equation in trace(mapped, *args).equations if equation.compared]


def told(equation: Equation) -> list[str]:
    return [f"{'back: ' if each.backward else ''}{each.collective}" for each in equation.compared]


GATHER, SCATTER = "all_gather('tp', V -> R)", "reduce_scatter('tp', Partial -> V)"
SUM = "all_reduce('tp', Partial -> R)"
COLUMN = (P("dp", "tp"), P(None, "tp")), P("dp", None, "tp")
ROW = (P("dp", None, "tp"), P("tp")), P("dp", "tp")
WHOLE = (P("dp", None, "tp"), P("tp")), P("dp")
SHAPES = float32(4, 8, 16), float32(16, 32)


def column(**options: Any) -> Body:
    return lambda x, w: all_gather_matmul(x, w, "tp", dim=1, **options)


def row(x: Tensor, w: Tensor) -> Tensor:
    return matmul_reduce_scatter(x, w, "tp", dim=1)


def reduced(dst: Any, **options: Any) -> Body:
    def body(x: Tensor, w: Tensor) -> Tensor:
        y = matmul_all_reduce(x, w, "tp", dst=dst, **options)
        return y if dst is I else convert(y, "tp", src=R, dst=I)

    return body
