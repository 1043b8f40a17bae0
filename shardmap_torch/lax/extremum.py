"""Extrema of `jax.lax`: pmax and pmin over the ranks of an axis."""

from typing import Literal, TypeVar

from torch import Tensor

from shardmap_torch.lax.arguments import (
    EQUAL_OR_VARYING,
    Groups,
    combined,
    each_leaf_or_number,
    read,
)
from shardmap_torch.lax.groups import gather_groups
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.types import TypeLike

X = TypeVar("X")


def pmax(
    x: X, axis_name: Axis, *, axis_index_groups: Groups | None = None, src: TypeLike | None = None
) -> X:
    """Takes the largest value over the ranks of `axis_name`; every rank gets it, of type I.

    Unlike JAX's, it has a derivative: the ranks that hold the extremum share it evenly.

    Shape: unchanged. Types: V becomes I, with groups V. Backward: the cotangent where the extremum
    was. Sends 2(n-1)/n * x.nbytes per rank; with groups of g ranks (g-1) * x.nbytes; nothing where
    `src` is I or R.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or several that act as one.
        axis_index_groups: positions along the axis, in groups of equal size.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: outside a body, unknown axis, bad groups, or `src` Partial, whose ranks
            hold addends.

    Source: `jax.lax.pmax`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pmax(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> f(torch.arange(4.0))
        tensor([3.])
    """
    return _extremum("max", x, axis_name, axis_index_groups, src)


def pmin(
    x: X, axis_name: Axis, *, axis_index_groups: Groups | None = None, src: TypeLike | None = None
) -> X:
    """Takes the smallest value over the ranks of `axis_name`; see `pmax`.

    Shape, types, backward, bytes and errors: as `pmax`.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or several that act as one.
        axis_index_groups: positions along the axis, in groups of equal size.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: as `pmax`.

    Source: `jax.lax.pmin`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pmin(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> f(torch.arange(4.0))
        tensor([0.])
    """
    return _extremum("min", x, axis_name, axis_index_groups, src)


def _extremum(
    op: Literal["max", "min"],
    x: X,
    axis_name: Axis,
    axis_index_groups: Groups | None,
    src: TypeLike | None,
) -> X:
    arguments = read(f"p{op}", axis_name, src, EQUAL_OR_VARYING, axis_index_groups)

    def one(leaf: Tensor) -> Tensor:
        if arguments.groups:
            every = gather_groups(arguments.varying(leaf), arguments.axes, arguments.groups)
            return every.amax(0) if op == "max" else every.amin(0)
        return combined(leaf, arguments.source(leaf), arguments.scope, op)

    return each_leaf_or_number(f"p{op}", x, one, lambda number: number)
