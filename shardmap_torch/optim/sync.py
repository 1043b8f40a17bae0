"""Moves trees in flat buckets: sums gradients over ranks, shards and gathers parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from shardmap_torch.checker.queries import means_over, propose_means, types_now
from shardmap_torch.core.caching import memo
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.tree import Broadcast, Flat, Tree, closed
from shardmap_torch.errors import ShardTypeError, SpecError, listing, read_names, show
from shardmap_torch.ops.arguments import Axis, finest
from shardmap_torch.ops.body import is_checking
from shardmap_torch.optim.buckets import (
    BUCKET_BYTES,
    Kind,
    Leaves,
    Stage,
    Transfer,
    match_leaves,
    transfer_all,
)
from shardmap_torch.spec import P
from shardmap_torch.types import I, K, R

X = TypeVar("X")


def sync_gradients(
    grads: X,
    specs: Tree,
    axis: Axis = (),
    *,
    into: Tree | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    comm_dtype: torch.dtype | None = None,
) -> X:
    """Sums the pending gradients of all leaves over the ranks, in flat buckets.

    A gradient taken in the body is one rank's addend, if every rank of an axis uses the parameter
    on different data. Each leaf is summed over those of `axis` that its spec neither
    mentions nor names in `invariant=`, and over those that it names in `replicate=`, as the scales
    of norms under sequence parallelism do over "tp". Leaves that are summed over the same axes and
    sharded over the same ones share buckets.

    With `into`, the specs of ZeRO's shards as `shard_over` returns them, gradients are
    reduce-scattered: a rank receives the sum of its own shard only; the other sums are all-reduced.

    Shape: unchanged, or that of the shard. Types: Partial over those axes becomes I, or S(dim).
    Sends 2(n-1)/n of the bytes of the leaves per rank over n ranks, or (n-1)/n with `into`;
    ceil(bytes / bucket_bytes) collectives for each distinct set of axes.

    Args:
        grads: pytree of gradients.
        specs: pytree prefix of the specs of the parameters.
        axis: the axes over which gradients are pending, such as "dp" or ("dp", "cp").
        into: pytree prefix of the specs of the shards.
        bucket_bytes: the largest buffer; one leaf may be larger.
        comm_dtype: dtype in which gradients are sent and added.

    Raises:
        SpecError: specs that do not match the gradients, or each other.
        ShardTypeError: in a checked call, a gradient that is not pending over one of these axes.

    Source: `torch.nn.parallel.DistributedDataParallel`; Megatron-LM's
    `finalize_model_grads`; Rajbhandari et al. 2020 (ZeRO).

    Example:
        >>> from shardmap_torch import I, P, all_reduce, make_mesh, shard_map
        >>> from shardmap_torch.optim import sync_gradients
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check="global")
        ... def grads(params, x):
        ...     loss = lambda p: all_reduce((x * p["w"] + p["b"]).sum(), "dp", dst=I)
        ...     return sync_gradients(torch.func.grad(loss)(params), P(), "dp")
        >>> grads({"w": torch.ones(()), "b": torch.ones(())}, torch.arange(4.0))
        {'w': tensor(6.), 'b': tensor(4.)}
    """
    names = read_names(axis)
    if names is None:
        raise SpecError(
            f"sync_gradients: {show(axis)} is neither an axis name nor a tuple of them."
        )
    axes = finest(names)
    leaves = _leaves("sync_gradients", "grads", specs, grads)
    targets = leaves if into is None else _leaves("sync_gradients", "grads", into, grads)
    plan = _plan_sums(leaves.match, targets.match, axes)
    _check_types(leaves, plan.pending)
    moved: X = _move(grads, leaves, (plan.scatters, plan.sums), bucket_bytes, comm_dtype)
    return moved


def reshard_params(
    name: Literal["slice", "all_gather"],
    params: X,
    specs: Tree,
    shards: Tree,
    bucket_bytes: int = BUCKET_BYTES,
) -> X:
    """Slices each rank's shards out of parameters, or gathers them, in flat buckets.

    Args:
        name: "slice" goes from parameters to shards, "all_gather" back.
        params: pytree of parameters, or of their shards.
        specs: pytree prefix of the specs of the parameters.
        shards: pytree prefix of the specs of the shards.
        bucket_bytes: the largest buffer, of shards; one leaf may be larger.

    Raises:
        SpecError: specs that do not match the parameters, or each other.
    """
    leaves = _leaves("zero", "params", specs, params)
    targets = _leaves("zero", "params", shards, params)
    stage = _plan_reshard(name, leaves.match, targets.match)
    moved: X = _move(params, leaves, (stage,), bucket_bytes, None)
    return moved


@memo
def _plan_reshard(name: Kind, own: Broadcast[P], shards: Broadcast[P]) -> Stage:
    _check_added("zero", own.paths, own.specs, shards.specs)
    return Stage(tuple(map(partial(_resharded, name), own.specs, shards.specs)))


def _resharded(name: Kind, spec: P, shard: P) -> Transfer | None:
    extra = added(spec, shard)
    if extra is None:
        return None
    ends = _bare(spec), _bare(shard)
    src, dst = ends if name == "slice" else reversed(ends)
    return Transfer(name, extra[1], extra[0], src, dst)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Plan of a sum of gradients: the axes over which each is pending, and its transfers."""

    pending: tuple[tuple[str, ...], ...]
    scatters: Stage
    sums: Stage


@memo
def _plan_sums(own: Broadcast[P], into: Broadcast[P], axes: tuple[str, ...]) -> _Sums:
    paths, specs, shards = own.paths, own.specs, into.specs
    _check_added("sync_gradients", paths, specs, shards)
    pending = tuple([_pending(spec, axes) for spec in specs])
    _check_scattered(paths, specs, shards, pending)
    return _Sums(
        pending,
        Stage(tuple(map(_scatter, specs, shards, pending))),
        Stage(tuple(map(_sum, specs, shards, pending))),
    )


def _move(
    tree: Tree,
    leaves: Leaves,
    stages: Sequence[Stage],
    bucket_bytes: int,
    comm_dtype: torch.dtype | None,
) -> Any:
    values, lends = leaves.values, type(tree) is Flat
    for stage in stages:
        values = transfer_all(values, stage, bucket_bytes, comm_dtype, lends)
    return closed(tree, leaves.structure, values)


def _leaves(name: str, what: str, specs: Tree, tree: Tree) -> Leaves:
    return match_leaves(what, specs, tree, f"{name}: the specs do not match the {what}:")


@memo
def added(spec: P, shard: P) -> tuple[int, tuple[str, ...]] | None:
    """Returns the dim that `shard` shards over more axes than `spec`, and these axes.

    None if both shard alike.

    Raises:
        ValueError: they differ in more than additional axes at the end of one dim.

    Example:
        >>> added(P("tp"), P(("tp", "dp")))
        (0, ('dp',))
    """
    one, other = dict(spec.sharded_dims), dict(shard.sharded_dims)
    dims = [dim for dim in sorted(one.keys() | other.keys()) if one.get(dim) != other.get(dim)]
    if not dims:
        return None
    own, further = one.get(dims[0], ()), other.get(dims[0], ())
    if len(dims) > 1 or further[: len(own)] != own:
        raise ValueError("they may differ in axes at the end of one dim only")
    return dims[0], further[len(own) :]


def _check_added(name: str, paths: Sequence[str], specs: Sequence[P], shards: Sequence[P]) -> None:
    problems = []
    for path, spec, shard in zip(paths, specs, shards, strict=True):
        try:
            added(spec, shard)
        except ValueError as error:
            problems.append(f"{path}: {spec!r} and {shard!r}: {error}")
    if problems:
        raise SpecError(listing(f"{name}: shards must be shards of the parameters:", problems))


def _check_scattered(
    paths: Sequence[str],
    specs: Sequence[P],
    shards: Sequence[P],
    pending: Sequence[tuple[str, ...]],
) -> None:
    """Requires that a scattered leaf is a sum: else each rank would get its own addend only."""
    problems = []
    for path, spec, shard, axes in zip(paths, specs, shards, pending, strict=True):
        extra = added(spec, shard)
        missing = [axis for axis in extra[1] if axis not in axes] if extra else []
        if missing:
            names = ", ".join(map(repr, missing))
            problems.append(f"{path}: is scattered over {names}, which axis= does not name")
    if problems:
        raise SpecError(listing("sync_gradients: only pending sums are scattered:", problems))


def _check_types(leaves: Leaves, pending: Sequence[tuple[str, ...]]) -> None:
    """Requires, under the checker, that each leaf is a pending sum over its axes and no others."""
    if not is_checking():
        return
    problems = []
    columns = zip(leaves.paths, leaves.values, leaves.specs, pending, strict=True)
    for path, value, spec, axes in columns:
        types = types_now(value) or {}
        complete = [axis for axis in axes if types.get(axis) in (I, R, K)]
        done = (*axes, *spec.mentioned)
        also_pending = [axis for axis, type_ in types.items() if type_.varies and axis not in done]
        if complete:
            names = ", ".join(map(repr, complete))
            problems.append(
                f"{path} ({spec!r}): equal on all ranks of {names}, complete already; sum it once, "
                f"or, if its layer does, name {names} in invariant= of its spec"
            )
        if also_pending:
            names = ", ".join(map(repr, also_pending))
            problems.append(
                f"{path} ({spec!r}): pending over {names} too; reduce over {names} what its layer "
                "returns, if that lacks it, or name it in axis=, or in replicate= of its spec"
            )
    if problems:
        site = call_site()
        where = f" at {site}" if site is not None else ""
        head = f"sync_gradients{where}: the gradients are not pending over the axes named:"
        raise ShardTypeError(listing(head, problems))
    _check_means(leaves, pending)


def _check_means(leaves: Leaves, pending: Sequence[tuple[str, ...]]) -> None:
    """Requires, under global strictness, that no gradients of each rank's mean are added up."""
    found = [
        (path, value, axis)
        for path, value, axes in zip(leaves.paths, leaves.values, pending, strict=True)
        if (axis := means_over(value, axes)) is not None
    ]
    if not found:
        return
    axis = found[0][2]
    head = f"sync_gradients at {call_site()}: check='global': the loss is each rank's own mean:"
    wrong = f"a sum over {axis!r} would be too large by the number of ranks"
    error = ShardTypeError(
        listing(head, [f"{path}: {wrong}" for path, *_ in found])
        + f"\nFix: return all_reduce(loss, {axis!r}, dst=I, op='mean') from what is differentiated."
    )
    propose_means(error)
    raise error


def _pending(spec: P, axes: tuple[str, ...]) -> tuple[str, ...]:
    others = [a for a in axes if a not in spec.mentioned and a not in spec.invariant]
    return tuple(dict.fromkeys([*others, *sorted(spec.replicate)]))


def _bare(spec: P, partial_: Sequence[str] = ()) -> P:
    """Returns the spec's entries alone, with other partial axes."""
    return P(*spec.entries, partial=partial_)


@memo
def _scatter(spec: P, shard: P, pending: tuple[str, ...]) -> Transfer | None:
    extra = added(spec, shard)
    if extra is None:
        return None
    dim, axes = extra
    rest = [axis for axis in pending if axis not in axes]
    return Transfer("reduce_scatter", axes, dim, _bare(spec, pending), _bare(shard, rest))


@memo
def _sum(spec: P, shard: P, pending: tuple[str, ...]) -> Transfer | None:
    axes = tuple(axis for axis in pending if axis not in shard.mentioned)
    if not axes:
        return None
    return Transfer("all_reduce", axes, None, _bare(shard, axes), _bare(shard))
