"""A cache holds what was put into it, at positions that are tensors, numbers, or the end."""

from functools import partial

import pytest
import torch
from torch import Tensor

from shardmap_torch import LayerError, P
from shardmap_torch.nn import kv_update
from tests.nn.support.cases import Case, budget, random
from tests.support.golden import told

CACHE, NEW, ONE = random(4, 8, 4, 2), random(4, 3, 4, 2, seed=1), random(4, 1, 4, 2, seed=2)


def written(cache: Tensor, new: Tensor, position: Tensor | int) -> Tensor:
    at = int(position)
    return torch.cat([cache[:, :at], new, cache[:, at + new.shape[1] :]], 1)


def grown(cache: Tensor, new: Tensor) -> Tensor:
    return torch.cat([cache, new], 1)


HEADS = P("dp", None, "tp")


def case_at(position: int, new: Tensor = NEW) -> Case:
    return Case(
        kv_update, written, (HEADS, HEADS, P()), HEADS, (CACHE, new, torch.tensor(position))
    )


CASES = {
    "at the start": case_at(0),
    "in the middle": case_at(3),
    "at the end": case_at(5),
    "one position": case_at(7, ONE),
    "at a number": Case(
        partial(kv_update, position=3),
        partial(written, position=3),
        (HEADS, HEADS),
        HEADS,
        (CACHE, NEW),
    ),
    "growing": Case(kv_update, grown, (HEADS, HEADS), HEADS, (CACHE, NEW)),
}


def test_nothing_is_sent() -> None:
    assert budget(CASES["in the middle"]) == ({}, {})


@pytest.mark.parametrize("position", [-1, 6, 8, 100])
def test_new_rows_without_room_are_nan(position: int) -> None:
    found = kv_update(CACHE, NEW, torch.tensor(position))
    assert found.isnan().sum() == NEW.numel()


@pytest.mark.parametrize("position", [-1, 6])
def test_a_number_without_room_is_refused(position: int) -> None:
    with told(LayerError):
        kv_update(CACHE, NEW, position)


@pytest.mark.parametrize("new", [random(4, 3, 2, 2), NEW.float(), NEW[:, :0], NEW[0]])
def test_what_does_not_match_the_cache_is_refused(new: Tensor) -> None:
    with told(LayerError):
        kv_update(CACHE, new, 0)
