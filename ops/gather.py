"""Collectives that move values without adding them: gather, all-to-all, broadcast."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from shardmap_torch.collectives.autograd import bind
from shardmap_torch.collectives.operations import Collective, Started
from shardmap_torch.core.functorch import base_of, is_transformed_otherwise
from shardmap_torch.errors import CollectiveError
from shardmap_torch.ops.arguments import (
    Axis,
    check_length,
    check_sizes,
    check_tiled,
    collective_in,
    for_operand,
    read_axes,
    read_dim,
    read_type,
    shown,
)
from shardmap_torch.ops.reading import Dtypes, Reader, Reading, issue_each
from shardmap_torch.ops.reduce import check_split
from shardmap_torch.types import AxisType, I, R, TypeLike, V

X = TypeVar("X")


def all_gather(
    x: X,
    axis: Axis,
    *,
    dim: int = 0,
    dst: TypeLike,
    tiled: bool = True,
    sizes: Sequence[int] | None = None,
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> X:
    """Concatenates the values of all ranks of `axis` along `dim`; every rank gets the result.

    Shape: `dim` of size d becomes n*d; with `tiled=False` a new dim of size n stands at `dim`; with
    `sizes` each rank holds max(sizes) rows of which the first sizes[r] count, and the result has
    sum(sizes). Types: S(dim) or V becomes `dst`, R or I. Backward: `dst=R` reduce-scatters the
    cotangents; `dst=I` slices them without communication. Sends (n-1) * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis: an axis name, or several that act as one.
        dim: the dimension to concatenate along.
        dst: R when the ranks use the result in different ways, I when all repeat one computation.
        tiled: whether to concatenate along an existing dim; otherwise stacks along a new one.
        sizes: unpadded length of each rank's shard, if they differ.
        comm_dtype: dtype in which the values are sent.
        grad_comm_dtype: that of the cotangents; needed if `comm_dtype` rounds and backward adds.
        out_dtype: dtype of the result.

    Raises:
        CollectiveError: outside a body, unknown axis, or dims and sizes that do not match.
        ShardTypeError: in a checked body, for `x` of another type.

    Source: `torch.distributed.all_gather_into_tensor`, `jax.lax.all_gather`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, R, all_gather, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: all_gather(x, "tp", dst=R).sum() + x
        >>> shard_map(f, mesh=mesh, in_specs=(P("tp"),), out_specs=P("tp"))(torch.arange(4.0))
        tensor([6., 7., 8., 9.])
    """
    dtypes = comm_dtype, grad_comm_dtype, out_dtype
    return issue_each("all_gather", _read_gather, x, axis, dim, dst, tiled, sizes, dtypes)


def _read_gather(
    _: object,
    axis: Axis,
    dim: int,
    dst: TypeLike,
    tiled: bool,
    sizes: Sequence[int] | None,
    dtypes: Dtypes,
) -> Reader:
    axes, scope = read_axes("all_gather", axis)
    check_tiled("all_gather", tiled)
    to = read_type("all_gather", dst, "dst", (R, I))
    lengths = check_sizes("all_gather", "sizes", sizes, scope.backend.mesh.num_ranks(axes))

    def one(leaf: Tensor) -> Reading:
        at = read_dim("all_gather", "dim", dim, leaf.ndim + (not tiled))
        if lengths is not None:
            _check_padded("all_gather", "dim", leaf.shape, at, tiled, lengths)
        return Reading(for_operand(_gather(dtypes, axes, to, at, tiled, lengths), leaf))

    return one


def gather_starter(axis: Axis) -> Callable[..., "Callable[[Tensor], Tensor] | None"] | None:
    """Returns what starts `all_gather(x, axis, dim=dim, tiled=tiled, dst=R)` for later.

    Returns:
        A function of `x`, `dim` and `tiled`, or None where nothing can be under way: on simulated
        ranks, while a body is checked or compiled, under vmap and forward mode. It returns what
        takes `x` again, with its gradient, waits, and returns the result, or None if this `x` is
        not sent as it is.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((1,), ("tp",), kind="simulated")
        >>> def body(x):
        ...     return x if gather_starter("tp") is None else x + 1
        >>> shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(torch.ones(2))
        tensor([1., 1.])
    """
    axes, scope = read_axes("all_gather", axis)
    begin = getattr(scope.backend, "start_gather", None)
    if begin is None or torch.compiler.is_compiling() or is_transformed_otherwise():
        return None

    def start(x: Tensor, dim: int = 0, tiled: bool = False) -> Callable[[Tensor], Tensor] | None:
        collective = for_operand(_gather((), axes, R, dim, tiled, None), x)
        finish = begin(collective, base_of(x))
        return None if finish is None else partial(_finish, axis, Started(collective, [finish]))

    return start


def _finish(axis: Axis, started: Started, x: Tensor) -> Tensor:
    """Does what `issue` does; the monitor sees the collective where its result is needed."""
    _, scope = read_axes("all_gather", axis)
    scope.on_operation(started.collective, x)
    return bind(scope.backend, started, x)


def _gather(
    dtypes: Sequence[torch.dtype | None],
    axes: tuple[str, ...],
    to: AxisType,
    dim: int,
    tiled: bool,
    lengths: tuple[int, ...] | None,
) -> Collective:
    return collective_in(dtypes, "all_gather", V, to, axes, dim=dim, tiled=tiled, sizes=lengths)


def all_to_all(
    x: X,
    axis: Axis,
    *,
    split_dim: int,
    concat_dim: int,
    tiled: bool = True,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> X:
    """Splits each rank's value along `split_dim`, sends block j to rank j, and joins what arrives.

    The value that is sharded along `concat_dim` becomes sharded along `split_dim`.

    Shape: `split_dim` d becomes d/n, `concat_dim` d becomes n*d; with `tiled=False` `split_dim`
    must be n and goes away, and a new dim of size n stands at `concat_dim` of the result. With
    `split_sizes` and `concat_sizes` the shards are padded and differ in length: `split_dim` is
    sum(split_sizes) and becomes max(split_sizes), `concat_dim` is max(concat_sizes) and becomes
    sum(concat_sizes). Where both dims are the same, its blocks are transposed with the ranks.
    Types: S(concat_dim) or V becomes S(split_dim). Backward: all_to_all with the dims swapped.
    Sends (n-1)/n * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis: an axis name, or several that act as one.
        split_dim: dim to split.
        concat_dim: dim to concatenate along.
        tiled: whether the dims stay.
        split_sizes: unpadded length, along `split_dim`, of each rank's result.
        concat_sizes: unpadded length, along `concat_dim`, of each rank's operand.
        comm_dtype: dtype in which the values are sent.
        grad_comm_dtype: dtype in which the cotangents are sent.
        out_dtype: dtype of the result.

    Raises:
        CollectiveError: outside a body, unknown axis, or dims and sizes that do not match.
        ShardTypeError: in a checked body, for `x` of another type.

    Source: `torch.distributed.all_to_all_single`, `jax.lax.all_to_all`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, all_to_all, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: all_to_all(x, "tp", split_dim=1, concat_dim=0)
        >>> y = shard_map(f, mesh=mesh, in_specs=(P("tp"),), out_specs=P(None, "tp"))
        >>> y(torch.arange(8.0).reshape(2, 4))
        tensor([[0., 1., 2., 3.],
                [4., 5., 6., 7.]])
    """
    dtypes = comm_dtype, grad_comm_dtype, out_dtype
    arguments = axis, split_dim, concat_dim, tiled, (split_sizes, concat_sizes), dtypes
    return issue_each("all_to_all", _read_exchange, x, *arguments)


def _read_exchange(
    _: object,
    axis: Axis,
    split_dim: int,
    concat_dim: int,
    tiled: bool,
    sizes: tuple[Sequence[int] | None, Sequence[int] | None],
    dtypes: Dtypes,
) -> Reader:
    """Reads the arguments of an all-to-all; sizes are of what is split and of what is joined."""
    axes, scope = read_axes("all_to_all", axis)
    check_tiled("all_to_all", tiled)
    num_ranks = scope.backend.mesh.num_ranks(axes)
    splits = check_sizes("all_to_all", "split_sizes", sizes[0], num_ranks)
    concats = check_sizes("all_to_all", "concat_sizes", sizes[1], num_ranks)

    def one(leaf: Tensor) -> Reading:
        split = read_dim("all_to_all", "split_dim", split_dim, leaf.ndim)
        concat = read_dim("all_to_all", "concat_dim", concat_dim, leaf.ndim)
        length = leaf.shape[split]
        if tiled and split == concat and (splits or concats):
            raise CollectiveError(
                f"all_to_all: split_dim and concat_dim are both {split}, where sizes say nothing "
                "of what goes from one rank to another. Use ragged_all_to_all."
            )
        check_split("all_to_all", "split_dim", length, axes, num_ranks, tiled, splits)
        if concats is not None:
            _check_padded("all_to_all", "concat_dim", leaf.shape, concat, tiled, concats)
        places = {"dim": split, "concat_dim": concat, "tiled": tiled}
        lengths = {"sizes": splits, "concat_sizes": concats}
        collective = collective_in(dtypes, "all_to_all", V, V, axes, **places, **lengths)
        return Reading(for_operand(collective, leaf))

    return one


def broadcast(
    x: X,
    axis: Axis,
    source: int,
    *,
    dst: TypeLike,
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
) -> X:
    """Gives every rank of `axis` the value of rank `source`.

    Shape: unchanged. Types: V becomes `dst`, R or I. Backward: on `source` the all-reduced
    (`dst=R`) or unchanged (`dst=I`) cotangent, zero elsewhere. The source sends x.nbytes.

    Args:
        x: a tensor or a pytree of tensors.
        axis: an axis name, or several that act as one.
        source: position along the axis.
        dst: R when the ranks use the result in different ways, I when all repeat one computation.
        comm_dtype: dtype in which the values are sent.
        grad_comm_dtype: dtype in which the cotangents are sent and added.

    Raises:
        CollectiveError: outside a body, unknown axis, or no such rank.
        ShardTypeError: in a checked body, for `x` of another type.

    Source: `torch.distributed.broadcast`, `jax.lax.pbroadcast`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, broadcast, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: broadcast(x, "tp", 1, dst=I)
        >>> shard_map(f, mesh=mesh, in_specs=(P("tp"),), out_specs=P())(torch.arange(4.0))
        tensor([2., 3.])
    """
    dtypes = comm_dtype, grad_comm_dtype
    return issue_each("broadcast", _read_broadcast, x, axis, source, dst, dtypes)


def _read_broadcast(_: object, axis: Axis, source: int, dst: TypeLike, dtypes: Dtypes) -> Reader:
    axes, scope = read_axes("broadcast", axis)
    to = read_type("broadcast", dst, "dst", (R, I))
    num_ranks = scope.backend.mesh.num_ranks(axes)
    if not isinstance(source, int) or isinstance(source, bool) or not 0 <= source < num_ranks:
        raise CollectiveError(
            f"broadcast: source={source!r} is none of the {num_ranks} ranks of {shown(axes)}."
        )
    collective = collective_in(dtypes, "broadcast", V, to, axes, source=source)
    return lambda leaf: Reading(for_operand(collective, leaf))


def _check_padded(
    name: str, word: str, shape: Sequence[int], dim: int, tiled: bool, sizes: tuple[int, ...]
) -> None:
    if not tiled:
        raise CollectiveError(f"{name}: sizes need tiled=True.")
    why = f"the largest of sizes={sizes}; uneven shards are padded to it"
    check_length(name, word, shape[dim], max(sizes), why)
