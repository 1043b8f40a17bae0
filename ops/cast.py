"""Collectives that change a value's type along an axis: convert, reinterpret, redistribute."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from shardmap_torch.collectives.bundle import issue_all
from shardmap_torch.collectives.moves import MOVEMENTS
from shardmap_torch.collectives.operations import Collective, collective_of
from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.collectives.table import TABLE, CollectiveRow, lookup
from shardmap_torch.core.caching import memo
from shardmap_torch.errors import CollectiveError
from shardmap_torch.ops.arguments import (
    Axis,
    all_leaves,
    check_divides,
    check_dtypes,
    each_leaf,
    read_axes,
    read_dim,
)
from shardmap_torch.ops.gather import all_gather, all_to_all
from shardmap_torch.ops.reading import Reader, Reading, issue_each
from shardmap_torch.ops.reduce import all_reduce, reduce_scatter
from shardmap_torch.types import AxisType, TypeLike, V, as_type

X = TypeVar("X")


def convert(
    x: X,
    axis: Axis,
    *,
    src: TypeLike,
    dst: TypeLike,
    dim: int | None = None,
    grad_comm_dtype: torch.dtype | None = None,
) -> X:
    """Changes the type along `axis` and keeps the global value. Communicates nothing.

    | src -> dst | forward | backward |
    |---|---|---|
    | I -> R | nothing | all_reduce(dst=I) |
    | I -> V | this rank's slice along `dim` | all_gather(dst=I) |
    | I -> Partial, R -> Partial | kept on rank 0, zero elsewhere | nothing; the same |
    | R -> I | nothing | kept on rank 0, zero elsewhere |
    | R -> V | this rank's slice along `dim` | padded with zeros to the full size |
    | V -> Partial | padded with zeros along `dim` to the full size | this rank's slice |
    | any type to itself | nothing; the checker requires the type | nothing |

    Shape: unchanged but for `dim`, which slicing divides by n and padding multiplies by n.

    Args:
        x: a tensor or a pytree of tensors.
        axis: an axis name, or several that act as one.
        src: the type that x has.
        dst: the type that it gets.
        dim: the dimension that V shards; needed if only one of src and dst is V.
        grad_comm_dtype: dtype in which the cotangents are sent and are added, if any are: from I.

    Raises:
        CollectiveError: outside a body, unknown axis, no such conversion, indivisible sizes.
        ShardTypeError: in a checked body, for `x` of another type than `src`.

    Source: meta-pytorch/spmd_types `convert`; `jax.lax.pcast`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, V, convert, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: convert(x, "tp", src=I, dst=V, dim=0)
        >>> shard_map(f, mesh=mesh, in_specs=(P(),), out_specs=P("tp"))(torch.arange(4.0))
        tensor([0., 1., 2., 3.])
    """
    arguments = axis, src, dst, dim, grad_comm_dtype
    if dim is not None or isinstance(x, Tensor):
        return issue_each("convert", _read_conversion, x, *arguments)
    axes, scope = read_axes("convert", axis)
    source, target = as_type(src), as_type(dst)
    if source == target:
        return issue_each("convert", _read_conversion, x, *arguments)
    collective = _conversion("convert", source, target, axes, grad_comm_dtype)
    return all_leaves("convert", x, partial(issue_all, scope, collective))


def _read_conversion(
    _: object,
    axis: Axis,
    src: TypeLike,
    dst: TypeLike,
    dim: int | None,
    grad_comm_dtype: torch.dtype | None,
) -> Reader:
    axes, scope = read_axes("convert", axis)
    source, target = as_type(src), as_type(dst)
    if source == target:
        return partial(_unchanged, "convert", scope, axes, source)
    if dim is None:
        collective = _conversion("convert", source, target, axes, grad_comm_dtype)
        return lambda leaf: Reading(collective)
    row = lookup("convert", source, target)
    arguments = _back_in(row, grad_comm_dtype)
    num_ranks = scope.backend.mesh.num_ranks(axes)

    def one(leaf: Tensor) -> Reading:
        at = read_dim("convert", "dim", dim, leaf.ndim) if MOVEMENTS[row.move].dims else 0
        if target == V:  # it is sliced
            check_divides("convert", "dim", leaf.shape[at], axes, num_ranks)
        collective = collective_of(row.name, row.src, row.dst, axes, dim=at, **arguments)
        return Reading(check_dtypes(collective))

    return one


def _unchanged(
    name: str, scope: Scope, axes: tuple[str, ...], axis_type: AxisType, leaf: Tensor
) -> Reading:
    """A value that already has the type, which only the checker can see."""
    if is_checker(scope.backend):
        scope.backend.require(name, axes, _plain(axis_type), leaf)
    return Reading(None)


def _back_in(row: CollectiveRow, grad_comm_dtype: torch.dtype | None) -> dict[str, Any]:
    """Rounds what travels in the backward, and nothing where nothing does."""
    if grad_comm_dtype is None or TABLE[row.transpose].sent == "0":
        return {}
    return {"grad_comm_dtype": grad_comm_dtype}


@memo
def _conversion(
    name: str,
    src: AxisType,
    dst: AxisType,
    axes: tuple[str, ...],
    grad_comm_dtype: torch.dtype | None = None,
) -> Collective:
    """Returns a conversion that needs no dim; the same object for the same arguments."""
    row = lookup(name, src, dst)
    if MOVEMENTS[row.move].dims:
        raise CollectiveError(f"convert from {row.src} to {row.dst} needs dim=.")
    arguments = _back_in(row, grad_comm_dtype)
    return check_dtypes(collective_of(row.name, row.src, row.dst, axes, **arguments))


def reinterpret(x: X, axis: Axis, *, src: TypeLike, dst: TypeLike) -> X:
    """Changes the type along `axis` and keeps each rank's bits, so the global value may change.

    R -> V: the copies become one value per rank. V -> Partial: the values become addends of a sum.
    R -> Partial: the copies become addends, so the global value is n times as large.
    Partial -> V: the addends become one value per rank, such as each rank's own gradient, which
    local SGD steps with, or which is clipped before it is summed.
    Shape: unchanged. Communicates nothing, forward or backward.

    Args:
        x: a tensor or a pytree of tensors.
        axis: an axis name, or several that act as one.
        src: the type that x has.
        dst: the type that it gets.

    Raises:
        CollectiveError: outside a body, unknown axis, or no such reinterpretation.
        ShardTypeError: in a checked body, for `x` of another type than `src`.

    Source: meta-pytorch/spmd_types `reinterpret`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, R, V, all_reduce, make_mesh, reinterpret, shard_map
        >>> mesh = make_mesh((4,), ("tp",), kind="simulated")
        >>> def count(x):
        ...     return all_reduce(reinterpret(x, "tp", src=R, dst="P"), "tp", dst=I)
        >>> shard_map(count, mesh=mesh, in_specs=(P(),), out_specs=P())(torch.tensor(1.0))
        tensor(4.)
    """
    return issue_each("reinterpret", _read_reinterpretation, x, axis, src, dst)


def _read_reinterpretation(_: object, axis: Axis, src: TypeLike, dst: TypeLike) -> Reader:
    axes, _ = read_axes("reinterpret", axis)
    collective = _conversion("reinterpret", as_type(src), as_type(dst), axes)
    return lambda leaf: Reading(collective)


def redistribute(
    x: X,
    axis: Axis,
    *,
    src: TypeLike,
    dst: TypeLike,
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> X:
    """Changes the type along `axis` by the collective or conversion that keeps the global value.

    Shards are named with their dim, S(i), since V alone does not say how they are joined: S(i) to
    S(j) is an all-to-all, S(i) to R or I an all-gather, Partial to R or I an all-reduce, Partial to
    S(i) a reduce-scatter, and all others are `convert`. Shape, backward and what it sends are those
    of that collective.

    Args:
        x: a tensor or a pytree of tensors.
        axis: an axis name, or several that act as one.
        src: the type that x has.
        dst: the type that it gets.
        comm_dtype: dtype in which the values are sent, if any are.
        grad_comm_dtype: dtype in which the cotangents are sent and are added, if any are.
        out_dtype: dtype of the result.

    Raises:
        CollectiveError: outside a body, unknown axis, or no path from src to dst.
        ShardTypeError: in a checked body, for `x` of another type than `src`.

    Source: `torch.distributed.tensor.DTensor.redistribute`; meta-pytorch/spmd_types.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, S, make_mesh, redistribute, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: redistribute(x, "tp", src=S(0), dst=S(1))
        >>> g = shard_map(f, mesh=mesh, in_specs=(P("tp"),), out_specs=P(None, "tp"))
        >>> g(torch.eye(2))
        tensor([[1., 0.],
                [0., 1.]])
    """
    axes, scope = read_axes("redistribute", axis)
    source, target = as_type(src), as_type(dst)
    if V in (source, target):
        raise CollectiveError(
            f"redistribute from {source} to {target}: V does not say how the ranks' values are put "
            "together; name the dim with S(dim)."
        )
    dtypes = {"comm_dtype": comm_dtype, "grad_comm_dtype": grad_comm_dtype, "out_dtype": out_dtype}
    move = _COLLECTIVES.get((source.kind, target.kind))
    if move is not None:
        collective, arguments = move
        moved: X = collective(x, axis, **arguments(source, target), **dtypes)
        return moved
    if source == target:
        read = partial(_unchanged, "redistribute", scope, axes, source)
        moved = each_leaf("redistribute", x, lambda leaf: read(leaf).issue(scope, leaf))
    else:
        moved = convert(
            x,
            axis,
            src=_plain(source),
            dst=_plain(target),
            dim=source.dim if source.dim is not None else target.dim,
            grad_comm_dtype=grad_comm_dtype,
        )
    return moved if out_dtype is None else each_leaf("redistribute", moved, _to(out_dtype))


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Casts, where nothing travels."""
    return lambda x: x.to(dtype)


def _plain(axis_type: AxisType) -> AxisType:
    return V if axis_type.dim is not None else axis_type


def _move_shards(x: X, axis: Axis, *, split_dim: int, concat_dim: int, **dtypes: Any) -> X:
    """Issues an all-to-all, or nothing if both dims are the same one, counted from either end."""

    def one(leaf: Tensor) -> Tensor:
        split = read_dim("redistribute", "dst dim", split_dim, leaf.ndim)
        if split == read_dim("redistribute", "src dim", concat_dim, leaf.ndim):
            return leaf if dtypes["out_dtype"] is None else leaf.to(dtypes["out_dtype"])
        return all_to_all(leaf, axis, split_dim=split_dim, concat_dim=concat_dim, **dtypes)

    return each_leaf("redistribute", x, one)


_COLLECTIVES: Final[
    Mapping[
        tuple[str, str], tuple[Callable[..., Any], Callable[[AxisType, AxisType], dict[str, Any]]]
    ]
] = {
    ("S", "S"): (_move_shards, lambda src, dst: {"split_dim": dst.dim, "concat_dim": src.dim}),
    ("S", "R"): (all_gather, lambda src, dst: {"dim": src.dim, "dst": dst}),
    ("S", "I"): (all_gather, lambda src, dst: {"dim": src.dim, "dst": dst}),
    ("P", "R"): (all_reduce, lambda src, dst: {"dst": dst}),
    ("P", "I"): (all_reduce, lambda src, dst: {"dst": dst}),
    ("P", "S"): (reduce_scatter, lambda src, dst: {"dim": dst.dim}),
}
"""Collectives between these types, with their arguments; `convert` handles all others."""
