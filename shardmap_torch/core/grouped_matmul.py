"""Products of groups of rows, each with a matrix of its own; how many rows a group has, data says.

Custom operators, since sizes that data decides are no shapes: the operands keep theirs, and the
loop over the groups is out of sight of what interprets programs without data.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.core.torch_private.engine import are_transforms_active


@torch.library.custom_op("shardmap_torch::grouped_matmul", mutates_args=())
def grouped_matmul(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """Multiplies the next `sizes[g]` rows with `weights[g]`; rows behind all groups become zeros.

    Shape: rows [r, d], weights [g, d, f], sizes [g] give [r, f].
    """
    out = rows.new_zeros(rows.shape[0], weights.shape[2])
    for group, place in _places(rows, sizes):
        torch.mm(rows[place], weights[group], out=out[place])
    return out


@torch.library.custom_op("shardmap_torch::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    """Multiplies the next `sizes[g]` rows of both, transposed: the gradient of `weights[g]`.

    Shape: left [r, d], right [r, f], sizes [g] give [g, d, f].
    """
    out = left.new_zeros(sizes.shape[0], left.shape[1], right.shape[1])
    for group, place in _places(left, sizes):
        torch.mm(left[place].mT, right[place], out=out[group])
    return out


def _places(rows: Tensor, sizes: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, size in enumerate(sizes.tolist()):
        if size:
            yield group, slice(start, start + size)
        start += size
    if start > rows.shape[0]:
        raise ValueError(f"The groups have {start} rows together, of {rows.shape[0]}.")


@grouped_matmul.register_fake
def _matmul_shape(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@grouped_outer.register_fake
def _outer_shape(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    return left.new_empty(sizes.shape[0], left.shape[1], right.shape[1])


def grouped_product(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """Computes `grouped_matmul`, differentiable under `torch.func.grad` too.

    torch's custom operators have no derivative there.
    """
    product: Tensor = _apply(_Matmul, grouped_matmul, rows, weights, sizes)
    return product


def _outer(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    outer: Tensor = _apply(_Outer, grouped_outer, left, right, sizes)
    return outer


def _apply(transformed: Any, operator: Any, *operands: Tensor) -> Any:
    return transformed.apply(*operands) if are_transforms_active() else operator(*operands)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, sizes = ctx.saved_tensors
    return grouped_product(grad, weights.mT, sizes), _outer(rows, grad, sizes), None


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    left, right, sizes = ctx.saved_tensors
    return grouped_product(right, grad.mT, sizes), grouped_product(left, grad, sizes), None


grouped_matmul.register_autograd(_matmul_backward, setup_context=_save)
grouped_outer.register_autograd(_outer_backward, setup_context=_save)


class _Matmul(torch.autograd.Function):
    forward = staticmethod(grouped_matmul)
    setup_context = staticmethod(_save)
    backward = staticmethod(_matmul_backward)


class _Outer(torch.autograd.Function):
    forward = staticmethod(grouped_outer)
    setup_context = staticmethod(_save)
    backward = staticmethod(_outer_backward)
