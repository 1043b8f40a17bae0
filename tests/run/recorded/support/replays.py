"""Compares replayed calls with plain ones, bit for bit, on inputs that are new in each call."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardmap_torch import Mesh, shard_map
from shardmap_torch.run.recorded import recordings, source

_CALLS = 3


@contextmanager
def counting_replays() -> Iterator[list[int]]:
    """Yields a list to which each run of recorded operators appends."""
    runs: list[int] = []
    make = source.runnable

    def counted(*args: Any) -> Any:
        run = make(*args)

        def noted(inputs: Sequence[Tensor]) -> list[Tensor]:
            runs.append(len(inputs))
            return run(inputs)

        return noted

    with mock.patch.object(recordings, "runnable", counted):
        yield runs


def compare(
    body: Callable[..., Any],
    mesh: Mesh,
    args: Any,
    replays: Collection[int] = (_CALLS - 1,),
    **options: Any,
) -> None:
    """Requires that so many of three replayed calls are replays, and that all equal plain calls.

    Raises:
        TransformError: the body cannot be recorded.
    """
    with counting_replays() as runs:
        replayed = shard_map(body, mesh=mesh, replay=True, **options)
        plain = shard_map(body, mesh=mesh, **options)
        for call in range(_CALLS):
            given = [detached(args) if call == 0 else shuffled(args, call) for _ in range(2)]
            found, expected = replayed(*given[0]), plain(*given[1])
            assert_equal(found, expected)
            for x in tree_leaves((found, expected)):  # later calls must not see it
                if isinstance(x, Tensor) and x.is_floating_point() and 0 not in x.stride():
                    local(x).add_(1)
        assert len(runs) in replays


def detached(tree: Any) -> Any:
    """Returns a copy of the tensors."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


def shuffled(tree: Any, seed: int) -> Any:
    """Returns the tensors with their entries in another order: ids stay valid, masks masks."""

    def mixed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        order = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(seed))
        return x.detach().flatten()[order].reshape(x.shape)

    return tree_map(mixed, tree)


def local(x: Any) -> Tensor:
    """Returns a tensor, or this process' part of a DTensor."""
    found: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return found


def assert_equal(found: Any, expected: Any) -> None:
    """Compares two trees, their tensors bit for bit."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    for one, other in pairs:
        if isinstance(other, Tensor):
            torch.testing.assert_close(local(one), local(other), rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other
