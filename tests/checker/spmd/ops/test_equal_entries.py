"""Dims of equal entries, which any sharding suits, beside operands that are sharded."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import P
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
    assert_is_refused(BODIES[name], args, specs, specs[1], "is not what it is on one device")
