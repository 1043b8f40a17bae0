"""Types the draws of a body from torch's default generator.

A draw varies over the axes over which its operand varies: `F.dropout(x)` drops the same entries of
values that are equal on ranks. A factory, such as `torch.rand(3)`, has no operand, and gives each
rank its own numbers. Runs seed the generator accordingly on every mesh; see `run.drawing`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from shardmap_torch.checker.ir.outcomes import Traits
from shardmap_torch.checker.ir.program import StorageType, varying
from shardmap_torch.checker.ir.symbolic import Numbers
from shardmap_torch.checker.rules.infer import Types, draws, may_draw, signature_of, tensors_of
from shardmap_torch.collectives.scope import Scope, current_scope
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import K, V

DRAW = "draw"


class Drawing(Protocol):
    """The part of an interpreter that draws are typed by."""

    name: str
    axes: Sequence[str]
    is_decomposing: bool
    traits: Traits
    numbers: Numbers

    def needs_ranks(self, what: str) -> None:
        """Records code that the mesh must not batch."""

    def storage_type(self, tensor: Tensor) -> StorageType:
        """Returns the storage type of a tensor."""
        ...


def drawn_types(interpreter: Drawing, op: OpOverload, arguments: Mapping[str, Any]) -> Types | None:
    """Returns V along the axes over which the ranks draw different numbers, K along the others.

    Records the draw for the runs. Returns None if runs do not seed it: for no draw, one from the
    user's own generator, and one inside of an operator.

    Raises:
        ShardTypeError: another path, which a run cannot distinguish, has other types.
    """
    if not may_draw(op) or not draws(op, arguments):
        return None
    interpreter.needs_ranks("a draw of random numbers")
    scope = current_scope()
    seeded = arguments.get("generator") is None and not interpreter.is_decomposing
    if scope is None or scope.monitor is None or not seeded:
        return None
    interpreter.traits.draws = True
    own = _own_axes(interpreter, scope, op, arguments)
    types = tuple(V if at in own else K for at in range(len(interpreter.axes)))
    note = scope.monitor.note((DRAW, str(op)))
    if note.types not in ((), types):
        unlike = ShardTypeError(
            f"{interpreter.name}: a draw at {call_site()} is {list(note.types)} over "
            f"{list(interpreter.axes)} on one path through the body and {list(types)} on another, "
            "and a run cannot tell which it takes. Draw before the branch, or from a random key."
        )
        interpreter.numbers.branches.fail(unlike)
    note.types = types
    return types


def _own_axes(
    interpreter: Drawing, scope: Scope, op: OpOverload, arguments: Mapping[str, Any]
) -> frozenset[int]:
    """Returns the axes, by position, over which each rank draws its own numbers."""
    outs = signature_of(op).outs
    read = [
        interpreter.storage_type(tensor)
        for name, value in arguments.items()
        if name not in outs
        for tensor in tensors_of(value)
    ]
    if all(map(_is_from_nothing, read)):
        return frozenset(at for at, axis in enumerate(interpreter.axes) if axis in scope.axes)
    # Memory without a type yet, as of empty_like, is batched like its model.
    return frozenset[int]().union(*(varying(each.types) | each.batched_over for each in read))


def _is_from_nothing(storage_type: StorageType) -> bool:
    """Returns whether a factory made it, such as the memory of `torch.empty(3).uniform_()`."""
    made = storage_type.made
    return made is not None and not made.operands and not varying(storage_type.types)
