"""Buckets: collectives of many small leaves run as few large ones, in flat buffers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.queries import call_region
from shardmap_torch.core.caching import lazy, memo
from shardmap_torch.core.storage import spare
from shardmap_torch.core.tree import (
    Broadcast,
    Placed,
    Structure,
    Tree,
    broadcast_prefix,
    broadcast_prefix_all,
    opened,
    rebuilt,
)
from shardmap_torch.errors import SpecError, listing
from shardmap_torch.ops import all_gather, all_reduce, axis_size, convert, reduce_scatter
from shardmap_torch.ops.body import is_checking, mesh_of_body
from shardmap_torch.ops.gather import gather_starter
from shardmap_torch.spec import P, expanded, is_partition
from shardmap_torch.types import I, R, V


@dataclass(frozen=True, eq=False, slots=True)
class Leaves:
    """The tensors of a tree in the order of `flatten`.

    Attributes:
        values: the tensors.
        structure: puts them back into the tree.
        match: their paths, and their specs over the finest axes of the mesh; plans are cached by
            it, since it is one object for all trees alike.
    """

    values: list[Tensor]
    structure: Structure
    match: Broadcast[P]

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each."""
        return self.match.paths

    @property
    def specs(self) -> tuple[P, ...]:
        """The spec of each."""
        return self.match.specs


def match_leaves(what: str, specs: Tree, tree: Tree, head: str) -> Leaves:
    """Matches the leaves of `tree`, named `what` in paths, with a prefix tree of specs.

    `specs` may be `Known`, and `tree` be `Flat`.

    Raises:
        SpecError: the specs do not match, or a leaf is no tensor; `head` begins its message.
    """
    values, structure = opened(tree)
    matched: Broadcast[P] = broadcast_prefix_all(specs, structure, tree, what, is_partition)
    others = [leaf for leaf in values if type(leaf) is not Tensor]
    if matched.mismatches or not all([isinstance(leaf, Tensor) for leaf in others]):
        raise SpecError(listing(head, [*map(str, matched.mismatches), *_others(specs, tree, what)]))
    mesh = mesh_of_body()
    aliases = () if mesh is None else mesh.aliases
    return Leaves(values, structure, _finest(matched, aliases) if aliases else matched)


@memo
def _finest(
    matched: Broadcast[P], aliases: tuple[tuple[str, tuple[str, ...]], ...]
) -> Broadcast[P]:
    specs = tuple([expanded(spec, aliases) for spec in matched.specs])
    return Broadcast(matched.paths, specs, ())


def _others(specs: Tree, tree: Tree, what: str) -> Iterator[str]:
    """Yields the leaves that have a spec and are no tensors."""
    for leaf in broadcast_prefix(rebuilt(specs), rebuilt(tree), what, is_partition):
        if isinstance(leaf, Placed) and not isinstance(leaf.value, Tensor):
            yield f"{leaf.path}: is no tensor but a {type(leaf.value).__name__}"


# A leaf is laid out as a matrix with one row per rank that its rows go to, or one row in all, and
# the matrices of a bucket are concatenated by columns. Under check="global" a bucket is a
# `local_region`: packing is per-rank code, and each leaf has the type and value that its own
# collective would give.

Kind: TypeAlias = Literal["all_reduce", "reduce_scatter", "all_gather", "gather", "slice"]
"""Names of collectives; "gather" is an all_gather whose copies are R, used differently by ranks."""

Begun: TypeAlias = Callable[[Tensor], Tensor] | None
"""A gather of a buffer that is under way; see `gather_starter`."""

BUCKET_BYTES: Final = 25 * 2**20
"""Size of a bucket, that of DistributedDataParallel: enough for a network's bandwidth."""


@dataclass(frozen=True)
class Transfer:
    """The collective that takes one leaf from `src` to `dst`.

    Attributes:
        name: name of the collective; "slice" communicates nothing.
        axes: the axes that it runs over.
        dim: the dim that is gathered, scattered or sliced; None for all_reduce.
        src: spec of the leaf before.
        dst: spec of the leaf after.
    """

    name: Kind
    axes: tuple[str, ...]
    dim: int | None
    src: P
    dst: P

    def run(self, x: Tensor, comm_dtype: torch.dtype | None) -> Tensor:
        """Transfers one leaf by itself."""
        return _COLLECTIVES[self.name](x, self.axes, self.dim, comm_dtype)


_One: TypeAlias = Callable[[Tensor, tuple[str, ...], int | None, torch.dtype | None], Tensor]

_COLLECTIVES: Final[Mapping[Kind, _One]] = {
    "all_reduce": lambda x, axes, _, dtype: all_reduce(x, axes, dst=I, comm_dtype=dtype),
    "reduce_scatter": lambda x, axes, dim, dtype: reduce_scatter(
        x, axes, dim=dim or 0, comm_dtype=dtype
    ),
    "all_gather": lambda x, axes, dim, dtype: all_gather(
        x, axes, dim=dim or 0, dst=I, comm_dtype=dtype
    ),
    "gather": lambda x, axes, dim, dtype: all_gather(
        x, axes, dim=dim or 0, dst=R, comm_dtype=dtype
    ),
    "slice": lambda x, axes, dim, _: convert(x, axes, src=I, dst=V, dim=dim),
}


@dataclass(frozen=True, eq=False)
class Stage:
    """The transfer of each leaf of a tree, None for those that stay; equal by identity."""

    transfers: tuple[Transfer | None, ...]

    @lazy
    def is_empty(self) -> bool:
        """Returns whether no leaf is transferred."""
        return not any(self.transfers)


def transfer_all(
    leaves: Sequence[Tensor],
    stage: Stage,
    bucket_bytes: int,
    comm_dtype: torch.dtype | None,
    lends: bool = False,
    begun: Mapping[tuple[int, ...], Begun] | None = None,
) -> list[Tensor]:
    """Runs the transfer of each leaf that has one, in common buffers where possible.

    Args:
        leaves: all leaves of a tree.
        stage: their transfers.
        bucket_bytes: the largest buffer.
        comm_dtype: dtype in which values are sent.
        lends: whether the caller writes into no result, so that one may be its operand.
        begun: the gathers that `begin_gathers` has begun.
    """
    result = list(leaves)
    if stage.is_empty:
        return result
    for places in _groups_of(stage, leaves):
        under_way = begun.get(places) if begun else None
        group = [each for each in [stage.transfers[at] for at in places] if each is not None]
        values = [leaves[place] for place in places]
        if len(places) > 1:
            move = partial(_move_group, group, bucket_bytes, comm_dtype, lends, under_way)
            moved = _move_in_region(move, group, values)
        else:
            moved = ((under_way or partial(group[0].run, comm_dtype=comm_dtype))(values[0]),)
        for place, value in zip(places, moved, strict=True):
            result[place] = value
    return result


def begin_gathers(
    leaves: Sequence[Tensor], stage: Stage, axis: str
) -> dict[tuple[int, ...], Begun] | None:
    """Begins the gathers of a stage, for results needed later; None where nothing can be."""
    start = None if _is_here((axis,)) else gather_starter(axis)
    if start is None:
        return None
    found: dict[tuple[int, ...], Begun] = {}
    for places in _groups_of(stage, leaves):
        first, *others = [(leaves[at], stage.transfers[at]) for at in places]
        if others or first[1] is None:
            found[places] = start(torch.cat([_front(*x).reshape(-1) for x in (first, *others)]))
        else:  # as `transfer_all` gathers it
            found[places] = start(first[0], first[1].dim, tiled=True)
    return found


def _move_in_region(
    move: Callable[..., tuple[Tensor, ...]], transfers: Sequence[Transfer], leaves: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    # A region does nothing but under the checker.
    if torch.compiler.is_dynamo_compiling() or not is_checking():
        return move(*leaves)
    move.__name__ = f"{transfers[0].name}_buckets"  # shown in reports
    types = tuple(t.src for t in transfers), tuple(t.dst for t in transfers)
    moved: tuple[Tensor, ...] = call_region(move, lambda *_: types, *leaves)
    return moved


def _groups_of(stage: Stage, leaves: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return _groups(stage, tuple([(x.dtype, x.device) for x in leaves]))


@memo
def _groups(
    stage: Stage, layouts: tuple[tuple[torch.dtype, torch.device], ...]
) -> tuple[tuple[int, ...], ...]:
    """Groups the indices of leaves whose values may share a buffer.

    They are transferred over the same axes, have one dtype, and vary over the same axes before and
    after: in one buffer with a leaf that varies, an equal leaf would become varying. Sizes do not
    count, so that the one-device program of the checker has the same groups.
    """
    groups: dict[object, list[int]] = {}
    for place, (layout, transfer) in enumerate(zip(layouts, stage.transfers, strict=True)):
        if transfer is None:
            continue
        key: object = place
        if transfer.name != "slice":
            src, dst = transfer.src, transfer.dst
            ends = frozenset(src.mentioned), src.partial, frozenset(dst.mentioned)
            key = (transfer.name, transfer.axes, ends, *layout)
        groups.setdefault(key, []).append(place)
    return tuple(map(tuple, groups.values()))


def _move_group(
    transfers: Sequence[Transfer],
    bucket_bytes: int,
    comm_dtype: torch.dtype | None,
    lends: bool,
    begun: Begun,
    *leaves: Tensor,
) -> tuple[Tensor, ...]:
    """Moves the leaves of a group, in as many buffers as needed."""
    first = transfers[0]
    if first.name != "gather" and _is_here(
        first.axes
    ):  # nothing is sent, and packing would be copies for that
        if first.name == "all_reduce":
            with spare(*leaves if lends else ()):
                return all_reduce(leaves, first.axes, dst=I, comm_dtype=comm_dtype)
        return tuple([t.run(x, comm_dtype) for t, x in zip(transfers, leaves, strict=True)])
    moved: list[Tensor] = []
    for places in _filled([x.nbytes for x in leaves], bucket_bytes):
        chosen, values = [transfers[place] for place in places], [leaves[place] for place in places]
        if len(places) == 1 and begun is None:
            moved.append(chosen[0].run(values[0], comm_dtype))
        else:
            moved += _move_bucket(chosen, values, comm_dtype, begun)
    return tuple(moved)


def _is_here(axes: tuple[str, ...]) -> bool:
    """Returns whether this process has the values of all ranks of the axes."""
    mesh = mesh_of_body()
    is_simulated = mesh is not None and mesh.kind == "simulated"
    return is_simulated or axis_size(axes) == 1


def _filled(sizes: Sequence[int], capacity: int) -> Iterator[list[int]]:
    """Distributes indices of leaves of these sizes, in order, over buckets."""
    bucket: list[int] = []
    total = 0
    for place, size in enumerate(sizes):
        if bucket and total + size > capacity:
            yield bucket
            bucket, total = [], 0
        bucket.append(place)
        total += size
    yield bucket


def _move_bucket(
    transfers: Sequence[Transfer],
    leaves: Sequence[Tensor],
    comm_dtype: torch.dtype | None,
    begun: Begun,
) -> list[Tensor]:
    """Packs the leaves into one buffer, moves it, and unpacks the results."""
    name, axes = transfers[0].name, transfers[0].axes
    num_before, num_after = (axis_size(axes) if per_rank else 1 for per_rank in _ROWS[name])
    fronts = list(map(_front, leaves, transfers))
    buffer = torch.cat([x.reshape(num_before, -1) for x in fronts], dim=1)
    dim = None if name == "all_reduce" else 0
    with spare(buffer):
        if name == "gather":  # of a flat buffer, as `begin_gathers` sends it
            gather = begun or partial(all_gather, axis=axes, tiled=False, dst=R)
            moved = gather(buffer.squeeze(0))
        else:
            moved = _COLLECTIVES[name](buffer, axes, dim, comm_dtype)
    widths = [x.numel() // num_before for x in fronts]
    parts = zip(moved.split(widths, dim=1), fronts, [t.dim or 0 for t in transfers], strict=True)
    if name == "all_reduce":
        return [part.reshape(x.shape) for part, x, _ in parts]
    if name == "reduce_scatter":
        own = [(part.reshape(len(x) // num_before, *x.shape[1:]), at) for part, x, at in parts]
        return [part.movedim(0, at) if at else part for part, at in own]
    return [_joined(part, num_after, x.shape, at) for part, x, at in parts]


def _joined(rows: Tensor, num_ranks: int, shape: torch.Size, dim: int) -> Tensor:
    """Concatenates shards, a flat row each, whose dim `dim` is in front, along it; copies once.

    The result is contiguous, as parameters are that nothing has sharded: a body may `view` them.
    """
    if not dim:
        return rows.reshape(num_ranks * shape[0], *shape[1:])
    shards = rows.view(num_ranks, *shape).movedim((0, 1), (dim, dim + 1))
    return shards.flatten(dim, dim + 1).contiguous()


def _front(x: Tensor, transfer: Transfer | None) -> Tensor:
    """Brings the dim of a transfer to the front."""
    return x.movedim(transfer.dim, 0) if transfer is not None and transfer.dim else x


_ROWS: Final[Mapping[Kind, tuple[bool, bool]]] = {
    "all_reduce": (False, False),
    "reduce_scatter": (True, False),
    "all_gather": (False, True),
    "gather": (False, True),
}
"""For each kind of bucket: whether a buffer has a row per rank, before and after."""
