"""Paths through a body share the specs of inputs and the types of results, or are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, R, all_reduce
from shardmap_torch.checker.verify import verdict
from tests.checker.support.branching import SPECS, W, X, both, loss, plain_loss
from tests.checker.support.rejections import assert_right, rejection
from tests.support.golden import hold_own


def test_an_input_that_one_way_does_not_use_gets_the_spec_of_the_other() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        big = all_reduce(x.detach().abs().sum(), "tp", dst=I) > 1
        return loss(x, w) if big else all_reduce(x.sum(), "tp", dst=I)

    def one(x: Tensor, w: Tensor) -> Tensor:
        return plain_loss(x, w) if x.abs().sum() > 1 else x.sum()

    both(body, one, X, W, in_specs=SPECS, out_specs=P())


def test_types_that_the_paths_never_agree_on_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        big = all_reduce(x.detach().abs().sum(), "tp", dst=I) > 1
        return loss(x, w) if big else all_reduce(x.sum(), "tp", dst=I)

    monkeypatch.setattr(verdict, "_ROUNDS", 0)  # no program is known that needs more than one
    hold_own(rejection(body, X, W, in_specs=SPECS, out_specs=P()))


def test_an_input_that_two_ways_need_differently_is_refused() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        big = all_reduce(x.detach().abs().sum(), "tp", dst=I) > 1
        if big:
            return loss(x, w)
        return all_reduce(x.sum(), "tp", dst=I) * w.sum()

    hold_own(rejection(body, X, W, in_specs=SPECS, out_specs=P()))


def leaving(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    def body(x: Tensor, w: Tensor) -> Any:
        big = all_reduce(x.detach().abs().sum(), "tp", dst=I) > 1
        return first(x, w) if big else second(x, w)

    return body


def constant(x: Tensor, w: Tensor) -> Tensor:
    return torch.ones((), dtype=x.dtype)


def test_results_that_leave_differently_are_refused() -> None:
    def other(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce((x @ w).square().sum(), "tp", dst=R)

    hold_own(rejection(leaving(loss, other), X, W, in_specs=SPECS, out_specs=P()))


def test_a_result_that_fits_both_leaves_as_the_other_way_s() -> None:
    def other(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce((x @ w).square().sum(), "tp", dst=R)

    def one(x: Tensor, w: Tensor) -> Tensor:
        if x.abs().sum() > 1:
            return plain_loss(x, w)
        return constant(x, w)

    for f in (leaving(other, constant), leaving(loss, constant)):
        both(f, one, X, W, in_specs=SPECS, out_specs=P())


def test_a_constant_beside_a_shard_leaves_as_shards() -> None:
    def one(x: Tensor, w: Tensor) -> Tensor:
        return x.sin() if x.abs().sum() > 1 else torch.ones_like(x)

    f = leaving(lambda x, w: x.sin(), lambda x, w: torch.ones_like(x))
    both(lambda x: f(x, W), lambda x: one(x, W), X, in_specs=P("tp"), out_specs=P("tp"))


def test_a_constant_beside_a_partial_result_is_refused_and_a_zero_is_right() -> None:
    def local(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).square().sum()

    specs: dict[str, Any] = {"in_specs": SPECS, "out_specs": P(partial={"tp"})}
    text = rejection(leaving(local, constant), X, W, **specs)
    assert "that need different conversions" in text

    def one(x: Tensor, w: Tensor) -> Tensor:
        return plain_loss(x, w) * (x.abs().sum() > 1)

    zero = leaving(local, lambda x, w: torch.zeros((), dtype=x.dtype))
    both(zero, one, X, W, **specs)


@pytest.mark.parametrize("second", [lambda x, w: None, lambda x, w: torch.ones(2)])
def test_results_of_different_shape_or_structure_are_refused(second: Callable[..., Any]) -> None:
    hold_own(rejection(leaving(loss, second), X, W, in_specs=SPECS, out_specs=P()))


@pytest.mark.parametrize("spec", [P(), P(invariant={"tp"}), P(replicate={"tp"})])
def test_an_equal_result_that_is_promised_as_a_pending_sum_counts_once(spec: P) -> None:
    def body(x: Tensor) -> Tensor:
        return x * 2

    assert_right(body, lambda x: x * 2, X, in_specs=spec, out_specs=P(partial={"tp"}))
