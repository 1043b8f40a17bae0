"""`assume_constant`: objects that a user declares constant, which no call compares."""

from typing import Any, TypeVar

X = TypeVar("X")

CONSTANTS: dict[int, Any] = {}
"""Objects that are declared constant, by their ids."""


def assume_constant(value: X) -> X:
    """Declares that an object, and all that it refers to, never changes.

    Before each call of a checked function the data that its code refers to is compared with that of
    the check, and a check undoes what it changes of it. A data set can be left out, or a log that a
    body writes and never reads. The promise is not verified: a change of a constant leaves an old
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
    CONSTANTS[id(value)] = value
    return value
