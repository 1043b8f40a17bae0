"""Runs a call in the body of another one, on the rank that runs that body."""

from shardmap_torch.boundary.call import Call, Untouched, run_body
from shardmap_torch.boundary.casts import apply, entry_shards, exit_joins
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.core.tree import Tree


def run(call: Call, backend: Backend) -> Tree:
    """Runs an inner call: values outside are plain, and global over the axes that it binds."""
    # Values that are sharded over automatic axes are global in an inner body, which may bind these.
    local = [
        apply(backend, entry_shards(call.match.spec(i)), backend.unshared(call.leaves[i]))
        for i in call.crossing
    ]
    watch = Untouched(call, local)
    result = run_body(call, backend, local)
    watch.check()
    specs = map(result.match.spec, result.match.crossing)
    pairs = zip(specs, result.crossing, strict=True)
    return result.rebuild([apply(backend, exit_joins(spec), value) for spec, value in pairs])
