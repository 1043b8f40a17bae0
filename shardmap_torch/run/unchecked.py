"""Unchecked: calls without verdicts; on processes their arguments and specs are still compared."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.control.start import current
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.tree import Tree
from shardmap_torch.mesh import PROCESS_KINDS
from shardmap_torch.run.agree import Description, agree, describe, is_compared
from shardmap_torch.run.safety.error_posting import posting_errors


class Unchecked:
    """The unchecked calls of one function, whose specs give all types."""

    def __init__(self) -> None:
        self._descriptions: Memo[Description] = Memo()

    def run(self, call: Call, run: Callable[[Call, bool], Tree]) -> Tree:
        """Runs a call.

        Raises:
            CollectiveMismatchError: the other ranks make another call.
        """
        if call.mesh.kind not in PROCESS_KINDS:
            return run(call, False)
        return posting_errors(call.mesh, call.name, lambda: self._compare_and_run(call, run))

    def _compare_and_run(self, call: Call, run: Callable[[Call, bool], Tree]) -> Tree:
        if current() is not None:
            key = _signature(call)
            agree(self._descriptions.get(key, lambda: describe(call, None)), now=False)
        return run(call, False)


def _signature(call: Call) -> tuple[Any, ...]:
    """Returns what the description of a call depends on; shapes and dtypes are in the match."""
    static = call.match.static
    return (
        call.match,
        tuple([x.requires_grad for x in call.leaves if isinstance(x, Tensor)]),
        # By text, as they are compared: True is 1, and 0.0 is -0.0.
        tuple([repr(call.leaves[at]) for at in static if is_compared(call.leaves[at])]),
    )
