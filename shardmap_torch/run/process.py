"""Runs a call on this process' rank, or inside a body that already runs on one."""

from torch import Tensor

from shardmap_torch.backend import Backend
from shardmap_torch.boundary import Call, Untouched, _apply, entry_cuts, exit_joins, run_body
from shardmap_torch.dtensor import Enter, Leave
from shardmap_torch.rule import bind
from shardmap_torch.spec import P
from shardmap_torch.tree import Placed, Tree


def run(call: Call, backend: Backend) -> Tree:
    """Takes global values or DTensors, gives DTensors; plain ones where whole on every rank."""
    local = []
    for position in call.crossing:
        leaf = call.inputs[position]
        local.append(bind(backend, Enter(call.mesh, _spec(leaf)), leaf.value))
    watch = Untouched(call)
    result = run_body(call, backend, local)
    watch.check()
    return result.rebuild(
        [
            bind(backend, Leave(call.mesh, leaf.spec), leaf.value) if _joins(leaf) else leaf.value
            for leaf in result.outputs
        ]
    )


def run_inside(call: Call, backend: Backend) -> Tree:
    """Binds more axes in a body: values outside are plain, and whole over these axes."""
    local = []
    for position in call.crossing:
        leaf = call.inputs[position]
        local.append(_apply(backend, entry_cuts(_spec(leaf)), leaf.value))
    result = run_body(call, backend, local)
    return result.rebuild(
        [
            _apply(backend, exit_joins(_spec(leaf)), leaf.value) if _joins(leaf) else leaf.value
            for leaf in result.outputs
        ]
    )


def _joins(leaf: Placed[P | None]) -> bool:
    return leaf.spec is not None and isinstance(leaf.value, Tensor)


def _spec(leaf: Placed[P | None]) -> P:
    assert leaf.spec is not None  # it crosses
    return leaf.spec
