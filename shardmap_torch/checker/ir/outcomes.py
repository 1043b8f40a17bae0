"""Results of verifying one path through a body, and what all paths share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from shardmap_torch.boundary.call import Result
from shardmap_torch.checker.ir.program import ProgramPath
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.core.source_location import Site
from shardmap_torch.types import AxisType

Cast = tuple[str, AxisType, AxisType]
"""Name and types of a conversion along one axis."""


Where = tuple[int, str]
"""The position of a leaf, and an axis."""


Outputs = dict[int, tuple[tuple[int, ...], torch.dtype, Types]]


@dataclass(frozen=True)
class Need:
    """The reading that an input's gradient needs of an axis its spec leaves open.

    Attributes:
        replicate: whether it has to be summed over the axis, or is whole already.
        origin: what made the gradient, in words.
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
    """The conversions of a result along one axis when it leaves.

    Attributes:
        casts: the conversions to the type that its spec promises.
        others: other conversions that are right for it as well.
        origin: what made the result, in words.
    """

    casts: tuple[Cast, ...]
    others: frozenset[tuple[Cast, ...]]
    origin: str


@dataclass(frozen=True)
class PathOutcome:
    """The outcome of verifying one path.

    Attributes:
        way: its branches and equations.
        result: what the body returned; None where it raised.
        error: what it raised.
        outputs: shape, dtype and types of the results that cross.
        exits: how these leave.
        needs: what the gradients of inputs want, along open axes.
        batches: whether a batched body can do it.
        draws: whether it draws from torch's default generator.
        takes_gradients: whether it takes gradients by itself.
    """

    way: ProgramPath
    result: Result | None
    error: Exception | None = None
    outputs: Outputs = field(default_factory=dict)
    exits: Mapping[Where, Exit] = field(default_factory=dict)
    needs: Mapping[Where, Need] = field(default_factory=dict)
    batches: bool = False
    draws: bool = False
    takes_gradients: bool = False


@dataclass(frozen=True)
class Resolved:
    """Choices that all paths share.

    Attributes:
        replicate: open axes of inputs over which the gradient is summed.
        exits: how results leave.
    """

    replicate: frozenset[Where] = frozenset()
    exits: Mapping[Where, tuple[Cast, ...]] = field(default_factory=dict)
