"""What a verdict depends on: equal signatures have equal programs."""

from collections.abc import Hashable
from typing import Final

import torch

from shardmap_torch.boundary import Call
from shardmap_torch.checker.surroundings import Surroundings
from shardmap_torch.checker.table import table_version

_DEVICES: Final = ("cpu", "cuda")


def signature(call: Call, surroundings: Surroundings) -> Hashable:
    """All that a verdict on `call` depends on and that can be seen from outside the body.

    What the leaves are, the specs and the mesh are in the fit, of which there is one object for all
    that is alike; only the values of leaves that are no tensors are not.
    """
    leaves = call.leaves
    return (
        call.fit,
        tuple([leaves[position] for position in call.fit.static]),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        table_version(),
        tuple([(d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)]),
        surroundings.key(),
    )
