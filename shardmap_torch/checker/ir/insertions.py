"""Candidates for repairs: functions that give a tensor another type or layout along one axis.

All of them keep the value that is meant on one device. Each is tried before it is printed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, count
from math import isclose, prod
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.ir.repairs import (
    NUMBER,
    Change,
    Insert,
    Place,
    Repair,
    Scaling,
    Spot,
    applied,
    axes_of,
    both,
    insertion,
)
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.table import TABLE
from shardmap_torch.core.tree import flatten, unflatten
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, Partial, R, V


def distinct(values: Any) -> list[Tensor]:
    """Returns the tensors that a call gets, each of them once."""
    return list({id(x): x for value in values for x in tensors_of(value)}.values())


def numbered(args: Any, kwargs: Any) -> tuple[list[Any], Any, list[int | None]]:
    """Returns the leaves of a call's arguments, their structure, and which operand each is."""
    tensors = {id(x): index for index, x in enumerate(distinct([*args, *kwargs.values()]))}
    leaves, structure = flatten((tuple(args), kwargs))
    numbers = count(NUMBER, -1)
    return (
        leaves,
        structure,
        [next(numbers) if type(x) in (int, float) else tensors.get(id(x)) for x in leaves],
    )


def with_inserted(
    spot: Spot, inserted: Mapping[Spot, Sequence[Change]], args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Returns the arguments of a call, with a repair applied to the operands that it names."""
    leaves, structure, indices = numbered(args, kwargs)
    changed: dict[int | None, Any] = {}
    for x, index in zip(leaves, indices, strict=True):
        chain = () if index is None else chain_of(replace(spot, index=index), inserted)
        if chain and index not in changed:
            changed[index] = applied(chain, x)
    if not changed:
        return args, kwargs
    values = [changed.get(index, x) for x, index in zip(leaves, indices, strict=True)]
    given: tuple[Any, Any] = unflatten(structure, values)
    return given


def chain_of(spot: Spot, inserted: Mapping[Spot, Sequence[Change]]) -> Sequence[Change]:
    """Returns what is inserted at a spot, in this run or in all."""
    return inserted.get(spot, inserted.get(replace(spot, run=None), ()))


Met = tuple[str, int | None]
"""The letter of a type along an axis, and of an S the dim."""

State = Mapping[str, Met]
"""The type of a tensor, or the dim that is sharded, along each axis of several ranks."""


def state_of(types: Mapping[str, Any], spec: P | None, sizes: Mapping[str, int]) -> State:
    """Returns what is met along each axis, from a tensor's types and its layout, if it is known."""
    return {
        axis: _met(axis_type.kind, axis, spec)
        for axis, axis_type in types.items()
        if sizes[axis] > 1
    }


def _met(kind: str, axis: str, spec: P | None) -> Met:
    if kind == "P" or (spec is not None and axis in spec.partial):
        return "P", None
    if spec is not None:
        for dim, entry in spec.sharded_dims:
            if axis in entry:
                return "S", dim
    return ("V", None) if kind == "S" else (kind, None)


_TO_EQUAL: Final[Mapping[str, Sequence[tuple[str, Sequence[tuple[str, Any]]]]]] = {
    "P": [("all_reduce", [("dst", R)]), ("all_reduce", [("dst", I)])],
    "V": [("all_reduce", [("dst", R), ("op", op)]) for op in ("max", "min")],
    "I": [("convert", [("src", I), ("dst", R)])],
    "K": [("convert", [("src", I), ("dst", R)])],
    "R": [("convert", [("src", R), ("dst", I)])],
    "M": [("all_reduce", [("dst", dst), ("op", "mean")]) for dst in (R, I)],
}
"""Calls after which a tensor is equal on all ranks, as R or as I; M is a sum of means."""

_SOURCE: Final = {"I": I, "R": R, "K": R}

LIKELY: Final = "PSVIKRM"
"""The likelier a type is to be refused, the earlier."""


def inserts(
    state: State, ndim: int, peers: Sequence[tuple[State, int]], spec: P | None
) -> Iterator[tuple[str, Insert]]:
    """Yields what could be applied to a tensor, given what else a call gets, with what it changes.

    Args:
        state: of the tensor.
        ndim: the number of its dims.
        peers: states of the other tensors, and their numbers of dims.
        spec: its layout, if it is known.
    """
    for axis, (kind, dim) in state.items():
        wanted = dict.fromkeys(_wanted(axis, other, ndim - count) for other, count in peers)
        suiting = [
            (kind, each)
            for need in wanted
            if need is not None and need != (kind, dim)
            for each in _to(axis, (kind, dim), need)
        ]
        is_addend = ("P", None) in wanted
        if is_addend:
            yield from suiting
        gathers = _gathers(axis, dim or 0, spec) if kind == "S" else ()
        yield from ((kind, each) for each in gathers)
        for met in (kind, "M") if kind == "P" else kind:
            for name, options in _TO_EQUAL.get(met, ()):
                yield met, Insert(name, axis, tuple(options))
        if not is_addend:
            yield from suiting


def _gathers(axis: str, dim: int, spec: P | None) -> Iterator[Insert]:
    """Yields gathers of a dim: of all axes that shard it at once, and of the last one."""
    axes = () if spec is None else dict(spec.sharded_dims).get(dim, ())
    if axes and axis != axes[-1]:
        return
    for over in dict.fromkeys([axes if len(axes) > 1 else axis, axis]):
        for dst in (R, I):
            yield Insert("all_gather", over, (("dim", dim), ("dst", dst)))


def gathered(operand: Spot, state: State) -> Iterator[Repair]:
    """Yields gathers of what a call gets, each with the return of its part to each rank."""
    for axis, (kind, dim) in state.items():
        if kind == "S":
            gather = Insert("all_gather", axis, (("dim", dim), ("dst", R)))
            split = Insert("convert", axis, (("src", R), ("dst", V), ("dim", dim)))
            result = replace(operand, index=-1)
            yield both(insertion(operand, [gather]), insertion(result, [split]))


def _wanted(axis: str, peer: State, more: int) -> Met | None:
    """Returns what a tensor would have to be to suit another one: sharded alike, or a sum."""
    kind, dim = peer.get(axis, ("K", None))
    if kind == "S" and dim is not None and dim + more >= 0:
        return "S", dim + more
    return ("P", None) if kind == "P" else None


def _to(axis: str, have: Met, need: Met) -> Iterator[Insert]:
    """Yields the call that gives a tensor of one type another, which shards it or leaves a sum."""
    (kind, dim), (wanted, to) = have, need
    source = _SOURCE.get(kind)
    if source is not None and wanted == "S":
        yield Insert("convert", axis, (("src", source), ("dst", V), ("dim", to)))
    if source is not None and wanted == "P":
        yield Insert("convert", axis, (("src", source), ("dst", Partial)))
    if kind == "P" and wanted == "S":
        yield Insert("reduce_scatter", axis, (("dim", to),))
    if kind == "S" and wanted == "P":
        yield Insert("convert", axis, (("src", V), ("dst", Partial), ("dim", dim)))
    if kind == "S" and wanted == "S":
        yield Insert("all_to_all", axis, (("split_dim", to), ("concat_dim", dim)))


def scalings(ratio: float, sizes: Mapping[str, int]) -> Iterator[Scaling]:
    """Yields what multiplies a value by this ratio on ranks, and by 1 on one device.

    Example:
        >>> [str(each.of("x")) for each in scalings(0.25, {"dp": 2, "tp": 4})]
        ["x / axis_size('tp')"]
    """
    for length in range(1, len(sizes) + 1):
        for axes in combinations(sizes, length):
            ranks = prod(sizes[axis] for axis in axes)
            axis = axes[0] if length == 1 else axes
            for sign, factor in (("*", ranks), ("/", 1 / ranks)):
                if isclose(ratio, factor, rel_tol=_ROUNDING) and ranks > 1:
                    yield Scaling(axis, sign)


_ROUNDING: Final = 1e-12
"""Numbers nearer than this to a multiple of another, relatively, count as the multiple."""


def to_spec(state: State, own: P | None, spec: P) -> Iterator[tuple[Insert, ...]]:
    """Yields what a result needs so that it is as its spec promises, over all axes at once."""
    for options in ({}, {"op": "mean"}):
        found: list[Insert] = []
        for axis, have in state.items():
            found += _leaves(axis, have, _met("I", axis, spec), own, options)
        if found:
            yield tuple(found)


def _leaves(axis: str, have: Met, need: Met, own: P | None, options: Any) -> Iterator[Insert]:
    kind, dim = have
    if need[0] == "I" and kind in "PV":
        yield Insert("all_reduce", axis, (("dst", I), *options.items()))
    elif need[0] == "I" and kind == "S":
        yield from list(_gathers(axis, dim or 0, own))[1:2]  # to I, all axes at once
    elif need != have:
        yield from _to(axis, have, need)


def exchange(
    collective: Collective, place: Place, state: State, is_repeated: bool = False
) -> Iterator[Repair]:
    """Yields collectives that take an operand of this state, in place of one that does not.

    The line issues several if it is repeated.
    """
    site = place[0]
    at = "" if site is None else f" at {site.place}"
    at += f" (collective {place[1] + 1} there)" if place[1] else ""
    name = collective.name
    without = list(_without(name, place, is_repeated))
    unequal = tuple(
        axis for axis in collective.axes if state.get(axis, ("K", None))[0] not in _SOURCE
    )
    if not unequal:
        yield from without
    elif unequal != collective.axes:
        other = replace(collective, axes=unequal)
        yield Repair(f"{_written(other)} in place of {name}{at}", collectives={place: other})
    for axes in dict.fromkeys([collective.axes, *((axis,) for axis in collective.axes)]):
        met = {state.get(axis, ("K", None)) for axis in axes}
        if len(met) > 1:
            continue
        ((kind, dim),) = met
        for dst in dict.fromkeys([collective.dst, R, I]):
            for other in _taking(kind, dim, dst, axes, collective):
                if other != collective:
                    text = f"{_written(other)} in place of {name}{at}"
                    yield Repair(text, collectives={place: other})
    if unequal:
        yield from without


def _without(name: str, place: Place, is_repeated: bool) -> Iterator[Repair]:
    """Yields repairs that leave out a collective, or all those of its line, as in a loop."""
    site, number = place
    at = "" if site is None else f" at {site.place}"
    alone = Repair(
        f"leave out {name}{at} (collective {number + 1} there)", collectives={place: None}
    )
    several = "every " if site is not None and site.source.count(name) > 1 else ""
    every = Repair(f"leave out {several}{name}{at}", left_out=frozenset([(site, name)]))
    for each in (alone, every) if number else (every, alone):
        if is_repeated or each is (alone if number else every):
            yield each


def _taking(
    kind: str, dim: int | None, dst: AxisType, axes: tuple[str, ...], old: Collective
) -> Iterator[Collective]:
    """Yields the collectives that take such an operand to this type."""
    if kind in "PV" and dst in (I, R):
        yield Collective("all_reduce", Partial, dst, axes)
    if kind == "P" and dst == V:
        yield Collective("reduce_scatter", Partial, V, axes, dim=old.dim)
    if kind == "S" and dim is not None and dst in (I, R):
        yield Collective("all_gather", V, dst, axes, dim=dim)
    if kind == "S" and dim is not None and dst == Partial:
        yield Collective("convert", V, Partial, axes, dim=dim)
    for src in (I, R):
        if kind in ("K", src.kind) and ("convert", src, dst) in TABLE:
            yield Collective("convert", src, dst, axes, dim=old.dim)


def _written(collective: Collective) -> str:
    src = f", src={collective.src}" * (collective.name == "convert")
    dst = f", dst={collective.dst}" * (collective.name != "reduce_scatter")
    has_dim = V in (collective.src, collective.dst)
    dim = f", dim={collective.dim}" * has_dim
    return f"{collective.name}(x, {axes_of(collective)}{dim}{src}{dst})"
