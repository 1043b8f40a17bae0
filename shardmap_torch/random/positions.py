"""Positions of entries in a global tensor: the counters of its random numbers."""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from shardmap_torch.checker.region import local_region
from shardmap_torch.errors import SpecError, listing
from shardmap_torch.ops import axis_index, axis_size
from shardmap_torch.spec import P, mismatches


def positions(
    shape: Sequence[int], spec: P | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """Returns the row-major indices, in a global tensor, of the entries of this rank's shard.

    Shape: int64 of the shape of a shard: `shape`, divided along each dim by the ranks of the axes
    that shard it. S(i) over the axes of `spec`, K over all others. Sends nothing.

    Args:
        shape: the global shape.
        spec: how it is sharded; None where each rank has the unsharded tensor.
        device: of the result.

    Raises:
        SpecError: `spec` does not divide `shape`, or names a partial axis.
        CollectiveError: `spec` names axes outside a body, or axes that are not bound in it.

    Source: `jax.lax.broadcasted_iota`, sharded.

    Example:
        >>> from shardmap_torch import P, make_mesh, random, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda: random.positions((2, 4), P(None, "tp"))
        >>> shard_map(f, mesh=mesh, in_specs=(), out_specs=P("tp"))()
        tensor([[0, 1],
                [4, 5],
                [2, 3],
                [6, 7]])
    """
    shape = tuple(shape)
    if spec is None or not spec.sharded_dims:
        return torch.arange(prod(shape), device=device).reshape(shape)
    _check(shape, spec)
    numbered = partial(_numbered, shape, spec, device)
    numbered.__name__ = "random.positions"  # type: ignore[attr-defined]  # what reports call it
    # Per-rank code whose result is S(i): check="global" replaces it by all positions on one device.
    return local_region(numbered, in_types=(), out_types=P(*spec.entries))()


def _check(shape: tuple[int, ...], spec: P) -> None:
    sizes = {axis: axis_size(axis) for axis in spec.mentioned}
    problems = mismatches(spec, shape, sizes)
    if spec.partial:
        problems.append(f"{spec!r} names partial axes, and numbers drawn are no sums")
    if problems:
        raise SpecError(listing(f"random: {spec!r} does not match shape {list(shape)}:", problems))


def _numbered(shape: tuple[int, ...], spec: P, device: torch.device | str | None) -> Tensor:
    axes_of = dict(spec.sharded_dims)
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        along = torch.arange(size, device=device)
        if axes := axes_of.get(dim):
            length = size // axis_size(axes)
            along = along[:length] + axis_index(axes).to(along.device) * length
        numbers = numbers.unsqueeze(-1) * size + along
    return numbers
