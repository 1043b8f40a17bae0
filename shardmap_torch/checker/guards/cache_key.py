"""Cache keys of verdicts: calls with equal signatures have the same program."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.guards.state import PLAIN, State
from shardmap_torch.checker.rules.registry import table_version
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.torch_private.engine import forward_level

_DEVICES: Final = ("cpu", "cuda")
_KEPT: Final = 64
"""Number of states, and of sets of arguments, that are remembered."""

Signature: TypeAlias = tuple[Any, ...]


class CapturedState:
    """State of a function and of the objects among the arguments of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Keeps the function; the first question walks."""
        self._function = function
        self._own: State | None = None
        self._of_objects: Memo[State] = Memo(_KEPT)
        self._numbers: Memo[tuple[int, Sequence[Any]]] = Memo(_KEPT)
        self._count = 0

    def key(self, call: Call) -> Hashable:
        """Returns a key that is equal for equal states of what a call refers to."""
        own = self._own
        if own is None or not own.holds():
            own = self._own = State(self._function)
            own.number = self._number_of(own)
        if not call.match.static:
            return own.number
        objects = _objects(call)
        ids = tuple(map(id, objects))
        state = self._of_objects.find(ids)
        if state is None or not state.holds():
            state = State(None, objects)
            state.number = self._number_of(state)
            self._of_objects.put(ids, state)
        return own.number, state.number

    def states(self, call: Call) -> list[State]:
        """Returns the states of the latest key: of the function, and of the arguments' objects."""
        # A state has its objects, so that no other ones get their ids.
        of_objects = self._of_objects.find(tuple(map(id, _objects(call))))
        return [state for state in (self._own, of_objects) if state is not None]

    def tensors(self, call: Call) -> list[Tensor]:
        """Returns the tensors that both refer to."""
        return [x for state in self.states(call) for x in state.tensors]

    def _number_of(self, state: State) -> int:
        """Returns a number of this state, and of all equal ones."""
        self._count += 1
        number, _ = self._numbers.get(state.found, lambda: (self._count, state.opaque))
        return number


def signature(call: Call, captured: CapturedState) -> Signature:
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
        captured.key(call),
    )


def _objects(call: Call) -> list[Any]:
    """Returns the static arguments that may change in place."""
    static = [call.leaves[position] for position in call.match.static]
    return [x for x in static if type(x) not in PLAIN and not isinstance(x, Number)]


def _value(leaf: Any) -> Any:
    """Tells zero from minus zero, which are equal, in numbers of any library; nan equals nan."""
    if type(leaf).__hash__ is None:  # its state tells it from others
        return type(leaf)
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


def split(key: Signature, call: Call, captured: CapturedState) -> SplitSignature:
    """Splits the latest signature into parts."""
    match, _, *rest, _ = key
    named = {match.paths[position]: call.leaves[position] for position in match.static}
    values: dict[Hashable, tuple[str, Any]] = {path: (path, x) for path, x in named.items()}
    for number, state in enumerate(captured.states(call)):
        values |= {(number, place): pair for place, pair in state.values().items()}
    return SplitSignature((match, *rest), values)
