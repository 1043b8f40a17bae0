"""Stand-ins of the operators of symmetric memory."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardmap_torch.kernels import (
    all_gather_matmul,
    matmul_reduce_scatter,
)
from tests.kernels.support.calls import normal


def gather_of(dim: int) -> tuple[Callable[..., Any], list[Tensor]]:
    def call(x: Tensor, w: Tensor, v: Tensor, b: Tensor, overlap: Any) -> tuple[Tensor, ...]:
        return all_gather_matmul(x, (w, v), "tp", dim=dim, bias=(b, None), overlap=overlap)

    return call, [normal(1, 4, 6, 3), normal(2, 3, 5), normal(3, 3, 2), normal(4, 5)]


def scatter_of(dim: int) -> tuple[Callable[..., Any], list[Tensor]]:
    def call(x: Tensor, w: Tensor, overlap: Any) -> tuple[Tensor, ...]:
        return (matmul_reduce_scatter(x, w, "tp", dim=dim, overlap=overlap),)

    return call, [normal(1, 12, 6, 3), normal(2, 3, 5)]
