"""Batching rules that torch lacks or has wrong: operators on the values of all ranks in one call.

Without one, vmap calls an attention for each rank, on operands that it copies out of those of all:
a gradient then takes time that grows with the square of the number of ranks. Attention treats the
sequences of a batch alike, so that ranks become more of them. A product by each rank's own matrix
is taken apart by torch into four times the operations of one `bmm`. `select_scatter` it makes
a scatter of values that it repeats along the dim, whose gradients it adds up; and `index_fill`
writes the values of all ranks into one tensor, where that is equal on all.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.library import Library

from shardmap_torch.core.caching import memo
from shardmap_torch.core.torch_private.engine import OpOverload, functorch, has_kernel, under_vmap

_aten: Final = torch.ops.aten
_ATTENTIONS: Final = (
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Operators of [sequences, heads, positions, features], and of logarithms without features."""

_attend_by_formula: Final = _aten._scaled_dot_product_attention_math.default
"""The operator that torch calls where a mask needs a gradient, which vmap hides from it."""

_matmul: Final = _aten.matmul.default
"""The operator of all products in Python, and of a Linear's where it has no bias."""

_select_scatter: Final = _aten.select_scatter.default
_index_fill: Final = _aten.index_fill.int_Tensor

_BATCHED: Final = "FuncTorchBatched"

_OWN: Final[set[OpOverload]] = set()
"""Operators that have their rule from us."""


@memo
def add_batching_rules() -> Library:
    """Gives torch the rules, in this process; a release that has one of its own keeps that.

    They last as long as the library that is returned, which is remembered.
    """
    library = Library("aten", "IMPL")
    for op in _ATTENTIONS:
        if not has_kernel(op.name(), _BATCHED):
            _OWN.add(op)
            library.impl(op, partial(_at_level, _attend, op), _BATCHED)
    if not has_kernel(_matmul.name(), _BATCHED):
        library.impl(_matmul, _multiply, _BATCHED)
    with warnings.catch_warnings():  # torch says that it has rules for them, which are wrong
        warnings.simplefilter("ignore")
        library.impl(_select_scatter, partial(_at_level, _write_one, _select_scatter), _BATCHED)
        library.impl(_index_fill, _fill, _BATCHED)
    return library


def batches_learned_masks(device: torch.device) -> bool:
    """Returns whether attention of all ranks gives a mask its gradient: by a rule of ours."""
    add_batching_rules()
    return device.type == "cpu" and _ATTENTIONS[0] in _OWN


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiplies at a level of vmap; rows by a matrix of each rank's own in one call."""
    level = functorch.maybe_current_level() or -1  # a tensor may outlive its level, torch says then
    x, x_dim = functorch._unwrap_batched(a, level)
    w, w_dim = functorch._unwrap_batched(b, level)
    if w_dim is None or b.ndim != 2 or a.ndim < 2:
        return _matmul.decompose(a, b)  # type: ignore[no-any-return]
    with under_vmap():
        x = _in_front(x, x_dim, w.shape[w_dim])
        y = torch.bmm(x if x.ndim == 3 else x.flatten(1, -2), w.movedim(w_dim, 0))
        y = y if x.ndim == 3 else y.unflatten(1, x.shape[1:-1])
    return functorch._add_batch_dim(y, 0, level)


def _at_level(rule: Callable[..., Any], op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Calls a rule at a level of vmap, or the operator if its operands are batched at others."""
    level = functorch.maybe_current_level() or -1
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if all(functorch._unwrap_batched(each, level)[1] is None for each in given):
        with under_vmap():
            return op(*args, **kwargs)
    return rule(op, level, *args, **kwargs)


def _write_one(op: OpOverload, level: int, x: Tensor, y: Tensor, dim: int, index: int) -> Tensor:
    """Writes at one index of a dim, at a level of vmap."""
    pairs = [functorch._unwrap_batched(each, level) for each in (x, y)]
    count = next(each.shape[at] for each, at in pairs if at is not None)
    with under_vmap():
        base, part = [_in_front(each, at, count) for each, at in pairs]
        out = op(base, part, dim % x.ndim + 1, index)
    return functorch._add_batch_dim(out, 0, level)


def _fill(x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    """Writes one number at some indices of a dim, at a level of vmap."""
    sizes = [1] * x.ndim
    if sizes:
        sizes[dim] = x.shape[dim]
    mask = torch.zeros(sizes, dtype=torch.bool, device=x.device).index_fill(dim, index, True)
    return torch.where(mask, value.to(x.dtype), x)


def _attend(
    op: OpOverload, level: int, *args: Any, attn_mask: Tensor | None = None, **kwargs: Any
) -> Any:
    """Calls an attention at a level of vmap."""
    operands = [functorch._unwrap_batched(x, level) for x in args if isinstance(x, Tensor)]
    options = args[len(operands) :]  # numbers come last
    masks = [] if attn_mask is None else [functorch._unwrap_batched(attn_mask, level)]
    count = next(x.shape[dim] for x, dim in (*operands, *masks) if dim is not None)
    with under_vmap():
        own = [_folded(x, dim, count) for x, dim in operands]
        shared = [_folded_mask(x, dim, count, len(own[0]) // count) for x, dim in masks]
        mask = shared[0] if shared else None
        if mask is not None and mask.requires_grad:  # for which the kernel has no gradient
            out = _attend_by_formula(*own, mask, *options, **kwargs)[0]
            results = (out, out[..., 0])  # nobody reads the logarithms of what it does not save
        else:
            results = op(*own, *options, attn_mask=mask, **kwargs)
        parts = [y.unflatten(0, (count, len(y) // count)) for y in results]
    return tuple(functorch._add_batch_dim(y, 0, level) for y in parts)


def _in_front(x: Tensor, dim: int | None, count: int) -> Tensor:
    """Makes the batch of a level dim 0."""
    return x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)


def _folded(x: Tensor, dim: int | None, count: int) -> Tensor:
    """Makes the batch of a level a part of dim 0."""
    return _in_front(x, dim, count).flatten(0, 1)


def _folded_mask(mask: Tensor, dim: int | None, count: int, num_sequences: int) -> Tensor:
    """Does the same with a mask, which may be of no heads, or of one sequence for all."""
    if dim is None and (mask.ndim == 2 or len(mask) == 1):
        return mask
    mask = _in_front(mask, dim, count)
    mask = mask.reshape(count, *[1] * (5 - mask.ndim), *mask.shape[1:])
    return mask.expand(count, num_sequences, *mask.shape[2:]).flatten(0, 1)
