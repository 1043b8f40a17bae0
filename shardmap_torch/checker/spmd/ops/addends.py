"""Sums of addends and of values that are equal on all ranks."""

from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Final

from shardmap_torch.checker.rules.infer import is_factor
from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.checker.spmd.sharded import PairedCall
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import NO_AXES, Sums

_ADDING: Final = overloads(
    "add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor sub_.Scalar"
    " rsub.Tensor rsub.Scalar"
)


def as_addends(call: PairedCall, notes: Notes) -> Sums | None:
    """Returns the state of a sum of which some operands are equal on all ranks, others addends.

    Each rank adds the equal ones, so that they add up to as many times their value as there are
    ranks. That is right where the addends add up to that multiple too, as means of parts do: the
    mean over the ranks of `x.mean() + c`. None where the multiples differ, or for no sum.
    """
    known = [notes.sums(x) for x in call.tensors]
    axes = frozenset(axis for each in known for axis in each.partial)
    copies = prod(notes.sizes[axis] for axis in axes)
    scales = {each.scale * (1 if each.partial else copies) for each in known if not each.zero}
    equal = [x for x, each in zip(call.tensors, known, strict=True) if each.partial != axes]
    has_number = call.op in _ADDING and is_factor(call.arguments.get("other"))
    if has_number:
        scales.add(Fraction(copies))
        call = replace(call, arguments={**call.arguments, "other": 0})
    if not axes or len(scales) != 1 or not (equal or has_number):
        return None
    if any(notes.sums(x).partial or notes.is_sharded(x, axes) for x in equal):
        return None
    if not call.is_linear(lambda x: True, lambda x: False):
        return None
    cause = next((each.cause for each in known if each.cause), "")
    means = NO_AXES.union(*(each.means for each in known))
    return Sums(partial=axes).scaled(scales.pop(), means, cause)
