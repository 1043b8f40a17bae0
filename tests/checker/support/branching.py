"""Bodies that branch on numbers taken from tensors, and what both branches have to give."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardmap_torch import I, P, all_reduce, check_program, make_mesh, shard_map
from tests.checker.support.rejections import ABSTRACT, RANKS, numbers

X, W = numbers(8, 6), numbers(6, 3)
SPECS, WHOLE = (P("tp"), P()), P()
AUTO = make_mesh((4,), ("tp",), kind="simulated")


def program_paths(
    f: Callable[..., Any], *args: Any, in_specs: Any = SPECS, out_specs: Any = WHOLE
) -> int:
    mapped = shard_map(f, mesh=ABSTRACT, in_specs=in_specs, out_specs=out_specs)
    return len(check_program(mapped, *args).program_paths)


def both(f: Callable[..., Any], one: Callable[..., Tensor], *args: Tensor, **specs: Any) -> None:
    """Right with data for each of two ways: `args`, and its first tensor a thousandth as large."""

    def touching(g: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """On one way a result may not lead to every argument."""
        return lambda *args: g(*args) + 0 * sum(x.sum() for x in args)

    mapped = shard_map(f, mesh=RANKS, **specs)
    for scale in (1.0, 1e-3):
        x = (args[0].detach() * scale).requires_grad_(args[0].requires_grad)
        given = (x, *args[1:])
        expected, actual = touching(one)(*given), touching(mapped)(*given)
        torch.testing.assert_close(actual, expected)
        wanted = [x for x in given if x.requires_grad]
        if wanted:
            weights = torch.linspace(1, 2, expected.numel(), dtype=X.dtype).reshape(expected.shape)
            torch.testing.assert_close(
                torch.autograd.grad((actual * weights).sum(), wanted),
                torch.autograd.grad((expected * weights).sum(), wanted),
            )


def loss(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).square().sum(), "tp", dst=I)


def plain_loss(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).square().sum()
