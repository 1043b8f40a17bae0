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

ADDED_TWICE: Final = (
    "add is not what it is on one device: over 'tp' an operand is a pending sum: an addend that is "
    "equal on all ranks would be counted once per rank.",
    "Fix: take the sum first, with all_reduce(x.sum(), 'tp', dst=I), or dst=R if ranks go on with "
    "it on their own shards, and add this to it.",
)
WRONG: Final[list[tuple[Body, tuple[str, str]]]] = [
    (
        lambda x, w, b: all_reduce(x @ w + b, "tp", dst=I),
        (
            ADDED_TWICE[0],
            "Tried, and accepted also by check='global': convert(b, 'tp', src=R, dst=Partial) in "
            "place of b in add at test_axes.py:72",
        ),
    ),
    (
        lambda x, w, b: product(x.softmax(1), w),
        (
            "softmax is not what it is on one device: on sharded operands it does not give shards "
            "of the result.",
            "Fix: gather dim 1 over 'tp' first, or wrap per-rank code in local_region.",
        ),
    ),
    (
        lambda x, w, b: product(x, w) * (axis_index("tp") + 1).sum(),
        (
            "sum is not what it is on one device: over 'tp' every rank has a value of its own, "
            "from add at ",
            "Fix: wrap code that is per-rank by nature in local_region(f, in_types, out_types).",
        ),
    ),
    (
        lambda x, w, b: product(x / x.shape[1], w),
        (
            "the result out is not what it is on one device: it is 2 times that value, because of "
            "div, whose argument other is 4 on a rank and 8 on one device, at ",
            "Tried, and accepted also by check='global': op='mean' in all_reduce at "
            "test_axes.py:33",
        ),
    ),
    (
        lambda x, w, b: product(x, w) + all_reduce(x.sum() + b.sum(), ("dp", "tp"), dst=R),
        ADDED_TWICE,
    ),
    (
        lambda x, w, b: product(ppermute(x, "tp", RING), w),
        (
            "on one device the body fails: CollectiveError: ppermute: [1] are none of the 1 ranks "
            "of 'tp'.",
            "Fix: write sizes that are right on one device too: -1, x.shape[...], or a size "
            "divided by axis_size(axis).",
        ),
    ),
]
"""Programs that are others over tp, why they are refused (up to the line), and the repair."""


def run(body: Body, tp: int, check: Any, **specs: Any) -> Tensor:
    mesh = make_mesh((2, tp), ("dp", "tp"), kind="simulated")
    found: Tensor = shard_map(body, mesh=mesh, check=check, **{**SPECS, **specs})(X, W, B)
    return found


@pytest.mark.parametrize("body", RIGHT)
def test_a_program_that_is_accepted_over_tp_gives_what_one_rank_of_tp_gives(body: Body) -> None:
    torch.testing.assert_close(run(body, 2, {"tp": "global", "dp": "local"}), run(body, 1, True))


@pytest.mark.usefixtures("repairs")
@pytest.mark.parametrize(("body", "expected"), WRONG)
def test_a_program_that_differs_over_tp_is_refused(body: Body, expected: tuple[str, str]) -> None:
    with pytest.raises(ShardTypeError) as raised:
        run(body, 2, {"tp": "global"})
    first, *others = str(raised.value).splitlines()
    assert first.startswith(f"<lambda>: check='global': {expected[0]}")
    assert expected[1] in others[-2:]


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
    with pytest.raises(SpecError) as raised:
        run(ring, 2, check)
    assert str(raised.value) == (
        "check is True, False, 'local' or 'global', or a dict from axes to 'local' or 'global', "
        f"not {check!r}."
    )


def test_an_axis_that_the_mesh_lacks_cannot_be_checked() -> None:
    with told(SpecError):
        run(ring, 2, {"pp": "global"})
