"""check={"tp": "global", "dp": "local"}: the program is compared over some axes."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    SpecError,
    all_gather,
    all_reduce,
    axis_index,
    make_mesh,
    ppermute,
    shard_map,
)
from tests.support.golden import told

Body = Callable[[Tensor, Tensor, Tensor], Tensor]
X: Final = torch.randn(4, 8, dtype=torch.float64)
W: Final = torch.randn(8, 6, dtype=torch.float64)
B: Final = torch.randn(6, dtype=torch.float64)
RING: Final = [(0, 1), (1, 0)]
SPECS: Final[Any] = {"in_specs": (P("dp", "tp"), P("tp"), P()), "out_specs": P("dp")}


def product(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(x @ w, "tp", dst=I)


def ring(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Goes around over dp, where one device has one step and nobody to send to."""
    return product(x, w) + ppermute(product(x, w), "dp", RING) + b


def by_rank(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (product(x, w) + b) * (axis_index("dp") + 1)


def over_both(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return product(x, w) - all_reduce((x @ w).sum(), ("dp", "tp"), dst=R)


def gathered(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    rows = all_gather(x, "dp", dim=0, dst=R)
    return product(x, w) * all_reduce((rows @ w).sum(), "tp", dst=R)


def differentiated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return ring(x, w, b).square().sum()

    gradient: Tensor = torch.func.grad(loss)(x)
    return all_reduce((x * gradient).sum(1, keepdim=True), "tp", dst=I)


RIGHT: Final[list[Body]] = [ring, by_rank, over_both, gathered, differentiated]

WRONG: Final[list[Body]] = [
    lambda x, w, b: all_reduce(x @ w + b, "tp", dst=I),
    lambda x, w, b: product(x.softmax(1), w),
    lambda x, w, b: product(x, w) * (axis_index("tp") + 1).sum(),
    lambda x, w, b: product(x / x.shape[1], w),
    lambda x, w, b: product(x, w) + all_reduce(x.sum() + b.sum(), ("dp", "tp"), dst=R),
    lambda x, w, b: product(ppermute(x, "tp", RING), w),
]
"""Programs that are others over tp."""


def run(body: Body, tp: int, check: Any, **specs: Any) -> Tensor:
    mesh = make_mesh((2, tp), ("dp", "tp"), kind="simulated")
    found: Tensor = shard_map(body, mesh=mesh, check=check, **{**SPECS, **specs})(X, W, B)
    return found


@pytest.mark.parametrize("body", RIGHT)
def test_a_program_that_is_accepted_over_tp_gives_what_one_rank_of_tp_gives(body: Body) -> None:
    torch.testing.assert_close(run(body, 2, {"tp": "global", "dp": "local"}), run(body, 1, True))


@pytest.mark.usefixtures("repairs")
@pytest.mark.parametrize("body", WRONG)
def test_a_program_that_differs_over_tp_is_refused(body: Body) -> None:
    with told(ShardTypeError):
        run(body, 2, {"tp": "global"})


def test_an_error_of_one_device_is_told_where_nothing_is_returned() -> None:
    def body(x: Tensor, w: Tensor, b: Tensor) -> None:
        y = product(x, w)
        if len(w) == len(W):
            y.numpy()

    with told(ShardTypeError):
        run(body, 2, {"tp": "global"}, out_specs=None)  # type: ignore[arg-type]


def test_over_an_axis_that_is_local_only_types_are_required() -> None:
    with pytest.raises(ShardTypeError, match="check='global'"):
        run(ring, 2, {"tp": "global", "dp": "global"})
    torch.testing.assert_close(run(ring, 2, {"dp": "local"}), run(ring, 1, True))


def test_local_axes_come_first_in_a_dim_that_several_shard() -> None:
    specs = {"in_specs": (P(None, ("tp", "dp")), P(("tp", "dp")), P()), "out_specs": P()}
    with told(SpecError):
        run(lambda x, w, b: all_reduce(x @ w, ("dp", "tp"), dst=I), 2, {"tp": "global"}, **specs)


@pytest.mark.parametrize("check", [{"tp": "strict"}, {1: "local"}, {"tp": True}, "pp", 3, [1]])
def test_another_check_is_no_strictness(check: Any) -> None:
    with told(SpecError):
        run(ring, 2, check)


def test_an_axis_that_the_mesh_lacks_cannot_be_checked() -> None:
    with told(SpecError):
        run(ring, 2, {"pp": "global"})
