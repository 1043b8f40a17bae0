"""ZeRO: optimizer state and update sharded over the ranks that have the same parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch

from shardmap_torch.core.caching import lazy
from shardmap_torch.core.tree import (
    Flat,
    Mismatch,
    Placed,
    Tree,
    broadcast_prefix,
    flatten,
    flatten_like,
    known,
    unflatten,
)
from shardmap_torch.errors import OptimizerError, SpecError, listing, read_names, show
from shardmap_torch.mesh import Mesh, as_mesh
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.optim.buckets import BUCKET_BYTES
from shardmap_torch.optim.norm import clip_by_global_norm
from shardmap_torch.optim.optimizer import Elementwise, Optimizer, State
from shardmap_torch.optim.sync import reshard_params, sync_gradients
from shardmap_torch.spec import P, sharded_by

X = TypeVar("X")


def shard_over(params: Tree, specs: Tree, axis: Axis, mesh: Mesh) -> Tree:
    """Makes specs that shard every parameter over `axis` too, along its largest divisible dim.

    That is the largest dim that divides evenly over the axes that shard it already and `axis`;
    `axis` comes last in its tuple. A leaf without such a dim keeps its spec. The result is for
    ZeRO's shards (`zero`), and for FSDP, whose parameters are sharded so between steps.

    Args:
        params: pytree of the global parameters, or of `ShapeDtype`.
        specs: pytree prefix of their specs.
        axis: the axis or axes to shard over, which no spec mentions.
        mesh: gives the sizes of the axes.

    Returns:
        A pytree like `params` of specs, without the types of `specs`.

    Raises:
        SpecError: specs that do not match the parameters, or mention `axis`.

    Source: `jax.sharding` specs of FSDP as in MaxText; torchtitan's per-parameter sharding (FSDP2).

    Example:
        >>> from shardmap_torch import P, make_mesh
        >>> from shardmap_torch.optim import shard_over
        >>> mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
        >>> params = {"w": torch.ones(8, 4), "v": torch.ones(4, 4), "scale": torch.ones(3)}
        >>> specs = {"w": P(None, "tp"), "v": P("tp"), "scale": P()}
        >>> shard_over(params, specs, "dp", mesh)
        {'w': P('dp', 'tp'), 'v': P('tp', 'dp'), 'scale': P()}
    """
    axes = read_names(axis)
    if axes is None:
        raise SpecError(f"shard_over: {show(axis)} is neither an axis name nor a tuple of them.")
    mesh = as_mesh(mesh)
    matched = list(broadcast_prefix(specs, params, "params", lambda spec: isinstance(spec, P)))
    problems = [str(leaf) for leaf in matched if isinstance(leaf, Mismatch)]
    placed = [leaf for leaf in matched if isinstance(leaf, Placed)]
    for leaf in placed:
        twice = [name for name in axes if name in leaf.spec.mentioned]
        if twice:
            problems.append(f"{leaf.path}: {leaf.spec!r} mentions {', '.join(map(repr, twice))}")
        unknown = [each for each in (*axes, *leaf.spec.mentioned) if each not in mesh.shape]
        if unknown:
            problems.append(f"{leaf.path}: {mesh} has no axis {', '.join(map(repr, unknown))}")
        if not hasattr(leaf.value, "shape"):
            problems.append(f"{leaf.path}: {show(leaf.value)} has no shape")
    if problems:
        raise SpecError(listing(f"shard_over {axis!r}:", problems))
    sharded = [_sharded(leaf.spec, tuple(leaf.value.shape), axes, mesh.shape) for leaf in placed]
    return unflatten(flatten(params)[1], sharded)


def _sharded(spec: P, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Mapping[str, int]) -> P:
    axes_by_dim = dict(spec.sharded_dims)
    num_ranks = prod(sizes[axis] for axis in axes)

    def local(dim: int) -> int:
        return shape[dim] // prod(sizes[axis] for axis in axes_by_dim.get(dim, ()))

    divisible = [dim for dim in range(len(shape)) if local(dim) and local(dim) % num_ranks == 0]
    if not divisible:
        return P(*spec.entries)
    # Of equal dims an unsharded one, then the first.
    best = max(divisible, key=lambda dim: (local(dim), dim not in axes_by_dim, -dim))
    axes_by_dim[best] = (*axes_by_dim.get(best, ()), *axes)
    return sharded_by(axes_by_dim.get(dim, ()) for dim in range(len(shape)))


def zero(
    optimizer: Optimizer,
    specs: Tree,
    shards: Tree,
    axis: Axis,
    *,
    max_norm: float | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    comm_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Makes an optimizer whose state is sharded over `axis`, whose ranks have equal parameters.

    Its `update` takes pending gradients, reduce-scatters them, updates each rank's shard of the
    parameters and all-gathers the new ones: it sends 2(n-1)/n of their bytes, as an all-reduce of
    the gradients does, with 1/n of the state and of the update on each of n ranks. It runs in a
    body. Parameters keep shapes and types; errors are those of `sync_gradients`, `global_norm`.

    `init` is called outside of a body, on global parameters; `specs` gives the specs of the state,
    whose moments have the global shapes of the parameters, so that a checkpoint of it loads on a
    mesh of another size.

    Args:
        optimizer: updates every entry by itself, as `adamw` and `sgd` do.
        specs: pytree prefix of the specs of the parameters.
        shards: the specs of the shards, as `shard_over(params, specs, axis, mesh)` gives them.
        axis: over which gradients are pending; shards are over one or more of these axes.
        max_norm: clips gradients by their global norm, after they are summed.
        bucket_bytes: the largest buffer of gradients, and of shards; see `sync_gradients`.
        comm_dtype: dtype in which gradients are sent and added.

    Source: Rajbhandari et al. 2020 (ZeRO, stages 1 and 2);
    `torch.distributed.optim.ZeroRedundancyOptimizer`; Megatron-LM's distributed optimizer.

    Example:
        >>> from shardmap_torch import I, P, all_reduce, make_mesh, shard_map
        >>> from shardmap_torch.optim import sgd, shard_over, zero
        >>> mesh, params = make_mesh((2,), ("dp",), kind="simulated"), {"w": torch.ones(4)}
        >>> specs = {"w": P()}
        >>> optimizer = zero(sgd(0.1), specs, shard_over(params, specs, "dp", mesh), "dp")
        >>> both = (specs, optimizer.specs(specs))
        >>> @shard_map(mesh=mesh, in_specs=(*both, P("dp")), out_specs=both, check="global")
        ... def step(params, state, x):
        ...     loss = lambda p: all_reduce((x @ p["w"]).sum(), "dp", dst=I)
        ...     return optimizer.update(params, torch.func.grad(loss)(params), state)
        >>> step(params, optimizer.init(params), torch.ones(2, 4))[0]
        {'w': tensor([0.8000, 0.8000, 0.8000, 0.8000])}
    """
    if isinstance(specs, str):
        raise SpecError("zero takes the axis last: zero(optimizer, specs, shards, axis).")
    return _Zero(optimizer, axis, specs, shards, max_norm, bucket_bytes, comm_dtype)


@dataclass(frozen=True)
class _Zero(Optimizer):
    optimizer: Optimizer
    axis: Axis
    own: Tree
    shards: Tree
    max_norm: float | None
    bucket_bytes: int
    comm_dtype: torch.dtype | None

    @lazy
    def _known_specs(self) -> tuple[Tree, Tree]:
        """Those of the parameters and of the shards, compared by identity."""
        return known(self.own), known(self.shards)

    def init(self, params: Tree) -> State:
        return self.optimizer.init(params)

    def specs(self, params: Tree) -> State:
        return self.optimizer.specs(self.shards)

    def update(
        self, params: X, grads: Tree, state: dict[str, Any], *, in_place: bool = False
    ) -> tuple[X, State]:
        if in_place:  # parameters are gathered anew
            raise OptimizerError("zero(...).update has no in_place=: it gathers new parameters.")
        new, state = self._updated(params, grads, state)
        return new, state

    def _updated(self, params: Tree, grads: Tree, state: State) -> tuple[Tree, State]:
        (own, into), structure = self._known_specs, None
        # Trees of those who take them flat, and write into none of them, stay so from here on.
        if isinstance(self.optimizer, Elementwise):
            params = Flat(*flatten(params))
            structure = params.structure
            grads = Flat(*flatten_like(structure, grads))
        shards: Any = sync_gradients(
            grads,
            own,
            self.axis,
            into=into,
            bucket_bytes=self.bucket_bytes,
            comm_dtype=self.comm_dtype,
        )
        if self.max_norm is not None:
            shards, _ = clip_by_global_norm(shards, into, self.max_norm)
        mine = reshard_params("slice", params, own, into)
        mine, state = self.optimizer.update(mine, shards, state)
        full = reshard_params("all_gather", mine, own, into, self.bucket_bytes)
        return full if structure is None else unflatten(structure, full.values), state
