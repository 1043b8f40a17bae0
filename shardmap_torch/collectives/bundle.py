"""Bundles: all-reduces of a tree's small tensors, sent as one message.

A parameter tree that is converted from I to R has one all-reduce for each leaf in its backward, and
small messages cost their latency. On processes the tensors of a tree are sent in flat buffers, one
for each dtype. Each keeps its own type, and a checker sees each by itself.

Source: the gradient buckets of `torch.nn.parallel.DistributedDataParallel`, Li et al. 2020.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.collectives.autograd import TypedFunction, bind, is_transformed, issue
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Backend, sends_bundles
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core.storage import all_spare, spare, unviewed
from shardmap_torch.core.tree import put

SMALL: Final = 2**20
"""Bytes above which a tensor is sent by itself, since its copy costs more than a message."""


def issue_all(
    scope: Scope,
    operation: Collective,
    xs: Sequence[Tensor],
    after: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Runs one operation that the user's code calls on several tensors; see `issue`.

    `after` is applied to each of the results.
    """
    is_spared = _is_spared(scope.backend, operation, xs)
    if is_spared or _can_bundle(scope.backend, operation, xs):
        for x in xs:
            scope.on_operation(operation, x)
        ys = list(xs) if is_spared else bind_all(scope.backend, operation, xs)
    else:
        ys = [issue(scope, operation, x) for x in xs]
    return ys if after is None else list(map(after, ys))


def _is_spared(backend: Backend, operation: Collective, xs: Sequence[Tensor]) -> bool:
    """Returns whether each is a spare operand of a sum over one rank, and so its result."""
    return (
        operation.movement.sums
        and operation.keeps_dtype
        and sends_bundles(backend)
        and backend.mesh.num_ranks(operation.axes) == 1
        and not torch.compiler.is_compiling()
        and not is_transformed()
        and all_spare(xs)
    )


def _can_bundle(backend: Backend, operation: Collective, xs: Sequence[Tensor]) -> bool:
    movements = operation.movement, operation.transpose.movement
    return (
        len(xs) > 1
        and sends_bundles(backend)
        and any(movement.sums for movement in movements)
        and all(movement.sums or movement.still for movement in movements)
        and backend.mesh.num_ranks(operation.axes) > 1
        and not torch.compiler.is_compiling()
        and not is_transformed()
    )


def bind_all(backend: Backend, operation: Collective, xs: Sequence[Tensor]) -> list[Tensor]:
    """Runs one operation on several tensors so that their derivatives are right; see `bind`."""
    if is_transformed():  # in a backward that a transform outside differentiates
        return [bind(backend, operation, x) for x in xs]
    tracked = torch.is_grad_enabled()
    differentiable = [place for place, x in enumerate(xs) if tracked and x.requires_grad]
    others = [place for place, x in enumerate(xs) if not (tracked and x.requires_grad)]
    results: list[Tensor] = list(xs)
    if differentiable:
        outputs = _apply(operation, backend, *[xs[place] for place in differentiable])
        results = put(results, differentiable, outputs)
    return put(results, others, _run(backend, operation, [xs[place] for place in others]))


def _run(backend: Backend, operation: Collective, xs: Sequence[Tensor]) -> list[Tensor]:
    """Runs the operation without autograd: small tensors of one dtype together."""
    results: list[Tensor] = list(xs)
    if operation.movement.still:
        return results
    bundles: dict[torch.dtype, list[int]] = {}
    for place, x in enumerate(xs):
        if x.nbytes <= SMALL:
            bundles.setdefault(x.dtype, []).append(place)
        else:
            results[place] = operation.run(backend, x)
    for places in bundles.values():
        chosen = [xs[place] for place in places]
        results = put(results, places, _together(backend, operation, chosen))
    return results


def _together(backend: Backend, operation: Collective, xs: Sequence[Tensor]) -> list[Tensor]:
    if len(xs) == 1:
        return [operation.run(backend, xs[0])]
    buffer = torch.cat([x.reshape(-1) for x in xs])
    with spare(buffer):
        flat = operation.run(backend, buffer)
    parts = flat.split([x.numel() for x in xs])
    # Not views of one buffer for autograd, which would take a write into one as a write into all.
    return [unviewed(part.view(x.shape)) for part, x in zip(parts, xs, strict=True)]


class _Bundle(TypedFunction):
    """Autograd Function of one operation on several tensors; like `EagerForm`."""

    @staticmethod
    def forward(
        ctx: Any, operation: Collective, backend: Backend, *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.operation, ctx.backend = operation, backend
        return tuple(_run(backend, operation, xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        present = [grad for grad in grads if grad is not None]
        pulled = iter(bind_all(ctx.backend, ctx.operation.transpose, present))
        return None, None, *(None if grad is None else next(pulled) for grad in grads)


# As in `autograd`: no transform is active where it is called.
_apply: Final[Callable[..., Sequence[Tensor]]] = super(torch.autograd.Function, _Bundle).apply
