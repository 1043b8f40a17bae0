"""Following a checked program at run time: what a body asks of its mesh, step by step.

A verdict holds for the code that was interpreted, and not all that code depends on can be seen from
outside: globals of libraries, the environment, what hides in C objects. So the interpretation notes
what the body asks of its mesh, and each run is compared with the notes before anything is sent.
The notes are a tree: code that may take one of several ways has one branch for each.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from shardmap_torch.checker.interpreter.state import kept
from shardmap_torch.checker.ir.crossing import Crossing
from shardmap_torch.collectives.protocol import Casts, Edge, Monitor, Note
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.types import AxisType

TYPE: Final = "type"


@dataclass(eq=False)
class Step:
    """One thing that a body asks of its mesh, and what may come after it.

    Attributes:
        what: the operation, or a tuple that tells it; None for the start.
        shape: of its operand, where it has one.
        dtype: of its operand.
        depth: how many steps lead here.
        kinds: the answer, where it is the question for a type.
        note: the answer, where a run asks for what only the checker can find out.
        site: the line of it.
        next: what may follow, one for each way that the code may take.
        last: whether the code may end here.
        later: the code that runs again in a backward, by what tells its runs apart.
        crossing: what the boundary of an inner function does, where it is that.
    """

    what: object = None
    shape: torch.Size | None = None
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
        """The step after this one; a new branch where no way that was taken before has it."""
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


def show(what: object, shape: torch.Size | None, dtype: torch.dtype | None) -> str:
    """An operation as errors call it."""
    if isinstance(what, tuple):
        name, *rest = what
        return f"{name}({', '.join(map(repr, rest))})"
    if shape is None:
        return str(what)
    return f"{what} of {str(dtype).removeprefix('torch.')}{list(shape)}"


class Fork:
    """Sees what its origin sees, and knows who follows the code that will run again."""

    def __init__(self, origin: Monitor, followed: Callable[[Hashable], "Monitor | None"]) -> None:
        """`followed` gives the monitor of a run again, by its kind."""
        self._origin, self._followed = origin, followed

    @property
    def depth(self) -> float:
        return self._origin.depth

    def on_operation(self, what: object, x: Tensor | None) -> None:
        self._origin.on_operation(what, x)

    def types_of(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...]:
        return self._origin.types_of(axes, x)

    def note(self, what: object) -> Note:
        return self._origin.note(what)

    def enter(self, what: object, edge: Edge) -> Casts:
        return self._origin.enter(what, edge)

    def leave(self, what: object, edge: Edge) -> Casts:
        return self._origin.leave(what, edge)

    def fork(self, what: object) -> Monitor:
        return self._origin.fork(what)

    def rerun(self, key: Hashable) -> Monitor | None:
        """Returns the monitor of the code when it runs again."""
        return self._followed(key)

    def end(self, leaves: Sequence[object] = ()) -> None:
        self._origin.end(leaves)


@dataclass(frozen=True)
class Difference:
    """The point where a run leaves the checked program.

    Attributes:
        found: what the run asks for.
        expected: what the checked program does there.
        depth: how many steps they have in common.
    """

    found: str
    expected: str
    depth: float

    def __str__(self) -> str:
        """Two lines."""
        return f"  this run: {self.found}\n  the checked program: {self.expected}"


class Departure(BaseException):
    """Unwinds a body that has left its program; `except Exception` in the body does not stop it."""

    def __init__(self, difference: Difference) -> None:
        """`difference` says where."""
        super().__init__(str(difference))
        self.difference = difference


End = Callable[[Difference], NoReturn]


def depart(difference: Difference) -> NoReturn:
    """Ends a run whose program has to be checked again."""
    raise Departure(difference)


class Replay:
    """Compares one run of a body, on one rank, with its checked program; see `backend.Monitor`."""

    def __init__(self, start: Step, late: End, end: End = depart) -> None:
        """`end` is called at a difference, `late` at one in a backward of the same call."""
        self._at, self._late, self._end = start, late, end

    @property
    def depth(self) -> float:
        """Counts the steps that the run and the program have in common."""
        return self._at.depth

    @property
    def site(self) -> Site | None:
        """The line of the latest step."""
        return self._at.site

    def on_operation(self, what: object, x: Tensor | None) -> None:
        """Takes the step, or calls `end`."""
        for step in self._at.next:
            mine = step.what  # as in `Step.is_of`: a call would double the cost
            if (mine is what or mine == what) and (
                x is None or (x.shape == step.shape and x.dtype is step.dtype)
            ):
                self._at = step
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
        """Returns the types that the checker found there."""
        self.on_operation((TYPE, axes), x)
        return self._at.types

    def note(self, what: object) -> Note:
        """Returns what the checker has written there."""
        self.on_operation(what, None)
        return self._at.note

    def enter(self, what: object, edge: Edge) -> Casts:
        """Returns the conversions that the checker found for the inputs of an inner function."""
        self.on_operation(what, None)
        return self._at.crossing.collectives

    def leave(self, what: object, edge: Edge) -> Casts:
        """The same of its results."""
        self.on_operation(what, None)
        return self._at.crossing.collectives

    def fork(self, what: object) -> Monitor:
        """Follows on; what runs again is compared with its own notes."""
        self.on_operation(what, None)
        later = self._at.later
        return Fork(self, lambda kind: self._again(later, kind))

    def _again(self, later: Mapping[Hashable, Step], kind: Hashable) -> Monitor | None:
        if kind in later:
            return _Again(later[kind], self._late, self._late)
        # A backward that the checker has not seen, for other inputs or outputs, may do less.
        alike = [start for known, start in later.items() if _same_code(known, kind)]
        return _Part(alike[0], self._late, self._late) if alike else None

    def rerun(self, key: Hashable) -> Monitor | None:
        """None: nothing runs again that was not forked."""
        return None

    def end(self, leaves: Sequence[object] = ()) -> None:
        """Requires that the program may end here, with results that have data."""
        for leaf in leaves:
            if isinstance(leaf, Tensor) and isinstance(base_of(leaf), FakeTensor):
                raise kept("a checked body returns")
        if not self._at.last:
            self._differ("the end")


def _same_code(kind: Hashable, other: Hashable) -> bool:
    return isinstance(kind, tuple) and isinstance(other, tuple) and kind[:1] == other[:1]


class _Again(Replay):
    """Follows code that runs in a backward: its place is behind all steps of the body."""

    @property
    def depth(self) -> float:
        return inf


class _Part(_Again):
    """The same where steps may be left out."""

    def on_operation(self, what: object, x: Tensor | None) -> None:
        at = self._at
        while not any(step.is_of(what, x) for step in at.next):
            if not at.next:
                self._miss(what, x)
            at = at.next[0]
        self._at = at.then(what, x)

    def end(self, leaves: Sequence[object] = ()) -> None:
        pass
