"""Regions that keep what they promise, and others like them that do not."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardmap_torch import P, axis_index, axis_size, local_region, shift

Region = Callable[..., Any]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


TOKENS = torch.tensor([[3, 0], [11, 5], [8, 7], [3, 3], [1, 10], [6, 2]])
TABLE = random(12, 3)


def lookup(offset: bool = True, mask: bool = True) -> Region:
    """A vocabulary-parallel lookup, with a part left out."""

    @local_region(in_types=(P("tp"), P()), out_types=P(partial={"tp"}))
    def rows(table: Tensor, ids: Tensor) -> Tensor:
        local = ids - axis_index("tp") * table.shape[0] if offset else ids
        owned = (local >= 0) & (local < table.shape[0])
        found = table[local.clamp(0, table.shape[0] - 1)]
        return found * owned.unsqueeze(-1) if mask else found

    return rows


class Weigh(torch.autograd.Function):
    """Position times value, whose backward forgets where this rank's positions start."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor) -> Tensor:
        return x * (torch.arange(x.shape[0]) + start)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * torch.arange(grad.shape[0]), None


@local_region(in_types=(P("cp"),), out_types=P("cp"))
def weigh(x: Tensor) -> Tensor:  # every position by its number, the backward by 1
    start = axis_index("cp") * x.shape[0]
    y: Tensor = Weigh.apply(x, start)  # type: ignore[no-untyped-call]
    return y


def ring(direction: int) -> Region:
    """A product of all rows, which go round the ring, with the columns of a rank."""

    def rows_by_columns(x: Tensor, w: Tensor) -> Tensor:
        num_ranks, num_rows = axis_size("tp"), x.shape[0]
        out = x.new_zeros(num_ranks * num_rows, w.shape[1])
        for step in range(num_ranks):
            owner = (axis_index("tp") + direction * step) % num_ranks
            out = out.index_copy(0, owner * num_rows + torch.arange(num_rows), x @ w)
            x = shift(x, "tp", 1)
        return out

    return local_region(rows_by_columns, in_types=(P("tp"), P(None, "tp")), out_types=P(None, "tp"))
