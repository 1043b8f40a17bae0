"""Aligns the ranks' program with the one-device program: the same steps in the same order."""

from collections.abc import Mapping
from typing import Any, Final

from shardmap_torch.checker.ir.paths import SymbolicNumber
from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.checker.spmd.recorder import Event, Recorder, Ref
from shardmap_torch.core.torch_private.engine import OpOverload

IDENTITIES: Final = overloads("clone alias contiguous")
"""Operations that one of the programs may lack: shapes decide whether torch copies."""

_RESHAPES: Final = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})


class PartedError(Exception):
    """Raised where the programs do different things; `there` is the one-device program's step."""

    def __init__(self, there: Event | None) -> None:
        """Keeps the step; None if the one-device program has ended."""
        super().__init__()
        self.there = there


class Alignment:
    """Reads the steps of the one-device program one by one, as the ranks' program reaches them."""

    def __init__(self, one: Recorder) -> None:
        self._events = one.events
        self._at = 0
        self._same: dict[int, int] = {}
        self._newly_same: list[int] = []

    def newly_same(self) -> list[int]:
        """Returns the tensors that only the one-device program has copied since the last call."""
        found, self._newly_same = self._newly_same, []
        return found

    def canonical(self, ref: Ref) -> int:
        """Returns a tensor's number, or its source's if it is a copy that the ranks do not make."""
        number = ref.number
        while number in self._same:
            number = self._same[number]
        return number

    def take(self, name: Any) -> Event:
        """Returns the next step, which must have that name.

        Raises:
            PartedError: it has another name.
        """
        event = self._peek()
        while event is not None and not _alike(name, event.name) and self._skips(event):
            event = self._peek()
        if event is None or not _alike(name, event.name):
            raise PartedError(event)
        self._at += 1
        return event

    def take_unless_copy(self, op: OpOverload) -> Event | None:
        """Returns the next step, or None if the ranks copy and the one-device program does not."""
        try:
            return self.take(op)
        except PartedError:
            if op in IDENTITIES:
                return None
            raise

    def end(self) -> None:
        """Requires that no step is left but copies that the ranks do not make.

        Raises:
            PartedError: there is one.
        """
        event = self._peek()
        while event is not None and self._skips(event):
            event = self._peek()
        if event is not None:
            raise PartedError(event)

    def _peek(self) -> Event | None:
        return self._events[self._at] if self._at < len(self._events) else None

    def _skips(self, event: Event) -> bool:
        """Skips a copy that the ranks do not make, and returns whether there was one."""
        if event.name not in IDENTITIES:
            return False
        ((number, _),) = event.results
        source = self.canonical(event.arguments["self"])
        self._same[number] = source
        self._newly_same.append(source)
        self._at += 1
        return True


def shown(event: Event | None) -> str:
    """Describes the step of the one-device program."""
    if event is None:
        return "has ended"
    name = event.name
    text = name._schema.name.split("::")[1] if isinstance(name, OpOverload) else name
    return f"does {text}" + (f" at {event.site}" if event.site is not None else "")


def equal(value: Any, other: Any) -> bool:
    """Returns whether two arguments or results that are no tensors are the same.

    Example:
        >>> equal([1, None], (1, None)), equal(1, 1.0), equal(float("nan"), float("nan"))
        (True, False, True)
    """
    if type(value) is SymbolicNumber:  # to compare two of them would be a branch of the body
        return type(other) is SymbolicNumber and value.text == other.text
    if isinstance(value, list | tuple):
        return (
            isinstance(other, list | tuple)
            and len(value) == len(other)
            and all(map(equal, value, other))
        )
    if isinstance(value, float | complex) and value != value:
        return type(value) is type(other) and bool(other != other)
    return value is other or (type(value) is type(other) and bool(value == other))


def differing(arguments: Mapping[str, Any], event: Event) -> dict[str, Any]:
    """Returns the non-tensor arguments that differ on one device, with their values there."""
    there = event.arguments
    return {
        name: there.get(name) for name in arguments if not equal(arguments[name], there.get(name))
    }


def is_reshape(op: OpOverload) -> bool:
    """Returns whether sizes and strides decide whether a result shares its operand's memory."""
    return op._schema.name.split("::")[1] in _RESHAPES


def _alike(name: Any, other: Any) -> bool:
    """Returns whether two steps are the same; whether a reshape copies depends on shapes."""
    if name == other:
        return True
    if not isinstance(name, OpOverload) or not isinstance(other, OpOverload):
        return False
    return is_reshape(name) and is_reshape(other)
