"""`device_put`, `from_local` and `full`: place trees of values on a mesh, and gather them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch import Tensor, empty
from torch.distributed.device_mesh import DeviceMesh

from shardmap_torch.boundary.matching import (
    check_inputs,
    crosses,
    in_finest,
    is_spec,
    spec_of,
    unknown_axes,
)
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.hashing import hash_text
from shardmap_torch.core.storage import SENT, of_parts, parts_of
from shardmap_torch.core.tree import (
    Mismatch,
    Placed,
    Tree,
    broadcast_prefix,
    flatten,
    map_leaves,
    unflatten,
)
from shardmap_torch.errors import SpecError, listing, show_shape
from shardmap_torch.mesh import PROCESS_KINDS, Mesh, as_mesh
from shardmap_torch.run.agree import compared as compared
from shardmap_torch.run.agree import control_of as control_of
from shardmap_torch.run.agree import number as number
from shardmap_torch.run.agree import shown_shard as shown_shard
from shardmap_torch.run.runtimes import runtime_of
from shardmap_torch.run.safety.equal_values import Copies
from shardmap_torch.run.safety.equal_values import copies_of as copies_of
from shardmap_torch.spec import P, longer

X = TypeVar("X")

_PLACED: Final = 1 << 20
"""Numbers of a plain tensor that `device_put` compares: of a larger one a sample of as many."""


def device_put(
    tree: X, mesh: Mesh | DeviceMesh | None, specs: Tree, *, as_dtensor: bool = False
) -> X:
    """Places global values on the mesh: each rank keeps its shard.

    On a process-group mesh every rank passes the same values, and sharded ones become DTensors; on
    a simulated mesh the values stay global. On both they move to the mesh's device. Nothing is
    communicated. Gradients are global.

    Args:
        tree: pytree of tensors, or DTensors, which are redistributed.
        mesh: the mesh; None takes that of `use_mesh`.
        specs: pytree prefix of specs.
        as_dtensor: on a process-group mesh, whether leaves that are replicated on every rank become
            DTensors too, instead of staying plain: torch's foreach optimizers and
            `clip_grad_norm_` refuse trees that have both. Gradients are DTensors then as well.

    Raises:
        SpecError: names every leaf that does not match its spec.

    Source: `jax.device_put` with a NamedSharding; `torch.distributed.tensor.distribute_tensor`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, device_put, make_mesh
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> device_put({"x": torch.arange(4)}, mesh, P("dp"))
        {'x': tensor([0, 1, 2, 3])}
    """
    on = as_mesh(mesh)
    moved: X = map_leaves(lambda leaf: _to_device(leaf, on), tree)
    runtime = runtime_of(on)

    def read() -> tuple[Placed[P | None], ...]:
        leaves = list(broadcast_prefix(specs, moved, "tree", is_spec))
        return check_inputs("device_put", on, on.axis_names, leaves, infers=True)

    def put(leaf: Placed[P | None]) -> Tensor:
        return runtime.place(on, spec_of(leaf), leaf.value, as_dtensor)

    def copies(leaves: tuple[Placed[P | None], ...]) -> Copies | None:
        return copies_of({leaf.path: leaf.value for leaf in leaves})

    def run(leaves: tuple[Placed[P | None], ...]) -> X:
        placed = _replace(moved, leaves, put)
        number(flatten(placed)[0])
        return placed

    return compared("device_put", on, read, _described, run, copies)


def from_local(tree: X, mesh: Mesh | DeviceMesh | None, specs: Tree) -> X:
    """Makes global values from the local ones of each process, as after reading its own batch.

    On a process-group mesh a leaf is this rank's shard and becomes a DTensor without communication.
    On a simulated mesh the one process has all values, so they are global already.

    Args:
        tree: pytree of local tensors, of the same shapes on all ranks.
        mesh: the mesh; None takes that of `use_mesh`.
        specs: pytree prefix of specs.

    Raises:
        SpecError: names every leaf whose spec does not match.

    Source: `jax.make_array_from_process_local_data`; `DTensor.from_local`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, from_local, make_mesh
        >>> from_local(torch.arange(4), make_mesh((2,), ("dp",), kind="simulated"), P("dp"))
        tensor([0, 1, 2, 3])
    """
    on = as_mesh(mesh)
    leaves = list(broadcast_prefix(specs, tree, "tree", is_spec))
    if on.kind not in PROCESS_KINDS:
        check_inputs("from_local", on, on.axis_names, leaves, infers=True)
        return tree
    placed, join = _check_local(on, leaves), runtime_of(on).join
    return _replace(tree, placed, lambda leaf: join(on, spec_of(leaf), leaf.value))


def full(tree: X) -> X:
    """Gathers the DTensors of `tree` to plain global tensors on every rank; leaves others alone.

    Sends (n-1) times the local bytes per rank for a value sharded over n ranks.

    Source: `DTensor.full_tensor`; `jax.device_get` without leaving the device.

    Example:
        >>> import torch
        >>> from shardmap_torch import full
        >>> full({"x": torch.ones(2)})
        {'x': tensor([1., 1.])}
    """
    leaves, _ = flatten(tree)
    values: list[Any] = [base_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    shards = list(filter(is_dtensor, values))
    if not shards:
        return tree

    def gather(leaves: list[Any]) -> X:
        gathered: X = map_leaves(_full, tree)
        return gathered

    # A DTensor of a part of the processes is gathered by these alone.
    if any(base.device_mesh.size() < dist.get_world_size() for base in shards):
        return gather(leaves)

    def copies(leaves: list[Any]) -> Copies | None:
        return copies_of({f"DTensor {at}": x for at, x in enumerate(leaves)})

    def describe(leaves: list[Any]) -> list[str]:
        return [f"  {shown_shard(x, at)}" for at, x in enumerate(leaves)]

    return compared("full", None, lambda: shards, describe, gather, copies)


def _full(leaf: Any) -> Any:
    if is_dtensor(leaf):
        is_sum = any([each.is_partial() for each in leaf.placements])
        is_sent = leaf.dtype in SENT or leaf.dtype.is_complex  # which torch takes apart itself
        return leaf.full_tensor() if is_sum or is_sent else _full_by_parts(leaf)
    base = base_of(leaf) if isinstance(leaf, Tensor) else leaf
    if not is_dtensor(base):
        return leaf
    # A transform of torch.func has wrapped it, so that it looks like a plain tensor.
    mesh = as_mesh(base.device_mesh)
    return runtime_of(mesh).gather_shards(mesh, leaf)


def _full_by_parts(leaf: Any) -> Tensor:
    """Gathers entries that gloo does not send, by their parts."""
    from torch.distributed.tensor import DTensor  # here: it takes a part of a second

    parts = parts_of(leaf.to_local())
    shape = (*leaf.shape, parts.shape[-1])
    layout: dict[str, Any] = {"shape": shape, "stride": empty(shape, device="meta").stride()}
    placed: Any = DTensor.from_local(parts, leaf.device_mesh, leaf.placements, **layout)
    return of_parts(placed.full_tensor(), leaf.dtype)


def _described(placed: Iterable[Placed[P | None]]) -> Iterator[str]:
    """Describes what is placed, by lines that are equal where plain values are."""
    for at, leaf in enumerate(filter(crosses, placed)):
        x = base_of(leaf.value)
        what = shown_shard(x, at) if is_dtensor(x) else f"{show_shape(x.dtype, x.shape)}, hash "
        what += "" if is_dtensor(x) else hash_text(x, _PLACED)
        yield f"  {leaf.path}: {what}, {leaf.spec!r}"


def _to_device(leaf: object, mesh: Mesh) -> object:
    movable = isinstance(leaf, Tensor) and mesh.device is not None
    return leaf.to(mesh.device) if movable else leaf  # type: ignore[attr-defined]  # a Tensor


def _check_local(
    mesh: Mesh, leaves: list[Placed[P | None] | Mismatch]
) -> tuple[Placed[P | None], ...]:
    problems = [str(leaf) for leaf in leaves if isinstance(leaf, Mismatch)]
    placed = tuple(in_finest(mesh, leaf) for leaf in leaves if isinstance(leaf, Placed))
    for leaf in placed:
        if not crosses(leaf):
            continue
        spec = spec_of(leaf)
        wrong = unknown_axes(spec, mesh.axis_names) + longer(spec, leaf.value.ndim)
        problems += [f"{leaf.path}: {problem}" for problem in wrong]
        if is_dtensor(leaf.value):
            problems.append(f"{leaf.path}: is a DTensor already; from_local takes local tensors")
    if problems:
        head = f"from_local: the values do not match their specs on the {mesh}:"
        raise SpecError(listing(head, problems))
    return placed


def _replace(
    tree: X, placed: tuple[Placed[P | None], ...], function: Callable[[Placed[P | None]], Tensor]
) -> X:
    leaves = [function(leaf) if crosses(leaf) else leaf.value for leaf in placed]
    rebuilt: Any = unflatten(flatten(tree)[1], leaves)
    return rebuilt  # type: ignore[no-any-return]  # the tree's own type
