"""Gradients through the maximum over a sharded dim, where they cancel out, as in a softmax.

Entries that equal the maximum share its gradient: evenly on one device, and on ranks first by ranks
and then by the entries that each has. That makes no difference where the gradient of the maximum
is 0, whatever cotangents the results get. So values that depend on it are followed, row by row, as
`f + degree * m` or as `f * exp(degree * m)`, where `f` does not depend on it. What is
differentiated, or returned with a gradient, must have degree 0. That is a property of the program
on one device, where collectives are the identity. What autograd does not see, because it is
detached, is a constant.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import Any, Final, TypeAlias

from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.rules.infer import is_factor, tensors_of
from shardmap_torch.checker.spmd.layout import (
    Dim,
    Shape,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    unsharded,
)
from shardmap_torch.checker.spmd.recorder import Event, Ref, memory_of
from shardmap_torch.checker.spmd.sharded import PairedCall
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.values.positions import name_of
from shardmap_torch.checker.spmd.values.rows import COPIES, by_rows, followed, rows_of, without_rows
from shardmap_torch.core.torch_private.engine import DisableTorchFunction, OpOverload, forward_level

SHIFT: Final = "shift"
SCALE: Final = "scale"
OTHER: Final = "other"


@dataclass(frozen=True)
class Degree:
    """Dependence of the entries of a value on the maximum of their row.

    Attributes:
        form: SHIFT for `f + degree * m`, SCALE for `f * exp(degree * m)`, OTHER for other
            functions, and for constants that a Function may give a gradient of its own.
        degree: not 0.
        rows: the layout on one device, where each dim of the maximum shards its dims as an axis.
        origin: where the maximum is taken.
        maximum: its number.
    """

    form: str
    degree: Fraction
    rows: ShardedTensor
    origin: str
    maximum: int


Form: TypeAlias = tuple[str, Fraction]
Arguments: TypeAlias = Mapping[str, Any]
"""Arguments by name: `Degree` for values that depend on the maximum, layouts for other tensors."""

Rule: TypeAlias = Callable[[Arguments], Form | None]
"""Returns the form and the degree of a result; None for other functions of the maximum."""


class Maxima:
    """The values that depend on maxima over sharded dims through which gradients flow."""

    def __init__(self, interpreter: Interpreter, notes: Notes, strict: bool) -> None:
        """Knows of none; `strict` refuses all."""
        self._interpreter, self._notes, self._strict = interpreter, notes, strict
        self._known: dict[int, Degree] = {}
        self._written: dict[int, Degree] = {}

    def begin(self, call: PairedCall, index: int) -> None:
        """Follows the maximum that is this result of a call, if gradients flow through it.

        Raises:
            UnrelatedError: it is a maximum of what depends on another one.
        """
        if not any(map(self._flows, call.tensors)):
            return
        origin = self._interpreter.storage_type(call.results[index]).origin()
        if self._strict or forward_level() >= 0 or self._touched(call):
            raise _refusal(origin)
        number, shape = call.event.results[index]
        self._known[number] = Degree(SHIFT, Fraction(1), rows_of(shape), origin, number)

    def reject(self, value: Any, ref: Any, flowing: bool = False) -> None:
        """Refuses values that depend on a maximum; with `flowing` only where a gradient flows.

        Raises:
            UnrelatedError: one does.
        """
        for tensor, found in self._found(value, ref):
            if not flowing or self._depends(tensor):
                raise _refusal(found.origin)

    def keep(self, event: Event, value: Any, ref: Any) -> None:
        """Follows the results of a step that may do anything with these values."""
        for _, found in self._found(value, ref):
            self._note(event, replace(found, form=OTHER))

    def join(self, numbers: Iterable[int], number: int) -> None:
        """Follows what is made of values of these numbers like any function of them."""
        for known in [self._known[each] for each in numbers if each in self._known]:
            self._known.setdefault(number, replace(known, form=OTHER))

    def move(self, event: Event, value: Tensor) -> None:
        """Follows the result of a collective: its operand on one device, perhaps with a new dim."""
        ((_, shape),) = event.results
        for tensor, found in self._found(value, event.arguments["x"]):  # without grad mode
            is_followed = shape == found.rows.global_shape and not self._is_leaf(tensor)
            self._note(event, found if is_followed else replace(found, form=OTHER))

    def follow(self, call: PairedCall) -> None:
        """Follows the results of an operation."""
        touched = self._touched(call) if self._known else []
        if not touched:
            return
        other = replace(touched[0][1], form=OTHER)
        self._written |= dict.fromkeys(map(memory_of, call.written), other)
        if any(self._depends(tensor) for tensor, _ in touched):
            made = self._made(call, touched)
            if made is None or made.degree:
                self._note(call.event, made or other)
        elif not any(map(self._flows, call.tensors)):
            self._note(call.event, other)  # else it is a constant in a step that autograd sees

    def _touched(self, call: PairedCall) -> list[tuple[Tensor, Degree]]:
        """Returns the tensors among the arguments of a call that depend on a maximum."""
        there = call.event.arguments
        arguments = call.arguments.items()
        return [pair for name, x in arguments for pair in self._found(x, there.get(name))]

    def _note(self, event: Event, found: Degree) -> None:
        for number, _ in event.results:  # of memory that is known nothing new is made
            self._known.setdefault(number, found)

    def _found(self, value: Any, ref: Any) -> list[tuple[Tensor, Degree]]:
        """Returns the tensors among these that depend on a maximum, also as constants."""
        if isinstance(ref, tuple) and isinstance(value, list | tuple):
            pairs = zip(value, ref, strict=False)
            return [found for each in pairs for found in self._found(*each)]
        if not (self._known and isinstance(value, Tensor) and isinstance(ref, Ref)):
            return []
        found = self._written.get(memory_of(value)) or self._known.get(self._notes.canonical(ref))
        return [] if found is None else [(value, found)]

    def _flows(self, tensor: Tensor) -> bool:
        return self._interpreter.flows(self._interpreter.base(tensor))

    def _depends(self, tensor: Tensor) -> bool:
        """Returns whether autograd sees that a value depends on a maximum."""
        return self._flows(tensor) and not self._is_leaf(tensor)

    def _is_leaf(self, tensor: Tensor) -> bool:
        """Returns whether gradients end at a tensor, which has been detached then."""
        base = self._interpreter.base(tensor)
        with DisableTorchFunction():
            return base.requires_grad and base.grad_fn is None

    def _made(self, call: PairedCall, touched: Sequence[tuple[Tensor, Degree]]) -> Degree | None:
        """Returns how the result depends on the maximum; None if as another function."""
        depending = {id(tensor): found for tensor, found in touched if self._depends(tensor)}
        first, *more = depending.values()
        forms = {first.form, *(each.form for each in more)}
        maxima = {first.maximum, *(each.maximum for each in more)}
        if OTHER in forms or len(maxima) > 1 or len(call.event.results) > 1:
            return None
        args: dict[str, Any] = {}
        for name, there in call.event.arguments.items():
            value = call.arguments.get(name)
            args[name] = there
            if isinstance(there, Ref) and isinstance(value, Tensor):
                shape = self._notes.find(value, there, name, takes_stacks=True).global_shape
                args[name] = depending.get(id(value)) or without_rows(shape)
            elif any(True for _ in tensors_of(value)):
                return None
        ((_, shape),) = call.event.results
        rule = _FORMS.get(name_of(call.op))
        form = None if rule is None else rule(args)
        rows = None if form is None else _rows(call.op, args, shape, first.rows)
        if form is None or rows is None:
            return None
        return replace(first, form=form[0], degree=form[1], rows=rows)


def _refusal(origin: str) -> UnrelatedError:
    return UnrelatedError(
        f"a gradient flows through the maximum or minimum over a sharded dim, from {origin}, and "
        "does not cancel out: equal entries would share it in other parts than on one device",
        "detach what it is taken of, if it needs no gradient, as x.detach().amax(); a softmax, "
        "e / all_reduce(e.sum()) with e = exp(x - m), may have it.",
    )


# ------------------------------------------------------------------------------------ rows


def _rows(
    op: OpOverload, args: Arguments, shape: Shape, like: ShardedTensor
) -> ShardedTensor | None:
    """Lays out a result by rows of the maximum; None if its entries depend on several rows."""
    special = _ROWS.get(name_of(op))
    if special is not None:
        dims = special(args, shape)
        return None if dims is None else by_rows(dims, shape)
    layouts = {k: x.rows if isinstance(x, Degree) else x for k, x in args.items()}
    return followed(op, layouts, shape, like)


def _reduced(args: Arguments, shape: Shape) -> tuple[Dim, ...] | None:
    rows = args["self"].rows
    rank = len(rows.dims)
    over = args.get("dim")
    over = [over] if isinstance(over, int) else over
    gone = {dim % rank for dim in over} if over else {*range(rank)}
    if any(axes_of(rows.dims[dim]) for dim in gone):
        return None
    kept = () if args.get("keepdim") else None
    left = [kept if dim in gone else each for dim, each in enumerate(rows.dims)]
    return tuple(dim for dim in left if dim is not None)


def _gathered(args: Arguments, shape: Shape) -> tuple[Dim, ...] | None:
    """Entries of the same rows; those at the end may be left out."""
    x = args["self"]
    if not isinstance(x, Degree) or not shape:
        return None
    dim = args["dim"] % len(shape)
    dims = [unsharded(n) if at == dim else x.rows.dims[at] for at, n in enumerate(shape)]
    sizes = zip(shape, x.rows.global_shape, strict=True)
    if axes_of(x.rows.dims[dim]) or any(a != b for at, (a, b) in enumerate(sizes) if at != dim):
        return None
    return tuple(dims)


# ----------------------------------------------------------------------------------- forms


def _kept(args: Arguments) -> Form | None:
    x = args["self"]
    others = [name for name, value in args.items() if isinstance(value, Degree)]
    return (x.form, x.degree) if others == ["self"] else None


def _power(form: str, made: str, factor: Fraction) -> Rule:
    """Makes the rule of a function that gives another form, or a power of the same."""

    def rule(args: Arguments) -> Form | None:
        x = args["self"]
        return (made, x.degree * factor) if x.form == form else None

    return rule


def _negative(args: Arguments) -> Form | None:
    x = args["self"]
    return x.form, -x.degree if x.form == SHIFT else x.degree


def _sum(args: Arguments) -> Form | None:
    x, y, alpha = args["self"], args["other"], args.get("alpha", 1)
    found = [each for each in (x, y) if isinstance(each, Degree)]
    if any(each.form == SCALE for each in found):
        same = len(found) == 2 and found[0].degree == found[1].degree
        return (SCALE, found[0].degree) if same else None
    if not is_factor(alpha):
        return None
    of_x = x.degree if isinstance(x, Degree) else 0
    of_y = y.degree if isinstance(y, Degree) else 0
    return SHIFT, of_x + Fraction(alpha) * of_y


def _difference(args: Arguments) -> Form | None:
    return _sum({**args, "alpha": -args.get("alpha", 1)})


def _multiplied(first: str, second: str, sign: int = 1) -> Rule:
    """Makes the rule of a product, or with -1 of a quotient; of numbers, or of matrices."""

    def rule(args: Arguments) -> Form | None:
        x, y = args[first], args[second]
        if isinstance(x, Degree) and x.form == SHIFT and is_factor(y):
            return SHIFT, x.degree * Fraction(y) ** sign
        found = [each for each in (x, y) if isinstance(each, Degree)]
        if any(each.form == SHIFT for each in found):
            return None
        of_x = x.degree if isinstance(x, Degree) else Fraction(0)
        return SCALE, of_x + (sign * y.degree if isinstance(y, Degree) else 0)

    return rule


def _total(args: Arguments) -> Form | None:
    return _kept(args) if args["self"].form == SCALE else None


def _filled(args: Arguments) -> Form | None:
    """Entries that are replaced by values that do not depend on the maximum in that form."""
    fill = args.get("value", args.get("other"))
    x = args["self"]
    if not isinstance(x, Degree):
        return None
    return _kept(args) if fill == (0 if x.form == SCALE else -inf) else None


_KEPT: Final = (*COPIES, "gather", "mean.dim", "mean")
_ROWS: Final = {
    **dict.fromkeys(("sum", "sum.dim_IntList", "mean", "mean.dim"), _reduced),
    "gather": _gathered,
}

_FORMS: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_KEPT, _kept),
    **dict.fromkeys(("sum", "sum.dim_IntList"), _total),
    "exp": _power(SHIFT, SCALE, Fraction(1)),
    "log": _power(SCALE, SHIFT, Fraction(1)),
    "reciprocal": _power(SCALE, SCALE, Fraction(-1)),
    "neg": _negative,
    **dict.fromkeys(("add.Tensor", "add.Scalar"), _sum),
    **dict.fromkeys(("sub.Tensor", "sub.Scalar"), _difference),
    **dict.fromkeys(("mul.Tensor", "mul.Scalar"), _multiplied("self", "other")),
    **dict.fromkeys(("div.Tensor", "div.Scalar"), _multiplied("self", "other", -1)),
    **dict.fromkeys(("mm", "bmm"), _multiplied("self", "mat2")),
    **dict.fromkeys(("masked_fill.Scalar", "where.ScalarOther"), _filled),
}
