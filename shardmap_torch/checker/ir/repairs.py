"""Repairs of a rejected program: one change each, proposed where it fails and tried before printed.

A change is of a call in the user's code, in all of its runs, as an edit of that line would be.
"""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.checker.rules.lattice import OR_R
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.source_location import Site, user_call
from shardmap_torch.errors import MAX_LINES, TRIED, ShardTypeError
from shardmap_torch.ops.reading import Reading
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from shardmap_torch.checker.ir.program import Equation


Op = Literal["sum", "mean"]


@dataclass(frozen=True)
class Spot:
    """A call in the user's code.

    Attributes:
        site: its line.
        code: the function that calls.
        at: the position of the call in that code, which tells the calls of one line apart.
        name: of what is called.
    """

    site: Site
    code: CodeType
    at: int
    name: str

    def __str__(self) -> str:
        """Formats it as `matmul at model.py:12`, with its column where a line has several."""
        start = [*self.code.co_positions()][self.at // 2][2]
        several = start is not None and self.site.source.count(f"{self.name}(") > 1
        return f"{self.name} at {self.site.place}" + f", column {(start or 0) + 1}" * several


_PUBLIC: Final = ("shardmap_torch.ops.", "shardmap_torch.lax")
"""Modules whose functions are collectives: what else issues some does more than that."""


def collective_call() -> Spot | None:
    """Returns the user's call of the collective that is issued now; None if a library's code calls.

    It has the name that stands in the line, such as `shift` for what is issued as a ppermute.
    """
    found = user_call()
    if found is None or not found[1].f_globals.get("__name__", "").startswith(_PUBLIC):
        return None
    return _spot(*found, found[1].f_code.co_name)


def function_call(func: Callable[..., Any]) -> Spot | None:
    """Returns the user's call of a function of torch, from the handler of modes for it.

    None if code of a library calls it, such as an optimizer, where no user can change operands.
    """
    found, name = user_call(), getattr(func, "__name__", "")
    handlers = (name, "__torch_function__", "wrapped")  # how torch's functions in Python get there
    if found is None or found[1].f_code.co_name not in handlers:
        return None
    return _spot(*found, name.removeprefix("__").removesuffix("__") or "a function")


def _spot(users: FrameType, called: FrameType, name: str) -> Spot:
    code = users.f_code
    return Spot(Site(code.co_filename, users.f_lineno), code, users.f_lasti, name)


@dataclass(frozen=True)
class Insert:
    """A public function of one tensor that keeps what it means on one device.

    Attributes:
        name: of the function: a collective, or `convert`.
        axis: the mesh axes.
        options: its keyword arguments.
    """

    name: str
    axis: str | tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def of(self, x: str) -> str:
        """Writes the call.

        Example:
            >>> Insert("reduce_scatter", "tp", (("dim", 1),)).of("x")
            "reduce_scatter(x, 'tp', dim=1)"
        """
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"{self.name}({x}, {self.axis!r}{options})"

    def apply(self, x: Tensor) -> Tensor:
        """Calls it in a body."""
        if self is FIRST:
            return torch.zeros_like(x)
        called: Tensor = getattr(ops, self.name)(x, self.axis, **dict(self.options))
        return called


FIRST: Final = Insert("axis_index", ())
"""The index of a rank on one device, which is the first rank: 0."""


def nested(chain: Sequence[Insert], x: str) -> str:
    """Writes calls of which each takes the result of the one before."""
    return reduce(lambda x, insert: insert.of(x), chain, x)


def applied(chain: Sequence[Insert], x: Tensor) -> Tensor:
    """Calls one after the other in a body."""
    return reduce(lambda x, insert: insert.apply(x), chain, x)


@dataclass(frozen=True)
class Repair:
    """One change of a program.

    Attributes:
        text: what to write.
        in_specs: for the position of an input, another spec.
        replicate: for the position of an input, an axis to name in its `replicate=`.
        gradients: for the line where the body takes gradients, how they are reduced before use.
        collectives: for a call of a collective, its replacement, or None to leave it out.
        turned: calls of ppermute or shift that send in the other direction.
        ops: for a call of all_reduce or reduce_scatter, the op to use.
        operands: for a call of a function of torch and the number of a tensor among its arguments,
            what to apply to that first.
        results: for a call of a function of torch, what to apply to what it returns.
        exits: for the position of a result, what to apply to it before it is returned.
        losses: for the line where the body takes gradients, what to apply to the loss before.
        out_specs: for the position of a result, another spec.
        keeps_op: whether `collectives` change an argument only, and a call keeps its `op=`.
    """

    text: str
    in_specs: Mapping[int, P] = field(default_factory=dict)
    replicate: Mapping[int, str] = field(default_factory=dict)
    gradients: Mapping[Site | None, Insert] = field(default_factory=dict)
    collectives: Mapping[Spot | None, Collective | None] = field(default_factory=dict)
    turned: frozenset[Spot | None] = frozenset()
    ops: Mapping[Spot | None, Op] = field(default_factory=dict)
    operands: Mapping[tuple[Spot, int], Insert] = field(default_factory=dict)
    results: Mapping[Spot, Insert] = field(default_factory=dict)
    exits: Mapping[int, Sequence[Insert]] = field(default_factory=dict)
    losses: Mapping[Site | None, Insert] = field(default_factory=dict)
    out_specs: Mapping[int, P] = field(default_factory=dict)
    keeps_op: bool = False

    def op_at(self, spot: Spot | None, own: str) -> str:
        """Returns the op of a reduction; that of one which is replaced divides nothing."""
        replaced = spot in self.collectives and own == "mean" and not self.keeps_op
        return self.ops.get(spot, "sum" if replaced else own)


NONE: Final = Repair("")
"""A repair that changes nothing."""


def is_divided() -> bool:
    """Returns whether the collective that is issued now is one with op="mean"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _REDUCING:
        if frame.f_code is Reading.issue.__code__:
            return frame.f_locals["self"].finish is not None
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals.get("made") == "mean")


_REDUCING: Final = (ops.all_reduce.__code__, ops.reduce_scatter.__code__)


@dataclass(eq=False)
class Rejection:
    """All that the checker knows of an error beside its text.

    Attributes:
        types: those that its message is about.
        equal: the equations that made the equal values which meet what varies.
        closure: the closed-over tensor that would have to be an argument.
        takes_gradients: whether the body has taken gradients by itself before.
        may_be_addend: whether it is right if an equal gradient is the n-th part of one device's.
        inputs: positions of the inputs that it is about, the nearest first.
        proposals: repairs that could be tried, the likeliest first.
        tried: the one that passed, and which the message names.
        refuted: what random numbers have found to differ from one device.
    """

    types: frozenset[AxisType] = frozenset()
    equal: "tuple[Equation | None, ...]" = ()
    closure: Tensor | None = None
    takes_gradients: bool = False
    may_be_addend: bool = False
    inputs: tuple[int, ...] = ()
    proposals: tuple[Repair, ...] = ()
    tried: Repair | None = None
    refuted: str = ""


def rejection_of(error: ShardTypeError) -> Rejection:
    """Returns the record of an error, an empty one where the error came without."""
    found: Any = error.rejection
    if found is None:
        found = error.rejection = Rejection()
    record: Rejection = found
    return record


def rejected(
    text: str,
    types: Iterable[AxisType] = (),
    proposals: Iterable[Repair] = (),
    equal: "Iterable[Equation | None]" = (),
    closure: Tensor | None = None,
    refuted: str = "",
) -> ShardTypeError:
    """Makes an error with its record; see `Rejection`."""
    error = ShardTypeError(text)
    error.rejection = Rejection(
        frozenset(types), tuple(equal), closure, proposals=tuple(proposals), refuted=refuted
    )
    return error


def propose(error: ShardTypeError, repairs: Iterable[Repair], first: bool = False) -> None:
    """Adds repairs to those that could be tried, after those that are known or before them."""
    known, more = rejection_of(error).proposals, tuple(repairs)
    rejection_of(error).proposals = (*more, *known) if first else (*known, *more)


def with_tried(error: ShardTypeError, repair: Repair | None, is_compared: bool) -> None:
    """Adds to an error the repair that passed, and whether numbers were compared with it."""
    if repair is not None:
        text = str(error)
        if repair.turned or repair.collectives:  # what is there may suit no more
            kept = "(?!drop|leave|say)" if None in repair.collectives.values() else ""
            text = re.sub(rf"\nFix: {kept}.*", "", text)
        code = repair.text.partition(" in place of ")[0]
        stem = code.rpartition("dst=")[0]
        text = text.replace(f"{stem}{OR_R}", code) if stem else text  # the type that is right
        lines = [text, f"{TRIED}{repair.text}"]
        lines += ["  with the results and gradients of one device, by numbers"] * is_compared
        error.args = ("\n".join(lines),)
    rejection_of(error).tried = repair


def shortened(error: ShardTypeError) -> ShardTypeError:
    """Cuts an error's message to 40 lines; `findings` keeps the complete text."""
    lines = str(error).splitlines()
    error.findings = error.findings or (str(error),)
    if len(lines) > MAX_LINES:
        left = len(lines) - MAX_LINES + 1
        error.args = ("\n".join([*lines[: MAX_LINES - 1], f"... and {left} more lines"]),)
    return error
