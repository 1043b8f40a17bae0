"""One rule for every cotangent, whoever has made it: autograd, a Function, a hook, `grad_outputs=`.

The gradient of an R value is an addend on each rank: what is equal on all of them would be counted
n times. The gradient of an I value is one value. Zero fits all. A value that is neither yet, K, is
made I by a gradient that is equal on all ranks, and R by one that varies.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.ir.program import Use, varying
from shardmap_torch.checker.ir.repairs import rejected, rejection_of
from shardmap_torch.checker.rules.lattice import as_cotangent
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import AxisType, I, K, R, V

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from shardmap_torch.checker.interpreter.interpreter import Interpreter


@dataclass(frozen=True)
class Giver:
    """The user's code that gives a value its gradient, in words for messages.

    Attributes:
        value: the value, such as "an operand of Own".
        gives: what gives it the gradient, such as "its backward".
        site: the line where that is defined.
        uses: the axes over which the cotangents vary that it makes the gradient of.
    """

    value: str
    gives: str
    site: Site | None = None
    uses: frozenset[int] = frozenset()


def settled(interpreter: "Interpreter", value: Use, gradient: Tensor, giver: Giver) -> Tensor:
    """Returns a gradient with the types that it has as the gradient of a value.

    Raises:
        ShardTypeError: it is none.
    """
    have = interpreter.storage_type(gradient)
    parts = parts_of(interpreter, value.types, gradient)
    types: list[AxisType] = []
    for at, (own, given) in enumerate(zip(value.types, have.types, strict=True)):
        found = V if at in parts else as_cotangent(own, given)
        is_open = own == given == K and at in giver.uses and not interpreter.observer.compares
        if found is None or (is_open and interpreter.mesh.shape[interpreter.axes[at]] > 1):
            raise _wrong(interpreter, at, value, gradient, giver)
        types.append(found)
    made = retyped(interpreter, gradient, types, parts)
    if not interpreter.goes_on([made]):  # it depends on no cotangent, and is one from here on
        made = made.clone() if made is gradient else made
        interpreter.storage_type(made).tasks |= {interpreter.running[-1]}
    return made


def retyped(
    interpreter: "Interpreter", gradient: Tensor, types: Sequence[AxisType], parts: frozenset[int]
) -> Tensor:
    """Returns the gradient with these types; over the axes `parts` ranks have equal addends."""
    sizes = [interpreter.mesh.shape[axis] for axis in interpreter.axes]
    # Of one rank nothing has to be decided; the ranks' program may do so in another way.
    found = interpreter.retyped(
        gradient, lambda at, have: K if (types[at], sizes[at]) == (I, 1) else types[at]
    )
    if parts:
        interpreter.observer.on_parts(base_of(found), [interpreter.axes[at] for at in parts])
    return found


def parts_of(
    interpreter: "Interpreter", types: tuple[AxisType, ...], gradient: Tensor
) -> frozenset[int]:
    """Returns the axes of R values over which an equal gradient is the n-th part of one device's.

    Such as 1 / n of a constant: equal addends, which add up to the gradient. Only a comparison with
    one device tells.
    """
    have = interpreter.storage_type(gradient).types
    own = [at for at, each in enumerate(types) if each == R and have[at] in (I, R, K)]
    undecided = [at for at, each in enumerate(types) if each == K and have[at] in (I, R, K)]
    scale = interpreter.observer.scale_of(base_of(gradient))
    sizes = interpreter.mesh.shape
    for found in (own, own + undecided):
        if scale * prod(sizes[interpreter.axes[at]] for at in found) == 1:
            return frozenset(found)
    return frozenset()


def uses_of(interpreter: "Interpreter", cotangents: Iterable[Tensor | None]) -> frozenset[int]:
    """Returns the axes over which one of these cotangents varies."""
    types = [interpreter.storage_type(base_of(x)).types for x in cotangents if x is not None]
    return frozenset[int]().union(*map(varying, types))


_COUNTED: Final = (
    "the gradient of an R value is an addend on each rank, and equal ones add up to n times it"
)
_OPEN: Final = (
    "only a comparison with one device tells whether that is all of it or each rank's addend"
)
_DECIDED: Final = (
    "name {axis!r} in invariant= of the input's spec, or make it I where it is made, if it is all "
    "of it; or check='global', which compares it."
)
_AS_R: Final = (
    "give it the operand as R, with convert(x, {axis!r}, src=I, dst=R), or sum the gradient in the "
    "backward of a shardmap_torch.Function."
)
_AS_I: Final = (
    "make the value I, with dst=I where it is reduced over {axis!r} or convert(x, {axis!r}, src=R, "
    "dst=I): its gradient is one value, equal on all ranks. Or give an addend of it, in a "
    "shardmap_torch.Function, as convert(g, {axis!r}, src=I, dst=Partial)."
)


def _wrong(
    interpreter: "Interpreter", at: int, value: Use, gradient: Tensor, giver: Giver
) -> ShardTypeError:
    axis, own, given = interpreter.axes[at], value.types[at], interpreter.storage_type(gradient)
    have = given.types[at]
    is_counted = have in (I, R, K)
    why, fix = (_COUNTED, _AS_I) if is_counted else (messages.wrong(own, have), _AS_R)
    if own == have == K:
        why, fix = _OPEN, _DECIDED
    error = rejected(
        f"{interpreter.name}: over {axis!r}, {giver.value} is {own} and {giver.gives} gives it a "
        f"gradient that is {have}: {why}.\n"
        f"  in the backward{'' if giver.site is None else f' at {giver.site}'}\n"
        f"  the operand is {value}, from {value.storage_type.origin()}\n"
        f"  the gradient is from {given.origin()}\n"
        f"Fix: {fix.format(axis=axis)}",
        proposals=messages.repairs_to(interpreter, value.storage_type, at, I if is_counted else R),
    )
    rejection_of(error).may_be_addend = is_counted
    return error
