"""FSDP: parameters sharded over a data axis, and gathered where they are used."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardmap_torch.checkpoint import checkpoint
from shardmap_torch.core.caching import memo
from shardmap_torch.core.functorch import base_of, can_receive_gradient
from shardmap_torch.core.tree import Broadcast, flatten, put, unflatten
from shardmap_torch.errors import SpecError, listing
from shardmap_torch.nn.arguments import to_replicate
from shardmap_torch.ops.arguments import finest
from shardmap_torch.optim.buckets import (
    Leaves,
    Stage,
    Transfer,
    begin_gathers,
    match_leaves,
    transfer_all,
)
from shardmap_torch.spec import P

X = TypeVar("X")
Y = TypeVar("Y")


def fsdp_gather(params: X, specs: Any, axis: str) -> X:
    """Gathers the shards of parameters over a data axis, in flat buffers.

    Issues one all-gather for each dtype and set of other axes that shard them. Gradients are
    reduce-scattered in the same buffers: each rank of `axis` has used the parameters on its own
    shard of the batch. Those that `axis` does not shard become R: they are summed.

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
        SpecError: a leaf without a spec, or one in whose entry `axis` is not the last.
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
        raise SpecError("fsdp_gather takes the axis last: fsdp_gather(params, specs, axis).")
    result: X = _gathered(*_plan(params, specs, axis), axis)
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
        SpecError: as `fsdp_gather`.

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
    recompute: bool = True,
) -> Tensor:
    """Calls `x = function(gathered params, x, *args)` for each layer; gathers the next one early.

    Each layer is an `fsdp_layer`; without `recompute` gathered parameters and intermediate values
    are saved for the backward in place of being made again. On processes the gather of layer i + 1
    is under way while layer i computes, and in the backward that of layer i - 1 while layer i is
    recomputed and pulled back; each reduce-scatter of gradients is waited for. The gathered
    parameters of two layers are in memory at a time if they are recomputed. Numbers, types and
    messages are those of `fsdp_layer`; on simulated ranks, under torch.compile and under vmap each
    gather runs where it is needed.

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
        recompute: whether the backward gathers parameters again and runs each layer again.

    Raises:
        SpecError: as `fsdp_gather`.

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
    early = LayerGathers(layers, [specs] * len(layers), axis)

    def run(shards: Any, index: int, x: Tensor, *args: Any) -> Tensor:
        return function(early.gather(shards, index), x, *args)

    for index, shards in enumerate(layers):
        early.note(index, (shards, x, args))
        call = partial(checkpoint, run) if recompute else run
        x = call(shards, index, x, *args)
    return x


class LayerGathers:
    """Gathers layers one after another, the next one while the last one is used.

    A layer runs first in the order of the layers, and is recomputed in the opposite order. Layers
    that no gradient reaches are not recomputed.
    """

    def __init__(self, layers: Sequence[Any], specs: Sequence[Any], axis: str) -> None:
        self._layers, self._specs, self._axis = layers, specs, axis
        self._recomputed: dict[int, bool] = {}
        self._begun: tuple[object, Any] = (None, None)
        self._has_run: set[int] = set()

    def note(self, index: int, operands: Any) -> None:
        """Notes whether a gradient reaches a layer's operands."""
        tensors = [leaf for leaf in flatten(operands)[0] if isinstance(leaf, Tensor)]
        self._recomputed[index] = any(map(can_receive_gradient, tensors))

    def gather(self, shards: Any, index: int) -> Any:
        """Returns gathered parameters, and begins to gather those that are needed next."""
        leaves, stage = _plan(shards, self._specs[index], self._axis)
        (state, begun), self._begun = self._begun, (None, None)
        is_theirs = begun is not None and state == (index, _state(leaves, stage))
        params = _gathered(leaves, stage, self._axis, begun if is_theirs else None)
        is_first = index not in self._has_run
        self._has_run.add(index)
        following = index + 1 if is_first else index - 1
        if following < len(self._layers) if is_first else self._recomputed.get(following, False):
            self._begin(following)
        return params

    def _begin(self, index: int) -> None:
        leaves, stage = _plan(self._layers[index], self._specs[index], self._axis)
        with torch.no_grad():
            begun = begin_gathers(leaves.values, stage, self._axis)
        if begun is not None:
            self._begun = (index, _state(leaves, stage)), begun


def _state(leaves: Leaves, stage: Stage) -> list[tuple[Any, ...]]:
    """Identifies the shards' values: their memory, and how often it was written."""
    pairs = zip(leaves.values, stage.transfers, strict=True)
    shards = [base_of(leaf) for leaf, transfer in pairs if transfer is not None]
    return [(x.untyped_storage()._cdata, x.storage_offset(), x._version) for x in shards]


def _plan(params: Any, specs: Any, axis: str) -> tuple[Leaves, Stage]:
    """Matches parameters with their specs, and those that are sharded with their gathers."""
    head = f"fsdp_gather over {axis!r}: the specs do not match:"
    leaves = match_leaves("params", specs, params, head)
    return leaves, _stage(leaves.match, finest((axis,)), head)


@memo
def _stage(match: Broadcast[P], own: tuple[str, ...], head: str) -> Stage:
    problems, transfers = [], []
    for path, spec in zip(match.paths, match.specs, strict=True):
        entry = next(((dim, names) for dim, names in spec.sharded_dims if {*own} & {*names}), None)
        if entry is not None and entry[1][-len(own) :] != own:
            problems.append(
                f"{path}: {spec!r} shards by {', '.join(map(repr, own))} from the outside; "
                "gathered alone it must be the last of its entry"
            )
        transfers.append(None if entry is None else _transfer(spec, *entry, own))
    if problems:
        raise SpecError(listing(head, problems))
    return Stage(tuple(transfers))


def _transfer(spec: P, dim: int, names: tuple[str, ...], own: tuple[str, ...]) -> Transfer:
    entries = list(spec.entries)
    entries[dim] = names[: -len(own)] or None
    return Transfer("gather", own, dim, P(*spec.entries), P(*entries))


def _gathered(leaves: Leaves, stage: Stage, axis: str, begun: Any = None) -> Any:
    """Gathers the shards, one buffer a group, and converts what is not sharded."""
    values = transfer_all(leaves.values, stage, sys.maxsize, None, begun=begun)
    whole = [at for at, transfer in enumerate(stage.transfers) if transfer is None]
    converted = to_replicate([values[at] for at in whole], axis) if whole else []
    return unflatten(leaves.structure, put(values, whole, converted))
