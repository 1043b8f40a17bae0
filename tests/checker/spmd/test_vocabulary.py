"""Lookups in a rank's part of a vocabulary, under global strictness, against one device.

Those that people write are in `end_to_end`, `run/trials/support/alone.py` and `nn`; here are random
ones, and mistakes that these do not draw.
"""

from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import P, R, all_reduce, axis_index
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers
from tests.checker.support.vocabulary_programs import SEEDS, TABLE, outcome_of

Body = Callable[..., Tensor]

W: Final = numbers(8, 3)
IDS: Final = torch.tensor([[3, 0, 5, 7], [1, 1, 6, 2], [7, 4, 4, 0]])
TARGETS: Final = torch.tensor([3, 0, 5, 7])


def total(x: Tensor) -> Tensor:
    return all_reduce(x, "a", dst=R)


def start_of(w: Tensor, dim: int = 0) -> Tensor:
    return axis_index("a") * w.shape[dim]


def inside(w: Tensor, ids: Tensor, dim: int = 0) -> Tensor:
    return (ids >= start_of(w, dim)) & (ids < start_of(w, dim) + w.shape[dim])


def of_another_axis(w: Tensor, ids: Tensor) -> Tensor:
    start = axis_index("b") * w.shape[0]
    mask = (ids >= start) & (ids < start + w.shape[0])
    return all_reduce(w[torch.where(mask, ids - start, 0)] * mask[..., None], "b", dst=R)


def of_ids_written_since(w: Tensor, ids: Tensor) -> Tensor:
    ids = ids.clone()
    mask = inside(w, ids)
    ids[:, 0] = 0
    local = (ids - start_of(w)).clamp(0, w.shape[0] - 1)
    return total(w[local] * mask[..., None])


def padded(w: Tensor, ids: Tensor) -> Tensor:
    """Each rank would leave out the gradient of its own first row."""
    mask = inside(w, ids)
    local = torch.where(mask, ids - start_of(w), 0)
    return total(functional.embedding(local, w, padding_idx=0) * mask[..., None])


def one_hot_of(targets: Tensor, classes: Tensor) -> Tensor:
    """Adds margins to the logits of the targets, as ArcFace does, and returns their sums."""
    local = targets - start_of(classes)
    hit = local[:, None] == torch.arange(classes.shape[0])
    scores = torch.where(hit, (classes[:, 0] + 0.5).cos(), classes[:, 0].sin())
    return total(scores.sum(1))


def one_hot_of_the_next(targets: Tensor, classes: Tensor) -> Tensor:
    start = (1 - axis_index("a")) * classes.shape[0]
    hit = (targets - start)[:, None] == torch.arange(classes.shape[0])
    return total((hit * classes[:, 0]).sum(1))


def one_hot_from_one(targets: Tensor, classes: Tensor) -> Tensor:
    hit = (targets - start_of(classes))[:, None] == torch.arange(1, classes.shape[0] + 1)
    return total((hit * classes[:, 0]).sum(1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("body", [one_hot_of, one_hot_from_one])
@pytest.mark.parametrize("rows", [P(), P("b")], ids=str)
def test_ids_of_a_part_are_compared_with_its_positions(body: Body, rows: P) -> None:
    assert_is_one_device(body, (TARGETS, W), (rows, P("a")), rows)


def test_ids_that_are_compared_with_other_positions_are_refused() -> None:
    text = "is not what it is on one device|never be summed"
    assert_is_refused(one_hot_of_the_next, (TARGETS, W), (P(), TABLE), P(), text)


WRONG: Final = (
    of_another_axis,
    of_ids_written_since,
    padded,
)


@pytest.mark.parametrize("body", WRONG, ids=lambda body: str(body.__name__))
def test_a_lookup_with_another_mask_or_other_ids_is_refused(body: Body) -> None:
    assert_is_refused(body, (W, IDS), (TABLE, P()), P(), "has a value of its own|never be summed")


def test_random_lookups_that_are_accepted_equal_one_device() -> None:
    outcomes = Counter(map(outcome_of, SEEDS))
    assert not outcomes["wrong"], outcomes
    assert outcomes["right"] > outcomes["refused"] > 0, outcomes
