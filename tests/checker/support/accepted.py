"""Checks a body against one device."""

import torch
from torch import Tensor

from shardmap_torch import P, make_mesh
from tests.checker.support.other_programs import ARGS, Body, mapped

RANKS = make_mesh((2, 4), ("dp", "tp"), kind="simulated", simulate="ranks")
ONE = make_mesh((1, 1), ("dp", "tp"), kind="simulated", simulate="ranks")


def accepted(body: Body, out: P) -> None:
    """Accepts it, and it gives on ranks what it gives on one device, gradients included."""
    found = [_with_gradients(mapped(body, out, mesh=mesh)) for mesh in (RANKS, ONE)]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def _with_gradients(f: Body) -> list[Tensor]:
    y = f(*ARGS)
    weights = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape)
    grads = torch.autograd.grad((y * weights).sum(), ARGS, allow_unused=True)
    return [y.detach(), *(g if g is not None else torch.zeros(()) for g in grads)]
