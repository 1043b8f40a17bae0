"""The typed program: equations with source lines, shapes and types, the outcome of each path.

It is the library's jaxpr.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Result
from shardmap_torch.checker.ir.paths import Branch
from shardmap_torch.checker.ir.repairs import Spot
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import show_shape
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType

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
        maker: name of the operation that made its memory; empty for values from outside.
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
    maker: str = ""

    def freeze(self, why: str) -> None:
        """Makes it read-only; `why` counts unless it was so before."""
        self.read_only = self.read_only or why

    @property
    def first(self) -> "StorageType":
        """The value from which this one comes, by the first operand of each step."""
        found = self
        for _ in range(_MAX_STEPS):
            operands = () if found.made is None else found.made.operands
            if not operands or operands[0].storage_type is found:
                break
            found = operands[0].storage_type
        return found

    def origin(self) -> str:
        """Describes the origin of the value."""
        if self.made is None:
            return self.label
        site = f" at {self.made.site}" if self.made.site is not None else ""
        return f"{self.made.name}{site}"


_MAX_STEPS: Final = 64
"""Steps after which no value is sought that others come from."""

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


def orders(equation: Equation) -> bool:
    """Returns whether it matters when an equation runs: not of a pure function of its operands.

    It does of collectives, writes, draws, and of whatever else is not known to be pure.
    """
    own = {id(use.storage_type) for use in equation.operands}
    shares = any(id(use.storage_type) in own for use in equation.results)
    free = equation.collective is None and bool(equation.results) and _purity(equation.name)
    return not free or (shares and free != _VIEW)


_FRESH: Final = 1
_VIEW: Final = 2
_aten: Final = torch.ops.aten


@lru_cache(maxsize=4096)
def _purity(name: str) -> int:
    """Returns what an operator of this name makes: new memory, or a view; 0 if it may do more."""
    overloads = _overloads(name)
    if not overloads or name.endswith("_") or draws(name):
        return 0
    views = (r.alias_info for each in overloads for r in each._schema.returns)
    return _VIEW if any(info is not None and not info.is_write for info in views) else _FRESH


def draws(name: str) -> bool:
    """Returns whether an operator of this name draws from torch's generators."""
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in _overloads(name))


def _overloads(name: str) -> Sequence[Any]:
    packet = getattr(_aten, name, None) if name.isidentifier() else None
    return [] if packet is None else [getattr(packet, each) for each in packet.overloads()]


@dataclass(frozen=True)
class ProgramPath:
    """The typed program of one path through a body, forward and backward.

    Attributes:
        branches: branches on numbers read from tensors, in order.
        equations: in the order of execution.
        end: text of the exception with which it ends; empty if it returns.
        gradients: the types that the derived gradients of arguments have in the body, by path.
        returned: the tensors among the results.
    """

    branches: tuple[Branch, ...]
    equations: tuple[Equation, ...]
    end: str = ""
    gradients: tuple[tuple[str, Types], ...] = ()
    returned: tuple[Use, ...] = ()


def use_of(name: str, tensor: Tensor, storage_type: StorageType) -> Use:
    """Makes a use of a tensor, with its shape and types now."""
    number = tensor.__dict__.get("_shardmap_number")
    return Use(name, storage_type, storage_type.types, tensor.dtype, tuple(tensor.shape), number)


def bytes_sent(collective: Collective, nbytes: int, num_ranks: int) -> int:
    """Counts the bytes that each rank sends, by the formula of the collective's row."""
    # A float, since sizes may be symbols of torch's, which know no fractions.
    return round(float(collective.row.sent_by(num_ranks)) * nbytes)


def show_types(types: Types, axes: Sequence[str]) -> str:
    """Formats it as `{dp: V, tp: R}`."""
    words = [f"{axis}: {axis_type}" for axis, axis_type in zip(axes, types, strict=True)]
    return f"{{{', '.join(words)}}}"


Cast = tuple[str, AxisType, AxisType]
"""Name and types of a conversion along one axis."""

Where = tuple[int, str]
"""The position of a leaf, and an axis."""

Outputs = dict[int, tuple[tuple[int, ...], torch.dtype, Types]]
"""Shape, dtype and types of each tensor result, by the position of its leaf."""


@dataclass(frozen=True)
class Need:
    """The type that an input's gradient requires along an axis that its spec leaves open.

    Attributes:
        replicate: whether the gradient has to be summed over the axis (R), or is complete (I).
        origin: text of the origin of the gradient.
    """

    replicate: bool
    origin: str


@dataclass(frozen=True)
class Asserted:
    """A type that the body asserts of an input along an axis which its spec leaves open.

    Attributes:
        leaf: the input's position.
        axis: the axis.
        expected: the type.
        site: the line.
    """

    leaf: int
    axis: str
    expected: AxisType
    site: Site | None


@dataclass(frozen=True)
class Exit:
    """The conversions of a result along one axis at the exit.

    Attributes:
        casts: the conversions to the type that its spec promises.
        others: other conversions that would be valid as well.
        origin: text of the origin of the result.
    """

    casts: tuple[Cast, ...]
    others: frozenset[tuple[Cast, ...]]
    origin: str


@dataclass
class Traits:
    """Facts about a body that its runs have to know, beside the types of its values.

    Attributes:
        rank_only: what `torch.func.vmap` drops or lacks and the body uses, or "" where it has it in
            a form of its own; None if a batched body runs as ranks do.
        draws: whether it draws from torch's default generator.
        takes_gradients: whether it takes gradients by itself.
        averages: whether it averages over shards losses whose targets must not be ignored.
        applies_functions: whether it applies autograd Functions other than collectives.
        closed_over: the ids of tensors that it reads and that are no arguments, and what tells
            their values from others where processes compare them.
        asks: axes along which it asks a group of torch.distributed for its rank or size.
        promises: the regions whose promises are to be tried, with the axes that their types name.
        drawn: how draws outside of regions are sharded, where layouts prove it, with their operator
            and line; None for one of which that is not known.
        untraced: a call of torch's whose derivative torch.compile lacks, or ""; see `run.compiled`.
        reductions: the op of each call that sums or averages over ranks.
    """

    rank_only: str | None = None
    draws: bool = False
    takes_gradients: bool = False
    averages: bool = False
    applies_functions: bool = False
    closed_over: set[tuple[int, str]] = field(default_factory=set)
    asks: frozenset[str] = frozenset()
    promises: frozenset[tuple[str, frozenset[str]]] = frozenset()
    drawn: tuple[tuple[Any, Site | None, P | None], ...] = ()
    untraced: str = ""
    reductions: dict[Spot, str] = field(default_factory=dict)

    @staticmethod
    def of_all(paths: "Sequence[Traits]") -> "Traits":
        """Returns the traits of a body that has those of any of its paths."""
        rank_only = [each.rank_only for each in paths if each.rank_only is not None]
        return Traits(
            max(rank_only, default=None),  # any that says where it is
            any(each.draws for each in paths),
            any(each.takes_gradients for each in paths),
            any(each.averages for each in paths),
            any(each.applies_functions for each in paths),
            set().union(*[each.closed_over for each in paths]),
            frozenset[str]().union(*(each.asks for each in paths)),
            frozenset[tuple[str, frozenset[str]]]().union(*(each.promises for each in paths)),
            paths[0].drawn if len(paths) == 1 else (),
            max(each.untraced for each in paths),
            {spot: op for each in paths for spot, op in each.reductions.items()},
        )


@dataclass(frozen=True)
class PathOutcome:
    """The outcome of verifying one path.

    Attributes:
        program: its branches and equations.
        result: the result of the body; None if it raised.
        error: the exception that it raised.
        outputs: shape, dtype and types of the tensor results.
        exits: their conversions.
        needs: requirements of the gradients of inputs, along open axes.
        traits: what else runs have to know of it.
        sharing: the input whose memory a result may have, by their positions.
        observer: what has observed it, as the request has asked.
    """

    program: ProgramPath
    result: Result | None
    error: Exception | None = None
    outputs: Outputs = field(default_factory=dict)
    exits: Mapping[Where, Exit] = field(default_factory=dict)
    needs: Mapping[Where, Need] = field(default_factory=dict)
    traits: Traits = field(default_factory=lambda: Traits(""))
    sharing: Mapping[int, int] = field(default_factory=dict)
    observer: Any = None


@dataclass(frozen=True)
class Resolved:
    """Choices that all paths share.

    Attributes:
        replicate: open axes of inputs over which the gradient is summed.
        exits: conversions of results.
    """

    replicate: frozenset[Where] = frozenset()
    exits: Mapping[Where, tuple[Cast, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class Crossing:
    """Conversions of the inputs or results at a boundary, on all paths that reach it."""

    casts: dict[Where, tuple[Cast, ...]] = field(default_factory=dict)

    @lazy
    def collectives(self) -> Mapping[int, tuple[Collective, ...]]:
        """The conversions of each value, by its position; read only after all were added."""
        conversions: dict[int, tuple[Collective, ...]] = {}
        for (position, axis), casts in self.casts.items():
            made = tuple(Collective(name, src, dst, (axis,)) for name, src, dst in casts)
            conversions[position] = conversions.get(position, ()) + made
        return conversions
