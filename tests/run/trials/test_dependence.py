"""check="global" by numbers: results that depend on an input by no more than rounding."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, ShardTypeError, axis_index, check_program, make_mesh, shard_map, shift
from shardmap_torch.run.trials.draws import Draw, Like, Style
from tests.checker.support.outcomes import outcome

MESH: Final = make_mesh((2,), ("cp",), kind="simulated")
ONE: Final = make_mesh((1,), ("cp",), kind="simulated")


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def mapped(body: Callable[..., Tensor], mesh: Any) -> Callable[..., Any]:
    specs = P("cp"), P(), P()
    return shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("cp"), check="global")


ARGS: Final = drawn(4, 6), drawn(5, 6), drawn(6)


def biased_keys(q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """Adds one number to all logits of a row, which changes no weight."""
    k = keys + bias
    own = shift(shift(q, "cp", 1), "cp", -1)
    weights = (own @ k.T + axis_index("cp") * 0.0).softmax(-1)
    return weights @ keys


def centered(q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    own = shift(shift(q, "cp", 1), "cp", -1) + bias.sum()
    return (own - own.mean(-1, keepdim=True)) @ keys.T


@pytest.mark.parametrize("body", [biased_keys, centered], ids=lambda body: body.__name__)
def test_a_gradient_that_rounding_alone_leaves_of_zero_is_no_dependence(
    body: Callable[..., Tensor],
) -> None:
    args = [x.requires_grad_() for x in ARGS]
    assert check_program(mapped(body, MESH), *args).tried
    found, expected = (outcome(mapped(body, mesh), args) for mesh in (MESH, ONE))
    for mine, there in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, there, atol=1e-12, rtol=1e-9)


def gated(q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    """Leaves out what other ranks have, behind a gate that hides it from 64 bits."""
    own = shift(shift(q, "cp", 1), "cp", -1)
    return own.sin() + math.exp(-50.0) * own.sum(0)


def gated_parts(q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
    own = shift(shift(q, "cp", 1), "cp", -1)
    gates = torch.sigmoid(own.square() * -1 - 30.0)
    return biased_keys(q, keys, bias) + (gates * own).sum(0)


@pytest.mark.parametrize("body", [gated, gated_parts], ids=lambda body: body.__name__)
def test_what_is_small_is_a_dependence_that_trials_must_tell(body: Callable[..., Tensor]) -> None:
    with pytest.raises(ShardTypeError):
        check_program(mapped(body, MESH), *[x.requires_grad_() for x in ARGS])


def test_inputs_that_are_off_by_rounding_are_others() -> None:
    likes = {0: Like(torch.Size((50,)), torch.float64, torch.device("cpu"), True)}
    draw = Draw(3)
    near = replace(draw, style=Style(jitter=1e-14))
    here, there = draw.values(likes)[0], near.values(likes)[0]
    off = ((here - there) / here).abs()
    assert 0 < float(off.max()) < 1e-13
