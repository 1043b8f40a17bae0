"""Tensors and numbers of optimizers: fused arithmetic on lists, scalars, shards as DTensors."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch.checker.interpreter.modes import current_interpreter
from shardmap_torch.core.caching import constant
from shardmap_torch.core.torch_private.engine import are_transforms_active, functorch

Tensors: TypeAlias = list[Tensor]

_NUMBERS: Final = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
)


def foreach(name: str, *operands: Sequence[Tensor] | Tensor | float, **scalars: float) -> Tensors:
    """Applies the operator `torch.<name>` at every position of the operands that are lists.

    Runs `torch._foreach_<name>`, one kernel for many tensors on CUDA, and one operator after the
    other under functorch transforms, for which torch has no batching rules of these.

    Example:
        >>> foreach("add", [torch.ones(1)], [torch.ones(1)], alpha=2.0)
        [tensor([3.])]
    """
    lists = [operand for operand in operands if isinstance(operand, list)]
    if not lists[0]:
        return []
    if not _is_transformed(operands):
        return list(_fused(f"_foreach_{name}", operands, scalars))
    single: Any = getattr(torch, name)
    return [
        single(*(o[i] if isinstance(o, list) else o for o in operands), **scalars)
        for i in range(len(lists[0]))
    ]


def foreach_in_place(
    name: str, own: Tensors, *operands: Sequence[Tensor] | Tensor | float, **scalars: float
) -> Tensors:
    """Maps like `foreach`, in place in the first operand, whose memory must not be shared.

    New memory costs more than the arithmetic of an optimizer: the OS kernel has to clear its pages.
    """
    if not own or _is_transformed((own, *operands)):
        return foreach(name, own, *operands, **scalars)
    _fused(f"_foreach_{name}_", (own, *operands), scalars)
    return own


def _fused(name: str, operands: Sequence[Any], scalars: Mapping[str, float]) -> Any:
    """Calls a fused operator; the checker learns that batched bodies do without it."""
    fused: Any = getattr(torch, name)
    interpreter = None if torch.compiler.is_dynamo_compiling() else current_interpreter()
    with nullcontext() if interpreter is None else interpreter.batching():
        return fused(*operands, **scalars)


def as_number(scalar: Tensor | float) -> Tensor | float:
    """Returns a scalar as a number, with which fused operators take fewer passes, where it is one.

    A tensor stays one where it has no value that can be read, or the device would have to be
    waited for.
    """
    if torch.compiler.is_dynamo_compiling() or are_transforms_active():
        return scalar
    is_plain = type(scalar) is Tensor and scalar.device.type == "cpu" and not scalar.requires_grad
    return float(scalar) if is_plain else scalar


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
