"""Paths through a body: every branch on a number read from a tensor is interpreted both ways.

A body is interpreted once for each path. One interpretation takes the answers of a list, and True
beyond its end; those answers are then negated one by one, the last one first, for further paths. An
answer that follows from earlier ones is no branch.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, NoReturn, TypeVar

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


class AgainError(BaseException):
    """Unwinds a body, past its own `except Exception`, that is interpreted again with more known.

    It takes a rank's part of a tuple, and those that torch returns are to be marked.
    """


class Branches:
    """The branches of one interpretation, decided by a list of answers.

    As a context it records an error of the checker even if the body catches it: a run, which has no
    types, would not raise it, and would run unchecked code.
    """

    def __init__(self, name: str, given: Sequence[bool] = (), others: int = 0) -> None:
        """Keeps the answers; `others` is the number of other known paths."""
        self.name, self._answers, self._others = name, given, others
        self.marks_parts = False
        self.taken: list[Branch] = []
        self._known: list[tuple[Condition, bool]] = []
        self._ended = False
        self._must_raise: dict[str, tuple[bool, ShardTypeError]] = {}
        self._due: ShardTypeError | None = None
        self.refusal: ShardTypeError | TransformError | None = None
        self.ending: Exception | None = None  # an answer had torch raise it, as it has every rank

    def end(self) -> None:
        """Ends the interpretation: later conditions are errors."""
        self._ended = True

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ShardTypeError | TransformError):
            self.refusal = error

    def refuse(self, what: str, advice: str) -> NoReturn:
        """Records and raises an error at the user's line."""
        self.fail(ShardTypeError(f"{self.name}: {what}\n  at {call_site()}\nFix: {advice}"))

    def fail(self, error: ShardTypeError | TransformError) -> NoReturn:
        """Records and raises an error: the body may catch it."""
        self.refusal = error
        raise error

    def require(self) -> None:
        """Raises the recorded error, if there is one."""
        if self.refusal is not None:
            raise self.refusal from None

    def must_raise(self, subject: str, answer: bool, error: ShardTypeError) -> None:
        """Notes that a path on which a number has this answer must raise, or it has this error."""
        self._must_raise[subject] = answer, error

    def require_raised(self) -> None:
        """Raises the error of an answer on which this path had to raise, as it has not."""
        if self._due is not None:
            raise self._due

    def again(self) -> "Branches":
        """Returns new branches for the same path."""
        same = Branches(self.name, self._answers, self._others)
        same.marks_parts = self.marks_parts
        return same

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
        raising, error = self._must_raise.get(condition.subject, (None, None))
        self._due = self._due or (error if answer is raising else None)
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


_KNOWN: Final = (int, float)
_KEEP: Final = (
    "keep it a tensor, or pass a static argument: sizes, positions and numbers of steps must not "
    "depend on the data."
)


class Numbers:
    """The symbolic numbers of one interpretation.

    Attributes:
        any: whether there are any.
        differ_by_rank: whether there are others, which differ by rank; see `rank_numbers`.
        sites: the user's line for each, in the order in which they were made, which decides the
            stand-ins.
    """

    def __init__(self, branches: Branches) -> None:
        """Starts without numbers; `branches` decides the outcome of their comparisons."""
        self.branches = branches
        self.any = self.differ_by_rank = False
        self.sites: dict[str, Site | None] = {}
        self._by_source: dict[Any, SymbolicNumber] = {}
        self._by_text: dict[str, SymbolicNumber] = {}
        self._texts: dict[Any, str] = {}

    def take(self, source: Any, number_type: type) -> "tuple[SymbolicNumber, bool]":
        """Returns the number of `source`, and whether it is a new one."""
        known = self._by_source.get((source, number_type))
        if known is not None:
            return known, False
        number = self.make(f"#{len(self._by_source) + 1}", number_type)
        self._by_source[source, number_type] = number
        return number, True

    def make(self, text: str, number_type: type) -> "SymbolicNumber":
        """Returns the number with that text; equal texts are equal numbers."""
        self.any = True
        if text not in self._by_text:
            # Not 0 or 1, and between them for functions that require it, such as dropout.
            count = len(self._by_text) + 1
            stand_in = 0.5 + count / 2**20 if number_type is float else 100 + count
            self._by_text[text] = SymbolicNumber(self, text, number_type, stand_in)
            self._texts[stand_in] = text
            self.sites[text] = call_site()
        return self._by_text[text]

    def shown(self, value: Any) -> Any:
        """Returns a literal of an operation, with the names of numbers in place of stand-ins."""
        if type(value) in _KNOWN and value in self._texts:
            return self._texts[value]
        if isinstance(value, list | tuple) and self.any:
            return f"[{', '.join([str(self.shown(item)) for item in value])}]"
        return value

    def stand_ins(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns a torch function's arguments with stand-ins for numbers; None if it takes none.

        Raises:
            ShardTypeError: the function might depend on the value.
        """
        types: set[type] = set()
        values = [_stand_in(value, types) for value in args]
        named = {name: _stand_in(value, types) for name, value in kwargs.items()}
        if not types:
            return None
        name = getattr(func, "__name__", str(func))
        place = args[1] if name == "__setitem__" else None
        if not _takes(func, name, types) or isinstance(place, SymbolicNumber):
            self.branches.refuse(
                f"{name} gets a number that is taken from a tensor, and may depend on its value.",
                _KEEP,
            )
        return values, named


def _stand_in(value: Any, types: set[type]) -> Any:
    if isinstance(value, list | tuple):
        found = [_stand_in(item, types) for item in value]
        changed = any(map(operator.is_not, found, value))
        return type(value)(found) if changed else value
    if type(value) is not SymbolicNumber:
        return value
    types.add(value.number_type)
    return value.stand_in


_ARITHMETIC: Final = frozenset(
    "add addcdiv addcmul as_tensor clamp clamp_max clamp_min clip div divide eq fill float_power"
    " floor_divide floordiv fmod full full_like ge greater greater_equal gt le lerp less less_equal"
    " lt masked_fill maximum minimum mod mul multiply ne new_full new_tensor not_equal pow radd"
    " rdiv remainder rfloordiv rmod rmul rpow rsub rtruediv scalar_tensor setitem sub subtract"
    " tensor true_divide truediv where".split()
)
"""Functions of values; also with `_`, `__` or `_foreach_` around the name."""

_MORE: Final = frozenset({"dropout"})
"""Functions written in Python that depend on no float that they take, except to reject it."""

_SHAPING: Final = frozenset({"arange", "range"})
"""Functions whose results have a shape that depends on a float."""


def is_arithmetic(name: str) -> bool:
    """Returns whether a function of torch does the same whatever numbers it gets."""
    return name.strip("_").removeprefix("foreach_") in _ARITHMETIC


def _takes(func: Any, name: str, types: set[type]) -> bool:
    if is_arithmetic(name):
        return True
    if isinstance(func, FunctionType):
        return name in _MORE
    return types == {float} and name not in _SHAPING


def _binary(symbol: str, operation: Callable[[Any, Any], Any]) -> Any:
    def forward(self: "UnknownNumber", other: Any) -> Any:
        return self.combine(symbol, operation, self, other)

    def reflected(self: "UnknownNumber", other: Any) -> Any:
        return self.combine(symbol, operation, other, self)

    return forward, reflected


def _unary(name: str, operation: Callable[..., Any]) -> Any:
    def method(self: "UnknownNumber", *args: Any) -> Any:
        return self.apply(name, operation, *args)

    return method


def _comparison(symbol: str) -> Any:
    def method(self: "UnknownNumber", other: Any) -> Any:
        return self.compare(symbol, other)

    return method


def _escaping(what: str) -> Any:
    def method(self: "UnknownNumber", *others: Any) -> Any:
        return self.plain(what)

    return method


class UnknownNumber:
    """A Python number that a check does not know, and that passes for a float, an int or a bool.

    The operators of Python stand here once; what a number is unknown by says what they give.

    Attributes:
        number_type: its Python type.
    """

    number_type: type

    @property  # type: ignore[misc]  # as in unittest.mock: what isinstance asks
    def __class__(self) -> type:
        """The Python type, for `isinstance`."""
        return self.number_type

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes torch's functions accept it; the mode that interprets the body comes first."""
        raise ShardTypeError(
            f"A number of an interpreted body is used after its check has ended, at {call_site()}: "
            "it was kept, as in a cache that the body fills.\n"
            "Fix: compute it in each call, without functools.cache or what else keeps it; the "
            "rank, for one, by axis_index(axis)."
        )

    def combine(self, symbol: str, operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        """Computes with two numbers, one of which is this one; NotImplemented for tensors."""
        raise NotImplementedError

    def apply(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        """Computes a function of this number."""
        raise NotImplementedError

    def compare(self, symbol: str, other: Any) -> Any:
        """Compares it, by one of `COMPARISONS`."""
        raise NotImplementedError

    def plain(self, what: str, advice: str = "") -> Any:
        """Returns the plain number that `what` needs, or refuses where there is none."""
        raise NotImplementedError

    __add__, __radd__ = _binary("+", operator.add)
    __sub__, __rsub__ = _binary("-", operator.sub)
    __mul__, __rmul__ = _binary("*", operator.mul)
    __truediv__, __rtruediv__ = _binary("/", operator.truediv)
    __floordiv__, __rfloordiv__ = _binary("//", operator.floordiv)
    __mod__, __rmod__ = _binary("%", operator.mod)
    __pow__, __rpow__ = _binary("**", operator.pow)
    __neg__ = _unary("neg", operator.neg)
    __pos__ = _unary("pos", operator.pos)
    __abs__ = _unary("abs", abs)
    __round__ = _unary("round", round)
    __floor__ = _unary("floor", lambda x: int(x // 1))
    __ceil__ = _unary("ceil", lambda x: int(x // 1))
    __trunc__ = _unary("trunc", int)
    __lt__, __le__ = _comparison("<"), _comparison("<=")
    __gt__, __ge__ = _comparison(">"), _comparison(">=")
    __eq__, __ne__ = _comparison("=="), _comparison("!=")
    __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __invert__ = _escaping(
        "an operation on bits"
    )
    __rand__ = __ror__ = __rxor__ = __rlshift__ = __rrshift__ = __and__
    __divmod__ = __rdivmod__ = _escaping("divmod()")

    def __hash__(self) -> int:
        # Equal numbers must have the same hash, and it is not known which are equal.
        return hash(self.plain("a set or the key of a dict"))

    def __float__(self) -> float:
        """Refuses: a plain number could not be tracked."""
        return float(self.plain("float() or math", "write n * 1.0 in place of float(n)"))

    def __int__(self) -> int:
        return int(self.plain("int()", "write math.trunc(n) in place of int(n)"))

    def __complex__(self) -> complex:
        return complex(self.plain("complex()"))

    def __getattr__(self, name: str) -> Any:
        """Rejects attributes that a Python number has and an unknown one has not."""
        if name != "number_type" and hasattr(self.number_type, name):
            return getattr(self.plain(f".{name}"), name)
        raise AttributeError(name)

    def __format__(self, spec: str) -> str:
        """Returns its name, in any format."""
        return str(self)

    def __repr__(self) -> str:
        return str(self)


_MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}


def _order(a: "SymbolicNumber", symbol: str, b: "SymbolicNumber") -> Condition:
    """Returns the condition on the order of two numbers: -1, 0 or 1, or none if unordered."""
    if b.text < a.text:
        a, symbol, b = b, _MIRRORED.get(symbol, symbol), a
    number_type = float if float in (a.number_type, b.number_type) else int
    return Condition(f"order of {a.text} and {b.text}", number_type, symbol, 0)


class SymbolicNumber(UnknownNumber):
    """A number taken from a tensor, known by how it is computed."""

    def __init__(self, owner: Numbers, text: str, number_type: type, stand_in: float) -> None:
        """Keeps the text, the Python type and the number that stands in for this one."""
        self.owner, self.text, self.number_type, self.stand_in = owner, text, number_type, stand_in

    def combine(self, symbol: str, operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        sides = (a, b)
        if not all(type(x) is SymbolicNumber or isinstance(x, _KNOWN) for x in sides):
            return NotImplemented  # a tensor, which takes it with a stand-in
        texts = [x.text if type(x) is SymbolicNumber else repr(x) for x in sides]
        values = [x.stand_in if type(x) is SymbolicNumber else x for x in sides]
        return self.owner.make(f"({texts[0]} {symbol} {texts[1]})", _kind(operation, values))

    def apply(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        inner = ", ".join([self.text, *map(str, args)])
        return self.owner.make(f"{name}({inner})", type(operation(self.stand_in, *args)))

    def compare(self, symbol: str, other: Any) -> Any:
        if type(other) is SymbolicNumber:
            return self.owner.branches.decide(_order(self, symbol, other))
        if isinstance(other, _KNOWN):
            return self.owner.branches.decide(Condition(self.text, self.number_type, symbol, other))
        return NotImplemented

    def plain(self, what: str, advice: str = "") -> NoReturn:
        self.owner.branches.refuse(
            f"{what} makes a plain Python number of one that is taken from a tensor.",
            f"{advice}{', or ' * bool(advice)}compute on the tensor before .item(), whose value "
            "is tracked through arithmetic, comparisons and branches.",
        )

    def __bool__(self) -> bool:
        return self.owner.branches.decide(Condition(self.text, self.number_type, "!=", 0))

    def __index__(self) -> int:
        """Refuses: a size, a position or a number of steps must not depend on data."""
        self.owner.branches.refuse(
            "a number that is taken from a tensor is used as a size, a position or a number of "
            "steps.",
            _KEEP,
        )

    def __str__(self) -> str:
        """Formats it as `<#1>`."""
        return f"<{self.text}>"


def _kind(operation: Callable[[Any, Any], Any], values: Sequence[Any]) -> type:
    try:
        return type(operation(*values))
    except (ZeroDivisionError, OverflowError):
        return float
