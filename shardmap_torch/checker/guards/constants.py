"""`assume_constant`: objects that a user declares constant, which no call compares."""

from typing import Any, TypeVar

X = TypeVar("X")

_CONSTANTS: dict[int, Any] = {}


def assume_constant(value: X) -> X:
    """Declares that an object, and all that it refers to, never changes.

    Before each call of a checked function all values that its code refers to are compared with
    those of the check, at some 50 ns per value. A vocabulary, a data set or a table of strings that
    never changes can be left out. The promise is not verified: a change of a constant leaves an old
    verdict in force.

    Args:
        value: any object; it is kept alive.

    Returns:
        The object itself.

    Source: `torch.compiler.assume_constant_result`.

    Example:
        >>> from shardmap_torch import assume_constant
        >>> vocabulary = assume_constant({f"token {i}": i for i in range(50_000)})
    """
    _CONSTANTS[id(value)] = value
    return value


def is_constant(value: object) -> bool:
    """Returns whether an object was declared constant."""
    return id(value) in _CONSTANTS
