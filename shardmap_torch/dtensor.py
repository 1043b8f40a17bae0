"""Crossing between local tensors and DTensors; the one file that touches DTensor's internals.

`DTensor.from_local` costs 27 us, its constructor with a spec that is already known a few.
"""

from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _dtensor_spec as private

from shardmap_torch.backend import Backend
from shardmap_torch.conversions import apply, entry_cuts
from shardmap_torch.errors import MeshError, SpecError, TransformError
from shardmap_torch.memo import Memo, memo
from shardmap_torch.mesh import Mesh
from shardmap_torch.rule import Collective, bind, collective_of
from shardmap_torch.spec import P
from shardmap_torch.types import I, R

Placements: TypeAlias = tuple[Placement, ...]


@memo
def placements_of(mesh: Mesh, spec: P) -> Placements:
    """One placement per mesh axis.

    Example:
        >>> from shardmap_torch import make_mesh
        >>> mesh = make_mesh((2, 4), ("dp", "tp"), kind="simulated")
        >>> placements_of(mesh, P(None, "tp"))
        (Replicate(), Shard(dim=1))
    """
    dims = {axis: dim for dim, axes in spec.cuts for axis in axes}
    return tuple(
        Shard(dims[axis]) if axis in dims else Partial() if axis in spec.partial else Replicate()
        for axis in mesh.axis_names
    )


@memo
def shard_order_of(mesh: Mesh, spec: P) -> Any:
    """DTensor's shard order where it is not the mesh's, else None.

    Placements alone say which axes cut a dim, not in which order, and torch takes the mesh's.

    Raises:
        SpecError: this torch cannot store another order.
    """
    order = list(mesh.axis_names)
    cuts = {dim: tuple(order.index(axis) for axis in axes) for dim, axes in spec.cuts}
    if all(list(axes) == sorted(axes) for axes in cuts.values()):
        return None
    entry = getattr(private, "ShardOrderEntry", None)
    if entry is None:
        raise SpecError(
            f"{spec!r} cuts a dim over axes in another order than the mesh's {mesh.axis_names}, "
            f"which DTensor of torch {torch.__version__} cannot store; write them in mesh order."
        )
    return tuple(entry(tensor_dim=dim, mesh_dims=axes) for dim, axes in sorted(cuts.items()))


_SPECS: Final = Memo[private.DTensorSpec]()


def _dtensor_spec(mesh: Mesh, spec: P, x: Tensor) -> private.DTensorSpec:
    shape, stride = x.shape, x.stride()
    # Meshes of one layout are equal, yet each has groups of its own.
    key = (id(mesh), mesh, spec, shape, stride, x.dtype)
    return _SPECS.get(key, lambda: _make_spec(mesh, spec, shape, stride, x.dtype))


def _make_spec(
    mesh: Mesh, spec: P, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> private.DTensorSpec:
    assert mesh.device_mesh is not None  # only process-group meshes come here
    placements = placements_of(mesh, spec)
    sizes = [size * _cut_by(mesh, spec, dim) for dim, size in enumerate(shape)]
    strides = list(stride)
    for dim, axes in spec.cuts:
        # Dims that lie outside the cut one in memory move apart by as much as it grows.
        grown = [
            s * mesh.num_ranks(axes) if s > stride[dim] or (s == stride[dim] and k < dim) else s
            for k, s in enumerate(strides)
        ]
        strides = grown
    meta = private.TensorMeta(torch.Size(sizes), tuple(strides), dtype)
    order = shard_order_of(mesh, spec)
    extra = {} if order is None else {"shard_order": order}
    return private.DTensorSpec(mesh.device_mesh, placements, tensor_meta=meta, **extra)


def _cut_by(mesh: Mesh, spec: P, dim: int) -> int:
    return next((mesh.num_ranks(axes) for cut, axes in spec.cuts if cut == dim), 1)


def wrap(mesh: Mesh, spec: P, local: Tensor) -> DTensor:
    """A DTensor of this rank's value."""
    local = local.detach()
    # `__init__` does nothing but step out of Dynamo, which costs as much as all the rest.
    return DTensor.__new__(DTensor, local, _dtensor_spec(mesh, spec, local), requires_grad=False)


@memo
def _way_of(mesh: Mesh, spec: P) -> tuple[Placements, Any]:
    return placements_of(mesh, spec), shard_order_of(mesh, spec)


def unwrap(mesh: Mesh, spec: P, x: DTensor) -> Tensor:
    """This rank's value of a DTensor, redistributed to `spec` first if it lies otherwise.

    Raises:
        MeshError: it lives on another mesh.
        SpecError: it is cut over the same axes in another order.
    """
    if x.device_mesh != mesh.device_mesh:
        raise MeshError(f"A DTensor on {x.device_mesh} cannot enter a function on the {mesh}.")
    placements, wanted = _way_of(mesh, spec)
    if x._spec.placements != placements:
        x = x.redistribute(placements=placements)
    have = getattr(x._spec, "shard_order", None)
    if (wanted is not None and have != wanted) or (wanted is None and _reordered(have)):
        raise SpecError(
            f"A DTensor with shard order {have} cannot enter by {spec!r}; reorder it outside."
        )
    local = x._local_tensor
    if isinstance(local, AsyncCollectiveTensor):  # torch may still be receiving it
        local = local.wait()
    return local.detach()


def _reordered(order: Any) -> bool:
    return order is not None and any(
        list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order
    )


# The cotangent of a partial sum is R in the body and I outside. The casts between the two move
# nothing; what they say is how the cotangent is differentiated in its turn.


def _shared(spec: P) -> tuple[Collective, ...]:
    axes = tuple(sorted(spec.partial))
    return (collective_of("convert", I, R, axes),) if axes else ()


def _finished(spec: P) -> tuple[Collective, ...]:
    axes = tuple(sorted(spec.partial))
    return (collective_of("convert", R, I, axes),) if axes else ()


class Enter:
    """From outside into a body: a DTensor gives its local tensor, a plain tensor its slice.

    Made anew for each call: which of the two it was is seen in `run`, where functorch has
    unwrapped the value, and decides what the cotangent becomes.
    """

    axes: tuple[str, ...] = ()
    move = "enter"

    def __init__(self, mesh: Mesh, spec: P) -> None:
        """`spec` says what is local."""
        self._mesh, self._spec = mesh, spec
        self._given: Placements | None = None

    def run(self, backend: Backend, x: Tensor) -> Tensor:
        """Unwraps or slices."""
        self._given = None
        if isinstance(x, DTensor):
            self._given = tuple(x.placements)
            return unwrap(self._mesh, self._spec, x)
        for collective in entry_cuts(self._spec):
            x = backend.run(collective.move, collective, x)
        return x

    def pull_back(self, backend: Backend, grad: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Wraps the cotangent as what came was, or gathers it: a plain tensor's is global."""
        if self._given is not None:
            grad = apply(backend, _finished(self._spec), grad)
            return bind(backend, Leave(self._mesh, P(*self._spec.entries), self._given), grad)
        for collective in reversed(entry_cuts(self._spec)):
            grad = bind(backend, collective.transpose, grad)
        return grad

    def push_forward(self, backend: Backend, tangent: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """A tangent enters like its value."""
        return bind(backend, Enter(self._mesh, self._spec), tangent)


class Leave:
    """From a body outside: a DTensor, or the plain value where it is whole on every rank."""

    axes: tuple[str, ...] = ()
    move = "leave"

    def __init__(self, mesh: Mesh, spec: P, beside: Placements | None = None) -> None:
        """`spec` says how the local values make the global one.

        `beside` makes a DTensor of it that lies as another one, whose cotangent it is: whole where
        that one is partial.
        """
        self._mesh, self._spec, self._beside = mesh, spec, beside

    @property
    def _is_whole(self) -> bool:
        return not (self._spec.cuts or self._spec.partial)

    def run(self, backend: Backend, x: Tensor) -> Tensor:
        """Wraps."""
        if self._beside is None:
            return x if self._is_whole else wrap(self._mesh, self._spec, x)
        wanted = tuple(Replicate() if p.is_partial() else p for p in self._beside)
        wrapped = wrap(self._mesh, self._spec, x)
        if wrapped.placements == wanted:
            return wrapped
        return wrapped.redistribute(placements=wanted)

    def pull_back(self, backend: Backend, grad: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Enters the cotangent; that of a partial sum is the same on all ranks."""
        grad = bind(backend, Enter(self._mesh, P(*self._spec.entries)), grad)
        return apply(backend, _shared(self._spec), grad)

    def push_forward(self, backend: Backend, tangent: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """A tangent leaves like its value.

        Raises:
            TransformError: torch has no plain forward mode for DTensors; batched, as in jacfwd, the
                tangents are no DTensors for it.
        """
        if not self._is_whole and not _is_batched(tangent):
            raise TransformError(
                f"torch.func.jvp from outside cannot return a DTensor, here by {self._spec!r}: "
                "torch has no forward mode for DTensors. Return a value that is whole on every "
                "rank, call torch.func.jvp in the body, or use torch.func.jacfwd."
            )
        return bind(backend, Leave(self._mesh, self._spec, self._beside), tangent)


def _is_batched(x: Tensor) -> bool:
    """Whether it is at any functorch level."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def enter(backend: Backend, mesh: Mesh, spec: P, x: Tensor) -> Tensor:
    """Brings a value into a body, differentiably; see `Enter`."""
    if torch.compiler.is_dynamo_compiling() and isinstance(x, DTensor):
        return _enter_traced(mesh, spec, x)
    return bind(backend, Enter(mesh, spec), x)


def leave(backend: Backend, mesh: Mesh, spec: P, x: Tensor) -> Tensor:
    """Brings a value out of a body, differentiably; see `Leave`."""
    if torch.compiler.is_dynamo_compiling() and (spec.cuts or spec.partial):
        return _leave_traced(mesh, spec, x)
    return bind(backend, Leave(mesh, spec), x)


# Dynamo cannot make a DTensor from a spec, but knows torch's own ways in and out, with backward.


def _enter_traced(mesh: Mesh, spec: P, x: DTensor) -> Tensor:
    placements = _placements_in_order(mesh, spec)
    if tuple(x.placements) != placements:
        x = x.redistribute(placements=placements)
    grads = [Replicate() if placement.is_partial() else placement for placement in placements]
    return x.to_local(grad_placements=grads)


def _leave_traced(mesh: Mesh, spec: P, x: Tensor) -> Tensor:
    placements = _placements_in_order(mesh, spec)
    return DTensor.from_local(x, mesh.device_mesh, placements, run_check=False)


def _placements_in_order(mesh: Mesh, spec: P) -> Placements:
    if shard_order_of(mesh, spec) is not None:
        raise SpecError(
            f"Under torch.compile {spec!r} cannot cut a dim over axes in another order than the "
            f"mesh's {mesh.axis_names}; write them in mesh order."
        )
    return placements_of(mesh, spec)
