"""Searches repairs of a rejected program: each is tried by checking the program with it."""

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import count, zip_longest
from typing import Final

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.ir.repairs import LOCATING, Repair, both, proposed, reached
from shardmap_torch.checker.verify.merge import with_replicate
from shardmap_torch.checker.verify.path import Strictness
from shardmap_torch.errors import ShardTypeError

Attempt = Callable[[Call, Repair, Strictness], object]
"""Checks a call with a repair."""

_TRIES: Final = 8
"""Maximal number of proposed repairs that are tried: each costs as much as the check itself."""

_MORE: Final = 10
"""Maximal number of insertions that are tried where none of these helps."""

_PARTS: Final = 3
"""Maximal number of changes that one repair makes."""

_SECONDS: Final = 5.0
"""CPU time after which no further insertion is tried."""


def search(
    call: Call, error: ShardTypeError, strictness: Strictness, attempt: Attempt
) -> list[Repair]:
    """Returns the repairs that help: those proposed with the error, or else one that is inserted.

    They keep what the program computes on one device: global strictness accepts it with them.
    """
    tries = _Tries(call, strictness, attempt)
    return (_proposed(tries, error) or list(_inserted(tries))) if _TRIES else []


class _Tries:
    """Tries repairs of a call."""

    def __init__(self, call: Call, strictness: Strictness, attempt: Attempt) -> None:
        self._call, self._strictness, self._attempt = call, strictness, attempt

    def left(self, repair: Repair, strictness: Strictness | None = None) -> ShardTypeError | None:
        """Returns the error that remains with the repair; None if there is none."""
        call = self._call
        if not set(repair.replicate.values()) <= set(call.mapped):
            return ShardTypeError(f"{call.name}: specs cannot name axes that inner functions bind.")
        match = with_replicate(call, frozenset(repair.replicate.items()))
        try:
            self._attempt(replace(call, match=match), repair, strictness or self._strictness)
        except ShardTypeError as error:
            return error
        except Exception as problem:  # the body's own, on shapes that the repair has changed, say
            return ShardTypeError(f"{call.name}: {problem}")
        return None

    def keeps_meaning(self, repair: Repair) -> bool:
        """Returns whether global strictness accepts what this strictness does.

        Well-typed is not enough: a sum of updated weights is that, and another program.
        """
        return self._strictness == "global" or self.left(repair, "global") is None


def _proposed(tries: _Tries, error: ShardTypeError) -> list[Repair]:
    """Returns the repairs proposed with an error that help, or else the pairs of them that do."""
    right: list[Repair] = []
    pairs: list[list[Repair]] = []
    given = list({repair.text: repair for repair in proposed(error)}.values())[:_TRIES]
    for repair in given:
        left = tries.left(repair)
        if left is None:
            right += [repair] * tries.keeps_meaning(repair)
        else:
            pairs.append([both(repair, other) for other in proposed(left)])
    if right:
        return right
    # In turn those of each: what is missing may be its last.
    turns = [pair for turn in zip_longest(*pairs) for pair in turn if pair is not None]
    for pair in turns[: _TRIES - len(given)]:
        if tries.left(pair) is None and tries.keeps_meaning(pair):
            return [pair]
    return []


def _shortest(tries: _Tries, repair: Repair) -> Repair:
    """Drops what a repair does not need."""
    for part in repair.parts[:-1]:
        left = [each for each in repair.parts if each is not part]
        fewer = reduce(both, left)
        if tries.left(fewer, "global") is None:
            repair = fewer
    return repair


def _inserted(tries: _Tries) -> Iterator[Repair]:
    """Yields the first combination of insertions that helps.

    Those are continued that make the check come further than before.
    """
    left = tries.left(LOCATING, "global") if _MORE else None
    if left is None:
        return
    order, end = count(), time.process_time() + _SECONDS
    waiting: list[tuple[float, int, float, Repair]] = []
    known: set[str] = set()

    def extend(by: Repair | None, error: ShardTypeError) -> None:
        progress = reached(error)
        for each in proposed(error):
            repair = each if by is None else both(by, each)
            if repair.text not in known and not repair.values:
                heapq.heappush(waiting, (-progress, next(order), progress, repair))
            known.add(repair.text)

    extend(None, left)
    for _ in range(_MORE):
        if not waiting or time.process_time() > end:
            return
        _, _, progress, repair = heapq.heappop(waiting)
        remains = tries.left(repair, "global")
        if remains is None:
            repair = _shortest(tries, repair)
            if tries.left(repair) is None:
                yield repair
                return
        elif reached(remains) > progress and len(repair.parts) < _PARTS:
            extend(repair, remains)
