"""Reshards a value in a body from one partition spec to another, by the cheapest collectives.

The planner searches. Its states are layouts (which axes shard which dim, and the types of the axes
that shard none), its steps are rows of the collective table that keep the global value, so any path
is right, forward and backward. Cheapest means: fewest bytes sent forward, then fewest backward,
then fewest collectives; the last rule merges several collectives into one over a tuple of axes.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, count, permutations, product
from math import gcd, prod
from typing import TypeVar

import torch
from torch import Tensor

from shardmap_torch.collectives.autograd import issue
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.scope import scope_of
from shardmap_torch.collectives.table import TABLE, CollectiveRow
from shardmap_torch.errors import CollectiveError, SpecError, show
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.arguments import check_dtypes, each_leaf, finest_spec, for_operand
from shardmap_torch.spec import P, expanded, mismatches
from shardmap_torch.types import AxisType, I, Partial, R, V

X = TypeVar("X")
ShardedDims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ReshardStep:
    """One collective of a plan.

    Attributes:
        collective: what to run.
        sent: bytes that each rank sends, in units of the bytes of the operand of `reshard`.
        sent_back: the same for the transpose, in the backward.
    """

    collective: Collective
    sent: Fraction
    sent_back: Fraction

    def __str__(self) -> str:
        """Formats it as `all_gather('tp', V -> I) dim 1, sends 3 x, back 0`."""
        c = self.collective
        dims = {"all_to_all": f" dim {c.concat_dim} to {c.dim}", "ppermute": ""}
        where = dims.get(c.name, f" dim {c.dim}" if V in (c.src, c.dst) else "")
        return f"{c}{where}, sends {self.sent} x, back {self.sent_back}"


def reshard(
    x: X,
    src: P,
    dst: P,
    *,
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
) -> X:
    """Changes the sharding of `x` from `src` to `dst`, sending the fewest bytes.

    Axes that shard the same dim on both sides, from the front of its tuple, stay where they are;
    axes that move from dim to dim go by all-to-all; a partial value is all-reduced or
    reduce-scattered; what has to be gathered is gathered over a tuple of axes at once, and nothing
    else is gathered. See `plan` for what will be sent.

    An axis that one spec names and the other does not is invariant in the other, as in
    `out_specs`. Axes that neither names are left as they are, whatever their type.

    Shape: that of a shard of `dst`. Types: those of `src` become those of `dst`. Backward: the
    transposes in reverse order. Sends the bytes that `plan` returns.

    Args:
        x: a tensor or a pytree of tensors, sharded by `src`.
        src: the spec of x.
        dst: the spec of the result.
        comm_dtype: dtype in which the values are sent, if any are.
        grad_comm_dtype: dtype in which the cotangents are sent and added.

    Raises:
        CollectiveError: outside a body, or an axis that is not bound.
        SpecError: the value cannot be sharded by `dst`.
        ShardTypeError: in a checked body, for `x` of other types than those of `src`.

    Source: `jax.sharding.reshard`; `torch.distributed.tensor.DTensor.redistribute`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, reshard, shard_map
        >>> mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
        >>> f = lambda x: reshard(x, P(("dp", "tp")), P("dp", "tp"))
        >>> g = shard_map(f, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P("dp", "tp"))
        >>> bool((g(torch.eye(4)) == torch.eye(4)).all())
        True
    """
    if not (isinstance(src, P) and isinstance(dst, P)):
        raise SpecError(f"reshard takes src and dst as P(...), not {show(src)} and {show(dst)}.")
    src, dst = finest_spec(src), finest_spec(dst)
    scope = scope_of("reshard", sorted(src.named | dst.named) or _no_axes(src, dst))
    mesh = scope.backend.mesh

    def one(leaf: Tensor) -> Tensor:
        for step in plan(src, dst, mesh, _global_shape(leaf, src, mesh)):
            collective = _in_dtypes(step.collective, comm_dtype, grad_comm_dtype)
            leaf = issue(scope, for_operand(collective, leaf), leaf)
        return leaf

    return each_leaf("reshard", x, one)


def plan(src: P, dst: P, mesh: Mesh, shape: Sequence[int] | None = None) -> tuple[ReshardStep, ...]:
    """Plans the collectives that reshard from `src` to `dst`, with the bytes that each sends.

    Args:
        src: the spec of the operand.
        dst: the spec of the result.
        mesh: gives the axis sizes.
        shape: the global shape. Without it only those paths are considered whose every sharding is
            known to be even, since `src` or `dst` has it.

    Raises:
        SpecError: an axis is not the mesh's, or `shape` cannot be sharded by one of the specs.

    Example:
        >>> from shardmap_torch import P, make_mesh
        >>> mesh = make_mesh((2, 4), ("dp", "tp"), kind="simulated")
        >>> for step in plan(P(("dp", "tp")), P("dp", "tp"), mesh):
        ...     print(step)
        all_to_all('tp', V -> V) dim 0 to 1, sends 3/4 x, back 3/4
        >>> for step in plan(P("tp", partial={"dp"}), P(replicate={"tp"}), mesh):
        ...     print(step)
        all_reduce('dp', Partial -> I), sends 1 x, back 0
        all_gather('tp', V -> R) dim 0, sends 3 x, back 3
    """
    src, dst = expanded(src, mesh.aliases), expanded(dst, mesh.aliases)
    sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names}
    unknown = sorted((src.named | dst.named) - set(sizes))
    if unknown:
        raise SpecError(f"reshard: no axis {', '.join(map(repr, unknown))} in the {mesh}.")
    if shape is not None:
        for word, spec in (("src", src), ("dst", dst)):
            problems = mismatches(spec, tuple(shape), sizes)
            if problems:
                raise SpecError(
                    f"reshard from {src!r} to {dst!r}: {word} does not match the global shape "
                    f"{tuple(shape)}: {'; '.join(problems)}."
                )
    num_dims = max(len(src.entries), len(dst.entries))
    # The shape decides only if a dim can be sharded n ways, so the search is cached on that alone.
    even = None if shape is None else tuple(gcd(d, mesh.size) for d in shape[:num_dims])
    return _search(src, dst, tuple(sizes.items()), even)


def _in_dtypes(
    collective: Collective, comm_dtype: torch.dtype | None, grad_comm_dtype: torch.dtype | None
) -> Collective:
    """Adds the communication dtypes to steps that send; data that stays is not rounded."""
    forward = comm_dtype if collective.row.sent != "0" else None
    back = grad_comm_dtype if TABLE[collective.row.transpose].sent != "0" else None
    if forward is None and back is None:
        return collective
    return check_dtypes(replace(collective, comm_dtype=forward, grad_comm_dtype=back))


def _no_axes(src: P, dst: P) -> tuple[str, ...]:
    raise CollectiveError(f"reshard from {src!r} to {dst!r}: no axis is named, nothing can move.")


def _global_shape(x: Tensor, src: P, mesh: Mesh) -> tuple[int, ...]:
    shape = list(x.shape)
    for dim, axes in src.sharded_dims:
        if dim < len(shape):
            shape[dim] *= mesh.num_ranks(axes)
    return tuple(shape)


# ------------------------------------------------------------------------------ the search


@dataclass(frozen=True)
class _Layout:
    """The axes that shard each dim, and the types of the axes that shard none."""

    sharded_dims: ShardedDims
    types: frozenset[tuple[str, AxisType]]

    def axes_of_type(self, type_: AxisType) -> list[str]:
        return sorted(axis for axis, its in self.types if its == type_)

    def with_dims(self, changes: Mapping[int, tuple[str, ...]]) -> "_Layout":
        dims = tuple(changes.get(dim, axes) for dim, axes in enumerate(self.sharded_dims))
        return _Layout(dims, self.types)

    def with_types(self, axes: Sequence[str], type_: AxisType | None) -> "_Layout":
        kept = frozenset(pair for pair in self.types if pair[0] not in axes)
        return _Layout(
            self.sharded_dims, kept | {(axis, type_) for axis in axes if type_ is not None}
        )


_Moves = Iterator[tuple[Collective, _Layout]]
_Cost = tuple[Fraction, Fraction, int]
_Path = tuple[tuple[Collective, _Layout, _Layout], ...]
_FREE: _Cost = (Fraction(0), Fraction(0), 0)


@lru_cache(maxsize=4096)
def _search(
    src: P, dst: P, axis_sizes: tuple[tuple[str, int], ...], even: tuple[int, ...] | None
) -> tuple[ReshardStep, ...]:
    """Finds the cheapest path from `src` to `dst` by Dijkstra's algorithm."""
    sizes = dict(axis_sizes)
    num_dims = max(len(src.entries), len(dst.entries))
    start, goal = (_layout(spec, src.named | dst.named, num_dims) for spec in (src, dst))
    neighbours = _Neighbours(start, goal, sizes, even)
    ticket = count()  # breaks ties, so that layouts are never compared
    queue: list[tuple[_Cost, int, _Layout, _Path]] = [(_FREE, next(ticket), start, ())]
    best = {start: _FREE}
    while queue:
        cost, _, layout, path = heapq.heappop(queue)
        if layout == goal:
            return tuple(_step(*move, start, sizes) for move in path)
        if cost > best[layout]:
            continue
        for collective, after in neighbours.of(layout):
            sent, back = _bytes(collective, layout, after, start, sizes)
            total = (cost[0] + sent, cost[1] + back, cost[2] + 1)
            if after not in best or total < best[after]:
                best[after] = total
                move = (collective, layout, after)
                heapq.heappush(queue, (total, next(ticket), after, (*path, move)))
    raise AssertionError(f"no path from {src!r} to {dst!r}")  # gathering and slicing is one


def _layout(spec: P, axes: frozenset[str], num_dims: int) -> _Layout:
    dims = dict(spec.sharded_dims)
    types = {axis: spec.types.get(axis, I) for axis in axes - set(spec.mentioned)}
    return _Layout(tuple(dims.get(dim, ()) for dim in range(num_dims)), frozenset(types.items()))


def _step(
    collective: Collective,
    before: _Layout,
    after: _Layout,
    start: _Layout,
    sizes: Mapping[str, int],
) -> ReshardStep:
    if collective.name == "ppermute":  # the pairs of those that are not taken are never needed
        collective = _permutation(before.sharded_dims, after.sharded_dims, sizes)
    return ReshardStep(collective, *_bytes(collective, before, after, start, sizes))


def _bytes(
    collective: Collective,
    before: _Layout,
    after: _Layout,
    start: _Layout,
    sizes: Mapping[str, int],
) -> tuple[Fraction, Fraction]:
    """Counts the bytes that each rank sends, forward and backward."""
    num_shards = _num_shards(start.sharded_dims, sizes)
    forward, back = _rates(collective.row, prod(sizes[axis] for axis in collective.axes))
    return (
        forward * Fraction(num_shards, _num_shards(before.sharded_dims, sizes)),
        back * Fraction(num_shards, _num_shards(after.sharded_dims, sizes)),
    )


@lru_cache(maxsize=4096)
def _rates(row: CollectiveRow, num_ranks: int) -> tuple[Fraction, Fraction]:
    return row.sent_by(num_ranks), TABLE[row.transpose].sent_by(num_ranks)


def _num_shards(dims: ShardedDims, sizes: Mapping[str, int]) -> int:
    return prod(sizes[axis] for axes in dims for axis in axes)


@dataclass(frozen=True)
class _Neighbours:
    """Enumerates the collectives that may bring a layout nearer to the goal.

    Axes that already shard the dim that they shard in the goal, from the front of its tuple, stay.
    An axis that shards nothing may only start to shard the dim that it shards in the goal; an axis
    that shards a dim may pass through other dims.
    """

    start: _Layout
    goal: _Layout
    sizes: Mapping[str, int]
    even: tuple[int, ...] | None

    def of(self, layout: _Layout) -> _Moves:
        yield from self._exchanges(layout)
        yield from self._joins(layout)
        yield from self._shardings(layout)
        yield from self._casts(layout)
        yield from self._permutations(layout)

    def _exchanges(self, layout: _Layout) -> _Moves:
        for dim, axes, kept in self._loose_ends(layout):
            for other, own in enumerate(layout.sharded_dims):
                if other != dim and self._divides(other, (*own, *axes)):
                    after = layout.with_dims({dim: kept, other: (*own, *axes)})
                    yield Collective("all_to_all", V, V, axes, dim=other, concat_dim=dim), after

    def _joins(self, layout: _Layout) -> _Moves:
        goal = dict(self.goal.types)
        for dim, axes, kept in self._loose_ends(layout):
            # An axis that is to shard another dim later becomes I first, so that this is a slice.
            for type_ in {goal.get(axis, I) for axis in axes}:
                name = "convert" if type_ == Partial else "all_gather"
                after = layout.with_dims({dim: kept}).with_types(axes, type_)
                yield Collective(name, V, type_, axes, dim=dim), after

    def _shardings(self, layout: _Layout) -> _Moves:
        types = dict(layout.types)
        for dim, (own, goal) in enumerate(
            zip(layout.sharded_dims, self.goal.sharded_dims, strict=True)
        ):
            if goal[: len(own)] != own:
                continue
            for end in range(len(own) + 1, len(goal) + 1):
                axes = goal[len(own) : end]
                axis_types = {types.get(axis) for axis in axes}
                type_ = axis_types.pop()
                if axis_types or type_ is None:
                    break
                name = "reduce_scatter" if type_ == Partial else "convert"
                after = layout.with_dims({dim: (*own, *axes)}).with_types(axes, None)
                yield Collective(name, type_, V, axes, dim=dim), after

    def _casts(self, layout: _Layout) -> _Moves:
        goal = dict(self.goal.types)
        for type_, target in permutations((Partial, I, R), 2):
            name = "all_reduce" if type_ == Partial else "convert"
            axes = [axis for axis in layout.axes_of_type(type_) if goal.get(axis, I) == target]
            if type_ == Partial and (axes or target == I):
                # One sum over all of them, even where some become another type in the end.
                axes = [axis for axis in layout.axes_of_type(type_) if goal.get(axis) != type_]
            for chosen in _subsets(axes):
                yield Collective(name, type_, target, chosen), layout.with_types(chosen, target)

    def _permutations(self, layout: _Layout) -> _Moves:
        """Moves the same shards to other ranks: other orders of the sharding axes."""
        flat = [axis for axes in layout.sharded_dims for axis in axes]
        lengths = [len(axes) for axes in layout.sharded_dims]
        orders = {_regroup(order, lengths) for order in permutations(flat)}
        if sorted(flat) == sorted(axis for axes in self.goal.sharded_dims for axis in axes):
            orders.add(self.goal.sharded_dims)
        for dims in orders - {layout.sharded_dims}:
            same = all(
                _num_shards((a,), self.sizes) == _num_shards((b,), self.sizes)
                for a, b in zip(layout.sharded_dims, dims, strict=True)
            )
            if same and self._keeps_fronts(layout, dims):
                yield Collective("ppermute", V, V, tuple(flat)), _Layout(dims, layout.types)

    def _loose_ends(
        self, layout: _Layout
    ) -> Iterator[tuple[int, tuple[str, ...], tuple[str, ...]]]:
        """Yields for each dim the trailing axes that may leave it, and the axes that stay."""
        for dim, axes in enumerate(layout.sharded_dims):
            for at in range(self._front(dim, axes), len(axes)):
                yield dim, axes[at:], axes[:at]

    def _front(self, dim: int, axes: tuple[str, ...]) -> int:
        """Counts the leading axes that are in the order of the target."""
        return len(_common_front(axes, self.goal.sharded_dims[dim]))

    def _keeps_fronts(self, layout: _Layout, dims: ShardedDims) -> bool:
        fronts = [axes[: self._front(dim, axes)] for dim, axes in enumerate(layout.sharded_dims)]
        return all(axes[: len(front)] == front for front, axes in zip(fronts, dims, strict=True))

    def _divides(self, dim: int, axes: tuple[str, ...]) -> bool:
        num = _num_shards((axes,), self.sizes)
        if self.even is not None:
            return self.even[dim] % num == 0
        known = (self.start.sharded_dims[dim], self.goal.sharded_dims[dim])
        return any(_num_shards((axes,), self.sizes) % num == 0 for axes in known)


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for length in range(1, len(axes) + 1):
        yield from combinations(axes, length)


def _regroup(flat: Sequence[str], lengths: Sequence[int]) -> ShardedDims:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return tuple(tuple(flat[end - length : end]) for end, length in zip(ends, lengths, strict=True))


def _common_front(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return a[:same]


def _permutation(before: ShardedDims, after: ShardedDims, sizes: Mapping[str, int]) -> Collective:
    """Sends each shard from the rank that has it before to the rank that has it after."""
    fronts = [len(_common_front(a, b)) for a, b in zip(before, after, strict=True)]
    old, new = (
        [axes[front:] for axes, front in zip(dims, fronts, strict=True)] for dims in (before, after)
    )
    axes = tuple(axis for group in old for axis in group)
    sources: dict[tuple[int, ...], int] = {}
    targets: dict[tuple[int, ...], int] = {}
    for rank, coordinates in enumerate(product(*(range(sizes[axis]) for axis in axes))):
        at = dict(zip(axes, coordinates, strict=True))
        sources[_block(old, at, sizes)] = rank
        targets[_block(new, at, sizes)] = rank
    pairs = sorted((sources[block], rank) for block, rank in targets.items())
    return Collective("ppermute", V, V, axes, perm=tuple(pairs))


def _block(
    dims: Sequence[tuple[str, ...]], at: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the index of the shard, along every dim, of the rank at these coordinates."""
    block = []
    for axes in dims:
        index = 0
        for axis in axes:
            index = index * sizes[axis] + at[axis]
        block.append(index)
    return tuple(block)
