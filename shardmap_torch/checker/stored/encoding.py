"""Values as rows of JSON, and back; a value of another type is an error, in both directions.

A row has the tag of a kind and the parts of a value: plain values, words as `{tag: text}`, and the
numbers of earlier rows in brackets. So equal values are written once, and nothing is nested.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Final, TypeAlias

Json: TypeAlias = Any


class EncodingError(Exception):
    """A value has no place in a file, or a file has no such value."""


@dataclass(frozen=True)
class Kind:
    """The form of values of one type.

    Attributes:
        tag: its name in files.
        parts: takes a value apart; of a word, into its text.
        make: makes a value of its parts.
        is_word: whether a value is written as `{tag: text}` wherever it is a part.
        is_shared: whether equal values may become one.
    """

    tag: str
    parts: Callable[[Any], Any]
    make: Callable[..., Any]
    is_word: bool = False
    is_shared: bool = True


def of_fields(cls: type, *names: str, is_shared: bool = True) -> tuple[type, Kind]:
    """Returns a dataclass, and the kind whose parts are these fields, or all."""
    get = attrgetter(*(names or [each.name for each in fields(cls)]))
    return cls, Kind(cls.__name__, get, cls, is_shared=is_shared)


_PLAIN: Final = frozenset({type(None), bool, int, str})


class Encoding:
    """The kinds of the values of a file."""

    def __init__(self, kinds: Mapping[type, Kind]) -> None:
        """Keeps the kind of each type that is not plain."""
        self.kinds = kinds
        self._by_tag = {kind.tag: kind for kind in kinds.values()}

    def write(self, value: object) -> list[Json]:
        """Returns the rows of a value.

        Raises:
            EncodingError: it, or a part of it, is of a type that has no kind.
        """
        return _Writer(self.kinds).write((value,))

    def read(self, rows: Json) -> Any:
        """Returns the value of rows.

        Raises:
            Exception: they are none that `write` writes; of many types, since all may be wrong.
        """
        values: list[Any] = []

        def part(content: Json) -> Any:
            if type(content) in _PLAIN:
                return content
            if type(content) is list:
                return values[content[0]]
            [(tag, text)] = content.items()
            return self._kind(tag, True).make(text)

        for row in rows:
            tag, *parts = map(part, row)
            values.append(self._kind(tag, False).make(*parts))
        [value] = values[-1]
        return value

    def _kind(self, tag: Json, is_word: bool) -> Kind:
        kind = self._by_tag.get(tag)
        if kind is None or kind.is_word != is_word:
            raise EncodingError(f"{tag!r:.40}")
        return kind


class _Writer:
    """The rows of one value, without recursion."""

    def __init__(self, kinds: Mapping[type, Kind]) -> None:
        self._kinds = kinds
        self._rows: list[Json] = []
        self._same: dict[str, Json] = {}
        self._done: dict[int, Json] = {}
        self._open: dict[int, tuple[Kind, Any]] = {}  # keeps parts, or others would get their ids

    def write(self, root: object) -> list[Json]:
        done, pending = self._done, [root]
        while pending:
            value = pending[-1]
            place = id(value)
            if place in done:
                pending.pop()
            elif place in self._open:
                done[place] = self._close(*self._open[place])
            else:
                kind, parts = self._opened(value)
                if kind.is_word:
                    done[place] = {kind.tag: parts}
                else:
                    pending += [x for x in parts if type(x) not in _PLAIN and id(x) not in done]
        return self._rows

    def _opened(self, value: object) -> tuple[Kind, Any]:
        kind = self._kinds.get(type(value))
        if kind is None:
            raise EncodingError(f"a {type(value).__name__}")
        parts = kind.parts(value)
        found = self._open[id(value)] = kind, parts if kind.is_word else [*parts]
        return found

    def _close(self, kind: Kind, parts: list[object]) -> Json:
        """Returns the number of a row, which is added unless an equal one is there."""
        row = [kind.tag, *[x if type(x) in _PLAIN else self._done[id(x)] for x in parts]]
        number = [len(self._rows)]
        if kind.is_shared:  # told apart by its text, since True is 1
            number = self._same.setdefault(repr(row), number)
        if number == [len(self._rows)]:
            self._rows.append(row)
        return number
