"""Linear operations on multiples, and sums of addends and of values equal on all ranks."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.checker.rules.builders import overloads
from shardmap_torch.checker.rules.infer import Refusal, Types, type_results
from shardmap_torch.checker.spmd.sums import (
    NO_AXES,
    Axes,
    Sums,
    common_scale,
    is_factor,
    reject_scaled,
)
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.types import K, Partial, Z


def require_linear(
    op: OpOverload,
    arguments: Mapping[str, Any],
    results: Sequence[Tensor],
    sums_of: Callable[[Tensor], Sums],
) -> None:
    """Requires that an operation is linear in the operands that have a factor.

    Raises:
        UnrelatedError: it is not linear in them.
    """

    def seen(x: Tensor) -> Types:
        if sums_of(x).scale != 1:
            return (Partial,)
        return (Z,) if sums_of(x).zero else (K,)

    scaled = common_scale([sums_of(x) for value in arguments.values() for x in tensors_in(value)])
    for outcome in type_results(op, arguments, results, seen, 1):
        if isinstance(outcome, Refusal) or outcome != (Partial,):
            reject_scaled(scaled)


_ADDING: Final = overloads(
    "add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor sub_.Scalar"
    " rsub.Tensor rsub.Scalar"
)


def as_addends(
    op: OpOverload,
    arguments: Mapping[str, Any],
    results: Sequence[Tensor],
    sums_of: Callable[[Tensor], Sums],
    is_sharded: Callable[[Tensor, Axes], bool],
    sizes: Mapping[str, int],
) -> Sums | None:
    """Returns what a sum is of which some operands are equal on all ranks, and others addends.

    Each rank adds the equal ones, so that they add up to as many times their value as there are
    ranks. That is right where the addends add up to that multiple too, as means of parts do: the
    mean over the ranks of `x.mean() + c`. None where the multiples differ, or for no sum.
    """
    tensors = [x for value in arguments.values() for x in tensors_in(value)]
    known = [sums_of(x) for x in tensors]
    axes = frozenset(axis for each in known for axis in each.partial)
    copies = prod(sizes[axis] for axis in axes)
    scales = {each.scale * (1 if each.partial else copies) for each in known if not each.zero}
    equal = [x for x, each in zip(tensors, known, strict=True) if each.partial != axes]
    has_number = op in _ADDING and is_factor(arguments.get("other"))
    if has_number:
        scales.add(Fraction(copies))
        arguments = {**arguments, "other": 0}
    if not axes or len(scales) != 1 or not (equal or has_number):
        return None
    if any(sums_of(x).partial or is_sharded(x, axes) for x in equal):
        return None
    outcomes = type_results(op, arguments, results, lambda x: (Partial,), 1)
    if any(outcome != (Partial,) for outcome in outcomes):
        return None
    cause = next((each.cause for each in known if each.cause), "")
    means = NO_AXES.union(*(each.means for each in known))
    return Sums(partial=axes).scaled(scales.pop(), means, cause)
