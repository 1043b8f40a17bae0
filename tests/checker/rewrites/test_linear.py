"""A Linear with a bias of rows that lie apart in memory, on several devices and on one."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    P,
    ShardTypeError,
    axis_index,
    check_program,
    explain,
    make_mesh,
    shard_map,
)

MESH: Final = make_mesh((2,), ("dp",), kind="simulated")
Body = Callable[[Tensor, Tensor, Tensor], Tensor]

W: Final = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
B: Final = torch.randn(8, dtype=torch.float64, requires_grad=True)

APART: Final[dict[str, Body]] = {
    "a slice": lambda x, w, b: functional.linear(x[:, 2:], w, b),
    "every second one": lambda x, w, b: functional.linear(x[:, ::2], w, b),
    "four dims, by names": lambda x, w, b: functional.linear(
        input=x.unflatten(1, (3, 2))[:, 1:], weight=w, bias=b
    ),
    "one row, repeated": lambda x, w, b: functional.linear(x[:, :1].expand(-1, 4, -1), w, b),
    "a dim in front": lambda x, w, b: functional.linear(x.transpose(0, 1), w, b).transpose(0, 1),
    "a layer's": lambda x, w, b: functional.linear(functional.linear(x, w, b)[:, 2:], w, b).sin(),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("rows", [2, 4])
def test_a_linear_of_rows_that_lie_apart_is_proven_for_one_row_a_rank_too(
    name: str, rows: int
) -> None:
    x = torch.randn(rows, 6, 8, dtype=torch.float64, requires_grad=True)
    specs = P("dp"), P(), P()
    f = shard_map(APART[name], mesh=MESH, in_specs=specs, out_specs=P("dp"), check="global")
    assert explain(f, x, W, B).one_device == "proven"
    found, expected = (call(x, W, B) for call in (f, APART[name]))
    torch.testing.assert_close(found, expected)
    for mine, other in zip(
        torch.autograd.grad(found.sin().sum(), (x, W, B)),
        torch.autograd.grad(expected.sin().sum(), (x, W, B)),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_a_linear_of_a_ranks_own_slice_is_refused() -> None:
    def body(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return functional.linear(x[:, 2:], w, b * (1 + axis_index("dp")))

    specs = P("dp"), P(), P()
    f = shard_map(body, mesh=MESH, in_specs=specs, out_specs=P("dp"), check="global")
    with pytest.raises(ShardTypeError, match="check='global'"):
        check_program(f, torch.randn(2, 6, 8, dtype=torch.float64), W, B)
