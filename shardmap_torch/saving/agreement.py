"""What ranks that save or load a checkpoint compare before they begin, and their errors."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from shardmap_torch.core.hashing import sampled_hash
from shardmap_torch.errors import CheckpointError, CommunicationError, listing, show_shape

T = TypeVar("T")


def is_alone() -> bool:
    """Returns whether there are no other processes."""
    return not (dist.is_available() and dist.is_initialized())


def described(
    what: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any], *, by_value: bool
) -> list[str]:
    """Describes a tree and other arguments by lines, equal on ranks where these are equal."""
    known = {path: repr(x) if by_value else type(x).__name__ for path, x in values.items()}
    known |= {path: _shown(x, by_value) for path, x in tensors.items()}
    return [what, *(f"{path}: {text}" for path, text in known.items())]


def _shown(x: Tensor, by_value: bool) -> str:
    kind = show_shape(x.dtype, x.shape)
    if isinstance(x, DTensor):
        return f"{kind}, placed {x.placements}"
    return f"{kind}, hash {sampled_hash(x)}" if by_value else kind


def on_first_rank(compute: Callable[[], T]) -> T:
    """Computes on rank 0 and returns, or raises, the same on all ranks.

    Raises:
        CheckpointError: rank 0 has raised it, or an OSError.
    """
    outcome: list[Any] = [None]
    cause: Exception | None = None
    if is_alone() or dist.get_rank() == 0:
        try:
            outcome[0] = compute()
        except (CheckpointError, OSError) as error:
            where = "" if is_alone() else "On rank 0, for all: "
            outcome[0], cause = CheckpointError(f"{where}{error}"), error
    if not is_alone():
        with naming_ranks("A checkpoint failed"):
            dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], CheckpointError):
        raise outcome[0] from cause
    result: T = outcome[0]
    return result


@contextmanager
def naming_ranks(head: str) -> Iterator[None]:
    """Turns torch's errors, one of which is a BaseException, into errors that name the ranks."""
    try:
        with warnings.catch_warnings():
            # A run without processes is supported.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        problems = [f"rank {rank}: {_text(why)}" for rank, (why, _) in error.failures.items()]
        raise CheckpointError(listing(f"{head}:", problems)) from error
    except RuntimeError as error:
        raise CommunicationError(f"{head} on rank {dist.get_rank()}: {error}") from error


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
