"""Collectives that combine the ranks' values: all_reduce (sum, mean, max, min), reduce_scatter."""

from collections.abc import Sequence
from functools import partial
from typing import Literal, TypeVar

import torch
from torch import Tensor

from shardmap_torch.collectives.autograd import issue
from shardmap_torch.collectives.bundle import issue_all
from shardmap_torch.collectives.operations import Collective, Extremum, collective_of
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core.caching import memo
from shardmap_torch.core.functorch import is_batched
from shardmap_torch.errors import CollectiveError
from shardmap_torch.ops.arguments import (
    Axis,
    all_leaves,
    check_divides,
    check_length,
    check_sizes,
    check_tiled,
    collective_in,
    each_leaf,
    for_operand,
    read_axes,
    read_dim,
    read_type,
    shown,
)
from shardmap_torch.ops.reading import Dtypes, Finish, Reader, Reading, issue_each
from shardmap_torch.types import I, Partial, R, TypeLike, V

X = TypeVar("X")


def all_reduce(
    x: X,
    axis: Axis,
    *,
    dst: TypeLike,
    src: TypeLike | None = None,
    op: Literal["sum", "mean", "max", "min"] = "sum",
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> X:
    """Combines the values of all ranks of `axis`; every rank gets the result.

    Shape: unchanged; any. Types: Partial (or V) becomes `dst`, R or I; for max and min V does.
    Backward: `dst=R` all-reduces the cotangents; `dst=I` passes them on without communication,
    since they are equal already. Max and min give the cotangent to the ranks that hold the
    extremum, in equal parts, and all-reduce their number. Sends 2(n-1)/n * x.nbytes per rank on a
    ring of n ranks, in each of these all-reduces.

    Args:
        x: a tensor or a pytree of tensors. Booleans are summed as int64, as `Tensor.sum` does.
        axis: an axis name, or several that act as one.
        dst: R when the ranks use the result in different ways, I when all repeat one computation.
        src: Partial or V, for the reader; both are accepted.
        op: "sum", "mean", "max" or "min".
        comm_dtype: dtype in which the values are sent and are added.
        grad_comm_dtype: that of the cotangents; needed if `comm_dtype` rounds and backward adds.
        out_dtype: dtype of the result, which is not rounded to that of x first.

    Raises:
        CollectiveError: outside a body, unknown axis, or arguments that cannot work.
        ShardTypeError: in a checked body, for `x` of another type.

    Source: `torch.distributed.all_reduce`, `jax.lax.psum`; types from meta-pytorch/spmd_types;
    cost from Patarasuk and Yuan 2009.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, all_reduce, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P("dp"),), out_specs=P())
        ... def total(x):
        ...     return all_reduce(x.sum(), "dp", dst=I)
        >>> total(torch.arange(8.0))
        tensor(28.)
    """
    dtypes = comm_dtype, grad_comm_dtype, out_dtype
    if isinstance(x, Tensor):
        return issue_each("all_reduce", _read_reduction, x, axis, dst, src, op, dtypes)
    axes, scope = read_axes("all_reduce", axis)
    made, num_ranks = scope.reduction(op, axes, x)
    operation = _reduction(axes, dst, src, made, *dtypes)
    if isinstance(operation, Extremum):
        return each_leaf("all_reduce", x, lambda x: issue(scope, _ordered(operation, x), x))
    finish = _mean_over("all_reduce", made, num_ranks)
    return all_leaves("all_reduce", x, partial(_sum_all, scope, operation, finish))


def _read_reduction(
    x: object, axis: Axis, dst: TypeLike, src: TypeLike | None, op: str, dtypes: Dtypes
) -> Reader:
    axes, scope = read_axes("all_reduce", axis)
    made, num_ranks = scope.reduction(op, axes, x)
    operation = _reduction(axes, dst, src, made, *dtypes)
    finish = _mean_over("all_reduce", made, num_ranks)

    def one(leaf: Tensor) -> Reading:
        if isinstance(operation, Extremum):
            return Reading(_ordered(operation, leaf))
        return _summing(operation, leaf, finish)

    return one


def _summing(operation: Collective, x: Tensor, finish: Finish | None) -> Reading:
    cast = torch.int64 if x.dtype == torch.bool else None
    return Reading(for_operand(operation, _summable(x)), finish, cast)


def _sum_all(
    scope: Scope, total: Collective, finish: Finish | None, xs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Sums of several tensors; where their dtypes count, each is a collective of its own."""
    xs = list(map(_summable, xs))
    if total.comm_dtype is None and total.out_dtype is None:
        return issue_all(scope, total, xs, after=finish)
    totals = [for_operand(total, x) for x in xs]
    if total.out_dtype is None:
        return issue_all(scope, total, xs, after=finish)
    sums = [issue(scope, each, x) for each, x in zip(totals, xs, strict=True)]
    return sums if finish is None else list(map(finish, sums))


def reduce_scatter(
    x: X,
    axis: Axis,
    *,
    dim: int = 0,
    op: Literal["sum", "mean"] = "sum",
    tiled: bool = True,
    sizes: Sequence[int] | None = None,
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> X:
    """Sums the values of all ranks of `axis` and leaves each rank its shard along `dim`.

    Shape: `dim` of size d becomes d/n; with `tiled=False` it must be n and goes away; with `sizes`
    it is sum(sizes) and becomes max(sizes), rank r holding sizes[r] rows and zeros below.
    Types: Partial (or V) becomes S(dim). Backward: all_gather(dst=R). Sends (n-1)/n * x.nbytes per
    rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis: an axis name, or several that act as one.
        dim: the dimension to split.
        op: "sum" or "mean".
        tiled: whether the dimension stays.
        sizes: true length of each rank's shard, where they differ.
        comm_dtype: dtype in which the values are sent and are added.
        grad_comm_dtype: that of the cotangents; needed if `comm_dtype` rounds and backward adds.
        out_dtype: dtype of the result, which is not rounded to that of x first.

    Raises:
        CollectiveError: outside a body, unknown axis, sizes that do not divide.
        ShardTypeError: in a checked body, for `x` of another type.

    Source: `torch.distributed.reduce_scatter_tensor`, `jax.lax.psum_scatter`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, reduce_scatter, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: reduce_scatter(x, "tp")
        >>> shard_map(f, mesh=mesh, in_specs=(P("tp"),), out_specs=P("tp"))(torch.arange(4.0))
        tensor([2., 4.])
    """
    dtypes = comm_dtype, grad_comm_dtype, out_dtype
    return issue_each("reduce_scatter", _read_scatter, x, axis, dim, op, tiled, sizes, dtypes)


def _read_scatter(
    x: object,
    axis: Axis,
    dim: int,
    op: str,
    tiled: bool,
    sizes: Sequence[int] | None,
    dtypes: Dtypes,
) -> Reader:
    axes, scope = read_axes("reduce_scatter", axis)
    check_tiled("reduce_scatter", tiled)
    num_ranks = scope.backend.mesh.num_ranks(axes)
    if not isinstance(op, str) or op not in ("sum", "mean"):
        raise CollectiveError(f"reduce_scatter: op={op!r} is none of sum, mean.")
    made, divisor = scope.reduction(op, axes, x)
    lengths = check_sizes("reduce_scatter", "sizes", sizes, num_ranks)
    finish = _mean_over("reduce_scatter", made, divisor)

    def one(leaf: Tensor) -> Reading:
        at = read_dim("reduce_scatter", "dim", dim, leaf.ndim)
        check_split("reduce_scatter", "dim", leaf.shape[at], axes, num_ranks, tiled, lengths)
        options = {"dim": at, "tiled": tiled, "sizes": lengths}
        collective = collective_in(dtypes, "reduce_scatter", Partial, V, axes, **options)
        return _summing(collective, leaf, finish)

    return one


def check_split(
    name: str,
    word: str,
    length: int,
    axes: tuple[str, ...],
    num_ranks: int,
    tiled: bool,
    sizes: tuple[int, ...] | None,
) -> None:
    """Requires that a dim can be split: evenly, into n single rows, or by sizes."""
    if not tiled:
        if sizes is not None:
            raise CollectiveError(f"{name}: sizes= needs tiled=True.")
        why = f"the number of ranks of {shown(axes)}, as tiled=False needs"
        check_length(name, word, length, num_ranks, why)
    elif sizes is not None:
        check_length(name, word, length, sum(sizes), f"the sum of sizes={sizes}")
    else:
        check_divides(name, word, length, axes, num_ranks)


@memo
def _reduction(
    axes: tuple[str, ...], dst: TypeLike, src: TypeLike | None, op: str, *dtypes: torch.dtype | None
) -> Collective | Extremum:
    """Returns the same object for the same arguments, which are checked once."""
    to = read_type("all_reduce", dst, "dst", (R, I))
    _check_source(op, src)
    if op in ("max", "min"):
        _reject_dtypes(op, *dtypes)
        return Extremum(op, collective_of("all_reduce", Partial, to, axes))
    return collective_in(dtypes, "all_reduce", Partial, to, axes)


def _check_source(op: str, src: TypeLike | None) -> None:
    if not isinstance(op, str) or op not in ("sum", "mean", "max", "min"):
        raise CollectiveError(f"all_reduce: op={op!r} is none of sum, mean, max, min.")
    if src is not None:
        allowed = (Partial, V) if op in ("sum", "mean") else (V,)
        read_type(f"all_reduce with op={op!r}", src, "src", allowed)


def _reject_dtypes(op: str, *dtypes: torch.dtype | None) -> None:
    if any(dtype is not None for dtype in dtypes):
        raise CollectiveError(
            f"all_reduce with op={op!r} rounds nothing; it takes no comm_dtype and no out_dtype."
        )


def _ordered(extremum: Extremum, x: Tensor) -> Extremum:
    if x.is_complex():
        raise CollectiveError(
            f"all_reduce: op={extremum.move!r} needs an order, which {x.dtype} lacks."
        )
    return extremum


def _summable(x: Tensor) -> Tensor:
    return x.to(torch.int64) if x.dtype == torch.bool else x


def _mean_over(name: str, op: str, num_ranks: int) -> Finish | None:
    """Returns what makes the result of `op` of the sum; None where that is the result."""
    if op == "sum":
        return None

    def divide(total: Tensor) -> Tensor:
        if not (total.is_floating_point() or total.is_complex()):
            raise CollectiveError(f"{name}: op='mean' needs a floating dtype, not {total.dtype}.")
        # Of a number in a vmap `/` makes a tensor of `num_ranks` first.
        if total.ndim == 0 and not torch.compiler.is_compiling() and is_batched(total):
            divided: Tensor = torch.ops.aten.div.Scalar(total, num_ranks)
            return divided
        return total / num_ranks

    return divide
