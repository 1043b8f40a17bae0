"""How the types of operands make the type of a result, along one mesh axis.

Pure functions of types: rules 1 to 3 of the type system. `Partial` is P, the value meant being the
sum over ranks; Z is zero on every rank. Operands through which no gradient flows come here as K in
place of I or R; who flows is the interpreter's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z


@dataclass(frozen=True)
class Clash:
    """Two types that do not go together, and why.

    Attributes:
        first: one of them.
        second: the other; None where `first` alone does not fit the operation.
        reason: what would go wrong.
    """

    first: AxisType
    second: AxisType | None
    reason: str


Outcome: TypeAlias = AxisType | Clash

MIXED: Final = "the I operand's gradient would differ between ranks and never be summed"
COUNTED: Final = "an addend that is equal on all ranks would be counted once per rank"
NONLINEAR: Final = "the operation is not linear, so it does not act on a sum still to be taken"
PRODUCT: Final = "a sum over ranks can only be multiplied by what is equal on all ranks, R or K"
SELECTION: Final = "what selects, scales or places addends of a sum must be equal on all ranks"


def plain(kind: AxisType) -> AxisType:
    """V for S(i): local operations do not propagate shards."""
    return V if kind.kind == "S" else kind


def join(kinds: Sequence[AxisType]) -> Outcome:
    """Rule 1, for any deterministic operation; Z counts as K, and P fits nothing but linear ones.

    Example:
        >>> join([K, R]), join([V, R, K]), join([])
        (R, V, K)
        >>> join([I, V]).first
        I
    """
    seen = {plain(kind) for kind in kinds}
    if Partial in seen:
        return Clash(Partial, None, NONLINEAR)
    if I in seen and (V in seen or R in seen):
        return Clash(I, V if V in seen else R, MIXED)
    return next((kind for kind in (V, R, I) if kind in seen), K)


def multiply(factors: Sequence[AxisType]) -> Outcome:
    """Rule 3: a product keeps one P if its other factors are R or K.

    A single factor stands for itself, so that a unary linear operation keeps P and Z.

    Example:
        >>> multiply([Partial, R]), multiply([Z]), multiply([Z, V])
        (P, Z, V)
    """
    kinds = [plain(kind) for kind in factors]
    if len(kinds) == 1:
        return kinds[0]
    if Partial not in kinds:
        return join(kinds)
    kinds.remove(Partial)
    bad = next((kind for kind in kinds if kind not in (R, K, Z)), None)
    return Partial if bad is None else Clash(Partial, bad, PRODUCT)


def add(addends: Sequence[AxisType]) -> Outcome:
    """Rule 2: a sum is P if any addend is, and then no addend may be equal on all ranks.

    Example:
        >>> add([Partial, V, Z]), add([I, Z]), add([Z, Z])
        (P, I, Z)
        >>> add([Partial, K]).reason == COUNTED
        True
    """
    kinds = [kind for kind in map(plain, addends) if kind != Z]
    if Partial not in kinds:
        return join(kinds) if kinds else Z
    bad = next((kind for kind in kinds if kind not in (Partial, V)), None)
    return Partial if bad is None else Clash(Partial, bad, COUNTED)


def combine(terms: Sequence[Sequence[AxisType]], parameters: Sequence[AxisType]) -> Outcome:
    """The type of a sum of products, given what selects, scales or places its addends.

    Example:
        >>> combine([[V], [Partial]], [K])  # where(mask, varying, partial)
        P
        >>> combine([[Partial]], [V]).reason == SELECTION
        True
    """
    products = [multiply(term) for term in terms]
    addends = [outcome for outcome in products if isinstance(outcome, AxisType)]
    if len(addends) < len(products):
        return next(outcome for outcome in products if isinstance(outcome, Clash))
    total = add(addends) if terms else K
    if isinstance(total, Clash):
        return total
    if total != Partial:
        fixed = [kind for kind in parameters if kind not in (K, Z)]
        return join([total, *fixed]) if fixed else total
    bad = next((kind for kind in map(plain, parameters) if kind not in (R, K, Z)), None)
    return Partial if bad is None else Clash(Partial, bad, SELECTION)


ACCEPTED: Final = {
    I: frozenset({I, K, Z}),
    R: frozenset({Partial, V, Z}),
    V: frozenset({V, R, K, Z}),
    Partial: frozenset({R, K, Z}),
    Z: frozenset({I, R, V, Partial, K, Z}),
}
"""For a value of each type, the types of cotangent that are right; K takes any one kind."""


def accepts(kind: AxisType, cotangent: AxisType) -> bool:
    """Whether a value of type `kind` may receive a cotangent of that type.

    Example:
        >>> accepts(R, V), accepts(R, R), accepts(I, K)
        (True, False, True)
    """
    kind, cotangent = plain(kind), plain(cotangent)
    if kind == K:
        return cotangent != R
    return cotangent in ACCEPTED[kind]
