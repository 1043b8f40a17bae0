"""Calls of one interpretation, remembered: layers of a network are the same calls, over and over.

All that depends on the key of a call alone is looked up, and so are the types of its results, by
those of its operands.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from shardmap_torch.checker.calls.fake_results import CallLookup, Key, Result, described
from shardmap_torch.checker.rules.infer import Types, is_real, signature_of
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.types import I, K, R

Literals: TypeAlias = tuple[tuple[str, Any], ...]
"""Arguments that are no tensors, by name."""

Situation: TypeAlias = tuple[Any, ...]
"""Types of operands, and all else on which those of a call's results depend."""


@dataclass(slots=True)
class Known:
    """Knowledge about all calls with one key.

    Attributes:
        op: the overload; kept, so that its address stays its own.
        name: the name of its equations.
        literals: its arguments that are no tensors.
        operands: for each operand, in the order of equations, the name and the position.
        result: its results, up to the values.
        is_view: whether they all are views of operands.
        is_real: whether some of them can have gradients.
        outcomes: types and batched axes of its results, by `Situation`.
    """

    op: OpOverload
    name: str
    literals: Literals
    operands: tuple[tuple[str, int], ...]
    result: Result
    is_view: bool
    is_real: bool
    outcomes: dict[Situation, tuple[Sequence[Types], frozenset[int]]] = field(default_factory=dict)


def knowledge(
    call: CallLookup, op: OpOverload, literals: Literals, args: Sequence[Any]
) -> Known | None:
    """Describes a call; None if what is known of its results does not say all of them."""
    result = described(call)
    items = () if result is None else result.items
    views = {item is not None and item.operand is not None for item in items}
    if result is None or None in items or len(views) > 1:
        return None
    if not items and result.container is not None:
        return None
    real = any(item is not None and is_real(item.dtype) for item in items)
    name, operands = op._schema.name.split("::")[1], tuple(_named(op, args))
    return Known(op, name, literals, operands, result, True in views, real)


class Remembered:
    """The calls of one interpretation that may come again."""

    def __init__(self) -> None:
        self._types: dict[int, tuple[Types, int, int]] = {}
        self._by_value: dict[Types, int] = {}
        self.calls: dict[Key, Known] = {}

    def number_of(self, types: Types) -> tuple[Types, int, int]:
        """Returns the types, a number for them, and one for them with K in place of I and R."""
        known = self._types.get(id(types))
        if known is None:
            free = tuple(K if each in (I, R) else each for each in types)
            number, freed = (
                self._by_value.setdefault(t, len(self._by_value)) for t in (types, free)
            )
            # Kept with what it is known by, so that no other tuple gets its address.
            known = self._types[id(types)] = types, number, freed
        return known


def _named(op: OpOverload, args: Sequence[Any]) -> list[tuple[str, int]]:
    """Returns name and position of each operand, in the order of `name_arguments`."""
    signature, at = signature_of(op), 0
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in signature.defaults}
    for name, value in zip(signature.names, args, strict=False):
        items = value if isinstance(value, list | tuple) else (value,)
        places = [place for place, item in enumerate(x for x in items if isinstance(x, Tensor))]
        found[name] = [(name, at + place) for place in places]
        at += len(places)
    return [each for places in found.values() for each in places]
