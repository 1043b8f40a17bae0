"""The lattice of types: result types from operand types, along one mesh axis.

Pure functions of types: rules 1 to 3 of the type system. `Partial` is P, the value meant being the
sum over ranks; Z is zero on every rank. Operands through which no gradient flows come here as K in
place of I or R; the interpreter decides which those are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardmap_torch.core.source_location import is_running
from shardmap_torch.core.torch_private.engine import FakeTensor
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z


@dataclass(frozen=True)
class Reason:
    """Why types do not go together, or why an operation is refused.

    Attributes:
        text: one sentence.
        advice: what to do about it, with `{axis}` for the name of the axis; empty if nothing is.
        of_sums: the same where operands are added.
    """

    text: str
    advice: str = ""
    of_sums: str = ""

    def __str__(self) -> str:
        return self.text

    def advise(self, axis: str, name: str = "") -> str:
        """Returns the advice about a conflict over an axis in an operation of this name."""
        more = self.of_sums * name.startswith(("add", "sub", "rsub", "baddbmm"))
        return f"{self.advice}{more}".format(axis=repr(axis))


OR_R: Final = "dst=I), or dst=R if ranks go on with it on their own shards"
"""The end of advice about a sum where both types may be right."""

SUM_FIRST: Final = f"all_reduce(x, {{axis}}, {OR_R}"
"""The sum over an axis of what is pending, in advice."""

MIXED: Final = Reason(
    "the I operand's gradient would differ between ranks and never be summed",
    "convert the I operand with convert(x, {axis}, src=I, dst=R), which sums its gradient, or "
    "detach it if it needs none.",
    " If the other is an addend, as a row-parallel product is, take the sum first, with "
    "all_reduce(x, {axis}, dst=I).",
)
COUNTED: Final = Reason(
    "an addend that is equal on all ranks would be counted once per rank",
    f"take the sum first, with {SUM_FIRST}, and add this to it.",
)
NONLINEAR: Final = Reason(
    "the operation is not linear, so it cannot be applied to a pending sum",
    f"take the sum first, with {SUM_FIRST}; leave out a later one.",
)
PRODUCT: Final = Reason(
    "a sum over ranks can only be multiplied by what is equal on all ranks, R or K",
    "take the sum of one operand first, with all_reduce(x, {axis}, dst=R): the product is a "
    "pending sum then, for a later all_reduce. Or take that of both, and leave out a later one.",
)
SELECTION: Final = Reason(
    "what selects, scales or places addends of a sum must be equal on all ranks",
    "take the sum of what selects, scales or divides first, with all_reduce(x, {axis}, dst=R); "
    "what it is applied to may stay a pending sum, for a later all_reduce. Losses of nn do so with "
    "batch_axis={axis}.",
)
INTEGER: Final = Reason(
    "a sum of rounded values is not the rounded sum",
    f"take the sum first, with {SUM_FIRST}, and round it.",
)
WRAPPED: Final = Reason(
    "a sum of integers that few bits hold is not that sum in more bits, as each wraps",
    f"cast the values before they are added up, or after {SUM_FIRST}.",
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
)
"""Advice about functions of torch that look at values."""


UNBRANCHED: Final = (
    "take what all ranks need out of the branch, as a collective or a term of the loss, and have "
    "rank 0 print, log and save outside of the body."
)
"""Advice for a branch on the index of the rank."""


def branch_advice(name: str, axis: str, is_index: bool, is_drawn: bool) -> str:
    """Returns advice for a Python value, or a shape, that differs between ranks.

    Args:
        name: the operation.
        axis: the axis over which its operand varies.
        is_index: whether that is because it is computed from the index of the rank.
        is_drawn: whether that is because torch's own generator has drawn it.
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
    if is_drawn:
        return (
            "draw it from a key of shardmap_torch.random, of which all ranks draw the same, or "
            "before the call, and pass it as an argument."
        )
    return (
        "compute what it decides with torch.where or a mask, or make it equal on all ranks of "
        f"{axis!r} first. For a log, debug_print shows what each rank has."
    )


@dataclass(frozen=True)
class Refusal:
    """Why types do not go together, or why an operation cannot be typed.

    Attributes:
        reason: what would go wrong.
        first: one of the types; None if the operation itself is refused.
        second: the other; None if the operation does not take `first` at all.
        axis: position of the mesh axis, once it is known.
    """

    reason: Reason
    first: AxisType | None = None
    second: AxisType | None = None
    axis: int | None = None


Outcome: TypeAlias = AxisType | Refusal


def plain(axis_type: AxisType) -> AxisType:
    """Returns V for S(i): local operations do not propagate shardings."""
    return V if axis_type.kind == "S" else axis_type


def join(types: Sequence[AxisType]) -> Outcome:
    """Applies rule 1, for any deterministic operation: Z counts as K, and P is refused.

    Example:
        >>> join([K, R]), join([V, R, K]), join([])
        (R, V, K)
        >>> join([I, V]).first
        I
    """
    seen = {plain(axis_type) for axis_type in types}
    if Partial in seen:
        return Refusal(NONLINEAR, Partial)
    if I in seen and (V in seen or R in seen):
        return Refusal(MIXED, I, V if V in seen else R)
    return next((axis_type for axis_type in (V, R, I) if axis_type in seen), K)


def multiply(factors: Sequence[AxisType]) -> Outcome:
    """Applies rule 3: a product keeps one P if its other factors are R or K.

    A single factor keeps its type, so that a unary linear operation keeps P and Z.

    Example:
        >>> multiply([Partial, R]), multiply([Z]), multiply([Z, V])
        (Partial, Z, V)
    """
    types = [plain(axis_type) for axis_type in factors]
    if len(types) == 1:
        return types[0]
    if Partial not in types:
        return join(types)
    types.remove(Partial)
    bad = next((axis_type for axis_type in types if axis_type not in (R, K, Z)), None)
    return Partial if bad is None else Refusal(PRODUCT, Partial, bad)


def add(addends: Sequence[AxisType]) -> Outcome:
    """Applies rule 2: a sum is P if any addend is, and then none may be equal on all ranks.

    Example:
        >>> add([Partial, V, Z]), add([I, Z]), add([Z, Z])
        (Partial, I, Z)
        >>> add([Partial, K]).reason == COUNTED
        True
    """
    types = [axis_type for axis_type in map(plain, addends) if axis_type != Z]
    if Partial not in types:
        return join(types) if types else Z
    bad = next((axis_type for axis_type in types if axis_type not in (Partial, V)), None)
    return Partial if bad is None else Refusal(COUNTED, Partial, bad)


def combine(terms: Sequence[Sequence[AxisType]], parameters: Sequence[AxisType]) -> Outcome:
    """Returns the type of a sum of products, given what selects, scales or places its addends.

    Example:
        >>> combine([[V], [Partial]], [K])  # where(mask, varying, partial)
        Partial
        >>> combine([[Partial]], [V]).reason == SELECTION
        True
    """
    products = [multiply(term) for term in terms]
    addends = [outcome for outcome in products if isinstance(outcome, AxisType)]
    if len(addends) < len(products):
        return next(outcome for outcome in products if isinstance(outcome, Refusal))
    total = add(addends) if terms else K
    if isinstance(total, Refusal):
        return total
    if total != Partial:
        fixed = [axis_type for axis_type in parameters if axis_type not in (K, Z)]
        return join([total, *fixed]) if fixed else total
    bad = next(
        (axis_type for axis_type in map(plain, parameters) if axis_type not in (R, K, Z)), None
    )
    return Partial if bad is None else Refusal(SELECTION, Partial, bad)


ACCEPTED: Final = {
    I: frozenset({I, K, Z}),
    R: frozenset({Partial, V, Z}),
    V: frozenset({V, R, K, Z}),
    Partial: frozenset({R, K, Z}),
    Z: frozenset({I, R, V, Partial, K, Z}),
}
"""For a value of each type, the types of cotangent that are right; K takes any one type."""


def as_cotangent(axis_type: AxisType, given: AxisType) -> AxisType | None:
    """Returns the type of what code gives a value of type `axis_type` as its cotangent, or None.

    Each rank of a varying value has its own, also if they are equal; addends have that of their
    sum; and what is equal on all ranks decides that a value which is neither I nor R yet is I.

    Example:
        >>> as_cotangent(V, K), as_cotangent(K, K), as_cotangent(R, K)
        (V, I, None)
    """
    axis_type, have = plain(axis_type), plain(given)
    if Z in (axis_type, have):
        return given
    if have not in (I, R, K):
        return given if accepts(axis_type, have) else None
    return {V: V, Partial: R, R: None}.get(axis_type, None if have == R else I)


def accepts(axis_type: AxisType, cotangent: AxisType) -> bool:
    """Returns whether a value of type `axis_type` may receive a cotangent of that type.

    Example:
        >>> accepts(R, V), accepts(R, R), accepts(I, K)
        (True, False, True)
    """
    axis_type, cotangent = plain(axis_type), plain(cotangent)
    if axis_type == K:
        return cotangent != R
    return cotangent in ACCEPTED[axis_type]
