"""Collectives and casts of `jax.lax`, as aliases of `shardmap_torch.ops` with JAX's casts."""

from collections.abc import Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.core.tree import map_leaves
from shardmap_torch.errors import CollectiveError, show
from shardmap_torch.lax.operands import WORDS, Source, read, read_type
from shardmap_torch.ops.arguments import Axis, read_dim, read_items, shown
from shardmap_torch.ops.reduce import check_split
from shardmap_torch.types import AxisType, I, K, Partial, R, TypeLike, V, Z

X = TypeVar("X")

_ANY: Final = (I, R, V, Partial)
_CASTS: Final = ((I, V), (I, R), (R, V), (V, Partial))


def psum(x: X, axis_name: Axis, *, axis_index_groups: None = None, src: Source = None) -> X:
    """Sums `x` over the ranks of `axis_name`; every rank gets the same sum, of type I.

    A Python number is equal on all ranks: it is multiplied by their number, and `psum(1, axis)` is
    the axis size. Booleans are counted, as int64.

    Shape: unchanged. Types: V or Partial becomes I. Backward: the cotangent as it is. Sends
    2(n-1)/n * x.nbytes per rank; with `src` I or R the result is n*x, and nothing is sent.
    Arguments and errors: see `shardmap_torch.lax`.

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


def pmean(x: X, axis_name: Axis, *, axis_index_groups: None = None, src: Source = None) -> X:
    """Averages `x` over the ranks of `axis_name`: `psum` divided by the number of ranks.

    Integers become floats, as by `/`. Shape, types, backward, bytes and errors: those of the sum.

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


def pmax(x: X, axis_name: Axis, *, axis_index_groups: None = None, src: Source = None) -> X:
    """Takes the largest value over the ranks of `axis_name`; every rank gets it, of type I.

    Unlike JAX's, it has a derivative: the ranks that hold the extremum share it evenly. Shape:
    unchanged. Types: V becomes I. Sends 2(n-1)/n * x.nbytes per rank, and as much backward, to
    count these ranks; nothing where `src` is I or R. Arguments and errors: as `psum`.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pmax(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> f(torch.arange(4.0))
        tensor([3.])
    """
    return read("pmax", axis_name, src, axis_index_groups).extremum("max", x)


def pmin(x: X, axis_name: Axis, *, axis_index_groups: None = None, src: Source = None) -> X:
    """Takes the smallest value over the ranks of `axis_name`; in all else as `pmax`.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pmin(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> f(torch.arange(4.0))
        tensor([0.])
    """
    return read("pmin", axis_name, src, axis_index_groups).extremum("min", x)


def psum_scatter(
    x: X,
    axis_name: Axis,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: None = None,
    tiled: bool = False,
    src: Source = None,
) -> X:
    """Sums `x` over the ranks of `axis_name` and leaves each its shard along `scatter_dimension`.

    Shape: `scatter_dimension` must be n, the number of ranks, and goes away; with `tiled=True` its
    size d becomes d/n. Types: V or Partial becomes V. Backward: all_gather. Sends
    (n-1)/n * x.nbytes per rank, and as much backward. Arguments and errors: as `psum`.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> f = lambda x: lax.psum_scatter(x, "dp", tiled=True)
        >>> shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(torch.arange(4.0))
        tensor([2., 4.])
    """
    name, word = "psum_scatter", "scatter_dimension"
    call = read(name, axis_name, src, axis_index_groups, _ANY)

    def one(leaf: Tensor) -> Tensor:
        dim = read_dim(name, word, scatter_dimension, leaf.ndim)
        check_split(name, word, leaf.shape[dim], call.axes, call.num_members, tiled, None)
        return ops.reduce_scatter(call.varying(leaf), call.axes, dim=dim, tiled=tiled)

    return call.map(one, x)


def all_gather(
    x: X,
    axis_name: Axis,
    *,
    axis_index_groups: None = None,
    axis: int = 0,
    tiled: bool = False,
    to: TypeLike = "varying",
    src: Source = None,
) -> X:
    """Concatenates or stacks the values of all ranks of `axis_name`; every rank gets the result.

    Shape: a new dim of size n stands at `axis`; with `tiled=True` the dim `axis`, of size d,
    becomes n*d. Types: V becomes `to`: "varying" (the ranks use their copies in different ways),
    "reduced" (the same, and the copies are known to be equal) or "invarying" (all repeat one
    computation). Backward: reduce_scatter; for "invarying" the rank's own slice, without
    communication. Sends (n-1) * x.nbytes per rank. Arguments and errors: as `psum`.

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
        dst, ndim = I if target == I else R, leaf.ndim + (not tiled)
        dim = read_dim("all_gather", "axis", axis, ndim)
        every = ops.all_gather(call.varying(leaf), call.axes, dim=dim, dst=dst, tiled=tiled)
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
    src: Source = None,
) -> X:
    """Splits each rank's value along `split_axis`, sends block j to rank j, joins what arrives.

    Shape: `split_axis` must be n, the number of ranks, and goes away; a new dim of size n stands at
    `concat_axis` of the result. With `tiled=True` `split_axis` d becomes d/n and `concat_axis` d
    becomes n*d, and they may be the same. Types: V stays V. Backward: all_to_all with the dims
    swapped. Sends (n-1)/n * x.nbytes per rank. Arguments and errors: as `psum`.

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
        check_split(name, "split_axis", leaf.shape[at], call.axes, call.num_members, tiled, None)
        leaf = call.varying(leaf)
        return ops.all_to_all(leaf, call.axes, split_dim=at, concat_dim=concat, tiled=tiled)

    return call.map(one, x)


def pswapaxes(
    x: X, axis_name: Axis, axis: int, *, axis_index_groups: None = None, src: Source = None
) -> X:
    """Swaps the mesh axis with the dim `axis`: `all_to_all(x, axis_name, axis, axis)`.

    Shape, types, backward, bytes, errors: as `all_to_all`.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: lax.pswapaxes(x, "tp", 0)
        >>> shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(torch.arange(4.0))
        tensor([0., 2., 1., 3.])
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups, src=src)


def axis_index(axis_name: Axis) -> Tensor:
    """Returns this rank's position along an axis: `shardmap_torch.axis_index`, by JAX's argument.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: x + lax.axis_index("tp")
        >>> shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(torch.zeros(4))
        tensor([0., 0., 1., 1.])
    """
    return ops.axis_index(axis_name)


def axis_size(axis_name: Axis) -> int:
    """Returns the number of ranks of an axis: `shardmap_torch.axis_size`, by JAX's argument.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: x / lax.axis_size("tp")
        >>> shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))(torch.ones(2))
        tensor([0.5000, 0.5000])
    """
    return ops.axis_size(axis_name)


def ppermute(x: X, axis_name: Axis, perm: Sequence[tuple[int, int]], *, src: Source = None) -> X:
    """Sends the value of rank s to rank t for every pair (s, t) of `perm`; others get zeros.

    Shape: unchanged. Types: V stays V. Backward: ppermute by the inverse pairs. A rank that is a
    source sends x.nbytes. Arguments and errors: as `psum`.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((3,), ("pp",), kind="simulated")
        >>> f = lambda x: lax.ppermute(x, "pp", [(0, 1), (1, 2)])
        >>> shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))(torch.arange(1.0, 4.0))
        tensor([0., 1., 2.])
    """
    call = read("ppermute", axis_name, src)
    return call.map(lambda leaf: ops.ppermute(call.varying(leaf), call.axes, perm), x)


def pshuffle(x: X, axis_name: Axis, perm: Sequence[int], *, src: Source = None) -> X:
    """Gives rank i the value of rank `perm[i]`, as `ppermute` by a permutation of all, which see.

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


def pbroadcast(x: X, axis_name: Axis, source: int, *, src: Source = None) -> X:
    """Gives every rank of `axis_name` the value of rank `source`; the copies are typed V.

    Shape: unchanged. `shardmap_torch.broadcast` types them R or I. Backward: on `source` the
    all-reduced cotangent, else zero. The source sends x.nbytes. Arguments and errors: as `psum`.

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


def pcast(x: X, axis_name: Axis, *, to: TypeLike, src: Source = None) -> X:
    """Changes the type of `x` along `axis_name`; the ranks' values stay as they are.

    | src -> to | backward |
    |---|---|
    | invarying -> varying, invarying -> reduced | all_reduce |
    | reduced -> varying | nothing |
    | varying -> unreduced | nothing |

    With `check=False` and without `src=`, "varying" is taken for a cast to "unreduced", else
    "invarying". Shape: unchanged. Sends nothing forward. Arguments and errors: as `psum`, and
    another cast than these is a `CollectiveError`.

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
    return V if type_.dim is not None else K if type_ == Z else type_


def _cast(x: Tensor, axes: Sequence[str], src: AxisType, dst: AxisType) -> Tensor:
    if (src, dst) == (I, R):
        return ops.convert(x, axes, src=I, dst=R)
    if (src, dst) == (V, Partial):
        return ops.reinterpret(x, axes, src=V, dst=Partial)
    known = ", ".join(f"{WORDS[a]} -> {WORDS[b]}" for a, b in _CASTS)
    raise CollectiveError(f"pcast does not go from {WORDS[src]} to {WORDS[dst]}; it goes {known}.")


def pvary(x: X, axis_name: Axis) -> X:
    """Makes an invariant `x` a varying one, as `pcast(x, axis_name, to="varying")`, which see.

    Example:
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pvary(x, "tp"), mesh=mesh, in_specs=P(), out_specs=P("tp"))
        >>> f(torch.ones(1))
        tensor([1., 1.])
    """
    return pcast(x, axis_name, to=V)


def stop_gradient(x: X) -> X:
    """Returns `x` without its gradient: `x.detach()` for every tensor; shapes stay, none is sent.

    Example:
        >>> torch.func.grad(lambda x: x * stop_gradient(x))(torch.tensor(3.0))
        tensor(3.)
    """
    stopped: X = map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, x)
    return stopped
