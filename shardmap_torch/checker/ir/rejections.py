"""The record of a rejection: what the checker knows of an error beside its text."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardmap_torch.checker.ir.repairs import Repair
from shardmap_torch.errors import MAX_LINES, ShardTypeError
from shardmap_torch.types import AxisType

if TYPE_CHECKING:  # equations know repairs
    from shardmap_torch.checker.ir.program import Equation


@dataclass(eq=False)
class Rejection:
    """All that the checker knows of an error beside its text.

    Attributes:
        types: those that its message is about.
        equal: the equations that made the equal values which meet what varies.
        closure: the closed-over tensor that would have to be an argument.
        takes_gradients: whether the body has taken gradients by itself before.
        proposals: repairs that could be tried, the likeliest first.
        tried: the one that passed, and which the message names.
    """

    types: frozenset[AxisType] = frozenset()
    equal: "tuple[Equation | None, ...]" = ()
    closure: Tensor | None = None
    takes_gradients: bool = False
    proposals: tuple[Repair, ...] = ()
    tried: Repair | None = None


def rejection_of(error: ShardTypeError) -> Rejection:
    """Returns the record of an error, an empty one where the error came without."""
    found: Any = error.rejection
    if found is None:
        found = error.rejection = Rejection()
    record: Rejection = found
    return record


def rejected(
    text: str,
    types: Iterable[AxisType] = (),
    proposals: Iterable[Repair] = (),
    equal: "Iterable[Equation | None]" = (),
    closure: Tensor | None = None,
) -> ShardTypeError:
    """Makes an error with its record; see `Rejection`."""
    error = ShardTypeError(text)
    error.rejection = Rejection(frozenset(types), tuple(equal), closure, False, tuple(proposals))
    return error


def propose(error: ShardTypeError, repairs: Iterable[Repair]) -> None:
    """Adds repairs to those that could be tried."""
    rejection_of(error).proposals += tuple(repairs)


def with_tried(error: ShardTypeError, repair: Repair | None) -> ShardTypeError:
    """Adds to an error the repair that passed."""
    if repair is not None:
        error.args = (f"{error}\nTried, and accepted also by check='global': {repair.text}",)
    rejection_of(error).tried = repair
    return error


def shortened(error: ShardTypeError) -> ShardTypeError:
    """Cuts an error's message to 40 lines; `findings` keeps the complete text."""
    lines = str(error).splitlines()
    error.findings = error.findings or (str(error),)
    if len(lines) > MAX_LINES:
        left = len(lines) - MAX_LINES + 1
        error.args = ("\n".join([*lines[: MAX_LINES - 1], f"... and {left} more lines"]),)
    return error
