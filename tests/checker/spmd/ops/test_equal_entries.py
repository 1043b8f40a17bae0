"""Dims of equal entries, which any sharding suits, beside operands that are sharded."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import P, axis_index, axis_size
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers

IDS: Final = (numbers(4, 4, 4) * 10).long() % 4


def _gather(x: Tensor, ids: Tensor) -> Tensor:
    return torch.gather(x.unsqueeze(2).expand(-1, -1, ids.shape[2]), 1, ids)


def _scatter(x: Tensor, ids: Tensor) -> Tensor:
    return x.unsqueeze(2).expand(-1, -1, ids.shape[2]).scatter(1, ids, 2.0)


BODIES: Final[dict[str, Callable[..., Any]]] = {"gather": _gather, "scatter": _scatter}


@pytest.mark.parametrize("name", BODIES)
def test_equal_entries_are_laid_out_like_an_operand_of_their_shape(name: str) -> None:
    out = P("a", None, "b")
    assert_is_one_device(BODIES[name], [numbers(4, 4), IDS], (P("a"), out), out)


@pytest.mark.parametrize("name", BODIES)
def test_what_is_sharded_stays_so_beside_an_operand_of_the_same_shape(name: str) -> None:
    specs = P("a"), P("b", None, "a")
    args = [numbers(4, 4), IDS]
    assert_is_refused(BODIES[name], args, specs, specs[1])


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


WEIGHT: Final = numbers(6, 8)

STARTS: Final[dict[str, Callable[..., Any]]] = {
    "product": lambda x: x + ones(x.shape[0], 6) @ WEIGHT,
    "linear": lambda x: x + functional.linear(ones(x.shape[0], 6), WEIGHT.T, WEIGHT[0]),
    "addend": lambda x: torch.addmm(x, ones(x.shape[0], 6), WEIGHT),
    "batched product": lambda x: (ones(x.shape[0], 1, 6) @ WEIGHT)[:, 0] * x,
    "softmax": lambda x: x * (ones(x.shape[0], 8) + WEIGHT[0]).softmax(-1),
    "layer norm": lambda x: x + functional.layer_norm(ones(x.shape[0], 8) * WEIGHT[1], (8,)),
    "group norm": lambda x: x + functional.group_norm(ones(x.shape[0], 8) * WEIGHT[1], 2),
    "sort": lambda x: x + (ones(x.shape[0], 8) * WEIGHT[1]).sort(-1)[0],
    "padding": lambda x: x + functional.pad(ones(x.shape[0], 6), (1, 1)),
    "convolution": lambda x: (
        x[:, :6] + functional.conv1d(ones(x.shape[0], 1, 8), WEIGHT[:1, None, :3])[:, 0]
    ),
    "positions": lambda x: x + torch.arange(8)[None].expand(x.shape[0], -1),
    "counted": lambda x: x + ones(x.shape[0], 8).cumsum(-1),
    "triangle": lambda x: x[:, None] + ones(x.shape[0], 8, 8).tril(),
    "copies of a row": lambda x: x + WEIGHT[0].repeat(x.shape[0], 1),
    "copies of positions": lambda x: x + torch.arange(8).repeat(x.shape[0], 1),
    "copies of a matrix": lambda x: x[:, None] + WEIGHT.repeat(x.shape[0], 1, 1),
}

SUMS: Final[dict[str, Callable[..., Any]]] = {
    "a count": lambda x: x / (ones(x.shape[0]).sum() * axis_size("a")),
    "a count of targets": lambda x: x / ((ones(x.shape[0]) != 2).sum() * axis_size("a")),
    "copies of a sum": lambda x: x + WEIGHT.sum() * ones(x.shape[0], 1).sum(0) * axis_size("a"),
    "copies in rows": lambda x: (
        x.unsqueeze(1).expand(-1, x.shape[0], -1).sum(1).mul(axis_size("a"))
    ),
    "a mean": lambda x: x * (ones(x.shape[0], 8) * WEIGHT[1]).mean(0),
    "copies in rows of a matrix": lambda x: (
        WEIGHT[0].expand(x.shape[0], 2, 8).reshape(-1, 8).unflatten(0, (-1, 2)).sum(1) + x
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_equal_entries_is_as_many_times_less_as_a_rank_has_fewer(name: str) -> None:
    assert_is_one_device(SUMS[name], [numbers(8, 8)], P("a"), P("a"))


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("spec", [P("a"), P(("b", "a"))], ids=str)
def test_what_is_made_of_equal_rows_is_sharded_like_what_it_meets(name: str, spec: P) -> None:
    assert_is_one_device(STARTS[name], [numbers(8, 8)], spec, spec)


@pytest.mark.parametrize("form", ["lstm", "gru", "rnn_tanh"])
def test_a_recurrent_network_starts_from_zeros(form: str) -> None:
    factor = {"lstm": 4, "gru": 3, "rnn_tanh": 1}[form]

    def body(x: Tensor, *weights: Tensor) -> Tensor:
        start = torch.zeros(1, x.shape[0], 4, dtype=x.dtype)
        state: Any = (start, start) if form == "lstm" else start
        options = (True, 1, 0.0, False, False, True)
        found: Tensor = getattr(torch, form)(x, state, weights, *options)[0]
        return found

    n = 4 * factor
    weights = [numbers(n, 6), numbers(n, 4), numbers(n), numbers(n) + 1]
    specs = P("a"), P(), P(), P(), P()
    assert_is_one_device(body, [numbers(4, 3, 6), *weights], specs, P("a"))


WRONG: Final[dict[str, Callable[..., Any]]] = {
    "a rank's count": lambda x: x / ones(x.shape[0]).sum(),
    "a count whose square is taken": lambda x: (
        x / (ones(x.shape[0]).sum().square() * axis_size("a"))
    ),
    "a count of other rows": lambda x: x * ones(x.shape[0] - 1).sum(),
    "rows put together in another order": lambda x: (
        x + WEIGHT[:2].unsqueeze(1).expand(2, x.shape[0] // 2, 8).reshape(-1, 8)
    ),
    "a sum over rows": lambda x: x / (ones(1, x.shape[0]) @ ones(x.shape[0], 8)),
    "a softmax over rows": lambda x: x * ones(x.shape[0], 8).softmax(0),
    "rows that are counted": lambda x: x + ones(x.shape[0], 8).cumsum(0),
    "rows in another order": lambda x: (
        x + torch.arange(8)[None].expand(x.shape[0], -1).T[: x.shape[0]]
    ),
    "a row of the rank": lambda x: x + axis_index("a") * ones(x.shape[0], 6) @ WEIGHT,
    "drawn rows": lambda x: x + functional.dropout(ones(x.shape[0], 6)) @ WEIGHT,
}


@pytest.mark.parametrize("name", WRONG)
def test_rows_that_differ_on_one_device_are_no_equal_entries(name: str) -> None:
    assert_is_refused(WRONG[name], [numbers(8, 8)], P("a"), P("a"))
