"""Warns of a Python value that changes in each call, so that each call is checked anew."""

import warnings
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from types import CodeType
from typing import Any, Final

from shardmap_torch.checker.guards.cache_key import Parts
from shardmap_torch.core.source_location import call_site

LIMIT: Final = 32
"""Number of calls in a row before the warning: more than most models have numbered layers."""

_SHOWN: Final = 3

_NUMBER: Final = "Pass it as a tensor, such as torch.tensor({}), with P() as its spec."
_OTHER: Final = "Pass what is equal from call to call."


@dataclass(frozen=True)
class _Series:
    """The values of one argument or captured variable in successive calls."""

    label: str
    values: Sequence[Any]


class Changing:
    """Records every check of one function, and warns once if each call is checked anew."""

    def __init__(self, name: str) -> None:
        """Keeps the function's name for the warning."""
        self._name = name
        self._warned = False
        self._number = 0
        self._last: Parts | None = None
        self._series: Mapping[Hashable, _Series] = {}

    def checked(self, number: int, parts: Parts) -> None:
        """Records that the call of that number, counting all calls, had to be checked."""
        last, is_next = self._last, number == self._number + 1
        self._number, self._last = number, parts
        if self._warned or last is None or not is_next or last.rest != parts.rest:
            self._series = {}
            return
        changed = {
            key: _Series(label, [last.values[key][1], value])
            for key, (label, value) in parts.values.items()
            if key in last.values and not _same(last.values[key][1], value)
        }
        if self._series:
            # A value that changes only now and then is not the reason.
            changed = {
                key: _Series(series.label, [*series.values, changed[key].values[-1]])
                for key, series in self._series.items()
                if key in changed
            }
        self._series = changed
        series_to_report = next((s for s in changed.values() if len(s.values) >= LIMIT), None)
        if series_to_report is not None:
            self._warned = True
            _warn(self._name, series_to_report)


_ENDED: Final[dict[CodeType, int]] = {}
"""Number of shard_mapped functions made from a body's code object and dropped."""


def watch_remaking(owner: object, name: str, function: Callable[..., Any]) -> None:
    """Warns once of a function that is shard_mapped anew for each call, and so checked anew.

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
        file, line = code.co_filename, code.co_firstlineno
        warnings.warn_explicit(
            f"{name}: shard_map has been applied to this function {LIMIT} times, and each result "
            "was dropped, so that each was checked anew. Apply shard_map once, outside of the "
            "loop.",
            UserWarning,
            file,
            line,
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


def _warn(function: str, series: _Series) -> None:
    latest = ", ".join(map(repr, series.values[-_SHOWN:]))
    value = series.values[-1]
    site = call_site()
    warnings.warn_explicit(
        f"{function}: each of the last {len(series.values)} calls was checked anew, since "
        f"{series.label} was another one each time: ..., {latest}. What is no tensor is a part of "
        f"the program. {_NUMBER.format(value) if isinstance(value, Number) else _OTHER}",
        UserWarning,
        *(("shardmap_torch", 0) if site is None else (site.file, site.line)),
    )
