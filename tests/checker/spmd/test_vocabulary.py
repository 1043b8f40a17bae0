"""Lookups in a rank's part of a vocabulary, under global strictness, against one device."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import P, R, all_reduce, axis_index
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers
from tests.checker.support.vocabulary_programs import SEEDS, TABLE, TRANSPOSED, outcome_of

Body = Callable[..., Tensor]

W: Final = numbers(8, 3)
LOGITS: Final = numbers(4, 8)
IDS: Final = torch.tensor([[3, 0, 5, 7], [1, 1, 6, 2], [7, 4, 4, 0]])
TARGETS: Final = torch.tensor([3, 0, 5, 7])
UNKNOWN: Final = torch.tensor([[3, -1, 5, 9]])


def total(x: Tensor) -> Tensor:
    return all_reduce(x, "a", dst=R)


def start_of(w: Tensor, dim: int = 0) -> Tensor:
    return axis_index("a") * w.shape[dim]


def inside(w: Tensor, ids: Tensor, dim: int = 0) -> Tensor:
    return (ids >= start_of(w, dim)) & (ids < start_of(w, dim) + w.shape[dim])


def chosen(w: Tensor, ids: Tensor) -> Tensor:
    mask = inside(w, ids)
    return total(w[torch.where(mask, ids - start_of(w), 0)] * mask[..., None])


def clamped(w: Tensor, ids: Tensor) -> Tensor:
    local = (ids - start_of(w)).clamp(0, w.shape[0] - 1)
    return total(functional.embedding(local, w) * inside(w, ids).unsqueeze(-1).to(w.dtype))


def megatron(w: Tensor, ids: Tensor) -> Tensor:
    """Megatron-LM's VocabParallelEmbedding."""
    start, end = start_of(w), start_of(w) + w.shape[0]
    input_mask = (ids < start) | (ids >= end)
    masked_input = ids.clone() - start
    masked_input[input_mask] = 0
    out = functional.embedding(masked_input, w)
    out[input_mask, :] = 0.0
    return total(out)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """The masked logits of targets, and the other half of the loss without a detached maximum."""
    mask = inside(x, target, 1)
    local = torch.where(mask, target - start_of(x, 1), 0)
    picked = total(torch.where(mask, x.gather(1, local[:, None]).squeeze(1), 0.0))
    m = all_reduce(x.amax(-1), "a", op="max", dst=R)
    return total((x - m[:, None]).exp().sum(-1)).log() + m - picked


def megatron_cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """Megatron-LM's vocab-parallel cross entropy."""
    start, end = start_of(x, 1), start_of(x, 1) + x.shape[1]
    x = x - all_reduce(x.detach().amax(-1), "a", op="max", dst=R).unsqueeze(-1)
    target_mask = (target < start) | (target >= end)
    masked_target = target.clone() - start
    masked_target[target_mask] = 0
    rows = torch.arange(x.shape[0])
    picked = x.view(-1, x.shape[1])[rows, masked_target.view(-1)].clone().view_as(target)
    picked[target_mask] = 0.0
    return total(x.exp().sum(-1)).log() - total(picked)


RIGHT: Final[dict[str, tuple[Body, Sequence[Tensor], Any, P]]] = {
    **{body.__name__: (body, (W, IDS), (TABLE, P()), P()) for body in (chosen, clamped, megatron)},
    **{
        body.__name__: (body, (LOGITS, TARGETS), (TRANSPOSED, P()), P())
        for body in (cross_entropy, megatron_cross_entropy)
    },
    "ids of a batch": (
        chosen,
        (W, IDS[:2]),
        (P("a", replicate={"b"}), P("b")),
        P("b", replicate={"a"}),
    ),
    "unknown ids": (chosen, (W, UNKNOWN), (TABLE, P()), P()),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_lookup_in_parts_of_a_vocabulary_is_that_on_one_device(name: str) -> None:
    assert_is_one_device(*RIGHT[name])


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
