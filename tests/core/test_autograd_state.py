"""Checks that torch's checkpoint starts: under its hooks, or in the backward that recomputes."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardmap_torch import Mesh, P, R, ShardTypeError, all_gather, full, make_mesh, shard_map
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on
from tests.support.pool import Gloo


def in_a_checkpoint(mesh: Mesh, use_reentrant: bool) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return (all_gather(x.sin(), "tp", dim=0, dst=R) @ w).cos()

    specs = P("tp"), P(None, "tp")
    f = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(None, "tp"))
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((4, 3), (3, 4))
    )

    def around(x: Tensor, w: Tensor) -> Tensor:
        return f(x * 1.5, w) * 2

    def alone(x: Tensor, w: Tensor) -> Tensor:
        return ((x * 1.5).sin() @ w).cos() * 2

    expected = torch.autograd.grad(alone(x, w).sum(), (x, w))
    for _ in range(2):
        full(checkpoint(around, x, w, use_reentrant=use_reentrant)).sum().backward()
        torch.testing.assert_close((x.grad, w.grad), expected, rtol=1e-10, atol=1e-10)
        x.grad = w.grad = None


@ON_EVERY_MESH
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_first_call_of_a_function_may_be_in_a_checkpoint(
    kind: Any, use_reentrant: bool, gloo: Gloo
) -> None:
    run_on(kind, partial(in_a_checkpoint, use_reentrant=use_reentrant), gloo)


class DividedByRows(torch.autograd.Function):
    """Divides gradients by a size of a rank's shard."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.shape[0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_gradient_unlike_that_of_one_device_is_refused_in_a_checkpoint_too(
    use_reentrant: bool,
) -> None:
    mesh = make_mesh((2,), ("dp",), kind="simulated")

    def body(x: Tensor) -> Tensor:
        y: Tensor = DividedByRows.apply(x)  # type: ignore[no-untyped-call]
        return y

    f = shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check="global")
    x = torch.ones(4, 2, requires_grad=True)
    with pytest.raises(ShardTypeError, match="is not what it is on one device"):
        checkpoint(f, x, use_reentrant=use_reentrant).sum().backward()
