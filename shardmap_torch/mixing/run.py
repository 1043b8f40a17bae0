"""Runs a call whose arguments are sharded over automatic axes: they stay so in its body."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardmap_torch.boundary.call import Call, Result, Untouched, run_body
from shardmap_torch.boundary.dtensor import Enter, Leave
from shardmap_torch.boundary.placements import placements_of
from shardmap_torch.collectives.autograd import bind, is_transformed
from shardmap_torch.collectives.protocol import Drawing
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core.functorch import base_of
from shardmap_torch.errors import SpecError, listing
from shardmap_torch.mesh import Mesh
from shardmap_torch.mixing.backend import SharingBackend
from shardmap_torch.mixing.layouts import (
    automatic_axes,
    body_placements,
    entry_spec,
    evenly,
    exit_spec,
    settled,
)
from shardmap_torch.mixing.modes import Sharing
from shardmap_torch.mixing.values import OBSERVERS, Place, Share, Unshare
from shardmap_torch.spec import P, expanded, mismatches


def entry_specs(call: Call) -> list[P] | None:
    """Returns the specs by which arguments enter if an automatic axis shards one; None otherwise.

    torch.compile, and torch.func transforms from outside, see bodies without automatic axes, whose
    values are global over them; so do bodies of whose backward a check has seen code of the user's.
    """
    # Hooks and Functions run outside of the modes in a backward.
    if torch.compiler.is_dynamo_compiling() or is_transformed() or call.rank_only:
        return None
    axes = automatic_axes(call.mesh, call.bound)
    known = [call.match.spec(position) for position in call.crossing]
    leaves = [call.leaves[position] for position in call.crossing]
    specs = [entry_spec(call.mesh, spec, axes, x) for spec, x in zip(known, leaves, strict=True)]
    for spec, x in zip(specs, leaves, strict=True) if OBSERVERS else ():
        _observe_entry(call.mesh, spec, x)
    return None if specs == known else specs


def run_shared(
    call: Call, backend: SharingBackend, specs: Sequence[P], drawing: Drawing | None
) -> tuple[Result, list[Tensor]]:
    """Runs the body on DTensors over the automatic axes: its result, and what leaves by its specs.

    The results that leave are sharded over these axes as they are in the body; pending sums are
    added up.
    """
    mesh, axes = call.mesh, backend.automatic
    backend.copies.clear()
    leaves = [call.leaves[position] for position in call.crossing]
    values = []
    for spec, x in zip(specs, leaves, strict=True):
        local = bind(backend, Enter(mesh, spec), x)
        placements = body_placements(mesh, spec, axes)
        values.append(bind(backend, Share(backend.shared, placements), local))
    watch = Untouched(call, values)
    result = run_body(call, backend, values, Sharing(backend, drawing))
    watch.check()
    match = result.match
    pairs = zip(match.crossing, result.crossing, strict=True)
    return result, [_leave(mesh, backend, match.spec(at), x) for at, x in pairs]


def _observe_entry(mesh: Mesh, spec: P, x: Tensor) -> None:
    """Tells observers that an argument is redistributed."""
    base = base_of(x)
    expected = placements_of(mesh, spec)
    if isinstance(base, DTensor) and base.placements != expected:
        for observer in OBSERVERS:
            observer("argument", base, expected)


def _leave(mesh: Mesh, backend: SharingBackend, spec: P, x: Tensor) -> Tensor:
    base = base_of(x)
    if isinstance(base, DTensor):
        sizes = [mesh.shape[axis] for axis in backend.automatic]
        placements = evenly(settled(base.placements), base.shape, sizes)
        spec = exit_spec(mesh, spec, backend.automatic, placements)
        x = bind(backend, Unshare(backend.shared, placements, "result"), x)
    return bind(backend, Leave(mesh, spec), x)


def mark(scope: Scope, spec: P, x: Tensor) -> Tensor:
    """Places a value of a body over the automatic axes; see `mark_sharding`.

    Raises:
        SpecError: the spec names an axis over which the body is mapped, or does not match.
    """
    mesh, backend = scope.backend.mesh, scope.backend
    spec = expanded(spec, mesh.aliases)
    bound = sorted(spec.named & scope.axes)
    if bound:
        raise SpecError(
            f"mark_sharding by {spec!r} names {', '.join(map(repr, bound))}, over which this body "
            "is mapped; in a body it takes the other axes, which are automatic. Move the value by "
            "a collective, or reshard."
        )
    unknown = [f"it has no axis {axis!r}" for axis in sorted(spec.named) if axis not in mesh.shape]
    wrong = unknown or mismatches(spec, tuple(x.shape), mesh.shape)
    if wrong:
        raise SpecError(listing(f"mark_sharding by {spec!r} on the {mesh}:", wrong))
    if not isinstance(backend, SharingBackend):
        return x
    placements = body_placements(mesh, spec, backend.automatic)
    return bind(backend, Place(placements), backend.replicated(x))
