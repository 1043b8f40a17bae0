"""Warns of a value or size that changes in each call, so that each call is checked again."""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from types import CodeType
from typing import Any, Final

from shardmap_torch.checker.guards.state import Signature
from shardmap_torch.checker.sizes import Slot
from shardmap_torch.core.source_location import Site, call_site, warn_at

LIMIT: Final = 32
"""Number of calls in a row before the warning: more than most models have numbered layers."""

NUMBERS: Final = 4
"""The same for sizes, and for numbers that do not decide what the program does."""

_SHOWN: Final = 3

_PART: Final = " What is no tensor is a part of the program. "
_NUMBER: Final = "Pass it as a tensor, such as torch.tensor({}), with P() as its spec."
_OTHER: Final = "Pass what is equal from call to call."
_SIZE: Final = (
    " Pad it to one of a few sizes; of a cache that grows, pass all of its length, and the "
    "position as a tensor."
)


Values = Mapping[Hashable, tuple[str, Any]]
"""Names and values, by keys that stay the same from call to call; see `sizes.values_of`."""


@dataclass(frozen=True)
class _Series:
    """The values of a size, an argument or a captured variable in successive calls."""

    label: str
    is_size: bool
    values: Sequence[Any]


class Changing:
    """Records every check of one function, and warns once if each call is checked again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False
        self._number = 0
        self._last: tuple[Signature, Values] | None = None
        self._series: Mapping[Hashable, _Series] = {}

    def checked(self, number: int, key: Signature, values: Values, why: str) -> None:
        """Records that the call of that number, counting all calls, had to be checked.

        Args:
            number: of the call.
            key: its signature.
            values: on which its verdict depends.
            why: why no verdict holds for all sizes and integers; empty if one may.
        """
        match, _, *others, _ = key
        rest = (match.resized_from or match, *others)
        last, is_next = self._last, number == self._number + 1
        self._number, self._last = number, (rest, values)
        if self._warned or last is None or not is_next or last[0] != rest:
            self._series = {}
            return
        before = {at: value for at, (_, value) in last[1].items()}
        changed = {
            at: _Series(label, isinstance(at, Slot), [before[at], value])
            for at, (label, value) in values.items()
            if at in before and not _same(before[at], value)
        }
        if self._series:
            # A value that changes only now and then is not the reason.
            changed = {
                at: replace(series, values=[*series.values, changed[at].values[-1]])
                for at, series in self._series.items()
                if at in changed
            }
        self._series = changed
        lengths = {at: _least(series, [*changed.values()], why) for at, series in changed.items()}
        long = [each for at, each in changed.items() if len(each.values) >= lengths[at]]
        if long:
            self._warned = True
            _warn(self._name, long[0], why)


def _least(series: _Series, changed: Sequence[_Series], why: str) -> int:
    """Returns the number of values of which a series is told.

    Integers may decide what the program does, and several sizes be those of layers.
    """
    value = series.values[-1]
    is_number = isinstance(value, Number) and not (why and isinstance(value, int))
    is_size = series.is_size and all(each.values == series.values for each in changed)
    return min(NUMBERS, LIMIT) if is_size or (is_number and not series.is_size) else LIMIT


_ENDED: Final[dict[CodeType, int]] = {}
"""Number of shard_mapped functions made from a body's code object and dropped."""


def watch_remaking(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Warns once of a function that is shard_mapped again for each call, and so checked again.

    Args:
        owner: an object with the lifetime of the shard_mapped function.
        name: name of the function in warnings.
        function: the body. A model may have one for each of many layers; these are not dropped.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return
    if _ENDED.get(code, 0) == LIMIT:
        _ENDED[code] += 1
        warn_at(
            Site(code.co_filename, code.co_firstlineno),
            f"{name}: shard_map has been applied to this function {LIMIT} times, and each result "
            "was dropped, so that each was checked again. Apply shard_map once, outside of the "
            "loop.",
        )
    weakref.finalize(owner, _count_end, code).atexit = False


def _count_end(code: CodeType) -> None:
    if _ENDED.get(code, 0) < LIMIT:
        _ENDED[code] = _ENDED.get(code, 0) + 1


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:  # of the user's own kind, such as arrays of several truths
        return False


def _warn(function: str, series: _Series, why: str) -> None:
    latest, value = ", ".join(map(repr, series.values[-_SHOWN:])), series.values[-1]
    advice = _PART + (_NUMBER.format(value) if isinstance(value, Number) else _OTHER)
    if series.is_size:
        reason = f" The verdict holds for one size only: {why}." if why else ""
        advice = reason + _SIZE
    warn_at(
        call_site(),
        f"{function}: each of the last {len(series.values)} calls was checked again, since "
        f"{series.label} was another one each time: ..., {latest}.{advice}",
    )
