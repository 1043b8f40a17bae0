"""Values of verdicts as JSON, and back; a value of another type is an error, in both directions."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

from shardmap_torch.collectives.operations import Collective, Extremum, collective_of
from shardmap_torch.core.source_location import Site
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, S, V, Z

Json: TypeAlias = Any


class EncodingError(Exception):
    """A value has no place in a file, or a file has no such value."""


def encode(value: object) -> Json:
    """Writes a value.

    Raises:
        EncodingError: it is of another type than verdicts have.
    """
    own = type(value)
    if own in _PLAIN:
        return value
    tag = _TAGS.get(own)
    if tag is None:
        raise EncodingError(f"a {own.__name__}")
    return {tag: _WRITERS[tag](value)}


def decode(value: Json) -> Any:
    """Reads a value.

    Raises:
        EncodingError: it is none that `encode` writes.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) is not dict or len(value) != 1:
        raise EncodingError(f"{value!r:.40}")
    [(tag, content)] = value.items()
    if tag not in _READERS:
        raise EncodingError(f"{tag!r:.40}")
    return _READERS[tag](content)


_PLAIN: Final = frozenset({type(None), bool, int, str})


def _write_collective(c: Collective) -> Json:
    options = {name: encode(value) for name, value in c.options.items()}
    return [c.name, encode(c.src), encode(c.dst), encode(c.axes), options]


def _read_collective(content: Json) -> Collective:
    *given, options = content
    return collective_of(*map(decode, given), **{n: decode(x) for n, x in options.items()})


def _write_spec(spec: P) -> Json:
    typed = (sorted(axes) for axes in (spec.replicate, spec.invariant, spec.partial))
    return [encode(spec.entries), *typed]


def _read_spec(content: Json) -> P:
    entries, replicate, invariant, partial = content
    return P(*decode(entries), replicate=replicate, invariant=invariant, partial=partial)


_TYPES: Final = {repr(each): each for each in (I, R, V, Partial, K, Z)}


def _read_type(content: Json) -> AxisType:
    return S(content) if type(content) is int else _TYPES[content]


def _write_type(axis_type: AxisType) -> Json:
    return f"{axis_type!r}" if axis_type.dim is None else axis_type.dim


def _read_dtype(content: Json) -> torch.dtype:
    found = getattr(torch, content)
    if not isinstance(found, torch.dtype):
        raise EncodingError("a dtype")
    return found


def _read_site(content: Json) -> Site:
    file, line = content
    return Site(str(file), int(line))


def _read_extremum(content: Json) -> Extremum:
    move, total = content
    return Extremum(str(move), _read_collective(total))


_KINDS: Final[tuple[tuple[type, str, Callable[[Any], Json], Callable[[Json], Any]], ...]] = (
    (float, "float", float.hex, float.fromhex),
    (tuple, "tuple", lambda x: [encode(y) for y in x], lambda x: tuple([decode(y) for y in x])),
    (torch.Size, "size", lambda x: [encode(y) for y in x], lambda x: torch.Size(map(decode, x))),
    (
        frozenset,
        "set",
        lambda x: [encode(y) for y in sorted(x)],
        lambda x: frozenset(map(decode, x)),
    ),
    (AxisType, "type", _write_type, _read_type),
    (P, "spec", _write_spec, _read_spec),
    (torch.dtype, "dtype", lambda x: str(x).removeprefix("torch."), _read_dtype),
    (Collective, "collective", _write_collective, _read_collective),
    (Extremum, "extremum", lambda x: [x.move, _write_collective(x.total)], _read_extremum),
    (Site, "site", lambda x: [x.file, x.line], _read_site),
)
_TAGS: Final = {kind: tag for kind, tag, _, _ in _KINDS}
_WRITERS: Final = {tag: write for _, tag, write, _ in _KINDS}
_READERS: Final = {tag: read for _, tag, _, read in _KINDS}
