"""The lattice of types: result types from operand types, along one mesh axis.

Pure functions of types: rules 1 to 3 of the type system. `Partial` is P, the value meant being the
sum over ranks; Z is zero on every rank. Operands through which no gradient flows come here as K in
place of I or R; the interpreter decides which those are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardmap_torch.checker.rules.reasons import (
    COUNTED,
    MIXED,
    NONLINEAR,
    PRODUCT,
    SELECTION,
    Reason,
)
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z


@dataclass(frozen=True)
class Conflict:
    """Two types that do not go together, and why.

    Attributes:
        first: one of the types.
        second: the other; None if the operation does not take `first` at all.
        reason: what would go wrong.
    """

    first: AxisType
    second: AxisType | None
    reason: Reason


Outcome: TypeAlias = AxisType | Conflict


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
        return Conflict(Partial, None, NONLINEAR)
    if I in seen and (V in seen or R in seen):
        return Conflict(I, V if V in seen else R, MIXED)
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
    return Partial if bad is None else Conflict(Partial, bad, PRODUCT)


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
    return Partial if bad is None else Conflict(Partial, bad, COUNTED)


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
        return next(outcome for outcome in products if isinstance(outcome, Conflict))
    total = add(addends) if terms else K
    if isinstance(total, Conflict):
        return total
    if total != Partial:
        fixed = [axis_type for axis_type in parameters if axis_type not in (K, Z)]
        return join([total, *fixed]) if fixed else total
    bad = next(
        (axis_type for axis_type in map(plain, parameters) if axis_type not in (R, K, Z)), None
    )
    return Partial if bad is None else Conflict(Partial, bad, SELECTION)


ACCEPTED: Final = {
    I: frozenset({I, K, Z}),
    R: frozenset({Partial, V, Z}),
    V: frozenset({V, R, K, Z}),
    Partial: frozenset({R, K, Z}),
    Z: frozenset({I, R, V, Partial, K, Z}),
}
"""For a value of each type, the types of cotangent that are right; K takes any one type."""


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
