"""FSDP: parameters sharded over a data axis, and gathered where they are used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from shardmap_torch.checkpoint import checkpoint
from shardmap_torch.core.functorch import base_of, can_receive_gradient
from shardmap_torch.core.tree import Placed, broadcast_prefix, flatten, unflatten
from shardmap_torch.errors import LayerError, listing
from shardmap_torch.nn.arguments import axes_of, to_replicate
from shardmap_torch.nn.region import PerRank, Types
from shardmap_torch.ops import all_gather
from shardmap_torch.ops.arguments import finest
from shardmap_torch.ops.gather import gather_starter
from shardmap_torch.spec import Entry, P
from shardmap_torch.types import R

X = TypeVar("X")
Y = TypeVar("Y")


def fsdp_gather(params: X, specs: Any, axis: str) -> X:
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
        specs: a pytree prefix of `params` with a `P` for each: the specs by which they entered. In
            an entry of several axes `axis` must come last, as in ("tp", "fsdp").
        axis: the data axis.

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
        ...     params = fsdp_gather(params, specs, "dp")
        ...     return x @ params["w"] + params["b"]
        >>> layer({"w": torch.eye(2), "b": torch.ones(2)}, torch.zeros(2, 2))
        tensor([[1., 1.],
                [1., 1.]])
    """
    if isinstance(specs, str):
        raise LayerError("fsdp_gather takes the axis last: fsdp_gather(params, specs, axis).")
    result: X = _gather_planned(_plan(params, axis, specs), axis)
    return result


def fsdp_layer(function: Callable[..., Y], params: Any, *args: Any, specs: Any, axis: str) -> Y:
    """Calls `function(gathered params, *args)`, and saves only shards and arguments for backward.

    The backward gathers the parameters again and recomputes the layer: between forward and backward
    neither gathered parameters nor intermediate values are in memory.

    Shape and types: as `function`. Backward: one all-gather and one reduce-scatter of the
    parameters, and what `function` sends. Sends one all-gather and what `function` sends forward.

    Args:
        function: of gathered parameters and `args`.
        params: a pytree of shards.
        *args: of the function.
        specs: as in `fsdp_gather`.
        axis: as in `fsdp_gather`.

    Raises:
        LayerError: as `fsdp_gather`.

    Source: `torch.distributed.fsdp.fully_shard` with `reshard_after_forward`, together with
    activation checkpointing.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp"))
        ... def layer(w, x):
        ...     return fsdp_layer(lambda w, x: x @ w, w, x, specs=P("dp"), axis="dp")
        >>> layer(torch.eye(2), torch.ones(2, 2))
        tensor([[1., 1.],
                [1., 1.]])
    """

    def run(shards: Any, *args: Any) -> Y:
        return function(fsdp_gather(shards, specs, axis), *args)

    return checkpoint(run, params, *args)


def fsdp_layers(
    function: Callable[..., Tensor],
    layers: Sequence[Any],
    x: Tensor,
    *args: Any,
    specs: Any,
    axis: str,
) -> Tensor:
    """Calls `x = function(gathered params, x, *args)` for each layer; gathers the next one early.

    Each layer is an `fsdp_layer`. On processes the gather of layer i + 1 is under way while layer i
    computes, and in the backward that of layer i - 1 while layer i is recomputed and pulled back;
    each reduce-scatter of gradients is waited for. The gathered parameters of two layers are in
    memory at a time. Numbers, types and messages are those of `fsdp_layer`; on simulated ranks,
    under torch.compile and under vmap each gather runs where it is needed.

    Shape and types: as `function`, whose result is the next layer's `x`. Backward: one all-gather
    and one reduce-scatter of each layer's parameters, and what `function` sends. Sends one
    all-gather a layer and what `function` sends forward.

    Args:
        function: of a layer's gathered parameters, `x` and `args`.
        layers: a pytree of shards for each layer.
        x: the input of the first layer.
        *args: of every layer, as positions.
        specs: of one layer, as in `fsdp_gather`.
        axis: as in `fsdp_gather`.

    Raises:
        LayerError: as `fsdp_gather`.

    Source: Zhao et al. 2023, "PyTorch FSDP", section 3.3.2, forward and backward prefetching.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P("dp"), P("dp")), out_specs=P("dp"))
        ... def model(layers, x):
        ...     return fsdp_layers(lambda w, x: x @ w, layers, x, specs=P("dp"), axis="dp")
        >>> model([2 * torch.eye(2), torch.eye(2)], torch.ones(2, 2))
        tensor([[2., 2.],
                [2., 2.]])
    """
    early = _Early(layers, axis, specs)

    def run(shards: Any, index: int, x: Tensor, *args: Any) -> Tensor:
        return function(early.gather(shards, index), x, *args)

    for index, shards in enumerate(layers):
        early.note(index, (shards, x, args))
        x = checkpoint(run, shards, index, x, *args)
    return x


class _Early:
    """Gathers layers one after another, the next one while the last one is used.

    A layer runs first in the order of the layers, and is recomputed in the opposite order. Layers
    that no gradient reaches are not recomputed.
    """

    def __init__(self, layers: Sequence[Any], axis: str, specs: Any) -> None:
        self._layers, self._axis, self._specs = layers, axis, specs
        self._recomputed: dict[int, bool] = {}
        self._started: tuple[int, Any, list[Gather | None]] | None = None
        self._has_run: set[int] = set()

    def note(self, index: int, operands: Any) -> None:
        """Notes whether a gradient reaches a layer's operands."""
        tensors = [leaf for leaf in flatten(operands)[0] if isinstance(leaf, Tensor)]
        self._recomputed[index] = any(map(can_receive_gradient, tensors))

    def gather(self, shards: Any, index: int) -> Any:
        """Returns gathered parameters, and starts to gather those that are needed next."""
        plan = _plan(shards, self._axis, self._specs)
        params = _gather_planned(plan, self._axis, self._take(index, plan))
        is_first = index not in self._has_run
        self._has_run.add(index)
        following = index + 1 if is_first else index - 1
        if following < len(self._layers) if is_first else self._recomputed.get(following, False):
            self._start(following)
        return params

    def _start(self, index: int) -> None:
        start = gather_starter(self._axis)
        if start is None:
            return
        with torch.no_grad():
            plan = _plan(self._layers[index], self._axis, self._specs)
            gathers = [start(plan.buffer(group)) for group in plan.groups]
        self._started = index, plan.state(), gathers

    def _take(self, index: int, plan: "_Plan") -> Sequence["Gather | None"]:
        """Returns the gathers of this layer that are under way, if they are of these shards."""
        started, self._started = self._started, None
        if started is None or started[:2] != (index, plan.state()):
            return [None] * len(plan.groups)
        return started[2]


Gather: TypeAlias = Callable[[Tensor], Tensor]
"""A gather that is under way; see `gather_starter`."""


@dataclass
class _Plan:
    """The leaves of some parameters, and which of them are gathered together.

    Attributes:
        leaves: all of them; those that are gathered are replaced.
        structure: of the pytree.
        dims: the dim of each that the axis shards, or None.
        groups: positions of those that share a buffer.
    """

    leaves: list[Any]
    structure: Any
    dims: list[int | None]
    groups: list[list[int]]

    def own_dims(self, group: Sequence[int]) -> list[int]:
        """Returns the dims of the leaves of a group."""
        return [dim for i in group if (dim := self.dims[i]) is not None]

    def buffer(self, group: Sequence[int]) -> Tensor:
        """Copies the shards of a group into one buffer."""
        return flat_buffer([self.leaves[i] for i in group])

    def state(self) -> list[tuple[int, int]]:
        """Identifies the shards' values: their memory, and how often it was written."""
        shards = [base_of(self.leaves[i]) for group in self.groups for i in group]
        return [(shard.data_ptr(), shard._version) for shard in shards]


def _plan(params: Any, axis: str, specs: Any) -> _Plan:
    """Groups parameters by buffers.

    In one buffer with a leaf that varies over another axis, an equal leaf would become varying.
    """
    leaves, structure = flatten(params)
    placed = _placed(params, axis, specs)
    dims = [_dim_of(leaf.spec, axis) for leaf in placed]
    groups: dict[Any, list[int]] = {}
    for i, (leaf, each) in enumerate(zip(leaves, placed, strict=True)):
        if dims[i] is not None:
            groups.setdefault((leaf.dtype, frozenset(each.spec.mentioned)), []).append(i)
    return _Plan(leaves, structure, dims, list(groups.values()))


def _gather_planned(plan: _Plan, axis: str, early: Sequence[Gather | None] = ()) -> Any:
    """Gathers each group, or waits for its gather, and converts leaves that are not sharded."""
    leaves = plan.leaves
    gathers = early or [None] * len(plan.groups)
    for group, gather in zip(plan.groups, gathers, strict=True):
        region = gathered_shards(axis, plan.own_dims(group), gather)
        for i, leaf in zip(group, region(*(leaves[i] for i in group)), strict=True):
            leaves[i] = leaf
    kept = [i for i, dim in enumerate(plan.dims) if dim is None]
    converted = to_replicate([leaves[i] for i in kept], axis) if kept else []
    for i, leaf in zip(kept, converted, strict=True):
        leaves[i] = leaf
    return unflatten(plan.structure, leaves)


def flat_buffer(shards: Sequence[Tensor]) -> Tensor:
    """Copies shards of one dtype into one buffer."""
    return torch.cat([shard.flatten() for shard in shards])


def gathered_shards(axis: str, dims: Sequence[int], early: Gather | None = None) -> PerRank:
    """Makes the gather of shards of one dtype, each along its dim, in one flat buffer.

    With `early` it waits for the gather of that buffer instead.
    """
    gather = early or partial(all_gather, axis=axis, tiled=False, dst=R)

    def gather_in_one_buffer(*shards: Tensor) -> tuple[Tensor, ...]:
        rows = gather(flat_buffer(shards))  # [n, elements of a rank]
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
        others = tuple(name for name in axes_of(entries[dim] or ()) if name not in own)
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
        if any(axis in names and names[-1] != axis for _, names in leaf.spec.sharded_dims):
            problems.append(
                f"{leaf.path}: {leaf.spec!r} shards by {axis!r} from the outside; gathered alone "
                "it must be the last of its entry"
            )
    if problems:
        raise LayerError(listing(f"fsdp_gather over {axis!r}: the specs do not match:", problems))
    return [leaf for leaf in leaves if isinstance(leaf, Placed)]


def _dim_of(spec: P, axis: str) -> int | None:
    """Finds the dim that the axis shards; None where it shards none."""
    return next((dim for dim, names in spec.sharded_dims if axis in names), None)
