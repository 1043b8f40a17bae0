"""Programs that are rejected, one for each kind of message."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    V,
    all_gather,
    all_reduce,
    axis_index,
    convert,
    make_mesh,
    reinterpret,
)

MESH: Final = make_mesh((2, 4), ("dp", "tp"), kind="abstract")
W: Final = torch.ones(4, 4).requires_grad_()
X: Final = torch.ones(8, 4).requires_grad_()


class Tagged(Tensor):
    """A subclass that nobody knows."""


def mixed_gather(x: Tensor, w: Tensor) -> Tensor:
    return all_gather(x, "dp", dst=I) @ w


def partial_through_relu(x: Tensor, w: Tensor) -> Tensor:
    y = reinterpret(x @ w, "dp", src=V, dst=Partial)
    return all_reduce(torch.relu(y), "dp", dst=I)


def bias_beside_partial(x: Tensor, w: Tensor) -> Tensor:
    y = reinterpret(x @ w, "dp", src=V, dst=Partial)
    return all_reduce(y + 1, "dp", dst=I)


def product_of_partials(x: Tensor, w: Tensor) -> Tensor:
    y = reinterpret(x @ w, "dp", src=V, dst=Partial)
    return all_reduce(y * y, "dp", dst=I)


def partial_masked_by_rank(x: Tensor, w: Tensor) -> Tensor:
    y = reinterpret(x @ w, "dp", src=V, dst=Partial)
    return all_reduce(torch.where(axis_index("dp") > 0, y, 0), "dp", dst=I)


def rounded_partial(x: Tensor, w: Tensor) -> Tensor:
    y = reinterpret(x @ w, "dp", src=V, dst=Partial)
    return all_reduce(y.to(torch.int64), "dp", dst=I)


def partial_returned(x: Tensor, w: Tensor) -> Tensor:
    return reinterpret(x @ w, "dp", src=V, dst=Partial)


def varying_returned(x: Tensor, w: Tensor) -> Tensor:
    y = (x @ w).relu()
    return y.sum(0)


def doubled_all_reduce(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce(all_reduce(x @ w, "dp", dst=I), "dp", dst=I)


def gather_of_equal_values(x: Tensor, w: Tensor) -> Tensor:
    return all_gather(all_reduce(x, "dp", dst=R), "dp", dst=R) @ w


def converted_varying(x: Tensor, w: Tensor) -> Tensor:
    return convert(x @ w, "dp", src=R, dst=I)


def maximum_of_partial(x: Tensor, w: Tensor) -> Tensor:
    y = reinterpret(x @ w, "dp", src=V, dst=Partial)
    return all_reduce(y, "dp", dst=I, op="max")


def replicate_loss(x: Tensor, w: Tensor) -> Tensor:
    def loss(w: Tensor) -> Tensor:
        return all_reduce((x @ w).square().sum(), "dp", dst=R)

    grad: Tensor = torch.func.grad(loss)(w)
    return all_reduce(grad, "dp", dst=I)


def both_ways(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return all_reduce((x @ w).sum(), "dp", dst=I), all_reduce(x.sum(), "dp", dst=I) * w.sum()


class Column(torch.autograd.Function):
    """A matmul whose backward forgets to sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grads[0] @ w.mT, x.mT @ grads[0]


def custom_backward(x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = Column.apply(x, w.sin())  # type: ignore[no-untyped-call]  # torch's
    return y


def closed_over(x: Tensor, w: Tensor) -> Tensor:
    return x @ W


def closed_over_subclass(x: Tensor, w: Tensor) -> Tensor:
    return x + _TAGGED


_TAGGED: Final = torch.ones(4).as_subclass(Tagged)


def backward_into_closure(x: Tensor, w: Tensor) -> Tensor:
    (x @ W).sum().backward()
    return x


def unseen_backward(x: Tensor, w: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(((leaf * 2).sum(),), (torch.ones(()),), False, False, (), True, True)
    return x


def branch_on_rank(x: Tensor, w: Tensor) -> Tensor:
    return x if axis_index("dp") == 0 else 2 * x


def number_of_varying_value(x: Tensor, w: Tensor) -> Tensor:
    return x * (x @ w).sum().item()


def plain_number(x: Tensor, w: Tensor) -> Tensor:
    return x * float(w.sum())


def number_as_size(x: Tensor, w: Tensor) -> Tensor:
    size: Any = w.long().sum().item()
    return x + torch.zeros((size, 1, 1))


def endless(x: Tensor, w: Tensor) -> Tensor:
    while w.sum() > 1:
        w = w / 2
    return x @ w


def different_ways(x: Tensor, w: Tensor) -> Tensor:
    return x if w.sum() > 1 else x.sum(0)


def unknown_shape(x: Tensor, w: Tensor) -> Tensor:
    return x * w[w > 0].numel()


def written_input(x: Tensor, w: Tensor) -> Tensor:
    return x.detach().add_(1)


def written_closure(x: Tensor, w: Tensor) -> Tensor:
    _COUNT.add_(1)
    return x


_COUNT: Final = torch.zeros(())

INVARIANT: Final = P(invariant={"dp", "tp"})
CASES: Final[tuple[tuple[Callable[..., Any], P, Any], ...]] = (
    (mixed_gather, P(None, "dp"), P(None, "dp")),
    (partial_through_relu, P(), P()),
    (bias_beside_partial, P(), P()),
    (product_of_partials, P(), P()),
    (partial_masked_by_rank, P(), P()),
    (rounded_partial, P(), P()),
    (partial_returned, P(), P()),
    (varying_returned, P(), P()),
    (doubled_all_reduce, P(), P()),
    (gather_of_equal_values, P(), P()),
    (converted_varying, P(), P()),
    (maximum_of_partial, P(), P()),
    (replicate_loss, P(), P()),
    (both_ways, P(), P()),
    (custom_backward, INVARIANT, P("dp")),
    (closed_over, P(), P("dp")),
    (closed_over_subclass, P(), P("dp")),
    (backward_into_closure, P(), P("dp")),
    (unseen_backward, P(), P("dp")),
    (branch_on_rank, P(), P("dp")),
    (number_of_varying_value, P(), P("dp")),
    (plain_number, P(), P("dp")),
    (number_as_size, P(), P("dp")),
    (endless, P(), P("dp")),
    (different_ways, P(), P("dp")),
    (unknown_shape, P(), P("dp")),
    (written_input, P(), P("dp")),
    (written_closure, P(), P("dp")),
)
