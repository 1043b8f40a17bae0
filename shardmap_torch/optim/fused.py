"""torch's fused AdamW on copies: new trees for three copies and one pass over memory."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.core.torch_private.engine import (
    dispatch_mode_stack,
    forward_level,
    fused_adamw_,
    has_kernel,
)
from shardmap_torch.optim.lists import Tensors, as_number, beneath_vmaps, foreach, is_readable

_DEVICES: Final = frozenset(
    kind
    for kind in ("cpu", "cuda")
    if fused_adamw_ is not None and has_kernel("aten::_fused_adamw_", kind.upper())
)
_DTYPE: Final = attrgetter("dtype")
_DEVICE: Final = attrgetter("device")
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
    lr, *numbers = map(as_number, options)
    if any([isinstance(x, Tensor) for x in numbers]) or forward_level() >= 0:
        return None
    if isinstance(lr, Tensor) and not (dispatch_mode_stack() and is_readable(lr)):
        return None
    return beneath_vmaps(_step, (*columns, number, lr, *map(float, numbers)), writes=True)


def _step(*operands: Any) -> list[Tensors] | None:
    *columns, number, lr, beta1, beta2, eps = operands
    every = [*chain(*columns)]
    if not _is_served(every) or type(number) is not Tensor:
        return None
    params, grads, *moments = columns
    strides = [*map(Tensor.stride, params)]
    copies = [_laid_out_as(params, strides, foreach("clone", moment)) for moment in moments]
    steps = [number.to(every[0].device, torch.float32)] * len(params)
    fused_adamw_(
        params, _laid_out_as(params, strides, grads), *copies, [], steps,
        lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=0.0, amsgrad=False, maximize=False,
    )  # fmt: skip
    return [params, *copies]


def _is_served(tensors: Tensors) -> bool:
    """Returns whether the operator may write into these, which autograd and subclasses do not see.

    They are of one dtype, on one device that has a kernel, and in memory as they are.
    """
    if {*map(type, tensors)} != {Tensor} or len({*map(_DTYPE, tensors)}) > 1:
        return False
    if any(map(Tensor.is_neg, tensors)):  # as the imaginary part of a conjugate
        return False
    device, *others = {*map(_DEVICE, tensors)}
    if others or device.type not in _DEVICES:
        return False
    return not (torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)))


def _laid_out_as(like: Tensors, strides: list[tuple[int, ...]], column: Tensors) -> Tensors:
    """Returns the tensors with the strides of others, which the kernel takes for granted."""
    if [*map(Tensor.stride, column)] == strides:
        return column
    return [torch.empty_like(to).copy_(x) for x, to in zip(column, like, strict=True)]
