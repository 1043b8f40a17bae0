"""Replay: compares a run of a body, operation by operation, with its checked program.

A verdict holds for the code that was interpreted, and code may depend on state that no cache key
sees: globals of libraries, the environment, C objects. So the interpretation records the operations
of the body on its mesh, and each run is compared with the record before anything is sent. The
record is a tree: code with several paths has one branch for each.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter.state import kept
from shardmap_torch.checker.ir.outcomes import Crossing
from shardmap_torch.collectives.protocol import Casts, Edge, Monitor, Note, Reruns
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import FakeTensor, functorch
from shardmap_torch.errors import show_shape
from shardmap_torch.types import AxisType

TYPE: Final = "type"


@dataclass(eq=False)
class Step:
    """A recorded operation of a body on its mesh, and the steps that may follow it.

    Attributes:
        what: the operation, or a tuple that describes it; None for the start.
        shape: shape of its operand, if it has one.
        dtype: dtype of its operand.
        depth: number of steps before it.
        types: the result of a query for types.
        note: the checker's answer that runs read.
        site: its source line.
        next: the steps that may follow, one for each path of the code.
        last: whether the code may end here.
        later: records of code that runs again in a backward, by the keys of its runs.
        crossing: casts at the boundary of an inner function.
    """

    what: object = None
    shape: Sequence[int] | None = None
    dtype: torch.dtype | None = None
    depth: int = 0
    types: tuple[AxisType, ...] = ()
    note: Note = field(default_factory=Note)
    site: Site | None = None
    next: "list[Step]" = field(default_factory=list)
    last: bool = False
    later: "dict[Hashable, Step]" = field(default_factory=dict)
    crossing: Crossing = field(default_factory=Crossing)

    def is_of(self, what: object, x: Tensor | None) -> bool:
        """Returns whether it is the same operation on an operand of the same shape and dtype."""
        mine = self.what
        return (mine is what or mine == what) and (
            x is None or (x.shape == self.shape and x.dtype is self.dtype)
        )

    def then(self, what: object, x: Tensor | None) -> "Step":
        """Returns the step after this one, as a new branch if no earlier path has it."""
        for step in self.next:
            if step.is_of(what, x):
                return step
        shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        step = Step(what, shape, dtype, self.depth + 1, site=call_site())
        self.next.append(step)
        return step

    def __str__(self) -> str:
        """Formats it as `all_reduce('tp', Partial -> I) of float32[4] at model.py:12`."""
        place = f" at {self.site.place}" if self.site is not None else ""
        return show(self.what, self.shape, self.dtype) + place


def copied(start: Step, change: Callable[[Step], Step]) -> Step:
    """Copies a record, each step changed; a loop, since it is as deep as the program is long.

    `change` returns a step of its own, whatever follows it.
    """
    first = change(start)
    pending = [(start, first)]
    while pending:
        step, copy = pending.pop()
        copy.next = [change(each) for each in step.next]
        copy.later = {key: change(each) for key, each in step.later.items()}
        pending += zip(step.next, copy.next, strict=True)
        pending += zip(step.later.values(), copy.later.values(), strict=True)
    return first


def show(what: object, shape: Sequence[int] | None, dtype: torch.dtype | None) -> str:
    """Formats an operation for errors."""
    if isinstance(what, tuple):
        name, *rest = what
        return f"{name}({', '.join(map(repr, rest))})"
    if shape is None:
        return str(what)
    return f"{what} of {show_shape(dtype, shape)}"


@dataclass(frozen=True)
class Difference:
    """The point where a run departs from the checked program.

    Attributes:
        found: the operation of the run.
        expected: the operations of the checked program there.
        depth: number of common steps.
    """

    found: str
    expected: str
    depth: float

    def __str__(self) -> str:
        return f"  this run: {self.found}\n  the checked program: {self.expected}"


class Departure(BaseException):
    """Unwinds a body that has departed from its program; `except Exception` does not catch it."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(str(difference))
        self.difference = difference


End = Callable[[Difference], NoReturn]


def depart(difference: Difference) -> NoReturn:
    """Ends a run whose program has to be checked again."""
    raise Departure(difference)


class Replay:
    """Monitor that compares one run of a body, on one rank, with its checked program."""

    def __init__(self, start: Step, late: End, end: End = depart) -> None:
        """Starts the run; `end` is called at a difference, `late` at one in a later backward."""
        self._at, self._late, self._end = start, late, end

    @property
    def depth(self) -> float:
        """Counts the steps that the run and the program have in common."""
        return self._at.depth

    @property
    def upcoming(self) -> Sequence[Step]:
        """The steps that may follow."""
        return self._at.next

    @property
    def site(self) -> Site | None:
        """Source line of the latest step."""
        return self._at.site

    def on_operation(self, what: object, x: Tensor | None) -> None:
        """Goes to the matching step, or calls `end`."""
        for step in self._at.next:
            mine = step.what  # as in `Step.is_of`: a call would double the cost
            if (mine is what or mine == what) and (
                x is None or (x.shape == step.shape and x.dtype is step.dtype)
            ):
                self._at = step
                step.what = what  # the same object next time, also where the record was loaded
                if type(x) is FakeTensor:
                    raise kept(f"{what} is called at {call_site()} on")
                return
        self._miss(what, x)

    def _miss(self, what: object, x: Tensor | None) -> NoReturn:
        site = call_site()
        place = f" at {site.place}" if site is not None else ""
        shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        self._differ(show(what, shape, dtype) + place)

    def _differ(self, found: str) -> NoReturn:
        program_paths = [str(step) for step in self._at.next] + ["the end"] * self._at.last
        self._end(Difference(found, " or ".join(program_paths), self.depth))

    def types_of(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...]:
        """Returns the types that the checker found at this step."""
        self.on_operation((TYPE, axes), x)
        return self._at.types

    def note(self, what: object) -> Note:
        """Returns the note that the checker wrote at this step."""
        self.on_operation(what, None)
        return self._at.note

    def enter(self, what: object, edge: Edge) -> Casts:
        """Returns the conversions that the checker found for the inputs of an inner function."""
        self.on_operation(what, None)
        return self._at.crossing.collectives

    def leave(self, what: object, edge: Edge) -> Casts:
        self.on_operation(what, None)
        return self._at.crossing.collectives

    def fork(self, what: object) -> Reruns:
        """Goes on; code that runs again is compared with its own record."""
        self.on_operation(what, None)
        return partial(self._again, self._at.later)

    def _again(self, later: Mapping[Hashable, Step], kind: Hashable) -> Monitor | None:
        if kind in later:
            return _Again(later[kind], self._late, self._late)
        # A backward that the checker has not seen, for other inputs or outputs, may do less.
        alike = [start for known, start in later.items() if _same_code(known, kind)]
        return _Part(alike[0], self._late, self._late) if alike else None

    def end(self, leaves: Sequence[Any] = ()) -> None:
        """Requires that the program may end here, with results that have data."""
        is_plain = {*map(type, leaves)} == {Tensor}  # as most are
        if not is_plain or any(map(functorch.is_functorch_wrapped_tensor, leaves)):
            for leaf in leaves:
                if isinstance(leaf, Tensor) and isinstance(base_of(leaf), FakeTensor):
                    raise kept("a checked body returns")
        if not self._at.last:
            self._differ("the end")


def _same_code(kind: Hashable, other: Hashable) -> bool:
    return isinstance(kind, tuple) and isinstance(other, tuple) and kind[:1] == other[:1]


class _Again(Replay):
    """Replay of code that runs in a backward, after all steps of the body."""

    @property
    def depth(self) -> float:
        return inf


class _Part(_Again):
    """Replay of such code where steps may be left out."""

    def on_operation(self, what: object, x: Tensor | None) -> None:
        at = self._at
        while not any(step.is_of(what, x) for step in at.next):
            if not at.next:
                self._miss(what, x)
            at = at.next[0]
        self._at = at.then(what, x)

    def end(self, leaves: Sequence[object] = ()) -> None:
        pass
