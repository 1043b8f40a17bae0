"""Programs and errors that several tests of the checker share."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import ShardTypeError, check_program, make_mesh, shard_map
from shardmap_torch.collectives.autograd import TypedFunction
from tests.support.golden import hold

RANKS = make_mesh((4,), ("tp",), kind="simulated", simulate="ranks")
ABSTRACT = make_mesh((4,), ("tp",), kind="abstract")


def numbers(*shape: int, grad: bool = True, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_(grad)


X, W, U, B = numbers(8, 6), numbers(6, 8), numbers(8, 6, seed=1), numbers(6)


def gradient(f: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Differentiates by torch.func, with respect to the first argument."""
    found: Tensor = torch.func.grad(f)(*args)
    return found


def rejection(f: Callable[..., Any], *args: Any, in_specs: Any, out_specs: Any) -> str:
    """Returns the error's text; in test_bugs.py all of it must equal tests/golden/bugs.txt."""
    with pytest.raises(ShardTypeError) as caught:
        check_program(shard_map(f, mesh=ABSTRACT, in_specs=in_specs, out_specs=out_specs), *args)
    caller = sys._getframe(1).f_code
    if Path(caller.co_filename).name == "test_bugs.py":
        hold("bugs.txt", caller.co_name, str(caught.value))
    return str(caught.value)


def assert_right(
    f: Callable[..., Any],
    one_device: Callable[..., Tensor],
    *args: Tensor,
    in_specs: Any,
    out_specs: Any,
) -> None:
    """Is accepted, and on real ranks equal to one device, gradients included."""
    mapped = shard_map(f, mesh=RANKS, in_specs=in_specs, out_specs=out_specs)
    expected, actual = one_device(*args), mapped(*args)
    torch.testing.assert_close(actual, expected)
    wanted = [x for x in args if x.requires_grad]
    if not expected.requires_grad:
        return
    weights = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).reshape(expected.shape)
    torch.testing.assert_close(
        torch.autograd.grad((actual * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
    )


class Plain(TypedFunction):
    """A product whose backward does not sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.mT, x.mT @ grad


class SetUp(TypedFunction):
    """A Function in torch's newer form."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Plain.backward
