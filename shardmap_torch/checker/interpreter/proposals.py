"""Proposes repairs where an operation, a collective or a result is refused.

Each gets what its operands are there, so that nothing is interpreted again to find them.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.ir.insertions import LIKELY, State, exchanges, inserts, state_of
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.ir.rejections import propose, rejection_of
from shardmap_torch.checker.ir.repairs import Op, Repair, collective_call, function_call
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import base_of, is_batched
from shardmap_torch.core.tree import flatten, unflatten
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.spec import P

if TYPE_CHECKING:  # for annotations; the interpreter calls this module
    from shardmap_torch.checker.interpreter.interpreter import Interpreter


def state(interpreter: "Interpreter", x: Tensor) -> tuple[State, P | None]:
    """Returns what is known of a tensor: its type along each axis, and its layout."""
    spec, storage_type = interpreter.observer.spec_of(base_of(x)), interpreter.storage_type(x)
    types = interpreter.by_axis(storage_type.types)
    return state_of(types, spec, interpreter.mesh.shape), spec


def distinct(args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that a call gets, each of them once."""
    values = [*args, *kwargs.values()]
    return list({id(x): x for value in values for x in tensors_of(value)}.values())


def repaired(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a call of torch under the repair that is tried."""
    if running_backward() != NO_BACKWARD:
        return args, kwargs
    spot, operands = function_call(func), interpreter.repair.operands
    tensors = distinct(args, kwargs)
    changes = {at: insert for (where, at), insert in operands.items() if where == spot}
    changed = {id(x): changes[at].apply(x) for at, x in enumerate(tensors) if at in changes}
    if not changed:
        return args, kwargs
    leaves, structure = flatten((tuple(args), kwargs))
    found: tuple[Any, Any] = unflatten(structure, [changed.get(id(x), x) for x in leaves])
    return found


def at_call(
    interpreter: "Interpreter", error: ShardTypeError, func: Any, args: Any, kwargs: Any
) -> None:
    """Proposes to apply a collective to an operand of the call of torch that is refused.

    Where nothing is compared with one device, only errors about types have to do with operands.
    """
    is_compared = interpreter.observer is not UNOBSERVED
    if running_backward() != NO_BACKWARD or not (is_compared or rejection_of(error).types):
        return
    spot = function_call(func)
    tensors = [
        (at, x)
        for at, x in enumerate(distinct(args, kwargs))
        if not is_batched(x) and _is_reducible(interpreter, x)
    ]
    if spot is None or not tensors:
        return
    known = [state(interpreter, x) for _, x in tensors]
    found: list[tuple[int, Repair]] = []
    for (at, _), own in zip(tensors, known, strict=True):
        peers = [other[0] for other in known if other is not own]
        for kind, insert in inserts(*own, peers):
            text = f"{insert.of('x')} for x, operand {at + 1} of {spot}"
            found.append((LIKELY.find(kind), Repair(text, operands={(spot, at): insert})))
    found.sort(key=itemgetter(0))
    propose(error, [*reductions(interpreter, [x for _, x in tensors]), *map(itemgetter(1), found)])


def at_collective(
    interpreter: "Interpreter", error: ShardTypeError, move: str, collective: Collective, x: Tensor
) -> None:
    """Proposes another collective in place of the one that is refused, or none."""
    spot = None if running_backward() != NO_BACKWARD else collective_call()
    if spot is None:
        return
    found = exchanges(spot, collective, state(interpreter, x)[0])
    if move in EXTREMA:  # of which only the transpose is exchanged
        found = (each for each in found if each.collectives[spot] is None)
    propose(error, [*reductions(interpreter, [x]), *found])


def _is_reducible(interpreter: "Interpreter", x: Tensor) -> bool:
    """Returns whether a value is known, and does not vary because of `axis_index` alone."""
    storage_type = interpreter.known_storage_type(x)
    return storage_type is not None and not any(
        storage_type.types[at].varies and messages.is_rank(storage_type, at, axis)
        for at, axis in enumerate(interpreter.axes)
    )


_OTHER: Final[Mapping[str, Op]] = {"sum": "mean", "mean": "sum"}


def reductions(interpreter: "Interpreter", tensors: Sequence[Tensor]) -> Iterator[Repair]:
    """Yields other ops of reductions, if a value is a multiple of what it is on one device."""
    observer = interpreter.observer
    scales = {observer.scale_of(base_of(x)) for x in tensors}
    for spot, op in reversed(interpreter.reductions.items()):
        if any(scale > 1 if op == "sum" else scale < 1 for scale in scales):
            other = _OTHER[op]
            yield Repair(f"op={other!r} in {spot}", ops={spot: other})
