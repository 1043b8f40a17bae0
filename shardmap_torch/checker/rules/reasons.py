"""Why a call is refused, and what its author can do about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torch.distributions import Distribution

from shardmap_torch.core.source_location import is_running
from shardmap_torch.core.torch_private.engine import FakeTensor


@dataclass(frozen=True)
class Reason:
    """Why types do not go together, or why an operation is refused.

    Attributes:
        text: one sentence.
        advice: what to do about it, with `{axis}` for the name of the axis; empty if nothing is.
    """

    text: str
    advice: str = ""

    def __str__(self) -> str:
        return self.text

    def advise(self, axis: str) -> str:
        """Returns the advice about a conflict over an axis."""
        return self.advice.format(axis=repr(axis))


MIXED: Final = Reason(
    "the I operand's gradient would differ between ranks and never be summed",
    "convert the I operand with convert(x, {axis}, src=I, dst=R), which sums its gradient, or "
    "detach it if it needs none.",
)
COUNTED: Final = Reason(
    "an addend that is equal on all ranks would be counted once per rank",
    "take the sum first, with all_reduce(x, {axis}, dst=...), and add this to it.",
)
NONLINEAR: Final = Reason(
    "the operation is not linear, so it cannot be applied to a pending sum",
    "take the sum first, with all_reduce(x, {axis}, dst=...); leave out a later one.",
)
PRODUCT: Final = Reason(
    "a sum over ranks can only be multiplied by what is equal on all ranks, R or K",
    "take the sum of one operand first, with all_reduce(x, {axis}, dst=R): the product is a "
    "pending sum then, for a later all_reduce. Or take that of both, and leave out a later one.",
)
SELECTION: Final = Reason(
    "what selects, scales or places addends of a sum must be equal on all ranks",
    "take the sum of what selects, scales or divides first, with all_reduce(x, {axis}, dst=R); "
    "what it is applied to may stay a pending sum, for a later all_reduce.",
)
INTEGER: Final = Reason(
    "a sum of rounded values is not the rounded sum",
    "take the sum first, with all_reduce(x, {axis}, dst=...), and round it.",
)
WRAPPED: Final = Reason(
    "a sum of integers that few bits hold is not that sum in more bits, as each wraps",
    "cast the values before they are added up, or after all_reduce(x, {axis}, dst=...).",
)
BITS: Final = Reason("the bits of a pending sum mean nothing")
BRANCH: Final = Reason("the ranks would get different Python values or shapes, and diverge")
UNKNOWN: Final = Reason(
    "nothing is known about what it does to the ranks' values; declare it with register_rule"
)

_SAME_SHAPE: Final = (
    "keep the shape: of x[mask].sum() write torch.where(mask, x, 0).sum(), and of x[mask].mean() "
    "that by mask.sum(), each after its all_reduce."
)
SIZED_BY_DATA: Final[Mapping[str, str]] = {
    "index": _SAME_SHAPE,
    "masked_select": _SAME_SHAPE,
    "nonzero": "count with mask.sum(), or give a bound, with torch.nonzero_static(mask, size=n), "
    "which goes into a local_region under check='global'.",
    "bincount": "give the number of bins: functional.one_hot(x, n).sum(0) has that shape, and so "
    "has torch.zeros(n).index_add(0, x, weights).",
}
"""Advice about operations whose results have sizes that depend on data."""

_READING: Final[Sequence[tuple[object, str]]] = (
    (
        FakeTensor.tolist,
        "keep them a tensor: ragged_all_to_all takes the numbers of rows that ranks send one "
        "another so, as all_to_all_single takes them as a list.",
    ),
    (
        Distribution.__init__,
        "leave out the look at the values: distributions take validate_args=False.",
    ),
)
"""Advice about functions of torch that look at values."""


def branch_advice(name: str, axis: str, is_index: bool) -> str:
    """Returns advice for a Python value, or a shape, that differs between ranks.

    Args:
        name: the operation.
        axis: the axis over which its operand varies.
        is_index: whether that is because it is computed from the index of the rank.
    """
    found = [advice for function, advice in _READING if is_running(function)]
    found += [SIZED_BY_DATA[name]] if name in SIZED_BY_DATA else []
    if found:
        return f"{found[0]} Or gather the values over {axis!r} first."
    if is_index:
        return (
            f"keep it a tensor, as in x * axis_index({axis!r}), x[axis_index({axis!r})] or "
            f"torch.where(axis_index({axis!r}) == 0, a, b)."
        )
    return (
        "compute what it decides with torch.where or a mask, or make it equal on all ranks of "
        f"{axis!r} first."
    )
