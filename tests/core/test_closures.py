"""Tensors that functions close over: their names, and copies of the functions with other ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import checkpoint
from shardmap_torch.core.closures import Closures, name_in

GLOBAL = torch.ones(2)


def test_a_tensor_is_named_as_the_function_writes_it() -> None:
    local, listed, module = torch.ones(2), [torch.ones(2)], torch.nn.Linear(2, 2)
    params = {"w": torch.ones(2)}

    def f(x: Tensor) -> Tensor:
        y: Tensor = module(x) * local + listed[0] + params["w"] + GLOBAL
        return y

    tensors = (local, listed[0], params["w"], module.weight, GLOBAL)
    names = ["local", "listed[0]", "params['w']", "module.weight", "GLOBAL"]
    assert [name_in(f, x) for x in tensors] == names


def test_what_a_function_does_not_close_over_has_no_name() -> None:
    assert name_in(lambda x: x, torch.ones(2)) is None
    assert name_in(torch.relu, torch.ones(2)) is None
    assert name_in(None, torch.ones(2)) is None


def scaled_by(scale: Tensor) -> Any:
    def outer(x: Tensor) -> Tensor:
        moved: Tensor = inner(x) + outer.offset  # type: ignore[attr-defined]  # set below
        return moved

    def inner(x: Tensor) -> Tensor:
        return x * scale if x.sum() > 0 else outer(-x)

    outer.offset = 3.0  # type: ignore[attr-defined]  # read above
    return outer


def test_a_copy_has_the_other_tensors_wherever_it_reaches_them_and_the_same_attributes() -> None:
    function = scaled_by(torch.ones(2))
    copy = Closures(function).put([torch.full((2,), 5.0)])
    assert [copy(torch.tensor([a, a])).tolist() for a in (1.0, -1.0)] == [[8.0, 8.0], [11.0, 11.0]]
    assert function(torch.ones(2)).tolist() == [4.0, 4.0]


def test_a_function_that_reaches_no_tensor_is_the_same_one_in_a_checkpoint() -> None:
    def layer(activation: Callable[[Tensor], Tensor], w: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: activation(x * w) * (2.0 if activation is functional.silu else 1.0)

    x, w = torch.ones(2, requires_grad=True), torch.ones(2)
    f = layer(functional.silu, w)
    assert torch.equal(checkpoint(f, x), f(x))
