"""Calls without verdicts of their own: unchecked ones, and those in the body of another call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardmap_torch.backends.vmap import BatchedBackend
from shardmap_torch.boundary.call import Call, Untouched, run_body
from shardmap_torch.boundary.casts import apply, entry_shards, exit_joins
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.control.start import current
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.tree import Tree
from shardmap_torch.mesh import PROCESS_KINDS
from shardmap_torch.run import vmap
from shardmap_torch.run.agree import Description, agree, describe, is_compared, posting_errors
from shardmap_torch.run.runtimes import runtime_of
from shardmap_torch.run.safety.equal_values import EqualValues


class Unchecked:
    """The unchecked calls of one function, whose specs give all types."""

    def __init__(self, debug: bool) -> None:
        """With `debug` each call compares all its plain inputs."""
        self._descriptions: Memo[Description] = Memo()
        self._equal = EqualValues(debug)

    def run(self, call: Call, run: Callable[[Call], Tree]) -> Tree:
        """Runs a call.

        Raises:
            CollectiveMismatchError: the other ranks make another call.
        """
        if call.mesh.kind not in PROCESS_KINDS:
            return run(call)
        return posting_errors(call.name, lambda: self._compare_and_run(call, run), call.mesh)

    def _compare_and_run(self, call: Call, run: Callable[[Call], Tree]) -> Tree:
        control = current()
        if control is None:
            return run(call)
        known = self._descriptions.get(_signature(call), lambda: describe(call, None))
        values = self._equal.of(call, control)
        agree(known, now=False, values=values)
        # Nothing has seen its collectives, and gloo ends the process where operands differ.
        control.compares_each = values is not None and values.is_whole
        try:
            result = run(call)
            if control.compares_each:  # one that another rank waits in may be left out
                agree(Description.of(call.name, [f"{call.name} has ended"]))
        finally:
            control.compares_each = False
        return result


def _signature(call: Call) -> tuple[Any, ...]:
    """Returns what the description of a call depends on; shapes and dtypes are in the match."""
    static = call.match.static
    return (
        call.match,
        tuple([x.requires_grad for x in call.leaves if isinstance(x, Tensor)]),
        # By text, as they are compared: True is 1, and 0.0 is -0.0.
        tuple([repr(call.leaves[at]) for at in static if is_compared(call.leaves[at])]),
    )


def run_in(call: Call, scope: Scope | None) -> Tree:
    """Runs a call without a verdict of its own, on its mesh or in the body around it."""
    if scope is None:
        return runtime_of(call.mesh).run(call)
    if isinstance(scope.backend, BatchedBackend):
        return vmap.run(call)
    return _run_inner(call, scope.backend)


def _run_inner(call: Call, backend: Backend) -> Tree:
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
