"""Warns of a Python value that changes in each call, so that each call is checked again."""

import warnings
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from types import CodeType
from typing import Any, Final

from shardmap_torch.checker.guards.state import SplitSignature
from shardmap_torch.checker.sizes import Recheck, Slot
from shardmap_torch.core.source_location import call_site

LIMIT: Final = 32
"""Number of calls in a row before the warning: more than most models have numbered layers."""

NUMBERS: Final = 4
"""The same for sizes, and for numbers that do not decide what the program does."""

_SHOWN: Final = 3

_NUMBER: Final = "Pass it as a tensor, such as torch.tensor({}), with P() as its spec."
_OTHER: Final = "Pass what is equal from call to call."


@dataclass(frozen=True)
class _Series:
    """The values of one argument or captured variable in successive calls."""

    label: str
    values: Sequence[Any]


class Changing:
    """Records every check of one function, and warns once if each call is checked again."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False
        self._number = 0
        self._last: SplitSignature | None = None
        self._series: Mapping[Hashable, _Series] = {}
        self._resized = False
        self._slots: Sequence[Slot] = ()
        self._sizes: tuple[int, ...] = ()

    def checked(
        self, number: int, parts: SplitSignature, structural: Collection[str] = frozenset()
    ) -> None:
        """Records that the call of that number, counting all calls, had to be checked.

        `structural` names numbers that decide what the program does.
        """
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
        series_to_report = next((s for s in changed.values() if _is_long(s, structural)), None)
        if series_to_report is not None:
            self._warned = True
            _warn(self._name, series_to_report)

    def resized(self, recheck: Recheck | None) -> None:
        """A call has been checked that differs from the one before in one size, or in more."""
        if recheck is None or any(slot.dim is None for slot in recheck.slots):
            self._sizes = ()
            return
        same = bool(self._sizes) and self._slots == recheck.slots
        self._slots = recheck.slots
        self._sizes = (*(self._sizes if same else (recheck.before,)), recheck.number)
        if len(self._sizes) >= NUMBERS and not self._resized:
            self._resized = True
            _warn_of_size(self._name, recheck, self._sizes)


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
        file, line = code.co_filename, code.co_firstlineno
        warnings.warn_explicit(
            f"{name}: shard_map has been applied to this function {LIMIT} times, and each result "
            "was dropped, so that each was checked again. Apply shard_map once, outside of the "
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


def _is_long(series: _Series, structural: Collection[str]) -> bool:
    is_number = isinstance(series.values[-1], Number) and series.label not in structural
    return len(series.values) >= (min(NUMBERS, LIMIT) if is_number else LIMIT)


def _warn_of_size(function: str, recheck: Recheck, sizes: Sequence[int]) -> None:
    latest = ", ".join(map(repr, sizes[-_SHOWN:]))
    names = recheck.slots[0].name
    if len(recheck.slots) > 1:
        names += f" (and {len(recheck.slots) - 1} like it)"
    why = f" The verdict holds for one size only: {recheck.why}." if recheck.why else ""
    _warn_here(
        f"{function}: checked again {len(sizes) - 1} times, since {names} had another size each "
        f"time: ..., {latest}.{why} Pad it to one of a few sizes; of a cache that grows, pass all "
        "of its length, and the position as a tensor."
    )


def _warn(function: str, series: _Series) -> None:
    latest = ", ".join(map(repr, series.values[-_SHOWN:]))
    value = series.values[-1]
    _warn_here(
        f"{function}: each of the last {len(series.values)} calls was checked again, since "
        f"{series.label} was another one each time: ..., {latest}. What is no tensor is a part of "
        f"the program. {_NUMBER.format(value) if isinstance(value, Number) else _OTHER}"
    )


def _warn_here(message: str) -> None:
    """Warns at the user's line."""
    site = call_site()
    place = ("shardmap_torch", 0) if site is None else (site.file, site.line)
    warnings.warn_explicit(message, UserWarning, *place)
