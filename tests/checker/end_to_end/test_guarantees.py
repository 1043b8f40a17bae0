"""The table of docs/guarantees.md: which mistakes each strictness catches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    check_program,
    make_mesh,
    ppermute,
    random,
    shard_map,
)

PAGE: Final = Path(__file__).parents[3] / "docs" / "guarantees.md"
MESH: Final = make_mesh((2,), ("dp",), kind="abstract")
X: Final = torch.ones(4, 6)
W: Final = torch.ones(6, 4)

Body = Callable[[Tensor, Tensor], Any]


def taken(x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda w: all_reduce((x @ w).square().sum(), "dp", dst=I))(w)
    return found


def loss_that_is_replicate(x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda w: all_reduce((x @ w).square().sum(), "dp", dst=R))(w)
    return all_reduce(found, "dp", dst=I)


def mean_of_masked_means(x: Tensor, w: Tensor) -> Tensor:
    counts = x > 0
    own = torch.where(counts, x, 0).sum() / counts.sum()
    return all_reduce(own, "dp", op="mean", dst=I)


class Halved(torch.autograd.Function):
    """Divides its gradient by a local size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[0]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / ctx.rows


class Swapped(torch.autograd.Function):
    """Sends forward, and not back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return ppermute(x, "dp", [(0, 1), (1, 0)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


HALVED: Final[Any] = Halved.apply
SWAPPED: Final[Any] = Swapped.apply


def hooked(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    y.register_hook(lambda g: g / (1 + g.norm()))
    return y @ w


def by_rank(x: Tensor, w: Tensor) -> Tensor:
    return x @ w if axis_index("dp") == 0 else 2 * (x @ w)


ROWS: Final[dict[str, tuple[bool, bool, Body, Any]]] = {
    "a forgotten sum of a gradient": (True, True, lambda x, w: w - 0.1 * taken(x, w), P()),
    "updated weights summed in place of gradients": (
        True,
        True,
        lambda x, w: all_reduce(w - 0.1 * taken(x, w), "dp", dst=I),
        P(),
    ),
    "a gradient summed twice": (
        True,
        True,
        lambda x, w: all_reduce(all_reduce(taken(x, w), "dp", dst=I), "dp", dst=I),
        P(),
    ),
    "a gradient clipped by its norm before the sum": (
        True,
        True,
        lambda x, w: all_reduce(taken(x, w) / taken(x, w).norm(), "dp", dst=I),
        P(),
    ),
    "weights decayed before the sum": (
        True,
        True,
        lambda x, w: w - all_reduce(0.1 * taken(x, w) + 0.01 * w, "dp", dst=I),
        P(),
    ),
    "a moving average of unsummed gradients": (
        True,
        True,
        lambda x, w: 0.9 * w + 0.1 * taken(x, w),
        P(),
    ),
    "squares of gradients summed, not the square of their sum": (
        True,
        True,
        lambda x, w: all_reduce(taken(x, w).square(), "dp", dst=I),
        P(),
    ),
    "a loss differentiated as R": (True, True, loss_that_is_replicate, P()),
    "a result that varies, promised to be equal": (True, True, lambda x, w: (x @ w).relu(), P()),
    "a branch on the rank": (True, True, by_rank, P("dp")),
    "a bias added on each rank before the sum": (
        False,
        True,
        lambda x, w: all_reduce((x @ w).sum(0) + w.sum(0), "dp", dst=I),
        P(),
    ),
    "a mean over a rank's part": (False, True, lambda x, w: (x - x.mean(0)) @ w, P("dp")),
    "a sum divided by the number of a rank's rows": (
        False,
        True,
        lambda x, w: all_reduce((x @ w).sum(), "dp", dst=I) / x.shape[0],
        P(),
    ),
    "a mean of means of unequal weights": (False, True, mean_of_masked_means, P()),
    "one random key for the dropout of all shards": (
        False,
        True,
        lambda x, w: random.dropout(random.key(0), x, 0.5) @ w,
        P("dp"),
    ),
    "a sum of what is sharded": (False, True, lambda x, w: all_reduce(x @ w, "dp", dst=I), P()),
    "parts gathered along another dim": (
        False,
        True,
        lambda x, w: all_gather(x @ w, "dp", dim=1, dst=I),
        P(),
    ),
    "a backward that divides by a local size": (
        False,
        True,
        lambda x, w: HALVED(x) @ w,
        P("dp"),
    ),
    "a hook that clips by a rank's norm": (False, True, hooked, P("dp")),
    "a backward that does not send back": (False, True, lambda x, w: SWAPPED(x) @ w, P("dp")),
    "a Python result that is a local size": (
        False,
        True,
        lambda x, w: (x @ w, x.shape[0]),
        (P("dp"), None),
    ),
}


def is_caught(body: Body, out_specs: Any, check: Any) -> bool:
    mapped = shard_map(body, mesh=MESH, in_specs=(P("dp"), P()), out_specs=out_specs, check=check)
    try:
        check_program(mapped, X.clone().requires_grad_(), W)
    except ShardTypeError:
        return True
    return False


@pytest.mark.parametrize("name", ROWS)
def test_each_row_is_as_the_page_says(name: str) -> None:
    by_local, by_global, body, out_specs = ROWS[name]
    assert is_caught(body, out_specs, True) == by_local
    assert is_caught(body, out_specs, "global") == by_global
    words = {True: "caught", False: "no"}
    assert f"| {name} | {words[by_local]} | {words[by_global]} |" in PAGE.read_text()


def test_the_page_has_no_other_row() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert len(lines[1:]) == len(ROWS)
