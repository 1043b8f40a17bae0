"""Tries the repairs that were proposed with an error: the program is checked with each of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.ir.rejections import rejection_of
from shardmap_torch.checker.ir.repairs import NONE, Repair
from shardmap_torch.checker.verify.merge import with_replicate
from shardmap_torch.checker.verify.request import Strictness
from shardmap_torch.errors import ShardTypeError

Attempt = Callable[[Call, Repair, Strictness], object]
"""Checks a call with a repair."""

_TRIES: Final = 8
"""Maximal number of repairs that are tried: each costs as much as the check itself."""


def find_repair(
    call: Call, error: ShardTypeError, strictness: Strictness, attempt: Attempt
) -> Repair | None:
    """Returns the first proposed repair with which a call is accepted, under global strictness too.

    Well-typed is not enough: a sum of updated weights is that, and another program on one device.
    """
    stricter = {strictness: None, "global": None}
    known: set[str] = set()
    for repair in _proposals(call, error, strictness, attempt) if _TRIES else ():
        if repair.text in known:
            continue
        known.add(repair.text)
        if all(_remaining(call, repair, each, attempt) is None for each in stricter):
            return repair
        if len(known) >= _TRIES:
            return None
    return None


def _proposals(
    call: Call, error: ShardTypeError, strictness: Strictness, attempt: Attempt
) -> Iterator[Repair]:
    """Yields what was proposed with an error, and then with that of global strictness.

    Only the latter knows how values are sharded, as whoever gathers them has to.
    """
    yield from rejection_of(error).proposals
    stricter = None if strictness == "global" else _remaining(call, NONE, "global", attempt)
    if stricter is not None:
        yield from rejection_of(stricter).proposals


def _remaining(
    call: Call, repair: Repair, strictness: Strictness, attempt: Attempt
) -> ShardTypeError | None:
    """Returns the error that remains with a repair; None if there is none."""
    if not set(repair.replicate.values()) <= set(call.mapped):
        return ShardTypeError(f"{call.name}: specs cannot name axes that inner functions bind.")
    match = with_replicate(call, frozenset(repair.replicate.items()))
    try:
        attempt(replace(call, match=match), repair, strictness)
    except ShardTypeError as error:
        return error
    except Exception as problem:  # the body's own, on shapes that the repair has changed, say
        return ShardTypeError(f"{call.name}: {problem}")
    return None
