"""The ways through a body: each branch on a number taken from a tensor is taken both ways.

A body is interpreted once for each way. One interpretation follows a list of answers, and answers
what lies beyond its end with True; the answers that it gave there are then turned round, the last
one first. An answer that follows from earlier ones is no branch.
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
    """Compares a number that is not known with one that is.

    Attributes:
        subject: the unknown number, as text; equal texts are equal numbers.
        kind: its Python type.
        comparison: one of `COMPARISONS`.
        bound: the known number.
    """

    subject: str
    kind: type
    comparison: str
    bound: float

    def __str__(self) -> str:
        """Formats it as `#1 > 1.0`, or `#1` for a bool."""
        if self.kind is bool and (self.comparison, self.bound) == ("!=", 0):
            return self.subject
        return f"{self.subject} {self.comparison} {self.bound!r}"

    def holds(self, value: float) -> bool:
        """Returns whether it holds where the subject has this value."""
        return COMPARISONS[self.comparison](value, self.bound)


@dataclass(frozen=True)
class Branch:
    """One branch that a way takes.

    Attributes:
        condition: as text, in numbers `#1`, `#2`, ... of the typed program.
        holds: what the way takes it to be.
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
    """An error of the checker in here is one also where the body catches it.

    A run, which has no types, would not raise it, and do what was not checked. Entered at every
    operation; a generator would cost each a microsecond.
    """

    __slots__ = ("_branches",)

    def __init__(self, branches: "Branches") -> None:
        """`branches` are told of the error."""
        self._branches = branches

    def __enter__(self) -> None:
        """Enters it."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leaves it, and notes the error."""
        if isinstance(error, ShardTypeError | TransformError):
            self._branches.refusal = error


class Branches:
    """The branches of one interpretation, which follows the answers that it is given."""

    def __init__(self, name: str, given: Sequence[bool] = (), others: int = 0) -> None:
        """`name` is what errors call the body, `others` is how many other ways are known."""
        self.name, self._answers, self._others = name, given, others
        self.start()

    def end(self) -> None:
        """No way is followed any more."""
        self._ended = True

    def start(self) -> None:
        """Forgets what has been answered, for another interpretation on the same way."""
        self.taken: list[Branch] = []
        self._known: list[tuple[Condition, bool]] = []
        self._ended = False
        self.refusal: ShardTypeError | TransformError | None = None

    def refuse(self, what: str, advice: str) -> NoReturn:
        """Insists on an error at the user's line."""
        self.fail(ShardTypeError(f"{self.name}: {what}\n  at {call_site()}\nFix: {advice}"))

    def fail(self, error: ShardTypeError) -> NoReturn:
        """Notes an error before it raises it: the body may catch it."""
        with Failing(self):
            raise error

    def require(self) -> None:
        """Raises the error that was insisted on, if there is one."""
        if self.refusal is not None:
            raise self.refusal from None

    def again(self) -> "Branches":
        """Others for the same way."""
        return Branches(self.name, self._answers, self._others)

    def decide(self, condition: Condition) -> bool:
        """Decides the condition on this path.

        Raises:
            ShardTypeError: there are too many ways; or the check has ended, and nobody knows.
        """
        if self._ended:
            raise ShardTypeError(
                f"{self.name}: {condition} is asked of a number that the body kept when it was "
                "checked. Return the number instead: the check of a body leaves nothing behind."
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
        """The answers that some value of the subject gives which fits all that was answered."""
        known = [
            (other, answer)
            for other, answer in self._known
            if (other.subject, other.kind) == (condition.subject, condition.kind)
        ]
        bounds = [condition.bound, *(other.bound for other, _ in known)]
        return {
            condition.holds(value)
            for value in _candidates(condition.kind, bounds)
            if all(other.holds(value) is answer for other, answer in known)
        } or {True, False}  # other bounds than numbers, such as complex ones


def _candidates(kind: type, bounds: Sequence[float]) -> Iterator[float]:
    """Values of which one lies in each range that the bounds part, and on each bound."""
    if kind is bool:
        yield from (False, True)
        return
    for bound in bounds:
        if kind is float:
            yield from (bound, math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf))
        elif math.isfinite(bound):
            low, high = math.floor(bound), math.ceil(bound)
            yield from (low - 1, low, high, high + 1)
        else:
            yield 0
    if kind is float:
        yield from (math.nan, math.inf, -math.inf)


_LISTED: Final = 4
"""Maximal number of branches of a path that an error lists."""


def format_branches(branches: Sequence[Branch]) -> list[str]:
    """The branches of a way, one a line; of many the last ones."""
    more = [f"  after {len(branches) - _LISTED} other branches"] * (len(branches) > _LISTED)
    return [*more, *(f"  where {branch}" for branch in branches[-_LISTED:])]


def every_path(name: str, run: Callable[[Branches], T]) -> list[T]:
    """Runs `run` on each path, and yields the results in the order in which paths are found."""
    found: list[T] = []
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        given = pending.pop()
        branches = Branches(name, given, len(found) + len(pending))
        found.append(run(branches))
        answers = [branch.holds for branch in branches.taken]
        pending += [(*answers[:i], False) for i in range(len(given), len(answers))]
    return found
