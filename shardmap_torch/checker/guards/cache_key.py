"""Cache keys of verdicts: equal signatures have equal programs."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.guards.captured_state import Surroundings
from shardmap_torch.checker.rules.registry import table_version

_DEVICES: Final = ("cpu", "cuda")


Signature: TypeAlias = tuple[Any, ...]


def signature(call: Call, surroundings: Surroundings) -> Signature:
    """All that a verdict on `call` depends on and that can be seen from outside the body.

    What the leaves are, the specs and the mesh are in the fit, of which there is one object for all
    that is alike; only the values of leaves that are no tensors are not.
    """
    leaves = call.leaves
    return (
        call.match,
        tuple([leaves[position] for position in call.match.static]),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        table_version(),
        tuple([(d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)]),
        surroundings.key(),
    )


@dataclass(frozen=True)
class Parts:
    """A signature taken apart.

    Attributes:
        rest: all but values and surroundings.
        values: what is no tensor, in the arguments and in what the code refers to: what it is
            called, and its value, by something that stays the same from call to call.
    """

    rest: Signature
    values: Mapping[Hashable, tuple[str, Any]]


def parts(key: Signature, call: Call, surroundings: Surroundings) -> Parts:
    """Takes the latest signature apart."""
    match, values, *rest, _ = key
    named = zip((match.paths[position] for position in match.static), values, strict=True)
    found = {path: (path, value) for path, value in named}
    return Parts((match, *rest), {**found, **surroundings.values()})
