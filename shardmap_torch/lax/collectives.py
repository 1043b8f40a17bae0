"""Collectives and casts of `jax.lax`, as aliases of `shardmap_torch.ops` with JAX's casts."""

from collections.abc import Sequence
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.core.tree import map_leaves
from shardmap_torch.errors import CollectiveError, show
from shardmap_torch.lax.operands import WORDS, read, read_type
from shardmap_torch.ops.arguments import Axis, read_dim, read_items, shown
from shardmap_torch.ops.reduce import check_split
from shardmap_torch.types import AxisType, I, K, Partial, R, TypeLike, V, Z

X = TypeVar("X")

_ANY: Final = (I, R, V, Partial)
_CASTS: Final = ((I, V), (I, R), (R, V), (V, Partial))


def psum(
    x: X, axis_name: Axis, *, axis_index_groups: None = None, src: TypeLike | None = None
) -> X:
    """Sums `x` over the ranks of `axis_name`; every rank gets the same sum, of type I.

    A Python number is equal on all ranks: it is multiplied by their number, and `psum(1, axis)` is
    the axis size. Booleans are counted, as int64. With `src` I or R the result is n*x, computed
    locally.

    Types: V or Partial becomes I. Backward: the cotangent as it is. Sends as `all_reduce`.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P("dp"),), out_specs=P())
        ... def mean(x):
        ...     return lax.psum(x.sum(), "dp") / lax.psum(len(x), "dp")
        >>> mean(torch.arange(8.0))
        tensor(3.5000)
    """
    call = read("psum", axis_name, src, axis_index_groups, _ANY)

    def one(leaf: Tensor) -> Tensor:
        leaf = leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf
        types = call.types(leaf)
        # Along axes with equal values n copies are added by a product, along the others by a sum.
        equal = [axis for axis, type_ in types.items() if type_ in (I, R, K)]
        total = leaf * ops.axis_size(equal) if equal else leaf
        return call.reduced(total, types, "sum")

    return call.map_numbers(one, x, lambda number: number * call.num_members)


def pmean(
    x: X, axis_name: Axis, *, axis_index_groups: None = None, src: TypeLike | None = None
) -> X:
    """Averages `x` over the ranks of `axis_name`: `psum` divided by the number of ranks.

    Integers become floats, as by `/`. Types, backward and bytes: as `psum`.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pmean(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> f(torch.arange(4.0))
        tensor([1.5000])
    """
    total = psum(x, axis_name, axis_index_groups=axis_index_groups, src=src)
    count = read("pmean", axis_name, src, axis_index_groups, _ANY).num_members
    averaged: X = map_leaves(lambda leaf: leaf / count, total)
    return averaged


def pmax(
    x: X, axis_name: Axis, *, axis_index_groups: None = None, src: TypeLike | None = None
) -> X:
    """Takes the largest value over the ranks of `axis_name`; every rank gets it, of type I.

    Unlike JAX's, it has a derivative: the ranks that hold the extremum share it evenly. Types: V
    becomes I. Sends as `all_reduce`; nothing where `src` is I or R.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pmax(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> f(torch.arange(4.0))
        tensor([3.])
    """
    return _extremum("max", x, axis_name, axis_index_groups, src)


def pmin(
    x: X, axis_name: Axis, *, axis_index_groups: None = None, src: TypeLike | None = None
) -> X:
    """Takes the smallest value over the ranks of `axis_name`; types, backward, bytes: as `pmax`."""
    return _extremum("min", x, axis_name, axis_index_groups, src)


def _extremum(
    op: Literal["max", "min"], x: X, axis_name: Axis, groups: None, src: TypeLike | None
) -> X:
    call = read(f"p{op}", axis_name, src, groups)

    return call.map_numbers(
        lambda leaf: call.reduced(leaf, call.types(leaf), op), x, lambda number: number
    )


def psum_scatter(
    x: X,
    axis_name: Axis,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: None = None,
    tiled: bool = False,
    src: TypeLike | None = None,
) -> X:
    """Sums `x` over the ranks of `axis_name` and leaves each its shard along `scatter_dimension`.

    Shape: `scatter_dimension` must be n, the number of ranks and goes
    away; with `tiled=True` its size d becomes d/n. Types: V or Partial becomes V. Backward:
    all_gather.
    Sends as `reduce_scatter`.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> f = lambda x: lax.psum_scatter(x, "dp", tiled=True)
        >>> shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(torch.arange(4.0))
        tensor([2., 4.])
    """
    call = read("psum_scatter", axis_name, src, axis_index_groups, _ANY)

    def one(leaf: Tensor) -> Tensor:
        leaf = call.varying(leaf)
        return ops.reduce_scatter(leaf, call.axes, dim=scatter_dimension, tiled=tiled)

    return call.map(one, x)


def all_gather(
    x: X,
    axis_name: Axis,
    *,
    axis_index_groups: None = None,
    axis: int = 0,
    tiled: bool = False,
    to: TypeLike = "varying",
    src: TypeLike | None = None,
) -> X:
    """Concatenates or stacks the values of all ranks of `axis_name`; every rank gets the result.

    Shape: a new dim of size n stands at `axis`; with `tiled=True` the dim `axis`, of size d,
    becomes n*d. Types: V becomes `to`: "varying" (the ranks use their copies in different ways),
    "reduced" (the same, and the copies are known to be equal) or "invarying" (all repeat one
    computation). Backward: reduce_scatter; for "invarying" the rank's own slice, without
    communication. Sends (n-1) * x.nbytes per rank.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: lax.all_gather(x, "tp", to="invarying")
        >>> shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P())(torch.arange(4.0))
        tensor([[0., 1.],
                [2., 3.]])
    """
    call = read("all_gather", axis_name, src, axis_index_groups)
    target = read_type("all_gather", "to", to, (V, R, I))

    def one(leaf: Tensor) -> Tensor:
        dst = I if target == I else R
        every = ops.all_gather(call.varying(leaf), call.axes, dim=axis, dst=dst, tiled=tiled)
        if target == I:
            return call.spread(every, call.axes)
        return call.copied(every) if target == V else every

    return call.map(one, x)


def all_to_all(
    x: X,
    axis_name: Axis,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: None = None,
    tiled: bool = False,
    src: TypeLike | None = None,
) -> X:
    """Splits each rank's value along `split_axis`, sends block j to rank j, joins what arrives.

    Shape: `split_axis` must be n, the number of ranks and goes away; a
    new dim of size n stands at `concat_axis` of the result. With `tiled=True` `split_axis` d
    becomes d/n and `concat_axis` d becomes n*d, and they may be the same. Types: V stays V.
    Backward: all_to_all with the dims swapped. Sends (n-1)/n * x.nbytes per rank.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: lax.all_to_all(x, "tp", 1, 0)
        >>> g = shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P(None, "tp"))
        >>> g(torch.arange(4.0).reshape(2, 2))
        tensor([[0., 1.],
                [2., 3.]])
    """
    name = "all_to_all"
    call = read(name, axis_name, src, axis_index_groups)

    def one(leaf: Tensor) -> Tensor:
        at = read_dim(name, "split_axis", split_axis, leaf.ndim)
        concat = read_dim(name, "concat_axis", concat_axis, leaf.ndim)
        length = leaf.shape[at]
        check_split(name, "split_axis", length, call.axes, call.num_members, tiled, None)
        leaf = call.varying(leaf)
        return ops.all_to_all(leaf, call.axes, split_dim=at, concat_dim=concat, tiled=tiled)

    return call.map(one, x)


def pswapaxes(
    x: X,
    axis_name: Axis,
    axis: int,
    *,
    axis_index_groups: None = None,
    src: TypeLike | None = None,
) -> X:
    """Swaps the mesh axis with the dim `axis`: `all_to_all(x, axis_name, axis, axis)`."""
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups, src=src)


def ppermute(
    x: X, axis_name: Axis, perm: Sequence[tuple[int, int]], *, src: TypeLike | None = None
) -> X:
    """Sends the value of rank s to rank t for every pair (s, t); other ranks get zeros.

    Types: V stays V. Backward: ppermute by the inverse pairs. A rank that is a source sends
    x.nbytes.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((3,), ("pp",), kind="simulated")
        >>> f = lambda x: lax.ppermute(x, "pp", [(0, 1), (1, 2)])
        >>> shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))(torch.arange(1.0, 4.0))
        tensor([0., 1., 2.])
    """
    call = read("ppermute", axis_name, src)
    return call.map(lambda leaf: ops.ppermute(call.varying(leaf), call.axes, perm), x)


def pshuffle(x: X, axis_name: Axis, perm: Sequence[int], *, src: TypeLike | None = None) -> X:
    """Gives rank i the value of rank `perm[i]`: `ppermute` by a permutation of all ranks.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((3,), ("pp",), kind="simulated")
        >>> f = lambda x: lax.pshuffle(x, "pp", [2, 0, 1])
        >>> shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))(torch.arange(3.0))
        tensor([2., 0., 1.])
    """
    call = read("pshuffle", axis_name, src)
    sources = read_items("pshuffle", "perm", perm)
    numbers = all(isinstance(rank, int) for rank in sources)
    if not numbers or sorted(sources) != list(range(call.num_members)):
        raise CollectiveError(
            f"pshuffle: perm={show(list(sources))} is no permutation of the {call.num_members} "
            f"ranks of {shown(call.axes)}."
        )
    pairs = [(source, target) for target, source in enumerate(sources)]
    return call.map(lambda leaf: ops.ppermute(call.varying(leaf), call.axes, pairs), x)


def pbroadcast(x: X, axis_name: Axis, source: int, *, src: TypeLike | None = None) -> X:
    """Gives every rank of `axis_name` the value of rank `source`; the copies are typed V.

    `shardmap_torch.broadcast` types them R or I. Backward: the all-reduced cotangent on `source`,
    zero elsewhere. The source sends x.nbytes.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((3,), ("pp",), kind="simulated")
        >>> f = lambda x: lax.pbroadcast(x, "pp", 2)
        >>> shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))(torch.arange(3.0))
        tensor([2., 2., 2.])
    """
    call = read("pbroadcast", axis_name, src)

    def one(leaf: Tensor) -> Tensor:
        return call.copied(ops.broadcast(call.varying(leaf), call.axes, source, dst=R))

    return call.map(one, x)


def pcast(x: X, axis_name: Axis, *, to: TypeLike, src: TypeLike | None = None) -> X:
    """Changes the type of `x` along `axis_name`; the ranks' values stay as they are.

    | src -> to | backward |
    |---|---|
    | invarying -> varying, invarying -> reduced | all_reduce |
    | reduced -> varying | nothing |
    | varying -> unreduced | nothing |

    With `check=False` and without `src=`, "varying" is taken for a cast to "unreduced", else
    "invarying". Sends nothing forward.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda w, x: lax.psum((lax.pcast(w, "tp", to="varying") * x).sum(), "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(invariant="tp"), P("tp")), out_specs=P())
        >>> torch.func.grad(g)(torch.tensor(1.0), torch.arange(4.0))
        tensor(6.)
    """
    target = read_type("pcast", "to", to, (V, R, Partial))
    call = read("pcast", axis_name, src, None, _ANY)

    def one(leaf: Tensor) -> Tensor:
        found = call.types(leaf, unknown=V if target == Partial else I)
        types = {axis: _source(type_) for axis, type_ in found.items()}
        if target == V and all(type_ in (I, R, K) for type_ in types.values()):
            return call.cast(leaf, types)
        for type_ in dict.fromkeys(types.values()):
            axes = [axis for axis in types if types[axis] == type_]
            leaf = _cast(leaf, axes, I if type_ == K else type_, target)
        return leaf

    return call.map(one, x)


def _source(type_: AxisType) -> AxisType:
    """Returns the type before a cast: of shards V, of zeros that of uncommitted values."""
    if type_.dim is not None:
        return V
    return K if type_ == Z else type_


def _cast(x: Tensor, axes: Sequence[str], src: AxisType, dst: AxisType) -> Tensor:
    if (src, dst) == (I, R):
        return ops.convert(x, axes, src=I, dst=R)
    if (src, dst) == (V, Partial):
        return ops.reinterpret(x, axes, src=V, dst=Partial)
    known = ", ".join(f"{WORDS[a]} -> {WORDS[b]}" for a, b in _CASTS)
    raise CollectiveError(f"pcast does not go from {WORDS[src]} to {WORDS[dst]}; it goes {known}.")


def pvary(x: X, axis_name: Axis) -> X:
    """Makes an invariant `x` a varying one: `pcast(x, axis_name, to="varying")`.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pvary(x, "tp"), mesh=mesh, in_specs=P(), out_specs=P("tp"))
        >>> f(torch.ones(1))
        tensor([1., 1.])
    """
    return pcast(x, axis_name, to=V)


def stop_gradient(x: X) -> X:
    """Returns `x` without its gradient: `x.detach()` for every tensor of a tree.

    Example:
        >>> torch.func.grad(lambda x: x * stop_gradient(x))(torch.tensor(3.0))
        tensor(3.)
    """
    stopped: X = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, x)
    return stopped
