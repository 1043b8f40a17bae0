"""The kinds of values that verdicts have."""

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import torch

from shardmap_torch.boundary.call import Result
from shardmap_torch.boundary.matching import Match
from shardmap_torch.checker.guards.replay import Step
from shardmap_torch.checker.ir.outcomes import Crossing, Traits
from shardmap_torch.checker.ir.paths import Branch
from shardmap_torch.checker.ir.program import (
    Equation,
    KernelCollective,
    ProgramPath,
    StorageType,
    Use,
)
from shardmap_torch.checker.stored.encoding import Encoding, EncodingError, Kind, of_fields
from shardmap_torch.collectives.operations import Collective, Extremum, collective_of
from shardmap_torch.collectives.protocol import Note
from shardmap_torch.core.source_location import Site
from shardmap_torch.core.tree import Structure, Tree, flatten, unflatten
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, S, V, Z

_TYPES: Final = {repr(each): each for each in (I, R, V, Partial, K, Z)}


def _type_word(axis_type: AxisType) -> str | int:
    return f"{axis_type!r}" if axis_type.dim is None else axis_type.dim


def _type(word: str | int) -> AxisType:
    return S(word) if type(word) is int else _TYPES[str(word)]


def _dtype(word: str) -> torch.dtype:
    found = getattr(torch, word)
    if not isinstance(found, torch.dtype):
        raise EncodingError("a dtype")
    return found


def _dict(*parts: Any) -> dict[Any, Any]:
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _collective_parts(c: Collective) -> Iterable[object]:
    return c.name, c.src, c.dst, c.axes, c.options


def _collective(*parts: Any) -> Collective:
    *given, options = parts
    return collective_of(*given, **options)


def _spec(entries: tuple[Any, ...], *names: Iterable[str]) -> P:
    replicate, invariant, partial = names
    return P(*entries, replicate=replicate, invariant=invariant, partial=partial)


def _error_parts(error: ShardTypeError) -> Iterable[object]:
    return str(error), error.findings


def _error(message: str, findings: tuple[str, ...]) -> ShardTypeError:
    error = ShardTypeError(message)
    error.findings = findings
    return error


_NODES: Final = frozenset({None, tuple, list, dict, type(None)})


def _require_known(structure: Structure) -> None:
    nodes: list[Any] = [structure]
    for node in nodes:  # which grows
        if node.type not in _NODES:
            raise EncodingError(f"a result of type {node.type.__name__}")
        nodes += node.children()


def _result_parts(result: Result) -> Iterable[object]:
    """Takes it apart into leaves, their match, and a tree with a number for each leaf."""
    _require_known(result.structure)
    tree = unflatten(result.structure, range(len(result.leaves)))
    return [*result.leaves], result.match, tree


def _result(leaves: list[Any], match: Match, tree: Tree) -> Result:
    return Result([*leaves], match, flatten(tree)[1])


def _step_parts(step: Step) -> Iterable[object]:
    asked = step.what, step.shape, step.dtype, step.depth, step.types
    answers = step.note.value, step.note.types, step.site, step.last
    return *asked, *answers, step.next, step.later, step.crossing.casts


def _step(*parts: Any) -> Step:
    what, shape, dtype, depth, types, value, note_types, site, last, *rest = parts
    following, later, casts = rest
    note, crossing = Note(value, note_types), Crossing({**casts})
    return Step(
        what, shape, dtype, depth, types, note, site, [*following], last, {**later}, crossing
    )


def _use_parts(use: Use) -> Iterable[object]:
    outside = use.number is None
    origin = (use.storage_type.label, use.storage_type.numbers) if outside else ("", "")
    return use.name, use.types, use.dtype, tuple(use.shape), use.number, origin


def _use(*parts: Any) -> Use:
    name, types, dtype, shape, number, (label, numbers) = parts
    storage_type = StorageType(types, None, label, _no_storage(), numbers=numbers)
    return Use(name, storage_type, types, dtype, shape, number)


@lru_cache(maxsize=1)
def _no_storage() -> torch.UntypedStorage:
    return torch.UntypedStorage(0)


ENCODING: Final = Encoding(
    {
        float: Kind("float", lambda x: [x.hex()], float.fromhex),
        AxisType: Kind("type", _type_word, _type, is_word=True),
        torch.dtype: Kind("dtype", lambda x: [str(x).removeprefix("torch.")], _dtype),
        tuple: Kind("tuple", iter, lambda *parts: parts),
        list: Kind("list", iter, lambda *parts: [*parts]),
        dict: Kind("dict", lambda x: chain.from_iterable(x.items()), _dict),
        frozenset: Kind("set", sorted, lambda *parts: frozenset(parts)),
        torch.Size: Kind("size", iter, lambda *parts: torch.Size(parts)),
        P: Kind("spec", lambda p: (p.entries, p.replicate, p.invariant, p.partial), _spec),
        Collective: Kind("collective", _collective_parts, _collective),
        ShardTypeError: Kind("error", _error_parts, _error),
        Result: Kind("result", _result_parts, _result),
        Step: Kind("step", _step_parts, _step, is_shared=False),
        Use: Kind("use", _use_parts, _use),
        **dict(map(of_fields, (Extremum, Site, Traits, Branch, KernelCollective, ProgramPath))),
        **dict([of_fields(Equation, is_shared=False)]),
        **dict([of_fields(Match, "paths", "specs", "crossing", "static")]),
    }
)
