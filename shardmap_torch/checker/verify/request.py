"""Requests of a check, and the types and shapes of values at its boundary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.guards.monitor import CheckedStep
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import Observer
from shardmap_torch.checker.ir.program import Resolved, StorageType
from shardmap_torch.checker.ir.repairs import Repair
from shardmap_torch.checker.ir.sizes import EXACT, Sizes
from shardmap_torch.collectives.protocol import Readings
from shardmap_torch.core.source_location import Site
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, V

Strictness: TypeAlias = Literal["local", "global"] | frozenset[str]
"""A set has the axes over which it is "global"; over the others it is "local"."""


@dataclass(frozen=True)
class Reading:
    """One reading of what a program leaves open; `verdict.attempt` tries one after another.

    Attributes:
        results: the type of a result that is equal on all ranks, uncommitted, and through which a
            gradient flows: K, which is returned as I, or else R.
        assumes: whether gradients that the body takes on one device are assumed to be right, in
            place of interpreting that backward too.
        cast: the lines of calls of `lax` whose equal results are cast where they meet what varies.
        uncommitted: the type that an uncommitted operand counts as in a cast of `lax`.
        marks_parts: whether a rank may take its own part of a tuple that torch returns.
        resolved: the conversions that all paths share.
        rounds: how often such were found before, by this reading.
    """

    results: AxisType = K
    assumes: bool = True
    cast: frozenset[tuple[Site, ...]] = frozenset()
    uncommitted: AxisType = I
    marks_parts: bool = False
    resolved: Resolved = field(default_factory=Resolved)
    rounds: int = 0

    def casts(self, strictness: Strictness) -> Readings:
        """Returns how collectives are to read their operands."""
        copies = V if strictness == "local" else R
        return Readings(self.uncommitted, copies, cast=set(self.cast))


@dataclass
class Met:
    """The parts of a reading that have mattered until an interpretation has failed.

    Attributes:
        results: whether the gradients of results that are read as K do not fit.
        assumed: whether a gradient was assumed.
    """

    results: bool = False
    assumed: bool = False


Observe: TypeAlias = Callable[[Interpreter], Observer]


@dataclass(frozen=True)
class Request:
    """A call whose paths are all verified with the same choices.

    Attributes:
        call: the call, with some open axes of its inputs resolved.
        repair: the change of the program that is tried.
        strictness: whether the forward is also compared with the program on one device.
        sizes: those of arguments that are symbols.
        reading: how to read what the program leaves open; `casts` is the part for collectives.
        start: the first step of the notes for runs, which all paths share.
        met: which parts of the reading have mattered.
        observe: makes an observer of each path; None where nobody else observes it.
    """

    call: Call
    repair: Repair
    strictness: Strictness
    sizes: Sizes = EXACT
    reading: Reading = field(default_factory=Reading)
    casts: Readings = field(default_factory=Readings)
    start: CheckedStep = field(default_factory=CheckedStep)
    met: Met = field(default_factory=Met)
    observe: Observe | None = None


def promised(spec: P, axis: str) -> AxisType:
    """Returns the type that a result's spec promises, before the spec's own conversion."""
    promise = spec.types.get(axis, I)
    return I if promise == R else promise  # `exit_casts` has converted R to I


def enters_as(spec: P, axis: str, mapped: Sequence[str]) -> AxisType:
    """Returns the type with which an input enters, before the conversions of the boundary."""
    axis_type = spec.types.get(axis)
    if axis_type is None:
        return K if axis in mapped else I
    return {"S": V, "P": Partial}.get(axis_type.kind, I)


def seeded_as(spec: P, axis: str) -> AxisType:
    """Returns the type with which the cotangent of a result enters: sharded like the result."""
    axis_type = spec.types.get(axis, I)
    return {"S": V, "P": R}.get(axis_type.kind, I)


def local_shape(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """Returns the shape of a rank's shard."""
    found = list(shape)
    for dim, axes in spec.sharded_dims:
        found[dim] //= mesh.num_ranks(axes)
    return tuple(found)


def global_shape(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """Returns the global shape of a value whose shards have this shape."""
    found = list(shape)
    for dim, axes in spec.sharded_dims:
        found[dim] *= mesh.num_ranks(axes)
    return tuple(found)


_COPIES: Final = frozenset({"clone"})
"""Operations that copy here and may return their operand at run time: `contiguous`, `reshape`."""


def input_sharing(result: StorageType) -> int | None:
    """Returns the position of the input whose memory a result may have at run time.

    Here each conversion gives a storage of its own, since a storage has one type.
    """
    while result.leaf is None:
        made = result.made
        collective = None if made is None else made.collective
        is_view = collective is not None and collective.movement.shares
        if made is None or not (is_view or made.name in _COPIES):
            return None
        result = made.operands[0].storage_type
    return result.leaf
