"""Requests of a check: a call, its strictness, and a reading of what the program leaves open."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.guards.monitor import CheckedStep
from shardmap_torch.checker.ir.outcomes import Resolved
from shardmap_torch.checker.ir.repairs import Repair
from shardmap_torch.checker.ir.sizes import EXACT, Sizes
from shardmap_torch.collectives.protocol import Readings
from shardmap_torch.core.source_location import Site
from shardmap_torch.types import AxisType, I, K, R, V

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
    """

    results: AxisType = K
    assumes: bool = True
    cast: frozenset[tuple[Site, ...]] = frozenset()
    uncommitted: AxisType = I

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


@dataclass(frozen=True)
class Request:
    """A call whose paths are all verified with the same choices.

    Attributes:
        call: the call, with some open axes of its inputs resolved.
        repair: the change of the program that is tried.
        strictness: whether the forward is also compared with the program on one device.
        sizes: those of arguments that are symbols.
        reading: how to read what the program leaves open; `casts` is the part for collectives.
        resolved: the conversions of results that all paths share.
        start: the first step of the notes for runs, which all paths share.
        met: which parts of the reading have mattered.
    """

    call: Call
    repair: Repair
    strictness: Strictness
    sizes: Sizes = EXACT
    reading: Reading = field(default_factory=Reading)
    casts: Readings = field(default_factory=Readings)
    resolved: Resolved = field(default_factory=Resolved)
    start: CheckedStep = field(default_factory=CheckedStep)
    met: Met = field(default_factory=Met)
