"""Tensors and numbers of optimizers: fused arithmetic on lists, torch's fused AdamW, scalars."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch.checker.queries import in_place_of_batched
from shardmap_torch.core.caching import constant
from shardmap_torch.core.functorch import batched_at, dims_of, is_only_vmapped, stacked_over
from shardmap_torch.core.torch_private.engine import (
    FakeTensor,
    are_transforms_active,
    dispatch_mode_stack,
    forward_level,
    functorch,
    fused_adamw_,
    has_kernel,
    temporarily_clear_interpreter_stack,
)
from shardmap_torch.ops.body import is_checking

Tensors: TypeAlias = list[Tensor]

Operands: TypeAlias = Sequence[Sequence[Tensor] | Tensor | float]

_NUMBERS: Final = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
)


def foreach(name: str, *operands: Sequence[Tensor] | Tensor | float, **scalars: float) -> Tensors:
    """Applies the operator `torch.<name>` at every position of the operands that are lists.

    Runs `torch._foreach_<name>`, one kernel for many tensors on CUDA. torch has no batching rules
    of these: where only vmaps are active, as in batched bodies, it runs on what they batch, and
    under other functorch transforms one operator after the other. So it does where a tensor that
    all share needs a gradient, which torch 2.14 fails to compute.

    Example:
        >>> foreach("add", [torch.ones(1)], [torch.ones(1)], alpha=2.0)
        [tensor([3.])]
    """
    lists = [operand for operand in operands if isinstance(operand, list)]
    if not lists[0]:
        return []
    if not any([isinstance(o, Tensor) and o.requires_grad for o in operands]):
        found = beneath_vmaps(lambda *own: [_fused(f"_foreach_{name}", own, scalars)], operands)
        if found is not None:
            return found[0]
    single: Any = getattr(torch, name)
    return [
        single(*(o[i] if isinstance(o, list) else o for o in operands), **scalars)
        for i in range(len(lists[0]))
    ]


def beneath_vmaps(
    run: Callable[..., Sequence[Sequence[Tensor]] | None], operands: Operands, writes: bool = False
) -> list[Tensors] | None:
    """Returns the lists that `run` makes of operands, where vmaps are active of what they batch.

    None where `run` returns None, or cannot be run: under other functorch transforms; or, with
    `writes`, where lists are not batched alike, so that results may be larger than operands.
    """
    if not _is_transformed(operands):
        found = run(*operands)
        return None if found is None else list(map(list, found))
    levels = _levels_of_vmap(operands)
    if levels is None:
        return None
    if writes and any(isinstance(x, list) and levels != _levels_of_vmap((x,)) for x in operands):
        return None
    with temporarily_clear_interpreter_stack():
        found = run(*_unbatched(operands, levels))
    return None if found is None else [list(map(batched_at, own, levels)) for own in found]


def _levels_of_vmap(operands: Operands) -> list[list[int]] | None:
    """Returns the levels at which each position of the lists is batched.

    None where other transforms are active too, what is no list is batched, or dims would not match.
    """
    if torch.compiler.is_dynamo_compiling() or not is_only_vmapped():
        return None
    lists = [operand for operand in operands if isinstance(operand, list)]
    rest = [operand for operand in operands if not isinstance(operand, list)]
    if any(isinstance(x, Tensor) and dims_of(x)[1] for x in rest):
        return None
    columns = list(zip(*lists, strict=True))
    if any(len({x.ndim for x in column}) > 1 for column in columns):
        return None
    return [sorted({level for x in column for level in dims_of(x)[1]}) for column in columns]


def _unbatched(operands: Operands, levels: list[list[int]]) -> list[Any]:
    """Returns the operands with a leading dim for each of these levels."""
    return [
        list(map(stacked_over, operand, levels)) if isinstance(operand, list) else operand
        for operand in operands
    ]


def _fused(name: str, operands: Sequence[Any], scalars: Mapping[str, float]) -> Any:
    """Calls a fused operator; the checker learns that batched bodies do without it."""
    fused: Any = getattr(torch, name)
    if torch.compiler.is_dynamo_compiling():
        return fused(*operands, **scalars)
    with in_place_of_batched():
        return fused(*operands, **scalars)


def as_number(scalar: Tensor | float) -> Tensor | float:
    """Returns a scalar as a number, with which fused operators take fewer passes, where it is one.

    A tensor stays one where it has no value that can be read, and under a dispatch mode, which may
    record operators for later calls with other values.
    """
    if torch.compiler.is_dynamo_compiling() or type(scalar) is not Tensor:
        return scalar
    return scalar if dispatch_mode_stack() or not is_readable(scalar) else float(scalar)


def is_readable(scalar: Tensor) -> bool:
    """Returns whether the value of a tensor can be read at once, and no derivative is lost by it.

    On a GPU the host would have to wait for it.
    """
    if are_transforms_active() and not (is_only_vmapped() and not dims_of(scalar)[1]):
        return False
    return forward_level() < 0 and scalar.device.type == "cpu" and not scalar.requires_grad


def _is_transformed(operands: Sequence[Sequence[Tensor] | Tensor | float]) -> bool:
    """Returns whether an operand is under a functorch transform, or may be while Dynamo traces."""
    if torch.compiler.is_dynamo_compiling():
        return _has_levels()
    if not are_transforms_active():
        return False
    wrapped = functorch.is_functorch_wrapped_tensor
    values = [value for o in operands for value in (o if isinstance(o, list) else [o])]
    return any(isinstance(value, Tensor) and wrapped(value) for value in values)


@constant
def _has_levels() -> bool:
    return functorch.peek_interpreter_stack() is not None


def placed_like(shard: Tensor, x: Tensor) -> Tensor:
    """Makes a DTensor of this rank's shard if `x` is one, with the placements and shape of `x`."""
    if not isinstance(x, DTensor):
        return shard
    return DTensor.from_local(
        shard, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def is_number(value: object) -> bool:
    """Returns whether a value is a real number, of Python or in a tensor of one."""
    if isinstance(value, Tensor):
        is_plain = value.layout == torch.strided and not value.is_meta
        return is_plain and value.numel() == 1 and value.dtype in _NUMBERS
    is_one = not hasattr(value, "__len__")  # unlike an array
    return isinstance(value, int | float) or (is_one and hasattr(type(value), "__float__"))


_DEVICES: Final = frozenset(
    kind for kind in ("cpu", "cuda") if has_kernel("aten::_fused_adamw_", kind.upper())
)
_DTYPE: Final = attrgetter("dtype")
_DEVICE: Final = attrgetter("device")
_REQUIRES_GRAD: Final = attrgetter("requires_grad")


def fused_adamw(
    columns: Sequence[Tensors],
    number: Tensor,
    options: Sequence[Tensor | float],
    in_place: bool = False,
) -> list[Tensors] | None:
    """Steps by torch's fused operator, without weight decay; None where it cannot serve.

    In its place the checker, whose tensors are fake, and torch.compile follow the composition; so
    do derivatives, and transforms of torch.func other than vmaps, which the operator would escape.

    Args:
        columns: parameters, whose memory the results take, gradients, and both moments.
        number: of the step.
        options: the learning rate, both betas and eps.
        in_place: whether the results take the memory of the moments too.

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
    step = partial(_step, in_place=in_place)
    return beneath_vmaps(step, (*columns, number, lr, *map(float, numbers)), writes=True)


def _step(*operands: Any, in_place: bool) -> list[Tensors] | None:
    *columns, number, lr, beta1, beta2, eps = operands
    every = [*chain(*columns)]
    if not (_is_served(every) and _is_plain([number])):
        return None
    params, grads, *moments = columns
    strides = [*map(Tensor.stride, params)]
    copies = [
        _laid_out_as(params, strides, moment if in_place else foreach("clone", moment))
        for moment in moments
    ]
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
    if not (tensors and _is_plain(tensors)) or len({*map(_DTYPE, tensors)}) > 1:
        return False
    if any(map(Tensor.is_neg, tensors)):  # as the imaginary part of a conjugate
        return False
    device, *others = {*map(_DEVICE, tensors)}
    if others or device.type not in _DEVICES:
        return False
    return not (torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)))


def _is_plain(tensors: Tensors) -> bool:
    """Returns whether these are no subclasses; a run without data has fakes, as a check does."""
    return {*map(type, tensors)} <= ({Tensor} if is_checking() else {Tensor, FakeTensor})


def _laid_out_as(like: Tensors, strides: list[tuple[int, ...]], column: Tensors) -> Tensors:
    """Returns the tensors with the strides of others, which the kernel takes for granted."""
    if [*map(Tensor.stride, column)] == strides:
        return column
    return [torch.empty_like(to).copy_(x) for x, to in zip(column, like, strict=True)]
