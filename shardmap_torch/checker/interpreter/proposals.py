"""Proposes repairs where an operation, a collective or a result is refused.

Each gets what its operands are there, so that nothing is interpreted again to find them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, strided

from shardmap_torch.checker.ir.program import Equation, StorageType
from shardmap_torch.checker.ir.repairs import (
    FIRST,
    Insert,
    Op,
    Repair,
    Spot,
    collective_call,
    function_call,
    propose,
    rejection_of,
)
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.table import TABLE
from shardmap_torch.core.functorch import base_of, is_batched
from shardmap_torch.core.source_location import user_call
from shardmap_torch.core.source_text import first_operand, operand_texts
from shardmap_torch.core.tree import flatten, unflatten
from shardmap_torch.errors import ShardMapError, ShardTypeError, show_shape
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, V

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from shardmap_torch.checker.interpreter.interpreter import Interpreter

State = Mapping[str, AxisType]
"""The type of a tensor along each axis of several ranks; S where it is known to be sharded."""


def _options(**given: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(given.items())


_CALLS: Final[Mapping[str, Sequence[tuple[str, Any]]]] = {
    "P": [("all_reduce", _options(dst=R)), ("all_reduce", _options(dst=I))],
    "V": [
        ("all_reduce", _options(dst=I)),
        ("all_reduce", _options(dst=I, op="mean")),
        ("all_reduce", _options(dst=R, op="max")),
    ],
    "M": [("all_reduce", _options(dst=dst, op="mean")) for dst in (R, I)],
    "I": [("convert", _options(src=I, dst=R)), ("convert", _options(src=I, dst=Partial))],
    "K": [("convert", _options(src=I, dst=R)), ("convert", _options(src=R, dst=Partial))],
    "R": [("convert", _options(src=R, dst=I)), ("convert", _options(src=R, dst=Partial))],
}
"""Calls that take a tensor of one type to another, the likeliest first."""

LIKELY: Final = "PSVIKR"
"""The likelier a type is to be refused, the earlier."""

_SOURCE: Final = {"I": I, "R": R, "K": R}


def inserts(
    state: State, spec: P | None, peers: Sequence[State], is_mean: bool = False
) -> Iterator[tuple[str, Insert]]:
    """Yields what could be applied to an operand, with the letter of the type that it changes.

    Args:
        state: of the operand.
        spec: its layout, if it is known.
        peers: the states of the call's other operands.
        is_mean: whether addends are means of each rank's part, which nothing else makes right.
    """
    for axis, have in state.items():
        kind = have.kind
        if have == Partial and is_mean:
            yield from ((kind, Insert(name, axis, options)) for name, options in _CALLS["M"])
            continue
        suiting = dict.fromkeys(peer.get(axis, K) for peer in peers)
        for need in suiting:
            yield from ((kind, each) for each in _to(axis, have, need))
        if have.dim is not None:
            yield from ((kind, each) for each in gathers(axis, have.dim, spec))
        yield from ((kind, Insert(name, axis, options)) for name, options in _CALLS.get(kind, ()))


def gathers(axis: str, dim: int, spec: P | None) -> Iterator[Insert]:
    """Yields gathers of a dim, of all axes that shard it at once."""
    axes = () if spec is None else dict(spec.sharded_dims).get(dim, ())
    if axes and axis != axes[-1]:
        return
    for dst in (R, I):
        yield Insert("all_gather", axes if len(axes) > 1 else axis, _options(dim=dim, dst=dst))


def _to(axis: str, have: AxisType, need: AxisType) -> Iterator[Insert]:
    """Yields the call after which a tensor is sharded, or a pending sum, as another is."""
    source = _SOURCE.get(have.kind)
    if need.kind == "S" and source is not None:
        yield Insert("convert", axis, _options(src=source, dst=V, dim=need.dim))
    if need.kind == "S" and have == Partial:
        yield Insert("reduce_scatter", axis, _options(dim=need.dim))
    if need.kind == have.kind == "S" and have != need:
        yield Insert("all_to_all", axis, _options(split_dim=need.dim, concat_dim=have.dim))
    if need == Partial and source is not None:
        yield Insert("convert", axis, _options(src=source, dst=Partial))
    if need == Partial and have.kind == "S":
        yield Insert("convert", axis, _options(src=V, dst=Partial, dim=have.dim))


def to_spec(state: State, own: P | None, spec: P) -> Sequence[Insert]:
    """Returns what a result needs so that it is as its spec promises, over all axes."""
    found: list[Insert] = []
    for axis, have in state.items():
        need = spec.types.get(axis, I)
        if need in (I, R) and have.kind in "PV":
            found.append(Insert("all_reduce", axis, _options(dst=I)))
        elif need in (I, R) and have.kind == "S":
            found += list(gathers(axis, have.dim or 0, own))[1:]  # to I
        elif need != have:
            found += _to(axis, have, need)
    return found


def exchanges(spot: Spot, collective: Collective, state: State) -> Iterator[Repair]:
    """Yields what to call in place of a collective that does not take an operand of this state."""
    unequal = tuple(axis for axis in collective.axes if state.get(axis, K).kind not in _SOURCE)
    without = Repair(f"leave out {spot}", collectives={spot: None})
    if not unequal:
        yield without
    elif unequal != collective.axes and collective.name in _WRITTEN:
        yield _instead(spot, collective, replace(collective, axes=unequal))
    met = {state.get(axis, K) for axis in collective.axes}
    if len(met) == 1:
        for dst in dict.fromkeys([collective.dst, R, I]):
            for other in _taking(min(met, key=str), dst, collective):
                if other != collective:
                    yield _instead(spot, collective, other)
    if unequal:
        yield without


_TAKES: Final = {"P": "PV", "V": "SV"}
"""Letters of the types of which a collective takes one, by the letter of its source type."""


def _over_others(spot: Spot, collective: Collective, state: State) -> Iterator[Repair]:
    """Yields the collective over another axis, along which the operand is what it takes."""
    for other, have in state.items():
        takes = have.kind in _TAKES.get(collective.src.kind, "")
        if takes and other not in collective.axes and have.dim in (None, collective.dim):
            yield from _over(spot, collective, other)


def moved_over_others(
    interpreter: "Interpreter", x: Tensor, own: State, peers: Sequence[State] = ()
) -> Iterator[Repair]:
    """Yields other axes for the collective that a value comes from.

    Those along which it still is what that takes, and those that shard other operands: as where
    hidden states are scattered over one group, and their mask over another.
    """
    made = _last_collective(interpreter.storage_type(x))
    if made is None or made.collective is None or made.spot is None:
        return
    need = {"V": "SV", "P": "P"}.get(made.collective.src.kind, "")
    meant = [axis for axis, have in own.items() if have.kind in need]
    meant += [axis for each in peers for axis, have in each.items() if have.kind in "SV"]
    for axis in dict.fromkeys(meant):
        yield from _over(made.spot, made.collective, axis)


def along_its_dims(interpreter: "Interpreter", x: Tensor, own: State, spec: P) -> Iterator[Repair]:
    """Yields the collective that a result comes from, along the dim that its spec shards."""
    made = _last_collective(interpreter.storage_type(x))
    if made is None or made.spot is None or made.collective is None:
        return
    for axis in made.collective.axes:
        have, need = own.get(axis, K), spec.types.get(axis, I)
        if have.kind == need.kind == "S" and have.dim == made.collective.dim != need.dim:
            other = replace(made.collective, dim=need.dim or 0)
            yield _instead(made.spot, made.collective, other)


def _along_others(value: StorageType) -> Iterator[Repair]:
    """Yields the collective that a value comes from along each of the other dims of its operand."""
    made = _last_collective(value)
    if made is not None and made.spot is not None and made.collective is not None:
        for dim in range(len(made.operands[0].shape)):
            other = replace(made.collective, dim=dim)
            if other != made.collective and V in (other.src, other.dst):
                yield _instead(made.spot, made.collective, other)


def _last_collective(storage_type: StorageType) -> Equation | None:
    """Returns the collective from which a value comes, by first operands; of few steps."""
    for _ in range(6):
        made = storage_type.made
        if made is None or made.collective is not None or not made.operands:
            return made
        storage_type = made.operands[0].storage_type  # itself, if it is written
    return None


def _over(spot: Spot, collective: Collective, other: str) -> Iterator[Repair]:
    """Yields a collective over another axis than the one it has now, if that is its only one."""
    axis, *more = collective.axes
    if collective.name in _WRITTEN and not more and other != axis:
        text = f"{other!r} in place of {axis!r} in {spot}"
        changed = replace(collective, axes=(other,))
        yield Repair(text, collectives={spot: changed}, keeps_op=True)


def _instead(spot: Spot, own: Collective, other: Collective) -> Repair:
    if other == replace(own, dim=other.dim) and own.name not in _ARGUMENTS:
        return Repair(f"dim={other.dim} in {spot}", collectives={spot: other})
    x = first_operand(spot.code, spot.at) or "x"
    return Repair(f"{_written(other, x)} in place of {spot}", collectives={spot: other})


def _taking(have: AxisType, dst: AxisType, old: Collective) -> Iterator[Collective]:
    """Yields the collectives that take an operand of one type to another."""
    kind, dim, axes, is_equal = have.kind, have.dim, old.axes, dst in (I, R)
    if kind == "S" and dst == V and old.name == "all_to_all":
        splits = [split for split in (old.concat_dim, old.dim) if split != dim]
        yield from (replace(old, dim=split, concat_dim=dim or 0) for split in splits)
    if kind in "PV" and is_equal:
        yield Collective("all_reduce", Partial, dst, axes)
    if kind == "P" and dst == V:
        yield Collective("reduce_scatter", Partial, V, axes, dim=old.dim)
    if kind == "S" and is_equal:
        yield Collective("all_gather", V, dst, axes, dim=dim or 0)
    if kind == "S" and dst == Partial:
        yield Collective("convert", V, Partial, axes, dim=dim or 0)
    for src in (I, R):
        if kind in ("K", src.kind) and ("convert", src, dst) in TABLE:
            yield Collective("convert", src, dst, axes, dim=old.dim)


_WRITTEN: Final = ("all_reduce", "all_gather", "reduce_scatter", "convert")


def _written(collective: Collective, x: str) -> str:
    """Writes the call of one of these collectives, of an operand."""
    axes = collective.axes[0] if len(collective.axes) == 1 else collective.axes
    if collective.name in _ARGUMENTS:
        own = _ARGUMENTS[collective.name].format(collective)
        return f"{collective.name}({x}, {axes!r}, {own})"
    src = f", src={collective.src}" * (collective.name == "convert")
    dst = f", dst={collective.dst}" * (collective.name != "reduce_scatter")
    dim = f", dim={collective.dim}" * (V in (collective.src, collective.dst))
    return f"{collective.name}({x}, {axes!r}{dim}{src}{dst})"


_ARGUMENTS: Final[Mapping[str, str]] = {
    "all_to_all": "split_dim={0.dim}, concat_dim={0.concat_dim}",
    "broadcast": "source={0.source}, dst={0.dst}",
    "ppermute": "{0.perm}",
}


def state(interpreter: "Interpreter", x: Tensor) -> tuple[State, P | None]:
    """Returns what is known of a tensor: its type along each axis, and its layout."""
    spec, storage_type = interpreter.observer.spec_of(base_of(x)), interpreter.storage_type(x)
    known = {} if spec is None else {a: t for a, t in spec.types.items() if t not in (I, R)}
    types = {axis: plain(t) for axis, t in interpreter.by_axis(storage_type.types).items()} | known
    return {a: t for a, t in types.items() if interpreter.mesh.shape[a] > 1}, spec


def distinct(args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that a call gets, each of them once."""
    values = [*args, *kwargs.values()]
    return list({id(x): x for value in values for x in tensors_of(value)}.values())


def repaired(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a call of torch under the repair that is tried."""
    spot, operands = function_call(func), interpreter.repair.operands
    tensors = distinct(args, kwargs)
    changes = {at: insert for (where, at), insert in operands.items() if where == spot}
    changed = {id(x): changes[at].apply(x) for at, x in enumerate(tensors) if at in changes}
    if not changed:
        return args, kwargs
    for x in changed.values():  # what is written into it, the operand does not get
        interpreter.storage_type(x).freeze("is what the repair makes")
    leaves, structure = flatten((tuple(args), kwargs))
    found: tuple[Any, Any] = unflatten(structure, [changed.get(id(x), x) for x in leaves])
    return found


def with_result(interpreter: "Interpreter", func: Any, out: Any) -> Any:
    """Returns what a call of torch returns under the repair that is tried."""
    spot = function_call(func)
    insert = None if spot is None else interpreter.repair.results.get(spot)
    if insert is None:
        return out
    leaves, structure = flatten(out)
    return unflatten(structure, [insert.apply(x) if isinstance(x, Tensor) else x for x in leaves])


def _own_part(spot: Spot, text: str, at: int, gather: Insert) -> Iterator[Repair]:
    """Yields a gather of an operand after which each rank goes on with its part of the result."""
    options = dict(gather.options)
    if gather.name == "all_gather" and options["dst"] is R:
        own = Insert("convert", gather.axis, _options(src=R, dst=V, dim=options["dim"]))
        text = f"{text}, and {own.of('y')} for each y that it returns"
        yield Repair(text, operands={(spot, at): gather}, results={spot: own})


def at_call(
    interpreter: "Interpreter", error: ShardTypeError, func: Any, args: Any, kwargs: Any
) -> None:
    """Proposes to apply a collective to an operand of the call of torch that is refused.

    Where nothing is compared with one device, only errors about types have to do with operands.
    """
    is_compared = interpreter.observer.compares
    spot = function_call(func)
    if not (is_compared or rejection_of(error).types):
        return
    if spot is None:  # in code of a library, as of an optimizer
        at_region(interpreter, error, [x for x in distinct(args, kwargs) if not is_batched(x)])
        return
    named = _named(distinct(args, kwargs))
    given = [(at, x) for at, (_, x) in enumerate(named) if not is_batched(x)]
    tensors = [(at, x) for at, x in given if _is_reducible(interpreter, x)]
    known = [state(interpreter, x) for _, x in tensors]
    _name_in_advice(
        error, [(named[at][0], own) for (at, _), (own, _) in zip(tensors, known, strict=True)]
    )
    found: list[tuple[int, Repair]] = []
    for (at, x), own in zip(tensors, known, strict=True):
        peers = [other[0] for other in known if other is not own]
        is_mean = interpreter.observer.scale_of(base_of(x)) > 1
        for kind, insert in inserts(*own, peers, is_mean):
            text = f"{insert.of(named[at][0])} in place of {named[at][0]} in {spot}"
            found.append((LIKELY.find(kind), Repair(text, operands={(spot, at): insert})))
            found += [(LIKELY.find(kind), each) for each in _own_part(spot, text, at, insert)]
    found.sort(key=itemgetter(0))
    operands = [x for _, x in tensors]
    states = [own for own, _ in known]
    first = list(reductions(interpreter, operands))
    for x, each in zip(operands, states, strict=True):
        first += moved_over_others(interpreter, x, each, states)
    propose(error, [*first, *map(itemgetter(1), found)])
    blame_inputs(interpreter, error, [x for _, x in given])
    for at, x in given:
        storage_type = interpreter.known_storage_type(x)
        made = None if storage_type is None else storage_type.made
        if is_compared and made is not None and made.name.startswith("axis_index("):
            text = f"0 in place of {made.name} in {spot}"
            propose(error, [Repair(text, operands={(spot, at): FIRST})])


def _named(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Returns what the user's call gets, with its text there, or else its number."""
    found = user_call()
    texts = [None] * len(tensors) if found is None else operand_texts(found[0], tensors)
    names = [f"operand {at}" if text is None else text for at, text in enumerate(texts, start=1)]
    return list(zip(names, tensors, strict=True))


def note_operands(
    interpreter: "Interpreter", error: Exception, func: Any, args: Any, kwargs: Any
) -> None:
    """Adds to an error of torch the user's line, and the shapes of operands that are shards.

    Where a view counts what does not divide over the ranks, as heads, that comes first.
    """
    site, _ = interpreter.site()
    if isinstance(error, ShardMapError) or site is None or hasattr(error, "__notes__"):
        return
    lines = [f"At {site}"]
    for name, x in _named(distinct(args, kwargs)):
        value = interpreter.known_storage_type(x) if x.layout is strided else None
        if value is not None:
            vars(error).setdefault("proposals", []).extend(_along_others(value))
            origin = value.origin().removesuffix(f" at {site}")
            lines.append(f"  {name}: {show_shape(x.dtype, x.shape)}, from {origin}")
    if args and getattr(func, "__name__", "") in ("view", "reshape", "unflatten"):
        x, sizes = args[0], flatten((args[1:], kwargs))[0]
        if all(type(n) is int for n in (*x.shape, *sizes)):
            if func.__name__ == "unflatten" and x.ndim:
                at = sizes.pop(0) % x.ndim
                sizes = [*x.shape[:at], *sizes, *x.shape[at + 1 :]]
            lines += _count(interpreter, error, func.__name__, x, sizes)
    error.add_note("\n".join(lines))


def _count(
    interpreter: "Interpreter", error: Exception, name: str, x: Tensor, sizes: Sequence[int]
) -> Iterator[str]:
    """Tells first what a view counts that does not divide over ranks; yields advice about it."""
    sharded = [axis for axis, have in state(interpreter, x)[0].items() if have.kind in "SV"]
    for axis, (at, own) in product(sharded, enumerate(sizes)):
        n, front = interpreter.mesh.shape[axis], prod(sizes[:at])
        count, over = divmod(x.numel() * n, abs(front * prod(sizes[at + 1 :])) or 1)
        is_meant = own in (-1, count, count // n) and (own == -1 or -1 not in sizes)
        before = [prod(x.shape[:dim]) for dim in range(x.ndim)]
        of_rank = [front % k == 0 == x.shape[i] % (front // k or 1) for i, k in enumerate(before)]
        if is_meant and any(of_rank) and not over and count > 1 and count % n:
            text = (
                f"{count} heads, or what else dim {at} counts, do not divide over {axis!r} = {n} "
                f"ranks: on one device {name} makes {[*sizes[:at], count, *sizes[at + 1 :]]} there "
            )
            error.args = (f"{text}({error})",)
            vars(error)["undivided"] = (
                f"take a multiple of {n} of them, or leave this layer whole on each rank, without "
                f"{axis!r} for its weights."
            )
            yield f"Fix: {vars(error)['undivided']}"
            return


_ADVISED: Final = (
    ("P", re.compile(r"(?<=all_reduce\()x(?=, '\w+', dst=)")),
    ("I", re.compile(r"(?<=convert\()x(?=, '\w+', src=I)")),
)
"""Letters of types, and where an error's advice speaks of the operand of that type."""


def _name_in_advice(error: ShardTypeError, operands: Sequence[tuple[str, State]]) -> None:
    """Has the advice name the operand that it is about, in place of an x, if there is only one."""
    for kind, place in _ADVISED:
        about = [name for name, own in operands if any(have.kind == kind for have in own.values())]
        head, fix, advice = str(error).rpartition("\nFix: ")
        if len(about) == 1 and not about[0].startswith("operand "):
            error.args = (head + fix + about[0].join(place.split(advice)),)


def at_collective(
    interpreter: "Interpreter", error: ShardTypeError, move: str, collective: Collective, x: Tensor
) -> None:
    """Proposes another collective in place of the one that is refused, or none."""
    spot = collective_call()
    if spot is None:
        return
    own, types = state(interpreter, x)[0], interpreter.storage_type(x).types
    # Of axes of one rank too, which are as wrong on more.
    all_axes = {**{a: plain(t) for a, t in interpreter.by_axis(types).items()}, **own}
    found = [*_over_others(spot, collective, all_axes), *exchanges(spot, collective, own)]
    if move in EXTREMA:  # of which only the transpose is exchanged
        found = [each for each in found if each.collectives[spot] is None]
    propose(error, [*reductions(interpreter, [x]), *found])
    blame_inputs(interpreter, error, [x])


def at_region(interpreter: "Interpreter", error: ShardTypeError, tensors: Sequence[Tensor]) -> None:
    """Proposes what comes before a step whose operands nobody can change, as in a library."""
    propose(error, reductions(interpreter, tensors))
    blame_inputs(interpreter, error, tensors)


def blame_inputs(
    interpreter: "Interpreter", error: ShardTypeError, tensors: Sequence[Tensor]
) -> None:
    """Notes from which inputs tensors come that an error is about, the nearest first."""
    known = map(interpreter.known_storage_type, tensors)
    waiting = [each for each in known if each is not None]
    seen, found = {*map(id, waiting)}, list[int]()
    for value in waiting:  # which grows
        found += [] if value.leaf is None or value.leaf in found else [value.leaf]
        operands = [] if value.made is None else [use.storage_type for use in value.made.operands]
        waiting += [each for each in dict.fromkeys(operands) if id(each) not in seen]
        seen |= {*map(id, operands)}
    rejection_of(error).inputs += tuple(found)


def _is_reducible(interpreter: "Interpreter", x: Tensor) -> bool:
    """Returns whether a value is known, and does not vary because of `axis_index` alone."""
    storage_type = interpreter.known_storage_type(x)
    return storage_type is not None and not any(
        each.varies and _is_of_rank_alone(storage_type, at)
        for at, each in enumerate(storage_type.types)
    )


def _is_of_rank_alone(value: StorageType, axis: int) -> bool:
    """Returns whether nothing but the index of the rank makes a value vary."""
    waiting, seen = [value], set[int]()
    while waiting:
        made = waiting.pop().made
        if made is None or (made.collective is not None and "axis_index" not in made.name):
            return False
        operands = [use.storage_type for use in made.operands if use.types[axis].varies]
        waiting += [each for each in operands if id(each) not in seen]
        seen |= {*map(id, operands)}
    return True


_OTHER: Final[Mapping[str, Op]] = {"sum": "mean", "mean": "sum"}
_WRONG: Final = {"sum": Fraction(1).__lt__, "mean": Fraction(1).__gt__}
"""Tests of a value's factor, each for the op that may be wrong there."""


def reductions(interpreter: "Interpreter", tensors: Sequence[Tensor]) -> Iterator[Repair]:
    """Yields other ops of reductions, if a value is a multiple of what it is on one device."""
    scales = {interpreter.observer.scale_of(base_of(x)) for x in tensors}
    asked = [op for op, is_it in _WRONG.items() if any(map(is_it, scales))]
    yield from other_ops(interpreter.traits.reductions, asked)
    if "sum" in asked:
        yield from mean_losses(interpreter)


def other_ops(reductions: dict[Spot, str], asked: Sequence[str]) -> Iterator[Repair]:
    """Yields the other op of each call that has one of these, the last call first."""
    for spot, op in reversed(reductions.items()):
        if op in asked:
            yield Repair(f"op={_OTHER[op]!r} in {spot}", ops={spot: _OTHER[op]})


def mean_losses(interpreter: "Interpreter") -> Iterator[Repair]:
    """Yields the mean of each loss that is a mean of each rank's part."""
    for site, mean in interpreter.means.items():
        text = f"{mean.of('loss')} for the loss that is differentiated at {site.place}"
        yield Repair(text, losses={site: mean})
