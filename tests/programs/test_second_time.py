"""Programs that are right once and wrong the second time elsewhere; on ranks and processes."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    ShardMapError,
    all_reduce,
    axis_group,
    convert,
    make_mesh,
    shard_map,
)
from shardmap_torch.optim import clip_by_global_norm
from tests.programs.support.harness import global_value, random, worker_mesh
from tests.support.pool import Gloo

ONE: Final = make_mesh((1,), ("tp",), kind="simulated", simulate="ranks")
TWO: Final = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
COLUMNS, EACH, ROWS = P(None, "tp"), P(), P("tp")
X, W, SLOPE, BIAS = random((4, 6), 0), random((6, 8), 1), random((1,), 2), random((8,), 3)


def accumulated(mesh: Mesh) -> list[Tensor]:
    """Three backwards from outside before a step."""

    def loss(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(functional.silu(x @ w).square().sum(), "tp", dst=I)

    found, w = shard_map(loss, in_specs=(ROWS, EACH), out_specs=P(), **on(mesh)), W.clone()
    w.requires_grad_()
    for k in (1.0, 2.0, -0.5):
        found(k * X, w).backward()
    assert w.grad is not None
    return [w.grad]


def accumulated_inside(mesh: Mesh) -> list[Tensor]:
    """Three backwards in the body, into one leaf, before the sum over the ranks."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        for k in (1.0, 2.0, -0.5):
            functional.silu(k * x @ w).square().sum().backward()
        assert w.grad is not None
        return w - 0.1 * all_reduce(w.grad, "tp", dst=I)

    return [shard_map(step, in_specs=(ROWS, EACH), out_specs=P(), **on(mesh))(X, W)]


def summed_in_place_in_turn(mesh: Mesh) -> list[Tensor]:
    """One in-place reduction, called again for other values."""
    group = axis_group(mesh, "tp")

    def body(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros_like(w[0])
        for k in (1.0, 2.0, -0.5):
            part = (k * x @ w).sin().sum(0)
            dist.all_reduce(part, group=group)
            total += part
        return total

    return [shard_map(body, in_specs=(ROWS, EACH), out_specs=P(), **on(mesh))(X, W)]


def summed_in_place_again(mesh: Mesh) -> list[Tensor]:
    """Wrong: what has been summed is summed again with what is added to it."""
    group = axis_group(mesh, "tp")

    def body(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros_like(w[0])
        for k in (1.0, 2.0, -0.5):
            total += (k * x @ w).sin().sum(0)
            dist.all_reduce(total, group=group)
        return total

    return [shard_map(body, in_specs=(ROWS, EACH), out_specs=P(), **on(mesh))(X, W)]


def gradient_summed_again(mesh: Mesh) -> list[Tensor]:
    """Wrong: an accumulated gradient is summed over the ranks after each backward."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros_like(w)
        w = w.detach().requires_grad_()
        for k in (1.0, 2.0, -0.5):
            (own,) = torch.autograd.grad((k * x @ w).sin().sum(), w)
            total = all_reduce(total + own, "tp", dst=I)
        return total

    return [shard_map(step, in_specs=(ROWS, EACH), out_specs=P(), **on(mesh))(X, W)]


def used_after_the_loss(mesh: Mesh) -> list[Tensor]:
    """A weight and an activation are used again after the loss was reduced."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        h = functional.silu(x @ convert(w, "tp", src=I, dst=R))
        loss = all_reduce(h.square().sum(), "tp", dst=I) + 0.1 * w.square().sum()
        scaled = h / (1 + convert(loss, "tp", src=I, dst=R))
        return loss * w.sin().sum() + all_reduce(scaled.sin().sum(), "tp", dst=I)

    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    loss = shard_map(body, in_specs=(ROWS, EACH), out_specs=P(), **on(mesh))(x, w)
    return [loss, *torch.autograd.grad(loss, (x, w))]


def learned_slope(spec: P, slope: Tensor) -> Callable[[Mesh], list[Tensor]]:
    def learned(mesh: Mesh) -> list[Tensor]:
        def whole(x: Tensor, w: Tensor, slope: Tensor, down: Tensor) -> Tensor:
            h = functional.prelu(x @ w, slope)
            return all_reduce(h @ down, "tp", dst=I).square().sum()

        args = [each.clone().requires_grad_() for each in (X, W, slope, W.t().contiguous())]
        specs = (EACH, COLUMNS, spec, ROWS)
        loss = shard_map(whole, in_specs=specs, out_specs=P(), **on(mesh))(*args)
        return [loss, *torch.autograd.grad(loss, args)]

    return learned


def empty(reduce: Callable[[Tensor], Tensor]) -> Callable[[Mesh], list[Tensor]]:
    """Reduces rows of which no rank has any."""

    def reduced(mesh: Mesh) -> list[Tensor]:
        x = X[:0].clone().requires_grad_()
        y = shard_map(reduce, in_specs=(ROWS,), out_specs=P(), **on(mesh))(x)
        return [y, torch.autograd.grad(y.sum(), x)[0]]

    return reduced


def clipped(ord: float) -> Callable[[Mesh], list[Tensor]]:
    """Clips gradients of which one has no entries."""

    def found(mesh: Mesh) -> list[Tensor]:
        specs = {"a": ROWS, "b": ROWS}

        def body(grads: dict[str, Tensor]) -> Any:
            clipped, norm = clip_by_global_norm(grads, specs, 0.5, ord=ord)
            return clipped, norm

        grads = {"a": X[:0], "b": X}
        out, norm = shard_map(body, in_specs=(specs,), out_specs=(specs, P()), **on(mesh))(grads)
        return [out["a"], out["b"], norm]

    return found


def on(mesh: Mesh) -> dict[str, Any]:
    return {"mesh": mesh, "check": True if mesh is ONE else "global"}


FAMILIES: Final[dict[str, Callable[[Mesh], list[Tensor]]]] = {
    "accumulated": accumulated,
    "accumulated inside": accumulated_inside,
    "summed in place in turn": summed_in_place_in_turn,
    "used after the loss": used_after_the_loss,
    "one learned slope": learned_slope(EACH, SLOPE),
    "a learned slope a column": learned_slope(ROWS, BIAS),
    "empty sum": empty(lambda x: all_reduce(x.square().sum(0), "tp", dst=I)),
    "empty norm": empty(lambda x: all_reduce(x.square().sum(0), "tp", dst=I).sqrt()),
    "empty largest": empty(lambda x: all_reduce(x.amax(0), "tp", op="max", dst=I)),
    "empty logsumexp": empty(lambda x: all_reduce(x.exp().sum(0), "tp", dst=I).log()),
    "clipped": clipped(2.0),
    "clipped, largest": clipped(float("inf")),
}
WRONG: Final[dict[str, Callable[[Mesh], list[Tensor]]]] = {
    "summed in place again": summed_in_place_again,
    "gradient summed again": gradient_summed_again,
}


def fate(name: str, mesh: Mesh) -> str:
    """Returns "equal" if it computes what one device does, else the error or "wrong"."""
    expected, found = outcome(name, ONE), outcome(name, mesh)
    if isinstance(found, str) or isinstance(expected, str):
        return str(found)
    pairs = zip(found, expected, strict=True)
    same = all(torch.allclose(a, b, equal_nan=True, atol=1e-12) for a, b in pairs)
    return "equal" if same else "wrong"


def outcome(name: str, mesh: Mesh) -> list[Tensor] | str:
    try:
        return [global_value(x).detach() for x in {**FAMILIES, **WRONG}[name](mesh)]
    except (ShardMapError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def on_processes() -> list[str]:
    mesh = worker_mesh((2,), ("tp",))
    return [fate(name, mesh) for name in (*FAMILIES, *WRONG)]


OTHERS: Final = {
    "summed in place again": "ShardTypeError: body: check='global': add_ is not what it is on one "
    "device: over 'tp' an operand is a pending sum: an addend that is equal on all ranks would be "
    "counted once per rank.",
    "gradient summed again": "ShardTypeError: step: add over axis 'tp' of Partial and K: an addend "
    "that is equal on all ranks would be counted once per rank.",
    "empty largest": "RuntimeError: reducing over zero-size dimension for reduction operation "
    "without identity",
}
"""Errors of the wrong ones, and one that torch raises on one device too."""
EXPECTED: Final = [OTHERS.get(name, "equal") for name in (*FAMILIES, *WRONG)]


def test_on_simulated_ranks_each_equals_one_device_and_the_wrong_ones_are_refused() -> None:
    assert [fate(name, TWO) for name in (*FAMILIES, *WRONG)] == EXPECTED


@pytest.mark.slow
def test_on_processes_each_equals_one_device_and_the_wrong_ones_are_refused(gloo: Gloo) -> None:
    for found in gloo(2).run(on_processes, timeout=90):
        assert found == EXPECTED
