"""Terms: expressions of some of the microbatches into which rows were divided."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch

from shardmap_torch.checker.spmd.recorder import Ref
from shardmap_torch.checker.spmd.sharded import Sharded

aten = torch.ops.aten

State: TypeAlias = Literal["rows", "additive", "mixed", "item"]

ADDS: Final = (aten.add.Tensor, aten.add_.Tensor)

ALL: Final = frozenset({-1})
"""The indices of a value that has every microbatch in an entry of its own along a dim."""


@dataclass(frozen=True)
class Term:
    """A value that is an expression of some microbatches.

    Attributes:
        count: how many there are.
        axes: those that shard the rows which were divided.
        indices: of the microbatches it depends on; or `ALL`.
        expression: what it is of them, as a number that equal expressions share.
        state: "rows" where each rank's value is a function of its own rows; "additive" where the
            value on one device is the sum, or the mean, of those of blocks of rows; else "mixed".
            "item" where it is no microbatch but an item of a dim of which each rank has `count`.
    """

    count: int
    axes: tuple[str, ...]
    indices: frozenset[int]
    expression: int
    state: State

    @property
    def group(self) -> tuple[int, tuple[str, ...], bool]:
        """Returns what values must share to be of the same microbatches, or items."""
        return self.count, self.axes, self.is_item

    @property
    def is_item(self) -> bool:
        """Returns whether it is an item of a dim."""
        return self.state == "item"


@dataclass(frozen=True)
class Entry:
    """An entry for a tensor: its expression, and the term that it is, until the next write.

    Attributes:
        expression: a number that equal expressions share.
        term: what it is of some microbatches; None if it depends on none.
        version: of the memory of the tensor, which each write counts up.
    """

    expression: int
    term: Term | None
    version: int = 0


@dataclass(frozen=True)
class Combined:
    """A call: its operands are terms of the same microbatches, or it adds them.

    Attributes:
        made: a number that equal calls share.
        terms: what its operands are.
        added: the sum that it makes of microbatches.
        is_linear: whether it is linear in its operands.
        finished: numbers of results in which it adds up all that lie along a dim.
    """

    made: int
    terms: tuple[Term, ...] = ()
    added: Term | None = None
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


def united(one: Term | None, other: Term | None) -> Term | None:
    """Returns the sum of an expression of several microbatches; None where there is none."""
    if one is None or other is None or not one.indices.isdisjoint(other.indices):
        return None
    if replace(one, indices=other.indices) != other or one.state not in ("additive", "item"):
        return None
    return replace(one, indices=one.indices | other.indices)


def shown(term: Term) -> str:
    """Formats a term for messages."""
    if term.indices == ALL:
        return f"each of {term.count} microbatches"
    which = ", ".join(map(str, sorted(term.indices)))
    if term.is_item:
        over = ", ".join(map(repr, term.axes))
        return f"items {which} of the {term.count} that each rank has of a dim sharded over {over}"
    return f"microbatches {which} of {term.count}"


_PLAIN: Final = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)


def plain_key(value: Any) -> Any:
    """Returns a key that equal arguments share; an object that is not plain has its own."""
    if isinstance(value, list | tuple):
        return tuple(map(plain_key, value))
    if isinstance(value, _PLAIN) or isinstance(value, torch.memory_format):
        return type(value).__name__, value
    return None if isinstance(value, Ref) else object()
