"""Linear layers with a sharded weight equal one device, value by value and gradient by gradient."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, LayerError, P, Partial, R, S, V, make_mesh, redistribute, shard_map
from shardmap_torch.nn import column_linear, row_linear
from tests.nn.support.cases import Case, budget, over_dp, random
from tests.support.golden import told

X, QKV, QKV_BIAS = random(4, 6, 8), random(8, 4, 3, 2), random(4, 3, 2)
HEADS, OUT, OUT_BIAS = random(4, 6, 4, 2), random(4, 2, 8), random(8)


def column(x: Tensor, w: Tensor, b: Tensor, src: Any, overlap: Any = "auto") -> Tensor:
    return column_linear(x, over_dp(w), "tp", bias=over_dp(b), src=src, overlap=overlap)


def column_one_device(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("btd,dhxk->bthxk", x, w) + b


def several(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Two weights that share a gather, one of them without a bias."""
    w, b = over_dp(w), over_dp(b)
    first, second = column_linear(x, [w, w[:, :, 0]], "tp", bias=[b, None], src=S(1))
    return first + second.unsqueeze(3)


def several_one_device(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return column_one_device(x, w, b) + torch.einsum("btd,dhk->bthk", x, w[:, :, 0]).unsqueeze(3)


def row(x: Tensor, w: Tensor, b: Tensor, dst: Any, overlap: Any = "auto") -> Tensor:
    return row_linear(x, over_dp(w), "tp", bias=over_dp(b), dst=dst, overlap=overlap)


def row_to_replicate(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return redistribute(row(x, w, b, R), "tp", src=R, dst=S(1))


def row_and_sum(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return redistribute(row(x, w, b, Partial), "tp", src=Partial, dst=I)


def row_one_device(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bthk,hkd->btd", x, w) + b


COLUMN: dict[str, Any] = {
    "reference": column_one_device,
    "out_spec": P("dp", None, "tp"),
    "inputs": (X, QKV, QKV_BIAS),
}
ROW: dict[str, Any] = {
    "reference": row_one_device,
    "in_specs": (P("dp", None, "tp"), P("tp"), P()),
    "inputs": (HEADS, OUT, OUT_BIAS),
}
WEIGHTS = P(None, "tp"), P("tp")
CASES = {
    "column": Case(partial(column, src=I), in_specs=(P("dp"), *WEIGHTS), **COLUMN),
    "column of R": Case(
        partial(column, src=R), in_specs=(P("dp", replicate="tp"), *WEIGHTS), **COLUMN
    ),
    "column of S(1)": Case(partial(column, src=S(1)), in_specs=(P("dp", "tp"), *WEIGHTS), **COLUMN),
    "column of S(-1)": Case(
        partial(column, src=S(-1)), in_specs=(P("dp", None, "tp"), *WEIGHTS), **COLUMN
    ),
    "columns that share a gather": Case(
        several,
        several_one_device,
        (P("dp", "tp"), *WEIGHTS),
        P("dp", None, "tp"),
        (X, QKV, QKV_BIAS),
    ),
    "row": Case(partial(row, dst=I), out_spec=P("dp"), **ROW),
    "row to R": Case(row_to_replicate, out_spec=P("dp", "tp"), **ROW),
    "row to S(1)": Case(partial(row, dst=S(1)), out_spec=P("dp", "tp"), **ROW),
    "row to S(-1)": Case(partial(row, dst=S(-1)), out_spec=P("dp", None, "tp"), **ROW),
    "row to Partial, summed later": Case(row_and_sum, out_spec=P("dp"), **ROW),
    "overlapped column": Case(
        partial(column, src=S(1), overlap="require"), in_specs=(P("dp", "tp"), *WEIGHTS), **COLUMN
    ),
    "overlapped row": Case(
        partial(row, dst=S(1), overlap="require"), out_spec=P("dp", "tp"), **ROW
    ),
}


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("column", {}, {"all_reduce": 1}),
        ("column of S(1)", {"all_gather": 1}, {"reduce_scatter": 1}),
        ("columns that share a gather", {"all_gather": 1}, {"reduce_scatter": 1}),
        ("row", {"all_reduce": 1}, {}),
        ("row to S(1)", {"reduce_scatter": 1}, {"all_gather": 1, "all_reduce": 1}),  # + the bias
    ],
)
def test_layers_send_what_the_literature_says_and_no_more(
    name: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    assert budget(CASES[name]) == (forward, backward)


def call(f: Callable[..., Tensor], *args: Tensor) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    shard_map(f, mesh=mesh, in_specs=tuple(P() for _ in args), out_specs=P("tp"))(*args)


@pytest.mark.parametrize(
    ("f", "shapes"),
    [
        (lambda x, w: column_linear(x, w, "tp"), [(2, 3), (4, 5)]),
        (lambda x, w: column_linear(x, w, "tp", src=V), [(2, 4), (4, 5)]),
        (lambda x, w: column_linear(x, w, "tp", bias=x), [(2, 4), (4, 5)]),
        (lambda x, w: row_linear(x, w, "tp"), [(4,), (4,)]),
        (lambda x, w: row_linear(x, w, "tp", bias=w[0], bias_type=R), [(2, 4), (4, 5)]),
    ],
)
def test_arguments_that_do_not_match_are_refused_by_shape(
    f: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    with told(LayerError):
        call(f, *(torch.ones(shape) for shape in shapes))
