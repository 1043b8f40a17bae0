"""Refuses questions about where a tensor lies in memory.

A check runs on tensors without data, and each rank's tensor lies elsewhere, a shard for instance
behind other shards: the answer would count as equal on all ranks.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from torch import Tensor

from shardmap_torch.checker.ir.generator_state import is_user
from shardmap_torch.core.source_location import call_site
from shardmap_torch.errors import ShardTypeError


class _Named(Protocol):
    name: str


def reject_address(
    interpreter: _Named, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Answers torch's own code only.

    Raises:
        ShardTypeError: the user's code asks.
    """
    # The frames here: this function, and two of the mode that calls it.
    if is_user(sys._getframe(3)):
        raise ShardTypeError(
            f"{interpreter.name}: {func.__name__}() at {call_site()} tells where a tensor lies in "
            "memory, which differs between ranks, and it would count as equal on all ranks.\n"
            "Fix: leave it out of the body; to compare tensors, use `is`."
        )
    return func(*args, **kwargs)


ADDRESSES: Final = {Tensor.data_ptr: reject_address, Tensor.storage_offset: reject_address}
"""Functions of torch that ask, with what handles them."""
