"""Runtime of process-group meshes: this process is one rank."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.boundary.call import Call, Result, Untouched, result_of, run_body
from shardmap_torch.boundary.dtensor import Crossings, Enter, Leave
from shardmap_torch.boundary.matching import Match
from shardmap_torch.boundary.placements import placements_of
from shardmap_torch.collectives.autograd import bind, is_transformed
from shardmap_torch.core.caching import constant
from shardmap_torch.core.storage import apart
from shardmap_torch.core.tree import Tree, unflatten
from shardmap_torch.mesh import Mesh
from shardmap_torch.mixing.backend import SharingBackend
from shardmap_torch.mixing.layouts import automatic_axes
from shardmap_torch.mixing.results import guard
from shardmap_torch.mixing.run import entry_specs, run_shared
from shardmap_torch.ops.asking import ANSWERING
from shardmap_torch.run.agree import number
from shardmap_torch.run.drawing import Drawing, agreed
from shardmap_torch.run.recorded.recordings import run_process
from shardmap_torch.spec import P

has_data: Final = True


_MESHES: Final = 4
"""Equal meshes that a signature remembers at a time."""


def run(call: Call) -> Tree:
    """Runs a call on this process; results are DTensors, or plain where equal on all ranks."""
    mesh, leaves = call.mesh, call.leaves
    if call.mapped != mesh.axis_names and (shared := entry_specs(call)) is not None:
        return _run_shared(call, _backend_of(mesh), shared)
    traced = torch.compiler.is_dynamo_compiling()
    crossings = _crossings(mesh, call.match, traced)
    backend, follows = crossings.backend, traced or is_transformed()
    local = crossings.enter([leaves[i] for i in call.match.crossing], follows)
    watch = Untouched(call, local)
    drawing = Drawing(call.mesh, backend.place, agreed(backend).get) if call.draws else None
    if call.compiled is not None:
        result = result_of(call, call.compiled(crossings, local))
    elif call.recordings is not None:
        result = run_process(call, backend, local)
    else:
        result = run_body(call, backend, local, drawing)
    watch.check()
    kept = [x for at, x in enumerate(leaves) if at not in call.donated] if call.donated else leaves
    values = apart(result.crossing, kept, _sharing(call, result) if traced else None)
    left = _crossings(mesh, result.match, traced).leave(values, follows)
    if not (follows or crossings.is_alone):
        number(left)
        # Where autograd goes on, torch's rules would go on, too.
        left = [guard(x) if x.requires_grad else x for x in left]
    return result.rebuild(left)


def run_local(call: Call) -> Tree:
    """Runs the body of a call whose leaves are local already; returns local values."""
    local = [call.leaves[position] for position in call.crossing]
    result = run_body(call, _backend_of(call.mesh), local)
    return unflatten(result.structure, result.leaves)


def _run_shared(call: Call, backend: ProcessGroupBackend, specs: Sequence[P]) -> Tree:
    """Runs a call with arguments that automatic axes shard."""
    drawing = Drawing(call.mesh, backend.place, agreed(backend).get) if call.draws else None
    mesh, axes = call.mesh, automatic_axes(call.mesh, call.bound)
    sharing = mesh._state.sharing.get(axes, lambda: SharingBackend(mesh, axes))
    result, values = run_shared(call, sharing, specs, drawing)
    return result.rebuild(apart(values, call.leaves, _sharing(call, result)))


def _sharing(call: Call, result: Result) -> Mapping[int, int] | None:
    """The argument whose memory each result that crosses may have; None where nothing is known."""
    known = call.sharing
    if known is None:
        return None
    return {n: known[i] for n, i in enumerate(result.match.crossing) if i in known}


def _crossings(mesh: Mesh, match: Match, traced: bool) -> Crossings:
    """Returns the cache of a match for a mesh, by identity: equal meshes may have other groups."""
    if not traced:
        known: Crossings | None = match.crossings.get(id(mesh))
        if known is not None and known.mesh is mesh:
            return known
    new = Crossings(mesh, _backend_of(mesh), [match.spec(i) for i in match.crossing])
    if not traced:
        if len(match.crossings) >= _MESHES:  # those that are closed go, too
            match.crossings.clear()
        match.crossings[id(mesh)] = new
        mesh._state.crossings.add(new)
    return new


def place(mesh: Mesh, spec: P, x: Tensor, as_dtensor: bool) -> Tensor:
    """Keeps this rank's shard of a global value, as a DTensor where it is sharded."""
    backend = _backend_of(mesh)
    local = bind(backend, Enter(mesh, spec), x)
    if spec.sharded_dims or as_dtensor:  # a view would keep the global value, and write into it
        (local,) = apart([local], [x], {0: 0})
    placements = placements_of(mesh, spec) if as_dtensor and not spec.partial else None
    return bind(backend, Leave(mesh, spec, placements), local)


def join(mesh: Mesh, spec: P, x: Tensor) -> Tensor:
    """Makes a DTensor of this rank's shard, without communication."""
    return bind(_backend_of(mesh), Leave(mesh, spec), x)


def gather_shards(mesh: Mesh, x: Tensor) -> Tensor:
    """Gathers a DTensor to a plain global value, differentiably."""
    return bind(_backend_of(mesh), Enter(mesh, P()), x)


def _backend_of(mesh: Mesh) -> ProcessGroupBackend:
    _make_backend(mesh)
    backend: ProcessGroupBackend = mesh._state.backend
    return backend


# A constant, so that Dynamo calls it: it cannot keep an object made while it traces.
@constant
def _make_backend(mesh: Mesh) -> None:
    if mesh._state.backend is None:
        ANSWERING.begin()
        mesh._state.backend = ProcessGroupBackend(mesh)
