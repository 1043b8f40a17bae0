"""Converts between DTensors and local tensors; the one file that touches DTensor's internals.

`DTensor.from_local` costs 27 us, its constructor with a spec that is already known a few.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardmap_torch.boundary.casts import entry_shards, over
from shardmap_torch.boundary.cotangents import compare_cotangent
from shardmap_torch.boundary.placements import Placements, placements_of, spec_of
from shardmap_torch.collectives.autograd import apply_eager, bind
from shardmap_torch.collectives.operations import Bind, Collective, Linear, Mover, Saved
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.core.caching import Memo, memo
from shardmap_torch.core.functorch import is_batched
from shardmap_torch.core.torch_private.dtensor import AsyncCollectiveTensor, DTensorSpec, TensorMeta
from shardmap_torch.errors import MeshError, SpecError, TransformError
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P
from shardmap_torch.types import I, R
from shardmap_torch.types import Partial as PartialType


def _dtensor_spec(mesh: Mesh, spec: P, x: Tensor) -> DTensorSpec:
    shape, stride, dtype = x.shape, x.stride(), x.dtype
    known: Memo[DTensorSpec] = mesh._state.specs
    return known.get(
        (spec, shape, stride, dtype), lambda: _make_spec(mesh, spec, shape, stride, dtype)
    )


def _make_spec(
    mesh: Mesh, spec: P, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    assert mesh.device_mesh is not None  # only process-group meshes come here
    placements = placements_of(mesh, spec)
    sizes, strides = list(shape), list(stride)
    for dim, axes in spec.sharded_dims:
        num_shards = mesh.num_ranks(axes)
        sizes[dim] *= num_shards
        # The strides of dims outside the sharded one in memory grow by the number of shards.
        strides = [
            s * num_shards if s > stride[dim] or (s == stride[dim] and k < dim) else s
            for k, s in enumerate(strides)
        ]
    meta = TensorMeta(torch.Size(sizes), tuple(strides), dtype)
    return DTensorSpec(mesh.device_mesh, placements, tensor_meta=meta)


def wrap(mesh: Mesh, spec: P, local: Tensor) -> DTensor:
    """Makes a DTensor of this rank's value."""
    local = local.detach()
    # `__init__` does nothing but step out of Dynamo, which costs as much as all the rest.
    return DTensor.__new__(DTensor, local, _dtensor_spec(mesh, spec, local), requires_grad=False)


def unwrap(mesh: Mesh, spec: P, x: DTensor) -> Tensor:
    """Returns this rank's value of a DTensor, redistributed first if its placements differ.

    Where `spec` is partial and the DTensor is not, the value is replicated on that axis; see
    `_added`.

    Raises:
        MeshError: it is on another mesh.
    """
    if x.device_mesh != mesh.device_mesh:
        raise MeshError(
            f"A DTensor on {x.device_mesh} cannot enter a function on the {mesh}. Make the mesh of "
            "that DeviceMesh, make_mesh(device_mesh), or pass x.full_tensor()."
        )
    x = _by_placements(mesh, x)
    expected = placements_of(mesh, spec)
    if x._spec.placements != expected:
        x = x.redistribute(placements=_replicate_unless(expected, x._spec.placements))
    return _arrived(x._local_tensor).detach()


def _arrived(x: Tensor) -> Tensor:
    """Waits for what a functional collective of torch may still be receiving."""
    if not isinstance(x, AsyncCollectiveTensor):
        return x
    arrived: Tensor = x.wait()
    return arrived


def _by_placements(mesh: Mesh, x: DTensor) -> DTensor:
    """Returns the DTensor with placements that express its shard order, if it has one."""
    order = getattr(x._spec, "shard_order", None) or ()
    if all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in order):
        return x
    spec = spec_of(x, mesh)
    assert isinstance(spec, P)  # a DTensor with such an order has plain shards only
    placements = placements_of(mesh, spec)
    known = DTensorSpec(x.device_mesh, placements, tensor_meta=x._spec.tensor_meta)
    return DTensor.__new__(DTensor, x._local_tensor, known, requires_grad=False)


def _replicate_unless(expected: Placements, placements: Placements) -> Placements:
    """Replaces new Partial placements by Replicate: torch cannot redistribute to Partial."""
    return tuple(
        Replicate() if to.is_partial() and to != placement else to
        for to, placement in zip(expected, placements, strict=True)
    )


def _added(mesh: Mesh, spec: P, placements: Placements) -> tuple[Collective, ...]:
    """Returns the conversion that makes a replicated DTensor partial: rank 0 keeps the value."""
    if not spec.partial:
        return ()
    expected = placements_of(mesh, spec)
    kept = _replicate_unless(expected, placements)
    axes = tuple(a for a, to, k in zip(mesh.axis_names, expected, kept, strict=True) if to != k)
    return over(axes, "convert", I, PartialType)


@memo
def _entries_of(spec: P) -> P:
    """Returns the spec of a cotangent, which is no pending sum outside of the body."""
    return P(*spec.entries)


class Enter(Linear):
    """Operation that brings a value into a body: the local tensor of a DTensor, or a slice.

    Made again for each call: `run`, where functorch has unwrapped the value, records if it was a
    DTensor, which decides the form of the cotangent.
    """

    axes: tuple[str, ...] = ()
    move = "enter"

    def __init__(self, mesh: Mesh, spec: P) -> None:
        self._mesh, self._spec = mesh, spec
        self._placements: Placements | None = None

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        self._placements = None
        if isinstance(x, DTensor):
            self._placements = tuple(x.placements)
            collectives, x = (
                _added(self._mesh, self._spec, self._placements),
                unwrap(self._mesh, self._spec, x),
            )
        else:
            collectives = entry_shards(self._spec)
        for collective in collectives:
            x = mover.run(collective.move, collective, x)
        return x

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        """Makes the cotangent a DTensor like the operand, or gathers it for a plain tensor."""
        if self._placements is not None:
            # The cotangent of a partial sum is R in the body and I outside. This cast moves no
            # data; it defines how the cotangent is itself differentiated.
            for collective in over(self._spec.partial, "convert", R, I):
                grad = bind(collective, grad)
            return bind(Leave(self._mesh, _entries_of(self._spec), self._placements), grad)
        for collective in reversed(entry_shards(self._spec)):
            grad = bind(collective.transpose, grad)
        return grad

    def push_forward(self, bind: Bind, tangent: Tensor, saved: Saved) -> Tensor:
        return bind(Enter(self._mesh, self._spec), tangent)


class Leave(Linear):
    """Operation that brings a value out of a body: a DTensor, or a plain tensor if replicated."""

    axes: tuple[str, ...] = ()
    move = "leave"

    def __init__(self, mesh: Mesh, spec: P, like: Placements | None = None) -> None:
        """Keeps the spec by which local values make up the global one.

        `like`: placements of the DTensor whose cotangent this is; the result is a DTensor with
        these placements, replicated where they are partial.
        """
        self._mesh, self._spec, self._like = mesh, spec, like

    @property
    def _is_replicated(self) -> bool:
        return not (self._spec.sharded_dims or self._spec.partial)

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        if self._like is None:
            if not self._is_replicated:
                return wrap(self._mesh, self._spec, x)
            # Autograd forbids to write into what a Function returns as it was.
            return x.clone() if x.requires_grad else x
        expected = tuple(Replicate() if p.is_partial() else p for p in self._like)
        wrapped = wrap(self._mesh, self._spec, x)
        if wrapped.placements == expected:
            return wrapped
        return wrapped.redistribute(placements=expected)

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        """Brings the cotangent in; that of a partial sum is the same on all ranks."""
        if self._like is None and self._is_replicated and not torch.compiler.is_compiling():
            compare_cotangent(self._mesh, grad)
        grad = bind(Enter(self._mesh, _entries_of(self._spec)), grad)
        for collective in over(self._spec.partial, "convert", I, R):  # as in `Enter.pull_back`
            grad = bind(collective, grad)
        return grad

    def push_forward(self, bind: Bind, tangent: Tensor, saved: Saved) -> Tensor:
        """Brings a tangent out like its value.

        Raises:
            TransformError: torch has no plain forward mode for DTensors; batched, as in jacfwd, the
                tangents are no DTensors for it.
        """
        if not self._is_replicated and not is_batched(tangent):
            raise TransformError(
                f"torch.func.jvp from outside cannot return a DTensor, here by {self._spec!r}: "
                "torch has no forward mode for DTensors. Return a value that is equal on all "
                "ranks, call torch.func.jvp in the body, or use torch.func.jacfwd."
            )
        return bind(Leave(self._mesh, self._spec, self._like), tangent)


def enter(backend: Backend, mesh: Mesh, spec: P, x: Tensor) -> Tensor:
    """Brings a value into a body, differentiably; see `Enter`."""
    if torch.compiler.is_dynamo_compiling() and isinstance(x, DTensor):
        return _enter_traced(mesh, spec, x)
    return bind(backend, Enter(mesh, spec), x)


def leave(backend: Backend, mesh: Mesh, spec: P, x: Tensor) -> Tensor:
    """Brings a value out of a body, differentiably; see `Leave`."""
    if torch.compiler.is_dynamo_compiling() and (spec.sharded_dims or spec.partial):
        return _leave_traced(mesh, spec, x)
    return bind(backend, Leave(mesh, spec), x)


class _EnterKnown(Enter):
    """Operation that brings in a DTensor of a DTensorSpec that is known to lie as the spec says."""

    def __init__(self, mesh: Mesh, spec: P, known: DTensorSpec) -> None:
        super().__init__(mesh, spec)
        self._placements = tuple(known.placements)

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        local: Tensor = x._local_tensor  # type: ignore[attr-defined]  # a DTensor
        return local.detach()


class _LeaveKnown(Leave):
    """Operation that brings out local tensors of one shape, strides and dtype as DTensors."""

    def __init__(self, mesh: Mesh, spec: P, known: DTensorSpec) -> None:
        super().__init__(mesh, spec)
        self._known = known

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        return DTensor.__new__(DTensor, x.detach(), self._known, requires_grad=False)


class Crossings:
    """Cache of the DTensorSpecs of one signature, leaf by leaf, from the last call.

    A training step passes the same specs in and out each time. An argument whose DTensorSpec is the
    same object as last time is unwrapped directly; a result with the shape, strides and dtype of
    last time gets the DTensorSpec of last time. That costs a sixth per leaf.

    Attributes:
        shapes: the global shapes of all arguments, as torch.compile knows them.
        is_alone: whether the mesh has one rank, whose results no other can take for others.
    """

    def __init__(self, mesh: Mesh, backend: Backend, specs: Sequence[P]) -> None:
        self.mesh: Any = mesh
        self.backend: Any = backend
        self.shapes: Any = None
        self.is_alone = mesh.size == 1
        self._specs = specs
        self._entered: list[tuple[DTensorSpec, Enter] | None] = [None] * len(specs)
        self._exited: list[tuple[Any, ...] | None] = [None] * len(specs)
        self._replicated = [not (spec.sharded_dims or spec.partial) for spec in specs]

    def close(self) -> None:
        """Drops the mesh, which is freed or whose groups change; it cannot be used any more."""
        self.mesh = self.backend = None
        self._entered, self._exited = [], []

    def enter(self, leaves: Sequence[Tensor], follows: bool) -> list[Tensor]:
        """Brings values into a body on its mesh, differentiably; see `Enter`.

        `follows`: whether Dynamo or a torch.func transform follows each value.
        """
        mesh, backend, specs, known = self.mesh, self.backend, self._specs, self._entered
        if follows:
            pairs = zip(specs, leaves, strict=True)
            return [enter(backend, mesh, spec, x) for spec, x in pairs]
        tracked, result = torch.is_grad_enabled(), []
        for at, x in enumerate(leaves):
            last = known[at]
            if last is not None and type(x) is DTensor and x._spec is last[0]:
                local = x._local_tensor
                if type(local) is Tensor:
                    grad = tracked and x.requires_grad
                    result.append(apply_eager(x, last[1], backend) if grad else local.detach())
                    continue
            if type(x) is Tensor and self._replicated[at] and not (tracked and x.requires_grad):
                result.append(x)  # global, and equal on all ranks
                continue
            result.append(enter(backend, mesh, specs[at], x))
            known[at] = _known_entry(mesh, specs[at], x)
        return result

    def leave(self, values: Sequence[Tensor], follows: bool) -> list[Tensor]:
        """Brings values out of a body on its mesh, differentiably; see `Leave` and `enter`."""
        mesh, backend, specs, known = self.mesh, self.backend, self._specs, self._exited
        if follows:
            pairs = zip(specs, values, strict=True)
            return [leave(backend, mesh, spec, x) for spec, x in pairs]
        tracked = torch.is_grad_enabled()
        result: list[Tensor] = []
        for at, x in enumerate(values):
            if type(x) is not Tensor:
                x = _arrived(x)
            if self._replicated[at]:
                result.append(leave(backend, mesh, specs[at], x) if x.requires_grad else x)
                continue
            like = x.shape, x.stride(), x.dtype
            last = known[at]
            if last is None or last[0] != like:
                spec = _dtensor_spec(mesh, specs[at], x)
                last = known[at] = like, _LeaveKnown(mesh, specs[at], spec)
            grad = tracked and x.requires_grad
            result.append(apply_eager(x, last[1], backend) if grad else last[1].run(backend, x))
        return result


def _known_entry(mesh: Mesh, spec: P, x: Tensor) -> tuple[DTensorSpec, Enter] | None:
    """Returns the DTensorSpec of a value that needs no redistribution for `spec`, and its entry."""
    if type(x) is not DTensor or spec.partial or _by_placements(mesh, x) is not x:
        return None
    if x._spec.placements != placements_of(mesh, spec):
        return None
    return x._spec, _EnterKnown(mesh, spec, x._spec)


# Dynamo cannot make a DTensor from a spec, but knows torch's own ways in and out, with backward.


def _enter_traced(mesh: Mesh, spec: P, x: DTensor) -> Tensor:
    placements = _placements_in_order(mesh, spec)
    # Of a tensor that is no argument, since Dynamo guards on which arguments share a placement.
    own: Any = x.detach()
    if tuple(own.placements) != placements:
        x = x.redistribute(placements=placements)
    grads = [Replicate() if placement.is_partial() else placement for placement in placements]
    return x.to_local(grad_placements=grads)


def _leave_traced(mesh: Mesh, spec: P, x: Tensor) -> Tensor:
    placements = _placements_in_order(mesh, spec)
    return DTensor.from_local(x, mesh.device_mesh, placements, run_check=False)


def _placements_in_order(mesh: Mesh, spec: P) -> Placements:
    placements = placements_of(mesh, spec)
    # torch cannot tell the global shape of strided shards.
    if not all(isinstance(to, Shard | Replicate | Partial) for to in placements):
        raise SpecError(
            f"Under torch.compile {spec!r} cannot shard a dim over axes in another order than the "
            f"mesh's {mesh.axis_names}; write them in mesh order."
        )
    return placements
