"""Runs a call on this process' rank, or inside a body that already runs on one."""

from shardmap_torch.boundary.call import Call, Untouched, run_body
from shardmap_torch.boundary.casts import apply, entry_shards, exit_joins
from shardmap_torch.boundary.dtensor import enter, leave
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.core.tree import Tree
from shardmap_torch.run.aliasing import apart


def run(call: Call, backend: Backend) -> Tree:
    """Takes global values or DTensors, gives DTensors; plain ones where whole on every rank."""
    local = [enter(backend, call.mesh, call.match.spec(i), call.leaves[i]) for i in call.crossing]
    watch = Untouched(call, local)
    result = run_body(call, backend, local)
    watch.check()
    leaves = list(result.leaves)
    values = apart([leaves[i] for i in result.match.crossing], call.leaves)
    for i, value in zip(result.match.crossing, values, strict=True):
        leaves[i] = leave(backend, call.mesh, result.match.spec(i), value)
    return result.rebuild(leaves)


def run_inside(call: Call, backend: Backend) -> Tree:
    """Binds more axes in a body: values outside are plain, and whole over these axes."""
    local = [
        apply(backend, entry_shards(call.match.spec(i)), call.leaves[i]) for i in call.crossing
    ]
    watch = Untouched(call, local)
    result = run_body(call, backend, local)
    watch.check()
    leaves = list(result.leaves)
    for i in result.match.crossing:
        leaves[i] = apply(backend, exit_joins(result.match.spec(i)), leaves[i])
    return result.rebuild(leaves)
