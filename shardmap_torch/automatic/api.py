"""`auto` and `mark_sharding`: global-view code on DTensors, with reports of redistributions."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from shardmap_torch.automatic.propagation import (
    GRADIENT,
    RESULT,
    Mark,
    Propagation,
    current_propagation,
    following,
    without_partial,
)
from shardmap_torch.automatic.report import AutoReport
from shardmap_torch.boundary.matching import is_spec
from shardmap_torch.boundary.placements import placements_of
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.torch_private.engine import FakeTensorMode
from shardmap_torch.core.tree import Mismatch, Placed, Tree, broadcast_prefix, flatten, map_leaves
from shardmap_torch.errors import MeshError, SpecError, listing, show
from shardmap_torch.mesh import PROCESS_KINDS, Mesh, as_mesh
from shardmap_torch.mixing.run import mark
from shardmap_torch.placing import device_put
from shardmap_torch.spec import Entry, P

A = ParamSpec("A")
Y = TypeVar("Y")


def auto(
    f: Callable[A, Y],
    *,
    in_specs: Tree,
    out_specs: Tree,
    mesh: Mesh | DeviceMesh | None = None,
) -> "Auto[A, Y]":
    """Runs unmodified code on global values, with communication placed by sharding propagation.

    The counterpart of `shard_map`: nothing in `f` is local and nothing is explicit. On a
    process-group mesh inputs become DTensors sharded by `in_specs`, `f` runs on them, and results
    are resharded to `out_specs`; plain tensors that `f` makes or closes over are replicated. On a
    simulated mesh `f` runs on the plain global values, which gives the same. Gradients and
    `torch.func` go through it as far as DTensor supports them.

    Propagation redistributes an operand that an operation needs in another placement. DTensor does
    that silently; `auto(...).report(*args)` lists each of these redistributions with the user's
    line and the bytes, on every mesh and without running.

    Args:
        f: a function of pytrees of tensors, written for one device.
        in_specs: pytree prefix of the tuple of positional arguments; None marks static ones.
        out_specs: pytree prefix of the result.
        mesh: the mesh; by default that of `use_mesh`, looked up in each call.

    Raises:
        SpecError: in a call, arguments or results that the specs do not match; names all.
        MeshError: in a call on an abstract mesh, which has no data; `report` works there.

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
        >>> f.report(*args).num_bytes  # one all-reduce of 64 bytes, 2 * 3/4 of them
        96
    """
    return Auto(f, in_specs, out_specs, mesh)


class Auto(Generic[A, Y]):
    """A function made by `auto`."""

    def __init__(
        self, f: Callable[A, Y], in_specs: Tree, out_specs: Tree, mesh: Mesh | DeviceMesh | None
    ) -> None:
        """Keeps the arguments; nothing is looked up before the first call."""
        self._function, self._in_specs, self._out_specs, self._mesh = f, in_specs, out_specs, mesh
        self._name = getattr(f, "__name__", type(f).__name__)
        wraps(f)(self)

    def __call__(self, *args: A.args, **kwargs: A.kwargs) -> Y:
        """Runs the function on global values; keyword arguments are static."""
        mesh = as_mesh(self._mesh)
        if mesh.kind == "abstract":
            raise MeshError(f"{self._name}: an abstract mesh has no data; use .report(...).")
        placed: Any = device_put(args, mesh, self._in_specs, as_dtensor=True)
        if mesh.kind not in PROCESS_KINDS:
            result = self._function(*placed, **kwargs)
            _read(self._out_specs, result, self._name)
            return result
        with implicit_replication():
            result = self._function(*placed, **kwargs)
        specs = iter(_read(self._out_specs, result, self._name))
        outputs: Y = map_leaves(lambda leaf: _output(leaf, mesh, next(specs)), result)
        return outputs

    def report(self, *args: Any, **kwargs: Any) -> AutoReport:
        """Lists the redistributions of a call: forward, and backward where inputs need gradients.

        The backward starts from gradients placed like the differentiable results. Nothing runs: of
        the arguments only shapes, dtypes and `requires_grad` are read; `ShapeDtype` will do.

        Raises:
            ShardMapError: an operation for which torch has no sharding rule; names its line.
            SpecError: arguments or results that the specs do not match.
        """
        mesh = as_mesh(self._mesh)
        specs = _read(self._in_specs, args, self._name)
        propagation = Propagation(mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake: Any = map_leaves(_fake, args)
            inputs = flatten(fake)[0]
            for leaf, spec in zip(inputs, specs, strict=True):
                if isinstance(leaf, Tensor) and spec is not None:
                    propagation.place(leaf, placements_of(mesh, spec))
            with following(propagation):
                result = self._function(*fake, **kwargs)
                out_specs = _read(self._out_specs, result, self._name)
                leaves = flatten(result)[0]
                for leaf, spec in zip(leaves, out_specs, strict=True):
                    if isinstance(leaf, Tensor) and spec is not None:
                        expected = placements_of(mesh, spec)
                        propagation.redistribute(leaf, expected, RESULT, True)
                _pull_back(propagation, leaves, out_specs, inputs)
        return AutoReport(propagation.moves, self._name, mesh)


def mark_sharding(x: Tensor, mesh: Mesh | DeviceMesh | None, spec: P | Sequence[Entry]) -> Tensor:
    """Sets the sharding of a global value from here on; changes no value.

    On a process-group mesh a plain tensor, equal on all ranks, becomes a DTensor without
    communication, and a DTensor is redistributed; differentiable. On other meshes it returns `x`.
    The report of `auto` lists it as a redistribution that the user asked for. In the body of a
    `shard_map` over some axes it takes the others, the automatic ones, if an argument of the body
    is sharded over one of these on processes; otherwise values are global over them, and stay so.

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
    propagation = current_propagation()
    if propagation is not None:
        marked: Tensor = Mark.apply(x, propagation, known)  # type: ignore[no-untyped-call]
        return marked
    if isinstance(x, DTensor):
        return x.redistribute(placements=placements_of(on, known))
    return device_put(x, on, known, as_dtensor=True)


def _read(specs: Tree, tree: Tree, name: str) -> list[P | None]:
    """Returns the spec of every leaf, or raises a SpecError that names every mismatch."""
    matched = list(broadcast_prefix(specs, tree, name, is_spec))
    problems = [str(leaf) for leaf in matched if isinstance(leaf, Mismatch)]
    placed = [leaf for leaf in matched if isinstance(leaf, Placed)]
    problems += [
        f"{leaf.path}: {leaf.spec!r} has {len(leaf.spec.entries)} entries, shape {shape}"
        for leaf in placed
        if leaf.spec is not None
        and (shape := tuple(getattr(leaf.value, "shape", (None,) * 99))) is not None
        and len(leaf.spec.entries) > len(shape)
    ]
    if problems:
        raise SpecError(listing(f"{name}: the specs do not match:", problems))
    return [leaf.spec for leaf in placed]


def _output(leaf: Any, mesh: Mesh, spec: P | None) -> Any:
    """Reshards a result; as in `shard_map`, one that is replicated is a plain tensor."""
    if spec is None or not isinstance(leaf, Tensor):
        return leaf
    placed = mark_sharding(leaf, mesh, spec)
    return placed if spec.sharded_dims or not isinstance(placed, DTensor) else placed.full_tensor()


def _fake(leaf: Any) -> Any:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return leaf
    needs = bool(getattr(leaf, "requires_grad", False))
    return torch.empty(tuple(shape), dtype=dtype, requires_grad=needs)


def _pull_back(
    propagation: Propagation,
    leaves: Sequence[Any],
    specs: Sequence[P | None],
    inputs: Sequence[Any],
) -> None:
    differentiable = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    pairs = [
        (leaf, spec)
        for leaf, spec in zip(leaves, specs, strict=True)
        if isinstance(leaf, Tensor) and leaf.requires_grad and spec is not None
    ]
    if not differentiable or not pairs:
        return
    cotangents = [torch.empty_like(leaf) for leaf, _ in pairs]
    for cotangent, (_, spec) in zip(cotangents, pairs, strict=True):
        propagation.place(cotangent, placements_of(propagation.mesh, P(*spec.entries)))
    outs = [leaf for leaf, _ in pairs]
    placed = [propagation.placements(x) for x in differentiable]
    grads = torch.autograd.grad(outs, differentiable, cotangents, allow_unused=True)
    for grad, placements in zip(grads, placed, strict=True):
        if grad is not None:
            propagation.redistribute(grad, without_partial(placements), GRADIENT, True)
