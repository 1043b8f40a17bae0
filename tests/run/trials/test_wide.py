"""check="global" by numbers: operators for which torch has no kernel in the dtype of trials."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    explain,
    make_mesh,
    shard_map,
    shift,
)
from shardmap_torch.run.trials.operators import WIDE

MESH: Final = make_mesh((2,), ("tp",), kind="simulated")
X: Final = torch.randn(6, 32, requires_grad=True)
W: Final = torch.randn(2, 32, 16, requires_grad=True)
ENDS: Final = torch.tensor([2, 6], dtype=torch.int32)

Change = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("shapes", [((8, 8), (2, 8, 4)), ((2, 4, 8), (8, 8)), ((4, 8), (8, 8))])
@pytest.mark.parametrize("ends", [[4, 8], [0, 8], [8, 8]])
def test_grouped_products_in_64_bits_are_those_of_torch(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], ends: list[int]
) -> None:
    x, w = (torch.randn(shape) for shape in shapes)
    offsets = torch.tensor(ends, dtype=torch.int32)
    found = WIDE["_grouped_mm"](x.double(), w.double(), offsets)
    torch.testing.assert_close(
        found, torch._grouped_mm(x, w, offs=offsets).double(), atol=1e-5, rtol=1e-5
    )


def experts(
    ends: Change = lambda x: x, end: Change = lambda y: all_reduce(y, "tp", dst=I)
) -> Callable[..., Tensor]:
    """Rows of experts times this rank's features; rows that went around keep layouts from it."""

    def body(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
        x = shift(shift(x, "tp", 1), "tp", -1)
        return end(torch._grouped_mm(x, w, offs=ends(offsets)))

    specs = P(None, "tp"), P(None, "tp"), P()
    return shard_map(body, mesh=MESH, in_specs=specs, out_specs=P(), check="global")


def test_a_program_with_grouped_products_is_tried_with_its_gradients() -> None:
    f = experts()
    assert explain(f, X, W, ENDS).one_device == "tried"
    torch.testing.assert_close(f(X, W, ENDS), torch._grouped_mm(X, W, offs=ENDS))


def rank_last(ends: Tensor) -> Tensor:
    own = torch.arange(2, dtype=torch.int32) == axis_index("tp") - 1
    return torch.where(own, ends - 1, ends)


WRONG: Final[dict[str, tuple[Change, Change]]] = {
    "a rank's own offsets": (rank_last, lambda y: all_reduce(y, "tp", dst=I)),
    "the offsets of ranks": (
        lambda ends: ends if axis_size("tp") == 1 else ends.flip(0),
        lambda y: all_reduce(y, "tp", dst=I),
    ),
    "the mean": (lambda ends: ends, lambda y: all_reduce(y, "tp", op="mean", dst=I)),
    "squares before the sum": (
        lambda ends: ends,
        lambda y: all_reduce(y.square(), "tp", dst=I),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_groups_and_sums_are_refused(name: str) -> None:
    with pytest.raises(ShardTypeError, match="ried with numbers over 'tp'"):
        check_program(experts(*WRONG[name]), X, W, ENDS)
