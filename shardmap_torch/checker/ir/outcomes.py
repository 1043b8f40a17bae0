"""Outcomes: results of verifying one path through a body, and choices that all paths share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardmap_torch.boundary.call import Result
from shardmap_torch.checker.ir.program import ProgramPath
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.source_location import Site
from shardmap_torch.types import AxisType

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
        closed_over: the ids of tensors that it reads and that are no arguments.
        asks: axes along which it asks a group of torch.distributed for its rank or size.
    """

    rank_only: str | None = None
    draws: bool = False
    takes_gradients: bool = False
    averages: bool = False
    applies_functions: bool = False
    closed_over: set[int] = field(default_factory=set)
    asks: frozenset[str] = frozenset()

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
    """

    program: ProgramPath
    result: Result | None
    error: Exception | None = None
    outputs: Outputs = field(default_factory=dict)
    exits: Mapping[Where, Exit] = field(default_factory=dict)
    needs: Mapping[Where, Need] = field(default_factory=dict)
    traits: Traits = field(default_factory=lambda: Traits(""))
    sharing: Mapping[int, int] = field(default_factory=dict)


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
