"""Cache keys of verdicts: calls with equal signatures have the same program."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any, Final, TypeAlias

import torch

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.guards.captured_state import Surroundings
from shardmap_torch.checker.guards.libraries import is_library
from shardmap_torch.checker.guards.references import PLAIN
from shardmap_torch.checker.guards.walk import ENTERED
from shardmap_torch.checker.rules.registry import table_version
from shardmap_torch.core.torch_private.engine import forward_level

_DEVICES: Final = ("cpu", "cuda")


Signature: TypeAlias = tuple[Any, ...]


def signature(call: Call, surroundings: Surroundings) -> Signature:
    """Computes the cache key: all visible state that a verdict on `call` depends on.

    Shapes, dtypes, specs and mesh are in the match, one object for all calls that have the same;
    the values of leaves that are no tensors are added.
    """
    leaves, static = call.leaves, call.match.static
    return (
        call.match,
        tuple([_value(leaves[position]) for position in static]) if static else (),
        torch.is_grad_enabled(),
        forward_level() >= 0,
        torch.get_default_dtype(),
        table_version(),
        _autocast() if any(map(torch.is_autocast_enabled, _DEVICES)) else (),
        (around(call, surroundings) if static else surroundings).key(),
    )


def around(call: Call, surroundings: Surroundings) -> Surroundings:
    """Returns what the body and the objects among its arguments refer to."""
    leaves, static = call.leaves, call.match.static
    if not static:
        return surroundings
    return surroundings.beside([leaves[at] for at in static if _may_change(leaves[at])])


def _may_change(leaf: Any) -> bool:
    """Returns whether an equal argument may be another one, as an object with attributes."""
    kind: Any = type(leaf)
    if kind in PLAIN or isinstance(leaf, Number):
        return False
    return kind.__hash__ is object.__hash__ or not is_library(kind) or isinstance(leaf, ENTERED)


def _value(leaf: Any) -> Any:
    """Tells zero from minus zero, which are equal, in numbers of any library; nan equals nan."""
    if type(leaf) is int or not isinstance(leaf, Number):
        return leaf
    return repr(leaf), leaf if leaf == leaf else None


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple(
        [(d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)]
    )


@dataclass(frozen=True)
class SplitSignature:
    """A signature split into its values and the rest.

    Attributes:
        rest: all but values and captured state.
        values: name and value of each non-tensor argument and captured variable, by a key that
            stays the same from call to call.
    """

    rest: Signature
    values: Mapping[Hashable, tuple[str, Any]]


def split(key: Signature, call: Call, surroundings: Surroundings) -> SplitSignature:
    """Splits the latest signature into parts."""
    match, _, *rest, _ = key
    named = {match.paths[position]: call.leaves[position] for position in match.static}
    arguments = {path: (path, value) for path, value in named.items()}
    return SplitSignature((match, *rest), {**arguments, **around(call, surroundings).values()})
