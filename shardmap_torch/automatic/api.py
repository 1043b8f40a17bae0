"""`auto` and `mark_sharding`: global-view code, whose values DTensor's propagation shards."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import optree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardmap_torch.boundary.matching import is_spec
from shardmap_torch.boundary.placements import placements_of
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.tree import NAMESPACE, Placed, Tree, broadcast_prefix, map_leaves
from shardmap_torch.errors import SpecError, listing, show
from shardmap_torch.mesh import Mesh, as_mesh
from shardmap_torch.mixing.run import mark
from shardmap_torch.placing import device_put
from shardmap_torch.spec import Entry, P, mismatches
from shardmap_torch.transform import shard_map

A = ParamSpec("A")
Y = TypeVar("Y")


def auto(
    f: Callable[A, Y], *, in_specs: Tree, out_specs: Tree, mesh: Mesh | DeviceMesh | None = None
) -> Callable[A, Y]:
    """Runs unmodified code on global values, with communication placed by sharding propagation.

    The counterpart of `shard_map`: nothing in `f` is local and nothing is explicit. Inputs are
    sharded by `in_specs`, `f` runs as the body of a `shard_map` that binds no axis
    (`axis_names=()`), and results are resharded to `out_specs`. On a process-group mesh its values
    are DTensors, plain tensors that it makes or closes over are replicated, and functions for which
    torch's rules are wrong run on global values; see docs/automatic_axes.md. On a simulated mesh it
    runs on plain global values, which gives the same.

    Propagation redistributes an operand that an operation needs in another placement. DTensor does
    that silently; `redistributions` lists each with the user's line and the bytes.

    Args:
        f: a function of pytrees of tensors, written for one device. Keyword arguments are static.
        in_specs: pytree prefix of the tuple of positional arguments; None marks static ones.
        out_specs: pytree prefix of the result.
        mesh: the mesh; by default that of `use_mesh`, looked up in each call.

    Raises:
        SpecError: in a call, arguments or results that the specs do not match; names all.

    Source: `jax.jit` with `in_shardings` and `out_shardings`; PyTorch/XLA SPMD; DTensor.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, auto, make_mesh
        >>> mesh = make_mesh((4,), ("tp",), kind="simulated")
        >>> mlp = lambda x, w1, w2: (x @ w1).relu() @ w2
        >>> f = auto(mlp, in_specs=(P(), P(None, "tp"), P("tp")), out_specs=P(), mesh=mesh)
        >>> args = torch.ones(2, 8), torch.ones(8, 16), torch.ones(16, 8)
        >>> f(*args).equal(mlp(*args))
        True
    """
    sources, targets = _over_no_axis(in_specs), _over_no_axis(out_specs)
    name = getattr(f, "__name__", type(f).__name__)

    @wraps(f)
    def placed(*args: A.args, **kwargs: A.kwargs) -> Y:
        on = as_mesh(mesh)
        inputs: Any = device_put(args, on, in_specs, as_dtensor=True)
        body = partial(f, **kwargs) if kwargs else f
        run = shard_map(
            body, mesh=on, in_specs=sources, out_specs=targets, axis_names=(), check=False
        )
        result = run(*inputs)
        specs = iter(_read(name, out_specs, result, on))
        outputs: Y = map_leaves(lambda leaf: _output(leaf, on, next(specs)), result)
        return outputs

    return placed


def _over_no_axis(specs: Tree) -> Tree:
    """Returns specs of the same tree that name no axis."""
    return optree.tree_map(
        lambda spec: spec if spec is None else P(),
        specs,
        is_leaf=is_spec,
        none_is_leaf=True,
        namespace=NAMESPACE,
    )


def _read(name: str, specs: Tree, result: Tree, mesh: Mesh) -> list[P | None]:
    """Returns the spec of each leaf of a result, whose structure is known to match."""
    placed = [x for x in broadcast_prefix(specs, result, name, is_spec) if isinstance(x, Placed)]
    problems = [
        f"{leaf.path}: {problem}"
        for leaf in placed
        if leaf.spec is not None and isinstance(leaf.value, Tensor)
        for problem in mismatches(leaf.spec, tuple(leaf.value.shape), mesh.shape)
    ]
    if problems:
        raise SpecError(listing(f"{name}: the result does not match out_specs:", problems))
    return [leaf.spec for leaf in placed]


def _output(leaf: Any, mesh: Mesh, spec: P | None) -> Any:
    """Reshards a result; as in `shard_map`, one that is replicated is a plain tensor."""
    if spec is None or not isinstance(leaf, Tensor):
        return leaf
    placed = mark_sharding(leaf, mesh, spec)
    return placed if spec.sharded_dims or not isinstance(placed, DTensor) else placed.full_tensor()


def mark_sharding(x: Tensor, mesh: Mesh | DeviceMesh | None, spec: P | Sequence[Entry]) -> Tensor:
    """Sets the sharding of a global value from here on; changes no value.

    On a process-group mesh a plain tensor, equal on all ranks, becomes a DTensor without
    communication, and a DTensor is redistributed; differentiable. On other meshes it returns `x`.
    In the body of a `shard_map` over some axes, or of `auto` over none, it takes the others, the
    automatic ones, if an argument of the body is sharded over one of these on processes; otherwise
    values are global over them, and stay so. `redistributions` lists it as asked for.

    Args:
        x: a global value; in a body one of its values.
        mesh: the mesh; None takes that of `use_mesh`.
        spec: a `P`, or its entries as in PyTorch/XLA: `("dp", None)`.

    Raises:
        SpecError: the value cannot be sharded by the spec; in a body, the spec names an axis over
            which the body is mapped.

    Source: `torch_xla.distributed.spmd.mark_sharding`; `jax.lax.with_sharding_constraint`.

    Example:
        >>> import torch
        >>> from shardmap_torch import make_mesh, mark_sharding
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> mark_sharding(torch.arange(4), mesh, ("dp", ))
        tensor([0, 1, 2, 3])
    """
    if not isinstance(spec, P | tuple | list):
        raise SpecError(f"mark_sharding: {show(spec)} is neither a P nor a sequence of entries.")
    known = spec if isinstance(spec, P) else P(*spec)
    scope = current_scope()
    if scope is not None:
        return mark(scope, known, x)
    on = as_mesh(mesh)
    if isinstance(x, DTensor):
        return x.redistribute(placements=placements_of(on, known))
    return device_put(x, on, known, as_dtensor=True)
