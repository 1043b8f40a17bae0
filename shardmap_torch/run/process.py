"""Runs a call on this process' rank, or inside a body that already runs on one."""

from shardmap_torch.backend import Backend
from shardmap_torch.boundary import (
    Call,
    Untouched,
    apply,
    crosses,
    entry_cuts,
    exit_joins,
    run_body,
    spec_of,
)
from shardmap_torch.dtensor import Enter, Leave
from shardmap_torch.rule import bind
from shardmap_torch.tree import Tree


def run(call: Call, backend: Backend) -> Tree:
    """Takes global values or DTensors, gives DTensors; plain ones where whole on every rank."""
    local = []
    for position in call.crossing:
        leaf = call.inputs[position]
        local.append(bind(backend, Enter(call.mesh, spec_of(leaf)), leaf.value))
    watch = Untouched(call, local)
    result = run_body(call, backend, local)
    watch.check()
    return result.rebuild(
        [
            bind(backend, Leave(call.mesh, spec_of(leaf)), leaf.value)
            if crosses(leaf)
            else leaf.value
            for leaf in result.outputs
        ]
    )


def run_inside(call: Call, backend: Backend) -> Tree:
    """Binds more axes in a body: values outside are plain, and whole over these axes."""
    local = []
    for position in call.crossing:
        leaf = call.inputs[position]
        local.append(apply(backend, entry_cuts(spec_of(leaf)), leaf.value))
    watch = Untouched(call, local)
    result = run_body(call, backend, local)
    watch.check()
    return result.rebuild(
        [
            apply(backend, exit_joins(spec_of(leaf)), leaf.value) if crosses(leaf) else leaf.value
            for leaf in result.outputs
        ]
    )
