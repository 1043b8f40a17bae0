"""Parts: what a value is of the microbatches into which rows were divided."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch

from shardmap_torch.checker.spmd.recorder import Ref
from shardmap_torch.checker.spmd.sharded import Sharded

State: TypeAlias = Literal["rows", "additive", "mixed"]

ALL: Final = frozenset({-1})
"""The indices of a value that has every microbatch in an entry of its own along a dim."""


@dataclass(frozen=True)
class Part:
    """A value that depends on some microbatches.

    Attributes:
        count: how many there are.
        axes: those that shard the rows which were divided.
        indices: of the microbatches it depends on; or `ALL`.
        expression: what it is of them, as a number that equal expressions share.
        state: "rows" where each rank's value is a function of its own rows; "additive" where the
            value on one device is the sum, or the mean, of those of blocks of rows; else "mixed".
    """

    count: int
    axes: tuple[str, ...]
    indices: frozenset[int]
    expression: int
    state: State

    @property
    def group(self) -> tuple[int, tuple[str, ...]]:
        """Returns what values must share to be of the same microbatches."""
        return self.count, self.axes


@dataclass(frozen=True)
class Entry:
    """An entry for a tensor: its expression, and the part that it is, until the next write.

    Attributes:
        expression: a number that equal expressions share.
        part: what it is of some microbatches; None if it depends on none.
        version: of the memory of the tensor, which each write counts up.
    """

    expression: int
    part: Part | None
    version: int = 0


@dataclass(frozen=True)
class Combined:
    """A call: its operands are parts of the same microbatches, or it adds them.

    Attributes:
        made: a number that equal calls share.
        parts: what its operands are.
        added: the sum that it makes of microbatches.
        is_linear: whether it is linear in its operands.
        finished: numbers of results in which it adds up all that lie along a dim.
    """

    made: int
    parts: tuple[Part, ...] = ()
    added: Part | None = None
    is_linear: bool = False
    finished: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rearranged:
    """A call that divides rows into microbatches, or puts these together again.

    Attributes:
        sharded: the layouts of its results.
        entries: what these are of the microbatches.
    """

    sharded: list[Sharded]
    entries: Sequence[Entry]


def united(one: Part | None, other: Part | None) -> Part | None:
    """Returns the sum of an expression of several microbatches; None where there is none."""
    if one is None or other is None or not one.indices.isdisjoint(other.indices):
        return None
    if replace(one, indices=other.indices) != other or one.state != "additive":
        return None
    return replace(one, indices=one.indices | other.indices)


def shown(part: Part) -> str:
    """Formats a part for messages."""
    if part.indices == ALL:
        return f"each of {part.count} microbatches"
    which = ", ".join(map(str, sorted(part.indices)))
    return f"microbatches {which} of {part.count}"


_PLAIN: Final = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)


def plain_key(value: Any) -> Any:
    """Returns a key that equal arguments share; of what is not plain one of its own."""
    if isinstance(value, list | tuple):
        return tuple(map(plain_key, value))
    if isinstance(value, _PLAIN) or isinstance(value, torch.memory_format):
        return type(value).__name__, value
    return None if isinstance(value, Ref) else object()
