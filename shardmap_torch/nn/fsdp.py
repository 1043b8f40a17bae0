"""FSDP: parameters sharded over a data axis, and gathered where they are used."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardmap_torch.checkpoint import checkpoint
from shardmap_torch.core.tree import Placed, broadcast_prefix, flatten, unflatten
from shardmap_torch.errors import LayerError, listing
from shardmap_torch.nn.core.arguments import to_replicate
from shardmap_torch.nn.core.region import PerRank, Types, axes_of
from shardmap_torch.ops import all_gather
from shardmap_torch.ops.arguments import finest
from shardmap_torch.spec import Entry, P
from shardmap_torch.types import R

X = TypeVar("X")
Y = TypeVar("Y")


def fsdp_gather(params: X, axis: str, specs: Any) -> X:
    """Gathers the shards of parameters over a data axis, in flat buffers.

    Issues one all-gather for each dtype and set of other axes that shard them. Gradients are
    reduce-scattered in the same buffers: each rank of `axis` has used the parameters on its own
    shard of the batch.
    Parameters that `axis` does not shard are converted to R, so that their gradients are summed.

    Shape: each leaf gets back the dimension that `axis` divides. Types: sharded over `axis` (S(i))
    becomes R, I becomes R; over other axes nothing changes. Backward: one reduce-scatter, and an
    all-reduce for each leaf that `axis` does not shard. Sends (n-1) * the bytes of the shards over
    n ranks forward, and as much backward.

    Args:
        params: a pytree of shards, as of one layer.
        axis: the data axis.
        specs: a pytree prefix of `params` with a `P` for each: the specs by which they entered. In
            an entry of several axes `axis` must come last, as in ("tp", "fsdp").

    Raises:
        LayerError: a leaf without a spec, or one in whose entry `axis` is not the last.
        CollectiveError: outside a body, or an unknown axis.

    Source: Rajbhandari et al. 2020, "ZeRO" (stage 3); Zhao et al. 2023, "PyTorch FSDP".

    Example:
        >>> from shardmap_torch import P, all_reduce, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> specs = {"w": P("dp"), "b": P()}
        >>> @shard_map(mesh=mesh, in_specs=(specs, P("dp")), out_specs=P("dp"))
        ... def layer(params, x):
        ...     params = fsdp_gather(params, "dp", specs)
        ...     return x @ params["w"] + params["b"]
        >>> layer({"w": torch.eye(2), "b": torch.ones(2)}, torch.zeros(2, 2))
        tensor([[1., 1.],
                [1., 1.]])
    """
    leaves, structure = flatten(params)
    placed = _placed(params, axis, specs)
    dims = [_dim_of(leaf.spec, axis) for leaf in placed]
    # In one buffer with a leaf that varies over another axis, an equal leaf would become varying.
    keys = [
        (leaf.dtype, frozenset(p.spec.mentioned)) for leaf, p in zip(leaves, placed, strict=True)
    ]
    for key in dict.fromkeys(keys):
        group = [i for i in range(len(leaves)) if keys[i] == key and dims[i] is not None]
        own_dims = [dim for i in group if (dim := dims[i]) is not None]
        gathered = gathered_shards(axis, own_dims)(*(leaves[i] for i in group)) if group else ()
        for i, leaf in zip(group, gathered, strict=True):
            leaves[i] = leaf
    kept = [i for i, dim in enumerate(dims) if dim is None]
    converted = to_replicate([leaves[i] for i in kept], axis) if kept else []
    for i, leaf in zip(kept, converted, strict=True):
        leaves[i] = leaf
    result: X = unflatten(structure, leaves)
    return result


def fsdp_layer(function: Callable[..., Y], params: Any, *args: Any, axis: str, specs: Any) -> Y:
    """Calls `function(gathered params, *args)`, and saves only shards and arguments for backward.

    The backward gathers the parameters again and recomputes the layer: between forward and backward
    neither gathered parameters nor intermediate values are in memory.

    Shape and types: as `function`. Backward: one all-gather and one reduce-scatter of the
    parameters, and what `function` sends. Sends one all-gather and what `function` sends forward.

    Args:
        function: of gathered parameters and `args`.
        params: a pytree of shards.
        *args: of the function.
        axis: as in `fsdp_gather`.
        specs: as in `fsdp_gather`.

    Raises:
        LayerError: as `fsdp_gather`.

    Source: `torch.distributed.fsdp.fully_shard` with `reshard_after_forward`, together with
    activation checkpointing.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp"))
        ... def layer(w, x):
        ...     return fsdp_layer(lambda w, x: x @ w, w, x, axis="dp", specs=P("dp"))
        >>> layer(torch.eye(2), torch.ones(2, 2))
        tensor([[1., 1.],
                [1., 1.]])
    """

    def run(shards: Any, *args: Any) -> Y:
        return function(fsdp_gather(shards, axis, specs), *args)

    return checkpoint(run, params, *args)


def gathered_shards(axis: str, dims: Sequence[int]) -> PerRank:
    """Makes the gather of shards of one dtype, each along its dim, in one flat buffer."""

    def gather_in_one_buffer(*shards: Tensor) -> tuple[Tensor, ...]:
        buffer = torch.cat([shard.flatten() for shard in shards])
        rows = all_gather(buffer, axis, tiled=False, dst=R)  # [n, elements of a rank]
        parts = rows.split([shard.numel() for shard in shards], 1)
        return tuple(
            part.unflatten(1, shard.shape).movedim(0, dim).flatten(dim, dim + 1)
            if shard.ndim
            else part
            for part, shard, dim in zip(parts, shards, dims, strict=True)
        )

    return PerRank(gather_in_one_buffer, partial(_gathered_types, axis=axis, dims=dims))


def _gathered_types(
    layouts: Sequence[P], ranks: Sequence[int], axis: str, dims: Sequence[int]
) -> Types:
    """Computes the types of the gather: each layout with `axis` last in its entry, and without."""
    own = finest((axis,))
    ins, outs = [], []
    for layout, ndim, dim in zip(layouts, ranks, dims, strict=True):
        entries: list[Entry] = [*layout.entries, *[None] * (ndim - len(layout.entries))]
        others = tuple(each for each in axes_of(entries[dim] or ()) if each not in own)
        outs.append(P(*entries[:dim], others or None, *entries[dim + 1 :]))
        ins.append(P(*entries[:dim], (*others, *own), *entries[dim + 1 :]))
    return tuple(ins), tuple(outs) if len(outs) > 1 else (outs[0],)


def _placed(params: Any, axis: str, specs: Any) -> list[Placed[P]]:
    """Matches each leaf with its spec, in which the axis must be last in its entry."""
    leaves = list(broadcast_prefix(specs, params, "params", lambda leaf: isinstance(leaf, P)))
    problems = []
    for leaf in leaves:
        if not isinstance(leaf, Placed):
            problems.append(str(leaf))
            continue
        axes = _by_dim(leaf.spec).values()
        if any(axis in names and names[-1] != axis for names in axes):
            problems.append(
                f"{leaf.path}: {leaf.spec!r} shards by {axis!r} from the outside; gathered alone "
                "it must be the last of its entry"
            )
    if problems:
        raise LayerError(listing(f"fsdp_gather over {axis!r}: the specs do not match:", problems))
    return [leaf for leaf in leaves if isinstance(leaf, Placed)]


def _dim_of(spec: P, axis: str) -> int | None:
    """Finds the dim that the axis shards; None where it shards none."""
    return next((dim for dim, names in _by_dim(spec).items() if axis in names), None)


def _by_dim(spec: P) -> Mapping[int, tuple[str, ...]]:
    return {dim: axes_of(entry) for dim, entry in enumerate(spec.entries) if entry is not None}
