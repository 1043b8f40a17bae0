"""The record of what a body does on its mesh, and the monitor that compares runs with it.

A verdict holds for the code that was interpreted, and code may depend on state that no cache key
sees: globals of libraries, the environment, C objects. So the interpretation records the operations
of the body on its mesh, and each run is compared with the record before anything is sent. The
record is a tree: code with several paths has one branch for each.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, ClassVar, Final, NoReturn

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import used_after_check
from shardmap_torch.checker.ir.program import Crossing
from shardmap_torch.collectives.protocol import Casts, Edge, Monitor, Note, Reruns
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.core.torch_private.engine import FakeTensor, functorch
from shardmap_torch.errors import show_shape
from shardmap_torch.types import AxisType

TYPE: Final = "type"


@dataclass(eq=False)
class CheckedStep:
    """A recorded operation of a body on its mesh, and the steps that may follow it.

    Attributes:
        what: the operation, or a tuple that describes it; None for the start.
        shape: shape of its operand, if it has one.
        dtype: dtype of its operand.
        depth: number of steps before it.
        note: the checker's answer that runs read, such as the result of a query for types.
        site: its source line.
        next: the steps that may follow, one for each path of the code.
        last: whether the code may end here.
        later: records of code that runs again in a backward, by the keys of its runs.
        crossing: casts at the boundary of an inner function.
        issued: the equal operation of the latest run: the next one mostly issues the same object,
            and to compare that takes 0.1 us in place of 1.4 us.
    """

    what: object = None
    shape: Sequence[int] | None = None
    dtype: torch.dtype | None = None
    depth: int = 0
    note: Note = field(default_factory=Note)
    site: Site | None = None
    next: "list[CheckedStep]" = field(default_factory=list)
    last: bool = False
    later: "dict[Hashable, CheckedStep]" = field(default_factory=dict)
    crossing: Crossing = field(default_factory=Crossing)
    issued: object = None

    @property
    def num_dims(self) -> int:
        """Counts the dims of its operand; 0 without one."""
        return len(self.shape or ())

    def then(self, what: object, x: Tensor | None) -> "CheckedStep":
        """Returns the step after this one, as a new branch if no earlier path has it."""
        for step in self.next:
            if step.what == what and (x is None or (x.shape, x.dtype) == (step.shape, step.dtype)):
                return step
        shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        step = CheckedStep(what, shape, dtype, self.depth + 1, site=call_site())
        self.next.append(step)
        return step

    def walk(self) -> "Iterator[CheckedStep]":
        """Yields this step and all that follow, those of code that runs again included."""
        pending = [self]
        while pending:
            step = pending.pop()
            yield step
            pending += [*step.later.values(), *step.next]

    def __str__(self) -> str:
        """Formats it as `all_reduce('tp', Partial -> I) of float32[4] at model.py:12`."""
        place = f" at {self.site.place}" if self.site is not None else ""
        return show(self.what, self.shape, self.dtype) + place


def copied(start: CheckedStep, change: Callable[[CheckedStep], CheckedStep]) -> CheckedStep:
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


class StepMonitor(ABC):
    """The part of a monitor that hands out what the checker has written at the step it is at."""

    def __init__(self, start: CheckedStep) -> None:
        self._at = start

    @property
    def depth(self) -> float:
        """Counts the steps that the run and the program have in common."""
        return self._at.depth

    @property
    def upcoming(self) -> Sequence[CheckedStep]:
        """The steps that may follow."""
        return self._at.next

    @property
    def site(self) -> Site | None:
        """Source line of the latest step."""
        return self._at.site

    @abstractmethod
    def on_operation(self, what: object, x: Tensor | None) -> None:
        """Goes to the step of this operation."""

    def types_of(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...]:
        """Returns the types that the checker found at this step."""
        return self.note((TYPE, axes), x).types

    def note(self, what: object, x: Tensor | None = None) -> Note:
        """Returns the note of this step, the same for all paths that look the same to a run."""
        self.on_operation(what, x)
        return self._at.note

    def enter(self, what: object, edge: Edge) -> Casts:
        """Returns the conversions that the checker found for the inputs of an inner function."""
        self.on_operation(what, None)
        return self._at.crossing.collectives

    def leave(self, what: object, edge: Edge) -> Casts:
        """Returns the conversions that the checker found for its results."""
        self.on_operation(what, None)
        return self._at.crossing.collectives

    def fork(self, what: object) -> Reruns:
        """Goes on; code that runs again has records of its own."""
        self.on_operation(what, None)
        return partial(self.rerun, self._at.later)

    @abstractmethod
    def rerun(self, later: dict[Hashable, CheckedStep], kind: Hashable) -> Monitor | None:
        """Returns the monitor of code that runs again, with what is recorded of it by kind."""


class RunMonitor(StepMonitor):
    """Monitor that compares one run of a body, on one rank, with its checked program.

    Attributes:
        has_data: whether values have data, so that one without is of the check.
    """

    has_data: ClassVar[bool] = True

    def __init__(
        self, start: CheckedStep, late: End, end: End = depart, skips: bool = False
    ) -> None:
        """Starts the run; `end` is called at a difference, `late` at one in a later backward.

        With `skips`, steps of the program may be left out.
        """
        super().__init__(start)
        self._late, self._end, self._skips = late, end, skips

    @property
    def depth(self) -> float:
        """Counts the common steps; code that runs in a backward comes after all of the body's."""
        return inf if self._end is self._late else self._at.depth

    def on_operation(self, what: object, x: Tensor | None) -> None:
        for step in self._at.next:
            if (step.issued is what or step.what == what) and (
                x is None or (x.shape == step.shape and x.dtype is step.dtype)
            ):
                self._at = step
                step.issued = what
                if self.has_data and type(x) is FakeTensor:
                    raise used_after_check(f"{what} is called at {call_site()} on")
                return
        if not self._skips or not self._at.next:
            site = call_site()
            place = f" at {site.place}" if site is not None else ""
            shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
            self._differ(show(what, shape, dtype) + place)
        self._at = self._at.next[0]
        self.on_operation(what, x)

    def _differ(self, found: str) -> NoReturn:
        expected = [str(step) for step in self._at.next] + ["the end"] * self._at.last
        self._end(Difference(found, " or ".join(expected), self.depth))

    def rerun(self, later: dict[Hashable, CheckedStep], kind: Hashable) -> Monitor | None:
        """Returns the monitor of code that runs again, which departs late."""
        if kind in later:
            return type(self)(later[kind], self._late, self._late)
        # A backward that the checker has not seen, for other inputs or outputs, may do less.
        alike = [start for known, start in later.items() if _same_code(known, kind)]
        return type(self)(alike[0], self._late, self._late, skips=True) if alike else None

    def end(self, leaves: Sequence[Any] = ()) -> None:
        """Requires that the program may end here, with results that have data."""
        is_plain = {*map(type, leaves)} == {Tensor}  # as most are
        if self.has_data and (
            not is_plain or any(map(functorch.is_functorch_wrapped_tensor, leaves))
        ):
            for leaf in leaves:
                if isinstance(leaf, Tensor) and isinstance(base_of(leaf), FakeTensor):
                    raise used_after_check("a checked body returns")
        if not self._at.last and not self._skips:
            self._differ("the end")


class DryMonitor(RunMonitor):
    """Monitor of a run without data."""

    has_data = False


class ResizedMonitor(DryMonitor):
    """Monitor of a run without data, of other sizes than those that were checked."""

    def on_operation(self, what: object, x: Tensor | None) -> None:
        """Goes to the step that is equal but for sizes, or calls `end`."""
        for step in self._at.next:
            if step.what == what and (
                x is None or (x.dtype, x.ndim) == (step.dtype, step.num_dims)
            ):
                self._at = step
                return
        super().on_operation(what, x)


def _same_code(kind: Hashable, other: Hashable) -> bool:
    return isinstance(kind, tuple) and isinstance(other, tuple) and kind[:1] == other[:1]
