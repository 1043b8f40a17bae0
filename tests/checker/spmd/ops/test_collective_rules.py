"""Extrema and means over a sharded dim under check="global": of shards first, then of ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_size,
    check_program,
    local_region,
)
from tests.checker.support.accepted import accepted
from tests.checker.support.other_programs import ARGS, Body, mapped
from tests.support.golden import told


def largest(x: Tensor, axis: Any = "tp", op: Any = "max") -> Tensor:
    return all_reduce(x, axis, dst=R, op=op)


def softmax(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w + b
    e = (h - largest(h.detach().amax(-1, keepdim=True))).exp()
    return all_reduce((e / all_reduce(e.sum(-1, keepdim=True), "tp", dst=R)) @ w2, "tp", dst=I) + b2


def viewed(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = (x @ w + b).unflatten(-1, (-1, 2))
    m = largest(h.detach().amax((-1, -2)).unsqueeze(-1).unsqueeze(-1))
    return all_reduce(torch.mm((h - m).flatten(-2), w2), "tp", dst=I) + b2


def of_both_axes(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w + b
    global_shape = largest(h.detach().max(), ("dp", "tp"))
    again = largest(largest(h.detach().min(), "dp", "min"), "tp", "min")
    return all_reduce((global_shape - again) * h @ w2, "tp", dst=I) + b2


def norm(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w + b
    largest_entry = largest(torch.linalg.vector_norm(h.detach(), torch.inf, -1, keepdim=True))
    return all_reduce(torch.mm(h / largest_entry, w2), "tp", dst=I) + b2


def integers(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w + b
    steps = largest((4 * h).long().amax(-1, keepdim=True))
    return all_reduce((steps * h) @ w2, "tp", dst=I) + b2


def mean(x: Tensor, axis: Any = "tp") -> Tensor:
    return all_reduce(x, axis, dst=R, op="mean")


def normalised(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w + b
    h = h - mean(h.mean(-1, keepdim=True))
    h = h / mean(h.square().mean(-1)).sqrt().unsqueeze(-1)
    return all_reduce(torch.mm(h, w2), "tp", dst=I) + b2


def means_of_both_axes(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w + b
    joint = mean(h.mean(), ("dp", "tp"))
    in_turn = mean(mean(functional.mse_loss(h, torch.zeros_like(h)), "dp"), "tp")
    return all_reduce((joint * in_turn * h) @ w2, "tp", dst=I) + b2


def mean_by_hand(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w + b
    scale = all_reduce(h.mean(-1).unsqueeze(-1), "tp", dst=R) / axis_size("tp")
    return all_reduce((scale * h) @ w2, "tp", dst=I) + b2


def mean_divided_before(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w + b
    scale = all_reduce(h.mean(-1, keepdim=True) / axis_size("tp"), "tp", dst=R)
    return all_reduce((scale * h) @ w2, "tp", dst=I) + b2


def mean_by_local_size(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w + b
    scale = mean(2 * (h.sum(-1, keepdim=True) / h.shape[-1]) + torch.zeros(1, dtype=h.dtype))
    return all_reduce((scale * h) @ w2, "tp", dst=I) + b2


def scaled(scale: Any) -> Body:
    def body(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        h = x @ w + b
        return all_reduce(torch.mm(scale(h) * h, w2), "tp", dst=I) + b2

    return body


def used_before(h: Tensor) -> Tensor:
    return largest(h.detach().amax(-1, keepdim=True) + 1)


def mean_of_what_counts(h: Tensor) -> Tensor:
    """Each rank's rows have targets of the same weights."""
    targets = torch.zeros(h.shape[:1], dtype=torch.int64)
    logits = all_gather(h, "tp", dim=1, dst=R)
    weight = torch.ones(logits.shape[1], dtype=h.dtype)
    return mean(functional.nll_loss(logits, targets, weight=weight), "dp")


@pytest.mark.parametrize("scale", [used_before, mean_of_what_counts])
def test_what_layouts_do_not_prove_is_tried(scale: Any) -> None:
    assert check_program(mapped(scaled(scale), P("dp")), *ARGS).tried


MEANS = [normalised, means_of_both_axes, mean_by_hand, mean_divided_before, mean_by_local_size]


@pytest.mark.parametrize("body", MEANS)
def test_the_mean_of_the_parts_means_is_that_of_one_device(body: Body) -> None:
    accepted(body, P("dp"))


@pytest.mark.parametrize("body", [softmax, viewed, of_both_axes, norm, integers])
def test_the_extremum_of_the_parts_extrema_is_that_of_one_device(body: Body) -> None:
    accepted(body, P("dp"))


def of_pieces(h: Tensor) -> Tensor:
    return largest(h)


def with_a_gradient(h: Tensor) -> Tensor:
    return largest(h.amax(-1, keepdim=True))


def of_another_kind(h: Tensor) -> Tensor:
    return largest(h.detach().amax(-1, keepdim=True), op="min")


def never_taken(h: Tensor) -> Tensor:
    return h.detach().amax(-1, keepdim=True)


def over_one_axis_only(h: Tensor) -> Tensor:
    return largest(h.detach().max(), "dp")


def in_a_region(h: Tensor) -> Any:
    return local_region(lambda m: m, in_types=(P(),), out_types=P())(h.detach().max())


def of_addends(h: Tensor) -> Tensor:
    return largest(h.detach().sum(-1, keepdim=True))


def of_addends_with_a_gradient(h: Tensor) -> Tensor:
    return largest(h.sum(-1, keepdim=True))


def of_addends_over_another_axis(h: Tensor) -> Tensor:
    return all_reduce(largest(h.detach().sum(), "dp"), "tp", dst=R)


def sum_of_means(h: Tensor) -> Tensor:
    return all_reduce(h.mean(-1, keepdim=True), "tp", dst=R)


def divided_otherwise(h: Tensor) -> Tensor:
    return all_reduce(h.mean(-1, keepdim=True), "tp", dst=R) / axis_size("dp")


def mean_used_before(h: Tensor) -> Tensor:
    return mean(h.mean(-1, keepdim=True).square())


def mean_over_one_axis_only(h: Tensor) -> Tensor:
    return mean(h.mean(), "dp")


def largest_mean(h: Tensor) -> Tensor:
    return largest(h.detach().mean(-1, keepdim=True))


def counted(h: Tensor) -> Tensor:
    """Every rank that has one counts once: 4 where one device has 1."""
    return all_reduce((h > 0).any(-1, keepdim=True), "tp", dst=R).to(h.dtype)


@pytest.mark.sample(9)
@pytest.mark.parametrize(
    "scale",
    [
        of_pieces,
        with_a_gradient,
        of_another_kind,
        never_taken,
        over_one_axis_only,
        of_addends,
        of_addends_with_a_gradient,
        of_addends_over_another_axis,
        in_a_region,
        sum_of_means,
        divided_otherwise,
        mean_used_before,
        mean_over_one_axis_only,
        largest_mean,
        counted,
    ],
)
def test_other_programs_than_on_one_device_are_rejected(scale: Any) -> None:
    leaves = [x.clone().requires_grad_() for x in ARGS]
    with told(ShardTypeError):
        check_program(mapped(scaled(scale), P("dp")), *leaves)
