"""The typed program: equations with source lines, shapes and types; the library's jaxpr."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.ir.paths import Branch
from shardmap_torch.checker.ir.repairs import Spot
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import show_shape

CLOSED_OVER: Final = "a closed-over"
"""Start of the label of a tensor that a body closes over."""


@lru_cache(maxsize=4096)
def varying(types: Types) -> frozenset[int]:
    """Returns the axes, by position, over which the ranks may have different values."""
    return frozenset(at for at, axis_type in enumerate(types) if axis_type.varies)


@dataclass(eq=False, slots=True)
class StorageType:
    """The local type of one storage, which all its views share.

    Attributes:
        types: one type per mesh axis.
        made: the equation that gave it this type; None for values from outside.
        label: name of a value from outside; empty for others.
        storage: kept alive, so that its address stays unique during the interpretation.
        leaf: position of an input; None for others.
        read_only: why it must not be written to; None if it may.
        tasks: the differentiations whose cotangents it descends from; see `state`.
        tokens: the differentiations that its tensors descend from.
        written: those of tensors written into it.
        batched_over: the axes, by position, over which a batched body has it batched,
            independent of its type.
        numbers: numbers of a literal, which are part of the program; empty for others.
    """

    types: Types
    made: "Equation | None"
    label: str
    storage: torch.UntypedStorage
    read_only: str | None = None
    leaf: int | None = None
    tasks: frozenset[int] = frozenset()
    tokens: frozenset[Any] = frozenset()
    written: frozenset[Any] = frozenset()
    batched_over: frozenset[int] = frozenset()
    numbers: str = ""

    def freeze(self, why: str) -> None:
        """Makes it read-only; `why` counts unless it was so before."""
        self.read_only = self.read_only or why

    def origin(self) -> str:
        """Describes the origin of the value."""
        if self.made is None:
            return self.label
        site = f" at {self.made.site}" if self.made.site is not None else ""
        return f"{self.made.name}{site}"


_SHAPED: Final = frozenset({"ones_like", "full_like", "new_ones", "new_full"})
"""Operations whose results depend on nothing but sizes of their operand."""


def is_constant(value: StorageType) -> bool:
    """Returns whether a value is computed from literals and sizes alone, and not written into."""
    known, waiting = {id(value)}, [value]
    while waiting:
        made = waiting[-1].made
        if made is None and not waiting[-1].numbers:
            return False
        of = [] if made is None or made.name in _SHAPED else made.operands
        operands = [use.storage_type for use in of]
        if any(each is waiting[-1] for each in operands):
            return False
        waiting[-1:] = [each for each in operands if id(each) not in known]
        known |= {*map(id, operands)}
    return True


@dataclass(slots=True, unsafe_hash=True)
class Use:
    """An operand or a result of an equation, with its types at that time.

    Nothing changes one; that Python makes sure of it would take most of the time to make it.
    """

    name: str
    storage_type: StorageType = field(compare=False)
    types: Types
    dtype: torch.dtype
    shape: tuple[int, ...]
    number: int | None = None

    def __str__(self) -> str:
        """Formats it as `float32[4, 8]`."""
        return show_shape(self.dtype, self.shape)


@dataclass(eq=False, slots=True)
class Equation:
    """One operation on values.

    Attributes:
        name: name of the ATen overload, or the collective as printed.
        operands: tensors that it reads.
        results: tensors that it makes or writes.
        site: the user's line; in a backward that of the forward operation.
        backward: whether it is in a backward.
        collective: its collective; None for local operations.
        sent: bytes that each rank sends.
        literals: other arguments than tensors, by name.
        spot: the call of a collective in the forward, if the body calls it; None for others.
        written: the collective that the body calls, if the repair that is tried has another.
        forward: in a backward, the equation whose derivative this is part of.
    """

    name: str
    operands: tuple[Use, ...]
    results: tuple[Use, ...]
    site: Site | None
    backward: bool
    collective: Collective | None = None
    sent: int = 0
    literals: tuple[tuple[str, Any], ...] = ()
    forward: "Equation | None" = None
    spot: Spot | None = None
    written: Collective | None = None


@dataclass(frozen=True)
class ProgramPath:
    """The typed program of one path through a body, forward and backward.

    Attributes:
        branches: branches on numbers read from tensors, in order.
        equations: in the order of execution.
        end: text of the exception with which it ends; empty if it returns.
        gradients: the types that the derived gradients of arguments have in the body, by path.
    """

    branches: tuple[Branch, ...]
    equations: tuple[Equation, ...]
    end: str = ""
    gradients: tuple[tuple[str, Types], ...] = ()


def use_of(name: str, tensor: Tensor, storage_type: StorageType) -> Use:
    """Makes a use of a tensor, with its shape and types now."""
    number = tensor.__dict__.get("_shardmap_number")
    return Use(name, storage_type, storage_type.types, tensor.dtype, tuple(tensor.shape), number)


_SENT: Final[Mapping[str, Callable[[int], float]]] = {
    "0": lambda n: 0.0,
    "1": lambda n: 1.0,
    "n-1": lambda n: n - 1.0,
    "(n-1)/n": lambda n: (n - 1) / n,
    "2(n-1)/n": lambda n: 2 * (n - 1) / n,
}


def bytes_sent(collective: Collective, nbytes: int, num_ranks: int) -> int:
    """Counts the bytes that each rank sends, by the formula of the collective's row."""
    return round(_SENT[collective.row.sent](num_ranks) * nbytes)


def show_types(types: Types, axes: Sequence[str]) -> str:
    """Formats it as `{dp: V, tp: R}`."""
    words = [f"{axis}: {axis_type}" for axis, axis_type in zip(axes, types, strict=True)]
    return f"{{{', '.join(words)}}}"
