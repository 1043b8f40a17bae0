"""Paths through a body: every branch on a number read from a tensor is interpreted both ways.

A body is interpreted once for each path. One interpretation takes the answers of a list, and True
beyond its end; those answers are then negated one by one, the last one first, for further paths. An
answer that follows from earlier ones is no branch.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeVar

from shardmap_torch.core.source_location import Site, call_site
from shardmap_torch.errors import ShardTypeError, TransformError

T = TypeVar("T")

LIMIT: Final = 64
"""Maximal number of paths through a body that are interpreted."""

COMPARISONS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Condition:
    """Comparison of an unknown number with a known one.

    Attributes:
        subject: the unknown number, as text; equal texts are equal numbers.
        number_type: its Python type.
        comparison: one of `COMPARISONS`.
        bound: the known number.
    """

    subject: str
    number_type: type
    comparison: str
    bound: float

    def __str__(self) -> str:
        """Formats it as `#1 > 1.0`, or `#1` for a bool."""
        if self.number_type is bool and (self.comparison, self.bound) == ("!=", 0):
            return self.subject
        return f"{self.subject} {self.comparison} {self.bound!r}"

    def holds(self, value: float) -> bool:
        """Returns whether it holds if the subject has this value."""
        return COMPARISONS[self.comparison](value, self.bound)


@dataclass(frozen=True)
class Branch:
    """One branch that a path takes.

    Attributes:
        condition: its text, in numbers `#1`, `#2`, ... of the typed program.
        holds: its value on the path.
        site: the user's line.
    """

    condition: str
    holds: bool
    site: Site | None

    def __str__(self) -> str:
        """Formats it as `#1 > 1.0 is False at train.py:12: if norm > clip:`."""
        at = "" if self.site is None else f" at {self.site}"
        return f"{self.condition} is {self.holds}{at}"


class Failing:
    """Context that records an error of the checker even if the body catches it.

    A run, which has no types, would not raise it, and would run unchecked code. What is entered at
    every operation calls `record` in place of the context, which would cost each a microsecond.
    """

    __slots__ = ("_branches",)

    def __init__(self, branches: "Branches") -> None:
        """Keeps the branches, where the error is recorded."""
        self._branches = branches

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ShardTypeError | TransformError):
            self.record(error)

    def record(self, error: ShardTypeError | TransformError) -> None:
        """Records an error."""
        self._branches.refusal = error


class Branches:
    """The branches of one interpretation, decided by a list of answers."""

    def __init__(self, name: str, given: Sequence[bool] = (), others: int = 0) -> None:
        """Keeps the answers; `others` is the number of other known paths."""
        self.name, self._answers, self._others = name, given, others
        self.start()

    def end(self) -> None:
        """Ends the interpretation: later conditions are errors."""
        self._ended = True

    def start(self) -> None:
        """Resets the state, for another interpretation of the same path."""
        self.taken: list[Branch] = []
        self._known: list[tuple[Condition, bool]] = []
        self._ended = False
        self.refusal: ShardTypeError | TransformError | None = None

    def refuse(self, what: str, advice: str) -> NoReturn:
        """Records and raises an error at the user's line."""
        self.fail(ShardTypeError(f"{self.name}: {what}\n  at {call_site()}\nFix: {advice}"))

    def fail(self, error: ShardTypeError) -> NoReturn:
        """Records and raises an error: the body may catch it."""
        with Failing(self):
            raise error

    def require(self) -> None:
        """Raises the recorded error, if there is one."""
        if self.refusal is not None:
            raise self.refusal from None

    def again(self) -> "Branches":
        """Returns new branches for the same path."""
        return Branches(self.name, self._answers, self._others)

    def decide(self, condition: Condition) -> bool:
        """Decides the condition on this path.

        Raises:
            ShardTypeError: there are too many paths, or the check has ended.
        """
        if self._ended:
            raise ShardTypeError(
                f"{self.name}: at {call_site()} {condition} is asked of a number that the body "
                "kept when it was checked. Return the number instead: the check of a body leaves "
                "nothing behind."
            )
        answers = self._possible(condition)
        if len(answers) == 1:
            return answers.pop()
        number = len(self.taken)
        answer = self._answers[number] if number < len(self._answers) else True
        self.taken.append(Branch(str(condition), answer, call_site()))
        self._known.append((condition, answer))
        if self._others + 1 + len(self.taken) - len(self._answers) > LIMIT:
            self.refuse(
                f"there are more than {LIMIT} paths through the branches on numbers taken from "
                "tensors.",
                "use torch.where, or a loop whose number of steps does not depend on the data.",
            )
        return answer

    def _possible(self, condition: Condition) -> set[bool]:
        """Returns the answers that are consistent with the earlier ones for some value."""
        known = [
            (other, answer)
            for other, answer in self._known
            if (other.subject, other.number_type) == (condition.subject, condition.number_type)
        ]
        bounds = [condition.bound, *(other.bound for other, _ in known)]
        return {
            condition.holds(value)
            for value in _candidates(condition.number_type, bounds)
            if all(other.holds(value) is answer for other, answer in known)
        } or {True, False}  # other bounds than numbers, such as complex ones


def _candidates(number_type: type, bounds: Sequence[float]) -> Iterator[float]:
    """Yields values on each bound, and in each range between bounds."""
    if number_type is bool:
        yield from (False, True)
        return
    for bound in bounds:
        if number_type is float:
            yield from (bound, math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf))
        elif math.isfinite(bound):
            low, high = math.floor(bound), math.ceil(bound)
            yield from (low - 1, low, high, high + 1)
        else:
            yield 0
    if number_type is float:
        yield from (math.nan, math.inf, -math.inf)


_LISTED: Final = 4
"""Maximal number of branches of a path that an error lists."""


def format_branches(branches: Sequence[Branch]) -> list[str]:
    """Formats the branches of a path, one per line; of many the last ones."""
    more = [f"  after {len(branches) - _LISTED} other branches"] * (len(branches) > _LISTED)
    return [*more, *(f"  where {branch}" for branch in branches[-_LISTED:])]


def every_path(name: str, run: Callable[[Branches], T]) -> list[T]:
    """Runs `run` on each path; returns the results in the order in which paths are found."""
    results: list[T] = []
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        prefix = pending.pop()
        branches = Branches(name, prefix, len(results) + len(pending))
        results.append(run(branches))
        answers = [branch.holds for branch in branches.taken]
        pending += [(*answers[:i], False) for i in range(len(prefix), len(answers))]
    return results
