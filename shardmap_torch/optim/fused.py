"""torch's fused AdamW on copies: new trees for three copies and one pass over memory."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.core.torch_private.engine import forward_level, fused_adamw_, has_kernel
from shardmap_torch.optim.lists import Tensors, as_number, beneath_vmaps, foreach

_DEVICES: Final = frozenset(
    kind
    for kind in ("cpu", "cuda")
    if fused_adamw_ is not None and has_kernel("aten::_fused_adamw_", kind.upper())
)
_LAYOUT: Final = attrgetter("dtype", "device", "shape")
_REQUIRES_GRAD: Final = attrgetter("requires_grad")


def fused_adamw(
    columns: Sequence[Tensors], number: Tensor, options: Sequence[Tensor | float]
) -> list[Tensors] | None:
    """Steps by torch's fused operator, without weight decay; None where it cannot serve.

    In its place the checker, whose tensors are fake, and torch.compile follow the composition; so
    do derivatives, and transforms of torch.func other than vmaps, which the operator would escape.

    Args:
        columns: parameters, whose memory the results take, gradients, and both moments.
        number: of the step.
        options: the learning rate, both betas and eps.

    Returns:
        New parameters and moments.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    numbers = [as_number(option) for option in options]
    if any([isinstance(x, Tensor) for x in numbers]) or forward_level() >= 0:
        return None
    return beneath_vmaps(_step, (*columns, number, *map(float, numbers)))


def _step(*operands: Any) -> list[Tensors] | None:
    *columns, number, lr, beta1, beta2, eps = operands
    if not _are_alike(columns) or not _are_plain([*chain(*columns), number]):
        return None
    params, grads, *moments = columns
    copies = [_laid_out_as(params, foreach("clone", moment)) for moment in moments]
    steps = [number.to(params[0].device, torch.float32)] * len(params)
    fused_adamw_(
        params, _laid_out_as(params, grads), *copies, [], steps,
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=0.0, amsgrad=False, maximize=False,
    )  # fmt: skip
    return [params, *copies]


def _are_alike(columns: Sequence[Tensors]) -> bool:
    """Returns whether all are of one dtype, on one device that has a kernel, and of equal shapes.

    Shapes differ where a vmap batches one of them alone.
    """
    layouts = list(map(_LAYOUT, columns[0]))
    if len({layout[:2] for layout in layouts}) != 1 or layouts[0][1].type not in _DEVICES:
        return False
    return all([list(map(_LAYOUT, column)) == layouts for column in columns])


def _are_plain(tensors: Tensors) -> bool:
    """Returns whether the operator may write into these: autograd and subclasses do not see it."""
    if set(map(type, tensors)) != {Tensor}:
        return False
    return not (torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)))


def _laid_out_as(like: Tensors, column: Tensors) -> Tensors:
    """Returns the tensors with the strides of others, which the kernel takes for granted."""
    pairs = zip(column, like, strict=True)
    return [x if x.stride() == to.stride() else torch.empty_like(to).copy_(x) for x, to in pairs]
