"""Messages of rejections: the operation, its line, the types with their origins, and a repair."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import torch

from shardmap_torch.checker.ir.program import Equation, StorageType, Use, use_of
from shardmap_torch.checker.ir.repairs import Insert, Op, Repair, propose, rejected, rejection_of
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.checker.rules.lattice import (
    BRANCH,
    MIXED,
    SUM_FIRST,
    UNBRANCHED,
    Refusal,
    branch_advice,
    plain,
)
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.table import TABLE
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import AxisType, I, K, Partial, R, V

if TYPE_CHECKING:  # for annotations; the interpreter calls this module
    from shardmap_torch.checker.interpreter.interpreter import Interpreter

MEANING = {
    "I": "equal on all ranks, one computation repeated",
    "R": "equal on all ranks, used differently by each",
    "V": "may differ between ranks",
    "P": "a pending sum over the ranks",
    "K": "equal on all ranks",
    "Z": "zero",
}


_FRIENDLY: Final = {
    "_local_scalar_dense": "taking a Python value",
    "_to_copy": "a cast",
    "_linalg_check_errors": "a factorization",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "native_layer_norm": "layer_norm",
    "threefry": "a draw",
}
"""Readable names of some ATen operations."""


_COMPOSED: Final = frozenset(("isfinite", "isclose", "allclose"))
"""Functions that torch makes of operations which nobody has written."""


def friendly(op: OpOverload) -> str:
    """Returns the users' name of an operation."""
    name = op._schema.name.split("::")[1].removeprefix("_foreach_")
    return _FRIENDLY.get(name, name)


def error(
    interpreter: "Interpreter",
    head: str,
    lines: Sequence[str],
    fix: str,
    placed: bool = True,
    types: Iterable[AxisType] = (),
) -> ShardTypeError:
    """Builds an error about these types from headline, line, details and advice."""
    where = [f"  {place(interpreter)}"] if placed else []
    advice = [f"Fix: {fix}"] if fix else []
    text = "\n".join([f"{interpreter.name}: {head}", *where, *lines, *advice])
    return rejected(text, types)


def place(interpreter: "Interpreter") -> str:
    """Says where a step is, by its line or that of its forward."""
    at, backward = interpreter.site()
    if backward and interpreter.own_site() is not None:
        return f"in the backward at {at}"
    if backward:
        return "in the backward" if at is None else f"in the backward of {at}"
    return "in the body" if at is None else f"at {at}"


def refused(
    interpreter: "Interpreter", op: OpOverload, arguments: Mapping[str, Any], refusal: Refusal
) -> ShardTypeError:
    """Builds the error of an operation whose operands have conflicting types."""
    function = getattr(interpreter.function, "__name__", "")
    name = function if function in _COMPOSED else friendly(op)
    if refusal.axis is None:
        return error(interpreter, f"{op} is refused: {refusal.reason}.", [], "")
    axis = interpreter.axes[refusal.axis]
    types = [each for each in (refusal.first, refusal.second) if each is not None]
    uses = [
        use_of(label, tensor, interpreter.storage_type(tensor))
        for label, value in arguments.items()
        for tensor in tensors_of(value)
    ]
    shown = _of_each(uses, refusal.axis)
    lines = [f"{_describe(use, refusal.axis)}{more}" for use, more in shown]
    lines += _chains([use for use, _ in shown], refusal.axis)
    head = f"{name} over axis {axis!r} of {' and '.join(map(str, types))}: {refusal.reason}."
    if refusal.reason == MIXED and name in ("add", "add_") and interpreter.site()[1]:
        return _both_ways(interpreter, axis, uses, refusal.axis)
    gradients = _pending_gradients(uses, refusal.axis, axis)
    if gradients:
        advice = gradient_sum_advice(interpreter, axis, gradients)
    elif refusal.reason == BRANCH:
        made = [culprit(use.storage_type, refusal.axis, axis).made for use in uses]
        is_index = any(each is not None and "axis_index" in each.name for each in made)
        is_drawn = any(each is not None and each.name in _DRAWING for each in made)
        advice = branch_advice(name, axis, is_index, is_drawn)
        if is_index and all(use.dtype == torch.bool for use in uses):
            advice = f"{UNBRANCHED} Or {advice}"
    else:
        advice = refusal.reason.advise(axis, name)
    types += [use.types[refusal.axis] for use in uses]
    rejection = error(interpreter, head, lines, advice, types=types)
    propose(rejection, _summing(interpreter, gradients, axis))
    if refusal.reason == MIXED and not gradients:
        for use in uses:
            if use.types[refusal.axis] == I:
                _propose_as_replicate(interpreter, rejection, use.storage_type, refusal.axis)
    return rejection


def _propose_as_replicate(
    interpreter: "Interpreter", error: ShardTypeError, value: StorageType, axis: int
) -> None:
    """Proposes to make an equal value R that ranks use differently; lax's may become so."""
    made = culprit(value, axis, interpreter.axes[axis]).made
    rejection_of(error).equal += (made,)
    propose(error, repairs_to(interpreter, value, axis, R))


_DRAWING: Final = frozenset(("rand", "randn", "randint", "randperm", "bernoulli", "multinomial"))
"""Names of equations that draw from torch's own generator."""

GRADIENT: Final = "a gradient"
"""The name of the equation whose result is a gradient that the body has asked for."""


def _pending_gradients(uses: Sequence[Use], axis: int, name: str) -> list[Equation]:
    """Finds the gradients from which operands that are pending sums over the axis come."""
    sums = [use.storage_type for use in uses if use.types[axis] == Partial]
    equations = (culprit(storage_type, axis, name).made for storage_type in sums)
    return list(dict.fromkeys(e for e in equations if e is not None and e.name == GRADIENT))


def _summing(
    interpreter: "Interpreter", equations: Sequence[Equation], axis: str
) -> Iterator[Repair]:
    """Yields the repairs that sum, or average, the gradients taken at one place."""
    asked: tuple[tuple[Op, str], ...] = (("sum", ""), ("mean", " and op='mean'"))
    for (op, more), equation in product(asked, equations):
        if op == "mean" and _is_of_one_loss(interpreter, axis, [equation]):
            continue
        text = f"all_reduce over {axis!r} with dst=I{more} of the gradients taken{_at(equation)}"
        reduced = Insert("all_reduce", axis, (("dst", I), ("op", op)))
        yield Repair(text, gradients={equation.site: reduced})


def _is_of_one_loss(interpreter: "Interpreter", axis: str, gradients: Sequence[Equation]) -> bool:
    """Returns whether gradients are of a loss that the ranks of an axis share.

    Each rank has an addend of such a gradient, and never a mean over its own part.
    """
    at = interpreter.axes.index(axis)
    losses = [types[at] for each in gradients for types in interpreter.losses.get(each, [])]
    return bool(losses) and all(plain(each) in (I, K) for each in losses)


def gradient_sum_advice(
    interpreter: "Interpreter", axis: str, gradients: Sequence[Equation]
) -> str:
    """Returns advice for using gradients of which each rank has an addend."""
    own = ", or with op='mean' if the loss is a mean over each rank's part of the batch"
    one = ": the loss is one for all its ranks, and each has an addend of the gradient"
    more = one if _is_of_one_loss(interpreter, axis, gradients) else own
    return (
        f"sum the gradient first, with all_reduce(g, {axis!r}, dst=I){more}. If each rank's own "
        f"gradient is meant, say so with reinterpret(g, {axis!r}, src=Partial, dst=V)."
    )


def _both_ways(
    interpreter: "Interpreter", axis: str, uses: Sequence[Use], at: int
) -> ShardTypeError:
    """Builds the error of a value used as I and as R, whose gradients autograd would add."""
    forward = interpreter.forward_of_current_node()
    operands = () if forward is None else forward.operands
    alike = (u for u in operands if u.shape == uses[0].shape and not u.types[at].varies)
    equal = {id(use.storage_type): use.storage_type for use in alike}
    value = next(iter(equal.values())) if len(equal) == 1 else None
    others = [culprit(each, at, axis) for each in _invariants_with(interpreter, value, at)]
    lines = [
        f"  one use is with a value that is I, from {others[0].origin()}"
        if others and use.types[at] == I
        else f"  one use gives a gradient that is {use.types[at]}, from {use.storage_type.origin()}"
        for use in uses
    ]
    what = "a value" if value is None or value.leaf is None else value.label
    name = "x" if what == "a value" else what.removeprefix("input ").partition(" (P(")[0]
    both = error(
        interpreter,
        f"{what} is needed as I and as R over {axis!r}: one use is a computation that all ranks "
        "repeat, another differs between ranks.",
        lines,
        f"where each rank uses it differently, use convert({name}, {axis!r}, src=I, dst=R).",
        types=[use.types[at] for use in uses],
    )
    rejection_of(both).may_be_addend = interpreter.may_be_addends
    for each in others:
        propose(both, repairs_to(interpreter, each, at, R))
    return both


def _invariants_with(
    interpreter: "Interpreter", value: StorageType | None, at: int
) -> Iterator[StorageType]:
    """Yields what is I and meets a value in an operation, or what that alone becomes."""
    same = {id(value)}
    for equation in interpreter.equations:
        uses = equation.operands
        if not equation.backward and any(id(use.storage_type) in same for use in uses):
            yield from (use.storage_type for use in uses if use.types[at] == I)
            same |= {id(use.storage_type) for use in equation.results if use.types[at] == K}


def culprit(storage_type: StorageType, axis: int, name: str) -> StorageType:
    """Finds the collective or input from which a value has its type, along equal types."""
    axis_type = plain(storage_type.types[axis])
    while storage_type.made is not None:
        equation = storage_type.made
        if equation.collective is not None and name in equation.collective.axes:
            return storage_type
        sources = [u.storage_type for u in equation.operands if plain(u.types[axis]) == axis_type]
        if not sources or sources[0] is storage_type:
            return storage_type
        storage_type = sources[0]
    return storage_type


def repairs_to(
    interpreter: "Interpreter", storage_type: StorageType, axis: int, axis_type: AxisType
) -> Iterator[Repair]:
    """Yields repairs that give the value the type `axis_type` where its type comes from."""
    name = interpreter.axes[axis]
    source = culprit(storage_type, axis, name)
    if source.made is not None:
        yield from _retype(source.made, axis_type)
    elif source.leaf is not None and axis_type == R and source.types[axis] in (I, K):
        text = f"replicate={{{name!r}}} in the spec of {source.label}"
        yield Repair(text, replicate={source.leaf: name})


def _at(equation: Equation) -> str:
    return "" if equation.site is None else f" at {equation.site.place}"


def _retype(equation: Equation, axis_type: AxisType) -> Iterator[Repair]:
    collective, spot = equation.collective, equation.spot
    if collective is None or spot is None or spot.name != collective.name:
        return
    if (collective.name, collective.src, axis_type) in TABLE:
        text = f"dst={axis_type} in {spot}"
        other = replace(collective, dst=axis_type)
        yield Repair(text, collectives={spot: other}, keeps_op=True)


def _of_each(uses: Sequence[Use], axis: int) -> list[tuple[Use, str]]:
    """Returns the first of the tensors of a list that have one type, and says how many more do."""
    groups: dict[tuple[str, AxisType], list[Use]] = {}
    for use in uses:
        groups.setdefault((use.name, use.types[axis]), []).append(use)
    every = groups.values()
    return [(g[0], f", and {len(g) - 1} more" if len(g) > 1 else "") for g in every]


def _describe(use: Use, axis: int) -> str:
    return f"  {use.name}: {use}, {use.types[axis]}, from {use.storage_type.origin()}"


def _chains(uses: Sequence[Use], axis: int) -> Iterator[str]:
    for use in uses:
        chain = list(chain_of(use.storage_type, axis))
        if use.types[axis].varies and len(chain) > 1:
            what = "varies" if plain(use.types[axis]) == V else "is partial"
            yield f"  {use.name} {what} because of {joined(chain[1:])}"


def joined(chain: Sequence[StorageType]) -> str:
    """Writes steps, each line of code once."""
    made = [each.made for each in chain]
    after = [None if each is None else each.site for each in made[1:]]
    return " <- ".join(
        step.name
        if step is not None and step.site is not None and step.site == site
        else each.origin()
        for each, step, site in zip(chain, made, [*after, None], strict=True)
    )


def chain_of(storage_type: StorageType, axis: int) -> Iterator[StorageType]:
    """Yields the last steps to a varying or partial value, back to the one that made it so."""
    for _ in range(6):
        yield storage_type
        equation = storage_type.made
        if equation is None or equation.collective is not None:
            return
        sources = [u.storage_type for u in equation.operands if u.types[axis].varies]
        if not sources or sources[0] is storage_type:
            return
        storage_type = sources[0]


def source(
    interpreter: "Interpreter", equation: Equation, axis: str, expected: AxisType
) -> ShardTypeError:
    """Builds the error of a collective whose operand has another type than its row."""
    at, use, collective = interpreter.axes.index(axis), equation.operands[0], equation.collective
    assert collective is not None  # what has been left out takes any type
    have = use.types[at]
    # As it stands in the line: `shift`, where that issues a ppermute.
    name = collective.name if equation.spot is None else equation.spot.name
    called = equation.name.replace(collective.name, name, 1)
    head = f"{called} takes {_named(expected)} over {axis!r}, but its operand is {_named(have)}."
    gradients = _pending_gradients([use], at, axis)
    advice = (
        gradient_sum_advice(interpreter, axis, gradients)
        if gradients
        else _source_advice(collective, name, axis, have, expected)
    )
    wrong_type = error(interpreter, head, [_describe(use, at)], advice, types=[have])
    propose(wrong_type, _summing(interpreter, gradients, axis))
    if equation.forward is not None:
        propose(wrong_type, _retype(equation.forward, I if plain(have) in (I, K) else R))
    return wrong_type


def _named(axis_type: AxisType) -> str:
    return f"{axis_type} ({MEANING[plain(axis_type).kind]})"


def _source_advice(
    collective: Collective, called: str, axis: str, have: AxisType, expected: AxisType
) -> str:
    if have in (I, R, K):
        return _equal_advice(collective, called, axis, have, expected)
    if have == Partial:
        return f"take the sum first, with {SUM_FIRST.format(axis=repr(axis))}."
    if have == V:
        return f"all_reduce or all_gather it over {axis!r} first."
    return f"convert(x, {axis!r}, src={have}, dst={expected}) changes the type."


def _equal_advice(
    collective: Collective, called: str, axis: str, have: AxisType, expected: AxisType
) -> str:
    """Returns advice for a collective whose operand is equal on all ranks."""
    name, dst, own = collective.name, collective.dst, R if have == K else have
    if name in ("convert", "reinterpret"):
        if have == dst:
            return f"leave it out: the value is {have} already."
        if (name, own, dst) in TABLE:
            return f"say src={own}."
        return f"convert(x, {axis!r}, src={own}, dst=...) changes its type, without communication."
    if expected == V and name == "all_reduce":
        return "drop the collective: the maximum or minimum of equal values is that value."
    first = f" after convert(x, {axis!r}, src=I, dst=R)" if have == I else ""
    return (
        f"drop the collective: {called} of what is equal on all ranks takes n copies; if n copies "
        f"are meant, say so with reinterpret(x, {axis!r}, src=R, dst={expected}){first}."
    )


def seeded(interpreter: "Interpreter", axis: int, storage_type: StorageType) -> ShardTypeError:
    """Builds the error of differentiating a replicate value."""
    name = interpreter.axes[axis]
    rejection = error(
        interpreter,
        f"the gradient of a value that is R over {name!r} would be n times too large: every rank "
        "starts with a full cotangent, and they are summed.",
        [f"  the value is from {storage_type.origin()}", *_became(storage_type, axis, name)],
        f"make it I: with dst=I where it is reduced over {name!r}, or with "
        f"convert(x, {name!r}, src=R, dst=I).",
        types=[R],
    )
    propose(rejection, repairs_to(interpreter, storage_type, axis, I))
    return rejection


def _became(storage_type: StorageType, axis: int, name: str) -> list[str]:
    first = culprit(storage_type, axis, name)
    because = f"  it is {storage_type.types[axis]} because of {first.origin()}"
    return [] if first is storage_type else [because]


def cotangent(
    interpreter: "Interpreter",
    axis: int,
    axis_type: AxisType,
    storage_type: StorageType,
    what: str,
    value: StorageType | None = None,
) -> ShardTypeError:
    """Builds the error of a gradient whose type does not match its value's."""
    name = interpreter.axes[axis]
    have = storage_type.types[axis]
    mismatch = error(
        interpreter,
        f"over {name!r}, {what} is {_named(axis_type)} and gets a gradient that is {_named(have)}: "
        f"{wrong(axis_type, have)}.",
        [f"  the gradient is from {storage_type.origin()}"],
        gradient_advice(axis_type, name),
        placed=value is None,
        types=[axis_type, have],
    )
    if value is not None:
        _propose_as_replicate(interpreter, mismatch, value, axis)
    return mismatch


def wrong(axis_type: AxisType, have: AxisType) -> str:
    """Explains why a gradient of this type is invalid."""
    if plain(axis_type) == I and plain(have) in (V, Partial, R):
        return "each rank has its own part of it, and nothing sums them"
    if have in (R, I, K):
        return "too large or too small by the number of ranks"
    return "its addends are not yet summed"


def gradient_advice(axis_type: AxisType, axis: str) -> str:
    """Returns advice for a gradient of an invalid type."""
    if plain(axis_type) == I:
        return (
            f"use the value as R, with convert(x, {axis!r}, src=I, dst=R) or with replicate= in "
            "its spec, which sums the gradient."
        )
    return ""
