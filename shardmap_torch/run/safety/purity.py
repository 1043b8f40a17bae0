"""Purity: rejects bodies that change what they depend on, so that each run is another program.

The checker runs a body, and then every rank does; on a simulated mesh they share the objects that
the body refers to. A list that it appends to, and does not read, is harmless. But a counter that it
multiplies by would differ between ranks, though its type says that it is equal on all. So if a
check leaves something changed, the body is checked again, and must be the same program.
"""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from shardmap_torch.checker.api import program_of
from shardmap_torch.checker.guards.captured_state import Surroundings
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.errors import ShardTypeError

_REPAIR: Final = (
    "Each rank runs the body, and so does the checker: they would not compute the same.\n"
    "Fix: pass what it depends on as an argument, and return what is new; draw random numbers from "
    "a key of shardmap_torch.random."
)


def verify_purely(name: str, surroundings: Surroundings, verify: Callable[[], Verdict]) -> Verdict:
    """Returns the verdict on a body, after requiring that repeated checks find the same program.

    Raises:
        ShardTypeError: the body changes what it refers to, and so its program.
    """
    verdict, changed = verified(surroundings, verify)
    for _ in range(_AGAIN if changed else 0):
        another, still_changed = verified(surroundings, verify)
        _require_same(name, verdict, another, changed)
        verdict = another
        if not still_changed:
            break
    return verdict


_AGAIN: Final = 2
"""Number of repeated checks of a body that leaves changes: a difference may appear late."""


def verified(
    surroundings: Surroundings, verify: Callable[[], Verdict]
) -> tuple[Verdict, Sequence[str]]:
    """Runs a check; returns the verdict, and what the check has changed."""
    surroundings.key()
    before, states = surroundings.snapshot(), _states()
    verdict = verify()
    return verdict, [*surroundings.changes(before), *_changed(states)]


def _require_same(name: str, first: Verdict, second: Verdict, changed: Sequence[str]) -> None:
    one, two = (str(program_of(verdict)).splitlines()[1:] for verdict in (first, second))
    if one == two:
        return
    differing = next(((a, b) for a, b in zip(one, two, strict=False) if a != b), None)
    a, b = differing or (f"{len(one)} lines of program", f"{len(two)} lines of program")
    raise ShardTypeError(
        f"{name}: the body changes {', '.join(sorted(set(changed)))}, and does something else when "
        f"it runs again:\n  first: {a.strip()}\n  then: {b.strip()}\n{_REPAIR}"
    )


def _states() -> Mapping[str, Any]:
    """Returns global state of the process that a body may change unnoticed.

    Not torch's generator: draws from it are interpreted, and seeded in each run.
    """
    states: dict[str, Any] = {"the state of Python's random module": random.getstate()}
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, keys, *rest = numpy.get_state()
        states["the state of numpy.random"] = (kind, keys.tobytes(), *rest)
    return states


def _changed(states: Mapping[str, Any]) -> list[str]:
    now = _states()
    return [label for label, state in states.items() if now[label] != state]
